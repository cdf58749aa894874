//! Tensors in CUDA memory: blocks pass through a staging slot of the device on their way to the store and back.
//!
//! ```text
//! engine's planes ── gather kernel ──> staging slot ── DMA ──> host tier ──> disk      a save
//! engine's planes <── scatter kernel ── staging slot <── DMA ── host tier <── disk      a load
//! ```
//!
//! A staging slot has a block in the form in which the store keeps it: the head of `format`, without meta, then
//! the planes. The store's thread starts the copies; it can do so because the staging memory is created before
//! the store. The device computes the checksum of a staging slot and compares it there with the store's,
//! because one processor thread sums at a third of the bus bandwidth at best. Saves and loads have a thread each:
//! a thread, a stream and half of the staging memory, so that a load, which a request waits for, never queues
//! behind a save, which no request waits for. A thread carries out one transfer after the other, in rounds: of as
//! many blocks as it has slots (a save: kernels, then the copies), or of half as many, two at a time (a load:
//! the copies, then kernels). A kernel moves bytes within the device's memory tens of times faster than the
//! bus.
//!
//! A failure of the device is permanent: later transfers fail, and blocks in the store are unchanged.

mod copy_thread;
mod copy_threads;
mod launch;
mod load;
mod places;
mod prepared;
mod save;

pub(crate) use copy_thread::Job;
pub(crate) use copy_threads::CopyThreads;
pub(crate) use launch::{launch, wait_after_panic};
pub(crate) use places::{GROUPS_MAX, Group, ITEMS_MAX, StagingRoutes};
pub(crate) use prepared::{MakeKernels, Prepared, Reports, open_device, place_of};

use std::ffi::c_void;

use dataplane_cuda::Stream;

use crate::status::{Failure, Status};

/// The directions, as indices.
const SAVE: usize = 0;
const LOAD: usize = 1;

/// Null, or a device event recorded behind earlier work on the blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceEvent(pub(crate) *mut c_void);

// SAFETY: the driver allows any thread to use an event, and this library never dereferences it.
unsafe impl Send for DeviceEvent {}

impl DeviceEvent {
    /// Makes a stream wait for the event, if there is one.
    ///
    /// # Safety
    /// The event must not have been destroyed.
    pub(crate) unsafe fn wait_on(self, stream: &Stream) -> Result<(), Failure> {
        if self.0.is_null() {
            return Ok(());
        }
        // SAFETY: handed on to the caller.
        let waits = unsafe { stream.wait_for_event(self.0) };
        waits.map_err(|error| failed("event", &error))
    }
}

pub(crate) fn failed(what: &str, error: &dyn std::fmt::Display) -> Failure {
    Failure::new(Status::Failed, format!("{what}: {error}"))
}
