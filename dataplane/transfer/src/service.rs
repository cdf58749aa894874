//! The thread that drives a node: without work it polls for a moment, then sleeps on the fabric's
//! descriptors and the commands' notifier until an event arrives or a deadline passes
//! ([`dataplane_fabric::wait`]). There is no fixed timer, with one exception: posting to a peer's full
//! queue is retried after [`RETRY_FULL_AFTER`]. While a device copies or checksums, the thread does not
//! sleep: the operations are short, and their completion is not signalled.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use dataplane_fabric::Fabric;
use dataplane_fabric::wait::{Notifier, ThreadPolicy, Waiter};
use dataplane_memory::{Copier, HostCopier};

use crate::node::{Command, Notice, TransferNode};
use crate::staging::Staging;

/// Commands that may wait for the thread.
const COMMANDS_MAX: usize = 16_384;
/// Commands that one round takes.
const ROUND_COMMANDS_MAX: usize = 64;
/// Delay after which posting to a full queue is retried.
const RETRY_FULL_AFTER: Duration = Duration::from_millis(1);

/// The thread could not be started.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The eventfd could not be created.
    #[error("transfer service: eventfd: {0}")]
    Eventfd(std::io::Error),
    /// The thread could not be created or pinned to its cores.
    #[error("transfer service: thread: {0}")]
    Thread(std::io::Error),
}

/// The node, and the staging around it, that the thread drives.
struct NodeWithStaging<F, C> {
    node: TransferNode<F>,
    staging: Option<Staging<C>>,
}

impl<F: Fabric, C: Copier> NodeWithStaging<F, C> {
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

    /// Whether device operations are in flight whose completion is not signalled.
    fn is_device_busy(&self) -> bool {
        self.node.sums_in_flight() > 0 || self.staging.as_ref().is_some_and(|staging| staging.in_flight() > 0)
    }

    fn has_backlog(&self) -> bool {
        self.node.has_backlog() || self.staging.as_ref().is_some_and(Staging::has_backlog)
    }
}

struct Mailbox {
    commands: ArrayQueue<Command>,
    notifier: Arc<Notifier>,
    stop: AtomicBool,
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
        policy: ThreadPolicy,
        notify: impl FnMut(Notice) + Send + 'static,
    ) -> Result<Self, ServiceError> {
        Self::drive(NodeWithStaging { node, staging: None::<Staging<HostCopier>> }, policy, notify)
    }

    /// [`Self::start`] for a node whose hand-offs may lie in a device's memory. The thread does not sleep
    /// while copies are in flight.
    pub fn start_staged<F: Fabric + Send + 'static, C: Copier + 'static>(
        node: TransferNode<F>,
        staging: Staging<C>,
        policy: ThreadPolicy,
        notify: impl FnMut(Notice) + Send + 'static,
    ) -> Result<Self, ServiceError> {
        Self::drive(NodeWithStaging { node, staging: Some(staging) }, policy, notify)
    }

    fn drive<F: Fabric + Send + 'static, C: Copier + 'static>(
        mut driven: NodeWithStaging<F, C>,
        policy: ThreadPolicy,
        mut notify: impl FnMut(Notice) + Send + 'static,
    ) -> Result<Self, ServiceError> {
        let notifier = Notifier::new().map_err(ServiceError::Eventfd)?;
        let (commands, stop) = (ArrayQueue::new(COMMANDS_MAX), AtomicBool::new(false));
        let mailbox = Arc::new(Mailbox { commands, notifier, stop });
        let inbox = Arc::clone(&mailbox);
        let thread = policy
            .spawn("kvasir-transfer", &mailbox.notifier, move |waiter| {
                run(&mut driven, &inbox, waiter, &mut notify)
            })
            .map_err(ServiceError::Thread)?;
        Ok(Self { mailbox, thread: Some(thread) })
    }

    /// Whether the thread has ended, which only a panic causes.
    #[must_use]
    pub fn has_stopped(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Submits a command to the thread; returns the command when the queue is full.
    pub fn submit(&self, command: Command) -> Result<(), Command> {
        self.mailbox.commands.push(command)?;
        self.mailbox.notifier.notify();
        Ok(())
    }
}

impl Drop for TransferService {
    fn drop(&mut self) {
        self.mailbox.stop.store(true, Ordering::Relaxed);
        self.mailbox.notifier.notify();
        if let Some(thread) = self.thread.take() {
            // The panic was printed by the thread; drop has no caller to report it to.
            let _panicked = thread.join();
        }
    }
}

fn run<F: Fabric, C: Copier>(
    driven: &mut NodeWithStaging<F, C>,
    mailbox: &Mailbox,
    mut waiter: Waiter,
    notify: &mut impl FnMut(Notice),
) {
    let mut notices = Vec::new();
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
            waiter.worked();
        } else if driven.is_device_busy() {
            std::thread::yield_now();
        } else if !waiter.should_poll() {
            sleep(driven, mailbox, &mut waiter);
        }
    }
}

/// Sleeps until an event, a command or a deadline.
fn sleep<F: Fabric, C: Copier>(driven: &mut NodeWithStaging<F, C>, mailbox: &Mailbox, waiter: &mut Waiter) {
    waiter.announce();
    let idle = mailbox.commands.is_empty() && !mailbox.stop.load(Ordering::Relaxed);
    if idle && driven.node.fabric_mut().prepare_wait() {
        // A full queue gives no signal when the peer drains it, so posting is retried soon.
        let retry = driven.has_backlog().then(|| Instant::now() + RETRY_FULL_AFTER);
        let until = driven.node.next_deadline().into_iter().chain(retry).min();
        waiter.sleep(driven.node.fabric(), until);
    }
    waiter.retract();
}
