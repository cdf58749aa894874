//! The C interface of the store: `libkvasir_kv`, declared in `include/kvasir_kv.h`.
//!
//! In reading order: [`backend`] is what a store does; `buffers` carries C's memory there and back; `queue` runs
//! submitted requests on threads of its own, because an engine's loop must not block; `handles` finds the store of a
//! handle; `compose` makes a store from a configuration; `interface` has the functions that C calls; [`memory`] is a
//! store for tests.
//!
//! Invariants: no panic crosses into C (the library must be built with `panic = "unwind"`, profile `capi`); a null
//! pointer, an unknown handle and a wrong size are errors, never accesses; a handle is a number that is never used
//! again, so one that was closed is an unknown one; memory of a submitted request is not touched after its completion
//! was polled or `kvasir_kv_close` returned.
//!
//! Threads: every function may be called from any thread. Polling takes one lock; `get` and `put` allocate nothing
//! here for up to [`buffers::INLINE_BUFFERS`] buffers and copy each byte once.

pub mod backend;
pub mod buffers;
pub mod memory;

mod compose;
mod handles;
mod interface;
mod queue;
mod status;

pub use backend::{Backend, BackendError, Identity, PutOutcome, Statistics};
pub use interface::*;
pub use status::Status;
