//! Approximate request counts of blocks, in half a byte per counter: the frequency sketch of TinyLFU.
//!
//! A count-min sketch of four rows with 4-bit counters that age (Einziger, Friedman, Manes: "TinyLFU: A Highly
//! Efficient Cache Admission Policy", 2017). All four counters of a block lie in one cache line (a blocked
//! sketch), so that counting costs one line. Ageing halves one line at a time, in turn, so that each line is
//! halved once per [`FrequencySketch::window`] counts and no call pays for the whole table.
//!
//! Any thread; no lock, no allocation. A count that loses a race twice is dropped: the sketch is approximate.

use kvstore_block::BlockIdentity;

use crate::index::hash;
use crate::sync::{AtomicU64, Ordering};

const WORDS: usize = 8;
const COUNTER_MAX: u64 = 15;
/// Counts per entry until everything was halved once.
const WINDOW_PER_ENTRY: u64 = 10;
/// Entries per line: 16 counters of 4 rows each.
const ENTRIES_PER_LINE: u64 = 8;
const HALF: u64 = 0x7777_7777_7777_7777;

#[derive(Debug)]
#[repr(align(64))]
struct Line([AtomicU64; WORDS]);

/// Approximate, ageing counts.
#[derive(Debug)]
pub struct FrequencySketch {
    lines: Box<[Line]>,
    counted: AtomicU64,
    /// Counts between two halvings of a line.
    step: u64,
}

impl FrequencySketch {
    /// A sketch for `entries` distinct blocks: 8 bytes for each.
    #[must_use]
    pub fn new(entries: u32) -> Self {
        let lines = u64::from(entries).div_ceil(ENTRIES_PER_LINE).max(1);
        let line = || Line(std::array::from_fn(|_| AtomicU64::new(0)));
        let step = (u64::from(entries) * WINDOW_PER_ENTRY / lines).max(1);
        Self { lines: (0..lines).map(|_| line()).collect(), counted: AtomicU64::new(0), step }
    }

    /// Counts until every count was halved once.
    #[must_use]
    pub fn window(&self) -> u64 {
        self.step * self.lines.len() as u64
    }

    /// Size of the counters in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        size_of_val(&*self.lines)
    }

    fn line(&self, hash: u64) -> &[AtomicU64; WORDS] {
        &self.lines[((u128::from(hash) * self.lines.len() as u128) >> 64) as usize].0
    }

    /// Loads the block's line, to have it when it is counted.
    pub(crate) fn warm(&self, hash: u64) {
        self.line(hash)[0].load(Ordering::Relaxed);
    }

    /// Word and shift of the counter of each row: a row has two words, 32 counters.
    fn counters(hash: u64) -> [(usize, u32); 4] {
        let mixed = hash.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        std::array::from_fn(|row| {
            let pick = (mixed >> (row * 8)) as u32 & 31;
            (row * 2 + (pick >> 4) as usize, (pick & 15) * 4)
        })
    }

    /// Counts one request.
    pub fn increment(&self, identity: &BlockIdentity) {
        self.increment_hash(hash(identity));
        self.advance(1);
    }

    pub(crate) fn increment_hash(&self, hash: u64) {
        let line = self.line(hash);
        let low = self.estimate_hash(hash);
        if u64::from(low) == COUNTER_MAX {
            return;
        }
        for (word, shift) in Self::counters(hash) {
            let now = line[word].load(Ordering::Relaxed);
            // Only the lowest counters grow (conservative update), which keeps collisions small.
            if (now >> shift) & COUNTER_MAX == u64::from(low) {
                let counted = now + (1 << shift);
                let _lost = line[word].compare_exchange(now, counted, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
    }

    /// Moves the ageing on by `counts`.
    pub(crate) fn advance(&self, counts: u64) {
        let before = self.counted.fetch_add(counts, Ordering::Relaxed);
        for line in before / self.step..(before + counts) / self.step {
            let line = &self.lines[(line % self.lines.len() as u64) as usize].0;
            for word in line {
                let now = word.load(Ordering::Relaxed);
                let _lost =
                    word.compare_exchange(now, (now >> 1) & HALF, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
    }

    /// Recent requests for the block: 0 to 15, never less than the true number within a window that did not
    /// age.
    #[must_use]
    pub fn estimate(&self, identity: &BlockIdentity) -> u8 {
        self.estimate_hash(hash(identity))
    }

    pub(crate) fn estimate_hash(&self, hash: u64) -> u8 {
        let line = self.line(hash);
        let counter =
            |(word, shift): (usize, u32)| (line[word].load(Ordering::Relaxed) >> shift) & COUNTER_MAX;
        Self::counters(hash).map(counter).into_iter().min().unwrap_or(0) as u8
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn identity(number: u64) -> BlockIdentity {
        BlockIdentity(u128::from(number).to_le_bytes())
    }

    #[test]
    fn counts_are_not_too_low_and_seldom_too_high() {
        let sketch = FrequencySketch::new(1000);
        for number in 0..1000 {
            (0..=number % 5).for_each(|_| sketch.increment_hash(hash(&identity(number))));
        }
        let exact = (0..1000).filter(|&number| {
            let (truth, estimate) = ((number % 5 + 1) as u8, sketch.estimate(&identity(number)));
            assert!(estimate >= truth, "block {number}: {estimate} is less than {truth}");
            estimate == truth
        });
        assert!(exact.count() > 900);
        let unseen = (1000..2000).filter(|&number| sketch.estimate(&identity(number)) > 1).count();
        assert!(unseen < 50, "{unseen} blocks never counted look frequent");
    }

    #[test]
    fn counts_age() {
        let sketch = FrequencySketch::new(64);
        (0..100).for_each(|_| sketch.increment(&identity(1)));
        assert_eq!(sketch.estimate(&identity(1)), 15);
        sketch.advance(sketch.window());
        assert_eq!(sketch.estimate(&identity(1)), 7);
        sketch.advance(3 * sketch.window());
        assert_eq!(sketch.estimate(&identity(1)), 0);
    }
}
