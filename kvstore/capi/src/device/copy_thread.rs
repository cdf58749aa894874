//! The thread of one direction of a device, which carries out transfers, one after the other.
//!
//! Between two transfers all its staging slots are free and none of its requests is in flight in the
//! store. If the store has stopped or the thread has panicked within a transfer, the thread is broken and later
//! transfers fail.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;

use dataplane_cuda::DeviceSlab;
use dataplane_gpu::KernelQueue;
use dataplane_memory::SlotRef;
use kvstore_store::StoreEvent;

use super::launch::wait_after_panic;
use super::prepared::{CopyThreadResources, StoredReportFlag};
use super::{DeviceEvent, StagingRoutes, failed};
use crate::operation::Outcome;
use crate::queue::Completions;
use crate::status::{Failure, Status};
use crate::store::StoreBackend;
use crate::transfer::{Blocks, Direction};

/// A transfer of blocks in a device's memory that the queue has admitted.
pub(crate) struct Job {
    pub(crate) user: u64,
    pub(crate) what: Blocks,
    pub(crate) event: DeviceEvent,
}

/// State of a copy thread.
pub(super) struct CopyThread {
    pub(super) direction: usize,
    pub(super) queue: KernelQueue,
    staging: Arc<DeviceSlab>,
    pub(super) moved: Receiver<StoreEvent>,
    pub(super) listening: StoredReportFlag,
    pub(super) store: Arc<StoreBackend>,
    completions: Completions,
    is_closing: Arc<AtomicBool>,
    /// Id of the tensors whose blocks the staging slots held last.
    last: u64,
    /// Whether requests of an earlier transfer may still be in flight.
    pub(super) is_broken: bool,
    /// Number of the next request to the store.
    pub(super) next_request: u64,
}

impl CopyThread {
    pub(super) fn new(
        direction: usize,
        prepared: CopyThreadResources,
        listening: StoredReportFlag,
        store: Arc<StoreBackend>,
        completions: Completions,
        is_closing: Arc<AtomicBool>,
    ) -> Self {
        let CopyThreadResources { queue, staging, moved } = prepared;
        Self {
            direction,
            queue,
            staging,
            moved,
            listening,
            store,
            completions,
            is_closing,
            last: 0,
            is_broken: false,
            next_request: 0,
        }
    }

    /// Carries out transfers until the channel is closed.
    pub(super) fn work(&mut self, jobs: &Receiver<Job>) {
        while let Ok(job) = jobs.recv() {
            if self.is_closing() {
                continue;
            }
            let Job { user, what, .. } = &job;
            let (user, identities) = (*user, what.identities.len());
            let done = catch_unwind(AssertUnwindSafe(|| self.carry_out(&job)));
            let outcome = done.unwrap_or_else(|_| {
                self.is_broken = true;
                wait_after_panic(&mut self.queue);
                Err(Failure::new(Status::Panicked, "a bug in a device's transfer"))
            });
            // Releases the tensors, so that a waiting unregistration can proceed.
            drop(job);
            self.completions.complete(user, identities, outcome);
        }
    }

    pub(super) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Relaxed)
    }

    fn carry_out(&mut self, job: &Job) -> Result<Outcome, Failure> {
        if self.is_broken {
            return Err(Failure::new(Status::Failed, "an earlier transfer has broken off in its middle"));
        }
        let tensors = &job.what.tensors;
        let Some(places) = tensors.places() else {
            return Err(Failure::new(Status::Panicked, "tensors without a place on the device"));
        };
        let places = &places[self.direction];
        if self.last != tensors.id() {
            // Block heads are zeros, but the slots hold bytes of other tensors' blocks.
            self.staging.fill(0).map_err(|error| failed("staging slots", &error))?;
            self.last = tensors.id();
        }
        // SAFETY: the submitter promised that the event lives until the completion is polled.
        unsafe { job.event.wait_on(self.queue.stream()) }?;
        let moved = match job.what.direction {
            Direction::Save => self.save(places, &job.what)?,
            Direction::Load => self.load(places, &job.what)?,
        };
        Ok(job.what.outcome(moved))
    }

    /// Acquires `count` free staging slots.
    pub(super) fn slots(&mut self, places: &StagingRoutes, count: usize) -> Result<Vec<SlotRef>, Failure> {
        let slots: Vec<SlotRef> = (0..count).map_while(|_| places.pool.acquire()).collect();
        if slots.len() < count {
            self.is_broken = true;
            return Err(Failure::new(Status::Failed, "staging slots are missing"));
        }
        Ok(slots)
    }

    /// Waits for the next report of the store's thread to this thread.
    pub(super) fn next_report(&mut self) -> Result<StoreEvent, Failure> {
        let moved = self.store.answer("transfer", &self.moved);
        moved.map_err(|_| self.stopped())
    }

    /// Marks the thread broken: the store no longer answers, and may still use its slots.
    pub(super) fn stopped(&mut self) -> Failure {
        self.is_broken = true;
        Failure::new(Status::Failed, "the store has stopped")
    }
}
