//! Faults of a software controller.

use std::ops::Range;

/// Faults of a software controller. Numbers per thousand commands are drawn from the seed.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// Seed of the draws.
    pub seed: u64,
    /// Reads and writes that fail with a media error.
    pub media_errors_per_mille: u64,
    /// Reads and writes that fail with an internal error.
    pub internal_errors_per_mille: u64,
    /// Commands that are executed and never completed.
    pub lost_per_mille: u64,
    /// Completions that are written with the phase of the last lap: the driver cannot see them.
    pub wrong_phase_per_mille: u64,
    /// Completions with a command id that is not in flight.
    pub wrong_id_per_mille: u64,
    /// Completions that are held back until a random number of later ones were written.
    pub reordered_per_mille: u64,
    /// Blocks that cannot be read.
    pub bad_blocks: Range<u64>,
    /// After this many I/O commands `CSTS.CFS` is set, once.
    pub fatal_after: Option<u64>,
    /// After this many I/O commands the device is pulled out.
    pub removed_after: Option<u64>,
    /// Whether aborts are answered with "not aborted".
    pub ignores_aborts: bool,
    /// Whether disabling never completes, so that only a reset from outside helps.
    pub cannot_be_disabled: bool,
    /// Whether the device has no reset from outside.
    pub has_no_reset: bool,
    /// Whether the controller never becomes ready when it is next enabled.
    pub cannot_be_enabled: bool,
}

/// Deterministic draws (SplitMix64, Steele et al. 2014).
#[derive(Debug, Clone)]
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut value = self.0;
        value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (value ^ value >> 31) % limit.max(1)
    }

    pub(super) fn per_mille(&mut self, chance: u64) -> bool {
        chance > 0 && self.below(1000) < chance
    }
}
