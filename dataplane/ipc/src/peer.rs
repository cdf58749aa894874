//! One peer: how far its connection is, its slab, and its lanes.

use std::os::fd::OwnedFd;

use dataplane_fabric::{Operation, PeerId, Priority, Rows, Source};
use dataplane_memory::{AttachedSlab, CopyDone, SlotPool, SlotRef};

use crate::lane::Lane;

/// How far a connection is.
///
/// ```text
/// Connecting ─(shm is up: hello)─▶ Greeting ── hello ──▶ Attaching ─(attached: ready)─▶ Waiting ── ready ──▶ Open
/// any of them ── leave ──▶ Leaving ─(copies over: goodbye)─▶ Left ── goodbye ──▶ Closing ── shm is down ──▶ gone
/// the peer dies ──▶ Orphaned ── its process has ended ──▶ gone
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Shared memory connects.
    Connecting,
    /// The peer's hello is awaited.
    Greeting,
    /// A thread attaches its slab.
    Attaching,
    /// Attached; whether the peer has attached ours is awaited.
    Waiting,
    Open,
    /// Nothing more is begun; copies of ours are under way, or a goodbye finds no room.
    Leaving,
    /// We have said goodbye; the peer's is awaited.
    Left,
    /// Both have; shared memory disconnects.
    Closing,
    /// The peer died without a goodbye; the end of its process is awaited.
    Orphaned,
}

impl Stage {
    /// Whether the connection ends.
    pub(crate) fn is_end(self) -> bool {
        matches!(self, Self::Leaving | Self::Left | Self::Closing | Self::Orphaned)
    }
}

#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) stage: Stage,
    pub(crate) is_initiator: bool,
    /// Whether the user knows of it.
    pub(crate) is_announced: bool,
    pub(crate) reason: String,
    /// Readable when its process has ended.
    pub(crate) process: Option<OwnedFd>,
    /// Whether the peer has attached our slab.
    pub(crate) is_ready: bool,
    pub(crate) has_said_goodbye: bool,
    pub(crate) attached: Option<AttachedSlab>,
    /// Every slot of its slab, by number: requests name them, and nothing else does.
    pub(crate) slots: Vec<SlotRef>,
    pub(crate) lanes: [Lane; 2],
    /// Whether the fabric's list of peers with work names it.
    pub(crate) is_listed: bool,
}

impl Peer {
    pub(crate) fn new(id: PeerId, is_initiator: bool) -> Self {
        Self {
            stage: Stage::Connecting,
            is_initiator,
            is_announced: is_initiator,
            reason: String::new(),
            process: None,
            is_ready: false,
            has_said_goodbye: false,
            attached: None,
            slots: Vec::new(),
            lanes: Priority::ALL.map(|priority| Lane::new(id, priority)),
            is_listed: false,
        }
    }

    pub(crate) fn has_requests(&self) -> bool {
        self.lanes.iter().any(|lane| !lane.is_empty())
    }

    pub(crate) fn copies_in_flight(&self) -> usize {
        self.attached.as_ref().map_or(0, |attached| attached.copier.in_flight())
    }

    pub(crate) fn take_slab(&mut self, attached: AttachedSlab) {
        let pool = SlotPool::new(attached.slab.clone());
        let mut slots: Vec<SlotRef> = std::iter::from_fn(|| pool.acquire()).collect();
        slots.sort_by_key(SlotRef::slot);
        self.slots = slots;
        self.attached = Some(attached);
    }

    /// Takes the ends of copies.
    pub(crate) fn poll_copies(&mut self, done: &mut Vec<CopyDone>) {
        let Some(attached) = self.attached.as_mut().filter(|attached| attached.copier.in_flight() > 0) else {
            return;
        };
        attached.copier.poll(done);
        for CopyDone { token, result } in done.drain(..) {
            self.lanes[(token & 1) as usize].piece_ended(token >> 1, result);
        }
    }

    /// Whether a request names bytes that are there on both sides.
    pub(crate) fn allows(&self, operation: &Operation) -> Result<(), &'static str> {
        const OUTSIDE: &str = "remote access error: bytes outside of a slot, or rows that overlap";
        let (local, target, len, rows) = match operation {
            Operation::Send { .. } => return Ok(()),
            Operation::Write { source, target, rows, .. } => match source {
                Source::Slot { slot, offset, len } => (Some((slot, *offset)), target, *len, rows.as_ref()),
                Source::Inline { bytes, len } if rows.is_none() && usize::from(*len) <= bytes.len() => {
                    (None, target, u32::from(*len), None)
                }
                Source::Inline { .. } => return Err(OUTSIDE),
            },
            Operation::Read { into, from, rows } => {
                (Some((&into.slot, into.offset)), from, into.len, rows.as_ref())
            }
        };
        let span = |stride: fn(&Rows) -> u32| match rows {
            None => Some(len),
            Some(rows) if rows.is_valid(len) => rows.span(len, stride(rows)),
            Some(_) => None,
        };
        let here = span(|rows| rows.local_stride).ok_or(OUTSIDE)?;
        let there = span(|rows| rows.remote_stride).ok_or(OUTSIDE)?;
        let slot = self.slots.get(target.slot as usize).ok_or(OUTSIDE)?;
        let is_inside = slot.slab().contains(slot.slot(), target.offset as usize, there as usize)
            && local.is_none_or(|(slot, offset)| {
                slot.slab().contains(slot.slot(), offset as usize, here as usize)
            });
        if is_inside { Ok(()) } else { Err(OUTSIDE) }
    }
}
