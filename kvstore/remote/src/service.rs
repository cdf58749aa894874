//! The thread that runs a pool node: when idle it polls for a short time, then sleeps on the fabric's
//! descriptors until an event arrives, the blocks call its notifier or a lease expires ([`dataplane_fabric::wait`]).
//! The only fixed interval is for messages that did not fit into a client's queue: they are tried again after
//! [`RETRY_FULL_AFTER`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dataplane_fabric::Fabric;
use dataplane_fabric::wait::{Notifier, ThreadPolicy, Waiter};

use crate::{PoolBlocks, PoolCounters, PoolServer, RemoteError};

const RETRY_FULL_AFTER: Duration = Duration::from_millis(1);

struct Stop {
    asked: AtomicBool,
    notifier: Arc<Notifier>,
}

/// Handle to the thread. Dropping it stops the thread and closes its connections.
pub struct PoolService {
    stop: Arc<Stop>,
    counters: Arc<PoolCounters>,
    thread: Option<JoinHandle<()>>,
}

impl PoolService {
    /// Starts the thread.
    pub fn start<F: Fabric + Send + 'static, B: PoolBlocks + Send + 'static>(
        mut server: PoolServer<F, B>,
        policy: ThreadPolicy,
    ) -> Result<Self, RemoteError> {
        let notifier =
            Notifier::new().map_err(|error| RemoteError::System { operation: "eventfd", error })?;
        server.set_notifier(Arc::clone(&notifier));
        let stop = Arc::new(Stop { asked: AtomicBool::new(false), notifier });
        let counters = Arc::clone(server.counters());
        let seen = Arc::clone(&stop);
        let thread = policy
            .spawn("kvasir-pool", &stop.notifier, move |waiter| run(&mut server, &seen, waiter))
            .map_err(|error| RemoteError::System { operation: "thread", error })?;
        Ok(Self { stop, counters, thread: Some(thread) })
    }

    /// Whether the thread has ended, which happens only by a panic.
    #[must_use]
    pub fn has_stopped(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Counters of the server.
    #[must_use]
    pub fn counters(&self) -> &Arc<PoolCounters> {
        &self.counters
    }
}

impl Drop for PoolService {
    fn drop(&mut self) {
        // Stored before the notification: the thread reads it after each sleep.
        self.stop.asked.store(true, Ordering::Release);
        self.stop.notifier.notify();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed already.
            let _panicked = thread.join();
        }
    }
}

fn run<F: Fabric, B: PoolBlocks>(server: &mut PoolServer<F, B>, stop: &Stop, mut waiter: Waiter) {
    // Acquire: pairs with the release in `drop`.
    while !stop.asked.load(Ordering::Acquire) {
        if server.poll(Instant::now()) > 0 {
            waiter.worked();
        } else if !waiter.should_poll() {
            waiter.announce();
            let may_sleep = !stop.asked.load(Ordering::Acquire) && !server.has_answers();
            if may_sleep && server.fabric_mut().prepare_wait() {
                // A peer that makes room in a full queue sends no notification: retry soon.
                let retry = server.has_backlog().then(|| Instant::now() + RETRY_FULL_AFTER);
                let until = server.next_deadline().into_iter().chain(retry).min();
                waiter.sleep(server.fabric(), until);
            }
            waiter.retract();
        }
    }
}
