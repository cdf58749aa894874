//! The oracles. Each failure names the one that found it: `seed 7: [tokens] request 3: …`.

use std::fmt;

/// An oracle, or the simulator itself. The table in `README.md` describes each by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Oracle {
    Tokens,
    OneEnd,
    Service,
    Drain,
    Tenants,
    Scaling,
    Progress,
    Rest,
    Index,
    Bounds,
    Alive,
    /// The simulated kernel or the scenario cannot go on. The failure is the simulator's own, or the program has
    /// called a function that is not simulated.
    Simulator,
}

impl fmt::Display for Oracle {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Tokens => "[tokens]",
            Self::OneEnd => "[one end]",
            Self::Service => "[service]",
            Self::Drain => "[drain]",
            Self::Tenants => "[tenants]",
            Self::Scaling => "[scaling]",
            Self::Progress => "[progress]",
            Self::Rest => "[rest]",
            Self::Index => "[index]",
            Self::Bounds => "[bounds]",
            Self::Alive => "[alive]",
            Self::Simulator => "[simulator]",
        })
    }
}

/// A failure that an oracle found.
#[derive(Debug)]
pub(crate) struct Violation(pub(crate) Oracle, pub(crate) String);

impl Violation {
    pub(crate) fn new(oracle: Oracle, what: impl Into<String>) -> Self {
        Self(oracle, what.into())
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} {}", self.0, self.1)
    }
}

impl std::error::Error for Violation {}
