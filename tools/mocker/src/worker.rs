//! One mock worker without its HTTP surface: the shared state, and the submission and end of requests.
//!
//! All state that a request can change is behind one lock, held for microseconds. If simulated work takes no
//! time, [`Worker::submit`] runs a request from its admission to its end under that lock, in the caller's task,
//! without queue, timer or wake-up. Otherwise it queues the request, and a task runs steps as long as there is
//! work; an idle worker has neither task nor timer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::SystemTime;

use router_tokens::ModelText;

use crate::events::EventSink;
use crate::fault::{FaultKind, Faults, mix};
use crate::lease::Leases;
use crate::output_generator::{Output, OutputGenerator};
use crate::output_progress::{OutputProgress, Progress};
use crate::pool::{Chain, Pool, Table};
use crate::scheduler::{self, Scheduler};
use crate::stats::{Counters, MockStats, add, get};
use crate::{Dialect, MockConfig};

/// Number of workers created in this process.
static RUNS: AtomicU64 = AtomicU64::new(0);

/// State shared by the workers of one process.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) text: ModelText,
    pub(crate) generator: OutputGenerator,
    /// Whether chats use the tiny model's template, which the server has in code.
    pub(crate) is_tiny: bool,
}

/// One mock worker.
pub(crate) struct Worker {
    pub(crate) config: MockConfig,
    pub(crate) model: Arc<Model>,
    pub(crate) counters: Counters,
    pub(crate) faults: Faults,
    /// Name of this run of the worker, for its peers.
    pub(crate) engine_id: String,
    pub(crate) started: u64,
    /// Start time in seconds, at the clock's full resolution.
    pub(crate) start_seconds: f64,
    pub(crate) is_stopped: AtomicBool,
    pub(crate) state: Mutex<State>,
}

/// State behind the worker's lock.
pub(crate) struct State {
    pub(crate) pool: Pool,
    pub(crate) scheduler: Scheduler,
    pub(crate) leases: Leases,
    pub(crate) events: Option<EventSink>,
    /// Whether the memory is released; the scheduler runs no step then.
    pub(crate) is_asleep: bool,
    /// Whether new requests are held back (SGLang's `/pause_generation`).
    pub(crate) is_paused: bool,
    next_id: u64,
}

/// A sequence in the worker.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: u64,
    /// The prompt, and all output tokens that have a place in the KV cache.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt: usize,
    /// Output tokens, and how many of them have been sent.
    pub(crate) output: usize,
    pub(crate) emitted: usize,
    /// Number of tokens whose KV is computed.
    pub(crate) computed: usize,
    pub(crate) chain: Chain,
    pub(crate) table: Table,
    pub(crate) output_progress: Arc<OutputProgress>,
    pub(crate) is_length: bool,
    /// Whether the prompt's KV came from another worker.
    pub(crate) is_external: bool,
    /// Number of cached tokens to report instead of the number found.
    pub(crate) report_cached: Option<usize>,
    /// Name under which the blocks are leased to another worker.
    pub(crate) lease: Option<String>,
    /// Whether the sequence was admitted before.
    pub(crate) was_admitted: bool,
}

/// Order of one output of a request.
#[derive(Debug, Default)]
pub(crate) struct SequenceRequest {
    pub(crate) prompt: Vec<u32>,
    pub(crate) adapter: Option<String>,
    pub(crate) extras: Vec<String>,
    pub(crate) is_external: bool,
    pub(crate) report_cached: Option<usize>,
    pub(crate) lease: Option<String>,
}

/// A request in the worker. Dropping it before the end aborts the request.
pub(crate) struct Running {
    worker: Arc<Worker>,
    id: u64,
    output_progress: Arc<OutputProgress>,
}

impl Running {
    pub(crate) fn progress(&self) -> Progress {
        self.output_progress.progress()
    }

    pub(crate) fn poll_past(&self, seen: usize, context: &mut Context<'_>) -> Poll<Progress> {
        self.output_progress.poll_past(seen, context)
    }

    /// Waits for the end of the output.
    pub(crate) async fn finished(&self) -> Progress {
        std::future::poll_fn(|context| self.poll_past(usize::MAX, context)).await
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.output_progress.progress().is_over {
            self.worker.abort(self.id);
        }
    }
}

/// The error if too many requests wait.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full;

impl Worker {
    pub(crate) fn new(config: MockConfig, model: Arc<Model>, events: Option<EventSink>) -> Arc<Self> {
        let first_id = u32::from(config.dialect == Dialect::Vllm);
        let pool = Pool::new(config.block_tokens, config.usable_blocks(), first_id, events.is_some());
        let high = mix(config.seed ^ 0x5EED);
        // Workers with equal seeds must still have different ids.
        let run = RUNS.fetch_add(1, Ordering::Relaxed);
        let low = mix(high ^ mix(run << 32 | u64::from(std::process::id())));
        let engine_id = format!(
            "{:08x}-{:04x}-4{:03x}-8{:03x}-{:012x}",
            high >> 32,
            high >> 16 & 0xFFFF,
            high & 0xFFF,
            low >> 52,
            low & 0xFFFF_FFFF_FFFF
        );
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Arc::new(Self {
            faults: Faults::new(config.seed),
            counters: Counters::default(),
            engine_id,
            started: now.as_ref().map_or(0, |now| now.as_secs()),
            start_seconds: now.map_or(0.0, |now| now.as_secs_f64()),
            is_stopped: AtomicBool::new(false),
            state: Mutex::new(State {
                pool,
                scheduler: Scheduler::default(),
                leases: Leases::default(),
                events,
                is_asleep: false,
                is_paused: false,
                next_id: 0,
            }),
            config,
            model,
        })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Submits an order whose output is already known.
    pub(crate) fn submit(self: &Arc<Self>, order: SequenceRequest, output: &Output) -> Result<Running, Full> {
        let SequenceRequest { prompt: mut tokens, adapter, extras, is_external, report_cached, lease } =
            order;
        let prompt = tokens.len();
        // The last token of an output never enters the model.
        tokens.extend_from_slice(&output.tokens[..output.tokens.len().saturating_sub(1)]);
        let mut sequence = Sequence {
            id: 0,
            tokens,
            prompt,
            output: output.tokens.len(),
            emitted: 0,
            computed: 0,
            chain: Chain::new(adapter, extras),
            table: Table::default(),
            output_progress: Arc::default(),
            is_length: output.ending == crate::output_generator::Ending::Length,
            is_external,
            report_cached,
            lease,
            was_admitted: false,
        };
        let mut state = self.lock();
        let is_idle = state.scheduler.waiting.is_empty() && state.scheduler.running.is_empty();
        let is_stopped = state.is_asleep || state.is_paused;
        let is_now =
            self.config.is_instant() && is_idle && !is_stopped && !self.faults.is_armed(FaultKind::Slow);
        if is_now && let Some(cached) = self.run_now(&mut state, &mut sequence) {
            drop(state);
            add(&self.counters.requests, 1);
            let progress = Progress { tokens: sequence.output, cached, is_over: true, is_failed: false };
            let output_progress = Arc::new(OutputProgress::finished(progress));
            return Ok(Running { worker: Arc::clone(self), id: 0, output_progress });
        }
        // Sequences that a running batch has room for wait only until the next step, so they do not count
        // against `waiting_max`.
        let inside = state.scheduler.waiting.len() + state.scheduler.running.len();
        if inside >= self.config.waiting_max.saturating_add(self.config.batch_max) {
            add(&self.counters.refused_full, 1);
            return Err(Full);
        }
        add(&self.counters.requests, 1);
        state.next_id += 1;
        sequence.id = state.next_id;
        let running = Running {
            worker: Arc::clone(self),
            id: sequence.id,
            output_progress: Arc::clone(&sequence.output_progress),
        };
        state.scheduler.waiting.push_back(sequence);
        if !is_stopped && !std::mem::replace(&mut state.scheduler.is_stepping, true) {
            tokio::spawn(scheduler::run_steps(Arc::clone(self)));
        }
        Ok(running)
    }

    /// Runs a request from admission to end. Returns the cached tokens; `None`: too few blocks.
    fn run_now(self: &Arc<Self>, state: &mut State, sequence: &mut Sequence) -> Option<usize> {
        let pool = &mut state.pool;
        let prompt = &sequence.tokens[..sequence.prompt];
        let cached = pool.admit(&mut sequence.chain, prompt, &mut sequence.table)?;
        if !pool.grow(&mut sequence.table, sequence.tokens.len()) {
            pool.release(&mut sequence.table);
            return None;
        }
        pool.register_blocks(&mut sequence.chain, &sequence.tokens, &mut sequence.table);
        let cached = self.admitted(sequence, cached);
        add(&self.counters.generation_tokens, sequence.output);
        self.finished(state, sequence, cached);
        self.publish(state);
        Some(cached)
    }

    /// Counts an admission; returns the cached tokens to report.
    pub(crate) fn admitted(&self, sequence: &Sequence, found: usize) -> usize {
        let counters = &self.counters;
        add(&counters.prompt_tokens, sequence.prompt);
        add(&counters.prefix_queries, sequence.prompt);
        add(&counters.prefix_hits, found);
        if sequence.is_external {
            add(&counters.external_queries, sequence.prompt - found.min(sequence.prompt));
            add(&counters.external_hits, sequence.prompt - found.min(sequence.prompt));
        }
        match sequence.report_cached {
            // SGLang's decode worker reports the larger count of both workers.
            Some(reported) if sequence.is_external && self.config.dialect == Dialect::Sglang => {
                reported.max(found)
            }
            reported => reported.unwrap_or(found),
        }
    }

    /// Releases the blocks of a finished sequence, or leases them for another worker to fetch.
    pub(crate) fn finished(self: &Arc<Self>, state: &mut State, sequence: &mut Sequence, cached: usize) {
        let counter = match sequence.is_length {
            true => &self.counters.finished_length,
            false => &self.counters.finished_stop,
        };
        add(counter, 1);
        // As in NixlConnector: only an output cut short has a rest for another worker.
        match sequence.lease.take().filter(|_| sequence.is_length) {
            Some(name) => {
                let table = std::mem::take(&mut sequence.table);
                let block_ids = state.pool.ids(&table);
                self.offer(state, name, table, block_ids, cached);
            }
            None => state.pool.release(&mut sequence.table),
        }
    }

    /// Publishes the pool's events as one batch.
    pub(crate) fn publish(&self, state: &mut State) {
        let State { pool, events: Some(events), .. } = state else { return };
        if pool.events.is_empty() {
            return;
        }
        add(&self.counters.event_batches, 1);
        let is_published = self.faults.draw(FaultKind::DropEvents).is_none();
        events.publish(std::mem::take(&mut pool.events), is_published);
    }

    fn abort(&self, id: u64) {
        let mut state = self.lock();
        if let Some(mut sequence) = state.scheduler.remove(id) {
            state.pool.release(&mut sequence.table);
            sequence.output_progress.advance(|progress| progress.is_over = true);
            add(&self.counters.aborted, 1);
        }
    }

    /// Gives all requests up, as at the end of a process.
    pub(crate) fn stop(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        let mut state = self.lock();
        for sequence in state.scheduler.take_all() {
            add(&self.counters.failed, 1);
            sequence
                .output_progress
                .advance(|progress| (progress.is_over, progress.is_failed) = (true, true));
        }
        state.leases = Leases::default();
        state.events = None;
    }

    pub(crate) fn stats(&self) -> MockStats {
        let counters = &self.counters;
        let state = self.lock();
        MockStats {
            requests: get(&counters.requests),
            running: state.scheduler.running.len(),
            waiting: state.scheduler.waiting.len(),
            finished: get(&counters.finished_length) + get(&counters.finished_stop),
            aborted: get(&counters.aborted),
            failed: get(&counters.failed),
            refused_full: get(&counters.refused_full),
            held_blocks: state.pool.held(),
            leased_blocks: state.leases.blocks(),
            cached_blocks: state.pool.cached(),
            known_blocks: state.pool.known(),
            prompt_tokens: get(&counters.prompt_tokens),
            generation_tokens: get(&counters.generation_tokens),
            prefix_hits: get(&counters.prefix_hits),
            external_hits: get(&counters.external_hits),
            preemptions: get(&counters.preemptions),
            leases: get(&counters.leases),
            leases_expired: get(&counters.leases_expired),
            pulled: get(&counters.pulled),
            steps: get(&counters.steps),
            event_batches: get(&counters.event_batches),
            retain_seconds: get(&counters.retain_seconds),
            faults: self.faults.shown().into_iter().collect(),
        }
    }
}
