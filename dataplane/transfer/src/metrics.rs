//! Counters of transfers.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::stages::StageTimes;

/// Counters of a node. They only grow, except the gauges; read with [`TransferCounters::snapshot`].
#[derive(Debug, Default)]
pub struct TransferCounters {
    pub(crate) bytes_sent: AtomicU64,
    pub(crate) bytes_summed: AtomicU64,
    pub(crate) blocks_received: AtomicU64,
    pub(crate) checksum_failures: AtomicU64,
    pub(crate) transfers_completed: AtomicU64,
    pub(crate) transfers_incomplete: AtomicU64,
    pub(crate) transfers_cancelled: AtomicU64,
    pub(crate) leases_expired: AtomicU64,
    pub(crate) peers_lost: AtomicU64,
    pub(crate) sent_directly: AtomicU64,
    pub(crate) sent_staged: AtomicU64,
    pub(crate) received_directly: AtomicU64,
    pub(crate) received_staged: AtomicU64,
    /// Gauge: slots that a peer may still write to.
    pub(crate) quarantined_slots: AtomicU64,
    /// Gauge: transfers in either direction.
    pub(crate) transfers_open: AtomicU64,
    /// Durations of the stages of hand-offs.
    pub stages: StageTimes,
}

impl TransferCounters {
    pub(crate) fn add(counter: &AtomicU64, value: u64) {
        counter.fetch_add(value, Ordering::Relaxed);
    }

    /// Returns name, help text and value of each counter; the last two are gauges.
    #[must_use]
    pub fn snapshot(&self) -> [(&'static str, &'static str, u64); 15] {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [
            ("bytes_sent", "Bytes of blocks written to peers", read(&self.bytes_sent)),
            (
                "bytes_summed",
                "Bytes of hand-offs whose checksum the processor computed before announcing them",
                read(&self.bytes_summed),
            ),
            ("blocks_received", "Blocks received and verified", read(&self.blocks_received)),
            ("checksum_failures", "Pieces whose checksum did not match", read(&self.checksum_failures)),
            ("completed", "Transfers received whole", read(&self.transfers_completed)),
            ("incomplete", "Transfers that ended with blocks missing", read(&self.transfers_incomplete)),
            ("cancelled", "Transfers cancelled by either side", read(&self.transfers_cancelled)),
            (
                "leases_expired",
                "Outgoing transfers whose lease ended before a receiver reserved them",
                read(&self.leases_expired),
            ),
            ("peers_lost", "Connections that ended", read(&self.peers_lost)),
            (
                "sent_directly",
                "Transfers that were sent from a device's memory without staging",
                read(&self.sent_directly),
            ),
            (
                "sent_staged",
                "Transfers that were sent from a device's memory through staging slots",
                read(&self.sent_staged),
            ),
            (
                "received_directly",
                "Transfers that were expected in a device's memory without staging",
                read(&self.received_directly),
            ),
            (
                "received_staged",
                "Transfers that were expected in a device's memory through staging slots",
                read(&self.received_staged),
            ),
            (
                "quarantined_slots",
                "Slots that a peer may still write to (level)",
                read(&self.quarantined_slots),
            ),
            ("open", "Transfers under way (level)", read(&self.transfers_open)),
        ]
    }
}
