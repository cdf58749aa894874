//! Counters of the server. Relaxed atomics: each is independent, and no decision depends on them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters since the start.
#[derive(Debug, Default)]
pub struct RespCounters {
    /// Connections accepted.
    pub connections: AtomicU64,
    /// Connections open now.
    pub connections_open: AtomicU64,
    /// Connections refused because `clients_max` were open.
    pub connections_refused: AtomicU64,
    /// Connections closed because they stalled or were idle.
    pub connections_stalled: AtomicU64,
    /// Connections closed because their client spoke HTTP.
    pub connections_cross_protocol: AtomicU64,
    /// Commands answered.
    pub commands: AtomicU64,
    /// Commands answered with an error.
    pub errors: AtomicU64,
    /// Keys read that existed.
    pub hits: AtomicU64,
    /// Keys read that did not exist.
    pub misses: AtomicU64,
    /// Commands answered with `TRYAGAIN`: the store had no room or bandwidth for a value, or the budget for
    /// received bytes had none in time.
    pub throttled: AtomicU64,
    /// Bytes received.
    pub bytes_received: AtomicU64,
    /// Bytes sent.
    pub bytes_sent: AtomicU64,
}

impl RespCounters {
    /// Name, help text and value of each counter.
    #[must_use]
    pub fn snapshot(&self) -> [(&'static str, &'static str, u64); 12] {
        [
            ("connections", "Connections taken", Self::read(&self.connections)),
            ("connections_open", "Connections open now (level)", Self::read(&self.connections_open)),
            ("connections_refused", "Connections refused: too many", Self::read(&self.connections_refused)),
            (
                "connections_stalled",
                "Connections closed for standing still",
                Self::read(&self.connections_stalled),
            ),
            (
                "connections_cross_protocol",
                "Connections closed because their client spoke HTTP",
                Self::read(&self.connections_cross_protocol),
            ),
            ("commands", "Commands answered", Self::read(&self.commands)),
            ("errors", "Commands answered with an error", Self::read(&self.errors)),
            ("hits", "Keys read that were there", Self::read(&self.hits)),
            ("misses", "Keys read that were not", Self::read(&self.misses)),
            ("throttled", "Values that the store had no room for at the time", Self::read(&self.throttled)),
            ("bytes_received", "Bytes received", Self::read(&self.bytes_received)),
            ("bytes_sent", "Bytes sent", Self::read(&self.bytes_sent)),
        ]
    }

    pub(crate) fn add(counter: &AtomicU64, count: usize) {
        counter.fetch_add(count as u64, Relaxed);
    }

    pub(crate) fn read(counter: &AtomicU64) -> u64 {
        counter.load(Relaxed)
    }
}
