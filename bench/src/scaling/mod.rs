//! Scaling policies in simulation: the planner of this repository and policies of its peers, on six shapes of demand.

mod demand_profiles;

use std::hint::black_box;
use std::time::Instant;

use anyhow::Result;
use control_planner::peer_policies::{Clairvoyant, DynamoThreshold, KedaQueue, LlmdSlo, Static, TokenAware};
use control_planner::{
    CAPACITY_OF, Engine, Headroom, Observation, Outcome, Planner, PlannerConfig, PlannerPolicy, PoolConfig,
    Request, ScalingPolicy, Setup, StepTime, WorkerCounts, choose_headroom, simulate,
};

use crate::results::{self, Better};
use demand_profiles::{DEMAND_PROFILES, DemandProfile};

/// Repetitions of each shape with seeds of their own.
const SEEDS: std::ops::RangeInclusive<u64> = 1..=3;
/// Seed of the demand on which the headroom is chosen; it differs from those on which it is judged.
const TUNING_SEED: u64 = 77;

struct Row {
    name: &'static str,
    outcomes: Vec<Outcome>,
}

impl Row {
    fn mean(&self, of: impl Fn(&Outcome) -> f64) -> f64 {
        self.outcomes.iter().map(of).sum::<f64>() / self.outcomes.len() as f64
    }

    fn attained(&self) -> f64 {
        self.mean(|outcome| outcome.attained)
    }

    fn workers(&self) -> f64 {
        self.mean(|outcome| outcome.mean_workers)
    }

    fn print(&self) {
        println!(
            "  {:<34}{:>8.1} %{:>9.2}{:>6.0}{:>10.2} s{:>10.2} s{:>11.1}",
            self.name,
            100.0 * self.attained(),
            self.workers(),
            self.mean(|outcome| f64::from(outcome.peak)),
            self.mean(|outcome| outcome.ttft_p50),
            self.mean(|outcome| outcome.ttft_p99),
            self.mean(|outcome| f64::from(outcome.reversals)),
        );
    }

    /// Adds the seeds of this policy on a shape of demand to the results.
    fn add_results(&self, shape: &str) {
        let values = |of: fn(&Outcome) -> f64| self.outcomes.iter().map(of).collect::<Vec<f64>>();
        let name = |what: &str| format!("{shape}, {}: {what}", self.name);
        let (attained, workers) =
            (values(|outcome| 100.0 * outcome.attained), values(|outcome| outcome.mean_workers));
        results::add("scaling", &name("requests in time"), ("%", Better::Higher), &attained);
        results::add("scaling", &name("mean workers"), ("workers", Better::Lower), &workers);
    }
}

fn row<L: ScalingPolicy>(
    name: &'static str,
    setup: &Setup,
    demands: &[Vec<Request>],
    policy: impl Fn() -> L,
) -> Row {
    let outcomes = demands.iter().map(|requests| simulate(setup, requests, &mut policy())).collect();
    Row { name, outcomes }
}

pub(crate) fn run(smoke: bool) -> Result<()> {
    println!(
        "# scaling policies, simulated; workers as vLLM with Qwen3-32B on two H100, attainment wanted 99 %"
    );
    let demand_profiles = if smoke { &DEMAND_PROFILES[..1] } else { &DEMAND_PROFILES[..] };
    for shape in demand_profiles {
        compare_on(shape, smoke);
    }
    println!();
    known_season(&DEMAND_PROFILES[1]);
    decisions();
    wrong_beliefs(&DEMAND_PROFILES[..if smoke { 1 } else { DEMAND_PROFILES.len() }]);
    other_devices();
    steady(if smoke { 4.0 } else { 24.0 });
    Ok(())
}

/// The step for the fourth time: its period is known, and two periods were seen.
fn known_season(shape: &DemandProfile) {
    let period = shape.seconds();
    let setup = Setup { seasons: vec![period], ..shape.setup() };
    let requests = shape.requests(4, 1);
    let from = 3.0 * period;
    let (chosen, _) = choose_headroom(&setup, &shape.requests(3, TUNING_SEED), 2.0 * period);
    let mut policies: Vec<(&str, Box<dyn ScalingPolicy>)> = vec![
        ("Kvasir, season known", Box::new(PlannerPolicy::new(&setup, chosen))),
        ("KEDA queue 1, running 16", Box::new(KedaQueue::default())),
    ];
    for (name, policy) in &mut policies {
        let outcome = simulate(&setup, &requests, policy.as_mut());
        println!(
            "{}, fourth repetition, {name}: {:.1} % attained with {:.2} workers",
            shape.name,
            100.0 * outcome.attained_from(&requests, from),
            outcome.mean_workers_between(from, from + period),
        );
    }
}

/// Time of one decision for a pool of 1,000 workers with known capacity.
fn decisions() {
    const WORKERS: u32 = 1000;
    let setup = DEMAND_PROFILES[0].setup();
    let config = PlannerConfig {
        level: setup.level,
        engine: setup.engine,
        headroom: Headroom::default(),
        start_time: setup.start_time,
        clear_within: 60.0,
        down_after: setup.down_after,
        manual_hold: 0.0,
        gpus_max: 2 * WORKERS,
        seasons: vec![86_400.0, 7.0 * 86_400.0],
    };
    let pool = PoolConfig { name: "both".to_owned(), role: setup.role, min: 1, max: 2 * WORKERS, gpus: 1 };
    let mut planner = Planner::new(config, vec![pool]);
    let mut took = Vec::new();
    for tick in 0..1000 {
        let observation = Observation {
            seconds: 5.0,
            arrivals: 5000.0 + f64::from(tick % 7),
            finished: DEMAND_PROFILES[0].lengths_of(64),
            queued: f64::from(tick % 3),
            decoding: 20_000.0,
            kv_tokens: 9e7,
            itl_mean: Some(0.02),
            workers: WorkerCounts { ready: WORKERS - 10, starting: 10, ..WorkerCounts::default() },
            starting_for: vec![20.0; 10],
            in_force: WORKERS,
            ..Observation::default()
        };
        let started = Instant::now();
        black_box(planner.decide(f64::from(tick) * 5.0, &[observation]));
        took.push(started.elapsed());
    }
    took.sort();
    let micros: Vec<f64> = took.iter().map(|took| took.as_secs_f64() * 1e6).collect();
    results::add("scaling", &format!("a decision for {WORKERS} workers"), ("us", Better::Lower), &micros);
    println!(
        "a decision for {WORKERS} workers: p50 {:.0} us, p99 {:.0} us, at most {:.1} ms (a new mix of lengths is simulated)",
        took[took.len() / 2].as_secs_f64() * 1e6,
        took[took.len() * 99 / 100].as_secs_f64() * 1e6,
        took[took.len() - 1].as_secs_f64() * 1e3,
    );
}

/// Initial step times that are a fifth too short or too long.
fn wrong_beliefs(demand_profiles: &[DemandProfile]) {
    for shape in demand_profiles {
        for speed in [0.8, 1.2] {
            let setup = shape.setup();
            let believed = Engine { step: setup.believed.step.times(1.0 / speed), ..setup.believed };
            let setup = Setup { believed, ..setup };
            let requests = shape.requests(2, 1);
            let mut policy = PlannerPolicy::new(&setup, Headroom::default());
            let outcome = simulate(&setup, &requests, &mut policy);
            let learned = policy.decision.and_then(|decision| decision.capacity).unwrap_or(f64::NAN);
            println!(
                "{}, workers believed {speed} times as fast: {:.1} % attained after the first 15 min; capacity learned: \
                 {learned:.2} requests/s, {:.2} of the truth",
                shape.name,
                100.0 * outcome.attained_from(&requests, 900.0),
                learned / shape.capacity_on(Engine::default(), CAPACITY_OF),
            );
        }
    }
}

/// Workers on devices without configured step times: those of an H100 are assumed.
fn other_devices() {
    let h100 = Engine::default().step;
    let devices = [
        ("twice as fast", h100.times(0.5)),
        ("prompts four times as slow, decoding twice", {
            let slow = h100.times(2.0);
            StepTime {
                per_prompt_token: 2.0 * slow.per_prompt_token,
                per_prompt_square: 2.0 * slow.per_prompt_square,
                ..slow
            }
        }),
        (
            "three times as slow, each token of KV six times",
            StepTime { per_kv_token: 6.0 * h100.per_kv_token, ..h100.times(3.0) },
        ),
    ];
    for (name, step) in devices {
        let shape = &DEMAND_PROFILES[0];
        let engine = Engine { step, ..Engine::default() };
        let setup = Setup { engine, ..shape.setup() };
        let truth = shape.capacity_on(engine, CAPACITY_OF);
        let requests = shape.steady(3.0 * truth, 600.0, 1);
        let mut policy = PlannerPolicy::new(&setup, Headroom::default());
        simulate(&setup, &requests, &mut policy);
        let learned = policy.decision.and_then(|decision| decision.capacity).unwrap_or(f64::NAN);
        println!(
            "an unknown device, {name}: each of {CAPACITY_OF} workers serves {truth:.2} requests/s; learned after 10 min: {learned:.2}, {:.2} \
             of the truth",
            learned / truth
        );
    }
}

/// A day of Poisson arrivals at one rate.
fn steady(hours: f64) {
    let shape = &DEMAND_PROFILES[0];
    let setup = shape.setup();
    let seconds = hours * 3600.0;
    let requests = shape.steady(4.0, seconds, 1);
    let outcome = simulate(&setup, &requests, &mut PlannerPolicy::new(&setup, Headroom::default()));
    let later: Vec<u32> =
        outcome.changes.iter().filter(|change| change.0 > 3600.0).map(|change| change.1).collect();
    let ups: Vec<bool> = later.windows(2).map(|pair| pair[1] > pair[0]).collect();
    println!(
        "{hours} h of 4 requests/s: {:.2} % attained with {:.2} workers, {} changes after the first hour, {} of them reversals",
        100.0 * outcome.attained,
        outcome.mean_workers,
        later.len(),
        ups.windows(2).filter(|pair| pair[0] != pair[1]).count(),
    );
}

fn compare_on(shape: &DemandProfile, smoke: bool) {
    let setup = shape.setup();
    let seeds = if smoke { 1..=1 } else { SEEDS };
    let demands: Vec<Vec<Request>> = seeds.map(|seed| shape.requests(1, seed)).collect();
    let capacity = shape.capacity();
    println!(
        "\n{}: {} requests in {:.0} s; one worker serves {capacity:.2} requests/s in time",
        shape.name,
        demands[0].len(),
        shape.seconds()
    );
    println!(
        "  {:<34}{:>10}{:>9}{:>6}{:>12}{:>12}{:>11}",
        "policy", "attained", "workers", "peak", "TTFT p50", "TTFT p99", "reversals"
    );
    let (chosen, _) = choose_headroom(&setup, &shape.requests(1, TUNING_SEED), 0.0);
    let peers = [
        row("static, as many as allowed", &setup, &demands, || Static(setup.max)),
        row("KEDA queue 1, running 16", &setup, &demands, KedaQueue::default),
        row("llm-d SLO", &setup, &demands, LlmdSlo::default),
        row("llm-d token-aware", &setup, &demands, TokenAware::default),
        row("Dynamo threshold, throughput", &setup, &demands, || DynamoThreshold::THROUGHPUT),
        row("Dynamo threshold, latency", &setup, &demands, || DynamoThreshold::LATENCY),
    ];
    let clairvoyant = row("clairvoyant (no policy can be)", &setup, &demands, || Clairvoyant { capacity });
    let cold =
        row("Kvasir, nothing recorded", &setup, &demands, || PlannerPolicy::new(&setup, Headroom::default()));
    let tuned =
        row("Kvasir, one repetition recorded", &setup, &demands, || PlannerPolicy::new(&setup, chosen));
    for row in peers.iter().chain([&clairvoyant, &cold, &tuned]) {
        row.print();
        row.add_results(shape.name);
    }
    println!("  headroom chosen: {:.0} % of the capacity is used", 100.0 * chosen.utilisation);
    let cheapest =
        peers.iter().filter(|row| row.attained() >= 0.99).min_by(|a, b| a.workers().total_cmp(&b.workers()));
    if let Some(cheapest) = cheapest {
        println!(
            "  beside the cheapest peer that attains 99 % ({}): {:.2} x its workers",
            cheapest.name,
            tuned.workers() / cheapest.workers()
        );
    }
}
