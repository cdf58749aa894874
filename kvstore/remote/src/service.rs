//! The thread that runs a pool node: it polls while there is work, then sleeps on the fabric's descriptors until
//! something comes or a lease expires. It waits for no fixed timer, but for one case: what did not fit into a
//! client's queue is tried again after [`RETRY_FULL_AFTER`].

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dataplane_fabric::{Fabric, Sleeper};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use crate::{PoolCounters, PoolServer, RemoteError};

/// Empty polls before the thread sleeps.
const IDLE_POLLS: u32 = 64;
const RETRY_FULL_AFTER: Duration = Duration::from_millis(1);

struct Stop {
    asked: AtomicBool,
    bell: OwnedFd,
    /// Set when the fabric has a faster sleep than on descriptors.
    sleeper: Option<Arc<dyn Sleeper>>,
}

/// Handle to the thread. Dropping it stops the thread and closes its connections.
pub struct PoolService {
    stop: Arc<Stop>,
    counters: Arc<PoolCounters>,
    thread: Option<JoinHandle<()>>,
}

impl PoolService {
    /// Starts the thread.
    pub fn start<F: Fabric + Send + 'static>(mut server: PoolServer<F>) -> Result<Self, RemoteError> {
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| RemoteError::System { operation: "eventfd", error: errno.into() })?;
        let sleeper = server.fabric().sleeper();
        let stop = Arc::new(Stop { asked: AtomicBool::new(false), bell, sleeper });
        let counters = Arc::clone(server.counters());
        let seen = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("kvasir-pool".to_owned())
            .spawn(move || run(&mut server, &seen))
            .map_err(|error| RemoteError::System { operation: "thread", error })?;
        Ok(Self { stop, counters, thread: Some(thread) })
    }

    /// Whether the thread has ended, which it does by a panic only.
    #[must_use]
    pub fn has_stopped(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// What has happened so far.
    #[must_use]
    pub fn counters(&self) -> &Arc<PoolCounters> {
        &self.counters
    }
}

impl Drop for PoolService {
    fn drop(&mut self) {
        // Before the bell, which orders it: the thread looks at it after each sleep.
        self.stop.asked.store(true, Ordering::Release);
        match &self.stop.sleeper {
            Some(sleeper) => sleeper.wake(),
            // Fails only when the counter is at its maximum, and then the thread is being woken anyway.
            None => drop(rustix::io::write(&self.stop.bell, &1_u64.to_ne_bytes())),
        }
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed; there is nobody to hand it to.
            let _panicked = thread.join();
        }
    }
}

fn run<F: Fabric>(server: &mut PoolServer<F>, stop: &Stop) {
    let mut idle_polls = 0;
    // Acquire: pairs with the release in `drop`.
    while !stop.asked.load(Ordering::Acquire) {
        if server.poll(Instant::now()) > 0 {
            idle_polls = 0;
            continue;
        }
        idle_polls += 1;
        if idle_polls < IDLE_POLLS {
            std::thread::yield_now();
            continue;
        }
        idle_polls = 0;
        if server.fabric_mut().prepare_wait() {
            sleep(server, stop);
        }
    }
}

/// The bell and the sleeper remember a ring that comes before the sleep, so nothing is missed between the look at
/// `asked` and here.
fn sleep<F: Fabric>(server: &PoolServer<F>, stop: &Stop) {
    // The other end of a full queue does not ring: look again soon.
    let retry = server.has_backlog().then(|| Instant::now() + RETRY_FULL_AFTER);
    let until = server.next_deadline().into_iter().chain(retry).min();
    match &stop.sleeper {
        Some(sleeper) => sleeper.sleep(until),
        None => {
            let mut descriptors = vec![stop.bell.as_fd()];
            server.fabric().wait_descriptors(&mut descriptors);
            wait(&descriptors, until);
        }
    }
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
