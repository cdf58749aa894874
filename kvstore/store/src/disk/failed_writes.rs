//! Write-through blocks whose writes have failed: each is written again while it is in host memory, one at a time.
//!
//! The next retry begins when the one before has ended. After [`IN_A_ROW_MAX`] consecutive failures there is a pause before each, which
//! doubles up to [`PAUSE_MAX`]; a write that succeeds ends the pauses. New blocks are written meanwhile. Used by the store's thread alone.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use kvstore_block::BlockIdentity;

/// Writes that fail one after the other before there is a pause.
const IN_A_ROW_MAX: u32 = 4;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct FailedWrites {
    waiting: VecDeque<BlockIdentity>,
    /// The same blocks, and the one that is tried.
    known: HashSet<BlockIdentity>,
    /// Blocks that may wait; the oldest goes for one more.
    blocks_max: usize,
    trying: Option<BlockIdentity>,
    /// Failures since the disk took a write.
    in_a_row: u32,
    pause: Duration,
    /// When the next one is tried; `None`: no block waits, or one is being tried.
    retry_at: Option<Instant>,
}

impl FailedWrites {
    /// At most as many blocks can be in host memory.
    pub(crate) fn new(blocks_max: usize) -> Self {
        Self {
            waiting: VecDeque::new(),
            known: HashSet::new(),
            blocks_max: blocks_max.max(1),
            trying: None,
            in_a_row: 0,
            pause: FIRST_PAUSE,
            retry_at: None,
        }
    }

    /// A write of the block has failed. `is_wanted`: it is to be tried again.
    pub(crate) fn failed(&mut self, identity: BlockIdentity, is_wanted: bool, now: Instant) {
        self.in_a_row = self.in_a_row.saturating_add(1);
        let was_tried = self.end_retry(&identity);
        if was_tried && self.in_a_row > IN_A_ROW_MAX {
            self.pause = (self.pause * 2).min(PAUSE_MAX);
        }
        if is_wanted && self.known.insert(identity) {
            if self.waiting.len() >= self.blocks_max
                && let Some(oldest) = self.waiting.pop_front()
            {
                self.known.remove(&oldest);
            }
            self.waiting.push_back(identity);
        }
        self.schedule(now);
    }

    /// The disk has taken a write of the block.
    pub(crate) fn written(&mut self, identity: &BlockIdentity, now: Instant) {
        (self.in_a_row, self.pause) = (0, FIRST_PAUSE);
        self.end_retry(identity);
        self.retry_at = None;
        self.schedule(now);
    }

    /// Returns the block to be tried now, if its time has come; the caller reports the outcome. Blocks that
    /// are not wanted any more are left out.
    pub(crate) fn next(
        &mut self,
        now: Instant,
        is_wanted: impl Fn(&BlockIdentity) -> bool,
    ) -> Option<BlockIdentity> {
        self.retry_at.take_if(|at| *at <= now)?;
        while let Some(identity) = self.waiting.pop_front() {
            if is_wanted(&identity) {
                self.trying = Some(identity);
                return Some(identity);
            }
            self.known.remove(&identity);
        }
        None
    }

    /// The write of the block that was to be tried has not begun; the block waits behind all others.
    pub(crate) fn put_back(&mut self, identity: BlockIdentity, now: Instant) {
        self.trying = None;
        self.waiting.push_back(identity);
        self.retry_at = Some(now + FIRST_PAUSE);
    }

    /// The write of the block will not begin, or is not going to be answered.
    pub(crate) fn give_up(&mut self, identity: &BlockIdentity, now: Instant) {
        self.end_retry(identity);
        self.schedule(now);
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.retry_at
    }

    fn end_retry(&mut self, identity: &BlockIdentity) -> bool {
        let was_tried = self.trying.take_if(|tried| tried == identity).is_some();
        if was_tried {
            self.known.remove(identity);
        }
        was_tried
    }

    fn schedule(&mut self, now: Instant) {
        if self.retry_at.is_none() && self.trying.is_none() && !self.waiting.is_empty() {
            let wait = if self.in_a_row < IN_A_ROW_MAX { Duration::ZERO } else { self.pause };
            self.retry_at = Some(now + wait);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn identity(number: u8) -> BlockIdentity {
        BlockIdentity([number; 16])
    }

    fn next(failed: &mut FailedWrites, now: Instant) -> Option<u8> {
        failed.next(now, |_| true).map(|identity| identity.0[0])
    }

    #[test]
    fn one_follows_the_other_until_the_disk_seems_to_be_away() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut failed = FailedWrites::new(8);
        assert_eq!((failed.next_deadline(), next(&mut failed, at(9))), (None, None));
        (1..=3).for_each(|number| failed.failed(identity(number), true, start));
        assert_eq!((next(&mut failed, start), next(&mut failed, start)), (Some(1), None), "one at a time");
        // The fourth failure in a row: the next one waits a second, and the one after it two.
        failed.failed(identity(1), true, start);
        assert_eq!((next(&mut failed, start), next(&mut failed, at(1))), (None, Some(2)));
        failed.failed(identity(2), true, at(1));
        assert_eq!((next(&mut failed, at(2)), next(&mut failed, at(3))), (None, Some(3)));
        // A write of another block is taken while one is tried: the pauses end, and that one is awaited.
        failed.written(&identity(9), at(3));
        assert_eq!((failed.next_deadline(), next(&mut failed, at(9))), (None, None));
        failed.written(&identity(3), at(4));
        assert_eq!(next(&mut failed, at(4)), Some(1));
        failed.written(&identity(1), at(4));
        assert_eq!(next(&mut failed, at(4)), Some(2));
        failed.written(&identity(2), at(4));
        assert!(failed.next_deadline().is_none() && failed.known.is_empty());
    }

    #[test]
    fn blocks_that_are_gone_cost_no_pause_and_each_waits_once() {
        let now = Instant::now();
        let mut failed = FailedWrites::new(4);
        (1..=6).chain([5, 6]).for_each(|number| failed.failed(identity(number), true, now));
        assert_eq!((failed.waiting.len(), failed.known.len()), (4, 4), "the oldest two are gone");
        failed.failed(identity(7), false, now);
        let later = now + FIRST_PAUSE;
        assert_eq!(failed.next(later, |block| *block == identity(6)), Some(identity(6)));
        failed.failed(identity(6), true, later);
        assert_eq!((failed.waiting.len(), failed.known.len()), (1, 1));
        // A block whose write does not begin waits; a block that is given up does not.
        let later = later + PAUSE_MAX;
        assert_eq!(next(&mut failed, later), Some(6));
        failed.put_back(identity(6), later);
        assert_eq!((next(&mut failed, later), next(&mut failed, later + FIRST_PAUSE)), (None, Some(6)));
        failed.give_up(&identity(6), later);
        assert!(failed.known.is_empty() && failed.next_deadline().is_none());
    }

    #[test]
    fn the_pause_has_a_bound() {
        let mut now = Instant::now();
        let mut failed = FailedWrites::new(8);
        failed.failed(identity(1), true, now);
        let mut pauses = Vec::new();
        for _ in 0..12 {
            let at = failed.next_deadline().expect("a block waits");
            pauses.push((at - now).as_secs());
            now = at;
            assert_eq!(next(&mut failed, now), Some(1));
            failed.failed(identity(1), true, now);
        }
        assert_eq!(pauses, [0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60]);
    }
}
