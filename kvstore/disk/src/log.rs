//! [`DiskLog`]: the public calls. `drive.rs` holds what `poll` does.
//!
//! One thread. `read`, `write` and `forget` queue and return; `poll` hands over to the engine, collects, verifies,
//! writes tables and reports. Hot path (`read`, `write`, `poll`): no lock, no allocation, no system call but the
//! engine's own.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_memory::{Slab, SlotRef};
use kvstore_block::BlockIdentity;
use kvstore_io::{Completion, IoEngine, PageBuffer, Waker};

use crate::format::{PAGE_BYTES, Record, RecordState};
use crate::health::{Health, WriteHealth};
use crate::operation::{OperationId, Operations, Purpose};
use crate::table::Tables;
use crate::{
    Block, ClockReading, Closed, DiskCompletion, DiskConfig, DiskCounters, DiskError, MissReason, ReadCheck,
    ReadOutcome, Refusal, RefusedOperation, Usage,
};

/// State of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotUse {
    /// Holds no block.
    Free,
    Writing,
    Live,
}

/// A flush that was requested.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flush {
    pub(crate) token: u64,
    pub(crate) sync: bool,
}

/// The log of one store.
pub struct DiskLog {
    pub(crate) config: DiskConfig,
    pub(crate) engine: Box<dyn IoEngine>,
    pub(crate) tables: Tables,
    pub(crate) slots: Vec<SlotUse>,
    pub(crate) operations: Operations,
    /// Reads and writes of blocks in flight, at most `operations_max`.
    pub(crate) block_operations: u32,
    pub(crate) table_writes: u32,
    /// Operations with requests that the engine has not accepted yet.
    pub(crate) unsubmitted: VecDeque<OperationId>,
    /// Reads whose payload is yet to be verified.
    pub(crate) unverified: VecDeque<OperationId>,
    pub(crate) ready: VecDeque<DiskCompletion>,
    pub(crate) completions: Vec<Completion>,
    pub(crate) spare_pages: Vec<PageBuffer>,
    pub(crate) is_unflushed: bool,
    pub(crate) flush: Option<Flush>,
    pub(crate) health: Health,
    /// Consecutive failures of reads.
    pub(crate) failures: u32,
    pub(crate) writes: WriteHealth,
    pub(crate) timeouts_checked: Instant,
    pub(crate) generation: u64,
    pub(crate) usage: Usage,
    pub(crate) now: ClockReading,
    pub(crate) counters: Arc<DiskCounters>,
    /// Fault injected by tests: every payload that was read counts as verified.
    #[cfg(test)]
    pub(crate) trusts_device: bool,
}

impl DiskLog {
    pub(crate) fn assemble(
        config: DiskConfig,
        engine: Box<dyn IoEngine>,
        tables: Tables,
        usage: Usage,
        generation: u64,
        now: ClockReading,
    ) -> Self {
        let count = config.operations_max + config.table_writes_max + 1;
        let places = count as usize;
        Self {
            slots: vec![SlotUse::Free; tables.slots() as usize],
            operations: Operations::new(count, config.meta_bytes_max),
            block_operations: 0,
            table_writes: 0,
            unsubmitted: VecDeque::with_capacity(places),
            unverified: VecDeque::with_capacity(places),
            ready: VecDeque::with_capacity(places),
            completions: Vec::with_capacity(crate::drive::COMPLETIONS_PER_POLL),
            spare_pages: (0..=config.table_writes_max).map(|_| PageBuffer::zeroed(PAGE_BYTES)).collect(),
            is_unflushed: false,
            flush: None,
            health: Health::Available,
            failures: 0,
            writes: WriteHealth::GOOD,
            timeouts_checked: now.instant,
            generation,
            usage,
            now,
            counters: Arc::default(),
            #[cfg(test)]
            trusts_device: false,
            config,
            engine,
            tables,
        }
    }

    /// Sets the state of each slot from the tables.
    pub(crate) fn adopt_tables(&mut self) {
        for slot in 0..self.tables.slots() {
            self.slots[slot as usize] = match self.tables.record(slot).map(|record| record.state) {
                Some(RecordState::Live) => SlotUse::Live,
                Some(RecordState::Tombstone) | None => SlotUse::Free,
            };
        }
    }

    /// Registers memory that holds payloads with the engine.
    pub fn register(&mut self, slab: &Arc<Slab>) -> Result<(), DiskError> {
        self.engine.register(slab).map_err(|source| DiskError::Io { operation: "register memory", source })
    }

    /// Number of slots of the store.
    #[must_use]
    pub fn slot_count(&self) -> u32 {
        self.tables.slots()
    }

    /// Returns the block that a slot holds, as it was written; `None` when the slot is empty.
    #[must_use]
    pub fn block(&self, slot: u32) -> Option<Block<'_>> {
        let record = (slot < self.slot_count()).then(|| self.tables.live(slot)).flatten()?;
        let Record { identity, parent, tenant, checksum, .. } = record;
        Some(Block { identity, parent, tenant, checksum, meta: self.tables.meta(slot) })
    }

    /// Counters of this log.
    #[must_use]
    pub fn counters(&self) -> &Arc<DiskCounters> {
        &self.counters
    }

    /// Bytes that the device was made to write, for admission.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// The engine's name.
    #[must_use]
    pub fn engine_name(&self) -> &'static str {
        self.engine.name()
    }

    /// Whether the device answers. While it does not, reads and writes are refused. A device that only fails to write
    /// is available, and refuses writes.
    #[must_use]
    pub fn is_available(&self) -> bool {
        matches!(self.health, Health::Available)
    }

    /// Reads and writes of blocks that have not been reported.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.block_operations as usize
    }

    /// Begins to write the first `bytes` of `payload` into a slot. The slot's previous block is forgotten at
    /// once. Up to the next 4 KiB, bytes behind the payload reach the disk as well; reads never return them.
    /// The payload must not be written to until it comes back.
    pub fn write(
        &mut self,
        slot: u32,
        block: Block<'_>,
        payload: SlotRef,
        bytes: u32,
        token: u64,
    ) -> Result<(), RefusedOperation> {
        let length = (bytes as usize).next_multiple_of(PAGE_BYTES);
        let fits = bytes > 0
            && bytes <= self.config.slot_bytes
            && length <= payload.slab().layout().slot_bytes
            && block.meta.len() <= usize::from(self.config.meta_bytes_max);
        if let Some(reason) = self.refusal(slot, fits) {
            return Err(RefusedOperation { reason, memory: payload });
        }
        if !self.can_write() {
            return Err(RefusedOperation { reason: Refusal::Unavailable, memory: payload });
        }
        if self.slots[slot as usize] == SlotUse::Writing {
            return Err(RefusedOperation { reason: Refusal::SlotBusy, memory: payload });
        }
        let range = self.payload_range(slot, length);
        let Some(id) = self.operations.start(Purpose::Write { token, slot }, range) else {
            return Err(RefusedOperation { reason: Refusal::Full, memory: payload });
        };
        self.forget(slot);
        self.slots[slot as usize] = SlotUse::Writing;
        let record = Record {
            identity: block.identity,
            parent: block.parent,
            checksum: block.checksum,
            generation: self.generation,
            bytes,
            tenant: block.tenant,
            written_at_s: u32::try_from(self.now.unix_s).unwrap_or(u32::MAX),
            meta_bytes: block.meta.len() as u16,
            state: RecordState::Live,
        };
        self.generation += 1;
        self.usage.add(self.now.unix_s, length as u64);
        self.begin(id, record, payload);
        if let Some(operation) = self.operations.get(id) {
            operation.meta.clear();
            operation.meta.extend_from_slice(block.meta);
        }
        Ok(())
    }

    /// Begins to read the block in a slot into `target`: one request of its payload, rounded up to 4 KiB. A slot that
    /// does not hold this block is a miss, without I/O.
    pub fn read(
        &mut self,
        slot: u32,
        identity: BlockIdentity,
        target: SlotRef,
        check: ReadCheck,
        token: u64,
    ) -> Result<(), RefusedOperation> {
        if let Some(reason) = self.refusal(slot, true) {
            return Err(RefusedOperation { reason, memory: target });
        }
        let found = self.tables.live(slot).filter(|record| record.identity == identity);
        let Some(record) = found.filter(|_| self.slots[slot as usize] == SlotUse::Live) else {
            DiskCounters::add(&self.counters.misses_stale, 1);
            let outcome = ReadOutcome::Miss(MissReason::Stale);
            self.ready.push_back(DiskCompletion::Read { token, slot, memory: Some(target), outcome });
            return Ok(());
        };
        let length = (record.bytes as usize).next_multiple_of(PAGE_BYTES);
        if length > target.slab().layout().slot_bytes {
            return Err(RefusedOperation { reason: Refusal::Invalid, memory: target });
        }
        let range = self.payload_range(slot, length);
        let Some(id) = self.operations.start(Purpose::Read { token, slot, check }, range) else {
            return Err(RefusedOperation { reason: Refusal::Full, memory: target });
        };
        self.begin(id, record, target);
        Ok(())
    }

    fn refusal(&self, slot: u32, fits: bool) -> Option<Refusal> {
        if slot >= self.slot_count() || !fits {
            Some(Refusal::Invalid)
        } else if !self.is_available() {
            Some(Refusal::Unavailable)
        } else if self.block_operations >= self.config.operations_max
            || self.ready.len() >= self.ready.capacity()
        {
            Some(Refusal::Full)
        } else {
            None
        }
    }

    fn payload_range(&self, slot: u32, length: usize) -> (u32, u64, usize) {
        let (segment, local) = self.tables.locate(slot);
        let layout = &self.tables.segments[segment].layout;
        (layout.area.file, layout.slot_offset(local), length)
    }

    fn begin(&mut self, id: OperationId, record: Record, memory: SlotRef) {
        self.block_operations += 1;
        if let Some(operation) = self.operations.get(id) {
            operation.record = record;
            operation.memory = Some(memory);
            operation.checksum.reset();
        }
        self.submit(id);
    }

    /// Forgets the block in a slot; returns whether there was one. The tombstone follows with the next table
    /// write of its page. A write in flight ends as superseded.
    pub fn forget(&mut self, slot: u32) -> bool {
        match self.slots.get(slot as usize) {
            Some(SlotUse::Live) => {
                self.tables.write_tombstone(slot, self.now.instant);
                self.slots[slot as usize] = SlotUse::Free;
                DiskCounters::add(&self.counters.tombstones, 1);
                true
            }
            Some(SlotUse::Writing) => self.supersede(slot),
            _ => false,
        }
    }

    fn supersede(&mut self, slot: u32) -> bool {
        let writes = |purpose| matches!(purpose, Purpose::Write { slot: other, .. } if other == slot);
        let found = self.operations.iter().find(|(_, operation)| writes(operation.purpose)).map(|(id, _)| id);
        let Some(operation) = found.and_then(|id| self.operations.get(id)) else { return false };
        !std::mem::replace(&mut operation.is_superseded, true)
    }

    /// Writes all records that are not on the disk, without waiting for more to share a page. With `sync` the
    /// files are then put on stable storage, which blocks. Returns false when an earlier flush is in flight.
    pub fn flush(&mut self, token: u64, sync: bool) -> bool {
        if self.flush.is_some() {
            return false;
        }
        self.flush = Some(Flush { token, sync });
        self.tables.begin_flush_wait(self.now.instant);
        true
    }

    /// Ends the sleep of `wait` from another thread.
    #[must_use]
    pub fn waker(&self) -> Arc<dyn Waker> {
        self.engine.waker()
    }

    /// Sleeps until `poll` has something to do, until woken, or until the given time; may return early.
    pub fn wait(&mut self, until: Option<Instant>) -> Result<(), DiskError> {
        let deadline = [until, self.next_deadline()].into_iter().flatten().min();
        if deadline.is_some_and(|deadline| deadline <= self.now.instant) {
            return Ok(());
        }
        self.hand_over();
        self.engine.wait(deadline).map_err(|source| DiskError::Io { operation: "wait", source })
    }

    /// Completes the operations in flight, then writes and syncs all records. Gives up after `within`; only a
    /// sync that hangs in the kernel takes longer.
    ///
    /// Dropping an engine waits for its requests, so an engine that still has some then is leaked: its memory
    /// is never used again, and its files stay open and locked until the process ends. Dropping a log waits for
    /// them.
    #[must_use]
    pub fn close(mut self, within: Duration) -> Closed {
        let deadline = Instant::now() + within;
        let mut done = Vec::new();
        let mut is_clean = None;
        let mut is_flushing = false;
        while is_clean.is_none() && Instant::now() < deadline {
            if self.block_operations == 0 && !is_flushing {
                is_flushing = self.flush(u64::MAX, true);
            }
            self.poll(ClockReading::now(), &mut done);
            is_clean = done.iter().find_map(|done| match done {
                DiskCompletion::Flushed { token: u64::MAX, failed_pages, is_synced } => {
                    Some(*failed_pages == 0 && *is_synced)
                }
                _ => None,
            });
            if is_clean.is_none() && self.wait(Some(deadline)).is_err() {
                break;
            }
        }
        release(self.engine, deadline);
        Closed { is_clean: is_clean.unwrap_or(false), done }
    }
}

/// Drops an engine, or leaks one that has requests in flight at the deadline.
pub(crate) fn release(mut engine: Box<dyn IoEngine>, deadline: Instant) {
    let mut completions = Vec::new();
    loop {
        engine.poll(crate::drive::COMPLETIONS_PER_POLL, &mut completions);
        completions.clear();
        if engine.in_flight() == 0 {
            return;
        }
        if Instant::now() >= deadline || engine.wait(Some(deadline)).is_err() {
            // The engine owns the memory of requests in flight, which the device may still write to.
            std::mem::forget(engine);
            return;
        }
    }
}
