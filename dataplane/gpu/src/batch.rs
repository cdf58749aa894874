//! Batches: the checksums that a batch takes, its result, and its state while it is in flight.

use dataplane_cuda::CudaError;

use crate::ring::Parts;
use crate::route::RouteMemory;

/// Use of the slots' checksums by a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sums<'a> {
    /// Take no checksums.
    None,
    /// Take the checksum of each slot.
    Take,
    /// Take them and compare: a difference sets [`status::CHECKSUM`](dataplane_kernels::status::CHECKSUM) in
    /// the item's status.
    Expect(&'a [u64]),
}

/// Result of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finished<'a> {
    /// Token that was submitted with the batch.
    pub token: u64,
    /// Whether the device completed the batch. After an error the content of the targets is undefined, and
    /// statuses and checksums are empty.
    pub result: Result<(), CudaError>,
    /// For each item the bits of [`status`](dataplane_kernels::status): the target's bytes are valid only
    /// when it is 0.
    pub statuses: &'a [u32],
    /// For each item the checksum; empty when none were taken.
    pub checksums: &'a [u64],
}

/// A batch that was accepted and has not completed.
#[derive(Debug)]
pub(crate) struct InFlightBatch {
    pub(crate) token: u64,
    /// Position of the batch in the ring.
    pub(crate) slot: u32,
    pub(crate) parts: Parts,
    pub(crate) count: usize,
    pub(crate) has_sums: bool,
    /// Error of the launch; `None`: the kernel was launched.
    pub(crate) failure: Option<CudaError>,
    /// Memory of the batch, which must stay allocated while the batch is in flight.
    pub(crate) _memory: RouteMemory,
}
