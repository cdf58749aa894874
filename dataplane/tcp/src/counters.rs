//! What happened, for metrics. One thread writes, any may read.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that only the thread that drives the fabric increases.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Its value now.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// There is one writer, so load and store need not be one step.
    pub(crate) fn add(&self, count: u64) {
        self.0.store(self.get() + count, Ordering::Relaxed);
    }
}

/// Counters of one fabric since it was made.
#[derive(Debug, Default)]
pub struct TcpCounters {
    /// Bytes that the kernel took, headers included.
    pub sent_bytes: Counter,
    /// Bytes that arrived, headers included.
    pub received_bytes: Counter,
    /// Frames that the kernel took.
    pub sent_frames: Counter,
    /// Frames that arrived whole.
    pub received_frames: Counter,
    /// `io_uring_enter` calls.
    pub system_calls: Counter,
    /// Sends whose bytes went out without a copy.
    pub zero_copy_sends: Counter,
    /// Sends that were to go out without a copy and that the kernel copied nevertheless.
    pub copied_sends: Counter,
    /// Times that accepting rested because descriptors or memory ran out.
    pub accept_pauses: Counter,
    /// Accepted connections that could not be kept: no greeting in time, a wrong one, or no room.
    pub refused_handshakes: Counter,
    /// Of those, the ones that did not greet, or did not get all their siblings, in time.
    pub handshake_timeouts: Counter,
    /// Handshakes, of either side, in which the peer did not prove that it holds this node's secret.
    pub unproved_handshakes: Counter,
    /// Registrations of slab or descriptors that the kernel refused; it works without, at a small cost.
    pub failed_registrations: Counter,
}
