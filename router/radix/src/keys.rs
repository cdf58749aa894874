//! One member's blocks by the engine's own hash: where each lies in the tree. The writer's alone.
//!
//! An extendible hash table like the one of children, so that it grows a piece at a time and its memory
//! follows its contents. An entry has twelve bytes, and at 37 to 75 % fill a block costs 16 to 32: a general
//! map of u64 to u32 takes 17 an entry at its fill, and doubles all at once. Copy counts would fit nowhere;
//! second copies are rare and live in a map of their own.

/// An engine's own name for a block.
pub type EngineHash = u64;

/// A node's number and a slot in it: 27 and 5 bits. 0 is no place, since the root has no slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place(pub(crate) u32);

impl Place {
    pub(crate) fn new(node: u32, slot: usize) -> Self {
        Self(node << 5 | slot as u32)
    }

    pub(crate) fn node(self) -> u32 {
        self.0 >> 5
    }

    pub(crate) fn slot(self) -> usize {
        self.0 as usize & 31
    }
}

const PIECE: usize = 512;
/// Fill at which a piece is split.
const PIECE_MAX: usize = PIECE * 3 / 4;

/// Low and high half of the key, place; all of it zero when free.
type Entry = [u32; 3];

#[derive(Debug)]
struct Piece {
    depth: u32,
    used: u32,
    entries: Box<[Entry; PIECE]>,
}

/// Bytes of a piece.
pub(crate) const PIECE_BYTES: usize = size_of::<[Entry; PIECE]>() + size_of::<Piece>();

#[derive(Debug, Default)]
pub(crate) struct Keys {
    bits: u32,
    directory: Vec<u32>,
    pieces: Vec<Piece>,
    len: usize,
}

#[inline]
fn spread(key: EngineHash) -> u64 {
    let word = key.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (word ^ word >> 32).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

#[inline]
fn home(spread: u64) -> usize {
    (spread >> 55) as usize
}

fn key_of(entry: Entry) -> EngineHash {
    u64::from(entry[0]) | u64::from(entry[1]) << 32
}

impl Piece {
    fn new(depth: u32) -> Self {
        Self { depth, used: 0, entries: Box::new([[0; 3]; PIECE]) }
    }

    /// Where a key is, or the free entry where it would be.
    #[inline]
    fn position(&self, spread: u64, key: EngineHash) -> (usize, bool) {
        let mut at = home(spread);
        loop {
            let entry = self.entries[at % PIECE];
            if entry[2] == 0 {
                return (at % PIECE, false);
            }
            if key_of(entry) == key {
                return (at % PIECE, true);
            }
            at += 1;
        }
    }

    fn put(&mut self, at: usize, key: EngineHash, place: Place) {
        self.entries[at] = [key as u32, (key >> 32) as u32, place.0];
    }

    /// Frees an entry and moves later ones up, so that no probe ends early.
    fn free(&mut self, mut hole: usize) {
        self.used -= 1;
        let mut at = hole;
        loop {
            at = (at + 1) % PIECE;
            let entry = self.entries[at];
            if entry[2] == 0 {
                break;
            }
            let wanted = home(spread(key_of(entry)));
            // It may move up unless its home lies between the hole and where it is.
            if (at + PIECE - wanted) % PIECE >= (at + PIECE - hole) % PIECE {
                self.entries[hole] = entry;
                hole = at;
            }
        }
        self.entries[hole] = [0; 3];
    }
}

impl Keys {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn bytes(&self) -> usize {
        self.pieces.len() * PIECE_BYTES + self.directory.capacity() * 4
    }

    #[inline]
    fn piece_at(&self, spread: u64) -> Option<usize> {
        let index = spread as usize & ((1 << self.bits) - 1);
        self.directory.get(index).map(|&piece| piece as usize)
    }

    pub(crate) fn find(&self, key: EngineHash) -> Option<Place> {
        let spread = spread(key);
        let piece = &self.pieces[self.piece_at(spread)?];
        let (at, found) = piece.position(spread, key);
        found.then(|| Place(piece.entries[at][2]))
    }

    /// Starts to load what a look-up of this key will need.
    #[inline]
    pub(crate) fn prefetch(&self, key: EngineHash) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let spread = spread(key);
            if let Some(piece) = self.piece_at(spread) {
                let at = &raw const self.pieces[piece].entries[home(spread)];
                // SAFETY: a prefetch reads nothing architecturally; any address will do.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>()) };
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = key;
    }

    /// Stores a key's place; returns the one that it had.
    pub(crate) fn insert(&mut self, key: EngineHash, place: Place) -> Option<Place> {
        let spread = spread(key);
        loop {
            let Some(at) = self.piece_at(spread) else {
                self.pieces.push(Piece::new(0));
                self.directory.push(0);
                continue;
            };
            let piece = &mut self.pieces[at];
            let (entry, found) = piece.position(spread, key);
            if found {
                let before = Place(piece.entries[entry][2]);
                piece.put(entry, key, place);
                return Some(before);
            }
            if (piece.used as usize) < PIECE_MAX {
                piece.put(entry, key, place);
                piece.used += 1;
                self.len += 1;
                return None;
            }
            self.split(at);
        }
    }

    /// Removes a key if `wanted` says so of its place, with one probe; returns the place in any case.
    pub(crate) fn remove_if(&mut self, key: EngineHash, wanted: impl FnOnce(Place) -> bool) -> Option<Place> {
        let spread = spread(key);
        let at = self.piece_at(spread)?;
        let piece = &mut self.pieces[at];
        let (entry, found) = piece.position(spread, key);
        if !found {
            return None;
        }
        let place = Place(piece.entries[entry][2]);
        if !wanted(place) {
            return Some(place);
        }
        piece.free(entry);
        self.len -= 1;
        let used = piece.used as usize;
        if self.len == 0 {
            *self = Self::default();
        } else if used <= PIECE / 4 && used.is_multiple_of(32) {
            self.merge(at, spread);
        }
        Some(place)
    }

    pub(crate) fn remove(&mut self, key: EngineHash) -> Option<Place> {
        self.remove_if(key, |_| true)
    }

    fn split(&mut self, at: usize) {
        let depth = self.pieces[at].depth;
        if depth == self.bits {
            self.directory.extend_from_within(..);
            self.bits += 1;
        }
        let new = self.pieces.len();
        self.pieces.push(Piece::new(depth + 1));
        let old = std::mem::replace(&mut self.pieces[at], Piece::new(depth + 1));
        for index in 0..self.directory.len() {
            if self.directory[index] as usize == at && index >> depth & 1 == 1 {
                self.directory[index] = new as u32;
            }
        }
        for &entry in old.entries.iter().filter(|entry| entry[2] != 0) {
            let key = key_of(entry);
            let spread = spread(key);
            let piece = &mut self.pieces[if spread >> depth & 1 == 1 { new } else { at }];
            let (free, _) = piece.position(spread, key);
            piece.entries[free] = entry;
            piece.used += 1;
        }
    }

    /// Gives a piece's entries to its sibling, if that is as deep and both fit half a piece.
    fn merge(&mut self, at: usize, spread_key: u64) {
        let depth = self.pieces[at].depth;
        if depth == 0 {
            return;
        }
        let index = spread_key as usize & ((1 << self.bits) - 1);
        let sibling = self.directory[index ^ 1 << (depth - 1)] as usize;
        let both = self.pieces[at].used + self.pieces[sibling].used;
        if self.pieces[sibling].depth != depth || both as usize > PIECE / 2 {
            return;
        }
        let old = std::mem::replace(&mut self.pieces[at], Piece::new(depth));
        let into = &mut self.pieces[sibling];
        into.depth -= 1;
        into.used = both;
        for &entry in old.entries.iter().filter(|entry| entry[2] != 0) {
            let key = key_of(entry);
            let (free, _) = into.position(spread(key), key);
            into.entries[free] = entry;
        }
        self.pieces.swap_remove(at);
        let moved = self.pieces.len() as u32;
        for piece in &mut self.directory {
            if *piece as usize == at {
                *piece = sibling as u32;
            }
            // The last piece took the number of the one that is gone.
            if *piece == moved {
                *piece = at as u32;
            }
        }
        while self.bits > 0 && self.pieces.iter().all(|piece| piece.depth < self.bits) {
            self.bits -= 1;
            self.directory.truncate(1 << self.bits);
            self.directory.shrink_to_fit();
        }
    }

    /// Takes a piece out with everything in it, for a member that is being forgotten. Look-ups are over by then.
    pub(crate) fn take_piece(&mut self) -> Option<Vec<(EngineHash, Place)>> {
        self.directory = Vec::new();
        let piece = self.pieces.pop()?;
        let used = piece.entries.iter().filter(|entry| entry[2] != 0);
        Some(used.map(|&entry| (key_of(entry), Place(entry[2]))).collect())
    }

    /// Every key and its place.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (EngineHash, Place)> {
        let entries = self.pieces.iter().flat_map(|piece| piece.entries.iter());
        entries.filter(|entry| entry[2] != 0).map(|&entry| (key_of(entry), Place(entry[2])))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn random_operations_agree_with_a_map() {
        let mut random = 11_u64;
        let mut next = move || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        let (mut keys, mut model) = (Keys::default(), HashMap::new());
        let mut largest = 0;
        for step in 0..600_000_u32 {
            // Grows for a while, shrinks for a while.
            let grows = (step / 100_000) % 2 == 0;
            let key = next() % 60_000;
            if next() % 10 < if grows { 8 } else { 1 } {
                let place = Place((next() as u32).max(1));
                assert_eq!(keys.insert(key, place).map(|place| place.0), model.insert(key, place.0));
            } else {
                assert_eq!(keys.remove(key).map(|place| place.0), model.remove(&key));
            }
            assert_eq!(keys.len(), model.len());
            let key = next() % 60_000;
            assert_eq!(keys.find(key).map(|place| place.0), model.get(&key).copied());
            largest = largest.max(keys.bytes());
        }
        let mut listed: Vec<(u64, u32)> = keys.iter().map(|(key, place)| (key, place.0)).collect();
        let mut expected: Vec<(u64, u32)> = model.iter().map(|(&key, &place)| (key, place)).collect();
        listed.sort_unstable();
        expected.sort_unstable();
        assert_eq!(listed, expected);
        for (key, _) in listed {
            keys.remove(key);
        }
        assert_eq!((keys.len(), keys.bytes()), (0, 0), "all memory is back, {largest} bytes at most");
    }
}
