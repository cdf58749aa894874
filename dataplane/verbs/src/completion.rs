//! Completion queues, and the channel that wakes a sleeping thread.
//!
//! Hot path: `poll` is one call through the context's table into memory that the device writes; no
//! allocation, no lock of this crate, no system call. Arming and taking events happen around a sleep only.
//!
//! Race around a sleep: a completion that arrives between the last poll and the arming raises no event. So:
//! arm, then poll once more, then sleep (ibv_req_notify_cq(3)).

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::VerbsError;
use crate::device::Device;
use crate::error::from_code;
use crate::ffi;

/// Completions taken by one poll of the device.
pub(crate) const POLL_BATCH: usize = 64;
/// Events acknowledged at once, because acknowledging takes a lock in the library.
const ACKNOWLEDGE_EVERY: u32 = 64;

/// A queue of completions with a channel of its own.
#[derive(Debug)]
pub struct CompletionQueue {
    device: Arc<Device>,
    channel: NonNull<ffi::CompletionChannel>,
    pub(crate) raw: NonNull<ffi::CompletionQueue>,
    poll: ffi::PollCq,
    request_notify: ffi::RequestNotify,
    entries: u32,
    unacknowledged: AtomicU32,
}

// SAFETY: libibverbs is thread-safe by its specification.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// Creates a queue of at least `entries`, whose events use interrupt vector `vector` (modulo the number
    /// that the device has).
    pub fn new(device: &Arc<Device>, entries: u32, vector: u32) -> Result<Arc<Self>, VerbsError> {
        let (library, context) = (&device.library, device.context.as_ptr());
        let last = std::io::Error::last_os_error;
        // SAFETY: the context is open.
        let channel = unsafe { (library.create_channel)(context) };
        let channel = NonNull::new(channel)
            .ok_or_else(|| device.failed("ibv_create_comp_channel", String::new(), last()))?;
        let channel_guard = ChannelGuard { device, channel };
        // SAFETY: the context is open.
        let vectors = unsafe { (*context).completion_vectors };
        let vector = vector.checked_rem(u32::try_from(vectors).unwrap_or(1)).unwrap_or(0) as i32;
        let (asked, user) = (i32::try_from(entries).unwrap_or(i32::MAX), std::ptr::null_mut());
        // SAFETY: context and channel are live; the user pointer is never followed.
        let raw = unsafe { (library.create_completions)(context, asked, user, channel.as_ptr(), vector) };
        let raw = NonNull::new(raw)
            .ok_or_else(|| device.failed("ibv_create_cq", format!(" for {entries} entries"), last()))?;
        // SAFETY: the context is open.
        let poll = unsafe { (*context).operations.poll_cq };
        // SAFETY: the context is open.
        let request_notify = unsafe { (*context).operations.request_notify };
        let (Some(poll), Some(request_notify)) = (poll, request_notify) else {
            // SAFETY: the queue was just made and nothing uses it.
            unsafe { (library.destroy_completions)(raw.as_ptr()) };
            let error = std::io::ErrorKind::Unsupported.into();
            return Err(device.failed("ibv_poll_cq", String::new(), error));
        };
        std::mem::forget(channel_guard);
        let this = Self {
            device: Arc::clone(device),
            channel,
            raw,
            poll,
            request_notify,
            entries,
            unacknowledged: AtomicU32::new(0),
        };
        rustix::io::ioctl_fionbio(this.descriptor(), true).map_err(|errno| {
            device.failed("ioctl(FIONBIO)", " of the completion channel".to_owned(), errno.into())
        })?;
        Ok(Arc::new(this))
    }

    /// Returns the number of entries asked for; the queue has at least these.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Fills the front of `completions`; returns the number of completions.
    pub fn poll(&self, completions: &mut [ffi::WorkCompletion]) -> Result<usize, VerbsError> {
        let room = i32::try_from(completions.len()).unwrap_or(i32::MAX);
        // SAFETY: the queue is live, and the slice has room for that many.
        let count = unsafe { (self.poll)(self.raw.as_ptr(), room, completions.as_mut_ptr()) };
        usize::try_from(count)
            .map_err(|_| self.device.failed("ibv_poll_cq", String::new(), std::io::Error::last_os_error()))
    }

    /// Requests one event at the next completion.
    pub fn arm(&self) -> Result<(), VerbsError> {
        // SAFETY: the queue is live.
        let code = unsafe { (self.request_notify)(self.raw.as_ptr(), 0) };
        if code == 0 {
            return Ok(());
        }
        Err(self.device.failed("ibv_req_notify_cq", String::new(), from_code(code)))
    }

    /// Takes the pending events of the channel; returns their number. One system call for each and one more.
    pub fn take_events(&self) -> u32 {
        let mut taken = 0;
        loop {
            let mut queue = std::ptr::null_mut();
            let mut user = std::ptr::null_mut();
            let channel = self.channel.as_ptr();
            // SAFETY: the channel is live and nonblocking; both places are valid to write to.
            let code =
                unsafe { (self.device.library.get_completion_event)(channel, &raw mut queue, &raw mut user) };
            if code != 0 {
                break;
            }
            taken += 1;
        }
        // Relaxed: one thread takes events; the count is only read by it and by the drop.
        let waiting = self.unacknowledged.fetch_add(taken, Ordering::Relaxed) + taken;
        if waiting >= ACKNOWLEDGE_EVERY {
            self.acknowledge();
        }
        taken
    }

    fn acknowledge(&self) {
        let count = self.unacknowledged.swap(0, Ordering::Relaxed);
        if count > 0 {
            // SAFETY: that many events of this queue were taken and not acknowledged yet.
            unsafe { (self.device.library.acknowledge_completion_events)(self.raw.as_ptr(), count) };
        }
    }

    /// Descriptor that is readable when an event is pending.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is live.
        let descriptor = unsafe { (*self.channel.as_ptr()).descriptor };
        // SAFETY: the library keeps it open as long as the channel, which `self` keeps.
        unsafe { BorrowedFd::borrow_raw(descriptor) }
    }
}

impl AsFd for CompletionQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor()
    }
}

/// Destroys a channel whose queue could not be made.
struct ChannelGuard<'device> {
    device: &'device Device,
    channel: NonNull<ffi::CompletionChannel>,
}

impl Drop for ChannelGuard<'_> {
    fn drop(&mut self) {
        // SAFETY: the channel is live and no queue uses it.
        unsafe { (self.device.library.destroy_channel)(self.channel.as_ptr()) };
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        self.acknowledge();
        // SAFETY: queue pairs that use the queue hold an `Arc` of it, so none is left.
        let code = unsafe { (self.device.library.destroy_completions)(self.raw.as_ptr()) };
        if code != 0 {
            tracing::warn!(device = self.device.name(), error = %from_code(code), "ibv_destroy_cq");
            return;
        }
        // SAFETY: its only queue is gone.
        unsafe { (self.device.library.destroy_channel)(self.channel.as_ptr()) };
    }
}
