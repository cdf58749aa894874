//! Continuous batching in simulated time.
//!
//! A step computes prompt chunks and one token for each sequence that is past its prompt, and takes
//! `prompt tokens × a + running × b + c`. All tokens of a step are sent at its end. Blocks become known when
//! the step that computes them is planned, as in vLLM. When blocks run out, the sequence that was admitted last
//! returns to the head of the queue and is computed again. The clock is a deadline that steps advance, so that
//! many steps shorter than a timer tick still take the right time together.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use crate::fault::FaultKind;
use crate::stats::add;
use crate::worker::{Sequence, State, Worker};

/// Most tokens that one step computes, as vLLM's `max_num_batched_tokens`.
const STEP_TOKENS_MAX: usize = 8192;
/// A clock that is later than this restarts: the machine was busy, and catching up would distort the simulation.
const LATE_MAX: Duration = Duration::from_millis(20);

/// Waiting and running sequences. Bounded by `waiting_max` and `batch_max`.
#[derive(Debug, Default)]
pub(crate) struct Scheduler {
    pub(crate) waiting: VecDeque<Sequence>,
    pub(crate) running: Vec<Sequence>,
    /// Whether a task runs the steps.
    pub(crate) is_stepping: bool,
}

impl Scheduler {
    pub(crate) fn remove(&mut self, id: u64) -> Option<Sequence> {
        if let Some(at) = self.running.iter().position(|sequence| sequence.id == id) {
            return Some(self.running.remove(at));
        }
        let at = self.waiting.iter().position(|sequence| sequence.id == id)?;
        self.waiting.remove(at)
    }

    pub(crate) fn take_all(&mut self) -> Vec<Sequence> {
        self.waiting.drain(..).chain(self.running.drain(..)).collect()
    }
}

/// Runs steps until there is no work left.
pub(crate) async fn run_steps(worker: Arc<Worker>) {
    let mut clock = Instant::now();
    loop {
        let took = {
            let mut state = worker.lock();
            let waits = !state.scheduler.waiting.is_empty() && !state.is_asleep && !state.is_paused;
            let is_over = !waits && state.scheduler.running.is_empty();
            if is_over || worker.is_stopped.load(Ordering::Relaxed) {
                state.scheduler.is_stepping = false;
                return;
            }
            plan(&worker, &mut state)
        };
        let now = Instant::now();
        if clock + LATE_MAX < now {
            clock = now;
        }
        match took {
            Some(took) => clock += took,
            // No sequence fits until a lease ends or a client goes away.
            None => clock = now + Duration::from_millis(1),
        }
        if clock > now {
            tokio::time::sleep_until(clock).await;
        } else {
            tokio::task::yield_now().await;
        }
        if took.is_some() {
            finish(&worker, &mut worker.lock());
        }
    }
}

/// Plans the next step. Returns its duration, or `None` if no sequence can run.
fn plan(worker: &Worker, state: &mut State) -> Option<Duration> {
    let (mut budget, mut prefill, mut squares) = (STEP_TOKENS_MAX, 0, 0.0);
    let square = |from: usize, chunk: usize| ((from + chunk) as f64).powi(2) - (from as f64).powi(2);
    let mut at = 0;
    while at < state.scheduler.running.len() {
        let sequence = &mut state.scheduler.running[at];
        let goal = sequence.prompt + sequence.emitted;
        if !state.pool.grow(&mut sequence.table, goal) {
            preempt(worker, state);
            continue;
        }
        let chunk = (goal - sequence.computed).min(budget);
        if chunk > 1 {
            prefill += chunk;
            squares += square(sequence.computed, chunk);
        }
        schedule(state, at, chunk);
        budget -= chunk;
        at += 1;
    }
    let takes_new = !state.is_asleep && !state.is_paused;
    while takes_new && state.scheduler.running.len() < worker.config.batch_max && budget > 0 {
        let Some(mut sequence) = state.scheduler.waiting.pop_front() else { break };
        let goal = sequence.prompt + sequence.emitted;
        let tokens = &sequence.tokens[..goal];
        let Some(found) = state.pool.admit(&mut sequence.chain, tokens, &mut sequence.table) else {
            state.scheduler.waiting.push_front(sequence);
            break;
        };
        // As vLLM counts: blocks of its own that a preempted request finds again were not cached before it arrived.
        if !std::mem::replace(&mut sequence.was_admitted, true) {
            let cached = worker.admitted(&sequence, found);
            sequence.report_cached = Some(cached);
        }
        sequence.computed = match sequence.is_external {
            // All but the last token were transferred.
            true => found.max(goal - 1),
            false => found,
        };
        let chunk = (goal - sequence.computed).min(budget);
        budget -= chunk;
        prefill += chunk;
        squares += square(sequence.computed, chunk);
        state.scheduler.running.push(sequence);
        schedule(state, state.scheduler.running.len() - 1, chunk);
    }
    let running = state.scheduler.running.len();
    if running == 0 {
        return None;
    }
    add(&worker.counters.steps, 1);
    let held: usize = state.scheduler.running.iter().map(|sequence| sequence.computed).sum();
    let config = &worker.config;
    let seconds = config.prefill_seconds_per_token * prefill as f64
        + config.prefill_seconds_per_square * squares
        + config.decode_seconds_per_request * running as f64
        + config.decode_seconds_per_kv_token * held as f64
        + config.decode_seconds_per_step;
    let slower = worker.faults.draw(FaultKind::Slow).map_or(Duration::ZERO, |fault| fault.delay());
    Some(Duration::from_secs_f64(seconds / config.speedup) + slower)
}

/// Schedules so many further tokens of a running sequence.
fn schedule(state: &mut State, at: usize, chunk: usize) {
    let sequence = &mut state.scheduler.running[at];
    sequence.computed += chunk;
    let tokens = &sequence.tokens[..sequence.computed];
    state.pool.register_blocks(&mut sequence.chain, tokens, &mut sequence.table);
}

/// Preempts the sequence that was admitted last: it returns to the queue.
fn preempt(worker: &Worker, state: &mut State) {
    if let Some(mut last) = state.scheduler.running.pop() {
        state.pool.release(&mut last.table);
        (last.computed, last.is_external) = (0, false);
        state.scheduler.waiting.push_front(last);
        add(&worker.counters.preemptions, 1);
    }
}

/// Ends a step: sends the tokens, and releases the blocks of finished sequences.
fn finish(worker: &Arc<Worker>, state: &mut State) {
    let mut left = 0;
    let mut at = 0;
    while at < state.scheduler.running.len() {
        let sequence = &mut state.scheduler.running[at];
        if sequence.computed < sequence.prompt + sequence.emitted {
            at += 1;
            continue;
        }
        sequence.emitted += 1;
        left += 1;
        let (tokens, cached) = (sequence.emitted, sequence.report_cached.unwrap_or(0));
        let is_over = tokens == sequence.output;
        if !is_over {
            sequence
                .output_progress
                .advance(|progress| (progress.tokens, progress.cached) = (tokens, cached));
            at += 1;
            continue;
        }
        // Counted and released before the client is told, so that a client with its answer sees the final numbers.
        let mut sequence = state.scheduler.running.remove(at);
        worker.finished(state, &mut sequence, cached);
        sequence.output_progress.advance(|progress| {
            (progress.tokens, progress.cached, progress.is_over) = (tokens, cached, true);
        });
    }
    add(&worker.counters.generation_tokens, left);
    worker.publish(state);
}
