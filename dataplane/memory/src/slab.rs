//! One shared mapping of fixed slots.
//!
//! Layout of the mapping: a header (magic, version, slot count, slot bytes), the generation of every slot,
//! padding to a page, then the slots, each aligned to [`SLOT_ALIGNMENT`]. The generations lie in the mapping
//! itself so that a process that attaches the slab can check them without asking its owner.
//!
//! The memory is a sealed memfd: it cannot shrink, so an attached peer cannot make us fault. Other processes
//! may write to it at any time; therefore no function hands out a reference to slot bytes without `unsafe`,
//! and the safe functions copy through raw pointers.
//!
//! Made and attached at start-up only; reads and writes cost a bounds check and a copy.
//!
//! The slots may lie in the memory of a device instead ([`Slab::on_device`]). The mapping then ends behind the
//! generations, and no function here gives an address of slot bytes or touches them: the ones that cannot fail panic,
//! the others say that there is no such range. That costs the host path nothing: the check of a slot's number is
//! against the number of slots that the CPU can reach, which is all of them or none.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::{DeviceMemory, MemoryError, copy};

/// `b"KVSRSLAB"`, little-endian.
const MAGIC: u64 = u64::from_le_bytes(*b"KVSRSLAB");
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 64;
/// Byte of the header that says where the slots lie.
const PLACE: usize = 24;
const PLACE_MAPPING: u8 = 0;
const PLACE_DEVICE: u8 = 1;
const PAGE_BYTES: usize = 4096;
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Slots start on a cache line, as DMA engines and vector loads like it.
pub(crate) const SLOT_ALIGNMENT: usize = 64;

/// Which pages back a slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageSize {
    /// 4 KiB pages.
    Standard,
    /// 2 MiB pages if the kernel has enough of them reserved, else 4 KiB.
    HugeIfAvailable,
}

/// The shape of a slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlabLayout {
    /// Usable bytes of one slot.
    pub slot_bytes: usize,
    /// Number of slots.
    pub slot_count: u32,
}

impl SlabLayout {
    /// From the start of one slot to the start of the next, in bytes.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.slot_bytes.next_multiple_of(SLOT_ALIGNMENT)
    }

    /// From the start of the mapping to the start of the first slot, in bytes.
    #[must_use]
    pub fn slots_offset(&self) -> usize {
        (HEADER_BYTES + self.slot_count as usize * size_of::<AtomicU32>()).next_multiple_of(PAGE_BYTES)
    }

    /// Bytes of all slots, from the start of the first; for a usable layout ([`SlabLayout::mapped_bytes`]).
    #[must_use]
    pub fn slots_bytes(&self) -> usize {
        self.stride() * self.slot_count as usize
    }

    /// Bytes of the whole mapping with 4 KiB pages, or `None` when the layout is unusable.
    #[must_use]
    pub fn mapped_bytes(&self) -> Option<usize> {
        if self.slot_bytes == 0 || self.slot_count == 0 || self.slot_bytes > isize::MAX as usize / 2 {
            return None;
        }
        let slots = self.stride().checked_mul(self.slot_count as usize)?;
        let bytes = self.slots_offset().checked_add(slots)?.checked_next_multiple_of(PAGE_BYTES)?;
        (bytes <= isize::MAX as usize).then_some(bytes)
    }
}

/// A mapping of fixed slots, shared with whoever holds its descriptor.
#[derive(Debug)]
pub struct Slab {
    base: NonNull<u8>,
    mapped_bytes: usize,
    layout: SlabLayout,
    /// [`SlabLayout::slots_offset`] and [`SlabLayout::stride`], kept because every copy needs them.
    slots_offset: usize,
    stride: usize,
    /// Slots whose bytes the CPU can reach: all of them, or none when they lie in a device's memory.
    reachable_count: u32,
    memory: OwnedFd,
    huge_pages: bool,
    device: Option<Arc<dyn DeviceMemory>>,
}

// SAFETY: the mapping belongs to this value until it is dropped, and every access goes through atomics or
// raw copies that assume other threads and processes write concurrently.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

impl Slab {
    /// Makes a slab. `name` appears in `/proc/self/maps` and in errors.
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
        slab.write_header(PLACE_MAPPING);
        Ok(slab)
    }

    /// Makes a slab whose slots lie in `device`, from its byte 0 on. Header and generations are in host memory as
    /// ever, so references, generations and leases work unchanged; the slots' bytes are for devices alone.
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
        slab.write_header(PLACE_DEVICE);
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
        })
    }

    /// Maps a slab that another process made, after checking that it is one and can no longer change size. One whose
    /// slots lie in a device's memory is refused: its descriptor does not hold them.
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
        };
        slab.layout = slab.read_header()?;
        slab.slots_offset = slab.layout.slots_offset();
        slab.stride = slab.layout.stride();
        slab.reachable_count = slab.layout.slot_count;
        Ok(slab)
    }

    fn write_header(&self, place: u8) {
        let mut header = [0_u8; HEADER_BYTES];
        header[0..8].copy_from_slice(&MAGIC.to_le_bytes());
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[12..16].copy_from_slice(&self.layout.slot_count.to_le_bytes());
        header[16..24].copy_from_slice(&(self.layout.slot_bytes as u64).to_le_bytes());
        header[PLACE] = place;
        // SAFETY: the mapping is at least one page and nobody else has its descriptor yet.
        unsafe { std::ptr::copy_nonoverlapping(header.as_ptr(), self.base.as_ptr(), HEADER_BYTES) };
    }

    fn read_header(&self) -> Result<SlabLayout, MemoryError> {
        let mut header = [0_u8; HEADER_BYTES];
        // SAFETY: `attach` checked that the mapping is at least one page long.
        unsafe { std::ptr::copy_nonoverlapping(self.base.as_ptr(), header.as_mut_ptr(), HEADER_BYTES) };
        let word =
            |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if long(0) != MAGIC {
            return Err(MemoryError::NotASlab("wrong magic"));
        }
        if word(8) != VERSION {
            return Err(MemoryError::NotASlab("other version"));
        }
        match header[PLACE] {
            PLACE_MAPPING => {}
            PLACE_DEVICE => return Err(MemoryError::NotASlab("its slots lie in a device's memory")),
            _ => return Err(MemoryError::NotASlab("its slots lie in memory of an unknown kind")),
        }
        let slot_bytes = usize::try_from(long(16)).map_err(|_| MemoryError::NotASlab("slot size"))?;
        let layout = SlabLayout { slot_bytes, slot_count: word(12) };
        match layout.mapped_bytes() {
            Some(needed) if needed <= self.mapped_bytes => Ok(layout),
            _ => Err(MemoryError::NotASlab("its slots do not fit into it")),
        }
    }

    /// The shape of this slab.
    #[must_use]
    #[inline]
    pub fn layout(&self) -> SlabLayout {
        self.layout
    }

    /// The device's memory that the slots lie in, or `None` when they lie in the mapping.
    #[must_use]
    pub fn device(&self) -> Option<&Arc<dyn DeviceMemory>> {
        self.device.as_ref()
    }

    /// The device's address of `len` bytes at `offset` of `slot`; `None` when they are not inside the slot, or the
    /// slots are not in a device's memory.
    #[must_use]
    pub fn device_address(&self, slot: u32, offset: usize, len: usize) -> Option<u64> {
        let device = self.device.as_ref().filter(|_| self.contains(slot, offset, len))?;
        Some(device.address() + (slot as usize * self.stride + offset) as u64)
    }

    /// Bytes of address space taken. The slots are not among them when they lie in a device's memory.
    #[must_use]
    pub fn mapped_bytes(&self) -> usize {
        self.mapped_bytes
    }

    /// Whether 2 MiB pages back it.
    #[must_use]
    pub fn has_huge_pages(&self) -> bool {
        self.huge_pages
    }

    /// Where the mapping starts. A device registers the whole of it, once. It ends before the slots when these lie
    /// in a device's memory: see [`Slab::device_address`].
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// The descriptor to hand to a process that shall attach this slab. Useless when the slots lie in a device's
    /// memory.
    #[must_use]
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    #[inline]
    fn generation_cell(&self, slot: u32) -> &AtomicU32 {
        assert!(slot < self.layout.slot_count, "slot {slot} of {}", self.layout.slot_count);
        let offset = HEADER_BYTES + slot as usize * size_of::<AtomicU32>();
        // SAFETY: `slot` is in range, so the cell lies between header and slots, inside the mapping.
        let cell = unsafe { self.base.add(offset) }.cast::<AtomicU32>();
        // SAFETY: the mapping lives as long as `self`; it is page-aligned and the offset a multiple of 4; and
        // every process accesses the cell atomically.
        unsafe { cell.as_ref() }
    }

    /// The slot's present generation, or `None` when there is no such slot. Pairs as [`Self::generation`] does.
    #[must_use]
    #[inline]
    pub fn try_generation(&self, slot: u32) -> Option<u32> {
        (slot < self.layout.slot_count).then(|| self.generation_cell(slot).load(Ordering::Acquire))
    }

    /// The slot's present generation. Pairs with the release in `advance_generation`.
    #[must_use]
    #[inline]
    pub fn generation(&self, slot: u32) -> u32 {
        self.generation_cell(slot).load(Ordering::Acquire)
    }

    /// Makes every name of the slot so far stale. Pairs with the acquire in `generation`.
    pub(crate) fn advance_generation(&self, slot: u32) {
        self.generation_cell(slot).fetch_add(1, Ordering::Release);
    }

    /// Address of `len` bytes at `offset` of `slot`; panics when they are not inside the slot, or lie in a device's
    /// memory. So do all functions below that cannot fail.
    #[must_use]
    #[inline]
    pub fn address(&self, slot: u32, offset: usize, len: usize) -> NonNull<u8> {
        match self.try_address(slot, offset, len) {
            Some(address) => address,
            None => self.outside(slot, offset, len),
        }
    }

    #[cold]
    fn outside(&self, slot: u32, offset: usize, len: usize) -> ! {
        let SlabLayout { slot_bytes, slot_count } = self.layout;
        assert!(slot < slot_count, "slot {slot} of {slot_count}");
        assert!(self.device.is_none(), "the CPU cannot reach slot {slot}: it lies in a device's memory");
        panic!("bytes {offset}+{len} of a slot of {slot_bytes} bytes");
    }

    /// Address of `len` bytes at `offset` of `slot`, or `None` when they are not inside the slot or lie in a device's
    /// memory. One check, for names that come from a peer.
    #[must_use]
    #[inline]
    pub fn try_address(&self, slot: u32, offset: usize, len: usize) -> Option<NonNull<u8>> {
        if slot >= self.reachable_count || !self.is_in_slot(offset, len) {
            return None;
        }
        let start = self.slots_offset + slot as usize * self.stride + offset;
        // SAFETY: slot and range were just checked, and the reachable slots fit into the mapping (`create` sized
        // the mapping for them, `read_header` compared them with the mapping, `on_device` has none).
        Some(unsafe { self.base.add(start) })
    }

    /// Whether `len` bytes at `offset` of `slot` exist, in whichever memory. What comes from a peer is asked here
    /// first.
    #[must_use]
    #[inline]
    pub fn contains(&self, slot: u32, offset: usize, len: usize) -> bool {
        slot < self.layout.slot_count && self.is_in_slot(offset, len)
    }

    #[inline]
    fn is_in_slot(&self, offset: usize, len: usize) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.layout.slot_bytes)
    }

    /// Copies `bytes` into a slot.
    pub fn write(&self, slot: u32, offset: usize, bytes: &[u8]) {
        let target = self.address(slot, offset, bytes.len());
        // SAFETY: `address` checked the range; the source is a live slice that cannot overlap the mapping,
        // since safe code has no reference into it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.as_ptr(), bytes.len()) };
    }

    /// Copies bytes of a slot out.
    pub fn read(&self, slot: u32, offset: usize, bytes: &mut [u8]) {
        let source = self.address(slot, offset, bytes.len());
        // SAFETY: as in `write`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Copies `len` bytes from a slot of `source` into a slot of this slab; panics when either range is outside.
    pub fn copy_from(&self, source: &Slab, from: (u32, usize), to: (u32, usize), len: usize) {
        let from = source.address(from.0, from.1, len);
        let to = self.address(to.0, to.1, len);
        // SAFETY: both ranges were checked; `copy` allows that they overlap.
        unsafe { copy::copy(from.as_ptr(), to.as_ptr(), len) };
    }

    /// Like [`Self::copy_from`], but a range that does not exist is an answer (false, nothing copied).
    #[must_use]
    #[inline]
    pub fn try_copy_from(&self, source: &Slab, from: (u32, usize), to: (u32, usize), len: usize) -> bool {
        let Some(from) = source.try_address(from.0, from.1, len) else { return false };
        let Some(to) = self.try_address(to.0, to.1, len) else { return false };
        // SAFETY: both ranges were checked; `copy` allows that they overlap.
        unsafe { copy::copy(from.as_ptr(), to.as_ptr(), len) };
        true
    }

    /// Copies `count` rows of `bytes` each between slots; the starts of rows lie `strides.0` apart in `source`
    /// and `strides.1` apart here. Panics when either side's rows are not inside the slot.
    pub fn copy_rows_from(
        &self,
        source: &Slab,
        from: (u32, usize),
        to: (u32, usize),
        strides: (usize, usize),
        bytes: usize,
        count: usize,
    ) {
        let copied = self.try_copy_rows_from(source, from, to, strides, bytes, count);
        let has_device = source.device.is_some() || self.device.is_some();
        assert!(!has_device, "the CPU cannot reach slots {from:?} and {to:?}: a device's memory");
        assert!(copied, "{count} rows of {bytes} bytes, {strides:?} apart, from {from:?} to {to:?}");
    }

    /// Like [`Self::copy_rows_from`], but rows that do not exist are an answer (false, nothing copied). The span
    /// of all rows is checked once, before the first is copied.
    #[must_use]
    pub fn try_copy_rows_from(
        &self,
        source: &Slab,
        from: (u32, usize),
        to: (u32, usize),
        strides: (usize, usize),
        bytes: usize,
        count: usize,
    ) -> bool {
        let span = |stride: usize| match count {
            0 => Some(0),
            _ => (count - 1).checked_mul(stride)?.checked_add(bytes),
        };
        let Some((span_from, span_to)) = span(strides.0).zip(span(strides.1)) else { return false };
        let Some(from) = source.try_address(from.0, from.1, span_from) else { return false };
        let Some(to) = self.try_address(to.0, to.1, span_to) else { return false };
        if strides == (bytes, bytes) {
            // SAFETY: both spans were checked, and rows without gaps are one span; overlap is allowed.
            unsafe { copy::copy(from.as_ptr(), to.as_ptr(), span_to) };
            return true;
        }
        // SAFETY: each row ends at or before the end of its span, and both spans were checked.
        unsafe { copy::copy_rows(from.as_ptr(), to.as_ptr(), strides, bytes, count) };
        true
    }

    /// Maps the first `bytes` of the slab into this process now, so that the first copy to a page does not stop
    /// for a fault (3 µs for each 4 KiB page on a busy virtual machine, and as much here). Pages that nobody has
    /// touched yet are allocated. Blocks meanwhile; for start-up. `bytes` beyond the end count as the end, which is
    /// that of the generations when the slots lie in a device's memory.
    pub fn populate(&self, bytes: usize) -> Result<(), MemoryError> {
        let bytes = bytes.min(self.mapped_bytes);
        // SAFETY: the range is inside our own mapping, and populating changes no contents.
        unsafe {
            rustix::mm::madvise(self.base.as_ptr().cast(), bytes, rustix::mm::Advice::LinuxPopulateWrite)
        }
        .map_err(|errno| MemoryError::System {
            operation: "madvise(MADV_POPULATE_WRITE)",
            name: "(mapped)".to_owned(),
            bytes,
            errno,
        })
    }

    /// The bytes of a slot as a slice.
    ///
    /// # Safety
    /// 1. For as long as the slice lives, the caller keeps the slot from being reused: it holds a `SlotRef`.
    /// 2. Nobody writes these bytes meanwhile: no transfer into the slot is under way, and no thread of this
    ///    process has the mutable slice.
    #[must_use]
    pub unsafe fn bytes(&self, slot: u32, offset: usize, len: usize) -> &[u8] {
        let start = self.address(slot, offset, len);
        // SAFETY: the range is inside the mapping, which is initialised (zero-filled by the kernel); the
        // caller upholds that nobody writes it.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), len) }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn slab(slot_bytes: usize, slot_count: u32) -> Slab {
        Slab::create("test", SlabLayout { slot_bytes, slot_count }, PageSize::Standard).expect("slab")
    }

    #[test]
    fn slots_are_disjoint_and_keep_their_bytes() {
        let slab = slab(100, 9);
        for slot in 0..9 {
            slab.write(slot, 0, &[slot as u8 + 1; 100]);
        }
        for slot in 0..9 {
            let mut bytes = [0; 100];
            slab.read(slot, 0, &mut bytes);
            assert_eq!(bytes, [slot as u8 + 1; 100]);
        }
    }

    #[test]
    fn an_attached_slab_sees_bytes_and_generations() {
        let owner = slab(4096, 3);
        owner.write(2, 8, b"hello");
        owner.advance_generation(2);
        let fd = rustix::io::dup(owner.memory()).expect("dup");
        let guest = Slab::attach(fd).expect("attach");
        assert_eq!(guest.layout(), owner.layout());
        assert_eq!(guest.generation(2), 1);
        let mut bytes = [0; 5];
        guest.read(2, 8, &mut bytes);
        assert_eq!(&bytes, b"hello");
    }

    #[test]
    fn rows_outside_of_the_slot_are_an_answer_and_change_nothing() {
        let (source, target) = (slab(1000, 2), slab(1000, 2));
        source.write(1, 0, &[7; 1000]);
        let rows =
            |strides, bytes, count| target.try_copy_rows_from(&source, (1, 0), (1, 0), strides, bytes, count);
        assert!(!rows((100, 101), 100, 10), "ten rows end at 1009 here");
        assert!(!rows((111, 100), 10, 10), "ten rows end at 1009 there");
        assert!(!rows((usize::MAX, 1), 1, 3), "a span beyond the address space");
        assert!(!rows((1, 1), usize::MAX, 2));
        assert!(!target.try_copy_from(&source, (2, 0), (0, 0), 1), "no such slot");
        assert!(!target.try_copy_from(&source, (1, 0), (0, usize::MAX), 2));
        assert_eq!(target.try_generation(2), None);
        let mut bytes = [0; 1000];
        target.read(1, 0, &mut bytes);
        assert_eq!(bytes, [0; 1000]);
        assert!(rows((100, 100), 100, 10) && rows((0, 0), 5, 0));
        target.read(1, 0, &mut bytes);
        assert_eq!(bytes, [7; 1000]);
    }

    #[test]
    fn populating_keeps_the_bytes() {
        let slab = slab(8192, 4);
        slab.write(3, 0, b"kept");
        slab.populate(usize::MAX).expect("populate");
        let mut bytes = [0; 4];
        slab.read(3, 0, &mut bytes);
        assert_eq!(&bytes, b"kept");
    }

    #[test]
    fn foreign_descriptors_are_refused() {
        let unsealed = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC).expect("memfd");
        rustix::fs::ftruncate(&unsealed, 8192).expect("truncate");
        assert!(matches!(Slab::attach(unsealed), Err(MemoryError::System { .. } | MemoryError::NotASlab(_))));

        let empty =
            rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("fd");
        rustix::fs::ftruncate(&empty, 8192).expect("truncate");
        rustix::fs::fcntl_add_seals(&empty, SealFlags::SHRINK | SealFlags::GROW).expect("seal");
        assert!(matches!(Slab::attach(empty), Err(MemoryError::NotASlab("wrong magic"))));
    }

    fn on_device(layout: SlabLayout) -> Slab {
        let memory = crate::testing::DeviceDouble::new(layout.slots_bytes(), Default::default());
        Slab::on_device("device", layout, memory).expect("slab")
    }

    const DEVICE_LAYOUT: SlabLayout = SlabLayout { slot_bytes: 100, slot_count: 9 };

    #[test]
    fn slots_on_a_device_have_generations_and_device_addresses_only() {
        let slab = on_device(DEVICE_LAYOUT);
        let start = slab.device().expect("a device").address();
        assert_eq!(slab.device_address(0, 0, 100), Some(start));
        assert_eq!(slab.device_address(8, 99, 1), Some(start + 8 * 128 + 99));
        assert_eq!((slab.device_address(9, 0, 0), slab.device_address(0, 99, 2)), (None, None));
        slab.advance_generation(8);
        assert_eq!((slab.generation(8), slab.try_generation(9)), (1, None));
        assert!(slab.contains(8, 0, 100), "the slot exists");
        assert_eq!(slab.try_address(8, 0, 0), None, "and is out of the CPU's reach");
        let host = Slab::create("host", DEVICE_LAYOUT, PageSize::Standard).expect("slab");
        assert!(!slab.try_copy_from(&host, (0, 0), (0, 0), 1));
        assert!(!host.try_copy_from(&slab, (0, 0), (0, 0), 1));
        assert!(!host.try_copy_rows_from(&slab, (0, 0), (0, 0), (2, 2), 1, 2));
        slab.populate(usize::MAX).expect("what is mapped");
        assert_eq!((slab.mapped_bytes(), host.device_address(0, 0, 1)), (PAGE_BYTES, None));
    }

    #[test]
    fn what_touches_bytes_on_a_device_is_a_bug() {
        let (slab, host) = (on_device(DEVICE_LAYOUT), slab(100, 1));
        let touches: [(&str, &dyn Fn()); 6] = [
            ("address", &|| _ = slab.address(0, 0, 0)),
            ("read", &|| slab.read(0, 0, &mut [0])),
            ("write", &|| slab.write(0, 0, &[0])),
            ("copy in", &|| slab.copy_from(&host, (0, 0), (0, 0), 1)),
            ("copy out", &|| host.copy_from(&slab, (0, 0), (0, 0), 1)),
            ("rows", &|| host.copy_rows_from(&slab, (0, 0), (0, 0), (2, 2), 1, 2)),
        ];
        for (what, touch) in touches {
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(touch)).expect_err(what);
            let message = caught.downcast_ref::<String>().expect("words");
            assert!(message.contains("the CPU cannot reach"), "{what}: {message}");
        }
    }

    #[test]
    fn a_slab_on_a_device_is_refused_elsewhere_and_where_it_does_not_fit() {
        let owner = on_device(DEVICE_LAYOUT);
        let fd = rustix::io::dup(owner.memory()).expect("dup");
        let refused = Slab::attach(fd).expect_err("its slots are not behind the descriptor");
        assert!(matches!(refused, MemoryError::NotASlab("its slots lie in a device's memory")), "{refused}");
        let small = crate::testing::DeviceDouble::new(DEVICE_LAYOUT.slots_bytes() - 1, Default::default());
        let refused = Slab::on_device("small", DEVICE_LAYOUT, small).expect_err("one byte too few");
        assert!(refused.to_string().contains("take 1152 bytes"), "{refused}");
        let nothing = SlabLayout { slot_bytes: 0, slot_count: 1 };
        let memory = crate::testing::DeviceDouble::new(64, Default::default());
        assert!(matches!(Slab::on_device("none", nothing, memory), Err(MemoryError::Layout { .. })));
    }

    #[test]
    fn unusable_layouts_are_errors() {
        for (slot_bytes, slot_count) in [(0, 1), (1, 0), (usize::MAX, 2), (isize::MAX as usize / 2, 4)] {
            let layout = SlabLayout { slot_bytes, slot_count };
            assert!(Slab::create("bad", layout, PageSize::Standard).is_err(), "{layout:?}");
        }
    }

    #[test]
    #[should_panic(expected = "bytes 60+5")]
    fn a_range_beyond_the_slot_is_a_bug() {
        let _ = slab(64, 1).address(0, 60, 5);
    }
}
