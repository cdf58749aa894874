//! A seeded fault injector around any engine, which simulates the errors of disks.
//!
//! Faults are drawn when a request is submitted, so that equal seeds and equal requests mean equal faults,
//! whatever the order of completions. Every injected fault is counted. For tests: allocates and copies.
//!
//! Writes that are torn, that rot, or that a power cut may undo are made from copies in separate memory; the
//! wrapped engine must accept unregistered memory, and blocks must be multiples of 4 KiB.

mod contents;
mod engine;
mod faults;
mod power;
#[cfg(test)]
mod tests;

pub use engine::FaultyEngine;
pub use faults::{FaultCounters, Faults};
pub use power::PowerCut;

/// Unit that a device writes atomically: a torn write tears between sectors.
const SECTOR_BYTES: usize = 512;
