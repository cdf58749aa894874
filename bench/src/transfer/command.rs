//! Commands of the initiator to the other end, and the answers. They travel as JSON in messages of the fabric.
//!
//! A process that connects to a listening end is trusted only with this: it can have memory of the benchmark
//! filled, compared and moved, and perftest started on the listening end's own device.

use serde::{Deserialize, Serialize};

use super::args::Op;
use super::perftest::PerftestPlan;
use super::places::Shape;
use super::stream::Plan;

/// Both ends must speak the same version.
pub(super) const VERSION: u32 = 2;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Command {
    /// The first command, and its answer: names of slots, as (slot, generation), and whether they are in device
    /// memory.
    Hello {
        version: u32,
        on_device: bool,
        slot_bytes: usize,
        out: Vec<(u32, u32)>,
        in_: Vec<(u32, u32)>,
    },
    /// Reset the counts of arrivals. Answer: `Done`.
    Reset,
    /// Report the arrivals since the reset. Answer: `Counted`.
    Count,
    /// Counts of arrivals. `span_ns` is the time between the first and the last, by the answering end's clock.
    Counted {
        immediates: u64,
        messages: u64,
        span_ns: u64,
    },
    /// Stream a plan towards the initiator. Answer, at the end: `Done`.
    Stream(Plan),
    /// Fill pieces with a pattern: the sources (`out`) or the targets. Answer: `Done`.
    Fill {
        shape: Shape,
        count: u32,
        seed: u64,
        out: bool,
    },
    /// Compare the written pieces with a pattern. Answer: `Compared`.
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
    /// Return each immediate (with as many bytes) or message; `None`: stop. Answer: `Done`.
    Echo(Option<Echo>),
    /// Start the server of a perftest program. Answer: `Done` once it listens.
    Perftest(PerftestPlan),
    /// Wait for that server to end. Answer: `Done`.
    PerftestEnd,
    Done,
    /// The command failed.
    Failed {
        reason: String,
    },
    /// End the session. No answer.
    Quit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Echo {
    pub(super) op: Op,
    pub(super) shape: Shape,
}
