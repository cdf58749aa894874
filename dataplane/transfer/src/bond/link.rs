//! One link of a bonded peer: a connection of one rail, made as often as it takes.

use std::time::{Duration, Instant};

use dataplane_fabric::{PeerId, Priority};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Not connected; the node that connects tries again at that moment.
    Down { retry_at: Option<Instant> },
    /// The rail connects.
    Connecting,
    /// Connected; waiting for the peer's welcome.
    Greeting { since: Instant },
    /// In use.
    Up,
}

#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) rail: usize,
    /// The rail's own notation, where we connect.
    pub(crate) address: Option<String>,
    pub(crate) inner: Option<PeerId>,
    pub(crate) state: State,
    /// Number of its present or last connection; 0 before the first.
    pub(crate) connection: u32,
    /// Failed attempts and connections since a connection lasted `BondConfig::retry_max`.
    pub(crate) failures: u32,
    /// Since when the present connection is up.
    pub(crate) up_since: Option<Instant>,
    /// Bytes posted and not completed.
    pub(crate) outstanding_bytes: u64,
    /// The number of each lane's last marker that has come over the present connection.
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

    /// A connection is made anew.
    pub(crate) fn begin(&mut self, inner: PeerId, connection: u32) {
        self.inner = Some(inner);
        self.connection = connection;
        self.up_since = None;
        self.outstanding_bytes = 0;
        self.markers = [0; Priority::ALL.len()];
    }

    /// Whether its connection is being made.
    pub(crate) fn is_being_made(&self) -> bool {
        matches!(self.state, State::Connecting | State::Greeting { .. })
    }

    pub(crate) fn is_up(&self) -> bool {
        self.state == State::Up
    }
}

/// What a link has shown it takes: nanoseconds for a KiB, smoothed. A rail that is slower, or slowed by loss or by a
/// neighbour, gets fewer slices; as the others fill up it gets one now and then, which keeps the measure fresh.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    nanos_per_kib: f64,
}

impl Default for Pace {
    fn default() -> Self {
        // 10 GB/s until something was measured.
        Self { nanos_per_kib: 100.0 }
    }
}

impl Pace {
    pub(crate) fn nanos_per_kib(&self) -> f64 {
        self.nanos_per_kib
    }

    /// When a slice posted behind `bytes` would be done.
    pub(crate) fn finish_nanos(&self, bytes: u64) -> u64 {
        (bytes as f64 / 1024.0 * self.nanos_per_kib) as u64
    }

    /// A slice was done `elapsed` after it was posted, with `bytes` before and in it.
    pub(crate) fn measured(&mut self, bytes: u64, elapsed: Duration) {
        let sample = elapsed.as_nanos() as f64 / (bytes.max(1024) as f64 / 1024.0);
        self.nanos_per_kib += (sample - self.nanos_per_kib) / 8.0;
    }
}
