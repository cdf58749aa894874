use rustix::io::Errno;

/// What can go wrong while a slab is made or attached. Nothing on the data path returns this.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// A system call on the way to the mapping failed.
    #[error("{operation} of slab '{name}' ({bytes} bytes): {errno}")]
    System {
        /// The system call.
        operation: &'static str,
        /// The slab's name.
        name: String,
        /// The size asked for.
        bytes: usize,
        /// What the kernel said.
        errno: Errno,
    },
    /// The layout cannot be mapped: no slots, no bytes, or more than the address space holds.
    #[error("slab '{name}': {slot_count} slots of {slot_bytes} bytes is not a usable layout")]
    Layout {
        /// The slab's name.
        name: String,
        /// Slots asked for.
        slot_count: u32,
        /// Bytes of one slot.
        slot_bytes: usize,
    },
    /// The device's memory does not hold the slots.
    #[error(
        "slab '{name}': the slots take {needed} bytes, and the device's memory at {address:#x} has {present}"
    )]
    Device {
        /// The slab's name.
        name: String,
        /// Bytes of all slots.
        needed: usize,
        /// Bytes of the memory.
        present: usize,
        /// Where it begins, for the device.
        address: u64,
    },
    /// A descriptor from a peer does not hold a slab of this version, or could still be resized under us.
    #[error("attached memory is not a sealed slab of this version: {0}")]
    NotASlab(&'static str),
}
