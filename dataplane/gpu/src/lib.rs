//! The layout kernels on a CUDA device: blocks of an engine's paged tensors to transfer slots and back.
//!
//! * [`LayoutKernels`]: the kernels of `dataplane-kernels`, compiled for one device at start-up.
//! * [`PagedTensors`]: an engine's tensors as planes in device memory, each checked to lie inside it.
//! * [`CopyRoute`], [`SlotRoute`]: tensors, slots and the plan between them, one [`Route`] with two plans.
//!   Made once.
//! * [`KernelQueue`]: batches of blocks over a route, submitted and polled. The hot path: no allocation, no
//!   lock of this crate, no wait; per batch two small copies, one launch, two events, and for a batch of few
//!   items one launch and event.
//! * [`SlotChecksummer`]: the `Checksummer` of `dataplane-memory` over such a queue, for code without CUDA
//!   types.
//!
//! Invariants: every block and slot of a batch is checked before its launch, so that a wrong number is a
//! [`SubmitError`] and not a fault that ends the device's context; all memory that a launch accesses is kept
//! until the launch has ended; items, status words and checksums lie in a ring that is made with the queue.
//! Duplicate targets in a batch are not detected: the target then gets bytes of either source.
//!
//! This crate does not handle tokens, hashes or models. It builds and its tests pass without a GPU: they run
//! over the double of the driver and the kernels' emulator (`tests/double.rs`); `tests/device.rs` does the
//! same on a real device.

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
pub use error::{KernelsError, RouteError, SubmitError};
pub use kernels::LayoutKernels;
pub use queue::KernelQueue;
pub use ring::KernelQueueConfig;
pub use route::{BlockCopy, CopyRoute, Route, SlotRoute, heads_shared};
pub use tensors::{PagedTensors, Plane};
