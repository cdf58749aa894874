//! The audit log: one line of JSON for each request, without contents of prompts or answers.
//!
//! * [`AuditRecord`]: the fields of a line and its only serialization.
//! * [`AuditLog`]: a bounded channel and a thread that writes to a file.
//!
//! A request never waits for the disk: when the channel is full its line is dropped and counted. Operators
//! who need every line watch that counter; a log that blocked would turn a missing line into a missing
//! service.

mod record;
mod writer;

pub use record::AuditRecord;
pub use writer::{AUDIT_QUEUE_MAX, AuditCounters, AuditLog};
