//! Stored values over the Redis serialization protocol, for clients that know Redis and not us: LMCache's Redis,
//! RESP and Valkey connectors, redis-py, `redis-benchmark`.
//!
//! In reading order: [`values`] is what the server needs of a store; [`wire`] makes commands out of bytes and
//! [`reply`] bytes out of answers; `commands` lists what is understood; `execute` carries it out; `session` holds
//! what belongs to one connection; `lanes`, `admission` and `connection` run commands side by side, bounded, and
//! keep answers in order;
//! [`server`] listens.
//!
//! Invariants: answers come in the order of the commands; a command that reads or writes a key sees what earlier
//! commands of its connection did to that key; memory grows with the bytes that have come, never with a length that
//! was only declared; nothing that a client sends ends the process.
//!
//! It is not Redis: one database, strings only, no transactions, scripts, subscriptions or replication; `SET … GET`
//! is a read and then a write; a value may be evicted at any time.
//!
//! Source: the protocol specification at redis.io/docs/latest/develop/reference/protocol-spec (RESP2, RESP3 and
//! inline commands) and the pages of the single commands.
//!
//! Threads: tasks of the caller's tokio runtime, one for each connection. Hot path of a `GET` or `SET` that is ready
//! at once: one `read` and one `writev` a batch of commands; one allocation a command, for its list of arguments.

#![forbid(unsafe_code)]

pub mod values;

pub mod reply;
pub mod wire;

mod commands;
mod execute;
mod informing;
mod options;
mod pattern;
mod session;

mod admission;
mod connection;
mod lanes;
mod output;
mod quiet;

mod config;
mod error;
mod metrics;
pub mod server;
pub mod testing;

pub use config::{Listen, Password, RespConfig};
pub use error::RespError;
pub use metrics::RespCounters;
pub use server::{Bound, Server};
pub use values::{
    Condition, Entry, Expiry, KeyPage, SetOptions, SetOutcome, Usage, Value, ValueError, Values,
};
