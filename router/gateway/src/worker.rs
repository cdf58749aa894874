//! A worker, and each run of its process.
//!
//! A worker is its URL. What it says of itself belongs to one run of its process, and each data-parallel rank of that
//! run is a [`Live`]: a place in the index, a load, a feed. Decisions see [`Picked`]s.

use std::cell::OnceCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

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
use crate::capacity::Capacity;
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
    /// What it can take, by what the engine said.
    pub(crate) capacity: Capacity,
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

    /// It takes no request that a prefill worker does not compute.
    pub(crate) fn needs_prefill(&self) -> bool {
        self.role == Role::Decode && self.description.engine.dialect().decode_needs_prefill()
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

/// An engine counts a request this long after it was sent at the latest: it has parsed and tokenised it by then.
const COUNTED_AFTER: Duration = Duration::from_millis(500);

/// An engine's own count of its load.
#[derive(Debug, Default)]
pub(crate) struct Reported {
    /// Running in the upper half, waiting in the lower.
    requests: AtomicU64,
    usage: AtomicU64,
    /// When the question was sent that these counts answer; `None` before the first answer.
    asked: Mutex<Option<Instant>>,
}

impl Reported {
    /// Takes over what the engine answered to a question sent at `asked`.
    pub(crate) fn set(&self, load: &EngineLoad, asked: Instant) {
        self.requests.store(u64::from(load.running) << 32 | u64::from(load.waiting), Ordering::Relaxed);
        self.usage.store(load.kv_usage.to_bits(), Ordering::Relaxed);
        *self.asked.lock().unwrap_or_else(PoisonError::into_inner) = Some(asked);
    }

    /// Whether the engine has no request at all by a count that would include one sent at `sent`: it has lost that one.
    pub(crate) fn is_idle_since(&self, sent: Instant) -> bool {
        let asked = *self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let load = self.get();
        asked.is_some_and(|asked| asked >= sent + COUNTED_AFTER) && load.running == 0 && load.waiting == 0
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

/// Selects the workers that may generate an answer. One that needs a prefill worker counts only while a prefill worker is
/// ready; the roster is searched for that at most once.
pub(crate) fn able_to_decode(roster: &[Picked], adapter: Option<&str>) -> impl Fn(&Picked) -> bool {
    let has_prefill = OnceCell::new();
    let computes = move |picked: &Picked| {
        picked.live.role == Role::Prefill && picked.is_ready() && picked.serves(adapter)
    };
    move |picked: &Picked| {
        picked.live.role != Role::Prefill
            && (!picked.live.needs_prefill() || *has_prefill.get_or_init(|| roster.iter().any(computes)))
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
    /// It may be another run of the process than the one that described itself.
    in_doubt: AtomicBool,
    /// The first miss of the health check that has given the worker up; `None` while health checks are answered.
    silent_since: Mutex<Option<Instant>>,
    /// Rung when the worker is given up although its connections are open. A request that has received bytes since
    /// `silent_since` goes on all the same.
    pub(crate) down: Notify,
    /// Rung when nothing answers at its address any more.
    pub(crate) gone: Notify,
}

impl Worker {
    pub(crate) fn new(config: &WorkerConfig, tls: Option<&Arc<ClientTls>>) -> Arc<Self> {
        let upstream = Upstream::with_key(&config.url, tls, config.key.as_ref());
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
            in_doubt: AtomicBool::new(false),
            silent_since: Mutex::new(None),
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
        self.doubt();
    }

    /// Something speaks for another run of the process: ask at once which one it is.
    pub(crate) fn doubt(&self) {
        self.in_doubt.store(true, Ordering::Relaxed);
        self.suspected.notify_one();
    }

    /// Whether there was a doubt, which the caller clears up.
    pub(crate) fn take_doubt(&self) -> bool {
        self.in_doubt.swap(false, Ordering::Relaxed)
    }

    /// A health check was answered, however late.
    pub(crate) fn answered(&self) {
        *self.silent_since.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// A health check that was missed first at `since` was never answered: gives up what has been silent for as long.
    pub(crate) fn give_up(&self, since: Instant) {
        *self.silent_since.lock().unwrap_or_else(PoisonError::into_inner) = Some(since);
        self.down.notify_waiters();
    }

    /// Whether the worker is given up and a request that received its last byte at `last` with it.
    pub(crate) fn is_silent_since(&self, last: Instant) -> bool {
        let since = *self.silent_since.lock().unwrap_or_else(PoisonError::into_inner);
        since.is_some_and(|since| last < since)
    }

    /// Ends when a request that has received nothing since `last` is to be given up.
    pub(crate) async fn given_up(&self, last: Instant) {
        loop {
            // Before the look, so that no ring between the two is lost.
            let rung = self.down.notified();
            if self.is_silent_since(last) {
                return;
            }
            rung.await;
        }
    }
}

/// Hash of a worker's name.
pub(crate) fn identity(name: &str) -> u64 {
    let letters: Vec<u32> = name.bytes().map(u32::from).collect();
    block_hash(&letters)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The worker's health check was missed first at second 5 and given up at second 15.
    #[test]
    fn only_requests_that_were_silent_since_before_the_first_miss_are_given_up() {
        let worker = Worker::new(&WorkerConfig::new("http://127.0.0.1:1"), None);
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        assert!(!worker.is_silent_since(at(0)), "no health check has been missed");
        worker.give_up(at(5));
        assert!(worker.is_silent_since(at(4)));
        assert!(!worker.is_silent_since(at(6)), "bytes came after the first miss");
        worker.answered();
        assert!(!worker.is_silent_since(at(4)));
    }

    #[test]
    fn only_a_count_that_includes_a_request_says_that_it_is_lost() {
        let reported = Reported::default();
        let sent = Instant::now();
        assert!(!reported.is_idle_since(sent), "nothing has been reported");
        reported.set(&EngineLoad::default(), sent);
        assert!(!reported.is_idle_since(sent), "the count is older than the request");
        reported.set(&EngineLoad { waiting: 1, ..EngineLoad::default() }, sent + COUNTED_AFTER);
        assert!(!reported.is_idle_since(sent), "it may be the one that waits");
        reported.set(&EngineLoad::default(), sent + COUNTED_AFTER);
        assert!(reported.is_idle_since(sent));
    }
}
