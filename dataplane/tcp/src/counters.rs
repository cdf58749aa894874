//! Counters for metrics. One thread writes; any thread may read.

use std::sync::atomic::{AtomicU64, Ordering};

/// A counter that only the thread that drives the fabric increases.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Returns the current value.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds to the counter. With a single writer, load and store need not be one atomic step.
    pub(crate) fn add(&self, count: u64) {
        self.0.store(self.get() + count, Ordering::Relaxed);
    }
}

/// Counters of one fabric since its creation.
#[derive(Debug, Default)]
pub struct TcpCounters {
    /// Bytes that the kernel accepted, headers included.
    pub sent_bytes: Counter,
    /// Bytes that arrived, headers included.
    pub received_bytes: Counter,
    /// Frames that the kernel accepted.
    pub sent_frames: Counter,
    /// Frames that arrived completely.
    pub received_frames: Counter,
    /// `io_uring_enter` calls.
    pub system_calls: Counter,
    /// Sends whose bytes went out without a copy.
    pub zero_copy_sends: Counter,
    /// Zero-copy sends that the kernel copied nevertheless.
    pub copied_sends: Counter,
    /// Times that accepting was paused because descriptors or memory ran out.
    pub accept_pauses: Counter,
    /// Accepted connections that were closed: no handshake in time, an invalid one, or no room.
    pub refused_handshakes: Counter,
    /// Connections of either side whose handshake did not complete in time, and accepted sessions whose other
    /// connections did not arrive in time.
    pub handshake_timeouts: Counter,
    /// Handshakes, of either side, in which the peer did not prove that it holds this node's secret.
    pub unproved_handshakes: Counter,
    /// Registrations of slab or descriptors that the kernel refused. The fabric works without them, at a
    /// small cost.
    pub failed_registrations: Counter,
}
