//! The memory of an end, host or device, and the benchmark's own access to its bytes.

use std::fmt;
use std::sync::Arc;

use anyhow::{Context, Result};
use dataplane_cuda::{Cuda, DeviceSlab};
use dataplane_memory::{PageSize, Slab, SlabLayout};

use super::args::MemoryKind;
use super::error::Unavailable;

/// Kind of memory of an end's slots, and its device if it is device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Memory {
    pub(super) kind: MemoryKind,
    /// Ordinal of the device in the driver.
    pub(super) gpu: u32,
}

impl fmt::Display for Memory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            MemoryKind::Host | MemoryKind::Huge => formatter.write_str("host"),
            MemoryKind::Gpu => write!(formatter, "device {}", self.gpu),
        }
    }
}

impl Memory {
    /// Page size of host memory.
    pub(super) fn pages(self) -> PageSize {
        if self.kind == MemoryKind::Huge { PageSize::HugeIfAvailable } else { PageSize::Standard }
    }

    pub(super) fn is_on_device(self) -> bool {
        self.kind == MemoryKind::Gpu
    }

    /// Creates a slab in this memory. Without a GPU: [`Unavailable`].
    pub(super) fn slab(self, name: &str, layout: SlabLayout) -> Result<Slab> {
        if !self.is_on_device() {
            return Ok(Slab::create(name, layout, self.pages())?);
        }
        let device = driver()?.device(self.gpu).with_context(|| self.to_string())?;
        let slots = DeviceSlab::allocate(&device, layout)?;
        slots.fill(0)?;
        Ok(Slab::on_device(name, layout, Arc::new(slots))?)
    }
}

/// Opens the driver of the GPUs; without one that has a device: [`Unavailable`].
pub(super) fn driver() -> Result<Cuda> {
    Ok(Cuda::open().map_err(|reason| Unavailable(format!("no GPU here: {reason}")))?)
}

/// Returns the offset of a slot's bytes in the device's memory. A range outside of it is a bug, as for host memory.
fn start(slab: &Slab, base: u64, (slot, offset): (u32, usize), bytes: usize) -> usize {
    let address = slab.device_address(slot, offset, bytes);
    (address.unwrap_or_else(|| panic!("{bytes} bytes at {offset} of slot {slot}")) - base) as usize
}

/// Writes bytes to a slot. Blocks for device memory.
pub(super) fn write(slab: &Slab, slot: u32, offset: usize, bytes: &[u8]) -> Result<()> {
    match slab.device() {
        None => slab.write(slot, offset, bytes),
        Some(device) => device.write(start(slab, device.address(), (slot, offset), bytes.len()), bytes)?,
    }
    Ok(())
}

/// Reads bytes of a slot, including those that a NIC has written. Blocks for device memory.
pub(super) fn read(slab: &Slab, slot: u32, offset: usize, bytes: &mut [u8]) -> Result<()> {
    match slab.device() {
        None => slab.read(slot, offset, bytes),
        Some(device) => {
            device.flush_nic_writes()?;
            device.read(start(slab, device.address(), (slot, offset), bytes.len()), bytes)?;
        }
    }
    Ok(())
}
