//! The layout kernels on a CUDA device: blocks of an engine's paged tensors to transfer slots and back.
//!
//! * [`LayoutKernels`]: the kernels of `dataplane-kernels`, compiled for one device at start-up.
//! * [`PagedTensors`]: an engine's tensors as planes in device memory, each checked to lie inside it.
//! * [`CopyRoute`], [`SlotRoute`]: tensors, slots and how one becomes the other, one [`Route`] with two plans. Made once.
//! * [`KernelQueue`]: batches of blocks over a route, submitted and polled. The hot path: no allocation, no lock of
//!   ours, no wait; per batch two small copies, one launch, two events, and for one of few items a launch and an event.
//! * [`SlotChecksummer`]: the `Checksummer` of `dataplane-memory` over such a queue, for whoever shall not know CUDA.
//!
//! Invariants: every block and slot of a batch is checked before its launch, so a wrong number is a [`Refusal`] and not
//! a fault that ends the device's context; what a launch reads and writes is kept until it is over; items, status words
//! and checksums lie in a ring that was made with the queue. A batch that names a slot or a block twice as a target gets
//! bytes of either: nothing here looks for that.
//!
//! This crate knows no tokens, hashes or models. It builds and its tests pass without a GPU: they run over the double
//! of the driver and the kernels' emulator (`tests/double.rs`); `tests/device.rs` does the same on a real device.

mod batch;
mod checksummer;
mod error;
mod kernels;
mod queue;
mod ring;
mod route;
mod tensors;

pub use batch::{Finished, Sums};
pub use checksummer::SlotChecksummer;
pub use error::{KernelsError, Refusal, RouteError};
pub use kernels::LayoutKernels;
pub use queue::KernelQueue;
pub use ring::KernelQueueConfig;
pub use route::{CopyRoute, Pair, Route, SlotRoute, heads_shared};
pub use tensors::{PagedTensors, Plane};
