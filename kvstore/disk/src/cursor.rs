//! Which slot is written next: free slots in address order, next fit.
//!
//! Writes that follow each other go to neighbouring slots, and their records into the same table page. Every free
//! slot gets its turn before any gets a second one, so wear is as even as the evictions allow. Two levels of bits:
//! finding a slot takes a few words even when one of a million is free. Nothing allocates after `new`.

const WORD_BITS: u32 = u64::BITS;

/// Hands out free slots.
#[derive(Debug, Clone)]
pub struct SlotCursor {
    /// A set bit is a free slot.
    free: Vec<u64>,
    /// A set bit is a word of `free` that is not zero.
    summary: Vec<u64>,
    slots: u32,
    free_count: u32,
    next: u32,
}

impl SlotCursor {
    /// All slots are free.
    #[must_use]
    pub fn new(slots: u32) -> Self {
        let words = slots.div_ceil(WORD_BITS);
        let mut cursor = Self {
            free: vec![0; words as usize],
            summary: vec![0; words.div_ceil(WORD_BITS) as usize],
            slots,
            free_count: 0,
            next: 0,
        };
        (0..slots).for_each(|slot| {
            cursor.release(slot);
        });
        cursor
    }

    /// How many slots are free.
    #[must_use]
    pub fn free_count(&self) -> u32 {
        self.free_count
    }

    /// The slot that `next` would take.
    #[must_use]
    pub fn peek(&self) -> Option<u32> {
        self.first_from(self.next).or_else(|| self.first_from(0))
    }

    /// Takes the next free slot, or `None` when all are used.
    #[expect(clippy::should_implement_trait, reason = "slots come back: this is no iterator")]
    pub fn next(&mut self) -> Option<u32> {
        let slot = self.peek()?;
        self.take(slot);
        self.next = if slot + 1 == self.slots { 0 } else { slot + 1 };
        Some(slot)
    }

    /// Takes this slot; whether it was free.
    pub fn take(&mut self, slot: u32) -> bool {
        let (word, bit) = ((slot / WORD_BITS) as usize, 1 << (slot % WORD_BITS));
        if slot >= self.slots || self.free[word] & bit == 0 {
            return false;
        }
        self.free[word] &= !bit;
        if self.free[word] == 0 {
            self.summary[word / 64] &= !(1 << (word % 64));
        }
        self.free_count -= 1;
        true
    }

    /// Gives a slot back; whether it was in use.
    pub fn release(&mut self, slot: u32) -> bool {
        let (word, bit) = ((slot / WORD_BITS) as usize, 1 << (slot % WORD_BITS));
        if slot >= self.slots || self.free[word] & bit != 0 {
            return false;
        }
        self.free[word] |= bit;
        self.summary[word / 64] |= 1 << (word % 64);
        self.free_count += 1;
        true
    }

    fn first_from(&self, slot: u32) -> Option<u32> {
        let word = (slot / WORD_BITS) as usize;
        let here = self.free.get(word)? & (u64::MAX << (slot % WORD_BITS));
        if here != 0 {
            return Some(word as u32 * WORD_BITS + here.trailing_zeros());
        }
        let word = first_set_from(&self.summary, word + 1)?;
        Some(word as u32 * WORD_BITS + self.free[word].trailing_zeros())
    }
}

fn first_set_from(bits: &[u64], from: usize) -> Option<usize> {
    let first = bits.get(from / 64)? & (u64::MAX << (from % 64));
    if first != 0 {
        return Some(from / 64 * 64 + first.trailing_zeros() as usize);
    }
    let rest = bits.iter().enumerate().skip(from / 64 + 1);
    rest.map(|(word, &bits)| (word, bits))
        .find(|&(_, bits)| bits != 0)
        .map(|(word, bits)| word * 64 + bits.trailing_zeros() as usize)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn random_steps_agree_with_a_set() {
        for slots in [1, 63, 64, 65, 4096, 4097, 10_000] {
            let mut cursor = SlotCursor::new(slots);
            let mut oracle: BTreeSet<u32> = (0..slots).collect();
            let (mut next, mut random) = (0, 0x9E37_79B9_7F4A_7C15_u64 ^ u64::from(slots));
            for step in 0..30_000 {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let slot = (random >> 8) as u32 % (slots + 1);
                // Phases that fill and phases that empty it.
                match random % 4 + u64::from(step / 5000 % 2 == 0) {
                    0 => assert_eq!(cursor.take(slot), oracle.remove(&slot)),
                    1 | 2 => assert_eq!(cursor.release(slot), slot < slots && oracle.insert(slot)),
                    _ => {
                        let expected = oracle.range(next..).chain(oracle.iter()).next().copied();
                        assert_eq!(cursor.next(), expected, "{slots} slots, step {step}");
                        if let Some(slot) = expected {
                            oracle.remove(&slot);
                            next = (slot + 1) % slots;
                        }
                    }
                }
                assert_eq!(cursor.free_count() as usize, oracle.len());
            }
        }
    }

    /// Evicting in any order must not wear some slots out: writes per slot stay near their mean.
    #[test]
    fn wear_is_even_under_random_eviction() {
        let (slots, rounds) = (1000_u32, 200);
        let mut cursor = SlotCursor::new(slots);
        let (mut writes, mut used, mut random) = (vec![0_u32; slots as usize], Vec::new(), 42_u64);
        for _ in 0..slots * rounds {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if used.len() as u32 >= slots * 9 / 10 {
                cursor.release(used.swap_remove((random >> 33) as usize % used.len()));
            }
            let slot = cursor.next().expect("a free slot");
            writes[slot as usize] += 1;
            used.push(slot);
        }
        let (least, most) = (writes.iter().min().expect("slots"), writes.iter().max().expect("slots"));
        println!("writes per slot: mean {rounds}, least {least}, most {most}");
        assert!(*least * 2 > rounds && *most < rounds * 2, "{least} to {most}, mean {rounds}");
    }
}
