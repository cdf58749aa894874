//! The fleet of workers, which follows the wanted roster.
//!
//! Sources of workers are the configuration ([`Fleet::configure`]), discovery ([`Fleet::discover`]) and administrators
//! ([`Fleet::add`], [`Fleet::drain`], [`Fleet::serve_again`], [`Fleet::remove`]), whose changes also arrive from peers. Each
//! change makes a [`FleetSpec`] with the next version, and [`Fleet::apply`] compares it with the present workers: a worker
//! with the same description continues, with its runs, its place in the index and what was learned of it; any other is a new
//! worker. A worker that leaves is out of every decision when `apply` returns; its requests continue until they end or break.
//! The worker's blocks leave the index, and with that every snapshot, in a task that `apply` starts.
//!
//! Locks: `roster` orders changes; `joining` orders places in the index; a pool's `remaking` orders the lists of its ranks.
//! No request takes any of them, nor those of `stores`, which are taken after `joining`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, Guard};
use router_engines::dialect::{Engine, Role};
use router_engines::key::ApiKey;
use router_events::listen::{ListenCounters, Listeners};
use router_events::tracker::TrackerCounters;
use router_radix::{Index, IndexConfig};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::booking::Booking;
use crate::changes::{AddedWorker, Changes, DesiredState};
use crate::config::FleetConfig;
use crate::decisions::Decisions;
use crate::health::watch;
use crate::peers::{PeerMessageSource, Peers, tell};
use crate::pool::Pool;
use crate::report::report;
use crate::route::{Chooser, Route, RouteRequest};
use crate::snapshots::{self, SnapshotCache};
use crate::spec::{AsleepRun, FleetSpec, SpecError, WORKERS_MAX, WorkerSpec, name_of};
use crate::stores::{self, Stores};
use crate::worker::{RankRef, Worker, WorkerRun};

/// Interval at which blocks of removed workers are swept out of the index and silent peers are dropped.
const SWEEP_EVERY: Duration = Duration::from_millis(100);

/// Workers by name.
pub type Workers = BTreeMap<String, Arc<Worker>>;

/// The sources of the roster.
#[derive(Debug, Default)]
struct RosterSources {
    configured: Arc<Vec<WorkerSpec>>,
    /// Discovered workers, each with another name. A worker that the configuration also names is taken from there.
    discovered: Arc<Vec<WorkerSpec>>,
    changes: Arc<Changes>,
    /// Keys given with added workers, by name. They are not sent to peers.
    added_keys: Arc<HashMap<String, ApiKey>>,
    /// The state in force.
    spec: Arc<FleetSpec>,
}

/// Result of applying a list of discovered workers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Discovered {
    /// Changes to the fleet.
    pub applied: RosterDelta,
    /// One error for each worker that was left out.
    pub refused: Vec<SpecError>,
}

/// Number of workers that a change added, replaced, removed, and began or stopped draining.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RosterDelta {
    /// Workers with new names.
    pub added: usize,
    /// Workers that replaced another under the same name.
    pub replaced: usize,
    /// Workers whose names are gone.
    pub removed: usize,
    /// Workers that begin to drain, or to serve again.
    pub drained: usize,
}

/// All workers, and the index of the blocks that they hold.
#[derive(Debug)]
pub struct Fleet {
    pub(crate) config: FleetConfig,
    pools: Vec<Arc<Pool>>,
    workers: ArcSwap<Workers>,
    roster: Mutex<RosterSources>,
    /// The prefix index: which worker holds which blocks.
    pub index: Arc<Index>,
    /// Loads that other gateways report.
    pub(crate) peers: Peers,
    /// Stores that workers share.
    pub stores: Stores,
    chooser: Chooser,
    /// Ports to which engines connect with their KV events.
    pub(crate) listeners: Arc<Listeners>,
    /// Identity of this gateway among its peers.
    pub(crate) gateway: u64,
    pub(crate) loads_changed: Option<Arc<Notify>>,
    shares: OnceLock<Box<dyn PeerMessageSource>>,
    /// Notified when a worker becomes ready, changes or leaves.
    pub changed: Notify,
    /// Snapshot states of workers that have not joined yet.
    pub(crate) known: SnapshotCache,
    /// Held while a snapshot is being made.
    pub(crate) saving: Mutex<()>,
    /// Held while a new worker is examined, and while a removed one releases its places in the index.
    pub(crate) joining: tokio::sync::Mutex<()>,
    /// Event counters of runs that have ended.
    pub(crate) ended: Mutex<TrackerCounters>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl RosterSources {
    /// The configured workers and the discovered ones beside them, before administrators' changes.
    fn workers(&self) -> impl Iterator<Item = &WorkerSpec> {
        let configured: HashSet<String> = self.configured.iter().map(WorkerSpec::name).collect();
        let left = WORKERS_MAX.saturating_sub(configured.len());
        let is_discovered_only = move |worker: &&WorkerSpec| !configured.contains(&worker.name());
        self.configured.iter().chain(self.discovered.iter().filter(is_discovered_only).take(left))
    }

    /// Names of the configured and discovered workers, with the identities that their sources give.
    fn identities(&self) -> HashMap<String, Option<String>> {
        self.workers().map(|worker| (worker.name(), worker.uid.clone())).collect()
    }
}

/// Whether one of these workers has the name, and the same identity where both are known.
fn is_current(known: &HashMap<String, Option<String>>, name: &str, uid: Option<&str>) -> bool {
    known.get(name).is_some_and(|known| match (known, uid) {
        (Some(known), Some(uid)) => known == uid,
        _ => true,
    })
}

impl Fleet {
    /// Starts a fleet without workers; [`Self::configure`] adds them. `gateway`: identity of this gateway among its peers.
    #[must_use]
    pub fn start(config: FleetConfig, gateway: u64) -> Arc<Self> {
        let index = IndexConfig { memory_max: config.index_memory_max };
        let fleet = Arc::new(Self {
            pools: config.pools.iter().map(Pool::new).collect(),
            workers: ArcSwap::default(),
            roster: Mutex::default(),
            index: Arc::new(Index::new(index)),
            peers: Peers::default(),
            stores: Stores::new(&config.stores),
            chooser: Chooser::default(),
            listeners: Arc::default(),
            gateway,
            loads_changed: (!config.peers.is_empty()).then(Arc::default),
            shares: OnceLock::new(),
            changed: Notify::new(),
            known: SnapshotCache::default(),
            saving: Mutex::new(()),
            joining: tokio::sync::Mutex::new(()),
            ended: Mutex::default(),
            tasks: Mutex::new(Vec::new()),
            config,
        });
        let background = start_background_tasks(Arc::downgrade(&fleet));
        fleet.adopt([tokio::spawn(background), tokio::spawn(sweep(Arc::downgrade(&fleet)))]);
        fleet.adopt(stores::follow(&fleet));
        fleet
    }

    /// Ends these tasks with the fleet.
    pub fn adopt(&self, tasks: impl IntoIterator<Item = JoinHandle<()>>) {
        let mut all = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|task| !task.is_finished());
        all.extend(tasks);
    }

    /// The pools. The first one takes workers that name no pool, if there is such a pool.
    #[must_use]
    pub fn pools(&self) -> &[Arc<Pool>] {
        &self.pools
    }

    /// The workers by name. Callers must not hold the guard for long.
    pub fn workers(&self) -> Guard<Arc<Workers>> {
        self.workers.load()
    }

    /// Every rank of every pool that has described itself.
    #[must_use]
    pub fn ranks(&self) -> Vec<RankRef> {
        let mut ranks = Vec::new();
        self.pools.iter().for_each(|pool| ranks.extend_from_slice(&pool.roster()));
        ranks
    }

    /// Workers that can take requests now.
    #[must_use]
    pub fn ready_count(&self) -> usize {
        let workers = self.workers();
        workers.values().filter(|worker| worker.state() == crate::WorkerState::Ready).count()
    }

    /// The roster that is in force.
    #[must_use]
    pub fn spec(&self) -> Arc<FleetSpec> {
        Arc::clone(&self.lock().spec)
    }

    fn lock(&self) -> MutexGuard<'_, RosterSources> {
        // A change is checked before anything is replaced, and replaced as a whole.
        self.roster.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the configured workers; administrators' changes are kept. Must be called within a Tokio runtime, as every
    /// other change.
    pub fn configure(self: &Arc<Self>, workers: Vec<WorkerSpec>) -> Result<RosterDelta, SpecError> {
        self.change(|roster| {
            roster.configured = Arc::new(workers);
            Ok(())
        })
    }

    /// The workers that the configuration names.
    #[must_use]
    pub fn configured(&self) -> Arc<Vec<WorkerSpec>> {
        Arc::clone(&self.lock().configured)
    }

    /// Replaces the discovered workers by this full list. A worker that the configuration also names is taken from there. An
    /// invalid worker is left out with the reason and the rest is taken: one mistake in a source must not stop the rest. When
    /// there are more workers than a fleet can have, workers that it has stay.
    pub fn discover(self: &Arc<Self>, workers: Vec<WorkerSpec>) -> Result<Discovered, SpecError> {
        let mut refused = Vec::new();
        let applied = self.change(|roster| {
            let mut names = HashSet::new();
            let count = roster.configured.len() + workers.len();
            let mut taken = Vec::with_capacity(workers.len().min(WORKERS_MAX));
            for worker in workers {
                match self.check_discovered(&worker) {
                    Err(error) => refused.push(error),
                    Ok(()) if !names.insert(worker.name()) => refused.push(SpecError::Twice(worker.url)),
                    Ok(()) => taken.push(worker),
                }
            }
            if count > WORKERS_MAX {
                refused.push(SpecError::TooMany(count));
                let there = self.workers();
                // Stable sort: present workers first, each part in its order.
                taken.sort_by_cached_key(|worker| !there.contains_key(&worker.name()));
                taken.truncate(WORKERS_MAX);
            }
            roster.discovered = Arc::new(taken);
            Ok(())
        })?;
        Ok(Discovered { applied, refused })
    }

    fn check_discovered(&self, worker: &WorkerSpec) -> Result<(), SpecError> {
        worker.check()?;
        if self.pool(&worker.pool).is_none() {
            return Err(SpecError::UnknownPool { worker: worker.name(), pool: worker.pool.clone() });
        }
        match worker.url.starts_with("https://") && self.config.tls.is_none() {
            true => Err(SpecError::Tls(worker.url.clone())),
            false => Ok(()),
        }
    }

    /// Adds a worker for an administrator, or replaces the description of an added one. This gateway authenticates to the
    /// worker with `key`, if given; peers use their own keys.
    pub fn add(self: &Arc<Self>, added: AddedWorker, key: Option<ApiKey>) -> Result<RosterDelta, SpecError> {
        if self.pool(&added.pool).is_none() {
            return Err(SpecError::UnknownPool { worker: name_of(&added.url), pool: added.pool });
        }
        if self.described(&added, &HashMap::new()).is_none() {
            return Err(SpecError::Tls(added.url));
        }
        self.apply_change(|roster| {
            if let Some(key) = key {
                Arc::make_mut(&mut roster.added_keys).insert(name_of(&added.url), key);
            }
            let known = roster.identities();
            let is_current = |name: &str, uid: Option<&str>| is_current(&known, name, uid);
            Arc::make_mut(&mut roster.changes).add(added, is_current)
        })
    }

    /// Drains a worker for an administrator: it gets no new requests.
    pub fn drain(self: &Arc<Self>, name: &str) -> Result<RosterDelta, SpecError> {
        self.set_desired_state(name, DesiredState::Drain)
    }

    /// The opposite of [`Self::drain`].
    pub fn serve_again(self: &Arc<Self>, name: &str) -> Result<RosterDelta, SpecError> {
        self.set_desired_state(name, DesiredState::Serve)
    }

    /// Removes a worker for an administrator, also one that the configuration names.
    pub fn remove(self: &Arc<Self>, name: &str) -> Result<RosterDelta, SpecError> {
        self.set_desired_state(name, DesiredState::Remove)
    }

    pub(crate) fn set_desired_state(
        self: &Arc<Self>,
        name: &str,
        desired: DesiredState,
    ) -> Result<RosterDelta, SpecError> {
        self.set_desired_of_run(name, desired, None)
    }

    fn set_desired_of_run(
        self: &Arc<Self>,
        name: &str,
        desired: DesiredState,
        asleep: Option<AsleepRun>,
    ) -> Result<RosterDelta, SpecError> {
        // Normalizes the spelling of the name.
        let name = &name_of(name);
        self.apply_change(|roster| {
            let in_force = roster.spec.workers.iter().find(|worker| worker.name() == *name);
            let Some(in_force) = in_force else {
                return Err(SpecError::UnknownWorker(name.to_owned()));
            };
            // The source's identity takes precedence over the one that an administrator gave with the added worker.
            let reported = roster.workers().find(|worker| worker.name() == *name);
            let uid = reported.unwrap_or(in_force).uid.clone();
            let known = roster.identities();
            let is_current = |name: &str, uid: Option<&str>| is_current(&known, name, uid);
            Arc::make_mut(&mut roster.changes).set_desired(name, uid, desired, asleep, is_current)
        })
    }

    /// Records that this run of a worker's process is put to sleep.
    pub(crate) fn request_sleep(
        self: &Arc<Self>,
        name: &str,
        run: Option<u64>,
    ) -> Result<RosterDelta, SpecError> {
        self.set_desired_of_run(name, DesiredState::Sleep, Some(AsleepRun(run)))
    }

    fn apply_change(
        self: &Arc<Self>,
        change: impl FnOnce(&mut RosterSources) -> Result<(), SpecError>,
    ) -> Result<RosterDelta, SpecError> {
        let applied = self.change(change)?;
        self.tell_peers();
        Ok(applied)
    }

    fn tell_peers(&self) {
        if let Some(changed) = &self.loads_changed {
            changed.notify_one();
        }
    }

    /// Changes of administrators, for peers.
    pub(crate) fn changes(&self) -> Arc<Changes> {
        Arc::clone(&self.lock().changes)
    }

    /// Merges administrators' changes that a peer reported.
    pub(crate) fn merge_peer_changes(self: &Arc<Self>, told: Changes) -> Result<(), SpecError> {
        let mut is_news = false;
        self.change(|roster| {
            let known = roster.identities();
            let mut changes = Changes::clone(&roster.changes);
            is_news = changes.merge(told, |name, uid| is_current(&known, name, uid));
            if is_news {
                roster.changes = Arc::new(changes);
            }
            Ok(())
        })?;
        if is_news {
            tracing::info!("changes to the roster received from a peer");
            // Peers of this gateway may not know the one that sent the changes.
            self.tell_peers();
        }
        Ok(())
    }

    /// Changes the list of one source; an error changes nothing.
    fn change(
        self: &Arc<Self>,
        change: impl FnOnce(&mut RosterSources) -> Result<(), SpecError>,
    ) -> Result<RosterDelta, SpecError> {
        let mut roster = self.lock();
        let before = (
            Arc::clone(&roster.configured),
            Arc::clone(&roster.discovered),
            Arc::clone(&roster.changes),
            Arc::clone(&roster.added_keys),
        );
        let made = change(&mut roster).and_then(|()| {
            let keys = Arc::clone(&roster.added_keys);
            let workers = roster.changes.over(roster.workers(), |added| self.described(added, &keys));
            if workers == roster.spec.workers {
                return Ok(RosterDelta::default());
            }
            let version = roster.spec.version + 1;
            self.apply_locked(&mut roster, FleetSpec { version, workers })
        });
        if made.is_err() {
            (roster.configured, roster.discovered, roster.changes, roster.added_keys) = before;
        }
        if !roster.added_keys.is_empty() {
            let names: HashSet<String> = roster.spec.workers.iter().map(WorkerSpec::name).collect();
            Arc::make_mut(&mut roster.added_keys).retain(|name, _| names.contains(name));
        }
        made
    }

    /// Description of an added worker at this gateway; `None` when it cannot have the worker, though a peer may: its pool is
    /// not configured here, or TLS is not loaded for https.
    fn described(&self, added: &AddedWorker, added_keys: &HashMap<String, ApiKey>) -> Option<WorkerSpec> {
        let pool = self.pool(&added.pool)?;
        if added.url.starts_with("https://") && self.config.tls.is_none() {
            return None;
        }
        let keys = &self.config.keys;
        let is_shared = keys.trusts_added && pool.engine != Some(Engine::OpenAi);
        let configured = if is_shared { keys.of(&added.url) } else { keys.own_of(&added.url) };
        let key = added_keys.get(&name_of(&added.url)).or(configured);
        Some(WorkerSpec {
            url: added.url.clone(),
            uid: added.uid.clone(),
            role: Role::from_name(&added.role),
            key: key.cloned(),
            pool: added.pool.clone(),
            generation: None,
            is_draining: false,
            asleep: None,
        })
    }

    /// Makes the fleet equal to a state that is newer than the one in force. An error changes nothing.
    pub fn apply(self: &Arc<Self>, spec: FleetSpec) -> Result<RosterDelta, SpecError> {
        let mut roster = self.lock();
        let workers = spec.workers.clone();
        let applied = self.apply_locked(&mut roster, spec)?;
        // A full state replaces what every source said before.
        (roster.configured, roster.discovered) = (Arc::new(workers), Arc::default());
        roster.changes = Arc::default();
        Ok(applied)
    }

    fn apply_locked(
        self: &Arc<Self>,
        roster: &mut MutexGuard<'_, RosterSources>,
        spec: FleetSpec,
    ) -> Result<RosterDelta, SpecError> {
        if spec.version <= roster.spec.version {
            return Err(SpecError::Stale { given: spec.version, current: roster.spec.version });
        }
        spec.check(|name| self.pool(name).is_some())?;
        if self.config.tls.is_none()
            && let Some(worker) = spec.workers.iter().find(|worker| worker.url.starts_with("https://"))
        {
            return Err(SpecError::Tls(worker.url.clone()));
        }
        let before = self.workers.load_full();
        let mut applied = RosterDelta::default();
        let mut workers = Workers::new();
        let (mut joined, mut left) = (Vec::new(), Vec::new());
        for wanted in &spec.workers {
            let name = wanted.name();
            let there = before.get(&name).filter(|worker| worker.spec.is_same_worker(wanted));
            let worker = match (there, self.pool(&wanted.pool)) {
                (Some(worker), _) => {
                    worker.update(|condition| condition.sleep_request = wanted.asleep);
                    if worker.is_draining() != wanted.is_draining {
                        applied.drained += 1;
                        worker.update(|condition| condition.is_draining = wanted.is_draining);
                        tracing::info!(
                            worker = name,
                            draining = wanted.is_draining,
                            "drain state of a worker changed"
                        );
                    }
                    Arc::clone(worker)
                }
                (None, Some(pool)) => {
                    let worker = Worker::new(wanted, pool, self.config.tls.as_ref());
                    joined.push(Arc::clone(&worker));
                    worker
                }
                (None, None) => continue,
            };
            workers.insert(name, worker);
        }
        for (name, worker) in before.iter() {
            match workers.get(name) {
                Some(now) if Arc::ptr_eq(now, worker) => {}
                Some(_) => {
                    applied.replaced += 1;
                    left.push(Arc::clone(worker));
                }
                None => {
                    applied.removed += 1;
                    left.push(Arc::clone(worker));
                }
            }
        }
        applied.added = joined.len() - applied.replaced;
        roster.spec = Arc::new(spec);
        self.workers.store(Arc::new(workers));
        if applied != RosterDelta::default() {
            let RosterDelta { added, replaced, removed, drained } = applied;
            let (version, workers) = (roster.spec.version, roster.spec.workers.len());
            tracing::info!(version, workers, added, replaced, removed, drained, "the roster has changed");
        }
        if !joined.is_empty() || !left.is_empty() {
            self.workers_changed(&roster.spec, &left);
        }
        self.watch(joined);
        if !left.is_empty() {
            let fleet = Arc::clone(self);
            self.adopt([tokio::spawn(async move { fleet.retire(&left).await })]);
        }
        self.changed.notify_waiters();
        Ok(applied)
    }

    fn workers_changed(&self, spec: &FleetSpec, left: &[Arc<Worker>]) {
        left.iter().for_each(|worker| worker.remove());
        for pool in &self.pools {
            let own = spec.workers.iter().filter(|worker| worker.pool == pool.name);
            pool.model.set_workers(own.map(WorkerSpec::name));
            self.remake_roster(pool);
        }
    }

    fn watch(self: &Arc<Self>, workers: Vec<Arc<Worker>>) {
        for worker in workers {
            let weak = Arc::downgrade(self);
            // Both end when the worker is removed; there may be many over the time of a fleet, so their handles are not kept.
            tokio::spawn(watch(weak.clone(), Arc::clone(&worker)));
            tokio::spawn(report(weak, worker));
        }
    }

    /// Has these workers from now on, whatever the roster says.
    #[cfg(feature = "testing")]
    pub(crate) fn install(&self, workers: Workers) {
        for pool in &self.pools {
            let own = workers.values().filter(|worker| Arc::ptr_eq(&worker.pool, pool));
            pool.model.set_workers(own.map(|worker| worker.name.clone()));
        }
        self.workers.store(Arc::new(workers));
        self.pools.iter().for_each(|pool| self.remake_roster(pool));
    }

    /// The pool of this name.
    #[must_use]
    pub fn pool(&self, name: &str) -> Option<&Arc<Pool>> {
        self.pools.iter().find(|pool| pool.name == name)
    }

    /// Rebuilds a pool's list of ranks, after a worker has begun another run or the roster has changed.
    pub(crate) fn remake_roster(&self, pool: &Arc<Pool>) {
        // Serializes collecting and storing, so that the later list is also stored later.
        let _turn = pool.remaking.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |worker: &Arc<Worker>| {
            let runs = worker.runs.load_full();
            let of = |run: &Arc<WorkerRun>| RankRef { worker: Arc::clone(worker), run: Arc::clone(run) };
            runs.iter().map(of).collect::<Vec<_>>()
        };
        let spec_workers = self.workers.load();
        let own = spec_workers.values().filter(|worker| Arc::ptr_eq(&worker.pool, pool));
        pool.set_roster(own.flat_map(of).collect());
        // A new run has no counts yet of the requests that peers sent to the worker.
        self.peers.add_up(self);
    }

    /// Chooses the worker of a request and books the request there; `None` when no worker of the pool can take it now. Hot
    /// path: see `route`.
    #[must_use]
    pub fn route(&self, pool: &Pool, request: &RouteRequest<'_>) -> Option<(Route, Booking)> {
        self.chooser.route(&self.index, pool, request)
    }

    /// Explains a decision without making it: every worker with the blocks that it holds and its cost.
    #[must_use]
    pub fn explain(&self, pool: &Pool, request: &RouteRequest<'_>) -> serde_json::Value {
        self.chooser.explain(&self.index, pool, request)
    }

    /// The last decisions.
    #[must_use]
    pub fn decisions(&self) -> &Decisions {
        &self.chooser.decisions
    }

    /// Writes a snapshot of the index, for the next start.
    pub fn write_snapshot(&self, file: &std::path::Path) -> std::io::Result<()> {
        snapshots::write(self, file)
    }

    /// Serializes the state of all workers whose events are followed, for a gateway that starts. Blocking.
    #[must_use]
    pub fn snapshot(&self) -> Vec<u8> {
        snapshots::save(self)
    }

    /// Whether there are other gateways in front of the same workers.
    #[must_use]
    pub fn has_peers(&self) -> bool {
        !self.config.peers.is_empty()
    }

    /// Adds a source of data to the messages between gateways. Only the first call takes effect.
    pub fn share(&self, shares: Box<dyn PeerMessageSource>) {
        let _taken = self.shares.set(shares);
    }

    pub(crate) fn shares(&self) -> Option<&dyn PeerMessageSource> {
        self.shares.get().map(AsRef::as_ref)
    }

    /// Handles a peer's message; the error says what is wrong with it.
    pub fn receive_loads(self: &Arc<Self>, message: &[u8]) -> Result<String, String> {
        crate::peers::receive(self, message, Instant::now())
    }

    /// Sum of the event counters of all workers, including those that have left.
    #[must_use]
    pub fn tracker_counters(&self) -> TrackerCounters {
        let mut sum = *self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        for rank in self.ranks() {
            sum += rank.run.follower.lock().unwrap_or_else(PoisonError::into_inner).tracker().counters;
        }
        sum
    }

    /// Counters of the ports to which engines connect with their events.
    #[must_use]
    pub fn listener_counters(&self) -> ListenCounters {
        self.listeners.counters()
    }
}

/// Loads the known state, then starts saving it periodically and reporting loads to peers.
async fn start_background_tasks(fleet: std::sync::Weak<Fleet>) {
    let Some(config) = fleet.upgrade().map(|fleet| fleet.config.clone()) else { return };
    let known = snapshots::load(&config).await;
    let Some(fleet) = fleet.upgrade() else { return };
    // Watchers wait for this: a worker's events continue from the known state.
    fleet.known.set(known);
    let weak = || Arc::downgrade(&fleet);
    if let Some(changed) = &fleet.loads_changed {
        // A notification wakes one waiter: each peer has its own, notified in turn.
        let told: Vec<Arc<Notify>> = config.peers.iter().map(|_| Arc::default()).collect();
        let tellers = config.peers.iter().zip(&told);
        let tellers = tellers.map(|(peer, changed)| tell(weak(), peer.clone(), Arc::clone(changed)));
        fleet.adopt(tellers.map(tokio::spawn));
        let changed = Arc::clone(changed);
        fleet.adopt([tokio::spawn(async move {
            loop {
                changed.notified().await;
                told.iter().for_each(|peer| peer.notify_one());
            }
        })]);
    }
    if let Some(file) = config.snapshot_file {
        fleet.adopt([tokio::spawn(snapshots::keep(weak(), file, config.snapshot_interval))]);
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
        fleet.pools.iter().for_each(|pool| pool.roster().refresh());
        fleet.peers.expire(&fleet, Instant::now());
        fleet.known.expire(Instant::now());
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(JoinHandle::abort);
        self.workers.load().values().for_each(|worker| worker.remove());
        // Breaks the reference cycle: workers refer to their pool, and its roster to them.
        self.pools.iter().for_each(|pool| pool.set_roster(Vec::new()));
    }
}
