//! Generation numbers of slots.
//!
//! A peer names a slot together with its generation, and a fabric that checks names obeys the pair. So a
//! generation is a permission as well: it is drawn from a keyed hash (the standard library's `RandomState`
//! over a counter: SipHash-1-3 at present, with keys of the process that the system drew), and a peer that
//! was told of some slots cannot guess the names of others. A guess is right once in 2³² tries, and a wrong
//! one ends the connection. For the same reason a reused slot keeps an old name valid by accident once in
//! 2³² times; moved bytes have a checksum besides.
//!
//! Per draw: one atomic addition and about 10 ns; no lock, no allocation.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Default)]
pub(super) struct Generations {
    keys: RandomState,
    drawn: AtomicU64,
}

impl Generations {
    pub(super) fn draw(&self) -> u32 {
        self.keys.hash_one(self.drawn.fetch_add(1, Ordering::Relaxed)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_rarely_repeat_and_do_not_count_up() {
        let (one, other) = (Generations::default(), Generations::default());
        let drawn: Vec<u32> = (0..1000).map(|_| one.draw()).collect();
        let different: std::collections::HashSet<&u32> = drawn.iter().collect();
        // Two of a thousand are equal in one run of 8,600.
        assert!(different.len() >= 998, "{} of 1000", different.len());
        assert!(drawn.windows(2).filter(|pair| pair[0].wrapping_add(1) == pair[1]).count() < 3);
        let same = drawn.iter().filter(|&&number| number == other.draw()).count();
        assert!(same < 3, "another slab has other keys");
    }
}
