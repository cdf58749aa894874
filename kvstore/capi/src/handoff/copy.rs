//! Between an engine's tensors and slots: a slot has a block's layers one after the other, each with its planes in order.

use std::ops::Range;

use dataplane_memory::SlotRef;

use crate::status::{Failure, Status};
use crate::tensors::{Memory, PagedTensors, PlaneRange};

/// The layers of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) layers: u16,
    pub(crate) layer_bytes: usize,
}

impl Shape {
    /// Why blocks of these tensors are not cut like this, if they are not.
    pub(crate) fn check(&self, tensors: &PagedTensors) -> Result<(), Failure> {
        let wrong = |text: String| Err(Failure::new(Status::InvalidArgument, text));
        let (planes, layers) = (tensors.planes(), usize::from(self.layers));
        if tensors.memory() != Memory::Host {
            return wrong(
                "hand-offs are of tensors in host memory: a device's are not supported yet".to_owned(),
            );
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

    /// Where each piece of these layers lies: its plane, and its place in a slot.
    fn pieces<'a>(
        &self,
        tensors: &'a PagedTensors,
        layers: Range<u16>,
    ) -> impl Iterator<Item = (&'a PlaneRange, usize)> {
        let planes_each = tensors.planes().len() / usize::from(self.layers);
        let planes =
            &tensors.planes()[usize::from(layers.start) * planes_each..usize::from(layers.end) * planes_each];
        let start = usize::from(layers.start) * self.layer_bytes;
        planes.iter().scan(start, |offset, plane| {
            let at = *offset;
            *offset += plane.bytes;
            Some((plane, at))
        })
    }

    /// Copies layers of a block into a slot.
    ///
    /// # Safety
    /// The block's memory must be readable and unchanged for the time of the call, and nobody else may use these layers of
    /// the slot. The tensors have passed [`Self::check`], and the block's number is one of theirs.
    pub(crate) unsafe fn copy_to_slot(
        &self,
        slot: &SlotRef,
        tensors: &PagedTensors,
        block: u64,
        layers: Range<u16>,
    ) {
        for (plane, offset) in self.pieces(tensors, layers) {
            let to = slot.slab().address(slot.slot(), offset, plane.bytes);
            let from = plane.start.as_ptr().wrapping_add(block as usize * plane.stride);
            // SAFETY: `from` is readable and `to` this call's alone by its contract; a slot is never an engine's memory.
            unsafe { std::ptr::copy_nonoverlapping(from, to.as_ptr(), plane.bytes) };
        }
    }

    /// Copies a slot into a block.
    ///
    /// # Safety
    /// The block's memory must be writable and nobody else's for the time of the call, and nobody may write to the slot. The
    /// tensors have passed [`Self::check`], and the block's number is one of theirs.
    pub(crate) unsafe fn copy_from_slot(&self, slot: &SlotRef, tensors: &PagedTensors, block: u64) {
        for (plane, offset) in self.pieces(tensors, 0..self.layers) {
            let from = slot.slab().address(slot.slot(), offset, plane.bytes);
            let to = plane.start.as_ptr().wrapping_add(block as usize * plane.stride);
            // SAFETY: `to` is this call's alone and `from` unchanged by its contract; a slot is never an engine's memory.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, plane.bytes) };
        }
    }
}
