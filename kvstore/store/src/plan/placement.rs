//! Spreads the blocks of a growing prefix over the tiers that hold them, so that the last one arrives early.
//!
//! Tiers work in parallel; a tier with n blocks finishes at `start + n × block_s`. A new block goes to the tier
//! that would finish it first. When that makes a tier the last one, a block of it that another tier holds as well
//! moves there, if need be along a chain of tiers (an augmenting path): without this, early blocks that both
//! host and disk hold would occupy the disk that later blocks have no alternative to. Blocks of a tier take
//! equal time, so one path for each new block keeps the last arrival the earliest possible, for every prefix.
//! Only counts per (tier, set of holders) are kept: O(blocks) for a constant number of tiers, and no
//! allocation; which block is whose is decided once, at the end, in long runs.

use crate::plan::tier::{TIERS, Tier, TierSet};

const CLASSES: usize = 1 << TIERS;

/// Cost of loading blocks from a tier.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TierCost {
    /// Seconds until the first block could arrive: latency and the queue in front.
    pub(crate) start_s: f64,
    /// Seconds for each block.
    pub(crate) block_s: f64,
    /// Most blocks to take.
    pub(crate) blocks_max: u32,
}

/// Blocks of each tier, by the set of tiers that hold them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Placement {
    counts: [[u32; CLASSES]; TIERS],
    blocks: [u32; TIERS],
    makespan_s: f64,
}

impl Placement {
    pub(crate) fn new() -> Self {
        Self { counts: [[0; CLASSES]; TIERS], blocks: [0; TIERS], makespan_s: 0.0 }
    }

    /// Seconds until the last block is here.
    #[cfg(test)]
    pub(crate) fn makespan_s(&self) -> f64 {
        self.makespan_s
    }

    /// Blocks from a tier.
    pub(crate) fn blocks(&self, tier: Tier) -> u32 {
        self.blocks[tier.index()]
    }

    /// Adds the next block of the prefix; `false` when no tier can take it, and then nothing has changed.
    pub(crate) fn add(&mut self, costs: &[TierCost; TIERS], holders: TierSet, margin: f64) -> bool {
        let Some((to, finish_s)) = self.earliest(costs, holders, margin) else { return false };
        self.blocks[to] += 1;
        self.counts[to][holders.class()] += 1;
        if finish_s > self.makespan_s {
            self.makespan_s = finish_s;
            self.relieve(costs, to, margin);
        }
        true
    }

    /// The tier that would finish one more block first. A later tier has to win by the margin.
    fn earliest(&self, costs: &[TierCost; TIERS], holders: TierSet, margin: f64) -> Option<(usize, f64)> {
        let mut best: Option<(usize, f64)> = None;
        for tier in Tier::ALL.into_iter().filter(|tier| holders.contains(*tier)) {
            let at = tier.index();
            if self.blocks[at] >= costs[at].blocks_max {
                continue;
            }
            let finish_s = finish_s(&costs[at], self.blocks[at] + 1);
            if best.is_none_or(|(_, least)| finish_s * (1.0 + margin) < least) {
                best = Some((at, finish_s));
            }
        }
        best
    }

    /// Moves one block off the tier that finishes last, along the shortest chain of moves to the tier that then
    /// finishes first.
    fn relieve(&mut self, costs: &[TierCost; TIERS], from: usize, margin: f64) {
        let mut reached_by = [None; TIERS];
        let mut queue = [from; TIERS];
        let (mut next, mut length) = (0, 1);
        while next < length {
            let at = queue[next];
            next += 1;
            for to in self.movable_to(at) {
                if to != from && reached_by[to].is_none() {
                    reached_by[to] = Some(at);
                    queue[length] = to;
                    length += 1;
                }
            }
        }
        let targets = queue[1..length].iter().copied();
        let Some((mut to, finish)) = targets
            .filter(|to| self.blocks[*to] < costs[*to].blocks_max)
            .map(|to| (to, finish_s(&costs[to], self.blocks[to] + 1)))
            .min_by(|one, other| one.1.total_cmp(&other.1))
        else {
            return;
        };
        if finish * (1.0 + margin) >= self.makespan_s {
            return;
        }
        self.blocks[from] -= 1;
        self.blocks[to] += 1;
        while let Some(at) = reached_by[to] {
            let class = (1..CLASSES).find(|class| self.counts[at][*class] > 0 && class >> to & 1 == 1);
            let Some(class) = class else { return };
            self.counts[at][class] -= 1;
            self.counts[to][class] += 1;
            to = at;
        }
        self.makespan_s = (0..TIERS)
            .filter(|at| self.blocks[*at] > 0)
            .map(|at| finish_s(&costs[at], self.blocks[at]))
            .fold(0.0, f64::max);
    }

    /// The tiers that hold some block that is placed on `at`.
    fn movable_to(&self, at: usize) -> impl Iterator<Item = usize> + use<> {
        let placed = (1..CLASSES).filter(|class| self.counts[at][*class] > 0);
        let holders = placed.fold(0, |holders, class| holders | class);
        (0..TIERS).filter(move |to| holders >> to & 1 == 1)
    }

    /// Takes a block for a tier, preferably the one that the block before came from.
    pub(crate) fn take(&mut self, holders: TierSet, before: Option<Tier>) -> Option<Tier> {
        let class = holders.class();
        let tier = before
            .into_iter()
            .chain(Tier::ALL)
            .find(|tier| self.counts[tier.index()].get(class).is_some_and(|count| *count > 0))?;
        self.counts[tier.index()][class] -= 1;
        Some(tier)
    }
}

/// Seconds until the last of so many blocks of a tier is here.
pub(crate) fn finish_s(cost: &TierCost, blocks: u32) -> f64 {
    cost.start_s + f64::from(blocks) * cost.block_s
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::testing::Random;

    fn class_members(class: usize) -> TierSet {
        Tier::ALL.into_iter().filter(|tier| class >> tier.index() & 1 == 1).collect()
    }

    /// The least makespan over every assignment, by recursion.
    fn brute(costs: &[TierCost; TIERS], chain: &[TierSet], blocks: &mut [u32; TIERS]) -> f64 {
        let Some((holders, rest)) = chain.split_first() else {
            return Tier::ALL
                .into_iter()
                .filter(|tier| blocks[tier.index()] > 0)
                .map(|tier| finish_s(&costs[tier.index()], blocks[tier.index()]))
                .fold(0.0, f64::max);
        };
        let mut least = f64::INFINITY;
        for tier in Tier::ALL.into_iter().filter(|tier| holders.contains(*tier)) {
            blocks[tier.index()] += 1;
            least = least.min(brute(costs, rest, blocks));
            blocks[tier.index()] -= 1;
        }
        least
    }

    #[test]
    fn every_prefix_is_spread_as_well_as_by_brute_force() {
        let seed = 31;
        println!("seed {seed}");
        let mut random = Random::new(seed);
        let mut worst = 1.0_f64;
        for _ in 0..400 {
            let costs = std::array::from_fn(|_| TierCost {
                start_s: random.uniform(),
                block_s: 0.02 + random.uniform(),
                blocks_max: u32::MAX,
            });
            let chain: Vec<TierSet> =
                (0..8).map(|_| class_members(1 + (random.uniform() * 14.99) as usize)).collect();
            let mut placement = Placement::new();
            for (at, holders) in chain.iter().enumerate() {
                assert!(placement.add(&costs, *holders, 0.0));
                let ratio = placement.makespan_s() / brute(&costs, &chain[..=at], &mut [0; TIERS]);
                worst = worst.max(ratio);
            }
        }
        println!("makespan against brute force: worst {worst:.6}");
        assert!(worst < 1.0 + 1e-9, "worst {worst}");
    }

    #[test]
    fn flexible_blocks_make_room_for_those_without_a_choice() {
        let cost = TierCost { start_s: 0.0, block_s: 1.0, blocks_max: u32::MAX };
        let both = TierSet::EMPTY.with(Tier::Host).with(Tier::Disk);
        let disk = TierSet::EMPTY.with(Tier::Disk);
        let mut placement = Placement::new();
        for holders in [[both; 50], [disk; 50]].concat() {
            assert!(placement.add(&[cost; TIERS], holders, 0.0));
        }
        assert_eq!(placement.makespan_s(), 50.0);
        assert_eq!((placement.blocks(Tier::Host), placement.blocks(Tier::Disk)), (50, 50));
        assert!(!placement.add(&[cost; TIERS], TierSet::EMPTY, 0.0));
        assert!(!placement.add(&[TierCost { blocks_max: 50, ..cost }; TIERS], both, 0.0));
    }
}
