//! An NVMe controller in software, so that the whole driver runs on any machine.
//!
//! [`SoftwareController`] is the device: a thread that reads registers, doorbells and queues in plain memory
//! and moves the bytes, written from the specification without the driver's code. It reaches memory only
//! through the mappings that the driver made, and counts accesses outside of them. [`SoftwareController::bus`]
//! is the driver's end. [`Faults`] make it fail, by seeded draws or at a given command.
//!
//! For tests: takes locks and allocates.

mod controller;
mod device;
mod faults;
mod machine;

pub use controller::{SoftwareBus, SoftwareController};
pub use device::{SoftwareCounters, SoftwareDevice};
pub use faults::Faults;
