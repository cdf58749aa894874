//! Simulated power cut: writes that are not guaranteed to be stable land in whole, in part or not at all.
//!
//! All writes since the last sync are undone, newest first, and then repeated in their order if they survive,
//! so that a write that survives on top of one that does not has its own bytes.

use std::time::{Duration, Instant};

use super::contents::{copy_of, tear};
use super::engine::FaultyEngine;
use crate::{Buffer, Completion, IoEngine, IoError, IoErrorKind, Operation, PageBuffer, Request};

/// Writes that a power cut spares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PowerCut {
    /// Completed writes: a device without a volatile cache, or with a capacitor.
    SparesCompleted,
    /// Only writes that a sync after their completion covered.
    SparesSynced,
}

/// A write that is not stable yet.
pub(super) struct Record {
    pub(super) number: u64,
    pub(super) file: u32,
    pub(super) offset: u64,
    pub(super) old: PageBuffer,
    pub(super) new: PageBuffer,
    /// Whether the completion was handed to the caller.
    pub(super) completed: bool,
}

impl<E: IoEngine> FaultyEngine<E> {
    /// Cuts the power and restores it: requests in flight are lost without a completion, and their buffers are
    /// free. Returns the number of writes that were lost or torn. Needs [`super::Faults::track_unsynced`].
    pub fn power_cut(&mut self, spares: PowerCut) -> Result<u64, IoError> {
        if !self.faults().track_unsynced {
            return Err(IoError {
                engine: self.name(),
                operation: "cut the power".to_owned(),
                kind: IoErrorKind::Unsupported,
                reason: "writes are not tracked".to_owned(),
            });
        }
        self.inner.flush()?;
        let mut arrived = Vec::new();
        while self.inner.in_flight() > 0 {
            if self.inner.poll(usize::MAX, &mut arrived) == 0 {
                self.inner.wait(Some(Instant::now() + Duration::from_millis(10)))?;
            }
        }
        drop(arrived);
        self.under_way.clear();
        self.forget_held();
        self.set_gone(false);
        let mut records = std::mem::take(&mut self.unsynced);
        for record in records.iter_mut().rev() {
            let old = std::mem::replace(&mut record.old, PageBuffer::zeroed(1));
            record.old = self.write_back(record.file, record.offset, old)?;
        }
        let mut lost = 0;
        for Record { file, offset, old, mut new, completed, .. } in records {
            let spared = completed && spares == PowerCut::SparesCompleted;
            // The write survives in whole, in part, or not at all.
            match if spared { 0 } else { self.random.below(3) } {
                0 => {}
                1 => {
                    // The present contents may come from a write before this one.
                    let mut now = old;
                    now = self.read_back(file, offset, now)?;
                    tear(&mut self.random, &now, &mut new);
                    lost += 1;
                }
                _ => {
                    lost += 1;
                    continue;
                }
            }
            self.write_back(file, offset, new)?;
        }
        self.counters.power_cut_writes += lost;
        Ok(lost)
    }

    fn write_back(&mut self, file: u32, offset: u64, buffer: PageBuffer) -> Result<PageBuffer, IoError> {
        self.run(Operation::Write, file, offset, buffer)
    }

    fn read_back(&mut self, file: u32, offset: u64, buffer: PageBuffer) -> Result<PageBuffer, IoError> {
        self.run(Operation::Read, file, offset, buffer)
    }

    /// Runs one request of the wrapped engine, which is idle; blocks.
    fn run(
        &mut self,
        operation: Operation,
        file: u32,
        offset: u64,
        buffer: PageBuffer,
    ) -> Result<PageBuffer, IoError> {
        let request = Request { id: u64::MAX, operation, file, offset, buffer: Buffer::Pages(buffer) };
        let refused = self.inner.submit(request);
        assert!(refused.is_ok(), "the engine is idle");
        self.inner.flush()?;
        let mut arrived = Vec::new();
        loop {
            self.inner.poll(1, &mut arrived);
            if let Some(Completion { buffer, result, .. }) = arrived.pop() {
                result?;
                return Ok(match buffer {
                    Buffer::Pages(pages) => pages,
                    slot => copy_of(&slot),
                });
            }
            self.inner.wait(Some(Instant::now() + Duration::from_millis(10)))?;
        }
    }
}
