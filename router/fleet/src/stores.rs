//! Stores that workers share (`kvasir store`): what they hold counts for every worker that has them.
//!
//! A worker says which stores it has and by which tag the names of its blocks begin ([`SharedStores`]); workers that say the same
//! are a group, with one place in the index for what they find there. A group whose last worker has left is kept while its stores
//! hold blocks that the index knows: workers that start again find them. One task for each store asks it for changes. A store
//! that does not answer for [`FORGOTTEN_AFTER`] holds nothing.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use router_engines::client::EngineClient;
use router_engines::dialect::SharedStores;
use router_events::shared_blocks::SharedBlocks;
use router_events::store_changes::{BlockName, StoreChanges, StoreContents, engine_hash, tag};
use router_radix::{Index, Member};

use crate::fleet::Fleet;
use crate::worker::WorkerRun;

/// A store answers within 10 s also when nothing has changed.
const ANSWER_WITHIN: Duration = Duration::from_secs(15);
/// What a store held is forgotten when it has not answered for so long after a failed question.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(3);
/// Between questions to a store that does not answer.
const PAUSE: Duration = Duration::from_millis(200);
/// Groups of workers with a place in the index.
const GROUPS_MAX: usize = 64;
/// Names that are put into the index in one go: its writer is locked meanwhile.
const NAMES_AT_ONCE: usize = 512;

/// The stores of a fleet, and the workers that share them.
#[derive(Debug)]
pub struct Stores {
    stores: Vec<Arc<Store>>,
    groups: Mutex<Vec<Group>>,
}

#[derive(Debug)]
struct Store {
    url: String,
    /// Locked after `groups`.
    contents: Mutex<StoreContents>,
    answers: AtomicBool,
}

/// Workers with the same stores.
#[derive(Debug)]
struct Group {
    shared: SharedStores,
    blocks: Arc<SharedBlocks>,
    workers: Vec<Member>,
}

/// A store as it is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreStatus {
    /// Where it is asked.
    pub url: String,
    /// Its name, once it has told it.
    pub name: Option<String>,
    /// Whether its last answer came.
    pub answers: bool,
    /// Blocks that it holds.
    pub blocks: usize,
}

/// A group of workers as it is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupStatus {
    /// Their stores.
    pub stores: Vec<String>,
    /// How many workers.
    pub workers: usize,
    /// Blocks of theirs that the stores hold and the index knows.
    pub blocks: u32,
    /// Names of blocks that no worker has told of yet.
    pub waiting: usize,
}

impl Stores {
    /// The stores at these URLs.
    pub(crate) fn new(urls: &[String]) -> Self {
        let store = |url: &String| {
            let (url, contents) = (url.trim_end_matches('/').to_owned(), Mutex::default());
            Arc::new(Store { url, contents, answers: AtomicBool::new(false) })
        };
        Self { stores: urls.iter().map(store).collect(), groups: Mutex::default() }
    }

    /// How they are.
    #[must_use]
    pub fn status(&self) -> Vec<StoreStatus> {
        let of = |store: &Arc<Store>| {
            let contents = store.contents();
            StoreStatus {
                url: store.url.clone(),
                name: contents.store().map(str::to_owned),
                answers: store.answers.load(Ordering::Relaxed),
                blocks: contents.len(),
            }
        };
        self.stores.iter().map(of).collect()
    }

    /// The groups of workers that share them.
    #[must_use]
    pub fn groups(&self, index: &Index) -> Vec<GroupStatus> {
        let of = |group: &Group| GroupStatus {
            stores: group.shared.stores.clone(),
            workers: group.workers.len(),
            blocks: group.known_blocks(index),
            waiting: group.blocks.waiting(),
        };
        self.lock().iter().map(of).collect()
    }

    /// A run of a worker has these stores. What it says first holds for all of the run.
    pub(crate) fn join(&self, index: &Index, run: &WorkerRun, shared: &SharedStores) {
        if self.stores.is_empty() || !run.has_feed || run.shared().is_some() {
            return;
        }
        let mut groups = self.lock();
        let is_theirs = |group: &Group| group.shared == *shared;
        let known = groups.iter().position(is_theirs);
        let is_new = known.is_none();
        let at = match known {
            Some(at) => at,
            None => {
                if groups.len() >= GROUPS_MAX && !remove_one(&mut groups, index) {
                    let limit = GROUPS_MAX;
                    tracing::warn!(worker = run.name, limit, "too many groups of workers that share stores");
                    return;
                }
                // Without a place what the stores hold counts for nobody of the group.
                let Some(member) = index.write().join() else { return };
                let blocks = Arc::new(SharedBlocks::new(member));
                groups.push(Group { shared: shared.clone(), blocks, workers: Vec::new() });
                groups.len() - 1
            }
        };
        let group = &mut groups[at];
        group.workers.push(run.member);
        // From now on what it tells is heard; what it has told before is looked up.
        let mut follower = run.follower.lock().unwrap_or_else(PoisonError::into_inner);
        follower.share(Some(Arc::clone(&group.blocks)));
        drop(follower);
        if is_new {
            for store in &self.stores {
                let contents = store.contents();
                if group.has(contents.store()) {
                    let names: Vec<BlockName> = contents.held().copied().collect();
                    group.change(index, &names, true);
                }
            }
        } else {
            group.blocks.joined(&mut index.write(), run.member);
        }
        run.set_shared(group.blocks.member());
        tracing::info!(worker = run.name, stores = ?shared.stores, "worker shares stores with others");
    }

    /// The run has ended. Before its place in the index is given back.
    pub(crate) fn leave(&self, index: &Index, run: &WorkerRun) {
        let mut groups = self.lock();
        for group in &mut *groups {
            group.workers.retain(|member| *member != run.member);
        }
        run.follower.lock().unwrap_or_else(PoisonError::into_inner).share(None);
        remove_useless(&mut groups, index);
    }

    /// A store has answered.
    fn take(&self, index: &Index, store: &Store, told: StoreChanges) {
        let mut groups = self.lock();
        let mut contents = store.contents();
        if contents.store().is_some_and(|name| name != told.store) {
            // Another store is at this address now.
            let gone = contents.forget();
            change(&groups, index, contents.store(), &gone, false);
        }
        let difference = contents.take(told);
        change(&groups, index, contents.store(), &difference.removed, false);
        change(&groups, index, contents.store(), &difference.stored, true);
        remove_useless(&mut groups, index);
    }

    fn forget(&self, index: &Index, store: &Store) {
        let mut groups = self.lock();
        let mut contents = store.contents();
        let gone = contents.forget();
        change(&groups, index, contents.store(), &gone, false);
        remove_useless(&mut groups, index);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Group>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store {
    fn contents(&self) -> MutexGuard<'_, StoreContents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Group {
    /// Blocks that its stores hold and the index knows.
    fn known_blocks(&self, index: &Index) -> u32 {
        index.write().blocks_of(self.blocks.member()).iter().sum()
    }

    fn has(&self, store: Option<&str>) -> bool {
        store.is_some_and(|store| self.shared.stores.iter().any(|own| own == store))
    }

    /// Blocks of any group that one of its stores has gained or lost.
    fn change(&self, index: &Index, names: &[BlockName], is_stored: bool) {
        let own = names.iter().filter(|name| tag(name) == self.shared.tag);
        let own: Vec<u64> = own.map(engine_hash).collect();
        for names in own.chunks(NAMES_AT_ONCE) {
            let mut index = index.write();
            match is_stored {
                true => self.blocks.stored(&mut index, &self.workers, names),
                false => self.blocks.removed(&mut index, names),
            }
        }
    }
}

/// Removes groups without workers of whose blocks nothing is known.
fn remove_useless(groups: &mut Vec<Group>, index: &Index) {
    groups.retain(|group| {
        let is_useful = !group.workers.is_empty() || group.known_blocks(index) > 0;
        if !is_useful {
            index.write().leave(group.blocks.member());
        }
        is_useful
    });
}

/// Removes the oldest group without workers. False when there is none.
fn remove_one(groups: &mut Vec<Group>, index: &Index) -> bool {
    let Some(at) = groups.iter().position(|group| group.workers.is_empty()) else { return false };
    index.write().leave(groups.remove(at).blocks.member());
    true
}

fn change(groups: &[Group], index: &Index, store: Option<&str>, names: &[BlockName], is_stored: bool) {
    if names.is_empty() {
        return;
    }
    for group in groups.iter().filter(|group| group.has(store)) {
        group.change(index, names, is_stored);
    }
}

/// Asks each store for what it holds until the fleet is gone.
pub(crate) fn follow(fleet: &Arc<Fleet>) -> Vec<tokio::task::JoinHandle<()>> {
    let stores = fleet.stores.stores.iter();
    stores.map(|store| tokio::spawn(follow_one(Arc::downgrade(fleet), Arc::clone(store)))).collect()
}

async fn follow_one(fleet: Weak<Fleet>, store: Arc<Store>) {
    let Some(tls) = fleet.upgrade().map(|fleet| fleet.config.tls.clone()) else { return };
    let client = EngineClient::new(&store.url, tls.as_ref());
    let mut silent_since = None;
    loop {
        let path = store.contents().next_path();
        let answer = tokio::time::timeout(ANSWER_WITHIN, client.get_large(&path)).await;
        let Some(fleet) = fleet.upgrade() else { return };
        let answer = match answer {
            Ok(Ok(body)) => Ok(body),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("{} does not answer", store.url)),
        };
        let (taking, by) = (Arc::clone(&store), Arc::clone(&fleet));
        let taken = match answer {
            Ok(body) => {
                // All that a large store holds takes a while, and this thread has other work.
                let taken = tokio::task::spawn_blocking(move || {
                    let told = serde_json::from_slice(&body).map_err(|error| error.to_string())?;
                    by.stores.take(&by.index, &taking, told);
                    Ok(())
                });
                taken.await.unwrap_or_else(|error| Err(error.to_string()))
            }
            Err(error) => Err(error),
        };
        let answers = taken.is_ok();
        let answered = store.answers.swap(answers, Ordering::Relaxed);
        let Err(error) = taken else {
            if !answered {
                let contents = store.contents();
                let (name, blocks) = (contents.store(), contents.len());
                tracing::info!(store = store.url, name, blocks, "a store tells what it holds");
            }
            silent_since = None;
            continue;
        };
        if silent_since.is_none() {
            tracing::warn!(store = store.url, error, "a store does not tell what it holds");
        }
        let since = *silent_since.get_or_insert_with(Instant::now);
        if since.elapsed() >= FORGOTTEN_AFTER && !store.contents().is_empty() {
            tracing::warn!(store = store.url, "what a store held is forgotten");
            let forgetting = Arc::clone(&store);
            let _done =
                tokio::task::spawn_blocking(move || fleet.stores.forget(&fleet.index, &forgetting)).await;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use router_events::store_changes::{Question, StoreLog};
    use router_policy::Policy;
    use router_radix::Tier;

    use crate::testing::{config, ready_pools};

    const TAG: u16 = 0x0a1f;

    fn name(tag: u16, hash: u64) -> BlockName {
        let mut name = [9; 16];
        name[..2].copy_from_slice(&tag.to_be_bytes());
        name[8..].copy_from_slice(&hash.to_be_bytes());
        name
    }

    /// A fleet of three workers and two stores, which are told of by hand: nothing listens at their addresses.
    struct Rig {
        /// Not the fleet's own, whose tasks would forget what is told here.
        stores: Stores,
        fleet: Arc<Fleet>,
        runs: Vec<Arc<WorkerRun>>,
        logs: [StoreLog; 2],
    }

    impl Rig {
        fn new() -> Self {
            let urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"].map(str::to_owned);
            let fleet = ready_pools(config(Policy::default()), &[3], 16);
            let runs = fleet.pools()[0].roster().iter().map(|rank| Arc::clone(&rank.run)).collect();
            let logs = [0, 1].map(|at| StoreLog::new(&format!("n{at}"), 5));
            Self { stores: Stores::new(&urls), fleet, runs, logs }
        }

        fn join(&self, worker: usize, stores: &[&str], tag: u16) {
            let stores = stores.iter().map(|name| (*name).to_owned()).collect();
            self.stores.join(&self.fleet.index, &self.runs[worker], &SharedStores { stores, tag });
        }

        /// A worker computes the first blocks of the chain 100, 101, …, whose names are 1, 2, …
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

        fn change(&mut self, store: usize, names: impl IntoIterator<Item = BlockName>, is_stored: bool) {
            names.into_iter().for_each(|name| self.logs[store].note(name, 0, is_stored));
            self.tell(store);
        }

        fn tell(&mut self, store: usize) {
            let to = Arc::clone(&self.stores.stores[store]);
            let path = to.contents().next_path();
            let number = |key: &str| {
                let (_, rest) = path.split_once(key).expect("a parameter");
                rest.split('&').next().and_then(|text| text.parse().ok()).expect("a number")
            };
            let known = Question { instance: number("instance="), after: number("after=") };
            self.stores.take(&self.fleet.index, &to, self.logs[store].changes_after(known));
        }

        /// Leading blocks of the chain that each worker finds.
        fn found(&self) -> Vec<u32> {
            let prompt: Vec<u64> = (100..120).collect();
            let mut reader = self.fleet.index.reader().expect("a reader");
            let overlaps = reader.overlaps(&prompt);
            self.runs.iter().map(|run| run.found(overlaps)).collect()
        }
    }

    #[tokio::test]
    async fn what_stores_hold_counts_for_the_workers_that_have_them() {
        let mut rig = Rig::new();
        rig.compute(0, 5);
        // Each has part of the chain; other tags are other models.
        rig.change(0, [1, 3].map(|hash| name(TAG, hash)), true);
        rig.change(1, [2].map(|hash| name(TAG, hash)).into_iter().chain([name(7, 4)]), true);
        rig.join(0, &["n0", "n1"], TAG);
        rig.join(1, &["n0", "n1"], TAG);
        rig.join(2, &["n0"], TAG);
        assert_eq!(rig.found(), [5, 3, 0], "the third does not know what it has not told itself");
        rig.compute(2, 1);
        rig.change(0, [name(TAG, 9)], true);
        assert_eq!(rig.found(), [5, 3, 1]);
        rig.drop_all(0);
        assert_eq!(rig.found(), [3, 3, 1], "nothing is left of its own");
        rig.change(1, [name(TAG, 2)], false);
        assert_eq!(rig.found(), [1, 1, 1]);
        // The store forgets everything with a new run, and so does one that does not answer.
        rig.logs[0] = StoreLog::new("n0", 6);
        rig.tell(0);
        assert_eq!(rig.found(), [0, 0, 1]);
        let groups = rig.stores.groups(&rig.fleet.index);
        assert_eq!(
            groups.iter().map(|group| (group.workers, group.blocks)).collect::<Vec<_>>(),
            [(2, 0), (1, 0)]
        );
    }

    #[tokio::test]
    async fn a_store_that_is_gone_holds_nothing_and_a_group_waits_for_workers_that_start_again() {
        let mut rig = Rig::new();
        rig.compute(0, 4);
        rig.join(0, &["n0"], TAG);
        rig.change(0, [1, 2, 3].map(|hash| name(TAG, hash)), true);
        rig.stores.leave(&rig.fleet.index, &rig.runs[0]);
        rig.drop_all(0);
        rig.join(1, &["n0"], TAG);
        assert_eq!(rig.found()[1], 3, "no worker knows of them any more");
        let store = Arc::clone(&rig.stores.stores[0]);
        rig.stores.forget(&rig.fleet.index, &store);
        assert_eq!(rig.found()[1], 0);
        rig.tell(0);
        let groups = rig.stores.groups(&rig.fleet.index);
        assert_eq!((groups.len(), groups[0].blocks, groups[0].waiting), (1, 0, 3), "their names wait");
        rig.stores.leave(&rig.fleet.index, &rig.runs[1]);
        assert!(rig.stores.groups(&rig.fleet.index).is_empty(), "nobody is there, and nothing is known");
    }

    #[tokio::test]
    async fn another_store_at_the_same_address_has_other_blocks() {
        let mut rig = Rig::new();
        rig.compute(0, 4);
        rig.join(0, &["n0"], TAG);
        rig.join(1, &["other"], TAG);
        rig.compute(1, 1);
        rig.change(0, [1, 2].map(|hash| name(TAG, hash)), true);
        rig.drop_all(0);
        assert_eq!(rig.found(), [2, 1, 0]);
        rig.logs[0] = StoreLog::new("other", 6);
        rig.change(0, [1].map(|hash| name(TAG, hash)), true);
        rig.drop_all(1);
        assert_eq!(rig.found(), [0, 1, 0]);
    }
}
