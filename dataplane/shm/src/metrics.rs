//! Counters of the shared-memory transport.

use std::sync::atomic::{AtomicU64, Ordering};

use dataplane_fabric::auth::UNPROVED_HELP;

/// Counters of a node; read with [`ShmCounters::snapshot`] from any thread.
///
/// Most have one writer, the fabric's thread, which adds up in plain fields and stores the sums at each
/// flush and poll: a locked instruction takes a tenth of the time of a 4 KiB copy.
#[derive(Debug, Default)]
pub struct ShmCounters {
    pub(crate) writes: AtomicU64,
    pub(crate) reads: AtomicU64,
    pub(crate) messages: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) wakes: AtomicU64,
    pub(crate) handshake_timeouts: AtomicU64,
    pub(crate) other_users_refused: AtomicU64,
    pub(crate) unproved_handshakes: AtomicU64,
    pub(crate) accept_pauses: AtomicU64,
    /// Gauge: open connections.
    pub(crate) connections: AtomicU64,
}

impl ShmCounters {
    /// Adds one with an atomic instruction; not for the path of every operation.
    pub(crate) fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns name, help text and value of each counter; the last is a gauge.
    #[must_use]
    pub fn snapshot(&self) -> [(&'static str, &'static str, u64); 10] {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [
            ("writes", "Writes into peers' slabs", read(&self.writes)),
            ("reads", "Reads from peers' slabs", read(&self.reads)),
            ("messages", "Messages sent", read(&self.messages)),
            ("bytes", "Bytes copied by writes and reads", read(&self.bytes)),
            ("wakes", "Sleeping peers woken", read(&self.wakes)),
            ("handshake_timeouts", "Connections that were not made in time", read(&self.handshake_timeouts)),
            ("other_users_refused", "Peers of another user turned away", read(&self.other_users_refused)),
            ("unproved_handshakes", UNPROVED_HELP, read(&self.unproved_handshakes)),
            ("accept_pauses", "Pauses in accepting for want of descriptors", read(&self.accept_pauses)),
            ("connections", "Open connections (level)", read(&self.connections)),
        ]
    }
}

/// Counts of the fabric's thread, not published yet.
#[derive(Debug, Default)]
pub(crate) struct Sums {
    pub(crate) writes: u64,
    pub(crate) reads: u64,
    pub(crate) messages: u64,
    pub(crate) bytes: u64,
}

impl Sums {
    /// Publishes the counts to other threads: plain stores, as there is one writer.
    pub(crate) fn publish(&self, counters: &ShmCounters) {
        counters.writes.store(self.writes, Ordering::Relaxed);
        counters.reads.store(self.reads, Ordering::Relaxed);
        counters.messages.store(self.messages, Ordering::Relaxed);
        counters.bytes.store(self.bytes, Ordering::Relaxed);
    }
}
