//! Translates an operation of the fabric's interface into work of a lane, and checks every range.
//!
//! Runs once for each request posted; no allocation unless the request is refused.

use dataplane_fabric::{MESSAGE_BYTES_MAX, Operation, SlotRange, Source, Target};
use dataplane_memory::SlabKind;

use crate::geometry::{Cursor, Geometry};
use crate::lane::Work;
use crate::local::FabricResources;
use crate::post::Remote;
use crate::wire::RemoteSlots;

/// Returns the work for the lane, or the reason that the request is invalid.
pub(crate) fn translate(
    local: &FabricResources,
    slots: &[RemoteSlots; SlabKind::COUNT],
    operation: Operation,
) -> Result<Work, String> {
    let locate = |target: Target, span: u32| {
        let slots = &slots[target.slab.index()];
        let address = slots.locate(target.slot, target.offset, span).ok_or_else(|| {
            let Target { slab, slot, offset, .. } = target;
            format!("{span} bytes at {offset} of slot {slot} ({slab:?}) are outside of the peer's slots")
        })?;
        Ok::<_, String>(Remote { address, key: slots.key })
    };
    let bad_rows = || "rows that do not cut the length, or overlap".to_owned();
    let (slot, offset, len, target, rows, immediate, is_read) = match operation {
        Operation::Write { source: Source::Slot { slot, offset, len }, target, rows, immediate } => {
            (slot, offset, len, target, rows, immediate, false)
        }
        Operation::Read { into: SlotRange { slot, offset, len }, from, rows } => {
            (slot, offset, len, from, rows, None, true)
        }
        Operation::Write { source: Source::Inline { bytes, len }, target, rows, immediate } => {
            if rows.is_some() || usize::from(len) > bytes.len() {
                return Err("an inline write with rows, or of more bytes than it has".to_owned());
            }
            let remote = locate(target, len.into())?;
            return Ok(Work::Inline { bytes, len, remote, immediate });
        }
        Operation::Send { message } => {
            assert!(message.len() <= MESSAGE_BYTES_MAX, "a message of {} bytes", message.len());
            return Ok(Work::Message { message, offset: 0 });
        }
    };
    let geometry = Geometry::new(len, rows).ok_or_else(bad_rows)?;
    let remote = locate(target, geometry.remote_span())?;
    let (span, slab) = (geometry.local_span() as usize, slot.slab());
    assert!(
        slab.contains(slot.slot(), offset as usize, span),
        "{span} bytes at {offset} of slot {}: outside",
        slot.slot()
    );
    let region = local.region_of(slab).ok_or_else(|| {
        let (bytes, memory) = (slab.layout().slots_bytes(), if slab.device().is_some() { "device" } else { "host" });
        format!("a slot of {bytes} bytes of {memory} memory that were not registered with the RDMA device at start-up")
    })?;
    // A region begins with the slots, in host and in device memory; only the card accesses the address.
    let within = slot.slot() as usize * slab.layout().stride() + offset as usize;
    let address = local.regions[region].address() + within as u64;
    let (region, cursor) = (region as u32, Cursor::default());
    Ok(Work::Slot { slot, region, local: address, remote, geometry, cursor, is_read, immediate })
}
