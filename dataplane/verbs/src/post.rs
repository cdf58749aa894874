//! Building chained work requests in a preallocated array: acquire → fill → release.
//!
//! [`PostArray::acquire`] returns a [`Batch`]; the caller begins requests and adds their entries;
//! [`Batch::post`] chains the requests and rings one doorbell for all. Batching is thus the only way to
//! post. The last request of a batch is always signalled. Posting allocates nothing, and makes no system
//! call on a device whose driver maps its doorbell.
//!
//! Posting is `unsafe`, since the device uses the memory after the call has returned:
//!
//! ```compile_fail,E0133
//! use dataplane_verbs::raw::{Batch, QueuePair, ReadyToSend};
//! fn post(pair: &QueuePair<ReadyToSend>, batch: Batch<'_, '_>) {
//!     let _ = batch.post(pair);
//! }
//! ```
//!
//! Until it is posted, a batch borrows the regions that it names:
//!
//! ```compile_fail,E0505
//! use dataplane_verbs::raw::{MemoryRegion, PostArray, QueuePair, ReadyToSend, Verb};
//! fn post(array: &mut PostArray, region: MemoryRegion, pair: &QueuePair<ReadyToSend>) {
//!     let mut batch = array.acquire();
//!     batch.begin(Verb::Send, 1, true);
//!     batch.gather(&region, region.address(), 8);
//!     drop(region);
//!     let _ = unsafe { batch.post(pair) };
//! }
//! ```
//!
//! The [`Posted`] that posting returns borrows the regions until the caller has seen the completion:
//!
//! ```compile_fail,E0505
//! use dataplane_verbs::raw::{MemoryRegion, PostArray, QueuePair, ReadyToSend, Verb};
//! fn post(array: &mut PostArray, region: MemoryRegion, pair: &QueuePair<ReadyToSend>) {
//!     let mut batch = array.acquire();
//!     batch.begin(Verb::Send, 1, true);
//!     batch.gather(&region, region.address(), 8);
//!     let posted = unsafe { batch.post(pair) }.expect("posted");
//!     drop(region);
//!     unsafe { posted.completed() };
//! }
//! ```
//!
//! The same without the `drop` compiles:
//!
//! ```
//! use dataplane_verbs::raw::{MemoryRegion, PostArray, QueuePair, ReadyToSend, Verb};
//! fn post(array: &mut PostArray, region: MemoryRegion, pair: &QueuePair<ReadyToSend>) {
//!     let mut batch = array.acquire();
//!     batch.begin(Verb::Send, 1, true);
//!     batch.gather(&region, region.address(), 8);
//!     let posted = unsafe { batch.post(pair) }.expect("posted");
//!     unsafe { posted.completed() };
//!     drop(region);
//! }
//! ```

use std::marker::PhantomData;

use crate::VerbsError;
use crate::error::from_code;
use crate::ffi;
use crate::memory_region::MemoryRegion;
use crate::queue_pair::{QueuePair, ReadyToSend};

/// Address range at the peer: the address in a region, and the region's remote key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remote {
    /// Address of the first byte.
    pub address: u64,
    /// Key of the region.
    pub key: u32,
}

/// Operation of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// RDMA WRITE.
    Write(Remote),
    /// RDMA WRITE WITH IMMEDIATE: uses up one receive of the peer.
    WriteWithImmediate(Remote, u32),
    /// RDMA READ.
    Read(Remote),
    /// SEND: uses up one receive of the peer.
    Send,
}

/// Preallocated work requests and entries of one batch.
#[derive(Debug)]
pub struct PostArray {
    requests: Box<[ffi::SendWorkRequest]>,
    entries: Box<[ffi::ScatterGatherEntry]>,
    inline: Box<[u8]>,
    entries_max: usize,
    inline_max: usize,
}

// SAFETY: the pointers in the requests point into the boxes beside them and are set again for each batch.
unsafe impl Send for PostArray {}

impl PostArray {
    /// Allocates `requests` requests of up to `entries` entries, or up to `inline_bytes` inline bytes, each.
    #[must_use]
    pub fn new(requests: usize, entries: usize, inline_bytes: usize) -> Self {
        Self {
            requests: vec![ffi::SendWorkRequest::EMPTY; requests].into_boxed_slice(),
            entries: vec![ffi::ScatterGatherEntry::default(); requests * entries].into_boxed_slice(),
            inline: vec![0; requests * inline_bytes].into_boxed_slice(),
            entries_max: entries,
            inline_max: inline_bytes,
        }
    }

    /// Starts an empty batch in this array.
    pub fn acquire<'region>(&mut self) -> Batch<'_, 'region> {
        Batch { array: self, count: 0, signalled: 0, regions: PhantomData }
    }
}

/// Requests that are being built. Dropping the batch posts nothing.
#[derive(Debug)]
pub struct Batch<'array, 'region> {
    array: &'array mut PostArray,
    count: usize,
    signalled: usize,
    regions: PhantomData<&'region MemoryRegion>,
}

impl<'region> Batch<'_, 'region> {
    /// Returns the number of requests in the batch.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether the batch has no requests.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the number of requests that still fit.
    #[must_use]
    pub fn room(&self) -> usize {
        self.array.requests.len() - self.count
    }

    /// Starts the next request; panics when the batch is full. Its entries are added by [`Batch::gather`],
    /// or its bytes by [`Batch::inline`].
    pub fn begin(&mut self, verb: Verb, id: u64, signalled: bool) {
        let position = self.count;
        let entries = &raw mut self.array.entries[position * self.array.entries_max];
        let (opcode, remote, immediate) = match verb {
            Verb::Write(remote) => (ffi::WR_RDMA_WRITE, remote, 0),
            Verb::WriteWithImmediate(remote, value) => (ffi::WR_RDMA_WRITE_WITH_IMM, remote, value),
            Verb::Read(remote) => (ffi::WR_RDMA_READ, remote, 0),
            Verb::Send => (ffi::WR_SEND, Remote { address: 0, key: 0 }, 0),
        };
        let request = &mut self.array.requests[position];
        request.id = id;
        request.next = std::ptr::null_mut();
        request.entries = entries;
        request.entry_count = 0;
        request.opcode = opcode;
        request.flags = if signalled { ffi::SEND_SIGNALED } else { 0 };
        request.immediate = immediate.to_be();
        request.remote_address = remote.address;
        request.remote_key = remote.key;
        self.signalled += usize::from(signalled);
        self.count += 1;
    }

    /// Adds bytes of a region to the request begun last; panics when they lie outside the region, or the
    /// request has no entry left.
    pub fn gather(&mut self, region: &'region MemoryRegion, address: u64, length: u32) {
        self.gather_rows(region, address, length, length, 1);
    }

    /// Adds `rows` ranges of `length` bytes each, their starts `stride` apart; panics as [`Batch::gather`] does.
    pub fn gather_rows(
        &mut self,
        region: &'region MemoryRegion,
        address: u64,
        length: u32,
        stride: u32,
        rows: u32,
    ) {
        let span = u64::from(stride) * u64::from(rows.saturating_sub(1)) + u64::from(length);
        assert!(region.contains(address, span), "{span} bytes at {address:#x} of another region");
        let position = self.last();
        let request = &mut self.array.requests[position];
        let first = usize::try_from(request.entry_count).unwrap_or(usize::MAX);
        let room = self.array.entries_max.saturating_sub(first);
        assert!(rows as usize <= room, "more than {} entries", self.array.entries_max);
        let start = position * self.array.entries_max + first;
        let (local_key, mut address) = (region.local_key(), address);
        for entry in &mut self.array.entries[start..start + rows as usize] {
            *entry = ffi::ScatterGatherEntry { address, length, local_key };
            address += u64::from(stride);
        }
        request.entry_count += rows as std::ffi::c_int;
    }

    /// Copies bytes into the request begun last, behind its earlier inline bytes. Panics when the inline
    /// capacity is exceeded.
    pub fn inline(&mut self, bytes: &[u8]) {
        let position = self.last();
        let (entries_max, inline_max) = (self.array.entries_max, self.array.inline_max);
        let request = &mut self.array.requests[position];
        let entry = &mut self.array.entries[position * entries_max];
        let (start, before) =
            (position * inline_max, if request.entry_count == 0 { 0 } else { entry.length });
        let before = before as usize;
        assert!(before + bytes.len() <= inline_max, "more than {inline_max} inline bytes");
        let room = &mut self.array.inline[start..start + inline_max];
        room[before..before + bytes.len()].copy_from_slice(bytes);
        *entry = ffi::ScatterGatherEntry {
            address: room.as_ptr() as u64,
            length: (before + bytes.len()) as u32,
            local_key: 0,
        };
        request.entry_count = 1;
        request.flags |= ffi::SEND_INLINE;
    }

    fn last(&self) -> usize {
        assert!(self.count > 0, "no request was begun");
        self.count - 1
    }

    /// Posts all requests as one chain. The last one is signalled.
    ///
    /// # Safety
    /// The caller keeps, until the completion of a request or of a later signalled one of the same pair was
    /// polled, or the pair was destroyed:
    /// 1. each region that the request names (not dropped, not even by other threads),
    /// 2. the bytes that it reads unchanged, and the bytes that a read writes without a reference to them,
    /// 3. room: the requests in flight on the pair are at most [`Capacity::send_requests`], each of at most
    ///    [`Capacity::entries`] entries or [`Capacity::inline_bytes`] bytes, and the completions that may be
    ///    generated fit into the completion queue.
    ///
    /// [`Capacity::send_requests`]: crate::queue_pair::Capacity::send_requests
    /// [`Capacity::entries`]: crate::queue_pair::Capacity::entries
    /// [`Capacity::inline_bytes`]: crate::queue_pair::Capacity::inline_bytes
    pub unsafe fn post(mut self, pair: &QueuePair<ReadyToSend>) -> Result<Posted<'region>, VerbsError> {
        if self.count == 0 {
            return Ok(Posted { count: 0, signalled: 0, regions: PhantomData });
        }
        let last = self.last();
        let base = self.array.requests.as_mut_ptr();
        for (position, request) in self.array.requests[..last].iter_mut().enumerate() {
            request.next = base.wrapping_add(position + 1);
        }
        let request = &mut self.array.requests[last];
        if request.flags & ffi::SEND_SIGNALED == 0 {
            request.flags |= ffi::SEND_SIGNALED;
            self.signalled += 1;
        }
        let device = &pair.domain().device;
        // SAFETY: the context is open as long as the device, which the pair keeps.
        let post = unsafe { (*device.context.as_ptr()).operations.post_send };
        let mut bad = std::ptr::null_mut();
        let code = match post {
            // SAFETY: the pair is ready to send; the chain lies in our boxes, ends with null and names entries
            // and inline bytes beside it; the caller upholds the numbered conditions above.
            Some(post) => unsafe { post(pair.raw(), base, &raw mut bad) },
            None => -1,
        };
        if code == 0 {
            return Ok(Posted { count: self.count, signalled: self.signalled, regions: PhantomData });
        }
        let accepted = if bad.is_null() { 0 } else { (bad as usize).wrapping_sub(base as usize) };
        let accepted = (accepted / size_of::<ffi::SendWorkRequest>()).min(self.count);
        let (device, posted) = (device.name().to_owned(), self.count);
        Err(VerbsError::Post { device, accepted, posted, error: from_code(code) })
    }
}

/// Requests in flight. Borrows the regions that the requests name.
#[derive(Debug)]
#[must_use = "the requests are in flight"]
pub struct Posted<'region> {
    count: usize,
    signalled: usize,
    regions: PhantomData<&'region MemoryRegion>,
}

impl Posted<'_> {
    /// Returns the number of requests.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the number of requests that ask for a completion.
    #[must_use]
    pub fn signalled(&self) -> usize {
        self.signalled
    }

    /// Ends the borrow.
    ///
    /// # Safety
    /// 1. The completion of the last request was polled, or the pair was destroyed; or the caller keeps the
    ///    regions by other means, as the in-flight table of the fabric does.
    pub unsafe fn completed(self) {}
}
