//! The thread that drives a node: it spins for a moment while there is work, then sleeps on the fabric's
//! descriptors and the command bell until something comes or a deadline passes. It waits for no fixed timer, but for
//! one case: what did not fit into a peer's queue is tried again after [`RETRY_FULL_AFTER`]. While a device copies or sums
//! it does not sleep either: that is for a moment, and nothing rings at its end.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use dataplane_fabric::{Fabric, Sleeper};
use dataplane_memory::{Copier, HostCopier};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use crate::node::{Command, Notice, TransferNode};
use crate::staging::Staging;

/// Commands that may wait for the thread.
const COMMANDS_MAX: usize = 16_384;
/// Commands that one round takes.
const ROUND_COMMANDS_MAX: usize = 64;
/// Empty polls before the thread sleeps. Short: the cores are shared with the engine.
const IDLE_POLLS: u32 = 64;

/// How long what did not fit waits before it is tried again.
const RETRY_FULL_AFTER: Duration = Duration::from_millis(1);

/// The thread could not be started.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// No eventfd.
    #[error("transfer service: eventfd: {0}")]
    Eventfd(rustix::io::Errno),
    /// No thread.
    #[error("transfer service: thread: {0}")]
    Thread(std::io::Error),
}

/// What the thread drives.
struct Driven<F, C> {
    node: TransferNode<F>,
    staging: Option<Staging<C>>,
}

impl<F: Fabric, C: Copier> Driven<F, C> {
    fn handle(&mut self, command: Command, now: Instant) {
        match &mut self.staging {
            Some(staging) => staging.handle(&mut self.node, command, now),
            None => self.node.handle(command, now),
        }
    }

    fn poll(&mut self, now: Instant, notices: &mut Vec<Notice>) -> usize {
        match &mut self.staging {
            Some(staging) => staging.poll(&mut self.node, now, notices),
            None => self.node.poll(now, notices),
        }
    }

    /// Whether something ends without ringing.
    fn is_device_busy(&self) -> bool {
        self.node.sums_in_flight() > 0 || self.staging.as_ref().is_some_and(|staging| staging.in_flight() > 0)
    }

    fn has_backlog(&self) -> bool {
        self.node.has_backlog() || self.staging.as_ref().is_some_and(Staging::has_backlog)
    }
}

struct Mailbox {
    commands: ArrayQueue<Command>,
    bell: OwnedFd,
    /// Set when the fabric has a faster sleep than on descriptors.
    sleeper: Option<Arc<dyn Sleeper>>,
    sleeping: AtomicBool,
    stop: AtomicBool,
}

impl Mailbox {
    fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.sleeping.swap(false, Ordering::Relaxed) {
            match &self.sleeper {
                Some(sleeper) => sleeper.wake(),
                // Fails only when the counter is at its maximum, and then the thread is being woken anyway.
                None => drop(rustix::io::write(&self.bell, &1_u64.to_ne_bytes())),
            }
        }
    }
}

/// Handle to the thread. Dropping it stops the thread and closes its connections.
pub struct TransferService {
    mailbox: Arc<Mailbox>,
    thread: Option<JoinHandle<()>>,
}

impl TransferService {
    /// Starts the thread. `notify` is called on it for each notice and must not block.
    pub fn start<F: Fabric + Send + 'static>(
        node: TransferNode<F>,
        notify: impl FnMut(Notice) + Send + 'static,
    ) -> Result<Self, ServiceError> {
        Self::drive(Driven { node, staging: None::<Staging<HostCopier>> }, notify)
    }

    /// The same for a node whose hand-offs may lie in a device's memory. The thread does not sleep while copies are
    /// under way.
    pub fn start_staged<F: Fabric + Send + 'static, C: Copier + 'static>(
        node: TransferNode<F>,
        staging: Staging<C>,
        notify: impl FnMut(Notice) + Send + 'static,
    ) -> Result<Self, ServiceError> {
        Self::drive(Driven { node, staging: Some(staging) }, notify)
    }

    fn drive<F: Fabric + Send + 'static, C: Copier + 'static>(
        mut driven: Driven<F, C>,
        mut notify: impl FnMut(Notice) + Send + 'static,
    ) -> Result<Self, ServiceError> {
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(ServiceError::Eventfd)?;
        let mailbox = Arc::new(Mailbox {
            commands: ArrayQueue::new(COMMANDS_MAX),
            bell,
            sleeper: driven.node.fabric().sleeper(),
            sleeping: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let inbox = Arc::clone(&mailbox);
        let thread = std::thread::Builder::new()
            .name("kvasir-transfer".to_owned())
            .spawn(move || run(&mut driven, &inbox, &mut notify))
            .map_err(ServiceError::Thread)?;
        Ok(Self { mailbox, thread: Some(thread) })
    }

    /// Whether the thread has ended, which it does by a panic only.
    #[must_use]
    pub fn has_stopped(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Hands a command to the thread; it comes back when too many wait.
    pub fn submit(&self, command: Command) -> Result<(), Command> {
        self.mailbox.commands.push(command)?;
        self.mailbox.ring();
        Ok(())
    }
}

impl Drop for TransferService {
    fn drop(&mut self) {
        self.mailbox.stop.store(true, Ordering::Relaxed);
        self.mailbox.ring();
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed; there is nobody to hand it to.
            let _panicked = thread.join();
        }
    }
}

fn run<F: Fabric, C: Copier>(driven: &mut Driven<F, C>, mailbox: &Mailbox, notify: &mut impl FnMut(Notice)) {
    let mut notices = Vec::new();
    let mut idle_polls = 0;
    while !mailbox.stop.load(Ordering::Relaxed) {
        let now = Instant::now();
        let mut work = 0;
        while work < ROUND_COMMANDS_MAX
            && let Some(command) = mailbox.commands.pop()
        {
            driven.handle(command, now);
            work += 1;
        }
        work += driven.poll(now, &mut notices);
        notices.drain(..).for_each(&mut *notify);
        if work > 0 {
            idle_polls = 0;
            continue;
        }
        idle_polls += 1;
        if idle_polls >= IDLE_POLLS && !driven.is_device_busy() {
            sleep(driven, mailbox);
            idle_polls = 0;
        } else {
            std::thread::yield_now();
        }
    }
}

/// Sleeps until there is something to do. The order of the steps is that of `Ring::prepare_sleep`: announce,
/// fence, look again.
fn sleep<F: Fabric, C: Copier>(driven: &mut Driven<F, C>, mailbox: &Mailbox) {
    mailbox.sleeping.store(true, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    let idle = mailbox.commands.is_empty() && !mailbox.stop.load(Ordering::Relaxed);
    if idle && driven.node.fabric_mut().prepare_wait() {
        // The other end of a full queue does not ring: look again soon.
        let retry = driven.has_backlog().then(|| Instant::now() + RETRY_FULL_AFTER);
        let until = driven.node.next_deadline().into_iter().chain(retry).min();
        match &mailbox.sleeper {
            Some(sleeper) => sleeper.sleep(until),
            None => {
                let mut descriptors = vec![mailbox.bell.as_fd()];
                driven.node.fabric().wait_descriptors(&mut descriptors);
                wait(&descriptors, until);
            }
        }
    }
    mailbox.sleeping.store(false, Ordering::Relaxed);
    // An empty bell reads as EAGAIN.
    let _empty = rustix::io::read(&mailbox.bell, &mut [0_u8; 8]);
}

fn wait(descriptors: &[BorrowedFd<'_>], until: Option<Instant>) {
    let mut polled: Vec<PollFd<'_>> =
        descriptors.iter().map(|fd| PollFd::new(fd, PollFlags::IN | PollFlags::HUP)).collect();
    let timeout = until.map(|until| {
        let left = until.saturating_duration_since(Instant::now());
        Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
    });
    // EINTR is as good as an event: the loop looks again.
    let _interrupted = rustix::event::poll(&mut polled, timeout.as_ref());
}
