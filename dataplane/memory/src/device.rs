//! Memory of an accelerator, as the slots of a slab may lie in it.
//!
//! The CPU never touches it: it knows the address, hands it to devices that can reach it, and asks whoever owns the
//! memory to copy. What owns it is behind [`DeviceMemory`]; this crate knows no driver. `testing` has a double.

use std::os::fd::OwnedFd;

/// Memory of a device, in one piece. It stays allocated for as long as this value lives.
pub trait DeviceMemory: Send + Sync + std::fmt::Debug {
    /// The device's virtual address of byte 0. Never dereferenced by the CPU.
    fn address(&self) -> u64;

    /// How many bytes there are.
    fn bytes(&self) -> usize;

    /// A dma-buf that covers all of it, for a NIC to register, mapped in that way and no other. A new descriptor each
    /// time.
    fn dma_buf(&self, mapping: DmaBufMapping) -> Result<DmaBuf, DirectError>;

    /// Whether a NIC may register the bare address, as `nvidia-peermem` allows.
    fn has_peer_memory(&self) -> bool;

    /// Copies bytes out. Blocks; not for hot paths. A range outside is an error.
    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Copies bytes in. Blocks; not for hot paths. A range outside is an error.
    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), DeviceError>;

    /// What a NIC has written is visible to kernels started afterwards, once this has returned `Ok`. Called after the
    /// NIC's completion and before anybody is told of it. Some devices reorder such writes, and then it waits for the
    /// device, some microseconds; for all others there is nothing to do.
    fn settle(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// How the pages of a dma-buf are mapped for the device that registers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DmaBufMapping {
    /// Through the memory's window on the PCI bus. On machines whose processor is closer to the accelerator than PCI,
    /// a NIC on the bus needs this; drivers before CUDA 12.8 cannot be asked for it.
    Bar,
    /// As the memory's driver likes.
    Automatic,
}

/// Device memory as a dma-buf. The kernel keeps the buffer alive for whoever has registered it.
#[derive(Debug)]
pub struct DmaBuf {
    /// The buffer.
    pub descriptor: OwnedFd,
    /// Where in the buffer byte 0 of the memory lies.
    pub offset: u64,
}

/// Device memory cannot be reached by other devices, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {reason}")]
pub struct DirectError {
    /// What was tried.
    pub operation: &'static str,
    /// Why it failed.
    pub reason: String,
}

/// A copy to, from or within device memory failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {reason}")]
pub struct DeviceError {
    /// What was tried.
    pub operation: &'static str,
    /// Why it failed.
    pub reason: String,
}
