//! The index against a trivial model: for each member, a map from prefix to copies.
//!
//! A universe of prefixes is a random tree with long runs. Operations store runs of it, in order and out of
//! order, remove blocks in any order, forget and replace members; after every few, prompts are looked up and
//! every member's leading blocks in every tier compared. The seed is in every message.

#![cfg(not(loom))]

use std::collections::HashMap;

use router_radix::{EngineHash, Index, IndexConfig, Member, Reader, Tier};

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let word = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() >> 16) as usize % bound
    }
}

/// A tree of prefixes: the parent and the last block's hash of each.
struct Universe {
    parent: Vec<Option<usize>>,
    block: Vec<u64>,
    children: Vec<Vec<usize>>,
}

impl Universe {
    fn new(random: &mut Random, size: usize, branch_one_in: usize) -> Self {
        let mut universe = Self { parent: Vec::new(), block: Vec::new(), children: Vec::new() };
        for at in 0..size {
            let parent = match at {
                0 => None,
                _ if random.below(branch_one_in) > 0 => Some(at - 1),
                _ if random.below(4) == 0 => None,
                _ => Some(random.below(at)),
            };
            universe.parent.push(parent);
            // Few different hashes, so that the same block follows many different prefixes, but never twice the same prefix.
            let is_used = |universe: &Self, hash: u64| match parent {
                Some(parent) => universe.children[parent].iter().any(|&child| universe.block[child] == hash),
                None => {
                    (0..at).any(|other| universe.parent[other].is_none() && universe.block[other] == hash)
                }
            };
            let mut hash = random.below(50) as u64;
            while is_used(&universe, hash) {
                hash = random.next();
            }
            universe.block.push(hash);
            universe.children.push(Vec::new());
            if let Some(parent) = parent {
                universe.children[parent].push(at);
            }
        }
        universe
    }

    /// The blocks of a prefix, from the first one on.
    fn path(&self, mut at: usize) -> Vec<usize> {
        let mut path = vec![at];
        while let Some(parent) = self.parent[at] {
            at = parent;
            path.push(at);
        }
        path.reverse();
        path
    }

    /// A random path down from `at`.
    fn run(&self, random: &mut Random, mut at: usize, most: usize) -> Vec<usize> {
        let mut run = vec![at];
        while run.len() < most && !self.children[at].is_empty() {
            at = self.children[at][random.below(self.children[at].len())];
            run.push(at);
        }
        run
    }
}

fn key(worker: usize, at: usize) -> EngineHash {
    // Engines use different hashes for the same block; small numbers are valid hashes, too.
    if worker.is_multiple_of(2) { at as u64 + 1 } else { Random((worker * 1_000_003 + at) as u64).next() }
}

struct Rig {
    seed: u64,
    random: Random,
    universe: Universe,
    index: Index,
    reader: Reader,
    members: Vec<Member>,
    model: Vec<HashMap<usize, [u32; 4]>>,
    lookups: u64,
    /// Blocks placed by the keys of another member.
    placed_as: u64,
}

impl Rig {
    fn new(seed: u64, workers: usize, size: usize, branch_one_in: usize) -> Self {
        let mut random = Random(seed);
        let universe = Universe::new(&mut random, size, branch_one_in);
        let index = Index::new(IndexConfig::default());
        let members = (0..workers).map(|_| index.write().join().expect("room")).collect();
        let reader = index.reader().expect("a reader");
        Self {
            seed,
            random,
            universe,
            index,
            reader,
            members,
            model: vec![HashMap::new(); workers],
            lookups: 0,
            placed_as: 0,
        }
    }

    fn tier(&mut self) -> Tier {
        Tier::ALL[[0, 0, 0, 0, 1, 1, 2, 3][self.random.below(8)]]
    }

    fn store(&mut self, worker: usize, tier: Tier, run: &[usize]) {
        let parent = self.universe.parent[run[0]].map(|parent| key(worker, parent));
        let keys: Vec<u64> = run.iter().map(|&at| key(worker, at)).collect();
        let blocks: Vec<u64> = run.iter().map(|&at| self.universe.block[at]).collect();
        let outcome = self.index.write().stored(self.members[worker], tier, parent, &keys, &blocks);
        assert_eq!(outcome.refused, 0, "seed {}", self.seed);
        for &at in run {
            self.model[worker].entry(at).or_default()[tier as usize] += 1;
        }
    }

    fn store_known(&mut self, worker: usize, tier: Tier, blocks: &[usize]) {
        for &at in blocks {
            let outcome = self.index.write().stored_known(self.members[worker], tier, &[key(worker, at)]);
            let added = outcome.changed + outcome.copies;
            assert_eq!((added + outcome.unknown, outcome.refused), (1, 0), "seed {}", self.seed);
            match self.model[worker].get_mut(&at) {
                Some(copies) if added == 1 => copies[tier as usize] += 1,
                // A block that waits for its parent is unknown, as is an absent one.
                _ => assert_eq!(added, 0, "seed {}: nobody has it", self.seed),
            }
        }
    }

    /// Workers with even numbers use the same names.
    fn store_as(&mut self, worker: usize, tier: Tier, other: usize, blocks: &[usize]) {
        let keys: Vec<u64> = blocks.iter().map(|&at| key(other, at)).collect();
        let mut unknown = Vec::new();
        let (member, source) = (self.members[worker], self.members[other]);
        let outcome = self.index.write().stored_as(member, tier, source, &keys, &mut unknown);
        self.placed_as += (keys.len() - unknown.len()) as u64;
        assert_eq!((outcome.unknown, outcome.refused), (unknown.len() as u64, 0), "seed {}", self.seed);
        for &at in blocks {
            if unknown.contains(&key(other, at)) {
                // A block that waits for its parent is absent, too.
                continue;
            }
            assert!(self.model[other].contains_key(&at), "seed {}: nobody has it", self.seed);
            self.model[worker].entry(at).or_default()[tier as usize] += 1;
        }
        let is_parked = self.index.write().usage().parked > 0;
        let is_unknown = |at: &usize| !self.model[other].contains_key(at);
        let expected = blocks.iter().filter(|at| is_unknown(at)).count();
        assert!(unknown.len() == expected || (is_parked && unknown.len() > expected), "seed {}", self.seed);
    }

    fn remove(&mut self, worker: usize, tier: Tier, blocks: &[usize]) {
        let keys: Vec<u64> = blocks.iter().map(|&at| key(worker, at)).collect();
        self.index.write().removed(self.members[worker], tier, &keys);
        for at in blocks {
            if let Some(copies) = self.model[worker].get_mut(at) {
                copies[tier as usize] = copies[tier as usize].saturating_sub(1);
                if copies.iter().all(|&copies| copies == 0) {
                    self.model[worker].remove(at);
                }
            }
        }
    }

    fn step(&mut self) {
        let worker = self.random.below(self.members.len());
        let start = self.random.below(self.universe.block.len());
        match self.random.below(100) {
            // From the beginning, as engines store; sometimes a block at a time.
            0..=29 => {
                let tier = self.tier();
                let mut run = self.universe.path(start);
                let known = run.iter().take_while(|at| self.model[worker].contains_key(at)).count();
                run.drain(..known.min(run.len() - 1));
                match self.random.below(3) {
                    0 => run.iter().for_each(|&at| self.store(worker, tier, &[at])),
                    _ => self.store(worker, tier, &run),
                }
            }
            // From anywhere: an absent parent, or a second copy.
            30..=39 => {
                let tier = self.tier();
                let most = self.random.below(40) + 1;
                let run = self.universe.run(&mut self.random, start, most);
                self.store(worker, tier, &run);
            }
            // From the end, as least-recently-used order does.
            40..=64 => {
                let tier = self.tier();
                let most = self.random.below(60) + 1;
                let mut run = self.universe.run(&mut self.random, start, most);
                run.reverse();
                self.remove(worker, tier, &run);
            }
            // From the beginning, or single blocks.
            65..=74 => {
                let tier = self.tier();
                let run = self.universe.run(&mut self.random, start, 30);
                self.remove(worker, tier, &run);
            }
            75..=79 => {
                let tier = self.tier();
                let some: Vec<usize> = (0..8).map(|_| self.random.below(self.universe.block.len())).collect();
                self.remove(worker, tier, &some);
            }
            80 if self.random.below(8) == 0 => {
                self.index.write().clear(self.members[worker]);
                self.model[worker].clear();
            }
            81 if self.random.below(8) == 0 => {
                self.index.write().leave(self.members[worker]);
                self.model[worker].clear();
                self.members[worker] = self.index.write().join().expect("room");
            }
            82 => drop(self.index.write().sweep()),
            // By hashes alone, as vLLM reports blocks that a connector's tiers have gained.
            83..=86 => {
                let tier = self.tier();
                let run = self.universe.run(&mut self.random, start, 20);
                self.store_known(worker, tier, &run);
            }
            // By the hashes of another member, as for blocks in a store.
            87..=90 => {
                let tier = self.tier();
                let run = self.universe.run(&mut self.random, start, 20);
                let even = self.members.len().div_ceil(2);
                let [worker, other] = [0; 2].map(|_| 2 * self.random.below(even));
                self.store_as(worker, tier, other, &run);
            }
            _ => self.look_up(start),
        }
    }

    fn look_up(&mut self, at: usize) {
        let most = 1 + self.random.below(100);
        let mut prompt = self.universe.path(at);
        let tail = self.universe.run(&mut self.random, at, most);
        prompt.extend(&tail[1..]);
        let mut hashes: Vec<u64> = prompt.iter().map(|&at| self.universe.block[at]).collect();
        if self.random.below(2) == 0 {
            hashes.push(self.random.next());
        }
        let overlaps = self.reader.overlaps(&hashes);
        for (worker, held) in self.model.iter().enumerate() {
            for tier in Tier::ALL {
                let has = |at: &&usize| {
                    held.get(at)
                        .is_some_and(|copies| copies[..=tier as usize].iter().any(|&copies| copies > 0))
                };
                let expected = prompt.iter().take_while(has).count() as u32;
                let found = overlaps.leading(self.members[worker], tier);
                assert_eq!(
                    found, expected,
                    "seed {}, worker {worker}, {tier:?}, prompt {prompt:?}",
                    self.seed
                );
            }
        }
        self.lookups += 1;
    }

    /// The copy of a member's state equals the model, as far as prefixes go.
    fn check_held(&self) {
        for (worker, model) in self.model.iter().enumerate() {
            let held = self.index.write().held(self.members[worker]);
            let whole = |at: usize| self.universe.path(at).iter().all(|at| model.contains_key(at));
            let mut expected: Vec<(u64, [u32; 4])> = model
                .iter()
                .filter(|(at, _)| whole(**at))
                .map(|(&at, &copies)| (key(worker, at), copies))
                .collect();
            let mut found: Vec<(u64, [u32; 4])> = held.iter().map(|held| (held.key, held.copies)).collect();
            expected.sort_unstable();
            found.sort_unstable();
            assert_eq!(found, expected, "seed {}, worker {worker}", self.seed);
            let writer = self.index.write();
            let (counted, is_parked) = (writer.blocks_of(self.members[worker]), writer.usage().parked > 0);
            for tier in 0..4 {
                let count = |copies: &[u32; 4]| u32::from(copies[tier] > 0);
                let most = model.values().map(count).sum::<u32>();
                // Blocks that wait for their parents are not held yet.
                let least =
                    if is_parked { found.iter().map(|(_, copies)| count(copies)).sum() } else { most };
                assert!(
                    (least..=most).contains(&counted[tier]),
                    "seed {}, worker {worker}, tier {tier}: {counted:?}, {least} to {most}",
                    self.seed
                );
            }
            let mut seen = std::collections::HashSet::new();
            for held in held {
                assert!(held.parent.is_none_or(|parent| seen.contains(&parent)), "parents come first");
                seen.insert(held.key);
            }
        }
    }

    fn forget_all(&mut self) {
        for worker in 0..self.members.len() {
            if worker % 2 == 0 {
                self.index.write().leave(self.members[worker]);
                continue;
            }
            for (at, copies) in std::mem::take(&mut self.model[worker]) {
                for (tier, copies) in Tier::ALL.into_iter().zip(copies) {
                    for _ in 0..copies {
                        self.index.write().removed(self.members[worker], tier, &[key(worker, at)]);
                    }
                }
            }
        }
        while self.index.write().sweep() {}
        for &member in &self.members {
            assert_eq!(self.index.write().blocks_of(member), [0; 4], "seed {}", self.seed);
        }
    }
}

fn run(seed: u64, workers: usize, size: usize, branch_one_in: usize, steps: usize) {
    let mut rig = Rig::new(seed, workers, size, branch_one_in);
    let empty = rig.index.write().usage();
    for step in 0..steps {
        rig.step();
        if step % 4096 == 0 {
            rig.check_held();
        }
    }
    assert!(rig.lookups > steps as u64 / 20 && rig.placed_as > steps as u64 / 100);
    rig.forget_all();
    let usage = rig.index.write().usage();
    assert_eq!((usage.nodes, usage.entries), (0, 0), "seed {seed}: everything is gone");
    assert!(usage.bytes <= empty.bytes + 4096, "seed {seed}: {empty:?} before, {usage:?} after");
}

#[test]
fn few_members_deep_trees() {
    for seed in 0..6 {
        run(seed, 5, 1500, 12, 60_000);
    }
}

#[test]
fn bushy_trees() {
    for seed in 100..104 {
        run(seed, 3, 400, 2, 60_000);
    }
}

#[test]
fn one_long_run_and_many_members() {
    for seed in 200..203 {
        run(seed, 150, 300, 60, 40_000);
    }
}

/// An engine may have several hashes for blocks that have one block hash here (with an image's offset, for example): the block
/// is held until the last of them is removed.
#[test]
fn several_names_for_one_block() {
    let index = Index::new(IndexConfig::default());
    let member = index.write().join().expect("room");
    let other = index.write().join().expect("room");
    let mut reader = index.reader().expect("a reader");
    let blocks = [1, 2, 3, 4, 5];
    for name in [100, 200, 300] {
        let keys = [name, name + 1, name + 2, name + 3, name + 4];
        index.write().stored(member, Tier::Device, None, &keys, &blocks);
    }
    // A split moves them.
    index.write().stored(other, Tier::Device, None, &[7, 8, 9], &[1, 2, 99]);
    index.write().stored(member, Tier::Device, Some(204), &[777], &[6]);
    index.write().removed(member, Tier::Device, &[104, 103, 102, 101, 100]);
    index.write().removed(member, Tier::Device, &[304, 303]);
    assert_eq!(reader.overlaps(&[1, 2, 3, 4, 5, 6]).device(member), 6);
    index.write().removed(member, Tier::Device, &[777, 204, 203]);
    assert_eq!(reader.overlaps(&[1, 2, 3, 4, 5, 6]).device(member), 3);
    // In several tiers at once only consistency is checked: nothing breaks and nothing is left.
    index.write().stored(member, Tier::Host, None, &[500, 501], &[1, 2]);
    index.write().removed(member, Tier::Device, &[300, 301, 302, 200, 201, 202]);
    index.write().removed(member, Tier::Host, &[500, 501, 200, 300]);
    assert_eq!(reader.overlaps(&[1, 2, 3]).any(member), 0);
    index.write().clear(member);
    index.write().leave(other);
    while index.write().sweep() {}
    let usage = index.write().usage();
    assert_eq!((usage.nodes, usage.entries), (0, 0));
}

/// A hash that now stands for another block removes its old block only if no other hash stands for it; and blocks that a
/// member leaves behind are not found by the next member.
#[test]
fn names_that_change_their_block() {
    let index = Index::new(IndexConfig::default());
    let other = index.write().join().expect("room");
    let member = index.write().join().expect("room");
    let mut reader = index.reader().expect("a reader");
    let mut held = |hash: u64, member: Member| reader.overlaps(&[hash]).any(member);
    index.write().stored(other, Tier::Device, None, &[900], &[1]);
    index.write().stored(member, Tier::Device, None, &[11], &[1]);
    index.write().stored(member, Tier::Device, None, &[12], &[1]);
    index.write().stored(member, Tier::Device, None, &[11], &[2]);
    assert_eq!((held(1, member), held(2, member)), (1, 1), "12 still stands for block 1");
    index.write().stored(member, Tier::Device, None, &[12], &[1]);
    index.write().removed(member, Tier::Device, &[12]);
    assert_eq!(held(1, member), 1, "stored twice under this name");
    index.write().removed(member, Tier::Device, &[12]);
    assert_eq!((held(1, member), held(2, member)), (0, 1));
    // Two hashes in two tiers, each removed from its own.
    index.write().stored(member, Tier::Device, None, &[21], &[3]);
    index.write().stored(member, Tier::Host, None, &[22], &[3]);
    index.write().removed(member, Tier::Device, &[21]);
    assert_eq!(held(3, member), 1);
    index.write().removed(member, Tier::Host, &[22]);
    assert_eq!(held(3, member), 0);
    assert!(!index.write().holds(member, 21) && !index.write().holds(member, 22));
    index.write().leave(member);
    while index.write().sweep() {}
    let next = index.write().join().expect("room");
    assert!([1, 2, 3].iter().all(|&hash| held(hash, next) == 0), "a new member holds nothing");
    assert_eq!(index.write().entries_of(next), 0);
}

/// After one lost message four thousand blocks wait for it: all are held when it arrives.
#[test]
fn a_long_chain_may_wait_for_one_block() {
    let index = Index::new(IndexConfig::default());
    let member = index.write().join().expect("room");
    let mut reader = index.reader().expect("a reader");
    let keys: Vec<u64> = (1..=4001).collect();
    let outcome = index.write().stored(member, Tier::Device, Some(1), &keys[1..], &keys[1..]);
    assert_eq!(outcome.parked, 4000);
    assert_eq!(reader.overlaps(&keys).device(member), 0);
    index.write().stored(member, Tier::Device, None, &[1], &[1]);
    assert_eq!(reader.overlaps(&keys).device(member), 4001);
    assert_eq!(index.write().usage().parked, 0);
}

/// A reader may outlive the index.
#[test]
fn readers_outlive_the_index() {
    let index = Index::new(IndexConfig::default());
    let members: Vec<Member> = (0..6).map(|_| index.write().join().expect("room")).collect();
    let mut reader = index.reader().expect("a reader");
    for (at, &member) in members.iter().enumerate() {
        let keys: Vec<u64> = (1..=20 + at as u64).collect();
        index.write().stored(member, Tier::Device, None, &keys, &keys);
    }
    drop(index);
    let prompt: Vec<u64> = (1..=30).collect();
    let overlaps = reader.overlaps(&prompt);
    let found: Vec<u32> = members.iter().map(|&member| overlaps.device(member)).collect();
    assert_eq!(found, [20, 21, 22, 23, 24, 25]);
}
