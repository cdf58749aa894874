//! Pieces that a test moves, and their work requests.

use anyhow::{Context, Result, ensure};
use dataplane_fabric::{Operation, SlotRange, Source, Target};
use dataplane_memory::{SlabKind, SlotRef};

use super::args::Op;
use super::memory;
use super::node::Node;
use super::places::{Shape, SlotOffset};
use super::sizes::RowShape;

/// The peer's slots, by name.
#[derive(Debug, Default)]
pub(super) struct Remote {
    on_device: bool,
    pub(super) slot_bytes: usize,
    pub(super) out: Vec<(u32, u32)>,
    pub(super) in_: Vec<(u32, u32)>,
}

impl Remote {
    /// Checks the values that a peer sent: offsets into its slots are 32 bits wide.
    pub(super) fn checked(
        on_device: bool,
        slot_bytes: usize,
        out: Vec<(u32, u32)>,
        in_: Vec<(u32, u32)>,
    ) -> Result<Self> {
        ensure!(u32::try_from(slot_bytes).is_ok(), "slots of {slot_bytes} bytes");
        Ok(Self { on_device, slot_bytes, out, in_ })
    }
}

/// A piece to move, with its source and target.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub(super) op: Op,
    pub(super) shape: Shape,
    /// Index of the piece locally and at the peer.
    pub(super) local: u32,
    pub(super) remote: u32,
    pub(super) immediate: Option<u32>,
    pub(super) signalled: bool,
}

impl Piece {
    pub(super) fn operation(&self, node: &Node) -> Result<Operation> {
        let rows = self.shape.rows.map(RowShape::rows);
        let here = |slots| here(slots, self.shape.place(node.slot_bytes(), self.local));
        let slab = if node.remote.on_device { SlabKind::Device } else { SlabKind::Host };
        let there = |names| there(slab, names, self.shape.place(node.remote.slot_bytes, self.remote));
        Ok(match self.op {
            Op::Write | Op::WriteImm => {
                let (slot, offset) = here(&node.out)?;
                Operation::Write {
                    source: Source::Slot { slot, offset, len: self.shape.bytes },
                    target: there(&node.remote.in_)?,
                    rows,
                    immediate: self.immediate,
                }
            }
            Op::Read => {
                let (slot, offset) = here(&node.in_)?;
                Operation::Read {
                    into: SlotRange { slot, offset, len: self.shape.bytes },
                    from: there(&node.remote.out)?,
                    rows,
                }
            }
            Op::Send => {
                let (slot, offset) = here(&node.out)?;
                let mut message = vec![0; self.shape.bytes as usize];
                memory::read(&node.slab, slot.slot(), offset as usize, &mut message)?;
                message[0] = 0;
                Operation::Send { message: message.into_boxed_slice() }
            }
        })
    }
}

fn here(slots: &[SlotRef], place: SlotOffset) -> Result<(SlotRef, u32)> {
    let slot = slots.get(place.slot).with_context(|| format!("no slot {} here", place.slot))?;
    Ok((slot.clone(), place.offset))
}

fn there(slab: SlabKind, names: &[(u32, u32)], place: SlotOffset) -> Result<Target> {
    let &(slot, generation) =
        names.get(place.slot).with_context(|| format!("no slot {} there", place.slot))?;
    Ok(Target { slab, slot, generation, offset: place.offset })
}
