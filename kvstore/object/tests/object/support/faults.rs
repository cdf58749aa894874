//! Faults of a bad service's answers, drawn from a seed.

use std::time::Duration;

use super::Random;

/// One fault of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// An answer with this status instead of the operation.
    Status(u16),
    /// The operation is carried out, but the answer has this status.
    LostAnswer(u16),
    /// TCP reset in the middle of the body, or instead of an answer without one.
    Reset,
    /// The body ends early, cleanly as far as TCP is concerned.
    Truncate,
    /// The body is complete according to HTTP but lacks its end.
    ShortObject,
    /// The body comes in small pieces with pauses.
    Slow(Duration),
    /// A wrong ETag.
    WrongETag,
    /// One bit of the body is wrong.
    BitFlip,
    /// No answer at all.
    Hang,
}

/// Faults and their frequency.
#[derive(Debug)]
pub(crate) struct Plan {
    random: Random,
    /// Number of answers with a fault, of 1000.
    permille: usize,
    faults: Vec<Fault>,
}

impl Plan {
    pub(crate) fn none() -> Self {
        Self::new(0, 0, &[])
    }

    pub(crate) fn always(fault: Fault) -> Self {
        Self::new(0, 1000, &[fault])
    }

    pub(crate) fn new(seed: u64, permille: usize, faults: &[Fault]) -> Self {
        Self { random: Random(seed), permille, faults: faults.to_vec() }
    }

    pub(crate) fn next(&mut self) -> Option<Fault> {
        if self.faults.is_empty() || self.random.below(1000) >= self.permille {
            return None;
        }
        Some(self.faults[self.random.below(self.faults.len())])
    }

    pub(crate) fn place(&mut self, bound: usize) -> usize {
        self.random.below(bound.max(1))
    }
}

impl std::fmt::Debug for Random {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}
