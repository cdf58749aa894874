//! A peer: the stage of its connection, its slab, and its lanes.

use std::os::fd::OwnedFd;
use std::time::Instant;

use dataplane_fabric::{Operation, PeerId, Priority, Rows, Source};
use dataplane_memory::{CopyDone, SlabKind, SlotRef};

use crate::attach::PeerSlab;
use crate::lane::Lane;

/// Stage of a connection.
///
/// ```text
/// initiator: Connecting ─(shm is up: hello)─▶ Greeting ── hello ──▶ Attaching ─(attached: ready)─▶ Waiting ── ready ──▶ Open
/// acceptor:                                   Greeting ── hello ─(hello)─▶ Attaching …
/// any of them ── leave ──▶ Leaving ─(copies over, detached: goodbyes)─▶ Left ── goodbyes ──▶ Closing ── shm is down ──▶ gone
/// the peer dies ──▶ Orphaned ── its process has ended ──▶ gone
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The connection over shared memory is being made.
    Connecting,
    /// The peer's hello is awaited.
    Greeting,
    /// The thread attaches the peer's slab.
    Attaching,
    /// The peer's slab is attached; the peer's attachment of our slab is awaited.
    Waiting,
    Open,
    /// No new request starts; local copies are in flight, the slab is being detached, or the ring has no room
    /// for a goodbye.
    Leaving,
    /// Our goodbyes are sent; those of the peer are awaited.
    Left,
    /// Both sides have said goodbye, or the peer need not; shared memory disconnects.
    Closing,
    /// Shared memory has disconnected; local copies, or the end of a peer without goodbyes, are awaited.
    Orphaned,
}

impl Stage {
    /// Whether the connection is ending.
    pub(crate) fn is_end(self) -> bool {
        matches!(self, Self::Leaving | Self::Left | Self::Closing | Self::Orphaned)
    }
}

#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) stage: Stage,
    pub(crate) is_initiator: bool,
    /// Whether the user knows the peer, so that its end is reported.
    pub(crate) is_announced: bool,
    /// Whether the connection was ever open: before that, no slot was named to the peer.
    pub(crate) was_open: bool,
    /// Time by which the connection must be open.
    pub(crate) deadline: Option<Instant>,
    pub(crate) reason: String,
    /// Process descriptor of the peer, readable when the process has ended.
    pub(crate) process: Option<OwnedFd>,
    /// Whether the peer has attached our slab.
    pub(crate) is_ready: bool,
    /// Goodbyes by lane: sent, and received.
    pub(crate) goodbyes_sent: [bool; 2],
    pub(crate) goodbyes_received: [bool; 2],
    /// Whether the attaching thread has a job of this peer.
    pub(crate) has_job: bool,
    pub(crate) slab: Option<PeerSlab>,
    pub(crate) lanes: [Lane; 2],
    /// Whether the peer is in the fabric's list of peers with work.
    pub(crate) is_listed: bool,
}

impl Peer {
    pub(crate) fn new(id: PeerId, is_initiator: bool, deadline: Instant) -> Self {
        Self {
            stage: Stage::Connecting,
            is_initiator,
            is_announced: is_initiator,
            was_open: false,
            deadline: Some(deadline),
            reason: String::new(),
            process: None,
            is_ready: false,
            goodbyes_sent: [false; 2],
            goodbyes_received: [false; 2],
            has_job: false,
            slab: None,
            lanes: Priority::ALL.map(|priority| Lane::new(id, priority)),
            is_listed: false,
        }
    }

    pub(crate) fn has_requests(&self) -> bool {
        self.lanes.iter().any(|lane| !lane.is_empty())
    }

    pub(crate) fn copies_in_flight(&self) -> usize {
        self.slab.as_ref().map_or(0, |slab| slab.attached.copier.in_flight())
    }

    /// Whether the peer has said that none of its copies is in flight.
    pub(crate) fn has_said_goodbye(&self) -> bool {
        self.goodbyes_received == [true; 2]
    }

    /// Whether a copy of the peer into our slab may be in flight.
    pub(crate) fn may_write(&self) -> bool {
        self.was_open && !self.has_said_goodbye()
    }

    pub(crate) fn slots(&self) -> &[SlotRef] {
        self.slab.as_ref().map_or(&[], |slab| &slab.slots)
    }

    /// Collects the completions of copies.
    pub(crate) fn poll_copies(&mut self, done: &mut Vec<CopyDone>) {
        let Some(slab) = self.slab.as_mut().filter(|slab| slab.attached.copier.in_flight() > 0) else {
            return;
        };
        slab.attached.copier.poll(done);
        for CopyDone { token, result } in done.drain(..) {
            self.lanes[(token & 1) as usize].piece_ended(token >> 1, result);
        }
    }

    /// Checks that the bytes of a request exist on both sides.
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
        if target.slab != SlabKind::Device {
            return Err(
                "refused at the sender: host memory of the peer, which this transport does not reach",
            );
        }
        let slot = self.slots().get(target.slot as usize).ok_or(OUTSIDE)?;
        let is_inside = slot.slab().contains(slot.slot(), target.offset as usize, there as usize)
            && local.is_none_or(|(slot, offset)| {
                slot.slab().contains(slot.slot(), offset as usize, here as usize)
            });
        if is_inside { Ok(()) } else { Err(OUTSIDE) }
    }
}
