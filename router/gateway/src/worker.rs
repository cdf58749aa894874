//! A worker, and each run of its process.
//!
//! A worker is its URL. What it says of itself belongs to one run of its process, and each data-parallel rank of that
//! run is a [`Live`]: a place in the index, a load, a feed. Decisions see [`Picked`]s.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use arc_swap::ArcSwap;
use kvstore_block::block_hash;
use router_engines::client::EngineClient;
use router_engines::dialect::{Description, EngineLoad, Role};
use router_engines::upstream::Upstream;
use router_events::follower::Follower;
use router_radix::Member;
use router_tls::ClientTls;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::breaker::Breaker;
use crate::config::WorkerConfig;
use crate::load::{Load, Speeds};
use crate::routed::Routed;

/// One rank of one run of a worker's process.
#[derive(Debug)]
pub(crate) struct Live {
    /// The worker's name, with the rank behind it when there are several.
    pub(crate) name: String,
    /// Hash of the name.
    pub(crate) identity: u64,
    pub(crate) description: Arc<Description>,
    /// The rank, when there are several.
    pub(crate) rank: Option<u16>,
    pub(crate) role: Role,
    pub(crate) member: Member,
    pub(crate) load: Load,
    /// What the engine itself said last.
    pub(crate) reported: Reported,
    pub(crate) speeds: Arc<Speeds>,
    pub(crate) follower: Arc<Mutex<Follower>>,
    /// It publishes events.
    pub(crate) has_feed: bool,
    /// Its KV events are followed, so the index speaks for it.
    pub(crate) is_warm: Arc<AtomicBool>,
    /// Rung when the index promises what the worker does not have.
    pub(crate) distrust: Arc<Notify>,
    /// Rung when what this gateway has sent somewhere changes; nobody listens unless there are peers.
    pub(crate) loads_changed: Option<Arc<Notify>>,
    /// Without events: what is routed there is noted.
    pub(crate) routed: Option<Arc<Routed>>,
    /// Writes to the index; ended before the place in the index is given out again.
    pub(crate) writing: Mutex<Option<JoinHandle<()>>>,
}

impl Live {
    /// A prompt with these block hashes goes there.
    pub(crate) fn routed(&self, block_hashes: &[u64]) {
        if let Some(routed) = &self.routed {
            routed.note(block_hashes);
        }
    }

    /// What this gateway sent somewhere has changed.
    pub(crate) fn changed(&self) {
        if let Some(changed) = &self.loads_changed {
            changed.notify_one();
        }
    }

    pub(crate) fn take_writing(&self) -> Option<JoinHandle<()>> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        if let Some(task) = self.take_writing() {
            task.abort();
        }
    }
}

/// An engine's own count of its load.
#[derive(Debug, Default)]
pub(crate) struct Reported {
    /// Running in the upper half, waiting in the lower.
    requests: AtomicU64,
    usage: AtomicU64,
}

impl Reported {
    pub(crate) fn set(&self, load: &EngineLoad) {
        self.requests.store(u64::from(load.running) << 32 | u64::from(load.waiting), Ordering::Relaxed);
        self.usage.store(load.kv_usage.to_bits(), Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> EngineLoad {
        let requests = self.requests.load(Ordering::Relaxed);
        EngineLoad {
            running: (requests >> 32) as u32,
            waiting: requests as u32,
            kv_usage: f64::from_bits(self.usage.load(Ordering::Relaxed)),
        }
    }
}

/// A rank of a worker's run together with the worker.
#[derive(Debug, Clone)]
pub(crate) struct Picked {
    pub(crate) worker: Arc<Worker>,
    pub(crate) live: Arc<Live>,
}

impl Picked {
    /// Whether it can take requests.
    pub(crate) fn is_ready(&self) -> bool {
        self.worker.is_up() && self.live.is_warm.load(Ordering::Acquire)
    }

    /// Whether it serves this model; `None` is the fleet's own.
    pub(crate) fn serves(&self, adapter: Option<&str>) -> bool {
        adapter.is_none_or(|name| self.live.description.models.iter().any(|model| model == name))
    }
}

/// A worker by its URL.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) client: EngineClient,
    pub(crate) upstream: Arc<Upstream>,
    /// Short name for headers and metrics.
    pub(crate) name: String,
    /// What the operator says that it does.
    pub(crate) role: Option<Role>,
    /// By rank; empty until it has described itself.
    pub(crate) lives: ArcSwap<Vec<Arc<Live>>>,
    is_up: AtomicBool,
    pub(crate) breaker: Breaker,
    pub(crate) suspected: Notify,
    /// Rung when the worker is given up although its connections are open.
    pub(crate) down: Notify,
    /// Rung when nothing answers at its address any more.
    pub(crate) gone: Notify,
}

impl Worker {
    pub(crate) fn new(config: &WorkerConfig, tls: Option<&Arc<ClientTls>>) -> Arc<Self> {
        let upstream = Upstream::new(&config.url, tls);
        let client = EngineClient::over(&upstream);
        let name = client.base().split_once("://").map_or(client.base(), |(_, name)| name).to_owned();
        Arc::new(Self {
            upstream,
            client,
            name,
            role: config.role,
            lives: ArcSwap::default(),
            is_up: AtomicBool::new(false),
            breaker: Breaker::new(Instant::now()),
            suspected: Notify::new(),
            down: Notify::new(),
            gone: Notify::new(),
        })
    }

    /// It answers its health check.
    pub(crate) fn is_up(&self) -> bool {
        self.is_up.load(Ordering::Acquire)
    }

    pub(crate) fn set_up(&self, is_up: bool) {
        self.is_up.store(is_up, Ordering::Release);
    }

    /// Whether some rank can take requests.
    pub(crate) fn is_ready(&self) -> bool {
        self.is_up() && self.lives.load().iter().any(|live| live.is_warm.load(Ordering::Acquire))
    }

    /// A request failed in a way that speaks against the worker: ask it at once how it is.
    pub(crate) fn suspect(&self) {
        self.set_up(false);
        self.suspected.notify_one();
    }
}

/// Hash of a worker's name.
pub(crate) fn identity(name: &str) -> u64 {
    let letters: Vec<u32> = name.bytes().map(u32::from).collect();
    block_hash(&letters)
}
