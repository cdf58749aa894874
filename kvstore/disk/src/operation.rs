//! Operations in flight: a table with a fixed number of entries, each with all that its operation needs.
//!
//! A request's id is the index of its entry and the entry's serial number, so that a late completion of an
//! earlier operation is recognised. Nothing allocates after `new`.

use std::time::Instant;

use dataplane_memory::{PartialChecksum, SlotRef};
use kvstore_block::BlockIdentity;
use kvstore_io::{Buffer, IoErrorKind, Operation as Direction, PageBuffer, Request};

use crate::ReadCheck;
use crate::format::{PAGE_BYTES, Record, RecordState};
use crate::layout::PageCopy;
use crate::table::PageNumber;

/// Purpose of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Idle,
    Write { token: u64, slot: u32 },
    Read { token: u64, slot: u32, check: ReadCheck },
    Table { page: PageNumber, copy: PageCopy },
    Probe,
}

/// One entry of the table.
pub(crate) struct Operation {
    serial: u32,
    pub(crate) purpose: Purpose,
    pub(crate) file: u32,
    pub(crate) offset: u64,
    /// Bytes to move, whole pages.
    pub(crate) bytes: usize,
    submitted: usize,
    outstanding: u32,
    pub(crate) failure: Option<IoErrorKind>,
    pub(crate) is_io_over: bool,
    /// Already reported as failed; the engine still holds the memory.
    pub(crate) is_abandoned: bool,
    /// The slot was forgotten during the operation.
    pub(crate) is_superseded: bool,
    /// Time of the first timeout check that saw the operation; `None` before.
    pub(crate) started: Option<Instant>,
    pub(crate) memory: Option<SlotRef>,
    pub(crate) page: Option<PageBuffer>,
    /// Record of the block that is written, or that a read expects.
    pub(crate) record: Record,
    pub(crate) meta: Vec<u8>,
    pub(crate) checksum: PartialChecksum,
}

/// Identifies an operation: the index of its entry, and the entry's serial number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OperationId {
    pub(crate) index: u32,
    serial: u32,
}

/// The table of operations.
pub(crate) struct Operations {
    places: Vec<Operation>,
    free: Vec<u32>,
}

impl Operations {
    pub(crate) fn new(count: u32, meta_bytes_max: u16) -> Self {
        let places = (0..count).map(|_| Operation::idle(meta_bytes_max)).collect();
        Self { places, free: (0..count).rev().collect() }
    }

    /// Takes a free entry and resets it. `None` when all are in use.
    pub(crate) fn start(&mut self, purpose: Purpose, range: (u32, u64, usize)) -> Option<OperationId> {
        let index = self.free.pop()?;
        let place = &mut self.places[index as usize];
        place.purpose = purpose;
        (place.file, place.offset, place.bytes) = range;
        (place.submitted, place.outstanding) = (0, 0);
        (place.failure, place.started) = (None, None);
        (place.is_io_over, place.is_abandoned, place.is_superseded) = (false, false, false);
        Some(OperationId { index, serial: place.serial })
    }

    pub(crate) fn end(&mut self, id: OperationId) {
        let place = &mut self.places[id.index as usize];
        place.purpose = Purpose::Idle;
        place.serial = place.serial.wrapping_add(1);
        place.memory = None;
        self.free.push(id.index);
    }

    /// Returns the operation, or `None` once it has ended.
    pub(crate) fn get(&mut self, id: OperationId) -> Option<&mut Operation> {
        self.places
            .get_mut(id.index as usize)
            .filter(|place| place.serial == id.serial && place.purpose != Purpose::Idle)
    }

    pub(crate) fn in_use(&self) -> usize {
        self.places.len() - self.free.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (OperationId, &Operation)> {
        let used = self.places.iter().zip(0..).filter(|(place, _)| place.purpose != Purpose::Idle);
        used.map(|(place, index)| (OperationId { index, serial: place.serial }, place))
    }

    pub(crate) fn len(&self) -> u32 {
        self.places.len() as u32
    }

    pub(crate) fn id_at(&self, index: u32) -> OperationId {
        OperationId { index, serial: self.places[index as usize].serial }
    }
}

impl OperationId {
    pub(crate) fn request_id(self) -> u64 {
        u64::from(self.serial) << 32 | u64::from(self.index)
    }

    pub(crate) fn from_request_id(id: u64) -> Self {
        Self { index: id as u32, serial: (id >> 32) as u32 }
    }
}

impl Operation {
    fn idle(meta_bytes_max: u16) -> Self {
        let none = BlockIdentity([0; 16]);
        let record = Record {
            identity: none,
            parent: none,
            checksum: 0,
            generation: 0,
            bytes: 0,
            tenant: 0,
            written_at_s: 0,
            meta_bytes: 0,
            state: RecordState::Tombstone,
        };
        Self {
            serial: 0,
            purpose: Purpose::Idle,
            file: 0,
            offset: 0,
            bytes: 0,
            submitted: 0,
            outstanding: 0,
            failure: None,
            is_io_over: false,
            is_abandoned: false,
            is_superseded: false,
            started: None,
            memory: None,
            page: None,
            record,
            meta: Vec::with_capacity(meta_bytes_max.into()),
            checksum: PartialChecksum::default(),
        }
    }

    /// Returns the direction of the operation's requests.
    pub(crate) fn direction(&self) -> Direction {
        match self.purpose {
            Purpose::Write { .. } | Purpose::Table { .. } => Direction::Write,
            Purpose::Read { .. } | Purpose::Probe | Purpose::Idle => Direction::Read,
        }
    }

    /// Returns the next request for the engine; `None` when all bytes were submitted or a request has failed.
    pub(crate) fn next_request(&mut self, id: OperationId, transfer_bytes_max: usize) -> Option<Request> {
        if self.failure.is_some() {
            self.submitted = self.bytes;
        }
        let len = (self.bytes - self.submitted).min(transfer_bytes_max / PAGE_BYTES * PAGE_BYTES);
        if len == 0 {
            return None;
        }
        let buffer = match (&self.memory, self.purpose) {
            (Some(slot), _) => Buffer::Slot { slot: slot.clone(), offset: self.submitted, len },
            (None, _) => Buffer::Pages(self.page.take()?),
        };
        let operation = self.direction();
        let offset = self.offset + self.submitted as u64;
        self.submitted += len;
        self.outstanding += 1;
        Some(Request { id: id.request_id(), operation, file: self.file, offset, buffer })
    }

    /// Takes back a request that the engine refused for lack of room.
    pub(crate) fn take_back(&mut self, request: Request) {
        self.submitted -= request.buffer.len();
        self.outstanding -= 1;
        if let Buffer::Pages(page) = request.buffer {
            self.page = Some(page);
        }
    }

    /// Records the completion of a request. Returns whether the operation's I/O is over.
    pub(crate) fn complete(&mut self, buffer: Buffer, failure: Option<IoErrorKind>) -> bool {
        self.outstanding = self.outstanding.saturating_sub(1);
        self.failure = self.failure.or(failure);
        if let Buffer::Pages(page) = buffer {
            self.page = Some(page);
        }
        self.is_io_over = self.outstanding == 0 && (self.submitted == self.bytes || self.failure.is_some());
        self.is_io_over
    }

    /// Fails the operation and submits nothing more of it. Returns whether none of its requests is in flight.
    pub(crate) fn withdraw(&mut self, failure: IoErrorKind) -> bool {
        self.failure.get_or_insert(failure);
        self.submitted = self.bytes;
        self.is_io_over = self.outstanding == 0;
        self.is_io_over
    }
}
