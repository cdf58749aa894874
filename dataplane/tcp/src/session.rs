//! A session with one peer: the connections of its two lanes, joined under one session number.

use std::time::Instant;

use dataplane_fabric::handshake::SocketId;
use dataplane_fabric::{PeerId, Priority};

use crate::lane::Lane;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Some connections have not been made yet.
    Joining,
    Open,
    /// Aborted; waits for the last operation on any of its connections.
    Closing,
}

/// A connection that this side dials, and its position in the session.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Greeting {
    pub(crate) socket_id: SocketId,
    pub(crate) lane: usize,
    pub(crate) index: usize,
}

pub(crate) struct Session {
    /// Session number, drawn by the connecting side.
    pub(crate) id: u64,
    pub(crate) peer: PeerId,
    pub(crate) we_connected: bool,
    pub(crate) stage: Stage,
    /// Whether the user knows the peer, so that its end must be reported.
    pub(crate) is_announced: bool,
    pub(crate) connections_per_lane: usize,
    /// Connections that this side has dialled and whose handshake is not complete.
    pub(crate) greetings: Vec<Greeting>,
    /// Connections whose handshake is complete and whose last operation has not ended.
    pub(crate) alive: usize,
    pub(crate) deadline: Instant,
    /// Reads of a lane that the peer serves at a time.
    pub(crate) peer_reads_max: usize,
    pub(crate) lanes: [Lane; Priority::ALL.len()],
    pub(crate) reason: String,
}

impl Session {
    pub(crate) fn new(id: u64, connections_per_lane: usize, we_connected: bool, deadline: Instant) -> Self {
        // The tables are allocated when the session opens, once the peer is authenticated.
        let lanes = std::array::from_fn(|_| Lane::new(connections_per_lane));
        Self {
            id,
            peer: PeerId(0),
            we_connected,
            stage: Stage::Joining,
            is_announced: we_connected,
            connections_per_lane,
            greetings: Vec::new(),
            alive: 0,
            deadline,
            peer_reads_max: usize::MAX,
            lanes,
            reason: String::new(),
        }
    }

    /// Returns the positions of all connections.
    pub(crate) fn connections(&self) -> impl Iterator<Item = u32> {
        self.lanes.iter().flat_map(|lane| lane.connections.iter().copied().flatten())
    }
}
