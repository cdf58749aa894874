//! A worker, and each run of its process.
//!
//! A worker is an entry of the roster. Its description belongs to one run of its process, and each data-parallel rank of
//! that run is a [`WorkerRun`]: a place in the index, a load, a subscription to its KV events. Decisions see [`RankRef`]s.
//! When a run ends, its place in the index is released and everything learned of it is dropped.

use std::cell::OnceCell;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};
use kvstore_block::block_hash;
use router_engines::client::EngineClient;
use router_engines::dialect::{Description, EngineLoad, Role, TransferReport};
use router_engines::upstream::Upstream;
use router_events::follower::Follower;
use router_policy::TIERS;
use router_radix::{Member, Overlaps, Tier};
use router_tls::ClientTls;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::breaker::Breaker;
use crate::capacity::Capacity;
use crate::load::Load;
use crate::pool::Pool;
use crate::roster::LoadOrderPosition;
use crate::routed::RoutedPromptQueue;
use crate::spec::AsleepRun;
use crate::spec::WorkerSpec;
use crate::state::{Condition, Health, WorkerState};

/// One rank of one run of a worker's process.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct WorkerRun {
    // A decision reads the first two cache lines of every candidate, and nothing behind them.
    /// Whether the worker is ready and the index has caught up with the rank's own events.
    takes_requests: AtomicBool,
    /// Role of the rank in this fleet.
    pub role: Role,
    /// The rank's number in the index.
    pub member: Member,
    /// Index of the member for the shared stores in the prefix index, plus one; 0: none.
    shared_stores: AtomicU32,
    /// Requests that the rank can take, by its engine's reports.
    pub capacity: Capacity,
    /// Hash of the rank's name.
    pub identity: u64,
    /// The engine's description of itself.
    pub description: Arc<Description>,
    /// Outstanding work and learned factor.
    pub load: Load,
    /// The worker's name, with the rank behind it when there are several.
    pub name: String,
    /// The data-parallel rank, when there are several.
    pub rank: Option<u16>,
    /// Load that the engine itself reported last.
    pub reported: ReportedLoad,
    /// Last reported hand-offs; `None` when the engine does not use Kvasir's data plane.
    pub transfers: ArcSwapOption<TransferReport>,
    /// The state of its KV events.
    pub follower: Arc<Mutex<Follower>>,
    /// Whether the worker publishes KV events.
    pub has_feed: bool,
    /// Whether the rank's KV events are followed, so that the index knows its blocks.
    pub is_warm: Arc<AtomicBool>,
    /// Notified when the index promised blocks that the worker does not have.
    pub(crate) resync: Arc<Notify>,
    /// Notified when this gateway's outstanding work at any worker changes; `None` without peers.
    pub(crate) loads_changed: Option<Arc<Notify>>,
    /// Prompts routed to a worker without events, on their way into the index.
    pub(crate) routed: Option<Arc<RoutedPromptQueue>>,
    /// Position in the load order of the pool.
    load_position: ArcSwapOption<LoadOrderPosition>,
    /// Task that writes to the index; ended before the place in the index is reused.
    pub(crate) index_task: Mutex<Option<JoinHandle<()>>>,
}

const _: () = assert!(std::mem::offset_of!(WorkerRun, load) == 64 && Load::HOT_BYTES <= 64);

impl WorkerRun {
    /// The member of the index for the stores that the rank shares with others.
    #[must_use]
    #[inline]
    pub fn shared_stores(&self) -> Option<Member> {
        // Relaxed: a reader that misses a change decides as if it had come before it.
        let number = self.shared_stores.load(Ordering::Relaxed) as usize;
        number.checked_sub(1).and_then(Member::from_index)
    }

    pub(crate) fn set_shared_stores(&self, member: Option<Member>) {
        self.shared_stores.store(member.map_or(0, |member| member.index() as u32 + 1), Ordering::Relaxed);
    }

    /// Leading blocks of a prompt that the rank finds in each tier or a faster one; shared stores count as remote.
    ///
    /// A prefix of which the worker alone holds one part and the stores alone another counts as the longer of what each of them
    /// holds from the first block on.
    #[must_use]
    #[inline]
    pub(crate) fn leading(&self, overlaps: &Overlaps) -> [u32; TIERS] {
        const REMOTE: usize = Tier::Remote as usize;
        let mut leading = overlaps.tiers(self.member);
        if let Some(shared) = self.shared_stores() {
            leading[REMOTE] = leading[REMOTE].max(overlaps.any(shared));
        }
        leading
    }

    /// Leading blocks of a prompt that the rank finds in any tier.
    #[must_use]
    #[inline]
    pub(crate) fn leading_any(&self, overlaps: &Overlaps) -> u32 {
        self.leading(overlaps)[Tier::Remote as usize]
    }

    /// Queues a prompt with these block hashes, which is routed to the rank, for the index.
    pub(crate) fn routed(&self, block_hashes: &[u64]) {
        if let Some(routed) = &self.routed {
            routed.note(block_hashes);
        }
    }

    /// Sets the position in the order by load of a new roster.
    pub(crate) fn set_load_position(&self, load_position: LoadOrderPosition) {
        self.load_position.store(Some(Arc::new(load_position)));
        self.reorder();
    }

    /// Sets whether the worker takes requests.
    pub(crate) fn set_ready(&self, is_ready: bool) {
        let is_ready = is_ready && self.is_warm.load(Ordering::Acquire);
        self.takes_requests.store(is_ready, Ordering::Release);
        self.reorder();
    }

    /// Moves the rank in the order by load, after its load has changed.
    pub(crate) fn reorder(&self) {
        let load_position = self.load_position.load();
        if let Some(load_position) = &*load_position {
            let takes_requests = self.takes_requests.load(Ordering::Acquire);
            load_position.put(self.role, takes_requests.then(|| self.weight()));
        }
    }

    /// Outstanding work, for the order of ranks: blocks to compute plus the weight of generating requests, times the rank's
    /// slowness factor.
    fn weight(&self) -> u32 {
        /// Weight of a generating request, in blocks to compute.
        const REQUEST_BLOCKS: u32 = 8;
        const BLOCK_TOKENS: u32 = 16;
        let [requests, queued_tokens, _] = self.load.counts();
        let queued = queued_tokens.saturating_add(self.capacity.foreign_tokens());
        let blocks = requests.saturating_mul(REQUEST_BLOCKS).saturating_add(queued / BLOCK_TOKENS);
        (f64::from(blocks) * self.load.factor()) as u32
    }

    /// Called when this gateway's outstanding work at the rank has changed.
    pub(crate) fn changed(&self) {
        self.reorder();
        if let Some(changed) = &self.loads_changed {
            changed.notify_one();
        }
    }

    /// Whether a prefill worker has to compute each prompt of this rank.
    #[must_use]
    pub fn needs_prefill(&self) -> bool {
        self.role == Role::Decode && self.description.engine.dialect().decode_needs_prefill()
    }

    pub(crate) fn take_index_task(&self) -> Option<JoinHandle<()>> {
        self.index_task.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Parts of which a run is built, without what it learns.
#[derive(Debug)]
pub(crate) struct RunParts {
    pub(crate) name: String,
    pub(crate) description: Arc<Description>,
    pub(crate) rank: Option<u16>,
    pub(crate) role: Role,
    pub(crate) member: Member,
    pub(crate) follower: Arc<Mutex<Follower>>,
    pub(crate) has_feed: bool,
    pub(crate) is_warm: Arc<AtomicBool>,
    pub(crate) resync: Arc<Notify>,
    pub(crate) loads_changed: Option<Arc<Notify>>,
    pub(crate) routed: Option<Arc<RoutedPromptQueue>>,
    pub(crate) index_task: Option<JoinHandle<()>>,
}

impl WorkerRun {
    pub(crate) fn new(parts: RunParts) -> Self {
        Self {
            identity: identity(&parts.name),
            name: parts.name,
            description: parts.description,
            rank: parts.rank,
            role: parts.role,
            member: parts.member,
            shared_stores: AtomicU32::new(0),
            load: Load::default(),
            reported: ReportedLoad::default(),
            transfers: ArcSwapOption::empty(),
            capacity: Capacity::default(),
            follower: parts.follower,
            has_feed: parts.has_feed,
            is_warm: parts.is_warm,
            resync: parts.resync,
            loads_changed: parts.loads_changed,
            routed: parts.routed,
            load_position: ArcSwapOption::empty(),
            takes_requests: AtomicBool::new(false),
            index_task: Mutex::new(parts.index_task),
        }
    }
}

impl Drop for WorkerRun {
    fn drop(&mut self) {
        if let Some(task) = self.take_index_task() {
            task.abort();
        }
    }
}

/// Longest time after sending a request until the engine counts it: it has parsed and tokenised the request by then.
const COUNTED_AFTER: Duration = Duration::from_millis(500);

/// An engine's own count of its load.
#[derive(Debug, Default)]
pub struct ReportedLoad {
    /// Running requests in the upper half, waiting requests in the lower.
    requests: AtomicU64,
    usage: AtomicU64,
    /// Time at which the question of these counts was sent; `None` before the first answer.
    asked: Mutex<Option<Instant>>,
}

impl ReportedLoad {
    /// Stores the engine's answer to a question sent at `asked`.
    pub(crate) fn set(&self, load: &EngineLoad, asked: Instant) {
        self.requests.store(u64::from(load.running) << 32 | u64::from(load.waiting), Ordering::Relaxed);
        self.usage.store(load.kv_usage.to_bits(), Ordering::Relaxed);
        *self.asked.lock().unwrap_or_else(PoisonError::into_inner) = Some(asked);
    }

    /// Whether the engine reports no request in a count that would include one sent at `sent`: that request is lost.
    #[must_use]
    pub fn is_idle_since(&self, sent: Instant) -> bool {
        let asked = *self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let load = self.get();
        asked.is_some_and(|asked| asked >= sent + COUNTED_AFTER) && load.running == 0 && load.waiting == 0
    }

    /// The last report.
    #[must_use]
    pub fn get(&self) -> EngineLoad {
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
pub struct RankRef {
    /// The worker.
    pub worker: Arc<Worker>,
    /// One of the run's ranks.
    pub run: Arc<WorkerRun>,
}

impl RankRef {
    /// Whether it can take requests.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.run.takes_requests.load(Ordering::Acquire)
    }

    /// Whether a prefill and a decode worker may share a request: blocks of another engine version could be read wrongly, and
    /// the model may be another one.
    #[must_use]
    pub fn pairs_with(&self, other: &Self) -> bool {
        are_paired(self.worker.spec.generation.as_deref(), other.worker.spec.generation.as_deref())
    }

    /// Whether the rank serves this adapter; `None` is the pool's model itself.
    #[must_use]
    pub fn serves(&self, adapter: Option<&str>) -> bool {
        adapter.is_none_or(|name| self.run.description.models.iter().any(|model| model == name))
    }
}

/// Whether workers of these generations may share a request. Where a source gives no generation, the operator is responsible.
fn are_paired(one: Option<&str>, other: Option<&str>) -> bool {
    one.zip(other).is_none_or(|(one, other)| one == other)
}

/// Largest number of prefill generations remembered in one decision: an update has two. With more the roster is searched again.
const GENERATIONS_MAX: usize = 4;

/// Selects the workers that may generate an answer. A worker that needs a prefill worker counts only while one of its
/// generation is ready; the roster is searched for these at most once.
pub fn able_to_decode(roster: &[RankRef], adapter: Option<&str>) -> impl Fn(&RankRef) -> bool {
    let computing = OnceCell::new();
    let computes =
        move |rank: &&RankRef| rank.run.role == Role::Prefill && rank.is_ready() && rank.serves(adapter);
    // One ready prefill worker of each generation.
    let search = move || {
        let (mut found, mut has_more) = ([None::<&RankRef>; GENERATIONS_MAX], false);
        for rank in roster.iter().filter(computes) {
            let is_same = |known: &&RankRef| known.worker.spec.generation == rank.worker.spec.generation;
            if !found.iter().flatten().any(is_same) {
                match found.iter_mut().find(|known| known.is_none()) {
                    Some(free) => *free = Some(rank),
                    None => has_more = true,
                }
            }
        }
        (found, has_more)
    };
    move |rank: &RankRef| {
        if rank.run.role == Role::Prefill || !rank.run.needs_prefill() {
            return rank.run.role != Role::Prefill;
        }
        let (found, has_more) = computing.get_or_init(search);
        found.iter().flatten().any(|prefill| prefill.pairs_with(rank))
            || (*has_more && roster.iter().filter(computes).any(|prefill| prefill.pairs_with(rank)))
    }
}

/// A worker of the roster. Replaced as a whole when its [`WorkerSpec`] changes in anything except the change to drain it.
#[derive(Debug)]
pub struct Worker {
    /// The source's description, without the changes to drain the worker and to have it asleep.
    pub spec: WorkerSpec,
    /// The pool that the worker belongs to.
    pub pool: Arc<Pool>,
    /// Client for health, load and description.
    pub client: EngineClient,
    /// Connections for requests.
    pub upstream: Arc<Upstream>,
    /// Host and port: its name in headers, metrics, snapshots and commands.
    pub name: String,
    /// Ranks of the known run of the worker's process; empty before it has described itself.
    pub runs: ArcSwap<Vec<Arc<WorkerRun>>>,
    /// [`WorkerState`] as a number, derived from `condition` whenever that changes. Release in [`Self::update`] pairs with
    /// the acquire in [`Self::state`]: a reader of `Ready` sees the runs that made it so.
    state: AtomicU8,
    condition: Mutex<Condition>,
    /// Reason for which the worker takes no requests; empty while it does.
    reason: Mutex<String>,
    /// Takes the worker out of routing for a time after failures in a row.
    pub breaker: Breaker,
    /// Wakes the health task: a request failed, or a report named another run.
    pub(crate) suspected: Notify,
    /// Whether this gateway is putting the worker to sleep or waking it.
    pub(crate) is_sleep_call_running: AtomicBool,
    /// Whether a sleep or wake call has failed and the engine does not report whether it sleeps.
    pub(crate) is_sleep_state_unknown: AtomicBool,
    /// Whether the process may have restarted since it described itself.
    may_have_restarted: AtomicBool,
    /// Time of the first missed health check before the worker was given up; `None` while health checks are answered.
    silent_since: Mutex<Option<Instant>>,
    /// Notified when the worker is given up although its connections are open. A request that has received bytes since
    /// `silent_since` goes on all the same.
    pub down: Notify,
    /// Notified when connections to the worker's address are refused.
    pub disconnected: Notify,
    /// Set when the worker has left the fleet; ends its tasks.
    removed: tokio::sync::watch::Sender<bool>,
}

impl Worker {
    pub(crate) fn new(spec: &WorkerSpec, pool: &Arc<Pool>, tls: Option<&Arc<ClientTls>>) -> Arc<Self> {
        let upstream = Upstream::with_key(&spec.url, tls, spec.key.as_ref());
        let (is_draining, sleep_request) = (spec.is_draining, spec.asleep);
        let condition = Condition { is_draining, sleep_request, ..Condition::default() };
        Arc::new(Self {
            client: EngineClient::over(&upstream),
            upstream,
            name: spec.name(),
            spec: WorkerSpec { is_draining: false, asleep: None, ..spec.clone() },
            pool: Arc::clone(pool),
            runs: ArcSwap::default(),
            state: AtomicU8::new(condition.state() as u8),
            condition: Mutex::new(condition),
            reason: Mutex::default(),
            breaker: Breaker::new(Instant::now()),
            suspected: Notify::new(),
            is_sleep_call_running: AtomicBool::new(false),
            is_sleep_state_unknown: AtomicBool::new(false),
            may_have_restarted: AtomicBool::new(false),
            silent_since: Mutex::new(None),
            down: Notify::new(),
            disconnected: Notify::new(),
            removed: tokio::sync::watch::Sender::new(false),
        })
    }

    /// The state that the worker is in now.
    #[must_use]
    pub fn state(&self) -> WorkerState {
        WorkerState::from_u8(self.state.load(Ordering::Acquire))
    }

    /// Reason for which the worker takes no requests, in words; empty while it does, or when no reason is known.
    #[must_use]
    pub fn reason(&self) -> String {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether an administrator wants no new requests at the worker, whatever its state.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.lock_condition().is_draining
    }

    /// The run of the process that was put to sleep, if its engine does not report sleep.
    pub(crate) fn sleep_request(&self) -> Option<AsleepRun> {
        self.lock_condition().sleep_request
    }

    /// Whether the worker was asleep at its last report.
    pub(crate) fn is_asleep(&self) -> bool {
        self.lock_condition().is_asleep
    }

    fn lock_condition(&self) -> std::sync::MutexGuard<'_, Condition> {
        // Poisoning is ignored: a condition is a plain value and consistent at any time.
        self.condition.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the worker's condition, and its state with that.
    pub(crate) fn update(&self, change: impl FnOnce(&mut Condition)) {
        let mut condition = self.lock_condition();
        change(&mut condition);
        // Under the lock, so that the state of the latest change is stored last.
        let state = condition.state();
        self.state.store(state as u8, Ordering::Release);
        self.runs.load().iter().for_each(|run| run.set_ready(state == WorkerState::Ready));
    }

    pub(crate) fn set_health(&self, health: Health) {
        self.update(|condition| condition.health = health);
    }

    /// Records the reason for which the worker does not serve; empty clears it.
    pub(crate) fn set_reason(&self, reason: &str) {
        let mut known = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        if *known != reason {
            reason.clone_into(&mut known);
        }
    }

    /// Whether the last health check was answered, and the description fits the pool.
    pub(crate) fn answers(&self) -> bool {
        self.lock_condition().health == Health::Answers
    }

    /// Called when the runs have changed, or the index has caught up with one of them.
    pub(crate) fn runs_changed(&self) {
        let runs = self.runs.load();
        let is_warm = runs.iter().any(|run| run.is_warm.load(Ordering::Acquire));
        let has_run = !runs.is_empty();
        self.update(|condition| {
            condition.has_run = has_run;
            condition.is_warm = is_warm;
        });
    }

    /// The worker has left the fleet.
    pub(crate) fn remove(&self) {
        self.removed.send_replace(true);
        self.update(|condition| condition.is_removed = true);
        self.set_reason("it was removed from the roster");
    }

    pub(crate) fn is_removed(&self) -> bool {
        *self.removed.borrow()
    }

    /// Completes when the worker has left the fleet.
    pub(crate) async fn removed(&self) {
        // The sender lives as long as this worker.
        let mut removed = self.removed.subscribe();
        let _removed = removed.wait_for(|removed| *removed).await;
    }

    /// Number of this gateway's requests that the worker has now.
    #[must_use]
    pub fn requests(&self) -> u32 {
        self.runs.load().iter().map(|run| run.load.own.get()[0]).sum()
    }

    /// Marks the worker as suspect after a failed request and starts a health check at once.
    pub fn suspect(&self) {
        self.update(|condition| {
            if condition.health == Health::Answers {
                condition.health = Health::Suspect;
            }
        });
        self.mark_possibly_restarted();
    }

    /// Starts a health check at once, because the worker may have changed.
    pub(crate) fn check_health_now(&self) {
        self.suspected.notify_one();
    }

    /// Notes that the process may have restarted, and starts a health check at once.
    pub fn mark_possibly_restarted(&self) {
        self.may_have_restarted.store(true, Ordering::Relaxed);
        self.suspected.notify_one();
    }

    /// Returns whether the process may have restarted, and clears that.
    pub(crate) fn take_possible_restart(&self) -> bool {
        self.may_have_restarted.swap(false, Ordering::Relaxed)
    }

    /// Records an answered health check, however late.
    pub(crate) fn answered(&self) {
        *self.silent_since.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Gives the worker up, with the requests that have been silent since `since`, the first missed health check.
    pub(crate) fn give_up(&self, since: Instant) {
        *self.silent_since.lock().unwrap_or_else(PoisonError::into_inner) = Some(since);
        self.down.notify_waiters();
    }

    /// Whether the worker is given up and a request that received its last byte at `last` with it.
    #[must_use]
    pub fn is_silent_since(&self, last: Instant) -> bool {
        let since = *self.silent_since.lock().unwrap_or_else(PoisonError::into_inner);
        since.is_some_and(|since| last < since)
    }

    /// Completes when a request that has received nothing since `last` is to be given up.
    pub async fn given_up(&self, last: Instant) {
        loop {
            // Subscribes before the check, so that no notification between the two is lost.
            let notified = self.down.notified();
            if self.is_silent_since(last) {
                return;
            }
            notified.await;
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

    #[test]
    fn workers_of_two_generations_are_not_paired() {
        assert!(are_paired(Some("1"), Some("1")) && !are_paired(Some("1"), Some("2")));
        assert!(are_paired(None, Some("1")) && are_paired(Some("1"), None) && are_paired(None, None));
    }

    /// The worker's health check was missed first at second 5 and given up at second 15.
    #[test]
    fn only_requests_that_were_silent_since_before_the_first_miss_are_given_up() {
        let worker = Worker::new(&WorkerSpec::new("http://127.0.0.1:1"), &Pool::for_tests(), None);
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
        let reported = ReportedLoad::default();
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
