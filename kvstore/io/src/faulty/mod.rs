//! A seeded fault injector around any engine: what disks do wrong, on purpose.
//!
//! Faults are drawn when a request is submitted, so that equal seeds and equal requests mean equal faults, whatever the
//! order of completions. Counters say what was injected. For tests: it allocates and copies.
//!
//! Writes that are torn, that rot, or that a power cut may undo are made from copies in memory of their own; the engine
//! underneath must take that, and blocks must be multiples of 4 KiB.

mod contents;
mod engine;
mod faults;
mod power;
#[cfg(test)]
mod tests;

pub use engine::FaultyEngine;
pub use faults::{FaultCounters, Faults};
pub use power::PowerCut;

/// What a device writes at once: a torn write tears between these.
const SECTOR_BYTES: usize = 512;
