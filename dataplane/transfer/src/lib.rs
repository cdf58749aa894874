//! Moves a request's blocks from the node that computes them to the node that needs them.
//!
//! The two legs start at the same time and are matched by transfer id. The *receiver* reserves slots and
//! sends their names to the sender (`Reserve`). The *sender* pushes every part as soon as it is computed:
//! one-sided writes, the last with an immediate, and then an announcement with checksums (`Announce`),
//! which are computed while the writes are in transit. The receiver verifies each part once both have
//! arrived, while later layers are still being computed.
//!
//! ```text
//! receiver                         sender
//!    │ ── Hello, Reserve(slots) ──▶ │   several of them when there are more slots than one message names
//!    │ ◀═══ writes … imm(seq) ═════ │   per part: a range of layers × a range of blocks
//!    │ ◀── Announce(seq, sums) ──── │
//!    │ ◀── Finished ─────────────── │
//!    │ ── Cancel ─────────────────▶ │   any time
//!    │ ◀── CancelAck ────────────── │   after it, no write of this transfer is under way
//! ```
//!
//! Blocks in a device's memory stay there where the connections to the peer reach them, both sides hold the
//! same heads and the device checksums them ([`TransferNode::with_checksummer`]); other blocks go through
//! staging slots in host memory ([`Staging`]).
//!
//! Invariants: a slot that a peer was told of is reused only after `Finished`, `CancelAck` or the end of the
//! connection; a block counts as arrived only when every byte of it was verified; every table and queue is bounded
//! ([`Limits`]); the writes, checksums and verification of one round are bounded ([`Limits::round_bytes`]); time arrives as an argument ([`TransferNode`]), and [`TransferService`] is the thread that supplies it.

#![forbid(unsafe_code)]

mod bond;
mod budget;
mod checksum;
mod config;
mod direct;
mod inbound;
mod metrics;
mod negotiation;
mod node;
mod outbound;
mod pieces;
mod service;
mod shard;
mod stages;
mod staging;
mod timers;
mod wire;

pub use bond::{Bond, BondConfig, BondCounters, LINKS_MAX, Rail};
pub use config::Limits;
pub use dataplane_fabric::cores::Cores;
pub use dataplane_fabric::wait::{ThreadPolicy, WaitPolicy};
pub use metrics::TransferCounters;
pub use node::{Command, Notice, Outcome, TransferId, TransferNode};
pub use service::{ServiceError, TransferService};
pub use shard::{HeadRange, PieceLayout, SharedHeads, senders_of};
pub use stages::{BOUNDS, Stage, StageSnapshot, StageTimes};
pub use staging::{Staging, StagingLimits};

/// For fuzzing: decodes a peer's bytes as the hand-off, the bond and the handshake do. Whatever decodes
/// must encode to the same bytes.
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub fn fuzz_wire(bytes: &[u8]) {
    match wire::Message::decode(bytes) {
        Some(message) => {
            // Of a greeting of a later version, only the fields known here are compared.
            let is_greeting = matches!(message, wire::Message::Hello(_));
            let encoded = message.encode();
            assert_eq!(&*encoded, if is_greeting { &bytes[..encoded.len()] } else { bytes }, "{message:?}");
            if let wire::Message::Hello(theirs) = message {
                let ours = negotiation::Greeting::new(theirs.layout, checksum::Checksum::Lanes);
                let _agreed = negotiation::NegotiatedParameters::between(&ours, &theirs);
            }
        }
        None => _ = wire::decode_error(bytes),
    }
    bond::fuzz_frame(bytes);
    dataplane_fabric::auth::fuzz(bytes);
}
