//! Definition of a KV block: hashes, identity, layout and byte budgets.
//!
//! * [`block_hashes`] and [`chained_hash`]: 64-bit hashes for *routing*. A collision costs time, nothing else.
//! * [`IdentityChain`] and [`BlockIdentity`]: 128-bit keyed identity of *stored* KV. It decides what a user
//!   reads, so model, layout, tenant and every token before it are part of it.
//! * [`BlockLayout`]: bytes and strides of a block.
//! * [`TokenBucket`]: rate limit on bytes of blocks, used by all tiers.
//!
//! Hashing runs on the request path: it allocates only the result and makes no system call.

#![forbid(unsafe_code)]

mod bucket;
mod identity;
mod layout;
mod routing;

pub use bucket::TokenBucket;
pub use identity::{BlockIdentity, IdentityChain};
pub use layout::{BlockLayout, ElementType, LayoutError};
pub use routing::{
    HASH_SEED, Multimodal, PromptExtras, block_hash, block_hash_with_extras, block_hashes, chained_hash,
};

/// A token id, as every engine writes it.
pub type TokenId = u32;
