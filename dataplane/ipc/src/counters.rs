//! Counters of a node of the fabric of shared device memory.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of a node, readable by any thread.
#[derive(Debug, Default)]
pub struct IpcCounters {
    pub(crate) copies: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) failed_copies: AtomicU64,
    pub(crate) refused_peers: AtomicU64,
    /// A gauge: the number of peers.
    pub(crate) peers: AtomicU64,
}

impl IpcCounters {
    pub(crate) fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }

    /// Returns name, help text and value of each counter; the last one is a gauge.
    #[must_use]
    pub fn snapshot(&self) -> [(&'static str, &'static str, u64); 5] {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [
            ("device_copies", "Writes and reads carried out by the device", read(&self.copies)),
            ("device_bytes", "Bytes of these", read(&self.bytes)),
            (
                "failed_copies",
                "Connections ended because a copy failed or was refused",
                read(&self.failed_copies),
            ),
            ("refused_peers", "Peers whose memory or whose end is out of reach", read(&self.refused_peers)),
            ("peers", "Peers", read(&self.peers)),
        ]
    }
}
