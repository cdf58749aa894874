//! Admission: a bounded number of requests in flight, and a bounded, fair queue before them.
//!
//! * [`Gate`] counts the admitted requests. While none waits, entering and leaving are one compare-and-swap
//!   each.
//! * [`queue`] chooses the next waiter; [`speed`] estimates how long the wait will be.
//!
//! A request that would wait too long is refused immediately, with the expected time until admission: when
//! the queue is full, or when the work ahead of it, at the measured speed, takes longer than its deadline
//! or than `wait_max`. A client that is refused immediately can try another gateway; after a minute's wait
//! it would have lost the minute, and the queue would have been longer for all other clients.

mod gate;
mod permit;
mod queue;
mod request;
mod speed;
mod state;
mod wait;

pub use gate::Gate;
pub use permit::Permit;
pub use request::{AdmissionRequest, Entry, GateConfig, GateStats, Refusal, WAITING_MAX_LIMIT};
pub use wait::{Wait, WaitOutcome};

#[cfg(test)]
mod tests;
