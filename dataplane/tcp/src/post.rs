//! Posting of requests: the frames of a request, and the connection of each frame.
//!
//! Frames that must keep the order travel on connection 0 of their lane. With several connections, slot
//! writes of at least [`SPREAD_BYTES_MIN`] go, in pieces, to the connection with the fewest bytes waiting,
//! unless a write of the same bytes is in flight. Before the next frame of connection 0, a fence states the
//! number of such writes that every sibling got; the receiver continues with connection 0 only when they have
//! landed. A frame on connection 0 therefore sees all earlier writes, and a write on a sibling meets no other
//! write of its bytes.

use std::mem;

use dataplane_fabric::{
    Completion, Event, Full, HOST_MEMORY_ONLY, MESSAGE_BYTES_MAX, Operation, Rows, Source, Target,
    WorkRequest,
};
use dataplane_memory::SlotRef;

use crate::connection::Connection;
use crate::extent::Extent;
use crate::fabric::TcpFabric;
use crate::frame::Payload;
use crate::lane::{FrameCompletion, Lane};
use crate::send::PIECE_BYTES;
use crate::session::Stage;
use crate::table::Table;
use crate::wire::{Header, RowShape};

/// Smallest write that is spread; smaller ones stay on connection 0.
const SPREAD_BYTES_MIN: u32 = 16 << 10;
/// Largest number of pieces of one write; larger writes have larger pieces.
const PIECES_MAX: u32 = 16;

/// One lane of a peer, as needed for posting a request.
struct Outbound<'a> {
    lane: &'a mut Lane,
    connections: &'a mut Table<Connection>,
    dirty: &'a mut Vec<u32>,
}

impl TcpFabric {
    pub(crate) fn take_request(&mut self, request: WorkRequest) -> Result<(), Full> {
        let index = self.sessions.find(request.peer.0);
        let session = index.and_then(|index| Some((index, self.sessions.get_mut(index)?)));
        let Some((index, session)) = session.filter(|(_, session)| session.stage == Stage::Open) else {
            return Err(Full(request));
        };
        if !request.operation.is_between_hosts() {
            if request.id != 0 {
                let (id, completion) = (request.id, Completion::PeerDown);
                self.events.push_back(Event::Completed { id, completion });
            }
            self.close_session(index, HOST_MEMORY_ONLY);
            return Ok(());
        }
        let lane = request.priority.index();
        let mut outbound = Outbound {
            lane: &mut session.lanes[lane],
            connections: &mut self.connections,
            dirty: &mut self.dirty[lane],
        };
        outbound.take(request)
    }
}

impl Outbound<'_> {
    fn take(&mut self, request: WorkRequest) -> Result<(), Full> {
        let pieces = self.pieces(&request.operation);
        let has_place = match &request.operation {
            Operation::Read { .. } => self.lane.reads.has_room(),
            _ => pieces == 0 || request.id == 0 || self.lane.has_split(),
        };
        if !has_place || !self.has_room(pieces) {
            return Err(Full(request));
        }
        let finish =
            if request.id == 0 { FrameCompletion::Silent } else { FrameCompletion::Request(request.id) };
        match request.operation {
            Operation::Send { message } => {
                assert!(message.len() <= MESSAGE_BYTES_MAX, "a message of {} bytes", message.len());
                let header = Header::Message { len: message.len() as u32 };
                self.put_in_order(header, Payload::Message(message), finish);
            }
            Operation::Write { source: Source::Inline { bytes, len }, target, rows, immediate } => {
                assert!(
                    rows.is_none() && usize::from(len) <= bytes.len(),
                    "an inline write of {len} bytes in rows"
                );
                let header = Header::Write { len: len.into(), target, rows: None, immediate };
                self.put_in_order(header, Payload::Inline { bytes, len }, finish);
            }
            Operation::Write { source: Source::Slot { slot, offset, len }, target, rows, immediate } => {
                let local = local_extent(&slot, offset, len, rows);
                if pieces == 0 {
                    let header = Header::Write { len, target, rows: remote_rows(rows), immediate };
                    self.put_in_order(header, Payload::Slot { slot, extent: local }, finish);
                } else {
                    self.spread(request.id, pieces, &Spread { slot, offset, len, target, rows }, immediate);
                }
            }
            Operation::Read { into, from, rows } => {
                let extent = local_extent(&into.slot, into.offset, into.len, rows);
                let len = into.len;
                if let Some(number) = self.lane.reads.begin(request.id, into.slot, extent) {
                    let header = Header::Read { number, len, from, rows: remote_rows(rows) };
                    self.put_in_order(header, Payload::Nothing, FrameCompletion::Silent);
                }
            }
        }
        Ok(())
    }

    /// Returns the number of pieces into which an operation is cut to be spread; 0: it stays on connection 0.
    fn pieces(&self, operation: &Operation) -> u32 {
        match operation {
            Operation::Write { source: Source::Slot { len, .. }, target, rows, .. }
                if *len >= SPREAD_BYTES_MIN && self.may_spread(*len, *target, *rows) =>
            {
                let rows = rows.map_or(u32::MAX, |rows| rows.count(*len)).max(1);
                len.div_ceil(PIECE_BYTES).min(PIECES_MAX).min(rows)
            }
            _ => 0,
        }
    }

    fn may_spread(&self, len: u32, target: Target, rows: Option<Rows>) -> bool {
        let header = Header::Write { len, target, rows: remote_rows(rows), immediate: None };
        self.lane.conflicts.as_ref().is_some_and(|conflicts| !conflicts.has(&header))
    }

    /// Whether the frames of one operation and a fence fit, on any choice of connections.
    fn has_room(&self, pieces: u32) -> bool {
        let needed = pieces as usize + 2;
        let involved = if pieces == 0 { 1 } else { self.lane.connection_count };
        (0..involved).all(|index| {
            let connection = self.lane.connections[index].and_then(|number| self.connections.get(number));
            connection.is_some_and(|connection| connection.halves.sender.room() >= needed)
        })
    }

    fn put(&mut self, index: usize, header: Header, payload: Payload, finish: FrameCompletion) {
        // `has_room` has checked that the connection exists.
        let Some(number) = self.lane.connections[index] else { return };
        let Some(connection) = self.connections.get_mut(number) else { return };
        if !mem::replace(&mut connection.is_dirty, true) {
            self.dirty.push(number);
        }
        connection.halves.sender.put(header, payload, finish, self.lane);
    }

    fn put_in_order(&mut self, header: Header, payload: Payload, finish: FrameCompletion) {
        if let Some(counts) = self.lane.next_fence() {
            self.put(0, Header::Fence { counts }, Payload::Nothing, FrameCompletion::Silent);
        }
        self.put(0, header, payload, finish);
    }

    fn spread(&mut self, id: u64, pieces: u32, whole: &Spread, immediate: Option<u32>) {
        let frames = pieces + u32::from(immediate.is_some());
        let finish = match (id, frames) {
            (0, _) => FrameCompletion::Silent,
            (id, 1) => FrameCompletion::Request(id),
            (id, frames) => self.lane.begin_split(id, frames).unwrap_or(FrameCompletion::Silent),
        };
        for piece in 0..pieces {
            let (header, payload) = whole.piece(piece, pieces);
            let index = self.least_loaded();
            self.lane.count_put(index);
            self.put(index, header, payload, finish);
        }
        if let Some(value) = immediate {
            self.put_in_order(Header::Immediate { value }, Payload::Nothing, finish);
        }
    }

    /// Returns the connection with the fewest bytes waiting. Of equal ones the last, since connection 0
    /// carries the messages.
    fn least_loaded(&self) -> usize {
        let waiting = |index: &usize| {
            let connection = self.lane.connections[*index].and_then(|number| self.connections.get(number));
            connection.map_or(u64::MAX, |connection| connection.halves.sender.queued_bytes)
        };
        (0..self.lane.connection_count).rev().min_by_key(waiting).unwrap_or(0)
    }
}

/// A write that is spread over connections.
struct Spread {
    slot: SlotRef,
    offset: u32,
    len: u32,
    target: Target,
    rows: Option<Rows>,
}

impl Spread {
    /// Returns piece `piece` of `pieces`: whole rows, or a range.
    fn piece(&self, piece: u32, pieces: u32) -> (Header, Payload) {
        let unit = self.rows.map_or(1, |rows| rows.bytes);
        let units = u64::from(self.len / unit);
        let border = |piece: u32| (units * u64::from(piece) / u64::from(pieces)) as u32;
        let (first, last) = (border(piece), border(piece + 1));
        let (local_stride, remote_stride) =
            self.rows.map_or((1, 1), |rows| (rows.local_stride, rows.remote_stride));
        let len = (last - first) * unit;
        let extent = local_extent(&self.slot, self.offset + first * local_stride, len, self.rows);
        let target = Target {
            offset: self.target.offset.saturating_add(first.saturating_mul(remote_stride)),
            ..self.target
        };
        let header = Header::Write { len, target, rows: remote_rows(self.rows), immediate: None };
        (header, Payload::Slot { slot: self.slot.clone(), extent })
    }
}

/// Returns the extent of bytes in a local slot. Panics when the bytes are not inside the slot.
fn local_extent(slot: &SlotRef, offset: u32, len: u32, rows: Option<Rows>) -> Extent {
    let shape = rows.map(|rows| RowShape { bytes: rows.bytes, stride: rows.local_stride });
    let extent = Extent::new(slot.slot(), offset, len, shape).filter(|extent| extent.is_inside(slot.slab()));
    extent.unwrap_or_else(|| panic!("{len} bytes at {offset} in rows {rows:?} are not in a slot"))
}

fn remote_rows(rows: Option<Rows>) -> Option<RowShape> {
    rows.map(|rows| RowShape { bytes: rows.bytes, stride: rows.remote_stride })
}
