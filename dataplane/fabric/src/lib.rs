//! The transport interface of the data plane.
//!
//! A [`Fabric`] is one transport as seen by one node: it connects to peers, takes [`WorkRequest`]s and
//! returns [`Event`]s. The model is that of RDMA verbs (one-sided writes into a peer's slots, an immediate
//! with the last of them, small two-sided messages): every slower transport can emulate it, while the fast
//! one need not emulate a slower one.
//!
//! Contract of every implementation:
//! 1. Messages and immediates posted to one peer with one [`Priority`] are delivered in the order of posting,
//!    each only when all writes posted before it have landed. Nothing else is ordered: a write may land before a
//!    message posted earlier, a read sees the peer's memory at some moment between its posting and its
//!    completion. (The simulated fabric can be configured to break even this.)
//! 2. `post` never blocks. [`Full`] hands the request back: a queue is full, the peer is gone, or the fabric has copied its limit
//!    of bytes since the last `poll`. No event reports that there is room again: post again after the next `poll`.
//! 3. Each accepted request with a nonzero id yields exactly one `Completed`, at the latest when its peer
//!    disconnects. Until then the fabric holds the request's slot reference. `Done` means for a write that
//!    its bytes have landed, for a read that they have arrived here, for a message that the peer's fabric has
//!    it.
//! 4. A write or read with a stale generation, or with bytes outside the slabs that are shown, changes
//!    nothing and ends the connection. NICs and copy engines do not check generations: a fabric for which
//!    [`Fabric::checks_generations`] is false checks the range only, and its users keep every slot whose name
//!    a peer was given until the peer has acknowledged or its connection has ended.
//! 5. A node shows its peers at most one slab of each [`SlabKind`], and a slot is named by its slab's kind and its number
//!    ([`Target`]). A request that a fabric cannot carry out ([`Fabric::reaches`]) takes the connection down, as in clause 4.
//! 6. One thread drives a fabric; `poll` takes a budget and returns at once.
//! 7. A connection between processes is reported once both sides have proved that they hold the same secret ([`auth`], [`handshake`]). What
//!    peers may do with the slabs is [`PeerAccess`].

pub mod auth;
pub mod cores;
pub mod faults;
pub mod handshake;
mod request;
#[cfg(any(test, feature = "simulation"))]
pub mod sim;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod wait;

pub use request::{
    Completion, ConnectError, Event, Full, HOST_MEMORY_ONLY, INLINE_BYTES_MAX, MESSAGE_BYTES_MAX, Operation,
    PeerId, Priority, Rows, SlotRange, Source, Target, WorkRequest,
};

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use dataplane_memory::{Slab, SlabKind};

/// Access of peers to the slots of the slabs that a fabric shows.
///
/// TCP and RDMA enforce it. Through shared memory, of a host or of devices, a peer can access the whole slab:
/// [`PeerAccess::None`] hides the slab, and the other two do not differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PeerAccess {
    /// No access: the slab is not shown.
    None,
    /// Write only. Reading would also reveal the bytes that a slot held before its name was given to the
    /// peer.
    Write,
    /// Write and read.
    #[default]
    ReadWrite,
}

impl PeerAccess {
    /// Whether peers may write, and therefore get the slab.
    #[must_use]
    pub fn allows_writes(self) -> bool {
        self != Self::None
    }

    /// Whether peers may read.
    #[must_use]
    pub fn allows_reads(self) -> bool {
        self == Self::ReadWrite
    }
}

/// A transport, driven by one thread.
pub trait Fabric {
    /// Short name for logs and metrics: `shm`, `cuda_ipc`, `tcp`, `rdma`, `sim`.
    fn name(&self) -> &'static str;

    /// Whether the target refuses writes and reads with a stale generation (clause 4).
    fn checks_generations(&self) -> bool {
        true
    }

    /// Returns the slab of this kind that peers write into and read from; `None` when there is none. Only
    /// slots of these slabs may be named to peers. Called for each slot list that is to be named, not for
    /// each block.
    fn shown_slab(&self, kind: SlabKind) -> Option<Arc<Slab>>;

    /// Whether this node shows this slab to its peers.
    fn shows_slab(&self, slab: &Arc<Slab>) -> bool {
        self.shown_slab(slab.kind()).is_some_and(|shown| Arc::ptr_eq(&shown, slab))
    }

    /// Whether slots of this local slab may be sources of writes and destinations of reads. Called for each
    /// push and each expectation, not for each block.
    fn carries(&self, slab: &Arc<Slab>) -> bool;

    /// Whether the peer can write into this node's slab of this kind over its current connections.
    fn is_shown_to(&self, _peer: PeerId, kind: SlabKind) -> bool {
        self.shown_slab(kind).is_some()
    }

    /// Whether the peer shows a slab of this kind to this node over its current connections. True over host
    /// shared memory and TCP even if the peer shows none: a request that names a slot of it then ends the
    /// connection.
    fn peer_shows(&self, peer: PeerId, kind: SlabKind) -> bool;

    /// Returns the peer's slab of host memory if it is mapped into this process: slots that the peer keeps
    /// can then be read in place. `None` when the transport moves bytes.
    fn mapped_slab(&self, _peer: PeerId) -> Option<Arc<Slab>> {
        None
    }

    /// Whether bytes can be moved between slots of `here` (`None`: bytes of the request itself) and the
    /// peer's slab of kind `there` over one of the current connections.
    fn reaches(&self, peer: PeerId, here: Option<&Arc<Slab>>, there: SlabKind) -> bool {
        self.peer_shows(peer, there) && here.is_none_or(|slab| self.carries(slab))
    }

    /// Returns the size of the largest message, in bytes.
    fn message_bytes_max(&self) -> usize {
        MESSAGE_BYTES_MAX
    }

    /// Starts a connection to `address`, which is in the transport's own notation, and returns at once. An
    /// [`Event::Connected`] or [`Event::PeerDown`] with this id follows.
    fn connect(&mut self, address: &str) -> Result<PeerId, ConnectError>;

    /// Queues one request. Call [`Fabric::flush`] after a batch.
    fn post(&mut self, request: WorkRequest) -> Result<(), Full>;

    /// Submits all requests that were posted since the last call.
    fn flush(&mut self);

    /// Moves about `budget` events at most into `events` and returns their number.
    fn poll(&mut self, budget: usize, events: &mut Vec<Event>) -> usize;

    /// Ends the connection. After the return, this node writes nothing more at the peer. The end is reported
    /// to the peer, requests in flight complete, and an [`Event::PeerDown`] follows once the peer cannot
    /// write either. Slots whose names the peer was given may be reused only after that event.
    fn disconnect(&mut self, peer: PeerId);

    /// Appends the descriptors that become readable when `poll` has work. They may change after any call.
    fn wait_descriptors<'a>(&'a self, descriptors: &mut Vec<BorrowedFd<'a>>);

    /// Prepares for a sleep on the descriptors. Returns false when there is work already.
    fn prepare_wait(&mut self) -> bool {
        true
    }

    /// Returns the latest time of the next `poll` if no descriptor becomes readable before: for a retry or a
    /// timeout.
    fn next_deadline(&self) -> Option<Instant> {
        None
    }
}

impl<F: Fabric + ?Sized> Fabric for Box<F> {
    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn checks_generations(&self) -> bool {
        (**self).checks_generations()
    }

    fn shown_slab(&self, kind: SlabKind) -> Option<Arc<Slab>> {
        (**self).shown_slab(kind)
    }

    fn carries(&self, slab: &Arc<Slab>) -> bool {
        (**self).carries(slab)
    }

    fn is_shown_to(&self, peer: PeerId, kind: SlabKind) -> bool {
        (**self).is_shown_to(peer, kind)
    }

    fn peer_shows(&self, peer: PeerId, kind: SlabKind) -> bool {
        (**self).peer_shows(peer, kind)
    }

    fn mapped_slab(&self, peer: PeerId) -> Option<Arc<Slab>> {
        (**self).mapped_slab(peer)
    }

    fn reaches(&self, peer: PeerId, here: Option<&Arc<Slab>>, there: SlabKind) -> bool {
        (**self).reaches(peer, here, there)
    }

    fn message_bytes_max(&self) -> usize {
        (**self).message_bytes_max()
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, ConnectError> {
        (**self).connect(address)
    }

    fn post(&mut self, request: WorkRequest) -> Result<(), Full> {
        (**self).post(request)
    }

    fn flush(&mut self) {
        (**self).flush();
    }

    fn poll(&mut self, budget: usize, events: &mut Vec<Event>) -> usize {
        (**self).poll(budget, events)
    }

    fn disconnect(&mut self, peer: PeerId) {
        (**self).disconnect(peer);
    }

    fn wait_descriptors<'a>(&'a self, descriptors: &mut Vec<BorrowedFd<'a>>) {
        (**self).wait_descriptors(descriptors);
    }

    fn prepare_wait(&mut self) -> bool {
        (**self).prepare_wait()
    }

    fn next_deadline(&self) -> Option<Instant> {
        (**self).next_deadline()
    }
}
