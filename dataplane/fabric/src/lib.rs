//! The seam between what moves and how it moves.
//!
//! A [`Fabric`] is one transport seen from one node: it connects to peers, takes [`WorkRequest`]s and gives
//! [`Event`]s back. Its vocabulary is that of RDMA verbs (one-sided writes into a peer's slots, an immediate
//! with the last of them, small two-sided messages), because every slower transport can imitate it and the
//! fast one must not imitate a slower one.
//!
//! Contract of every implementation:
//! 1. Requests posted to one peer take effect there in the order of posting: a message or an immediate is
//!    delivered only when all earlier writes have landed. (The simulated fabric can be told to break this.)
//! 2. `post` never blocks. "Full" hands the request back.
//! 3. Each accepted request with a nonzero id yields exactly one `Completed`, at the latest when its peer
//!    goes down. Until then the fabric holds the request's slot reference.
//! 4. A write that names a stale generation, or bytes outside the registered slab, changes nothing at the
//!    target and takes the connection down.
//! 5. One thread drives a fabric; `poll` takes a budget and returns at once.

pub mod faults;
mod request;
pub mod set;
pub mod sim;
pub mod testing;

pub use request::{
    Completion, ConnectError, Event, Full, INLINE_BYTES_MAX, MESSAGE_BYTES_MAX, Operation, PeerId, Source,
    Target, WorkRequest,
};
pub use set::FabricSet;

use std::os::fd::BorrowedFd;

/// One transport, driven by one thread.
pub trait Fabric {
    /// Short name for logs and metrics: `shm`, `tcp`, `sim`.
    fn name(&self) -> &'static str;

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
}
