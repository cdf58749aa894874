//! The part of ZMTP 3 (ZeroMQ's wire protocol) that KV events need, interoperable with libzmq.
//!
//! * [`limits`]: every bound, in one place.
//! * [`wire`]: bytes to events and back. Pure, and fuzzed.
//! * [`queue`]: a queue with a bound on messages and on bytes.
//! * [`PubSocket`], [`SubSocket`], [`SubListener`], [`RouterSocket`], [`DealerSocket`]: the sockets.
//!
//! Own code rather than `zeromq` 0.7: that crate reserves the frame length that a peer announces before a byte of the
//! frame has come, and has neither a maximum message size nor a limit on subscriptions, handshakes or peers.
//!
//! Sources: ZeroMQ RFC 23 (ZMTP 3.0), 28 (request-reply), 29 (publish-subscribe), 37 (ZMTP 3.1). Left out: every
//! mechanism but NULL, ZMTP 1 and 2, and reconnecting, which is the caller's.

#![forbid(unsafe_code)]

pub mod limits;
pub mod wire;

mod endpoint;
mod error;

pub mod queue;

mod accept;
mod connection;
mod dealer;
mod publisher;
mod router;
mod subscriber;

pub use accept::SocketCounters;
pub use dealer::DealerSocket;
pub use endpoint::Endpoint;
pub use error::Error;
pub use limits::Limits;
pub use publisher::PubSocket;
pub use router::{Replies, RouterSocket};
pub use subscriber::{Inbound, SubListener, SubSocket};
