//! The terminal view of one gateway, behind `kvasir top`.
//!
//! Polls `GET /kvasir/status` and `GET /kvasir/decisions` and shows rates, latencies, the workers with their pools, and the
//! reasons of routing decisions. Read-only: being watched does not change a gateway's behaviour.
//!
//! Two threads: one polls (`poll`), the other owns the terminal (`terminal`, `screen`), and a bounded channel leads from the
//! first to the second. Received text is cleaned in `wire`, so that a name given by a worker or a gateway cannot reach the
//! terminal as a command. The computations are in `history`, which takes the time as an argument.
//!
//! * [`run`] owns the terminal until the user quits, and restores it, also after a panic or a SIGTERM.
//! * [`once`] renders one frame as plain text, for scripts and for when standard output is no terminal.

#![forbid(unsafe_code)]

mod config;
mod display;
mod error;
mod history;
mod keys;
mod poll;
mod screen;
mod state;
mod terminal;
mod view;
mod wire;

#[cfg(test)]
mod testing;

pub use config::{FRAME_CELLS_MAX, INTERVAL_MAX, INTERVAL_MIN, TopConfig};
pub use display::View;
pub use error::TopError;
pub use terminal::{once, run};
