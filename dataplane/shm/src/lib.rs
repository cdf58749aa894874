//! Shared memory as a fabric: one copy, straight from our slot into the peer's.
//!
//! Peers meet at a Unix socket and hand each other three descriptors: the slab (attached by the peer), the
//! ring that the peer writes messages and immediates into, and the eventfd that wakes us. From then on a
//! write is a `memcpy` into the attached slab, a message is a record in the ring, and the socket only tells
//! when the other process is gone.
//!
//! Per operation: no allocation for writes, one for a received message; no lock; a system call only when the
//! peer sleeps (one eventfd write per flush). A futex instead of the eventfd would save a descriptor but
//! could not be waited for together with the sockets.

mod error;
mod fabric;
mod handshake;
mod ring;

pub use error::ShmError;
pub use fabric::{CONNECTIONS_MAX, ShmFabric};
