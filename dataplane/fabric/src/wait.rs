//! Waiting of a thread that drives a fabric: it polls for a moment, and then sleeps in `poll(2)` on the
//! fabric's descriptors and a [`Notifier`] of other threads. [`WaitPolicy::Busy`] never sleeps.
//!
//! Polling does not yield: `sched_yield` gives the rest of a time slice away, and a thread that yields in each wait runs later at each
//! wake-up when something else computes on its processor (measured on Linux 6.18: 3.6 ms instead of 16 us).
//!
//! Costs: an idle poll reads the clock once; a sleep allocates two short lists. A notification costs a fence and an exchange, and a system call
//! only when the thread sleeps or is about to.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use crate::Fabric;
use crate::cores::Cores;

/// Longest time of polling before a sleep.
pub const SPIN_MAX: Duration = Duration::from_millis(1);
/// Longest sleep. A peer that shares memory with this process may overwrite the word that says that this
/// process sleeps; that delays a wake-up by at most this.
pub const SLEEP_MAX: Duration = Duration::from_secs(1);

/// When an idle thread sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitPolicy {
    /// Sleep after polling without work for this long, at most [`SPIN_MAX`]; zero: sleep at once.
    Sleep(Duration),
    /// Never sleep: the thread occupies a processor.
    Busy,
}

impl Default for WaitPolicy {
    fn default() -> Self {
        Self::Sleep(Duration::from_micros(50))
    }
}

/// Waiting and placement of a thread that drives a fabric.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ThreadPolicy {
    /// When the thread sleeps.
    pub wait: WaitPolicy,
    /// Processors that the thread runs on.
    pub cores: Cores,
}

impl ThreadPolicy {
    /// Starts a thread on the chosen processors, with the waiter of this notifier.
    ///
    /// # Errors
    /// When the system starts no thread, or the process may not use the cores.
    pub fn spawn(
        &self,
        name: &str,
        notifier: &Arc<Notifier>,
        run: impl FnOnce(Waiter) + Send + 'static,
    ) -> std::io::Result<JoinHandle<()>> {
        let (cores, waiter) = (self.cores.clone(), Waiter::new(Arc::clone(notifier), self.wait));
        let (tell, told) = std::sync::mpsc::sync_channel(1);
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            let bound = cores.bind_thread();
            let is_bound = bound.is_ok();
            // `spawn` waits for this message.
            let _waits = tell.send(bound);
            if is_bound {
                run(waiter);
            }
        })?;
        match told.recv() {
            Ok(Ok(())) => Ok(thread),
            Ok(Err(error)) => Err(std::io::Error::other(error)),
            Err(_) => Err(std::io::Error::other("the thread has ended")),
        }
    }
}

/// Wakes a waiting thread. Any thread may call [`Notifier::notify`].
#[derive(Debug)]
pub struct Notifier {
    descriptor: OwnedFd,
    is_awaited: AtomicBool,
}

impl Notifier {
    /// Creates a notifier.
    ///
    /// # Errors
    /// When the system gives no eventfd.
    pub fn new() -> std::io::Result<Arc<Self>> {
        let descriptor = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Self { descriptor, is_awaited: AtomicBool::new(false) }))
    }

    /// Wakes the waiter after work was left for it. Makes a system call only when the waiter sleeps or is
    /// about to.
    pub fn notify(&self) {
        // Pairs with the fence in `Waiter::announce`: either this thread sees `is_awaited`, or the waiter
        // sees the work. The protocol is that of shared memory's doorbell, which is model-checked
        // (`dataplane/shm/tests/loom.rs`).
        fence(Ordering::SeqCst);
        if self.is_awaited.swap(false, Ordering::Relaxed) {
            // Fails only when the counter is at its maximum, and then the thread is being woken anyway.
            let _full = rustix::io::write(&self.descriptor, &1_u64.to_ne_bytes());
        }
    }
}

/// The waiting thread's side of a [`Notifier`].
///
/// The loop of the waiting thread: [`Self::worked`] after a round with work; else, unless [`Self::should_poll`],
/// [`Self::announce`], then one more look for work (the fabric's is [`Fabric::prepare_wait`]),
/// [`Self::sleep`] when there is none, and [`Self::retract`].
#[derive(Debug)]
pub struct Waiter {
    notifier: Arc<Notifier>,
    policy: WaitPolicy,
    /// Start of the current stretch of polling without work.
    idle_since: Option<Instant>,
}

impl Waiter {
    /// Creates the waiter of a notifier.
    #[must_use]
    pub fn new(notifier: Arc<Notifier>, policy: WaitPolicy) -> Self {
        // With one processor no other thread can produce work while this thread polls.
        let is_alone = std::thread::available_parallelism().is_ok_and(|count| count.get() == 1);
        let policy = match policy {
            WaitPolicy::Sleep(_) if is_alone => WaitPolicy::Sleep(Duration::ZERO),
            WaitPolicy::Sleep(spin) => WaitPolicy::Sleep(spin.min(SPIN_MAX)),
            WaitPolicy::Busy => WaitPolicy::Busy,
        };
        Self { notifier, policy, idle_since: None }
    }

    /// Records that the last round had work.
    pub fn worked(&mut self) {
        self.idle_since = None;
    }

    /// Records that the last round had no work. Returns whether to poll again instead of sleeping.
    pub fn should_poll(&mut self) -> bool {
        std::hint::spin_loop();
        let WaitPolicy::Sleep(spin) = self.policy else { return true };
        let now = Instant::now();
        now.saturating_duration_since(*self.idle_since.get_or_insert(now)) < spin
    }

    /// Announces that the thread is about to sleep. A [`Notifier::notify`] from now on wakes it.
    pub fn announce(&mut self) {
        self.idle_since = None;
        self.notifier.is_awaited.store(true, Ordering::Relaxed);
        // Pairs with the fence in `Notifier::notify`.
        fence(Ordering::SeqCst);
    }

    /// Sleeps until it is notified, the fabric has work, or `until` is reached; at most [`SLEEP_MAX`], and
    /// possibly less.
    pub fn sleep(&self, fabric: &impl Fabric, until: Option<Instant>) {
        let mut descriptors: Vec<BorrowedFd<'_>> = vec![self.notifier.descriptor.as_fd()];
        fabric.wait_descriptors(&mut descriptors);
        let mut polled: Vec<PollFd<'_>> =
            descriptors.iter().map(|fd| PollFd::new(fd, PollFlags::IN | PollFlags::HUP)).collect();
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.unwrap_or(SLEEP_MAX).min(SLEEP_MAX);
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        // EINTR counts as an event: the loop looks for work again.
        let _interrupted = rustix::event::poll(&mut polled, Some(&timeout));
    }

    /// Withdraws the announcement: the thread does not sleep, or has woken up.
    pub fn retract(&mut self) {
        self.notifier.is_awaited.store(false, Ordering::Relaxed);
        // An eventfd of 0 reads as EAGAIN.
        let _empty = rustix::io::read(&self.notifier.descriptor, &mut [0_u8; 8]);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::sim::{Faults, SimNetwork};
    use crate::testing::pool;

    fn waiter(policy: WaitPolicy) -> Waiter {
        Waiter::new(Notifier::new().expect("an eventfd"), policy)
    }

    #[test]
    fn polling_lasts_as_long_as_it_is_told_to_and_begins_anew_with_work() {
        let spin = Duration::from_micros(900);
        let mut waiter = waiter(WaitPolicy::default());
        waiter.policy = WaitPolicy::Sleep(spin); // Also on a machine with one processor.
        for _ in 0..3 {
            let started = Instant::now();
            while waiter.should_poll() {}
            assert!(started.elapsed() >= spin);
            waiter.worked();
        }
        while waiter.should_poll() {}
        waiter.announce();
        waiter.retract();
        assert!(waiter.should_poll(), "after a sleep, too");
    }

    #[test]
    fn zero_sleeps_at_once_and_busy_never() {
        assert!(!waiter(WaitPolicy::Sleep(Duration::ZERO)).should_poll());
        let mut busy = waiter(WaitPolicy::Busy);
        assert!((0..10_000).all(|_| busy.should_poll()));
    }

    /// Work is seen wherever the ring falls: while the waiter works, between polls, before a sleep, during
    /// it. The notifying thread leaves work only after the previous one was taken, so that no later notification hides a lost
    /// one.
    #[test]
    fn no_notification_is_lost() {
        let network = SimNetwork::new(1, Faults::default());
        let fabric = network.add_node(Arc::clone(pool("notifier").slab()));
        let left = Arc::new(AtomicU64::new(0));
        // Number of notifications, and the time of the last one in microseconds from here.
        let (notified, notified_at, origin) =
            (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)), Instant::now());
        let micros = move || origin.elapsed().as_micros() as u64;
        let mut waiter = waiter(WaitPolicy::Sleep(Duration::from_micros(20)));
        let notifier = Arc::clone(&waiter.notifier);
        let (leaves, notifies, notifies_at) =
            (Arc::clone(&left), Arc::clone(&notified), Arc::clone(&notified_at));
        let rounds = 2000;
        let notifying = std::thread::spawn(move || {
            for round in 0..rounds {
                while leaves.load(Ordering::Acquire) > 0 {
                    std::thread::yield_now();
                }
                // Pauses of 0 to 147 us, so that notifications fall into every part of the wait.
                let pause = Instant::now() + Duration::from_micros(round % 50 * 3);
                while Instant::now() < pause {}
                leaves.store(1, Ordering::Release);
                notifier.notify();
                notifies_at.store(micros(), Ordering::Relaxed);
                notifies.store(round + 1, Ordering::Release);
            }
        });
        let mut taken = 0;
        while taken < rounds {
            if left.swap(0, Ordering::AcqRel) > 0 {
                taken += 1;
                waiter.worked();
            } else if !waiter.should_poll() {
                waiter.announce();
                if left.load(Ordering::Acquire) == 0 {
                    let begun = micros();
                    waiter.sleep(&fabric, None);
                    let (ended, was_notified) = (micros(), notified.load(Ordering::Acquire) > taken);
                    // At least half of the longest sleep passed after the ring for the work that is still
                    // there.
                    let since = begun.max(notified_at.load(Ordering::Relaxed));
                    let is_long = ended.saturating_sub(since) > SLEEP_MAX.as_micros() as u64 / 2;
                    assert!(!(was_notified && is_long), "notification {taken} was lost");
                }
                waiter.retract();
            }
        }
        notifying.join().expect("notifying");
    }

    /// Median wake-up time of a thread that shares its processor with one that computes.
    fn usual_wake_up(spin: Duration) -> Duration {
        const ROUNDS: usize = 201;
        let core = rustix::thread::sched_getcpu().to_string();
        let cores: Cores = core.parse().expect("a core");
        let notifier = Notifier::new().expect("an eventfd");
        // Time of the notification in microseconds from `origin`; 0: none yet.
        let (notified_at, ended, origin) = (AtomicU64::new(0), AtomicBool::new(false), Instant::now());
        let micros = || origin.elapsed().as_micros() as u64;
        // Created before its thread is bound to one processor, as in `ThreadPolicy::spawn`.
        let mut waiter = Waiter::new(Arc::clone(&notifier), WaitPolicy::Sleep(spin));
        let mut taken = std::thread::scope(|scope| {
            scope.spawn(|| {
                cores.bind_thread().expect("it runs there already");
                while !ended.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let waits = scope.spawn(|| {
                cores.bind_thread().expect("it runs there already");
                let network = SimNetwork::new(1, Faults::default());
                let fabric = network.add_node(Arc::clone(pool("wake").slab()));
                let mut taken = Vec::new();
                while taken.len() < ROUNDS {
                    let notified = notified_at.swap(0, Ordering::AcqRel);
                    if notified > 0 {
                        taken.push(micros() - notified);
                        waiter.worked();
                    } else if !waiter.should_poll() {
                        waiter.announce();
                        if notified_at.load(Ordering::Acquire) == 0 {
                            waiter.sleep(&fabric, None);
                        }
                        waiter.retract();
                    }
                }
                taken
            });
            while !waits.is_finished() {
                std::thread::sleep(Duration::from_micros(500));
                if notified_at.load(Ordering::Acquire) == 0 {
                    notified_at.store(micros(), Ordering::Release);
                    notifier.notify();
                }
            }
            ended.store(true, Ordering::Relaxed);
            waits.join().expect("no panic")
        });
        taken.sort_unstable();
        Duration::from_micros(taken[ROUNDS / 2])
    }

    /// Yielding between polls would cost a time slice at each wake-up.
    #[test]
    fn polling_does_not_make_wake_ups_late_beside_a_thread_that_computes() {
        if std::thread::available_parallelism().is_ok_and(|count| count.get() == 1) {
            return eprintln!("not tried: with one processor nobody polls");
        }
        let ratio = |round: usize| {
            let [polled, slept] = [SPIN_MAX / 20, Duration::ZERO].map(usual_wake_up);
            println!("{round}: {polled:?} after polling, {slept:?} without");
            polled.as_secs_f64() / slept.max(Duration::from_micros(100)).as_secs_f64()
        };
        assert!((0..5).any(|round| ratio(round) < 5.0));
    }

    #[test]
    fn a_thread_that_may_not_run_where_it_shall_is_an_error() {
        let notifier = Notifier::new().expect("an eventfd");
        let nowhere = ThreadPolicy { cores: "1023".parse().expect("a list"), ..ThreadPolicy::default() };
        let allowed = rustix::thread::sched_getaffinity(None).expect("affinity");
        if !allowed.is_set(1023) {
            let error = nowhere.spawn("test", &notifier, |_| panic!("it runs")).expect_err("no such core");
            assert!(error.to_string().contains("none of these cores"), "{error}");
        }
        let (tell, told) = std::sync::mpsc::channel();
        let somewhere =
            ThreadPolicy::default().spawn("test", &notifier, move |_| tell.send(7).expect("heard"));
        assert_eq!(told.recv(), Ok(7));
        somewhere.expect("a thread").join().expect("no panic");
    }

    #[test]
    fn a_sleep_ends_at_its_deadline() {
        let network = SimNetwork::new(1, Faults::default());
        let fabric = network.add_node(Arc::clone(pool("deadline").slab()));
        let mut waiter = waiter(WaitPolicy::default());
        waiter.announce();
        let started = Instant::now();
        waiter.sleep(&fabric, Some(started + Duration::from_millis(30)));
        let slept = started.elapsed();
        assert!((Duration::from_millis(25)..SLEEP_MAX).contains(&slept), "{slept:?}");
    }
}
