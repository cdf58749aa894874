//! What a transport needs to know of device memory, and no more. Nothing here is specific to one vendor.

use std::os::fd::OwnedFd;

/// A descriptor through which the kernel maps device memory for another device.
#[derive(Debug)]
pub struct DmaBuf {
    /// The DMA buffer. Whoever registers it needs it only until the registration is made.
    pub descriptor: OwnedFd,
    /// Where byte 0 of the memory lies in the buffer.
    pub offset: u64,
}

/// Memory of a device, as one range of addresses.
pub trait DeviceMemory: Send + Sync + std::fmt::Debug {
    /// The device's virtual address of byte 0; never dereferenced by the processor.
    fn address(&self) -> u64;

    /// Bytes of the range.
    fn bytes(&self) -> usize;

    /// Exports the memory as a DMA buffer.
    fn dma_buf(&self) -> Result<DmaBuf, DirectError>;

    /// Whether a NIC may register the bare address, since a kernel module translates it.
    fn has_peer_memory(&self) -> bool;

    /// Copies bytes out. Blocks; not for hot paths.
    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Copies bytes in. Blocks; not for hot paths.
    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), DeviceError>;
}

/// Why device memory cannot be reached without a copy through host memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {reason}")]
pub struct DirectError {
    /// What was asked for.
    pub operation: &'static str,
    /// Why it was refused.
    pub reason: String,
}

/// Why device memory could not be read or written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {reason}")]
pub struct DeviceError {
    /// What was asked for.
    pub operation: &'static str,
    /// Why it failed.
    pub reason: String,
}
