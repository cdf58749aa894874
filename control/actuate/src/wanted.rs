//! The counts that the planner wants, as they are published.

use tokio::sync::watch;

/// The count of one pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolTarget {
    /// Name of the pool: `prefill`, `decode` or `both`.
    pub pool: String,
    /// Workers that the pool should have.
    pub wanted: u32,
    /// Workers that it has, starting ones included, draining ones not.
    pub current: u32,
    /// Why, in a line.
    pub text: String,
}

/// The latest counts of all pools; `None` until the planner has decided once.
pub type WantedCounts = watch::Receiver<Option<Vec<PoolTarget>>>;

/// The end that the planner writes to.
#[derive(Debug)]
pub struct WantedSender(watch::Sender<Option<Vec<PoolTarget>>>);

/// A channel that holds the latest counts.
#[must_use]
pub fn wanted_counts() -> (WantedSender, WantedCounts) {
    let (sender, receiver) = watch::channel(None);
    (WantedSender(sender), receiver)
}

impl WantedSender {
    /// Publishes the counts of all pools. Receivers wake only when they differ from the ones before.
    pub fn publish(&self, pools: Vec<PoolTarget>) {
        self.0.send_if_modified(|last| {
            let is_changed = last.as_ref() != Some(&pools);
            if is_changed {
                *last = Some(pools);
            }
            is_changed
        });
    }
}
