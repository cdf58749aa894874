//! A place inside.

use std::sync::Arc;

use super::gate::Gate;

/// A place inside, freed on drop.
#[derive(Debug)]
#[must_use = "dropping it leaves again"]
pub struct Permit {
    /// `None` once the place is given up.
    gate: Option<Arc<Gate>>,
    cost: u64,
    since: u64,
}

impl Permit {
    pub(super) fn new(gate: Arc<Gate>, cost: u64, since: u64) -> Self {
        Self { gate: Some(gate), cost, since }
    }

    /// Drops it without leaving: its place goes to somebody else.
    pub(super) fn forget(mut self) {
        self.gate = None;
    }

    /// Leaves at this time, and lets the gate learn how long such a request takes.
    pub fn release(self, now: u64) {
        if let Some(gate) = &self.gate {
            gate.learn(self.cost, now.saturating_sub(self.since), now);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(gate) = self.gate.take() {
            gate.leave();
        }
    }
}
