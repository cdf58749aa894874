//! Least recently used, to the granularity of the tier's clock.
//!
//! The clock ticks 64 times per turnover of the tier. There is a list for each of the last 128 ticks, and one for
//! all that is older. A block lies in the list of the tick at which it was last seen used; when it comes up for
//! eviction and was used since, it moves to the list of that tick. So the victim is always of the oldest tick that
//! any candidate was last used in. An exact order would need a heap (20 levels of cache misses at a million
//! slots) or a relinking of each block of each look-up.

use super::{End, Policy, PolicyContext};
use crate::list::{List, NONE, Node, ORDER};

const TICKS: u32 = 128;

#[derive(Debug)]
pub(crate) struct Lru {
    recent: [List<ORDER>; TICKS as usize],
    /// Bit per list of `recent` that is not empty.
    occupied: u128,
    older: List<ORDER>,
    clock: u32,
}

impl Lru {
    pub(crate) fn new() -> Self {
        Self { recent: [List::EMPTY; TICKS as usize], occupied: 0, older: List::EMPTY, clock: 0 }
    }

    /// Index in `recent` of a tick's list, if the tick is recent.
    fn place(&self, tick: u32) -> Option<usize> {
        (self.clock.wrapping_sub(tick) < TICKS).then_some((tick % TICKS) as usize)
    }

    fn note(&mut self, place: usize) {
        let bit = 1 << place;
        self.occupied = if self.recent[place].len == 0 { self.occupied & !bit } else { self.occupied | bit };
    }

    fn oldest(&self) -> u32 {
        if self.older.len > 0 {
            return self.older.oldest;
        }
        // The list after that of the clock is the oldest of the recent ones.
        let first = (self.clock + 1) % TICKS;
        match self.occupied.rotate_right(first).trailing_zeros() {
            TICKS => NONE,
            after => self.recent[((first + after) % TICKS) as usize].oldest,
        }
    }
}

impl Policy for Lru {
    fn register(&mut self, _field: &mut PolicyContext<'_>, _slot: u32) {}

    fn link(&mut self, field: &mut PolicyContext<'_>, slot: u32, end: End) {
        let tick = field.records[slot as usize].stamp();
        field.nodes[slot as usize].mark = tick;
        let place = self.place(tick);
        let list = place.map_or(&mut self.older, |place| &mut self.recent[place]);
        match end {
            End::Oldest => list.push_oldest(field.nodes, slot),
            End::Newest => list.push_newest(field.nodes, slot),
        }
        place.into_iter().for_each(|place| self.note(place));
    }

    fn unlink(&mut self, field: &mut PolicyContext<'_>, slot: u32) {
        let place = self.place(field.nodes[slot as usize].mark);
        let list = place.map_or(&mut self.older, |place| &mut self.recent[place]);
        list.remove(field.nodes, slot);
        place.into_iter().for_each(|place| self.note(place));
    }

    fn next(&mut self, field: &mut PolicyContext<'_>) -> Option<u32> {
        loop {
            let slot = Some(self.oldest()).filter(|&slot| slot != NONE)?;
            let (listed, used) = (field.nodes[slot as usize].mark, field.records[slot as usize].stamp());
            // A block moves to a later tick only, and no tick is later than the clock: this ends.
            if self.clock.wrapping_sub(used) >= self.clock.wrapping_sub(listed) {
                return Some(slot);
            }
            self.unlink(field, slot);
            self.link(field, slot, End::Newest);
        }
    }

    fn leave(&mut self, _field: &mut PolicyContext<'_>, _slot: u32, _evicted: bool) {}

    fn tick(&mut self, field: &mut PolicyContext<'_>) {
        while self.clock != field.clock {
            self.clock = self.clock.wrapping_add(1);
            let place = (self.clock % TICKS) as usize;
            self.older.append(field.nodes, &mut self.recent[place]);
            self.note(place);
        }
    }

    fn candidates(&self, nodes: &[Node]) -> Vec<u32> {
        let lists = std::iter::once(&self.older).chain(&self.recent);
        lists.flat_map(|list| list.iter(nodes)).collect()
    }
}
