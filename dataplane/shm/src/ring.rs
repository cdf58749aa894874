//! Single-producer, single-consumer rings of records in shared memory, one for each priority.
//!
//! The producer is another process, which may be faulty or hostile: the consumer reads each position and
//! each header once, into its own memory, checks the copy and then uses only the copy, so that a later
//! change has no effect. Positions are 64-bit byte counts that never wrap in practice; the difference of
//! head and tail is the filled part.
//!
//! Layout: a cache line of heads (written by the consumer), a cache line of tails (written by the
//! producer), then the data of either ring. Both tails share a line so that checking an idle connection
//! reads one line. A record is a header word (upper half: kind; lower half: the length, or the value of an
//! immediate) and the bytes of a message, padded to 8.
//!
//! Hot path; no system call, one allocation for each message received.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use dataplane_fabric::{MESSAGE_BYTES_MAX, Priority};
use dataplane_memory::{PageSize, Slab, SlabLayout};

use crate::ShmError;
use crate::config::{RING_BYTES_MAX, RING_BYTES_MIN};

const LANES: usize = Priority::ALL.len();
const HEADER_BYTES: usize = 8;
const KIND_MESSAGE: u32 = 1;
const KIND_IMMEDIATE: u32 = 2;

const HEADS_AT: usize = 0;
const TAILS_AT: usize = 64;
const CONTROL_BYTES: usize = 128;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Record {
    Message(Box<[u8]>),
    Immediate(u32),
}

fn record_bytes(len: usize) -> usize {
    (HEADER_BYTES + len).next_multiple_of(8)
}

/// The mapping of the rings of one direction.
#[derive(Debug)]
struct Memory {
    slab: Slab,
    /// Data bytes of one ring; a power of two.
    ring_bytes: usize,
}

impl Memory {
    #[inline]
    fn cell(&self, at: usize) -> &AtomicU64 {
        debug_assert!(at.is_multiple_of(8), "the cell at {at}");
        let cell = self.slab.address(0, at, 8).cast::<AtomicU64>();
        // SAFETY: the address is inside the mapping, 8-byte aligned (slot start plus a multiple of 8), lives as
        // long as `self`, and both processes access control words and headers atomically only.
        unsafe { cell.as_ref() }
    }

    #[inline]
    fn head(&self, lane: usize) -> &AtomicU64 {
        self.cell(HEADS_AT + lane * 8)
    }

    #[inline]
    fn tail(&self, lane: usize) -> &AtomicU64 {
        self.cell(TAILS_AT + lane * 8)
    }

    /// Offset of a position in the slot. Positions are multiples of 8 on either side by construction.
    #[inline]
    fn at(&self, lane: usize, position: u64) -> usize {
        CONTROL_BYTES + lane * self.ring_bytes + (position as usize & (self.ring_bytes - 1))
    }

    fn copy_in(&self, lane: usize, position: u64, bytes: &[u8]) {
        let at = self.at(lane, position);
        let first = bytes.len().min(self.at(lane, 0) + self.ring_bytes - at);
        self.slab.write(0, at, &bytes[..first]);
        if first < bytes.len() {
            self.slab.write(0, self.at(lane, 0), &bytes[first..]);
        }
    }

    fn copy_out(&self, lane: usize, position: u64, bytes: &mut [u8]) {
        let at = self.at(lane, position);
        let first = bytes.len().min(self.at(lane, 0) + self.ring_bytes - at);
        let (head, rest) = bytes.split_at_mut(first);
        self.slab.read(0, at, head);
        if !rest.is_empty() {
            self.slab.read(0, self.at(lane, 0), rest);
        }
    }
}

/// The consumer's end, which creates the rings.
#[derive(Debug)]
pub(crate) struct Inbound {
    memory: Memory,
    own: [u64; LANES],
    /// The heads last published to the producer.
    released: [u64; LANES],
    /// Tails that the producer had published when its socket closed: nothing beyond them is read.
    end: Option<[u64; LANES]>,
}

impl Inbound {
    pub(crate) fn create(ring_bytes: usize) -> Result<Self, ShmError> {
        let layout = SlabLayout { slot_bytes: CONTROL_BYTES + LANES * ring_bytes, slot_count: 1 };
        let slab = Slab::create("kvasir-ring", layout, PageSize::Standard)?;
        Ok(Self { memory: Memory { slab, ring_bytes }, own: [0; LANES], released: [0; LANES], end: None })
    }

    pub(crate) fn memory(&self) -> BorrowedFd<'_> {
        self.memory.slab.memory()
    }

    #[inline]
    fn filled(&self, lane: usize) -> u64 {
        let tail = match self.end {
            Some(end) => end[lane],
            // Acquire: pairs with the release in `publish`.
            None => self.memory.tail(lane).load(Ordering::Acquire),
        };
        tail.wrapping_sub(self.own[lane])
    }

    /// Whether neither ring holds a record.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        (0..LANES).all(|lane| self.filled(lane) == 0)
    }

    /// Ends the connection's input: only what the producer has published so far is read.
    pub(crate) fn close(&mut self) {
        if self.end.is_none() {
            self.end = Some(std::array::from_fn(|lane| self.memory.tail(lane).load(Ordering::Acquire)));
        }
    }

    /// Discards all further input, whatever the producer has published.
    pub(crate) fn discard(&mut self) {
        self.end = Some(self.own);
    }

    /// Returns the next record of a lane; an error when the producer wrote an invalid one. Call
    /// [`Self::release`] after the last record of a batch.
    #[inline]
    pub(crate) fn pop(&mut self, lane: usize) -> Result<Option<Record>, &'static str> {
        match self.filled(lane) {
            0 => Ok(None),
            filled => self.pop_filled(lane, filled).map(Some),
        }
    }

    fn pop_filled(&mut self, lane: usize, filled: u64) -> Result<Record, &'static str> {
        if filled > self.memory.ring_bytes as u64 || !filled.is_multiple_of(8) {
            return Err("the positions in the peer's ring are out of range");
        }
        let position = self.own[lane];
        // Relaxed: ordered by the acquire of the tail. Only this copy of the header is used from here on.
        let header = self.memory.cell(self.memory.at(lane, position)).load(Ordering::Relaxed);
        let (kind, low) = ((header >> 32) as u32, header as u32);
        match kind {
            KIND_IMMEDIATE => {
                self.own[lane] += HEADER_BYTES as u64;
                Ok(Record::Immediate(low))
            }
            KIND_MESSAGE => {
                let len = low as usize;
                if len > MESSAGE_BYTES_MAX || record_bytes(len) as u64 > filled {
                    return Err("a record is longer than what is in its ring");
                }
                let mut message = vec![0; len].into_boxed_slice();
                self.memory.copy_out(lane, position + HEADER_BYTES as u64, &mut message);
                self.own[lane] += record_bytes(len) as u64;
                // Released after a quarter of the ring at the latest, so that long batches free space too.
                if self.own[lane] - self.released[lane] > self.memory.ring_bytes as u64 / 4 {
                    self.release(lane);
                }
                Ok(Record::Message(message))
            }
            _ => Err("an unknown record kind"),
        }
    }

    /// Returns the space of popped records to the producer.
    #[inline]
    pub(crate) fn release(&mut self, lane: usize) {
        self.released[lane] = self.own[lane];
        // Release: pairs with the producer's acquire of the head in `has_room`.
        self.memory.head(lane).store(self.own[lane], Ordering::Release);
    }
}

/// The producer's end.
#[derive(Debug)]
pub(crate) struct Outbound {
    memory: Memory,
    own: [u64; LANES],
    published: [u64; LANES],
    /// The consumer's heads at the last check.
    heads: [u64; LANES],
}

impl Outbound {
    /// Attaches a peer's rings; their size is the peer's choice within the limits.
    pub(crate) fn attach(memory: OwnedFd) -> Result<Self, ShmError> {
        let slab = Slab::attach(memory)?;
        let ring_bytes = slab.layout().slot_bytes.saturating_sub(CONTROL_BYTES) / LANES;
        let fits = CONTROL_BYTES + LANES * ring_bytes == slab.layout().slot_bytes;
        if !fits || !ring_bytes.is_power_of_two() || !(RING_BYTES_MIN..=RING_BYTES_MAX).contains(&ring_bytes)
        {
            return Err(ShmError::Handshake("its rings have an impossible size"));
        }
        let memory = Memory { slab, ring_bytes };
        Ok(Self { memory, own: [0; LANES], published: [0; LANES], heads: [0; LANES] })
    }

    /// Whether a record with `len` bytes fits now. An invalid head counts as a full ring.
    #[inline]
    pub(crate) fn has_room(&mut self, lane: usize, len: usize) -> bool {
        let room =
            |head: u64| (self.memory.ring_bytes as u64).saturating_sub(self.own[lane].wrapping_sub(head));
        let needed = record_bytes(len) as u64;
        if room(self.heads[lane]) >= needed {
            return true;
        }
        // Acquire: pairs with the consumer's release of the head, so that its reads are over before the
        // space is overwritten.
        let head = self.memory.head(lane).load(Ordering::Acquire);
        let fits = room(head) >= needed;
        self.heads[lane] = head;
        fits
    }

    /// Writes the header; the caller has checked `has_room`.
    #[inline]
    fn push_header(&mut self, lane: usize, kind: u32, low: u32) {
        let header = u64::from(kind) << 32 | u64::from(low);
        // Relaxed: published by the release of the tail.
        self.memory.cell(self.memory.at(lane, self.own[lane])).store(header, Ordering::Relaxed);
    }

    pub(crate) fn push_message(&mut self, lane: usize, message: &[u8]) -> bool {
        if !self.has_room(lane, message.len()) {
            return false;
        }
        self.push_header(lane, KIND_MESSAGE, message.len() as u32);
        self.memory.copy_in(lane, self.own[lane] + HEADER_BYTES as u64, message);
        self.own[lane] += record_bytes(message.len()) as u64;
        true
    }

    #[inline]
    pub(crate) fn push_immediate(&mut self, lane: usize, value: u32) -> bool {
        if !self.has_room(lane, 0) {
            return false;
        }
        self.push_header(lane, KIND_IMMEDIATE, value);
        self.own[lane] += HEADER_BYTES as u64;
        true
    }

    /// Publishes the pushed records to the consumer; returns true when there were some, and the doorbell
    /// must be rung.
    pub(crate) fn publish(&mut self) -> bool {
        let mut any = false;
        for lane in 0..LANES {
            if self.published[lane] != self.own[lane] {
                // Release: pairs with the consumer's acquire of the tail; records and slot writes come first.
                self.memory.tail(lane).store(self.own[lane], Ordering::Release);
                self.published[lane] = self.own[lane];
                any = true;
            }
        }
        any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends() -> (Outbound, Inbound) {
        let consumer = Inbound::create(RING_BYTES_MIN).expect("ring");
        let fd = rustix::io::dup(consumer.memory()).expect("dup");
        (Outbound::attach(fd).expect("attach"), consumer)
    }

    fn message(len: usize, fill: u8) -> Record {
        Record::Message(vec![fill; len].into_boxed_slice())
    }

    #[test]
    fn records_survive_the_wrap_on_both_lanes() {
        let (mut producer, mut consumer) = ends();
        for round in 0..4_000_u32 {
            let (lane, len) = (round as usize % 2, round as usize * 37 % 3000);
            assert!(producer.push_message(lane, &vec![round as u8; len]));
            assert!(producer.push_immediate(1 - lane, round));
            assert!(producer.publish() && !producer.publish());
            assert_eq!(consumer.pop(lane), Ok(Some(message(len, round as u8))));
            assert_eq!(consumer.pop(1 - lane), Ok(Some(Record::Immediate(round))));
            assert_eq!((consumer.pop(0), consumer.pop(1)), (Ok(None), Ok(None)));
            consumer.release(0);
            consumer.release(1);
        }
    }

    #[test]
    fn a_full_lane_refuses_and_recovers_and_leaves_the_other_alone() {
        let (mut producer, mut consumer) = ends();
        let mut pushed = 0;
        while producer.push_message(1, &[7; 1000]) {
            pushed += 1;
        }
        assert_eq!(pushed, RING_BYTES_MIN / record_bytes(1000));
        assert!(producer.push_immediate(0, 5), "the urgent lane is not full");
        producer.publish();
        assert_eq!(consumer.pop(1), Ok(Some(message(1000, 7))));
        consumer.release(1);
        assert!(producer.push_message(1, &[7; 1000]), "room for one again");
        assert!(!producer.push_message(1, &[7; 1000]));
    }

    #[test]
    fn what_is_published_after_the_end_is_not_read() {
        let (mut producer, mut consumer) = ends();
        producer.push_immediate(0, 1);
        producer.publish();
        consumer.close();
        producer.push_immediate(0, 2);
        producer.publish();
        consumer.close();
        assert_eq!(consumer.pop(0), Ok(Some(Record::Immediate(1))));
        assert!(consumer.is_empty());
    }

    #[test]
    fn nonsense_from_the_producer_is_reported() {
        let header = |kind: u32, low: u32| u64::from(kind) << 32 | u64::from(low);
        let cases = [
            (header(KIND_MESSAGE, u32::MAX), 64),
            (header(KIND_MESSAGE, 57), 64),
            (header(KIND_MESSAGE, MESSAGE_BYTES_MAX as u32 + 1), RING_BYTES_MIN as u64),
            (header(9, 0), 64),
            (header(KIND_IMMEDIATE, 0), u64::MAX / 2),
            (header(KIND_IMMEDIATE, 0), RING_BYTES_MIN as u64 + 8),
            (header(KIND_IMMEDIATE, 0), 3),
        ];
        for (word, tail) in cases {
            let (mut producer, mut consumer) = ends();
            producer.memory.cell(producer.memory.at(0, 0)).store(word, Ordering::Relaxed);
            producer.own[0] = tail;
            producer.publish();
            assert!(consumer.pop(0).is_err(), "{word:#x} {tail}");
        }
    }

    #[test]
    fn nonsense_from_the_consumer_is_a_full_ring() {
        let (mut producer, consumer) = ends();
        while producer.push_message(0, &[1; 60_000]) {}
        for head in [u64::MAX, u64::MAX / 2, 1 << 40] {
            consumer.memory.head(0).store(head, Ordering::Release);
            assert!(!producer.push_message(0, &[1; 60_000]), "{head:#x}");
        }
    }
}
