//! Settings of a fleet. Workers are not among them (`spec`). All except [`RoutingPolicy`] are fixed when the fleet starts.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use router_engines::dialect::{Engine, Hints};
use router_engines::key::EngineKeys;
use router_policy::{Policy, Strategy};
use router_tls::ClientTls;

/// Rules that assign a pool's requests to its workers; may change while the fleet runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoutingPolicy {
    /// Policy that chooses a worker.
    pub policy: Policy,
    /// Prompts with more uncached tokens than this go through a prefill worker.
    pub disaggregate_above_tokens: usize,
}

/// A model and the pool of workers that serve it.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolConfig {
    /// Name of the pool, as in [`WorkerSpec::pool`](crate::WorkerSpec::pool).
    pub name: String,
    /// Name under which the workers serve the model. `None`: the name that the workers agree on.
    pub model: Option<String>,
    /// Engine that the workers run. `None`: detected by asking each worker.
    pub engine: Option<Engine>,
    /// Other names under which clients may ask for the model.
    pub aliases: Vec<String>,
    /// Whether the gateway has the model's own tokenizer. Without it the workers' KV events cannot be indexed.
    pub has_tokenizer: bool,
    /// Rules that assign requests to the pool's workers.
    pub routing: RoutingPolicy,
    /// Strategy of this pool; `None` is the one in `routing`.
    pub strategy: Option<Strategy>,
}

/// Settings of a fleet.
#[derive(Debug, Clone)]
pub struct FleetConfig {
    /// At least one pool, each with another name. A model name that two pools have means the first one.
    pub pools: Vec<PoolConfig>,
    /// KV event endpoints given by the operator, for engines that do not report them.
    pub hints: Hints,
    /// Keys of workers that are added while the fleet runs.
    pub keys: EngineKeys,
    /// TLS settings for https connections to workers and peers.
    pub tls: Option<Arc<ClientTls>>,
    /// Largest size of the index, in bytes.
    pub index_memory_max: usize,
    /// Time for which a routed prompt is assumed to be cached, on workers without KV events.
    pub approximate_ttl: Duration,
    /// URLs of other gateways in front of the same workers.
    pub peers: Vec<String>,
    /// URLs of stores that workers share.
    pub stores: Vec<String>,
    /// Secret by which gateways of one fleet authenticate to each other.
    pub peer_key: Option<String>,
    /// Path of the saved index, which is loaded at the next start; `None`: the index is not saved.
    pub snapshot_file: Option<PathBuf>,
    /// Interval at which the index is saved.
    pub snapshot_interval: Duration,
    /// Interval between health checks of a worker.
    pub health_interval: Duration,
    /// Time after which a late health check stops new requests to the worker, until the answer comes.
    pub health_timeout: Duration,
    /// Number of `health_timeout` periods without an answer after which a worker is given up; at least 2.
    pub health_misses: u32,
}
