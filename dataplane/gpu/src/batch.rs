//! What a batch asks for, how it ends, and what is kept of it in between.

use dataplane_cuda::CudaError;

use crate::ring::Parts;
use crate::route::Ends;

/// What of the slots' checksums a batch takes on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sums<'a> {
    /// Nothing.
    None,
    /// The checksum of each slot.
    Take,
    /// The same, and a difference sets [`status::CHECKSUM`](dataplane_kernels::status::CHECKSUM) in the item's status.
    Expect(&'a [u64]),
}

/// The end of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finished<'a> {
    /// The token that came with it.
    pub token: u64,
    /// Whether the device did the work. After an error the targets' bytes may be anything, and there are no words.
    pub result: Result<(), CudaError>,
    /// For each item the bits of [`status`](dataplane_kernels::status): its target's bytes count only when it is 0.
    pub statuses: &'a [u32],
    /// For each item the checksum, if they were taken.
    pub checksums: &'a [u64],
}

/// A batch between its acceptance and its completion.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) token: u64,
    /// Its place in the ring.
    pub(crate) slot: u32,
    pub(crate) parts: Parts,
    pub(crate) count: usize,
    pub(crate) has_sums: bool,
    /// Why its kernel was not launched.
    pub(crate) failure: Option<CudaError>,
    /// Its memory.
    pub(crate) _ends: Ends,
}
