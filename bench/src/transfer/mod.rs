//! Transfers between two nodes, over any fabric, beside a peer that is measured in the same run.
//!
//! One end initiates and measures (`bandwidth`, `latency`, `post`); the other executes its commands (`responder`). Commands
//! travel as messages of the fabric itself (`command`), so the same code serves both ends driven by one thread,
//! one thread for each, and two processes or machines. A [`Rails`] makes the fabrics, so no transport is named
//! here.
//!
//! Method: a window of signalled batches is kept full; bytes count when their batch has completed at the
//! initiator, which proves that they have reached the target. Immediates and messages must all arrive; the rate
//! at which the target saw them is reported beside. The result is the median of rounds (latency: of all round
//! trips), and the ratio to memcpy or perftest is taken round by round, since machines are shared and noisy.
//! Pieces are shuffled at the target, so that no transport can merge neighbours, as blocks of a cache are never
//! neighbours on both sides.
//!
//! Reading order: `args`, `sizes`, `memory`, `places`, `piece`, `node`, `command`, `stream`, `responder`, `session`, then the tests.

mod against;
mod args;
mod bandwidth;
mod command;
mod error;
#[cfg(test)]
mod fakes;
mod latency;
mod memory;
mod node;
mod open_loop;
mod perftest;
mod piece;
mod places;
mod plot;
mod post;
mod report;
mod responder;
mod run;
mod session;
mod sizes;
mod statistics;
mod stream;
#[cfg(test)]
mod tests;

pub use args::{Against, MemoryKind, Op, Test, Threads, TransferArgs};
pub use error::Unavailable;
pub use report::Record;
pub use run::{EXIT_UNAVAILABLE, run};
pub use session::{ANY_ADDRESS, Rails};
pub use sizes::{RowShape, Sizes};
