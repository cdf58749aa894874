//! The terminal view of one gateway, behind `kvasir top`.
//!
//! It asks `GET /kvasir/status` and `GET /kvasir/decisions` again and again and shows what is in between: rates,
//! latencies, the workers with their pools, and why requests went where they went. It only reads; a gateway
//! that is watched by nobody and one that is watched by ten do the same.
//!
//! Two threads: one asks (`poll`), the other owns the terminal (`terminal`, `screen`), and a bounded channel leads from the
//! first to the second. What arrives is cleaned in `wire`, so that nothing that a worker or a gateway calls
//! itself reaches the terminal as a command. The arithmetic is in `history`, which takes the time as an argument.
//!
//! * [`run`] owns the terminal until the user quits, and gives it back as it was, also after a panic or a SIGTERM.
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
