//! A simulated worker.
//!
//! Steps: each computes up to a batch of prompt tokens, first come first served, and one token for every running request.
//! Between arrivals, steps that only decode are computed together, so that an hour takes a second.

use std::collections::VecDeque;

use hdrhistogram::Histogram;

use crate::pool::{Change, Pool};

/// Speed and size of a worker.
#[derive(Debug, Clone, Copy)]
pub struct WorkerModel {
    /// Number of blocks of the pool.
    pub pool_blocks: usize,
    /// Largest number of prompt tokens in one step.
    pub batch_tokens: usize,
    /// Largest number of running requests.
    pub running_max: usize,
    /// Fixed seconds of a step.
    pub step: f64,
    /// Seconds per prompt token.
    pub per_token: f64,
    /// Seconds per pair of a prompt token and a token before it: attention.
    pub per_pair: f64,
    /// Seconds per running request.
    pub per_decode: f64,
}

impl Default for WorkerModel {
    /// Roughly one node of eight GPUs with a model of 70 billion parameters.
    fn default() -> Self {
        Self {
            pool_blocks: 3000,
            batch_tokens: 8192,
            running_max: 256,
            step: 0.012,
            per_token: 6e-5,
            per_pair: 4e-10,
            per_decode: 6e-5,
        }
    }
}

/// A request in a worker.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) number: usize,
    pub(crate) arrived: f64,
    pub(crate) tokens: usize,
    pub(crate) output: usize,
    /// Keys of the prompt's whole blocks.
    pub(crate) keys: Vec<u64>,
    pub(crate) blocks: Vec<u64>,
    pub(crate) block_tokens: usize,
    done: usize,
    cached: usize,
    leading: usize,
    private: usize,
}

impl Job {
    pub(crate) fn new(
        number: usize,
        arrived: f64,
        (tokens, output): (usize, usize),
        keys: Vec<u64>,
        blocks: Vec<u64>,
        block_tokens: usize,
    ) -> Self {
        Self {
            number,
            arrived,
            tokens,
            output: output.max(1),
            keys,
            blocks,
            block_tokens,
            done: 0,
            cached: 0,
            leading: 0,
            private: 0,
        }
    }
}

/// An event of the worker.
#[derive(Debug)]
pub(crate) enum Report {
    Cache(Change),
    FirstToken { number: usize, since: f64, cached: usize },
    Finished { number: usize },
}

/// Events with their times, before which they must not be visible.
pub(crate) type Reports = VecDeque<(f64, Report)>;

#[derive(Debug)]
pub(crate) struct Worker {
    model: WorkerModel,
    pool: Pool,
    now: f64,
    waiting: VecDeque<Job>,
    /// Prompts being computed, first come first served.
    prefilling: VecDeque<Job>,
    /// Generating requests with the number of tokens left.
    running: Vec<(Job, usize)>,
    pub(crate) computed_tokens: u64,
    pub(crate) busy: f64,
}

impl Worker {
    pub(crate) fn new(model: WorkerModel) -> Self {
        Self {
            model,
            pool: Pool::new(model.pool_blocks),
            now: 0.0,
            waiting: VecDeque::new(),
            prefilling: VecDeque::new(),
            running: Vec::new(),
            computed_tokens: 0,
            busy: 0.0,
        }
    }

    pub(crate) fn push(&mut self, job: Job) {
        self.now = self.now.max(if self.is_idle() { job.arrived } else { self.now });
        self.waiting.push_back(job);
    }

    pub(crate) fn now(&self) -> f64 {
        self.now
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.prefilling.is_empty() && self.running.is_empty()
    }

    /// Runs until `until`, or until there is no work. A step that has begun is finished.
    pub(crate) fn advance(&mut self, until: f64, itl: &mut Histogram<u64>, reports: &mut Reports) {
        while self.now < until && !self.is_idle() {
            self.admit(reports);
            if self.prefilling.is_empty() {
                self.decode_only(until, itl, reports);
            } else {
                self.step(itl, reports);
            }
        }
    }

    fn admit(&mut self, reports: &mut Reports) {
        while let Some(job) = self.waiting.front() {
            if self.prefilling.len() + self.running.len() >= self.model.running_max {
                return;
            }
            let most = (job.tokens - 1) / job.block_tokens;
            let leading = self.pool.leading(&job.keys[..most.min(job.keys.len())]);
            let private = (job.tokens + job.output).div_ceil(job.block_tokens) - leading;
            let mut gone = Vec::new();
            // A request larger than the pool gets all of it.
            let private = private.min(self.model.pool_blocks.saturating_sub(leading));
            if !self.pool.admit(&job.keys[..leading], private, &mut gone) {
                return;
            }
            if !gone.is_empty() {
                reports.push_back((self.now, Report::Cache(Change::Removed(gone))));
            }
            let Some(mut job) = self.waiting.pop_front() else { return };
            (job.leading, job.private) = (leading, private);
            job.cached = leading * job.block_tokens;
            job.done = job.cached;
            self.prefilling.push_back(job);
        }
    }

    fn step(&mut self, itl: &mut Histogram<u64>, reports: &mut Reports) {
        let mut left = self.model.batch_tokens;
        let mut seconds = self.model.step + self.model.per_decode * self.running.len() as f64;
        let mut finished = 0;
        for job in &mut self.prefilling {
            let chunk = left.min(job.tokens - job.done);
            seconds += self.model.per_token * chunk as f64
                + self.model.per_pair * chunk as f64 * (job.done as f64 + chunk as f64 / 2.0);
            job.done += chunk;
            left -= chunk;
            self.computed_tokens += chunk as u64;
            finished += usize::from(job.done == job.tokens);
            if left == 0 {
                break;
            }
        }
        self.now += seconds;
        self.busy += seconds;
        self.tokens_of_running(1, seconds, itl, reports);
        for _ in 0..finished {
            let Some(mut job) = self.prefilling.pop_front() else { return };
            let keys = job.keys.len().min(job.leading + job.private);
            let before = self.pool.leading(&job.keys).max(job.leading);
            self.pool.register(&job.keys[..keys], job.leading);
            job.private -= keys - job.leading;
            if before < keys {
                let parent = before.checked_sub(1).map(|last| job.keys[last]);
                let (keys, blocks) = (job.keys[before..keys].to_vec(), job.blocks[before..keys].to_vec());
                reports.push_back((self.now, Report::Cache(Change::Stored { parent, keys, blocks })));
            }
            job.keys.truncate(keys);
            reports.push_back((
                self.now,
                Report::FirstToken { number: job.number, since: self.now - job.arrived, cached: job.cached },
            ));
            let left = job.output - 1;
            if left == 0 {
                self.finish(&job, reports);
            } else {
                self.running.push((job, left));
            }
        }
    }

    fn decode_only(&mut self, until: f64, itl: &mut Histogram<u64>, reports: &mut Reports) {
        let seconds = self.model.step + self.model.per_decode * self.running.len() as f64;
        let least = self.running.iter().map(|running| running.1).min().unwrap_or(1);
        let steps = (((until - self.now) / seconds).ceil() as usize).clamp(1, least);
        self.now += seconds * steps as f64;
        self.busy += seconds * steps as f64;
        self.tokens_of_running(steps, seconds, itl, reports);
    }

    fn tokens_of_running(
        &mut self,
        steps: usize,
        seconds: f64,
        itl: &mut Histogram<u64>,
        reports: &mut Reports,
    ) {
        itl.saturating_record_n((seconds * 1e6) as u64, (steps * self.running.len()) as u64);
        let mut at = 0;
        while at < self.running.len() {
            self.running[at].1 -= steps;
            if self.running[at].1 == 0 {
                let (job, _) = self.running.swap_remove(at);
                self.finish(&job, reports);
            } else {
                at += 1;
            }
        }
    }

    fn finish(&mut self, job: &Job, reports: &mut Reports) {
        self.pool.release(&job.keys, job.private);
        reports.push_back((self.now, Report::Finished { number: job.number }));
    }
}
