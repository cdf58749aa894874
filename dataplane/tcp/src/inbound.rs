//! Checks and execution of the frames that a peer sends.

use std::collections::VecDeque;

use dataplane_fabric::{Completion, Event, PeerAccess, PeerId};
use dataplane_memory::Slab;

use crate::extent::Extent;
use crate::lane::{Lane, Served};
use crate::receive_target::ReceiveTarget;
use crate::send::Sender;
use crate::wire::Header;

/// State that the processing of received bytes may change.
pub(crate) struct Inbound<'a> {
    pub(crate) slab: &'a Slab,
    pub(crate) lane: &'a mut Lane,
    /// Sending half of the connection.
    pub(crate) sender: &'a mut Sender,
    pub(crate) events: &'a mut VecDeque<Event>,
    pub(crate) peer: PeerId,
    /// Index of the connection within its lane.
    pub(crate) index: usize,
    /// Access of the peer to this node's slots.
    pub(crate) access: PeerAccess,
    /// Set when connection 0 may be released.
    pub(crate) releases: bool,
    pub(crate) frames: u64,
}

impl Inbound<'_> {
    /// Checks whether a header is allowed, before any header of its batch is executed.
    pub(crate) fn check(&self, header: &Header) -> Result<(), &'static str> {
        match *header {
            Header::Message { .. }
            | Header::Immediate { .. }
            | Header::Fence { .. }
            | Header::Read { .. }
            | Header::Write { immediate: Some(_), .. }
                if self.index > 0 =>
            {
                Err("an ordered frame on a connection that carries unordered ones")
            }
            Header::Write { .. } if !self.access.allows_writes() => {
                Err("a write to slots that are not shown")
            }
            Header::Read { .. } if !self.access.allows_reads() => Err("a read of slots that may not be read"),
            Header::Write { len, target, rows, .. } | Header::Read { len, from: target, rows, .. } => {
                let extent = Extent::new(target.slot, target.offset, len, rows)
                    .ok_or("the layout of rows does not fit the slot")?;
                if !extent.is_inside(self.slab) {
                    Err("bytes outside of our slots")
                } else if self.slab.generation(target.slot) != target.generation {
                    Err("a slot that has been reused")
                } else {
                    Ok(())
                }
            }
            Header::Response { number, at, len, .. } if !self.lane.reads.expects(number, at, len) => {
                Err("a response with an unknown read number")
            }
            _ => Ok(()),
        }
    }

    /// Executes a header. Returns the landing of its payload; `None` when it has no payload.
    pub(crate) fn begin(&mut self, header: Header) -> Result<Option<ReceiveTarget>, &'static str> {
        self.frames += 1;
        match header {
            Header::Message { len } => {
                Ok(Some(ReceiveTarget::Message { bytes: vec![0; len as usize].into_boxed_slice(), at: 0 }))
            }
            Header::Write { len, target, rows, immediate } => {
                let extent = Extent::new(target.slot, target.offset, len, rows)
                    .ok_or("the layout of rows does not fit the slot")?;
                Ok(Some(ReceiveTarget::Write { extent, generation: target.generation, immediate, at: 0 }))
            }
            Header::Response { number, at, len, is_verified } => {
                Ok(Some(ReceiveTarget::Response { number, first: at, at, end: at + len, is_verified }))
            }
            Header::Immediate { value } => {
                self.events.push_back(Event::Immediate { peer: self.peer, value });
                Ok(None)
            }
            Header::Read { number, len, from, rows } => {
                let extent = Extent::new(from.slot, from.offset, len, rows)
                    .ok_or("the layout of rows does not fit the slot")?;
                self.lane.serve(Served { number, from: extent, generation: from.generation, at: 0 })?;
                Ok(None)
            }
            Header::Verified { number, len } => {
                if let Some(read) = self.lane.reads.verify(number, len)? {
                    self.complete(read.id);
                }
                Ok(None)
            }
            Header::Landed { count } => {
                self.sender.landed(count, self.lane, self.events)?;
                Ok(None)
            }
            Header::Fence { .. } => Ok(None),
        }
    }

    /// Handles a payload whose bytes have all arrived.
    pub(crate) fn landed(&mut self, receive_target: ReceiveTarget) -> Result<(), &'static str> {
        if let ReceiveTarget::Write { extent, .. } = &receive_target {
            self.slab.end_write(extent.slot);
        }
        if !receive_target.is_current(self.slab) {
            return Err("a write to a slot that was reused meanwhile");
        }
        match receive_target {
            ReceiveTarget::Message { bytes, .. } => {
                self.events.push_back(Event::Message { peer: self.peer, message: bytes });
            }
            ReceiveTarget::Write { immediate, .. } => {
                self.releases |= self.lane.count_landed(self.index);
                self.events.extend(immediate.map(|value| Event::Immediate { peer: self.peer, value }));
            }
            ReceiveTarget::Response { number, first, end, is_verified, .. } => {
                let reads = &mut self.lane.reads;
                let verified = if is_verified { reads.verify(number, end - first)? } else { None };
                if let Some(read) = verified.or_else(|| reads.land(number, end - first)) {
                    self.complete(read.id);
                }
            }
        }
        Ok(())
    }

    fn complete(&mut self, id: u64) {
        if id != 0 {
            self.events.push_back(Event::Completed { id, completion: Completion::Done });
        }
    }
}
