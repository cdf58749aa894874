//! Settings of the planner.

/// Settings of [`plan`](crate::plan).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PlanConfig {
    /// Onboarding has to win by this part of its time (0 … 0.5), or recomputing if the previous choice was to
    /// onboard; and a nominally slower tier against a faster one. Twice this bounds what the caution costs when
    /// speeds are known.
    pub(crate) margin: f64,
    /// Part of the shorter of onboarding and computing that the worker hides behind the longer (0 … 1): 0 when
    /// it starts computing after the whole prefix is there, near 1 when it waits layer by layer.
    pub(crate) overlap: f64,
    /// A tier with fewer measured transfers than this is taken in growing pieces only.
    pub(crate) trusted_samples: u64,
    /// Blocks of the first piece from a tier without measurements (at least 1).
    pub(crate) first_blocks: u32,
    /// The next piece may be this many times as large as the largest one measured (at least 1).
    pub(crate) growth: u32,
}

impl Default for PlanConfig {
    fn default() -> Self {
        Self { margin: 0.015, overlap: 0.0, trusted_samples: 8, first_blocks: 8, growth: 4 }
    }
}
