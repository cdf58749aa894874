//! Blocks on their way to other nodes that are verified first: no request waits for them, so they take a
//! bounded part of each turn of the thread that also reads. The checksum that goes with a block is the one
//! that it was stored with.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dataplane_memory::PartialChecksum;
use kvstore_block::BlockIdentity;
use kvstore_remote::with_identity;

use super::OfferedBlock;

/// One of the blocks on their way out, whose number is bounded. Relaxed: the count guards no other memory.
pub(super) struct InFlightOffer(Arc<AtomicUsize>);

impl InFlightOffer {
    /// Counts one more, unless there are `max`.
    pub(super) fn one_of(count: &Arc<AtomicUsize>, max: usize) -> Option<Self> {
        let before = count.fetch_add(1, Ordering::Relaxed);
        let counted = Self(Arc::clone(count));
        (before < max).then_some(counted)
    }
}

impl Drop for InFlightOffer {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A block for another node; it stays in host memory until this is dropped.
pub(super) struct Offer {
    pub(super) block: OfferedBlock,
    /// The first block of the group that it belongs to.
    pub(super) group: BlockIdentity,
    /// Counts it until it has arrived.
    pub(super) _counted: InFlightOffer,
}

/// In the order of arrival.
#[derive(Default)]
pub(super) struct OfferQueue {
    waiting: VecDeque<Box<Offer>>,
    /// Checksum of the first waiting block, as far as the block has been read.
    check: PartialChecksum,
}

impl OfferQueue {
    pub(super) fn push(&mut self, offer: Box<Offer>) {
        self.waiting.push_back(offer);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Goes on reading, and takes what it reads off the budget: the next block, with the checksum that other nodes compare with,
    /// or none where it is damaged. `None`: the budget is spent, or nothing waits.
    pub(super) fn advance(&mut self, budget: &mut usize) -> Option<(Box<Offer>, Option<u64>)> {
        let OfferedBlock { identity, block, .. } = &self.waiting.front()?.block;
        let found = self.check.advance(block.slot(), block.len(), budget)?;
        let is_intact = found == block.checksum();
        let checksum = with_identity(found, identity);
        if !is_intact {
            tracing::warn!("host tier: a block is damaged and is not sent to other nodes");
        }
        Some((self.waiting.pop_front()?, is_intact.then_some(checksum)))
    }
}
