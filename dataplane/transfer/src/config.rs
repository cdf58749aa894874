use std::time::Duration;

/// How a slot is cut: `layers` pieces of `layer_bytes` each, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PieceLayout {
    /// Pieces of a slot.
    pub layers: u16,
    /// Bytes of one.
    pub layer_bytes: u32,
    /// Both ends must hold the same: whatever else decides whether bytes mean the same there.
    pub fingerprint: u64,
}

impl PieceLayout {
    /// Bytes of a whole slot.
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        usize::from(self.layers) * self.layer_bytes as usize
    }
}

/// Bounds of a node's tables.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Transfers in each direction at a time.
    pub transfers_max: usize,
    /// How long blocks are kept for a receiver that has not come.
    pub lease: Duration,
    /// Events handled in one poll.
    pub poll_budget: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { transfers_max: 4096, lease: Duration::from_secs(30), poll_budget: 256 }
    }
}

/// Most blocks of one transfer: what fits into one `Reserve` message.
pub(crate) const BLOCKS_MAX: usize = 8000;
/// Most blocks of one announcement: what fits into one message and one range of immediates.
pub(crate) const ANNOUNCED_BLOCKS_MAX: usize = 4096;
