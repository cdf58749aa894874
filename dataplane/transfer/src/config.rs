//! Configuration and fixed limits of transfers.

use std::time::Duration;

/// Bounds of a node's tables.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Most transfers in each direction at a time.
    pub transfers_max: usize,
    /// Time that blocks are kept for a receiver that has not reserved them.
    pub lease: Duration,
    /// Most events handled in one poll.
    pub poll_budget: usize,
    /// Bytes per poll that the processor checksums for sending, and the same again for verification; a round may exceed it by one
    /// chunk of 8 KiB. Posting a write of a hand-off counts 2 KiB, naming a slot to a sender 128 bytes, against a third budget of
    /// this size. At least 1: 0 is taken as 1.
    pub round_bytes: usize,
    /// First delay after a failed connection attempt, doubled with each failure up to
    /// [`Limits::reconnect_max`] and shortened by up to a half at random.
    pub reconnect_first: Duration,
    /// Longest delay after a failed connection attempt.
    pub reconnect_max: Duration,
    /// Seed of that randomness: equal seed, equal run.
    pub seed: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            transfers_max: 4096,
            lease: Duration::from_secs(30),
            poll_budget: 256,
            round_bytes: 192 << 10,
            reconnect_first: Duration::from_millis(20),
            reconnect_max: Duration::from_secs(2),
            seed: 1,
        }
    }
}

/// Most blocks of one transfer: a million tokens in blocks of sixteen. The names of their slots take
/// several messages.
pub(crate) const BLOCKS_MAX: usize = 65_536;
/// Most slot names of one `Reserve` message and checksums of one `Announce`: eight bytes each, which fit
/// into one message of every fabric.
pub(crate) const MESSAGE_BLOCKS_MAX: usize = 8000;
/// Most blocks that one peer may have reserved at a time, over all of its transfers: bounds the memory for their names to
/// 8 MiB.
pub(crate) const PEER_BLOCKS_MAX: usize = 16 * BLOCKS_MAX;
/// Most blocks of one announcement: limited by one message and one range of immediates.
pub(crate) const ANNOUNCED_BLOCKS_MAX: usize = 4096;
