//! Errors of planning a launch.

/// A failure to plan a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// A dimension is zero.
    #[error("layout kernels: {0} is zero")]
    Zero(&'static str),
    /// The slot's and the engine's description of a block differ.
    #[error("layout kernels: {what} is {slot} in the slot, but {paged} in the engine")]
    Mismatch {
        /// Name of the property that differs.
        what: &'static str,
        /// Value in the slot.
        slot: u64,
        /// Value in the engine.
        paged: u64,
    },
    /// The range of heads is not inside one side's heads.
    #[error("layout kernels: heads {first} to {end} of {heads} in the {side}")]
    Heads {
        /// The side: `"slot"` or `"engine"`.
        side: &'static str,
        /// First head.
        first: u64,
        /// One past the last.
        end: u64,
        /// Number of heads of that side.
        heads: u32,
    },
    /// The checksum cannot be taken during the copy: use [`ChecksumPlan`](crate::ChecksumPlan) after it.
    #[error("layout kernels: no checksum with this copy, because {0}")]
    Checksum(&'static str),
    /// More units or tiles than the kernels can index.
    #[error("layout kernels: {count} {what}, and the limit is {most}")]
    TooMany {
        /// Name of the quantity.
        what: &'static str,
        /// Value of the quantity.
        count: u64,
        /// The limit.
        most: u64,
    },
}
