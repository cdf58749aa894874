//! The tiers behind a worker's pool: host memory, a local disk, and the tiers of other nodes.
//!
//! [`Store`] keeps blocks that a worker has computed (*offload*) and brings them back when a prompt's prefix is found
//! (*onboard*), if that is faster than computing them again ([`Plan`]). Host memory is the hub: blocks of every slower
//! tier pass through it, on their way in and out, and it is the only tier that the store's own thread copies to and
//! from; the disk and the tiers of other nodes have threads of their own.
//!
//! The states of a block. Each tier has its own copy, in a slot whose state is a type of `kvstore-catalog`; a
//! transfer between two tiers is a guard of both slots, which travels with the command and comes back with
//! its result:
//!
//! ```text
//!                 slot reserved            summed and registered
//!  HOST  absent ────────────────▶ filling ───────────────────────▶ resident ◀──────────────────────────┐
//!          ▲     free, or by evicting │                             │  │  │                            │
//!          │                          │ not filled, damaged,        │  │  └▶ queued to be written      │
//!          ◀──────────────────────────┘ forgotten meanwhile         │  │     (disk::WriteBacklog)      │
//!          │                                                        │  │        │ write-through        │
//!          ◀──── evicted, forgotten, damaged (waits for leases) ────┘  │        ▼                      │
//!          │                                              write-back   │   being written, stays ───────┤
//!          │                                                           ▼   (disk::InFlightWrites)      │
//!          ◀──── written, or failed ─────────────────────── being written, leaves ── a child was ──────┘
//!                                                           (nobody finds it)        put back
//!
//!  DISK  absent ──▶ filling (being written) ── written, still wanted ──▶ on disk ── read ──▶ HOST filling
//!          ▲              │ failed, or forgotten                            │       (disk::InFlightReads)
//!          └── tombstone ─┴───────── evicted, forgotten, damaged ───────────┘
//!              (disk::DiskSlots)
//! ```
//!
//! A block that a request wants retained (`tiers::retained`) is not evicted from the disk, or from host
//! memory without one, before its time. A new block, a read of the disk and a read of another node are the
//! three ways into *filling*; a slot that another node may still write (`far::LentSlot`) stays there until it
//! cannot. The device may answer late or never: an operation that is stuck keeps its slots. A write-through
//! block whose write fails is written again while it is in host memory (`disk::FailedWrites`); a write-back
//! block whose write fails is lost. Blocks of pools on this host may be read in place, without a slot here
//! (`tiers::mapped`). Each round the thread compares the guards that are out with its tables
//! (`guarded_count`), and `model` runs these states through millions of random steps.
//!
//! A block's checksum is taken once, of the bytes that its caller gives, and goes with it to the disk and to
//! other nodes; objects alone have another. Every reader of a block compares the bytes with it, on the way of
//! the copy. A block that is damaged in host memory is read from the disk again, where the log compares it
//! first, and forgets it if it is damaged there.
//!
//! Invariants: a block is served only after its checksum was verified on its way out (a pool in a device's
//! memory cannot be read here: such a block is verified in host memory right before its copy, or in the
//! device's memory by the caller: [`Store::onboard_unverified`]), and only under the identity that it was
//! stored with; a full queue gives the job back ([`Throttled`]) and never blocks; memory is taken at the
//! start; a tier that does not answer costs a request its deadline at most, and no other request anything.
//! Look-ups take no lock; a plan takes one that is held for arithmetic only.

#![forbid(unsafe_code)]

mod background;
mod bandwidth;
mod builder;
mod config;
mod device;
mod disk;
mod error;
pub mod far;
mod fault_injection;
mod guarded_count;
mod held;
mod job;
mod load;
mod memory;
mod metrics;
#[cfg(test)]
mod model;
mod offload;
mod pages_ahead;
mod plan;
mod pool;
mod quota;
mod shared;
mod store;
mod store_thread;
mod tiers;

pub use builder::{DiskTier, HostTier, StoreBuilder};
pub use config::{RetentionConfig, StoreConfig, WriteMode};
pub use disk::{DiskEngine, DiskTierConfig, OpenDisk};
pub use error::StoreError;
pub use far::{
    Delivered, DeliveredSum, FetchRequest, OfferedBlock, ReturnedSlots, SecondaryTier, SecondaryTierEvent,
    SecondaryTierInbox,
};
pub use job::{
    Description, Medium, Offload, Onboard, Prepare, RecoveredBlock, RetentionRequest, StoreEvent, Throttled,
};
pub use kvstore_catalog::TenantId;
pub use memory::{BlockRead, HostBlock, NewSlot};
pub use metrics::StoreCounters;
pub use plan::{BandwidthLimit, ReturnConfig, Tier as BandwidthTier};
pub use pool::StorePool;
pub use shared::{LoadTimes, Plan, Prompt, PromptGroup, RemoteCoverage};
pub use store::Store;

/// Most bytes that a caller may keep with a block on the disk: the tokens of a block of 64 and some more.
pub const META_BYTES_MAX: usize = 400;

/// Most bytes of metadata that the disk's log must be able to keep with a block.
pub const DISK_META_BYTES_MAX: usize = META_BYTES_MAX + tiers::META_FIXED;
