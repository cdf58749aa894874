//! The work of `poll`: submit requests, collect completions, verify, write tables, check timeouts.
//!
//! Bounded: [`COMPLETIONS_PER_POLL`] completions, `checksum_bytes_per_poll` bytes of checksums,
//! `table_writes_max` table pages. A payload of several MiB is verified over several polls, between which
//! other operations complete.

use std::time::Instant;

use kvstore_io::{Completion, Full, IoErrorKind, Operation as Direction, PageBuffer};

use crate::format::PAGE_BYTES;
use crate::health::Health;
use crate::log::SlotUse;
use crate::operation::{OperationId, Purpose};
use crate::table::TableWrite;
use crate::{
    ClockReading, DiskCompletion, DiskCounters, DiskLog, MissReason, ReadCheck, ReadOutcome, WriteOutcome,
};

/// Maximum number of completions that one `poll` takes from the engine.
pub(crate) const COMPLETIONS_PER_POLL: usize = 64;

impl DiskLog {
    /// Does the work that can be done now and appends completed operations to `done`; returns their number.
    pub fn poll(&mut self, now: ClockReading, done: &mut Vec<DiskCompletion>) -> usize {
        self.now = now;
        self.hand_over();
        let mut completions = std::mem::take(&mut self.completions);
        self.engine.poll(COMPLETIONS_PER_POLL, &mut completions);
        completions.drain(..).for_each(|completion| self.complete(completion));
        self.completions = completions;
        self.verify();
        self.write_tables();
        self.end_flush();
        self.check_timeouts();
        self.probe();
        self.hand_over();
        let count = self.ready.len();
        done.extend(self.ready.drain(..));
        count
    }

    /// Time at which `poll` has work to do even if nothing completes.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let now = self.now.instant;
        if !self.ready.is_empty() || !self.unverified.is_empty() {
            return Some(now);
        }
        let is_available = self.is_available();
        let has_room = is_available && self.table_writes < self.config.table_writes_max;
        let tables = self.tables.oldest_dirty().filter(|_| has_room).map(|since| match self.flush {
            Some(_) => now,
            None if self.can_write() => since + self.config.table_delay,
            None => self.writes.refused_until.unwrap_or(now),
        });
        let timeout = (self.operations.in_use() > 0).then(|| now + self.config.operation_timeout / 4);
        let probe = match self.health {
            Health::Available => None,
            Health::Unavailable { probe_at, .. } => Some(probe_at),
        };
        [tables, timeout, probe].into_iter().flatten().min()
    }

    /// Submits queued requests as long as the engine has room, and flushes the engine.
    pub(crate) fn hand_over(&mut self) {
        for _ in 0..self.unsubmitted.len() {
            let Some(id) = self.unsubmitted.pop_front() else { break };
            if !self.submit_pieces(id) {
                self.unsubmitted.push_front(id);
                break;
            }
        }
        if std::mem::take(&mut self.is_unflushed)
            && let Err(error) = self.engine.flush()
        {
            // Flush again at the next call: the engine may not have handed all requests over.
            self.is_unflushed = true;
            self.note_failure(error.kind, Direction::Read);
        }
    }

    /// Submits an operation, or queues it behind the operations that wait already.
    pub(crate) fn submit(&mut self, id: OperationId) {
        if !self.unsubmitted.is_empty() || !self.submit_pieces(id) {
            self.unsubmitted.push_back(id);
        }
    }

    /// Submits the operation's requests. Returns whether the engine has accepted all of them.
    fn submit_pieces(&mut self, id: OperationId) -> bool {
        let transfer_bytes_max = self.engine.geometry().transfer_bytes_max;
        let Some(operation) = self.operations.get(id) else { return true };
        while let Some(request) = operation.next_request(id, transfer_bytes_max) {
            if let Err(Full(request)) = self.engine.submit(request) {
                operation.take_back(request);
                return false;
            }
            self.is_unflushed = true;
        }
        true
    }

    fn complete(&mut self, completion: Completion) {
        let id = OperationId::from_request_id(completion.id);
        let kind = completion.result.err().map(|error| error.kind);
        let Some(operation) = self.operations.get(id) else { return };
        let direction = operation.direction();
        if operation.complete(completion.buffer, kind) {
            self.end_io(id);
        }
        match kind {
            None => self.note_success(direction),
            Some(kind) => self.note_failure(kind, direction),
        }
    }

    /// Called when all requests of an operation have completed.
    pub(crate) fn end_io(&mut self, id: OperationId) {
        let Some(operation) = self.operations.get(id) else { return };
        let has_failed = operation.failure.is_some();
        match operation.purpose {
            Purpose::Idle => {}
            Purpose::Write { .. } => self.end_write(id),
            Purpose::Read { .. } if has_failed || operation.is_abandoned => self.end_read(id, None),
            Purpose::Read { check: ReadCheck::Caller, .. } => {
                let checksum = operation.record.checksum;
                self.end_read(id, Some(checksum));
            }
            Purpose::Read { check: ReadCheck::Log, .. } => self.unverified.push_back(id),
            Purpose::Table { .. } => self.end_table_write(id),
            Purpose::Probe => self.end_probe(id),
        }
    }

    /// Checksums payloads that were read, oldest first, within the budget of one poll.
    fn verify(&mut self) {
        let mut budget = self.config.checksum_bytes_per_poll;
        while budget > 0 {
            let Some(&id) = self.unverified.front() else { break };
            if let Some(operation) = self.operations.get(id)
                && let Some(memory) = operation.memory.as_ref()
            {
                let bytes = operation.record.bytes as usize;
                let Some(sum) = operation.checksum.advance(memory, bytes, &mut budget) else { break };
                self.end_read(id, Some(sum));
            }
            self.unverified.pop_front();
        }
    }

    fn end_write(&mut self, id: OperationId) {
        let now = self.now.instant;
        let Some(operation) = self.operations.get(id) else { return };
        let Purpose::Write { token, slot } = operation.purpose else { return };
        let outcome = match operation.failure {
            Some(kind) => WriteOutcome::Failed(kind),
            None if operation.is_superseded || operation.is_abandoned => WriteOutcome::Superseded,
            None => WriteOutcome::Stored,
        };
        let counter = if outcome == WriteOutcome::Stored {
            self.tables.put(slot, &operation.record, &operation.meta, now);
            self.slots[slot as usize] = SlotUse::Live;
            DiskCounters::add(&self.counters.written_bytes, operation.record.bytes.into());
            &self.counters.writes
        } else {
            self.slots[slot as usize] = SlotUse::Free;
            &self.counters.write_failures
        };
        DiskCounters::add(counter, u64::from(outcome != WriteOutcome::Superseded));
        if !operation.is_abandoned {
            let memory = operation.memory.take();
            self.ready.push_back(DiskCompletion::Written { token, slot, memory, outcome });
        }
        self.operations.end(id);
        self.block_operations -= 1;
    }

    /// `sum` is the checksum of the bytes, or the record's own if the caller compares it; `None` when they did not arrive.
    fn end_read(&mut self, id: OperationId, sum: Option<u64>) {
        let Some(operation) = self.operations.get(id) else { return };
        let Purpose::Read { token, slot, check } = operation.purpose else { return };
        let (record, failure, is_abandoned) = (operation.record, operation.failure, operation.is_abandoned);
        let memory = operation.memory.take();
        self.operations.end(id);
        self.block_operations -= 1;
        if is_abandoned {
            return;
        }
        let is_current = self.tables.live(slot).is_some_and(|now| now.generation == record.generation);
        let is_good = sum.is_some_and(|sum| self.accepts(sum, record.checksum));
        let outcome = if !is_current {
            ReadOutcome::Miss(MissReason::Stale)
        } else if is_good {
            match check {
                ReadCheck::Log => ReadOutcome::Verified { bytes: record.bytes },
                ReadCheck::Caller => ReadOutcome::Unverified { bytes: record.bytes },
            }
        } else {
            ReadOutcome::Miss(match failure {
                None => MissReason::Damaged,
                Some(IoErrorKind::Media) => MissReason::Media,
                Some(_) => MissReason::Device,
            })
        };
        if let ReadOutcome::Miss(MissReason::Damaged | MissReason::Media) = outcome {
            self.forget(slot);
        }
        self.count_read(outcome);
        self.ready.push_back(DiskCompletion::Read { token, slot, memory, outcome });
    }

    fn accepts(&self, found: u64, expected: u64) -> bool {
        #[cfg(test)]
        if self.trusts_device {
            return true;
        }
        found == expected
    }

    pub(crate) fn count_read(&self, outcome: ReadOutcome) {
        let counters = &self.counters;
        let counter = match outcome {
            ReadOutcome::Verified { bytes } | ReadOutcome::Unverified { bytes } => {
                DiskCounters::add(&counters.read_bytes, bytes.into());
                &counters.reads
            }
            ReadOutcome::Miss(MissReason::Damaged) => &counters.misses_damaged,
            ReadOutcome::Miss(MissReason::Stale) => &counters.misses_stale,
            ReadOutcome::Miss(MissReason::Media) => &counters.misses_media,
            ReadOutcome::Miss(MissReason::Device) => &counters.misses_device,
        };
        DiskCounters::add(counter, 1);
    }

    /// Starts the table writes that are due.
    fn write_tables(&mut self) {
        while self.can_write() && self.table_writes < self.config.table_writes_max {
            let Some(since) = self.tables.oldest_dirty() else { break };
            if self.flush.is_none() && since + self.config.table_delay > self.now.instant {
                break;
            }
            let Some(mut buffer) = self.spare_pages.pop() else { break };
            let Some((page, copy, offset)) = self.tables.start_write(self.usage, &mut buffer) else {
                self.spare_pages.push(buffer);
                break;
            };
            let file = self.tables.segments[page.segment as usize].layout.area.file;
            self.usage.add(self.now.unix_s, PAGE_BYTES as u64);
            self.table_writes += 1;
            self.start_page_operation(Purpose::Table { page, copy }, (file, offset), buffer);
        }
    }

    pub(crate) fn start_page_operation(&mut self, purpose: Purpose, place: (u32, u64), buffer: PageBuffer) {
        let range = (place.0, place.1, PAGE_BYTES);
        let id = self.operations.start(purpose, range);
        // There is a place for each block operation, each table write and the probe.
        let id = id.expect("a place for each page buffer");
        if let Some(operation) = self.operations.get(id) {
            operation.page = Some(buffer);
        }
        self.submit(id);
    }

    fn end_table_write(&mut self, id: OperationId) {
        let Some(operation) = self.operations.get(id) else { return };
        let Purpose::Table { page, copy } = operation.purpose else { return };
        let outcome = match operation.failure {
            None => TableWrite::Done,
            Some(IoErrorKind::Device) => TableWrite::DeviceFailed,
            Some(_) => TableWrite::Failed,
        };
        self.spare_pages.extend(operation.page.take());
        self.operations.end(id);
        self.table_writes -= 1;
        let given_up = self.tables.end_write(page, copy, outcome, self.now.instant);
        DiskCounters::add(&self.counters.table_writes, u64::from(outcome == TableWrite::Done));
        DiskCounters::add(&self.counters.table_write_failures, u64::from(given_up));
    }

    fn end_flush(&mut self) {
        let is_over = self.tables.awaited_pages == 0 || !self.can_write();
        let Some(flush) = self.flush.take_if(|_| is_over) else { return };
        let failed_pages = self.tables.end_flush_wait() + std::mem::take(&mut self.tables.given_up);
        let is_synced = flush.sync && self.can_write() && self.sync();
        self.ready.push_back(DiskCompletion::Flushed { token: flush.token, failed_pages, is_synced });
    }

    fn sync(&mut self) -> bool {
        let mut synced = None;
        for index in 0..self.tables.segments.len() {
            let file = self.tables.segments[index].layout.area.file;
            // Areas of one file mostly follow each other; a second sync of a file costs little.
            if synced.replace(file) == Some(file) {
                continue;
            }
            if let Err(error) = self.engine.sync(file) {
                self.note_failure(error.kind, Direction::Write);
                return false;
            }
        }
        true
    }
}
