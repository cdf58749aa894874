//! S3-FIFO: Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1.
//!
//! New blocks enter the small queue (a tenth of the tier), those that were evicted lately the main queue. At the
//! old end of the small queue a block that was used more than once moves to the main queue, any other goes and
//! is remembered. At the old end of the main queue a block that was used gets another round for one use.
//!
//! A queue counts all its blocks, those with children too, though only candidates are linked.

use super::ghost::Ghost;
use super::{End, Policy, PolicyContext};
use crate::list::{List, NONE, Node, ORDER};

const SMALL: u32 = 0;
const MAIN: u32 = 1;
/// The paper's share: one in ten.
const SMALL_SHARE: u32 = 10;
/// A block gets at most three rounds for its uses; more than this in one call means that readers add some.
const ROUNDS_MAX: u32 = 5;

#[derive(Debug)]
pub(crate) struct S3Fifo {
    queues: [List<ORDER>; 2],
    small_blocks: u32,
    small_target: u32,
    ghost: Ghost,
}

impl S3Fifo {
    pub(crate) fn new(slots: u32) -> Self {
        let small_target = (slots / SMALL_SHARE).max(1);
        Self {
            queues: [List::EMPTY; 2],
            small_blocks: 0,
            small_target,
            ghost: Ghost::new(slots - small_target.min(slots - 1)),
        }
    }

    fn move_to_main(&mut self, field: &mut PolicyContext<'_>, slot: u32) {
        self.unlink(field, slot);
        if field.nodes[slot as usize].mark == SMALL {
            self.small_blocks -= 1;
        }
        field.nodes[slot as usize].mark = MAIN;
        self.link(field, slot, End::Newest);
    }
}

impl Policy for S3Fifo {
    fn register(&mut self, field: &mut PolicyContext<'_>, slot: u32) {
        let remembered = self.ghost.take(field.records[slot as usize].halves());
        field.nodes[slot as usize].mark = if remembered { MAIN } else { SMALL };
        self.small_blocks += u32::from(!remembered);
    }

    fn link(&mut self, field: &mut PolicyContext<'_>, slot: u32, end: End) {
        let queue = &mut self.queues[field.nodes[slot as usize].mark as usize];
        match end {
            End::Oldest => queue.push_oldest(field.nodes, slot),
            End::Newest => queue.push_newest(field.nodes, slot),
        }
    }

    fn unlink(&mut self, field: &mut PolicyContext<'_>, slot: u32) {
        self.queues[field.nodes[slot as usize].mark as usize].remove(field.nodes, slot);
    }

    fn next(&mut self, field: &mut PolicyContext<'_>) -> Option<u32> {
        let [small, main] = self.queues;
        for _ in 0..(small.len + main.len).saturating_mul(ROUNDS_MAX) {
            let [small, main] = self.queues;
            let from_small = main.len == 0 || (small.len > 0 && self.small_blocks >= self.small_target);
            let slot = if from_small { small.oldest } else { main.oldest };
            let record = &field.records[slot as usize];
            match (from_small, record.uses()) {
                (true, 0 | 1) | (false, 0) => return Some(slot),
                (true, _) => record.set_uses(0),
                (false, uses) => record.set_uses(uses - 1),
            }
            self.move_to_main(field, slot);
        }
        // Readers used everything faster than it came round.
        let [small, main] = self.queues;
        [main.oldest, small.oldest].into_iter().find(|&slot| slot != NONE)
    }

    fn leave(&mut self, field: &mut PolicyContext<'_>, slot: u32, evicted: bool) {
        if field.nodes[slot as usize].mark == SMALL {
            self.small_blocks -= 1;
            if evicted {
                self.ghost.insert(field.records[slot as usize].halves());
            }
        }
    }

    fn candidates(&self, nodes: &[Node]) -> Vec<u32> {
        self.queues.iter().flat_map(|queue| queue.iter(nodes)).collect()
    }
}
