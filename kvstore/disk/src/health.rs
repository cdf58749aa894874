//! Health of the device: detection of failures, outages and probing.
//!
//! An engine that reports a failed device, or that does not answer for `operation_timeout`, makes the log
//! unavailable: every operation then ends at once as a miss or is refused, until a read of the first header
//! of each device of the log succeeds. So do failures of reads in a row, whatever their kind: a medium does not
//! lose everything that is read. Memory that the engine still holds is not given back, since the device may yet write into it.
//!
//! Writes are judged apart. A device that is full, worn out or write protected still reads: when only its
//! writes fail, they are refused for a while, and the writes after that pause show whether the device accepts
//! them again.

use std::time::{Duration, Instant};

use kvstore_io::{IoErrorKind, Operation as Direction};

use crate::layout::PageCopy;
use crate::operation::{OperationId, Purpose};
use crate::{DiskCompletion, DiskCounters, DiskLog, MissReason, ReadOutcome, WriteOutcome};

/// Consecutive failures of reads that make the log unavailable, and of writes that make it refuse writes.
const FAILURES_MAX: u32 = 8;
/// Maximum pause between probes, as a multiple of the first; the pause doubles until then.
const PROBE_BACKOFF_MAX: u32 = 32;

/// Whether the device answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Health {
    Available,
    /// Time of the next probe, the pause after it in units of the first, and the device that is probed next.
    Unavailable {
        probe_at: Instant,
        backoff: u32,
        column: u32,
    },
}

/// Health of writes while reads succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WriteHealth {
    /// Consecutive failures of writes.
    failures: u32,
    /// End of the pause during which writes are refused.
    pub(crate) refused_until: Option<Instant>,
    /// The next pause in units of the first.
    backoff: u32,
}

impl WriteHealth {
    pub(crate) const GOOD: Self = Self { failures: 0, refused_until: None, backoff: 1 };
}

impl DiskLog {
    /// Whether the device may be asked to write.
    pub(crate) fn can_write(&self) -> bool {
        self.is_available() && self.writes.refused_until.is_none_or(|until| self.now.instant >= until)
    }

    pub(crate) fn note_success(&mut self, direction: Direction) {
        match direction {
            Direction::Read => self.failures = 0,
            Direction::Write => {
                if self.writes.refused_until.is_some() {
                    self.tables.retry_stale_pages(self.now.instant);
                }
                self.writes = WriteHealth::GOOD;
            }
        }
    }

    pub(crate) fn note_failure(&mut self, kind: IoErrorKind, direction: Direction) {
        match (kind, direction) {
            (IoErrorKind::Device, _) => self.suspend(),
            (_, Direction::Read) => {
                self.failures += 1;
                if self.failures >= FAILURES_MAX {
                    self.suspend();
                }
            }
            (_, Direction::Write) => {
                self.writes.failures += 1;
                // Failures of writes that were in flight when the pause began do not extend it.
                if self.writes.failures >= FAILURES_MAX && self.can_write() {
                    let pause = self.config.probe_interval * self.writes.backoff;
                    self.writes.refused_until = Some(self.now.instant + pause);
                    self.writes.backoff = (self.writes.backoff * 2).min(PROBE_BACKOFF_MAX);
                }
            }
        }
    }

    /// Makes the log unavailable. Operations that the engine has none of end now, the rest when the engine
    /// answers or times out.
    fn suspend(&mut self) {
        if !self.is_available() {
            return;
        }
        DiskCounters::add(&self.counters.outages, 1);
        let probe_at = self.now.instant + self.config.probe_interval;
        self.health = Health::Unavailable { probe_at, backoff: 2, column: 0 };
        while let Some(id) = self.unsubmitted.pop_front() {
            if self.operations.get(id).is_some_and(|operation| operation.withdraw(IoErrorKind::Device)) {
                self.end_io(id);
            }
        }
    }

    pub(crate) fn check_timeouts(&mut self) {
        if self.operations.in_use() == 0 || !self.is_timeout_check_due() {
            return;
        }
        for index in 0..self.operations.len() {
            let id = self.operations.id_at(index);
            let now = self.now.instant;
            let timeout = self.config.operation_timeout;
            let Some(operation) = self.operations.get(id) else { continue };
            let started = *operation.started.get_or_insert(now);
            let is_late = now.saturating_duration_since(started) >= timeout;
            if is_late && !operation.is_abandoned && !operation.is_io_over {
                self.abandon(id);
            }
        }
    }

    fn is_timeout_check_due(&mut self) -> bool {
        let period = (self.config.operation_timeout / 16).max(Duration::from_millis(1));
        let is_due = self.now.instant.saturating_duration_since(self.timeouts_checked) >= period;
        if is_due {
            self.timeouts_checked = self.now.instant;
        }
        is_due
    }

    /// Reports an operation that timed out. Its entry stays in use until the engine answers.
    fn abandon(&mut self, id: OperationId) {
        let Some(operation) = self.operations.get(id) else { return };
        DiskCounters::add(&self.counters.timeouts, 1);
        if operation.withdraw(IoErrorKind::Device) {
            // The engine holds none of its requests.
            self.end_io(id);
        } else {
            operation.is_abandoned = true;
            match operation.purpose {
                Purpose::Write { token, slot } => {
                    let outcome = WriteOutcome::Failed(IoErrorKind::Device);
                    self.ready.push_back(DiskCompletion::Written { token, slot, memory: None, outcome });
                }
                Purpose::Read { token, slot, .. } => {
                    let outcome = ReadOutcome::Miss(MissReason::Device);
                    self.count_read(outcome);
                    self.ready.push_back(DiskCompletion::Read { token, slot, memory: None, outcome });
                }
                Purpose::Table { .. } | Purpose::Probe | Purpose::Idle => {}
            }
        }
        self.suspend();
    }

    /// Tries the devices of an unavailable log with reads of their first headers, one at a time.
    pub(crate) fn probe(&mut self) {
        let Health::Unavailable { probe_at, backoff, column } = self.health else { return };
        if self.now.instant < probe_at {
            return;
        }
        let probe_at = self.now.instant + self.config.probe_interval * backoff;
        self.health = Health::Unavailable { probe_at, backoff: (backoff * 2).min(PROBE_BACKOFF_MAX), column };
        let is_probing = self.operations.iter().any(|(_, operation)| operation.purpose == Purpose::Probe);
        let layout = self.tables.segments[column as usize].layout;
        if !is_probing && let Some(buffer) = self.spare_pages.pop() {
            let place = (layout.area.file, layout.header_offset(PageCopy::A));
            self.start_page_operation(Purpose::Probe, place, buffer);
        }
    }

    pub(crate) fn end_probe(&mut self, id: OperationId) {
        let Some(operation) = self.operations.get(id) else { return };
        // A media error is an answer too.
        let is_answered = matches!(operation.failure, None | Some(IoErrorKind::Media));
        let is_late = operation.is_abandoned;
        self.spare_pages.extend(operation.page.take());
        self.operations.end(id);
        let Health::Unavailable { probe_at, backoff, column } = self.health else { return };
        // A log over several devices needs all of them: with one of them alone the next read of another would wait for
        // its timeout again. Devices that answered long ago are probed again.
        self.health = match column + 1 {
            _ if !is_answered || (is_late && column > 0) => {
                Health::Unavailable { probe_at, backoff, column: 0 }
            }
            next if next < self.config.stripes => {
                Health::Unavailable { probe_at: self.now.instant, backoff: 2, column: next }
            }
            _ => Health::Available,
        };
        if self.is_available() {
            self.failures = 0;
        }
    }
}
