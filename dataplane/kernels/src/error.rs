//! Why there is no launch for what was asked.

/// A launch cannot be planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// A dimension is zero.
    #[error("layout kernels: {0} is zero")]
    Zero(&'static str),
    /// Two descriptions of one block differ.
    #[error("layout kernels: {what} is {slot} in the slot, but {paged} in the engine")]
    Mismatch {
        /// What differs.
        what: &'static str,
        /// In the slot.
        slot: u64,
        /// In the engine.
        paged: u64,
    },
    /// A range of heads that one side does not have.
    #[error("layout kernels: heads {first} to {end} of {heads} in the {side}")]
    Heads {
        /// `"slot"` or `"engine"`.
        side: &'static str,
        /// First head.
        first: u64,
        /// One past the last.
        end: u64,
        /// Heads there.
        heads: u32,
    },
    /// The checksum cannot be taken with the copy: use [`ChecksumPlan`](crate::ChecksumPlan) after it.
    #[error("layout kernels: no checksum with this copy, because {0}")]
    Checksum(&'static str),
    /// More units or tiles than the kernels can number.
    #[error("layout kernels: {what} are {count}, at most {most}")]
    TooMany {
        /// What there is too much of.
        what: &'static str,
        /// How much.
        count: u64,
        /// The limit.
        most: u64,
    },
}
