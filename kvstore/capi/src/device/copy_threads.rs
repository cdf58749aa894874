//! [`CopyThreads`]: the load and save directions of a device.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use dataplane_cuda::{Device, DeviceSlab};

use super::copy_thread::{CopyThread, Job};
use super::prepared::Prepared;
use super::{LOAD, SAVE, StagingRoutes, failed};
use crate::lock::lock;
use crate::queue::Completions;
use crate::status::{Failure, Status};
use crate::store::StoreBackend;
use crate::tensors::{Memory, PagedTensors};
use crate::transfer::Direction;

/// Both directions of a device.
pub(crate) struct CopyThreads {
    device: Device,
    staging: [Arc<DeviceSlab>; 2],
    jobs: Mutex<Option<[Sender<Job>; 2]>>,
    is_closing: Arc<AtomicBool>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl CopyThreads {
    /// Starts a thread for each direction.
    pub(crate) fn start(
        prepared: Prepared,
        store: &Arc<StoreBackend>,
        completions: &Completions,
    ) -> Result<Self, Failure> {
        let Prepared { device, copy_threads, listening, .. } = prepared;
        let staging = copy_threads.each_ref().map(|copy_thread| Arc::clone(&copy_thread.staging));
        let ((save, saves), (load, loads)) = (channel(), channel());
        let is_closing = Arc::new(AtomicBool::new(false));
        // If starting a thread fails, dropping this ends the threads that were started.
        let started = Self {
            device,
            staging,
            jobs: Mutex::new(Some([save, load])),
            is_closing: Arc::clone(&is_closing),
            threads: Mutex::default(),
        };
        for ((direction, jobs), copy_thread) in [(SAVE, saves), (LOAD, loads)].into_iter().zip(copy_threads) {
            let (completions, is_closing) = (completions.clone(), Arc::clone(&is_closing));
            let mut copy_thread = CopyThread::new(
                direction,
                copy_thread,
                listening.clone(),
                Arc::clone(store),
                completions,
                is_closing,
            );
            let name = ["kvasir-kv-save", "kvasir-kv-load"][direction];
            let thread =
                std::thread::Builder::new().name(name.to_owned()).spawn(move || copy_thread.work(&jobs));
            lock(&started.threads).push(thread.map_err(|error| failed("start a thread", &error))?);
        }
        Ok(started)
    }

    /// Creates the places of tensors in both threads.
    ///
    /// # Safety
    /// As for [`StagingRoutes::new`].
    pub(crate) unsafe fn places(&self, tensors: &PagedTensors) -> Result<[StagingRoutes; 2], Failure> {
        let ordinal = self.device.description().ordinal;
        if tensors.memory() != Memory::Cuda(ordinal) {
            let text = format!("device is not {ordinal}, which is device.ordinal of the configuration");
            return Err(Failure::new(Status::InvalidArgument, text));
        }
        let [save, load] = &self.staging;
        // SAFETY: handed on to the caller.
        unsafe { StagingRoutes::new(&self.device, [save, load], tensors) }
    }

    /// Submits a transfer. Its completion follows, unless the threads are closed before.
    ///
    /// # Safety
    /// The blocks and the event must be usable as the header says until the transfer's completion is polled or
    /// [`Self::close`] returns.
    pub(crate) unsafe fn submit(&self, job: Job) {
        let copy_thread = if job.what.direction == Direction::Save { SAVE } else { LOAD };
        if let Some(jobs) = &*lock(&self.jobs) {
            // A thread ends only when the threads are closed.
            let _closed = jobs[copy_thread].send(job);
        }
    }

    /// Drops transfers that have not begun, and waits for the rounds in flight.
    pub(crate) fn close(&self) {
        // Pairs with no other operation: the threads only have to see the flag eventually.
        self.is_closing.store(true, Ordering::Relaxed);
        drop(lock(&self.jobs).take());
        for thread in lock(&self.threads).drain(..) {
            // Panics are caught inside the thread.
            let _ = thread.join();
        }
    }
}

impl Drop for CopyThreads {
    fn drop(&mut self) {
        self.close();
    }
}
