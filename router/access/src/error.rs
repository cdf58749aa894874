//! What can fail. Refusals of a client are outcomes and live with what refuses; failures here are the operator's
//! to mend: a file, a key set, a configuration, the disk.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// A failure, named by the operation.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The keys file is bad; what was loaded before stays in force.
    #[error("the keys file is bad: {0}")]
    Keys(Problems),
    /// A configuration cannot be used.
    #[error("the configuration of {what} is bad: {reason}")]
    Config {
        /// Of what.
        what: &'static str,
        /// Why.
        reason: String,
    },
    /// A JSON Web Key Set could not be read; what was loaded before stays in force.
    #[error("the key set of the identity provider is bad: {reason}")]
    Jwks {
        /// Why.
        reason: String,
    },
    /// The operating system gave no random bytes.
    #[error("no random bytes could be had")]
    Random,
    /// The audit log could not be opened, or its thread could not be started.
    #[error("opening the audit log {path}: {source}", path = path.display())]
    Audit {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// One problem in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Line, from 1.
    pub line: usize,
    /// What is wrong. It never contains a value of the file, which may be a key pasted by mistake.
    pub message: String,
}

/// All problems of a file, by line.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(out, "{separator}line {}: {}", problem.line, problem.message)?;
        }
        Ok(())
    }
}
