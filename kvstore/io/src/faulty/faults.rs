//! Which faults, how likely, and how many there were.

/// Probabilities of faults, for each request that the fault applies to; all zero by default.
#[derive(Debug, Clone, PartialEq)]
pub struct Faults {
    /// Seed of every draw.
    pub seed: u64,
    /// A write that is acknowledged, and of which the first sectors landed, or some.
    pub torn_write: f64,
    /// A write that is acknowledged, and landed elsewhere in its file.
    pub misdirected_write: f64,
    /// A write that is acknowledged, and never lands.
    pub lost_write: f64,
    /// A write of which one bit is wrong on the medium.
    pub rot_at_rest: f64,
    /// A read that returns one wrong bit, once.
    pub rot_on_read: f64,
    /// A read whose first block cannot be read any more, until it is written.
    pub media_error: f64,
    /// A write that finds no room.
    pub no_space: f64,
    /// The device goes away, with this request and everything after it.
    pub device_gone: f64,
    /// A completion that comes later.
    pub delay: f64,
    /// By how many calls of `poll`, at most.
    pub delay_polls_max: u32,
    /// Completions are handed out in any order.
    pub reorder: bool,
    /// Keeps what writes overwrote until they are synced, so that power can be cut.
    pub track_unsynced: bool,
    /// Writes that the device's cache holds at most; older ones count as synced.
    pub unsynced_max: usize,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            seed: 1,
            torn_write: 0.0,
            misdirected_write: 0.0,
            lost_write: 0.0,
            rot_at_rest: 0.0,
            rot_on_read: 0.0,
            media_error: 0.0,
            no_space: 0.0,
            device_gone: 0.0,
            delay: 0.0,
            delay_polls_max: 8,
            reorder: false,
            track_unsynced: false,
            unsynced_max: 1024,
        }
    }
}

/// How many faults were injected.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FaultCounters {
    /// See [`Faults::torn_write`].
    pub torn_writes: u64,
    /// See [`Faults::misdirected_write`].
    pub misdirected_writes: u64,
    /// See [`Faults::lost_write`].
    pub lost_writes: u64,
    /// See [`Faults::rot_at_rest`].
    pub rotten_writes: u64,
    /// See [`Faults::rot_on_read`].
    pub rotten_reads: u64,
    /// Reads that failed on blocks that cannot be read.
    pub media_errors: u64,
    /// See [`Faults::no_space`].
    pub no_space: u64,
    /// Requests that found no device.
    pub device_gone: u64,
    /// See [`Faults::delay`].
    pub delayed: u64,
    /// Writes that a power cut undid, in whole or in part.
    pub power_cut_writes: u64,
}
