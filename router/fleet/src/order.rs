//! The ranks of a pool by load, kept in order while requests come and go.
//!
//! Load is sorted into classes: exact for small loads, four classes to each power of two beyond. Each class has one bit for
//! every rank. A rank whose load changes is moved with a few atomic operations by the thread that changed it, and only when
//! its class changes; a decision reads the lowest classes until it has seen enough ranks. So the cost of a decision does not
//! grow with the number of ranks, except for one word of 64 bits per 64 ranks in the classes that it reads.
//!
//! Two threads that move one rank at the same time may leave a bit in a class that the rank has left, or no bit at all; the
//! class stored for the rank identifies the first case, and [`LoadOrder::refresh`], called ten times a second, repairs both. A
//! decision that meets such a bit compares real loads, as it does for every rank: the order is a hint, not an account.
//! Everything is relaxed for that reason.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Number of classes of load. The last one is everything from 7 · 2^16 on.
const CLASSES: usize = 72;
/// Loads below this each have a class of their own.
const EXACT: u32 = 8;
/// The class of a rank that takes no requests.
const OUT: u8 = u8::MAX;

/// The order of a pool's ranks by load; see the module's documentation.
#[derive(Debug)]
pub(crate) struct LoadOrder {
    classes: Vec<Box<[AtomicU64]>>,
    /// Number of ranks in each class: empty classes are skipped.
    counts: [AtomicU32; CLASSES],
    class_of: Box<[AtomicU8]>,
}

/// The class of a load.
fn class(load: u32) -> u8 {
    if load < EXACT {
        return load as u8;
    }
    let octave = load.ilog2();
    // The two bits behind the highest one.
    let quarter = load >> (octave - 2) & 3;
    let class = EXACT + (octave - EXACT.ilog2()) * 4 + quarter;
    class.min(CLASSES as u32 - 1) as u8
}

impl LoadOrder {
    /// Returns an order of `ranks` ranks, none of which takes requests yet.
    pub(crate) fn new(ranks: usize) -> Self {
        let words = ranks.div_ceil(64);
        Self {
            classes: (0..CLASSES).map(|_| (0..words).map(|_| AtomicU64::new(0)).collect()).collect(),
            counts: std::array::from_fn(|_| AtomicU32::new(0)),
            class_of: (0..ranks).map(|_| AtomicU8::new(OUT)).collect(),
        }
    }

    /// Sets the load of a rank; `None` when it takes no requests.
    pub(crate) fn put(&self, rank: usize, load: Option<u32>) {
        let Some(class_of) = self.class_of.get(rank) else { return };
        let now = load.map_or(OUT, class);
        if class_of.load(Ordering::Relaxed) == now {
            return;
        }
        let before = class_of.swap(now, Ordering::Relaxed);
        let (word, bit) = (rank / 64, 1_u64 << (rank % 64));
        // Exactly one thread leaves each stored class, so the counts are exact.
        if before != OUT {
            self.counts[usize::from(before)].fetch_sub(1, Ordering::Relaxed);
            self.classes[usize::from(before)][word].fetch_and(!bit, Ordering::Relaxed);
        }
        if now != OUT {
            self.counts[usize::from(now)].fetch_add(1, Ordering::Relaxed);
            self.classes[usize::from(now)][word].fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Passes ranks to `take`, the least loaded first, until it returns false. Among ranks of one class `turn` selects the first
    /// word of 64.
    pub(crate) fn least(&self, turn: usize, mut take: impl FnMut(usize) -> bool) {
        for (number, class) in self.classes.iter().enumerate() {
            if self.counts[number].load(Ordering::Relaxed) == 0 {
                continue;
            }
            let words = class.len();
            for word in (0..words).map(|at| (at + turn) % words) {
                let mut bits = class[word].load(Ordering::Relaxed);
                // Rotated, since starting from the lowest bit would give every request to the first of equal ranks.
                let shift = (turn / words % 64) as u32;
                bits = bits.rotate_right(shift);
                while bits != 0 {
                    let bit = (bits.trailing_zeros() + shift) % 64;
                    bits &= bits - 1;
                    let rank = word * 64 + bit as usize;
                    let is_there = self.class_of[rank].load(Ordering::Relaxed) == number as u8;
                    if is_there && !take(rank) {
                        return;
                    }
                }
            }
        }
    }

    /// Repairs inconsistencies of concurrent moves: afterwards every rank is in its stored class, and in no other.
    pub(crate) fn refresh(&self) {
        for (number, class) in self.classes.iter().enumerate() {
            for (word, cell) in class.iter().enumerate() {
                let bits = cell.load(Ordering::Relaxed);
                let ranks = &self.class_of[word * 64..self.class_of.len().min(word * 64 + 64)];
                let in_class = |of: &AtomicU8| of.load(Ordering::Relaxed) == number as u8;
                let right =
                    ranks.iter().enumerate().fold(0, |right, (at, of)| right | u64::from(in_class(of)) << at);
                if bits & !right != 0 {
                    cell.fetch_and(!(bits & !right), Ordering::Relaxed);
                }
                if right & !bits != 0 {
                    cell.fetch_or(right & !bits, Ordering::Relaxed);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn all(order: &LoadOrder, turn: usize) -> Vec<usize> {
        let mut ranks = Vec::new();
        order.least(turn, |rank| {
            ranks.push(rank);
            true
        });
        ranks
    }

    #[test]
    fn classes_rise_with_the_load_and_are_narrow() {
        let mut before = 0;
        for load in 0..1 << 20 {
            let class = class(load);
            assert!(class == before || class == before + 1, "{load}");
            before = class;
        }
        assert_eq!(usize::from(class(u32::MAX)), CLASSES - 1);
        let first = (0..1 << 20).find(|&load| usize::from(class(load)) == CLASSES - 1);
        assert_eq!(first, Some((1 << 18) + 3 * (1 << 16)), "the last class");
        for load in [100, 1000, 100_000] {
            assert!(class(load + load / 16) <= class(load) + 1, "a sixteenth more is about the same");
            assert!(class(load) < class(load + load / 2));
        }
    }

    /// Random changes against a map of loads: the order is that of the classes, whatever the turn.
    #[test]
    fn the_order_is_that_of_a_map() {
        let mut random = 11_u64;
        let mut next = |bound: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % bound
        };
        let order = LoadOrder::new(300);
        let mut loads: BTreeMap<usize, u32> = BTreeMap::new();
        for step in 0..5000 {
            let rank = next(300) as usize;
            let size = next(20);
            let load = (next(4) > 0).then(|| next(1 << size) as u32);
            order.put(rank, load);
            match load {
                Some(load) => drop(loads.insert(rank, load)),
                None => drop(loads.remove(&rank)),
            }
            if step % 100 == 0 {
                let mut ranks = all(&order, step);
                let classes: Vec<u8> = ranks.iter().map(|rank| class(loads[rank])).collect();
                assert!(classes.is_sorted(), "{classes:?}");
                ranks.sort_unstable();
                assert_eq!(ranks, loads.keys().copied().collect::<Vec<_>>());
            }
        }
        let mut first = Vec::new();
        order.least(0, |rank| {
            first.push(rank);
            first.len() < 5
        });
        assert_eq!(first.len(), 5, "no more than are wanted");
    }

    #[test]
    fn ranks_that_threads_move_at_the_same_time_are_found_after_a_refresh() {
        let order = LoadOrder::new(70);
        std::thread::scope(|scope| {
            for thread in 0..4_u32 {
                let order = &order;
                scope.spawn(move || {
                    for step in 0..50_000_u32 {
                        order.put(
                            ((step * 13 + thread) % 70) as usize,
                            Some((step * 31 + thread * 977) % 5000),
                        );
                        if step % 5000 == 0 {
                            order.refresh();
                        }
                    }
                });
            }
        });
        order.refresh();
        let mut ranks = all(&order, 3);
        ranks.sort_unstable();
        assert_eq!(ranks, (0..70).collect::<Vec<_>>());
    }

    #[test]
    fn equals_are_begun_with_in_turn() {
        let order = LoadOrder::new(256);
        (0..256).for_each(|rank| order.put(rank, Some(0)));
        let firsts: std::collections::HashSet<usize> = (0..256).map(|turn| all(&order, turn)[0]).collect();
        assert!(firsts.len() > 200, "{}", firsts.len());
    }
}
