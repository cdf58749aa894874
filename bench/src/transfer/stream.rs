//! A window of batches, kept full. Hot path: for one-sided operations no allocation, no lock.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::args::Op;
use super::node::Node;
use super::piece::Piece;
use super::places::{Shape, shuffled};

/// Amount of data to move, and its operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) op: Op,
    pub(super) shape: Shape,
    /// Pieces of a batch; the last is signalled.
    pub(super) batch: u32,
    /// Batches in flight.
    pub(super) depth: u32,
    /// Number of batches in all.
    pub(super) batches: u64,
}

impl Plan {
    /// Returns the plan with the wanted batch and depth, reduced to the memory of both sides.
    pub(super) fn fitting(op: Op, shape: Shape, (batch, depth): (u32, u32), capacity: u32) -> Self {
        let pieces = batch.saturating_mul(depth).min(capacity).max(1);
        let depth = depth.min(pieces).max(1);
        Self { op, shape, batch: batch.min(pieces / depth).max(1), depth, batches: 0 }
    }

    /// Most pieces in flight, each with its own place.
    pub(super) fn window(&self) -> u32 {
        self.batch.saturating_mul(self.depth)
    }

    pub(super) fn batch_bytes(&self) -> u64 {
        u64::from(self.batch) * u64::from(self.shape.bytes)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.batch_bytes() * self.batches
    }

    fn piece(&self, batch: u64, index: u32) -> Piece {
        let local = (batch % u64::from(self.depth)) as u32 * self.batch + index;
        let last = index + 1 == self.batch;
        Piece {
            op: self.op,
            shape: self.shape,
            local,
            remote: shuffled(local, self.window()),
            immediate: (last && self.op == Op::WriteImm).then_some(batch as u32),
            signalled: last,
        }
    }
}

/// A plan in progress.
#[derive(Debug)]
pub(super) struct Stream {
    plan: Plan,
    posted_batches: u64,
    next_piece: u32,
    completed_before: u64,
}

impl Stream {
    pub(super) fn new(plan: Plan, node: &Node) -> Self {
        Self { plan, posted_batches: 0, next_piece: 0, completed_before: node.completed }
    }

    /// Posts as many pieces as there is room for; `true` once all have completed.
    pub(super) fn pump(&mut self, node: &mut Node) -> Result<bool> {
        let completed = node.completed - self.completed_before;
        while self.posted_batches < self.plan.batches
            && self.posted_batches - completed < u64::from(self.plan.depth)
        {
            let rail = (self.posted_batches % node.rail_count() as u64) as usize;
            while self.next_piece < self.plan.batch {
                let piece = self.plan.piece(self.posted_batches, self.next_piece);
                if !node.post(rail, piece)? {
                    node.flush(rail);
                    return Ok(false);
                }
                self.next_piece += 1;
            }
            node.flush(rail);
            self.next_piece = 0;
            self.posted_batches += 1;
        }
        Ok(completed >= self.plan.batches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_shrink_to_the_memory() {
        let shape = Shape::new(64, None).expect("shape");
        for (batch, depth, capacity, expected) in [
            (64, 2, 1000, (64, 2)),
            (64, 2, 128, (64, 2)),
            (64, 2, 100, (50, 2)),
            (64, 4, 8, (2, 4)),
            (64, 4, 3, (1, 3)),
            (1, 1, 1, (1, 1)),
            (64, 1, 2, (2, 1)),
        ] {
            let plan = Plan::fitting(Op::Write, shape, (batch, depth), capacity);
            assert_eq!((plan.batch, plan.depth), expected, "{batch} x {depth} in {capacity}");
            assert!(plan.window() <= capacity);
        }
    }

    #[test]
    fn batches_in_flight_share_no_piece_and_end_with_their_immediate() {
        let shape = Shape::new(64, None).expect("shape");
        let plan = Plan { op: Op::WriteImm, shape, batch: 5, depth: 3, batches: 100 };
        let mut met = std::collections::HashSet::new();
        for batch in 41..44 {
            for index in 0..5 {
                let piece = plan.piece(batch, index);
                assert!(met.insert((true, piece.local)) && met.insert((false, piece.remote)));
                assert_eq!(piece.immediate, (index == 4).then_some(batch as u32));
                assert_eq!(piece.signalled, index == 4);
            }
        }
    }
}
