//! Errors of this crate, by the time at which they occur: at start-up, when a route is made, when a batch is
//! submitted.

use dataplane_cuda::{CompileError, CudaError, DeviceError, PinError};
use dataplane_kernels::PlanError;
use dataplane_memory::MemoryError;

/// A failure to make the kernels or their queue ready.
#[derive(Debug, thiserror::Error)]
pub enum KernelsError {
    /// The kernels could not be compiled.
    #[error("the layout kernels for compute capability {major}.{minor}: {error}")]
    Compile {
        /// Major number of the device's compute capability.
        major: u32,
        /// Minor number.
        minor: u32,
        /// Error of the compiler.
        error: CompileError,
    },
    /// The device rejects the image or has too little memory.
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

/// A mismatch between tensors and slots, or between either and its memory.
#[derive(Debug, thiserror::Error)]
pub enum RouteError {
    /// A plane does not lie inside its memory.
    #[error("plane {plane} needs {needed} bytes from byte {offset} on; the memory has {present}")]
    Plane {
        /// Index of the plane.
        plane: usize,
        /// Position of the plane's first byte in the memory.
        offset: usize,
        /// Bytes from the plane's first to its last byte; `u64::MAX` when the number overflows.
        needed: u64,
        /// Bytes of the memory.
        present: usize,
    },
    /// The tensors have no planes, or another number of planes than the slot.
    #[error("the slot has {slot} planes, the tensors have {tensors}")]
    Planes {
        /// Planes of the slot.
        slot: u64,
        /// Planes of the tensors.
        tensors: usize,
    },
    /// A slot is too small.
    #[error("slots of {present} bytes are too small: {needed} are needed")]
    Slot {
        /// Bytes of a slot.
        present: usize,
        /// Bytes that are needed; `u64::MAX` when the number overflows.
        needed: u64,
    },
    /// Tensors, or tensors and slots, lie on different devices.
    #[error("memory of devices {one} and {other} in one route")]
    Devices {
        /// Ordinal of one device.
        one: u32,
        /// Ordinal of the other device.
        other: u32,
    },
    /// The kernels have no plan for the route.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The array of the planes' addresses cannot be allocated.
    #[error(transparent)]
    Memory(#[from] DeviceError),
}

/// Reason for which a batch was rejected. No part of the batch was accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The largest number of batches is in flight: poll, then try again.
    #[error("the queue is full")]
    Full,
    /// The batch has more items than the queue allows.
    #[error("{items} items are more than a batch may have ({items_max})")]
    TooMany {
        /// Items of the batch.
        items: usize,
        /// Largest number of items of a batch.
        items_max: u32,
    },
    /// A block does not exist.
    #[error("item {index} names block {block} of {blocks}")]
    Block {
        /// Index of the item.
        index: usize,
        /// Block that the item names.
        block: u64,
        /// Blocks of the tensors.
        blocks: u64,
    },
    /// A slot does not exist.
    #[error("item {index} names slot {slot} of {slots}")]
    Slot {
        /// Index of the item.
        index: usize,
        /// Slot that the item names.
        slot: u32,
        /// Slots of the slab.
        slots: u32,
    },
    /// The number of expected checksums differs from the number of items.
    #[error("{expected} checksums for {items} items")]
    Expected {
        /// Number of checksums.
        expected: usize,
        /// Number of items.
        items: usize,
    },
    /// The route's memory is on another device than the queue.
    #[error("the route is on device {route}, the queue on device {queue}")]
    Device {
        /// Ordinal of the route's device.
        route: u32,
        /// Ordinal of the queue's device.
        queue: u32,
    },
    /// The kernels have no plan for such a batch.
    #[error(transparent)]
    Plan(#[from] PlanError),
}
