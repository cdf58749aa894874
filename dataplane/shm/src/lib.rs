//! Fabric over shared memory: one copy, directly between a local slot and the peer's.
//!
//! Peers connect at a Unix socket (a path, or `@name` in the abstract namespace, which leaves no file) and
//! exchange four descriptors: the slab, the rings that the peer writes messages and immediates into (one
//! for each priority), the doorbell word and the eventfd. From then on a write or read is a `memcpy` with
//! the attached slab, a message is a record in a ring, and the socket only reports the end of the other
//! process.
//!
//! Per operation: no allocation for writes and reads, one for a received message; no lock; no system call
//! unless the peer sleeps (one for a flush). `poll` checks the sockets (one `epoll_wait`) after a sleep and
//! every 64th time.
//!
//! Peers are processes that prove knowledge of the shared secret (`dataplane_fabric::handshake`), of the
//! same effective user unless the configuration admits others. With `PeerAccess::None` a peer gets an empty
//! slab; otherwise it maps the node's slab writable, so it can overwrite every byte there and the doorbell
//! word. It cannot make the node fault (the memory is sealed against shrinking), read past a ring (headers
//! are copied once, then checked) or allocate without bound. A false doorbell word costs at most a late
//! wake-up: at the end of the sleep that the thread has chosen ([`dataplane_fabric::wait::SLEEP_MAX`]).
//!
//! A peer may be stopped without being dead: its socket stays open and it may resume in the middle of a
//! copy. When this node ends its connection (disconnect, protocol error), the peer keeps its place in the
//! table and its `PeerDown` is withheld until its socket closes, without a time limit: the slots that it
//! was told of stay in quarantine and count against the pool, and one of `connections_max` places is taken.
//! Only its death (SIGKILL works on a stopped process) or its resumption frees them. Requests to it are
//! refused at once.
//!
//! A process that dies has lost access to this node's memory before its socket closes (the kernel ends all
//! threads and their address space first), unless it forked without exec: the child then keeps socket and
//! mapping alive.

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
