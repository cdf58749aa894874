//! Test doubles of a device, for this crate and others. No product code uses them.
//!
//! [`DeviceDouble`] is memory that the CPU cannot access by accident: its address faults. [`CopierDouble`]
//! copies to and from it as a device would: asynchronously, without order between directions, and with
//! failures. [`ChecksummerDouble`] computes checksums in that memory, in the same manner.

mod checksummer;
mod copier;
mod device;
mod sharing;

pub use checksummer::{ChecksummerDouble, SumFaults};
pub use copier::{CopierDouble, CopyFaults};
pub use device::{Abilities, DeviceDouble};
pub use sharing::SharingDouble;

/// Sets every slot's generation to 0, for tests that write names by hand and for fuzzers, whose inputs must
/// have the same meaning in each run.
pub fn make_names_guessable(slab: &crate::Slab) {
    (0..slab.layout().slot_count).for_each(|slot| slab.set_generation(slot, 0));
}
