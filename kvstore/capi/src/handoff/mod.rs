//! Hand-offs of blocks between engines: from the tensors of the one that computes a prompt to the tensors of the one that
//! generates from it.
//!
//! A block travels through a slot of this library's own memory on each side. The sender's thread copies each layer of it
//! into a slot as soon as it is computed, so that the engine may use the block's memory again, and
//! [`TransferService`] sends it from there. The receiver's slots are all that peers can write to; a block is copied
//! from there into the engine's tensors when it was verified. So no peer ever writes to an engine's memory.
//!
//! Where the processes of two engines share out the heads differently, a block's slot is sent to several processes, each of
//! which takes its heads, or filled by several: one transfer for each, all over the same slots. A hand-off is known by the
//! first of its transfers.
//!
//! Threads: blocks of host memory are copied by the threads of the [`crate::queue`], those of a device by two threads of
//! [`device`]; the service has a thread of its own. A call takes a lock for a moment, and waits only while the service has
//! 16,384 commands to take.

mod copy;
mod device;
mod open;
mod state;
mod statistics;
mod task;

use std::ops::Range;
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use dataplane_memory::{SlotPool, SlotRef};
use dataplane_rails::{Addresses, RailCounters};
use dataplane_transfer::{
    Command, Notice, Outcome as Arrival, TransferCounters, TransferId, TransferService,
};

pub(crate) use copy::Shape;
use device::DeviceCopyThreads;
pub(crate) use device::{DeviceParts, HandOffRoutes};
pub(crate) use open::rails_config;
use state::{Copied, Expected, Pushed, Transfers};
pub use statistics::{HandOffStatistics, RAIL_NAME_BYTES, RailStatistics, STAGE_NAME_BYTES, StageStatistics};
pub(crate) use task::CopyTask;
use task::Task;

use crate::device::DeviceEvent;
use crate::lock::lock;
use crate::operation::Outcome;
use crate::queue::{Completions, Submitted, Work};
use crate::registry::InUse;
use crate::status::{Failure, Status};
use crate::tensors::PagedTensors;

/// The end of a received transfer, `kvasir_kv_ending` in C.
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
    /// There were too many transfers, no memory for its blocks, or a bad address; or the device failed.
    Refused = 5,
    /// Cancelled by this process.
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

/// Names the whole of what a transfer brings: equal on both sides of one prompt, and on no others.
pub(crate) type Content = [u8; 16];

/// Layers of blocks that are computed: they are sent to each process that expects one of the transfers.
#[derive(Debug)]
pub(crate) struct Push {
    /// A transfer for each process that takes a share; at least one.
    pub(crate) transfers: Vec<TransferId>,
    pub(crate) content: Content,
    /// Number of the first block, counted from the beginning of the prompt.
    pub(crate) first_block: u32,
    pub(crate) layers: Range<u16>,
    pub(crate) tensors: InUse,
    pub(crate) blocks: Vec<u64>,
    pub(crate) event: DeviceEvent,
}

/// Blocks that another process sends.
#[derive(Debug)]
pub(crate) struct Expect {
    /// A transfer for each process that sends a share, and its address, as its [`Addresses::notation`] has it; at least
    /// one.
    pub(crate) senders: Vec<(TransferId, String)>,
    pub(crate) content: Content,
    pub(crate) first_block: u32,
    pub(crate) patience: Duration,
    pub(crate) tensors: InUse,
    pub(crate) blocks: Vec<u64>,
    pub(crate) event: DeviceEvent,
}

/// The hand-offs of one open store.
pub(crate) struct HandOffs {
    shape: Shape,
    /// Where the blocks of hand-offs lie, in the memory of the tensors.
    pool: Arc<SlotPool>,
    /// Host slots on the way of blocks that lie in a device's memory.
    staging_pool: Option<Arc<SlotPool>>,
    /// The threads that copy the blocks of a device.
    device: Option<DeviceCopyThreads>,
    completions: Completions,
    address: Addresses,
    counters: Arc<TransferCounters>,
    rails: Vec<RailCounters>,
    transfers: Mutex<Transfers>,
    /// Held while commands of pushes are submitted, which keep the order in which the pushes came: a receiver takes a block's
    /// layers in order. Never taken by the service's thread, which drains the queue that a submission may wait for.
    submitting: Mutex<()>,
    /// `None` once the store is closed.
    service: RwLock<Option<TransferService>>,
}

impl std::fmt::Debug for HandOffs {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("HandOffs").field("shape", &self.shape).finish_non_exhaustive()
    }
}

fn invalid(what: &str) -> Failure {
    Failure::new(Status::InvalidArgument, what)
}

fn outcome(status: Status, blocks: usize, ending: Ending) -> Outcome {
    Outcome { status, meta_bytes: ending as usize, payload_bytes: blocks }
}

impl HandOffs {
    /// The addresses at which peers reach this process.
    pub(crate) fn address(&self) -> &Addresses {
        &self.address
    }

    /// The layers that tensors must have.
    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Takes layers of blocks to send. The completion comes when they are copied: the blocks may change from then on.
    ///
    /// # Safety
    /// The blocks' memory must stay as it is until the completion was polled or the queue is closed.
    pub(crate) unsafe fn push(self: &Arc<Self>, user: u64, push: Push) -> Result<Submitted, Failure> {
        let mut transfers = lock(&self.transfers);
        let known = transfers.pushed.get(&push.transfers[0]);
        if known.is_some_and(|known| known.transfers != push.transfers) {
            return Err(invalid("transfers are not those of the earlier pushes of this hand-off"));
        }
        let admitted = self.completions.admit(push.blocks.len());
        if admitted != Submitted::Taken {
            return Ok(admitted);
        }
        if !transfers.pushed.contains_key(&push.transfers[0]) {
            transfers.remember(&push.transfers);
        }
        let pushed = transfers.pushed.entry(push.transfers[0]);
        let number = pushed.or_insert_with(|| Pushed::new(&push.transfers)).begin();
        drop(transfers);
        self.hand_over(user, Task::Push(push, number));
        Ok(Submitted::Taken)
    }

    /// Nothing more will be pushed for this hand-off.
    pub(crate) fn end(&self, first: TransferId) {
        // So that the end follows pushes whose commands are being submitted.
        let submitting = lock(&self.submitting);
        let mut transfers = lock(&self.transfers);
        if let Some(pushed) = transfers.pushed.get_mut(&first) {
            pushed.is_ended = true;
        }
        let over = transfers.end_pushed(first);
        drop(transfers);
        over.into_iter().for_each(|transfer| self.command(Command::PushEnd { transfer }));
        drop(submitting);
    }

    /// Takes an expectation. The completion comes when it is over, with the number of leading blocks that are in the
    /// tensors.
    ///
    /// # Safety
    /// The blocks' memory must be usable for writes by nobody else until the completion was polled or the queue is closed.
    pub(crate) unsafe fn expect(self: &Arc<Self>, user: u64, expect: Expect) -> Result<Submitted, Failure> {
        let Expect { senders, content, first_block, patience, tensors, blocks, event } = expect;
        let mut transfers = lock(&self.transfers);
        let all: Vec<TransferId> = senders.iter().map(|(transfer, _)| *transfer).collect();
        let is_known =
            |&transfer: &TransferId| transfers.expected.contains_key(&transfers.hand_off_of(transfer));
        if let Some(at) = all.iter().position(is_known) {
            return Err(invalid(&format!("transfers[{at}] is expected already")));
        }
        let admitted = self.completions.admit(blocks.len());
        if admitted != Submitted::Taken {
            return Ok(admitted);
        }
        let slots: Option<Vec<SlotRef>> = blocks.iter().map(|_| self.pool.acquire()).collect();
        let Some(slots) = slots else {
            drop(transfers);
            let refused = outcome(Status::Throttled, 0, Ending::Refused);
            self.completions.complete(user, blocks.len(), Ok(refused));
            for (transfer, address) in senders {
                self.command(Command::Decline { transfer, address });
            }
            return Ok(Submitted::Taken);
        };
        transfers.remember(&all);
        let expected = Expected {
            user,
            tensors,
            blocks,
            event,
            waiting: all.clone(),
            transfers: all.clone(),
            arrived: None,
            ending: Ending::Complete,
        };
        transfers.expected.insert(all[0], expected);
        drop(transfers);
        let deadline = Instant::now() + patience;
        for (transfer, address) in senders {
            let slots = slots.clone();
            self.command(Command::Expect { transfer, address, content, first_block, slots, deadline });
        }
        Ok(Submitted::Taken)
    }

    /// Tells the sender at `address` that nothing of this transfer is wanted.
    pub(crate) fn decline(&self, transfer: TransferId, address: String) {
        let transfers = lock(&self.transfers);
        let is_expected = transfers.expected.contains_key(&transfers.hand_off_of(transfer));
        drop(transfers);
        if !is_expected {
            self.command(Command::Decline { transfer, address });
        }
    }

    /// Stops a hand-off on whichever side this is. An expectation completes at once, without a block.
    pub(crate) fn cancel(&self, first: TransferId) {
        let mut transfers = lock(&self.transfers);
        let expected = transfers.end_expected(first);
        let mut all = expected.as_ref().map_or_else(|| vec![first], |expected| expected.waiting.clone());
        if let Some(pushed) = transfers.pushed.get_mut(&first) {
            all.clone_from(&pushed.transfers);
            pushed.abandon();
            pushed.is_ended = true;
            transfers.end_pushed(first);
        }
        drop(transfers);
        all.into_iter().for_each(|transfer| self.command(Command::Cancel { transfer }));
        if let Some(Expected { user, tensors, blocks, .. }) = expected {
            drop(tensors);
            let cancelled = outcome(Status::Miss, 0, Ending::Cancelled);
            self.completions.complete(user, blocks.len(), Ok(cancelled));
        }
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
        if let Some(device) = &self.device {
            device.close();
        }
        *lock(&self.transfers) = Transfers::default();
    }

    /// The ways between a device's tensors and the slots; `None` when these tensors are not cut as hand-offs want them, or
    /// hand-offs are of host memory.
    ///
    /// # Safety
    /// As for [`DeviceCopyThreads::routes`].
    pub(crate) unsafe fn routes(&self, tensors: &PagedTensors) -> Result<Option<HandOffRoutes>, Failure> {
        let Some(device) = self.device.as_ref().filter(|_| self.shape.check(tensors).is_ok()) else {
            return Ok(None);
        };
        // SAFETY: handed on to the caller.
        unsafe { device.routes(&self.shape, tensors) }.map(Some)
    }

    /// Called on the service's thread.
    fn notice(self: &Arc<Self>, notice: Notice) {
        match notice {
            Notice::Arrived { transfer, slots, outcome } => self.arrived(transfer, slots, outcome.into()),
            Notice::Pushed { transfer, complete: false } => {
                let mut transfers = lock(&self.transfers);
                let first = transfers.hand_off_of(transfer);
                if let Some(pushed) = transfers.pushed.get_mut(&first) {
                    pushed.wanted.retain(|&wanted| wanted != transfer);
                    if pushed.wanted.is_empty() {
                        pushed.slots.clear();
                    }
                }
            }
            // A complete push needs no action; the library starts no moves.
            Notice::Pushed { complete: true, .. } => {}
        }
    }

    /// Ends one transfer of an expectation; with the last of them the expectation is over.
    fn arrived(self: &Arc<Self>, transfer: TransferId, slots: Vec<SlotRef>, ending: Ending) {
        let mut transfers = lock(&self.transfers);
        let first = transfers.hand_off_of(transfer);
        // A cancelled expectation is over already.
        let Some(expected) = transfers.expected.get_mut(&first) else { return };
        expected.waiting.retain(|&waiting| waiting != transfer);
        if expected.ending == Ending::Complete {
            expected.ending = ending;
        }
        // A block is there when all shares of it are.
        let least = expected.arrived.take().filter(|before| before.len() < slots.len()).unwrap_or(slots);
        expected.arrived = Some(least);
        if !expected.waiting.is_empty() {
            return;
        }
        let Some(Expected { user, tensors, blocks, event, arrived, ending, .. }) =
            transfers.end_expected(first)
        else {
            return;
        };
        drop(transfers);
        let slots = arrived.unwrap_or_default();
        self.hand_over(user, Task::Arrived { tensors, blocks, slots, ending, event });
    }

    fn hand_over(self: &Arc<Self>, user: u64, task: Task) {
        let task = CopyTask { handoffs: Arc::clone(self), task };
        match &self.device {
            Some(device) => device.submit(user, task),
            None => self.completions.hand_over(user, Work::Copying(task)),
        }
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

    /// The slot of each block, acquired where it has none. `Miss`: no receiver wants the hand-off. `Throttled`: no slot is free,
    /// and the hand-off is abandoned.
    fn slots_of(&self, push: &Push) -> Result<Vec<SlotRef>, Status> {
        let mut transfers = lock(&self.transfers);
        let pushed = transfers.pushed.get_mut(&push.transfers[0]);
        let Some(pushed) = pushed.filter(|pushed| !pushed.wanted.is_empty()) else {
            return Err(Status::Miss);
        };
        let mut slots = Vec::with_capacity(push.blocks.len());
        for number in (push.first_block..).take(push.blocks.len()) {
            let slot = match pushed.slots.get(&number) {
                Some(slot) => Some(slot.clone()),
                None => self.pool.acquire().inspect(|slot| _ = pushed.slots.insert(number, slot.clone())),
            };
            let Some(slot) = slot else {
                pushed.abandon();
                return Err(Status::Throttled);
            };
            slots.push(slot);
        }
        Ok(slots)
    }

    /// Submits a push that was copied, and those that waited for it; `None` of a push that was not copied.
    fn copied(&self, first: TransferId, number: u64, copied: Option<Copied>) {
        let submitting = lock(&self.submitting);
        let mut transfers = lock(&self.transfers);
        let Some(pushed) = transfers.pushed.get_mut(&first) else { return };
        let (ready, wanted) = (pushed.end(number, copied), pushed.wanted.clone());
        let over = transfers.end_pushed(first);
        drop(transfers);
        for Copied { content, first_block, slots, layers } in ready {
            for &transfer in &wanted {
                let (slots, layers) = (slots.clone(), layers.clone());
                self.command(Command::Push { transfer, content, first_block, slots, layers });
            }
        }
        over.into_iter().for_each(|transfer| self.command(Command::PushEnd { transfer }));
        drop(submitting);
    }
}
