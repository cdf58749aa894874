//! One peer: its handshake, its two lanes, and how it ends.
//!
//! ```text
//! initiator: Greeting ─(Make)─▶ hello sent ── peer's hello ──▶ Preparing ─(Connect)─▶ Readying ─▶ Established
//! acceptor:  peer's hello ──▶ Preparing ─(MakeConnected)─▶ hello sent, Readying ─▶ Established
//! any of them ── begin_end ─(Stop)─▶ Draining ── drained, or too late ─(Destroy)─▶ Destroying ─▶ removed
//! ```
//!
//! In parentheses: the [`Command`](crate::commands::Command) that is in flight meanwhile. An end waits for it.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use dataplane_fabric::PeerId;
use dataplane_memory::SlabKind;

use crate::commands::{Abandoned, Destination};
use crate::config::VerbsConfig;
use crate::device::LinkLayer;
use crate::lane::{Agreement, Lane, Pair};
use crate::local::Local;
use crate::queue_pair::{Path, Retries};
use crate::wire::{Handshake, Hello, LaneAddress, RemoteSlots};

/// How far a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The peer's hello is awaited, for as long as [`Handshakes`](dataplane_fabric::handshake::Handshakes) allows.
    Greeting,
    /// The peer's hello is here; our pairs are being brought to where they can send to it.
    Preparing,
    /// Our pairs are ready; the peer's word that its are is awaited.
    Readying,
    /// Work flows.
    Established,
    /// The pairs fail, or have failed; the device returns what was in flight.
    Draining,
    /// The pairs are being destroyed.
    Destroying,
}

impl Phase {
    pub(crate) fn is_end(self) -> bool {
        matches!(self, Self::Draining | Self::Destroying)
    }
}

/// How long a failed pair may take to give back the receives that it holds, where the device does not say when it has
/// (`IBV_EVENT_QP_LAST_WQE_REACHED`, ibv_destroy_qp(3)). A pair destroyed earlier takes them with it.
const RECEIVES_RETURN_WITHIN: Duration = Duration::from_millis(20);

/// A peer.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) peer: PeerId,
    pub(crate) address: SocketAddr,
    pub(crate) is_initiator: bool,
    /// Whether the user knows of it.
    pub(crate) is_announced: bool,
    pub(crate) abandoned: Abandoned,
    pub(crate) phase: Phase,
    /// When the phase is over, done or not.
    pub(crate) deadline: Option<Instant>,
    /// When its pairs failed; before that, when it began to end or was made.
    pub(crate) ended_at: Instant,
    /// By lane: whether the device has said that its pair holds no receive of the shared queue any more.
    pub(crate) receives_returned: [bool; 2],
    pub(crate) reason: String,
    pub(crate) lanes: [Lane; 2],
    pub(crate) psns: [u32; 2],
    /// Whether the peer has said that its pairs are ready, before ours were.
    pub(crate) peer_is_ready: bool,
    pub(crate) slots: Option<[RemoteSlots; SlabKind::COUNT]>,
    pub(crate) message_bytes_max: u32,
    /// Whether the fabric's list of peers with work names it.
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

    /// Whether a command in flight has its pairs.
    pub(crate) fn is_in_command(&self) -> bool {
        self.lanes.iter().any(Lane::is_in_command)
    }

    /// When to look at it without news: at its deadline, or now when the device has returned everything. An end waits for its
    /// pairs to come back, however long that takes: nothing is known of them.
    pub(crate) fn next_look(&self) -> Option<Instant> {
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

    /// Whether our hello is sent, on the side that connects: its pairs wait for the peer's.
    pub(crate) fn has_greeted(&self) -> bool {
        self.lanes.iter().all(|lane| matches!(lane.pair, Pair::Initialised(_)))
    }

    /// Our hello; the lanes must have their pairs.
    pub(crate) fn hello(&self, local: &Local) -> Handshake {
        let lane = |index: usize| LaneAddress {
            queue_pair: self.lanes[index].number().unwrap_or(0),
            psn: self.psns[index],
        };
        Handshake::Hello(local.hello([lane(0), lane(1)]))
    }

    /// Takes what the peer says of itself; the peer's ends of our pairs.
    pub(crate) fn agree(&mut self, local: &Local, hello: &Hello) -> Destination {
        let config = &local.config;
        let needs_route = local.port.needs_global_route || local.port.lid == 0 || hello.lid == 0;
        for lane in &mut self.lanes {
            lane.agree(Agreement {
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
