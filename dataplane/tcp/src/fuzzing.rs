//! The receiving side of a connection without a socket, for fuzzers and property tests: bytes in arbitrary
//! pieces go through the code that handles the kernel's receives. Not a part of the public interface.

use std::collections::VecDeque;
use std::sync::Arc;

use dataplane_fabric::{Event, PeerAccess, PeerId};
use dataplane_memory::{Slab, SlotPool, SlotRef};

use crate::extent::Extent;
use crate::inbound::Inbound;
use crate::lane::Lane;
use crate::reads::Reads;
use crate::receive::Receiver;
use crate::send::Sender;
use crate::wire::RowShape;

/// Row lengths in bytes of the reads that a [`Stream`] has in flight; each read fills a slot of its own. 0:
/// no rows.
pub const READ_ROW_BYTES: [u32; 3] = [0, 100, 600];
/// Length of each of these reads.
pub const READ_BYTES: u32 = 1200;
/// Largest number of reads that the stream serves at a time.
pub const SERVED_MAX: usize = 8;

/// The receiving half of connection 0 in a lane of two connections.
pub struct Stream {
    slab: Arc<Slab>,
    lane: Lane,
    sender: Sender,
    receiver: Receiver,
    /// Events so far.
    pub events: VecDeque<Event>,
    /// The slots that the reads fill.
    pub read_slots: Vec<SlotRef>,
}

impl Stream {
    /// Creates a stream into the slots of a fresh pool, which has at least three slots of at least 2400
    /// bytes.
    #[must_use]
    pub fn new(pool: &Arc<SlotPool>) -> Self {
        dataplane_memory::testing::make_names_guessable(pool.slab());
        let mut lane = Lane::new(2);
        lane.open(Reads::new(READ_ROW_BYTES.len()), SERVED_MAX);
        let mut read_slots = Vec::new();
        for (at, bytes) in READ_ROW_BYTES.into_iter().enumerate() {
            let rows = (bytes > 0).then_some(RowShape { bytes, stride: 2 * bytes });
            let Some(slot) = pool.acquire() else { continue };
            let Some(extent) = Extent::new(slot.slot(), 0, READ_BYTES, rows) else { continue };
            read_slots.push(slot.clone());
            lane.reads.begin(at as u64 + 1, slot, extent);
        }
        Self {
            slab: Arc::clone(pool.slab()),
            lane,
            sender: Sender::new(64, None, 1 << 20),
            receiver: Receiver::new(1 << 20),
            events: VecDeque::new(),
            read_slots,
        }
    }

    /// Feeds bytes. `cut` returns how many of the bytes that would fit arrive at once. Returns early, without
    /// an error, at a fence that is not satisfied.
    pub fn feed(
        &mut self,
        mut bytes: &[u8],
        mut cut: impl FnMut(usize) -> usize,
    ) -> Result<(), &'static str> {
        while !bytes.is_empty() && !self.lane.is_held {
            self.receiver.plan(&self.slab, &self.lane);
            let room: usize = self.receiver.vectors.iter().map(|piece| piece.iov_len).sum();
            assert!(room > 0, "a receive into nothing would look like the end of the stream");
            let arriving = cut(room.min(bytes.len())).clamp(1, room.min(bytes.len()));
            let (now, later) = bytes.split_at(arriving);
            let mut left = now;
            for piece in &self.receiver.vectors {
                let (here, rest) = left.split_at(left.len().min(piece.iov_len));
                // SAFETY: the receiver promises the kernel that its pieces are writable for their lengths and its
                // own to fill; `here` is no longer than the piece.
                unsafe { std::ptr::copy_nonoverlapping(here.as_ptr(), piece.iov_base.cast(), here.len()) };
                left = rest;
            }
            bytes = later;
            let mut inbound = Inbound {
                slab: &self.slab,
                lane: &mut self.lane,
                sender: &mut self.sender,
                events: &mut self.events,
                peer: PeerId(1),
                index: 0,
                access: PeerAccess::ReadWrite,
                releases: false,
                frames: 0,
            };
            self.receiver.received(arriving, &mut inbound)?;
        }
        Ok(())
    }

    /// Returns the number of the peer's reads that wait to be served.
    #[must_use]
    pub fn served(&self) -> usize {
        self.lane.serving.len()
    }
}
