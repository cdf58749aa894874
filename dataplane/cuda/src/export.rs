//! Device memory as a DMA buffer, which a NIC's driver can map.
//!
//! The driver exports whole pages of the host: the range is widened to whole pages inside its allocation, and
//! the offset of the first byte is returned. (`cuda.h`, `cuMemGetHandleForAddressRange`.) Memory that was
//! mapped piece by piece has an allocation for each piece: a range over several allocations is exported
//! unchanged.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use cudarc::driver::sys::{CUmemRangeFlags_enum, CUmemRangeHandleType};

use crate::device::Context;
use crate::error::CudaError;
use dataplane_memory::{DmaBuf, DmaBufError, DmaBufMapping};

pub(crate) const OPERATION: &str = "cuMemGetHandleForAddressRange";
/// Page size of the driver's device mappings. An allocation owns its last page whole.
const DEVICE_PAGE_BYTES: u64 = 64 << 10;

/// Returns start and length of the allocation that contains an address.
pub(crate) fn allocation_of(context: &Context, address: u64) -> Result<(u64, usize), CudaError> {
    let _entered = context.enter()?;
    let (mut start, mut bytes) = (0, 0);
    // SAFETY: writes one address and one length.
    let asked = unsafe { (context.library.address_range)(&mut start, &mut bytes, address) };
    context.library.check("cuMemGetAddressRange", asked)?;
    Ok((start, bytes))
}

/// Exports a range as a DMA buffer. `is_adopted`: other code allocated the memory, so that its last page may
/// be shared.
pub(crate) fn dma_buf(
    context: &Context,
    address: u64,
    bytes: usize,
    mapping: DmaBufMapping,
    is_adopted: bool,
) -> Result<DmaBuf, DmaBufError> {
    let refused = |reason: String| DmaBufError { operation: OPERATION, reason };
    if context.library.range_handle.is_none() {
        return Err(refused(format!("the driver speaks CUDA {}; 11.7 is needed", context.library.version())));
    }
    if !context.description.has_dma_buf {
        return Err(refused("the device says that it exports no DMA buffers".to_owned()));
    }
    let (allocation, allocated) =
        allocation_of(context, address).map_err(|error| refused(error.to_string()))?;
    let is_whole = |number: u64| number.is_multiple_of(DEVICE_PAGE_BYTES);
    if is_adopted && !(is_whole(allocation) && is_whole(allocated as u64)) {
        let reason = "which is not of whole pages of 64 KiB: others' bytes may share its pages";
        return Err(refused(format!("{allocated} bytes at {allocation:#x} were allocated, {reason}")));
    }
    let (start, end) = widened((allocation, allocated as u64), address, bytes);
    let flags = match mapping {
        DmaBufMapping::Automatic => 0,
        DmaBufMapping::Bar => CUmemRangeFlags_enum::CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE as u64,
    };
    let descriptor = export(context, start, (end - start) as usize, flags).map_err(|error| {
        refused(format!("{} bytes at {start:#x}: {} ({})", end - start, error.name, error.code))
    })?;
    Ok(DmaBuf { descriptor, offset: address - start })
}

/// Returns the range in whole pages. The last page of an allocation whose length is not a multiple of pages
/// belongs to it whole. A range that passes the end of the allocation is returned unchanged.
fn widened((allocation, allocated): (u64, u64), address: u64, bytes: usize) -> (u64, u64) {
    let page = rustix::param::page_size() as u64;
    let grain = page.max(DEVICE_PAGE_BYTES);
    let allocation_end = (allocation + allocated).next_multiple_of(grain);
    if address + bytes as u64 > allocation_end {
        return (address, address + bytes as u64);
    }
    let start = (address / grain * grain).max(allocation) / page * page;
    let end = (address + bytes as u64).next_multiple_of(grain).min(allocation_end);
    (start, end)
}

fn export(context: &Context, address: u64, bytes: usize, flags: u64) -> Result<OwnedFd, CudaError> {
    let Some(range_handle) = context.library.range_handle else {
        return Err(CudaError { operation: OPERATION, code: 0, name: "no such function" });
    };
    let _entered = context.enter()?;
    let mut descriptor: RawFd = -1;
    let kind = CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
    // SAFETY: for this kind of handle the driver writes one descriptor, an `int`.
    let exported = unsafe { range_handle((&raw mut descriptor).cast(), address, bytes, kind, flags) };
    context.library.check(OPERATION, exported)?;
    assert!(descriptor >= 0, "the driver said that it exported memory, and gave descriptor {descriptor}");
    // SAFETY: the driver has just created the descriptor, which has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}
