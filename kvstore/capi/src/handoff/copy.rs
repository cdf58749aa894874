//! Copies between an engine's tensors and slots. A slot has a block's layers one after the other, each with its
//! planes in order.

use std::ops::Range;

use dataplane_memory::SlotRef;

use crate::device::DeviceEvent;
use crate::registry::TensorsGuard;
use crate::status::{Failure, Status};
use crate::tensors::{Memory, PagedTensors, PlaneRange};

/// Copies blocks between tensors and slots. The tensors have passed [`Shape::check`], the block numbers are
/// within the tensors, and there is a slot for each block.
pub(crate) trait BlockCopier {
    /// Copies layers of blocks into slots.
    ///
    /// # Safety
    /// The blocks' memory must be readable and unchanged, and the event must live, for the time of the call; no
    /// other code may use these layers of the slots.
    unsafe fn gather(
        &mut self,
        tensors: &TensorsGuard,
        places: (&[u64], &[SlotRef]),
        layers: Range<u16>,
        event: DeviceEvent,
    ) -> Result<(), Failure>;

    /// Copies slots into blocks.
    ///
    /// The blocks' memory must be writable and used by no other code, and the event must live, for the time of
    /// the call; the slots must not be written to.
    unsafe fn scatter(
        &mut self,
        tensors: &TensorsGuard,
        places: (&[u64], &[SlotRef]),
        event: DeviceEvent,
    ) -> Result<(), Failure>;
}

/// The layers of a block, and the memory of the tensors of hand-offs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) memory: Memory,
    pub(crate) layers: u16,
    pub(crate) layer_bytes: usize,
}

impl Shape {
    /// Checks that the blocks of these tensors have this shape. The error names the difference.
    pub(crate) fn check(&self, tensors: &PagedTensors) -> Result<(), Failure> {
        let wrong = |text: String| Err(Failure::new(Status::InvalidArgument, text));
        let (planes, layers) = (tensors.planes(), usize::from(self.layers));
        if tensors.memory() != self.memory {
            let (theirs, ours) = (tensors.memory(), self.memory);
            return wrong(format!(
                "the tensors lie in {theirs}, and hand-offs are of tensors in {ours} (section [device], device.ordinal)"
            ));
        }
        if !planes.len().is_multiple_of(layers) {
            return wrong(format!("the tensors have {} planes, and a block {layers} layers", planes.len()));
        }
        for (layer, group) in planes.chunks(planes.len() / layers).enumerate() {
            let bytes: usize = group.iter().map(|plane| plane.bytes).sum();
            if bytes != self.layer_bytes {
                let expected = self.layer_bytes;
                return wrong(format!(
                    "layer {layer} of the tensors has {bytes} bytes, and the configuration {expected}"
                ));
            }
        }
        Ok(())
    }

    /// Returns the plane and the slot offset of each piece of these layers.
    fn pieces<'a>(
        &self,
        tensors: &'a PagedTensors,
        layers: Range<u16>,
    ) -> impl Iterator<Item = (&'a PlaneRange, usize)> {
        let planes_each = tensors.planes().len() / usize::from(self.layers);
        let (from, to) = (usize::from(layers.start), usize::from(layers.end));
        let planes = &tensors.planes()[from * planes_each..to * planes_each];
        planes.iter().scan(from * self.layer_bytes, |offset, plane| {
            let at = *offset;
            *offset += plane.bytes;
            Some((plane, at))
        })
    }
}

/// Copies tensors in host memory with the processor.
pub(crate) struct HostCopier(pub(crate) Shape);

impl BlockCopier for HostCopier {
    unsafe fn gather(
        &mut self,
        tensors: &TensorsGuard,
        (blocks, slots): (&[u64], &[SlotRef]),
        layers: Range<u16>,
        _event: DeviceEvent,
    ) -> Result<(), Failure> {
        for (slot, &block) in slots.iter().zip(blocks) {
            for (plane, offset) in self.0.pieces(tensors, layers.clone()) {
                let to = slot.slab().address(slot.slot(), offset, plane.bytes);
                let from = plane.start.as_ptr().wrapping_add(block as usize * plane.stride);
                // SAFETY: `from` is readable and `to` this call's alone by its contract; a slot is never an engine's memory.
                unsafe { std::ptr::copy_nonoverlapping(from, to.as_ptr(), plane.bytes) };
            }
        }
        Ok(())
    }

    unsafe fn scatter(
        &mut self,
        tensors: &TensorsGuard,
        (blocks, slots): (&[u64], &[SlotRef]),
        _event: DeviceEvent,
    ) -> Result<(), Failure> {
        for (slot, &block) in slots.iter().zip(blocks) {
            for (plane, offset) in self.0.pieces(tensors, 0..self.0.layers) {
                let from = slot.slab().address(slot.slot(), offset, plane.bytes);
                let to = plane.start.as_ptr().wrapping_add(block as usize * plane.stride);
                // SAFETY: `to` is this call's alone and `from` unchanged by its contract; a slot is never an engine's memory.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, plane.bytes) };
            }
        }
        Ok(())
    }
}
