//! Six shapes of demand.
//!
//! The first is llm-d's published benchmark (Qwen3-32B on two H100, 4,000 and 1,000 tokens, 2 to 10 requests/s, TTFT 3 s,
//! 3 to 8 replicas that take 100 s to start). The others change one thing each. Rates of shapes with other lengths are
//! scaled so that they need as many workers.

use control_planner::{Capacity, Engine, Lengths, Request, ServiceLevel, Setup, WorkerRole, poisson};

/// A shape of demand.
pub(super) struct DemandProfile {
    pub(super) name: &'static str,
    lengths: Lengths,
    level: ServiceLevel,
    start_time: f64,
    /// Pairs of a rate, in requests per second of the first shape's lengths, and a duration in seconds.
    stages: &'static [(f64, f64)],
}

const RAMP: &[(f64, f64)] =
    &[(2.0, 330.0), (4.0, 360.0), (6.0, 360.0), (8.0, 360.0), (10.0, 360.0), (4.0, 360.0), (1.0, 300.0)];
const STEP: &[(f64, f64)] = &[(1.0, 600.0), (6.0, 1500.0), (1.0, 600.0)];
const LONG: Lengths = Lengths { prompt: 4000.0, cached: 0.0, output: 1000.0 };

const fn level(ttft: f64, itl: f64) -> ServiceLevel {
    ServiceLevel { ttft, itl, attainment: 0.99 }
}

pub(super) const DEMAND_PROFILES: [DemandProfile; 6] = [
    DemandProfile { name: "ramp", lengths: LONG, level: level(3.0, 0.1), start_time: 100.0, stages: RAMP },
    DemandProfile { name: "step", lengths: LONG, level: level(3.0, 0.1), start_time: 100.0, stages: STEP },
    DemandProfile {
        name: "slow start",
        lengths: LONG,
        level: level(3.0, 0.1),
        start_time: 300.0,
        stages: RAMP,
    },
    DemandProfile {
        name: "long prompts",
        lengths: Lengths { prompt: 8000.0, cached: 0.0, output: 200.0 },
        level: level(3.0, 0.1),
        start_time: 100.0,
        stages: RAMP,
    },
    DemandProfile {
        name: "long answers",
        lengths: Lengths { prompt: 500.0, cached: 0.0, output: 2000.0 },
        level: level(1.0, 0.05),
        start_time: 100.0,
        stages: RAMP,
    },
    DemandProfile {
        name: "chats",
        lengths: Lengths { prompt: 800.0, cached: 0.0, output: 150.0 },
        level: level(0.5, 0.05),
        start_time: 100.0,
        stages: RAMP,
    },
];

impl DemandProfile {
    pub(super) fn setup(&self) -> Setup {
        Setup {
            engine: Engine::default(),
            believed: Engine::default(),
            role: WorkerRole::Both,
            level: self.level,
            min: 3,
            max: 8,
            start_time: self.start_time,
            down_after: 120.0,
            seasons: Vec::new(),
        }
    }

    /// Requests per second that one worker serves within the service level.
    pub(super) fn capacity(&self) -> f64 {
        self.capacity_on(Engine::default(), 1)
    }

    /// Requests per second of each of `workers` workers on a device.
    pub(super) fn capacity_on(&self, engine: Engine, workers: u32) -> f64 {
        Capacity::new(engine, WorkerRole::Both, self.level).of(&[self.lengths], workers)
    }

    /// Seconds of one repetition.
    pub(super) fn seconds(&self) -> f64 {
        self.stages.iter().map(|stage| stage.1).sum()
    }

    /// Poisson arrivals over `repetitions` repetitions.
    pub(super) fn requests(&self, repetitions: usize, seed: u64) -> Vec<Request> {
        let first = DEMAND_PROFILES[0].capacity();
        let scale = self.capacity() / first;
        let stages: Vec<(f64, f64)> =
            self.stages.iter().map(|&(rate, seconds)| (rate * scale, seconds)).collect();
        poisson(&stages.repeat(repetitions), self.lengths, seed)
    }

    /// Lengths of `count` requests.
    pub(super) fn lengths_of(&self, count: usize) -> Vec<Lengths> {
        vec![self.lengths; count]
    }

    /// Poisson arrivals at one rate.
    pub(super) fn steady(&self, rate: f64, seconds: f64, seed: u64) -> Vec<Request> {
        poisson(&[(rate, seconds)], self.lengths, seed)
    }
}
