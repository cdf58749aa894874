//! What can go wrong, by when it does: at start-up, when a route is made, when a batch is submitted.

use dataplane_cuda::{CompileError, CudaError, DeviceError, PinError};
use dataplane_kernels::PlanError;
use dataplane_memory::MemoryError;

/// The kernels or their queue cannot be made ready.
#[derive(Debug, thiserror::Error)]
pub enum KernelsError {
    /// There is no image.
    #[error("the layout kernels for compute capability {major}.{minor}: {error}")]
    Compile {
        /// Major number of the device's compute capability.
        major: u32,
        /// Minor number.
        minor: u32,
        /// What the compiler said.
        error: CompileError,
    },
    /// The device does not take the image, or has no room.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A call of the driver failed.
    #[error(transparent)]
    Driver(#[from] CudaError),
    /// The ring's host memory cannot be made.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The ring's host memory cannot be pinned.
    #[error(transparent)]
    Pin(#[from] PinError),
}

/// Tensors and slots that do not fit together, or not into their memory.
#[derive(Debug, thiserror::Error)]
pub enum RouteError {
    /// A plane is not inside its memory.
    #[error("plane {plane} needs {needed} bytes from byte {offset} on; the memory has {present}")]
    Plane {
        /// Which plane.
        plane: usize,
        /// Where it starts.
        offset: usize,
        /// From its first to its last byte; `u64::MAX` when that is more than can be counted.
        needed: u64,
        /// What there is.
        present: usize,
    },
    /// There are no planes, or other ones than the slot has.
    #[error("the slot has {slot} planes, the tensors have {tensors}")]
    Planes {
        /// In the slot.
        slot: u64,
        /// In the tensors.
        tensors: usize,
    },
    /// A slot is too small.
    #[error("slots of {present} bytes are too small: {needed} are needed")]
    Slot {
        /// What there is.
        present: usize,
        /// What is needed; `u64::MAX` when that is more than can be counted.
        needed: u64,
    },
    /// Tensors, or tensors and slots, lie on different devices.
    #[error("memory of devices {one} and {other} in one route")]
    Devices {
        /// One of them.
        one: u32,
        /// Another.
        other: u32,
    },
    /// The kernels have no way for it.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The array of planes cannot be made.
    #[error(transparent)]
    Memory(#[from] DeviceError),
}

/// Why a batch was not accepted. Nothing of it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// As many batches are in flight as may be: poll, then try again.
    #[error("the queue is full")]
    Full,
    /// It has more items than a batch may have.
    #[error("{items} items are more than a batch may have ({items_max})")]
    TooMany {
        /// Items of the batch.
        items: usize,
        /// The limit.
        items_max: u32,
    },
    /// A block does not exist.
    #[error("item {index} names block {block} of {blocks}")]
    Block {
        /// Which item.
        index: usize,
        /// Its block.
        block: u64,
        /// Blocks of the tensors.
        blocks: u64,
    },
    /// A slot does not exist.
    #[error("item {index} names slot {slot} of {slots}")]
    Slot {
        /// Which item.
        index: usize,
        /// Its slot.
        slot: u32,
        /// Slots of the slab.
        slots: u32,
    },
    /// There is not one expected checksum for each item.
    #[error("{expected} checksums for {items} items")]
    Expected {
        /// Checksums.
        expected: usize,
        /// Items.
        items: usize,
    },
    /// The route's memory is another device's.
    #[error("the route is on device {route}, the queue on device {queue}")]
    Device {
        /// The route's.
        route: u32,
        /// The queue's.
        queue: u32,
    },
    /// The kernels cannot do this to such a batch.
    #[error(transparent)]
    Plan(#[from] PlanError),
}
