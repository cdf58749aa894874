//! Fleets whose workers are ready without a process behind them, for tests and benchmarks of decisions.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use router_engines::dialect::{Description, Engine, Hints, Role};
use router_engines::key::EngineKeys;
use router_events::follower::Follower;
use router_events::tracker::Tracker;
use router_policy::Policy;
use tokio::sync::Notify;

use crate::config::{FleetConfig, PoolConfig, RoutingPolicy};
use crate::fleet::{Fleet, Workers};
use crate::pool::Pool;
use crate::spec::{DEFAULT_POOL, WorkerSpec};
use crate::state::Health;
use crate::worker::{RunParts, Worker, WorkerRun};

/// Settings of a fleet of one pool, without peers and snapshots.
#[must_use]
pub fn config(policy: Policy) -> FleetConfig {
    FleetConfig {
        pools: vec![PoolConfig {
            name: DEFAULT_POOL.to_owned(),
            model: Some("model".to_owned()),
            engine: None,
            aliases: Vec::new(),
            has_tokenizer: true,
            routing: RoutingPolicy { policy, disaggregate_above_tokens: usize::MAX },
            strategy: None,
        }],
        hints: Hints::default(),
        keys: EngineKeys::default(),
        tls: None,
        index_memory_max: 8 << 30,
        approximate_ttl: Duration::from_secs(120),
        peers: Vec::new(),
        stores: Vec::new(),
        peer_key: None,
        snapshot_file: None,
        snapshot_interval: Duration::from_secs(30),
        health_interval: Duration::from_secs(1),
        health_timeout: Duration::from_secs(5),
        health_misses: 3,
    }
}

/// A fleet of `workers` ready workers with blocks of `block_tokens` tokens, whose places in the index are free to be filled
/// ([`WorkerRun::member`]). To be called within a Tokio runtime.
#[must_use]
pub fn ready_fleet(workers: usize, block_tokens: usize, policy: Policy) -> Arc<Fleet> {
    ready_pools(config(policy), &[workers], block_tokens)
}

/// The same with a number of workers for each pool of a configuration.
#[must_use]
pub fn ready_pools(config: FleetConfig, workers: &[usize], block_tokens: usize) -> Arc<Fleet> {
    let fleet = Fleet::start(config, 1);
    let mut all = Workers::new();
    for (pool, &count) in fleet.pools().iter().zip(workers) {
        add_ready(&fleet, pool, count, block_tokens, &mut all);
    }
    fleet.install(all);
    fleet
}

/// A fleet of ready workers of these makes, roles and generations, which disaggregates every prompt that it can.
#[must_use]
pub fn ready_phases(
    workers: &[(Engine, Role, Option<&str>)],
    block_tokens: usize,
    policy: Policy,
) -> Arc<Fleet> {
    let mut config = config(policy);
    config.pools[0].routing.disaggregate_above_tokens = 0;
    let fleet = Fleet::start(config, 1);
    let pool = &fleet.pools()[0];
    let mut all = Workers::new();
    for (number, &(engine, role, generation)) in workers.iter().enumerate() {
        let spec = WorkerSpec {
            generation: generation.map(str::to_owned),
            ..WorkerSpec::new(&format!("http://{}-{number}:8000", role.name()))
        };
        let description = Arc::new(Description { engine, ..description(pool, block_tokens) });
        add_one(&fleet, pool, &spec, role, &description, &mut all);
    }
    fleet.install(all);
    fleet
}

fn description(pool: &Pool, block_tokens: usize) -> Description {
    Description {
        engine: Engine::Vllm,
        version: "0".to_owned(),
        models: vec![pool.model().to_string()],
        role: None,
        context_tokens: 1 << 20,
        block_tokens,
        blocks: 1 << 20,
        lower_blocks: [0; 2],
        keeps_prefixes: true,
        retains_blocks: false,
        instance: None,
        feeds: vec![None],
        data_plane: None,
        bootstrap: None,
    }
}

fn add_ready(fleet: &Arc<Fleet>, pool: &Arc<Pool>, workers: usize, block_tokens: usize, all: &mut Workers) {
    let description = Arc::new(description(pool, block_tokens));
    for number in 0..workers {
        let spec = WorkerSpec::new(&format!("http://{}-{number}:8000", pool.name));
        add_one(fleet, pool, &spec, Role::Both, &description, all);
    }
}

/// Adds a ready worker, if the index has a place for it.
fn add_one(
    fleet: &Arc<Fleet>,
    pool: &Arc<Pool>,
    spec: &WorkerSpec,
    role: Role,
    description: &Arc<Description>,
    all: &mut Workers,
) {
    let worker = Worker::new(spec, pool, None);
    let Some(member) = fleet.index.write().join() else { return };
    let run = WorkerRun::new(RunParts {
        name: worker.name.clone(),
        description: Arc::clone(description),
        rank: None,
        role,
        member,
        follower: Arc::new(Mutex::new(Follower::new(Tracker::new(member, description.block_tokens)))),
        has_feed: true,
        is_warm: Arc::new(AtomicBool::new(true)),
        resync: Arc::new(Notify::new()),
        loads_changed: None,
        routed: None,
        index_task: None,
    });
    worker.runs.store(Arc::new(vec![Arc::new(run)]));
    worker.set_health(Health::Answers);
    worker.runs_changed();
    all.insert(worker.name.clone(), worker);
}
