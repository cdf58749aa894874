//! The thread that attaches and detaches peers' slabs: calls of the driver that take milliseconds.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

use dataplane_fabric::PeerId;
use dataplane_memory::{AttachedSlab, DeviceError, DeviceSharing};
use rustix::event::EventfdFlags;

use crate::wire::Hello;

enum Job {
    Attach(PeerId, Hello),
    /// Dropped there: a driver may take its time.
    Detach(AttachedSlab),
}

pub(crate) type Attached = (PeerId, Result<AttachedSlab, DeviceError>);

#[derive(Debug)]
pub(crate) struct AttachThread {
    jobs: Option<Sender<Job>>,
    attached: Receiver<Attached>,
    /// Readable when something was attached, or was not.
    wakeup: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl AttachThread {
    pub(crate) fn start(sharing: Arc<dyn DeviceSharing>) -> std::io::Result<Self> {
        let wakeup = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (jobs, submitted) = mpsc::channel::<Job>();
        let (sender, attached) = mpsc::channel();
        let rings = Arc::clone(&wakeup);
        let run = move || {
            for job in submitted {
                match job {
                    Job::Attach(peer, hello) => {
                        // Nobody waits for it when the fabric is gone; it is dropped then.
                        let _gone = sender.send((peer, sharing.attach(&hello.exported, hello.layout)));
                        // Fails only when the counter is at its maximum, and then the fabric is being woken anyway.
                        let _full = rustix::io::write(&rings, &1_u64.to_ne_bytes());
                    }
                    Job::Detach(slab) => drop(slab),
                }
            }
        };
        let thread = std::thread::Builder::new().name("kvasir-ipc-attach".to_owned()).spawn(run)?;
        Ok(Self { jobs: Some(jobs), attached, wakeup, thread: Some(thread) })
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.wakeup.as_fd()
    }

    pub(crate) fn attach(&self, peer: PeerId, hello: Hello) {
        self.submit(Job::Attach(peer, hello));
    }

    pub(crate) fn detach(&self, slab: AttachedSlab) {
        self.submit(Job::Detach(slab));
    }

    fn submit(&self, job: Job) {
        if let Some(jobs) = &self.jobs {
            // A thread that panicked gives the job back, and it is dropped here.
            let _dead = jobs.send(job);
        }
    }

    /// What was attached since, or was not.
    pub(crate) fn take(&self) -> impl Iterator<Item = Attached> {
        // One that rings meanwhile is seen at the next look.
        let _empty = rustix::io::read(&self.wakeup, &mut [0_u8; 8]);
        self.attached.try_iter()
    }

    /// Whether its thread has panicked: nothing is attached any more.
    pub(crate) fn is_dead(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for AttachThread {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed; there is nobody to hand it to.
            let _panicked = thread.join();
        }
    }
}
