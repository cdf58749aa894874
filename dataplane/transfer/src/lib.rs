//! Moves a request's blocks from the node that computes them to the node that wants them.
//!
//! The two legs start at the same time and meet by transfer id. The *receiver* reserves slots and tells the
//! sender their names (`Reserve`). The *sender* pushes every piece as soon as it is computed: an announcement
//! with checksums (`Announce`), then one-sided writes, the last with an immediate. The receiver verifies each
//! piece once both have come, while later layers are still being computed elsewhere.
//!
//! ```text
//! receiver                         sender
//!    │ ── Hello, Reserve(slots) ──▶ │
//!    │ ◀── Announce(seq, sums) ──── │   per push: a range of layers × a range of blocks
//!    │ ◀═══ writes … imm(seq) ═════ │
//!    │ ◀── Finished ─────────────── │
//!    │ ── Cancel ─────────────────▶ │   any time
//!    │ ◀── CancelAck ────────────── │   after it, no write of this transfer is under way
//! ```
//!
//! Invariants: a slot that a peer was told of is reused only after `Finished`, `CancelAck` or the end of the
//! connection; a block counts as arrived only when every byte of it was verified; every table and queue is
//! bounded ([`Limits`]); time arrives as an argument ([`TransferNode`]), the thread that brings it is
//! [`TransferService`].

#![forbid(unsafe_code)]

mod checksum;
mod config;
mod inbound;
mod metrics;
mod node;
mod outbound;
mod service;
mod wire;

pub use config::{Limits, PieceLayout};
pub use metrics::TransferCounters;
pub use node::{Command, Notice, Outcome, TransferId, TransferNode};
pub use service::{ServiceError, TransferService};
