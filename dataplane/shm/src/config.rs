//! Configuration of the shared-memory transport.

use std::time::Duration;

use dataplane_fabric::auth::{SharedKey, Transport, Versions};
use dataplane_fabric::{MESSAGE_BYTES_MAX, PeerAccess};

use crate::ShmError;

/// Settings of the shared-memory fabric. [`ShmConfig::default`] holds the defaults, [`ShmConfig::validate`]
/// the ranges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShmConfig {
    /// Bytes of each of the two rings (urgent, background) that a peer writes into; bounds the messages and
    /// immediates that may wait. Default 512 KiB; a power of two from 256 KiB to 64 MiB.
    pub ring_bytes: usize,
    /// Most connections. Default 256; 1 to 1024. Each takes six descriptors and twice `ring_bytes`.
    pub connections_max: usize,
    /// Time limit for making a connection, in either direction. Default 2 s; 10 ms to 60 s.
    pub handshake_timeout: Duration,
    /// Whether peers of another effective user are refused. Default true. If false, they can write this
    /// node's slab.
    pub same_user_only: bool,
    /// Bytes of a new peer's slab that are mapped when it connects, so that the first copies incur no page
    /// faults. The fabric's thread stops meanwhile: 3 µs for each 4 KiB page on a busy virtual machine, as
    /// long as the faults would have taken. Pages that the peer has not touched are allocated. Default 0;
    /// up to 1 TiB.
    pub populate_bytes_max: usize,
    /// Access of peers to this node's slots. With [`PeerAccess::None`] they are not given the slab; with
    /// the other values they map all of it, and can read and write every slot.
    pub access: PeerAccess,
    /// The secret that all peers share; nodes with different secrets refuse each other.
    pub key: SharedKey,
    /// Protocol versions that the node supports.
    pub versions: Versions,
}

/// Smallest ring: room for two of the largest messages and a remainder.
pub(crate) const RING_BYTES_MIN: usize = 4 * MESSAGE_BYTES_MAX;
/// Largest ring.
pub(crate) const RING_BYTES_MAX: usize = 64 << 20;
const CONNECTIONS_MAX: usize = 1024;
const HANDSHAKE_TIMEOUT_MIN: Duration = Duration::from_millis(10);
const HANDSHAKE_TIMEOUT_MAX: Duration = Duration::from_secs(60);
const POPULATE_BYTES_MAX: usize = 1 << 40;

impl Default for ShmConfig {
    fn default() -> Self {
        Self {
            ring_bytes: 512 << 10,
            connections_max: 256,
            handshake_timeout: Duration::from_secs(2),
            same_user_only: true,
            populate_bytes_max: 0,
            access: PeerAccess::default(),
            key: SharedKey::default(),
            versions: Transport::Shm.versions(),
        }
    }
}

impl ShmConfig {
    /// Returns an error for the first value that is out of its range.
    pub fn validate(&self) -> Result<(), ShmError> {
        let problems = [
            (
                !self.ring_bytes.is_power_of_two()
                    || !(RING_BYTES_MIN..=RING_BYTES_MAX).contains(&self.ring_bytes),
                "ring_bytes must be a power of two from 256 KiB to 64 MiB",
            ),
            (
                !(1..=CONNECTIONS_MAX).contains(&self.connections_max),
                "connections_max must be from 1 to 1024",
            ),
            (
                !(HANDSHAKE_TIMEOUT_MIN..=HANDSHAKE_TIMEOUT_MAX).contains(&self.handshake_timeout),
                "handshake_timeout must be from 10 ms to 60 s",
            ),
            (self.populate_bytes_max > POPULATE_BYTES_MAX, "populate_bytes_max must be at most 1 TiB"),
        ];
        match problems.into_iter().find(|(wrong, _)| *wrong) {
            Some((_, reason)) => Err(ShmError::Config(reason)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_outside_of_their_range_are_refused() {
        let fine = ShmConfig::default();
        assert!(fine.validate().is_ok());
        let wrong = [
            ShmConfig { ring_bytes: 300 << 10, ..fine.clone() },
            ShmConfig { ring_bytes: 128 << 10, ..fine.clone() },
            ShmConfig { connections_max: 0, ..fine.clone() },
            ShmConfig { connections_max: 1025, ..fine.clone() },
            ShmConfig { handshake_timeout: Duration::ZERO, ..fine.clone() },
            ShmConfig { populate_bytes_max: usize::MAX, ..fine },
        ];
        for config in wrong {
            assert!(matches!(config.validate(), Err(ShmError::Config(_))), "{config:?}");
        }
    }
}
