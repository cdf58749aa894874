//! One link of a bonded peer: a connection of one rail, made again after each failure.

use std::time::{Duration, Instant};

use dataplane_fabric::{PeerId, Priority};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Not connected; the node that connects tries again at `retry_at`.
    Down { retry_at: Option<Instant> },
    /// The rail is connecting.
    Connecting,
    /// Connected; waiting for the peer's welcome.
    Greeting { since: Instant },
    /// In use.
    Up,
}

#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) rail: usize,
    /// Address in the rail's notation, if this node connects.
    pub(crate) address: Option<String>,
    pub(crate) inner: Option<PeerId>,
    pub(crate) state: State,
    /// Number of the present or last connection; 0 before the first.
    pub(crate) connection: u32,
    /// Failed attempts and connections since a connection lasted `BondConfig::retry_max`.
    pub(crate) failures: u32,
    /// Time at which the present connection came up.
    pub(crate) up_since: Option<Instant>,
    /// Bytes posted and not completed.
    pub(crate) outstanding_bytes: u64,
    /// By lane: number of the last marker that arrived over the present connection.
    pub(crate) markers: [u64; Priority::ALL.len()],
    pub(crate) pace: Pace,
}

impl Link {
    pub(crate) fn new(rail: usize, address: Option<String>) -> Self {
        Self {
            rail,
            address,
            inner: None,
            state: State::Down { retry_at: None },
            connection: 0,
            failures: 0,
            up_since: None,
            outstanding_bytes: 0,
            markers: [0; Priority::ALL.len()],
            pace: Pace::default(),
        }
    }

    /// Starts a new connection.
    pub(crate) fn begin(&mut self, inner: PeerId, connection: u32) {
        self.inner = Some(inner);
        self.connection = connection;
        self.up_since = None;
        self.outstanding_bytes = 0;
        self.markers = [0; Priority::ALL.len()];
    }

    /// Whether the connection is being made.
    pub(crate) fn is_being_made(&self) -> bool {
        matches!(self.state, State::Connecting | State::Greeting { .. })
    }

    pub(crate) fn is_up(&self) -> bool {
        self.state == State::Up
    }
}

/// Measured pace of a link: nanoseconds per KiB, smoothed. A rail that is slower, or slowed by loss or by
/// competing traffic, gets fewer slices; as the other links fill up it gets one now and then, which keeps
/// the measurement current.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    nanos_per_kib: f64,
}

impl Default for Pace {
    fn default() -> Self {
        // 10 GB/s until the first measurement.
        Self { nanos_per_kib: 100.0 }
    }
}

impl Pace {
    pub(crate) fn nanos_per_kib(&self) -> f64 {
        self.nanos_per_kib
    }

    /// Returns the estimated nanoseconds until a slice posted behind `bytes` completes.
    pub(crate) fn finish_nanos(&self, bytes: u64) -> u64 {
        (bytes as f64 / 1024.0 * self.nanos_per_kib) as u64
    }

    /// Records a slice that completed `elapsed` after it was posted, with `bytes` before and in it.
    pub(crate) fn measured(&mut self, bytes: u64, elapsed: Duration) {
        let sample = elapsed.as_nanos() as f64 / (bytes.max(1024) as f64 / 1024.0);
        self.nanos_per_kib += (sample - self.nanos_per_kib) / 8.0;
    }
}
