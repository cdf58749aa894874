//! Shared memory as a fabric: one copy, straight from our slot into the peer's or back.
//!
//! Peers meet at a Unix socket (a path, or `@name` in the abstract namespace, which leaves no file) and hand each
//! other four descriptors: the slab, the rings that the peer writes messages and immediates into (one for each
//! priority), the doorbell word and the eventfd. From then on a write or read is a `memcpy` with the attached
//! slab, a message is a record in a ring, and the socket only tells when the other process is gone.
//!
//! Per operation: no allocation for writes and reads, one for a received message; no lock; no system call unless
//! the peer sleeps (one for a flush). A `poll` that finds nothing looks at the sockets (one `epoll_wait`) every 64th time.
//!
//! Who may be a peer: processes that prove that they hold our secret (`dataplane_fabric::handshake`), of the same effective
//! user unless the configuration admits others. With `PeerAccess::None` a peer gets an empty slab; else it maps
//! our slab writable, so it can overwrite every byte there and the doorbell word; what it cannot do is make
//! us fault (the memory is sealed against shrinking), read past a ring (headers are copied once, then checked)
//! or allocate without bound. A false doorbell word costs at most a late wake-up: at the end of the sleep
//! that the thread has chosen ([`dataplane_fabric::wait::SLEEP_MAX`]).
//!
//! A peer that is stopped, not dead: its socket stays open and it may resume in the middle of a copy. When its
//! connection is ended from here (disconnect, protocol error), it keeps its place in the table and its
//! `PeerDown` is withheld until its socket closes, for ever if need be: the slots it was told of stay in
//! quarantine and count against the pool, and one of `connections_max` places is taken. Only its death
//! (SIGKILL works on a stopped process) or its resumption frees them. Requests to it are refused at once.
//!
//! A process that dies is gone from our memory before its socket closes (the kernel ends all threads and their
//! address space first), unless it forked without exec: the child then keeps socket and mapping alive.

#[cfg(not(loom))]
mod address;
#[cfg(not(loom))]
mod config;
#[cfg(not(loom))]
mod connection;
#[cfg(not(loom))]
mod doorbell;
#[cfg(not(loom))]
mod error;
#[cfg(not(loom))]
mod fabric;
#[cfg(not(loom))]
mod greeting;
#[cfg(not(loom))]
mod hello;
#[cfg(not(loom))]
mod metrics;
#[cfg(not(loom))]
mod peer;
#[cfg(not(loom))]
mod poll;
#[cfg(not(loom))]
mod ring;
#[cfg(not(loom))]
mod table;
#[doc(hidden)]
pub mod word;

#[cfg(not(loom))]
pub use address::remove_stale;
#[cfg(not(loom))]
pub use config::ShmConfig;
#[cfg(not(loom))]
pub use error::ShmError;
#[cfg(not(loom))]
pub use fabric::ShmFabric;
#[cfg(not(loom))]
pub use metrics::ShmCounters;
