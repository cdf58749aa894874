//! Asynchronous copies of one stream: submitted, flushed in batches, and polled. This is the hot path.
//!
//! `submit` checks and plans, without a call of the driver. `flush` makes the calls: one for all contiguous
//! pieces (from CUDA 12.8 on, so that many small blocks are not bound by launches; else one each), one for
//! each copy in rows, and one that records an event of a ring made at the start. `poll` queries the oldest
//! events. No allocation, no lock of this crate, no callback, no wait; the driver takes its own locks.
//!
//! Order: flushes run one after the other; the copies of one flush run in any order (the driver's batches
//! guarantee none). A copy that depends on an earlier one must be submitted after a flush.
//!
//! Failures: a copy that the driver refuses completes with its error; the other copies continue. A queue that
//! has failed stays failed: copies in flight and later submissions complete with the same error. Before the
//! first such completion the queue waits for the stream, so that no copy is running in memory that is handed
//! back. A lost context ([`CudaError::is_final`]) needs no wait; when the wait itself fails otherwise, no
//! token completes, and later polls wait again.
//!
//! A graph recording of another thread is not a failure: its codes mean "not yet", and `poll` tries again.
//!
//! One thread drives a queue; the queue may be moved to another thread. Dropping a queue waits for the
//! device; tokens that were not polled until then are dropped. When that wait fails, the regions are leaked,
//! because memory must not be freed under a running copy.

use std::collections::VecDeque;

use cudarc::driver::sys::CUevent;

use crate::copy::{CopyRequest, Region, RegionId, Regions, Resolved};
use crate::error::{CudaError, is_of_capture};
use crate::issue::Issuer;
use crate::library::code;
use crate::plan::Plan;
use crate::stream::{Stream, create_event, destroy_event};
use crate::submission::{Completion, CopyQueueConfig, CopyQueueCounters, SubmitError};

/// A token that was accepted and has not completed.
#[derive(Debug, Clone, Copy)]
struct Accepted {
    token: u64,
    failure: Option<CudaError>,
}

/// An event in flight and the tokens that it completes.
#[derive(Debug, Clone, Copy)]
struct InFlightFlush {
    event: usize,
    /// Place behind the last token that is complete when the event has passed.
    tokens_end: u64,
}

/// A queue of copies on one stream.
#[derive(Debug)]
pub struct CopyQueue {
    stream: Stream,
    regions: Regions,
    config: CopyQueueConfig,
    row_pitch_max: usize,
    plan: Plan,
    issuer: Issuer,
    events: Vec<CUevent>,
    flights: VecDeque<InFlightFlush>,
    /// Index of the event for the next flush.
    next_event: usize,
    accepted: VecDeque<Accepted>,
    /// Place of the first token of `accepted`, and the end of the flushed places.
    first_place: u64,
    flushed_end: u64,
    /// Whether a flush was requested and waits for a free event.
    is_flush_due: bool,
    /// Whether copies were issued whose event could not be recorded yet.
    is_record_due: bool,
    dead: Option<CudaError>,
    /// After a failure: whether no copy is running any more.
    is_idle: bool,
    counters: CopyQueueCounters,
}

// SAFETY: the events are the queue's own, and the driver lets any thread use them.
unsafe impl Send for CopyQueue {}

impl CopyQueue {
    /// Creates a queue on a stream, with all memory that it ever allocates.
    pub fn new(stream: Stream, config: CopyQueueConfig) -> Result<Self, CudaError> {
        let config = CopyQueueConfig {
            copies_max: config.copies_max.max(1),
            tokens_max: config.tokens_max.max(1),
            flushes_max: config.flushes_max.max(1),
        };
        let row_pitch_max = stream.device().description().row_pitch_max;
        let mut queue = Self {
            stream,
            regions: Regions::default(),
            config,
            row_pitch_max,
            plan: Plan::new(config.copies_max),
            issuer: Issuer::new(config.copies_max),
            events: Vec::with_capacity(config.flushes_max),
            flights: VecDeque::with_capacity(config.flushes_max),
            next_event: 0,
            accepted: VecDeque::with_capacity(config.tokens_max),
            first_place: 0,
            flushed_end: 0,
            is_flush_due: false,
            is_record_due: false,
            dead: None,
            is_idle: false,
            counters: CopyQueueCounters::default(),
        };
        for _ in 0..config.flushes_max {
            queue.events.push(create_event(queue.stream.context())?);
        }
        Ok(queue)
    }

    /// Adds memory to the queue, which keeps it until the queue is dropped. `None` after 65,536 regions.
    /// Allocates.
    pub fn add_region(&mut self, region: Region) -> Option<RegionId> {
        let is_elsewhere = match &region {
            Region::Host(_) => false,
            Region::Device(slab) => !slab.device().is(self.stream.device()),
        };
        self.regions.add(region, is_elsewhere)
    }

    /// Returns the stream, for kernels that run between flushes. An empty submission that is flushed after a
    /// launch completes when the kernel has ended.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Returns the number of tokens that were accepted and have not completed.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.accepted.len()
    }

    /// Returns the error that made the queue fail; `None` while the queue works.
    #[must_use]
    pub fn dead(&self) -> Option<CudaError> {
        self.dead
    }

    /// Returns the counters of the queue.
    #[must_use]
    pub fn counters(&self) -> CopyQueueCounters {
        self.counters
    }

    /// Accepts one copy; it starts with the next [`Self::flush`].
    #[inline]
    pub fn submit(&mut self, copy: &CopyRequest, token: u64) -> Result<(), SubmitError> {
        self.submit_batch(std::slice::from_ref(copy), token)
    }

    /// Accepts copies that complete together, all or none. An empty list completes when everything before it
    /// has completed.
    pub fn submit_batch(&mut self, copies: &[CopyRequest], token: u64) -> Result<(), SubmitError> {
        if self.accepted.len() == self.config.tokens_max || self.is_flush_due {
            return Err(SubmitError::Full);
        }
        let mut pieces = 0_usize;
        for (index, copy) in copies.iter().enumerate() {
            let (resolved, is_elsewhere) =
                self.regions.resolve(copy).ok_or(SubmitError::Outside { index })?;
            let by_row = self.is_by_row(&resolved, is_elsewhere);
            pieces = pieces.saturating_add(if by_row { resolved.rows.count } else { 1 });
        }
        if pieces > self.plan.room() {
            let copies_max = self.plan.capacity();
            let refusal = SubmitError::TooMany { copies: pieces, copies_max };
            return Err(if pieces > copies_max { refusal } else { SubmitError::Full });
        }
        if self.dead.is_none() {
            let place = self.first_place + self.accepted.len() as u64;
            for copy in copies {
                // Resolving succeeded in the check above, and nothing has changed since.
                let Some((resolved, is_elsewhere)) = self.regions.resolve(copy) else { continue };
                let by_row = self.is_by_row(&resolved, is_elsewhere);
                self.plan.add(resolved, by_row, place);
            }
        }
        self.accepted.push_back(Accepted { token, failure: None });
        self.counters.copies += copies.len() as u64;
        Ok(())
    }

    /// Returns whether rows are copied one by one: the driver's copy in rows is for one device and has a
    /// largest stride.
    fn is_by_row(&self, copy: &Resolved, is_elsewhere: bool) -> bool {
        let stride_max = copy.rows.from_stride.max(copy.rows.to_stride);
        copy.rows.count > 1 && (is_elsewhere || stride_max > self.row_pitch_max)
    }

    /// Hands the submitted copies to the device. When the largest number of flushes is in flight, the flush
    /// is deferred: submissions are refused, and `poll` makes the flush.
    pub fn flush(&mut self) {
        let end = self.first_place + self.accepted.len() as u64;
        if self.dead.is_some() || end == self.flushed_end {
            return;
        }
        self.is_flush_due = self.flights.len() == self.config.flushes_max;
        if self.is_flush_due {
            return;
        }
        if let Err(error) = self.hand_over(end) {
            self.set_failed(error);
        }
    }

    fn hand_over(&mut self, end: u64) -> Result<(), CudaError> {
        let context = self.stream.context().clone();
        let _entered = context.enter()?;
        if !self.is_record_due || !self.plan.runs().is_empty() {
            self.issue();
        }
        let event = self.next_event;
        // SAFETY: event and stream live. The event has passed and is not waited for: fewer flushes are in
        // flight than there are events, and each of them has an event of its own.
        let recorded = unsafe { (context.library.record_event)(self.events[event], self.stream.raw()) };
        // Until the event is recorded, later copies are issued as well, and one event covers all of them.
        self.is_record_due = is_of_capture(recorded);
        if self.is_record_due {
            return Ok(());
        }
        context.library.check("cuEventRecord", recorded)?;
        self.next_event = (event + 1) % self.events.len();
        self.flights.push_back(InFlightFlush { event, tokens_end: end });
        self.flushed_end = end;
        Ok(())
    }

    fn issue(&mut self) {
        self.counters.flushes += 1;
        let (accepted, first_place) = (&mut self.accepted, self.first_place);
        self.issuer.issue(&self.stream, self.plan.runs(), &mut self.counters, |run, error| {
            // Each token keeps its first failure.
            for place in run.tokens.0..=run.tokens.1 {
                accepted[(place - first_place) as usize].failure.get_or_insert(error);
            }
        });
        self.plan.clear();
    }

    /// Appends up to `budget` completions, in the order of submission, and returns their number. Waits only
    /// for the device of a queue that has failed. Allocates only when the vector has to grow.
    pub fn poll(&mut self, budget: usize, completions: &mut Vec<Completion>) -> usize {
        let mut done = 0;
        if self.dead.is_none() && !self.flights.is_empty() {
            match self.passed_end() {
                Ok(end) => done = self.complete(end, budget, completions),
                Err(error) => self.set_failed(error),
            }
        }
        if self.is_flush_due || self.is_record_due {
            self.flush();
        }
        if self.dead.is_some() && self.wait_idle() {
            let end = self.first_place + self.accepted.len() as u64;
            done += self.complete(end, budget - done, completions);
        }
        done
    }

    /// Returns the end of the tokens whose events have passed. An event with tokens beyond the budget is
    /// queried again.
    fn passed_end(&mut self) -> Result<u64, CudaError> {
        let context = self.stream.context().clone();
        let _entered = context.enter()?;
        let mut end = self.first_place;
        for flight in &self.flights {
            // SAFETY: the event lives.
            match unsafe { (context.library.query_event)(self.events[flight.event]) } {
                code::SUCCESS => end = flight.tokens_end,
                code::NOT_READY => break,
                code if is_of_capture(code) => break,
                code => return Err(context.library.error("cuEventQuery", code)),
            }
        }
        Ok(end)
    }

    fn complete(&mut self, end: u64, budget: usize, completions: &mut Vec<Completion>) -> usize {
        let count = usize::try_from(end - self.first_place).unwrap_or(usize::MAX).min(budget);
        for Accepted { token, failure } in self.accepted.drain(..count) {
            let failure = failure.or(self.dead);
            completions.push(Completion { token, result: failure.map_or(Ok(()), Err) });
        }
        self.first_place += count as u64;
        while self.flights.front().is_some_and(|flight| flight.tokens_end <= self.first_place) {
            self.flights.pop_front();
        }
        count
    }

    #[cold]
    fn set_failed(&mut self, error: CudaError) {
        self.dead = Some(error);
        self.is_idle = error.is_final();
        self.is_flush_due = false;
        self.is_record_due = false;
        self.flights.clear();
        self.plan.clear();
        self.wait_idle();
    }

    /// Blocks until no work of the stream is running, and returns whether that is certain. If it is not, all
    /// memory that the work names must be kept. Code that puts work of its own on the stream calls this
    /// before it frees memory.
    pub fn wait_idle(&mut self) -> bool {
        if !self.is_idle {
            let waited = self.stream.synchronise();
            let is_idle = waited.map_or_else(|error| error.is_final(), |()| true);
            // A queue that has not failed may get work again.
            self.is_idle = is_idle && self.dead.is_some();
            return is_idle;
        }
        true
    }
}

impl Drop for CopyQueue {
    fn drop(&mut self) {
        // The regions are freed after this: no copy may be running in them.
        if !self.wait_idle() {
            std::mem::forget(std::mem::take(&mut self.regions));
            return;
        }
        for event in self.events.drain(..) {
            destroy_event(self.stream.context(), event);
        }
    }
}
