//! Creation, attachment and unmapping of a slab. For start-up: all of this blocks.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::Slab;
use super::generations::Generations;
use super::layout::{HEADER_BYTES, PAGE_BYTES, PageSize, SlabLayout, SlotMemory, header, layout_of};
use crate::{DeviceMemory, MemoryError};

const HUGE_PAGE_BYTES: usize = 2 << 20;

impl Slab {
    /// Creates a slab. `name` appears in `/proc/self/maps` and in errors.
    pub fn create(name: &str, layout: SlabLayout, pages: PageSize) -> Result<Self, MemoryError> {
        let standard_bytes = layout.mapped_bytes().ok_or_else(|| unusable(name, layout))?;
        let slab = match pages {
            PageSize::Standard => Self::create_mapped(name, layout, standard_bytes, false)?,
            PageSize::HugeIfAvailable => {
                let huge_bytes = standard_bytes.next_multiple_of(HUGE_PAGE_BYTES);
                match Self::create_mapped(name, layout, huge_bytes, true) {
                    Ok(slab) => slab,
                    Err(_) => Self::create_mapped(name, layout, standard_bytes, false)?,
                }
            }
        };
        slab.initialise_header(SlotMemory::Mapping);
        Ok(slab)
    }

    /// Creates a slab whose slots lie in `device`, from its byte 0 on. Header and generations stay in host
    /// memory, so references, generations and leases work unchanged; only devices access the slots' bytes.
    pub fn on_device(
        name: &str,
        layout: SlabLayout,
        device: Arc<dyn DeviceMemory>,
    ) -> Result<Self, MemoryError> {
        layout.mapped_bytes().ok_or_else(|| unusable(name, layout))?;
        let (needed, present) = (layout.slots_bytes(), device.bytes());
        let is_addressable = device.address().checked_add(present as u64).is_some();
        if needed > present || !is_addressable {
            let (address, name) = (device.address(), name.to_owned());
            return Err(MemoryError::Device { name, needed, present, address });
        }
        let mut slab = Self::create_mapped(name, layout, layout.slots_offset(), false)?;
        slab.reachable_count = 0;
        slab.device = Some(device);
        slab.initialise_header(SlotMemory::Device);
        Ok(slab)
    }

    fn create_mapped(
        name: &str,
        layout: SlabLayout,
        bytes: usize,
        huge_pages: bool,
    ) -> Result<Self, MemoryError> {
        let failed =
            |operation| move |errno| MemoryError::System { operation, name: name.to_owned(), bytes, errno };
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        if huge_pages {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        }
        let memory = rustix::fs::memfd_create(name, flags).map_err(failed("memfd_create"))?;
        rustix::fs::ftruncate(&memory, bytes as u64).map_err(failed("ftruncate"))?;
        rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(failed("fcntl(F_ADD_SEALS)"))?;
        let base = map_shared(&memory, bytes).map_err(failed("mmap"))?;
        Ok(Self {
            base,
            mapped_bytes: bytes,
            layout,
            slots_offset: layout.slots_offset(),
            stride: layout.stride(),
            reachable_count: layout.slot_count,
            memory,
            huge_pages,
            device: None,
            generations: Generations::default(),
            writes_in_progress: (0..layout.slot_count).map(|_| AtomicU32::new(0)).collect(),
        })
    }

    /// Maps a slab that another process made, after checking that it is valid and can no longer change
    /// size. A slab whose slots lie in a device's memory is refused: its descriptor does not hold them.
    pub fn attach(memory: OwnedFd) -> Result<Self, MemoryError> {
        let system = |operation| {
            move |errno| MemoryError::System { operation, name: "(attached)".to_owned(), bytes: 0, errno }
        };
        let seals = rustix::fs::fcntl_get_seals(&memory).map_err(system("fcntl(F_GET_SEALS)"))?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(MemoryError::NotASlab("its size is not sealed"));
        }
        let size = rustix::fs::fstat(&memory).map_err(system("fstat"))?.st_size;
        let bytes = usize::try_from(size).map_err(|_| MemoryError::NotASlab("impossible size"))?;
        if bytes < PAGE_BYTES {
            return Err(MemoryError::NotASlab("too small for a header"));
        }
        let base = map_shared(&memory, bytes).map_err(system("mmap"))?;
        let layout = SlabLayout { slot_bytes: 1, slot_count: 1 };
        let mut slab = Self {
            base,
            mapped_bytes: bytes,
            layout,
            slots_offset: layout.slots_offset(),
            stride: layout.stride(),
            reachable_count: 0,
            memory,
            huge_pages: false,
            device: None,
            generations: Generations::default(),
            writes_in_progress: Box::default(),
        };
        slab.layout = slab.read_header()?;
        slab.slots_offset = slab.layout.slots_offset();
        slab.stride = slab.layout.stride();
        slab.reachable_count = slab.layout.slot_count;
        Ok(slab)
    }

    /// Maps the first `bytes` of the slab into this process now, so that the first copy to a page does not
    /// incur a fault (3 µs for each 4 KiB page on a busy virtual machine, and as much here). Untouched
    /// pages are allocated. Blocks meanwhile; for start-up. `bytes` beyond the end count as the end, which
    /// is that of the generations when the slots lie in a device's memory.
    pub fn populate(&self, bytes: usize) -> Result<(), MemoryError> {
        self.populate_range(0..bytes.min(self.mapped_bytes))
    }

    /// [`Self::populate`] for the pages of some slots.
    ///
    /// # Panics
    /// If the slots do not exist, or lie in a device's memory.
    pub fn populate_slots(&self, slots: Range<u32>) -> Result<(), MemoryError> {
        let count = self.reachable_count;
        assert!(slots.start <= slots.end && slots.end <= count, "slots {slots:?} of {count}");
        let page = if self.huge_pages { HUGE_PAGE_BYTES } else { PAGE_BYTES };
        let place = |slot: u32| self.slots_offset + slot as usize * self.stride;
        let end = place(slots.end).next_multiple_of(page).min(self.mapped_bytes);
        self.populate_range(place(slots.start) / page * page..end)
    }

    /// Populates a range of the mapping that begins at a page boundary.
    fn populate_range(&self, range: Range<usize>) -> Result<(), MemoryError> {
        // SAFETY: the range is inside our own mapping.
        let start = unsafe { self.base.as_ptr().add(range.start) };
        // SAFETY: as above, and populating changes no contents.
        unsafe { rustix::mm::madvise(start.cast(), range.len(), rustix::mm::Advice::LinuxPopulateWrite) }
            .map_err(|errno| MemoryError::System {
                operation: "madvise(MADV_POPULATE_WRITE)",
                name: "(mapped)".to_owned(),
                bytes: range.len(),
                errno,
            })
    }

    /// Prefers this NUMA node for pages that are touched from now on, by whichever thread or process, as
    /// long as the node has free pages. For start-up, before the slots are used.
    ///
    /// # Errors
    /// If the system refuses: the node does not exist, or the container lacks the permission.
    pub fn prefer_numa_node(&self, node: u32) -> Result<(), MemoryError> {
        const NODES_MAX: u32 = 1024;
        const BITS: u32 = u64::BITS;
        let failed = |errno| MemoryError::System {
            operation: "mbind",
            name: "(mapped)".to_owned(),
            bytes: self.mapped_bytes,
            errno,
        };
        let mut mask = [0_u64; (NODES_MAX / BITS) as usize];
        let word = mask.get_mut((node / BITS) as usize).ok_or(failed(Errno::INVAL))?;
        *word = 1 << (node % BITS);
        // SAFETY: the range is our own mapping, whose contents a policy does not change; the mask lives during the call and has as
        // many bits as are said (the kernel takes one off, set_mempolicy(2)).
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base.as_ptr(),
                self.mapped_bytes,
                libc::MPOL_PREFERRED,
                mask.as_ptr(),
                libc::c_ulong::from(NODES_MAX + 1),
                0_u32,
            )
        };
        if result == 0 {
            return Ok(());
        }
        Err(failed(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)))
    }

    /// Writes the header, and sets the first generation of each slot.
    fn initialise_header(&self, place: SlotMemory) {
        let header = header(self.layout, place);
        // SAFETY: the mapping is at least one page and nobody else has its descriptor yet.
        unsafe { std::ptr::copy_nonoverlapping(header.as_ptr(), self.base.as_ptr(), HEADER_BYTES) };
        (0..self.layout.slot_count).for_each(|slot| self.change_generation(slot));
    }

    fn read_header(&self) -> Result<SlabLayout, MemoryError> {
        let mut header = [0_u8; HEADER_BYTES];
        // SAFETY: `attach` checked that the mapping is at least one page long.
        unsafe { std::ptr::copy_nonoverlapping(self.base.as_ptr(), header.as_mut_ptr(), HEADER_BYTES) };
        layout_of(&header, self.mapped_bytes)
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: this mapping was made with exactly this address and length, and no reference into it can
        // outlive `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped_bytes) };
        debug_assert!(unmapped.is_ok(), "munmap of a slab: {unmapped:?}");
    }
}

fn unusable(name: &str, layout: SlabLayout) -> MemoryError {
    let SlabLayout { slot_bytes, slot_count } = layout;
    MemoryError::Layout { name: name.to_owned(), slot_count, slot_bytes }
}

fn map_shared(memory: &OwnedFd, bytes: usize) -> Result<NonNull<u8>, Errno> {
    // SAFETY: the kernel picks an address that nothing else uses; the descriptor is owned and sealed against
    // shrinking, so pages stay valid.
    let base = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            memory,
            0,
        )
    }?;
    NonNull::new(base.cast()).ok_or(Errno::NOMEM)
}
