//! Random histories of observations, valid and invalid, against an actuator that carries decisions out:
//! limits hold at every instant, and equal seeds give equal runs.

use control_planner::{
    Decision, Engine, Headroom, Lengths, Observation, Planner, PlannerConfig, PoolConfig, Reason,
    ServiceLevel, WorkerCounts, WorkerRole,
};

/// Default number of histories; `KVASIR_HISTORIES` overrides it.
const HISTORIES: u64 = 100;
const TICKS: usize = 100;

/// Workers of one pool in the actuator.
#[derive(Default)]
struct Workers {
    ready: u32,
    /// Seconds since each starting worker was requested.
    starting: Vec<f64>,
    draining: u32,
    in_force: u32,
}

impl Workers {
    fn allocated(&self) -> u32 {
        self.ready + self.starting.len() as u32 + self.draining
    }

    fn apply(&mut self, wanted: u32) {
        while self.ready + (self.starting.len() as u32) < wanted {
            self.starting.push(0.0);
        }
        while self.ready + self.starting.len() as u32 > wanted {
            if self.starting.pop().is_none() {
                self.ready -= 1;
                self.draining += 1;
            }
        }
        self.in_force = wanted;
    }
}

fn config(random: &mut fastrand::Rng, gpus_max: u32) -> PlannerConfig {
    PlannerConfig {
        level: ServiceLevel { ttft: 3.0, itl: 0.1, attainment: 0.99 },
        engine: Engine::default(),
        headroom: Headroom { utilisation: 0.4 + 0.6 * random.f64() },
        start_time: 60.0,
        clear_within: 60.0,
        down_after: 30.0,
        manual_hold: 600.0,
        gpus_max,
        seasons: vec![600.0],
    }
}

/// Returns a number as a broken gateway may report it.
fn number(random: &mut fastrand::Rng, most: f64) -> f64 {
    match random.u8(..40) {
        0 => f64::NAN,
        1 => f64::INFINITY,
        2 => -1.0,
        3 => 0.0,
        _ => random.f64() * most,
    }
}

fn observation(random: &mut fastrand::Rng, workers: &mut Workers, usual: Lengths) -> Observation {
    let seconds = if random.u8(..50) == 0 { number(random, 5.0) } else { 5.0 };
    workers.starting.iter_mut().for_each(|age| *age += 5.0);
    let before = workers.starting.len();
    workers.starting.retain(|age| !(60.0..=300.0).contains(age));
    let started = (before - workers.starting.len()) as u32;
    workers.ready += started;
    workers.draining -= random.u32(..=workers.draining);
    let finished = random.usize(..20);
    let lengths = |random: &mut fastrand::Rng| match random.u8(..50) {
        0 => Lengths {
            prompt: number(random, 1000.0),
            cached: number(random, 100.0),
            output: number(random, 100.0),
        },
        _ => usual,
    };
    Observation {
        seconds,
        arrivals: number(random, 100.0),
        finished: (0..finished).map(|_| lengths(random)).collect(),
        queued: number(random, 20.0),
        decoding: number(random, 200.0),
        kv_tokens: number(random, 1e6),
        itl_mean: random.bool().then(|| number(random, 0.2)),
        ttft_mean: random.bool().then(|| number(random, 6.0)),
        itl_p90: random.bool().then(|| number(random, 0.2)),
        ttft_p90: random.bool().then(|| number(random, 6.0)),
        workers: WorkerCounts {
            ready: workers.ready,
            starting: workers.starting.len() as u32,
            draining: workers.draining,
            sleeping: 0,
        },
        starting_for: workers.starting.clone(),
        started_in: vec![60.0; started as usize],
        woken_in: Vec::new(),
        in_force: workers.in_force,
        is_partial: random.u8(..10) == 0,
    }
}

/// Runs one history and returns its decisions.
fn run(seed: u64) -> Vec<Decision> {
    let mut random = fastrand::Rng::with_seed(seed);
    let pools: Vec<PoolConfig> = [WorkerRole::Prefill, WorkerRole::Decode, WorkerRole::Both]
        [..random.usize(1..=3)]
        .iter()
        .map(|&role| {
            let min = random.u32(..3);
            PoolConfig {
                name: role.name().to_owned(),
                role,
                min,
                max: min + random.u32(..8),
                gpus: random.u32(1..=4),
            }
        })
        .collect();
    let least: u32 = pools.iter().map(|pool| pool.min * pool.gpus).sum();
    let gpus_max = least + random.u32(..20);
    let mut planner = Planner::new(config(&mut random, gpus_max), pools.clone());
    let mut workers: Vec<Workers> = pools.iter().map(|_| Workers::default()).collect();
    for (workers, pool) in workers.iter_mut().zip(&pools) {
        workers.apply(pool.min);
    }
    let (mut now, mut decisions) = (1e9, Vec::new());
    let usual =
        Lengths { prompt: 1000.0 + 3000.0 * random.f64(), cached: 0.0, output: 1.0 + 100.0 * random.f64() };
    for tick in 0..TICKS {
        now += match random.u8(..60) {
            0 => -7200.0,
            1 => 7200.0,
            _ => 5.0,
        };
        let observations: Vec<Observation> =
            workers.iter_mut().map(|workers| observation(&mut random, workers, usual)).collect();
        for (at, decision) in planner.decide(now, &observations).into_iter().enumerate() {
            let pool = &pools[at];
            let is_limited = (pool.min..=pool.max).contains(&decision.wanted);
            assert!(is_limited, "seed {seed}, tick {tick}: {decision:?} outside {}..={}", pool.min, pool.max);
            workers[at].apply(decision.wanted);
            decisions.push(decision);
        }
        let gpus: u32 =
            workers.iter().zip(&pools).map(|(workers, pool)| workers.allocated() * pool.gpus).sum();
        assert!(gpus <= gpus_max, "seed {seed}, tick {tick}: {gpus} GPUs of {gpus_max}");
    }
    decisions
}

#[test]
fn limits_hold_at_every_instant_and_equal_seeds_are_equal_runs() {
    let set = std::env::var("KVASIR_HISTORIES").ok().and_then(|count| count.parse().ok());
    let (histories, mut decided) = (set.unwrap_or(HISTORIES), 0);
    for seed in 0..histories {
        let decisions = run(seed);
        decided += decisions.len();
        if seed % 100 == 0 {
            let shown = |decisions: &[Decision]| format!("{decisions:?}");
            assert_eq!(shown(&decisions), shown(&run(seed)), "seed {seed}");
        }
    }
    println!("{histories} histories, {decided} decisions: no limit was passed");
}

fn planner(min: u32, max: u32) -> Planner {
    let pool = PoolConfig { name: "both".to_owned(), role: WorkerRole::Both, min, max, gpus: 1 };
    let config = PlannerConfig {
        headroom: Headroom::default(),
        down_after: 60.0,
        seasons: Vec::new(),
        ..config(&mut fastrand::Rng::with_seed(1), 100)
    };
    Planner::new(config, vec![pool])
}

/// Returns a tick of 5 s in which this many requests of 4,000 and 1,000 tokens arrived and finished.
fn tick(arrivals: f64, in_force: u32) -> Observation {
    Observation {
        seconds: 5.0,
        arrivals,
        finished: vec![Lengths { prompt: 4000.0, cached: 0.0, output: 1000.0 }; arrivals as usize],
        workers: WorkerCounts { ready: in_force, ..WorkerCounts::default() },
        in_force,
        ..Observation::default()
    }
}

/// Follows decisions for this many ticks and returns the last one.
fn follow(planner: &mut Planner, now: &mut f64, ticks: usize, arrivals: f64, in_force: &mut u32) -> Decision {
    let mut last = None;
    for _ in 0..ticks {
        *now += 5.0;
        let decision = planner.decide(*now, &[tick(arrivals, *in_force)]).remove(0);
        *in_force = decision.wanted;
        last = Some(decision);
    }
    last.expect("at least one tick")
}

/// Dynamo #6985: no scale-down without demand, and NaN.
#[test]
fn zero_traffic_leads_to_the_minimum() {
    for min in [0, 1] {
        let (mut planner, mut now, mut count) = (planner(min, 20), 0.0, 1);
        let busy = follow(&mut planner, &mut now, 60, 20.0, &mut count);
        assert_eq!((busy.wanted, busy.reason), (4, Reason::Demand), "{busy}");
        let idle = follow(&mut planner, &mut now, 200, 0.0, &mut count);
        assert_eq!(idle.wanted, min, "{idle}");
    }
}

/// Dynamo #14251, #14671: scaling was blocked for hours while one pod found no GPU.
#[test]
fn a_worker_that_never_starts_holds_nothing_and_is_not_asked_for_twice() {
    let (mut planner, mut now, mut count) = (planner(1, 20), 0.0, 1);
    follow(&mut planner, &mut now, 60, 10.0, &mut count);
    let mut stuck = None;
    for number in 0..100 {
        now += 5.0;
        let seen = Observation {
            workers: WorkerCounts { ready: 1, starting: count - 1, ..WorkerCounts::default() },
            starting_for: vec![f64::from(number) * 5.0; count as usize - 1],
            ..tick(20.0, count)
        };
        let decision = planner.decide(now, &[seen]).remove(0);
        count = decision.wanted;
        stuck = Some(decision);
    }
    let decision = stuck.expect("decisions");
    assert_eq!((decision.wanted, decision.stuck), (4, 3), "{decision}: demand goes on to be followed");
    assert!(decision.to_string().contains("3 stuck while starting"), "{decision}");
}

/// Dynamo #4420: a count that was set by hand was ignored.
#[test]
fn a_count_set_by_hand_is_kept_for_its_time() {
    let (mut planner, mut now, mut count) = (planner(1, 20), 0.0, 1);
    follow(&mut planner, &mut now, 60, 20.0, &mut count);
    count = 9;
    let held = follow(&mut planner, &mut now, 100, 20.0, &mut count);
    assert_eq!((held.wanted, held.reason), (9, Reason::ManualHold));
    let resumed = follow(&mut planner, &mut now, 400, 20.0, &mut count);
    assert!(resumed.wanted < 9 && resumed.reason != Reason::ManualHold, "{resumed}");
}

/// A planner that restarts beside a running fleet knows no demand yet and must not shrink the fleet before it
/// has observed it.
#[test]
fn a_planner_that_starts_again_keeps_what_it_finds() {
    let (mut planner, mut now) = (planner(1, 20), 0.0);
    let first = planner.decide(now, &[tick(0.0, 12)]).remove(0);
    assert_eq!((first.wanted, first.reason), (12, Reason::WaitingToShrink), "{first}");
    let mut count = 12;
    let later = follow(&mut planner, &mut now, 300, 0.0, &mut count);
    assert_eq!(later.wanted, 1, "once it has watched long enough: {later}");
}

/// Demand at a silent gateway is unknown: no worker is stopped while a gateway is silent.
#[test]
fn nothing_is_stopped_while_a_part_of_the_demand_is_not_seen() {
    let (mut planner, mut now, mut count) = (planner(0, 20), 0.0, 1);
    follow(&mut planner, &mut now, 60, 20.0, &mut count);
    let before = count;
    for _ in 0..500 {
        now += 5.0;
        let seen = Observation { is_partial: true, ..tick(0.0, count) };
        let decision = planner.decide(now, &[seen]).remove(0);
        assert_eq!((decision.wanted, decision.reason), (before, Reason::Partial), "{decision}");
    }
    // A single late answer delays nothing.
    let mut last = None;
    for tick_number in 0..60 {
        now += 5.0;
        let seen = Observation { is_partial: tick_number % 10 == 0, ..tick(0.0, count) };
        let decision = planner.decide(now, &[seen]).remove(0);
        count = decision.wanted;
        last = Some(decision);
    }
    assert_eq!(last.map(|decision| decision.wanted), Some(0));
}

/// A few requests, too few to know a capacity, keep one worker.
#[test]
fn a_pool_that_is_used_keeps_a_worker_without_a_capacity_as_well() {
    let (mut planner, mut now, mut count) = (planner(0, 20), 0.0, 1);
    let trickle = follow(&mut planner, &mut now, 40, 1.0, &mut count);
    assert_eq!((trickle.wanted, trickle.capacity), (1, None), "{trickle}");
}

/// Late answers with growing queues add a worker, whatever the model predicts.
#[test]
fn late_answers_override_the_model() {
    let (mut planner, mut now, mut count) = (planner(1, 20), 0.0, 1);
    follow(&mut planner, &mut now, 60, 5.0, &mut count);
    assert_eq!(count, 1);
    let mut reasons = Vec::new();
    for queued in 1..=3 {
        now += 5.0;
        let seen = Observation { queued: f64::from(queued), ttft_p90: Some(9.0), ..tick(5.0, count) };
        let decision = planner.decide(now, &[seen]).remove(0);
        count = decision.wanted;
        reasons.push((decision.wanted, decision.reason));
    }
    assert_eq!(reasons[0].0, 1, "one tick is no trend");
    assert_eq!(reasons[1], (2, Reason::LateAnswers));
}

#[test]
fn without_finished_requests_thresholds_decide_and_say_so() {
    let (mut planner, mut now, mut count) = (planner(1, 20), 0.0, 1);
    let none = follow(&mut planner, &mut now, 3, 0.0, &mut count);
    assert_eq!((none.wanted, none.capacity), (1, None));
    let full = Observation { kv_tokens: 340_000.0, ..tick(1.0, 1) };
    let decision = planner.decide(now + 5.0, &[full]).remove(0);
    assert_eq!((decision.wanted, decision.reason), (2, Reason::Thresholds));
    assert!(decision.to_string().contains("too few requests"), "{decision}");
}
