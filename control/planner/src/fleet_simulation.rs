//! A fleet in virtual time: requests, a router that balances by load, workers that take time to start and
//! drain before they end, and a scaling policy that sets their number.
//!
//! The fleet has one role and one engine. A request counts as attained if its TTFT and its mean ITL met the
//! service level. `mean_workers` counts workers that exist and are not draining, including starting ones, as
//! llm-d's published benchmark does.

use crate::capacity::Lengths;
use crate::engine::{Engine, ServiceLevel, WorkerRole};
use crate::headroom::Headroom;
use crate::planner::{Decision, Observation, Planner, PlannerConfig, PoolConfig, WorkerCounts};
use crate::simulated_worker::{Progress, SimulatedWorker};

/// A request of a trace; lengths in tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Request {
    /// Arrival, in seconds from the start.
    pub at: f64,
    /// Tokens of the prompt.
    pub prompt: f64,
    /// Prompt tokens whose KV is cached.
    pub cached: f64,
    /// Tokens of the answer.
    pub output: f64,
}

impl Request {
    /// Creates a request of these lengths. At least one prompt token is computed and one token is generated.
    #[must_use]
    pub fn new(at: f64, lengths: Lengths) -> Self {
        let prompt = lengths.prompt.max(1.0).floor();
        let cached = lengths.cached.clamp(0.0, prompt - 1.0).floor();
        Self { at, prompt, cached, output: lengths.output.max(1.0).floor() }
    }

    pub(crate) fn uncached(&self) -> f64 {
        self.prompt - self.cached
    }

    /// Returns the lengths of the request.
    #[must_use]
    pub fn lengths(&self) -> Lengths {
        Lengths { prompt: self.prompt, cached: self.cached, output: self.output }
    }
}

/// Returns Poisson arrivals of requests with these lengths; `stages` are rates per second with their
/// durations in seconds.
#[must_use]
pub fn poisson(stages: &[(f64, f64)], lengths: Lengths, seed: u64) -> Vec<Request> {
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut requests, mut begin) = (Vec::new(), 0.0);
    for &(rate, seconds) in stages {
        let end = begin + seconds;
        let mut at = begin;
        let mut gap = || -(1.0 - random.f64()).ln() / rate;
        at += if rate > 0.0 { gap() } else { seconds };
        while at < end {
            requests.push(Request::new(at, lengths));
            at += gap();
        }
        begin = end;
    }
    requests
}

/// A simulated fleet and its limits.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Actual engine of the workers.
    pub engine: Engine,
    /// Engine that the planner assumes before it has measured one.
    pub believed: Engine,
    /// Phases that the workers compute.
    pub role: WorkerRole,
    /// The service level.
    pub level: ServiceLevel,
    /// Fewest workers, and workers at the start.
    pub min: u32,
    /// Most workers.
    pub max: u32,
    /// Seconds from the request for a worker to its first request.
    pub start_time: f64,
    /// Seconds for which the need must have been lower before a worker is removed.
    pub down_after: f64,
    /// Periods after which demand repeats, in seconds.
    pub seasons: Vec<f64>,
}

impl Setup {
    fn planner(&self, headroom: Headroom) -> Planner {
        let pool = PoolConfig {
            name: "simulated".to_owned(),
            role: self.role,
            min: self.min,
            max: self.max,
            gpus: 1,
        };
        let config = PlannerConfig {
            level: self.level,
            engine: self.believed,
            headroom,
            start_time: self.start_time,
            clear_within: 60.0,
            down_after: self.down_after,
            manual_hold: 0.0,
            gpus_max: u32::MAX,
            seasons: self.seasons.clone(),
        };
        Planner::new(config, vec![pool])
    }
}

/// State of a worker that a policy may use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Replica {
    /// Whether it takes requests.
    pub is_ready: bool,
    /// Requests that wait for a place in the batch.
    pub queued: usize,
    /// Requests in the batch.
    pub running: usize,
    /// Requests in the batch that decode.
    pub decoding: usize,
    /// Tokens of KV in use.
    pub kv_tokens: f64,
    /// Prompt tokens that are not yet computed.
    pub queued_tokens: f64,
}

/// The state of the fleet at a tick.
#[derive(Debug)]
pub struct FleetView<'a> {
    /// Seconds from the start.
    pub now: f64,
    /// The count in force.
    pub wanted: u32,
    /// Fewest workers.
    pub min: u32,
    /// Most workers.
    pub max: u32,
    /// Seconds that a worker takes to start.
    pub start_time: f64,
    /// The service level.
    pub level: ServiceLevel,
    /// The workers' engine.
    pub engine: &'a Engine,
    /// Workers that are not draining.
    pub replicas: &'a [Replica],
    /// Workers that are draining.
    pub draining: u32,
    /// All requests of the run, by time of arrival, including future ones (for policies with perfect foresight).
    pub requests: &'a [Request],
    /// Number of requests that have arrived.
    pub arrived: usize,
    /// Time and TTFT of each first token so far.
    pub first_tokens: &'a [(f64, f64)],
    /// Time, mean ITL and number of each finished request.
    pub finished: &'a [(f64, f64, usize)],
    /// Mean inter-token latency since the last tick.
    pub itl_mean: Option<f64>,
    /// Workers that became ready since the last tick.
    pub started: u32,
}

/// A scaling policy.
pub trait ScalingPolicy {
    /// Seconds between two ticks.
    fn interval(&self) -> f64;
    /// Returns the wanted count.
    fn wanted(&mut self, view: &FleetView<'_>) -> u32;
}

/// Result of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Share of requests within the service level.
    pub attained: f64,
    /// Mean count of workers.
    pub mean_workers: f64,
    /// Most workers at a time.
    pub peak: u32,
    /// Seconds to the first token, median.
    pub ttft_p50: f64,
    /// Seconds to the first token, p99.
    pub ttft_p99: f64,
    /// Number of changes in the opposite direction of the previous change.
    pub reversals: u32,
    /// Time and count of each change.
    pub changes: Vec<(f64, u32)>,
    /// For each request, whether it was in time.
    pub in_time: Vec<bool>,
}

impl Outcome {
    /// Returns the share of the requests arriving at or after `from` that were in time.
    #[must_use]
    pub fn attained_from(&self, requests: &[Request], from: f64) -> f64 {
        let first = requests.partition_point(|request| request.at < from);
        let in_time = self.in_time[first..].iter().filter(|&&in_time| in_time).count();
        in_time as f64 / (self.in_time.len() - first).max(1) as f64
    }

    /// Returns the mean count of workers from `from` to `to`.
    #[must_use]
    pub fn mean_workers_between(&self, from: f64, to: f64) -> f64 {
        let ends = self.changes.iter().skip(1).map(|change| change.0).chain([to]);
        let seconds = self
            .changes
            .iter()
            .zip(ends)
            .map(|(&(at, count), end)| (end.min(to) - at.max(from)).max(0.0) * f64::from(count));
        seconds.sum::<f64>() / (to - from)
    }
}

/// Longest time that a run continues after the last arrival, in seconds; unfinished requests were not in
/// time.
const TAIL_SECONDS_MAX: f64 = 3600.0;

struct Member {
    worker: SimulatedWorker,
    ready_at: f64,
    is_draining: bool,
    is_counted: bool,
}

/// Runs `requests` (by time of arrival) through a fleet whose size `policy` sets.
pub fn simulate(setup: &Setup, requests: &[Request], policy: &mut dyn ScalingPolicy) -> Outcome {
    let interval = policy.interval();
    let mut run = Run::new(setup, requests);
    let last = requests.last().map_or(0.0, |request| request.at);
    let (mut tick, mut worker_seconds) = (0.0, 0.0);
    loop {
        let next = tick + interval;
        run.arrivals_until(next);
        worker_seconds += f64::from(run.wanted) * interval;
        tick = next;
        if run.is_over() || tick > last + TAIL_SECONDS_MAX {
            break;
        }
        let wanted = run.ask(policy, tick).clamp(setup.min, setup.max);
        run.resize(wanted, tick);
    }
    run.outcome(worker_seconds / tick)
}

struct Run<'a> {
    setup: &'a Setup,
    requests: &'a [Request],
    members: Vec<Member>,
    arrived: usize,
    wanted: u32,
    first: Vec<f64>,
    in_time: Vec<bool>,
    first_tokens: Vec<(f64, f64)>,
    finished: Vec<(f64, f64, usize)>,
    progress: Vec<Progress>,
    changes: Vec<(f64, u32)>,
}

impl<'a> Run<'a> {
    fn new(setup: &'a Setup, requests: &'a [Request]) -> Self {
        let mut run = Self {
            setup,
            requests,
            members: Vec::new(),
            arrived: 0,
            wanted: 0,
            first: vec![f64::NAN; requests.len()],
            in_time: vec![false; requests.len()],
            first_tokens: Vec::new(),
            finished: Vec::new(),
            progress: Vec::new(),
            changes: Vec::new(),
        };
        let first = setup.min.max(1);
        (0..first).for_each(|_| run.start(0.0));
        run.members.iter_mut().for_each(|member| member.is_counted = true);
        run.wanted = first;
        run.changes.push((0.0, first));
        run
    }

    fn start(&mut self, ready_at: f64) {
        let worker = SimulatedWorker::new(self.setup.engine, self.setup.role, ready_at);
        self.members.push(Member { worker, ready_at, is_draining: false, is_counted: false });
    }

    fn is_over(&self) -> bool {
        self.finished.len() == self.requests.len()
    }

    fn arrivals_until(&mut self, until: f64) {
        while let Some(request) = self.requests.get(self.arrived).filter(|request| request.at < until) {
            let at = request.at;
            self.advance(at);
            let ready = |member: &&mut Member| member.ready_at <= at && !member.is_draining;
            let least = |a: &&mut Member, b: &&mut Member| a.worker.load().total_cmp(&b.worker.load());
            // Without a ready worker, the one that will be ready next.
            let next = |a: &&mut Member, b: &&mut Member| a.ready_at.total_cmp(&b.ready_at);
            let number = self.arrived;
            self.arrived += 1;
            if let Some(member) = self.members.iter_mut().filter(ready).min_by(least) {
                member.worker.push(number, self.requests);
            } else if let Some(member) =
                self.members.iter_mut().filter(|member| !member.is_draining).min_by(next)
            {
                member.worker.push(number, self.requests);
            }
        }
        self.advance(until);
    }

    fn advance(&mut self, until: f64) {
        for member in &mut self.members {
            if member.ready_at <= until {
                member.worker.advance(until, self.requests, &mut self.progress);
            }
        }
        let level = &self.setup.level;
        for progress in self.progress.drain(..) {
            match progress {
                Progress::FirstToken { number, at } => {
                    self.first[number] = at;
                    self.first_tokens.push((at, at - self.requests[number].at));
                }
                Progress::Finished { number, at } => {
                    let request = &self.requests[number];
                    let began = if self.first[number].is_nan() { request.at } else { self.first[number] };
                    let itl = (at - began) / (request.output - 1.0).max(1.0);
                    let itl_counts = self.setup.role != WorkerRole::Prefill;
                    self.in_time[number] =
                        began - request.at <= level.ttft && (!itl_counts || itl <= level.itl);
                    self.finished.push((at, itl, number));
                }
            }
        }
    }

    fn ask(&mut self, policy: &mut dyn ScalingPolicy, now: f64) -> u32 {
        let mut started = 0;
        for member in self.members.iter_mut().filter(|member| !member.is_counted && member.ready_at <= now) {
            member.is_counted = true;
            started += 1;
        }
        let gaps = self.members.iter_mut().map(|member| member.worker.take_gaps());
        let (tokens, seconds) = gaps.fold((0.0, 0.0), |sum, gaps| (sum.0 + gaps.0, sum.1 + gaps.1));
        let replicas: Vec<Replica> = self
            .members
            .iter()
            .filter(|member| !member.is_draining)
            .map(|member| Replica {
                is_ready: member.ready_at <= now,
                queued: member.worker.queued(),
                running: member.worker.running(),
                decoding: member.worker.decoding(),
                kv_tokens: member.worker.kv_tokens(),
                queued_tokens: member.worker.queued_tokens(),
            })
            .collect();
        policy.wanted(&FleetView {
            now,
            wanted: self.wanted,
            min: self.setup.min,
            max: self.setup.max,
            start_time: self.setup.start_time,
            level: self.setup.level,
            engine: &self.setup.engine,
            draining: (self.members.len() - replicas.len()) as u32,
            replicas: &replicas,
            requests: self.requests,
            arrived: self.arrived,
            first_tokens: &self.first_tokens,
            finished: &self.finished,
            itl_mean: (tokens > 0.0).then(|| seconds / tokens),
            started,
        })
    }

    /// Starts workers, or drains workers: those that are still starting first, then those with the least
    /// load.
    fn resize(&mut self, wanted: u32, now: f64) {
        self.members.retain(|member| !(member.is_draining && member.worker.is_idle()));
        if wanted != self.wanted {
            self.changes.push((now, wanted));
        }
        for _ in self.wanted..wanted {
            self.start(now + self.setup.start_time);
        }
        for _ in wanted..self.wanted {
            let rank = |member: &Member| (member.ready_at <= now, member.worker.load());
            let least = |a: &&mut Member, b: &&mut Member| {
                let (a, b) = (rank(a), rank(b));
                a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
            };
            if let Some(member) = self.members.iter_mut().filter(|member| !member.is_draining).min_by(least) {
                member.is_draining = true;
            }
        }
        self.wanted = wanted;
    }

    fn outcome(self, mean_workers: f64) -> Outcome {
        let mut ttfts: Vec<f64> = self.first_tokens.iter().map(|first| first.1).collect();
        ttfts.sort_by(f64::total_cmp);
        let quantile = |share: f64| {
            let at = (ttfts.len() as f64 * share) as usize;
            ttfts.get(at.min(ttfts.len().saturating_sub(1))).copied().unwrap_or(0.0)
        };
        let ups: Vec<bool> = self.changes.windows(2).map(|pair| pair[1].1 > pair[0].1).collect();
        let in_time = self.in_time.iter().filter(|&&in_time| in_time).count();
        Outcome {
            attained: in_time as f64 / self.requests.len().max(1) as f64,
            mean_workers,
            peak: self.changes.iter().map(|change| change.1).max().unwrap_or(0),
            ttft_p50: quantile(0.5),
            ttft_p99: quantile(0.99),
            reversals: ups.windows(2).filter(|pair| pair[0] != pair[1]).count() as u32,
            changes: self.changes,
            in_time: self.in_time,
        }
    }
}

/// Kvasir's planner as a policy: it uses the parts of the view that gateways report.
#[derive(Debug)]
pub struct PlannerPolicy {
    planner: Planner,
    arrived: usize,
    first_tokens: usize,
    finished: usize,
    start_time: f64,
    /// Time of the request for each starting worker.
    asked_at: Vec<f64>,
    before: f64,
    /// The last decision.
    pub decision: Option<Decision>,
}

/// Seconds between two ticks of the planner.
const INTERVAL: f64 = 5.0;

impl PlannerPolicy {
    /// Creates the planner with this headroom.
    #[must_use]
    pub fn new(setup: &Setup, headroom: Headroom) -> Self {
        Self {
            planner: setup.planner(headroom),
            arrived: 0,
            first_tokens: 0,
            finished: 0,
            start_time: setup.start_time,
            asked_at: Vec::new(),
            before: 0.0,
            decision: None,
        }
    }

    fn observation(&mut self, view: &FleetView<'_>) -> Observation {
        let ready = view.replicas.iter().filter(|replica| replica.is_ready).count() as u32;
        let starting = view.replicas.len() as u32 - ready;
        self.asked_at.truncate(starting as usize);
        let p90 = |mut values: Vec<f64>| {
            values.sort_by(f64::total_cmp);
            values.get(values.len() * 9 / 10).copied()
        };
        let ttfts: Vec<f64> = view.first_tokens[self.first_tokens..].iter().map(|first| first.1).collect();
        let mean =
            |values: &[f64]| (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64);
        let itls = view.finished[self.finished..].iter().map(|end| end.1).collect();
        let lengths = view.finished[self.finished..].iter().map(|end| view.requests[end.2].lengths());
        let observation = Observation {
            seconds: view.now - self.before,
            arrivals: (view.arrived - self.arrived) as f64,
            finished: lengths.collect(),
            queued: view.replicas.iter().map(|replica| replica.queued as f64).sum(),
            decoding: view.replicas.iter().map(|replica| replica.decoding as f64).sum(),
            kv_tokens: view.replicas.iter().map(|replica| replica.kv_tokens).sum(),
            itl_mean: view.itl_mean,
            ttft_mean: mean(&ttfts),
            itl_p90: p90(itls),
            ttft_p90: p90(ttfts),
            workers: WorkerCounts { ready, starting, draining: view.draining, sleeping: 0 },
            starting_for: self.asked_at.iter().map(|asked| view.now - asked).collect(),
            started_in: vec![self.start_time; view.started as usize],
            woken_in: Vec::new(),
            in_force: view.wanted,
            is_partial: false,
        };
        (self.arrived, self.first_tokens, self.finished, self.before) =
            (view.arrived, view.first_tokens.len(), view.finished.len(), view.now);
        observation
    }
}

impl ScalingPolicy for PlannerPolicy {
    fn interval(&self) -> f64 {
        INTERVAL
    }

    fn wanted(&mut self, view: &FleetView<'_>) -> u32 {
        let observation = self.observation(view);
        let decision = self.planner.decide(view.now, &[observation]).remove(0);
        let wanted = decision.wanted;
        for _ in view.wanted..wanted {
            self.asked_at.insert(0, view.now);
        }
        self.decision = Some(decision);
        wanted
    }
}
