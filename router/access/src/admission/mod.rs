//! In which order: at most so many requests inside, and a bounded, fair queue before them.
//!
//! * [`Gate`] counts who is inside. While nobody waits, entering and leaving are one compare-and-swap each.
//! * [`queue`] decides who of the waiting is next; [`speed`] how long that will take.
//!
//! A request that would not make it is refused at once, with the time after which it would: when the queue is full,
//! or when what is ahead of it, at the measured speed, takes longer than its deadline or than `wait_max`. A client
//! that hears that immediately can go elsewhere; one that hears it after a minute has lost the minute, and the
//! queue was longer for everybody else.

mod ask;
mod gate;
mod permit;
mod queue;
mod speed;
mod state;
mod wait;

pub use ask::{Ask, Entry, GateConfig, GateStats, Refusal, WAITING_MAX_LIMIT};
pub use gate::Gate;
pub use permit::Permit;
pub use wait::{Wait, WaitOutcome};

#[cfg(test)]
mod tests;
