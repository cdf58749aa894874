//! Settings of the service, and its limits.

use std::time::Duration;

/// Settings of the service.
#[derive(Debug, Clone)]
pub struct Config {
    /// The server's name, in its metadata. Default: `kvasir`.
    pub server_name: String,
    /// The server's version, in its metadata. Default: the version of this crate.
    pub server_version: String,
    /// The largest accepted message, in bytes; a larger one is OUT_OF_RANGE. Default: 16 MiB.
    pub request_bytes_max: usize,
    /// The largest answer of the backend that is buffered, and the largest event of a stream, in bytes; a
    /// larger one is INTERNAL. Default: 16 MiB.
    pub answer_bytes_max: usize,
    /// The largest number of bytes of requests that all calls together hold, from the first byte until the
    /// answer; a call that needs more is RESOURCE_EXHAUSTED. A decoded request takes about three times as
    /// much. Raised to `request_bytes_max` if smaller. Default: 256 MiB.
    pub received_bytes_max: usize,
    /// Longest time from the beginning of a message to its end, else the call is DEADLINE_EXCEEDED.
    /// Default: 60 s.
    pub message_within: Duration,
    /// The largest number of requests of one bidirectional stream in flight at once; more are left unread.
    /// Default: 16.
    pub pipelined_max: usize,
    /// The largest number of calls that one connection may have open at once. Default: 64.
    pub calls_per_connection_max: u32,
    /// The largest number of open connections; more wait to be accepted. Default: 1024.
    pub connections_max: usize,
    /// Longest time that an answer waits for its client to read on, after which the answer is given up.
    /// Default: 60 s.
    pub stalled_read_timeout: Duration,
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
            stalled_read_timeout: Duration::from_secs(60),
        }
    }
}
