//! TCP as a fabric, over io_uring: what moves blocks between hosts that have no RDMA.
//!
//! One ring per node and thread; per connection at most one receive and one send are in flight. A send
//! gathers up to [`FRAMES_PER_SEND_MAX`] queued frames, header and slot bytes, in one `sendmsg`, so batching
//! needs no timer. A receive reads into a buffer and, when a write's payload goes on, straight into the
//! target slot. Nagle's algorithm is off.
//!
//! `io-uring` directly and not `tokio-uring`: that crate has had no release since 2024 and no maintainer, and
//! its runtime would own the thread that polls.
//!
//! Per operation: no allocation for writes, one for a received message; no lock; system calls only in
//! `flush`, `poll` and `prepare_wait`, one `io_uring_enter` each at most.

mod connection;
mod error;
mod fabric;
mod ring;
mod wire;

pub use connection::{FRAMES_PER_SEND_MAX, QUEUED_FRAMES_MAX};
pub use error::TcpError;
pub use fabric::{CONNECTIONS_MAX, TcpFabric};
