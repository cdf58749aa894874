//! The tiers behind a worker's pool. First form: host memory.
//!
//! [`HostStore`] keeps blocks that the pool evicts (*offload*) and brings them back when a prompt's prefix is
//! found there (*onboard*). The catalog can be asked by any thread; the copies run on a thread of the store,
//! so an eviction costs the engine one queue operation.
//!
//! Invariants: a block is served only after its checksum was verified, and only under the identity that it
//! was stored with; a full queue drops an offload (`Throttled`), it never blocks; memory is the slab that was
//! made at start-up, nothing more.

#![forbid(unsafe_code)]

mod host;
mod metrics;

pub use host::{HostStore, Moved, Offload, Throttled};
pub use metrics::StoreCounters;
