//! One peer: the connections of its two lanes, joined under one session number.

use std::time::Instant;

use dataplane_fabric::handshake::SocketId;
use dataplane_fabric::{PeerId, Priority};

use crate::lane::Lane;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Not all connections are there yet.
    Joining,
    Open,
    /// Aborted; waiting for the last operation on any of its connections.
    Closing,
}

/// A connection that this side dials, and its place.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Greeting {
    pub(crate) socket_id: SocketId,
    pub(crate) lane: usize,
    pub(crate) index: usize,
}

pub(crate) struct Session {
    /// Drawn by the side that connects.
    pub(crate) id: u64,
    pub(crate) peer: PeerId,
    pub(crate) we_connected: bool,
    pub(crate) stage: Stage,
    /// Whether the user knows of it, and so must hear of its end.
    pub(crate) is_announced: bool,
    pub(crate) connections_per_lane: usize,
    /// Connections that this side has dialled and that are not greeted.
    pub(crate) greetings: Vec<Greeting>,
    /// Connections that are greeted both ways, and whose last operation has not ended.
    pub(crate) alive: usize,
    pub(crate) deadline: Instant,
    /// Reads of a lane that the peer serves at a time.
    pub(crate) peer_reads_max: usize,
    pub(crate) lanes: [Lane; Priority::ALL.len()],
    pub(crate) reason: String,
}

impl Session {
    pub(crate) fn new(id: u64, connections_per_lane: usize, we_connected: bool, deadline: Instant) -> Self {
        // The tables are made when the session opens: until then nothing is known about the peer.
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

    /// Positions of all its connections.
    pub(crate) fn connections(&self) -> impl Iterator<Item = u32> {
        self.lanes.iter().flat_map(|lane| lane.connections.iter().copied().flatten())
    }
}
