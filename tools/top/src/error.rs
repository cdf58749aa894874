//! Errors of the view. While the terminal view runs, failures of the gateway are shown and polling continues; only a bad
//! configuration and a failing terminal end it.

use std::io;

use http::StatusCode;

/// A failure, named by the operation.
#[derive(Debug, thiserror::Error)]
pub enum TopError {
    /// The configuration cannot be used.
    #[error("the {what} cannot be used: {reason}")]
    Config {
        /// Name of the setting.
        what: &'static str,
        /// Reason, in words.
        reason: String,
    },
    /// The gateway could not be reached, or the connection broke.
    #[error("{gateway}: {reason}")]
    Connection {
        /// Host and port.
        gateway: String,
        /// Text of the failure.
        reason: String,
    },
    /// The gateway requires an administrator's key.
    #[error("{}", refusal(*status, *had_key))]
    Refused {
        /// Status of the answer: 401 or 403.
        status: StatusCode,
        /// Whether a key was sent.
        had_key: bool,
    },
    /// The gateway answered with a status other than 200.
    #[error("GET {path} answered {status}{}{message}", if message.is_empty() { "" } else { ": " })]
    Status {
        /// Path of the request.
        path: &'static str,
        /// The answer's status.
        status: StatusCode,
        /// Error message in the answer; empty if there is none.
        message: String,
    },
    /// The answer does not have the gateway's format.
    #[error("GET {path} is not understood: {reason}")]
    NotUnderstood {
        /// Path of the request.
        path: &'static str,
        /// Reason, in words.
        reason: String,
    },
    /// Standard output is no terminal; [`once`](crate::once) serves that case.
    #[error("standard output is not a terminal; use --once")]
    NoTerminal,
    /// The terminal failed.
    #[error("the terminal failed: {0}")]
    Terminal(io::Error),
    /// The polling thread could not be started, or has ended.
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
