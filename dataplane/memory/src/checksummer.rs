//! Interface for checksums of slots in a device's memory, computed asynchronously by the device.
//!
//! The checksum is that of `dataplane-checksum`, so that a processor can verify a device's checksum, and
//! vice versa. Used as submit → flush → poll, so that one doorbell starts a whole batch. Contract of every
//! [`Checksummer`]:
//! 1. Each accepted sum ends exactly once, as one [`SumDone`] with its token: when the device is lost, everything in
//!    flight and everything submitted later ends with an error.
//! 2. Until then the checksummer holds the slot's reference, so the slot cannot be reused under the device, even when
//!    its owner has dropped it. An accepted sum cannot be taken back.
//! 3. Sums are not ordered. A sum may begin when it is submitted, and begins after the next `flush` with no further
//!    call but `poll`.
//! 4. No call blocks, and none allocates once `poll`'s vector has its capacity.
//! 5. Dropping a checksummer waits for the device's remaining work, or leaks the slots.
//! 6. A checksummer does not wait for other work. The writes of the bytes must be over when the sum is submitted: a
//!    kernel's event has passed; after a NIC's completion [`DeviceMemory::flush_nic_writes`](crate::DeviceMemory::flush_nic_writes) has
//!    returned. The sum of bytes that are written meanwhile is undefined.

use std::sync::Arc;

use crate::{DeviceError, Slab, SlotRef};

/// Bytes of one slot to checksum. The reference keeps the slot in use.
#[derive(Debug, Clone)]
pub struct SlotSum {
    /// Token that the sum's [`SumDone`] returns.
    pub token: u64,
    /// The slot.
    pub slot: SlotRef,
    /// Offset of the first byte in the slot.
    pub offset: u32,
    /// Number of bytes, at least one.
    pub len: u32,
}

impl SlotSum {
    /// Whether the range is not empty and lies inside the slot.
    #[must_use]
    pub fn is_inside(&self) -> bool {
        let (offset, len) = (self.offset as usize, self.len as usize);
        len > 0 && self.slot.slab().contains(self.slot.slot(), offset, len)
    }
}

/// Reason that a sum was not accepted; returns the sum.
#[derive(Debug)]
pub enum SumRefused {
    /// The checksummer is full. Poll, then try again.
    Full(SlotSum),
    /// The range is empty or lies outside the slot.
    Outside(SlotSum),
    /// The checksummer cannot reach the memory ([`Checksummer::reaches`]).
    Unreachable(SlotSum),
}

/// The end of one sum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SumDone {
    /// Token of the sum.
    pub token: u64,
    /// The checksum of the bytes.
    pub result: Result<u64, DeviceError>,
}

/// Checksums of slots computed by a device, driven by one thread. See the module for the contract.
pub trait Checksummer: Send {
    /// Whether it can checksum the slots of this slab.
    fn reaches(&self, slab: &Arc<Slab>) -> bool;

    /// Takes one sum, or returns it. The range is checked here; the caller guarantees that earlier writes
    /// are over (6 of the contract).
    fn submit(&mut self, sum: SlotSum) -> Result<(), SumRefused>;

    /// Rings one doorbell for all sums submitted since the last call.
    fn flush(&mut self);

    /// Moves completed sums into `done`, each token once; returns their number.
    fn poll(&mut self, done: &mut Vec<SumDone>) -> usize;

    /// Returns the number of sums accepted and not yet reported as done.
    fn in_flight(&self) -> usize;
}
