//! What the initiator asks of the other end, and the answers. Travels as JSON in messages of the fabric.
//!
//! Whoever connects to a listening end is trusted no further than this: it can have memory of the benchmark filled,
//! compared and moved, and perftest started on the listening end's own device.

use serde::{Deserialize, Serialize};

use super::args::Op;
use super::perftest::PerftestPlan;
use super::places::Shape;
use super::stream::Plan;

/// Both ends must speak the same version.
pub(super) const VERSION: u32 = 2;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Command {
    /// The first command, and its answer: names of slots, as (slot, generation), and whether they lie in a device's memory.
    Hello {
        version: u32,
        on_device: bool,
        slot_bytes: usize,
        out: Vec<(u32, u32)>,
        in_: Vec<(u32, u32)>,
    },
    /// Start counting arrivals afresh. Answer: `Done`.
    Reset,
    /// What arrived since. Answer: `Counted`.
    Count,
    /// `span_ns` lies between the first and the last arrival, by the answering end's clock.
    Counted {
        immediates: u64,
        messages: u64,
        span_ns: u64,
    },
    /// Move so much towards the initiator. Answer, at the end: `Done`.
    Stream(Plan),
    /// Put a pattern into pieces: those to read from (`out`) or to be written to. Answer: `Done`.
    Fill {
        shape: Shape,
        count: u32,
        seed: u64,
        out: bool,
    },
    /// Compare the pieces that were written with a pattern. Answer: `Compared`.
    Compare {
        shape: Shape,
        count: u32,
        seed: u64,
    },
    Compared {
        wrong: u64,
    },
    /// Compare the last message of a test with a pattern. Answer: `Compared`.
    CompareMessage {
        shape: Shape,
        piece: u32,
        seed: u64,
    },
    /// Send back each immediate (with as many bytes) or message; `None`: no longer. Answer: `Done`.
    Echo(Option<Echo>),
    /// Start the server of a perftest program. Answer: `Done` when it listens.
    Perftest(PerftestPlan),
    /// Wait for that server to end. Answer: `Done`.
    PerftestEnd,
    Done,
    /// The command could not be obeyed.
    Failed {
        reason: String,
    },
    /// The end. No answer.
    Quit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Echo {
    pub(super) op: Op,
    pub(super) shape: Shape,
}
