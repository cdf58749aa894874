//! Counters of one fabric. The fabric's thread counts in plain integers and publishes them at intervals for
//! readers on other threads.

use std::sync::atomic::{AtomicU64, Ordering};

use dataplane_fabric::auth::UNPROVED_HELP;

/// Counters since start, and gauges as of now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Metrics {
    /// Calls of `ibv_post_send`.
    pub doorbells: u64,
    /// Send work requests posted.
    pub work_requests: u64,
    /// Send work requests that asked for a completion.
    pub signalled: u64,
    /// Completions polled, receives included.
    pub completions: u64,
    /// Calls of `ibv_post_srq_recv`.
    pub receive_doorbells: u64,
    /// Credit messages sent because no message was there to carry the credits.
    pub credit_messages: u64,
    /// Connections ended because the peer had no receive posted for too long.
    pub receiver_not_ready: u64,
    /// Connections ended because the peer did not acknowledge.
    pub retries_exceeded: u64,
    /// Connections ended by a remote access error.
    pub remote_access_errors: u64,
    /// Commands submitted to the queue-pair thread: one to make, connect, stop or destroy both pairs of a
    /// connection.
    pub pair_commands: u64,
    /// Port state changes reported by the device.
    pub port_events: u64,
    /// Handshakes refused or timed out.
    pub handshakes_failed: u64,
    /// Handshakes refused because the peer did not prove that it holds this node's secret.
    pub unproved_handshakes: u64,
    /// Times accepting paused because descriptors ran out.
    pub accept_pauses: u64,
    /// Queue pairs that the device neither moved to their error state nor destroyed. The memory that they
    /// may access is never reused.
    pub queue_pairs_leaked: u64,
    /// Queue pairs that exist.
    pub queue_pairs_open: u64,
    /// Bytes registered with the device.
    pub registered_bytes: u64,
    /// Registered bytes of device memory that the card reaches through a dma-buf.
    pub dma_buf_bytes: u64,
    /// Registered bytes of device memory that the card reaches through nvidia-peermem.
    pub peer_memory_bytes: u64,
    /// Send work requests posted whose completion is not known yet.
    pub outstanding: u64,
}

/// The published [`Metrics`], readable by other threads; at most a few polls old.
#[derive(Debug, Default)]
pub struct VerbsCounters([AtomicU64; COUNT]);

const COUNT: usize = 20;

impl Metrics {
    fn values(&self) -> [u64; COUNT] {
        [
            self.doorbells,
            self.work_requests,
            self.signalled,
            self.completions,
            self.receive_doorbells,
            self.credit_messages,
            self.receiver_not_ready,
            self.retries_exceeded,
            self.remote_access_errors,
            self.pair_commands,
            self.port_events,
            self.handshakes_failed,
            self.unproved_handshakes,
            self.accept_pauses,
            self.queue_pairs_leaked,
            self.queue_pairs_open,
            self.registered_bytes,
            self.dma_buf_bytes,
            self.peer_memory_bytes,
            self.outstanding,
        ]
    }
}

impl VerbsCounters {
    pub(crate) fn show(&self, metrics: &Metrics) {
        for (cell, value) in self.0.iter().zip(metrics.values()) {
            cell.store(value, Ordering::Relaxed);
        }
    }

    /// Returns name, help text and value of each metric; the last five are gauges.
    #[must_use]
    pub fn snapshot(&self) -> [(&'static str, &'static str, u64); COUNT] {
        let names: [(&str, &str); COUNT] = [
            ("doorbells", "Calls of `ibv_post_send`"),
            ("work_requests", "Send work requests posted"),
            ("signalled", "Those of them that asked for a completion"),
            ("completions", "Completions polled, receives included"),
            ("receive_doorbells", "Calls of `ibv_post_srq_recv`"),
            ("credit_messages", "Credit messages sent because nothing else was there to carry the credits"),
            ("receiver_not_ready", "Connections ended because the peer had no receive posted for too long"),
            ("retries_exceeded", "Connections ended because the peer did not acknowledge"),
            ("remote_access_errors", "Connections ended by a remote access error"),
            ("pair_commands", "Commands to make, connect, stop or destroy both queue pairs of a connection"),
            ("port_events", "Port state changes reported by the device"),
            ("handshakes_failed", "Handshakes refused or timed out"),
            ("unproved_handshakes", UNPROVED_HELP),
            ("accept_pauses", "Times accepting paused because descriptors ran out"),
            ("queue_pairs_leaked", "Queue pairs that the device keeps; what they may touch is never reused"),
            ("queue_pairs_open", "Queue pairs that exist (level)"),
            ("registered_bytes", "Bytes registered with the device (level)"),
            ("dma_buf_bytes", "Of these, bytes of a GPU's memory, reached through a dma-buf (level)"),
            (
                "peer_memory_bytes",
                "Of these, bytes of a GPU's memory, reached through nvidia-peermem (level)",
            ),
            ("outstanding", "Send work requests posted and not yet known to be done (level)"),
        ];
        std::array::from_fn(|index| (names[index].0, names[index].1, self.0[index].load(Ordering::Relaxed)))
    }
}
