//! Requests per second that one worker serves within the service level.
//!
//! A worker is simulated under Poisson arrivals whose lengths are drawn from requests that were seen lately, and the rate
//! is bisected for the highest one at which the share in time is kept. An analytic formula has to choose one of the
//! limits (prompt time, ITL, KV) in advance; the simulation meets whichever comes first, with its queueing.

use std::collections::BTreeMap;

use crate::engine::{Engine, ServiceLevel, WorkerRole};
use crate::fleet_simulation::Request;
use crate::simulated_worker::{Progress, SimulatedWorker};

/// Lengths of one request, in tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lengths {
    /// The prompt.
    pub prompt: f64,
    /// Of the prompt, tokens whose KV a cache had.
    pub cached: f64,
    /// The answer.
    pub output: f64,
}

/// Requests of one simulation.
const REQUESTS: usize = 600;
/// Halvings of the rate's range.
const HALVINGS: usize = 9;
/// Arrivals are drawn from this seed: equal lengths, equal capacity.
const SEED: u64 = 0x6B76_6173_6972;
/// Results kept.
const RESULTS_MAX: usize = 64;
/// Mixes of lengths whose means differ by less than this share are the same mix.
const MIX_GRAIN: f64 = 0.1;

type MixKey = [i32; 4];

/// Capacities of one engine, by mix of lengths. A new mix costs some ten milliseconds, a known one a look-up.
#[derive(Debug)]
pub struct Capacity {
    engine: Engine,
    role: WorkerRole,
    level: ServiceLevel,
    known: BTreeMap<MixKey, f64>,
}

impl Capacity {
    /// Capacities of workers with this engine and role, within this service level.
    #[must_use]
    pub fn new(engine: Engine, role: WorkerRole, level: ServiceLevel) -> Self {
        Self { engine, role, level, known: BTreeMap::new() }
    }

    /// Requests per second of one worker when requests are like these; 0 when none can be served in time.
    pub fn of(&mut self, lengths: &[Lengths]) -> f64 {
        if lengths.is_empty() {
            return 0.0;
        }
        let key = key(lengths);
        if let Some(&known) = self.known.get(&key) {
            return known;
        }
        if self.known.len() >= RESULTS_MAX {
            self.known.clear();
        }
        let found = self.bisect(lengths);
        self.known.insert(key, found);
        found
    }

    fn bisect(&self, lengths: &[Lengths]) -> f64 {
        let mut low = 0.0;
        let mut high = 0.25;
        while self.attains(high, lengths) {
            (low, high) = (high, high * 2.0);
            if high > 1e6 {
                return low;
            }
        }
        for _ in 0..HALVINGS {
            let middle = (low + high) / 2.0;
            if self.attains(middle, lengths) {
                low = middle;
            } else {
                high = middle;
            }
        }
        low
    }

    /// Whether one worker keeps the service level at this rate.
    fn attains(&self, rate: f64, lengths: &[Lengths]) -> bool {
        let mut random = fastrand::Rng::with_seed(SEED);
        let mut at = 0.0;
        let requests: Vec<Request> = (0..REQUESTS)
            .map(|_| {
                at -= (1.0 - random.f64()).ln() / rate;
                Request::new(at, lengths[random.usize(..lengths.len())])
            })
            .collect();
        let late_max = ((1.0 - self.level.attainment) * REQUESTS as f64) as usize;
        let mut worker = SimulatedWorker::new(self.engine, self.role, 0.0);
        let mut first = vec![0.0; REQUESTS];
        let (mut late, mut progress) = (0, Vec::new());
        for number in 0..=REQUESTS {
            let until = requests.get(number).map_or(f64::INFINITY, |request| request.at);
            worker.advance(until, &requests, &mut progress);
            for progress in progress.drain(..) {
                late += usize::from(self.is_late(progress, &requests, &mut first));
            }
            if late > late_max {
                return false;
            }
            if number < REQUESTS {
                worker.push(number, &requests);
            }
        }
        true
    }

    /// Whether a finished request was late; notes first tokens.
    fn is_late(&self, progress: Progress, requests: &[Request], first: &mut [f64]) -> bool {
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
                is_slow || began - request.at > self.level.ttft
            }
        }
    }
}

/// Means of the lengths and the spread of prompts, on a logarithmic grid.
fn key(lengths: &[Lengths]) -> MixKey {
    let mean = |of: fn(&Lengths) -> f64| lengths.iter().map(of).sum::<f64>() / lengths.len() as f64;
    let prompt = mean(|lengths| lengths.prompt);
    let uncached = mean(|lengths| lengths.prompt - lengths.cached);
    let output = mean(|lengths| lengths.output);
    let square = mean(|lengths| lengths.prompt * lengths.prompt).sqrt();
    [prompt, uncached, output, square].map(|value| (value.max(1.0).ln() / MIX_GRAIN).round() as i32)
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
        let rate = capacity.of(&[lengths(4000.0, 1000.0)]);
        assert!((1.3..1.65).contains(&rate), "{rate}");
        assert!((capacity.of(&[lengths(4010.0, 1001.0)]) - rate).abs() < 1e-12, "the same mix");
    }

    #[test]
    fn more_work_for_each_request_is_less_capacity() {
        let mut capacity = Capacity::new(Engine::default(), WorkerRole::Both, LEVEL);
        let base = capacity.of(&[lengths(4000.0, 1000.0)]);
        assert!(capacity.of(&[lengths(8000.0, 1000.0)]) < base);
        assert!(capacity.of(&[lengths(4000.0, 2000.0)]) < base);
        let cached = Lengths { cached: 3500.0, ..lengths(4000.0, 1000.0) };
        assert!(capacity.of(&[cached]) > base, "cached prompts cost less");
        let mut slow = Capacity::new(
            Engine { step: Engine::default().step.times(2.0), ..Engine::default() },
            WorkerRole::Both,
            LEVEL,
        );
        assert!(slow.of(&[lengths(4000.0, 1000.0)]) < 0.62 * base);
    }

    #[test]
    fn nothing_in_time_is_no_capacity() {
        let level = ServiceLevel { ttft: 0.01, ..LEVEL };
        let mut capacity = Capacity::new(Engine::default(), WorkerRole::Both, level);
        assert!(capacity.of(&[lengths(4000.0, 100.0)]) < 1e-3);
        assert!(capacity.of(&[]).abs() < f64::EPSILON);
    }

    #[test]
    fn the_slower_phase_is_the_bound_of_both() {
        let of = |role| Capacity::new(Engine::default(), role, LEVEL).of(&[lengths(4000.0, 1000.0)]);
        let (both, prefill, decode) = (of(WorkerRole::Both), of(WorkerRole::Prefill), of(WorkerRole::Decode));
        assert!(prefill > both && decode > both, "{prefill} {decode} {both}");
    }
}
