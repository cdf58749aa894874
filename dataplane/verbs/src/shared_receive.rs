//! The shared receive queue: buffers for messages of all peers, posted again in chained batches.
//!
//! The queue owns its buffers, so posting them is safe: a buffer is handed to the device by [`repost`] and
//! returns to the queue with its completion. Everything is allocated once; reposting allocates nothing, and
//! a batch is one call whatever its length.
//!
//! [`repost`]: SharedReceiveQueue::repost

use std::ptr::NonNull;
use std::sync::Arc;

use dataplane_fabric::PeerAccess;
use dataplane_memory::{PageSize, Slab, SlabLayout};

use crate::VerbsError;
use crate::error::from_code;
use crate::ffi;
use crate::memory_region::{Access, MemoryRegion};
use crate::protection::ProtectionDomain;

/// The raw queue, kept alive by the queue pairs that use it.
#[derive(Debug)]
pub(crate) struct SharedReceiveHandle {
    domain: Arc<ProtectionDomain>,
    pub(crate) raw: NonNull<ffi::SharedReceiveQueue>,
    /// Registered buffers that the device may still write to: freed after the queue.
    region: MemoryRegion,
}

// SAFETY: libibverbs is thread-safe by its specification.
unsafe impl Send for SharedReceiveHandle {}
// SAFETY: as above.
unsafe impl Sync for SharedReceiveHandle {}

impl Drop for SharedReceiveHandle {
    fn drop(&mut self) {
        // SAFETY: queue pairs that use it hold an `Arc` of this, so none is left.
        let code = unsafe { (self.domain.device.library.destroy_shared_receives)(self.raw.as_ptr()) };
        if code != 0 {
            tracing::warn!(device = self.domain.device.name(), error = %from_code(code), "ibv_destroy_srq");
        }
    }
}

/// Receives shared by all queue pairs of a fabric.
#[derive(Debug)]
pub struct SharedReceiveQueue {
    pub(crate) handle: Arc<SharedReceiveHandle>,
    buffers: Arc<Slab>,
    post: ffi::PostSharedReceive,
    requests: Box<[ffi::ReceiveWorkRequest]>,
    entries: Box<[ffi::ScatterGatherEntry]>,
    /// Buffers to post with the next [`SharedReceiveQueue::flush`].
    waiting: Vec<u32>,
    tag: u64,
}

// SAFETY: the pointers in `requests` point into the boxes beside them and are rebuilt at each flush.
unsafe impl Send for SharedReceiveQueue {}

impl SharedReceiveQueue {
    /// Creates a queue with `count` buffers of `bytes` each, all posted. Completions carry `tag` plus the
    /// buffer index.
    pub fn new(
        domain: &Arc<ProtectionDomain>,
        count: u32,
        bytes: usize,
        tag: u64,
    ) -> Result<Self, VerbsError> {
        let layout = SlabLayout { slot_bytes: bytes, slot_count: count };
        let buffers = Arc::new(Slab::create("kvasir-rdma-receive", layout, PageSize::HugeIfAvailable)?);
        let access = Access { remote: PeerAccess::None, relaxed_ordering: false };
        let region = MemoryRegion::of_slab(domain, &buffers, access)?;
        let device = &domain.device;
        let mut init = ffi::SharedReceiveInit {
            user: std::ptr::null_mut(),
            attributes: ffi::SharedReceiveAttributes { requests: count, entries: 1, limit: 0 },
        };
        // SAFETY: the domain is live and the struct is what the library expects.
        let raw = unsafe { (device.library.create_shared_receives)(domain.raw.as_ptr(), &raw mut init) };
        let raw = NonNull::new(raw).ok_or_else(|| {
            let object = format!(" for {count} receives");
            device.failed("ibv_create_srq", object, std::io::Error::last_os_error())
        })?;
        let entries = (0..count)
            .map(|index| ffi::ScatterGatherEntry {
                address: buffers.address(index, 0, bytes).as_ptr() as u64,
                length: bytes as u32,
                local_key: region.local_key(),
            })
            .collect();
        let handle = Arc::new(SharedReceiveHandle { domain: Arc::clone(domain), raw, region });
        // SAFETY: the context is open as long as the device.
        let post = unsafe { (*device.context.as_ptr()).operations.post_shared_receive };
        let post = post.ok_or_else(|| {
            let error = std::io::ErrorKind::Unsupported.into();
            device.failed("ibv_post_srq_recv", String::new(), error)
        })?;
        let empty = ffi::ReceiveWorkRequest {
            id: 0,
            next: std::ptr::null_mut(),
            entries: std::ptr::null_mut(),
            entry_count: 1,
        };
        let requests = vec![empty; count as usize].into_boxed_slice();
        let mut this = Self { handle, buffers, post, requests, entries, waiting: (0..count).collect(), tag };
        this.flush()?;
        Ok(this)
    }

    /// Returns the bytes registered for the buffers.
    #[must_use]
    pub fn registered_bytes(&self) -> u64 {
        self.handle.region.length()
    }

    /// Copies the first bytes of a buffer whose completion was polled.
    pub fn read(&self, buffer: u32, offset: usize, bytes: &mut [u8]) {
        self.buffers.read(buffer, offset, bytes);
    }

    /// Returns the buffer of this queue that a completion's id names, if any.
    #[must_use]
    pub fn buffer_of(&self, id: u64) -> Option<u32> {
        let index = u32::try_from(id.checked_sub(self.tag)?).ok()?;
        ((index as usize) < self.entries.len()).then_some(index)
    }

    /// Returns a buffer to the device at the next flush, after its completion was handled.
    pub fn repost(&mut self, buffer: u32) {
        assert!(self.waiting.len() < self.entries.len(), "a buffer is given back twice");
        self.waiting.push(buffer);
    }

    /// Posts the waiting buffers as one chain; returns their number. Buffers that the device refuses keep
    /// waiting.
    pub fn flush(&mut self) -> Result<usize, VerbsError> {
        let count = self.waiting.len();
        if count == 0 {
            return Ok(0);
        }
        let base = self.requests.as_mut_ptr();
        for (position, &buffer) in self.waiting.iter().enumerate() {
            let next =
                if position + 1 < count { base.wrapping_add(position + 1) } else { std::ptr::null_mut() };
            let entries = &raw mut self.entries[buffer as usize];
            self.requests[position] =
                ffi::ReceiveWorkRequest { id: self.tag + u64::from(buffer), next, entries, entry_count: 1 };
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue is live; the chain lies in our boxes and ends with null; each entry names a buffer
        // of the region that the queue keeps, and none of them is posted now.
        let code = unsafe { (self.post)(self.handle.raw.as_ptr(), base, &raw mut bad) };
        if code == 0 {
            self.waiting.clear();
            return Ok(count);
        }
        // A provider that does not report the refused request has accepted none.
        let bad = if bad.is_null() { base } else { bad };
        let accepted = (bad as usize).wrapping_sub(base as usize) / size_of::<ffi::ReceiveWorkRequest>();
        self.waiting.drain(..accepted.min(count));
        let object = format!(": {accepted} of {count} receives accepted");
        Err(self.handle.domain.device.failed("ibv_post_srq_recv", object, from_code(code)))
    }
}
