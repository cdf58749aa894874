//! The SSD tier: blocks in fixed slots of segments, with the checksums that their makers took.
//!
//! * [`DiskLog`]: reads and writes of slots over any [`kvstore_io::IoEngine`]; one thread, driven by `poll`.
//! * [`Recovered`], [`RecoveryReport`]: result of opening a store. Opening does not read payloads.
//! * [`Admission`], [`Usage`]: admission of writes by frequency, bandwidth and endurance.
//! * [`inspect`]: contents of segments, for people.
//! * [`mod@format`]: the bytes on the disk.
//!
//! Invariants: a read is `Verified` only if its bytes have the checksum of the record, so torn, lost,
//! misdirected, stale and rotten bytes are misses, and so are bytes that were damaged in memory before they
//! were written; a record counts only in its own place (its CRC begins with store, segment and slot) and is
//! written after its payload; the newest whole copy of a table page is never written over; no contents of the
//! disk can make this crate panic or allocate more than the areas' size implies.
//!
//! A read is one request of the payload rounded up to 4 KiB: the record is in memory, so a block costs what the
//! same request costs `fio`. A record header in front of each payload would also have served recovery, but
//! makes every read 4 KiB longer: twice the bytes for a block of 4 KiB.

#![forbid(unsafe_code)]

mod admission;
mod completion;
mod config;
mod drive;
mod error;
pub mod format;
mod headers;
mod health;
mod inspect;
mod layout;
mod log;
mod metrics;
mod open;
mod operation;
mod scan;
mod table;

#[cfg(test)]
mod model;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use admission::{Admission, AdmissionConfig, Usage, WriteAdmission};
pub use completion::{
    Block, Closed, DiskCompletion, MissReason, ReadCheck, ReadOutcome, Refusal, RefusedOperation,
    WriteOutcome,
};
pub use config::{Area, ClockReading, DiskConfig, STRIPES_MAX};
pub use error::DiskError;
pub use inspect::{SegmentState, SegmentSummary, Summary, inspect};
pub use log::DiskLog;
pub use metrics::DiskCounters;
pub use open::{Recovered, RecoveryReport};
