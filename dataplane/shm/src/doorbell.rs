//! How a node sleeps and is woken: a word in shared memory, an eventfd, and the epoll descriptor of its sockets.
//!
//! The protocol of the word is in `word.rs`. A node that drives this fabric alone sleeps through the
//! [`Sleeper`]: it spins while recent spins sufficed, then waits in the futex. A node with several transports
//! sleeps in `poll(2)` on the epoll descriptor, which holds the eventfd and the sockets.
//!
//! Nobody touches the futex when a peer dies or somebody connects. Therefore (1) a futex sleep lasts at most
//! [`SLEEP_BOUND`], after which the sockets are looked at, and (2) a node without connections, or with one being
//! made, sleeps in `poll(2)` even through the sleeper: it is not in a hurry for messages but for sockets.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use dataplane_fabric::Sleeper;
use dataplane_memory::{PageSize, Slab, SlabLayout};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;
use rustix::thread::futex;

use crate::word::{self, IN_FUTEX, IN_POLL, SPINNING, Wake};
use crate::{ShmCounters, ShmError};

/// Longest sleep in the futex: the bound within which a dead peer is noticed and a new one let in.
pub const SLEEP_BOUND: Duration = Duration::from_millis(50);
/// The word's memory: one cache line.
const WORD_BYTES: usize = 64;
/// Most sleeps without spinning after a spin that was in vain.
const SPINLESS_SLEEPS_MAX: u32 = 64;
/// Looks at the word between two looks at the clock.
const SPINS_PER_CLOCK: u32 = 32;

/// The word in its shared mapping.
#[derive(Debug)]
struct Word(Slab);

impl Word {
    fn get(&self) -> &AtomicU32 {
        let cell = self.0.address(0, 0, WORD_BYTES).cast::<AtomicU32>();
        // SAFETY: the address is inside the mapping, 64-byte aligned (start of a slot), lives as long as `self`,
        // and every process accesses it atomically only.
        unsafe { cell.as_ref() }
    }
}

/// The owner's side; the fabric's thread sleeps on it, any thread may wake it.
#[derive(Debug)]
pub(crate) struct Doorbell {
    word: Word,
    eventfd: OwnedFd,
    epoll: OwnedFd,
    /// Somebody called `wake`, and no sleep has ended for it yet.
    woken: AtomicBool,
    /// Connections are made and none is being made: the futex may be slept in.
    settled: AtomicBool,
    /// The last sleep may have ended for the sockets.
    sockets_due: AtomicBool,
    spin: Duration,
    /// How many of the next sleeps do not spin: doubled by each spin in vain. On a machine with more runnable
    /// threads than processors a spin keeps the very process from running that would ring. Used by the fabric's
    /// thread only, as is the next.
    spinless: AtomicU32,
    penalty: AtomicU32,
    counters: Arc<ShmCounters>,
}

impl Doorbell {
    pub(crate) fn create(
        spin: Duration,
        epoll: OwnedFd,
        counters: Arc<ShmCounters>,
    ) -> Result<Self, ShmError> {
        let layout = SlabLayout { slot_bytes: WORD_BYTES, slot_count: 1 };
        let eventfd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(ShmError::system("eventfd"))?;
        // With one processor nobody can ring while we spin.
        let alone = std::thread::available_parallelism().is_ok_and(|count| count.get() == 1);
        Ok(Self {
            word: Word(Slab::create("kvasir-doorbell", layout, PageSize::Standard)?),
            eventfd,
            epoll,
            woken: AtomicBool::new(false),
            settled: AtomicBool::new(false),
            sockets_due: AtomicBool::new(true),
            spin: if alone { Duration::ZERO } else { spin },
            spinless: AtomicU32::new(0),
            penalty: AtomicU32::new(0),
            counters,
        })
    }

    pub(crate) fn word_memory(&self) -> BorrowedFd<'_> {
        self.word.0.memory()
    }

    pub(crate) fn eventfd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }

    pub(crate) fn epoll(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Empties the eventfd.
    pub(crate) fn drain(&self) {
        // An empty one reads as EAGAIN.
        let _empty = rustix::io::read(&self.eventfd, &mut [0_u8; 8]);
    }

    /// Whether the futex may be slept in from now on; see the module's documentation.
    pub(crate) fn set_settled(&self, settled: bool) {
        self.settled.store(settled, Ordering::Relaxed);
    }

    /// The fabric's thread is about to sleep; it looks at the rings after this. False when somebody called
    /// `wake` since the last sleep.
    pub(crate) fn announce(&self) -> bool {
        word::announce(self.word.get());
        self.sockets_due.store(true, Ordering::Relaxed);
        !self.woken.swap(false, Ordering::SeqCst)
    }

    /// The fabric's thread is awake. Returns whether the sleep may have ended for the sockets.
    pub(crate) fn retract(&self) -> bool {
        word::retract(self.word.get());
        self.sockets_due.swap(false, Ordering::Relaxed)
    }

    /// Watches the word; true when it was changed within the budget.
    fn spin(&self, start: Instant, until: Option<Instant>) -> bool {
        let deadline = until.unwrap_or(start + self.spin).min(start + self.spin);
        loop {
            for _ in 0..SPINS_PER_CLOCK {
                // Acquire: pairs with the exchange in `word::ring`.
                if self.word.get().load(Ordering::Acquire) != SPINNING {
                    return true;
                }
                std::hint::spin_loop();
            }
            if Instant::now() >= deadline {
                return false;
            }
        }
    }

    fn spin_pays(&self) -> bool {
        let left = self.spinless.load(Ordering::Relaxed);
        self.spinless.store(left.saturating_sub(1), Ordering::Relaxed);
        left == 0 && !self.spin.is_zero()
    }

    fn remember(&self, sufficed: bool) {
        let before = self.penalty.load(Ordering::Relaxed);
        let penalty = if sufficed { 0 } else { (before * 2).clamp(1, SPINLESS_SLEEPS_MAX) };
        self.penalty.store(penalty, Ordering::Relaxed);
        self.spinless.store(penalty, Ordering::Relaxed);
    }

    fn wait_in_futex(&self, until: Option<Instant>) {
        let left = until
            .map_or(SLEEP_BOUND, |until| until.saturating_duration_since(Instant::now()).min(SLEEP_BOUND));
        let timeout = timespec(left);
        // Changed, interrupted and timed out all mean the same: the caller looks again.
        let ended = futex::wait(self.word.get(), futex::Flags::empty(), IN_FUTEX, Some(&timeout));
        let in_time = ended != Err(rustix::io::Errno::TIMEDOUT);
        self.sockets_due.store(!in_time, Ordering::Relaxed);
    }

    fn wait_in_poll(&self, until: Option<Instant>, now: Instant) {
        let timeout = until.map(|until| timespec(until.saturating_duration_since(now)));
        let mut polled = [PollFd::new(&self.epoll, PollFlags::IN)];
        // EINTR is as good as an event: the caller looks again.
        let _interrupted = rustix::event::poll(&mut polled, timeout.as_ref());
    }

    /// The sleep proper, between announcement and retraction.
    fn wait(&self, until: Option<Instant>) {
        let start = Instant::now();
        if until.is_some_and(|until| until <= start) {
            return;
        }
        if !self.settled.load(Ordering::Relaxed) {
            ShmCounters::count(&self.counters.sleeps);
            return self.wait_in_poll(until, start);
        }
        let mut state = IN_POLL;
        if self.spin_pays() {
            if !word::change(self.word.get(), IN_POLL, SPINNING) {
                return;
            }
            let sufficed = self.spin(start, until);
            self.remember(sufficed);
            if sufficed {
                self.sockets_due.store(false, Ordering::Relaxed);
                return ShmCounters::count(&self.counters.spins_that_sufficed);
            }
            state = SPINNING;
        }
        if word::change(self.word.get(), state, IN_FUTEX) {
            ShmCounters::count(&self.counters.sleeps);
            self.wait_in_futex(until);
        }
    }
}

impl Sleeper for Doorbell {
    fn sleep(&self, until: Option<Instant>) {
        self.wait(until);
        word::retract(self.word.get());
        // Whoever called `wake` before this point has ended this sleep.
        self.woken.swap(false, Ordering::SeqCst);
    }

    fn wake(&self) {
        // SeqCst: pairs with the swap in `announce`, like a ring and the word.
        self.woken.store(true, Ordering::SeqCst);
        wake(word::ring(self.word.get()), &self.word, &self.eventfd);
    }
}

fn timespec(duration: Duration) -> Timespec {
    let seconds = i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    Timespec { tv_sec: seconds, tv_nsec: i64::from(duration.subsec_nanos()) }
}

fn wake(due: Wake, word: &Word, eventfd: &OwnedFd) {
    if matches!(due, Wake::Futex | Wake::Both) {
        // It fails only for a bad address, and this one is mapped.
        let _woken = futex::wake(word.get(), futex::Flags::empty(), 1);
    }
    if matches!(due, Wake::Eventfd | Wake::Both) {
        // Fails only when the counter is at its maximum, and then the owner is awake anyway.
        let _full = rustix::io::write(eventfd, &1_u64.to_ne_bytes());
    }
}

/// A peer's doorbell.
#[derive(Debug)]
pub(crate) struct RemoteDoorbell {
    word: Word,
    eventfd: OwnedFd,
}

impl RemoteDoorbell {
    /// Attaches what a peer sent. The second descriptor must be an eventfd: a write to anything else could
    /// block us, or do something that the peer may not do itself.
    pub(crate) fn attach(word: OwnedFd, eventfd: OwnedFd) -> Result<Self, ShmError> {
        let word = Slab::attach(word)?;
        if word.layout().slot_bytes != WORD_BYTES {
            return Err(ShmError::Handshake("its doorbell has another size"));
        }
        let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&eventfd));
        if std::fs::read_link(link).ok().as_deref() != Some(std::path::Path::new("anon_inode:[eventfd]")) {
            return Err(ShmError::Handshake("its fourth descriptor is not an eventfd (or /proc is missing)"));
        }
        rustix::fs::fcntl_setfl(&eventfd, OFlags::NONBLOCK).map_err(ShmError::system("fcntl(F_SETFL)"))?;
        Ok(Self { word: Word(word), eventfd })
    }

    /// Tells the owner that something was published.
    pub(crate) fn ring(&self, counters: &ShmCounters) {
        let due = word::ring(self.word.get());
        if due == Wake::Nothing {
            return;
        }
        wake(due, &self.word, &self.eventfd);
        ShmCounters::count(match due {
            Wake::Futex => &counters.futex_wakes,
            _ => &counters.eventfd_wakes,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doorbell(spin: Duration) -> Doorbell {
        let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).expect("epoll");
        let bell = Doorbell::create(spin, epoll, Arc::default()).expect("doorbell");
        rustix::event::epoll::add(
            bell.epoll(),
            bell.eventfd(),
            rustix::event::epoll::EventData::new_u64(0),
            rustix::event::epoll::EventFlags::IN,
        )
        .expect("epoll_ctl");
        bell
    }

    #[test]
    fn wake_ends_the_sleep_or_the_next_one() {
        for (settled, spin_us) in [(false, 0), (true, 0), (true, 1000)] {
            let bell = doorbell(Duration::from_micros(spin_us));
            bell.set_settled(settled);
            bell.wake();
            assert!(!bell.announce(), "the next sleep does not begin");
            bell.retract();
            std::thread::scope(|scope| {
                for pause_us in [0, 30, 300, 20_000] {
                    assert!(bell.announce());
                    let start = Instant::now();
                    let bell = &bell;
                    let waker = scope.spawn(move || {
                        std::thread::sleep(Duration::from_micros(pause_us));
                        bell.wake();
                    });
                    bell.sleep(Some(start + Duration::from_secs(5)));
                    assert!(start.elapsed() < Duration::from_secs(2), "settled {settled}, {pause_us} us");
                    waker.join().expect("waker");
                    bell.drain();
                    bell.retract();
                    // A wake that came late counts for the next sleep.
                    bell.announce();
                    bell.retract();
                }
            });
        }
    }

    #[test]
    fn a_futex_sleep_is_bounded() {
        let bell = doorbell(Duration::ZERO);
        bell.set_settled(true);
        assert!(bell.announce());
        let start = Instant::now();
        bell.sleep(None);
        let slept = start.elapsed();
        assert!(slept >= SLEEP_BOUND / 2 && slept < SLEEP_BOUND * 20, "{slept:?}");
        assert!(bell.retract(), "after a sleep without a ring the sockets are due");
    }

    #[test]
    fn a_word_full_of_nonsense_wakes_both_ways() {
        let bell = doorbell(Duration::ZERO);
        bell.word.get().store(77, Ordering::Relaxed);
        bell.wake();
        assert_eq!(rustix::io::read(&bell.eventfd, &mut [0_u8; 8]), Ok(8));
    }

    #[test]
    fn another_kind_of_descriptor_is_refused() {
        let bell = doorbell(Duration::ZERO);
        let (_, pipe) = rustix::pipe::pipe().expect("pipe");
        let word = rustix::io::dup(bell.word_memory()).expect("dup");
        assert!(matches!(RemoteDoorbell::attach(word, pipe), Err(ShmError::Handshake(_))));
        let word = rustix::io::dup(bell.word_memory()).expect("dup");
        let eventfd = rustix::io::dup(bell.eventfd()).expect("dup");
        assert!(RemoteDoorbell::attach(word, eventfd).is_ok());
    }
}
