//! The seam for checksums of slots in a device's memory, which the device takes beside the caller.
//!
//! The checksum is that of `dataplane-checksum`, so that a processor can verify what a device has summed, and the other
//! way round. Used as submit → flush → poll, so that one doorbell starts a whole batch. Contract of every
//! [`Checksummer`]:
//! 1. Each accepted sum ends exactly once, as one [`SumDone`] with its token, whatever happens to the device: when the
//!    device is lost, everything in flight and everything submitted later ends with an error.
//! 2. Until then the checksummer holds the slot's reference, so the slot cannot be reused under the device, not even
//!    when its owner has forgotten it. A sum that was accepted cannot be taken back.
//! 3. Nothing orders two sums. A sum may begin when it is submitted, and begins after the next `flush` with no further
//!    call but `poll`.
//! 4. Nothing blocks, and nothing is allocated once `poll`'s vector has its capacity.
//! 5. Dropping a checksummer waits for what the device still does, or leaks the slots.
//! 6. A checksummer waits for nobody else's work. What wrote the bytes must be over when the sum is submitted: a kernel's
//!    event has passed; after a NIC's completion [`DeviceMemory::settle`](crate::DeviceMemory::settle) has returned. Of
//!    bytes that are written meanwhile the sum is any number.

use std::sync::Arc;

use crate::{DeviceError, Slab, SlotRef};

/// Bytes of one slot to be summed. The reference keeps them in place.
#[derive(Debug, Clone)]
pub struct SlotSum {
    /// Comes back with the end of the sum.
    pub token: u64,
    /// The slot.
    pub slot: SlotRef,
    /// First byte within the slot.
    pub offset: u32,
    /// Number of bytes, at least one.
    pub len: u32,
}

impl SlotSum {
    /// Whether there are such bytes, and at least one.
    #[must_use]
    pub fn is_inside(&self) -> bool {
        let (offset, len) = (self.offset as usize, self.len as usize);
        len > 0 && self.slot.slab().contains(self.slot.slot(), offset, len)
    }
}

/// Why a sum was not accepted; it comes back.
#[derive(Debug)]
pub enum SumRefused {
    /// As many as the checksummer takes are in flight. Poll, then try again.
    Full(SlotSum),
    /// There are no such bytes.
    Outside(SlotSum),
    /// This checksummer cannot reach the memory ([`Checksummer::reaches`]).
    Unreachable(SlotSum),
}

/// The end of one sum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SumDone {
    /// Whose.
    pub token: u64,
    /// The checksum of the bytes.
    pub result: Result<u64, DeviceError>,
}

/// Checksums of slots, taken by a device, driven by one thread. See the module for the contract.
pub trait Checksummer: Send {
    /// Whether it takes sums of this slab's slots.
    fn reaches(&self, slab: &Arc<Slab>) -> bool;

    /// Takes one sum, or hands it back. The range is checked here; that earlier writes are over is what the caller
    /// promises (6 of the contract).
    fn submit(&mut self, sum: SlotSum) -> Result<(), SumRefused>;

    /// Rings one doorbell for all that was submitted since the last call.
    fn flush(&mut self);

    /// Moves ended sums into `done`, each token once; returns how many.
    fn poll(&mut self, done: &mut Vec<SumDone>) -> usize;

    /// Sums accepted and not yet told as ended.
    fn in_flight(&self) -> usize;
}
