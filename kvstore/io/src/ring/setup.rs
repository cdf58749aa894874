//! Options of a ring, and its creation on kernels without the newer flags.
//!
//! SINGLE_ISSUER and DEFER_TASKRUN (6.1): completions are processed when this thread asks, on its own core, instead of
//! interrupting it. COOP_TASKRUN and TASKRUN_FLAG (5.19): no interrupt, and a flag in shared memory says when asking is
//! worth a system call. The ring starts disabled (R_DISABLED), as the thread that enables it is its only issuer: an
//! engine may so be made by one thread and driven by another. io_uring_setup(2).

use io_uring::{Builder, IoUring, cqueue, squeue};

use crate::{IoError, IoErrorKind};

/// Options of a ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingConfig {
    /// Maximum number of requests queued or in flight, 1 to 16384.
    pub depth: usize,
    /// Maximum length of a request, in bytes.
    pub transfer_bytes_max: usize,
    /// Whether completions are polled from the device instead of raised by an interrupt. `wait` then spins
    /// while requests are in flight. Needs a device with poll queues.
    pub io_poll: bool,
    /// Idle time in milliseconds after which the kernel's submission thread sleeps: no system calls, for a
    /// core. `None`: no such thread.
    pub submission_poll_idle_ms: Option<u32>,
}

impl Default for RingConfig {
    fn default() -> Self {
        Self { depth: 128, transfer_bytes_max: 16 << 20, io_poll: false, submission_poll_idle_ms: None }
    }
}

/// Maximum depth: kernels refuse larger rings (32768 entries of the queue, two of which are not for requests).
const DEPTH_MAX: usize = 16384;

/// Mode of a ring that was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mode {
    pub(super) io_poll: bool,
    pub(super) submission_poll: bool,
    /// The ring must be enabled before its first use.
    pub(super) disabled: bool,
}

impl RingConfig {
    pub(super) fn check(&self, engine: &'static str) -> Result<(), IoError> {
        let reason = match self {
            Self { depth, .. } if !(1..=DEPTH_MAX).contains(depth) => {
                format!("a depth of {depth}; 1 to {DEPTH_MAX} are possible")
            }
            // The kernel moves at most 2 GiB less a page at once (MAX_RW_COUNT), and results are 32-bit.
            Self { transfer_bytes_max, .. } if !(512..=1 << 30).contains(transfer_bytes_max) => {
                format!("requests of {transfer_bytes_max} bytes; 512 to {} are possible", 1 << 30)
            }
            _ => return Ok(()),
        };
        let operation = "make a ring".to_owned();
        Err(IoError { engine, operation, kind: IoErrorKind::Invalid, reason })
    }

    /// Makes the ring with as many of the flags above as this kernel supports.
    pub(super) fn build<S: squeue::EntryMarker, C: cqueue::EntryMarker>(
        &self,
        engine: &'static str,
    ) -> Result<(IoUring<S, C>, Mode), IoError> {
        self.check(engine)?;
        // One entry for each request, and one for the waker.
        let entries = (self.depth + 1).next_power_of_two() as u32;
        let base = || {
            let mut builder: Builder<S, C> = IoUring::builder();
            // Each request has at most one completion pending, so twice the entries never overflow.
            builder.setup_cqsize(entries * 2).dontfork();
            if self.io_poll {
                builder.setup_iopoll();
            }
            if let Some(idle_ms) = self.submission_poll_idle_ms {
                builder.setup_sqpoll(idle_ms);
            }
            builder
        };
        let submission_poll = self.submission_poll_idle_ms.is_some();
        let mode = |disabled| Mode { io_poll: self.io_poll, submission_poll, disabled };
        // With SQPOLL the kernel thread is the issuer, so task work cannot be deferred to this thread.
        if !submission_poll {
            let mut builder = base();
            builder.setup_submit_all().setup_coop_taskrun().setup_taskrun_flag();
            builder.setup_single_issuer().setup_defer_taskrun().setup_r_disabled();
            if let Ok(ring) = builder.build(entries) {
                return Ok((ring, mode(true)));
            }
            let mut builder = base();
            builder.setup_submit_all().setup_coop_taskrun().setup_taskrun_flag();
            if let Ok(ring) = builder.build(entries) {
                return Ok((ring, mode(false)));
            }
        }
        let ring = base().build(entries).map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(0);
            IoError::from_errno(engine, format!("io_uring_setup of {entries} entries"), errno)
        })?;
        Ok((ring, mode(false)))
    }
}
