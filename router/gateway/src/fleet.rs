//! Who is there: the workers, their health, what they hold and what they are doing.
//!
//! Each worker has a task that asks it who it is. A worker that answers with a new instance number has
//! (re)started: it gets a fresh place in the index and a fresh subscription to its KV events. A failed request
//! marks a worker as down at once; the task brings it back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};
use kvstore_block::block_hash;
use router_engines::client::{EngineClient, WorkerDescription};
use router_events::approximate::Approximate;
use router_events::follower::Follower;
use router_events::snapshot::restore;
use router_events::subscribe::{Feed, Followed, follow};
use router_events::tracker::{Tracker, TrackerCounters};
use router_radix::{Index, IndexConfig, Member};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;

use crate::GatewayConfig;
use crate::load::{Load, Speeds};
use crate::peers::{Peers, tell};
use crate::warm::{self, Known};

/// A feed gets no more than this time to begin.
const WARM_UP_MAX: Duration = Duration::from_secs(2);
/// One with a replay gets this time to tell about its past: a replay is given up a little earlier.
const REPLAY_MAX: Duration = Duration::from_secs(7);
/// How often what forgotten workers left in the index is swept.
const SWEEP_EVERY: Duration = Duration::from_millis(100);
/// Prompts that may wait to be noted for a worker without events; more are not noted.
const ROUTED_MAX: usize = 1024;

/// What a worker does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Prefill,
    Decode,
    Both,
}

impl Role {
    fn from_name(name: &str) -> Option<Self> {
        match name {
            "prefill" => Some(Self::Prefill),
            "decode" => Some(Self::Decode),
            "both" => Some(Self::Both),
            _ => None,
        }
    }
}

/// One run of a worker's process.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) description: WorkerDescription,
    pub(crate) role: Role,
    pub(crate) member: Member,
    pub(crate) load: Load,
    pub(crate) speeds: Arc<Speeds>,
    pub(crate) follower: Arc<Mutex<Follower>>,
    /// It publishes events.
    pub(crate) has_feed: bool,
    /// Its KV events are followed, so the index speaks for it.
    pub(crate) is_warm: Arc<AtomicBool>,
    /// Rung when the index promises what the worker does not have.
    pub(crate) distrust: Arc<Notify>,
    /// Rung when what this gateway has sent somewhere changes; nobody listens unless there are peers.
    loads_changed: Option<Arc<Notify>>,
    /// Without events: what is routed there is noted.
    routed: Option<mpsc::Sender<Vec<u64>>>,
    /// Writes to the index; ended before the place in the index is given out again.
    writing: Mutex<Option<JoinHandle<()>>>,
}

impl Live {
    /// A prompt with these block hashes goes there.
    pub(crate) fn routed(&self, block_hashes: &[u64]) {
        if let Some(routed) = &self.routed {
            // When it is full, a hit or two will be missed.
            let _not_noted = routed.try_send(block_hashes.to_vec());
        }
    }

    /// What this gateway sent somewhere has changed.
    pub(crate) fn changed(&self) {
        if let Some(changed) = &self.loads_changed {
            changed.notify_one();
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        if let Some(task) = self.writing.lock().unwrap_or_else(PoisonError::into_inner).take() {
            task.abort();
        }
    }
}

/// A worker's run together with the worker.
#[derive(Debug, Clone)]
pub(crate) struct Picked {
    pub(crate) worker: Arc<Worker>,
    pub(crate) live: Arc<Live>,
}

impl Picked {
    /// Whether it can take requests.
    pub(crate) fn is_ready(&self) -> bool {
        self.worker.is_up.load(Ordering::Acquire) && self.live.is_warm.load(Ordering::Acquire)
    }
}

/// A worker by its URL.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) client: EngineClient,
    /// Short name for headers and metrics.
    pub(crate) name: String,
    /// Hash of the name.
    pub(crate) identity: u64,
    live: ArcSwapOption<Live>,
    is_up: AtomicBool,
    suspected: Notify,
    /// Rung when the worker is given up although its connections are open.
    pub(crate) down: Notify,
}

impl Worker {
    /// The present run, if the worker can take requests.
    pub(crate) fn ready(&self) -> Option<Arc<Live>> {
        if !self.is_up.load(Ordering::Acquire) {
            return None;
        }
        self.live.load_full().filter(|live| live.is_warm.load(Ordering::Acquire))
    }

    /// A request failed in a way that speaks against the worker: ask it at once how it is.
    pub(crate) fn suspect(&self) {
        self.is_up.store(false, Ordering::Release);
        self.suspected.notify_one();
    }
}

/// All workers and the index over what they hold.
#[derive(Debug)]
pub struct Fleet {
    pub(crate) workers: Vec<Arc<Worker>>,
    /// Every worker that has described itself, as decisions see it.
    pub(crate) roster: ArcSwap<Vec<Picked>>,
    pub(crate) index: Arc<Index>,
    pub(crate) peers: Peers,
    pub(crate) speeds: Arc<Speeds>,
    loads_changed: Option<Arc<Notify>>,
    approximate_ttl: Duration,
    /// Rung when a worker becomes ready.
    pub(crate) changed: Notify,
    /// What a snapshot said of workers that have not come yet.
    pub(crate) known: Mutex<Known>,
    /// Held while a snapshot is being made.
    pub(crate) saving: Mutex<()>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl Fleet {
    /// Starts to watch the configured workers.
    #[must_use]
    pub fn start(config: &GatewayConfig) -> Arc<Self> {
        let worker = |url: &String| {
            let client = EngineClient::new(url);
            let name = client.base().trim_start_matches("http://").to_owned();
            let letters: Vec<u32> = name.bytes().map(u32::from).collect();
            Arc::new(Worker {
                client,
                identity: block_hash(&letters),
                name,
                live: ArcSwapOption::empty(),
                is_up: AtomicBool::new(false),
                suspected: Notify::new(),
                down: Notify::new(),
            })
        };
        let index = IndexConfig { memory_max: config.index_memory_max, ..IndexConfig::default() };
        let fleet = Arc::new(Self {
            workers: config.workers.iter().map(worker).collect(),
            roster: ArcSwap::default(),
            index: Arc::new(Index::new(index)),
            peers: Peers::default(),
            speeds: Arc::default(),
            loads_changed: (!config.peers.is_empty()).then(Arc::default),
            approximate_ttl: config.approximate_ttl,
            changed: Notify::new(),
            known: Mutex::default(),
            saving: Mutex::new(()),
            tasks: Mutex::new(Vec::new()),
        });
        let begin = begin(Arc::downgrade(&fleet), config.clone());
        fleet.adopt([tokio::spawn(begin), tokio::spawn(sweep(Arc::downgrade(&fleet)))]);
        fleet
    }

    fn adopt(&self, tasks: impl IntoIterator<Item = JoinHandle<()>>) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).extend(tasks);
    }

    /// The roster is made anew: a worker has begun another run.
    fn reroster(&self) {
        let picked = |worker: &Arc<Worker>| {
            Some(Picked { live: worker.live.load_full()?, worker: Arc::clone(worker) })
        };
        self.roster.store(Arc::new(self.workers.iter().filter_map(picked).collect()));
        // A fresh run knows nothing yet of what peers sent to the worker.
        self.peers.add_up(self);
    }

    /// Writes a snapshot of the index, for the next start.
    pub fn write_snapshot(&self, file: &std::path::Path) -> std::io::Result<()> {
        warm::write(self, file)
    }

    /// Workers that can take requests now.
    #[must_use]
    pub fn ready_count(&self) -> usize {
        self.workers.iter().filter(|worker| worker.ready().is_some()).count()
    }

    /// Whether some worker can decode.
    #[must_use]
    pub fn can_serve(&self) -> bool {
        self.workers.iter().filter_map(|worker| worker.ready()).any(|live| live.description.role != "prefill")
    }

    /// Sum over all trackers.
    pub(crate) fn tracker_counters(&self) -> TrackerCounters {
        let mut sum = TrackerCounters::default();
        for picked in self.roster.load().iter() {
            sum += picked.live.follower.lock().unwrap_or_else(PoisonError::into_inner).tracker().counters;
        }
        sum
    }

    async fn begin(self: &Arc<Self>, description: WorkerDescription, role: Role, worker: &Arc<Worker>) {
        if let Some(before) = worker.live.swap(None) {
            self.reroster();
            let task = before.writing.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(task) = task {
                task.abort();
                // Only when it has ended can it no longer write to the place that is given back here.
                let _aborted = task.await;
            }
            self.index.write().leave(before.member);
        }
        let Some(member) = self.index.write().join() else {
            let limit = router_radix::MEMBERS_MAX;
            tracing::error!(worker = worker.name, limit, "too many workers for the index");
            return;
        };
        let mut follower = Follower::new(Tracker::new(member, description.block_tokens));
        let feed = description.events.clone().map(|events| Feed {
            events,
            replay: description.replay.clone(),
            bind: false,
        });
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(&worker.name);
        if let Some(state) = known.filter(|state| state.instance == description.instance && feed.is_some()) {
            let (index, name) = (Arc::clone(&self.index), worker.name.clone());
            // A large worker's blocks take a while, and this thread has other work.
            let restored = tokio::task::spawn_blocking(move || {
                let fits = restore(&state, &mut follower, &mut index.write());
                tracing::info!(
                    worker = name,
                    blocks = state.held.len(),
                    fits,
                    "worker known from a snapshot"
                );
                follower
            });
            follower = match restored.await {
                Ok(follower) => follower,
                Err(_) => Follower::new(Tracker::new(member, description.block_tokens)),
            };
        }
        let follower = Arc::new(Mutex::new(follower));
        let is_warm = Arc::new(AtomicBool::new(feed.is_none()));
        let distrust = Arc::<Notify>::default();
        let has_feed = feed.is_some();
        let (task, routed) = match feed {
            Some(feed) => {
                let followed = Followed {
                    follower: Arc::clone(&follower),
                    index: Arc::clone(&self.index),
                    distrust: Arc::clone(&distrust),
                };
                (self.follow(feed, followed, &is_warm), None)
            }
            None => {
                let approximate = Approximate::new(member, self.approximate_ttl, description.blocks);
                let (routed, prompts) = mpsc::channel(ROUTED_MAX);
                (tokio::spawn(note_routed(approximate, Arc::clone(&self.index), prompts)), Some(routed))
            }
        };
        tracing::info!(
            worker = worker.name,
            role = description.role,
            instance = description.instance,
            "worker joined"
        );
        let live = Live {
            description,
            role,
            member,
            load: Load::default(),
            speeds: Arc::clone(&self.speeds),
            follower,
            has_feed,
            is_warm,
            distrust,
            loads_changed: self.loads_changed.clone(),
            routed,
            writing: Mutex::new(Some(task)),
        };
        worker.live.store(Some(Arc::new(live)));
        self.reroster();
    }

    fn follow(self: &Arc<Self>, feed: Feed, followed: Followed, is_warm: &Arc<AtomicBool>) -> JoinHandle<()> {
        let fleet = Arc::downgrade(self);
        let flag = Arc::clone(is_warm);
        let warm = move || {
            flag.store(true, Ordering::Release);
            if let Some(fleet) = fleet.upgrade() {
                fleet.changed.notify_waiters();
            }
        };
        let late = warm.clone();
        let most = if feed.replay.is_some() { REPLAY_MAX } else { WARM_UP_MAX };
        tokio::spawn(async move {
            let followed = follow(feed, followed, warm);
            tokio::pin!(followed);
            if tokio::time::timeout(most, &mut followed).await.is_err() {
                late();
                followed.await;
            }
        })
    }
}

/// Takes over what is known, then watches the workers and tells the peers.
async fn begin(fleet: std::sync::Weak<Fleet>, config: GatewayConfig) {
    let known = warm::load(&config.peers, config.snapshot_file.as_deref()).await;
    let Some(fleet) = fleet.upgrade() else { return };
    *fleet.known.lock().unwrap_or_else(PoisonError::into_inner) = known;
    let weak = || Arc::downgrade(&fleet);
    fleet.adopt(fleet.workers.iter().map(|worker| {
        let watch = watch(weak(), Arc::clone(worker), config.model.clone(), config.health_interval);
        tokio::spawn(watch)
    }));
    let gateway = crate::service::fresh_number();
    if let Some(changed) = &fleet.loads_changed {
        // One bell rings for one listener: each peer has its own, rung in turn.
        let bells: Vec<Arc<Notify>> = config.peers.iter().map(|_| Arc::default()).collect();
        let tellers = config
            .peers
            .iter()
            .zip(&bells)
            .map(|(peer, bell)| tell(weak(), peer.clone(), gateway, Arc::clone(bell)));
        fleet.adopt(tellers.map(tokio::spawn));
        let changed = Arc::clone(changed);
        fleet.adopt([tokio::spawn(async move {
            loop {
                changed.notified().await;
                bells.iter().for_each(|bell| bell.notify_one());
            }
        })]);
    }
    if let Some(file) = config.snapshot_file {
        fleet.adopt([tokio::spawn(warm::keep(weak(), file, config.snapshot_interval))]);
    }
}

/// Housekeeping while nothing changes.
async fn sweep(fleet: std::sync::Weak<Fleet>) {
    loop {
        tokio::time::sleep(SWEEP_EVERY).await;
        let Some(fleet) = fleet.upgrade() else { return };
        while fleet.index.write().sweep() {
            tokio::task::yield_now().await;
        }
        fleet.peers.expire(&fleet, Instant::now());
    }
}

/// Notes what is routed to a worker without events.
async fn note_routed(mut approximate: Approximate, index: Arc<Index>, mut prompts: mpsc::Receiver<Vec<u64>>) {
    loop {
        match tokio::time::timeout(Duration::from_secs(1), prompts.recv()).await {
            Ok(Some(hashes)) => approximate.routed(&mut index.write(), &hashes, Instant::now()),
            Ok(None) => return,
            Err(_) => approximate.expire(&mut index.write(), Instant::now()),
        }
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(JoinHandle::abort);
    }
}

/// Why a worker that describes itself so cannot be used, if it cannot.
fn unusable(fleet: &Fleet, worker: &Worker, description: &WorkerDescription, model: &str) -> Option<String> {
    if description.model != model {
        return Some(format!("it serves {:?}, not {model:?}", description.model));
    }
    if Role::from_name(&description.role).is_none() {
        return Some(format!("its role {:?} is unknown", description.role));
    }
    // Ready or not: two that come at the same time must not both be the first.
    let roster = fleet.roster.load();
    let other = roster
        .iter()
        .find(|other| other.worker.name != worker.name && other.worker.is_up.load(Ordering::Acquire));
    let expected = other.map_or(description.block_tokens, |other| other.live.description.block_tokens);
    if description.block_tokens == 0 || description.block_tokens != expected {
        return Some(format!(
            "its blocks have {} tokens, those of the others {expected}",
            description.block_tokens
        ));
    }
    None
}

/// Questions in a row that may go unanswered before a worker is given up.
const MISSES_MAX: u32 = 2;

async fn watch(fleet: std::sync::Weak<Fleet>, worker: Arc<Worker>, model: String, interval: Duration) {
    let patience = interval.max(Duration::from_secs(1));
    let mut misses = 0;
    let mut complained = String::new();
    loop {
        let described = tokio::time::timeout(patience, worker.client.describe()).await;
        let Some(fleet) = fleet.upgrade() else { return };
        let complaint = match described {
            Err(_) => {
                misses += 1;
                Some(format!("no answer within {} ms", patience.as_millis()))
            }
            Ok(Err(error)) => Some(error.to_string()),
            Ok(Ok(description)) => match unusable(&fleet, &worker, &description, &model) {
                Some(reason) => Some(reason),
                None => {
                    let live = worker.live.load_full();
                    let role = Role::from_name(&description.role);
                    if live.is_none_or(|live| live.description.instance != description.instance)
                        && let Some(role) = role
                    {
                        fleet.begin(description, role, &worker).await;
                    }
                    None
                }
            },
        };
        match complaint {
            None => {
                misses = 0;
                complained.clear();
                worker.is_up.store(true, Ordering::Release);
                fleet.changed.notify_waiters();
            }
            Some(reason) => {
                worker.is_up.store(false, Ordering::Release);
                if complained != reason {
                    tracing::warn!(worker = worker.name, reason, "worker is not usable");
                    complained = reason;
                }
                if misses >= MISSES_MAX {
                    worker.down.notify_waiters();
                }
            }
        }
        drop(fleet);
        let quick = interval.min(Duration::from_millis(100));
        let pause = if worker.is_up.load(Ordering::Acquire) { interval } else { quick };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // Not at once: a worker that died needs a moment to come back.
            () = worker.suspected.notified() => tokio::time::sleep(quick / 2).await,
        }
    }
}
