//! Hosts and the links between them. A link has a delay and a rate, and may hold all packets back.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use super::connections::{End, UnreportedClose};
use super::disks::DiskFaults;
use super::objects::{Kind, ObjectId};
use super::sockets::{Socket, SocketState};
use super::{Due, Kernel, MICROSECOND, Nanos};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct HostId(pub(super) u16);

impl HostId {
    /// The host on which a simulation starts.
    pub(crate) const WORLD: Self = Self(0);

    pub(super) fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// Returns the address of a host.
pub(crate) fn host_address(host: HostId) -> Ipv4Addr {
    Ipv4Addr::from(BASE + u32::from(host.0) + 1)
}

/// Returns the host of an address; `None` if no host has it.
pub(super) fn host_of(address: Ipv4Addr) -> Option<HostId> {
    u32::from(address).checked_sub(BASE + 1).and_then(|number| u16::try_from(number).ok()).map(HostId)
}

/// 10.0.0.0.
const BASE: u32 = 0x0A00_0000;
/// First port for sockets without an explicit one.
pub(super) const EPHEMERAL: u16 = 32_768;
/// Delay within a host.
const LOCAL_DELAY: Nanos = 10 * MICROSECOND;

#[derive(Debug)]
pub(super) struct Host {
    pub(super) name: String,
    /// Offset of the host's wall clock.
    pub(super) clock_offset: i64,
    pub(super) next_port: u16,
    /// Whether the host has no power: it answers nothing, not even with a refusal.
    pub(super) is_powered_off: bool,
    pub(super) disk: DiskFaults,
}

/// Counts of what the network did to connections.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct NetworkCounts {
    /// Ends of connections that were cut.
    pub(crate) cut_ends: u64,
    /// Packets that were lost, and so came late.
    pub(crate) lost_packets: u64,
    /// Writes that found the reader's buffer full.
    pub(crate) full_windows: u64,
}

/// Delay, loss and rate of the link between two hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LinkFaults {
    /// Shortest and longest delay.
    pub(crate) delay: (Nanos, Nanos),
    /// One packet in this many is lost and arrives `lost_delay` later; 0: none.
    pub(crate) lose_one_in: u64,
    pub(crate) lost_delay: Nanos,
    /// Bytes per second; 0: unlimited.
    pub(crate) rate: u64,
    /// One write in this many arrives in parts; 0: none.
    pub(crate) split_one_in: u64,
    /// Whether no packet gets through.
    pub(crate) is_down: bool,
}

impl Default for LinkFaults {
    fn default() -> Self {
        Self {
            delay: (20 * MICROSECOND, 60 * MICROSECOND),
            lose_one_in: 0,
            lost_delay: 0,
            rate: 0,
            split_one_in: 0,
            is_down: false,
        }
    }
}

/// Ways in which connections are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Both ends get a reset.
    Reset,
    /// Neither end is notified.
    Silently,
}

#[derive(Debug, Default)]
pub(super) struct Network {
    pub(super) links: BTreeMap<(HostId, HostId), LinkFaults>,
    pub(super) listeners: BTreeMap<(HostId, u16), Vec<ObjectId>>,
    pub(super) paths: BTreeMap<Vec<u8>, ObjectId>,
}

impl Kernel {
    pub(super) fn add_host(&mut self, name: &str) -> HostId {
        let id = HostId(self.hosts.len() as u16);
        self.hosts.push(Host {
            name: name.to_owned(),
            clock_offset: 0,
            next_port: EPHEMERAL,
            is_powered_off: false,
            disk: DiskFaults::default(),
        });
        id
    }

    pub(super) fn link(&self, a: HostId, b: HostId) -> LinkFaults {
        if a == b {
            return LinkFaults { delay: (LOCAL_DELAY, LOCAL_DELAY), ..LinkFaults::default() };
        }
        self.network.links.get(&(a.min(b), a.max(b))).copied().unwrap_or_default()
    }

    pub(super) fn set_link(&mut self, a: HostId, b: HostId, faults: LinkFaults) {
        let was_down = self.link(a, b).is_down;
        self.trace.step("link", self.now, u64::from(a.0) << 16 | u64::from(b.0), u64::from(faults.is_down));
        self.network.links.insert((a.min(b), a.max(b)), faults);
        if was_down && !faults.is_down {
            for id in self.between(a, b) {
                self.schedule(self.now, Due::Arrival(id));
            }
        }
    }

    /// Returns the ends of open connections between two hosts.
    pub(super) fn between(&self, a: HostId, b: HostId) -> Vec<ObjectId> {
        let joins = |socket: &Socket, end: &End| {
            (socket.host, end.peer_host) == (a, b) || (socket.host, end.peer_host) == (b, a)
        };
        let ends = self.objects.iter().filter(|(_, object)| match &object.kind {
            Kind::Socket(socket) => matches!(&socket.state, SocketState::Open(end) if joins(socket, end)),
            _ => false,
        });
        ends.map(|(id, _)| *id).collect()
    }

    pub(super) fn cut(&mut self, a: HostId, b: HostId, how: Cut) {
        self.trace.step("cut", self.now, u64::from(a.0), u64::from(b.0));
        for id in self.between(a, b) {
            let Some(Socket { state: SocketState::Open(end), error, .. }) = self.socket(id) else { continue };
            end.peer = None;
            match how {
                Cut::Reset => {
                    end.is_reset = true;
                    *error = libc::ECONNRESET;
                }
                Cut::Silently => end.unreported_close = Some(UnreportedClose::Forgotten),
            }
            end.flight.clear();
            end.flight_bytes = 0;
            self.network_counts.cut_ends += 1;
            self.changed(id);
            self.schedule_give_up(id);
        }
    }

    pub(super) fn target_host(&self, from: HostId, ip: Ipv4Addr) -> Option<HostId> {
        if ip.is_loopback() || ip.is_unspecified() {
            return Some(from);
        }
        host_of(ip).filter(|host| host.index() < self.hosts.len())
    }

    pub(super) fn draw_delay(&mut self, a: HostId, b: HostId) -> Nanos {
        let link = self.link(a, b);
        let mut delay = self.random.between(link.delay.0, link.delay.1.max(link.delay.0));
        if self.random.one_in(link.lose_one_in) {
            delay += link.lost_delay;
            self.network_counts.lost_packets += 1;
        }
        delay
    }

    pub(super) fn is_powered_off(&self, host: HostId) -> bool {
        self.hosts[host.index()].is_powered_off
    }
}
