//! Reads from the disk that are under way, and who waits for them.

use std::collections::{HashMap, HashSet};

use kvstore_block::BlockIdentity;

/// Somebody who waits for a block that is being read: the load's number, and which block of it.
pub(crate) type Waiter = (u64, usize);

/// A read that is under way.
#[derive(Debug)]
struct Reading {
    /// Its number: one that was given up may still be answered, when there is another of the same block.
    number: u64,
    waiters: Vec<Waiter>,
}

/// Blocks on their way from the disk into host memory.
#[derive(Debug, Default)]
pub(crate) struct Reads {
    reading: HashMap<BlockIdentity, Reading>,
    next: u64,
    /// Reads whose blocks were forgotten meanwhile.
    forgotten: HashSet<u64>,
}

impl Reads {
    pub(crate) fn is_empty(&self) -> bool {
        self.reading.is_empty()
    }

    /// Waits for a read that is under way; false when there is none of the block.
    pub(crate) fn join(&mut self, identity: &BlockIdentity, waiter: Waiter) -> bool {
        let Some(reading) = self.reading.get_mut(identity) else { return false };
        reading.waiters.push(waiter);
        true
    }

    /// A number for a new read.
    pub(crate) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    pub(crate) fn begin(&mut self, number: u64, identity: BlockIdentity, waiter: Waiter) {
        self.reading.insert(identity, Reading { number, waiters: vec![waiter] });
    }

    /// A read has been answered. One that was given up has no waiters any more, though a newer one of the block may have.
    pub(crate) fn end(&mut self, number: u64, identity: &BlockIdentity) -> Vec<Waiter> {
        let is_known = self.reading.get(identity).is_some_and(|reading| reading.number == number);
        if is_known { self.give_up(identity) } else { Vec::new() }
    }

    /// The device does not answer: those who wait go on without the block.
    pub(crate) fn give_up(&mut self, identity: &BlockIdentity) -> Vec<Waiter> {
        self.reading.remove(identity).map_or_else(Vec::new, |reading| reading.waiters)
    }

    /// What is being read is not wanted any more.
    pub(crate) fn forget(&mut self, identity: &BlockIdentity) {
        if let Some(reading) = self.reading.get(identity) {
            self.forgotten.insert(reading.number);
        }
    }

    /// Whether the read's block was forgotten while it was under way.
    pub(crate) fn take_forgotten(&mut self, number: u64) -> bool {
        self.forgotten.remove(&number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: BlockIdentity = BlockIdentity([7; 16]);

    #[test]
    fn the_answer_to_a_read_that_was_given_up_is_nobodys() {
        let mut reads = Reads::default();
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
        let mut reads = Reads::default();
        reads.forget(&BLOCK);
        let (old, new) = (reads.number(), reads.number());
        reads.begin(old, BLOCK, (1, 0));
        reads.forget(&BLOCK);
        reads.give_up(&BLOCK);
        reads.begin(new, BLOCK, (2, 0));
        assert!(reads.take_forgotten(old) && !reads.take_forgotten(old) && !reads.take_forgotten(new));
    }
}
