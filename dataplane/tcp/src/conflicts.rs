//! Conflict detection between writes in flight: two writes of the same bytes of the peer must not use
//! different connections, because their order would be lost.
//!
//! Counters by granule of a slot, hashed into a table. A false conflict costs a write its choice of
//! connection and nothing else. A write of more than [`GRANULES_MAX`] granules conflicts with every other
//! write while it is in flight. Only lanes of several connections have a table. Per write: a few counters, no
//! allocation.

use crate::wire::Header;

/// Size of a granule, as a power of two of bytes.
const GRANULE_BITS: u32 = 16;
const COUNTERS: usize = 4096;
/// Largest number of granules of a write that is counted by granule.
const GRANULES_MAX: u64 = 64;

#[derive(Default)]
pub(crate) struct Conflicts {
    counters: Box<[u32]>,
    wide: u32,
    narrow: u32,
}

impl Conflicts {
    pub(crate) fn new() -> Self {
        Self { counters: vec![0; COUNTERS].into_boxed_slice(), wide: 0, narrow: 0 }
    }

    /// Whether a write may touch the bytes of a write in flight.
    pub(crate) fn has(&self, header: &Header) -> bool {
        match granules(header) {
            _ if self.wide > 0 => true,
            Some(mut places) => places.any(|place| self.counters[place] > 0),
            None => self.narrow > 0,
        }
    }

    /// Adds a write that is in flight.
    pub(crate) fn add(&mut self, header: &Header) {
        match granules(header) {
            Some(places) => {
                self.narrow += 1;
                places.for_each(|place| self.counters[place] += 1);
            }
            None => self.wide += 1,
        }
    }

    /// Removes a write that has landed.
    pub(crate) fn remove(&mut self, header: &Header) {
        match granules(header) {
            Some(places) => {
                self.narrow -= 1;
                places.for_each(|place| self.counters[place] -= 1);
            }
            None => self.wide -= 1,
        }
    }
}

/// Returns the counter positions of a write; `None` when there are too many. Empty for other frames.
fn granules(header: &Header) -> Option<impl Iterator<Item = usize>> {
    let Header::Write { len, target, rows, .. } = *header else {
        return Some(0..0).map(|range| places(0, range));
    };
    let span = match rows {
        Some(rows) if rows.bytes > 0 => u64::from(len / rows.bytes) * u64::from(rows.stride.max(rows.bytes)),
        _ => u64::from(len),
    };
    let first = u64::from(target.offset) >> GRANULE_BITS;
    let last = (u64::from(target.offset) + span.max(1) - 1) >> GRANULE_BITS;
    (last - first < GRANULES_MAX).then(|| places(target.slot, first..last + 1))
}

fn places(slot: u32, granules: std::ops::Range<u64>) -> impl Iterator<Item = usize> {
    let spread =
        move |granule: u64| (u64::from(slot) << 20 ^ granule).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 52;
    granules.map(move |granule| spread(granule) as usize)
}

#[cfg(test)]
mod tests {
    use dataplane_fabric::Target;
    use dataplane_memory::SlabKind;

    use super::*;
    use crate::wire::RowShape;

    fn write(slot: u32, offset: u32, len: u32, rows: Option<RowShape>) -> Header {
        Header::Write {
            len,
            target: Target { slab: SlabKind::Host, slot, generation: 0, offset },
            rows,
            immediate: None,
        }
    }

    #[test]
    fn overlapping_writes_conflict_and_others_hardly_ever_do() {
        let mut conflicts = Conflicts::new();
        let rows = Some(RowShape { bytes: 1024, stride: 65_536 });
        let wide = write(1, 0, 100 << 20, None);
        conflicts.add(&write(3, 1 << 20, 1 << 20, None));
        for (other, expected) in [
            (write(3, (1 << 20) - 1, 1, None), false),
            (write(3, (1 << 20) - 1, 2, None), true),
            (write(3, (2 << 20) - 1, 1, None), true),
            (write(3, 2 << 20, 1 << 20, None), false),
            (write(4, 1 << 20, 1 << 20, None), false),
            (write(3, 0, 20 << 10, rows), true),
            (wide, true),
            (Header::Immediate { value: 1 }, false),
        ] {
            assert_eq!(conflicts.has(&other), expected, "{other:?}");
        }
        conflicts.add(&wide);
        conflicts.remove(&write(3, 1 << 20, 1 << 20, None));
        assert!(conflicts.has(&write(9, 0, 1, None)), "a wide one conflicts with everything");
        conflicts.remove(&wide);
        assert!(!conflicts.has(&write(3, 1 << 20, 1 << 20, None)) && !conflicts.has(&wide));
    }
}
