//! Equal slots in one allocation of device memory.
//!
//! Slot `n` begins at `n` times the layout's stride; there is no header, since the processor cannot read one.
//! The allocation is a multiple of 2 MiB, which is the driver's own mapping unit; such a range can be
//! exported whole. Made at start-up. Reads and writes here block and are for tests and control paths; copies
//! of the data path go through [`CopyQueue`](crate::CopyQueue). The blocking copies run on a stream of the
//! device's own: the default stream and the kernels of other code would wait for each other.

use std::sync::Arc;

use cudarc::driver::sys::{
    CUflushGPUDirectRDMAWritesScope as FlushScope, CUflushGPUDirectRDMAWritesTarget as FlushTarget,
    CUpointer_attribute, CUstream,
};
use dataplane_memory::SlabLayout;

use crate::Device;
use crate::borrowed_memory::{self, BorrowError};
use crate::error::CudaError;
use crate::export;
use crate::ipc::IpcHandle;
use crate::library::code;
use dataplane_memory::{DeviceError, DeviceMemory, DmaBuf, DmaBufError, DmaBufMapping};

/// Allocations are a multiple of this number of bytes.
const ALLOCATION_GRAIN: usize = 2 << 20;

/// Origin of the memory, which decides how it is released.
#[derive(Debug)]
enum Origin {
    Allocated,
    Attached,
    Adopted,
    Part { whole: Arc<DeviceSlab> },
}

/// A range of device memory that is divided into equal slots.
#[derive(Debug)]
pub struct DeviceSlab {
    device: Device,
    base: u64,
    /// Distance from the first slot's first byte to the last slot's last byte.
    bytes: usize,
    stride: usize,
    layout: SlabLayout,
    origin: Origin,
    has_peer_memory: bool,
}

impl DeviceSlab {
    /// Allocates a slab. Its content is undefined: see [`Self::fill`].
    pub fn allocate(device: &Device, layout: SlabLayout) -> Result<Self, DeviceError> {
        let operation = "cuMemAlloc";
        let bytes = span(layout).ok_or_else(|| unusable(operation, layout))?;
        let rounded =
            bytes.checked_next_multiple_of(ALLOCATION_GRAIN).ok_or_else(|| unusable(operation, layout))?;
        let context = device.context();
        let _entered = context.enter().map_err(failed)?;
        let mut base = 0;
        // SAFETY: writes one address.
        let allocated = unsafe { (context.library.allocate)(&mut base, rounded) };
        context.library.check(operation, allocated).map_err(|error| DeviceError {
            operation,
            reason: format!("{rounded} bytes on device {}: {error}", device.description().ordinal),
        })?;
        let mut slab = Self::over(device, base, layout, bytes, Origin::Allocated);
        slab.has_peer_memory = slab.keep_in_order();
        Ok(slab)
    }

    /// Maps the slab of another process on the same device. The driver refuses this in the process that
    /// exported the slab.
    pub fn attach(device: &Device, handle: IpcHandle, layout: SlabLayout) -> Result<Self, DeviceError> {
        let operation = "cuIpcOpenMemHandle";
        let bytes = span(layout).ok_or_else(|| unusable(operation, layout))?;
        let context = device.context();
        let _entered = context.enter().map_err(failed)?;
        let base = handle.open(context).map_err(failed)?;
        let slab = Self::over(device, base, layout, bytes, Origin::Attached);
        let mapped = slab.allocation_bytes().map_err(failed)?;
        if mapped < bytes {
            let reason = format!("the exported memory has {mapped} bytes, the layout needs {bytes}");
            return Err(DeviceError { operation, reason });
        }
        Ok(slab)
    }

    /// Uses memory that other code in this process has allocated and will free.
    ///
    /// # Safety
    /// 1. The layout's bytes, from `address` on, lie in one allocation of this device's primary context.
    /// 2. They are freed only after the slab and everything registered from it was dropped.
    pub unsafe fn adopt(device: &Device, address: u64, layout: SlabLayout) -> Result<Self, DeviceError> {
        let bytes = span(layout).ok_or_else(|| unusable("adopt", layout))?;
        let mut slab = Self::over(device, address, layout, bytes, Origin::Adopted);
        slab.has_peer_memory = slab.keep_in_order();
        Ok(slab)
    }

    /// Views memory that other code in this process has allocated and uses, an engine's tensors for example,
    /// as one slot of `bytes` bytes. The memory is not changed. The driver is asked, allocation by
    /// allocation, whether all of the range is mapped and is memory of this device, not of another one or of
    /// the host: ranges of virtual memory that were mapped piece by piece may span several allocations.
    ///
    /// # Safety
    /// 1. This device's primary context may use the bytes.
    /// 2. They stay mapped until the slab is dropped.
    pub unsafe fn borrow(device: &Device, address: u64, bytes: usize) -> Result<Self, BorrowError> {
        borrowed_memory::is_mapped(device.context(), address, bytes)?;
        let layout = SlabLayout { slot_bytes: bytes, slot_count: 1 };
        Ok(Self::over(device, address, layout, bytes, Origin::Adopted))
    }

    /// Returns slots in a part of a slab, from byte `offset` on, for example one tensor of memory that was
    /// attached whole. Keeps the whole slab.
    pub fn part(whole: &Arc<Self>, offset: usize, layout: SlabLayout) -> Result<Self, DeviceError> {
        let bytes = span(layout).ok_or_else(|| unusable("part", layout))?;
        let base = whole.range("part", offset, bytes)?;
        let mut part = Self::over(&whole.device, base, layout, bytes, Origin::Part { whole: whole.clone() });
        part.has_peer_memory = whole.has_peer_memory;
        Ok(part)
    }

    fn over(device: &Device, base: u64, layout: SlabLayout, bytes: usize, origin: Origin) -> Self {
        let stride = layout.stride();
        Self { device: device.clone(), base, bytes, stride, layout, origin, has_peer_memory: false }
    }

    /// Makes the driver finish every blocking copy to this memory before the call returns, for all callers: a
    /// NIC that registers the bare address would otherwise see the bytes late. Returns whether a NIC may
    /// register bare addresses here.
    fn keep_in_order(&self) -> bool {
        let context = self.device.context();
        let Ok(_entered) = context.enter() else { return false };
        let which = CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS;
        let on = 1_u32;
        // SAFETY: the attribute's value is an unsigned integer, which is read during the call.
        let set =
            unsafe { (context.library.set_pointer_attribute)((&raw const on).cast(), which, self.base) };
        let description = self.device.description();
        set == code::SUCCESS && description.has_direct_access && description.has_peer_memory
    }

    /// Returns the bytes from the slab's start to the end of the allocation that contains it.
    fn allocation_bytes(&self) -> Result<usize, CudaError> {
        let (start, bytes) = export::allocation_of(self.device.context(), self.base)?;
        Ok((start + bytes as u64).saturating_sub(self.base) as usize)
    }

    /// Returns the device that holds the slab.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the layout.
    #[must_use]
    pub fn layout(&self) -> SlabLayout {
        self.layout
    }

    /// Returns the device address of `len` bytes at `offset` of `slot`; `None` when they are not inside the
    /// slot.
    #[must_use]
    #[inline]
    pub fn try_address(&self, slot: u32, offset: usize, len: usize) -> Option<u64> {
        let is_inside = slot < self.layout.slot_count
            && offset.checked_add(len).is_some_and(|end| end <= self.layout.slot_bytes);
        is_inside.then(|| self.base + (slot as usize * self.stride + offset) as u64)
    }

    /// Sets every byte to `value`. Blocks.
    pub fn fill(&self, value: u8) -> Result<(), DeviceError> {
        let context = self.device.context();
        let fill = |stream: CUstream| {
            // SAFETY: the range is this slab's, and the stream lives.
            unsafe { (context.library.fill_async)(self.base, value, self.bytes, stream) }
        };
        context.block_on("cuMemsetD8Async", fill).map_err(|(error, _)| failed(error))
    }

    /// Returns the origin of the slab, or of the slab that this is a part of.
    fn root(&self) -> &Origin {
        match &self.origin {
            Origin::Part { whole } => whole.root(),
            origin => origin,
        }
    }

    /// Returns a handle by which another process attaches this slab. Valid while the slab lives. Only for a
    /// slab that was allocated here: the handle stands for the whole allocation, from its start.
    pub fn export_ipc(&self) -> Result<IpcHandle, DeviceError> {
        if !matches!(self.origin, Origin::Allocated) {
            let reason = "the slab was not allocated by this process's own call".to_owned();
            return Err(DeviceError { operation: "cuIpcGetMemHandle", reason });
        }
        IpcHandle::of(self.device.context(), self.base).map_err(failed)
    }

    fn range(&self, operation: &'static str, offset: usize, len: usize) -> Result<u64, DeviceError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.bytes => Ok(self.base + offset as u64),
            _ => Err(DeviceError {
                operation,
                reason: format!("bytes {offset}+{len} of {} bytes", self.bytes),
            }),
        }
    }

    /// Copies between `host` and the device, and waits. When the wait fails, the copy may still be running:
    /// then `host` is leaked, which is why it is not the caller's slice.
    fn copy(&self, device: u64, mut host: Vec<u8>, is_read: bool) -> Result<Vec<u8>, DeviceError> {
        if host.is_empty() {
            return Ok(host);
        }
        let context = self.device.context();
        let (address, len) = (host.as_mut_ptr() as u64, host.len());
        let (to, from) = if is_read { (address, device) } else { (device, address) };
        let copy = |stream: CUstream| {
            // SAFETY: one side is this slab's range, which the caller checked; the other side lives until the
            // copy has ended, or is leaked.
            unsafe { (context.library.copy_async)(to, from, len, stream) }
        };
        context.block_on("cuMemcpyAsync", copy).map(|()| std::mem::take(&mut host)).map_err(
            |(error, is_over)| {
                if !is_over {
                    std::mem::forget(host);
                }
                failed(error)
            },
        )
    }
}

impl DeviceMemory for DeviceSlab {
    fn address(&self) -> u64 {
        self.base
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn dma_buf(&self, mapping: DmaBufMapping) -> Result<DmaBuf, DmaBufError> {
        let is_adopted = match self.root() {
            Origin::Attached => {
                let reason = "it is another process's memory, whose export has not been tried anywhere";
                return Err(DmaBufError { operation: export::OPERATION, reason: reason.to_owned() });
            }
            origin => matches!(origin, Origin::Adopted),
        };
        export::dma_buf(self.device.context(), self.base, self.bytes, mapping, is_adopted)
    }

    fn has_peer_memory(&self) -> bool {
        self.has_peer_memory
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let from = self.range("read", offset, bytes.len())?;
        bytes.copy_from_slice(&self.copy(from, vec![0; bytes.len()], true)?);
        Ok(())
    }

    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        let to = self.range("write", offset, bytes.len())?;
        self.copy(to, bytes.to_vec(), false).map(|_| ())
    }

    fn flush_nic_writes(&self) -> Result<(), DeviceError> {
        let operation = "cuFlushGPUDirectRDMAWrites";
        let (context, description) = (self.device.context(), self.device.description());
        if description.orders_direct_writes {
            return Ok(());
        }
        let Some(flush) = context.library.flush_direct.filter(|_| description.flushes_direct_writes) else {
            let reason = "the device neither orders what a NIC writes nor can be asked to".to_owned();
            return Err(DeviceError { operation, reason });
        };
        let _entered = context.enter().map_err(failed)?;
        let target = FlushTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        // SAFETY: the context is current; the device reports that the host may call this.
        let flushed = unsafe { flush(target, FlushScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER) };
        context.library.check(operation, flushed).map_err(failed)
    }
}

impl Drop for DeviceSlab {
    fn drop(&mut self) {
        let context = self.device.context();
        let Ok(_entered) = context.enter() else { return };
        // A context that has failed refuses this too; its memory is freed with the process.
        match &self.origin {
            // SAFETY: allocated by this slab and freed once; the driver waits for copies that are under way.
            Origin::Allocated => _ = unsafe { (context.library.free)(self.base) },
            // SAFETY: opened by this slab and closed once.
            Origin::Attached => _ = unsafe { (context.library.ipc_close)(self.base) },
            Origin::Adopted | Origin::Part { .. } => {}
        }
    }
}

/// Returns the bytes of all slots; `None` when the layout is unusable.
fn span(layout: SlabLayout) -> Option<usize> {
    layout.mapped_bytes()?;
    layout.stride().checked_mul(layout.slot_count as usize)
}

fn unusable(operation: &'static str, layout: SlabLayout) -> DeviceError {
    let SlabLayout { slot_bytes, slot_count } = layout;
    DeviceError {
        operation,
        reason: format!("{slot_count} slots of {slot_bytes} bytes is not a usable layout"),
    }
}

pub(crate) fn failed(error: CudaError) -> DeviceError {
    DeviceError { operation: error.operation, reason: format!("{} ({})", error.name, error.code) }
}
