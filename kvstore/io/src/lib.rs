//! Reads and writes of aligned byte ranges on files and NVMe devices, behind one trait.
//!
//! An [`IoEngine`] is one way to do I/O: io_uring on files, NVMe commands through the kernel, queue pairs of a
//! device in user space, plain `pread`. Which bytes mean what is not known here: the log above
//! (`kvstore/disk`) decides that, on any of them.
//!
//! Contract of every implementation:
//! 1. `submit` never blocks and makes no system call; "full" hands the request back. `flush` hands everything that
//!    was queued to the kernel or the device: one system call or one doorbell for the batch.
//! 2. Each accepted request yields exactly one [`Completion`] with its buffer, in any order. Until then the engine
//!    owns the buffer, and with it a reference to the slot. Dropping an engine waits for what is in flight.
//! 3. `Ok` means that the whole range was read or written: short transfers are continued inside. A write that
//!    completed is read back by every later read, of this process or the next; it is on stable storage after a
//!    `sync` that began later.
//! 4. Requests that are under way at the same time are not ordered, overlapping or not.
//! 5. Offsets, lengths and addresses are multiples of [`Geometry::block_bytes`], lengths from one block to
//!    [`Geometry::transfer_bytes_max`], ranges inside their file. Anything else completes with
//!    [`IoErrorKind::Invalid`], without I/O.
//! 6. One thread drives an engine, from the first `flush`, `poll` or `wait` on: it may be made on another thread, and
//!    must stay where it was used first. An engine that cannot work for another thread says so at once, with
//!    [`IoErrorKind::Device`] from then on, and completes what the kernel has not got with that error. `poll` takes a
//!    budget and returns at once; `wait` sleeps. A [`Waker`] ends its sleep from another thread.

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

/// What an engine can take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Offsets, lengths and addresses are multiples of this, a power of two.
    pub block_bytes: usize,
    /// The longest request, in bytes.
    pub transfer_bytes_max: usize,
    /// Requests that may be queued or in flight.
    pub depth_max: usize,
    /// Bytes of each file (or device), by its number.
    pub files: Vec<u64>,
}

/// Ends the sleep of [`IoEngine::wait`], or the next one when nobody sleeps.
pub trait Waker: Send + Sync {
    /// See the trait.
    fn wake(&self);
}

/// One way to do I/O, driven by one thread.
pub trait IoEngine: Send {
    /// Short name for logs, metrics and benchmarks: `io_uring`, `pread`, `nvme_passthrough`, `nvme_user`, `spdk`.
    fn name(&self) -> &'static str;

    /// What it takes. Constant while the engine lives.
    fn geometry(&self) -> &Geometry;

    /// Tells it of memory that buffers will come from, so that it can be pinned and mapped once. An engine for which
    /// this fails must take the buffers all the same, unless the error is of kind [`IoErrorKind::Unmapped`].
    fn register(&mut self, slab: &Arc<Slab>) -> Result<(), IoError>;

    /// Queues one request. Call [`IoEngine::flush`] after a batch.
    fn submit(&mut self, request: Request) -> Result<(), Full>;

    /// Hands over what was queued since the last call.
    fn flush(&mut self) -> Result<(), IoError>;

    /// Moves at most `budget` completions into `completions`; returns how many.
    fn poll(&mut self, budget: usize, completions: &mut Vec<Completion>) -> usize;

    /// Sleeps until `poll` would find something, until woken, or until the moment given; may return early. Hands over
    /// what was queued first, so that a batch and the sleep after it can cost one system call.
    fn wait(&mut self, until: Option<Instant>) -> Result<(), IoError>;

    /// Ends the sleep of `wait` from another thread.
    fn waker(&self) -> Arc<dyn Waker>;

    /// Requests that were accepted and have not completed.
    fn in_flight(&self) -> usize;

    /// Puts every write of this file that has completed on stable storage. Blocks.
    fn sync(&mut self, file: u32) -> Result<(), IoError>;

    /// Tells the device that the range's contents are not needed (TRIM, hole punching); what is read there later is
    /// undefined. Blocks; returns whether the device was told.
    fn discard(&mut self, file: u32, offset: u64, bytes: u64) -> Result<bool, IoError>;
}
