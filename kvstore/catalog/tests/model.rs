//! Each policy against a plain oracle: random operations, the victims and their order as the oracle says.
#![cfg(not(loom))]

mod bed;

use std::collections::HashMap;

use bed::{ANYBODY, Random, TIER, catalog, identity, number};
use kvstore_catalog::{Catalog, Lease, PolicyKind, Registered};

const STEPS: u64 = 40_000;

#[derive(Debug, Clone)]
struct Block {
    parent: Option<u64>,
    uses: u8,
    stamp: u32,
    small: bool,
    pins: u32,
    parked: bool,
    density: f32,
}

struct Oracle {
    policy: PolicyKind,
    blocks: HashMap<u64, Block>,
    /// S3-FIFO's queues of candidates, the oldest first.
    small: Vec<u64>,
    main: Vec<u64>,
    small_target: usize,
    /// Parked blocks whose last lease ended, the newest last.
    returned: Vec<u64>,
}

impl Oracle {
    fn new(policy: PolicyKind, slots: usize) -> Self {
        let small_target = (slots / 10).max(1);
        Self {
            policy,
            blocks: HashMap::new(),
            small: Vec::new(),
            main: Vec::new(),
            small_target,
            returned: Vec::new(),
        }
    }

    fn has_children(&self, block: u64) -> bool {
        self.blocks.values().any(|other| other.parent == Some(block))
    }

    fn link(&mut self, block: u64, oldest: bool) {
        if self.blocks.get(&block).is_none_or(|block| block.parked) || self.has_children(block) {
            return;
        }
        let queue = if self.blocks[&block].small { &mut self.small } else { &mut self.main };
        if !queue.contains(&block) {
            queue.insert(if oldest { 0 } else { queue.len() }, block);
        }
    }

    fn unlink(&mut self, block: u64) {
        self.small.retain(|&other| other != block);
        self.main.retain(|&other| other != block);
    }

    /// Links returned blocks, as every call that takes the lock does first.
    fn take_returned(&mut self) {
        while let Some(block) = self.returned.pop() {
            if let Some(found) = self.blocks.get_mut(&block) {
                found.parked = false;
                self.link(block, false);
            }
        }
    }

    fn register(&mut self, block: u64, parent: Option<u64>, stamp: u32, density: f32) {
        let parent = parent.filter(|parent| self.blocks.contains_key(parent));
        parent.into_iter().for_each(|parent| self.unlink(parent));
        let new = Block { parent, uses: 0, stamp, small: true, pins: 0, parked: false, density };
        assert!(self.blocks.insert(block, new).is_none());
        self.link(block, false);
    }

    fn touch(&mut self, block: u64, clock: u32) {
        let block = self.blocks.get_mut(&block).expect("it is there");
        block.stamp = clock;
        block.uses = (block.uses + 1).min(3);
    }

    fn unpin(&mut self, block: u64) {
        let Some(found) = self.blocks.get_mut(&block) else { return };
        found.pins -= 1;
        if found.pins == 0 && found.parked && !self.returned.contains(&block) {
            self.returned.push(block);
        }
    }

    fn take_out(&mut self, block: u64) {
        self.unlink(block);
        let gone = self.blocks.remove(&block).expect("it is there");
        // Children that stay behind have no parent any more.
        self.blocks
            .values_mut()
            .filter(|other| other.parent == Some(block))
            .for_each(|other| other.parent = None);
        gone.parent.into_iter().for_each(|parent| self.link(parent, true));
    }

    fn evictable(&self) -> impl Iterator<Item = u64> {
        let free =
            |(&block, found): (&u64, &Block)| (found.pins == 0 && !self.has_children(block)).then_some(block);
        self.blocks.iter().filter_map(free)
    }

    /// S3-FIFO's next victim, by the book.
    fn s3_fifo(&mut self) -> Option<u64> {
        loop {
            let small_blocks = self.blocks.values().filter(|block| block.small).count();
            let from_small =
                self.main.is_empty() || (!self.small.is_empty() && small_blocks >= self.small_target);
            let block = *if from_small { self.small.first() } else { self.main.first() }?;
            let found = self.blocks.get_mut(&block).expect("queued blocks are there");
            match (from_small, found.uses) {
                (true, 0 | 1) | (false, 0) if found.pins == 0 => return Some(block),
                (true, 0 | 1) | (false, 0) => {
                    found.parked = true;
                    self.unlink(block);
                    continue;
                }
                (true, _) => (found.small, found.uses) = (false, 0),
                (false, _) => found.uses -= 1,
            }
            self.unlink(block);
            self.main.push(block);
        }
    }

    /// Whether `victim` is what the policy must evict now.
    fn check(&mut self, catalog: &Catalog, victim: Option<u64>, seed: u64, step: u64) {
        let place = format!("{:?}, seed {seed}, step {step}", self.policy);
        if self.policy == PolicyKind::S3Fifo {
            assert_eq!(victim, self.s3_fifo(), "{place}");
        }
        let evictable: Vec<u64> = self.evictable().collect();
        let Some(victim) = victim else {
            assert!(evictable.is_empty(), "{place}: {evictable:?} could go");
            return;
        };
        assert!(evictable.contains(&victim), "{place}: {victim} is in use, a parent, or not there");
        match self.policy {
            PolicyKind::S3Fifo => {}
            PolicyKind::Lru => {
                let age = |block: u64| catalog.clock(TIER).wrapping_sub(self.blocks[&block].stamp).min(128);
                let oldest = evictable.iter().map(|&block| age(block)).max();
                assert_eq!(Some(age(victim)), oldest, "{place}");
            }
            PolicyKind::Cost => {
                let sketch = catalog.sketch(TIER).expect("it counts");
                let worth = |block: u64| {
                    self.blocks[&block].density * (f32::from(sketch.estimate(&identity(block))) + 1.0)
                };
                let least = evictable.iter().map(|&block| worth(block)).min_by(f32::total_cmp);
                assert_eq!(Some(worth(victim)), least, "{place}");
            }
        }
    }

    /// Parks the candidates that the eviction found in use; the order of other policies does not show it.
    fn park_pinned(&mut self) {
        let pinned: Vec<u64> =
            self.blocks.iter().filter(|(_, block)| block.pins > 0).map(|(&at, _)| at).collect();
        if self.policy != PolicyKind::S3Fifo {
            pinned.into_iter().for_each(|block| self.unlink(block));
        }
    }
}

fn run(policy: PolicyKind, slots: u32, seed: u64) {
    println!("{policy:?}, {slots} slots, seed {seed}");
    let mut random = Random(seed);
    let catalog = catalog(policy, slots);
    let mut oracle = Oracle::new(policy, slots as usize);
    let mut leases: Vec<(u64, Lease)> = Vec::new();
    let (mut next, mut victims) = (1_u64, 0_u64);
    for step in 0..STEPS {
        let recent = next.saturating_sub(random.draw(u64::from(slots) * 2)).max(1);
        match random.draw(12) {
            0..=3 => {
                let (mut evicted, mut reserved) = (Vec::new(), Vec::new());
                oracle.take_returned();
                let full = catalog.usage(TIER).is_some_and(|usage| usage.free == 0);
                catalog.reserve(TIER, 1, ANYBODY, &mut evicted, &mut reserved);
                let victim = evicted.first().map(|evicted| number(&evicted.identity));
                if full {
                    oracle.check(&catalog, victim, seed, step);
                    victims += 1;
                }
                victim.into_iter().for_each(|victim| oracle.take_out(victim));
                let Some(slot) = reserved.pop() else { continue };
                let (block, parent) = (next, (random.draw(3) > 0).then_some(recent));
                next += 1;
                let (cost, bytes) = (random.draw(9) as f32 + 1.0, 64 << random.draw(3));
                let complete = slot.fill().complete(block, bytes);
                let registered = complete.register(identity(block), parent.map(identity), cost);
                assert_eq!(registered, Registered::New);
                oracle.register(block, parent, catalog.clock(TIER), cost / bytes as f32);
            }
            4..=7 => {
                let lease = catalog.lease(TIER, &identity(recent));
                assert_eq!(lease.is_some(), oracle.blocks.contains_key(&recent), "seed {seed}, step {step}");
                if let Some(lease) = lease {
                    oracle.touch(recent, catalog.clock(TIER));
                    oracle.blocks.get_mut(&recent).expect("it is there").pins += 1;
                    leases.push((recent, lease));
                }
            }
            8..=9 if !leases.is_empty() => {
                let at = random.draw(leases.len() as u64) as usize;
                let (block, lease) = leases.swap_remove(at);
                assert_eq!(number(&lease.identity()), block);
                drop(lease);
                oracle.unpin(block);
            }
            10 => {
                let mut evicting = Vec::new();
                oracle.take_returned();
                catalog.evict(TIER, 1, &mut evicting);
                let victim = evicting.first().map(|block| number(&block.identity()));
                oracle.check(&catalog, victim, seed, step);
                victims += 1;
                if random.draw(2) == 0 {
                    assert_eq!(catalog.finish(&mut evicting), usize::from(victim.is_some()));
                    victim.into_iter().for_each(|victim| oracle.take_out(victim));
                } else if let Some(victim) = victim {
                    drop(evicting);
                    // The block was evicted and put back: its parent is no candidate again, it is the newest.
                    let block = oracle.blocks[&victim].clone();
                    oracle.take_out(victim);
                    block.parent.into_iter().for_each(|parent| oracle.unlink(parent));
                    oracle.blocks.insert(victim, block);
                    oracle.link(victim, false);
                }
            }
            11 if random.draw(8) == 0 => {
                oracle.take_returned();
                let there = oracle.blocks.contains_key(&recent);
                assert_eq!(catalog.remove(TIER, &identity(recent)), there);
                if there {
                    oracle.take_out(recent);
                    // The leases on it go on, and the oracle forgets them.
                    leases.retain(|(block, _)| *block != recent);
                }
            }
            _ => {
                // Leases are given up, lest everything be in use.
                for (block, lease) in leases.drain(leases.len() / 2..) {
                    drop(lease);
                    oracle.unpin(block);
                }
            }
        }
        oracle.park_pinned();
        assert_eq!(catalog.contains(&identity(recent)), oracle.blocks.contains_key(&recent));
        if step % 500 == 0 {
            oracle.take_returned();
            catalog.debug_check();
        }
    }
    assert!(victims > STEPS / 10, "{victims} victims are too few to tell");
    drop(leases);
    catalog.debug_check();
}

#[test]
fn lru_evicts_what_the_oracle_says() {
    for seed in 1..=3 {
        run(PolicyKind::Lru, 48, seed);
    }
    // More slots than ticks in a turnover: several blocks share a tick.
    run(PolicyKind::Lru, 300, 4);
}

#[test]
fn s3_fifo_evicts_what_the_oracle_says() {
    for seed in 11..=13 {
        run(PolicyKind::S3Fifo, 48, seed);
    }
}

/// At most 16 candidates: the sample is everything, and the choice exact.
#[test]
fn cost_evicts_what_the_oracle_says() {
    for seed in 21..=23 {
        run(PolicyKind::Cost, 16, seed);
    }
}
