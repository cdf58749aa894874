//! [`Checksummer`] over a [`KernelQueue`]: ranges of slots, gathered into batches of one length each.
//!
//! An item of the checksum kernel is an address, so a range of a slot costs no more than a slot. All items of
//! a launch have the same length, and either all or none have addresses that are multiples of 16. A flush
//! therefore makes separate batches for each slab, length and alignment. The plan for a length is arithmetic,
//! so no plans are kept. A sum without a free batch waits here until a poll has freed one.
//!
//! Slabs must be registered; slots of all other slabs are refused. Like the queue, allocates nothing after
//! construction, except for the text of a failure.

use std::sync::Arc;

use dataplane_cuda::{DeviceMemory, DeviceSlab};
use dataplane_kernels::{ChecksumPlan, PlanError};
use dataplane_memory::{Checksummer, DeviceError, Slab, SlotRef, SlotSum, SumDone, SumRefused};

use crate::batch::Finished;
use crate::error::SubmitError;
use crate::queue::KernelQueue;
use crate::route::RouteMemory;

/// Alignment of addresses that the fast kernel requires, in bytes.
const ALIGNMENT: u64 = 16;

/// Properties that all sums of one batch share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kind {
    /// Index of the slab.
    slab: usize,
    len: u32,
    is_aligned: bool,
}

impl Kind {
    fn plan(self) -> Result<ChecksumPlan, PlanError> {
        ChecksumPlan::new(self.len.into(), if self.is_aligned { ALIGNMENT } else { 1 })
    }
}

/// A sum that was accepted and has not completed.
#[derive(Debug)]
struct Accepted {
    token: u64,
    kind: Kind,
    address: u64,
    /// Keeps the slot until the sum has ended.
    _slot: SlotRef,
}

/// A registered slab, with its memory in the form that a batch keeps.
#[derive(Debug)]
struct RegisteredSlab {
    slab: Arc<Slab>,
    memory: RouteMemory,
}

/// Computes checksums of slots over a [`KernelQueue`].
#[derive(Debug)]
pub struct SlotChecksummer {
    // Dropped first: its drop waits for the device.
    queue: KernelQueue,
    slabs: Vec<RegisteredSlab>,
    /// Accepted sums that were not launched yet, in the order of submission.
    waiting: Vec<Accepted>,
    /// The sums of each batch of the queue; the token of a batch is its index here.
    batches: Box<[Vec<Accepted>]>,
    free: Vec<usize>,
    /// Largest number of sums in one batch.
    items_max: usize,
    sums_max: usize,
    in_flight: usize,
    /// Results of sums that failed before a launch.
    failed: Vec<SumDone>,
}

impl Drop for SlotChecksummer {
    /// When sums may still be running on the device, their slots are leaked instead of freed.
    fn drop(&mut self) {
        if !self.queue.wait_idle() {
            std::mem::forget(std::mem::take(&mut self.batches));
        }
    }
}

impl SlotChecksummer {
    /// Creates a checksummer over an empty queue that it uses alone; at most `sums_max` (at least 1) sums at
    /// a time.
    #[must_use]
    pub fn new(queue: KernelQueue, sums_max: usize) -> Self {
        let sums_max = sums_max.max(1);
        let config = queue.config();
        let items_max = sums_max.min(config.items_max as usize);
        let batches: Box<[_]> = (0..config.batches_max).map(|_| Vec::with_capacity(items_max)).collect();
        Self {
            queue,
            slabs: Vec::new(),
            waiting: Vec::with_capacity(sums_max),
            free: (0..batches.len()).rev().collect(),
            batches,
            items_max,
            sums_max,
            in_flight: 0,
            failed: Vec::with_capacity(sums_max),
        }
    }

    /// Registers a slab whose slots lie in `memory`, from its byte 0 on. `None`: the slots lie elsewhere or
    /// on another device.
    pub fn add_device(&mut self, slab: &Arc<Slab>, memory: &Arc<DeviceSlab>) -> Option<()> {
        let lies_there = slab.device().is_some_and(|device| device.address() == memory.address());
        let ordinal = |device: &dataplane_cuda::Device| device.description().ordinal;
        let is_same = ordinal(memory.device()) == ordinal(self.queue.stream().device());
        if !lies_there || !is_same || slab.layout() != memory.layout() {
            return None;
        }
        let slots = Arc::clone(memory);
        let registered =
            RegisteredSlab { slab: Arc::clone(slab), memory: RouteMemory { tensors: None, slots } };
        self.slabs.push(registered);
        Some(())
    }

    fn position(&self, slab: &Arc<Slab>) -> Option<usize> {
        self.slabs.iter().position(|known| Arc::ptr_eq(&known.slab, slab))
    }

    /// Launches the waiting sums of the same kind as the oldest one; false when there is no free batch or no
    /// sum.
    fn launch(&mut self) -> bool {
        let Some((first, &place)) = self.waiting.first().zip(self.free.last()) else { return false };
        let kind = first.kind;
        let batch = &mut self.batches[place];
        let alike = self.waiting.extract_if(.., |waiting| waiting.kind == kind);
        batch.extend(alike.take(self.items_max));
        let addresses = batch.iter().map(|accepted| accepted.address);
        let launched = kind.plan().map_err(SubmitError::from).and_then(|plan| {
            self.queue.sum_at(&self.slabs[kind.slab].memory, addresses, &plan, place as u64)
        });
        match launched {
            Ok(()) => _ = self.free.pop(),
            Err(refusal) => {
                let failure = DeviceError { operation: "launch of a checksum", reason: refusal.to_string() };
                let failed =
                    |accepted: Accepted| SumDone { token: accepted.token, result: Err(failure.clone()) };
                self.failed.extend(batch.drain(..).map(failed));
            }
        }
        true
    }
}

impl Checksummer for SlotChecksummer {
    fn reaches(&self, slab: &Arc<Slab>) -> bool {
        self.position(slab).is_some()
    }

    fn submit(&mut self, sum: SlotSum) -> Result<(), SumRefused> {
        let Some(slab) = self.position(sum.slot.slab()) else { return Err(SumRefused::Unreachable(sum)) };
        let (slot, offset, len) = (sum.slot.slot(), sum.offset as usize, sum.len as usize);
        let address = self.slabs[slab].slab.device_address(slot, offset, len).filter(|_| len > 0);
        let Some(address) = address else { return Err(SumRefused::Outside(sum)) };
        if self.in_flight >= self.sums_max {
            return Err(SumRefused::Full(sum));
        }
        let kind = Kind { slab, len: sum.len, is_aligned: address.is_multiple_of(ALIGNMENT) };
        self.waiting.push(Accepted { token: sum.token, kind, address, _slot: sum.slot });
        self.in_flight += 1;
        Ok(())
    }

    fn flush(&mut self) {
        while self.launch() {}
    }

    fn poll(&mut self, done: &mut Vec<SumDone>) -> usize {
        let before = done.len();
        let Self { queue, batches, free, .. } = self;
        queue.poll(usize::MAX, |Finished { token, result, statuses, checksums }| {
            let batch = &mut batches[token as usize];
            for (index, Accepted { token, .. }) in batch.drain(..).enumerate() {
                let result = match result {
                    Ok(()) if statuses[index] == 0 => Ok(checksums[index]),
                    Ok(()) => Err(format!("status {:#x}", statuses[index])),
                    Err(error) => Err(error.to_string()),
                };
                let result = result.map_err(|reason| DeviceError { operation: "checksum", reason });
                done.push(SumDone { token, result });
            }
            free.push(token as usize);
        });
        done.append(&mut self.failed);
        let ended = done.len() - before;
        self.in_flight -= ended;
        if ended > 0 {
            self.flush();
        }
        ended
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}
