//! Requests of the I/O engines and the memory that they read into and write from.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use dataplane_memory::SlotRef;

use crate::IoError;

/// Alignment of [`PageBuffer`]s: no device in use requires more.
const PAGE_BYTES: usize = 4096;

/// Direction of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// From the file into the buffer.
    Read,
    /// From the buffer into the file.
    Write,
}

/// Page-aligned heap memory: for headers and tables, not for blocks.
#[derive(Debug)]
pub struct PageBuffer {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its memory, like a `Box<[u8]>`.
unsafe impl Send for PageBuffer {}

impl PageBuffer {
    /// Returns zeroed memory; `bytes` is rounded up to whole pages.
    #[must_use]
    pub fn zeroed(bytes: usize) -> Self {
        let layout = Self::layout(bytes.max(1).next_multiple_of(PAGE_BYTES));
        // SAFETY: the layout's size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Self { start, bytes: layout.size() }
    }

    fn layout(bytes: usize) -> Layout {
        // The bound holds for every size that an allocator could give.
        Layout::from_size_align(bytes, PAGE_BYTES).expect("a buffer is smaller than the address space")
    }
}

impl std::ops::Deref for PageBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the memory is owned, initialised and `bytes` long; a shared borrow of `self` excludes writers, as an
        // engine that writes into it owns it.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl std::ops::DerefMut for PageBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for PageBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this very layout, and dropped once.
        unsafe { dealloc(self.start.as_ptr(), Self::layout(self.bytes)) }
    }
}

/// Memory that a request reads into or writes from.
#[derive(Debug)]
pub enum Buffer {
    /// Part of a slot; the reference keeps the slot from being reused.
    Slot {
        /// The slot.
        slot: SlotRef,
        /// First byte in the slot.
        offset: usize,
        /// Number of bytes.
        len: usize,
    },
    /// Separate memory.
    Pages(PageBuffer),
}

impl Buffer {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Slot { len, .. } => *len,
            Self::Pages(pages) => pages.len(),
        }
    }

    /// Whether the buffer is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address of the first byte, or `None` when the range leaves its slot. Valid for `len` bytes as long as
    /// the buffer lives.
    #[must_use]
    pub fn address(&self) -> Option<NonNull<u8>> {
        match self {
            Self::Slot { slot, offset, len } => slot.slab().try_address(slot.slot(), *offset, *len),
            Self::Pages(pages) => Some(pages.start),
        }
    }
}

/// A read or write request.
#[derive(Debug)]
pub struct Request {
    /// The caller's number; comes back with the completion.
    pub id: u64,
    /// Direction of the transfer.
    pub operation: Operation,
    /// Number of the file.
    pub file: u32,
    /// First byte in the file.
    pub offset: u64,
    /// Memory of the bytes, owned by the engine until the completion.
    pub buffer: Buffer,
}

/// The engine has no room; holds the refused request.
#[derive(Debug)]
pub struct Full(pub Request);

/// Completion of a request.
#[derive(Debug)]
pub struct Completion {
    /// The caller's number.
    pub id: u64,
    /// The request's buffer.
    pub buffer: Buffer,
    /// Whether the whole range was moved.
    pub result: Result<(), IoError>,
}
