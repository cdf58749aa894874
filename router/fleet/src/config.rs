//! Settings of a fleet. Workers are not among them (`spec`). All but [`RoutingPolicy`] is fixed when the fleet starts.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use router_engines::dialect::{Engine, Hints};
use router_engines::key::EngineKeys;
use router_policy::{Policy, Strategy};
use router_tls::ClientTls;

/// How requests of a pool are given to its workers; may change while the fleet runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoutingPolicy {
    /// How to choose a worker.
    pub policy: Policy,
    /// Prompts with more uncached tokens than this go through a prefill worker.
    pub disaggregate_above_tokens: usize,
}

/// A model and who serves it.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolConfig {
    /// Its name in [`WorkerSpec::pool`](crate::WorkerSpec::pool).
    pub name: String,
    /// Name under which its workers serve the model; `None` is what they agree on.
    pub model: Option<String>,
    /// Its workers' make; `None` asks them.
    pub engine: Option<Engine>,
    /// Other names under which clients may ask for the model.
    pub aliases: Vec<String>,
    /// The gateway has the model's own tokenizer; without it the events of its workers mean nothing to the index.
    pub has_tokenizer: bool,
    /// How requests are given to its workers.
    pub routing: RoutingPolicy,
    /// How its workers are chosen, where that is not as in `routing`.
    pub strategy: Option<Strategy>,
}

/// Settings of a fleet.
#[derive(Debug, Clone)]
pub struct FleetConfig {
    /// At least one; their names differ. Of two with one model name the first is meant by it.
    pub pools: Vec<PoolConfig>,
    /// KV event endpoints that the operator gives, for engines that do not tell them.
    pub hints: Hints,
    /// Keys of workers that are added while the fleet runs.
    pub keys: EngineKeys,
    /// How workers and peers are reached over https.
    pub tls: Option<Arc<ClientTls>>,
    /// Bytes that the index may take.
    pub index_memory_max: usize,
    /// How long a prompt is taken to be where it was routed, on workers without KV events.
    pub approximate_ttl: Duration,
    /// URLs of other gateways in front of the same workers.
    pub peers: Vec<String>,
    /// URLs of stores that workers share.
    pub stores: Vec<String>,
    /// Secret that gateways of one fleet show each other.
    pub peer_key: Option<String>,
    /// Where the index is saved for the next start.
    pub snapshot_file: Option<PathBuf>,
    /// How often it is saved.
    pub snapshot_interval: Duration,
    /// How often workers are asked how they are.
    pub health_interval: Duration,
    /// A worker whose answer takes longer gets no new requests until it comes.
    pub health_timeout: Duration,
    /// Times `health_timeout` without an answer after which a worker is given up; at least 2.
    pub health_misses: u32,
}
