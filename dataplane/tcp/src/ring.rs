//! The io_uring of one node: queueing operations, entering the kernel, reaping completions.
//!
//! The ring is made disabled and is enabled by the thread that first enters it, because with
//! `IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN` (io_uring_setup(2)) only that thread may submit,
//! and the kernel finishes work only while the thread is in the kernel. `IORING_SETUP_TASKRUN_FLAG` shows in
//! shared memory whether there is such work, so an idle poll makes no system call. Such a ring's own
//! descriptor does not become readable for deferred work (seen on Linux 6.18); an eventfd does, and is
//! enabled only for a sleep.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use dataplane_memory::Slab;
use io_uring::{IoUring, cqueue, squeue};
use rustix::event::EventfdFlags;

use crate::token::Token;
use crate::{TcpCounters, TcpError};

/// Entries of the submission queue; a full one is submitted early.
const ENTRIES: u32 = 1024;
/// Entries of the completion queue; more completions wait in the kernel (IORING_FEAT_NODROP).
const COMPLETIONS: u32 = 8192;
/// `IORING_ENTER_GETEVENTS` of io_uring.h: run deferred work and flush overflown completions.
const ENTER_GETEVENTS: u32 = 1;
/// Largest registered buffer, in bytes (io_sqe_buffer_register in io_uring/rsrc.c).
const REGISTERED_BYTES_MAX: usize = 1 << 30;
/// Largest number of registered buffers (`IORING_MAX_REG_BUFFERS`).
const REGISTERED_BUFFERS_MAX: usize = 1 << 14;
/// Largest number of registered descriptors: not above the usual limit of open files, which bounds them too.
const REGISTERED_FILES_MAX: usize = 1024;

pub(crate) struct Ring {
    ring: IoUring,
    counters: Arc<TcpCounters>,
    is_enabled: bool,
    /// The eventfd that the kernel signals while `is_sleeping`.
    wake: OwnedFd,
    is_sleeping: bool,
    /// Number of registered descriptor positions: connections below it may use one.
    files: usize,
    /// Address and length of the registered slab; length 0 when it is not registered.
    registered: (usize, usize),
}

/// One completion.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reaped {
    pub(crate) token: Token,
    pub(crate) result: i32,
    /// Whether a notification of this zero-copy send follows, when its bytes are no longer needed.
    pub(crate) has_more: bool,
    /// Whether this is the notification of a zero-copy send.
    pub(crate) is_notification: bool,
}

impl Ring {
    pub(crate) fn new(counters: Arc<TcpCounters>) -> Result<Self, TcpError> {
        let deferred = IoUring::builder()
            .setup_clamp()
            .setup_cqsize(COMPLETIONS)
            .setup_r_disabled()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .build(ENTRIES);
        // For kernels before Linux 6.1.
        let plain =
            || IoUring::builder().setup_clamp().setup_cqsize(COMPLETIONS).setup_r_disabled().build(ENTRIES);
        let failed = |operation: &str| {
            let operation = operation.to_owned();
            |error| TcpError::System { operation, error }
        };
        let mut ring = deferred.or_else(|_| plain()).map_err(failed("io_uring_setup"))?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = wake.map_err(|errno| failed("eventfd")(errno.into()))?;
        ring.submitter().register_eventfd(wake.as_raw_fd()).map_err(failed("io_uring_register eventfd"))?;
        ring.completion().disable_eventfd();
        let (is_enabled, is_sleeping) = (false, false);
        Ok(Self { ring, counters, is_enabled, wake, is_sleeping, files: 0, registered: (0, 0) })
    }

    /// Registers descriptor positions and, if given, the slab. A registration that the kernel refuses is
    /// counted, and the ring works without it.
    pub(crate) fn register(&mut self, slab: Option<&Slab>, connections_max: usize) {
        let files = connections_max.min(REGISTERED_FILES_MAX);
        match self.ring.submitter().register_files_sparse(files as u32) {
            Ok(()) => self.files = files,
            Err(_) => self.counters.failed_registrations.add(1),
        }
        let Some(slab) = slab else { return };
        let (start, bytes) = (slab.base().as_ptr(), slab.mapped_bytes());
        let chunks = (0..bytes).step_by(REGISTERED_BYTES_MAX).map(|at| libc::iovec {
            iov_base: start.wrapping_add(at).cast(),
            iov_len: (bytes - at).min(REGISTERED_BYTES_MAX),
        });
        let chunks: Vec<libc::iovec> = chunks.collect();
        // SAFETY: the chunks are the mapping of a slab that the fabric keeps alive longer than this ring.
        let registered = unsafe { self.ring.submitter().register_buffers(&chunks) };
        match registered {
            Ok(()) if chunks.len() <= REGISTERED_BUFFERS_MAX => self.registered = (start as usize, bytes),
            _ => self.counters.failed_registrations.add(1),
        }
    }

    /// Returns the registered buffer that holds all of the bytes.
    pub(crate) fn registered_buffer(&self, start: *const u8, len: usize) -> Option<u16> {
        let offset = (start as usize).checked_sub(self.registered.0)?;
        let end = offset.checked_add(len)?;
        let buffer = offset / REGISTERED_BYTES_MAX;
        let is_one = end <= self.registered.1 && end.saturating_sub(1) / REGISTERED_BYTES_MAX == buffer;
        is_one.then_some(buffer as u16)
    }

    /// Registers a connection's descriptor at the position of its number; false when it has none or the
    /// kernel refuses.
    pub(crate) fn register_file(&mut self, connection: u32, descriptor: RawFd) -> bool {
        (connection as usize) < self.files
            && self.ring.submitter().register_files_update(connection, &[descriptor]).is_ok()
    }

    pub(crate) fn unregister_file(&mut self, position: u32) {
        // A descriptor that stays registered costs an open file until the position is used again.
        let _kept = self.ring.submitter().register_files_update(position, &[-1]);
    }

    /// Returns the descriptor that is readable when there is something to reap.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Makes the descriptor readable for every later completion. False when there is work already.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        self.is_sleeping = true;
        self.ring.completion().enable_eventfd();
        // The kernel marks work and then reads the switch; this side sets the switch and then reads the mark.
        fence(Ordering::SeqCst);
        !self.has_work() && !self.has_completions()
    }

    /// Stops signalling the descriptor.
    fn wake_up(&mut self) {
        if self.is_sleeping {
            self.is_sleeping = false;
            self.ring.completion().disable_eventfd();
            // Resets the count to zero; the read fails when it is zero already.
            let _empty = rustix::io::read(&self.wake, &mut [0_u8; 8]);
        }
    }

    /// Queues one operation.
    ///
    /// # Safety
    /// Every buffer and descriptor that `entry` names stays valid until its last completion has been reaped.
    pub(crate) unsafe fn push(&mut self, entry: squeue::Entry, token: Token) {
        let entry = entry.user_data(token.pack());
        loop {
            // SAFETY: the caller upholds that what the entry names outlives the operation.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return;
            }
            assert!(self.enter(), "the thread that first drove this fabric must drive it always");
        }
    }

    /// Submits the queued operations and lets the kernel finish deferred work. False: called from the wrong
    /// thread.
    pub(crate) fn enter(&mut self) -> bool {
        if !self.is_enabled {
            self.is_enabled = self.ring.submitter().register_enable_rings().is_ok();
            // Saves the look-up of the ring's descriptor in each call. An old kernel does not support it.
            let _optional = self.ring.submitter().register_ring_fd();
        }
        let queued = self.ring.submission().len() as u32;
        self.counters.system_calls.add(1);
        // SAFETY: no argument is passed; the queued entries were pushed under the contract of `push`.
        let entered = unsafe { self.ring.submitter().enter::<()>(queued, 0, ENTER_GETEVENTS, None) };
        // EBUSY, EAGAIN and EINTR leave the entries queued; the next call takes them.
        !entered.is_err_and(|error| error.raw_os_error() == Some(libc::EEXIST))
    }

    /// Whether entering the kernel would submit or finish something.
    pub(crate) fn has_work(&mut self) -> bool {
        let queue = self.ring.submission();
        !queue.is_empty() || queue.taskrun() || queue.cq_overflow()
    }

    pub(crate) fn has_completions(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }

    pub(crate) fn reap(&mut self) -> Option<Reaped> {
        self.wake_up();
        let entry = self.ring.completion().next()?;
        let (flags, token) = (entry.flags(), Token::unpack(entry.user_data()));
        let (has_more, is_notification) = (cqueue::more(flags), cqueue::notif(flags));
        Some(Reaped { token, result: entry.result(), has_more, is_notification })
    }
}

/// Byte of `buf_index` in `struct io_uring_sqe` (io_uring.h).
const BUFFER_INDEX_AT: usize = 40;

/// Sets the registered buffer of a vectored zero-copy send, for which the `io-uring` crate has no field.
pub(crate) fn set_registered_buffer(entry: &mut squeue::Entry, buffer: u16) {
    const { assert!(size_of::<squeue::Entry>() == 64) };
    let field = (&raw mut *entry).wrapping_byte_add(BUFFER_INDEX_AT).cast::<u16>();
    // SAFETY: an entry is the 64 bytes of the kernel's struct, in which this aligned field is 16 bits of plain
    // data; the pointer comes from a unique reference to all of it.
    unsafe { field.write(buffer) };
}
