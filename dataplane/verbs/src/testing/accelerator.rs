//! Accelerators beside the software devices: memory that the devices reach and the CPU does not.
//!
//! A region of such memory is named by the accelerator's own addresses. The software device reads and
//! writes it through [`Accelerator`], where a card would use the bus.

use std::sync::Arc;

use dataplane_memory::DeviceMemory;

use super::world::World;

/// The ways in which a software device can register an accelerator's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reach {
    /// `ibv_reg_dmabuf_mr` succeeds.
    pub dma_buf: bool,
    /// `ibv_reg_mr` accepts the memory's address: a peer-memory module is loaded. Otherwise it fails with EFAULT.
    pub peer_memory: bool,
}

/// Memory that software devices access over the bus, by the memory's own addresses.
pub trait Accelerator: Send + Sync {
    /// Whether the whole range belongs to this memory.
    fn covers(&self, address: u64, length: u64) -> bool;

    /// Reads bytes of a covered range.
    fn read(&self, address: u64, bytes: &mut [u8]);

    /// Writes bytes to a covered range.
    fn write(&self, address: u64, bytes: &[u8]);
}

/// A contiguous piece of memory as an accelerator.
impl Accelerator for Arc<dyn DeviceMemory> {
    fn covers(&self, address: u64, length: u64) -> bool {
        let offset = address.checked_sub(self.address());
        let end = offset.and_then(|offset| offset.checked_add(length));
        end.is_some_and(|end| end <= self.bytes() as u64)
    }

    fn read(&self, address: u64, bytes: &mut [u8]) {
        DeviceMemory::read(&**self, (address - self.address()) as usize, bytes).expect("a live accelerator");
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        DeviceMemory::write(&**self, (address - self.address()) as usize, bytes).expect("a live accelerator");
    }
}

/// An accelerator's memory, seen from one software device.
pub(super) struct Beside {
    device: u32,
    memory: Arc<dyn Accelerator>,
    reach: Reach,
}

impl World {
    pub(super) fn put_beside(&mut self, device: u32, memory: Arc<dyn Accelerator>, reach: Reach) {
        self.beside.push(Beside { device, memory, reach });
    }

    /// Returns the ways in which the device of a context reaches the range; `None` when the range is in no
    /// accelerator's memory.
    pub(super) fn reach_of(&self, context: u32, address: u64, length: u64) -> Option<Reach> {
        let device = self.contexts.get(&context)?.device;
        let mut covering =
            self.beside.iter().filter(|beside| beside.memory.covers(address, length)).peekable();
        covering.peek()?;
        let own = covering.find(|beside| beside.device == device);
        Some(own.map_or_else(Reach::default, |beside| beside.reach))
    }

    fn accelerator_at(&self, address: u64, length: u64) -> Option<&dyn Accelerator> {
        let beside = self.beside.iter().find(|beside| beside.memory.covers(address, length))?;
        Some(&*beside.memory)
    }

    /// The device's access to memory.
    ///
    /// # Safety
    /// Both ranges are covered by regions: mapped, and valid to read or write.
    pub(super) unsafe fn copy_bytes(&self, from: u64, to: u64, length: usize) {
        let ends = (self.accelerator_at(from, length as u64), self.accelerator_at(to, length as u64));
        if let (None, None) = ends {
            // SAFETY: the caller vouches for both ranges; `copy` allows that they overlap.
            return unsafe { std::ptr::copy(from as *const u8, to as *mut u8, length) };
        }
        let mut bytes = vec![0; length];
        match ends.0 {
            Some(memory) => memory.read(from, &mut bytes),
            // SAFETY: the caller vouches for the range; `bytes` is as long.
            None => unsafe { std::ptr::copy(from as *const u8, bytes.as_mut_ptr(), length) },
        }
        match ends.1 {
            Some(memory) => memory.write(to, &bytes),
            // SAFETY: as above.
            None => unsafe { std::ptr::copy(bytes.as_ptr(), to as *mut u8, length) },
        }
    }
}
