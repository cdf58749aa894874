//! Configuration of the TCP fabric, with defaults and ranges.

use std::time::Duration;

use dataplane_fabric::PeerAccess;
use dataplane_fabric::auth::{SharedKey, Transport, Versions};

use crate::wire::SIBLINGS_MAX;

/// Configuration of one node's TCP fabric. Peers may differ in all values;
/// [`TcpConfig::connections_per_peer`] is that of the connecting side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpConfig {
    /// Connections of each lane to one peer; large writes are spread over them. 1 to 8.
    pub connections_per_peer: usize,
    /// Largest number of peers. 1 to 4096.
    pub peers_max: usize,
    /// Largest number of accepted connections that have not completed the handshake; one more displaces the
    /// oldest. 16 to 4096.
    pub handshakes_max: usize,
    /// Time limit of a connection's handshake, and of the time between a peer's first and last completed
    /// handshake. 100 ms to 60 s.
    pub handshake_timeout: Duration,
    /// Time of silence or of unacknowledged data after which a peer counts as dead. 1 s to 10 min.
    pub peer_dead_after: Duration,
    /// Largest number of frames that wait on one connection; `post` returns full beyond it. 64 to 65536.
    pub queue_depth: usize,
    /// Largest number of reads of one lane in flight to a peer, and of reads served for the peer. 1 to 4096.
    pub reads_max: usize,
    /// Size of the kernel's send buffer of a connection, in bytes. 0: the kernel adapts it, except for peers
    /// on this host, which get small buffers. At most 1 GiB.
    pub send_buffer_bytes: usize,
    /// Size of the kernel's receive buffer of a connection, in bytes. 0: the kernel adapts it, except for
    /// peers on this host, which get small buffers. At most 1 GiB.
    pub receive_buffer_bytes: usize,
    /// Smallest payload, in bytes, that is sent without a copy, on a connection whose zero-copy sends the kernel
    /// has not copied so far. `None`: none is.
    pub zero_copy_from: Option<usize>,
    /// The secret that all peers share. A peer with another secret is refused by both sides.
    pub key: SharedKey,
    /// The protocol versions that the node speaks.
    pub versions: Versions,
    /// Access of peers to this node's slots.
    pub access: PeerAccess,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            connections_per_peer: 2,
            peers_max: 256,
            handshakes_max: 256,
            handshake_timeout: Duration::from_secs(5),
            peer_dead_after: Duration::from_secs(10),
            queue_depth: 1024,
            reads_max: 256,
            send_buffer_bytes: 0,
            receive_buffer_bytes: 0,
            zero_copy_from: Some(64 << 10),
            key: SharedKey::default(),
            versions: Transport::Tcp.versions(),
            access: PeerAccess::default(),
        }
    }
}

impl TcpConfig {
    /// Returns one sentence for each value that is out of its range.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut check = |name: &str, value: usize, least: usize, most: usize| {
            if value < least || value > most {
                problems.push(format!("{name} is {value}, which is not in {least}..={most}"));
            }
        };
        check("connections_per_peer", self.connections_per_peer, 1, SIBLINGS_MAX + 1);
        check("peers_max", self.peers_max, 1, 4096);
        check("handshakes_max", self.handshakes_max, 16, 4096);
        check("handshake_timeout in ms", self.handshake_timeout.as_millis() as usize, 100, 60_000);
        check("peer_dead_after in ms", self.peer_dead_after.as_millis() as usize, 1000, 600_000);
        check("queue_depth", self.queue_depth, 64, 65_536);
        check("reads_max", self.reads_max, 1, 4096);
        check("send_buffer_bytes", self.send_buffer_bytes, 0, 1 << 30);
        check("receive_buffer_bytes", self.receive_buffer_bytes, 0, 1 << 30);
        problems
    }

    /// Returns the largest number of connections of the node that have completed the handshake.
    pub(crate) fn connections_max(&self) -> usize {
        // A peer may have chosen more connections than this node would.
        self.peers_max * 2 * (SIBLINGS_MAX + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_problems_are_named_at_once() {
        assert_eq!(TcpConfig::default().problems(), Vec::<String>::new());
        let bad = TcpConfig { connections_per_peer: 9, reads_max: 0, ..TcpConfig::default() };
        assert_eq!(bad.problems().len(), 2, "{:?}", bad.problems());
    }
}
