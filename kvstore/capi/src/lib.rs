//! The C interface of the store: `libkvasir_kv`, declared in `include/kvasir_kv.h`.
//!
//! In reading order: [`backend`] is what a store does; `buffers` carries C's memory there and back; `operation` is
//! a request of one block; `tensors` are an engine's paged tensors, `registry` has those that are registered, and
//! `transfer` moves blocks between them and the store, in pieces; `queue` runs all of that on threads of its own,
//! because an engine's loop must not block; `handles` finds the store of a handle; `config` reads a configuration,
//! `memory` tells what there is for it, and `compose` makes a store; `store` is the product's store as a
//! [`Backend`], with `held` for blocks that are read, `format` for a block in its slot and `turns` for changes of
//! one block; `fetch` brings blocks from other nodes; `events` tells what the tiers gain and lose; `device` is the way to tensors in
//! CUDA memory; `handoff` sends blocks of tensors to another process and receives them; `interface` has the functions that C calls,
//! with plans, which are the store's own, in its `plan`; and `layout` asserts how what they share with C lies in memory. [`testing`] opens a store over a double of the
//! driver.
//!
//! Invariants: no panic crosses into C (a library that was not built with `panic = "unwind"`, as profile `capi`
//! does, opens nothing); a null pointer, an unknown handle and a wrong size are errors, never accesses; a handle is
//! a number that is never used again, so one that was closed is an unknown one; memory of a submitted request is
//! not touched after its completion was polled or `kvasir_kv_close` returned, and that of registered tensors not
//! after `kvasir_kv_unregister` returned.
//!
//! Threads: every function may be called from any thread. Polling takes one lock. The store has a thread that
//! copies blocks and one that drives the disk; a device has one for saves and one for loads, and with hand-offs one for
//! pushes and one for arrivals; `get` and `put`
//! hand them a request and wait (a few small allocations each). A `get` verifies and copies a block through a
//! buffer in the L1 cache; a `put` copies it into memory of the library's and from there into its slot.

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
mod turns;

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
