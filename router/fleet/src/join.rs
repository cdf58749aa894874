//! Start and end of a worker's run: places in the index, subscriptions to KV events, state from a snapshot. Runs in the
//! worker's health task, holding `joining`.
//!
//! A worker that has (re)started gets, for each of its ranks, a new place in the index and a new subscription to its KV
//! events; `health` decides when. A worker that publishes no events, or whose tokens the gateway cannot compute itself, is
//! assumed to hold the prompts that were routed to it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use router_engines::dialect::{Description, Engine, POLLED, Role, authority_of};
use router_events::approximate::ApproximateTracker;
use router_events::follower::Follower;
use router_events::listen::Publisher;
use router_events::snapshot::restore;
use router_events::subscribe::{Feed, SubscriptionContext, follow};
use router_events::tracker::Tracker;
use router_radix::Member;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::fleet::Fleet;
use crate::poll::poll;
use crate::routed::{RoutedPromptQueue, keep};
use crate::worker::{RunParts, Worker, WorkerRun};

/// Number of blocks assumed for an engine that does not report it.
const BLOCKS_ASSUMED: usize = 16_384;
/// Longest wait for a subscription to begin.
const WARM_UP_MAX: Duration = Duration::from_secs(2);
/// Longest wait for a subscription with a replay; a longer replay continues beside the worker's first requests.
const REPLAY_MAX: Duration = Duration::from_secs(7);

impl Fleet {
    /// Starts a worker's new run: its old places in the index are released, and each rank gets a new one. The caller holds
    /// `joining`.
    pub(crate) async fn start_runs(self: &Arc<Self>, description: Description, worker: &Arc<Worker>) {
        self.end_runs(worker).await;
        if worker.is_removed() {
            return;
        }
        // Failures of the previous process do not count for this one.
        worker.breaker.reset();
        let description = Arc::new(description);
        let mut runs = Vec::new();
        for rank in 0..description.feeds.len().max(1) as u16 {
            let member = self.index.write().join();
            let Some(member) = member else {
                let limit = router_radix::MEMBERS_MAX;
                tracing::error!(worker = worker.name, limit, "too many workers for the index");
                break;
            };
            runs.push(Arc::new(self.start_run(&description, rank, member, worker).await));
        }
        tracing::info!(
            worker = worker.name,
            engine = description.engine.name(),
            version = description.version,
            ranks = runs.len(),
            "worker joined"
        );
        worker.runs.store(Arc::new(runs));
        worker.runs_changed();
        self.remake_roster(&worker.pool);
    }

    /// Ends a worker's runs: removes them from every decision, and their blocks from the index. The caller holds
    /// `joining`.
    pub(crate) async fn end_runs(&self, worker: &Arc<Worker>) {
        let before = worker.runs.swap(Arc::default());
        if before.is_empty() {
            return;
        }
        worker.runs_changed();
        before.iter().for_each(|run| run.set_ready(false));
        self.remake_roster(&worker.pool);
        for run in before.iter() {
            if let Some(task) = run.take_index_task() {
                task.abort();
                // Only after its end it can no longer write to the place that is released here.
                let _aborted = task.await;
            }
            let counted = run.follower.lock().unwrap_or_else(PoisonError::into_inner).tracker().counters;
            *self.ended.lock().unwrap_or_else(PoisonError::into_inner) += counted;
            self.stores.leave(&self.index, run);
            self.index.write().leave(run.member);
        }
    }

    /// Removes workers that are no longer in the roster.
    pub(crate) async fn retire(&self, left: &[Arc<Worker>]) {
        for worker in left {
            let _turn = self.joining.lock().await;
            self.end_runs(worker).await;
        }
        let workers = self.workers();
        let gone = left.iter().map(|worker| worker.name.as_str());
        let gone: Vec<&str> = gone.filter(|name| !workers.contains_key(*name)).collect();
        self.known.forget(&gone);
    }

    async fn start_run(
        self: &Arc<Self>,
        description: &Arc<Description>,
        rank: u16,
        member: Member,
        worker: &Arc<Worker>,
    ) -> WorkerRun {
        let has_ranks = description.feeds.len() > 1;
        let name = if has_ranks { format!("{}@{rank}", worker.name) } else { worker.name.clone() };
        let means_something = worker.pool.has_tokenizer || description.engine == Engine::Native;
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
        let known = self.known.take(&name);
        let is_same = |instance| description.instance == Some(instance);
        if let Some(state) = known.filter(|state| is_same(state.instance) && feed.is_some()) {
            let (index, name) = (Arc::clone(&self.index), name.clone());
            // Restoring a large worker's blocks takes long; the async thread must not block.
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
        let resync = Arc::<Notify>::default();
        let has_feed = feed.is_some();
        let (task, routed) = match feed {
            Some(feed) => {
                let followed = SubscriptionContext {
                    follower: Arc::clone(&follower),
                    index: Arc::clone(&self.index),
                    resync: Arc::clone(&resync),
                };
                (self.follow(feed, followed, &is_warm, worker), None)
            }
            None if !description.keeps_prefixes => (tokio::spawn(async {}), None),
            None => {
                // An engine that does not report its number of blocks is assumed to have some.
                let blocks = if description.blocks > 0 { description.blocks } else { BLOCKS_ASSUMED };
                let approximate = ApproximateTracker::new(member, self.config.approximate_ttl, blocks);
                let routed = RoutedPromptQueue::new();
                let keeping = keep(Arc::clone(&routed), approximate, Arc::clone(&self.index));
                (tokio::spawn(keeping), Some(routed))
            }
        };
        WorkerRun::new(RunParts {
            name,
            description: Arc::clone(description),
            rank: has_ranks.then_some(rank),
            role: role_of(worker, description),
            member,
            follower,
            has_feed,
            is_warm,
            resync,
            loads_changed: self.loads_changed.clone(),
            routed,
            index_task: Some(task),
        })
    }

    fn follow(
        self: &Arc<Self>,
        feed: Feed,
        followed: SubscriptionContext,
        is_warm: &Arc<AtomicBool>,
        worker: &Arc<Worker>,
    ) -> JoinHandle<()> {
        let fleet = Arc::downgrade(self);
        let flag = Arc::clone(is_warm);
        let warming = Arc::downgrade(worker);
        let warm = move || {
            flag.store(true, Ordering::Release);
            if let Some(worker) = warming.upgrade() {
                worker.runs_changed();
            }
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

/// The role of a worker: the configured one, except for engines whose role was fixed when they started.
fn role_of(worker: &Worker, description: &Description) -> Role {
    if let (Some(configured), Some(told)) = (worker.spec.role, description.role)
        && configured != told
        && description.engine.dialect().decode_needs_prefill()
    {
        let (wanted, is) = (configured.name(), told.name());
        tracing::warn!(worker = worker.name, wanted, is, "the server was started for another role");
        return told;
    }
    worker.spec.role.or(description.role).unwrap_or(Role::Both)
}
