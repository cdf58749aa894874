//! The thread that drives the disk's log, and opens it: an engine belongs to the thread that uses it first.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, TryRecvError};
use dataplane_memory::SlotRef;
use kvstore_catalog::TenantId;
use kvstore_disk::{Block, ClockReading, DiskCompletion, DiskLog, MissReason, ReadOutcome, WriteOutcome};

use super::{DiskCommand, DiskResult, NO_PARENT, Read, Write};
use crate::Description;
use crate::tiers::parse_meta;

/// The longest sleep: a wake-up that was lost would cost no more than that.
const SLEEP_MAX: Duration = Duration::from_millis(100);
/// Completed operations that are looked at in one go.
const BATCH: usize = 256;
/// Longest time that the log may take at the end to put its records on stable storage.
const CLOSE_MAX: Duration = Duration::from_secs(5);

enum InFlightOperation {
    Write(Box<Write>),
    Read(Box<Read>),
}

pub(super) struct Driver {
    log: DiskLog,
    inbox: Receiver<DiskCommand>,
    depth: usize,
    under_way: HashMap<u64, InFlightOperation>,
    /// Operations that were given up although the device may still access their memory: their guards stay
    /// until it cannot.
    abandoned_operations: Vec<(SlotRef, InFlightOperation)>,
    next_token: u64,
    report: Box<dyn FnMut(DiskResult) + Send>,
}

impl Driver {
    /// `depth`: operations that may be under way. `report` is called on this thread and must not block.
    pub(super) fn new(
        log: DiskLog,
        inbox: Receiver<DiskCommand>,
        depth: usize,
        report: Box<dyn FnMut(DiskResult) + Send>,
    ) -> Self {
        Self {
            log,
            inbox,
            depth,
            under_way: HashMap::new(),
            abandoned_operations: Vec::new(),
            next_token: 0,
            report,
        }
    }

    pub(super) fn run(mut self) {
        let mut done = Vec::with_capacity(BATCH);
        let mut is_open = true;
        while is_open || !self.under_way.is_empty() {
            is_open = is_open && self.take_commands();
            self.log.poll(ClockReading::now(), &mut done);
            let is_full = self.under_way.len() >= self.depth;
            let is_idle = done.is_empty() && (is_full || self.inbox.is_empty());
            for done in done.drain(..) {
                self.finished(done);
            }
            self.reap_abandoned();
            if is_idle && (is_open || !self.under_way.is_empty()) {
                let until = Instant::now() + SLEEP_MAX;
                if let Err(error) = self.log.wait(Some(until)) {
                    tracing::warn!("disk tier: {error}");
                    std::thread::sleep(SLEEP_MAX);
                }
            }
        }
        let closed = self.log.close(CLOSE_MAX);
        if !closed.is_clean {
            tracing::warn!(
                "disk tier: closed before every record was on stable storage; the blocks of the rest are lost"
            );
        }
    }

    /// Starts queued commands, as far as there is room; false when every sender is gone.
    fn take_commands(&mut self) -> bool {
        while self.under_way.len() < self.depth {
            match self.inbox.try_recv() {
                Ok(command) => self.start(command),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
        true
    }

    fn start(&mut self, command: DiskCommand) {
        let token = self.next_token;
        self.next_token += 1;
        match command {
            DiskCommand::Forget(slot) => {
                self.log.forget(slot);
            }
            DiskCommand::Read(read) => {
                let target = read.target.clone();
                match self.log.read(read.lease.slot(), read.identity, target, read.check, token) {
                    Ok(()) => drop(self.under_way.insert(token, InFlightOperation::Read(read))),
                    Err(_) => (self.report)(DiskResult::Read { read, bytes: None, is_gone: false }),
                }
            }
            DiskCommand::Write(write) => {
                let block = Block {
                    identity: write.identity,
                    parent: write.parent.unwrap_or(NO_PARENT),
                    tenant: write.tenant.0,
                    checksum: write.hold.checksum(),
                    meta: &write.meta,
                };
                let started =
                    self.log.write(write.filling.slot(), block, write.payload.clone(), write.bytes, token);
                match started {
                    Ok(()) => drop(self.under_way.insert(token, InFlightOperation::Write(write))),
                    Err(_) => self.wrote(write, false),
                }
            }
        }
    }

    fn wrote(&mut self, write: Box<Write>, is_written: bool) {
        let usage = self.log.usage();
        (self.report)(DiskResult::Written { write, is_written, usage });
    }

    fn finished(&mut self, done: DiskCompletion) {
        match done {
            DiskCompletion::Written { token, memory, outcome, .. } => {
                let Some(InFlightOperation::Write(write)) = self.under_way.remove(&token) else { return };
                if memory.is_none() {
                    (self.report)(DiskResult::Stuck { identity: write.identity, is_write: true });
                    return self
                        .abandoned_operations
                        .push((write.payload.clone(), InFlightOperation::Write(write)));
                }
                drop(memory);
                self.wrote(write, outcome == WriteOutcome::Stored);
            }
            DiskCompletion::Read { token, memory, outcome, .. } => {
                let Some(InFlightOperation::Read(mut read)) = self.under_way.remove(&token) else { return };
                if memory.is_none() {
                    (self.report)(DiskResult::Stuck { identity: read.identity, is_write: false });
                    return self
                        .abandoned_operations
                        .push((read.target.clone(), InFlightOperation::Read(read)));
                }
                drop(memory);
                let (mut bytes, mut is_gone) = match outcome {
                    ReadOutcome::Verified { bytes } | ReadOutcome::Unverified { bytes } => {
                        (Some(bytes), false)
                    }
                    ReadOutcome::Miss(MissReason::Device) => (None, false),
                    ReadOutcome::Miss(_) => (None, true),
                };
                if bytes.is_some() {
                    // The slot may hold a newer write of the block by now.
                    let stored = self.log.block(read.lease.slot());
                    let stored = stored.filter(|block| {
                        block.identity == read.identity && block.checksum == read.lease.checksum()
                    });
                    (bytes, is_gone) = (bytes.filter(|_| stored.is_some()), stored.is_none());
                    read.description = stored.as_ref().and_then(describe);
                }
                (self.report)(DiskResult::Read { read, bytes, is_gone });
            }
            DiskCompletion::Flushed { .. } => {}
        }
    }

    /// Reports operations that the device did not answer, once it cannot access their memory any more.
    fn reap_abandoned(&mut self) {
        // References to the slot without those of the device: of `abandoned_operations`, of the operation, and of the tier.
        const REFERENCES_WITHOUT_DEVICE: u32 = 3;
        let is_free = |(slot, _): &mut (SlotRef, InFlightOperation)| {
            slot.reference_count() <= REFERENCES_WITHOUT_DEVICE
        };
        let released: Vec<_> = self.abandoned_operations.extract_if(.., is_free).collect();
        for (_, operation) in released {
            match operation {
                InFlightOperation::Write(write) => self.wrote(write, false),
                InFlightOperation::Read(read) => {
                    (self.report)(DiskResult::Read { read, bytes: None, is_gone: false })
                }
            }
        }
    }
}

/// Returns the description of a block, from the metadata that the disk keeps with it.
fn describe(block: &Block<'_>) -> Option<Description> {
    let (position, meta) = parse_meta(block.meta)?;
    let parent = (block.parent != NO_PARENT).then_some(block.parent);
    Some(Description { parent, position, meta: meta.into(), tenant: TenantId(block.tenant) })
}
