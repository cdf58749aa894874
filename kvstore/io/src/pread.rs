//! pread(2) and pwrite(2) on a few threads: works everywhere, also where io_uring is forbidden (seccomp in
//! containers).
//!
//! Each request costs a system call and two hand-overs between threads. Channels are bounded by the depth, so a
//! request neither blocks nor allocates.

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, TrySendError};
use dataplane_memory::Slab;

use crate::error::describe;
use crate::files::Files;
use crate::{Completion, Full, Geometry, IoEngine, IoError, IoErrorKind, Operation, Request, Waker};

const NAME: &str = "pread";
/// Number of retries without progress after which a request fails, as in the ring.
const RETRIES_MAX: u32 = 10_000;

/// Options of the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreadConfig {
    /// Number of threads, each with one request at a time.
    pub threads: usize,
    /// Maximum number of requests queued or in flight.
    pub depth: usize,
    /// Maximum length of a request, in bytes.
    pub transfer_bytes_max: usize,
}

impl Default for PreadConfig {
    fn default() -> Self {
        Self { threads: 8, depth: 128, transfer_bytes_max: 16 << 20 }
    }
}

/// A request with the address of its buffer.
struct Job {
    request: Request,
    address: NonNull<u8>,
}

// SAFETY: the address points into the buffer that the request owns, and a job is used by one thread at a time.
unsafe impl Send for Job {}

enum Event {
    Done(Completion),
    Woken,
}

/// An engine over pread(2) and pwrite(2).
pub struct PreadEngine {
    files: Arc<Files>,
    geometry: Geometry,
    queued: VecDeque<Job>,
    /// Completions that were not polled yet.
    ready: VecDeque<Completion>,
    /// Number of requests at the threads.
    running: usize,
    /// `None` once the engine is being dropped, which ends the threads.
    jobs: Option<Sender<Job>>,
    events: Receiver<Event>,
    woken: bool,
    waker: Arc<ChannelWaker>,
    threads: Vec<JoinHandle<()>>,
}

struct ChannelWaker {
    pending: AtomicBool,
    events: Sender<Event>,
}

impl Waker for ChannelWaker {
    fn wake(&self) {
        // One wake-up at a time, so that the channel has room for it beside every completion. AcqRel: pairs
        // with `take`.
        if !self.pending.swap(true, Ordering::AcqRel) {
            // Fails only after the engine was dropped.
            let _gone = self.events.try_send(Event::Woken);
        }
    }
}

impl PreadEngine {
    /// Starts the threads.
    pub fn new(files: Files, config: &PreadConfig) -> Result<Self, IoError> {
        let failed = |operation: &str, kind, reason: String| IoError {
            engine: NAME,
            operation: operation.to_owned(),
            kind,
            reason,
        };
        if config.threads == 0 || config.depth == 0 || config.transfer_bytes_max == 0 {
            return Err(failed("start", IoErrorKind::Invalid, format!("{config:?}")));
        }
        let geometry = files.geometry(config.transfer_bytes_max, config.depth);
        let files = Arc::new(files);
        let (jobs, incoming) = crossbeam_channel::bounded::<Job>(config.depth);
        let (outgoing, events) = crossbeam_channel::bounded(config.depth + 1);
        let mut threads = Vec::with_capacity(config.threads);
        for index in 0..config.threads.min(config.depth) {
            let (incoming, outgoing, files) = (incoming.clone(), outgoing.clone(), Arc::clone(&files));
            let body = move || {
                for job in incoming {
                    if outgoing.send(Event::Done(perform(&files, job))).is_err() {
                        break;
                    }
                }
            };
            let thread = std::thread::Builder::new().name(format!("pread-{index}")).spawn(body);
            threads.push(thread.map_err(|e| failed("start a thread", IoErrorKind::Other, e.to_string()))?);
        }
        let waker = Arc::new(ChannelWaker { pending: AtomicBool::new(false), events: outgoing });
        Ok(Self {
            files,
            queued: VecDeque::with_capacity(geometry.depth_max),
            ready: VecDeque::with_capacity(geometry.depth_max),
            geometry,
            running: 0,
            jobs: Some(jobs),
            events,
            woken: false,
            waker,
            threads,
        })
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Done(completion) => {
                self.running -= 1;
                self.ready.push_back(completion);
            }
            Event::Woken => {
                // Pairs with the swap in `wake`: stores of the waker before it are visible after this.
                self.waker.pending.swap(false, Ordering::AcqRel);
                self.woken = true;
            }
        }
    }

    fn take_arrived(&mut self) {
        while let Ok(event) = self.events.try_recv() {
            self.take(event);
        }
    }
}

/// Moves all bytes of a request.
fn perform(files: &Files, job: Job) -> Completion {
    let Job { request, address } = job;
    let len = request.buffer.len();
    let (done, errno) = match move_all(len, |done| transfer(files, &request, address, done)) {
        Ok(()) => return Completion { id: request.id, buffer: request.buffer, result: Ok(()) },
        Err(stopped) => stopped,
    };
    let operation = describe(request.operation, len, request.offset, request.file);
    let error = match errno {
        Some(errno) => IoError::from_errno(NAME, operation, errno),
        None => IoError {
            engine: NAME,
            operation,
            kind: IoErrorKind::Other,
            reason: format!("the file ends after {done} bytes"),
        },
    };
    Completion { id: request.id, buffer: request.buffer, result: Err(error) }
}

/// Calls `transfer` until all bytes are moved. The error has the number of bytes moved, and the errno; `None`
/// at the file's end.
fn move_all(
    len: usize,
    mut transfer: impl FnMut(usize) -> Result<usize, i32>,
) -> Result<(), (usize, Option<i32>)> {
    let (mut done, mut retries) = (0, 0);
    while done < len {
        match transfer(done) {
            Ok(0) => return Err((done, None)),
            Ok(moved) => (done, retries) = (done + moved, 0),
            Err(libc::EINTR | libc::EAGAIN) if retries < RETRIES_MAX => {
                retries += 1;
                std::thread::yield_now();
            }
            Err(errno) => return Err((done, Some(errno))),
        }
    }
    Ok(())
}

/// Makes one pread or pwrite of the remaining bytes; returns its result.
fn transfer(files: &Files, request: &Request, address: NonNull<u8>, done: usize) -> Result<usize, i32> {
    // `submit` checked the file.
    let descriptor = files.descriptor(request.file).map_or(-1, |file| file.as_raw_fd());
    let left = request.buffer.len() - done;
    let at = (request.offset + done as u64) as libc::off64_t;
    // SAFETY: `done` is less than the buffer's length, so the place is inside of the buffer.
    let place = unsafe { address.add(done) }.as_ptr();
    let moved = match request.operation {
        // SAFETY: `left` bytes from `place` belong to the buffer that this request owns, so no other code uses
        // them.
        Operation::Read => unsafe { libc::pread64(descriptor, place.cast(), left, at) },
        // SAFETY: as above.
        Operation::Write => unsafe { libc::pwrite64(descriptor, place.cast(), left, at) },
    };
    usize::try_from(moved).map_err(|_| std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

impl IoEngine for PreadEngine {
    fn name(&self) -> &'static str {
        NAME
    }

    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn register(&mut self, _slab: &Arc<Slab>) -> Result<(), IoError> {
        Ok(())
    }

    fn submit(&mut self, request: Request) -> Result<(), Full> {
        if self.in_flight() >= self.geometry.depth_max {
            return Err(Full(request));
        }
        match self.geometry.check(&request) {
            Ok(address) => self.queued.push_back(Job { request, address }),
            Err(reason) => {
                let result = Err(IoError::invalid(NAME, &request, reason));
                self.ready.push_back(Completion { id: request.id, buffer: request.buffer, result });
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), IoError> {
        while let Some(job) = self.queued.pop_front() {
            let Some(jobs) = &self.jobs else { return Ok(()) };
            match jobs.try_send(job) {
                Ok(()) => self.running += 1,
                // The channel has room for the whole depth, and threads end only with the engine.
                Err(TrySendError::Full(job) | TrySendError::Disconnected(job)) => {
                    self.queued.push_front(job);
                    return Err(IoError {
                        engine: NAME,
                        operation: "hand a request to a thread".to_owned(),
                        kind: IoErrorKind::Other,
                        reason: "no thread takes it".to_owned(),
                    });
                }
            }
        }
        Ok(())
    }

    fn poll(&mut self, budget: usize, completions: &mut Vec<Completion>) -> usize {
        self.take_arrived();
        let count = budget.min(self.ready.len());
        completions.extend(self.ready.drain(..count));
        count
    }

    fn wait(&mut self, until: Option<Instant>) -> Result<(), IoError> {
        self.flush()?;
        self.take_arrived();
        if self.ready.is_empty() && !self.woken {
            let event = match until {
                // The waker holds a sender, so the channel is never disconnected.
                None => self.events.recv().ok(),
                Some(until) => self.events.recv_deadline(until).ok(),
            };
            if let Some(event) = event {
                self.take(event);
            }
        }
        self.woken = false;
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Waker> {
        Arc::clone(&self.waker) as Arc<dyn Waker>
    }

    fn in_flight(&self) -> usize {
        self.queued.len() + self.running + self.ready.len()
    }

    fn sync(&mut self, file: u32) -> Result<(), IoError> {
        self.files.sync(NAME, file)
    }
}

impl Drop for PreadEngine {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // The channel of events has room for every running request, so no thread blocks here.
            let _ended = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::{FolderConfig, open_folder};
    use crate::testing::{Conformance, conformance};

    #[test]
    fn trying_again_has_an_end() {
        let mut calls = 0;
        let mut always = |_| {
            calls += 1;
            Err(libc::EAGAIN)
        };
        assert_eq!(move_all(8, &mut always), Err((0, Some(libc::EAGAIN))));
        assert_eq!(calls, RETRIES_MAX + 1);
        // Progress resets the number of retries.
        let mut tries = 0;
        let mut slow = |_| {
            tries += 1;
            if tries % RETRIES_MAX == 0 { Ok(1) } else { Err(libc::EINTR) }
        };
        assert_eq!(move_all(3, &mut slow), Ok(()));
        assert_eq!(move_all(8, |done| Ok(4 - done)), Err((4, None)));
    }

    #[test]
    fn keeps_the_contract() {
        for (threads, depth, direct) in [(4, 32, true), (1, 3, false)] {
            let path = std::env::temp_dir().join(format!("kvasir-pread-{threads}-{}", std::process::id()));
            let folder = FolderConfig { direct, ..FolderConfig::new(&path, 8 << 20, 2) };
            let config = PreadConfig { threads, depth, transfer_bytes_max: 1 << 20 };
            let mut open = || {
                let files = open_folder(&folder).expect("segments");
                Box::new(PreadEngine::new(files, &config).expect("threads")) as Box<dyn IoEngine>
            };
            let options = Conformance { seed: threads as u64, requests: 1000, ..Conformance::default() };
            conformance(&mut open, &options);
            std::fs::remove_dir_all(&path).expect("remove");
        }
    }
}
