//! An engine's tensors: the position of each plane, and the check that all its blocks lie in memory that
//! stays allocated.

use std::ops::Range;
use std::sync::Arc;

use dataplane_cuda::{Device, DeviceMemory, DeviceSlab};
use dataplane_kernels::{EngineTensors, PagedLayout, PlanError};
use dataplane_memory::SlabLayout;

use crate::error::RouteError;

/// Position of a plane (one layer's keys or values).
#[derive(Debug, Clone)]
pub struct Plane {
    /// The memory, used as plain bytes: its division into slots is ignored.
    pub memory: Arc<DeviceSlab>,
    /// Position of the plane's first block in the memory, in bytes.
    pub offset: usize,
}

/// The planes of one engine on one device, in the same order as in the slot.
#[derive(Debug)]
pub struct PagedTensors {
    layout: PagedLayout,
    planes: Vec<Plane>,
    /// Array of all planes' addresses in device memory, and the index of the first one of these planes.
    array: Arc<DeviceSlab>,
    first: usize,
}

impl PagedTensors {
    /// Checks that every block of every plane lies in its memory, and writes the planes' addresses to device
    /// memory (an allocation of 2 MiB, which is the smallest). For a range of layers, use [`Self::part`].
    pub fn new(layout: PagedLayout, planes: &[Plane]) -> Result<Self, RouteError> {
        let Some(first) = planes.first() else { return Err(RouteError::Planes { slot: 0, tensors: 0 }) };
        let device = first.memory.device().clone();
        let needed = span(&layout)?;
        for (number, plane) in planes.iter().enumerate() {
            same_device(&device, plane.memory.device())?;
            let present = plane.memory.bytes();
            let end = needed.checked_add(plane.offset as u64);
            if end.is_none_or(|end| end > present as u64) {
                return Err(RouteError::Plane { plane: number, offset: plane.offset, needed, present });
            }
        }
        let words: Vec<u64> = planes.iter().map(address_of).collect();
        let array = SlabLayout { slot_bytes: words.len() * size_of::<u64>(), slot_count: 1 };
        let array = DeviceSlab::allocate(&device, array)?;
        array.write(0, bytemuck::cast_slice(&words))?;
        Ok(Self { layout, planes: planes.to_vec(), array: Arc::new(array), first: 0 })
    }

    /// Returns a range of the planes, without device memory of its own; `None` when the range is empty or out
    /// of bounds.
    #[must_use]
    pub fn part(&self, planes: Range<usize>) -> Option<Self> {
        let first = self.first + planes.start;
        let planes = self.planes.get(planes).filter(|planes| !planes.is_empty())?.to_vec();
        Some(Self { layout: self.layout, planes, array: Arc::clone(&self.array), first })
    }

    /// Creates the planes from an engine's tensors: one tensor per layer, or two with separate keys and
    /// values.
    pub fn of_engine(engine: &EngineTensors, tensors: &[Plane]) -> Result<Self, RouteError> {
        let offsets: Vec<u64> = tensors.iter().map(|tensor| tensor.offset as u64).collect();
        let offsets = engine.planes(&offsets);
        let each = (offsets.len() / tensors.len().max(1)).max(1);
        let memories = tensors.iter().flat_map(|tensor| std::iter::repeat_n(&tensor.memory, each));
        let planes: Vec<Plane> = memories
            .zip(offsets)
            .map(|(memory, offset)| Plane { memory: memory.clone(), offset: offset as usize })
            .collect();
        Self::new(engine.layout(), &planes)
    }

    /// Returns the strides of the planes.
    #[must_use]
    pub fn layout(&self) -> &PagedLayout {
        &self.layout
    }

    /// Returns the device that holds the planes.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.array.device()
    }

    pub(crate) fn planes(&self) -> usize {
        self.planes.len()
    }

    /// Returns the device address of the array of the planes' addresses.
    pub(crate) fn array(&self) -> u64 {
        self.array.address() + (self.first * size_of::<u64>()) as u64
    }

    pub(crate) fn addresses(&self) -> impl Iterator<Item = u64> + '_ {
        self.planes.iter().map(address_of)
    }
}

fn address_of(plane: &Plane) -> u64 {
    plane.memory.address() + plane.offset as u64
}

pub(crate) fn same_device(one: &Device, other: &Device) -> Result<(), RouteError> {
    let (one, other) = (one.description().ordinal, other.description().ordinal);
    if one == other { Ok(()) } else { Err(RouteError::Devices { one, other }) }
}

/// Bytes from a plane's first byte to the last byte of its last block; `u64::MAX` when the number overflows.
fn span(layout: &PagedLayout) -> Result<u64, PlanError> {
    let last = |what, count: u64, stride: u64| {
        let last = count.checked_sub(1).ok_or(PlanError::Zero(what))?;
        Ok(last.saturating_mul(stride))
    };
    Ok(last("the count of blocks", layout.blocks, layout.block_stride)?
        .saturating_add(last("the count of tokens", layout.tokens.into(), layout.token_stride)?)
        .saturating_add(last("the count of heads", layout.heads.into(), layout.head_stride)?)
        .saturating_add(layout.head_bytes.into()))
}
