//! Queue of submitted requests: threads carry them out, and completions wait until they are polled.
//!
//! One lock guards both lists. A request counts against the depth from its submission until its completion is
//! polled, so neither list can outgrow the depth, and neither is reallocated after the start. The rest of a
//! request is allocated when it is submitted: arrays of buffers, identities, a transfer, later the text of a
//! failure. The identities of all matches, fetches and transfers in flight are at most [`IDENTITIES_MAX`]
//! together: 16 MiB, and 8 MiB more if each has the block number of a transfer. A transfer is in the list once,
//! and several threads may have pieces of it. The eventfd is readable exactly while completions wait or the
//! queue is closed: it is written and read under the lock.
//!
//! Source: eventfd(2).

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use crate::backend::Backend;
use crate::config::QueueSettings;
use crate::handoff::CopyTask;
use crate::operation::{Operation, Outcome, catch_store_panic};
use crate::status::{Failure, Status};
use crate::transfer::{Claim, Transfer};

/// Most identities of all matches, fetches and transfers in flight, and so of any one of them.
pub(crate) const IDENTITIES_MAX: usize = 1 << 20;

/// A finished request, `kvasir_kv_completion` in C.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Value that the caller wrote into the request.
    pub user: u64,
    /// A `kvasir_kv_status`.
    pub status: i32,
    /// Reserved; zero.
    pub reserved: u32,
    /// Bytes of meta read, or needed if the buffers were too small.
    pub meta_bytes: u64,
    /// Bytes of payload read, or needed if the buffers were too small. For a match or a transfer: number of blocks.
    pub payload_bytes: u64,
}

/// A unit of work for the queue's threads.
#[derive(Debug)]
pub(crate) enum Work {
    /// Carried out by one thread.
    Whole(Operation),
    /// Carried out in pieces by all idle threads.
    Shared(Arc<Transfer>),
    /// Copies of a hand-off, carried out by one thread.
    Copying(CopyTask),
}

impl From<Operation> for Work {
    fn from(operation: Operation) -> Self {
        Self::Whole(operation)
    }
}

impl Work {
    fn identities(&self) -> usize {
        match self {
            Self::Whole(operation) => operation.identities(),
            Self::Shared(transfer) => transfer.identities(),
            Self::Copying(copying) => copying.blocks(),
        }
    }
}

/// Outcome of a submission.
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
    common: Arc<QueueShared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct QueueShared {
    backend: Arc<dyn Backend>,
    state: Mutex<State>,
    /// Signalled when a request is submitted or the queue closes.
    submitted: Condvar,
    /// Signalled when a completion is added or the queue closes.
    completed: Condvar,
    event: OwnedFd,
    depth: usize,
}

impl std::fmt::Debug for QueueShared {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Common").field("depth", &self.depth).finish_non_exhaustive()
    }
}

struct State {
    requests: VecDeque<(u64, Work)>,
    /// Each with the text of its failure, if it failed.
    completions: VecDeque<(Completion, Option<String>)>,
    /// Requests submitted whose completions have not been polled.
    under_way: usize,
    /// Number of identities of all requests that wait or run.
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
            under_way: 0,
            identities: 0,
            closed: false,
        };
        let common = Arc::new(QueueShared {
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
            // If a later thread fails to start, dropping the queue ends the threads that were started.
            queue.threads().push(thread.map_err(|error| failed("start a thread", &error))?);
        }
        Ok(queue)
    }

    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a request that runs outside the queue's threads, if there is room. [`Completions::complete`] ends it.
    pub(crate) fn admit(&self, identities: usize) -> Submitted {
        self.common.state().admit(self.common.depth, identities)
    }

    /// Returns the handle through which requests that run outside the queue's threads complete.
    pub(crate) fn completions(&self) -> Completions {
        Completions(Arc::clone(&self.common))
    }

    /// Submits a request if there is room. On refusal the caller still owns what `work` was made from.
    ///
    /// # Safety
    /// The ranges must be usable, as [`Operation::carry_out`] and [`Transfer::carry_out`] require, until the
    /// completion is polled or [`Queue::close`] returns.
    pub(crate) unsafe fn submit(&self, user: u64, work: impl Into<Work>) -> Submitted {
        let work = work.into();
        let mut state = self.common.state();
        let admitted = state.admit(self.common.depth, work.identities());
        if admitted != Submitted::Taken {
            return admitted;
        }
        state.requests.push_back((user, work));
        drop(state);
        self.common.submitted.notify_one();
        Submitted::Taken
    }

    /// Passes at most `limit` completions to `take`, each with the text of its failure. Waits for the first one
    /// for `patience`; `None` waits without limit. Returns the number of completions.
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
        state.under_way -= count;
        if count > 0 && state.completions.is_empty() && !state.closed {
            // Does not block: the eventfd has been written once since it was last read.
            let _ = rustix::io::read(&self.common.event, &mut [0; 8]);
        }
        count
    }

    pub(crate) fn event(&self) -> i32 {
        self.common.event.as_raw_fd()
    }

    /// Drops requests that have not begun, waits for those that have, and ends the threads. Wakes callers that
    /// wait in [`Queue::poll`] or for the eventfd, which stays readable from now on.
    pub(crate) fn close(&self) {
        let mut state = self.common.state();
        state.closed = true;
        let forgotten: usize = state.requests.drain(..).map(|(_, work)| work.identities()).sum();
        state.identities -= forgotten;
        // Does not block, since only an overflow would: written once here and once for the first waiting completion.
        let _ = rustix::io::write(&self.common.event, &1_u64.to_ne_bytes());
        drop(state);
        self.common.submitted.notify_all();
        self.common.completed.notify_all();
        for thread in self.threads().drain(..) {
            // Panics are caught inside the thread.
            let _ = thread.join();
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.close();
    }
}

/// Handle through which requests that run outside the queue's threads complete.
#[derive(Debug, Clone)]
pub(crate) struct Completions(Arc<QueueShared>);

impl Completions {
    /// Admits a request that another thread begins, if there is room, as [`Queue::admit`] does.
    pub(crate) fn admit(&self, identities: usize) -> Submitted {
        self.0.state().admit(self.0.depth, identities)
    }

    /// Passes the rest of an admitted request to the queue's threads. If the queue is closed, the request is dropped.
    pub(crate) fn hand_over(&self, user: u64, work: Work) {
        let mut state = self.0.state();
        if state.closed {
            state.identities -= work.identities();
            // Dropped without the lock, because the drop may wait for tensors.
            drop(state);
            return;
        }
        state.requests.push_back((user, work));
        drop(state);
        self.0.submitted.notify_one();
    }

    /// Ends a request with `identities` identities that [`Queue::admit`] has admitted.
    pub(crate) fn complete(&self, user: u64, identities: usize, outcome: Result<Outcome, Failure>) {
        let mut state = self.0.state();
        state.identities -= identities;
        self.0.complete(&mut state, user, outcome);
    }
}

impl State {
    fn admit(&mut self, depth: usize, identities: usize) -> Submitted {
        let identities = self.identities.saturating_add(identities);
        if self.closed {
            return Submitted::Closed;
        }
        if self.under_way >= depth || identities > IDENTITIES_MAX {
            return Submitted::Full;
        }
        self.identities = identities;
        self.under_way += 1;
        Submitted::Taken
    }
}

impl QueueShared {
    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while the lock is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.state();
        loop {
            if state.closed {
                return;
            }
            let Some((user, work)) = state.requests.pop_front() else {
                state = self.submitted.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let identities = work.identities();
            let (guard, outcome) = self.carry_out(state, user, work);
            state = guard;
            if let Some(outcome) = outcome {
                state.identities -= identities;
                self.complete(&mut state, user, outcome);
            }
        }
    }

    /// Carries out work taken from the list, without holding the lock. `None`: other threads still work on it.
    fn carry_out<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        user: u64,
        work: Work,
    ) -> (MutexGuard<'a, State>, Option<Result<Outcome, Failure>>) {
        let backend = &*self.backend;
        let outcome = match work {
            Work::Whole(operation) => {
                drop(state);
                // SAFETY: the submitter promised that the ranges are usable until the completion is polled,
                // which is created after this call, or until `close` returns, which waits for this thread.
                Some(unsafe { operation.carry_out(backend) })
            }
            Work::Shared(transfer) => {
                let Claim { piece, has_more } = transfer.claim();
                if has_more {
                    state.requests.push_back((user, Work::Shared(Arc::clone(&transfer))));
                    self.submitted.notify_one();
                }
                drop(state);
                // SAFETY: as above, for the blocks of the tensors.
                unsafe { transfer.carry_out(piece, backend) }
            }
            Work::Copying(copying) => {
                drop(state);
                // SAFETY: as above.
                Some(catch_store_panic(|| unsafe { copying.carry_out_on_host() }))
            }
        };
        (self.state(), outcome)
    }

    fn complete(&self, state: &mut State, user: u64, outcome: Result<Outcome, Failure>) {
        let (Outcome { status, meta_bytes, payload_bytes }, text) = match outcome {
            Ok(outcome) => (outcome, None),
            Err(Failure { status, text, needed }) => {
                let (meta_bytes, payload_bytes) = needed.unwrap_or_default();
                (Outcome { status, meta_bytes, payload_bytes }, Some(text))
            }
        };
        let completion = Completion {
            user,
            status: status as i32,
            reserved: 0,
            meta_bytes: meta_bytes as u64,
            payload_bytes: payload_bytes as u64,
        };
        state.completions.push_back((completion, text));
        if state.completions.len() == 1 {
            // Cannot overflow: the eventfd is read before it is written again.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
        self.completed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{
        BackendError, ChainPosition, GetOutcome, Identity, LoadReport, Loaded, PutOutcome, Statistics,
    };
    use crate::buffers::{Destination, Source};

    /// A backend that panics for one block and fails for another.
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

        fn get_prefix(
            &self,
            _: &[Identity],
            _: &mut [Destination],
            _: Instant,
        ) -> Result<Loaded, BackendError> {
            Ok(Loaded::default())
        }

        fn observe_load(&self, _: &LoadReport) {}

        fn payload_bytes_max(&self) -> usize {
            usize::MAX
        }

        fn put(
            &self,
            _: &Identity,
            _: ChainPosition,
            _: &Source,
            _: &Source,
        ) -> Result<PutOutcome, BackendError> {
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
        let settings = QueueSettings { threads: 1, depth: 100, events: 0 };
        let queue = Queue::new(Arc::new(Broken), &settings).expect("starts");
        let matching = |count: usize| Operation::Match { identities: vec![[0; 16]; count] };
        // The thread takes no request while the lock is held, so this is the state with one request waiting.
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
        let settings = QueueSettings { threads: 1, depth: 2, events: 0 };
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
        let queue =
            Queue::new(Arc::new(Broken), &QueueSettings { threads: 1, depth: 4, events: 0 }).expect("starts");
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

        let queue =
            Queue::new(Arc::new(Broken), &QueueSettings { threads: 1, depth: 4, events: 0 }).expect("starts");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| queue.poll(1, None, |_, _, _| panic!("nothing was submitted")));
            std::thread::sleep(Duration::from_millis(20));
            queue.close();
            assert_eq!(waiter.join().expect("no panic"), 0, "woken");
        });
    }
}
