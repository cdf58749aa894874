//! Stores that workers share (`kvasir store`): the blocks of a store count for every worker that has it.
//!
//! A worker reports its stores and the tag with which the identities of its blocks begin ([`SharedStores`]). Workers with
//! equal reports are a group, with one member of the index for the blocks of their stores. A group whose last worker has left
//! is kept while its stores hold blocks that the index knows: workers that start again find them. A store credits all groups
//! that name it, also groups whose engines would look for a block elsewhere because their list of stores has changed since.
//!
//! One task for each store polls it for changes. What a store held is forgotten [`FORGOTTEN_AFTER`] after the first poll that
//! fails, or at once when it hangs.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use kvstore_block::BlockIdentity;
use router_engines::client::EngineClient;
use router_engines::dialect::SharedStores;
use router_events::shared_blocks::SharedBlocks;
use router_events::snapshot::{self, PublisherState};
use router_events::store_changes::{LONG_POLL_MAX, StoreChanges, StoreMirror, engine_hash, tag};
use router_radix::{Index, Member};

use crate::fleet::Fleet;
use crate::snapshots::SnapshotCache;
use crate::worker::WorkerRun;

/// Time from the first failed poll of a store until what it held is forgotten.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(3);
/// Time limit of the first answer, and of one after everything was forgotten: it lists all blocks of the store, and a
/// slow link is not a dead store.
const WHOLE_ANSWER_WITHIN: Duration = Duration::from_secs(120);
/// Pause between polls of a store that does not answer.
const PAUSE: Duration = Duration::from_millis(200);
/// Pause between polls of a store whose answers are refused.
const PAUSE_AFTER_REFUSAL: Duration = Duration::from_secs(5);
/// Pause between polls of a store that changes all the time.
const PAUSE_BETWEEN_CHANGES: Duration = Duration::from_millis(20);
/// Largest number of groups with a place in the index.
const GROUPS_MAX: usize = 64;

/// The stores of a fleet, and the workers that share them.
///
/// Locks, in this order: `groups`, a store's `mirror`, a worker's follower; then the index's writer and the locks of
/// [`SharedBlocks`]. Snapshots are written under a lock of their own that comes before; the state read from a snapshot is
/// locked for a look-up alone.
#[derive(Debug)]
pub struct Stores {
    stores: Vec<Arc<Store>>,
    groups: Mutex<Vec<Group>>,
    /// Whether the warning about too many groups was logged.
    is_full: AtomicBool,
}

#[derive(Debug)]
struct Store {
    url: String,
    mirror: Mutex<StoreMirror>,
    answers: AtomicBool,
    /// Number of blocks in `mirror`, readable without its lock.
    blocks: AtomicUsize,
}

/// Workers with the same stores and tag.
#[derive(Debug)]
struct Group {
    shared: SharedStores,
    blocks: Arc<SharedBlocks>,
    workers: Vec<Member>,
}

/// Status of a store, for display.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreStatus {
    /// URL that is polled.
    pub url: String,
    /// Name of the store, once it has reported it.
    pub name: Option<String>,
    /// Whether the last poll was answered.
    pub answers: bool,
    /// Number of blocks in the store.
    pub blocks: usize,
}

/// Status of a group of workers, for display.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupStatus {
    /// Names of the stores that the group shares.
    pub stores: Vec<String>,
    /// Number of workers in the group.
    pub workers: usize,
    /// Blocks of the group that the stores hold and the index knows.
    pub blocks: u32,
    /// Hashes of stored blocks that no worker has described yet.
    pub unresolved: usize,
}

impl Stores {
    /// Returns the stores at these URLs.
    pub(crate) fn new(urls: &[String]) -> Self {
        let store = |url: &String| {
            let (url, mirror) = (url.trim_end_matches('/').to_owned(), Mutex::default());
            Arc::new(Store { url, mirror, answers: AtomicBool::new(false), blocks: AtomicUsize::new(0) })
        };
        let stores = urls.iter().map(store).collect();
        Self { stores, groups: Mutex::default(), is_full: AtomicBool::new(false) }
    }

    /// Status of all stores. May wait while a large answer is applied.
    #[must_use]
    pub fn status(&self) -> Vec<StoreStatus> {
        let of = |store: &Arc<Store>| {
            let mirror = store.mirror();
            StoreStatus {
                url: store.url.clone(),
                name: mirror.store().map(str::to_owned),
                answers: store.answers.load(Ordering::Relaxed),
                blocks: mirror.len(),
            }
        };
        self.stores.iter().map(of).collect()
    }

    /// URL of each store, whether it answers, and the number of its blocks. Does not wait.
    pub fn levels(&self) -> impl Iterator<Item = (&str, bool, usize)> {
        self.stores.iter().map(|store| {
            let (answers, blocks) = (&store.answers, &store.blocks);
            (store.url.as_str(), answers.load(Ordering::Relaxed), blocks.load(Ordering::Relaxed))
        })
    }

    /// Status of the groups of workers. May wait as `status`.
    #[must_use]
    pub fn groups(&self, index: &Index) -> Vec<GroupStatus> {
        let of = |group: &Group| GroupStatus {
            stores: group.shared.stores.clone(),
            workers: group.workers.len(),
            blocks: group.known_blocks(index),
            unresolved: group.blocks.unresolved(),
        };
        self.lock().iter().map(of).collect()
    }

    /// Whether a run's report of its stores changes nothing. Does not wait: if a lock is taken, the next report is used
    /// instead.
    pub(crate) fn is_known(&self, run: &WorkerRun, shared: Option<&SharedStores>) -> bool {
        if self.stores.is_empty() || !run.has_feed {
            return true;
        }
        let Ok(groups) = self.groups.try_lock() else { return true };
        let own = groups.iter().find(|group| group.workers.contains(&run.member));
        own.map(|group| &group.shared) == shared.filter(|shared| self.are_known(shared))
    }

    /// Whether each of these stores has reported its name. With a store that this gateway does not know, a worker finds more
    /// blocks than are known here.
    fn are_known(&self, shared: &SharedStores) -> bool {
        let is_told = |name: &String| self.stores.iter().any(|store| store.mirror().store() == Some(name));
        shared.stores.iter().all(is_told)
    }

    /// Assigns these stores to a run of a worker. Blocking: looks up all blocks that they hold. The first run of a group
    /// loads the meaning of known blocks from `known_before`, the state of an earlier gateway.
    pub(crate) fn join(
        &self,
        index: &Index,
        run: &WorkerRun,
        shared: &SharedStores,
        known_before: &SnapshotCache,
    ) {
        let mut groups = self.lock();
        if !self.are_known(shared) {
            // The next report repeats this one.
            return;
        }
        let known = groups.iter().position(|group| group.shared == *shared);
        let at = match known {
            Some(at) => at,
            None => {
                let has_room = groups.len() < GROUPS_MAX || remove_idle_group(&mut groups, index);
                let Some(member) = has_room.then(|| index.write().join()).flatten() else {
                    if !self.is_full.swap(true, Ordering::Relaxed) {
                        let limit = GROUPS_MAX;
                        tracing::warn!(
                            worker = run.name,
                            limit,
                            "too many groups of workers that share stores"
                        );
                    }
                    return;
                };
                let blocks = Arc::new(SharedBlocks::new(member));
                groups.push(Group { shared: shared.clone(), blocks, workers: Vec::new() });
                groups.len() - 1
            }
        };
        let group = &mut groups[at];
        group.workers.push(run.member);
        // The run's later events go to the group; its earlier blocks are looked up below.
        let mut follower = run.follower.lock().unwrap_or_else(PoisonError::into_inner);
        follower.share(Some(Arc::clone(&group.blocks)));
        drop(follower);
        if known.is_some() {
            group.blocks.joined(index, run.member);
        } else {
            let remembered =
                known_before.peek(&snapshot_name(shared)).map(|state| state.held).unwrap_or_default();
            group.blocks.remember(index, &remembered);
            for store in &self.stores {
                // Copied, so that the store's task does not wait for the mirror. `groups` is locked, so the mirror does not change.
                let blocks: Vec<BlockIdentity> = {
                    let mirror = store.mirror();
                    let is_theirs = mirror.store().is_some_and(|name| group.shared.has(name));
                    mirror.held().copied().filter(|_| is_theirs).collect()
                };
                group.change(index, &blocks, true);
            }
            group.blocks.forget_remembered(index, &remembered);
        }
        run.set_shared_stores(Some(group.blocks.member()));
        tracing::info!(worker = run.name, stores = ?shared.stores, "worker shares stores with others");
    }

    /// Captures the known meaning of blocks in stores, for a gateway that starts. `groups` is unlocked between two groups.
    pub(crate) fn capture(&self, index: &Index) -> Vec<PublisherState> {
        let of = |shared: &SharedStores| {
            let groups = self.lock();
            let group = groups.iter().find(|group| group.shared == *shared)?;
            let held = index.write().held(group.blocks.member());
            (!held.is_empty()).then(|| snapshot::capture_stores(snapshot_name(shared), held))
        };
        let all: Vec<SharedStores> = self.lock().iter().map(|group| group.shared.clone()).collect();
        all.iter().filter_map(of).collect()
    }

    /// Removes the run from its group. Must be called before its place in the index is released.
    pub(crate) fn leave(&self, index: &Index, run: &WorkerRun) {
        if self.stores.is_empty() {
            return;
        }
        let mut groups = self.lock();
        run.set_shared_stores(None);
        for group in &mut *groups {
            group.workers.retain(|member| *member != run.member);
        }
        run.follower.lock().unwrap_or_else(PoisonError::into_inner).share(None);
        remove_empty_groups(&mut groups, index);
    }

    /// Applies a store's answer. An error says why the answer is refused.
    fn apply(&self, index: &Index, store: &Arc<Store>, changes: StoreChanges) -> Result<(), String> {
        let mut groups = self.lock();
        let others = self.stores.iter().filter(|other| !Arc::ptr_eq(other, store));
        for other in others.filter(|other| other.answers.load(Ordering::Relaxed)) {
            if other.mirror().store() == Some(&changes.store) {
                let (name, url) = (&changes.store, &other.url);
                return Err(format!(
                    "the store calls itself {name:?}, as the one at {url} does: give it another store.name"
                ));
            }
        }
        let mut mirror = store.mirror();
        if mirror.store().is_some_and(|name| name != changes.store) {
            // The address now has another store.
            let removed = mirror.clear();
            change(&groups, index, mirror.store(), &removed, false);
        }
        let difference = mirror.apply(changes);
        change(&groups, index, mirror.store(), &difference.removed, false);
        change(&groups, index, mirror.store(), &difference.stored, true);
        store.blocks.store(mirror.len(), Ordering::Relaxed);
        drop(mirror);
        remove_empty_groups(&mut groups, index);
        Ok(())
    }

    fn forget(&self, index: &Index, store: &Store) {
        let mut groups = self.lock();
        let mut mirror = store.mirror();
        let removed = mirror.clear();
        store.blocks.store(0, Ordering::Relaxed);
        change(&groups, index, mirror.store(), &removed, false);
        drop(mirror);
        remove_empty_groups(&mut groups, index);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Group>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store {
    fn mirror(&self) -> MutexGuard<'_, StoreMirror> {
        self.mirror.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Group {
    /// Blocks that the group's stores hold and the index knows.
    fn known_blocks(&self, index: &Index) -> u32 {
        index.write().blocks_of(self.blocks.member()).iter().sum()
    }

    /// Applies the blocks that a store has gained or lost, as far as they have the group's tag.
    fn change(&self, index: &Index, blocks: &[BlockIdentity], is_stored: bool) {
        let own = blocks.iter().filter(|block| tag(block) == self.shared.tag);
        let own: Vec<u64> = own.map(engine_hash).collect();
        match is_stored {
            true => self.blocks.stored(index, &self.workers, &own),
            false => self.blocks.removed(index, &own),
        }
    }
}

/// Removes groups without workers and without known blocks.
fn remove_empty_groups(groups: &mut Vec<Group>, index: &Index) {
    groups.retain(|group| {
        let is_useful = !group.workers.is_empty() || group.known_blocks(index) > 0;
        if !is_useful {
            index.write().leave(group.blocks.member());
        }
        is_useful
    });
}

/// Removes the oldest group without workers. False when there is none.
fn remove_idle_group(groups: &mut Vec<Group>, index: &Index) -> bool {
    let Some(at) = groups.iter().position(|group| group.workers.is_empty()) else { return false };
    index.write().leave(groups.remove(at).blocks.member());
    true
}

fn change(groups: &[Group], index: &Index, store: Option<&str>, blocks: &[BlockIdentity], is_stored: bool) {
    let Some(store) = store.filter(|_| !blocks.is_empty()) else { return };
    for group in groups.iter().filter(|group| group.shared.has(store)) {
        group.change(index, blocks, is_stored);
    }
}

fn snapshot_name(shared: &SharedStores) -> String {
    snapshot::stores_name(&shared.stores, shared.tag)
}

/// Starts a task for each store that polls it until the fleet is gone.
pub(crate) fn follow(fleet: &Arc<Fleet>) -> Vec<tokio::task::JoinHandle<()>> {
    let stores = fleet.stores.stores.iter();
    stores.map(|store| tokio::spawn(poll_store(Arc::downgrade(fleet), Arc::clone(store)))).collect()
}

async fn poll_store(fleet: Weak<Fleet>, store: Arc<Store>) {
    let Some(tls) = fleet.upgrade().map(|fleet| fleet.config.tls.clone()) else { return };
    let client = EngineClient::new(&store.url, tls.as_ref());
    let mut failed_since: Option<Instant> = None;
    loop {
        let (path, is_empty) = {
            let mirror = store.mirror();
            (mirror.next_path(), mirror.is_empty())
        };
        let limit = if is_empty { WHOLE_ANSWER_WITHIN } else { LONG_POLL_MAX + FORGOTTEN_AFTER };
        let answer = tokio::time::timeout(limit, client.get_large(&path)).await;
        let Some(fleet) = fleet.upgrade() else { return };
        let (hangs, has_answered) = (answer.is_err(), matches!(answer, Ok(Ok(_))));
        let result = match answer {
            Ok(Ok(body)) => {
                let (taking, by) = (Arc::clone(&store), Arc::clone(&fleet));
                // Applying all blocks of a large store takes long; the async thread must not block.
                let taken = tokio::task::spawn_blocking(move || {
                    let changes = serde_json::from_slice(&body).map_err(|error| error.to_string())?;
                    by.stores.apply(&by.index, &taking, changes)
                });
                taken.await.unwrap_or_else(|error| Err(error.to_string()))
            }
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("it does not answer".to_owned()),
        };
        let answered_before = store.answers.swap(result.is_ok(), Ordering::Relaxed);
        let Err(error) = result else {
            if !answered_before {
                let mirror = store.mirror();
                let (name, blocks) = (mirror.store(), mirror.len());
                tracing::info!(store = store.url, name, blocks, "list of a shared store's blocks received");
            }
            failed_since = None;
            tokio::time::sleep(PAUSE_BETWEEN_CHANGES).await;
            continue;
        };
        if failed_since.is_none() {
            tracing::warn!(store = store.url, error, "the blocks of a shared store cannot be listed");
        }
        let since = *failed_since.get_or_insert_with(Instant::now);
        if (hangs || since.elapsed() >= FORGOTTEN_AFTER) && !store.mirror().is_empty() {
            tracing::warn!(
                store = store.url,
                "a shared store does not answer: its blocks are removed from the index"
            );
            let forgetting = Arc::clone(&store);
            let forgotten =
                tokio::task::spawn_blocking(move || fleet.stores.forget(&fleet.index, &forgetting)).await;
            // The task fails only when the runtime ends.
            drop(forgotten);
        }
        tokio::time::sleep(if has_answered { PAUSE_AFTER_REFUSAL } else { PAUSE }).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use router_events::store_changes::{ChangeLog, ChangesSince};
    use router_policy::Policy;
    use router_radix::Tier;

    use crate::testing::{config, ready_pools};

    const TAG: u16 = 0x0a1f;

    fn block(tag: u16, hash: u64) -> BlockIdentity {
        let mut name = [9; 16];
        name[..2].copy_from_slice(&tag.to_be_bytes());
        name[8..].copy_from_slice(&hash.to_be_bytes());
        BlockIdentity(name)
    }

    /// A fleet of three workers and two stores whose answers are injected: nothing listens at their addresses.
    struct Rig {
        /// Separate from the fleet's own stores, whose tasks would forget the injected answers.
        stores: Stores,
        /// Snapshot of an earlier gateway.
        known: SnapshotCache,
        fleet: Arc<Fleet>,
        runs: Vec<Arc<WorkerRun>>,
        logs: [ChangeLog; 2],
    }

    impl Rig {
        fn new() -> Self {
            let urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"].map(str::to_owned);
            let fleet = ready_pools(config(Policy::default()), &[3], 16);
            let runs = fleet.pools()[0].roster().iter().map(|rank| Arc::clone(&rank.run)).collect();
            let logs = [0, 1].map(|at| ChangeLog::new(&format!("n{at}"), 5));
            Self { stores: Stores::new(&urls), known: SnapshotCache::default(), fleet, runs, logs }
        }

        fn join(&self, worker: usize, stores: &[&str], tag: u16) {
            let stores = stores.iter().map(|name| (*name).to_owned()).collect();
            let shared = SharedStores { stores, tag };
            self.stores.join(&self.fleet.index, &self.runs[worker], &shared, &self.known);
        }

        /// A worker computes the first blocks of the chain 100, 101, …, with the hashes 1, 2, …
        fn compute(&self, worker: usize, blocks: u64) {
            let keys: Vec<u64> = (1..=blocks).collect();
            let hashes: Vec<u64> = keys.iter().map(|key| 99 + key).collect();
            let run = &self.runs[worker];
            let mut index = self.fleet.index.write();
            index.stored(run.member, Tier::Device, None, &keys, &hashes);
        }

        fn drop_all(&self, worker: usize) {
            self.fleet.index.write().clear(self.runs[worker].member);
        }

        /// Both stores have answered, with no blocks.
        fn answered(mut self) -> Self {
            self.tell(0);
            self.tell(1);
            self
        }

        fn change(&mut self, store: usize, blocks: impl IntoIterator<Item = BlockIdentity>, is_stored: bool) {
            blocks.into_iter().for_each(|block| self.logs[store].set_held(block, 0, is_stored));
            self.tell(store);
        }

        fn tell(&mut self, store: usize) {
            let to = Arc::clone(&self.stores.stores[store]);
            let path = to.mirror().next_path();
            let number = |key: &str| {
                let (_, rest) = path.split_once(key).expect("a parameter");
                rest.split('&').next().and_then(|text| text.parse().ok()).expect("a number")
            };
            let known = ChangesSince { instance: number("instance="), after: number("after=") };
            self.stores.apply(&self.fleet.index, &to, self.logs[store].changes(known)).expect("its own name");
        }

        /// Leading blocks of the chain that each worker finds.
        fn found(&self) -> Vec<u32> {
            let prompt: Vec<u64> = (100..120).collect();
            let mut reader = self.fleet.index.reader().expect("a reader");
            let overlaps = reader.overlaps(&prompt);
            self.runs.iter().map(|run| run.leading_any(overlaps)).collect()
        }
    }

    #[tokio::test]
    async fn what_stores_hold_counts_for_the_workers_that_have_them() {
        let mut rig = Rig::new().answered();
        rig.compute(0, 5);
        // Each store has part of the chain; other tags are other models.
        rig.change(0, [1, 3].map(|hash| block(TAG, hash)), true);
        rig.change(1, [2].map(|hash| block(TAG, hash)).into_iter().chain([block(7, 4)]), true);
        rig.join(0, &["n0", "n1"], TAG);
        rig.join(1, &["n0", "n1"], TAG);
        rig.join(2, &["n0"], TAG);
        assert_eq!(rig.found(), [5, 3, 0], "the third does not know what it has not told itself");
        let unknown = SharedStores { stores: vec!["n0".to_owned(), "elsewhere".to_owned()], tag: TAG };
        assert!(!rig.stores.is_known(&rig.runs[0], Some(&unknown)), "it has left the others");
        rig.compute(2, 1);
        rig.change(0, [block(TAG, 9)], true);
        assert_eq!(rig.found(), [5, 3, 1]);
        rig.drop_all(0);
        assert_eq!(rig.found(), [3, 3, 1], "nothing is left of its own");
        rig.change(1, [block(TAG, 2)], false);
        assert_eq!(rig.found(), [1, 1, 1]);
        // A store's new run holds nothing.
        rig.logs[0] = ChangeLog::new("n0", 6);
        rig.tell(0);
        assert_eq!(rig.found(), [0, 0, 1]);
        // A worker may have other stores, or none: its weights were updated.
        rig.compute(0, 1);
        rig.change(0, [block(TAG, 1)], true);
        assert_eq!(rig.found(), [1, 1, 1]);
        assert!(!rig.stores.is_known(&rig.runs[1], None));
        rig.stores.leave(&rig.fleet.index, &rig.runs[1]);
        assert!(rig.stores.is_known(&rig.runs[1], None));
        assert_eq!(rig.found(), [1, 0, 1]);
        rig.join(1, &["n0", "n1"], TAG);
        assert_eq!(rig.found(), [1, 1, 1]);
        let groups = rig.stores.groups(&rig.fleet.index);
        assert_eq!(
            groups.iter().map(|group| (group.workers, group.blocks)).collect::<Vec<_>>(),
            [(2, 1), (1, 1)]
        );
    }

    #[tokio::test]
    async fn a_store_that_is_gone_holds_nothing_and_a_group_waits_for_workers_that_start_again() {
        let mut rig = Rig::new().answered();
        rig.compute(0, 4);
        rig.join(0, &["n0"], TAG);
        rig.change(0, [1, 2, 3].map(|hash| block(TAG, hash)), true);
        rig.stores.leave(&rig.fleet.index, &rig.runs[0]);
        rig.drop_all(0);
        rig.join(1, &["n0"], TAG);
        assert_eq!(rig.found()[1], 3, "no worker knows of them any more");
        let held = |rig: &Rig| rig.stores.levels().map(|(_, _, blocks)| blocks).collect::<Vec<_>>();
        assert_eq!(held(&rig), [3, 0]);
        let store = Arc::clone(&rig.stores.stores[0]);
        rig.stores.forget(&rig.fleet.index, &store);
        assert_eq!(held(&rig), [0, 0]);
        assert_eq!(rig.found()[1], 0);
        rig.tell(0);
        let groups = rig.stores.groups(&rig.fleet.index);
        assert_eq!(
            (groups.len(), groups[0].blocks, groups[0].unresolved),
            (1, 0, 3),
            "no worker has told of them"
        );
        rig.stores.leave(&rig.fleet.index, &rig.runs[1]);
        assert!(rig.stores.groups(&rig.fleet.index).is_empty(), "nobody is there, and nothing is known");
    }

    /// A gateway that restarts learns from stores which blocks they hold, and from its snapshot what these are.
    #[tokio::test]
    async fn what_blocks_in_stores_are_outlives_a_restart() {
        let mut before = Rig::new().answered();
        before.compute(0, 5);
        before.join(0, &["n0", "n1"], TAG);
        before.change(0, [1, 2, 4].map(|hash| block(TAG, hash)), true);
        before.change(1, [2, 3].map(|hash| block(TAG, hash)), true);
        let states = before.stores.capture(&before.fleet.index);
        let bytes = snapshot::encode(&states);
        let states = snapshot::decode(&bytes).expect("a snapshot");
        let remembered = |states: &[PublisherState]| {
            states.iter().map(|state| (state.name.clone(), state.clone())).collect()
        };
        let mut after = Rig::new().answered();
        after.known.set(remembered(&states));
        // Meanwhile one block has gone, and one has come that is not in the snapshot.
        after.change(0, [1, 2, 9].map(|hash| block(TAG, hash)), true);
        after.change(1, [2, 3].map(|hash| block(TAG, hash)), true);
        after.join(2, &["n0", "n1"], 7);
        assert_eq!(after.found(), [0, 0, 0], "those of another model");
        after.join(1, &["n0", "n1"], TAG);
        assert_eq!(after.found(), [0, 3, 0]);
        let groups = after.stores.groups(&after.fleet.index);
        let known: Vec<_> = groups.iter().map(|group| (group.blocks, group.unresolved)).collect();
        assert_eq!(known, [(0, 0), (3, 1)]);
        after.change(1, [2].map(|hash| block(TAG, hash)), false);
        assert_eq!(after.found()[1], 3, "the other store has a copy");
        after.change(0, [1].map(|hash| block(TAG, hash)), false);
        assert_eq!(after.found()[1], 0);
        // A group that starts again finds the block again.
        after.stores.leave(&after.fleet.index, &after.runs[1]);
        for store in after.stores.stores.clone() {
            after.stores.forget(&after.fleet.index, &store);
        }
        after.change(0, [1].map(|hash| block(TAG, hash)), true);
        after.tell(1);
        after.join(0, &["n0", "n1"], TAG);
        assert_eq!(after.found()[0], 3);
        // Without a snapshot nothing is known.
        let mut without = Rig::new().answered();
        without.change(0, [1, 2].map(|hash| block(TAG, hash)), true);
        without.join(1, &["n0", "n1"], TAG);
        assert_eq!(without.found(), [0, 0, 0]);
    }

    #[tokio::test]
    async fn another_store_at_the_same_address_has_other_blocks() {
        let mut rig = Rig::new().answered();
        rig.compute(0, 4);
        rig.join(0, &["n0"], TAG);
        rig.join(1, &["other"], TAG);
        assert!(rig.runs[1].shared_stores().is_none(), "no store has this name yet");
        rig.compute(1, 1);
        rig.change(0, [1, 2].map(|hash| block(TAG, hash)), true);
        rig.drop_all(0);
        assert_eq!(rig.found(), [2, 1, 0]);
        rig.logs[0] = ChangeLog::new("other", 6);
        rig.change(0, [1].map(|hash| block(TAG, hash)), true);
        rig.join(1, &["other"], TAG);
        rig.drop_all(1);
        assert_eq!(rig.found(), [0, 1, 0]);
    }

    #[tokio::test]
    async fn of_two_stores_with_one_name_one_counts() {
        let rig = Rig::new().answered();
        let [first, second] = [0, 1].map(|at| Arc::clone(&rig.stores.stores[at]));
        first.answers.store(true, Ordering::Relaxed);
        let changes = ChangeLog::new("n0", 9).changes(ChangesSince::default());
        let refused =
            rig.stores.apply(&rig.fleet.index, &second, changes).expect_err("the name of the first");
        assert!(refused.contains("\"n0\"") && refused.contains("127.0.0.1:1"), "{refused}");
    }

    #[tokio::test]
    async fn requests_go_to_a_worker_whose_stores_hold_the_prompt() {
        let mut rig = Rig::new().answered();
        let tokens: Vec<u32> = (0..321).collect();
        let mut hashes = Vec::new();
        kvstore_block::block_hashes(&tokens, 16, &kvstore_block::PromptExtras::default(), &mut hashes);
        let keys: Vec<u64> = (1..=20).collect();
        rig.fleet.index.write().stored(rig.runs[0].member, Tier::Device, None, &keys, &hashes[..20]);
        rig.join(0, &["n0"], TAG);
        rig.join(1, &["n0"], TAG);
        rig.change(0, keys.iter().map(|key| block(TAG, *key)), true);
        rig.drop_all(0);
        rig.stores.leave(&rig.fleet.index, &rig.runs[0]);
        let request = crate::RouteRequest {
            tokens: &tokens,
            salt: None,
            session: None,
            adapter: None,
            tokens_are_exact: true,
            without_prefill: false,
            avoid: &[],
            allowed_workers: None,
        };
        // New workers get some requests whatever they hold.
        let mut followed = 0;
        for _ in 0..100 {
            let (route, _booking) = rig.fleet.route(&rig.fleet.pools()[0], &request).expect("a ready worker");
            let is_its = Arc::ptr_eq(&route.decode.run, &rig.runs[1]);
            assert_eq!(
                (route.shared_blocks, route.overlap_blocks),
                if is_its { (Some(20), 20) } else { (None, 0) }
            );
            followed += u32::from(is_its);
        }
        assert!(followed > 60, "{followed} of 100");
    }
}
