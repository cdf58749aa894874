//! Frequency of recent requests for a group: a count-min sketch whose counters are halved at the end of each
//! window.
//!
//! Within a window an estimate is never too low; it is too high when groups collide in all rows, which
//! costs a needless replica. Four rows; the memory is fixed.

use std::time::{Duration, Instant};

use kvstore_block::BlockIdentity;

const ROWS: usize = 4;

#[derive(Debug)]
pub(crate) struct Sketch {
    counters: Box<[u8]>,
    width: usize,
    window: Duration,
    window_end: Instant,
}

impl Sketch {
    /// Returns a sketch with `width` counters in each row.
    pub(crate) fn new(width: usize, window: Duration, now: Instant) -> Self {
        let width = width.max(1);
        Self { counters: vec![0; width * ROWS].into(), width, window, window_end: now + window }
    }

    /// Counts one use; returns the count, this one included.
    pub(crate) fn count(&mut self, group: &BlockIdentity, now: Instant) -> u8 {
        if now >= self.window_end {
            // A whole window has passed without a use after the last one ended: all counts are dropped.
            let shift = if now >= self.window_end + self.window { 8 } else { 1 };
            self.counters.iter_mut().for_each(|counter| *counter = counter.checked_shr(shift).unwrap_or(0));
            self.window_end = now + self.window;
        }
        let least = self.estimate(group).saturating_add(1);
        for row in 0..ROWS {
            let at = self.position(group, row);
            self.counters[at] = self.counters[at].max(least);
        }
        least
    }

    /// Estimated count of a group; never too low within a window.
    pub(crate) fn estimate(&self, group: &BlockIdentity) -> u8 {
        (0..ROWS).map(|row| self.counters[self.position(group, row)]).min().unwrap_or(0)
    }

    /// Position of a group's counter in a row. Identities are uniformly distributed: each row uses 32 other
    /// bits of them.
    fn position(&self, group: &BlockIdentity, row: usize) -> usize {
        let mut word = [0; 4];
        word.copy_from_slice(&group.0[row * 4..row * 4 + 4]);
        row * self.width + u32::from_le_bytes(word) as usize % self.width
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(number: u32) -> BlockIdentity {
        let hash = xxhash_rust::xxh3::xxh3_128(&number.to_le_bytes());
        BlockIdentity(hash.to_le_bytes())
    }

    #[test]
    fn counts_are_never_too_small_and_fade() {
        let start = Instant::now();
        let window = Duration::from_secs(1);
        let mut sketch = Sketch::new(512, window, start);
        for number in 0..200 {
            for time in 1..=number % 7 {
                assert!(u32::from(sketch.count(&group(number), start)) >= time);
            }
        }
        let too_much = (0..200).filter(|&number| u32::from(sketch.estimate(&group(number))) > number % 7);
        assert!(too_much.count() < 10, "few collide in all rows");
        assert_eq!(sketch.count(&group(6), start + window), 4, "six, halved, and one");
        assert_eq!(sketch.count(&group(6), start + window * 4), 1, "long ago does not count");
    }
}
