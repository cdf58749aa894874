//! The tiers behind a worker's pool: host memory, a local disk, and whatever other nodes keep.
//!
//! [`Store`] keeps blocks that a worker has computed (*offload*) and brings them back when a prompt's prefix is found
//! (*onboard*), if that is faster than computing them again ([`Plan`]). Host memory is the hub: blocks of every slower
//! tier pass through it, on their way in and out, and it is the only tier that the store's own thread copies to and
//! from; the disk and the tiers of other nodes have threads of their own.
//!
//! Invariants: a block is served only after its checksum was verified where it arrived (a pool in a device's memory cannot
//! be read here: such a block is verified in host memory right before its copy, or there by whoever asked for it:
//! [`Store::onboard_unverified`]), and only under the identity that it was
//! stored with; a full queue gives the job back ([`Throttled`]) and never blocks; memory is taken at the start;
//! a tier that does not answer costs a request its deadline at most, and no other request anything. Look-ups take no
//! lock; a plan takes one that is held for arithmetic only.

#![forbid(unsafe_code)]

mod background;
mod bandwidth;
mod builder;
mod config;
mod device;
mod disk;
mod error;
pub mod far;
mod job;
mod load;
mod memory;
mod metrics;
mod mover;
mod offload;
mod quota;
mod shared;
mod store;
mod tiers;

pub use builder::{DiskTier, HostTier, StoreBuilder};
pub use config::{StoreConfig, WriteMode};
pub use disk::OpenDisk;
pub use error::StoreError;
pub use far::{Delivered, FarInbox, FarResult, FarTier, Incoming, Outgoing, ReturnedSlots};
pub use job::{Description, Medium, Moved, Offload, Onboard, Prepare, Survivor, Throttled};
pub use kvstore_catalog::TenantId;
pub use kvstore_plan::{BandwidthLimit, ReturnConfig, Tier as BandwidthTier};
pub use memory::{HostBlock, NewSlot};
pub use metrics::StoreCounters;
pub use shared::{LoadTimes, Plan, Prompt, PromptGroup};
pub use store::Store;

/// Most bytes that a caller may keep with a block on the disk: the tokens of a block of 64 and some more.
pub const META_BYTES_MAX: usize = 400;

/// What the disk's log must be able to keep with a block.
pub const DISK_META_BYTES_MAX: usize = META_BYTES_MAX + tiers::META_FIXED;
