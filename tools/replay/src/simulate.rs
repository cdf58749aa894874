//! Arrivals, decisions, and the feedback to the index and the learner.

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use router_policy::{
    Candidate, CostModel, FEATURES, Factor, Learner, Policy, PredictedTime, Request, Strategy, TIERS,
    features,
};
use router_radix::{Index, IndexConfig, Member, Tier};
use tools_workload::mooncake::{BLOCK_TOKENS, Request as TraceRequest, block_hashes};
use tools_workload::{Random, chained};

use crate::pool::Change;
use crate::worker::{Job, Report, Reports, Worker, WorkerModel};

/// Settings of one simulation.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Number of workers.
    pub workers: usize,
    /// Speed and size of the workers.
    pub model: WorkerModel,
    /// Routing policy.
    pub policy: Policy,
    /// Factor by which the trace's time is accelerated.
    pub speedup: f64,
    /// Number of repetitions of the trace, each with different prompts.
    pub repeat: usize,
    /// Random seed. Equal seeds give equal runs.
    pub seed: u64,
}

/// Result of a simulation.
#[derive(Debug)]
pub struct Outcome {
    /// Strategy of the policy.
    pub strategy: Strategy,
    /// Value of [`Setup::speedup`].
    pub speedup: f64,
    /// Number of answered requests.
    pub requests: usize,
    /// Share of prompt tokens that were cached.
    pub hit_rate: f64,
    /// Microseconds to the first token.
    pub ttft: Histogram<u64>,
    /// Microseconds between tokens.
    pub itl: Histogram<u64>,
    /// Busy time of the busiest worker divided by the mean.
    pub imbalance: f64,
    /// Mean share of the time that a worker was busy.
    pub utilisation: f64,
    /// Mean of |predicted − real| / real of the time to the first token.
    pub prediction_error: f64,
}

/// Load booked on a worker.
#[derive(Debug, Default, Clone, Copy)]
struct BookedLoad {
    requests: u32,
    queued_tokens: u32,
    decoding_blocks: u32,
}

/// A request between its decision and its end.
#[derive(Clone, Copy, Default)]
struct InFlight {
    worker: usize,
    uncached: u32,
    blocks: u32,
    features: [f64; FEATURES],
    predicted: f64,
}

struct Fleet {
    index: Index,
    members: Vec<Member>,
    workers: Vec<Worker>,
    /// Events of workers that are not visible to the router yet.
    reports: Vec<Reports>,
    booked: Vec<BookedLoad>,
    learner: Learner,
    factors: Vec<Factor>,
    in_flight: Vec<InFlight>,
    ttft: Histogram<u64>,
    itl: Histogram<u64>,
    cached_tokens: u64,
    finished: usize,
    errors: (f64, usize),
}

impl Fleet {
    /// Advances a worker to `until`, and applies its reports up to then.
    fn advance(&mut self, worker: usize, until: f64) {
        self.workers[worker].advance(until, &mut self.itl, &mut self.reports[worker]);
        while let Some((_, report)) = self.reports[worker].pop_front_if(|report| report.0 <= until) {
            match report {
                Report::Cache(Change::Stored { parent, keys, blocks }) => {
                    self.index.write().stored(self.members[worker], Tier::Device, parent, &keys, &blocks);
                }
                Report::Cache(Change::Removed(keys)) => {
                    self.index.write().removed(self.members[worker], Tier::Device, &keys);
                }
                Report::FirstToken { number, since, cached } => {
                    let flight = self.in_flight[number];
                    self.booked[worker].queued_tokens -= flight.uncached;
                    let factor = &mut self.factors[worker];
                    factor.observe(self.learner.learned().seconds(flight.features), since);
                    self.learner.observe(flight.features, since / factor.value());
                    self.ttft.saturating_record((since * 1e6) as u64);
                    self.cached_tokens += cached as u64;
                    self.errors.0 += (flight.predicted - since).abs() / since;
                    self.errors.1 += 1;
                }
                Report::Finished { number } => {
                    let flight = self.in_flight[number];
                    self.booked[worker].requests -= 1;
                    self.booked[worker].decoding_blocks -= flight.blocks;
                    self.finished += 1;
                }
            }
        }
    }
}

/// Simulates a trace; `progress` is called periodically with the share that is done.
pub fn simulate(setup: &Setup, trace: &[TraceRequest], mut progress: impl FnMut(f64)) -> Result<Outcome> {
    let index = Index::new(IndexConfig::default());
    let mut reader = index.reader().context("a reader")?;
    let members = (0..setup.workers).map_while(|_| index.write().join()).collect::<Vec<_>>();
    anyhow::ensure!(members.len() == setup.workers, "{} workers are too many", setup.workers);
    let count = trace.len() * setup.repeat;
    let mut fleet = Fleet {
        index,
        members,
        workers: (0..setup.workers).map(|_| Worker::new(setup.model)).collect(),
        reports: (0..setup.workers).map(|_| Reports::new()).collect(),
        booked: vec![BookedLoad::default(); setup.workers],
        learner: Learner::default(),
        factors: vec![Factor::default(); setup.workers],
        in_flight: vec![InFlight::default(); count],
        ttft: Histogram::new_with_bounds(1, 36_000_000_000, 3)?,
        itl: Histogram::new_with_bounds(1, 3_600_000_000, 3)?,
        cached_tokens: 0,
        finished: 0,
        errors: (0.0, 0),
    };
    let mut random = Random::new(setup.seed);
    let (mut prompt_tokens, mut now) = (0_u64, 0.0);
    let mut candidates = Vec::with_capacity(setup.workers);
    let times = arrivals(setup, trace, &mut random);
    let requests = (0..setup.repeat).flat_map(|turn| trace.iter().map(move |request| (turn as u64, request)));
    for (number, (turn, request)) in requests.enumerate() {
        now = times[number];
        (0..setup.workers).for_each(|worker| fleet.advance(worker, now));
        let mut blocks = block_hashes(request, 1);
        blocks.iter_mut().for_each(|block| *block ^= turn.wrapping_mul(0xD6E8_FEB8_6659_FD93));
        let overlaps = reader.overlaps(&blocks);
        let wanted = Request {
            tokens: request.input_length.max(1) as u32,
            block_tokens: BLOCK_TOKENS as u32,
            session: blocks.get(1).copied(),
        };
        candidates.clear();
        candidates.extend((0..setup.workers).map(|worker| Candidate {
            identity: worker as u64,
            leading: [overlaps.device(fleet.members[worker]); TIERS],
            queued_tokens: fleet.booked[worker].queued_tokens,
            decoding_blocks: fleet.booked[worker].decoding_blocks,
            requests: fleet.booked[worker].requests,
            transfer_seconds: 0.0,
            is_cold: false,
            coefficients: fleet.learner.coefficients().scaled_by(fleet.factors[worker].value()),
        }));
        let choice = setup.policy.choose(&wanted, &candidates, number as u64, random.bits());
        let worker = choice.context("no workers")?.index;
        let candidate = &candidates[worker];
        let flight = InFlight {
            worker,
            uncached: candidate.uncached_tokens(&wanted),
            blocks: wanted.blocks(),
            features: features(&wanted, candidate),
            predicted: PredictedTime.cost(&wanted, candidate).total,
        };
        fleet.in_flight[number] = flight;
        let booked = &mut fleet.booked[flight.worker];
        booked.requests += 1;
        booked.queued_tokens += flight.uncached;
        booked.decoding_blocks += flight.blocks;
        prompt_tokens += u64::from(wanted.tokens);
        let lengths = (wanted.tokens as usize, request.output_length);
        fleet.workers[worker].push(Job::new(number, now, lengths, chained(&blocks), blocks, BLOCK_TOKENS));
        if number % 1024 == 0 {
            progress(number as f64 / count as f64);
        }
    }
    (0..setup.workers).for_each(|worker| fleet.advance(worker, f64::INFINITY));
    anyhow::ensure!(fleet.finished == count, "{} of {count} requests finished", fleet.finished);
    let busy: Vec<f64> = fleet.workers.iter().map(|worker| worker.busy).collect();
    let mean = busy.iter().sum::<f64>() / busy.len() as f64;
    Ok(Outcome {
        strategy: setup.policy.strategy,
        speedup: setup.speedup,
        requests: count,
        hit_rate: fleet.cached_tokens as f64 / prompt_tokens as f64,
        ttft: fleet.ttft,
        itl: fleet.itl,
        imbalance: busy.iter().copied().fold(0.0, f64::max) / mean,
        utilisation: mean / fleet.workers.iter().map(Worker::now).fold(now, f64::max).max(1e-9),
        prediction_error: fleet.errors.0 / fleet.errors.1.max(1) as f64,
    })
}

/// Arrival times of requests, in seconds. The trace has one time stamp for all requests of some seconds: within these their
/// times are random and uniform.
fn arrivals(setup: &Setup, trace: &[TraceRequest], random: &mut Random) -> Vec<f64> {
    let mut times = Vec::with_capacity(trace.len() * setup.repeat);
    let mut start = 0.0;
    for _ in 0..setup.repeat {
        let mut gap = 1.0;
        let mut groups = trace.chunk_by(|a, b| a.timestamp == b.timestamp).peekable();
        while let Some(group) = groups.next() {
            let from = group[0].timestamp as f64;
            gap = groups.peek().map_or(gap, |next| next[0].timestamp as f64 - from);
            let mut offsets: Vec<f64> = group.iter().map(|_| random.unit() * gap).collect();
            offsets.sort_by(f64::total_cmp);
            times.extend(offsets.into_iter().map(|offset| (start + from + offset) / 1e3 / setup.speedup));
        }
        start += trace.last().map_or(0.0, |request| request.timestamp as f64 + gap);
    }
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace() -> Vec<TraceRequest> {
        let mut random = Random::new(5);
        (0..600)
            .map(|number: u64| {
                let conversation = random.below(60) as u64;
                let blocks = 2 + number / 60;
                TraceRequest {
                    timestamp: number * 250,
                    input_length: blocks as usize * BLOCK_TOKENS + 40,
                    output_length: 20 + random.below(100),
                    hash_ids: (0..blocks)
                        .map(|at| conversation * 1000 + at)
                        .chain([number + 1_000_000])
                        .collect(),
                }
            })
            .collect()
    }

    fn run(strategy: Strategy, seed: u64) -> Outcome {
        let model = WorkerModel { pool_blocks: 200, ..WorkerModel::default() };
        let policy = Policy { strategy, ..Policy::default() };
        let setup = Setup { workers: 4, model, policy, speedup: 1.0, repeat: 2, seed };
        simulate(&setup, &trace(), |_| {}).expect("a simulation")
    }

    #[test]
    fn equal_seeds_make_equal_runs_and_the_cache_is_worth_finding() {
        let (a, b) = (run(Strategy::PredictedTime, 1), run(Strategy::PredictedTime, 1));
        assert_eq!(
            (a.requests, a.hit_rate, a.ttft.mean(), a.itl.mean()),
            (1200, b.hit_rate, b.ttft.mean(), b.itl.mean())
        );
        let random = run(Strategy::Random, 1);
        assert!(a.hit_rate > random.hit_rate * 1.5, "{} against {}", a.hit_rate, random.hit_rate);
        assert!(a.ttft.value_at_quantile(0.5) < random.ttft.value_at_quantile(0.5));
        assert_eq!(a.itl.len(), random.itl.len(), "as many tokens");
    }

    /// Without queue and cache the time is that of the model.
    #[test]
    fn an_idle_worker_takes_the_models_time() {
        let model = WorkerModel::default();
        let policy = Policy { strategy: Strategy::RoundRobin, ..Policy::default() };
        let setup = Setup { workers: 1, model, policy, speedup: 1.0, repeat: 1, seed: 1 };
        let one = TraceRequest { timestamp: 0, input_length: 10_000, output_length: 11, hash_ids: vec![] };
        let outcome = simulate(&setup, &[one], |_| {}).expect("a simulation");
        let expected = 2.0 * model.step
            + model.per_token * 10_000.0
            + model.per_pair * (8192.0 * 4096.0 + 1808.0 * (8192.0 + 904.0));
        let ttft = outcome.ttft.value_at_quantile(0.5) as f64 / 1e6;
        assert!((ttft / expected - 1.0).abs() < 0.002, "{ttft} s, not {expected}");
        assert_eq!(outcome.itl.len(), 10);
        let step = outcome.itl.value_at_quantile(0.5) as f64 / 1e6;
        assert!((step / (model.step + model.per_decode) - 1.0).abs() < 0.01);
    }
}
