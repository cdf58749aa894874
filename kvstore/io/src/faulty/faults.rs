//! Settings and counters of the injected faults.

/// Probabilities of faults, for each request that the fault applies to; all zero by default.
#[derive(Debug, Clone, PartialEq)]
pub struct Faults {
    /// Seed of every draw.
    pub seed: u64,
    /// A write that is acknowledged, but of which only the first sectors, or some, reach the medium.
    pub torn_write: f64,
    /// A write that is acknowledged, but lands elsewhere in its file.
    pub misdirected_write: f64,
    /// A write that is acknowledged, but never reaches the medium.
    pub lost_write: f64,
    /// A write of which one bit is wrong on the medium.
    pub rot_at_rest: f64,
    /// A read that returns one wrong bit, once.
    pub rot_on_read: f64,
    /// A read whose first block cannot be read any more, until it is written.
    pub media_error: f64,
    /// A write that fails for lack of space.
    pub no_space: f64,
    /// The device is lost, with this request and all later ones.
    pub device_gone: f64,
    /// A completion that is delayed.
    pub delay: f64,
    /// Maximum delay, in calls of `poll`.
    pub delay_polls_max: u32,
    /// Whether completions are handed out in random order.
    pub reorder: bool,
    /// Whether contents that writes replace are kept until a sync, so that a power cut can be simulated.
    pub track_unsynced: bool,
    /// Maximum number of writes in the device's cache; older ones count as synced.
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

/// Number of faults injected, by kind.
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
    /// Reads that failed on unreadable blocks.
    pub media_errors: u64,
    /// See [`Faults::no_space`].
    pub no_space: u64,
    /// Requests that failed because the device was lost.
    pub device_gone: u64,
    /// See [`Faults::delay`].
    pub delayed: u64,
    /// Writes that a power cut undid, in whole or in part.
    pub power_cut_writes: u64,
}
