//! What an operator can set, and the limits.

use std::time::Duration;

/// Settings of the service.
#[derive(Debug, Clone)]
pub struct Config {
    /// The server's name, in its metadata. Default: `kvasir`.
    pub server_name: String,
    /// The server's version, in its metadata. Default: the version of this crate.
    pub server_version: String,
    /// The largest message that is taken, in bytes; a larger one is OUT_OF_RANGE. Default: 16 MiB.
    pub request_bytes_max: usize,
    /// The largest answer of the backend that is collected, and the largest event of a stream, in bytes; a larger
    /// one is INTERNAL. Default: 16 MiB.
    pub answer_bytes_max: usize,
    /// Bytes of requests that all calls together hold, from the first byte until the answer; a call that needs more is
    /// RESOURCE_EXHAUSTED. Understood, a request takes about three times as much. At least `request_bytes_max` counts.
    /// Default: 256 MiB.
    pub received_bytes_max: usize,
    /// A message that has begun must be whole within this time, else the call is DEADLINE_EXCEEDED. Default: 60 s.
    pub message_within: Duration,
    /// How many requests of one bidirectional stream are in flight at once; further ones wait on the wire.
    /// Default: 16.
    pub pipelined_max: usize,
    /// How many calls one connection may have open at once. Default: 64.
    pub calls_per_connection_max: u32,
    /// How many connections are open at once; further ones wait to be accepted. Default: 1024.
    pub connections_max: usize,
    /// How long an answer waits for its client to read on before it is given up. Default: 60 s.
    pub unread_max: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            server_name: "kvasir".to_owned(),
            server_version: env!("CARGO_PKG_VERSION").to_owned(),
            request_bytes_max: 16 << 20,
            answer_bytes_max: 16 << 20,
            received_bytes_max: 256 << 20,
            message_within: Duration::from_secs(60),
            pipelined_max: 16,
            calls_per_connection_max: 64,
            connections_max: 1024,
            unread_max: Duration::from_secs(60),
        }
    }
}
