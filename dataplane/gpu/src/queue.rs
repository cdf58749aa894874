//! Batches of blocks over routes: checked, launched on one stream, polled. This is the hot path.
//!
//! A batch is a copy of its items to the device, a launch, and a copy of status words and checksums back, in
//! the order of the stream; a small one is a launch alone. Batches run one after the other and complete in
//! that order. One thread drives a queue, which may be moved to another thread. Dropping a queue waits for
//! the device; batches that were not polled until then are dropped.
//!
//! A failed device is final: batches in flight and later ones complete with its error.

use std::collections::VecDeque;
use std::sync::Arc;

use dataplane_cuda::{Completion, CopyRequest, CudaError, Stream};
use dataplane_kernels::{ChecksumPlan, Direction, Item, Launch};

use crate::batch::{Finished, InFlightBatch, Sums};
use crate::error::{KernelsError, SubmitError};
use crate::kernels::LayoutKernels;
use crate::ring::{KernelQueueConfig, Parts, Ring};
use crate::route::{BlockCopy, CopyRoute, Plan, Route, RouteMemory, SlotRoute};

/// A queue of kernel batches on one stream.
#[derive(Debug)]
pub struct KernelQueue {
    // Dropped first: its drop waits for the stream, after which nothing accesses the memory of the other
    // fields.
    ring: Ring,
    flights: VecDeque<InFlightBatch>,
    kernels: Arc<LayoutKernels>,
    config: KernelQueueConfig,
    next_slot: u32,
    completions: Vec<Completion>,
    statuses: Vec<u32>,
    checksums: Vec<u64>,
}

impl Drop for KernelQueue {
    /// When kernels may still be running, their memory is leaked instead of freed.
    fn drop(&mut self) {
        if !self.ring.copies.wait_idle() {
            std::mem::forget((std::mem::take(&mut self.flights), Arc::clone(&self.kernels)));
        }
    }
}

impl KernelQueue {
    /// Creates a queue on a stream of the kernels' device, with all memory that it ever allocates.
    pub fn new(
        kernels: Arc<LayoutKernels>,
        stream: Stream,
        config: KernelQueueConfig,
    ) -> Result<Self, KernelsError> {
        let config = KernelQueueConfig {
            items_max: config.items_max.clamp(1, 1 << 20),
            batches_max: config.batches_max.clamp(1, 1 << 12),
        };
        let (items, batches) = (config.items_max as usize, config.batches_max as usize);
        Ok(Self {
            ring: Ring::new(stream, config)?,
            flights: VecDeque::with_capacity(batches),
            kernels,
            config,
            next_slot: 0,
            completions: Vec::with_capacity(2 * batches),
            statuses: vec![0; items],
            checksums: vec![0; items],
        })
    }

    /// Returns the stream, for other work that is to be ordered with the batches.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        self.ring.copies.stream()
    }

    pub(crate) fn config(&self) -> KernelQueueConfig {
        self.config
    }

    /// Waits for the device; false when kernels may still be running.
    pub(crate) fn wait_idle(&mut self) -> bool {
        self.ring.copies.wait_idle()
    }

    /// Returns the number of batches that were accepted and have not completed.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Copies blocks to slots.
    pub fn gather(
        &mut self,
        route: &CopyRoute,
        pairs: &[BlockCopy],
        sums: Sums,
        token: u64,
    ) -> Result<(), SubmitError> {
        self.start(route, Direction::Gather, pairs.iter().copied(), sums, token)
    }

    /// Copies slots to blocks. Checksums are those of the slots, as they are read.
    pub fn scatter(
        &mut self,
        route: &CopyRoute,
        pairs: &[BlockCopy],
        sums: Sums,
        token: u64,
    ) -> Result<(), SubmitError> {
        self.start(route, Direction::Scatter, pairs.iter().copied(), sums, token)
    }

    /// Takes the checksums of slots.
    pub fn checksum(&mut self, route: &SlotRoute, slots: &[u32], token: u64) -> Result<(), SubmitError> {
        self.start(route, (), slots.iter().map(whole_slot), Sums::Take, token)
    }

    /// Compares the checksums of slots with the expected ones.
    pub fn verify(
        &mut self,
        route: &SlotRoute,
        slots: &[u32],
        expected: &[u64],
        token: u64,
    ) -> Result<(), SubmitError> {
        self.start(route, (), slots.iter().map(whole_slot), Sums::Expect(expected), token)
    }

    fn start<P: Plan>(
        &mut self,
        Route { memory, plan }: &Route<P>,
        way: P::Way,
        pairs: impl ExactSizeIterator<Item = BlockCopy>,
        sums: Sums,
        token: u64,
    ) -> Result<(), SubmitError> {
        let count = pairs.len();
        self.admit(memory, count, sums)?;
        self.collect(memory, pairs)?;
        self.begin(memory, plan, way, count, sums, token)
    }

    /// Takes the checksum of the bytes at each of these addresses, in the length of the plan. The caller has
    /// checked that they lie in the slots of `memory`.
    pub(crate) fn sum_at(
        &mut self,
        memory: &RouteMemory,
        addresses: impl ExactSizeIterator<Item = u64>,
        plan: &ChecksumPlan,
        token: u64,
    ) -> Result<(), SubmitError> {
        let count = addresses.len();
        self.admit(memory, count, Sums::Take)?;
        self.ring.clear();
        addresses.for_each(|slot| self.ring.add(Item { slot, block: 0 }));
        self.begin(memory, plan, (), count, Sums::Take, token)
    }

    /// Launches the batch of the collected items.
    fn begin<P: Plan>(
        &mut self,
        memory: &RouteMemory,
        plan: &P,
        way: P::Way,
        count: usize,
        sums: Sums,
        token: u64,
    ) -> Result<(), SubmitError> {
        let slot = self.next_slot;
        let parts = Parts::of(count);
        let expected = if let Sums::Expect(expected) = sums { expected } else { &[] };
        let places = (sums != Sums::None).then_some(!expected.is_empty());
        let batch = self.ring.batch(slot, &parts, memory.planes(), places);
        let launch = plan.launch(way, &batch, self.kernels.shape())?;
        self.ring.seal(slot, &parts, expected);
        let failure = self.hand_over(slot, &parts, &launch).err();
        let (has_sums, _memory) = (places.is_some(), memory.clone());
        self.flights.push_back(InFlightBatch { token, slot, parts, count, has_sums, failure, _memory });
        self.next_slot = (slot + 1) % self.config.batches_max;
        Ok(())
    }

    /// Checks that the queue has room and that the batch belongs to this queue's device and limits.
    fn admit(&self, memory: &RouteMemory, items: usize, sums: Sums) -> Result<(), SubmitError> {
        let items_max = self.config.items_max;
        if items > items_max as usize {
            return Err(SubmitError::TooMany { items, items_max });
        }
        let ordinal = |device: &dataplane_cuda::Device| device.description().ordinal;
        let (route, queue) = (ordinal(memory.device()), ordinal(self.kernels.device()));
        if route != queue || ordinal(self.stream().device()) != queue {
            return Err(SubmitError::Device { route, queue });
        }
        match sums {
            Sums::Expect(expected) if expected.len() != items => {
                Err(SubmitError::Expected { expected: expected.len(), items })
            }
            _ if self.flights.len() == self.config.batches_max as usize => Err(SubmitError::Full),
            _ => Ok(()),
        }
    }

    /// Checks every item and builds the array of items.
    fn collect(
        &mut self,
        memory: &RouteMemory,
        pairs: impl Iterator<Item = BlockCopy>,
    ) -> Result<(), SubmitError> {
        let (blocks, slots) = (memory.blocks(), memory.slots.layout().slot_count);
        self.ring.clear();
        for (index, BlockCopy { block, slot }) in pairs.enumerate() {
            if block >= blocks {
                return Err(SubmitError::Block { index, block, blocks });
            }
            let address = memory.slots.try_address(slot, 0, memory.slots.layout().slot_bytes);
            let address = address.ok_or(SubmitError::Slot { index, slot, slots })?;
            self.ring.add(Item { slot: address, block });
        }
        Ok(())
    }

    /// Puts both copies and the launch on the stream. There is room for them: each batch in flight has two
    /// tokens and two flushes of the copy queue, which has no other work.
    fn hand_over(&mut self, slot: u32, parts: &Parts, launch: &Launch) -> Result<(), CudaError> {
        if parts.fits_host_memory() {
            return self.launch_near(launch);
        }
        let copy_to_device = self.ring.copy_to_device(slot, parts);
        let launched = if self.copy(&[copy_to_device]) {
            let stream = self.ring.copies.stream();
            // SAFETY: the items were checked against memory that the flight keeps, and their copy was put on this
            // stream before; the ring and the kernels outlive the stream's work.
            unsafe { self.kernels.launch(stream, launch) }
        } else {
            // The copy's error comes with its completion. The device's items may be those of an earlier
            // batch, whose memory may have been freed, so nothing is launched.
            Ok(())
        };
        let copy_to_host = self.ring.copy_to_host(slot, parts);
        self.copy(if launched.is_ok() { std::slice::from_ref(&copy_to_host) } else { &[] });
        launched
    }

    /// Launches a batch whose items and results stay in host memory. Both of its completions come with the
    /// event behind it.
    fn launch_near(&mut self, launch: &Launch) -> Result<(), CudaError> {
        let accepted = self.ring.copies.submit_batch(&[], 0);
        debug_assert_eq!(accepted, Ok(()), "a batch in flight has room for both its copies");
        let launched = if self.ring.copies.dead().is_none() {
            // SAFETY: the items were checked against memory that the flight keeps, and lie in host memory that the device
            // reaches; the ring and the kernels outlive the stream's work.
            unsafe { self.kernels.launch(self.stream(), launch) }
        } else {
            // The error comes with the completions.
            Ok(())
        };
        self.copy(&[]);
        launched
    }

    /// Submits and flushes copies. Returns whether the driver accepted them.
    fn copy(&mut self, requests: &[CopyRequest]) -> bool {
        let copies = &mut self.ring.copies;
        let before = copies.counters().bytes;
        let accepted = copies.submit_batch(requests, 0);
        debug_assert_eq!(accepted, Ok(()), "a batch in flight has room for both its copies");
        copies.flush();
        let bytes: u64 = requests.iter().map(|request| request.rows.bytes as u64).sum();
        accepted.is_ok() && copies.dead().is_none() && copies.counters().bytes - before == bytes
    }

    /// Reports up to `budget` completed batches, in the order of submission, and returns their number. Never
    /// waits.
    pub fn poll(&mut self, budget: usize, mut each: impl FnMut(Finished<'_>)) -> usize {
        self.ring.copies.poll(budget.saturating_mul(2), &mut self.completions);
        // Two completions per batch: an odd one is kept for the next poll.
        let whole = self.completions.len() / 2;
        for pair in 0..whole {
            let Some(flight) = self.flights.pop_front() else { break };
            let ways = &self.completions[2 * pair..][..2];
            let failed = ways.iter().find_map(|way| way.result.err()).or(flight.failure);
            let count = if failed.is_some() { 0 } else { flight.count };
            let sums = if flight.has_sums { count } else { 0 };
            let (statuses, checksums) = (&mut self.statuses[..count], &mut self.checksums[..sums]);
            self.ring.read(flight.slot, &flight.parts, statuses, checksums);
            let result = failed.map_or(Ok(()), Err);
            each(Finished { token: flight.token, result, statuses, checksums });
        }
        self.completions.drain(..2 * whole);
        whole
    }

    /// Waits for all batches. For start-up, shut-down and tests.
    pub fn drain(&mut self, mut each: impl FnMut(Finished<'_>)) {
        while self.in_flight() > 0 {
            if self.poll(usize::MAX, &mut each) == 0 {
                std::thread::yield_now();
            }
        }
    }
}

/// Returns the item of a route without tensors, of which the kernels read no block.
fn whole_slot(&slot: &u32) -> BlockCopy {
    BlockCopy { block: 0, slot }
}
