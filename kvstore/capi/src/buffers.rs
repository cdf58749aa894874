//! Ranges of memory that belong to the C caller.
//!
//! The caller's memory may be uninitialised, and the memory of a submitted request is used on another thread,
//! so a Rust reference to it would claim more than is known. A [`Destination`] is therefore only written
//! through, byte range by byte range, and a [`Source`] gives slices for the time of a call. Both are created in
//! `interface` from pointers that were checked there, under the promise of the header: valid until the call
//! returns, or until the completion is polled or the handle closed.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use crate::status::{Failure, Status};

/// Most buffers of a request that need no allocation.
pub const INLINE_BUFFERS: usize = 4;
/// Most buffers of one request.
pub const BUFFERS_MAX: usize = 4096;

/// A range of the caller's memory, `kvasir_kv_buffer` in C.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Buffer {
    /// First byte of the range; may be null if the range is empty.
    pub start: *mut c_void,
    /// Length in bytes.
    pub bytes: usize,
}

impl Buffer {
    /// An empty range.
    pub const EMPTY: Self = Self { start: std::ptr::null_mut(), bytes: 0 };
}

/// The ranges of one request. Makes no claim about their use.
#[derive(Debug, Clone)]
pub(crate) struct Ranges {
    inline: [(NonNull<u8>, usize); INLINE_BUFFERS],
    more: Vec<(NonNull<u8>, usize)>,
    count: usize,
    bytes: usize,
}

// SAFETY: the header obliges the caller to let another thread use the memory until the request's completion is
// polled; no other field is tied to a thread.
unsafe impl Send for Ranges {}

impl Ranges {
    /// Checks that every non-empty range has a start, and that the sum of the lengths fits `isize`.
    pub(crate) fn check(buffers: &[Buffer]) -> Result<Self, Failure> {
        let mut ranges = Self::none();
        for buffer in buffers.iter().filter(|buffer| buffer.bytes > 0) {
            let start = NonNull::new(buffer.start.cast::<u8>()).ok_or_else(|| {
                Failure::new(Status::InvalidArgument, "a buffer with bytes has a null pointer")
            })?;
            ranges.bytes = ranges
                .bytes
                .checked_add(buffer.bytes)
                .filter(|bytes| isize::try_from(*bytes).is_ok())
                .ok_or_else(|| Failure::new(Status::InvalidArgument, "the buffers are longer than memory"))?;
            match ranges.inline.get_mut(ranges.count) {
                Some(place) => *place = (start, buffer.bytes),
                None => {
                    if ranges.more.is_empty() {
                        let left = buffers.len() - INLINE_BUFFERS;
                        (ranges.more.try_reserve_exact(left))
                            .map_err(|_| Failure::no_memory("the buffers"))?;
                    }
                    ranges.more.push((start, buffer.bytes));
                }
            }
            ranges.count += 1;
        }
        Ok(ranges)
    }

    fn none() -> Self {
        Self { inline: [(NonNull::dangling(), 0); INLINE_BUFFERS], more: Vec::new(), count: 0, bytes: 0 }
    }

    fn iter(&self) -> impl Iterator<Item = (NonNull<u8>, usize)> {
        self.inline[..self.count.min(INLINE_BUFFERS)].iter().chain(&self.more).copied()
    }
}

/// Memory to which a block's bytes are written.
#[derive(Debug)]
pub struct Destination {
    ranges: Ranges,
    filled: usize,
}

impl Destination {
    /// # Safety
    /// All of the ranges must be valid for writes, and used by no other code, for as long as this lives.
    pub(crate) unsafe fn new(ranges: Ranges) -> Self {
        Self { ranges, filled: 0 }
    }

    /// A destination without room.
    pub(crate) fn nowhere() -> Self {
        Self { ranges: Ranges::none(), filled: 0 }
    }

    /// Number of bytes that can still be written.
    #[must_use]
    pub fn room(&self) -> usize {
        self.ranges.bytes - self.filled
    }

    /// Bytes written so far.
    #[must_use]
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// Returns memory for the next `bytes` bytes, or for all that there is room for, range by range. The memory
    /// counts as filled.
    pub fn next(&mut self, bytes: usize) -> impl Iterator<Item = &mut [MaybeUninit<u8>]> {
        let mut left = bytes.min(self.room());
        let mut skip = self.filled;
        self.filled += left;
        self.ranges.iter().filter_map(move |(start, length)| {
            let before = skip.min(length);
            skip -= before;
            let now = left.min(length - before);
            left -= now;
            let to = start.as_ptr().wrapping_add(before).cast();
            // SAFETY: inside a range that is valid for writes and used by no other code for as long as this
            // lives, by the contract of `new`; each byte of it is given out once, as `filled` grows.
            (now > 0).then(|| unsafe { std::slice::from_raw_parts_mut(to, now) })
        })
    }

    /// Appends bytes, across ranges if needed. Returns `false` and writes nothing if there is no room for all
    /// of them.
    #[must_use]
    pub fn write(&mut self, mut bytes: &[u8]) -> bool {
        if bytes.len() > self.room() {
            return false;
        }
        let mut skip = self.filled;
        self.filled += bytes.len();
        for (start, length) in self.ranges.iter() {
            if skip >= length {
                skip -= length;
                continue;
            }
            let (now, later) = bytes.split_at(bytes.len().min(length - skip));
            let to = start.as_ptr().wrapping_add(skip);
            // SAFETY: `now` is a live slice; `to` has `now.len()` bytes left in its range, which is valid for writes by
            // the contract of `new`; the ranges are the caller's alone, so they do not overlap the store's memory.
            unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), to, now.len()) };
            (bytes, skip) = (later, 0);
            if bytes.is_empty() {
                break;
            }
        }
        true
    }
}

/// Memory from which a block's bytes are read.
#[derive(Debug)]
pub struct Source {
    ranges: Ranges,
    _reads: PhantomData<*const u8>,
}

impl Source {
    /// # Safety
    /// All of the ranges must be initialised and valid for reads, and must not be written to, for as long as
    /// this lives.
    pub(crate) unsafe fn new(ranges: Ranges) -> Self {
        Self { ranges, _reads: PhantomData }
    }

    /// A source without bytes.
    pub(crate) fn nothing() -> Self {
        Self { ranges: Ranges::none(), _reads: PhantomData }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ranges.bytes
    }

    /// Whether the source has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.bytes == 0
    }

    /// The bytes, range by range.
    pub fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        self.ranges.iter().map(|(start, length)| {
            // SAFETY: the range is initialised, valid for reads and not written to while `self` lives, by the contract
            // of `new`; its length is at most `isize::MAX`, which `Ranges::check` has seen to.
            unsafe { std::slice::from_raw_parts(start.as_ptr(), length) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_cross_ranges_in_both_directions() {
        let mut places: Vec<Vec<u8>> = [3, 0, 1, 5, 2, 4, 1].iter().map(|bytes| vec![0xEE; *bytes]).collect();
        let buffers: Vec<Buffer> = places
            .iter_mut()
            .map(|place| Buffer { start: place.as_mut_ptr().cast(), bytes: place.len() })
            .collect();
        let ranges = Ranges::check(&buffers).expect("valid");
        // SAFETY: the vectors live to the end of the test and are not used while this does.
        let mut destination = unsafe { Destination::new(ranges.clone()) };
        assert!(destination.write(b"ab") && destination.write(b"") && destination.write(b"cdefghij"));
        assert!(!destination.write(b"klmnopq"), "7 bytes where 6 have room");
        assert!(destination.write(b"klm") && destination.room() == 3);
        let mut next = b"no".iter();
        for piece in destination.next(2) {
            for (byte, given) in piece.iter_mut().zip(&mut next) {
                byte.write(*given);
            }
        }
        assert!(next.next().is_none() && destination.room() == 1 && destination.next(0).count() == 0);
        drop(destination);
        assert_eq!(places.concat(), b"abcdefghijklmno\xEE");
        // SAFETY: as above, and all bytes are initialised.
        let source = unsafe { Source::new(ranges) };
        assert_eq!((source.len(), source.pieces().count()), (16, 6));
        assert_eq!(source.pieces().collect::<Vec<_>>().concat(), b"abcdefghijklmno\xEE");
    }

    #[test]
    fn what_cannot_be_memory_is_refused() {
        let null = Buffer { start: std::ptr::null_mut(), bytes: 1 };
        let huge = Buffer { start: NonNull::<u8>::dangling().as_ptr().cast(), bytes: usize::MAX };
        for buffer in [null, huge] {
            assert_eq!(Ranges::check(&[buffer]).expect_err("refused").status, Status::InvalidArgument);
        }
        assert_eq!(Ranges::check(&[Buffer::EMPTY]).expect("no bytes").bytes, 0);
    }
}
