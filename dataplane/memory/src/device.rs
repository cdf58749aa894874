//! Memory of an accelerator, in which the slots of a slab may lie.
//!
//! The CPU never accesses it: it knows the address, passes it to devices that can reach it, and asks the
//! owner of the memory to copy. The owner is behind [`DeviceMemory`]; this crate knows no driver. `testing`
//! has a double.

use std::os::fd::OwnedFd;

/// Contiguous memory of a device. It stays allocated as long as this value lives.
pub trait DeviceMemory: Send + Sync + std::fmt::Debug {
    /// Returns the device's virtual address of byte 0. The CPU never dereferences it.
    fn address(&self) -> u64;

    /// Returns the number of bytes.
    fn bytes(&self) -> usize;

    /// Exports all of the memory as a dma-buf for a NIC to register, mapped in exactly this way. Each call
    /// returns a new descriptor.
    fn dma_buf(&self, mapping: DmaBufMapping) -> Result<DmaBuf, DmaBufError>;

    /// Whether a NIC may register the bare address, as `nvidia-peermem` allows.
    fn has_peer_memory(&self) -> bool;

    /// Copies bytes out of the memory. Blocks; not for hot paths. A range outside is an error.
    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Copies bytes into the memory. Blocks; not for hot paths. A range outside is an error.
    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Makes bytes that a NIC has written visible to kernels started after it has returned `Ok`. Called
    /// after the NIC's completion and before the bytes are reported. On devices that reorder such writes it
    /// waits for the device, some microseconds; on all others it does nothing.
    fn flush_nic_writes(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// Mapping of a dma-buf's pages for the device that registers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DmaBufMapping {
    /// Through the memory's window on the PCI bus. On machines whose processor is closer to the accelerator
    /// than PCI, a NIC on the bus needs this mapping; drivers before CUDA 12.8 do not support the request.
    Bar,
    /// The mapping that the memory's driver chooses.
    Automatic,
}

/// Device memory as a dma-buf. The kernel keeps the buffer alive while a device has it registered.
#[derive(Debug)]
pub struct DmaBuf {
    /// The buffer.
    pub descriptor: OwnedFd,
    /// Offset of the memory's byte 0 in the buffer.
    pub offset: u64,
}

/// Error: other devices cannot reach the device's memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {reason}")]
pub struct DmaBufError {
    /// The operation that failed.
    pub operation: &'static str,
    /// Reason of the failure.
    pub reason: String,
}

/// Error of a copy to, from or within device memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {reason}")]
pub struct DeviceError {
    /// The operation that failed.
    pub operation: &'static str,
    /// Reason of the failure.
    pub reason: String,
}
