//! [`Copier`] over copy queues: one stream for what goes to the device and one for the rest, so that both of its copy
//! engines work at a time.
//!
//! It knows the slabs that it was told of and refuses all others, and copies from host to host too. No allocation after
//! construction, as the queues; a failure's text is made when there is one.

use std::sync::Arc;

use dataplane_memory::{Copier, CopyDone, CopyRefused, DeviceError, DeviceMemory, Slab, SlotCopy, SlotRef};

use crate::copy::{CopyRequest, Place, Region, RegionId};
use crate::error::CudaError;
use crate::queue::CopyQueue;
use crate::slab::{DeviceSlab, failed};
use crate::stream::{Priority, Stream};
use crate::submission::{Completion, CopyQueueConfig, Refusal};
use crate::{Device, Pinned};

/// A slab and its name in both queues.
#[derive(Debug)]
struct Known {
    slab: Arc<Slab>,
    regions: [RegionId; 2],
}

/// Both slots of a copy that is under way.
#[derive(Debug)]
struct Held {
    token: u64,
    _from: SlotRef,
    _to: SlotRef,
}

/// One direction.
#[derive(Debug)]
struct Lane {
    queue: CopyQueue,
    held: Vec<Option<Held>>,
    free: Vec<usize>,
}

impl Drop for Lane {
    /// The slots of copies that may be under way are never given back.
    fn drop(&mut self) {
        if !self.queue.settle() {
            std::mem::forget(std::mem::take(&mut self.held));
        }
    }
}

/// What goes to the device.
const UP: usize = 0;
/// Everything else.
const DOWN: usize = 1;

/// See the module.
#[derive(Debug)]
pub struct SlotCopier {
    /// Dropped first: a queue waits for what the device still does.
    lanes: [Lane; 2],
    slabs: Vec<Known>,
    completions: Vec<Completion>,
}

impl SlotCopier {
    /// A copier on streams of its own; each direction takes as many copies as `config` has tokens.
    pub fn new(device: &Device, priority: Priority, config: CopyQueueConfig) -> Result<Self, CudaError> {
        let lane = || -> Result<Lane, CudaError> {
            let queue = CopyQueue::new(Stream::new(device, priority)?, config)?;
            let count = config.tokens_max.max(1);
            let held = std::iter::repeat_with(|| None).take(count).collect();
            Ok(Lane { queue, held, free: (0..count).rev().collect() })
        };
        let lanes = [lane()?, lane()?];
        Ok(Self { lanes, slabs: Vec::new(), completions: Vec::with_capacity(config.tokens_max) })
    }

    /// Tells it of pinned host memory. `None`: it knows too many slabs already.
    pub fn add_host(&mut self, pinned: &Arc<Pinned>) -> Option<()> {
        let slab = Arc::clone(pinned.slab());
        self.add(slab, &Region::Host(Arc::clone(pinned)))
    }

    /// Tells it of a slab whose slots lie in `memory`, from its byte 0 on. `None`: they do not, or it knows too many.
    pub fn add_device(&mut self, slab: &Arc<Slab>, memory: &Arc<DeviceSlab>) -> Option<()> {
        let lies_there = slab.device().is_some_and(|device| device.address() == memory.address());
        if !lies_there || slab.layout() != memory.layout() {
            return None;
        }
        self.add(Arc::clone(slab), &Region::Device(Arc::clone(memory)))
    }

    fn add(&mut self, slab: Arc<Slab>, region: &Region) -> Option<()> {
        let [up, down] = &mut self.lanes;
        let regions = [up.queue.add_region(region.clone())?, down.queue.add_region(region.clone())?];
        self.slabs.push(Known { slab, regions });
        Some(())
    }

    fn regions(&self, slot: &SlotRef) -> Option<[RegionId; 2]> {
        self.slabs.iter().find(|known| Arc::ptr_eq(&known.slab, slot.slab())).map(|known| known.regions)
    }
}

impl Copier for SlotCopier {
    fn submit(&mut self, copy: SlotCopy) -> Result<(), CopyRefused> {
        if !copy.is_inside() || copy.overlaps() {
            return Err(CopyRefused::Outside(copy));
        }
        let Some((from, to)) = self.regions(&copy.from).zip(self.regions(&copy.to)) else {
            return Err(CopyRefused::Unreachable(copy));
        };
        if copy.from.slab().device().is_none() && copy.to.slab().device().is_none() {
            return Err(CopyRefused::Unreachable(copy));
        }
        let is_up = copy.to.slab().device().is_some() && copy.from.slab().device().is_none();
        let at = if is_up { UP } else { DOWN };
        let lane = &mut self.lanes[at];
        let Some(&place) = lane.free.last() else { return Err(CopyRefused::Full(copy)) };
        let from = Place { region: from[at], slot: copy.from.slot(), offset: copy.from_offset as usize };
        let to = Place { region: to[at], slot: copy.to.slot(), offset: copy.to_offset as usize };
        let request = CopyRequest::contiguous(from, to, copy.len as usize);
        match lane.queue.submit(&request, place as u64) {
            Ok(()) => {
                lane.free.pop();
                lane.held[place] = Some(Held { token: copy.token, _from: copy.from, _to: copy.to });
                Ok(())
            }
            Err(Refusal::Outside { .. }) => Err(CopyRefused::Outside(copy)),
            Err(Refusal::Full | Refusal::TooMany { .. }) => {
                // What was submitted makes room once it has begun.
                lane.queue.flush();
                Err(CopyRefused::Full(copy))
            }
        }
    }

    fn flush(&mut self) {
        self.lanes.iter_mut().for_each(|lane| lane.queue.flush());
    }

    fn poll(&mut self, done: &mut Vec<CopyDone>) -> usize {
        let before = done.len();
        for lane in &mut self.lanes {
            if lane.queue.in_flight() == 0 {
                continue;
            }
            lane.queue.poll(lane.held.len(), &mut self.completions);
            for Completion { token: place, result } in self.completions.drain(..) {
                let place = place as usize;
                let Some(Held { token, .. }) = lane.held[place].take() else { continue };
                lane.free.push(place);
                let result = result.map_err(|error| -> DeviceError { failed(error) });
                done.push(CopyDone { token, result });
            }
        }
        done.len() - before
    }

    fn in_flight(&self) -> usize {
        self.lanes.iter().map(|lane| lane.queue.in_flight()).sum()
    }
}
