//! [`Copier`] over copy queues: one stream for copies to the device and one for all others, so that both copy
//! engines of the device work at a time.
//!
//! Slabs must be registered; slots of all other slabs are refused. Copies from host to host are supported
//! too. Like the queues, allocates nothing after construction, except for the text of a failure.

use std::sync::Arc;

use dataplane_memory::{Copier, CopyDone, CopyRefused, DeviceError, DeviceMemory, Slab, SlotCopy, SlotRef};

use crate::copy::{CopyRequest, Place, Region, RegionId};
use crate::error::CudaError;
use crate::queue::CopyQueue;
use crate::slab::{DeviceSlab, failed};
use crate::stream::{Priority, Stream};
use crate::submission::{Completion, CopyQueueConfig, SubmitError};
use crate::{Device, Pinned};

/// A registered slab and its region in both queues.
#[derive(Debug)]
struct RegisteredSlab {
    slab: Arc<Slab>,
    regions: [RegionId; 2],
}

/// Device memory in which slabs may be created later.
#[derive(Debug)]
struct Range {
    memory: Arc<DeviceSlab>,
    regions: [RegionId; 2],
}

/// Position of a slot, with its region in both queues.
struct SlotLocation {
    regions: [RegionId; 2],
    slot: u32,
    /// Offset of the slot's first byte in the region's slot.
    first: usize,
}

/// Both slots of a copy in flight, which it keeps.
#[derive(Debug)]
struct InFlightSlots {
    token: u64,
    _from: SlotRef,
    _to: SlotRef,
}

/// The copies of one direction.
#[derive(Debug)]
struct CopyDirection {
    queue: CopyQueue,
    held: Vec<Option<InFlightSlots>>,
    free: Vec<usize>,
}

impl Drop for CopyDirection {
    /// When copies may still be running on the device, their slots are leaked instead of freed.
    fn drop(&mut self) {
        if !self.queue.wait_idle() {
            std::mem::forget(std::mem::take(&mut self.held));
        }
    }
}

/// Index of the direction of copies to the device.
const UP: usize = 0;
/// Index of the direction of all other copies.
const DOWN: usize = 1;

/// Copies slots between host and device memory over two [`CopyQueue`]s.
#[derive(Debug)]
pub struct SlotCopier {
    /// Dropped first: the drop of a queue waits for the device.
    directions: [CopyDirection; 2],
    slabs: Vec<RegisteredSlab>,
    ranges: Vec<Range>,
    completions: Vec<Completion>,
}

impl SlotCopier {
    /// Creates a copier with streams of its own. Each direction accepts as many copies as `config` has
    /// tokens.
    pub fn new(device: &Device, priority: Priority, config: CopyQueueConfig) -> Result<Self, CudaError> {
        let direction = || -> Result<CopyDirection, CudaError> {
            let queue = CopyQueue::new(Stream::new(device, priority)?, config)?;
            let count = config.tokens_max.max(1);
            let held = std::iter::repeat_with(|| None).take(count).collect();
            Ok(CopyDirection { queue, held, free: (0..count).rev().collect() })
        };
        let directions = [direction()?, direction()?];
        Ok(Self {
            directions,
            slabs: Vec::new(),
            ranges: Vec::new(),
            completions: Vec::with_capacity(config.tokens_max),
        })
    }

    /// Registers pinned host memory. `None`: too many slabs are registered.
    pub fn add_host(&mut self, pinned: &Arc<Pinned>) -> Option<()> {
        let slab = Arc::clone(pinned.slab());
        self.add(slab, &Region::Host(Arc::clone(pinned)))
    }

    /// Registers a slab whose slots lie in `memory`, from its byte 0 on. `None`: the slots lie elsewhere, or
    /// too many slabs are registered.
    pub fn add_device(&mut self, slab: &Arc<Slab>, memory: &Arc<DeviceSlab>) -> Option<()> {
        let lies_there = slab.device().is_some_and(|device| device.address() == memory.address());
        if !lies_there || slab.layout() != memory.layout() {
            return None;
        }
        self.add(Arc::clone(slab), &Region::Device(Arc::clone(memory)))
    }

    /// Registers device memory of one slot: slabs that are later created in it need no registration. `None`:
    /// the memory does not have exactly one slot, or too many slabs are registered.
    pub fn add_memory(&mut self, memory: &Arc<DeviceSlab>) -> Option<()> {
        if memory.layout().slot_count != 1 {
            return None;
        }
        let regions = self.regions(&Region::Device(Arc::clone(memory)))?;
        self.ranges.push(Range { memory: Arc::clone(memory), regions });
        Some(())
    }

    fn add(&mut self, slab: Arc<Slab>, region: &Region) -> Option<()> {
        let regions = self.regions(region)?;
        self.slabs.push(RegisteredSlab { slab, regions });
        Some(())
    }

    fn regions(&mut self, region: &Region) -> Option<[RegionId; 2]> {
        let [up, down] = &mut self.directions;
        Some([up.queue.add_region(region.clone())?, down.queue.add_region(region.clone())?])
    }

    fn find(&self, slot: &SlotRef) -> Option<SlotLocation> {
        if let Some(known) = self.slabs.iter().find(|known| Arc::ptr_eq(&known.slab, slot.slab())) {
            return Some(SlotLocation { regions: known.regions, slot: slot.slot(), first: 0 });
        }
        let bytes = slot.slab().layout().slot_bytes;
        let address = slot.slab().device_address(slot.slot(), 0, bytes)?;
        self.ranges.iter().find_map(|Range { memory, regions }| {
            let first = usize::try_from(address.checked_sub(memory.address())?).ok()?;
            memory.try_address(0, first, bytes)?;
            Some(SlotLocation { regions: *regions, slot: 0, first })
        })
    }
}

impl Copier for SlotCopier {
    fn submit(&mut self, copy: SlotCopy) -> Result<(), CopyRefused> {
        if !copy.is_inside() || copy.overlaps() {
            return Err(CopyRefused::Outside(copy));
        }
        let Some((from, to)) = self.find(&copy.from).zip(self.find(&copy.to)) else {
            return Err(CopyRefused::Unreachable(copy));
        };
        if copy.from.slab().device().is_none() && copy.to.slab().device().is_none() {
            return Err(CopyRefused::Unreachable(copy));
        }
        let is_up = copy.to.slab().device().is_some() && copy.from.slab().device().is_none();
        let at = if is_up { UP } else { DOWN };
        let direction = &mut self.directions[at];
        let Some(&place) = direction.free.last() else { return Err(CopyRefused::Full(copy)) };
        let place_of = |found: SlotLocation, offset: u32| Place {
            region: found.regions[at],
            slot: found.slot,
            offset: found.first + offset as usize,
        };
        let (from, to) = (place_of(from, copy.from_offset), place_of(to, copy.to_offset));
        let request = CopyRequest::contiguous(from, to, copy.len as usize);
        match direction.queue.submit(&request, place as u64) {
            Ok(()) => {
                direction.free.pop();
                direction.held[place] =
                    Some(InFlightSlots { token: copy.token, _from: copy.from, _to: copy.to });
                Ok(())
            }
            Err(SubmitError::Outside { .. }) => Err(CopyRefused::Outside(copy)),
            Err(SubmitError::Full | SubmitError::TooMany { .. }) => {
                // The flush starts the submitted copies, which makes room later.
                direction.queue.flush();
                Err(CopyRefused::Full(copy))
            }
        }
    }

    fn flush(&mut self) {
        self.directions.iter_mut().for_each(|direction| direction.queue.flush());
    }

    fn poll(&mut self, done: &mut Vec<CopyDone>) -> usize {
        let before = done.len();
        for direction in &mut self.directions {
            if direction.queue.in_flight() == 0 {
                continue;
            }
            direction.queue.poll(direction.held.len(), &mut self.completions);
            for Completion { token: place, result } in self.completions.drain(..) {
                let place = place as usize;
                let Some(InFlightSlots { token, .. }) = direction.held[place].take() else { continue };
                direction.free.push(place);
                let result = result.map_err(|error| -> DeviceError { failed(error) });
                done.push(CopyDone { token, result });
            }
        }
        done.len() - before
    }

    fn in_flight(&self) -> usize {
        self.directions.iter().map(|direction| direction.queue.in_flight()).sum()
    }

    fn is_lost(&self) -> bool {
        self.directions.iter().any(|direction| direction.queue.dead().is_some())
    }
}
