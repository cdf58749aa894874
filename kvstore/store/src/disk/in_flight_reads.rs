//! Reads from the disk that are under way, and the loads that wait for them.

use std::collections::{HashMap, HashSet};

use kvstore_block::BlockIdentity;
use kvstore_disk::ReadCheck;

use crate::fault_injection::{Planted, is_planted};

/// A load that waits for a block: its number, and the block's place in it.
pub(crate) type Waiter = (u64, usize);

/// A read that the device is expected to answer.
#[derive(Debug)]
struct InFlightRead {
    /// A read that was given up may be answered while another read of the same block is under way: numbers tell them apart.
    number: u64,
    waiters: Vec<Waiter>,
}

/// Blocks on their way from the disk into host memory.
#[derive(Debug, Default)]
pub(crate) struct InFlightReads {
    answering: HashMap<BlockIdentity, InFlightRead>,
    /// Reads that the device has not answered in their time. Answers may still come.
    stuck: HashSet<u64>,
    /// Reads whose blocks were forgotten since they began.
    forgotten: HashSet<u64>,
    /// Blocks of the disk whose copies in host memory were found damaged: the log verifies the next read of each.
    verify_next: HashSet<BlockIdentity>,
    next: u64,
}

impl InFlightReads {
    /// Whether the device is expected to answer none.
    pub(crate) fn is_empty(&self) -> bool {
        self.answering.is_empty()
    }

    /// All reads, those that the device does not answer among them.
    pub(crate) fn len(&self) -> usize {
        self.answering.len() + self.stuck.len()
    }

    /// Waits for a read that is under way; false when there is none of the block.
    pub(crate) fn join(&mut self, identity: &BlockIdentity, waiter: Waiter) -> bool {
        let Some(read) = self.answering.get_mut(identity) else { return false };
        if !is_planted(Planted::LostWaiter) {
            read.waiters.push(waiter);
        }
        true
    }

    /// A number for a new read.
    pub(crate) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// The side that verifies a read of the block that begins now.
    pub(crate) fn check(&self, identity: &BlockIdentity) -> ReadCheck {
        if self.verify_next.contains(identity) { ReadCheck::Log } else { ReadCheck::Caller }
    }

    /// The block's copy in host memory was damaged, and the disk's may be.
    pub(crate) fn verify_next(&mut self, identity: BlockIdentity) {
        self.verify_next.insert(identity);
    }

    /// The disk does not have the block any more.
    pub(crate) fn gone_from_disk(&mut self, identity: &BlockIdentity) {
        self.verify_next.remove(identity);
    }

    pub(crate) fn begin(&mut self, number: u64, identity: BlockIdentity, waiter: Waiter) {
        self.verify_next.remove(&identity);
        let other = self.answering.insert(identity, InFlightRead { number, waiters: vec![waiter] });
        assert!(other.is_none(), "a load joins the read of a block that is under way: {other:?}");
    }

    /// A read has been answered. Returns the loads that wait for it: none when it was given up, although loads may wait for a
    /// newer read of the block.
    pub(crate) fn end(&mut self, number: u64, identity: &BlockIdentity) -> Vec<Waiter> {
        if self.stuck.remove(&number) {
            return Vec::new();
        }
        let read = self.answering.remove(identity).expect("a read that is answered is under way");
        assert_eq!(read.number, number, "the read that is under way is the one that is answered");
        read.waiters
    }

    /// The device has not answered in its time: the loads that wait go on without the block.
    pub(crate) fn give_up(&mut self, identity: &BlockIdentity) -> Vec<Waiter> {
        let Some(read) = self.answering.remove(identity) else { return Vec::new() };
        self.stuck.insert(read.number);
        read.waiters
    }

    /// The block is not wanted any more.
    pub(crate) fn forget(&mut self, identity: &BlockIdentity) {
        if let Some(read) = self.answering.get(identity) {
            self.forgotten.insert(read.number);
        }
    }

    /// Whether the read's block was forgotten while it was under way. To be asked once, at its end.
    pub(crate) fn take_forgotten(&mut self, number: u64) -> bool {
        self.forgotten.remove(&number)
    }

    /// The loads that wait, for the model test.
    #[cfg(test)]
    pub(crate) fn waiters(&self) -> impl Iterator<Item = (&BlockIdentity, &Waiter)> {
        self.answering
            .iter()
            .flat_map(|(identity, read)| read.waiters.iter().map(move |waiter| (identity, waiter)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: BlockIdentity = BlockIdentity([7; 16]);

    #[test]
    fn the_answer_to_a_read_that_was_given_up_is_nobodys() {
        let mut reads = InFlightReads::default();
        assert!(!reads.join(&BLOCK, (1, 0)), "none is under way");
        let (old, new) = (reads.number(), reads.number());
        reads.begin(old, BLOCK, (1, 0));
        assert_eq!(reads.give_up(&BLOCK), [(1, 0)]);
        reads.begin(new, BLOCK, (2, 0));
        assert!(reads.join(&BLOCK, (3, 1)));
        assert_eq!(reads.end(old, &BLOCK), []);
        assert_eq!(reads.end(new, &BLOCK), [(2, 0), (3, 1)]);
        assert!(reads.is_empty());
    }

    #[test]
    fn a_block_is_forgotten_by_the_read_that_was_under_way_and_no_other() {
        let mut reads = InFlightReads::default();
        reads.forget(&BLOCK);
        let (old, new) = (reads.number(), reads.number());
        reads.begin(old, BLOCK, (1, 0));
        reads.forget(&BLOCK);
        reads.give_up(&BLOCK);
        reads.begin(new, BLOCK, (2, 0));
        assert!(reads.take_forgotten(old) && !reads.take_forgotten(old) && !reads.take_forgotten(new));
    }
}
