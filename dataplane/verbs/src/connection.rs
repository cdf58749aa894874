//! One peer: its handshake, its two lanes, and the end of its connection.
//!
//! ```text
//! initiator: Greeting ─(Make)─▶ hello sent ── peer's hello ──▶ Preparing ─(Connect)─▶ Readying ─▶ Established
//! acceptor:  peer's hello ──▶ Preparing ─(MakeConnected)─▶ hello sent, Readying ─▶ Established
//! any of them ── start_teardown ─(Stop)─▶ Draining ── drained, or too late ─(Destroy)─▶ Destroying ─▶ removed
//! ```
//!
//! In parentheses: the [`Command`](crate::commands::Command) that is in flight meanwhile. The end of a
//! connection waits for it.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use dataplane_fabric::PeerId;
use dataplane_memory::SlabKind;

use crate::commands::{Abandoned, Destination};
use crate::config::VerbsConfig;
use crate::device::LinkLayer;
use crate::lane::{Lane, LaneParameters, Pair};
use crate::local::FabricResources;
use crate::queue_pair::{Path, Retries};
use crate::wire::{Handshake, Hello, LaneAddress, RemoteSlots};

/// Phase of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Waiting for the peer's hello, for as long as [`Handshakes`](dataplane_fabric::handshake::Handshakes)
    /// allows.
    Greeting,
    /// The peer's hello has arrived; the local pairs are being connected to the peer's.
    Preparing,
    /// The local pairs are ready; waiting for the peer's `ready`.
    Readying,
    /// Both sides may post work.
    Established,
    /// The pairs are in their error state or on the way to it; the device returns the work in flight.
    Draining,
    /// The pairs are being destroyed.
    Destroying,
}

impl Phase {
    pub(crate) fn is_end(self) -> bool {
        matches!(self, Self::Draining | Self::Destroying)
    }
}

/// Time that a failed pair has to return the receives that it holds, on a device that does not report when
/// it has done so (`IBV_EVENT_QP_LAST_WQE_REACHED`, ibv_destroy_qp(3)). A pair destroyed earlier takes them
/// with it.
const RECEIVES_RETURN_WITHIN: Duration = Duration::from_millis(20);

/// A peer and its connection.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) peer: PeerId,
    pub(crate) address: SocketAddr,
    pub(crate) is_initiator: bool,
    /// Whether the user was told of the connection.
    pub(crate) is_announced: bool,
    pub(crate) abandoned: Abandoned,
    pub(crate) phase: Phase,
    /// Time at which the phase is over, completed or not.
    pub(crate) deadline: Option<Instant>,
    /// Time at which its pairs failed; before that, the time at which its end began or it was created.
    pub(crate) ended_at: Instant,
    /// By lane: whether the device has reported that the pair holds no receive of the shared queue any more.
    pub(crate) receives_returned: [bool; 2],
    pub(crate) reason: String,
    pub(crate) lanes: [Lane; 2],
    pub(crate) psns: [u32; 2],
    /// Whether the peer's `ready` arrived before the local pairs were connected.
    pub(crate) peer_is_ready: bool,
    pub(crate) slots: Option<[RemoteSlots; SlabKind::COUNT]>,
    pub(crate) message_bytes_max: u32,
    /// Whether the fabric's list of peers with work contains this one.
    pub(crate) is_listed: bool,
}

impl Connection {
    pub(crate) fn new(
        peer: PeerId,
        address: SocketAddr,
        psns: [u32; 2],
        config: &VerbsConfig,
        is_initiator: bool,
    ) -> Self {
        let queue_max = config.request_queue_depth as usize;
        Self {
            peer,
            address,
            is_initiator,
            is_announced: is_initiator,
            abandoned: Abandoned::default(),
            phase: Phase::Greeting,
            deadline: None,
            ended_at: Instant::now(),
            receives_returned: [false; 2],
            reason: String::new(),
            lanes: [Lane::new(queue_max), Lane::new(queue_max)],
            psns,
            peer_is_ready: false,
            slots: None,
            message_bytes_max: 0,
            is_listed: false,
        }
    }

    pub(crate) fn has_work(&self) -> bool {
        self.lanes.iter().any(Lane::has_work)
    }

    pub(crate) fn outstanding(&self) -> u64 {
        self.lanes.iter().map(Lane::outstanding).sum()
    }

    /// Whether a command in flight holds the pairs of the connection.
    pub(crate) fn is_in_command(&self) -> bool {
        self.lanes.iter().any(Lane::is_in_command)
    }

    /// Returns the time of the next check without an event: the deadline, or now when the device has
    /// returned everything. A connection that ends waits for its pairs to return from a command, however
    /// long that takes, since their state is unknown until then.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        if self.phase.is_end() && self.is_in_command() {
            return None;
        }
        if self.phase == Phase::Draining && self.outstanding() == 0 {
            let is_drained = self.receives_returned.iter().all(|&returned| returned);
            let until = if is_drained { self.ended_at } else { self.ended_at + RECEIVES_RETURN_WITHIN };
            return Some(self.deadline.map_or(until, |deadline| deadline.min(until)));
        }
        self.deadline
    }

    /// Whether this side connects and has sent its hello: its pairs wait for the peer's.
    pub(crate) fn has_greeted(&self) -> bool {
        self.lanes.iter().all(|lane| matches!(lane.pair, Pair::Initialised(_)))
    }

    /// Returns the local hello; the lanes must have their pairs.
    pub(crate) fn hello(&self, local: &FabricResources) -> Handshake {
        let lane = |index: usize| LaneAddress {
            queue_pair: self.lanes[index].number().unwrap_or(0),
            psn: self.psns[index],
        };
        Handshake::Hello(local.hello([lane(0), lane(1)]))
    }

    /// Applies the peer's hello; returns the peer's ends of the local pairs.
    pub(crate) fn agree(&mut self, local: &FabricResources, hello: &Hello) -> Destination {
        let config = &local.config;
        let needs_route = local.port.needs_global_route || local.port.lid == 0 || hello.lid == 0;
        for lane in &mut self.lanes {
            lane.agree(LaneParameters {
                send_credits: hello.receive_credits.into(),
                receive_credits: config.receive_credits,
                segment_bytes: hello.receive_buffer_bytes.min(config.receive_buffer_bytes) as usize,
            });
        }
        self.slots = Some(hello.slots);
        self.message_bytes_max = local.port.message_bytes_max.min(hello.message_bytes_max);
        let lanes = [0, 1].map(|index| {
            let path = Path {
                queue_pair: hello.lanes[index].queue_pair,
                psn: hello.lanes[index].psn,
                gid: hello.gid,
                lid: hello.lid,
                is_global: local.port.link_layer == LinkLayer::Ethernet || needs_route,
                source_gid_index: u8::try_from(local.gid.index).unwrap_or(0),
                port: local.port.number,
                mtu: local.mtu().min(hello.mtu),
                service_level: config.service_levels[index],
                traffic_class: config.traffic_class,
                hop_limit: config.hop_limit,
                reads_as_target: local.reads_as_target(),
                receiver_not_ready_timer: config.receiver_not_ready_timer,
            };
            let retries = Retries {
                psn: self.psns[index],
                timeout: config.timeout,
                count: config.retry_count,
                receiver_not_ready: config.receiver_not_ready_retry,
                reads_as_initiator: local.reads_as_initiator().min(hello.reads_as_target),
            };
            (path, retries)
        });
        Destination { lanes, peer: self.address }
    }
}
