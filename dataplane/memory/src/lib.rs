//! Memory of KV blocks: slabs of equal slots, references to slots, and leases on them.
//!
//! * [`Slab`]: one shared-memory mapping, made once at start-up, cut into equal slots. A peer process can attach
//!   the same slab, and a NIC can register it, so bytes need no second copy.
//! * [`SlotPool`] and [`SlotRef`]: allocation and reference counts of slots. A slot returns to the free list when its last
//!   reference is dropped, and gets another generation first, by which a stale name of it is detected. Generations cannot
//!   be guessed: a peer that names a slot has been told of it, and the end of a [`SlotGrant`] revokes the name.
//! * [`DeviceMemory`]: an accelerator's memory, in which the slots of a slab may lie, and [`Copier`], which copies
//!   between slots in any memory. [`Checksummer`] has a device checksum its own memory,
//!   and [`DeviceSharing`] shares that memory with other processes of the machine.
//! * [`Slab::read_summed`], [`Slab::write_summed`] and [`PartialChecksum`]: checksums of slots, during a copy or alone.
//! * [`LeaseTable`]: slot references held for an owner (a peer) until an expiry.
//!
//! Invariants: a slot is never allocated while a reference to it exists (work requests in flight hold one);
//! everything here has a fixed capacity. Acquiring and releasing a slot is lock-free and allocates nothing.
//! This crate contains no tokens, hashes, models or transports.

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
pub use device::{DeviceError, DeviceMemory, DmaBuf, DmaBufError, DmaBufMapping};
pub use error::MemoryError;
pub use lease::{Lease, LeaseFull, LeaseTable};
pub use partial_checksum::PartialChecksum;
pub use pool::{SlotGrant, SlotPool, SlotRef};
pub use sharing::{AttachedSlab, DeviceSharing, EXPORT_BYTES_MAX};
pub use slab::{PageSize, Slab, SlabKind, SlabLayout};
