//! The C interface of the store: `libkvasir_kv`, declared in `include/kvasir_kv.h`.
//!
//! In reading order: [`backend`] is the interface of a store; `buffers` are ranges of C's memory; `operation`
//! is a request of one block; `tensors` are an engine's paged tensors, `registry` has the registered ones, and
//! `transfer` moves blocks between them and the store, in pieces; `queue` runs all of that on its own threads,
//! because an engine's loop must not block; `handles` finds the store of a handle; `config` reads a
//! configuration, `memory` reads the memory limit, and `compose` builds a store; `store` is the product's store
//! as a [`Backend`], with `held` for blocks that are read, `format` for a block in its slot and `key_locks` for
//! changes of one block; `fetch` loads blocks from other nodes; `events` reports blocks that the tiers gain and
//! lose; `device` is for tensors in CUDA memory; `handoff` sends blocks of tensors to another process and
//! receives them; `interface` has the functions that C calls, with plans, which are the store's own, in its
//! `plan`; and `layout` asserts the layout of the types shared with C. [`testing`] opens a store over a double
//! of the driver.
//!
//! Invariants: no panic crosses into C (a library that was not built with `panic = "unwind"`, as profile `capi`
//! does, opens no store); a null pointer, an unknown handle and a wrong size are errors, never accesses; a
//! handle is a number that is never used again, so a closed handle is an unknown one; memory of a submitted
//! request is not accessed after its completion was polled or `kvasir_kv_close` returned, and that of
//! registered tensors not after `kvasir_kv_unregister` returned.
//!
//! Threads: every function may be called from any thread. Polling takes one lock. The store has a thread that
//! copies blocks and one that drives the disk; a device has one for saves and one for loads, and with hand-offs
//! one for pushes and one for arrivals. `get` and `put` send them a request and wait (a few small allocations
//! each). A `get` verifies and copies a block through a buffer in the L1 cache; a `put` copies it into the
//! library's memory and from there into its slot.

pub mod backend;
pub mod buffers;
pub mod testing;

mod compose;
mod config;
mod device;
mod events;
mod fetch;
mod format;
mod handles;
mod handoff;
mod held;
mod interface;
mod key_locks;
mod layout;
mod lock;
mod memory;
mod nodes;
mod operation;
mod queue;
mod registry;
mod status;
mod store;
mod tensors;
mod transfer;

#[cfg(test)]
mod header;
#[cfg(test)]
mod tests;

pub use backend::{Backend, BackendError, GetOutcome, Identity, PutOutcome, Statistics};
pub use events::Event;
pub use format::META_BYTES_MAX;
pub use handoff::{
    Ending, HandOffStatistics, RAIL_NAME_BYTES, RailStatistics, STAGE_NAME_BYTES, StageStatistics,
};
pub use interface::*;
pub use nodes::{NODE_NAME_BYTES, NodeStatistics};
pub use queue::Completion;
pub use status::Status;
pub use tensors::{Plane, Tensors};
