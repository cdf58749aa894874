//! Threads for long work: scanning, parsing, translating, rendering and tokenising large bodies.
//!
//! One pool serves all threads that serve streams; those threads only work on small bodies themselves. The
//! queue is bounded, and "full" is an error. Work whose request was cancelled is removed from the queue
//! immediately, with all its resources, and running work is asked to stop between its phases; a result
//! without a waiting request is dropped. Work never waits, so it always ends.
//!
//! Not `spawn_blocking`: its queue has no limit, a thread of its pool belongs to one shard, and queued work
//! runs even when its client has disconnected.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use axum::http::StatusCode;
use router_openai::{ApiError, JsonCounts, JsonLimits};
use tokio::sync::oneshot;

use crate::memory::{Footprint, MemoryCharge};
use crate::service::Gateway;

/// Largest text, in bytes, that is processed by the thread that serves the request.
pub(crate) const INLINE_BYTES: usize = 16 << 10;

/// Largest number of queued jobs.
const WAITING_MAX: usize = 1024;

/// Bytes of working memory for each byte of a text of which only the length is known.
const BYTES_PER_TEXT_BYTE: usize = 8;

/// Returns whether the work's request was cancelled: nothing waits for the result.
pub(crate) type IsCancelled<'a> = &'a dyn Fn() -> bool;

/// Reason why work has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ComputeError {
    /// The queue is full.
    Full,
    /// The work panicked; the panic was reported where it happened.
    Panicked,
}

trait Job: Send {
    fn is_cancelled(&self) -> bool;
    fn run(self: Box<Self>);
}

struct Task<T, W> {
    work: W,
    result: oneshot::Sender<T>,
}

impl<T: Send, W: FnOnce(IsCancelled<'_>) -> T + Send> Job for Task<T, W> {
    fn is_cancelled(&self) -> bool {
        self.result.is_closed()
    }

    fn run(self: Box<Self>) {
        let Self { work, result } = *self;
        let computed = catch_unwind(AssertUnwindSafe(|| work(&|| result.is_closed())));
        if let Ok(computed) = computed {
            // The receiver was dropped when the request was cancelled.
            let _gone = result.send(computed);
        }
    }
}

struct State {
    jobs: VecDeque<Box<dyn Job>>,
    is_closed: bool,
}

struct Queue {
    state: Mutex<State>,
    arrived: Condvar,
    waiting_max: usize,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        // No work runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, job: Box<dyn Job>) -> Result<(), ComputeError> {
        let mut state = self.state();
        if state.jobs.len() >= self.waiting_max {
            return Err(ComputeError::Full);
        }
        state.jobs.push_back(job);
        drop(state);
        self.arrived.notify_one();
        Ok(())
    }

    /// Returns the next job; `None` when the pool has been stopped.
    fn next(&self) -> Option<Box<dyn Job>> {
        let mut state = self.state();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn drop_cancelled(&self) {
        let mut state = self.state();
        if !state.jobs.iter().any(|job| job.is_cancelled()) {
            return;
        }
        let jobs = std::mem::take(&mut state.jobs);
        let (kept, cancelled): (VecDeque<_>, VecDeque<_>) =
            jobs.into_iter().partition(|job| !job.is_cancelled());
        state.jobs = kept;
        drop(state);
        // A body may be large: it is freed without the lock.
        drop(cancelled);
    }
}

/// The pool of threads for long work. Dropping it ends the threads.
pub(crate) struct ComputePool {
    queue: Arc<Queue>,
}

impl ComputePool {
    /// Starts `threads` threads, at least one.
    pub(crate) fn start(threads: usize) -> std::io::Result<Arc<Self>> {
        Self::with_limit(threads, WAITING_MAX)
    }

    fn with_limit(threads: usize, waiting_max: usize) -> std::io::Result<Arc<Self>> {
        let state = Mutex::new(State { jobs: VecDeque::new(), is_closed: false });
        let queue = Arc::new(Queue { state, arrived: Condvar::new(), waiting_max });
        let pool = Arc::new(Self { queue: Arc::clone(&queue) });
        for number in 0..threads.max(1) {
            let queue = Arc::clone(&queue);
            let work = move || {
                while let Some(job) = queue.next() {
                    if !job.is_cancelled() {
                        job.run();
                    }
                }
            };
            thread::Builder::new().name(format!("kvasir-text-{number}")).spawn(work)?;
        }
        Ok(pool)
    }

    /// Runs work in the pool. Dropping the future cancels the work.
    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(IsCancelled<'_>) -> T + Send + 'static,
    ) -> Result<T, ComputeError> {
        let (sender, receiver) = oneshot::channel();
        let mut ticket = Ticket { queue: Arc::clone(&self.queue), result: receiver };
        self.queue.push(Box::new(Task { work, result: sender }))?;
        (&mut ticket.result).await.map_err(|_| ComputeError::Panicked)
    }
}

impl Drop for ComputePool {
    fn drop(&mut self) {
        let mut state = self.queue.state();
        state.is_closed = true;
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        drop(jobs);
        self.queue.arrived.notify_all();
    }
}

/// A request's wait for its result.
struct Ticket<T> {
    queue: Arc<Queue>,
    result: oneshot::Receiver<T>,
}

impl<T> Drop for Ticket<T> {
    fn drop(&mut self) {
        self.result.close();
        self.queue.drop_cancelled();
    }
}

/// Place where one request's work runs, with the memory charged for it until this is dropped and the last
/// job has ended.
pub(crate) struct Work {
    pool: Option<(Arc<ComputePool>, Charges)>,
}

/// Memory charges of a job: its own, and that of its request.
type Charges = Arc<(Option<MemoryCharge>, Option<Arc<MemoryCharge>>)>;

impl Work {
    /// Whether the work is small: then the thread that serves the request runs it.
    pub(crate) fn is_inline(&self) -> bool {
        self.pool.is_none()
    }

    /// Runs one job.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(IsCancelled<'_>) -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let Some((pool, charges)) = &self.pool else { return Ok(work(&|| false)) };
        let charges = Arc::clone(charges);
        let charged = move |is_cancelled: IsCancelled<'_>| {
            let done = work(is_cancelled);
            drop(charges);
            done
        };
        pool.run(charged).await.map_err(|reason| match reason {
            ComputeError::Full => {
                let message = "Too many large requests are waiting; try again later.";
                ApiError::unavailable(message).retry_after(Some(1))
            }
            ComputeError::Panicked => {
                ApiError::internal("An internal error occurred while the request was processed.")
            }
        })
    }
}

impl Gateway {
    /// Prepares work on a text of `text_bytes` bytes. Waits for memory, unless the text is small.
    pub(crate) async fn work(&self, text_bytes: usize, footprint: &Footprint) -> Result<Work, ApiError> {
        if text_bytes <= INLINE_BYTES {
            return Ok(Work { pool: None });
        }
        let bytes = match footprint.work_bytes {
            0 => BYTES_PER_TEXT_BYTE * text_bytes,
            bytes => bytes,
        };
        let own = self.in_line(self.memory.scratch(bytes)).await?;
        let charges = Arc::new((Some(own), footprint.held.clone()));
        Ok(Work { pool: Some((Arc::clone(&self.compute), charges)) })
    }

    /// Prepares one pass over a text that allocates nothing of the text's size.
    pub(crate) fn pass(&self, text_bytes: usize, footprint: &Footprint) -> Work {
        /// At about 1 GB/s.
        const PASS_INLINE_BYTES: usize = 64 << 10;
        if text_bytes <= PASS_INLINE_BYTES {
            return Work { pool: None };
        }
        let charges = Arc::new((None, footprint.held.clone()));
        Work { pool: Some((Arc::clone(&self.compute), charges)) }
    }

    /// Waits for memory or for a place, at most for `wait_max`.
    pub(crate) async fn in_line<T>(&self, wait: impl Future<Output = T>) -> Result<T, ApiError> {
        tokio::time::timeout(self.config.access.wait_max, wait).await.map_err(|_| self.memory_in_use())
    }

    /// Returns the error for a request that found no memory, and counts it as shed.
    pub(crate) fn memory_in_use(&self) -> ApiError {
        self.metrics.shed.inc();
        let message = "The gateway has no room for this request now; try again later.";
        ApiError::unavailable(message).retry_after(Some(1))
    }

    /// Prepares work on an engine's answer as a tree. Counts its nodes first and charges its memory.
    pub(crate) async fn answer_work(&self, answer: &[u8], footprint: &Footprint) -> Result<Work, ApiError> {
        /// As many as the log-probabilities of a long answer have.
        const LIMITS: JsonLimits = JsonLimits { nodes: 2 << 20, numbers: 2 << 20, depth: 128 };
        let counts = JsonCounts::of(answer, &LIMITS).map_err(|excess| {
            let message = excess.replace("The body", "The engine's answer");
            ApiError::new(StatusCode::BAD_GATEWAY, message, "bad_answer")
        })?;
        let work_bytes = counts.work_bytes(answer.len());
        let footprint = Footprint { held: footprint.held.clone(), work_bytes };
        self.work(answer.len(), &footprint).await
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::task::{Context, Waker};
    use std::time::Duration;

    use super::*;

    /// A pool of one thread that is busy until something is sent.
    fn busy(waiting_max: usize) -> (Arc<ComputePool>, mpsc::Sender<()>, thread::JoinHandle<()>) {
        let pool = ComputePool::with_limit(1, waiting_max).expect("a thread");
        let (release, held) = mpsc::channel();
        let (begun, has_begun) = mpsc::channel();
        let working = Arc::clone(&pool);
        let waiting = thread::spawn(move || {
            let work = move |_: IsCancelled<'_>| {
                begun.send(()).expect("the test waits");
                held.recv().expect("released");
            };
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            runtime.block_on(working.run(work)).expect("done");
        });
        has_begun.recv().expect("begun");
        (pool, release, waiting)
    }

    #[tokio::test]
    async fn work_of_a_client_that_left_is_dropped_with_what_it_holds() {
        let (pool, release, waiting) = busy(2);
        let (ran, memory) = (Arc::new(AtomicUsize::new(0)), Arc::new(()));
        let count = || {
            let (ran, memory) = (Arc::clone(&ran), Arc::clone(&memory));
            move |_: IsCancelled<'_>| {
                ran.fetch_add(1, Ordering::Relaxed);
                drop(memory);
            }
        };
        let mut context = Context::from_waker(Waker::noop());
        {
            let mut left = pin!(pool.run(count()));
            assert!(left.as_mut().poll(&mut context).is_pending());
            assert_eq!(Arc::strong_count(&memory), 2);
        }
        // Freed immediately, although the only thread is busy.
        assert_eq!(Arc::strong_count(&memory), 1);
        let mut stayed = pin!(pool.run(count()));
        assert!(stayed.as_mut().poll(&mut context).is_pending());
        release.send(()).expect("the thread waits");
        stayed.await.expect("computed");
        assert_eq!(ran.load(Ordering::Relaxed), 1);
        waiting.join().expect("no panic");
    }

    #[tokio::test]
    async fn the_queue_of_work_is_bounded() {
        let (pool, release, waiting) = busy(2);
        let mut context = Context::from_waker(Waker::noop());
        let mut queued: Vec<_> = (0..2).map(|number| Box::pin(pool.run(move |_| number))).collect();
        for work in &mut queued {
            assert!(work.as_mut().poll(&mut context).is_pending());
        }
        assert_eq!(pool.run(|_| 7).await, Err(ComputeError::Full));
        // A cancelled job frees its place in the queue.
        drop(queued.pop());
        let mut next = pin!(pool.run(|_| 7));
        assert!(next.as_mut().poll(&mut context).is_pending());
        release.send(()).expect("the thread waits");
        assert_eq!(next.await, Ok(7));
        assert_eq!(queued.remove(0).await, Ok(0));
        waiting.join().expect("no panic");
    }

    #[tokio::test]
    async fn work_that_has_begun_learns_that_its_client_left() {
        let pool = ComputePool::with_limit(1, 2).expect("a thread");
        let (saw, seen) = mpsc::channel();
        let work = move |is_cancelled: IsCancelled<'_>| {
            saw.send(()).expect("the test waits");
            while !is_cancelled() {
                thread::sleep(Duration::from_millis(1));
            }
            saw.send(()).expect("the test waits");
        };
        {
            let mut context = Context::from_waker(Waker::noop());
            let mut left = pin!(pool.run(work));
            assert!(left.as_mut().poll(&mut context).is_pending());
            seen.recv().expect("begun");
        }
        seen.recv().expect("told");
        // A panic is an error, and the thread keeps running.
        assert_eq!(pool.run(|_| -> u8 { panic!("as planned") }).await, Err(ComputeError::Panicked));
        assert_eq!(pool.run(|_| 7).await, Ok(7));
    }
}
