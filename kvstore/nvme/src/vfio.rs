//! A controller behind VFIO: an IOMMU group, a container that holds its mappings (type 1, version 2), and the device.
//!
//! `sysfs` checks before anything is opened whether a device can be used, and its errors say what to do; `ffi`
//! has the kernel's interface (`linux/vfio.h`, `Documentation/driver-api/vfio.rst`); `addresses` allocates
//! device addresses. Closing the descriptors removes all mappings and gives the device back to vfio-pci, which
//! resets it.

mod addresses;
mod ffi;
mod open;
mod sysfs;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;

use crate::{Bus, NvmeError, PciAddress};
use addresses::Addresses;

/// PCI command register: enables accesses to the device's memory space, and accesses of the device to memory.
const COMMAND_REGISTER: u64 = 4;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_BUS_MASTER: u16 = 1 << 2;

/// The mapping of BAR 0.
#[derive(Debug)]
struct Registers {
    start: NonNull<u8>,
    bytes: usize,
}

/// A device that this process uses exclusively.
#[derive(Debug)]
pub struct VfioBus {
    name: String,
    registers: Registers,
    addresses: Addresses,
    device: File,
    /// Offset of the configuration space in `device`.
    configuration: u64,
    has_reset: bool,
    container: OwnedFd,
    /// The container's IOMMU lives as long as a group is in it.
    _group: OwnedFd,
}

// SAFETY: the registers are accessed by volatile reads and writes through `&self` and belong to this value.
unsafe impl Send for VfioBus {}

impl VfioBus {
    /// Opens the device. It must be bound to vfio-pci; errors say what to do.
    pub fn open(address: PciAddress) -> Result<Self, NvmeError> {
        open::open(address)
    }

    fn set_command(&self, set: u16, clear: u16) -> std::io::Result<()> {
        let mut command = [0; 2];
        let at = self.configuration + COMMAND_REGISTER;
        self.device.read_exact_at(&mut command, at)?;
        let command = u16::from_le_bytes(command) & !clear | set;
        self.device.write_all_at(&command.to_le_bytes(), at)
    }

    /// Lets the device answer and make memory accesses.
    fn switch_on(&self) -> Result<(), NvmeError> {
        self.set_command(COMMAND_MEMORY | COMMAND_BUS_MASTER, 0)
            .map_err(|error| NvmeError::system("write the PCI command register of", &self.name, &error))
    }
}

impl Registers {
    #[inline]
    fn at(&self, offset: usize) -> NonNull<u32> {
        let is_inside = offset.is_multiple_of(4) && offset < self.bytes;
        assert!(is_inside, "register {offset:#x} of {:#x}", self.bytes);
        // SAFETY: the offset is inside the mapping, whose length is a multiple of a page.
        unsafe { self.start.add(offset) }.cast()
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: mapped by `open` with this length; nothing keeps a pointer into it.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "munmap of registers: {unmapped:?}");
    }
}

impl Bus for VfioBus {
    fn device(&self) -> &str {
        &self.name
    }

    fn register_bytes(&self) -> usize {
        self.registers.bytes
    }

    #[inline]
    fn read(&self, offset: usize) -> u32 {
        // SAFETY: `at` gives an aligned address inside of the mapping, which lives as long as `self`.
        let value = unsafe { self.registers.at(offset).read_volatile() };
        u32::from_le(value)
    }

    #[inline]
    fn write(&self, offset: usize, value: u32) {
        // SAFETY: as in `read`.
        unsafe { self.registers.at(offset).write_volatile(value.to_le()) }
    }

    unsafe fn map(&mut self, start: NonNull<u8>, bytes: usize) -> Result<u64, NvmeError> {
        let no_room = |limit| NvmeError::NoRoom { device: self.name.clone(), bytes, limit };
        let Some(address) = self.addresses.take(start.addr().get() as u64, bytes as u64) else {
            return Err(no_room("the IOMMU's address space is full"));
        };
        let mapped = ffi::map_dma(&self.container, start, address, bytes);
        let Err(error) = mapped else { return Ok(address) };
        self.addresses.give_back(address);
        Err(match error.raw_os_error() {
            Some(libc::ENOSPC) => no_room("the IOMMU driver's limit of mappings (dma_entry_limit)"),
            Some(libc::ENOMEM) => NvmeError::LockedMemory {
                device: self.name.clone(),
                bytes,
                limit_bytes: rustix::process::getrlimit(rustix::process::Resource::Memlock)
                    .current
                    .unwrap_or(u64::MAX),
            },
            _ => NvmeError::system("VFIO_IOMMU_MAP_DMA for", &self.name, &error),
        })
    }

    fn unmap(&mut self, address: u64, bytes: usize) -> Result<(), NvmeError> {
        ffi::unmap_dma(&self.container, address, bytes)
            .map_err(|error| NvmeError::system("VFIO_IOMMU_UNMAP_DMA for", &self.name, &error))?;
        self.addresses.give_back(address);
        Ok(())
    }

    fn reset(&mut self) -> Result<(), NvmeError> {
        if !self.has_reset {
            let what = "the function has no reset of its own".to_owned();
            return Err(NvmeError::Unsupported { device: self.name.clone(), what });
        }
        ffi::reset(&self.device)
            .map_err(|error| NvmeError::system("VFIO_DEVICE_RESET of", &self.name, &error))?;
        self.switch_on()
    }

    fn isolate(&mut self) {
        // If this fails, the device does not answer any more, and then makes no accesses either.
        let _ = self.set_command(0, COMMAND_BUS_MASTER);
    }
}
