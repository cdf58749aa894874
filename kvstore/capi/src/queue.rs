//! Submitted requests: threads carry them out, completions wait until they are polled.
//!
//! One lock guards both lists. A request counts against the depth from its submission until its completion was polled,
//! so neither list can outgrow it, and nothing is allocated for them after the start but the text of a failure. The identities of matches are kept
//! apart: all that are under way together are at most [`IDENTITIES_MAX`], which is 16 MiB. An eventfd is readable exactly
//! while completions wait or the queue is closed: it is written and read under the lock.
//!
//! Source: eventfd(2).

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use crate::backend::{Backend, GetOutcome, Identity};
use crate::buffers::{Destination, Ranges, Source};
use crate::config::QueueSettings;
use crate::status::{Failure, Status};

/// Most identities of matches that are under way, so also of one match.
pub(crate) const IDENTITIES_MAX: usize = 1 << 20;

/// What a request asks for, with all pointers checked.
#[derive(Debug)]
pub(crate) enum Operation {
    Get { identity: Identity, meta: Ranges, payload: Ranges },
    Put { identity: Identity, meta: Ranges, payload: Ranges },
    Delete { identity: Identity },
    Match { identities: Vec<Identity> },
}

/// What came of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outcome {
    pub(crate) status: Status,
    pub(crate) meta_bytes: usize,
    /// For a match, how many blocks.
    pub(crate) payload_bytes: usize,
}

impl Outcome {
    fn of(status: Status) -> Self {
        Self { status, meta_bytes: 0, payload_bytes: 0 }
    }
}

impl Operation {
    /// Identities that it keeps apart.
    fn identities(&self) -> usize {
        match self {
            Self::Match { identities } => identities.len(),
            _ => 0,
        }
    }

    /// Carries the request out; a panic of the store becomes a failure.
    ///
    /// # Safety
    /// The ranges must be usable as the header says for the time of the call: a get's for writes, a put's for reads.
    pub(crate) unsafe fn carry_out(self, backend: &dyn Backend) -> Result<Outcome, Failure> {
        // What the closure captures is dropped by the panic or not looked at again.
        let carried = catch_unwind(AssertUnwindSafe(|| match self {
            Self::Get { identity, meta, payload } => {
                // SAFETY: writable and nobody else's for the time of this call, by the contract of this function.
                let mut meta = unsafe { Destination::new(meta) };
                // SAFETY: as above.
                let mut payload = unsafe { Destination::new(payload) };
                let outcome = backend.get(&identity, &mut meta, &mut payload)?;
                if outcome != GetOutcome::Read {
                    return Ok(Outcome::of(outcome.into()));
                }
                Ok(Outcome { status: Status::Ok, meta_bytes: meta.filled(), payload_bytes: payload.filled() })
            }
            Self::Put { identity, meta, payload } => {
                // SAFETY: readable and not written to for the time of this call, by the contract of this function.
                let meta = unsafe { Source::new(meta) };
                // SAFETY: as above.
                let payload = unsafe { Source::new(payload) };
                Ok(Outcome::of(backend.put(&identity, &meta, &payload)?.into()))
            }
            Self::Delete { identity } => {
                let there = backend.delete(&identity)?;
                Ok(Outcome::of(if there { Status::Ok } else { Status::Miss }))
            }
            Self::Match { identities } => {
                let matched = backend.matched(&identities)?;
                Ok(Outcome { payload_bytes: matched, ..Outcome::of(Status::Ok) })
            }
        }));
        carried.unwrap_or_else(|_| Err(Failure::new(Status::Panicked, "the store panicked")))
    }
}

/// A finished request, `kvasir_kv_completion` in C.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// What the caller wrote into the request.
    pub user: u64,
    /// A `kvasir_kv_status`.
    pub status: i32,
    /// Zero.
    pub reserved: u32,
    /// Bytes of meta read, or needed when they did not fit.
    pub meta_bytes: u64,
    /// Bytes of payload read, or needed when they did not fit; for a match, the number of blocks.
    pub payload_bytes: u64,
}

/// What became of a request that was to be queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Submitted {
    Taken,
    /// `depth` requests or [`IDENTITIES_MAX`] identities are under way.
    Full,
    Closed,
}

/// The queue of one open store.
#[derive(Debug)]
pub(crate) struct Queue {
    common: Arc<Common>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Common {
    backend: Arc<dyn Backend>,
    state: Mutex<State>,
    /// A request was submitted, or the queue closes.
    submitted: Condvar,
    /// A completion waits, or the queue closes.
    completed: Condvar,
    event: OwnedFd,
    depth: usize,
}

impl std::fmt::Debug for Common {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Common").field("depth", &self.depth).finish_non_exhaustive()
    }
}

struct State {
    requests: VecDeque<(u64, Operation)>,
    /// With the text of a failure.
    completions: VecDeque<(Completion, Option<String>)>,
    running: usize,
    /// Of requests that wait or run.
    identities: usize,
    closed: bool,
}

impl Queue {
    pub(crate) fn new(backend: Arc<dyn Backend>, settings: &QueueSettings) -> Result<Self, Failure> {
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            Failure::new(Status::Failed, format!("{what}: {error}"))
        };
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| failed("eventfd", &error))?;
        let state = State {
            requests: VecDeque::with_capacity(settings.depth),
            completions: VecDeque::with_capacity(settings.depth),
            running: 0,
            identities: 0,
            closed: false,
        };
        let common = Arc::new(Common {
            backend,
            state: Mutex::new(state),
            submitted: Condvar::new(),
            completed: Condvar::new(),
            event,
            depth: settings.depth,
        });
        let queue = Self { common, threads: Mutex::default() };
        for at in 0..settings.threads {
            let common = Arc::clone(&queue.common);
            let thread =
                std::thread::Builder::new().name(format!("kvasir-kv-{at}")).spawn(move || common.work());
            // Those that were started end when the queue is dropped.
            queue.threads().push(thread.map_err(|error| failed("start a thread", &error))?);
        }
        Ok(queue)
    }

    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a request, if there is room. If not, the caller still has what it was made from.
    ///
    /// # Safety
    /// The ranges must be usable, as [`Operation::carry_out`] has it, until the completion was polled or
    /// [`Queue::close`] returned.
    pub(crate) unsafe fn submit(&self, user: u64, operation: Operation) -> Submitted {
        let mut state = self.common.state();
        let under_way = state.requests.len() + state.running + state.completions.len();
        let identities = state.identities.saturating_add(operation.identities());
        if state.closed {
            return Submitted::Closed;
        }
        if under_way >= self.common.depth || identities > IDENTITIES_MAX {
            return Submitted::Full;
        }
        state.identities = identities;
        state.requests.push_back((user, operation));
        drop(state);
        self.common.submitted.notify_one();
        Submitted::Taken
    }

    /// Gives completions to `take`, each with the text of its failure, at most `limit`; waits for the first as long as `patience` says, `None` being
    /// without end. Returns how many.
    pub(crate) fn poll(
        &self,
        limit: usize,
        patience: Option<Duration>,
        mut take: impl FnMut(usize, Completion, Option<String>),
    ) -> usize {
        let deadline = patience.and_then(|patience| Instant::now().checked_add(patience));
        let mut state = self.common.state();
        while state.completions.is_empty() && !state.closed && limit > 0 {
            state = match deadline {
                None => self.common.completed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return 0;
                    }
                    let waited = self.common.completed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        let count = state.completions.len().min(limit);
        for (at, (completion, text)) in state.completions.drain(..count).enumerate() {
            take(at, completion, text);
        }
        if count > 0 && state.completions.is_empty() && !state.closed {
            // It was written once since it was last read; it does not block.
            let _ = rustix::io::read(&self.common.event, &mut [0; 8]);
        }
        count
    }

    pub(crate) fn event(&self) -> i32 {
        self.common.event.as_raw_fd()
    }

    /// Forgets what has not begun, waits for what has, and ends the threads. Wakes those that wait in [`Queue::poll`] or
    /// for the event, which stays readable from now on.
    pub(crate) fn close(&self) {
        let mut state = self.common.state();
        state.closed = true;
        let forgotten: usize = state.requests.drain(..).map(|(_, operation)| operation.identities()).sum();
        state.identities -= forgotten;
        // Written here once, and for the first completion that waits: far from an overflow, which alone would block.
        let _ = rustix::io::write(&self.common.event, &1_u64.to_ne_bytes());
        drop(state);
        self.common.submitted.notify_all();
        self.common.completed.notify_all();
        for thread in self.threads().drain(..) {
            // Panics were caught inside.
            let _ = thread.join();
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.close();
    }
}

impl Common {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.state();
        loop {
            if state.closed {
                return;
            }
            let Some((user, operation)) = state.requests.pop_front() else {
                state = self.submitted.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.running += 1;
            let identities = operation.identities();
            drop(state);
            // SAFETY: whoever submitted it promised that the ranges are usable until its completion was polled, which
            // is made below, or until `close` returned, which waits for this thread.
            let outcome = unsafe { operation.carry_out(&*self.backend) };
            let (Outcome { status, meta_bytes, payload_bytes }, text) = match outcome {
                Ok(outcome) => (outcome, None),
                Err(Failure { status, text, needed }) => {
                    let (meta_bytes, payload_bytes) = needed.unwrap_or_default();
                    (Outcome { status, meta_bytes, payload_bytes }, Some(text))
                }
            };
            state = self.state();
            state.running -= 1;
            state.identities -= identities;
            let completion = Completion {
                user,
                status: status as i32,
                reserved: 0,
                meta_bytes: meta_bytes as u64,
                payload_bytes: payload_bytes as u64,
            };
            state.completions.push_back((completion, text));
            if state.completions.len() == 1 {
                // Cannot overflow: it is read before it is written again.
                let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
            }
            self.completed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{BackendError, PutOutcome, Statistics};

    /// Panics for one block and fails for another.
    struct Broken;

    impl Backend for Broken {
        fn matched(&self, identities: &[Identity]) -> Result<usize, BackendError> {
            Ok(identities.len())
        }

        fn get(
            &self,
            _: &Identity,
            _: &mut Destination,
            _: &mut Destination,
        ) -> Result<GetOutcome, BackendError> {
            Ok(GetOutcome::Throttled)
        }

        fn put(&self, _: &Identity, _: &Source, _: &Source) -> Result<PutOutcome, BackendError> {
            Ok(PutOutcome::Throttled)
        }

        fn delete(&self, identity: &Identity) -> Result<bool, BackendError> {
            assert!(identity[0] != 1, "a planted bug");
            Err(BackendError::Failed { operation: "delete", reason: "errno 5".to_owned() })
        }

        fn statistics(&self) -> Statistics {
            Statistics::default()
        }
    }

    #[test]
    fn identities_of_matches_under_way_are_bounded() {
        let settings = QueueSettings { threads: 1, depth: 100 };
        let queue = Queue::new(Arc::new(Broken), &settings).expect("starts");
        let matching = |count: usize| Operation::Match { identities: vec![[0; 16]; count] };
        // The thread takes nothing while the lock is held, so this is how it looks with one request waiting.
        queue.common.state().identities = IDENTITIES_MAX - 5;
        // SAFETY: a match names no memory that is not its own.
        assert_eq!(unsafe { queue.submit(1, matching(6)) }, Submitted::Full, "one identity too many");
        // SAFETY: as above.
        assert_eq!(unsafe { queue.submit(2, matching(5)) }, Submitted::Taken, "exactly as many as may be");
        let patience = Some(Duration::from_secs(20));
        assert_eq!(queue.poll(1, patience, |_, completion, _| assert_eq!(completion.payload_bytes, 5)), 1);
        assert_eq!(queue.common.state().identities, IDENTITIES_MAX - 5, "given back");
        queue.common.state().identities = 0;
        // SAFETY: as above.
        assert_eq!(
            // SAFETY: as above.
            unsafe { queue.submit(3, matching(IDENTITIES_MAX)) },
            Submitted::Taken,
            "the largest alone"
        );
        queue.close();
        assert_eq!(queue.common.state().identities, 0, "given back by a request that ran or was forgotten");
    }

    #[test]
    fn a_panic_of_the_store_is_a_status_and_the_threads_go_on() {
        let settings = QueueSettings { threads: 1, depth: 2 };
        let queue = Queue::new(Arc::new(Broken), &settings).expect("starts");
        let delete = |first: u8| Operation::Delete { identity: [first; 16] };
        for (user, first, status, text) in [
            (7, 1, Status::Panicked, "the store panicked"),
            (8, 2, Status::Failed, "delete: errno 5"),
            (9, 1, Status::Panicked, "the store panicked"),
        ] {
            // SAFETY: a delete names no memory.
            assert_eq!(unsafe { queue.submit(user, delete(first)) }, Submitted::Taken);
            let mut told = Vec::new();
            assert_eq!(
                queue.poll(4, Some(Duration::from_secs(20)), |_, done, text| told.push((done, text))),
                1
            );
            assert_eq!((told[0].0.user, told[0].0.status), (user, status as i32));
            assert_eq!(told[0].1.as_deref(), Some(text));
        }
        for (user, taken) in [(1, Submitted::Taken), (2, Submitted::Taken), (3, Submitted::Full)] {
            // SAFETY: a delete names no memory.
            assert_eq!(unsafe { queue.submit(user, delete(2)) }, taken, "request {user} of a depth of 2");
        }
        queue.close();
        // SAFETY: a delete names no memory.
        assert_eq!(unsafe { queue.submit(1, delete(2)) }, Submitted::Closed);
    }

    #[test]
    fn closing_wakes_and_keeps_what_is_done() {
        let queue = Queue::new(Arc::new(Broken), &QueueSettings { threads: 1, depth: 4 }).expect("starts");
        let is_readable = || {
            let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            let mut event = [rustix::event::PollFd::new(&queue.common.event, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut event, Some(&none)) == Ok(1)
        };
        assert!(!is_readable(), "nothing waits");
        // SAFETY: a match names no memory that is not its own.
        assert_eq!(unsafe { queue.submit(5, Operation::Match { identities: Vec::new() }) }, Submitted::Taken);
        let deadline = Instant::now() + Duration::from_secs(20);
        while queue.common.state().completions.is_empty() {
            assert!(Instant::now() < deadline, "not carried out");
            std::thread::yield_now();
        }
        queue.close();
        let mut user = 0;
        assert_eq!(queue.poll(4, None, |_, completion, _| user = completion.user), 1);
        assert_eq!((user, queue.poll(4, None, |_, _, _| ())), (5, 0), "there is one, and no wait");
        assert!(is_readable(), "closed, whatever was polled");

        let queue = Queue::new(Arc::new(Broken), &QueueSettings { threads: 1, depth: 4 }).expect("starts");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| queue.poll(1, None, |_, _, _| panic!("nothing was submitted")));
            std::thread::sleep(Duration::from_millis(20));
            queue.close();
            assert_eq!(waiter.join().expect("no panic"), 0, "woken");
        });
    }
}
