//! A store of values over the Redis serialization protocol, for clients of Redis: LMCache's Redis,
//! RESP and Valkey connectors, redis-py, `redis-benchmark`.
//!
//! In reading order: [`values`] is the interface to a store; [`wire`] parses commands and [`reply`] encodes
//! answers; `commands` lists the supported commands; `execute` carries them out; `session` holds the state of
//! one connection; `running_commands`, `admission` and `connection` run commands side by side, bounded, and keep answers
//! in order; [`server`] listens.
//!
//! Invariants: answers come in the order of the commands; a command that reads or writes a key sees what
//! earlier commands of its connection did to that key; memory grows with the bytes received, never with a
//! length that was only declared; no input of a client ends the process.
//!
//! Differences from Redis: one database, strings only, no transactions, scripts, subscriptions or replication;
//! `SET … GET` is a read and then a write; a value may be evicted at any time.
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
mod options;
mod pattern;
mod server_info;
mod session;

mod admission;
mod connection;
mod output;
mod running_commands;
mod stall_detector;

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
