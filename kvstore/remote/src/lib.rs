//! Another node's host memory as a tier of KV blocks, over the data plane.
//!
//! * [`PoolServer`] serves blocks in the slots of one slab ([`PoolBlocks`]): it tells clients where blocks lie,
//!   for as long as they hold a lease, grants slots to write into, and registers the written blocks once their
//!   checksum is right. [`PoolService`] runs a server on a thread.
//! * [`RemotePool`] is a client of many such nodes: it computes the node of a block without a directory
//!   (rendezvous hashing), asks all nodes of a chain at once, reads one-sidedly into slots of its own slab and
//!   verifies every block before it counts. A node's memory that is mapped here is read in place, and verified
//!   by the reader.
//!
//! Invariants:
//! 1. A block counts only after the checksum of the bytes here, with its identity in it, was right. Errors of
//!    the wire, a stale lease or a misbehaving peer cause a miss at worst.
//! 2. A slot whose position a peer was given is not reused until the peer gave it back (release, commit) or its
//!    connection has ended. An expired lease therefore ends the connection first (see `server::leases`).
//! 3. A dead or slow node costs at most the deadlines, and only the operations that asked it.
//! 4. Every table has a capacity; time and randomness are arguments. One thread drives each side.
//!
//! This crate knows blocks and where they live, and nothing of models, requests or HTTP.

#![forbid(unsafe_code)]

mod breaker;
mod checksum;
mod client;
mod config;
mod error;
mod metrics;
mod placement;
mod server;
mod service;
mod sketch;
mod wire;

pub use breaker::BreakerState;
pub use checksum::{checksum, with_identity};
pub use client::{
    MappedBlock, MappedGroup, Outcome, PoolLease, PoolNode, Refusal, RefusedFetch, RemotePool, StoreBlock,
    StoreResult, Ticket, Verified,
};
pub use config::{PoolConfig, RemoteConfig};
pub use error::RemoteError;
pub use metrics::{NodeCounters, PoolCounters, RemoteCounters};
pub use placement::{NodeId, Placement, group_of};
pub use server::{Answer, LookUpResult, PoolBlocks, PoolLevels, PoolServer, Readable, Writable};
pub use service::PoolService;
pub use wire::{BLOCKS_PER_MESSAGE_MAX, Description};

/// For fuzzing: decodes bytes as both sides do. Every message that decodes must encode to the same bytes.
#[doc(hidden)]
pub fn fuzz_wire(bytes: &[u8]) {
    wire::fuzz(bytes);
}
