//! Hand-offs of blocks between engines: from the tensors of the engine that computes a prompt to the tensors of
//! the engine that generates from it.
//!
//! A block passes through a slot of this library's own memory on each side. The sender's thread copies each
//! layer into a slot as soon as it is computed, so that the engine may reuse the block's memory, and
//! [`TransferService`] sends it from there. Peers can write only to the receiver's slots; a block is copied
//! from there into the engine's tensors once it is verified. So no peer ever writes to an engine's memory.
//!
//! If the processes of two engines divide the heads differently, a block's slot is sent to several processes,
//! each of which takes its heads, or filled by several: one transfer for each, all over the same slots. A
//! hand-off is identified by the first of its transfers.
//!
//! Threads: blocks of host memory are copied by the threads of the [`crate::queue`], those of a device by two
//! threads of [`device`]; the service has its own thread. A call holds a lock briefly, and blocks only while
//! the service's queue of 16,384 commands is full.

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
use crate::registry::TensorsGuard;
use crate::status::{Failure, Status};
use crate::tensors::PagedTensors;

/// Ending of a received transfer, `kvasir_kv_ending` in C.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// All blocks have arrived.
    Complete = 0,
    /// A checksum did not match.
    Corrupted = 1,
    /// The sender stopped before the end, or has other blocks than expected.
    SenderStopped = 2,
    /// The connection could not be made, or was lost.
    PeerDown = 3,
    /// The deadline passed.
    Deadline = 4,
    /// Too many transfers, no memory for the blocks, a bad address, or a failed device.
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

/// Name of the whole content of a transfer: equal on both sides of one prompt, and different for every other.
pub(crate) type Content = [u8; 16];

/// Layers of computed blocks. They are sent to each process that expects one of the transfers.
#[derive(Debug)]
pub(crate) struct Push {
    /// One transfer for each process that takes a share; at least one.
    pub(crate) transfers: Vec<TransferId>,
    pub(crate) content: Content,
    /// Index of the first block, counted from the start of the prompt.
    pub(crate) first_block: u32,
    pub(crate) layers: Range<u16>,
    pub(crate) tensors: TensorsGuard,
    pub(crate) blocks: Vec<u64>,
    pub(crate) event: DeviceEvent,
}

/// Blocks that another process sends.
#[derive(Debug)]
pub(crate) struct Expect {
    /// One transfer for each process that sends a share, and that process's address in [`Addresses::notation`];
    /// at least one.
    pub(crate) senders: Vec<(TransferId, String)>,
    pub(crate) content: Content,
    pub(crate) first_block: u32,
    pub(crate) patience: Duration,
    pub(crate) tensors: TensorsGuard,
    pub(crate) blocks: Vec<u64>,
    pub(crate) event: DeviceEvent,
}

/// The hand-offs of one open store.
pub(crate) struct HandOffs {
    shape: Shape,
    /// Slots for the blocks of hand-offs, in the same kind of memory as the tensors.
    pool: Arc<SlotPool>,
    /// Host slots through which blocks of device memory are staged.
    staging_pool: Option<Arc<SlotPool>>,
    /// The threads that copy the blocks of a device.
    device: Option<DeviceCopyThreads>,
    completions: Completions,
    address: Addresses,
    counters: Arc<TransferCounters>,
    rails: Vec<RailCounters>,
    transfers: Mutex<Transfers>,
    /// Held while commands of pushes are submitted, so that they keep the order of the pushes: a receiver takes
    /// the layers of a block in order. Never taken by the service's thread, which drains the queue that a
    /// submission may wait for.
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

    /// The layers that the tensors must have.
    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Accepts layers of blocks to send. The completion comes once they are copied; from then on the blocks may
    /// change.
    ///
    /// # Safety
    /// The blocks' memory must not change until the completion is polled or the queue is closed.
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

    /// Marks the hand-off as complete: no more layers will be pushed.
    pub(crate) fn end(&self, first: TransferId) {
        // Orders the end behind pushes whose commands are being submitted.
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

    /// Accepts an expectation. Its completion reports the number of leading blocks that are in the tensors.
    ///
    /// # Safety
    /// The blocks' memory must be writable and used by no other code until the completion is polled or the
    /// queue is closed.
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

    /// Tells the sender at `address` that no block of this transfer is wanted.
    pub(crate) fn decline(&self, transfer: TransferId, address: String) {
        let transfers = lock(&self.transfers);
        let is_expected = transfers.expected.contains_key(&transfers.hand_off_of(transfer));
        drop(transfers);
        if !is_expected {
            self.command(Command::Decline { transfer, address });
        }
    }

    /// Cancels a hand-off on the sender's or the receiver's side. An expectation completes at once, without a block.
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

    /// Cancels all expectations into these tensors.
    pub(crate) fn cancel_into(&self, tensors: u64) {
        let into: Vec<TransferId> = (lock(&self.transfers).expected.iter())
            .filter(|(_, expected)| expected.tensors.id() == tensors)
            .map(|(&transfer, _)| transfer)
            .collect();
        into.into_iter().for_each(|transfer| self.cancel(transfer));
    }

    /// Ends the service. Once the queue is closed as well, no memory of an engine is accessed any more.
    pub(crate) fn close(&self) {
        let service = self.service.write().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        drop(service);
        if let Some(device) = &self.device {
            device.close();
        }
        *lock(&self.transfers) = Transfers::default();
    }

    /// Returns the routes between a device's tensors and the slots. `None`: the layers of these tensors do not
    /// fit hand-offs, or hand-offs use host memory.
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

    /// Handles a notice of the service. Runs on the service's thread.
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

    /// Ends one transfer of an expectation. The last one completes the expectation.
    fn arrived(self: &Arc<Self>, transfer: TransferId, slots: Vec<SlotRef>, ending: Ending) {
        let mut transfers = lock(&self.transfers);
        let first = transfers.hand_off_of(transfer);
        // A cancelled expectation has been removed already.
        let Some(expected) = transfers.expected.get_mut(&first) else { return };
        expected.waiting.retain(|&waiting| waiting != transfer);
        if expected.ending == Ending::Complete {
            expected.ending = ending;
        }
        // A block counts as arrived once all of its shares have arrived.
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

    /// Passes a command to the service, which always drains its queue. After the close the command is dropped.
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

    /// Returns the slot of each block, acquiring missing ones. `Miss`: no receiver wants the hand-off.
    /// `Throttled`: no slot is free, and the hand-off is abandoned.
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

    /// Submits a copied push and the later pushes that waited for it. `None`: the push could not be copied.
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
