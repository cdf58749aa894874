//! Failures that the operator must correct: a file, a key set, a configuration, the disk. Refusals of a
//! client are outcomes and are defined where they are made.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// A failure, named by the operation.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The keys file is invalid; the previous one stays in use.
    #[error("the keys file is bad: {0}")]
    Keys(Problems),
    /// A configuration cannot be used.
    #[error("the configuration of {what} is bad: {reason}")]
    Config {
        /// Part of the configuration.
        what: &'static str,
        /// Reason, in words.
        reason: String,
    },
    /// A JSON Web Key Set could not be read; the previous one stays in use.
    #[error("the key set of the identity provider is bad: {reason}")]
    Jwks {
        /// Reason, in words.
        reason: String,
    },
    /// The operating system gave no random bytes.
    #[error("the system gives no random bytes")]
    Random,
    /// The audit log could not be opened, or its thread could not be started.
    #[error("opening the audit log {path}: {source}", path = path.display())]
    Audit {
        /// Path of the log file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// One problem in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Line, from 1.
    pub line: usize,
    /// Description of the problem. It never contains a value of the file, which may be a key pasted by
    /// mistake.
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
