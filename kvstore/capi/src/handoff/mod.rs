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
//! [`device`]; the service has a thread of its own. A call takes a
//! lock for a moment, and waits only while the service has 16,384 commands to take.

mod copy;
mod device;
mod open;
mod state;

use std::ops::Range;
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use dataplane_memory::{SlotPool, SlotRef};
use dataplane_rails::{Addresses, RailCounters};
use dataplane_transfer::{
    BOUNDS, Command, Notice, Outcome as Arrival, StageSnapshot, TransferCounters, TransferId, TransferService,
};

pub(crate) use copy::Shape;
use copy::{BlockCopier, HostCopier};
use device::DeviceCopyThreads;
pub(crate) use device::{DeviceParts, HandOffRoutes};
pub(crate) use open::rails_config;
use state::{Copied, Expected, Pushed, Transfers};

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
    /// Transfers whose blocks a network card read in a device's memory.
    pub sent_directly: u64,
    /// Transfers whose blocks went from a device's memory through the host's.
    pub sent_staged: u64,
    /// Transfers whose blocks a network card wrote to a device's memory.
    pub received_directly: u64,
    /// Transfers whose blocks came to a device's memory through the host's.
    pub received_staged: u64,
    /// Blocks for which there are slots.
    pub slots: u64,
}

/// Bytes of a rail's name in [`RailStatistics`], the final 0 included.
pub const RAIL_NAME_BYTES: usize = 64;

/// Counters of one transport of hand-offs, `kvasir_kv_rail_statistics` in C. Fields are only ever appended.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RailStatistics {
    /// `shm`, `tcp` or `rdma DEVICE`, UTF-8 with a final 0; longer names are cut.
    pub name: [u8; RAIL_NAME_BYTES],
    /// Bytes of blocks that it was given to write or read.
    pub block_bytes: u64,
    /// Slices posted again because a connection had failed.
    pub slices_retried: u64,
    /// Connections that ended while their peer went on over others.
    pub links_failed: u64,
    /// Time for a KiB, queue included, smoothed; 0 where no peer has several rails.
    pub nanoseconds_per_kib: u64,
    /// 1 while it takes 3 times as long for a KiB as the best one of equal preference.
    pub is_slow: u64,
}

impl RailStatistics {
    fn named(name: &str) -> Self {
        let mut bytes = [0; RAIL_NAME_BYTES];
        let cut = &name[..name.floor_char_boundary(RAIL_NAME_BYTES - 1)];
        bytes[..cut.len()].copy_from_slice(cut.as_bytes());
        Self {
            name: bytes,
            block_bytes: 0,
            slices_retried: 0,
            links_failed: 0,
            nanoseconds_per_kib: 0,
            is_slow: 0,
        }
    }
}

/// Bytes of a stage's name in [`StageStatistics`], the final 0 included.
pub const STAGE_NAME_BYTES: usize = 16;

/// How long one stage of hand-offs took, `kvasir_kv_stage_statistics` in C. Fields are only ever appended.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageStatistics {
    /// As [`dataplane_transfer::Stage::name`] has it, with a final 0.
    pub name: [u8; STAGE_NAME_BYTES],
    /// All times together, in microseconds.
    pub sum_us: u64,
    /// How many there were.
    pub count: u64,
    /// How many were at most 16 µs times two to the power of the index.
    pub at_most: [u64; BOUNDS],
}

impl From<StageSnapshot> for StageStatistics {
    fn from(snapshot: StageSnapshot) -> Self {
        let mut name = [0; STAGE_NAME_BYTES];
        let text = snapshot.stage.name().as_bytes();
        let known = text.len().min(STAGE_NAME_BYTES - 1);
        name[..known].copy_from_slice(&text[..known]);
        let mut at_most = [0; BOUNDS];
        for (to, (_, count)) in at_most.iter_mut().zip(&snapshot.cumulative) {
            *to = *count;
        }
        let count = snapshot.cumulative.last().map_or(0, |(_, count)| *count);
        Self { name, sum_us: snapshot.sum_us, count, at_most }
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
    /// What copies the blocks of a device.
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

/// One copy of a hand-off, for the thread that carries it out.
#[derive(Debug)]
pub(crate) struct CopyTask {
    handoffs: Arc<HandOffs>,
    task: Task,
}

#[derive(Debug)]
enum Task {
    /// With its number among those of its hand-off.
    Push(Push, u64),
    Arrived {
        tensors: InUse,
        blocks: Vec<u64>,
        slots: Vec<SlotRef>,
        ending: Ending,
        event: DeviceEvent,
    },
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

    /// Counters since the start.
    pub(crate) fn statistics(&self) -> HandOffStatistics {
        let counted = self.counters.snapshot();
        let staged = self.staging_pool.as_ref().map_or(0, |pool| pool.used_count());
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
            slots_used: (self.pool.used_count() + staged) as u64,
            sent_directly: value("sent_directly"),
            sent_staged: value("sent_staged"),
            received_directly: value("received_directly"),
            received_staged: value("received_staged"),
            slots: self.pool.slot_count() as u64,
        }
    }

    /// How long the stages took, the receiver's first.
    pub(crate) fn stages(&self) -> Vec<StageStatistics> {
        self.counters.stages.snapshot().into_iter().map(StageStatistics::from).collect()
    }

    /// Counters of each transport, in the order in which they were opened.
    pub(crate) fn rails(&self) -> Vec<RailStatistics> {
        let mut rails: Vec<(&str, RailStatistics)> = Vec::new();
        for RailCounters { name, read } in &self.rails {
            // The bond's counters of each transport come behind all transports' own, under the same names.
            let index = rails.iter().position(|(known, _)| known == name).unwrap_or_else(|| {
                rails.push((name, RailStatistics::named(name)));
                rails.len() - 1
            });
            let rail = &mut rails[index].1;
            for (counter, _, value) in read() {
                match counter {
                    "block_bytes" => rail.block_bytes += value,
                    "slices_retried" => rail.slices_retried += value,
                    "links_failed" => rail.links_failed += value,
                    "nanoseconds_per_kib" => rail.nanoseconds_per_kib = rail.nanoseconds_per_kib.max(value),
                    "slow" => rail.is_slow = rail.is_slow.max(value),
                    _ => {}
                }
            }
        }
        rails.into_iter().map(|(_, rail)| rail).collect()
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

impl CopyTask {
    /// Blocks that it counts for in the queue.
    pub(crate) fn blocks(&self) -> usize {
        match &self.task {
            Task::Push(push, _) => push.blocks.len(),
            Task::Arrived { blocks, .. } => blocks.len(),
        }
    }

    /// What tells the receivers of a push, and the pushes behind it, that it does not come.
    fn given_up(&self) -> impl FnOnce() + use<> {
        let handoffs = Arc::clone(&self.handoffs);
        let push = match &self.task {
            Task::Push(push, number) => Some((push.transfers.clone(), *number)),
            Task::Arrived { .. } => None,
        };
        move || {
            let Some((transfers, number)) = push else { return };
            handoffs.give_up(&transfers);
            handoffs.copied(transfers[0], number, None);
        }
    }

    fn is_push(&self) -> bool {
        matches!(self.task, Task::Push(..))
    }

    /// Copies blocks of host memory.
    ///
    /// # Safety
    /// As for [`Self::carry_out`].
    pub(crate) unsafe fn carry_out_on_host(self) -> Result<Outcome, Failure> {
        let mut copier = HostCopier(self.handoffs.shape);
        // SAFETY: handed on to the caller.
        unsafe { self.carry_out(&mut copier) }
    }

    /// Copies.
    ///
    /// # Safety
    /// The blocks of the tensors must be usable for the time of the call: a push's for reads, an arrival's for writes. So must
    /// the event.
    unsafe fn carry_out(self, copier: &mut impl BlockCopier) -> Result<Outcome, Failure> {
        let Self { handoffs, task } = self;
        match task {
            Task::Push(push, number) => {
                let (first, count) = (push.transfers[0], push.blocks.len());
                // SAFETY: readable by the contract of this function.
                let copied = unsafe { handoffs.copy(push, copier) };
                let (copied, outcome) = match copied {
                    Ok(copied) => (Some(copied), Ok(outcome(Status::Ok, count, Ending::Complete))),
                    Err(NotCopied::Outcome(status)) => (None, Ok(outcome(status, 0, Ending::Complete))),
                    Err(NotCopied::Failed(failure)) => (None, Err(failure)),
                };
                handoffs.copied(first, number, copied);
                outcome
            }
            Task::Arrived { tensors, blocks, slots, ending, event } => {
                if !slots.is_empty() {
                    let places = (&blocks[..slots.len()], &slots[..]);
                    // SAFETY: writable by the contract of this function; the slots are verified and nobody writes to them.
                    unsafe { copier.scatter(&tensors, places, event) }?;
                }
                let status = if slots.len() == blocks.len() { Status::Ok } else { Status::Miss };
                Ok(outcome(status, slots.len(), ending))
            }
        }
    }
}

/// Why a push is not in its slots.
enum NotCopied {
    /// Nobody wants it, or there is no slot.
    Outcome(Status),
    /// The device has failed.
    Failed(Failure),
}

impl HandOffs {
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

    /// Lets go of what was pushed for a hand-off, and tells its receivers.
    fn give_up(&self, transfers: &[TransferId]) {
        if let Some(pushed) = lock(&self.transfers).pushed.get_mut(&transfers[0]) {
            pushed.abandon();
        }
        transfers.iter().for_each(|&transfer| self.command(Command::Cancel { transfer }));
    }

    /// Copies a push into its slots. What cannot be copied is given up, and the receivers are told.
    ///
    /// # Safety
    /// As for [`CopyTask::carry_out`].
    unsafe fn copy(&self, push: Push, copier: &mut impl BlockCopier) -> Result<Copied, NotCopied> {
        let slots = self.slots_of(&push).map_err(|status| {
            if status == Status::Throttled {
                self.give_up(&push.transfers);
            }
            NotCopied::Outcome(status)
        })?;
        let Push { transfers, content, first_block, layers, tensors, blocks, event } = push;
        // SAFETY: readable by the contract of this function; these layers of the slots were not pushed before.
        let copied = unsafe { copier.gather(&tensors, (&blocks, &slots), layers.clone(), event) };
        copied.map_err(|failure| {
            self.give_up(&transfers);
            NotCopied::Failed(failure)
        })?;
        Ok(Copied { content, first_block, slots, layers })
    }
}
