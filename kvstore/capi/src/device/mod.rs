//! Tensors in CUDA memory: blocks go through a staging slot of the device on their way to the store and back.
//!
//! ```text
//! engine's planes ── gather kernel ──> staging slot ── DMA ──> host tier ──> disk      a save
//! engine's planes <── scatter kernel ── staging slot <── DMA ── host tier <── disk      a load
//! ```
//!
//! A staging slot has a block as the store keeps it: the head of `format`, without meta, then the planes. The store's
//! own thread starts the copies, which it can since the staging memory exists before it. The device takes the checksum of a
//! staging slot, and compares it there with the store's: one thread of the processor sums a third of what the bus carries at best.
//! Saves and loads have a lane each: a thread, a stream and half of the staging memory, so that what a request waits for never
//! stands behind what nobody waits for. A lane carries out one transfer after the other, in rounds: of as many blocks as it has
//! slots (a save: kernels, then the copies), or of half as many, two at a time (a load: the copies, then kernels). A kernel
//! moves bytes within the device's memory tens of times faster than the bus.
//!
//! A failed device is final: transfers fail from then on, and blocks in the store are as they were.

mod lane;
mod lanes;
mod launch;
mod load;
mod places;
mod prepared;
mod save;

pub(crate) use lane::Job;
pub(crate) use lanes::Lanes;
pub(crate) use launch::{launch, settle};
pub(crate) use places::{GROUPS_MAX, Group, ITEMS_MAX, Places};
pub(crate) use prepared::{MakeKernels, Prepared, Reports};

use crate::status::{Failure, Status};

/// The directions, as indices.
const SAVE: usize = 0;
const LOAD: usize = 1;

pub(crate) fn failed(what: &str, error: &dyn std::fmt::Display) -> Failure {
    Failure::new(Status::Failed, format!("{what}: {error}"))
}
