//! The audit log: one line of JSON for each request, without anything that was said.
//!
//! * [`AuditRecord`]: what a line has, and the only place that writes one.
//! * [`AuditLog`]: a bounded channel and a thread that writes to a file.
//!
//! A request never waits for the disk: when the channel is full its line is dropped and counted. Who needs every
//! line watches that counter, as whoever let the log block would have traded a missing line for a missing service.

mod record;
mod writer;

pub use record::AuditRecord;
pub use writer::{AUDIT_QUEUE_MAX, AuditCounters, AuditLog};
