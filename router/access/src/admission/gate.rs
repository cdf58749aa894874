//! The gate: entering, leaving and handing over.
//!
//! Time is a nanosecond counter that arrives with each call. A permit that is merely dropped does not know it, so
//! it frees its place and teaches nothing; [`Permit::release`] also tells how long the request took. Waiters past
//! their deadline are found by any call that takes the lock and knows the time; when nothing ends for long, by
//! [`Gate::expire`], which somebody should call once a second.
//!
//! Hot path ([`Gate::enter`] with nobody waiting, and leaving): one compare-and-swap, one count of the Arc, one
//! counter; no lock, no allocation. Waiting: a mutex for one operation of the queue, O(log n); one allocation for
//! the wake-up and few for the queue. Nothing is woken and no permit is dropped under the mutex.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use super::ask::{Ask, Entry, GateConfig, GateStats, Refusal, WAITING_MAX_LIMIT};
use super::permit::Permit;
use super::queue::{Arrival, Queue, Ticket};
use super::speed::Speed;
use super::state::State;
use super::wait::{Wait, WaitOutcome};
use crate::error::Error;

/// Costs are cut off here, so that their sums cannot overflow. The least is 1: whoever costs nothing would stay first
/// for ever.
const COST_MAX: u64 = 1 << 40;
/// Advice to come back when nothing is known.
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

/// Lets requests in.
#[derive(Debug)]
pub struct Gate {
    config: GateConfig,
    running_max: AtomicU32,
    state: State,
    queue: Mutex<Queue<Waiting>>,
    speed: Speed,
    /// Latest time that any call knew, for those that know none.
    latest: AtomicU64,
    counters: Counters,
}

impl Gate {
    /// An empty gate.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when nobody could ever get in, or the queue is larger than [`WAITING_MAX_LIMIT`].
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

    /// Asks to go inside, and waits in the queue if need be. Dropping the future gives up the place, or frees the
    /// permit that was on its way.
    pub async fn admit(self: &Arc<Self>, ask: &Ask<'_>, now: u64) -> Result<WaitOutcome, Refusal> {
        match self.enter(ask, now) {
            Entry::Admitted(permit) => Ok(WaitOutcome::Admitted(permit)),
            Entry::Waiting(wait) => Ok(wait.await),
            Entry::Full(refusal) => Err(refusal),
        }
    }

    /// Asks to go inside without waiting for the answer.
    pub fn enter(self: &Arc<Self>, ask: &Ask<'_>, now: u64) -> Entry {
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
        // Somebody may have left since the first look.
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

    /// How long all places take to serve so much, if their speed is known.
    fn duration_of(&self, tokens: u64) -> Option<Duration> {
        let speed = self.speed.get()? * f64::from(self.running_max());
        Duration::try_from_secs_f64(tokens as f64 / speed).ok()
    }

    /// Learns how long a request took, and looks for the expired if anybody waits.
    pub(super) fn learn(&self, cost: u64, held_ns: u64, now: u64) {
        self.speed.observe(cost, held_ns);
        if self.state.get().1 > 0 {
            self.expire(now);
        }
    }

    /// Tells those whose deadline is past that they waited in vain.
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
            // It may have given up in this very moment.
            let _ = waiting.sender.send(WaitOutcome::Expired);
        }
    }

    /// Changes how many may be inside, as workers come and go. More go in at once; fewer, as those inside leave.
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

    /// How many may be inside.
    #[must_use]
    pub fn running_max(&self) -> u32 {
        self.running_max.load(Ordering::Relaxed)
    }

    /// What it did so far.
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
            admitted_late: get(&self.counters.late),
            refused_full: get(&self.counters.full),
            refused_long: get(&self.counters.long),
            expired: get(&self.counters.expired),
            abandoned: get(&self.counters.abandoned),
        }
    }

    /// A place is free: it goes to the next who still waits, or nobody has it.
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
            // Without a next one the last waiter gave up between the two looks.
            let Some(next) = next else { continue };
            match self.offer(next) {
                Ok(()) => return,
                // It gave up in this very moment: the place is still ours to pass on.
                Err(()) => continue,
            }
        }
    }

    /// Gives a place that is counted already to a waiter, or frees it.
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
                // Its drop would come back here: a thousand who gave up would be a thousand frames of stack.
                if let WaitOutcome::Admitted(permit) = outcome {
                    permit.forget();
                }
                Err(())
            }
        }
    }

    /// Takes a waiter that gave up out of the queue.
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
        // Whoever panicked was between two calls of the queue, which is whole then.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
