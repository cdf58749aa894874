//! The fault-injecting engine: each request of the caller is at most one request at a time of the wrapped
//! engine.

mod io_engine;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::contents::{copy_of, copy_of_bytes, flip, flip_in, tear};
use super::faults::{FaultCounters, Faults};
use super::power::Record;
use crate::error::describe;
use crate::testing::Random;
use crate::{Buffer, Completion, IoEngine, IoError, IoErrorKind, Operation, PageBuffer, Request};

const NAME: &str = "faulty";
/// Maximum number of unreadable ranges; the oldest is dropped for a new one.
const BAD_RANGES_MAX: usize = 1024;

/// An engine that applies [`Faults`] to the engine it wraps. See the module.
pub struct FaultyEngine<E: IoEngine> {
    pub(super) inner: E,
    faults: Faults,
    pub(super) random: Random,
    pub(super) counters: FaultCounters,
    /// Requests of the wrapped engine, by their number there.
    pub(super) under_way: HashMap<u64, Stage>,
    next_number: u64,
    held: Vec<Held>,
    bad: Vec<(u32, u64, u64)>,
    gone: bool,
    pub(super) unsynced: Vec<Record>,
    arrived: Vec<Completion>,
}

/// Faults of one write.
#[derive(Debug, Clone)]
pub(super) struct WritePlan {
    offset: u64,
    torn: bool,
    rotten: bool,
    random: Random,
}

/// Purpose of a request to the wrapped engine.
pub(super) enum Stage {
    /// The caller's request itself; a tracked write has its record's number.
    Whole { id: u64, rotten: Option<Random>, record: Option<u64> },
    /// Read of the old contents, which the write needs first.
    Old { request: Request, plan: WritePlan },
    /// The write of a copy for the caller's request.
    Copy { request: Request, record: Option<u64> },
}

struct Held {
    completion: Completion,
    polls: u32,
    record: Option<u64>,
}

impl<E: IoEngine> FaultyEngine<E> {
    /// Wraps an engine.
    ///
    /// # Panics
    /// When its blocks are not multiples of 4 KiB.
    pub fn new(inner: E, faults: Faults) -> Self {
        let block_bytes = inner.geometry().block_bytes;
        assert!(block_bytes.is_multiple_of(4096), "copies need blocks of 4 KiB, not {block_bytes}");
        Self {
            inner,
            random: Random(faults.seed),
            faults,
            counters: FaultCounters::default(),
            under_way: HashMap::new(),
            next_number: 0,
            held: Vec::new(),
            bad: Vec::new(),
            gone: false,
            unsynced: Vec::new(),
            arrived: Vec::new(),
        }
    }

    /// Number of faults injected so far.
    #[must_use]
    pub fn counters(&self) -> FaultCounters {
        self.counters
    }

    /// Replaces the faults from now on; the random generator keeps its state.
    pub fn set_faults(&mut self, faults: Faults) {
        self.faults = faults;
    }

    /// The present faults.
    #[must_use]
    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    /// Makes a range unreadable until it is written.
    pub fn spoil(&mut self, file: u32, offset: u64, bytes: u64) {
        if self.bad.len() == BAD_RANGES_MAX {
            self.bad.remove(0);
        }
        self.bad.push((file, offset, offset.saturating_add(bytes)));
    }

    /// Removes the device, or brings it back.
    pub fn set_gone(&mut self, gone: bool) {
        self.gone = gone;
    }

    /// The wrapped engine.
    pub fn inner(&mut self) -> &mut E {
        &mut self.inner
    }

    fn fail(&mut self, request: Request, kind: IoErrorKind, reason: &str) {
        let operation = describe(request.operation, request.buffer.len(), request.offset, request.file);
        let error = IoError { engine: NAME, operation, kind, reason: format!("{reason} (injected)") };
        self.hold(Completion { id: request.id, buffer: request.buffer, result: Err(error) }, None);
    }

    fn hold(&mut self, completion: Completion, record: Option<u64>) {
        let mut polls = 0;
        if self.random.chance(self.faults.delay) {
            self.counters.delayed += 1;
            polls = 1 + self.random.below(u64::from(self.faults.delay_polls_max)) as u32;
        }
        self.held.push(Held { completion, polls, record });
    }

    fn pass(&mut self, request: Request, stage: Stage) {
        let number = self.next_number;
        self.next_number += 1;
        let refused = self.inner.submit(Request { id: number, ..request });
        assert!(refused.is_ok(), "one request underneath for each of ours, and as many are allowed");
        self.under_way.insert(number, stage);
    }

    fn start_read(&mut self, request: Request) {
        let len = request.buffer.len() as u64;
        if self.random.chance(self.faults.media_error) {
            self.spoil(request.file, request.offset, self.inner.geometry().block_bytes as u64);
        }
        let end = request.offset + len;
        let overlaps = |&(file, start, stop): &(u32, u64, u64)| {
            file == request.file && start < end && request.offset < stop
        };
        if self.bad.iter().any(overlaps) {
            self.counters.media_errors += 1;
            return self.fail(request, IoErrorKind::Media, "unrecovered read error");
        }
        let rotten = self.random.chance(self.faults.rot_on_read).then(|| Random(self.random.draw()));
        let id = request.id;
        self.pass(request, Stage::Whole { id, rotten, record: None });
    }

    fn start_write(&mut self, request: Request) {
        let len = request.buffer.len() as u64;
        if self.random.chance(self.faults.no_space) {
            self.counters.no_space += 1;
            return self.fail(request, IoErrorKind::NoSpace, "no room");
        }
        let end = request.offset + len;
        // Writing makes a range readable again: the device remaps the block.
        self.bad.retain(|&(file, start, stop)| file != request.file || start < request.offset || stop > end);
        if self.random.chance(self.faults.lost_write) {
            self.counters.lost_writes += 1;
            return self.hold(Completion { id: request.id, buffer: request.buffer, result: Ok(()) }, None);
        }
        let mut offset = request.offset;
        if self.random.chance(self.faults.misdirected_write)
            && let Some(elsewhere) = self.elsewhere(&request)
        {
            self.counters.misdirected_writes += 1;
            offset = elsewhere;
        }
        let torn = self.random.chance(self.faults.torn_write);
        let rotten = self.random.chance(self.faults.rot_at_rest);
        self.counters.torn_writes += u64::from(torn);
        self.counters.rotten_writes += u64::from(rotten);
        let plan = WritePlan { offset, torn, rotten, random: Random(self.random.draw()) };
        if torn || self.faults.track_unsynced {
            let old = Buffer::Pages(PageBuffer::zeroed(request.buffer.len()));
            let read = Request { id: 0, operation: Operation::Read, file: request.file, offset, buffer: old };
            self.pass(read, Stage::Old { request, plan });
        } else {
            self.write(request, plan, None);
        }
    }

    /// Returns another offset of the same file at which the write fits.
    fn elsewhere(&mut self, request: &Request) -> Option<u64> {
        let geometry = self.inner.geometry();
        let block = geometry.block_bytes as u64;
        let places = (geometry.files[request.file as usize] - request.buffer.len() as u64) / block;
        if places == 0 {
            return None;
        }
        let place = self.random.below(places);
        // Skips the right offset.
        Some(if place >= request.offset / block { place + 1 } else { place } * block)
    }

    /// Submits the write with its faults; `old` is the present contents of the range.
    fn write(&mut self, request: Request, mut plan: WritePlan, old: Option<PageBuffer>) {
        let (file, offset) = (request.file, plan.offset);
        let mut landing = None;
        if plan.torn || plan.rotten || self.faults.track_unsynced {
            let mut new = copy_of(&request.buffer);
            if let (true, Some(old)) = (plan.torn, &old) {
                tear(&mut plan.random, old, &mut new);
            }
            if plan.rotten {
                flip(&mut plan.random, &mut new);
            }
            landing = Some(new);
        }
        let mut record = None;
        if let (true, Some(old), Some(new)) = (self.faults.track_unsynced, old, &landing) {
            record = Some(self.next_number);
            if self.unsynced.len() >= self.faults.unsynced_max {
                self.unsynced.remove(0);
            }
            let new = copy_of_bytes(new);
            self.unsynced.push(Record { number: self.next_number, file, offset, old, new, completed: false });
        }
        match landing {
            Some(new) => {
                let copy =
                    Request { id: 0, operation: Operation::Write, file, offset, buffer: Buffer::Pages(new) };
                self.pass(copy, Stage::Copy { request, record });
            }
            None => {
                let id = request.id;
                self.pass(Request { offset, ..request }, Stage::Whole { id, rotten: None, record });
            }
        }
    }

    /// Collects completions of the wrapped engine, and continues requests that need another one.
    fn advance(&mut self) {
        let mut arrived = std::mem::take(&mut self.arrived);
        self.inner.poll(usize::MAX, &mut arrived);
        let mut again = false;
        for Completion { id: number, mut buffer, result } in arrived.drain(..) {
            let Some(stage) = self.under_way.remove(&number) else { continue };
            match stage {
                Stage::Whole { id, rotten, record } => {
                    if let (Some(mut random), Ok(())) = (rotten, &result) {
                        self.counters.rotten_reads += 1;
                        flip_in(&mut random, &mut buffer);
                    }
                    self.finish(Completion { id, buffer, result }, record);
                }
                Stage::Old { request, plan } => match (result, buffer) {
                    (Ok(()), Buffer::Pages(old)) => {
                        self.write(request, plan, Some(old));
                        again = true;
                    }
                    (result, _) => {
                        self.finish(Completion { id: request.id, buffer: request.buffer, result }, None);
                    }
                },
                Stage::Copy { request, record } => {
                    self.finish(Completion { id: request.id, buffer: request.buffer, result }, record);
                }
            }
        }
        self.arrived = arrived;
        if again {
            // The caller's next flush reports the error again.
            let _ = self.inner.flush();
        }
    }

    fn finish(&mut self, mut completion: Completion, record: Option<u64>) {
        if self.gone && completion.result.is_ok() {
            self.counters.device_gone += 1;
            completion.result = Err(gone());
        }
        self.hold(completion, record);
    }

    /// Drops completions that were not handed out.
    pub(super) fn forget_held(&mut self) {
        self.held.clear();
    }
}

impl<E: IoEngine> Drop for FaultyEngine<E> {
    /// Waits for writes that are still reading the old contents, and for those in flight.
    fn drop(&mut self) {
        while !self.under_way.is_empty() {
            self.advance();
            if self.inner.wait(Some(Instant::now() + Duration::from_millis(10))).is_err() {
                break;
            }
        }
    }
}

fn gone() -> IoError {
    let (operation, reason) = ("use the device".to_owned(), "it is gone (injected)".to_owned());
    IoError { engine: NAME, operation, kind: IoErrorKind::Device, reason }
}
