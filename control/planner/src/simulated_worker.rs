//! One worker in virtual time: continuous batching with chunked prefill, first come, first served.
//!
//! Decode-only steps are simulated together up to the next arrival or the next end of a request, so that an
//! hour of one worker costs some milliseconds. Requests are represented by their lengths: the planner
//! simulates millions of them, and has no prompts. (`tools/replay` simulates prefix caches, for routing
//! policies.)

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crate::engine::{Engine, WorkerRole};
use crate::fleet_simulation::Request;

/// Decode-only steps simulated together while a request waits for KV; admission is retried after them.
const STEPS_WHILE_WAITING: u64 = 20;

/// Progress of a request, with its time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Progress {
    FirstToken { number: usize, at: f64 },
    Finished { number: usize, at: f64 },
}

#[derive(Debug)]
struct Prefilling {
    number: usize,
    /// Prompt tokens whose KV is computed.
    done: f64,
}

#[derive(Debug)]
pub(crate) struct SimulatedWorker {
    engine: Engine,
    role: WorkerRole,
    now: f64,
    /// Steps so far.
    steps: u64,
    waiting: VecDeque<usize>,
    prefilling: VecDeque<Prefilling>,
    /// Running requests, by the step after which they end.
    running: BinaryHeap<Reverse<(u64, usize)>>,
    /// Tokens of KV of running requests.
    running_kv: f64,
    /// Tokens of prompts in `prefilling`, computed or not.
    prefilling_tokens: f64,
    /// Prompt tokens of requests in `waiting` and `prefilling` that are not computed.
    queued_tokens: f64,
    /// Tokens generated after the first, and the sum of the gaps before them.
    gaps: (f64, f64),
}

impl SimulatedWorker {
    pub(crate) fn new(engine: Engine, role: WorkerRole, now: f64) -> Self {
        Self {
            engine,
            role,
            now,
            steps: 0,
            waiting: VecDeque::new(),
            prefilling: VecDeque::new(),
            running: BinaryHeap::new(),
            running_kv: 0.0,
            prefilling_tokens: 0.0,
            queued_tokens: 0.0,
            gaps: (0.0, 0.0),
        }
    }

    /// Returns the tokens after the first that were generated since the last call, and the sum of the gaps
    /// before them.
    pub(crate) fn take_gaps(&mut self) -> (f64, f64) {
        std::mem::take(&mut self.gaps)
    }

    fn generate(&mut self, steps: f64, seconds: f64) {
        let tokens = self.running.len() as f64 * steps;
        self.running_kv += tokens;
        self.gaps.0 += tokens;
        self.gaps.1 += self.running.len() as f64 * seconds;
    }

    pub(crate) fn push(&mut self, number: usize, requests: &[Request]) {
        let request = &requests[number];
        self.now = self.now.max(if self.is_idle() { request.at } else { self.now });
        self.queued_tokens += request.uncached();
        self.waiting.push_back(number);
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.prefilling.is_empty() && self.running.is_empty()
    }

    /// Returns the requests that wait for a place in the batch.
    pub(crate) fn queued(&self) -> usize {
        self.waiting.len()
    }

    /// Returns the requests in the batch.
    pub(crate) fn running(&self) -> usize {
        self.running.len() + self.prefilling.len()
    }

    /// Returns the requests that decode.
    pub(crate) fn decoding(&self) -> usize {
        self.running.len()
    }

    pub(crate) fn kv_tokens(&self) -> f64 {
        self.running_kv
    }

    pub(crate) fn queued_tokens(&self) -> f64 {
        self.queued_tokens
    }

    /// Returns the approximate seconds of work ahead of a new request, by which a router balances.
    pub(crate) fn load(&self) -> f64 {
        let step = &self.engine.step;
        self.queued_tokens * step.per_prompt_token + self.running.len() as f64 * step.base / 16.0
    }

    /// Runs until `until`, or until no work is left. A step that has begun is completed.
    pub(crate) fn advance(&mut self, until: f64, requests: &[Request], progress: &mut Vec<Progress>) {
        while self.now < until && !self.is_idle() {
            self.admit(requests, progress);
            if self.prefilling.is_empty() {
                self.decode_only(until);
            } else {
                self.step(requests, progress);
            }
            while let Some(&Reverse((end, number))) = self.running.peek()
                && end <= self.steps
            {
                self.running.pop();
                self.running_kv -= requests[number].prompt + requests[number].output;
                progress.push(Progress::Finished { number, at: self.now });
            }
        }
        if self.is_idle() {
            self.now = self.now.max(until);
        }
    }

    /// Admits waiting requests to the batch while their prompts, and half of their answers, fit into the KV
    /// cache; a single request is admitted whatever its length.
    fn admit(&mut self, requests: &[Request], progress: &mut Vec<Progress>) {
        while let Some(&number) = self.waiting.front() {
            let request = &requests[number];
            let held = self.running_kv + self.prefilling_tokens;
            let is_alone = self.prefilling.is_empty() && self.running.is_empty();
            let fits = held + request.prompt + request.output / 2.0 <= self.engine.kv_tokens;
            if !is_alone && (!fits || self.running() >= self.engine.running_max) {
                return;
            }
            self.waiting.pop_front();
            if self.role == WorkerRole::Decode {
                self.queued_tokens -= request.uncached();
                if request.output > 1.0 {
                    self.start_decoding(number, requests);
                } else {
                    progress.push(Progress::Finished { number, at: self.now });
                }
            } else {
                self.prefilling_tokens += request.prompt;
                self.prefilling.push_back(Prefilling { number, done: request.cached });
            }
        }
    }

    fn start_decoding(&mut self, number: usize, requests: &[Request]) {
        let request = &requests[number];
        self.running_kv += request.prompt + 1.0;
        self.running.push(Reverse((self.steps + request.output as u64 - 1, number)));
    }

    /// Runs a step that contains prompt tokens.
    fn step(&mut self, requests: &[Request], progress: &mut Vec<Progress>) {
        let mut left = (self.engine.batch_tokens - self.running.len() as f64).max(1.0);
        let mut seconds = self.engine.step.decode(self.running.len() as f64, self.running_kv);
        let mut finished = 0;
        for prefilling in &mut self.prefilling {
            let prompt = requests[prefilling.number].prompt;
            let chunk = left.min(prompt - prefilling.done);
            seconds += self.engine.step.prefill(prefilling.done, prefilling.done + chunk);
            prefilling.done += chunk;
            left -= chunk;
            self.queued_tokens -= chunk;
            finished += usize::from(prefilling.done >= prompt);
            if left <= 0.0 {
                break;
            }
        }
        self.now += seconds;
        self.steps += 1;
        self.generate(1.0, seconds);
        for _ in 0..finished {
            let Some(Prefilling { number, .. }) = self.prefilling.pop_front() else { return };
            let request = &requests[number];
            self.prefilling_tokens -= request.prompt;
            progress.push(Progress::FirstToken { number, at: self.now });
            if self.role == WorkerRole::Prefill || request.output <= 1.0 {
                progress.push(Progress::Finished { number, at: self.now });
            } else {
                self.start_decoding(number, requests);
            }
        }
    }

    fn decode_only(&mut self, until: f64) {
        let Some(&Reverse((end, _))) = self.running.peek() else { return };
        let running = self.running.len() as f64;
        let mut steps = end.saturating_sub(self.steps).max(1);
        if !self.waiting.is_empty() {
            steps = steps.min(STEPS_WHILE_WAITING);
        }
        let seconds_of = |steps: u64| {
            self.engine.step.decode(running, self.running_kv + running * steps as f64 / 2.0) * steps as f64
        };
        let seconds = seconds_of(steps);
        if self.now + seconds > until {
            let share = (until - self.now) / seconds;
            steps = ((steps as f64 * share).ceil() as u64).clamp(1, steps);
        }
        let seconds = seconds_of(steps);
        self.now += seconds;
        self.steps += steps;
        self.generate(steps as f64, seconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(role: WorkerRole, request: Request) -> Vec<Progress> {
        let mut worker = SimulatedWorker::new(Engine::default(), role, 0.0);
        let requests = [request];
        let mut progress = Vec::new();
        worker.push(0, &requests);
        worker.advance(1e6, &requests, &mut progress);
        assert!(worker.is_idle());
        assert!(worker.kv_tokens().abs() < 1e-6 && worker.queued_tokens().abs() < 1e-6, "{worker:?}");
        progress
    }

    #[test]
    fn a_lone_request_takes_the_sum_of_its_steps() {
        let step = Engine::default().step;
        let request = Request { at: 2.0, prompt: 10_000.0, cached: 0.0, output: 101.0 };
        let progress = one(WorkerRole::Both, request);
        let [Progress::FirstToken { at: first, .. }, Progress::Finished { at: end, .. }] = progress[..]
        else {
            panic!("{progress:?}")
        };
        // Two chunks: 8,192 tokens and the rest.
        let prefill = 2.0 * step.decode(0.0, 0.0) + step.prefill(0.0, 10_000.0);
        assert!((first - 2.0 - prefill).abs() < 1e-9, "{first}");
        let decode: f64 = (0..100).map(|token| step.decode(1.0, 10_001.0 + f64::from(token))).sum();
        assert!((end - first - decode).abs() < 1e-3, "{} not {decode}", end - first);
    }

    #[test]
    fn roles_compute_their_phase_only() {
        let request = Request { at: 0.0, prompt: 4000.0, cached: 0.0, output: 50.0 };
        let of = |role| -> f64 {
            match one(role, request)[..] {
                [.., Progress::Finished { at, .. }] => at,
                _ => panic!("never finished"),
            }
        };
        let (both, prefill, decode) = (of(WorkerRole::Both), of(WorkerRole::Prefill), of(WorkerRole::Decode));
        assert!((prefill + decode - both).abs() < 1e-3, "{prefill} + {decode} = {both}");
        let cached = one(WorkerRole::Prefill, Request { cached: 3999.0, ..request });
        assert!(matches!(cached[0], Progress::FirstToken { at, .. } if at < 0.02), "{cached:?}");
    }

    #[test]
    fn a_full_cache_makes_requests_wait() {
        let engine = Engine { kv_tokens: 10_000.0, ..Engine::default() };
        let mut worker = SimulatedWorker::new(engine, WorkerRole::Both, 0.0);
        let requests = vec![Request { at: 0.0, prompt: 4000.0, cached: 0.0, output: 100.0 }; 3];
        (0..3).for_each(|number| worker.push(number, &requests));
        let mut progress = Vec::new();
        worker.advance(1.0, &requests, &mut progress);
        assert_eq!((worker.running(), worker.queued()), (2, 1));
        worker.advance(60.0, &requests, &mut progress);
        assert_eq!(progress.len(), 6);
    }
}
