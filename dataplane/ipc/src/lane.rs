//! Requests of one lane to one peer, in the order of posting: copies by the device, and the requests that
//! wait behind them.

use std::collections::VecDeque;

use dataplane_fabric::{
    Completion, Event, Fabric, Full, INLINE_BYTES_MAX, Operation, PeerId, Priority, Rows, Source, WorkRequest,
};
use dataplane_memory::{CopyRefused, DeviceError, SlotCopy, SlotRef};
use dataplane_shm::ShmFabric;

use crate::IpcCounters;
use crate::attach::PeerSlab;

/// Largest number of requests that wait in a lane.
const REQUESTS_MAX: usize = 4096;

/// A copy between a range of a local slot and one of the peer's, contiguous or in rows.
#[derive(Debug)]
pub(crate) struct Copy {
    pub(crate) local: SlotRef,
    pub(crate) local_offset: u32,
    /// Number of the peer's slot.
    pub(crate) remote: u32,
    pub(crate) remote_offset: u32,
    pub(crate) len: u32,
    pub(crate) rows: Option<Rows>,
    /// Whether the peer's slot is the target.
    pub(crate) is_write: bool,
}

#[derive(Debug)]
enum Kind {
    /// `begun` and `ended` count pieces.
    Copy {
        copy: Copy,
        begun: u32,
        ended: u32,
        failed: Option<DeviceError>,
    },
    /// Written by this thread, which blocks, after the earlier copies have ended. Posted only by tests with
    /// faults.
    Inline {
        bytes: [u8; INLINE_BYTES_MAX],
        len: u8,
        remote: u32,
        offset: u32,
    },
    /// Sent to the peer once all earlier requests have ended.
    Immediate(u32),
    Message(Box<[u8]>),
}

#[derive(Debug)]
struct Request {
    id: u64,
    kind: Kind,
}

#[derive(Debug)]
pub(crate) struct Lane {
    peer: PeerId,
    priority: Priority,
    requests: VecDeque<Request>,
    /// Number of the first request.
    first: u64,
    /// Position of the first request whose copies have not all been submitted.
    next: usize,
}

/// The parts of the fabric that the lanes of a peer share.
pub(crate) struct LaneContext<'a> {
    pub(crate) shm: &'a mut ShmFabric,
    pub(crate) events: &'a mut VecDeque<Event>,
    /// All slots of the peer's slab, by number.
    pub(crate) slots: &'a [SlotRef],
    pub(crate) counters: &'a IpcCounters,
}

impl Lane {
    pub(crate) fn new(peer: PeerId, priority: Priority) -> Self {
        Self { peer, priority, requests: VecDeque::new(), first: 0, next: 0 }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    pub(crate) fn has_room(&self) -> bool {
        // A write with an immediate takes two entries.
        self.requests.len() + 2 <= REQUESTS_MAX
    }

    /// Queues a request that has been checked.
    pub(crate) fn push(&mut self, id: u64, operation: Operation) {
        match operation {
            Operation::Write { source: Source::Slot { slot, offset, len }, target, rows, immediate } => {
                self.copy(
                    id,
                    Copy {
                        local: slot,
                        local_offset: offset,
                        remote: target.slot,
                        remote_offset: target.offset,
                        len,
                        rows,
                        is_write: true,
                    },
                );
                self.immediate(immediate);
            }
            Operation::Write { source: Source::Inline { bytes, len }, target, immediate, .. } => {
                let kind = Kind::Inline { bytes, len, remote: target.slot, offset: target.offset };
                self.requests.push_back(Request { id, kind });
                self.immediate(immediate);
            }
            Operation::Read { into, from, rows } => self.copy(
                id,
                Copy {
                    local: into.slot,
                    local_offset: into.offset,
                    remote: from.slot,
                    remote_offset: from.offset,
                    len: into.len,
                    rows,
                    is_write: false,
                },
            ),
            Operation::Send { message } => {
                self.requests.push_back(Request { id, kind: Kind::Message(message) });
            }
        }
    }

    fn copy(&mut self, id: u64, copy: Copy) {
        let kind = Kind::Copy { copy, begun: 0, ended: 0, failed: None };
        self.requests.push_back(Request { id, kind });
    }

    fn immediate(&mut self, immediate: Option<u32>) {
        let request = immediate.map(|value| Request { id: 0, kind: Kind::Immediate(value) });
        self.requests.extend(request);
    }

    /// Submits as many copies as the copier accepts. An error is the reason why a copy can never be made.
    pub(crate) fn begin(&mut self, slab: &mut PeerSlab) -> Result<(), &'static str> {
        let begun = self.submit(slab);
        // Also starts the copies that were accepted before the error.
        slab.attached.copier.flush();
        begun
    }

    fn submit(&mut self, slab: &mut PeerSlab) -> Result<(), &'static str> {
        while let Some(request) = self.requests.get_mut(self.next) {
            if let Kind::Copy { copy, begun, .. } = &mut request.kind {
                let token = (self.first + self.next as u64) << 1 | self.priority.index() as u64;
                while *begun < copy.pieces() {
                    match slab.attached.copier.submit(copy.piece(*begun, token, &slab.slots)) {
                        Ok(()) => *begun += 1,
                        Err(CopyRefused::Full(_)) => return Ok(()),
                        Err(CopyRefused::Outside(_)) => {
                            return Err("bytes outside of a slot, or rows that overlap");
                        }
                        Err(CopyRefused::Unreachable(_)) => {
                            return Err("a slot of memory that the device does not know");
                        }
                    }
                }
            }
            self.next += 1;
        }
        Ok(())
    }

    /// Records the end of a piece of the request with this number.
    pub(crate) fn piece_ended(&mut self, number: u64, result: Result<(), DeviceError>) {
        let at = number.checked_sub(self.first).and_then(|at| usize::try_from(at).ok());
        let request = at.and_then(|at| self.requests.get_mut(at));
        if let Some(Request { kind: Kind::Copy { ended, failed, .. }, .. }) = request {
            *ended += 1;
            *failed = failed.take().or(result.err());
        }
    }

    /// Completes finished requests at the front and sends what waited behind them. An error is the reason to
    /// end the connection.
    pub(crate) fn advance(&mut self, context: &mut LaneContext<'_>) -> Result<(), String> {
        while let Some(Request { id, kind }) = self.requests.front_mut() {
            let id = *id;
            match kind {
                Kind::Copy { failed: Some(error), begun, ended, .. } if begun == ended => {
                    return Err(format!("a copy between devices failed: {error}"));
                }
                Kind::Copy { copy, ended, .. } => {
                    if *ended < copy.pieces() {
                        break;
                    }
                    IpcCounters::add(&context.counters.copies, 1);
                    IpcCounters::add(&context.counters.bytes, u64::from(copy.len));
                }
                Kind::Inline { bytes, len, remote, offset } => {
                    write_inline(&bytes[..usize::from(*len)], &context.slots[*remote as usize], *offset)
                        .map_err(|error| format!("a write to the peer's device failed: {error}"))?;
                }
                Kind::Immediate(value) => {
                    if !context.shm.post_immediate(self.peer, self.priority, *value) {
                        break;
                    }
                }
                Kind::Message(message) => {
                    let operation = Operation::Send { message: std::mem::take(message) };
                    let request = WorkRequest { id, peer: self.peer, priority: self.priority, operation };
                    if let Err(Full(request)) = context.shm.post(request) {
                        if let Operation::Send { message: back } = request.operation {
                            *message = back;
                        }
                        break;
                    }
                    // Shared memory reports the completion of a message.
                    self.pop();
                    continue;
                }
            }
            self.pop();
            if id != 0 {
                context.events.push_back(Event::Completed { id, completion: Completion::Done });
            }
        }
        Ok(())
    }

    /// Removes the first request.
    fn pop(&mut self) {
        self.requests.pop_front();
        self.first += 1;
        self.next = self.next.saturating_sub(1);
    }

    /// Stops submitting copies. Ends all requests at once if no piece is in flight; otherwise the caller calls
    /// [`Self::end`] once the pieces in flight have ended.
    pub(crate) fn give_up(&mut self, events: &mut VecDeque<Event>) {
        self.next = self.requests.len();
        if !self.requests.iter().any(|request| request.is_under_way()) {
            self.end(events);
        }
    }

    /// Ends every request as [`Completion::PeerDown`].
    pub(crate) fn end(&mut self, events: &mut VecDeque<Event>) {
        self.first += self.requests.len() as u64;
        self.next = 0;
        let signalled = self.requests.drain(..).filter(|request| request.id != 0);
        events.extend(
            signalled.map(|request| Event::Completed { id: request.id, completion: Completion::PeerDown }),
        );
    }
}

impl Request {
    fn is_under_way(&self) -> bool {
        matches!(self.kind, Kind::Copy { begun, ended, .. } if ended < begun)
    }
}

impl Copy {
    fn pieces(&self) -> u32 {
        self.rows.map_or(u32::from(self.len > 0), |rows| rows.count(self.len))
    }

    fn piece(&self, number: u32, token: u64, slots: &[SlotRef]) -> SlotCopy {
        let (local_offset, remote_offset, len) = match self.rows {
            None => (self.local_offset, self.remote_offset, self.len),
            // The spans were checked to lie inside the slots.
            Some(rows) => (
                self.local_offset + number * rows.local_stride,
                self.remote_offset + number * rows.remote_stride,
                rows.bytes,
            ),
        };
        let (local, remote) = (self.local.clone(), slots[self.remote as usize].clone());
        let (from, to) = if self.is_write {
            ((local, local_offset), (remote, remote_offset))
        } else {
            ((remote, remote_offset), (local, local_offset))
        };
        SlotCopy { token, from: from.0, from_offset: from.1, to: to.0, to_offset: to.1, len }
    }
}

fn write_inline(bytes: &[u8], slot: &SlotRef, offset: u32) -> Result<(), DeviceError> {
    let slab = slot.slab();
    let Some(device) = slab.device() else {
        return Err(DeviceError { operation: "write", reason: "the slot is not a device's".to_owned() });
    };
    device.write(slot.slot() as usize * slab.layout().stride() + offset as usize, bytes)
}
