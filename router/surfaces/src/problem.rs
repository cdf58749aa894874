//! What is wrong with a request.

use std::fmt;

/// A request that cannot be translated; the client gets it as a 400.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The offending field, as in `messages[0].content`; `None` when it is the body as a whole.
    pub param: Option<String>,
    /// What is wrong, for people.
    pub message: String,
}

impl Problem {
    pub(crate) fn of(param: &str, message: impl Into<String>) -> Self {
        Self { param: Some(param.to_owned()), message: message.into() }
    }

    /// Something valid that this gateway does not do.
    pub(crate) fn unsupported(param: &str, what: &str) -> Self {
        Self::of(param, format!("{what} is not supported (`{param}`)."))
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&self.message)
    }
}

impl std::error::Error for Problem {}
