//! Access to slot bytes that the CPU can reach. Other processes may write them at any time: so everything
//! here copies through raw pointers, and the one function that returns a reference is unsafe.

use std::mem::MaybeUninit;

use dataplane_checksum::{LANE_BYTES, Stores, Sum};

use super::Slab;
use crate::copy;

impl Slab {
    /// Copies `bytes` into a slot.
    pub fn write(&self, slot: u32, offset: usize, bytes: &[u8]) {
        let target = self.address(slot, offset, bytes.len());
        // SAFETY: `address` checked the range; the source is a live slice that cannot overlap the mapping,
        // since safe code has no reference into it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.as_ptr(), bytes.len()) };
    }

    /// Copies bytes out of a slot.
    pub fn read(&self, slot: u32, offset: usize, bytes: &mut [u8]) {
        let source = self.address(slot, offset, bytes.len());
        // SAFETY: as in `write`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Adds bytes of a slot to a sum that begins at the slot's start; panics unless `offset` is a multiple
    /// of the lane size.
    pub fn add_to_sum(&self, slot: u32, offset: usize, bytes: usize, sum: &mut Sum) {
        let source = self.address(slot, offset, bytes);
        // SAFETY: `address` checked the range.
        unsafe { sum.add_shared(lane(offset), source.as_ptr(), bytes) };
    }

    /// Copies bytes out of a slot and adds them to the sum, as [`Self::add_to_sum`] does.
    pub fn read_summed(
        &self,
        slot: u32,
        offset: usize,
        target: &mut [MaybeUninit<u8>],
        sum: &mut Sum,
        stores: Stores,
    ) {
        let source = self.address(slot, offset, target.len());
        // SAFETY: `address` checked the range; the target is a live slice of the caller's alone.
        unsafe {
            sum.add_copied(lane(offset), source.as_ptr(), target.as_mut_ptr().cast(), target.len(), stores);
        }
    }

    /// [`Self::read_summed`] for a few bytes, through the caches.
    pub fn read_summed_into(&self, slot: u32, offset: usize, target: &mut [u8], sum: &mut Sum) {
        let source = self.address(slot, offset, target.len());
        let (place, bytes) = (target.as_mut_ptr(), target.len());
        // SAFETY: `address` checked the range; the target is a live slice of the caller's alone.
        unsafe { sum.add_copied(lane(offset), source.as_ptr(), place, bytes, Stores::Cached) };
    }

    /// Copies `bytes` into a slot and adds them to the sum, as [`Self::add_to_sum`] does.
    pub fn write_summed(&self, slot: u32, offset: usize, bytes: &[u8], sum: &mut Sum, stores: Stores) {
        let target = self.address(slot, offset, bytes.len());
        // SAFETY: as in `read_summed`, the other way round.
        unsafe {
            sum.add_copied(lane(offset), bytes.as_ptr(), target.as_ptr(), bytes.len(), stores);
        }
    }

    /// Copies the start of a slot of `source` to the start of a slot of another slab, and adds the copied
    /// bytes to the sum.
    pub fn copy_summed(
        &self,
        source: &Slab,
        from: u32,
        to: u32,
        bytes: usize,
        sum: &mut Sum,
        stores: Stores,
    ) {
        let from = source.address(from, 0, bytes);
        let to = self.address(to, 0, bytes);
        assert!(from.addr().get().abs_diff(to.addr().get()) >= bytes, "slots of two slabs are apart");
        // SAFETY: both ranges were checked and are apart.
        unsafe { sum.add_copied(0, from.as_ptr(), to.as_ptr(), bytes, stores) };
    }

    /// Copies `len` bytes from a slot of `source` into a slot of this slab; panics when either range is
    /// outside its slot.
    pub fn copy_from(&self, source: &Slab, from: (u32, usize), to: (u32, usize), len: usize) {
        let from = source.address(from.0, from.1, len);
        let to = self.address(to.0, to.1, len);
        // SAFETY: both ranges were checked; `copy` allows that they overlap.
        unsafe { copy::copy(from.as_ptr(), to.as_ptr(), len) };
    }

    /// [`Self::copy_from`] that returns false, and copies nothing, when a range does not exist.
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

    /// [`Self::copy_rows_from`] that returns false, and copies nothing, when rows do not exist. The span of
    /// all rows is checked once, before the first is copied.
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

    /// Returns the bytes of a slot as a slice.
    ///
    /// # Safety
    /// 1. For as long as the slice lives, the caller keeps the slot from being reused: it holds a `SlotRef`.
    /// 2. These bytes are not written meanwhile: no transfer into the slot is in progress, and no thread of this
    ///    process has the mutable slice.
    #[must_use]
    pub unsafe fn bytes(&self, slot: u32, offset: usize, len: usize) -> &[u8] {
        let start = self.address(slot, offset, len);
        // SAFETY: the range is inside the mapping, which is initialised (zero-filled by the kernel); the
        // caller upholds that nobody writes it.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), len) }
    }
}

fn lane(offset: usize) -> u64 {
    assert!(offset.is_multiple_of(LANE_BYTES), "{offset} is no whole number of lanes");
    (offset / LANE_BYTES) as u64
}
