//! Doubles of a device, for tests here and in other crates. Nothing in production uses them.
//!
//! [`DeviceDouble`] is memory that the CPU cannot touch by accident: its address faults. [`CopierDouble`] copies to
//! and from it as a device would: later, in no order between directions, and not always with success.
//! [`ChecksummerDouble`] sums what lies there, in the same manner.

mod checksummer;
mod copier;
mod device;
mod sharing;

pub use checksummer::{ChecksummerDouble, SumFaults};
pub use copier::{CopierDouble, CopyFaults};
pub use device::{Abilities, DeviceDouble};
pub use sharing::SharingDouble;

/// Gives every slot the generation 0, for tests that write names by hand and for fuzzers, whose inputs must mean the same in
/// each run.
pub fn make_names_guessable(slab: &crate::Slab) {
    (0..slab.layout().slot_count).for_each(|slot| slab.set_generation(slot, 0));
}
