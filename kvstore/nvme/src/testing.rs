//! An NVMe controller in software, so that the whole driver runs on any machine.
//!
//! [`SoftwareController`] is the device: a thread that reads registers, doorbells and queues in plain memory and moves
//! the bytes, by the specification and by nothing of the driver's. It reaches memory only through the mappings that
//! the driver made, and counts what it was made to access without one. [`SoftwareController::bus`] is the driver's end.
//! [`Faults`] make it fail, by seeded draws or at a given command.
//!
//! For tests: it takes locks and allocates.

mod controller;
mod device;
mod faults;
mod machine;

pub use controller::{SoftwareBus, SoftwareController};
pub use device::{SoftwareCounters, SoftwareDevice};
pub use faults::Faults;
