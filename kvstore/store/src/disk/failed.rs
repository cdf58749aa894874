//! Blocks whose writes have failed: each is tried again while it is in host memory.
//!
//! They follow each other, one behind each write that the disk takes or fails. After [`IN_A_ROW_MAX`] failures in a row one is tried after a
//! pause, which doubles each time: a disk that is away is asked seldom, and one that fails now and then at most twice as often as without.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use kvstore_block::BlockIdentity;

/// Blocks that may wait; the oldest goes for one more.
const FAILED_MAX: usize = 65_536;
/// Writes that fail one after the other before there is a pause.
const IN_A_ROW_MAX: u32 = 4;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct FailedWrites {
    waiting: VecDeque<BlockIdentity>,
    /// Failures since the disk took a write.
    in_a_row: u32,
    pause: Duration,
    /// When the next one is tried; `None`: no block waits.
    retry_at: Option<Instant>,
}

impl Default for FailedWrites {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), in_a_row: 0, pause: FIRST_PAUSE, retry_at: None }
    }
}

impl FailedWrites {
    /// A write of the block has failed.
    pub(crate) fn push(&mut self, identity: BlockIdentity, now: Instant) {
        if self.waiting.len() >= FAILED_MAX {
            self.waiting.pop_front();
        }
        self.waiting.push_back(identity);
        self.in_a_row = self.in_a_row.saturating_add(1);
        self.retry_at.get_or_insert(now + self.wait());
    }

    /// The disk has taken a write: the block to be tried next.
    pub(crate) fn disk_took_a_write(&mut self, now: Instant) -> Option<BlockIdentity> {
        self.in_a_row = 0;
        self.pause = FIRST_PAUSE;
        self.next(now)
    }

    /// The block to be tried now, once its time has come.
    pub(crate) fn due(&mut self, now: Instant) -> Option<BlockIdentity> {
        self.retry_at.filter(|at| *at <= now)?;
        if self.in_a_row >= IN_A_ROW_MAX {
            self.pause = (self.pause * 2).min(PAUSE_MAX);
        }
        self.next(now)
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.retry_at
    }

    fn next(&mut self, now: Instant) -> Option<BlockIdentity> {
        let next = self.waiting.pop_front();
        self.retry_at = (!self.waiting.is_empty()).then_some(now + self.wait());
        next
    }

    fn wait(&self) -> Duration {
        if self.in_a_row < IN_A_ROW_MAX { Duration::ZERO } else { self.pause }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn identity(number: u8) -> BlockIdentity {
        BlockIdentity([number; 16])
    }

    #[test]
    fn blocks_follow_each_other_until_the_disk_seems_to_be_away() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut failed = FailedWrites::default();
        assert_eq!((failed.next_deadline(), failed.due(at(9))), (None, None));
        (1..=3).for_each(|number| failed.push(identity(number), start));
        assert_eq!(failed.due(start), Some(identity(1)));
        // The fourth failure in a row: the next one waits a second, and the one after it two.
        failed.push(identity(1), start);
        assert_eq!(failed.due(start), Some(identity(2)), "its time had come before");
        failed.push(identity(2), start);
        assert_eq!((failed.due(start), failed.next_deadline()), (None, Some(at(2))));
        assert_eq!(failed.due(at(2)), Some(identity(3)));
        failed.push(identity(3), at(2));
        assert_eq!((failed.due(at(5)), failed.next_deadline()), (None, Some(at(6))));
        // The disk takes a write: the others are next, one behind each.
        let next = [(); 4].map(|()| failed.disk_took_a_write(at(3)));
        assert_eq!(next, [Some(identity(1)), Some(identity(2)), Some(identity(3)), None]);
        assert_eq!(failed.next_deadline(), None);
    }

    #[test]
    fn the_pause_and_the_number_of_blocks_have_bounds() {
        let mut now = Instant::now();
        let mut failed = FailedWrites::default();
        (0..FAILED_MAX + 5).for_each(|number| failed.push(identity(number as u8), now));
        assert_eq!(failed.waiting.len(), FAILED_MAX);
        let mut pauses = Vec::new();
        for _ in 0..9 {
            let at = failed.next_deadline().expect("blocks wait");
            pauses.push((at - now).as_secs());
            now = at;
            assert!(failed.due(now).is_some());
        }
        assert_eq!(pauses, [0, 2, 4, 8, 16, 32, 60, 60, 60]);
    }
}
