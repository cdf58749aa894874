//! The disk as the model plays it: it keeps blocks in a map, and answers when and how it is told to.

use std::collections::HashMap;

use crossbeam_channel::{Receiver, Sender};
use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;
use kvstore_disk::{ReadCheck, Usage};

use super::{Random, content};
use crate::disk::{DiskCommand, DiskResult, NO_PARENT, Read, Write};
use crate::job::Description;
use crate::store_thread::Message;
use crate::tiers::parse_meta;

/// A block as the disk keeps it.
struct Kept {
    identity: BlockIdentity,
    parent: BlockIdentity,
    meta: Vec<u8>,
    checksum: u64,
    tenant: u32,
    bytes: Vec<u8>,
}

enum Operation {
    Write(Box<Write>),
    Read(Box<Read>),
}

impl Operation {
    fn disk_slot(&self) -> u32 {
        match self {
            Self::Write(write) => write.filling.slot(),
            Self::Read(read) => read.lease.slot(),
        }
    }
}

/// Chance of each fault, in percent.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Faults {
    pub(super) failed: usize,
    pub(super) stuck: usize,
    pub(super) rotten: usize,
}

pub(super) struct ModelDisk {
    inbox: Receiver<DiskCommand>,
    results: Sender<Message>,
    faults: Faults,
    kept: HashMap<u32, Kept>,
    in_flight: Vec<Operation>,
    /// Operations that it has not answered in their time.
    stuck: Vec<Operation>,
    pub(super) answered: u64,
    pub(super) found_rotten: u64,
}

impl ModelDisk {
    pub(super) fn new(inbox: Receiver<DiskCommand>, results: Sender<Message>, faults: Faults) -> Self {
        let (kept, in_flight, stuck) = (HashMap::new(), Vec::new(), Vec::new());
        Self { inbox, results, faults, kept, in_flight, stuck, answered: 0, found_rotten: 0 }
    }

    /// Slots and the blocks in them that it would give back after a restart.
    pub(super) fn kept(&self) -> impl Iterator<Item = (u32, BlockIdentity)> {
        self.kept.iter().map(|(&slot, kept)| (slot, kept.identity))
    }

    /// Whether it gives back damaged blocks now and then.
    pub(super) fn may_rot(&self) -> bool {
        self.faults.rotten > 0
    }

    /// Whether its reads fail now and then.
    pub(super) fn may_fail(&self) -> bool {
        self.faults.failed > 0
    }

    pub(super) fn is_idle(&self) -> bool {
        self.inbox.is_empty() && self.in_flight.is_empty() && self.stuck.is_empty()
    }

    /// Takes a command, if there is one.
    pub(super) fn take_command(&mut self) {
        let Ok(command) = self.inbox.try_recv() else { return };
        let operation = match command {
            DiskCommand::Write(write) => Operation::Write(write),
            DiskCommand::Read(read) => Operation::Read(read),
            DiskCommand::Forget(slot) => {
                let is_written = |operation: &Operation| {
                    operation.disk_slot() == slot && matches!(operation, Operation::Write(_))
                };
                assert!(!self.all().any(is_written), "slot {slot} is forgotten while it is written");
                self.kept.remove(&slot);
                return;
            }
        };
        let slot = operation.disk_slot();
        match &operation {
            Operation::Write(_) => {
                assert!(
                    self.all().all(|other| other.disk_slot() != slot),
                    "slot {slot} is in use and is written"
                );
            }
            Operation::Read(read) => {
                let kept = self.kept.get(&slot).map(|kept| kept.identity);
                assert_eq!(
                    kept,
                    Some(read.identity),
                    "slot {slot} is read for a block that it does not have"
                );
            }
        }
        self.in_flight.push(operation);
    }

    fn all(&self) -> impl Iterator<Item = &Operation> {
        self.in_flight.iter().chain(&self.stuck)
    }

    /// Answers an operation: any of them, in any order.
    pub(super) fn answer(&mut self, random: &mut Random, is_honest: bool) {
        let faults = if is_honest { Faults::default() } else { self.faults };
        if !self.stuck.is_empty() && (self.in_flight.is_empty() || random.percent(20)) {
            let at = random.below(self.stuck.len());
            let operation = self.stuck.swap_remove(at);
            return self.release(operation, random);
        }
        if self.in_flight.is_empty() {
            return;
        }
        let at = random.below(self.in_flight.len());
        let operation = self.in_flight.swap_remove(at);
        if random.percent(faults.stuck) {
            let (identity, is_write) = match &operation {
                Operation::Write(write) => (write.identity, true),
                Operation::Read(read) => (read.identity, false),
            };
            self.send(DiskResult::Stuck { identity, is_write });
            return self.stuck.push(operation);
        }
        self.answered += 1;
        match operation {
            Operation::Write(write) => {
                let is_written = !random.percent(faults.failed);
                if is_written {
                    self.keep(&write);
                }
                self.wrote(write, is_written);
            }
            Operation::Read(read) => self.read(read, random, faults),
        }
    }

    /// The device lets go of an operation after its time. Of a write it may have kept the block or not.
    fn release(&mut self, operation: Operation, random: &mut Random) {
        match operation {
            Operation::Write(write) => {
                if random.percent(50) {
                    self.keep(&write);
                }
                self.wrote(write, false);
            }
            Operation::Read(read) => self.send(DiskResult::Read { read, bytes: None, is_gone: false }),
        }
    }

    fn read(&mut self, mut read: Box<Read>, random: &mut Random, faults: Faults) {
        if random.percent(faults.failed) {
            let is_gone = random.percent(50);
            return self.send(DiskResult::Read { read, bytes: None, is_gone });
        }
        // Forgotten since it began: the log gives what it reads all the same, if it is whole.
        let slot = read.lease.slot();
        let Some(kept) = self.kept.get(&slot).filter(|kept| kept.identity == read.identity) else {
            return self.send(DiskResult::Read { read, bytes: None, is_gone: true });
        };
        let mut bytes = kept.bytes.clone();
        if random.percent(faults.rotten) {
            bytes[random.below(super::BLOCK)] ^= 1;
        }
        self.found_rotten += u64::from(bytes[..] != content(&read.identity)[..]);
        if read.check == ReadCheck::Log && dataplane_checksum::checksum(&bytes) != kept.checksum {
            return self.send(DiskResult::Read { read, bytes: None, is_gone: true });
        }
        write_slot(&read.target, &bytes);
        let parent = (kept.parent != NO_PARENT).then_some(kept.parent);
        let (position, meta) = parse_meta(&kept.meta).expect("what the store gave");
        let tenant = crate::TenantId(kept.tenant);
        read.description = Some(Description { parent, position, meta: meta.into(), tenant });
        let bytes = Some(bytes.len() as u32);
        self.send(DiskResult::Read { read, bytes, is_gone: false });
    }

    fn keep(&mut self, write: &Write) {
        let mut bytes = vec![0; write.bytes as usize];
        write.payload.slab().read(write.payload.slot(), 0, &mut bytes);
        let (identity, meta, tenant) = (write.identity, write.meta.clone(), write.tenant.0);
        let (parent, checksum) = (write.parent.unwrap_or(NO_PARENT), write.hold.checksum());
        self.kept.insert(write.filling.slot(), Kept { identity, parent, meta, checksum, tenant, bytes });
    }

    fn wrote(&self, write: Box<Write>, is_written: bool) {
        self.send(DiskResult::Written { write, is_written, usage: Usage::default() });
    }

    fn send(&self, result: DiskResult) {
        self.results.send(Message::Disk(result)).expect("the store is there");
    }
}

pub(super) fn write_slot(slot: &SlotRef, bytes: &[u8]) {
    slot.slab().write(slot.slot(), 0, bytes);
}
