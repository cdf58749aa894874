//! The seam between what moves and how it moves.
//!
//! A [`Fabric`] is one transport seen from one node: it connects to peers, takes [`WorkRequest`]s and gives
//! [`Event`]s back. Its vocabulary is that of RDMA verbs (one-sided writes into a peer's slots, an immediate
//! with the last of them, small two-sided messages), because every slower transport can imitate it and the
//! fast one must not imitate a slower one.
//!
//! Contract of every implementation:
//! 1. Messages and immediates posted to one peer with one [`Priority`] are delivered in the order of posting,
//!    each only when all writes posted before it have landed. Nothing else is ordered: a write may land before a
//!    message posted earlier, a read sees the peer's memory at some moment between its posting and its
//!    completion. (The simulated fabric can be told to break even this.)
//! 2. `post` never blocks. [`Full`] hands the request back: a queue is full, the peer is gone, or the fabric has copied its limit
//!    of bytes since the last `poll`. No event reports that there is room again: post again after the next `poll`.
//! 3. Each accepted request with a nonzero id yields exactly one `Completed`, at the latest when its peer
//!    goes down. Until then the fabric holds the request's slot reference. `Done` says of a write that its bytes
//!    have landed, of a read that they are here, of a message that the peer's fabric has it.
//! 4. A write or read that names a stale generation, or bytes outside the slabs that are shown, changes nothing and
//!    takes the connection down. NICs and copy engines do not know generations: a fabric for which
//!    [`Fabric::checks_generations`] is false checks the range only, and its users keep every slot that a peer
//!    was told of until the peer has acknowledged or its connection has ended.
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

/// The access that peers have to the slots of the slabs that a fabric shows.
///
/// TCP and RDMA hold them to it. Through shared memory, of a host or of devices, a peer has the whole slab: [`PeerAccess::None`]
/// keeps it from them, the others do not differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PeerAccess {
    /// Nothing: they are not shown it.
    None,
    /// Write. One that may read could see what lay in a slot before it was told of it.
    Write,
    /// Write and read.
    #[default]
    ReadWrite,
}

impl PeerAccess {
    /// Whether they may write, and so are told of the slab.
    #[must_use]
    pub fn allows_writes(self) -> bool {
        self != Self::None
    }

    /// Whether they may read.
    #[must_use]
    pub fn allows_reads(self) -> bool {
        self == Self::ReadWrite
    }
}

/// One transport, driven by one thread.
pub trait Fabric {
    /// Short name for logs and metrics: `shm`, `cuda_ipc`, `tcp`, `rdma`, `sim`.
    fn name(&self) -> &'static str;

    /// Whether the target refuses names of slots that were reused since (clause 4).
    fn checks_generations(&self) -> bool {
        true
    }

    /// The slab of this kind that its peers write into and read from; `None` when there is none. Only slots of these may
    /// be named to peers. Asked for each slot list that is to be named, not for each block.
    fn shown_slab(&self, kind: SlabKind) -> Option<Arc<Slab>>;

    /// Whether this node shows its peers this very slab.
    fn shows_slab(&self, slab: &Arc<Slab>) -> bool {
        self.shown_slab(slab.kind()).is_some_and(|shown| Arc::ptr_eq(&shown, slab))
    }

    /// Whether the slots of this slab of this node may be sources of writes and destinations of reads. Asked for each push and
    /// each expectation, and not for each block.
    fn carries(&self, slab: &Arc<Slab>) -> bool;

    /// Whether this peer can write into the slab of this kind that this node shows, by the connections to it as they are now.
    fn is_shown_to(&self, _peer: PeerId, kind: SlabKind) -> bool {
        self.shown_slab(kind).is_some()
    }

    /// Whether this peer shows a slab of this kind to this node, by the connections to it as they are now. Over shared memory of a
    /// host and TCP it may be that it shows none: a request that names a slot of it then ends the connection.
    fn peer_shows(&self, peer: PeerId, kind: SlabKind) -> bool;

    /// This peer's slab of host memory, where it is mapped into this process: slots that the peer keeps can be read in place. `None` where the
    /// transport moves bytes.
    fn mapped_slab(&self, _peer: PeerId) -> Option<Arc<Slab>> {
        None
    }

    /// Whether bytes can be moved between the slots of `here` (`None`: from a request itself) and this peer's slab of the
    /// kind `there`, by one of the connections to it as they are now.
    fn reaches(&self, peer: PeerId, here: Option<&Arc<Slab>>, there: SlabKind) -> bool {
        self.peer_shows(peer, there) && here.is_none_or(|slab| self.carries(slab))
    }

    /// The largest message that it takes, in bytes.
    fn message_bytes_max(&self) -> usize {
        MESSAGE_BYTES_MAX
    }

    /// Starts a connection to `address` (the transport's own notation). Returns at once; a
    /// [`Event::Connected`] or [`Event::PeerDown`] with this id follows.
    fn connect(&mut self, address: &str) -> Result<PeerId, ConnectError>;

    /// Queues one request. Call [`Fabric::flush`] after a batch.
    fn post(&mut self, request: WorkRequest) -> Result<(), Full>;

    /// Rings the doorbell for everything that was posted since the last call.
    fn flush(&mut self);

    /// Moves at most about `budget` events into `events`; returns how many.
    fn poll(&mut self, budget: usize, events: &mut Vec<Event>) -> usize;

    /// Ends the connection. After the return nothing of ours is written at the peer any more. The peer learns
    /// of the end, requests in flight complete, and an [`Event::PeerDown`] follows once nothing can arrive
    /// from the peer either: only then may slots that it was told of be reused.
    fn disconnect(&mut self, peer: PeerId);

    /// Descriptors that become readable when `poll` would find something. May change after any call.
    fn wait_descriptors<'a>(&'a self, descriptors: &mut Vec<BorrowedFd<'a>>);

    /// Called before the thread sleeps on the descriptors. Returns false when there is already work.
    fn prepare_wait(&mut self) -> bool {
        true
    }

    /// When it wants to be polled at the latest, although nothing becomes readable: a retry, a timeout.
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
