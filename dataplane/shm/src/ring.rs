//! A single-producer, single-consumer ring of records in shared memory.
//!
//! The producer is another process, which may be buggy: the consumer checks every length before it believes
//! it and reports nonsense instead of reading past the ring. Positions are 64-bit byte counts that never
//! wrap in practice; the difference of the two is what is filled.
//!
//! Sleeping protocol: the consumer sets `sleeping`, then looks at the ring once more; the producer moves the
//! tail, then looks at `sleeping`. Both sides put a `SeqCst` fence between their two steps, so at least one
//! of them sees the other (the store-buffer litmus test), and no wake-up is lost.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use dataplane_memory::{PageSize, Slab, SlabLayout};

use crate::ShmError;

/// Data bytes of a ring: a power of two, several times the largest message.
pub(crate) const RING_BYTES: usize = 512 << 10;
const RECORD_HEADER_BYTES: usize = 8;
const KIND_MESSAGE: u32 = 1;
const KIND_IMMEDIATE: u32 = 2;

/// Slot 0 of the ring's slab: the control words, each on its own cache line.
const CONTROL_BYTES: usize = 256;
const HEAD_AT: usize = 0;
const TAIL_AT: usize = 64;
const SLEEPING_AT: usize = 128;

/// One end of a ring. Which end is decided by which methods are called.
#[derive(Debug)]
pub(crate) struct Ring {
    memory: Slab,
    /// Our own position (head for the consumer, tail for the producer).
    own: u64,
    /// The producer's tail before the last `publish`.
    published: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Record {
    Message(Box<[u8]>),
    Immediate(u32),
}

impl Ring {
    /// A new ring; the creator is its consumer.
    pub(crate) fn create() -> Result<Self, ShmError> {
        let layout = SlabLayout { slot_bytes: CONTROL_BYTES + RING_BYTES, slot_count: 1 };
        Ok(Self { memory: Slab::create("kvasir-ring", layout, PageSize::Standard)?, own: 0, published: 0 })
    }

    /// Attaches a peer's ring, as its producer.
    pub(crate) fn attach(memory: OwnedFd) -> Result<Self, ShmError> {
        let memory = Slab::attach(memory)?;
        if memory.layout().slot_bytes != CONTROL_BYTES + RING_BYTES {
            return Err(ShmError::Handshake("its ring has another size"));
        }
        Ok(Self { memory, own: 0, published: 0 })
    }

    pub(crate) fn memory(&self) -> BorrowedFd<'_> {
        self.memory.memory()
    }

    fn position(&self, at: usize) -> &AtomicU64 {
        let cell = self.memory.address(0, at, 8).cast::<AtomicU64>();
        // SAFETY: the address is inside the mapping, 64-byte aligned (slot start plus a multiple of 64), lives
        // as long as `self`, and both processes access it atomically only.
        unsafe { cell.as_ref() }
    }

    fn sleeping(&self) -> &AtomicU32 {
        let cell = self.memory.address(0, SLEEPING_AT, 4).cast::<AtomicU32>();
        // SAFETY: as in `position`.
        unsafe { cell.as_ref() }
    }

    // --- producer ---

    fn room(&self) -> usize {
        // Acquire: pairs with the consumer's release of `head`, so that its reads are over before we overwrite.
        let head = self.position(HEAD_AT).load(Ordering::Acquire);
        RING_BYTES.saturating_sub(self.own.wrapping_sub(head) as usize)
    }

    /// Whether a message of `len` bytes fits now.
    pub(crate) fn has_room(&self, len: usize) -> bool {
        self.room() >= record_bytes(len)
    }

    pub(crate) fn push_message(&mut self, message: &[u8]) -> bool {
        self.push(KIND_MESSAGE, message)
    }

    pub(crate) fn push_immediate(&mut self, value: u32) -> bool {
        self.push(KIND_IMMEDIATE, &value.to_le_bytes())
    }

    fn push(&mut self, kind: u32, payload: &[u8]) -> bool {
        if !self.has_room(payload.len()) {
            return false;
        }
        let mut header = [0; RECORD_HEADER_BYTES];
        header[..4].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        header[4..].copy_from_slice(&kind.to_le_bytes());
        self.copy_in(self.own, &header);
        self.copy_in(self.own + RECORD_HEADER_BYTES as u64, payload);
        self.own += record_bytes(payload.len()) as u64;
        true
    }

    fn copy_in(&self, position: u64, bytes: &[u8]) {
        let at = position as usize % RING_BYTES;
        let first = bytes.len().min(RING_BYTES - at);
        self.memory.write(0, CONTROL_BYTES + at, &bytes[..first]);
        self.memory.write(0, CONTROL_BYTES, &bytes[first..]);
    }

    /// Shows what was pushed to the consumer; true when it sleeps and must be woken.
    pub(crate) fn publish(&mut self) -> bool {
        if self.published == self.own {
            return false;
        }
        self.published = self.own;
        // Release: pairs with the consumer's acquire of `tail`; records and earlier slot writes come first.
        self.position(TAIL_AT).store(self.own, Ordering::Release);
        fence(Ordering::SeqCst);
        self.sleeping().load(Ordering::Relaxed) == 1 && self.sleeping().swap(0, Ordering::Relaxed) == 1
    }

    // --- consumer ---

    fn filled(&self) -> u64 {
        // Acquire: pairs with the release in `publish`.
        self.position(TAIL_AT).load(Ordering::Acquire).wrapping_sub(self.own)
    }

    /// The next record; an error when the producer wrote nonsense.
    pub(crate) fn pop(&mut self) -> Result<Option<Record>, &'static str> {
        let filled = self.filled();
        if filled == 0 {
            return Ok(None);
        }
        if filled > RING_BYTES as u64 || filled < RECORD_HEADER_BYTES as u64 {
            return Err("its ring positions make no sense");
        }
        let mut header = [0; RECORD_HEADER_BYTES];
        self.copy_out(self.own, &mut header);
        let len = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let kind = u32::from_le_bytes([header[4], header[5], header[6], header[7]]);
        if len > dataplane_fabric::MESSAGE_BYTES_MAX || record_bytes(len) as u64 > filled {
            return Err("a record is longer than what is in its ring");
        }
        let mut payload = vec![0; len].into_boxed_slice();
        self.copy_out(self.own + RECORD_HEADER_BYTES as u64, &mut payload);
        self.own += record_bytes(len) as u64;
        // Release: pairs with the producer's acquire of `head` in `room`.
        self.position(HEAD_AT).store(self.own, Ordering::Release);
        match kind {
            KIND_MESSAGE => Ok(Some(Record::Message(payload))),
            KIND_IMMEDIATE => match <[u8; 4]>::try_from(&*payload) {
                Ok(value) => Ok(Some(Record::Immediate(u32::from_le_bytes(value)))),
                Err(_) => Err("an immediate that is not 4 bytes"),
            },
            _ => Err("an unknown record kind"),
        }
    }

    fn copy_out(&self, position: u64, bytes: &mut [u8]) {
        let at = position as usize % RING_BYTES;
        let first = bytes.len().min(RING_BYTES - at);
        let (head, rest) = bytes.split_at_mut(first);
        self.memory.read(0, CONTROL_BYTES + at, head);
        self.memory.read(0, CONTROL_BYTES, rest);
    }

    /// Announces that the consumer is about to sleep; false when there is something to read after all.
    pub(crate) fn prepare_sleep(&self) -> bool {
        self.sleeping().store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.filled() == 0 {
            return true;
        }
        self.sleeping().store(0, Ordering::Relaxed);
        false
    }
}

fn record_bytes(len: usize) -> usize {
    (RECORD_HEADER_BYTES + len).next_multiple_of(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends() -> (Ring, Ring) {
        let consumer = Ring::create().expect("ring");
        let fd = rustix::io::dup(consumer.memory()).expect("dup");
        (Ring::attach(fd).expect("attach"), consumer)
    }

    #[test]
    fn records_survive_the_wrap() {
        let (mut producer, mut consumer) = ends();
        for round in 0..2_000_u32 {
            let len = round as usize * 37 % 3000;
            assert!(producer.push_message(&vec![round as u8; len]));
            assert!(producer.push_immediate(round));
            producer.publish();
            assert_eq!(consumer.pop(), Ok(Some(Record::Message(vec![round as u8; len].into_boxed_slice()))));
            assert_eq!(consumer.pop(), Ok(Some(Record::Immediate(round))));
            assert_eq!(consumer.pop(), Ok(None));
        }
    }

    #[test]
    fn a_full_ring_refuses_and_recovers() {
        let (mut producer, mut consumer) = ends();
        let mut pushed = 0;
        while producer.push_message(&[7; 1000]) {
            pushed += 1;
        }
        assert_eq!(pushed, RING_BYTES / record_bytes(1000));
        producer.publish();
        assert!(matches!(consumer.pop(), Ok(Some(Record::Message(_)))));
        assert!(producer.push_message(&[7; 1000]), "room for one again");
    }

    #[test]
    fn a_sleeping_consumer_is_woken_exactly_once() {
        let (mut producer, mut consumer) = ends();
        assert!(consumer.prepare_sleep());
        producer.push_immediate(1);
        assert!(producer.publish(), "must wake");
        producer.push_immediate(2);
        assert!(!producer.publish(), "already awake");
        assert!(!consumer.prepare_sleep(), "there is something to read");
        assert_eq!(consumer.pop(), Ok(Some(Record::Immediate(1))));
    }

    #[test]
    fn nonsense_from_the_producer_is_reported() {
        let (mut producer, mut consumer) = ends();
        producer.copy_in(0, &u32::MAX.to_le_bytes());
        producer.own = 64;
        producer.publish();
        assert!(consumer.pop().is_err());
        producer.own = u64::MAX / 2;
        producer.publish();
        assert!(consumer.pop().is_err());
    }
}
