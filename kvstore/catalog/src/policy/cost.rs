//! Evicts the cheapest block to lose: recompute seconds saved per byte × recent number of requests for the
//! block.
//!
//! The frequency comes from an ageing sketch, so a block's worth changes without anybody touching it, and any
//! order kept in lists would be stale (what was hot once would never be looked at again). Hence sampling, as in
//! Redis' approximated LRU: each eviction looks at a random candidate, each block is looked at when it becomes a
//! candidate, and the 16 cheapest seen so far stay in a pool across evictions. The cheapest of the pool goes, after
//! a worth that is not fresh was computed anew. With at most 16 candidates all are looked at, and the choice is
//! exact. Among equals the least recently used goes.

use super::{End, Policy, PolicyContext};
use crate::index::hash_halves;
use crate::list::{NONE, Node};

const POOL: usize = 16;
const SAMPLES: usize = 1;
/// Maximum age of a computed value, in evictions.
const FRESH: u32 = 64;

#[derive(Debug, Clone, Copy)]
struct Sampled {
    worth: f32,
    idle: u32,
    slot: u32,
    generation: u32,
    /// Number of the eviction before which it was looked at.
    at: u32,
}

impl Sampled {
    fn cheaper(&self, other: &Self) -> bool {
        (self.worth, std::cmp::Reverse(self.idle)) < (other.worth, std::cmp::Reverse(other.idle))
    }
}

#[derive(Debug)]
pub(crate) struct Cost {
    /// Candidates, in no order; a node's mark is its position here.
    candidates: Vec<u32>,
    /// The cheapest last.
    pool: Vec<Sampled>,
    random: fastrand::Rng,
    evictions: u32,
}

impl Cost {
    pub(crate) fn new(slots: u32, seed: u64) -> Self {
        // Written, not only reserved: the page faults are taken now.
        let mut candidates = vec![NONE; slots as usize];
        candidates.clear();
        Self {
            candidates,
            pool: Vec::with_capacity(POOL + 1),
            random: fastrand::Rng::with_seed(seed),
            evictions: 0,
        }
    }

    fn sample(&self, field: &PolicyContext<'_>, slot: u32) -> Sampled {
        let record = &field.records[slot as usize];
        let asked = field.sketch.map_or(0, |sketch| sketch.estimate_hash(hash_halves(record.halves())));
        Sampled {
            // Once more than counted: a block that was never asked for still costs its recompute time.
            worth: field.nodes[slot as usize].density * (f32::from(asked) + 1.0),
            idle: field.clock.wrapping_sub(record.stamp()),
            slot,
            generation: record.generation(),
            at: self.evictions,
        }
    }

    fn offer(&mut self, sampled: Sampled) {
        // A slot is in the pool once, under what it holds now.
        if let Some(at) = self.pool.iter().position(|other| other.slot == sampled.slot) {
            self.pool.remove(at);
        }
        let at = self.pool.partition_point(|other| !other.cheaper(&sampled));
        if self.pool.len() < POOL {
            self.pool.insert(at, sampled);
        } else if at > 0 {
            // The dearest makes room.
            self.pool.copy_within(1..at, 0);
            self.pool[at - 1] = sampled;
        }
    }

    fn draw(&mut self) -> u32 {
        self.candidates[self.random.usize(..self.candidates.len())]
    }

    fn fill(&mut self, field: &PolicyContext<'_>) {
        if self.candidates.len() <= POOL {
            self.pool.clear();
            for at in 0..self.candidates.len() {
                self.offer(self.sample(field, self.candidates[at]));
            }
            return;
        }
        for _ in 0..SAMPLES {
            let slot = self.draw();
            if !self.pool.iter().any(|other| other.slot == slot) {
                self.offer(self.sample(field, slot));
            }
        }
    }

    fn is_candidate(&self, field: &PolicyContext<'_>, sampled: &Sampled) -> bool {
        let mark = field.nodes[sampled.slot as usize].mark as usize;
        self.candidates.get(mark) == Some(&sampled.slot)
            && field.records[sampled.slot as usize].generation() == sampled.generation
    }
}

impl Policy for Cost {
    fn register(&mut self, field: &mut PolicyContext<'_>, slot: u32) {
        field.nodes[slot as usize].mark = NONE;
    }

    fn link(&mut self, field: &mut PolicyContext<'_>, slot: u32, _end: End) {
        field.nodes[slot as usize].mark = self.candidates.len() as u32;
        self.candidates.push(slot);
        // A new block is the likeliest to be asked for once only, and a parent whose last child went is likely
        // to be as cheap as that was: no need to wait until a sample finds them.
        if self.candidates.len() > POOL {
            self.offer(self.sample(field, slot));
        }
    }

    fn unlink(&mut self, field: &mut PolicyContext<'_>, slot: u32) {
        let at = field.nodes[slot as usize].mark as usize;
        self.candidates.swap_remove(at);
        if let Some(&moved) = self.candidates.get(at) {
            field.nodes[moved as usize].mark = at as u32;
        }
        field.nodes[slot as usize].mark = NONE;
    }

    fn next(&mut self, field: &mut PolicyContext<'_>) -> Option<u32> {
        self.evictions = self.evictions.wrapping_add(1);
        self.fill(field);
        loop {
            // Nothing in the pool: all that was sampled is gone or in use.
            let Some(cheapest) = self.pool.pop() else { return self.candidates.first().copied() };
            if !self.is_candidate(field, &cheapest) {
                continue;
            }
            if self.evictions.wrapping_sub(cheapest.at) < FRESH {
                return Some(cheapest.slot);
            }
            let now = self.sample(field, cheapest.slot);
            match self.pool.last() {
                // Asked for since it was sampled: it is offered again at its present worth, so this ends.
                Some(second) if now.worth > cheapest.worth && second.cheaper(&now) => self.offer(now),
                _ => return Some(cheapest.slot),
            }
        }
    }

    fn leave(&mut self, _field: &mut PolicyContext<'_>, _slot: u32, _evicted: bool) {}

    fn candidates(&self, _nodes: &[Node]) -> Vec<u32> {
        self.candidates.clone()
    }
}
