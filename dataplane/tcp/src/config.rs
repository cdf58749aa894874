//! What can be chosen, with defaults and ranges.

use std::time::Duration;

use dataplane_fabric::PeerAccess;
use dataplane_fabric::auth::{SharedKey, Transport, Versions};

use crate::wire::SIBLINGS_MAX;

/// Settings of one node's TCP fabric. Peers may differ in all of them; the side that connects decides
/// [`TcpConfig::connections_per_peer`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpConfig {
    /// Connections of each lane to one peer; bulk is spread over them. 1 to 8.
    pub connections_per_peer: usize,
    /// Most peers at a time. 1 to 4096.
    pub peers_max: usize,
    /// Most accepted connections that have not greeted yet; the oldest makes room for the next. 16 to 4096.
    pub handshakes_max: usize,
    /// How long the handshake of a connection may take, and from a peer's first greeted connection to its last. 100 ms to 60 s.
    pub handshake_timeout: Duration,
    /// Silence or unacknowledged data for so long means that the peer is dead. 1 s to 10 min.
    pub peer_dead_after: Duration,
    /// Frames that may wait on one connection before `post` says full. 64 to 65536.
    pub queue_depth: usize,
    /// Reads of one lane in flight to a peer, and served for it, at a time. 1 to 4096.
    pub reads_max: usize,
    /// Bytes of the kernel's send buffer of a connection. 0: the kernel adapts it, but for peers on this host, which get small ones. At most 1 GiB.
    pub send_buffer_bytes: usize,
    /// Bytes of the kernel's receive buffer of a connection. 0: the kernel adapts it, but for peers on this host, which get small ones. At most 1 GiB.
    pub receive_buffer_bytes: usize,
    /// Payloads of at least so many bytes are sent without a copy while that works. `None`: never.
    pub zero_copy_from: Option<usize>,
    /// The secret that peers share; with another one neither side admits the other.
    pub key: SharedKey,
    /// The versions of the protocol that it speaks.
    pub versions: Versions,
    /// What peers may do with this node's slots.
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
    /// One sentence for each value that is out of its range.
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

    /// Most connections of one node that are greeted.
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
