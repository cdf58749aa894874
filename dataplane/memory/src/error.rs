//! Errors of slabs and regions.

use rustix::io::Errno;

/// Errors while a slab is made or attached. No call of the data path returns one.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// A system call that prepares the mapping failed.
    #[error("{operation} of slab '{name}' ({bytes} bytes): {errno}")]
    System {
        /// The system call.
        operation: &'static str,
        /// Name of the slab.
        name: String,
        /// Size of the mapping, bytes.
        bytes: usize,
        /// The errno of the call.
        errno: Errno,
    },
    /// The layout cannot be mapped: no slots, no bytes, or more than the address space holds.
    #[error("slab '{name}': {slot_count} slots of {slot_bytes} bytes is not a usable layout")]
    Layout {
        /// Name of the slab.
        name: String,
        /// Requested number of slots.
        slot_count: u32,
        /// Bytes of one slot.
        slot_bytes: usize,
    },
    /// The device's memory does not hold the slots.
    #[error(
        "slab '{name}': the slots take {needed} bytes, and the device's memory at {address:#x} has {present}"
    )]
    Device {
        /// Name of the slab.
        name: String,
        /// Bytes of all slots.
        needed: usize,
        /// Bytes of the device's memory.
        present: usize,
        /// Address of the memory at the device.
        address: u64,
    },
    /// A descriptor from a peer holds no slab of this version, or one that could still be resized.
    #[error("attached memory is not a sealed slab of this version: {0}")]
    NotASlab(&'static str),
}
