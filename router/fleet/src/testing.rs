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
    let fleet = Fleet::start(config(policy), 1);
    let pool = Arc::clone(&fleet.pools()[0]);
    let description = Arc::new(Description {
        engine: Engine::Vllm,
        version: "0".to_owned(),
        models: vec!["model".to_owned()],
        role: None,
        context_tokens: 1 << 20,
        block_tokens,
        blocks: 1 << 20,
        lower_blocks: [0; 2],
        keeps_prefixes: true,
        instance: None,
        feeds: vec![None],
        data_plane: None,
        bootstrap: None,
    });
    let mut all = Workers::new();
    for number in 0..workers {
        let worker = Worker::new(&WorkerSpec::new(&format!("http://worker-{number}:8000")), &pool, None);
        let Some(member) = fleet.index.write().join() else { break };
        let run = WorkerRun::new(RunParts {
            name: worker.name.clone(),
            description: Arc::clone(&description),
            rank: None,
            role: Role::Both,
            member,
            follower: Arc::new(Mutex::new(Follower::new(Tracker::new(member, block_tokens)))),
            has_feed: true,
            is_warm: Arc::new(AtomicBool::new(true)),
            distrust: Arc::new(Notify::new()),
            loads_changed: None,
            routed: None,
            writing: None,
        });
        worker.runs.store(Arc::new(vec![Arc::new(run)]));
        worker.set_health(Health::Answers);
        worker.runs_changed();
        all.insert(worker.name.clone(), worker);
    }
    fleet.install(all);
    fleet
}
