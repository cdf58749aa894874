//! Permission to be in flight.

use std::sync::Arc;

use super::gate::Gate;

/// A place among the admitted requests, freed on drop.
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

    /// Drops the permit without freeing its place, which goes to another request.
    pub(super) fn forget(mut self) {
        self.gate = None;
    }

    /// Frees the place at this time, and lets the gate measure how long the request took.
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
