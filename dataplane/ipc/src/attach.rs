//! The thread that attaches and detaches peers' slabs, because these driver calls take milliseconds.
//!
//! A connection has one job at a time, so the queue holds at most as many jobs as there are connections.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::thread::JoinHandle;

use dataplane_fabric::PeerId;
use dataplane_memory::{AttachedSlab, DeviceError, DeviceSharing, SlotPool, SlotRef};
use rustix::event::EventfdFlags;

use crate::wire::Hello;

/// The slab of a peer, as requests use it.
#[derive(Debug)]
pub(crate) struct PeerSlab {
    /// All slots, by number. Only requests hold further references to them. Dropped first.
    pub(crate) slots: Vec<SlotRef>,
    pub(crate) attached: AttachedSlab,
}

enum Job {
    Attach(PeerId, Hello),
    Detach(PeerId, PeerSlab),
}

/// The result of a job.
#[derive(Debug)]
pub(crate) enum Done {
    Attached(PeerId, Result<PeerSlab, DeviceError>),
    Detached(PeerId),
}

#[derive(Debug)]
pub(crate) struct AttachThread {
    jobs: Option<Sender<Job>>,
    done: Receiver<Done>,
    /// Readable when a job is complete or the thread has ended; sometimes readable without either.
    wakeup: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// The thread's side. Fields are dropped in order: the fabric is woken after `done` is closed, so that it
/// sees the end.
struct Worker {
    done: Sender<Done>,
    wakeup: WakeOnDrop,
}

struct WakeOnDrop(Arc<OwnedFd>);

impl WakeOnDrop {
    fn wake(&self) {
        // Fails only when the counter is at its maximum, and then the fabric is being woken anyway.
        let _full = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        self.wake();
    }
}

impl AttachThread {
    pub(crate) fn start(sharing: Arc<dyn DeviceSharing>) -> std::io::Result<Self> {
        let wakeup = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (jobs, submitted) = mpsc::channel::<Job>();
        let (sender, done) = mpsc::channel();
        let worker = Worker { done: sender, wakeup: WakeOnDrop(Arc::clone(&wakeup)) };
        let run = move || {
            let worker = worker;
            for job in submitted {
                // Fails when the fabric has been dropped; the result is then dropped too.
                let _gone = worker.done.send(carry_out(job, &*sharing));
                worker.wakeup.wake();
            }
        };
        let thread = std::thread::Builder::new().name("kvasir-ipc-attach".to_owned()).spawn(run)?;
        Ok(Self { jobs: Some(jobs), done, wakeup, thread: Some(thread) })
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.wakeup.as_fd()
    }

    /// Submits an attach job; [`Done::Attached`] follows. False when the thread has panicked.
    pub(crate) fn attach(&self, peer: PeerId, hello: Hello) -> bool {
        self.submit(Job::Attach(peer, hello))
    }

    /// Submits a detach job; [`Done::Detached`] follows when the driver has closed the memory. The slab must
    /// have no copy in flight. False when the thread has panicked, and the memory was closed here.
    pub(crate) fn detach(&self, peer: PeerId, slab: PeerSlab) -> bool {
        self.submit(Job::Detach(peer, slab))
    }

    fn submit(&self, job: Job) -> bool {
        // After a panic of the thread, `send` returns the job, which is dropped here.
        self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok())
    }

    /// Returns a completed job; `Err` when the thread has panicked and no further job will complete.
    pub(crate) fn next(&self) -> Result<Option<Done>, ()> {
        match self.done.try_recv() {
            Ok(done) => Ok(Some(done)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(()),
        }
    }

    /// Clears the wake-up, so that later completions wake a sleeper. Call [`Self::next`] after it.
    pub(crate) fn clear(&self) {
        let _empty = rustix::io::read(&self.wakeup, &mut [0_u8; 8]);
    }
}

fn carry_out(job: Job, sharing: &dyn DeviceSharing) -> Done {
    match job {
        Job::Attach(peer, hello) => {
            let attached = sharing.attach(&hello.exported, hello.layout);
            Done::Attached(peer, attached.map(PeerSlab::new))
        }
        Job::Detach(peer, slab) => {
            drop(slab);
            Done::Detached(peer)
        }
    }
}

impl PeerSlab {
    fn new(attached: AttachedSlab) -> Self {
        let pool = SlotPool::new(attached.slab.clone());
        let mut slots: Vec<SlotRef> = std::iter::from_fn(|| pool.acquire()).collect();
        slots.sort_by_key(SlotRef::slot);
        Self { slots, attached }
    }
}

impl Drop for AttachThread {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // The panic message has been printed; the panic is not propagated.
            let _panicked = thread.join();
        }
    }
}
