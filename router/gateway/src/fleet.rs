//! Who is there: the workers, their health, what they hold and what they are doing.
//!
//! Each worker has a task that asks it who it is. A worker that answers with a new instance number has
//! (re)started: it gets a fresh place in the index and a fresh subscription to its KV events. A failed request
//! marks a worker as down at once; the task brings it back.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use router_engines::client::{EngineClient, WorkerDescription};
use router_events::subscribe::{Feed, follow};
use router_events::tracker::{Tracker, TrackerCounters};
use router_radix::{Index, WorkerSlot};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::GatewayConfig;

/// Blocks that the index has room for before it grows.
const INDEX_BLOCKS: usize = 1 << 16;
/// A worker without replay gets no more than this time to tell about its past.
const WARM_UP_MAX: Duration = Duration::from_secs(2);

/// What a worker is doing, by what this gateway sent it.
#[derive(Debug, Default)]
pub(crate) struct Load {
    pub(crate) requests: AtomicU32,
    pub(crate) queued_prefill_blocks: AtomicU32,
    pub(crate) decoding_blocks: AtomicU32,
    /// Learned nanoseconds of prefill per uncached token; 0 is not known yet.
    pub(crate) nanos_per_token: AtomicU64,
}

/// One run of a worker's process.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) description: WorkerDescription,
    pub(crate) slot: WorkerSlot,
    pub(crate) load: Load,
    pub(crate) tracker: Arc<Mutex<Tracker>>,
    /// Its KV events are followed, so the index speaks for it.
    pub(crate) is_warm: Arc<AtomicBool>,
    /// Follows its events; ended before the next run's place in the index is given out.
    events: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for Live {
    fn drop(&mut self) {
        if let Some(task) = self.events.lock().unwrap_or_else(PoisonError::into_inner).take() {
            task.abort();
        }
    }
}

/// A worker by its URL.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) client: EngineClient,
    /// Short name for headers and metrics.
    pub(crate) name: String,
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
    pub(crate) index: Arc<Index>,
    /// Rung when a worker becomes ready.
    pub(crate) changed: Notify,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl Fleet {
    /// Starts to watch the configured workers.
    #[must_use]
    pub fn start(config: &GatewayConfig) -> Arc<Self> {
        let worker = |url: &String| {
            let client = EngineClient::new(url);
            let name = client.base().trim_start_matches("http://").to_owned();
            Arc::new(Worker {
                client,
                name,
                live: ArcSwapOption::empty(),
                is_up: AtomicBool::new(false),
                suspected: Notify::new(),
                down: Notify::new(),
            })
        };
        let fleet = Arc::new(Self {
            workers: config.workers.iter().map(worker).collect(),
            index: Arc::new(Index::new(INDEX_BLOCKS)),
            changed: Notify::new(),
            tasks: Mutex::new(Vec::new()),
        });
        let tasks = fleet.workers.iter().map(|worker| {
            let watch = watch(
                Arc::downgrade(&fleet),
                Arc::clone(worker),
                config.model.clone(),
                config.health_interval,
            );
            tokio::spawn(watch)
        });
        fleet.tasks.lock().unwrap_or_else(PoisonError::into_inner).extend(tasks);
        fleet
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
        for live in self.workers.iter().filter_map(|worker| worker.live.load_full()) {
            let counters = live.tracker.lock().unwrap_or_else(PoisonError::into_inner).counters;
            sum.batches += counters.batches;
            sum.stored += counters.stored;
            sum.removed += counters.removed;
            sum.orphans += counters.orphans;
            sum.resets += counters.resets;
        }
        sum
    }

    async fn begin(self: &Arc<Self>, description: WorkerDescription, worker: &Arc<Worker>) {
        if let Some(before) = worker.live.swap(None) {
            let task = before.events.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(task) = task {
                task.abort();
                // Only when it has ended can it no longer write under the number that is given back here.
                let _aborted = task.await;
            }
            self.index.retire_worker(before.slot);
        }
        let Some(slot) = self.index.add_worker() else {
            tracing::error!(
                worker = worker.name,
                limit = router_radix::WORKERS_MAX,
                "too many workers for the index"
            );
            return;
        };
        let tracker = Arc::new(Mutex::new(Tracker::new(slot, description.block_tokens)));
        let feed =
            description.events.clone().map(|events| Feed { events, replay: description.replay.clone() });
        let fleet = Arc::downgrade(self);
        let is_warm = Arc::new(AtomicBool::new(feed.is_none()));
        let flag = Arc::clone(&is_warm);
        let warm = move || {
            flag.store(true, Ordering::Release);
            if let Some(fleet) = fleet.upgrade() {
                fleet.changed.notify_waiters();
            }
        };
        let events = feed.map(|feed| {
            let (tracker, index) = (Arc::clone(&tracker), Arc::clone(&self.index));
            let late = warm.clone();
            tokio::spawn(async move {
                let followed = follow(feed, tracker, index, warm);
                tokio::pin!(followed);
                if tokio::time::timeout(WARM_UP_MAX, &mut followed).await.is_err() {
                    late();
                    followed.await;
                }
            })
        });
        tracing::info!(
            worker = worker.name,
            role = description.role,
            instance = description.instance,
            "worker joined"
        );
        let events = Mutex::new(events);
        let load = Load::default();
        worker.live.store(Some(Arc::new(Live { description, slot, load, tracker, is_warm, events })));
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
    if !matches!(description.role.as_str(), "prefill" | "decode" | "both") {
        return Some(format!("its role {:?} is unknown", description.role));
    }
    let others =
        fleet.workers.iter().filter(|other| other.name != worker.name).filter_map(|other| other.ready());
    let expected =
        others.map(|live| live.description.block_tokens).next().unwrap_or(description.block_tokens);
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
                    if live.is_none_or(|live| live.description.instance != description.instance) {
                        fleet.begin(description, &worker).await;
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
