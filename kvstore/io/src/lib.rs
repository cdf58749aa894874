//! Reads and writes of aligned byte ranges on files and NVMe devices, behind one trait.
//!
//! An [`IoEngine`] is one way to do I/O: io_uring on files, NVMe commands through the kernel, queue pairs of a
//! device in user space, plain `pread`. The contents of the bytes are not interpreted here: the log above
//! (`kvstore/disk`) does that, on any engine.
//!
//! Contract of every implementation:
//! 1. `submit` never blocks and makes no system call; "full" hands the request back. `flush` hands all queued
//!    requests to the kernel or the device: one system call or one doorbell for the batch.
//! 2. Each accepted request yields exactly one [`Completion`] with its buffer, in any order. Until then the
//!    engine owns the buffer, and with it a reference to the slot. Dropping an engine waits for requests in
//!    flight.
//! 3. `Ok` means that the whole range was read or written: short transfers are continued inside. A write that
//!    completed is read back by every later read, of this process or the next; it is on stable storage after a
//!    `sync` that began later.
//! 4. Requests that are in flight at the same time are not ordered, overlapping or not.
//! 5. Offsets, lengths and addresses are multiples of [`Geometry::block_bytes`], lengths from one block to
//!    [`Geometry::transfer_bytes_max`], ranges inside their file. Any other request completes with
//!    [`IoErrorKind::Invalid`], without I/O.
//! 6. One thread drives an engine, from the first `flush`, `poll` or `wait` on: an engine may be made on
//!    another thread, but must stay on the thread that used it first. An engine that cannot work on another
//!    thread returns [`IoErrorKind::Device`] from then on, and completes the requests that the kernel has not
//!    got with that error. `poll` takes a budget and returns at once; `wait` sleeps. A [`Waker`] ends its sleep
//!    from another thread.

mod check;
mod error;
pub mod faulty;
pub mod files;
mod memory;
pub mod passthrough;
pub mod pread;
mod request;
pub mod ring;
pub mod testing;
pub mod uring;
mod wake;

pub use error::{IoError, IoErrorKind, kind_of_errno};
pub use request::{Buffer, Completion, Full, Operation, PageBuffer, Request};
pub use wake::Parking;

use std::sync::Arc;
use std::time::Instant;

use dataplane_memory::Slab;

/// Limits of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Alignment of offsets, lengths and addresses, a power of two.
    pub block_bytes: usize,
    /// Maximum length of a request, in bytes.
    pub transfer_bytes_max: usize,
    /// Maximum number of requests queued or in flight.
    pub depth_max: usize,
    /// Bytes of each file or device, by its number.
    pub files: Vec<u64>,
}

/// Ends the sleep of [`IoEngine::wait`], or the next one if no thread sleeps.
pub trait Waker: Send + Sync {
    /// Ends the present sleep, or the next one.
    fn wake(&self);
}

/// A way to do I/O, driven by one thread.
pub trait IoEngine: Send {
    /// Short name for logs, metrics and benchmarks: `io_uring`, `pread`, `nvme_passthrough`, `nvme_user`, `spdk`.
    fn name(&self) -> &'static str;

    /// Limits of this engine. Constant while the engine lives.
    fn geometry(&self) -> &Geometry;

    /// Registers memory that buffers will come from, so that it can be pinned and mapped once. An engine for
    /// which this fails must still accept the buffers, unless the error is of kind [`IoErrorKind::Unmapped`].
    fn register(&mut self, slab: &Arc<Slab>) -> Result<(), IoError>;

    /// Queues one request. Call [`IoEngine::flush`] after a batch.
    fn submit(&mut self, request: Request) -> Result<(), Full>;

    /// Hands over all requests that were queued since the last call.
    fn flush(&mut self) -> Result<(), IoError>;

    /// Moves at most `budget` completions into `completions`; returns their number.
    fn poll(&mut self, budget: usize, completions: &mut Vec<Completion>) -> usize;

    /// Sleeps until `poll` would find a completion, until woken, or until the given time; may return early.
    /// Hands over queued requests first, so that a batch and the sleep after it can cost one system call.
    fn wait(&mut self, until: Option<Instant>) -> Result<(), IoError>;

    /// Ends the sleep of `wait` from another thread.
    fn waker(&self) -> Arc<dyn Waker>;

    /// Number of requests that were accepted and have not completed.
    fn in_flight(&self) -> usize;

    /// Puts every completed write of this file on stable storage. Blocks.
    fn sync(&mut self, file: u32) -> Result<(), IoError>;
}
