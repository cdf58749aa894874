//! Requests per second that a worker serves within the service level.
//!
//! A few workers are simulated under Poisson arrivals whose lengths are drawn from recent requests, and the
//! rate is bisected for the highest one at which enough requests are in time. A worker in a group serves more
//! than a single worker: behind a long prompt the next request goes to another worker. With the lengths of
//! Mooncake's conversations this is a factor of ten. An analytic formula has to choose one of the limits
//! (prompt time, ITL, KV) in advance; the simulation meets the first limit that applies, with its queueing.
//!
//! Requests that would be late even on an idle worker (a prompt of 80,000 tokens within three seconds) are
//! part of the load, and are not judged: no number of workers brings them in time.

use std::collections::BTreeMap;

use crate::engine::{Engine, ServiceLevel, WorkerRole};
use crate::fleet_simulation::Request;
use crate::simulated_worker::{Progress, SimulatedWorker};

/// Lengths of one request, in tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lengths {
    /// Tokens of the prompt.
    pub prompt: f64,
    /// Prompt tokens whose KV was cached.
    pub cached: f64,
    /// Tokens of the answer.
    pub output: f64,
}

/// Requests of one simulation: fewest, per worker, and most.
const REQUESTS_MIN: usize = 600;
const REQUESTS_EACH: usize = 200;
const REQUESTS_MAX: usize = 20_000;
/// Shortest simulation, as a multiple of the time of an answer that is just in time: a worker whose queue
/// grows slowly must be detected.
const ANSWERS_MIN: f64 = 2.0;
/// Most workers of one simulation.
const WORKERS_MAX: u32 = 8;
/// Bisection steps of the rate.
const HALVINGS: usize = 9;
/// Seed of the arrivals: equal lengths give equal capacities.
const SEED: u64 = 0x6B76_6173_6972;
/// Most results kept.
const RESULTS_MAX: usize = 64;
/// Ratio of the grid to which means of lengths are rounded: mixes of one cell share a result.
const MIX_GRAIN: f64 = 0.1;

/// The mix, the number of workers that share it, and the number of requests that it is known from, as a power
/// of two, so that a first estimate is replaced.
type MixKey = ([i32; 5], u32, u32);

/// Capacities of one engine by mix of lengths. A new mix costs some ten milliseconds, a known mix a look-up.
#[derive(Debug)]
pub struct Capacity {
    engine: Engine,
    role: WorkerRole,
    level: ServiceLevel,
    known: BTreeMap<MixKey, f64>,
}

impl Capacity {
    /// Creates the capacities of workers with this engine and role, within this service level.
    #[must_use]
    pub fn new(engine: Engine, role: WorkerRole, level: ServiceLevel) -> Self {
        Self { engine, role, level, known: BTreeMap::new() }
    }

    /// Returns the requests per second of each of `workers` workers for requests of these lengths; 0 if none
    /// of them can be served in time.
    pub fn of(&mut self, lengths: &[Lengths], workers: u32) -> f64 {
        if lengths.is_empty() {
            return 0.0;
        }
        let workers = workers.clamp(1, WORKERS_MAX);
        let key = (key(lengths), workers, lengths.len().ilog2());
        if let Some(&known) = self.known.get(&key) {
            return known;
        }
        if self.known.len() >= RESULTS_MAX {
            self.known.clear();
        }
        let found = self.bisect(lengths, workers);
        self.known.insert(key, found);
        found
    }

    fn bisect(&self, lengths: &[Lengths], workers: u32) -> f64 {
        if !lengths.iter().any(|lengths| self.is_possible(lengths)) {
            return 0.0;
        }
        let mut low = 0.0;
        let mut high = 0.25;
        while self.attains(high, lengths, workers) {
            (low, high) = (high, high * 2.0);
            if high > 1e6 {
                return low;
            }
        }
        for _ in 0..HALVINGS {
            let middle = (low + high) / 2.0;
            if self.attains(middle, lengths, workers) {
                low = middle;
            } else {
                high = middle;
            }
        }
        low
    }

    /// Whether this many workers keep the service level at this rate per worker.
    fn attains(&self, rate: f64, lengths: &[Lengths], workers: u32) -> bool {
        let rate = rate * f64::from(workers);
        let output = lengths.iter().map(|lengths| lengths.output).sum::<f64>() / lengths.len() as f64;
        let lasting = (rate * ANSWERS_MIN * output * self.level.itl) as usize;
        let count = REQUESTS_MIN.max(REQUESTS_EACH * workers as usize).max(lasting).min(REQUESTS_MAX);
        let mut random = fastrand::Rng::with_seed(SEED);
        let mut at = 0.0;
        let requests: Vec<Request> = (0..count)
            .map(|_| {
                at -= (1.0 - random.f64()).ln() / rate;
                Request::new(at, lengths[random.usize(..lengths.len())])
            })
            .collect();
        let judged: Vec<bool> = requests.iter().map(|request| self.is_possible(&request.lengths())).collect();
        let judged_count = judged.iter().filter(|&&judged| judged).count();
        let late_max = ((1.0 - self.level.attainment) * judged_count as f64) as usize;
        let worker = || SimulatedWorker::new(self.engine, self.role, 0.0);
        let mut fleet: Vec<SimulatedWorker> = (0..workers).map(|_| worker()).collect();
        let mut first = vec![0.0; count];
        let (mut late, mut progress) = (0, Vec::new());
        for number in 0..=count {
            let until = requests.get(number).map_or(f64::INFINITY, |request| request.at);
            fleet.iter_mut().for_each(|worker| worker.advance(until, &requests, &mut progress));
            for progress in progress.drain(..) {
                late += usize::from(self.is_late(progress, &requests, &judged, &mut first));
            }
            if late > late_max {
                return false;
            }
            if number < count
                && let Some(worker) = fleet.iter_mut().min_by(|a, b| a.load().total_cmp(&b.load()))
            {
                worker.push(number, &requests);
            }
        }
        true
    }

    /// Whether a request is in time on an idle worker.
    fn is_possible(&self, lengths: &Lengths) -> bool {
        let step = &self.engine.step;
        let chunks = ((lengths.prompt - lengths.cached) / self.engine.batch_tokens).ceil().max(1.0);
        let ttft = match self.role {
            WorkerRole::Decode => 0.0,
            WorkerRole::Both | WorkerRole::Prefill => {
                chunks * step.decode(0.0, 0.0) + step.prefill(lengths.cached, lengths.prompt)
            }
        };
        let itl = match self.role {
            WorkerRole::Prefill => 0.0,
            WorkerRole::Both | WorkerRole::Decode => step.decode(1.0, lengths.prompt + lengths.output / 2.0),
        };
        ttft <= self.level.ttft && itl <= self.level.itl
    }

    /// Whether a finished request is judged and was late. Records first tokens.
    fn is_late(&self, progress: Progress, requests: &[Request], judged: &[bool], first: &mut [f64]) -> bool {
        match progress {
            Progress::FirstToken { number, at } => {
                first[number] = at;
                false
            }
            Progress::Finished { number, at } => {
                let request = &requests[number];
                let began = if self.role == WorkerRole::Decode { request.at } else { first[number] };
                let itl = (at - began) / (request.output - 1.0).max(1.0);
                let is_slow = self.role != WorkerRole::Prefill && itl > self.level.itl;
                judged[number] && (is_slow || began - request.at > self.level.ttft)
            }
        }
    }
}

/// Returns the means of the lengths and the spreads of prompts and answers, on a logarithmic grid.
fn key(lengths: &[Lengths]) -> [i32; 5] {
    let mean = |of: fn(&Lengths) -> f64| lengths.iter().map(of).sum::<f64>() / lengths.len() as f64;
    let prompt = mean(|lengths| lengths.prompt);
    let uncached = mean(|lengths| lengths.prompt - lengths.cached);
    let output = mean(|lengths| lengths.output);
    let square = mean(|lengths| lengths.prompt * lengths.prompt).sqrt();
    let output_square = mean(|lengths| lengths.output * lengths.output).sqrt();
    [prompt, uncached, output, square, output_square]
        .map(|value| (value.max(1.0).ln() / MIX_GRAIN).round() as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEVEL: ServiceLevel = ServiceLevel { ttft: 3.0, itl: 0.1, attainment: 0.99 };

    fn lengths(prompt: f64, output: f64) -> Lengths {
        Lengths { prompt, cached: 0.0, output }
    }

    /// llm-d's published benchmark: Qwen3-32B on two H100, 4,000 and 1,000 tokens, measured 1.4 to 1.5 requests/s.
    #[test]
    fn a_published_measurement_is_met() {
        let mut capacity = Capacity::new(Engine::default(), WorkerRole::Both, LEVEL);
        let rate = capacity.of(&[lengths(4000.0, 1000.0)], 1);
        assert!((1.3..1.65).contains(&rate), "{rate}");
        assert!((capacity.of(&[lengths(4010.0, 1001.0)], 1) - rate).abs() < 1e-12, "the same mix");
    }

    #[test]
    fn more_work_for_each_request_is_less_capacity() {
        let mut capacity = Capacity::new(Engine::default(), WorkerRole::Both, LEVEL);
        let base = capacity.of(&[lengths(4000.0, 1000.0)], 1);
        assert!(capacity.of(&[lengths(8000.0, 1000.0)], 1) < base);
        assert!(capacity.of(&[lengths(4000.0, 2000.0)], 1) < base);
        let cached = Lengths { cached: 3500.0, ..lengths(4000.0, 1000.0) };
        assert!(capacity.of(&[cached], 1) > base, "cached prompts cost less");
        let mut slow = Capacity::new(
            Engine { step: Engine::default().step.times(2.0), ..Engine::default() },
            WorkerRole::Both,
            LEVEL,
        );
        assert!(slow.of(&[lengths(4000.0, 1000.0)], 1) < 0.62 * base);
    }

    #[test]
    fn nothing_in_time_is_no_capacity() {
        let level = ServiceLevel { ttft: 0.01, ..LEVEL };
        let mut capacity = Capacity::new(Engine::default(), WorkerRole::Both, level);
        assert!(capacity.of(&[lengths(4000.0, 100.0)], 1) < 1e-3);
        assert!(capacity.of(&[], 1).abs() < f64::EPSILON);
    }

    #[test]
    fn requests_that_are_late_alone_do_not_hide_the_capacity_for_the_others() {
        let mut capacity = Capacity::new(Engine::default(), WorkerRole::Both, LEVEL);
        let mut mix = vec![lengths(4000.0, 500.0); 19];
        let base = capacity.of(&mix, 8);
        mix.push(lengths(60_000.0, 100.0));
        let (alone, of_eight) = (capacity.of(&mix, 1), capacity.of(&mix, 8));
        assert!(
            alone > 0.0 && of_eight > 4.0 * alone,
            "{alone} alone, {of_eight} of eight: they share the risk"
        );
        assert!(of_eight < base, "{of_eight} of {base}: a part of the load, not judged");
    }

    #[test]
    fn the_slower_phase_is_the_bound_of_both() {
        let of = |role| Capacity::new(Engine::default(), role, LEVEL).of(&[lengths(4000.0, 1000.0)], 1);
        let (both, prefill, decode) = (of(WorkerRole::Both), of(WorkerRole::Prefill), of(WorkerRole::Decode));
        assert!(prefill > both && decode > both, "{prefill} {decode} {both}");
    }
}
