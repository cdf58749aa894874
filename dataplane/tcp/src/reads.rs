//! Reads that this node has requested from a peer on one lane: the target and the missing bytes of each.
//!
//! A read completes when all of its bytes have landed *and* the peer has confirmed for all of them that their
//! slot kept its generation while they were gathered. Read numbers on the wire contain a generation of 16
//! bits.

use dataplane_memory::SlotRef;

use crate::extent::Extent;

#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) id: u64,
    /// Keeps the target slot.
    pub(crate) slot: SlotRef,
    pub(crate) into: Extent,
    promised: u32,
    landed: u32,
    verified: u32,
}

#[derive(Debug, Default)]
struct Entry {
    generation: u16,
    read: Option<Read>,
}

#[derive(Debug)]
pub(crate) struct Reads {
    entries: Box<[Entry]>,
    free: Vec<u16>,
}

impl Reads {
    pub(crate) fn new(capacity: usize) -> Self {
        assert!(capacity <= usize::from(u16::MAX), "{capacity} reads");
        let entries = (0..capacity).map(|_| Entry::default()).collect();
        Self { entries, free: (0..capacity as u16).rev().collect() }
    }

    pub(crate) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Registers a read and returns its number on the wire; `None` when the table is full.
    pub(crate) fn begin(&mut self, id: u64, slot: SlotRef, into: Extent) -> Option<u32> {
        let index = self.free.pop()?;
        let entry = &mut self.entries[usize::from(index)];
        entry.read = Some(Read { id, slot, into, promised: 0, landed: 0, verified: 0 });
        Some(u32::from(entry.generation) << 16 | u32::from(index))
    }

    pub(crate) fn get(&self, number: u32) -> Option<&Read> {
        let entry = self.entries.get(number as usize & 0xFFFF)?;
        entry.read.as_ref().filter(|_| u32::from(entry.generation) == number >> 16)
    }

    fn get_mut(&mut self, number: u32) -> Option<&mut Read> {
        let entry = self.entries.get_mut(number as usize & 0xFFFF)?;
        entry.read.as_mut().filter(|_| u32::from(entry.generation) == number >> 16)
    }

    /// Whether `len` bytes from byte `at` on are part of the read `number`.
    pub(crate) fn expects(&self, number: u32, at: u32, len: u32) -> bool {
        let end = at.checked_add(len);
        self.get(number).is_some_and(|read| end.is_some_and(|end| end <= read.into.len))
    }

    /// Records that `len` bytes are about to arrive. A byte must not arrive twice.
    pub(crate) fn promise(&mut self, number: u32, len: u32) -> Result<(), &'static str> {
        let read = self.get_mut(number).ok_or("a response with an unknown read number")?;
        read.promised = read.promised.checked_add(len).ok_or("more bytes than were asked for")?;
        if read.promised > read.into.len { Err("more bytes than were asked for") } else { Ok(()) }
    }

    /// Records that `len` bytes have landed. Returns the read once it is complete.
    pub(crate) fn land(&mut self, number: u32, len: u32) -> Option<Read> {
        self.get_mut(number)?.landed += len;
        self.take_complete(number)
    }

    /// Records that the peer has verified `len` bytes. Returns the read once it is complete.
    pub(crate) fn verify(&mut self, number: u32, len: u32) -> Result<Option<Read>, &'static str> {
        let read = self.get_mut(number).ok_or("a verification with an unknown read number")?;
        read.verified = read.verified.checked_add(len).ok_or("more bytes verified than asked for")?;
        if read.verified > read.into.len {
            return Err("more bytes verified than asked for");
        }
        Ok(self.take_complete(number))
    }

    fn take_complete(&mut self, number: u32) -> Option<Read> {
        let entry = self.entries.get_mut(number as usize & 0xFFFF)?;
        let is_complete = |read: &mut Read| read.landed == read.into.len && read.verified == read.into.len;
        let read = entry.read.take_if(is_complete)?;
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(number as u16);
        Some(read)
    }

    /// Removes and returns all reads.
    pub(crate) fn abandon(&mut self) -> impl Iterator<Item = Read> {
        self.entries.iter_mut().filter_map(|entry| entry.read.take())
    }
}

#[cfg(test)]
mod tests {
    use dataplane_fabric::testing::pool;

    use super::*;

    #[test]
    fn a_read_ends_when_all_bytes_are_here_and_vouched_for() {
        let pool = pool("reads");
        let mut reads = Reads::new(1);
        let into = Extent::new(0, 0, 100, None).expect("extent");
        let number = reads.begin(7, pool.acquire().expect("slot"), into).expect("room");
        assert!(reads.begin(8, pool.acquire().expect("slot"), into).is_none(), "capacity is a bound");
        assert!(reads.expects(number, 60, 40) && !reads.expects(number, 60, 41));
        assert!(!reads.expects(number, u32::MAX, 2) && !reads.expects(number ^ 1 << 16, 0, 1));
        assert_eq!(reads.promise(number, 100), Ok(()));
        assert!(reads.promise(number, 1).is_err());
        assert!(reads.verify(number, 60).expect("in range").is_none());
        assert!(reads.verify(number, 41).is_err());
        drop(reads);
        let mut reads = Reads::new(1);
        let number = reads.begin(7, pool.acquire().expect("slot"), into).expect("room");
        assert!(reads.land(number, 60).is_none());
        assert!(reads.verify(number, 100).expect("in range").is_none());
        assert_eq!(reads.land(number, 40).map(|read| read.id), Some(7));
        assert!(reads.get(number).is_none(), "the number is stale");
        assert!(reads.has_room());
        assert_eq!(pool.used_count(), 0);
    }
}
