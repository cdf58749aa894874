//! A reliable-connection queue pair, its state in its type.
//!
//! `Reset` → `Initialised` → `ReadyToSend` (by way of RTR, "ready to receive"), and from each of them to `Failed`
//! (ibv_modify_qp(3)). Each step consumes the value, so that a request can be posted in `ReadyToSend` only:
//!
//! ```compile_fail
//! use dataplane_verbs::raw::{Batch, Initialised, QueuePair};
//! fn too_early(pair: &QueuePair<Initialised>, batch: Batch<'_, '_>) {
//!     let _ = unsafe { batch.post(pair) };
//! }
//! ```
//!
//! A step to INIT that fails destroys the pair; a step to RTR or RTS that fails stops it. Dropping a pair destroys it;
//! after that the device touches nothing on its behalf, which is what makes it safe to reuse memory that its requests
//! named.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

use dataplane_fabric::PeerAccess;

use crate::VerbsError;
use crate::completion::CompletionQueue;
use crate::config::PathMtu;
use crate::error::from_code;
use crate::ffi;
use crate::memory_region::remote_flags;
use crate::protection::ProtectionDomain;
use crate::shared_receive::{SharedReceiveHandle, SharedReceiveQueue};

/// Created, not bound to a port.
#[derive(Debug)]
pub struct Reset(());
/// Bound to a port (INIT).
#[derive(Debug)]
pub struct Initialised(());
/// Connected to a peer; accepts work requests (RTS).
#[derive(Debug)]
pub struct ReadyToSend(());
/// In the error state: the device completes all work as flushed.
#[derive(Debug)]
pub struct Failed(());

/// Sizes of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Send work requests in flight.
    pub send_requests: u32,
    /// Scatter/gather entries of one work request.
    pub entries: u32,
    /// Inline bytes of one work request.
    pub inline_bytes: u32,
}

/// Address of the peer's queue pair and the attributes of the path to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// Number of the peer's queue pair.
    pub queue_pair: u32,
    /// First packet sequence number that the peer uses.
    pub psn: u32,
    /// GID of the peer.
    pub gid: [u8; 16],
    /// LID of the peer, on InfiniBand.
    pub lid: u16,
    /// Whether packets carry a global route: always on Ethernet.
    pub is_global: bool,
    /// Row of the local port's GID table.
    pub source_gid_index: u8,
    /// Local port.
    pub port: u8,
    /// Largest packet.
    pub mtu: PathMtu,
    /// Service level.
    pub service_level: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// RDMA reads of the peer that this side answers at a time.
    pub reads_as_target: u8,
    /// Code of the delay that is requested of a sender for which no receive is posted.
    pub receiver_not_ready_timer: u8,
}

/// Retries and timeouts of this side's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retries {
    /// First packet sequence number that this side uses.
    pub psn: u32,
    /// Exponent of the acknowledgement timeout.
    pub timeout: u8,
    /// Retries after an acknowledgement timeout.
    pub count: u8,
    /// Retries after "receiver not ready"; 7 retries without limit.
    pub receiver_not_ready: u8,
    /// RDMA reads that this side has in flight at a time.
    pub reads_as_initiator: u8,
}

impl Path {
    /// Attributes of the step to "ready to receive", and their mask.
    fn attributes(&self) -> (ffi::QueuePairAttributes, u32) {
        let attributes = ffi::QueuePairAttributes {
            state: ffi::QPS_RTR,
            path_mtu: self.mtu as u32,
            destination: self.queue_pair,
            receive_psn: self.psn,
            reads_as_target: self.reads_as_target,
            receiver_not_ready_timer: self.receiver_not_ready_timer,
            address: ffi::AddressAttributes {
                route: ffi::GlobalRoute {
                    destination: ffi::Gid { raw: self.gid },
                    flow_label: 0,
                    source_gid_index: self.source_gid_index,
                    hop_limit: self.hop_limit,
                    traffic_class: self.traffic_class,
                },
                destination_lid: self.lid,
                service_level: self.service_level,
                is_global: u8::from(self.is_global),
                port: self.port,
                ..Default::default()
            },
            ..Default::default()
        };
        let mask = ffi::QP_STATE
            | ffi::QP_AV
            | ffi::QP_PATH_MTU
            | ffi::QP_DEST_QPN
            | ffi::QP_RQ_PSN
            | ffi::QP_MAX_DEST_RD_ATOMIC
            | ffi::QP_MIN_RNR_TIMER;
        (attributes, mask)
    }
}

impl Retries {
    /// Attributes of the step to "ready to send", and their mask.
    fn attributes(&self) -> (ffi::QueuePairAttributes, u32) {
        let attributes = ffi::QueuePairAttributes {
            state: ffi::QPS_RTS,
            send_psn: self.psn,
            timeout: self.timeout,
            retry_count: self.count,
            receiver_not_ready_retry: self.receiver_not_ready,
            reads_as_initiator: self.reads_as_initiator,
            ..Default::default()
        };
        let mask = ffi::QP_STATE
            | ffi::QP_SQ_PSN
            | ffi::QP_TIMEOUT
            | ffi::QP_RETRY_CNT
            | ffi::QP_RNR_RETRY
            | ffi::QP_MAX_QP_RD_ATOMIC;
        (attributes, mask)
    }
}

#[derive(Debug)]
struct Handle {
    raw: NonNull<ffi::QueuePair>,
    domain: Arc<ProtectionDomain>,
    completions: Arc<CompletionQueue>,
    receives: Arc<SharedReceiveHandle>,
}

// SAFETY: libibverbs is thread-safe by its specification.
unsafe impl Send for Handle {}

impl Handle {
    /// Destroys the pair; returns whether the device did so.
    fn destroy(&mut self) -> bool {
        // SAFETY: the pair is live, and the caller calls this once; its asynchronous events were acknowledged
        // when they were taken.
        let code = unsafe { (self.domain.device.library.destroy_queue_pair)(self.raw.as_ptr()) };
        if code != 0 {
            let device = self.domain.device.name();
            tracing::error!(device, error = %from_code(code), "ibv_destroy_qp: the pair is leaked");
        }
        code == 0
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.destroy() {
            // The device may go on using these objects: memory that a live pair names is never freed.
            std::mem::forget((Arc::clone(&self.completions), Arc::clone(&self.receives)));
            std::mem::forget(Arc::clone(&self.domain));
        }
    }
}

/// Result of stopping a pair.
#[derive(Debug)]
pub enum Stopped {
    /// The pair is in its error state: the device completes all work as flushed.
    Failed(QueuePair<Failed>),
    /// The pair could not be moved to its error state and was destroyed instead.
    Destroyed(VerbsError),
    /// The device refused both: the pair stays live, and its peer may still read and write the memory it
    /// had access to. The memory that its requests name must be leaked.
    Leaked(VerbsError),
}

/// A queue pair in `State`.
#[derive(Debug)]
pub struct QueuePair<State> {
    handle: Handle,
    number: u32,
    capacity: Capacity,
    state: PhantomData<State>,
}

impl<State> QueuePair<State> {
    /// Queue pair number on the wire.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Sizes of the pair, at least the ones asked for.
    #[must_use]
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    pub(crate) fn raw(&self) -> *mut ffi::QueuePair {
        self.handle.raw.as_ptr()
    }

    pub(crate) fn domain(&self) -> &ProtectionDomain {
        &self.handle.domain
    }

    fn in_state<Next>(self) -> QueuePair<Next> {
        let Self { handle, number, capacity, .. } = self;
        QueuePair { handle, number, capacity, state: PhantomData }
    }

    fn modify(
        &self,
        mut attributes: ffi::QueuePairAttributes,
        mask: u32,
        verb: &'static str,
        object: impl FnOnce() -> String,
    ) -> Result<(), VerbsError> {
        let device = &self.handle.domain.device;
        // SAFETY: the pair is live; the struct is complete and the mask names fields that were set.
        let code =
            unsafe { (device.library.modify_queue_pair)(self.raw(), &raw mut attributes, mask as i32) };
        if code != 0 {
            return Err(device.failed(verb, object(), from_code(code)));
        }
        Ok(())
    }

    /// Moves the pair to its error state: work in flight completes as flushed, and the peer can no longer
    /// access local memory. A pair that cannot be moved is destroyed.
    pub fn fail(self) -> Stopped {
        let attributes = ffi::QueuePairAttributes { state: ffi::QPS_ERR, ..Default::default() };
        let Err(error) = self.modify(attributes, ffi::QP_STATE, "ibv_modify_qp(ERR)", String::new) else {
            return Stopped::Failed(self.in_state());
        };
        if self.destroy() { Stopped::Destroyed(error) } else { Stopped::Leaked(error) }
    }

    /// Destroys the pair; returns whether the device did so. If not, the device may go on using the memory
    /// that its requests name, and the caller must leak that memory.
    pub fn destroy(self) -> bool {
        let mut handle = std::mem::ManuallyDrop::new(self.handle);
        let is_gone = handle.destroy();
        if is_gone {
            // SAFETY: the fields are dropped once, here: the handle itself is never dropped.
            unsafe { std::ptr::drop_in_place(&raw mut handle.domain) };
            // SAFETY: as above.
            unsafe { std::ptr::drop_in_place(&raw mut handle.completions) };
            // SAFETY: as above.
            unsafe { std::ptr::drop_in_place(&raw mut handle.receives) };
        }
        is_gone
    }
}

impl QueuePair<Reset> {
    /// Creates a pair whose sends and receives complete in `completions` and whose receives come from `receives`.
    pub fn new(
        domain: &Arc<ProtectionDomain>,
        completions: &Arc<CompletionQueue>,
        receives: &SharedReceiveQueue,
        capacity: Capacity,
    ) -> Result<Self, VerbsError> {
        Self::with_receive_handle(domain, completions, &receives.handle, capacity)
    }

    /// [`Self::new`] for a thread other than the one that drives the receives.
    pub(crate) fn with_receive_handle(
        domain: &Arc<ProtectionDomain>,
        completions: &Arc<CompletionQueue>,
        receives: &Arc<SharedReceiveHandle>,
        capacity: Capacity,
    ) -> Result<Self, VerbsError> {
        let mut init = ffi::QueuePairInit {
            user: std::ptr::null_mut(),
            send_completions: completions.raw.as_ptr(),
            receive_completions: completions.raw.as_ptr(),
            shared_receives: receives.raw.as_ptr(),
            capacity: ffi::QueuePairCapacity {
                send_requests: capacity.send_requests,
                receive_requests: 0,
                send_entries: capacity.entries,
                receive_entries: 0,
                inline_bytes: capacity.inline_bytes,
            },
            kind: ffi::QPT_RC,
            signal_all: 0,
        };
        let device = &domain.device;
        // SAFETY: domain, queue and shared receives are live and kept by the pair.
        let raw = unsafe { (device.library.create_queue_pair)(domain.raw.as_ptr(), &raw mut init) };
        let Some(raw) = NonNull::new(raw) else {
            let error = std::io::Error::last_os_error();
            let Capacity { send_requests, entries, inline_bytes } = capacity;
            let object =
                format!(" for {send_requests} sends of {entries} entries, {inline_bytes} bytes inline");
            return Err(device.failed("ibv_create_qp", object, error));
        };
        // SAFETY: the library returned a live pair, whose number does not change.
        let number = unsafe { (*raw.as_ptr()).number };
        let capacity = Capacity {
            send_requests: init.capacity.send_requests.max(capacity.send_requests),
            entries: init.capacity.send_entries.max(1),
            inline_bytes: init.capacity.inline_bytes,
        };
        let handle = Handle {
            raw,
            domain: Arc::clone(domain),
            completions: Arc::clone(completions),
            receives: Arc::clone(receives),
        };
        Ok(Self { handle, number, capacity, state: PhantomData })
    }

    /// Binds the pair to a port and to a row of the port's partition key table. The peer's access is
    /// limited by `access` and by the registered regions.
    pub fn initialise(
        self,
        port: u8,
        partition_key_index: u16,
        access: PeerAccess,
    ) -> Result<QueuePair<Initialised>, VerbsError> {
        let attributes = ffi::QueuePairAttributes {
            state: ffi::QPS_INIT,
            port,
            partition_key_index,
            access: ffi::ACCESS_LOCAL_WRITE | remote_flags(access),
            ..Default::default()
        };
        let mask = ffi::QP_STATE | ffi::QP_PKEY_INDEX | ffi::QP_PORT | ffi::QP_ACCESS_FLAGS;
        self.modify(attributes, mask, "ibv_modify_qp(INIT)", || format!(" port {port}"))?;
        Ok(self.in_state())
    }
}

impl QueuePair<Initialised> {
    /// Moves the pair to RTR and RTS. A pair for which a step fails is stopped, because the peer may have
    /// sent to it already.
    pub(crate) fn connect(
        self,
        path: &Path,
        retries: &Retries,
        peer: &dyn std::fmt::Display,
    ) -> Result<QueuePair<ReadyToSend>, Box<(VerbsError, Stopped)>> {
        let steps = [(path.attributes(), "ibv_modify_qp(RTR)"), (retries.attributes(), "ibv_modify_qp(RTS)")];
        for ((attributes, mask), verb) in steps {
            if let Err(error) = self.modify(attributes, mask, verb, || format!(" to {peer}")) {
                return Err(Box::new((error, self.fail())));
            }
        }
        Ok(self.in_state())
    }
}
