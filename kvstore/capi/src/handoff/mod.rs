//! Hand-offs of blocks between engines: from the tensors of the one that computes a prompt to the tensors of the one that
//! generates from it.
//!
//! A block travels through a slot of this library's own memory on each side. The sender's thread copies each layer of it
//! into a slot as soon as it is computed, so that the engine may use the block's memory again, and
//! [`TransferService`] sends it from there. The receiver's slots are all that peers can write to; a block is copied
//! from there into the engine's tensors when it was verified. So no peer ever writes to an engine's memory.
//!
//! Threads: submitting takes a lock for a moment and never waits; copies are carried out by the threads of the
//! [`crate::queue`]; the service has a thread of its own.

mod copy;
mod open;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use dataplane_memory::{SlotPool, SlotRef};
use dataplane_rails::Addresses;
use dataplane_transfer::{
    Command, Notice, Outcome as Arrival, TransferCounters, TransferId, TransferService,
};

pub(crate) use copy::Shape;

use crate::lock::lock;
use crate::operation::Outcome;
use crate::queue::{Completions, Submitted, Work};
use crate::registry::InUse;
use crate::status::{Failure, Status};

/// How a received transfer ended, `kvasir_kv_ending` in C.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Every block is here.
    Complete = 0,
    /// A checksum did not match.
    Corrupted = 1,
    /// The sender stopped before the end, or has other blocks than the ones that were expected.
    SenderStopped = 2,
    /// The connection could not be made, or ended.
    PeerDown = 3,
    /// The deadline passed.
    Deadline = 4,
    /// There were too many transfers, no memory for its blocks, or a bad address.
    Refused = 5,
    /// It was cancelled here.
    Cancelled = 6,
}

impl From<Arrival> for Ending {
    fn from(arrival: Arrival) -> Self {
        match arrival {
            Arrival::Complete => Self::Complete,
            Arrival::Corrupted => Self::Corrupted,
            Arrival::SenderStopped => Self::SenderStopped,
            Arrival::PeerDown => Self::PeerDown,
            Arrival::Deadline => Self::Deadline,
            Arrival::Refused | Arrival::Duplicate | Arrival::DeviceFailed => Self::Refused,
        }
    }
}

/// Counters of hand-offs, `kvasir_kv_handoff_statistics` in C. Fields are only ever appended.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HandOffStatistics {
    /// Blocks that were received and verified.
    pub blocks_received: u64,
    /// Transfers that were received whole.
    pub transfers_completed: u64,
    /// Transfers that ended with blocks missing.
    pub transfers_incomplete: u64,
    /// Transfers that either side cancelled.
    pub transfers_cancelled: u64,
    /// Transfers whose receiver never came.
    pub leases_expired: u64,
    /// Connections that ended.
    pub peers_lost: u64,
    /// Bytes that were written to peers.
    pub bytes_sent: u64,
    /// Pieces whose checksum did not match.
    pub checksum_failures: u64,
    /// Slots in use now.
    pub slots_used: u64,
}

/// Names the whole of what a transfer brings: equal on both sides of one prompt, and on no others.
pub(crate) type Content = [u8; 16];

/// Layers of blocks that are computed and go to whoever expects them.
#[derive(Debug)]
pub(crate) struct Push {
    pub(crate) transfer: TransferId,
    pub(crate) content: Content,
    /// Number of the first block, counted from the beginning of the prompt.
    pub(crate) first_block: u32,
    pub(crate) layers: Range<u16>,
    pub(crate) tensors: InUse,
    pub(crate) blocks: Vec<u64>,
}

/// Blocks that another process sends.
#[derive(Debug)]
pub(crate) struct Expect {
    pub(crate) transfer: TransferId,
    pub(crate) content: Content,
    pub(crate) first_block: u32,
    /// The sender, as its [`Addresses::notation`] has it.
    pub(crate) address: String,
    pub(crate) patience: Duration,
    pub(crate) tensors: InUse,
    pub(crate) blocks: Vec<u64>,
}

/// The hand-offs of one open store.
pub(crate) struct HandOffs {
    shape: Shape,
    pool: Arc<SlotPool>,
    completions: Completions,
    address: Addresses,
    counters: Arc<TransferCounters>,
    transfers: Mutex<Transfers>,
    /// `None` once the store is closed.
    service: RwLock<Option<TransferService>>,
}

#[derive(Debug, Default)]
struct Transfers {
    expected: HashMap<TransferId, Expected>,
    pushed: HashMap<TransferId, Pushed>,
}

#[derive(Debug)]
struct Expected {
    user: u64,
    tensors: InUse,
    blocks: Vec<u64>,
}

#[derive(Debug, Default)]
struct Pushed {
    /// The slot of each block.
    slots: HashMap<u32, SlotRef>,
    /// Pushes whose layers are not copied yet.
    copying: usize,
    /// Nothing more will be pushed.
    is_ended: bool,
    /// Nobody wants it, or there was no memory for it.
    is_given_up: bool,
}

/// A part of a hand-off for the threads of the queue.
#[derive(Debug)]
pub(crate) struct Copying {
    handoffs: Arc<HandOffs>,
    task: Task,
}

#[derive(Debug)]
enum Task {
    Push(Push),
    Arrived { tensors: InUse, blocks: Vec<u64>, slots: Vec<SlotRef>, ending: Ending },
}

impl std::fmt::Debug for HandOffs {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("HandOffs").field("shape", &self.shape).finish_non_exhaustive()
    }
}

fn outcome(status: Status, blocks: usize, ending: Ending) -> Outcome {
    Outcome { status, meta_bytes: ending as usize, payload_bytes: blocks }
}

impl HandOffs {
    /// How peers reach this process.
    pub(crate) fn address(&self) -> &Addresses {
        &self.address
    }

    /// How tensors must be cut into layers.
    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// What has been counted so far.
    pub(crate) fn statistics(&self) -> HandOffStatistics {
        let counted = self.counters.snapshot();
        let value =
            |name: &str| counted.iter().find(|(known, ..)| *known == name).map_or(0, |(.., value)| *value);
        HandOffStatistics {
            blocks_received: value("blocks_received"),
            transfers_completed: value("completed"),
            transfers_incomplete: value("incomplete"),
            transfers_cancelled: value("cancelled"),
            leases_expired: value("leases_expired"),
            peers_lost: value("peers_lost"),
            bytes_sent: value("bytes_sent"),
            checksum_failures: value("checksum_failures"),
            slots_used: self.pool.used_count() as u64,
        }
    }

    /// Takes layers of blocks to send. The completion comes when they are copied: the blocks may change from then on.
    ///
    /// # Safety
    /// The blocks' memory must stay as it is until the completion was polled or the queue is closed.
    pub(crate) unsafe fn push(self: &Arc<Self>, user: u64, push: Push) -> Submitted {
        let admitted = self.completions.admit(push.blocks.len());
        if admitted != Submitted::Taken {
            return admitted;
        }
        lock(&self.transfers).pushed.entry(push.transfer).or_default().copying += 1;
        self.hand_over(user, Task::Push(push));
        Submitted::Taken
    }

    /// Nothing more will be pushed for this transfer.
    pub(crate) fn end(&self, transfer: TransferId) {
        let mut transfers = lock(&self.transfers);
        let Some(pushed) = transfers.pushed.get_mut(&transfer) else { return };
        pushed.is_ended = true;
        let is_over = pushed.copying == 0;
        let is_given_up = pushed.is_given_up;
        if is_over {
            transfers.pushed.remove(&transfer);
        }
        drop(transfers);
        if is_over && !is_given_up {
            self.command(Command::PushEnd { transfer });
        }
    }

    /// Takes an expectation. The completion comes when it is over, with the number of leading blocks that are in the
    /// tensors. `None`: a transfer of this id is expected already.
    ///
    /// # Safety
    /// The blocks' memory must be usable for writes by nobody else until the completion was polled or the queue is closed.
    pub(crate) unsafe fn expect(self: &Arc<Self>, user: u64, expect: Expect) -> Option<Submitted> {
        let Expect { transfer, content, first_block, address, patience, tensors, blocks } = expect;
        let mut transfers = lock(&self.transfers);
        if transfers.expected.contains_key(&transfer) {
            return None;
        }
        let admitted = self.completions.admit(blocks.len());
        if admitted != Submitted::Taken {
            return Some(admitted);
        }
        let slots: Option<Vec<SlotRef>> = blocks.iter().map(|_| self.pool.acquire()).collect();
        let Some(slots) = slots else {
            drop(transfers);
            self.completions.complete(user, blocks.len(), Ok(outcome(Status::Throttled, 0, Ending::Refused)));
            self.command(Command::Decline { transfer, address });
            return Some(Submitted::Taken);
        };
        transfers.expected.insert(transfer, Expected { user, tensors, blocks });
        drop(transfers);
        let deadline = Instant::now() + patience;
        self.command(Command::Expect { transfer, address, content, first_block, slots, deadline });
        Some(Submitted::Taken)
    }

    /// Tells the sender at `address` that nothing of this transfer is wanted.
    pub(crate) fn decline(&self, transfer: TransferId, address: String) {
        if !lock(&self.transfers).expected.contains_key(&transfer) {
            self.command(Command::Decline { transfer, address });
        }
    }

    /// Stops a transfer on whichever side this is. An expectation completes at once, without a block.
    pub(crate) fn cancel(&self, transfer: TransferId) {
        let mut transfers = lock(&self.transfers);
        let expected = transfers.expected.remove(&transfer);
        if let Some(pushed) = transfers.pushed.get_mut(&transfer) {
            (pushed.is_given_up, pushed.is_ended) = (true, true);
            pushed.slots.clear();
            if pushed.copying == 0 {
                transfers.pushed.remove(&transfer);
            }
        }
        drop(transfers);
        self.command(Command::Cancel { transfer });
        expected.into_iter().for_each(|expected| self.cancelled(expected));
    }

    /// Cancels what is expected into these tensors.
    pub(crate) fn cancel_into(&self, tensors: u64) {
        let into: Vec<TransferId> = (lock(&self.transfers).expected.iter())
            .filter(|(_, expected)| expected.tensors.id() == tensors)
            .map(|(&transfer, _)| transfer)
            .collect();
        into.into_iter().for_each(|transfer| self.cancel(transfer));
    }

    /// Ends the service. Nothing of an engine's is touched any more, once the queue is closed as well.
    pub(crate) fn close(&self) {
        let service = self.service.write().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        drop(service);
        *lock(&self.transfers) = Transfers::default();
    }

    fn cancelled(&self, Expected { user, tensors, blocks }: Expected) {
        drop(tensors);
        self.completions.complete(user, blocks.len(), Ok(outcome(Status::Miss, 0, Ending::Cancelled)));
    }

    /// Called on the service's thread.
    fn notice(self: &Arc<Self>, notice: Notice) {
        match notice {
            Notice::Arrived { transfer, slots, outcome } => {
                // One that was cancelled is over already.
                let Some(Expected { user, tensors, blocks }) =
                    lock(&self.transfers).expected.remove(&transfer)
                else {
                    return;
                };
                self.hand_over(user, Task::Arrived { tensors, blocks, slots, ending: outcome.into() });
            }
            Notice::Pushed { transfer, complete: false } => {
                if let Some(pushed) = lock(&self.transfers).pushed.get_mut(&transfer) {
                    pushed.is_given_up = true;
                    pushed.slots.clear();
                }
            }
            // The library starts no moves of its own.
            Notice::Pushed { complete: true, .. } | Notice::Moved { .. } => {}
        }
    }

    fn hand_over(self: &Arc<Self>, user: u64, task: Task) {
        self.completions.hand_over(user, Work::Copying(Copying { handoffs: Arc::clone(self), task }));
    }

    /// Hands a command to the service, which always drains its queue. After the close there is nobody to hand it to.
    fn command(&self, mut command: Command) {
        let service = self.service.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Some(service) = service.as_ref() else { return };
        while let Err(back) = service.submit(command) {
            if service.has_stopped() {
                return;
            }
            command = back;
            std::thread::yield_now();
        }
    }

    /// The slots of these blocks, of which those that have none get one; `None` when the transfer is given up, and then
    /// whether that is for want of memory.
    fn slots_of(&self, push: &Push) -> Result<Vec<SlotRef>, Status> {
        let mut transfers = lock(&self.transfers);
        let Some(pushed) = transfers.pushed.get_mut(&push.transfer).filter(|pushed| !pushed.is_given_up)
        else {
            return Err(Status::Miss);
        };
        let mut slots = Vec::with_capacity(push.blocks.len());
        for number in (push.first_block..).take(push.blocks.len()) {
            let slot = match pushed.slots.get(&number) {
                Some(slot) => Some(slot.clone()),
                None => self.pool.acquire().inspect(|slot| _ = pushed.slots.insert(number, slot.clone())),
            };
            let Some(slot) = slot else {
                pushed.is_given_up = true;
                pushed.slots.clear();
                return Err(Status::Throttled);
            };
            slots.push(slot);
        }
        Ok(slots)
    }

    /// One push of this transfer has been copied, or was not.
    fn copied(&self, transfer: TransferId) {
        let mut transfers = lock(&self.transfers);
        let Some(pushed) = transfers.pushed.get_mut(&transfer) else { return };
        pushed.copying -= 1;
        let (is_over, is_given_up) = (pushed.is_ended && pushed.copying == 0, pushed.is_given_up);
        if is_over {
            transfers.pushed.remove(&transfer);
        }
        drop(transfers);
        if is_over && !is_given_up {
            self.command(Command::PushEnd { transfer });
        }
    }
}

impl Copying {
    /// Blocks that it counts for in the queue.
    pub(crate) fn blocks(&self) -> usize {
        match &self.task {
            Task::Push(push) => push.blocks.len(),
            Task::Arrived { blocks, .. } => blocks.len(),
        }
    }

    /// Copies.
    ///
    /// # Safety
    /// The blocks of the tensors must be usable for the time of the call: a push's for reads, an arrival's for writes.
    pub(crate) unsafe fn carry_out(self) -> Result<Outcome, Failure> {
        let Self { handoffs, task } = self;
        match task {
            Task::Push(push) => {
                let transfer = push.transfer;
                // SAFETY: readable by the contract of this function.
                let pushed = unsafe { handoffs.carry_out_push(push) };
                handoffs.copied(transfer);
                Ok(pushed)
            }
            Task::Arrived { tensors, blocks, slots, ending } => {
                for (slot, &block) in slots.iter().zip(&blocks) {
                    // SAFETY: writable by the contract of this function; the slot is verified and nobody writes to it.
                    unsafe { handoffs.shape.from_slot(slot, &tensors, block) };
                }
                let status = if slots.len() == blocks.len() { Status::Ok } else { Status::Miss };
                Ok(outcome(status, slots.len(), ending))
            }
        }
    }
}

impl HandOffs {
    /// # Safety
    /// As for [`Copying::carry_out`].
    unsafe fn carry_out_push(&self, push: Push) -> Outcome {
        let slots = match self.slots_of(&push) {
            Ok(slots) => slots,
            Err(status) => {
                if status == Status::Throttled {
                    self.command(Command::Cancel { transfer: push.transfer });
                }
                return outcome(status, 0, Ending::Complete);
            }
        };
        let Push { transfer, content, first_block, layers, tensors, blocks } = push;
        for (slot, &block) in slots.iter().zip(&blocks) {
            // SAFETY: readable by the contract of this function; these layers of the slot were not pushed before.
            unsafe { self.shape.into_slot(slot, &tensors, block, layers.clone()) };
        }
        self.command(Command::Push { transfer, content, first_block, slots, layers });
        outcome(Status::Ok, blocks.len(), Ending::Complete)
    }
}
