//! What can fail. While the terminal view runs, failures of the gateway are shown and tried again; only a bad
//! configuration and a failing terminal end it.

use std::io;

use http::StatusCode;

/// A failure, named by the operation.
#[derive(Debug, thiserror::Error)]
pub enum TopError {
    /// The configuration cannot be used.
    #[error("the {what} cannot be used: {reason}")]
    Config {
        /// Which part.
        what: &'static str,
        /// Why.
        reason: String,
    },
    /// The gateway could not be reached, or the connection broke.
    #[error("{gateway}: {reason}")]
    Connection {
        /// Host and port.
        gateway: String,
        /// What happened.
        reason: String,
    },
    /// The gateway wants an administrator's key.
    #[error("{}", refusal(*status, *had_key))]
    Refused {
        /// 401 or 403.
        status: StatusCode,
        /// Whether a key was shown.
        had_key: bool,
    },
    /// The gateway answered something else than 200.
    #[error("GET {path} answered {status}{}{message}", if message.is_empty() { "" } else { ": " })]
    Status {
        /// What was asked.
        path: &'static str,
        /// The answer's status.
        status: StatusCode,
        /// What the answer says about it, or nothing.
        message: String,
    },
    /// The answer is not what a gateway says.
    #[error("GET {path} is not understood: {reason}")]
    NotUnderstood {
        /// What was asked.
        path: &'static str,
        /// Why.
        reason: String,
    },
    /// Standard output is no terminal; [`once`](crate::once) serves that case.
    #[error("standard output is not a terminal; use --once")]
    NoTerminal,
    /// The terminal failed.
    #[error("the terminal failed: {0}")]
    Terminal(io::Error),
    /// The thread that asks the gateway could not be started, or it is gone.
    #[error("the poller failed: {0}")]
    Poller(io::Error),
}

fn refusal(status: StatusCode, had_key: bool) -> String {
    let advice = "give one with --key-file or KVASIR_KEY";
    match (status, had_key) {
        (StatusCode::FORBIDDEN, _) => {
            format!("403: this key is not an administrator's; {advice}")
        }
        (_, true) => format!("{}: the gateway does not know this key; {advice}", status.as_u16()),
        (_, false) => format!("{}: the gateway wants an administrator's key; {advice}", status.as_u16()),
    }
}
