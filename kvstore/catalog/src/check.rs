//! Every invariant of the catalog, checked the slow way. For tests: it walks over everything under the locks.

use std::collections::{HashMap, HashSet};

use crate::catalog::Catalog;
use crate::index::hash_halves;
use crate::list::{NONE, Place};
use crate::record::{State, halves};
use crate::tier::LockedTier;

impl Catalog {
    /// Asserts all invariants.
    ///
    /// # Panics
    /// When one is broken.
    pub fn debug_check(&self) {
        let locked: Vec<LockedTier<'_>> =
            (0..self.shared.tiers.len()).map(|at| self.shared.lock(at as u8)).collect();
        let indexed: usize = locked.iter().map(LockedTier::check).sum();
        assert_eq!(self.shared.index.entry_count(), indexed, "the index has just the blocks");
    }
}

impl LockedTier<'_> {
    fn in_states(&self, states: &[State]) -> impl Iterator<Item = u32> {
        let records = &self.tier.records;
        (0..records.len() as u32).filter(move |&slot| states.contains(&records[slot as usize].state()))
    }

    /// Returns how many entries the index must have for this tier.
    fn check(&self) -> usize {
        let (nodes, records) = (&self.changes.nodes, &self.tier.records);
        let free: HashSet<u32> = self.changes.free.iter(nodes).collect();
        assert_eq!(free.len(), self.changes.free.len as usize);
        assert_eq!(free, self.in_states(&[State::Free]).collect(), "the free list has just the free slots");

        let mut identities = HashSet::new();
        for slot in self.in_states(&[State::Registered]) {
            let identity = records[slot as usize].halves();
            assert!(identities.insert(identity), "slot {slot}: registered twice");
            assert_eq!(self.tier.find(self.index, hash_halves(identity), identity), Some(slot));
        }

        let mut children: HashMap<u32, u32> = HashMap::new();
        for slot in self.in_states(&[State::Registered]) {
            let node = &nodes[slot as usize];
            let is_alive = |parent: u32| {
                let record = &records[parent as usize];
                matches!(record.state(), State::Registered | State::Evicting)
                    && record.generation() == node.parent_generation
            };
            if node.parent != NONE && is_alive(node.parent) {
                *children.entry(node.parent).or_default() += 1;
            }
        }
        let is_orphan = |&slot: &u32| {
            let node = &nodes[slot as usize];
            node.parent == NONE && !node.is_cut && records[slot as usize].parent().is_some()
        };
        let orphans: HashSet<u32> = self.changes.orphans.iter(nodes).collect();
        assert_eq!(orphans, self.in_states(&[State::Registered]).filter(is_orphan).collect(), "orphans");
        for &orphan in &orphans {
            let parent = records[orphan as usize].parent().map(|parent| halves(&parent));
            let is_there = parent.is_some_and(|parent| {
                identities.contains(&parent) && parent != records[orphan as usize].halves()
            });
            assert!(!is_there, "slot {orphan}: an orphan whose parent is there");
        }
        for slot in self.in_states(&[State::Registered]) {
            let expected = children.get(&slot).copied().unwrap_or(0);
            assert_eq!(nodes[slot as usize].children, expected, "slot {slot}: children");
        }

        let candidates = self.changes.policy.candidates(nodes);
        let distinct: HashSet<u32> = candidates.iter().copied().collect();
        assert_eq!(distinct.len(), candidates.len(), "a candidate is listed once");
        assert_eq!(distinct.len(), self.changes.candidates as usize);
        for slot in 0..records.len() as u32 {
            let (node, state) = (&nodes[slot as usize], records[slot as usize].state());
            assert_eq!(
                node.place == Place::Candidate,
                distinct.contains(&slot),
                "slot {slot}: {:?}",
                node.place
            );
            match (state, node.place) {
                (State::Registered, Place::Candidate) => assert_eq!(node.children, 0, "slot {slot}"),
                (State::Registered, Place::Away) => assert_ne!(node.children, 0, "slot {slot} is lost"),
                (State::Registered | State::PendingFree, Place::Parked) => {}
                (State::PendingFree, _) => {
                    assert_eq!(records[slot as usize].pins(), 0, "slot {slot} is never freed")
                }
                (_, place) => assert_eq!(place, Place::Away, "slot {slot}: {state:?}"),
            }
        }
        self.check_accounts(&distinct);
        let indexed = self.in_states(&[State::Registered, State::Evicting]).count();
        assert_eq!(self.changes.blocks as usize, indexed, "blocks");
        indexed
    }

    fn check_accounts(&self, candidates: &HashSet<u32>) {
        let nodes = &self.changes.nodes;
        let all = [State::Reserved, State::Registered, State::Evicting, State::PendingFree];
        let mut used: HashMap<u16, u32> = HashMap::new();
        self.in_states(&all).for_each(|slot| *used.entry(nodes[slot as usize].account).or_default() += 1);
        for (number, account) in self.changes.tenants.accounts.iter().enumerate() {
            assert_eq!(account.used, used.get(&(number as u16)).copied().unwrap_or(0), "account {number}");
            if account.is_limited() {
                let own: HashSet<u32> = account.own.iter(nodes).collect();
                let is_own = |slot: &u32| usize::from(nodes[*slot as usize].account) == number;
                assert_eq!(own, candidates.iter().copied().filter(is_own).collect(), "account {number}");
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::thread;
    use std::time::Duration;

    use kvstore_block::BlockIdentity;

    use crate::{Catalog, CatalogConfig, Contents, PolicyKind, TenantId, TierConfig, TierIndex};

    /// Runs every operation of a reader while another thread holds the lock.
    #[test]
    fn readers_take_no_lock() {
        let (tier, identity) = (TierIndex(0), BlockIdentity([7; 16]));
        for policy in [PolicyKind::Lru, PolicyKind::S3Fifo, PolicyKind::Cost] {
            let config = CatalogConfig::new(vec![TierConfig::new(4, policy)]);
            let catalog = Arc::new(Catalog::new(&config).expect("valid"));
            let contents = Contents { identity, parent: None, checksum: 0, bytes: 1, recompute_seconds: 0.0 };
            catalog.adopt(tier, 1, contents, TenantId(0)).expect("a free slot");
            let parked = catalog.lease(tier, &identity);
            assert_eq!(catalog.evict(tier, 1, &mut Vec::new()), 0);
            let locked = catalog.shared.lock(0);
            let (done, wait) = mpsc::channel();
            let reader = {
                let catalog = Arc::clone(&catalog);
                thread::spawn(move || {
                    let (mut places, mut leases) = (Vec::new(), Vec::new());
                    assert!(catalog.contains(&identity));
                    assert_eq!(catalog.match_prefix(&[identity], &mut places), 1);
                    assert_eq!(catalog.lease_prefix(tier, &[identity], &mut leases), 1);
                    catalog.touch(tier, &[identity]);
                    // The last lease of a slot that the evictor found in use hands it back, still without a lock.
                    drop((leases, parked));
                    done.send(()).expect("somebody waits");
                })
            };
            let in_time = wait.recv_timeout(Duration::from_secs(20));
            drop(locked);
            assert!(in_time.is_ok(), "{policy:?}: a reader waits for the lock");
            reader.join().expect("reader");
            catalog.debug_check();
        }
    }
}
