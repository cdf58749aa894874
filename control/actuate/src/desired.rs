//! The published counts of the planner.

use tokio::sync::watch;

/// The count of one pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolTarget {
    /// Name of the pool: `prefill`, `decode` or `both`.
    pub pool: String,
    /// Workers that the pool should have.
    pub wanted: u32,
    /// Workers that the pool has, including starting ones, without draining ones.
    pub current: u32,
    /// Reason for the count, in one line.
    pub text: String,
}

/// The latest counts of all pools; `None` until the planner has decided once.
pub type DesiredCounts = watch::Receiver<Option<Vec<PoolTarget>>>;

/// Sending end of the counts, for the planner.
#[derive(Debug)]
pub struct DesiredSender(watch::Sender<Option<Vec<PoolTarget>>>);

/// Creates a channel that holds the latest counts.
#[must_use]
pub fn desired_counts() -> (DesiredSender, DesiredCounts) {
    let (sender, receiver) = watch::channel(None);
    (DesiredSender(sender), receiver)
}

impl DesiredSender {
    /// Publishes the counts of all pools. Receivers wake only if the counts differ from the previous ones.
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
