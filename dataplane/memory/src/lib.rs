//! Memory that KV blocks live in: slabs of fixed slots, references to slots, and leases on them.
//!
//! * [`Slab`]: one shared-memory mapping, made once at start-up, cut into equal slots. A peer process can
//!   attach the same slab, and a NIC can register it, so bytes need no second home.
//! * [`SlotPool`] and [`SlotRef`]: who uses which slot. A slot goes back to the free list when its last
//!   reference is dropped, and gets another generation first, by which a stale name of it is detected. Generations cannot
//!   be guessed: whoever names a slot has been told of it, and the end of a [`SlotGrant`] takes that back.
//! * [`DeviceMemory`]: what the slots of a slab may lie in instead, and [`Copier`], which copies between slots
//!   wherever they lie. [`Checksummer`] has a device sum what lies in its memory,
//!   and [`DeviceSharing`] gives it to other processes of the machine.
//! * [`Slab::read_summed`], [`Slab::write_summed`] and [`PartialChecksum`]: checksums of slots, on the way of a copy or by themselves.
//! * [`LeaseTable`]: references held on behalf of somebody else (a peer), with an owner and an expiry.
//!
//! Invariants: a slot is never handed out while a reference to it exists (work requests in flight hold one);
//! everything here has a fixed capacity. Acquiring and releasing a slot is
//! lock-free and allocates nothing. This crate knows nothing of tokens, hashes, models or transports.

mod checksummer;
mod copier;
mod copy;
mod device;
mod error;
mod lease;
mod partial_checksum;
mod pool;
mod sharing;
mod slab;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use checksummer::{Checksummer, SlotSum, SumDone, SumRefused};
pub use copier::{Copier, CopyDone, CopyRefused, HostCopier, SlotCopy};
pub use device::{DeviceError, DeviceMemory, DirectError, DmaBuf, DmaBufMapping};
pub use error::MemoryError;
pub use lease::{Lease, LeaseFull, LeaseTable};
pub use partial_checksum::PartialChecksum;
pub use pool::{SlotGrant, SlotPool, SlotRef};
pub use sharing::{AttachedSlab, DeviceSharing, EXPORT_BYTES_MAX};
pub use slab::{PageSize, Slab, SlabKind, SlabLayout};
