//! io_uring, as the engines for files and for NVMe commands use it.
//!
//! `Ring` owns the queues, the sleep and the waker; [`RingEngine`] owns the requests; a [`Commands`] encodes
//! requests for the kernel. Reading order: `setup`, `ring`, `registered`, `pending`, `engine`.

mod engine;
mod pending;
mod registered;
#[expect(clippy::module_inception, reason = "the ring itself")]
mod ring;
mod setup;

pub use engine::{Commands, RingEngine};
pub use pending::{Outcome, Pending};
pub use setup::RingConfig;
