//! A worker, and each run of its process.
//!
//! A worker is an entry of the roster. What it says of itself belongs to one run of its process, and each data-parallel rank
//! of that run is a [`WorkerRun`]: a place in the index, a load, a subscription to its KV events. Decisions see
//! [`RankRef`]s. A run that ends gives its place in the index back; nothing that was learned of it is left.

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
use crate::roster::Seat;
use crate::routed::Routed;
use crate::spec::AsleepRun;
use crate::spec::WorkerSpec;
use crate::state::{Condition, Health, WorkerState};

/// One rank of one run of a worker's process.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct WorkerRun {
    // A decision reads the first two cache lines of every candidate, and nothing behind them.
    /// The worker is ready, and the rank's own events are caught up with.
    takes_requests: AtomicBool,
    /// What it does in this fleet.
    pub role: Role,
    /// The rank's number in the index.
    pub member: Member,
    /// The member of the index for the stores that it shares with others, as its array index plus one; 0: none.
    shared_stores: AtomicU32,
    /// What it can take, by what the engine said.
    pub capacity: Capacity,
    /// Hash of the name.
    pub identity: u64,
    /// What the engine says of itself.
    pub description: Arc<Description>,
    /// What it has to do, and how fast it is.
    pub load: Load,
    /// The worker's name, with the rank behind it when there are several.
    pub name: String,
    /// The data-parallel rank, when there are several.
    pub rank: Option<u16>,
    /// What the engine itself said last.
    pub reported: Reported,
    /// The hand-offs that it reported last; `None` when its engine has no data plane of Kvasir's.
    pub transfers: ArcSwapOption<TransferReport>,
    /// The state of its KV events.
    pub follower: Arc<Mutex<Follower>>,
    /// The worker publishes KV events.
    pub has_feed: bool,
    /// The rank's KV events are followed, so the index knows its blocks.
    pub is_warm: Arc<AtomicBool>,
    /// Notified when the index promises what the worker does not have.
    pub(crate) distrust: Arc<Notify>,
    /// Notified when what this gateway has sent somewhere changes; `None` without peers.
    pub(crate) loads_changed: Option<Arc<Notify>>,
    /// Without events: prompts routed there, on their way into the index.
    pub(crate) routed: Option<Arc<Routed>>,
    /// Where it is in the order of its pool's loads.
    seat: ArcSwapOption<Seat>,
    /// Writes to the index; ended before the place in the index is given out again.
    pub(crate) writing: Mutex<Option<JoinHandle<()>>>,
}

const _: () = assert!(std::mem::offset_of!(WorkerRun, load) == 64 && Load::HOT_BYTES <= 64);

impl WorkerRun {
    /// The member of the index for the stores that it shares with others.
    #[must_use]
    #[inline]
    pub fn shared_stores(&self) -> Option<Member> {
        // Relaxed: whoever misses a change counts as if it had come before it.
        let number = self.shared_stores.load(Ordering::Relaxed) as usize;
        number.checked_sub(1).and_then(Member::from_index)
    }

    pub(crate) fn set_shared_stores(&self, member: Option<Member>) {
        self.shared_stores.store(member.map_or(0, |member| member.index() as u32 + 1), Ordering::Relaxed);
    }

    /// Leading blocks of a prompt that it finds in each tier or a faster one; stores that it shares with others are remote.
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

    /// Leading blocks of a prompt that it finds anywhere.
    #[must_use]
    #[inline]
    pub(crate) fn leading_any(&self, overlaps: &Overlaps) -> u32 {
        self.leading(overlaps)[Tier::Remote as usize]
    }

    /// A prompt with these block hashes goes there.
    pub(crate) fn routed(&self, block_hashes: &[u64]) {
        if let Some(routed) = &self.routed {
            routed.note(block_hashes);
        }
    }

    /// Notes the seat in a new list of ranks.
    pub(crate) fn take_seat(&self, seat: Seat) {
        self.seat.store(Some(Arc::new(seat)));
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
        let seat = self.seat.load();
        if let Some(seat) = &*seat {
            let takes_requests = self.takes_requests.load(Ordering::Acquire);
            seat.put(self.role, takes_requests.then(|| self.weight()));
        }
    }

    /// What it has to do, for the order of ranks: blocks to compute, and what generating costs beside them, times as slow as
    /// it is.
    fn weight(&self) -> u32 {
        /// A request that is being generated weighs as much as so many blocks to compute.
        const REQUEST_BLOCKS: u32 = 8;
        const BLOCK_TOKENS: u32 = 16;
        let [requests, queued_tokens, _] = self.load.counts();
        let queued = queued_tokens.saturating_add(self.capacity.foreign_tokens());
        let blocks = requests.saturating_mul(REQUEST_BLOCKS).saturating_add(queued / BLOCK_TOKENS);
        (f64::from(blocks) * self.load.factor()) as u32
    }

    /// What this gateway sent there has changed.
    pub(crate) fn changed(&self) {
        self.reorder();
        if let Some(changed) = &self.loads_changed {
            changed.notify_one();
        }
    }

    /// Whether a prefill worker has to compute each of its prompts.
    #[must_use]
    pub fn needs_prefill(&self) -> bool {
        self.role == Role::Decode && self.description.engine.dialect().decode_needs_prefill()
    }

    pub(crate) fn take_writing(&self) -> Option<JoinHandle<()>> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// What a run is made of, beside what it learns.
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
    pub(crate) distrust: Arc<Notify>,
    pub(crate) loads_changed: Option<Arc<Notify>>,
    pub(crate) routed: Option<Arc<Routed>>,
    pub(crate) writing: Option<JoinHandle<()>>,
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
            reported: Reported::default(),
            transfers: ArcSwapOption::empty(),
            capacity: Capacity::default(),
            follower: parts.follower,
            has_feed: parts.has_feed,
            is_warm: parts.is_warm,
            distrust: parts.distrust,
            loads_changed: parts.loads_changed,
            routed: parts.routed,
            seat: ArcSwapOption::empty(),
            takes_requests: AtomicBool::new(false),
            writing: Mutex::new(parts.writing),
        }
    }
}

impl Drop for WorkerRun {
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
pub struct Reported {
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

    /// Whether a prefill and a decode worker may have a request together: blocks of another version of an engine could be
    /// read wrongly, and the model may be another one.
    #[must_use]
    pub fn pairs_with(&self, other: &Self) -> bool {
        are_paired(self.worker.spec.generation.as_deref(), other.worker.spec.generation.as_deref())
    }

    /// Whether it serves this adapter; `None` is the pool's model itself.
    #[must_use]
    pub fn serves(&self, adapter: Option<&str>) -> bool {
        adapter.is_none_or(|name| self.run.description.models.iter().any(|model| model == name))
    }
}

/// Whether workers of these generations may have a request together. A source that says none of a worker leaves that to its operator.
fn are_paired(one: Option<&str>, other: Option<&str>) -> bool {
    one.zip(other).is_none_or(|(one, other)| one == other)
}

/// Generations of prefill workers that are remembered in one decision: an update has two. With more the roster is searched again.
const GENERATIONS_MAX: usize = 4;

/// Selects the workers that may generate an answer. One that needs a prefill worker counts only while one of its generation is
/// ready; the roster is searched for them at most once.
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

/// A worker of the roster. Replaced as a whole when its [`WorkerSpec`] changes in anything but the wish to drain it.
#[derive(Debug)]
pub struct Worker {
    /// What its source says of it, without the wishes to drain it and to have it asleep.
    pub spec: WorkerSpec,
    /// The pool that the worker belongs to.
    pub pool: Arc<Pool>,
    /// Asks for health, load and descriptions.
    pub client: EngineClient,
    /// Connections for requests.
    pub upstream: Arc<Upstream>,
    /// Host and port: its name in headers, metrics, snapshots and commands.
    pub name: String,
    /// The ranks of the run of its process that is known; empty before it has described itself.
    pub runs: ArcSwap<Vec<Arc<WorkerRun>>>,
    /// [`WorkerState`] as a number, derived from `condition` whenever that changes. Release in [`Self::update`] pairs with
    /// the acquire in [`Self::state`]: a reader of `Ready` sees the runs that made it so.
    state: AtomicU8,
    condition: Mutex<Condition>,
    /// Why it takes no requests; empty while it does.
    reason: Mutex<String>,
    /// Takes it out of routing for a time after failures in a row.
    pub breaker: Breaker,
    /// Wakes its watcher: a request failed, or a report named another run.
    pub(crate) suspected: Notify,
    /// It is being put to sleep or woken by this gateway.
    pub(crate) is_turning: AtomicBool,
    /// A call to put it to sleep or to wake it has failed, and its engine does not tell whether it sleeps.
    pub(crate) is_uncertain: AtomicBool,
    /// It may be another run of the process than the one that described itself.
    in_doubt: AtomicBool,
    /// The first miss of the health check that has given the worker up; `None` while health checks are answered.
    silent_since: Mutex<Option<Instant>>,
    /// Notified when the worker is given up although its connections are open. A request that has received bytes since
    /// `silent_since` goes on all the same.
    pub down: Notify,
    /// Notified when connections to its address are refused.
    pub disconnected: Notify,
    /// Set when it is no worker of the fleet any more: its watchers end.
    removed: tokio::sync::watch::Sender<bool>,
}

impl Worker {
    pub(crate) fn new(spec: &WorkerSpec, pool: &Arc<Pool>, tls: Option<&Arc<ClientTls>>) -> Arc<Self> {
        let upstream = Upstream::with_key(&spec.url, tls, spec.key.as_ref());
        let (is_draining, sleep_wish) = (spec.is_draining, spec.asleep);
        let condition = Condition { is_draining, sleep_wish, ..Condition::default() };
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
            is_turning: AtomicBool::new(false),
            is_uncertain: AtomicBool::new(false),
            in_doubt: AtomicBool::new(false),
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

    /// Why it takes no requests, in words; empty while it does, or when nothing is known against it.
    #[must_use]
    pub fn reason(&self) -> String {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether it takes no new requests by an administrator's wish, whatever its state.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.lock_condition().is_draining
    }

    /// The run of its process that was put to sleep, where its engine does not tell that.
    pub(crate) fn sleep_wish(&self) -> Option<AsleepRun> {
        self.lock_condition().sleep_wish
    }

    /// Whether it was asleep when it was last heard of.
    pub(crate) fn is_asleep(&self) -> bool {
        self.lock_condition().is_asleep
    }

    fn lock_condition(&self) -> std::sync::MutexGuard<'_, Condition> {
        // A condition is a plain value: it is whole at any time.
        self.condition.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes what is known of it, and its state with that.
    pub(crate) fn update(&self, change: impl FnOnce(&mut Condition)) {
        let mut condition = self.lock_condition();
        change(&mut condition);
        // Under the lock, so that of two changes the later one's state stays.
        let state = condition.state();
        self.state.store(state as u8, Ordering::Release);
        self.runs.load().iter().for_each(|run| run.set_ready(state == WorkerState::Ready));
    }

    pub(crate) fn set_health(&self, health: Health) {
        self.update(|condition| condition.health = health);
    }

    /// Records why it does not serve; empty clears it.
    pub(crate) fn set_reason(&self, reason: &str) {
        let mut known = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        if *known != reason {
            reason.clone_into(&mut known);
        }
    }

    /// Whether the last health check was answered, and what was said fits the pool.
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

    /// Ends when it is no worker of the fleet any more.
    pub(crate) async fn removed(&self) {
        // The sender lives as long as this worker.
        let mut removed = self.removed.subscribe();
        let _removed = removed.wait_for(|removed| *removed).await;
    }

    /// Requests of this gateway that it has now.
    #[must_use]
    pub fn requests(&self) -> u32 {
        self.runs.load().iter().map(|run| run.load.own.get()[0]).sum()
    }

    /// A request failed in a way that speaks against the worker: ask it at once how it is.
    pub fn suspect(&self) {
        self.update(|condition| {
            if condition.health == Health::Answers {
                condition.health = Health::Suspect;
            }
        });
        self.doubt();
    }

    /// Something may have changed: asks it at once how it is.
    pub(crate) fn look_now(&self) {
        self.suspected.notify_one();
    }

    /// Something speaks for another run of the process: ask at once which one it is.
    pub fn doubt(&self) {
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
    #[must_use]
    pub fn is_silent_since(&self, last: Instant) -> bool {
        let since = *self.silent_since.lock().unwrap_or_else(PoisonError::into_inner);
        since.is_some_and(|since| last < since)
    }

    /// Ends when a request that has received nothing since `last` is to be given up.
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
