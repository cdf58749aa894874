//! TCP transport over io_uring, for blocks between hosts that have no RDMA.
//!
//! A peer is a session: for each lane a few connections, grouped by a number in their hellos. Frames travel
//! in batches, headers first, so one `sendmsg` gathers 64 frames and one `recvmsg` scatters them to their
//! slots; only headers, small payloads and short rows are copied once more. Connection 0 keeps the order
//! within a lane, with fences that wait for its siblings; two writes of the same bytes are never sent on two
//! connections. A signalled request is complete when the peer has it. Lanes share nothing, and a background
//! turn is at most 256 KiB per connection.
//!
//! One ring and one thread per node; the thread that first flushes or polls must be the one that drives it.
//! Per operation: no allocation for writes and reads, one for a received message; no lock; `flush` and `poll`
//! enter the kernel at most once each, and not at all when there is nothing to do (counted in
//! `tests/cost.rs`). Frames of a peer are checked before a byte is written; generations once more when the
//! bytes have landed or been gathered.
//!
//! Chosen by measurement on loopback, Linux 6.18, two contended cores, ratios within one run:
//! * `examples/writev_limit.rs` against plain `writev`/`recv`, by processor time of the busier side: 0.95 to 1.3 from
//!   64 KiB on the urgent lane, 0.76 to 1.1 on the background's, 0.92 to 1.03 at 4 KiB. Ping-pong: 1.3 times sockets
//!   that are asked in a loop, of which io_uring itself costs 1.17.
//! * Deferred task work against cooperative: equal in streams, ping-pong 1.17 against 1.22 times sockets.
//! * Multishot receive into provided buffers: 1.21 times sockets where a single receive is 1.17, and it could not
//!   put bytes into their slots; so receives are single.
//! * Two connections against one: 1.1 to 1.2 times from 1 MiB, equal at 64 KiB; four lose at 64 KiB.
//! * `tokio-uring` 0.5.0 against io-uring directly, a plain stream: 1.00 times at 64 KiB and 1.02 at 1 MiB. It is not
//!   used because it has no maintainer (last release May 2024), owns the thread's loop, and has neither deferred
//!   task work nor registered buffers in vectored zero-copy sends.
//!
//! Sources: io_uring_enter(2), io_uring_setup(2), tcp(7), linux/io_uring.h.

mod close;
mod config;
mod conflicts;
mod connecting;
mod connection;
mod counters;
mod error;
mod extent;
mod fabric;
mod finish;
mod frame;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod fuzzing;
mod gather;
mod hello;
mod inbound;
mod lane;
mod plan;
mod post;
mod reads;
mod reap;
mod receive;
mod receive_target;
mod ring;
mod send;
mod session;
mod socket;
#[cfg(test)]
mod stream_tests;
mod table;
mod token;
mod wire;
mod zero_copy;

pub use config::TcpConfig;
pub use counters::{Counter, TcpCounters};
pub use error::TcpError;
pub use fabric::TcpFabric;
pub use wire::BATCH_FRAMES_MAX;
