//! Catalog of blocks: the slot of each block in each tier, the leases on it, and the order of eviction.
//!
//! [`Catalog`] is shared by all threads. The life of a block, as types: [`Reserved`] (a free slot, owned by
//! the caller) → [`Filling`] → [`Complete`] (checksum known) → registered (look-ups find it, readers hold a
//! [`Lease`]) → [`Evicting`] (gone from look-up, bytes still there) → free. No state is skipped, and dropping
//! a value returns its slot or puts the block back.
//!
//! Invariants: look-up, match and lease take no lock and allocate nothing; a leased block is never evicted
//! and its slot never reused; an identity is registered in at most one slot of a tier; a block with a
//! registered child in its tier is not evicted before it, in whatever order they were registered (chains stay
//! whole from the root); every structure is sized at construction and nothing grows. The catalog sees no
//! bytes: it knows slot numbers only.
//!
//! Changes take one short lock per tier. The order of the files is that of reading: `record` is the protocol
//! between readers and evictor, `index` the lock-free map, `tier` the state that the lock protects, `policy`
//! the order of eviction. [`PoolCatalog`] is the older, single-threaded relative over `SlotRef`.

#![forbid(unsafe_code)]

mod config;
mod error;
mod sync;

// The lock-free protocol, which the model check reaches from outside.
#[cfg(not(loom))]
#[expect(unreachable_pub, reason = "the same items are public to the model check")]
mod index;
#[cfg(not(loom))]
#[expect(unreachable_pub, reason = "the same items are public to the model check")]
mod record;
#[cfg(not(loom))]
#[expect(unreachable_pub, reason = "the same items are public to the model check")]
mod returns;

#[cfg(loom)]
pub mod index;
#[cfg(loom)]
pub mod record;
#[cfg(loom)]
pub mod returns;

mod catalog;
mod census;
mod changes;
mod check;
mod lease;
mod list;
mod lookup;
mod orphans;
mod policy;
mod pool;
mod sketch;
mod states;
mod tenants;
mod tier;

pub use catalog::{BlockSlots, Catalog, Outcome, Registration, TierUsage};
pub use census::Census;
pub use config::{
    CatalogConfig, PolicyKind, SlotOrder, TIERS_MAX, TenantId, TenantQuota, TierConfig, TierIndex,
};
pub use error::CatalogError;
pub use lease::Lease;
pub use pool::{IdentityHasher, PoolCatalog, PoolRegistered};
pub use sketch::FrequencySketch;
pub use states::{Complete, Evicted, Evicting, Filling, Registered, Reserved};
pub use tier::Contents;
