//! Who is there, and the index over what they hold.
//!
//! A worker that has (re)started gets, for each of its ranks, a fresh place in the index and a fresh subscription to
//! its KV events; `watch` says when. A worker that publishes nothing, or whose tokens the gateway cannot make itself, is
//! taken to hold what was routed to it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use router_engines::dialect::{Description, Engine, POLLED, Role, authority_of};
use router_events::approximate::Approximate;
use router_events::follower::Follower;
use router_events::listen::{Listeners, Publisher};
use router_events::snapshot::restore;
use router_events::subscribe::{Feed, Followed, follow};
use router_events::tracker::{Tracker, TrackerCounters};
use router_radix::{Index, IndexConfig, Member};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::GatewayConfig;
use crate::capacity::Capacity;
use crate::load::{Load, Speeds};
use crate::model::ServedModel;
use crate::peers::{Peers, tell};
use crate::poll::poll;
use crate::report::report;
use crate::routed::{Routed, keep};
use crate::warm::{self, Known};
use crate::watch::watch;
use crate::worker::{Live, Picked, Reported, Worker, able_to_decode, identity};

/// Blocks of an engine that does not say how many it has.
const BLOCKS_ASSUMED: usize = 16_384;
/// A feed gets no more than this time to begin.
const WARM_UP_MAX: Duration = Duration::from_secs(2);
/// One with a replay gets this time to tell about its past: a replay is given up a little earlier.
const REPLAY_MAX: Duration = Duration::from_secs(7);
/// How often what forgotten workers left in the index is swept.
const SWEEP_EVERY: Duration = Duration::from_millis(100);

/// All workers and the index over what they hold.
#[derive(Debug)]
pub struct Fleet {
    pub(crate) workers: Vec<Arc<Worker>>,
    /// The model that all of them serve.
    pub(crate) model: ServedModel,
    /// Whether the gateway's tokens are the engines' own, so that their events mean something to the index.
    follows_events: bool,
    /// Every worker that has described itself, as decisions see it.
    pub(crate) roster: ArcSwap<Vec<Picked>>,
    pub(crate) index: Arc<Index>,
    pub(crate) peers: Peers,
    pub(crate) speeds: Arc<Speeds>,
    /// Ports to which engines connect with their KV events.
    pub(crate) listeners: Arc<Listeners>,
    loads_changed: Option<Arc<Notify>>,
    approximate_ttl: Duration,
    /// Rung when a worker becomes ready.
    pub(crate) changed: Notify,
    /// What a snapshot said of workers that have not come yet.
    pub(crate) known: Mutex<Known>,
    /// Held while a snapshot is being made.
    pub(crate) saving: Mutex<()>,
    /// Held while a worker that has come is looked at.
    pub(crate) joining: tokio::sync::Mutex<()>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl Fleet {
    /// Starts to watch the configured workers.
    #[must_use]
    pub fn start(config: &GatewayConfig) -> Arc<Self> {
        let index = IndexConfig { memory_max: config.index_memory_max, ..IndexConfig::default() };
        let tls = config.access.tls.as_ref();
        let workers: Vec<_> = config.workers.iter().map(|worker| Worker::new(worker, tls)).collect();
        let names = workers.iter().map(|worker| worker.name.clone());
        let fleet = Arc::new(Self {
            model: ServedModel::new(config.model.clone(), names),
            workers,
            follows_events: config.has_tokenizer,
            roster: ArcSwap::default(),
            index: Arc::new(Index::new(index)),
            peers: Peers::default(),
            speeds: Arc::default(),
            listeners: Arc::default(),
            loads_changed: (!config.peers.is_empty()).then(Arc::default),
            approximate_ttl: config.approximate_ttl,
            changed: Notify::new(),
            known: Mutex::default(),
            saving: Mutex::new(()),
            joining: tokio::sync::Mutex::new(()),
            tasks: Mutex::new(Vec::new()),
        });
        let begin = begin(Arc::downgrade(&fleet), config.clone());
        fleet.adopt([tokio::spawn(begin), tokio::spawn(sweep(Arc::downgrade(&fleet)))]);
        fleet
    }

    pub(crate) fn adopt(&self, tasks: impl IntoIterator<Item = JoinHandle<()>>) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).extend(tasks);
    }

    /// The roster is made anew: a worker has begun another run.
    fn reroster(&self) {
        let picked = |worker: &Arc<Worker>| {
            let lives = worker.lives.load_full();
            let of = |live: &Arc<Live>| Picked { worker: Arc::clone(worker), live: Arc::clone(live) };
            lives.iter().map(of).collect::<Vec<_>>()
        };
        self.roster.store(Arc::new(self.workers.iter().flat_map(picked).collect()));
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
        self.workers.iter().filter(|worker| worker.is_ready()).count()
    }

    /// Whether some worker can decode, and it is clear which model the gateway serves.
    #[must_use]
    pub fn can_serve(&self) -> bool {
        let roster = self.roster.load();
        let can_decode = able_to_decode(&roster, None);
        !self.model.is_disputed() && roster.iter().any(|picked| picked.is_ready() && can_decode(picked))
    }

    /// Whether every worker takes and gives token ids, and does prompt and answer itself.
    pub(crate) fn speaks_ids(&self) -> bool {
        let roster = self.roster.load();
        !roster.is_empty()
            && roster.iter().all(|picked| {
                let engine = picked.live.description.engine;
                engine.dialect().returns_token_ids()
                    && (engine == Engine::Native || picked.live.role == Role::Both)
            })
    }

    /// Whether all of them are the reference engine, whose text is made here.
    pub(crate) fn is_native(&self) -> bool {
        let roster = self.roster.load();
        // Nobody is there while the only worker begins another run: what it is must not be guessed.
        !roster.is_empty() && roster.iter().all(|picked| picked.live.description.engine == Engine::Native)
    }

    /// Sum over all trackers.
    pub(crate) fn tracker_counters(&self) -> TrackerCounters {
        let mut sum = TrackerCounters::default();
        for picked in self.roster.load().iter() {
            sum += picked.live.follower.lock().unwrap_or_else(PoisonError::into_inner).tracker().counters;
        }
        sum
    }

    /// A worker has begun another run: its old places in the index are given back, and each rank gets a new one.
    pub(crate) async fn begin(self: &Arc<Self>, description: Description, worker: &Arc<Worker>) {
        let before = worker.lives.swap(Arc::default());
        if !before.is_empty() {
            self.reroster();
        }
        for live in before.iter() {
            if let Some(task) = live.take_writing() {
                task.abort();
                // Only when it has ended can it no longer write to the place that is given back here.
                let _aborted = task.await;
            }
            self.index.write().leave(live.member);
        }
        let description = Arc::new(description);
        let mut lives = Vec::new();
        for rank in 0..description.feeds.len().max(1) as u16 {
            let member = self.index.write().join();
            let Some(member) = member else {
                let limit = router_radix::MEMBERS_MAX;
                tracing::error!(worker = worker.name, limit, "too many workers for the index");
                break;
            };
            lives.push(Arc::new(self.live(&description, rank, member, worker).await));
        }
        tracing::info!(
            worker = worker.name,
            engine = description.engine.name(),
            version = description.version,
            ranks = lives.len(),
            "worker joined"
        );
        worker.lives.store(Arc::new(lives));
        self.reroster();
    }

    async fn live(
        self: &Arc<Self>,
        description: &Arc<Description>,
        rank: u16,
        member: Member,
        worker: &Arc<Worker>,
    ) -> Live {
        let has_ranks = description.feeds.len() > 1;
        let name = if has_ranks { format!("{}@{rank}", worker.name) } else { worker.name.clone() };
        let means_something = self.follows_events || description.engine == Engine::Native;
        let feed = description.feeds.get(rank as usize).cloned().flatten().filter(|_| means_something);
        let feed = feed.map(|feed| Feed {
            events: feed.events,
            replay: feed.replay,
            bind: feed.bind,
            publisher: Publisher {
                name: name.clone(),
                address: authority_of(worker.client.base()).to_owned(),
                topic: feed.topic,
            },
        });
        let mut follower = Follower::new(Tracker::new(member, description.block_tokens));
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
        let is_same = |instance| description.instance == Some(instance);
        if let Some(state) = known.filter(|state| is_same(state.instance) && feed.is_some()) {
            let (index, name) = (Arc::clone(&self.index), name.clone());
            // A large worker's blocks take a while, and this thread has other work.
            let restored = tokio::task::spawn_blocking(move || {
                let fits = restore(&state, &mut follower, &mut index.write());
                let blocks = state.held.len();
                tracing::info!(worker = name, blocks, fits, "worker known from a snapshot");
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
                (self.follow(feed, followed, &is_warm, worker), None)
            }
            None if !description.keeps_prefixes => (tokio::spawn(async {}), None),
            None => {
                // An engine that does not say how many blocks it has is taken to have some.
                let blocks = if description.blocks > 0 { description.blocks } else { BLOCKS_ASSUMED };
                let approximate = Approximate::new(member, self.approximate_ttl, blocks);
                let routed = Routed::new();
                let keeping = keep(Arc::clone(&routed), approximate, Arc::clone(&self.index));
                (tokio::spawn(keeping), Some(routed))
            }
        };
        Live {
            identity: identity(&name),
            name,
            description: Arc::clone(description),
            rank: has_ranks.then_some(rank),
            role: role_of(worker, description),
            member,
            load: Load::default(),
            reported: Reported::default(),
            capacity: Capacity::default(),
            speeds: Arc::clone(&self.speeds),
            follower,
            has_feed,
            is_warm,
            distrust,
            loads_changed: self.loads_changed.clone(),
            routed,
            writing: Mutex::new(Some(task)),
        }
    }

    fn follow(
        self: &Arc<Self>,
        feed: Feed,
        followed: Followed,
        is_warm: &Arc<AtomicBool>,
        worker: &Worker,
    ) -> JoinHandle<()> {
        let fleet = Arc::downgrade(self);
        let flag = Arc::clone(is_warm);
        let warm = move || {
            flag.store(true, Ordering::Release);
            if let Some(fleet) = fleet.upgrade() {
                fleet.changed.notify_waiters();
            }
        };
        let late = warm.clone();
        if feed.events == POLLED {
            let client = worker.client.clone();
            return tokio::spawn(async move {
                let polling = poll(client, followed, warm);
                tokio::pin!(polling);
                if tokio::time::timeout(WARM_UP_MAX, &mut polling).await.is_err() {
                    late();
                    polling.await;
                }
            });
        }
        let most = if feed.replay.is_some() { REPLAY_MAX } else { WARM_UP_MAX };
        let listeners = Arc::clone(&self.listeners);
        tokio::spawn(async move {
            let followed = follow(feed, followed, listeners, warm);
            tokio::pin!(followed);
            if tokio::time::timeout(most, &mut followed).await.is_err() {
                late();
                followed.await;
            }
        })
    }
}

/// The role of a worker: the operator's word, except for engines whose part was fixed when they started.
fn role_of(worker: &Worker, description: &Description) -> Role {
    if let (Some(configured), Some(told)) = (worker.role, description.role)
        && configured != told
        && description.engine.dialect().decode_needs_prefill()
    {
        let (wanted, is) = (configured.name(), told.name());
        tracing::warn!(worker = worker.name, wanted, is, "the server was started for another role");
        return told;
    }
    worker.role.or(description.role).unwrap_or(Role::Both)
}

/// Takes over what is known, then watches the workers and tells the peers.
async fn begin(fleet: std::sync::Weak<Fleet>, config: GatewayConfig) {
    let known = warm::load(&config.peers, &config.access, config.snapshot_file.as_deref()).await;
    let Some(fleet) = fleet.upgrade() else { return };
    *fleet.known.lock().unwrap_or_else(PoisonError::into_inner) = known;
    let weak = || Arc::downgrade(&fleet);
    fleet.adopt(
        fleet.workers.iter().map(|worker| tokio::spawn(watch(weak(), Arc::clone(worker), config.clone()))),
    );
    let interval = config.health_interval;
    fleet.adopt(fleet.workers.iter().map(|worker| tokio::spawn(report(Arc::clone(worker), interval))));
    let gateway = crate::service::fresh_number();
    if let Some(changed) = &fleet.loads_changed {
        // One bell rings for one listener: each peer has its own, rung in turn.
        let bells: Vec<Arc<Notify>> = config.peers.iter().map(|_| Arc::default()).collect();
        let tellers =
            config.peers.iter().zip(&bells).map(|(peer, bell)| {
                tell(weak(), peer.clone(), config.access.clone(), gateway, Arc::clone(bell))
            });
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

impl Drop for Fleet {
    fn drop(&mut self) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(JoinHandle::abort);
    }
}
