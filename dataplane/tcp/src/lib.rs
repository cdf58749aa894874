//! TCP as a fabric, over io_uring: what moves blocks between hosts that have no RDMA.

mod close;
mod config;
mod connection;
mod counters;
mod error;
mod extent;
mod fabric;
mod frame;
#[doc(hidden)]
pub mod fuzzing;
mod gather;
mod handshake;
mod join;
mod landing;
mod lane;
mod post;
mod reads;
mod reap;
mod receive;
mod ring;
mod send;
mod session;
mod socket;
#[cfg(test)]
mod stream_tests;
mod table;
mod wire;
mod zero_copy;

pub use config::TcpConfig;
pub use counters::{Counter, TcpCounters};
pub use error::TcpError;
pub use fabric::TcpFabric;
pub use wire::BATCH_FRAMES_MAX;
