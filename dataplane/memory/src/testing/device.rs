//! Test double of a device's memory.
//!
//! The same pages are mapped twice: at the address that is returned no access is allowed, so that a
//! dereference faults at once; the double itself uses the other mapping, under a lock.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use crate::{DeviceError, DeviceMemory, DmaBuf, DmaBufError, DmaBufMapping};

/// Ways in which a NIC may reach the memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Abilities {
    /// Whether the memory can be exported as a dma-buf. (The export is a memfd, which no kernel accepts as
    /// a dma-buf.)
    pub dma_buf: bool,
    /// Whether the memory reports that a NIC may register its address.
    pub peer_memory: bool,
}

/// Test double of a device's memory; see the module's documentation.
#[derive(Debug)]
pub struct DeviceDouble {
    memory: OwnedFd,
    /// Mapping without any access, whose address is returned.
    face: NonNull<u8>,
    /// Accessible mapping of the same bytes. The lock serialises the copies of two threads.
    alias: Mutex<NonNull<u8>>,
    bytes: usize,
    abilities: Abilities,
    is_dead: AtomicBool,
    /// Whether the export through the bus window is refused.
    refuses_bar: AtomicBool,
    flushed: AtomicU64,
    /// Writes that are not flushed yet; `None`: writes take effect at once.
    unflushed: Mutex<Option<Vec<Write>>>,
}

/// Offset and bytes of a write.
type Write = (usize, Box<[u8]>);

// SAFETY: both mappings belong to this value until it is dropped; the face is never accessed, the alias only under
// its lock.
unsafe impl Send for DeviceDouble {}
// SAFETY: as above.
unsafe impl Sync for DeviceDouble {}

impl DeviceDouble {
    /// Makes memory of `bytes` zeros. Panics when the system has no memory for it: this is for tests.
    #[must_use]
    pub fn new(bytes: usize, abilities: Abilities) -> Arc<Self> {
        let memory = rustix::fs::memfd_create("device-double", MemfdFlags::CLOEXEC).expect("a memfd");
        rustix::fs::ftruncate(&memory, bytes as u64).expect("room for the device's memory");
        let face = map(&memory, bytes, ProtFlags::empty());
        let alias = Mutex::new(map(&memory, bytes, ProtFlags::READ | ProtFlags::WRITE));
        let (is_dead, refuses_bar) = (AtomicBool::new(false), AtomicBool::new(false));
        let (flushed, unflushed) = (AtomicU64::new(0), Mutex::new(None));
        Arc::new(Self { memory, face, alias, bytes, abilities, is_dead, refuses_bar, flushed, unflushed })
    }

    /// From now on written bytes can be read only after [`DeviceMemory::flush_nic_writes`], like a NIC's writes to a
    /// device that reorders them.
    pub fn reorder_writes(&self) {
        self.unflushed().get_or_insert_default();
    }

    fn unflushed(&self) -> MutexGuard<'_, Option<Vec<Write>>> {
        self.unflushed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, offset: usize, bytes: &[u8]) {
        let alias = self.alias.lock().unwrap_or_else(PoisonError::into_inner);
        let to = alias.as_ptr().wrapping_add(offset);
        // SAFETY: the caller saw by `check` that the range is inside the mapping, which cannot overlap a live slice; the
        // lock keeps other copies away.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// From now on only the automatic export succeeds, as with a driver that does not support the other.
    pub fn refuse_bar(&self) {
        self.refuses_bar.store(true, Ordering::Relaxed);
    }

    /// Returns the number of times that written bytes were made visible.
    #[must_use]
    pub fn flush_count(&self) -> u64 {
        self.flushed.load(Ordering::Relaxed)
    }

    /// Removes the device from the bus: from now on every access fails.
    pub fn kill(&self) {
        self.is_dead.store(true, Ordering::Relaxed);
    }

    fn check(&self, operation: &'static str, offset: usize, len: usize) -> Result<(), DeviceError> {
        if self.is_dead.load(Ordering::Relaxed) {
            return Err(DeviceError { operation, reason: "the device is gone".to_owned() });
        }
        match offset.checked_add(len) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => {
                let reason = format!("bytes {offset}+{len} of {}", self.bytes);
                Err(DeviceError { operation, reason })
            }
        }
    }
}

impl DeviceMemory for DeviceDouble {
    fn address(&self) -> u64 {
        self.face.addr().get() as u64
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn dma_buf(&self, mapping: DmaBufMapping) -> Result<DmaBuf, DmaBufError> {
        let failed = |reason: String| DmaBufError { operation: "export of the double's memory", reason };
        if !self.abilities.dma_buf {
            return Err(failed("this double has no dma-buf".to_owned()));
        }
        if mapping == DmaBufMapping::Bar && self.refuses_bar.load(Ordering::Relaxed) {
            return Err(failed("this double does not map its window".to_owned()));
        }
        let descriptor = rustix::io::dup(&self.memory).map_err(|errno| failed(errno.to_string()))?;
        Ok(DmaBuf { descriptor, offset: 0 })
    }

    fn has_peer_memory(&self) -> bool {
        self.abilities.peer_memory
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.check("read of the double", offset, bytes.len())?;
        let alias = self.alias.lock().unwrap_or_else(PoisonError::into_inner);
        let from = alias.as_ptr().wrapping_add(offset);
        // SAFETY: `check` saw that the range is inside the mapping, which cannot overlap a live slice; the lock keeps
        // other copies away.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.check("write of the double", offset, bytes.len())?;
        match self.unflushed().as_mut() {
            Some(kept) => kept.push((offset, bytes.into())),
            None => self.put(offset, bytes),
        }
        Ok(())
    }

    fn flush_nic_writes(&self) -> Result<(), DeviceError> {
        self.check("a flush of the double", 0, 0)?;
        self.flushed.fetch_add(1, Ordering::Relaxed);
        let kept = self.unflushed().as_mut().map(std::mem::take).unwrap_or_default();
        kept.iter().for_each(|(offset, bytes)| self.put(*offset, bytes));
        Ok(())
    }
}

impl Drop for DeviceDouble {
    fn drop(&mut self) {
        let alias = *self.alias.get_mut().unwrap_or_else(PoisonError::into_inner);
        for mapping in [self.face, alias] {
            // SAFETY: mapped in `new` with this length, and nothing refers to it any more.
            let unmapped = unsafe { rustix::mm::munmap(mapping.as_ptr().cast(), self.bytes) };
            debug_assert!(unmapped.is_ok(), "munmap of a device double: {unmapped:?}");
        }
    }
}

fn map(memory: &OwnedFd, bytes: usize, access: ProtFlags) -> NonNull<u8> {
    // SAFETY: the kernel picks an address that nothing else uses.
    let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, memory, 0) };
    NonNull::new(start.expect("a mapping").cast()).expect("not at address zero")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_and_ranges_and_death_are_errors() {
        let double = DeviceDouble::new(5000, Abilities::default());
        double.write(4990, b"0123456789").expect("inside");
        let mut bytes = [0; 4];
        double.read(4996, &mut bytes).expect("inside");
        assert_eq!(&bytes, b"6789");
        assert!(double.write(4991, b"0123456789").is_err());
        assert!(double.read(usize::MAX, &mut bytes).is_err());
        for mapping in [DmaBufMapping::Bar, DmaBufMapping::Automatic] {
            assert!(double.dma_buf(mapping).is_err());
            let exported = DeviceDouble::new(1, Abilities { dma_buf: true, ..Abilities::default() });
            assert!(exported.dma_buf(mapping).is_ok());
            exported.refuse_bar();
            assert_eq!(exported.dma_buf(mapping).is_ok(), mapping == DmaBufMapping::Automatic);
        }
        double.flush_nic_writes().expect("alive");
        double.reorder_writes();
        double.write(4996, b"later").expect_err("outside all the same");
        double.write(4996, b"late").expect("inside");
        double.read(4996, &mut bytes).expect("inside");
        assert_eq!(&bytes, b"6789", "not flushed");
        double.flush_nic_writes().expect("alive");
        double.read(4996, &mut bytes).expect("inside");
        assert_eq!(&bytes, b"late");
        double.kill();
        assert!(double.flush_nic_writes().is_err());
        assert!(double.read(0, &mut bytes).expect_err("dead").reason.contains("gone"));
    }

    /// Checks the guard mapping: a kernel read from the returned address fails.
    #[test]
    fn the_address_faults() {
        let double = DeviceDouble::new(4096, Abilities::default());
        let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
        let start = format!("{:x}-", double.address());
        let line = maps.lines().find(|line| line.starts_with(&start)).expect("a mapping starts there");
        assert!(line.contains(" ---s "), "{line}");
    }
}
