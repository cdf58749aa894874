//! The gate: entering, leaving and handing over.
//!
//! Time is a nanosecond counter that arrives with each call. A permit that is merely dropped has no time,
//! so it frees its place and the gate measures nothing; [`Permit::release`] also tells how long the request
//! took. Waiters past their deadline are found by any call that takes the lock and has the time, and by
//! [`Gate::expire`], which the caller should call once a second.
//!
//! Hot path ([`Gate::enter`] with an empty queue, and leaving): one compare-and-swap, one count of the Arc,
//! one counter; no lock, no allocation. Waiting: a mutex for one operation of the queue, O(log n); one
//! allocation for the wake-up and few for the queue. No waiter is woken and no permit is dropped under the
//! mutex.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use super::permit::Permit;
use super::queue::{Arrival, Queue, Ticket};
use super::request::{AdmissionRequest, Entry, GateConfig, GateStats, Refusal, WAITING_MAX_LIMIT};
use super::speed::Speed;
use super::state::State;
use super::wait::{Wait, WaitOutcome};
use crate::error::Error;

/// Upper bound of a request's cost, so that sums cannot overflow. The lower bound is 1: a tenant with costs
/// of 0 would stay first forever.
const COST_MAX: u64 = 1 << 40;
/// Shortest retry advice, and the advice while the speed is unknown.
const RETRY_DEFAULT: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct Counters {
    at_once: AtomicU64,
    late: AtomicU64,
    full: AtomicU64,
    long: AtomicU64,
    expired: AtomicU64,
    abandoned: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

#[derive(Debug)]
struct Waiting {
    sender: oneshot::Sender<WaitOutcome>,
    cost: u64,
}

/// Admission gate in front of the workers.
#[derive(Debug)]
pub struct Gate {
    config: GateConfig,
    running_max: AtomicU32,
    state: State,
    queue: Mutex<Queue<Waiting>>,
    speed: Speed,
    /// Latest time of any call, for calls without a time.
    latest: AtomicU64,
    counters: Counters,
}

impl Gate {
    /// Creates an empty gate.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when no request could ever be admitted, or the queue is larger than
    /// [`WAITING_MAX_LIMIT`].
    pub fn new(config: GateConfig) -> Result<Arc<Self>, Error> {
        let bad = |reason: &str| Error::Config { what: "admission", reason: reason.to_owned() };
        if config.running_max == 0 {
            return Err(bad("running_max is 0"));
        }
        if config.waiting_max > WAITING_MAX_LIMIT {
            return Err(bad("waiting_max is too large"));
        }
        Ok(Arc::new(Self {
            running_max: AtomicU32::new(config.running_max),
            config,
            state: State::default(),
            queue: Mutex::default(),
            speed: Speed::default(),
            latest: AtomicU64::new(0),
            counters: Counters::default(),
        }))
    }

    /// Asks for admission, and waits in the queue if necessary. Dropping the future gives up the place in
    /// the queue, or frees a permit that was already sent.
    pub async fn admit(
        self: &Arc<Self>,
        ask: &AdmissionRequest<'_>,
        now: u64,
    ) -> Result<WaitOutcome, Refusal> {
        match self.enter(ask, now) {
            Entry::Admitted(permit) => Ok(WaitOutcome::Admitted(permit)),
            Entry::Waiting(wait) => Ok(wait.await),
            Entry::Full(refusal) => Err(refusal),
        }
    }

    /// Asks for admission without waiting.
    pub fn enter(self: &Arc<Self>, ask: &AdmissionRequest<'_>, now: u64) -> Entry {
        let cost = ask.cost.clamp(1, COST_MAX);
        if self.state.try_enter(self.running_max()) {
            return self.admitted_at_once(cost, now);
        }
        let arrival = Arrival {
            priority: ask.priority,
            tenant: ask.tenant,
            weight: ask.weight,
            cost,
            deadline: ask.deadline,
        };
        self.expire(now);
        let mut queue = self.lock();
        if let Err(refusal) = self.check(&queue, &arrival, now) {
            return Entry::Full(refusal);
        }
        // A request may have left since the first check.
        if self.state.enter_or_wait(self.running_max()) {
            return self.admitted_at_once(cost, now);
        }
        let (sender, receiver) = oneshot::channel();
        let ticket = queue.push(&arrival, Waiting { sender, cost });
        drop(queue);
        Entry::Waiting(Wait::new(Arc::clone(self), ticket, receiver))
    }

    fn check(&self, queue: &Queue<Waiting>, arrival: &Arrival<'_>, now: u64) -> Result<(), Refusal> {
        let wait = self.duration_of(queue.cost_ahead(arrival));
        let is_queue_full = queue.len() >= self.config.waiting_max
            || queue.tenant_len(arrival.priority, arrival.tenant) >= self.config.tenant_waiting_max;
        let time_left = Duration::from_nanos(arrival.deadline.saturating_sub(now));
        let is_long = wait.is_some_and(|wait| wait > self.config.wait_max.min(time_left));
        if !is_queue_full && !is_long && !time_left.is_zero() {
            return Ok(());
        }
        count(if is_queue_full { &self.counters.full } else { &self.counters.long });
        let retry_after = wait.unwrap_or(RETRY_DEFAULT).max(RETRY_DEFAULT);
        Err(Refusal { retry_after, is_queue_full })
    }

    fn admitted_at_once(self: &Arc<Self>, cost: u64, now: u64) -> Entry {
        count(&self.counters.at_once);
        Entry::Admitted(Permit::new(Arc::clone(self), cost, now))
    }

    /// Returns the time in which all places serve this many tokens, if their speed is known.
    fn duration_of(&self, tokens: u64) -> Option<Duration> {
        let speed = self.speed.get()? * f64::from(self.running_max());
        Duration::try_from_secs_f64(tokens as f64 / speed).ok()
    }

    /// Measures how long a request took, and expires waiters if there are any.
    pub(super) fn learn(&self, cost: u64, held_ns: u64, now: u64) {
        self.speed.observe(cost, held_ns);
        if self.state.get().1 > 0 {
            self.expire(now);
        }
    }

    /// Ends the wait of requests whose deadline has passed.
    pub fn expire(&self, now: u64) {
        self.latest.fetch_max(now, Ordering::Relaxed);
        loop {
            let expired = {
                let mut queue = self.lock();
                let expired = queue.pop_expired(now);
                if expired.is_some() {
                    self.state.stop_waiting();
                }
                expired
            };
            let Some(waiting) = expired else { return };
            count(&self.counters.expired);
            // The send fails if the waiter gave up concurrently.
            let _ = waiting.sender.send(WaitOutcome::Expired);
        }
    }

    /// Changes the number of places, as workers come and go. More requests are admitted immediately; fewer,
    /// as requests leave.
    pub fn set_running_max(self: &Arc<Self>, running_max: u32) {
        self.running_max.store(running_max.max(1), Ordering::Relaxed);
        loop {
            let next = {
                let mut queue = self.lock();
                if !self.state.try_advance(self.running_max()) {
                    return;
                }
                queue.pop()
            };
            match next {
                Some(next) => self.hand_over(next),
                None => self.leave(),
            }
        }
    }

    /// Returns the number of places.
    #[must_use]
    pub fn running_max(&self) -> u32 {
        self.running_max.load(Ordering::Relaxed)
    }

    /// Returns the gate's counters.
    #[must_use]
    pub fn stats(&self) -> GateStats {
        let (running, waiting) = self.state.get();
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        GateStats {
            running,
            waiting,
            waiting_tokens: self.lock().cost(),
            tokens_per_second: self.speed.get().map_or(0.0, |speed| speed * f64::from(self.running_max())),
            admitted_at_once: get(&self.counters.at_once),
            admitted_from_queue: get(&self.counters.late),
            refused_full: get(&self.counters.full),
            refused_wait_too_long: get(&self.counters.long),
            expired: get(&self.counters.expired),
            abandoned: get(&self.counters.abandoned),
        }
    }

    /// Passes a freed place to the next waiter, or frees the place if there is none.
    pub(super) fn leave(self: &Arc<Self>) {
        while !self.state.try_leave(self.running_max()) {
            let next = {
                let mut queue = self.lock();
                let next = queue.pop();
                if next.is_some() {
                    self.state.stop_waiting();
                }
                next
            };
            // No waiter is left: the last one gave up between the two checks.
            let Some(next) = next else { continue };
            match self.offer(next) {
                Ok(()) => return,
                // The waiter gave up concurrently: the place is passed to the next one.
                Err(()) => continue,
            }
        }
    }

    /// Gives an already counted place to a waiter, or frees it.
    fn hand_over(self: &Arc<Self>, next: Waiting) {
        if self.offer(next).is_err() {
            self.leave();
        }
    }

    fn offer(self: &Arc<Self>, next: Waiting) -> Result<(), ()> {
        let since = self.latest.load(Ordering::Relaxed);
        let permit = Permit::new(Arc::clone(self), next.cost, since);
        match next.sender.send(WaitOutcome::Admitted(permit)) {
            Ok(()) => {
                count(&self.counters.late);
                Ok(())
            }
            Err(outcome) => {
                // Dropping the permit would recurse into `leave`: a thousand abandoned waiters would be a
                // thousand stack frames.
                if let WaitOutcome::Admitted(permit) = outcome {
                    permit.forget();
                }
                Err(())
            }
        }
    }

    /// Removes a waiter that gave up from the queue.
    pub(super) fn abandon(&self, ticket: &Ticket) {
        let removed = {
            let mut queue = self.lock();
            let removed = queue.remove(ticket);
            if removed.is_some() {
                self.state.stop_waiting();
            }
            removed
        };
        if removed.is_some() {
            count(&self.counters.abandoned);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue<Waiting>> {
        // A panic can only occur between two calls of the queue, which is consistent then.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
