//! Hosts, links between them, and sockets.
//!
//! Bytes of a connection arrive in order, as over TCP: a lost packet is a late one. A link has a delay, a rate, and may hold
//! everything back; connections end by a close, a reset, or without anybody hearing of it.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;
use std::net::Ipv4Addr;

use super::disks::DiskFaults;
use super::objects::{Kind, ObjectId};
use super::threads::ProcessId;
use super::{Due, Kernel, MICROSECOND, Nanos, SECOND};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct HostId(pub(super) u16);

impl HostId {
    /// The host on which a simulation begins.
    pub(crate) const WORLD: Self = Self(0);

    pub(super) fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// The address of a host.
pub(crate) fn host_address(host: HostId) -> Ipv4Addr {
    Ipv4Addr::from(BASE + u32::from(host.0) + 1)
}

/// The host of an address; `None` for one that nobody has.
fn host_of(address: Ipv4Addr) -> Option<HostId> {
    u32::from(address).checked_sub(BASE + 1).and_then(|number| u16::try_from(number).ok()).map(HostId)
}

/// 10.0.0.0.
const BASE: u32 = 0x0A00_0000;
pub(super) const EPHEMERAL: u16 = 32_768;
/// First wait for an answer to an attempt to connect; each later one is twice as long.
const CONNECT_AGAIN: Nanos = SECOND;
const CONNECT_ATTEMPTS: u32 = 6;
/// How long Linux sends bytes again that nobody acknowledges (`tcp_retries2` of 15).
const UNACKNOWLEDGED_MAX: Nanos = 924 * SECOND;
/// Bytes that fit between a sender and a reader.
const WINDOW: usize = 256 << 10;
/// Delay within a host.
const LOCAL_DELAY: Nanos = 10 * MICROSECOND;

#[derive(Debug)]
pub(super) struct Host {
    pub(super) name: String,
    /// Offset of the host's wall clock.
    pub(super) clock_offset: i64,
    pub(super) next_port: u16,
    /// The host has no power: nothing answers, not even with a refusal.
    pub(super) is_dark: bool,
    pub(super) disk: DiskFaults,
}

/// Delay, loss and rate of the link between two hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LinkFaults {
    /// Shortest and longest delay.
    pub(crate) delay: (Nanos, Nanos),
    /// One packet in so many is lost and comes `lost_delay` later; 0 is none.
    pub(crate) lose_one_in: u64,
    pub(crate) lost_delay: Nanos,
    /// Bytes per second; 0 is without end.
    pub(crate) rate: u64,
    /// One write in so many arrives in parts; 0 is none.
    pub(crate) split_one_in: u64,
    /// Nothing gets through.
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

/// How connections end before their time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Both ends get a reset.
    Reset,
    /// Neither end hears of it.
    Silently,
}

#[derive(Debug, Default)]
pub(super) struct Network {
    links: BTreeMap<(HostId, HostId), LinkFaults>,
    listeners: BTreeMap<(HostId, u16), Vec<ObjectId>>,
    paths: BTreeMap<Vec<u8>, ObjectId>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Address {
    Inet(Ipv4Addr, u16),
    Path(Vec<u8>),
}

#[derive(Debug)]
pub(super) struct Socket {
    pub(super) is_inet: bool,
    pub(super) host: HostId,
    pub(super) owner: ProcessId,
    pub(super) state: SocketState,
    pub(super) local: Option<Address>,
    pub(super) remote: Option<Address>,
    /// Value of `SO_ERROR`.
    pub(super) error: c_int,
    pub(super) shares_port: bool,
    pub(super) receive_timeout: Nanos,
    pub(super) send_timeout: Nanos,
    /// When an idle connection without a sign of its peer is given up.
    pub(super) keep_alive: KeepAlive,
    /// After so long without an acknowledgement a connection is given up.
    pub(super) user_timeout: Nanos,
}

/// The options of keep-alive.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeepAlive {
    pub(super) is_on: bool,
    pub(super) idle: Nanos,
    pub(super) interval: Nanos,
    pub(super) probes: u64,
}

#[derive(Debug)]
pub(super) enum SocketState {
    Idle,
    Listening { waiting: VecDeque<ObjectId>, backlog: usize },
    Connecting { attempts: u32 },
    Open(End),
    Failed,
}

/// One end of a connection.
#[derive(Debug)]
pub(super) struct End {
    /// The other end, while it is there.
    peer: Option<ObjectId>,
    peer_host: HostId,
    /// The other end is gone, and nothing tells.
    desertion: Option<Desertion>,
    /// Bytes that were sent to an end that is gone.
    sent_in_vain: usize,
    inbox: VecDeque<u8>,
    /// Packets on their way to this end.
    flight: VecDeque<(Nanos, Packet)>,
    flight_bytes: usize,
    has_end: bool,
    is_reset: bool,
    write_shut: bool,
    read_shut: bool,
    /// When the last byte that this end has sent will have left it.
    busy_until: Nanos,
}

/// Why nothing tells that the other end is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Desertion {
    /// The peer's machine lost its power: once that is back it answers with a reset.
    Power,
    /// Something between has forgotten the connection.
    Forgotten,
}

#[derive(Debug)]
enum Packet {
    Bytes(Vec<u8>),
    End,
    Reset,
}

impl End {
    fn new(peer: ObjectId, peer_host: HostId) -> Self {
        Self {
            peer: Some(peer),
            peer_host,
            desertion: None,
            sent_in_vain: 0,
            inbox: VecDeque::new(),
            flight: VecDeque::new(),
            flight_bytes: 0,
            has_end: false,
            is_reset: false,
            write_shut: false,
            read_shut: false,
            busy_until: 0,
        }
    }

    /// Is over from now on; returns the other end, if it is there.
    pub(super) fn abort(&mut self) -> Option<ObjectId> {
        self.is_reset = true;
        self.inbox.clear();
        self.peer.take()
    }

    pub(super) fn peer_host(&self) -> HostId {
        self.peer_host
    }

    fn room(&self) -> usize {
        WINDOW.saturating_sub(self.flight_bytes + self.inbox.len())
    }
}

impl Socket {
    pub(super) fn new(is_inet: bool, host: HostId, owner: ProcessId) -> Self {
        Self {
            is_inet,
            host,
            owner,
            state: SocketState::Idle,
            local: None,
            remote: None,
            error: 0,
            shares_port: false,
            receive_timeout: 0,
            send_timeout: 0,
            keep_alive: KeepAlive { is_on: false, idle: 7200 * SECOND, interval: 75 * SECOND, probes: 9 },
            user_timeout: UNACKNOWLEDGED_MAX,
        }
    }

    pub(super) fn describe(&self) -> String {
        let state = match &self.state {
            SocketState::Idle => "idle",
            SocketState::Listening { .. } => "listening",
            SocketState::Connecting { .. } => "connecting",
            SocketState::Open(_) => "open",
            SocketState::Failed => "failed",
        };
        format!("{state} {:?} -> {:?}", self.local, self.remote)
    }
}

impl Kernel {
    pub(super) fn add_host(&mut self, name: &str) -> HostId {
        let id = HostId(self.hosts.len() as u16);
        self.hosts.push(Host {
            name: name.to_owned(),
            clock_offset: 0,
            next_port: EPHEMERAL,
            is_dark: false,
            disk: DiskFaults::default(),
        });
        id
    }

    fn link(&self, a: HostId, b: HostId) -> LinkFaults {
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

    /// Ends of open connections between two hosts.
    fn between(&self, a: HostId, b: HostId) -> Vec<ObjectId> {
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
                Cut::Silently => end.desertion = Some(Desertion::Forgotten),
            }
            end.flight.clear();
            end.flight_bytes = 0;
            self.changed(id);
            self.await_sign(id);
        }
    }

    /// A connection whose other end is silent for good is given up when its options say so.
    fn await_sign(&mut self, id: ObjectId) {
        let now = self.now;
        let Some(socket) = self.socket(id) else { return };
        let (keep_alive, limit) = (socket.keep_alive, socket.user_timeout);
        if keep_alive.is_on && matches!(&socket.state, SocketState::Open(end) if end.desertion.is_some()) {
            // With a user timeout Linux gives up at the first unanswered probe behind it (`tcp_keepalive_timer`).
            let silent = match limit {
                UNACKNOWLEDGED_MAX => keep_alive.idle + keep_alive.interval * keep_alive.probes,
                limit => {
                    let probes = limit.saturating_sub(keep_alive.idle).div_ceil(keep_alive.interval).max(1);
                    keep_alive.idle + keep_alive.interval * probes
                }
            };
            self.schedule(now + silent, Due::GiveUp(id));
        }
    }

    /// A connection has been without a sign of its peer for too long.
    pub(super) fn give_up(&mut self, id: ObjectId) {
        let now = self.now;
        let Some(socket) = self.socket(id) else { return };
        let (host, limit) = (socket.host, socket.user_timeout);
        let SocketState::Open(end) = &socket.state else { return };
        let (peer, peer_host, is_deserted, was_reset) =
            (end.peer, end.peer_host, end.desertion.is_some(), end.is_reset);
        let is_held_up = self.link(host, peer_host).is_down
            && peer.is_some_and(|peer| match self.socket(peer) {
                Some(Socket { state: SocketState::Open(end), .. }) => {
                    end.flight.front().is_some_and(|(at, _)| at + limit <= now + SECOND)
                }
                _ => false,
            });
        if was_reset || !(is_deserted || is_held_up) {
            return;
        }
        if let Some(Socket { state: SocketState::Open(end), error, .. }) = self.socket(id) {
            end.is_reset = true;
            *error = libc::ETIMEDOUT;
            self.changed(id);
        }
    }

    pub(super) fn socket_readiness(&self, socket: &Socket) -> u32 {
        let bits = match &socket.state {
            SocketState::Idle => libc::EPOLLOUT | libc::EPOLLHUP,
            SocketState::Listening { waiting, .. } => {
                if waiting.is_empty() {
                    0
                } else {
                    libc::EPOLLIN
                }
            }
            SocketState::Connecting { .. } => 0,
            SocketState::Failed => libc::EPOLLERR | libc::EPOLLHUP | libc::EPOLLIN | libc::EPOLLOUT,
            SocketState::Open(end) => {
                let mut bits = 0;
                if end.is_reset {
                    bits |=
                        libc::EPOLLERR | libc::EPOLLHUP | libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP;
                }
                if !end.inbox.is_empty() {
                    bits |= libc::EPOLLIN;
                }
                if end.has_end || end.read_shut {
                    bits |= libc::EPOLLIN | libc::EPOLLRDHUP;
                }
                if (end.has_end || end.read_shut) && end.write_shut {
                    bits |= libc::EPOLLHUP;
                }
                if self.room_towards(end) > 0 || end.write_shut {
                    bits |= libc::EPOLLOUT;
                }
                bits
            }
        };
        bits as u32
    }

    /// Bytes that an end may send now.
    fn room_towards(&self, end: &End) -> usize {
        let Some(peer) = end.peer else { return WINDOW.saturating_sub(end.sent_in_vain) };
        match self.objects.get(&peer).map(|object| &object.kind) {
            Some(Kind::Socket(socket)) => match &socket.state {
                SocketState::Open(end) => end.room(),
                _ => WINDOW,
            },
            _ => WINDOW,
        }
    }

    pub(super) fn bind(&mut self, id: ObjectId, address: Address) -> Result<(), c_int> {
        let Some(socket) = self.socket(id) else { return Err(libc::ENOTSOCK) };
        let (host, shares) = (socket.host, socket.shares_port);
        let address = match address {
            Address::Inet(ip, 0) => Address::Inet(ip, self.free_port(host)),
            Address::Inet(ip, port) => {
                let taken = self.network.listeners.get(&(host, port)).cloned().unwrap_or_default();
                let in_use = taken.iter().any(|other| match self.socket(*other) {
                    Some(other) => !(shares && other.shares_port) && conflicts(other.local.as_ref(), ip),
                    None => false,
                });
                if in_use {
                    return Err(libc::EADDRINUSE);
                }
                if !ip.is_unspecified() && !ip.is_loopback() && host_of(ip) != Some(host) {
                    return Err(libc::EADDRNOTAVAIL);
                }
                Address::Inet(ip, port)
            }
            Address::Path(path) => {
                if self.network.paths.contains_key(&path) {
                    return Err(libc::EADDRINUSE);
                }
                self.network.paths.insert(path.clone(), id);
                Address::Path(path)
            }
        };
        if let Some(socket) = self.socket(id) {
            socket.local = Some(address);
        }
        Ok(())
    }

    fn free_port(&mut self, host: HostId) -> u16 {
        loop {
            let state = &mut self.hosts[host.index()];
            let port = state.next_port;
            state.next_port = if port >= 60_000 { EPHEMERAL } else { port + 1 };
            if !self.network.listeners.contains_key(&(host, port)) {
                return port;
            }
        }
    }

    pub(super) fn listen(&mut self, id: ObjectId, backlog: c_int) -> Result<(), c_int> {
        let Some(socket) = self.socket(id) else { return Err(libc::ENOTSOCK) };
        socket.state = SocketState::Listening {
            waiting: VecDeque::new(),
            backlog: usize::try_from(backlog).unwrap_or(1).max(1),
        };
        let host = socket.host;
        if socket.local.is_none() && socket.is_inet {
            let port = self.free_port(host);
            if let Some(socket) = self.socket(id) {
                socket.local = Some(Address::Inet(Ipv4Addr::UNSPECIFIED, port));
            }
        }
        if let Some(Socket { local: Some(Address::Inet(_, port)), .. }) = self.socket(id) {
            let port = *port;
            self.network.listeners.entry((host, port)).or_default().push(id);
            self.trace.step("listen", self.now, u64::from(host.0), u64::from(port));
        }
        Ok(())
    }

    /// Begins to connect; the outcome comes as a change of the object.
    pub(super) fn connect(&mut self, id: ObjectId, address: Address) -> Result<(), c_int> {
        let Some(socket) = self.socket(id) else { return Err(libc::ENOTSOCK) };
        match socket.state {
            SocketState::Idle => {}
            SocketState::Connecting { .. } => return Err(libc::EALREADY),
            SocketState::Open(_) => return Err(libc::EISCONN),
            _ => return Err(libc::EINVAL),
        }
        socket.state = SocketState::Connecting { attempts: 0 };
        socket.remote = Some(address.clone());
        let host = socket.host;
        if socket.local.is_none() && matches!(address, Address::Inet(..)) {
            let port = self.free_port(host);
            if let Some(socket) = self.socket(id) {
                socket.local = Some(Address::Inet(host_address(host), port));
            }
        }
        let delay = match &address {
            Address::Inet(ip, port) => {
                self.trace.step("connect", self.now, u64::from(u32::from(*ip)), u64::from(*port));
                self.target_host(host, *ip).map_or(0, |target| 2 * self.draw_delay(host, target))
            }
            Address::Path(_) => 0,
        };
        self.schedule(self.now + delay, Due::Connect(id));
        Ok(())
    }

    fn target_host(&self, from: HostId, ip: Ipv4Addr) -> Option<HostId> {
        if ip.is_loopback() || ip.is_unspecified() {
            return Some(from);
        }
        host_of(ip).filter(|host| host.index() < self.hosts.len())
    }

    fn draw_delay(&mut self, a: HostId, b: HostId) -> Nanos {
        let link = self.link(a, b);
        let mut delay = self.random.between(link.delay.0, link.delay.1.max(link.delay.0));
        if self.random.one_in(link.lose_one_in) {
            delay += link.lost_delay;
        }
        delay
    }

    /// An attempt to connect gets to where it shall.
    pub(super) fn reach(&mut self, id: ObjectId) {
        let Some(socket) = self.socket(id) else { return };
        let SocketState::Connecting { attempts } = &mut socket.state else { return };
        *attempts += 1;
        let (attempt, host, owner, local) = (*attempts, socket.host, socket.owner, socket.local.clone());
        let Some(remote) = socket.remote.clone() else { return };
        let (listener, target) = match &remote {
            Address::Path(path) => (self.network.paths.get(path).copied(), Some(host)),
            Address::Inet(ip, port) => {
                let target = self.target_host(host, *ip);
                let listeners =
                    target.and_then(|target| self.network.listeners.get(&(target, *port))).cloned();
                let fitting: Vec<ObjectId> = listeners
                    .unwrap_or_default()
                    .into_iter()
                    .filter(|id| self.socket(*id).is_some_and(|socket| accepts(socket.local.as_ref(), *ip)))
                    .collect();
                let chosen = (!fitting.is_empty()).then(|| *self.random.pick(&fitting));
                (chosen, target)
            }
        };
        let is_down = target.is_none_or(|target| self.link(host, target).is_down || self.is_dark(target));
        let is_full =
            listener.is_some_and(|listener| match self.socket(listener).map(|socket| &socket.state) {
                Some(SocketState::Listening { waiting, backlog }) => waiting.len() >= *backlog,
                _ => false,
            });
        if is_down || is_full {
            if attempt >= CONNECT_ATTEMPTS {
                self.fail_connect(id, libc::ETIMEDOUT);
            } else {
                self.schedule(self.now + (CONNECT_AGAIN << (attempt - 1)), Due::Connect(id));
            }
            return;
        }
        let (Some(listener), Some(target)) = (listener, target) else {
            self.fail_connect(id, libc::ECONNREFUSED);
            return;
        };
        let Some(Socket { state: SocketState::Listening { .. }, owner: server, is_inet, .. }) =
            self.socket(listener)
        else {
            self.fail_connect(id, libc::ECONNREFUSED);
            return;
        };
        let mut accepted = Socket::new(*is_inet, target, *server);
        accepted.local = Some(match &remote {
            Address::Inet(ip, port) if ip.is_unspecified() => Address::Inet(Ipv4Addr::LOCALHOST, *port),
            other => other.clone(),
        });
        accepted.remote = local;
        accepted.state = SocketState::Open(End::new(id, host));
        let accepted = self.add_object(Kind::Socket(Box::new(accepted)), false);
        if let Some(Socket { state: SocketState::Listening { waiting, .. }, .. }) = self.socket(listener) {
            waiting.push_back(accepted);
        }
        if let Some(socket) = self.socket(id) {
            socket.state = SocketState::Open(End::new(accepted, target));
        }
        self.trace.step("connected", self.now, u64::from(owner.0), u64::from(target.0));
        self.changed(listener);
        self.changed(id);
    }

    fn is_dark(&self, host: HostId) -> bool {
        self.hosts[host.index()].is_dark
    }

    fn fail_connect(&mut self, id: ObjectId, error: c_int) {
        if let Some(socket) = self.socket(id) {
            socket.state = SocketState::Failed;
            socket.error = error;
        }
        self.trace.step("refused", self.now, error as u64, 0);
        self.changed(id);
    }

    /// The next connection of a listener, as an object without a descriptor.
    pub(super) fn accept(&mut self, id: ObjectId) -> Result<ObjectId, c_int> {
        match self.socket(id).map(|socket| &mut socket.state) {
            Some(SocketState::Listening { waiting, .. }) => waiting.pop_front().ok_or(libc::EAGAIN),
            _ => Err(libc::EINVAL),
        }
    }

    /// Two connected sockets.
    pub(super) fn pair(&mut self) -> (ObjectId, ObjectId) {
        let (host, owner) = (self.host(), self.process());
        let first = self.add_object(Kind::Socket(Box::new(Socket::new(false, host, owner))), false);
        let second = self.add_object(Kind::Socket(Box::new(Socket::new(false, host, owner))), false);
        for (id, peer) in [(first, second), (second, first)] {
            if let Some(socket) = self.socket(id) {
                socket.state = SocketState::Open(End::new(peer, host));
            }
        }
        (first, second)
    }

    /// Reads what has arrived; 0 bytes are the end.
    pub(super) fn receive(
        &mut self,
        id: ObjectId,
        room: &mut [&mut [u8]],
        peek: bool,
    ) -> Result<usize, c_int> {
        let Some(socket) = self.socket(id) else { return Err(libc::ENOTSOCK) };
        let end = match &mut socket.state {
            SocketState::Open(end) => end,
            SocketState::Failed => return Err(std::mem::replace(&mut socket.error, 0).max(libc::ENOTCONN)),
            _ => return Err(libc::ENOTCONN),
        };
        if end.inbox.is_empty() {
            if end.is_reset {
                socket.error = 0;
                return Err(libc::ECONNRESET);
            }
            return if end.has_end || end.read_shut { Ok(0) } else { Err(libc::EAGAIN) };
        }
        let wanted: usize = room.iter().map(|part| part.len()).sum();
        let count = wanted.min(end.inbox.len());
        let mut done = 0;
        for part in room {
            let take = part.len().min(count - done);
            let (first, second) = end.inbox.as_slices();
            let from_first = first.len().saturating_sub(done).min(take);
            part[..from_first].copy_from_slice(&first[done.min(first.len())..][..from_first]);
            let begin = (done + from_first).saturating_sub(first.len());
            part[from_first..take].copy_from_slice(&second[begin..][..take - from_first]);
            done += take;
        }
        if !peek {
            let was_full = end.room() == 0;
            end.inbox.drain(..count);
            let peer = end.peer;
            if was_full && let Some(peer) = peer {
                self.changed(peer);
            }
        }
        Ok(count)
    }

    /// Sends as much as there is room for.
    pub(super) fn transmit(&mut self, id: ObjectId, parts: &[&[u8]]) -> Result<usize, c_int> {
        let now = self.now;
        let Some(socket) = self.socket(id) else { return Err(libc::ENOTSOCK) };
        let host = socket.host;
        let end = match &mut socket.state {
            SocketState::Open(end) => end,
            SocketState::Failed => return Err(libc::EPIPE),
            _ => return Err(libc::ENOTCONN),
        };
        if end.is_reset || end.write_shut {
            return Err(if std::mem::replace(&mut socket.error, 0) == 0 {
                libc::EPIPE
            } else {
                libc::ECONNRESET
            });
        }
        let (peer, peer_host, desertion, busy_until) =
            (end.peer, end.peer_host, end.desertion, end.busy_until);
        let total: usize = parts.iter().map(|part| part.len()).sum();
        if total == 0 {
            return Ok(0);
        }
        let Some(peer) = peer else { return self.send_in_vain(id, total, host, peer_host, desertion) };
        let room = match self.socket(peer) {
            Some(Socket { state: SocketState::Open(end), .. }) => end.room(),
            _ => WINDOW,
        };
        if room == 0 {
            return Err(libc::EAGAIN);
        }
        let count = total.min(room);
        let mut bytes = Vec::with_capacity(count);
        for part in parts {
            bytes.extend_from_slice(&part[..part.len().min(count - bytes.len())]);
        }
        let link = self.link(host, peer_host);
        let takes = (count as u64 * SECOND).checked_div(link.rate).unwrap_or(0);
        let leaves = now.max(busy_until) + takes;
        if let Some(Socket { state: SocketState::Open(end), .. }) = self.socket(id) {
            end.busy_until = leaves;
        }
        self.trace.step("send", now, u64::from(host.0) << 16 | u64::from(peer_host.0), count as u64);
        // Split bytes arrive in parts, each a packet of its own. A reader always gets all that has arrived, and a writer fills
        // all the room: event loops rely on it.
        while bytes.len() > 1 && self.random.one_in(link.split_one_in) {
            let rest = bytes.split_off(self.random.between(1, bytes.len() as u64 - 1) as usize);
            let at = leaves + self.draw_delay(host, peer_host);
            self.send_packet(peer, at, Packet::Bytes(std::mem::replace(&mut bytes, rest)));
        }
        let at = leaves + self.draw_delay(host, peer_host);
        self.send_packet(peer, at, Packet::Bytes(bytes));
        if link.is_down
            && let Some(limit) = self.socket(id).map(|socket| socket.user_timeout)
        {
            self.schedule(now + limit, Due::GiveUp(id));
        }
        Ok(count)
    }

    /// Sends to an end that is gone.
    fn send_in_vain(
        &mut self,
        id: ObjectId,
        total: usize,
        host: HostId,
        peer_host: HostId,
        desertion: Option<Desertion>,
    ) -> Result<usize, c_int> {
        let now = self.now;
        let answers = match desertion {
            None => true,
            Some(Desertion::Power) => !self.is_dark(peer_host),
            Some(Desertion::Forgotten) => false,
        };
        if answers {
            let at = now + 2 * self.draw_delay(host, peer_host);
            self.send_packet(id, at, Packet::Reset);
            return Ok(total);
        }
        let Some(Socket { state: SocketState::Open(end), user_timeout, .. }) = self.socket(id) else {
            return Err(libc::EPIPE);
        };
        let count = total.min(WINDOW.saturating_sub(end.sent_in_vain));
        if count == 0 {
            return Err(libc::EAGAIN);
        }
        let (is_first, limit) = (end.sent_in_vain == 0, *user_timeout);
        end.sent_in_vain += count;
        if is_first {
            self.schedule(now + limit, Due::GiveUp(id));
        }
        Ok(count)
    }

    /// Sends a reset to an end, which has no other end any more.
    pub(super) fn send_reset(&mut self, to: ObjectId, now: Nanos, host: HostId, peer_host: HostId) {
        let at = now + self.draw_delay(host, peer_host);
        if let Some(Socket { state: SocketState::Open(end), .. }) = self.socket(to) {
            end.peer = None;
        }
        self.send_packet(to, at, Packet::Reset);
    }

    /// Puts a packet on its way to an end; none overtakes another.
    fn send_packet(&mut self, to: ObjectId, at: Nanos, packet: Packet) {
        let Some(Socket { state: SocketState::Open(end), .. }) = self.socket(to) else { return };
        let at = end.flight.back().map_or(at, |(last, _)| at.max(*last));
        if let Packet::Bytes(bytes) = &packet {
            end.flight_bytes += bytes.len();
        }
        end.flight.push_back((at, packet));
        self.schedule(at, Due::Arrival(to));
    }

    pub(super) fn arrive(&mut self, id: ObjectId) {
        let now = self.now;
        let Some(Socket { state: SocketState::Open(end), host, .. }) = self.socket(id) else { return };
        let (host, peer_host) = (*host, end.peer_host);
        if self.link(host, peer_host).is_down {
            return;
        }
        let Some(Socket { state: SocketState::Open(end), error, .. }) = self.socket(id) else { return };
        let mut changed = false;
        while end.flight.front().is_some_and(|(at, _)| *at <= now) {
            let Some((_, packet)) = end.flight.pop_front() else { break };
            changed = true;
            match packet {
                Packet::Bytes(bytes) => {
                    end.flight_bytes -= bytes.len();
                    end.inbox.extend(bytes);
                }
                Packet::End => end.has_end = true,
                Packet::Reset => {
                    end.is_reset = true;
                    end.inbox.clear();
                    *error = libc::ECONNRESET;
                }
            }
        }
        if changed {
            self.changed(id);
        }
    }

    /// Ends a direction of a connection, or both.
    pub(super) fn shut(&mut self, id: ObjectId, reads: bool, writes: bool) -> Result<(), c_int> {
        let now = self.now;
        let Some(Socket { state: SocketState::Open(end), host, .. }) = self.socket(id) else {
            return Err(libc::ENOTCONN);
        };
        end.read_shut |= reads;
        let ends = writes && !end.write_shut;
        end.write_shut |= writes;
        let (peer, host, peer_host) = (end.peer, *host, end.peer_host);
        if ends && let Some(peer) = peer {
            let at = now + self.draw_delay(host, peer_host);
            self.send_packet(peer, at, Packet::End);
        }
        self.changed(id);
        Ok(())
    }

    /// A socket is closed by its last descriptor.
    pub(super) fn hang_up(&mut self, id: ObjectId, silently: bool) {
        let now = self.now;
        let Some(socket) = self.socket(id) else { return };
        let (host, local) = (socket.host, socket.local.clone());
        match &mut socket.state {
            SocketState::Listening { waiting, .. } => {
                let waiting = std::mem::take(waiting);
                for accepted in waiting {
                    self.hang_up(accepted, silently);
                    self.objects.remove(&accepted);
                }
            }
            SocketState::Open(end) => {
                let has_unread = !end.inbox.is_empty() || end.flight_bytes > 0;
                let (peer, peer_host, was_shut) = (end.peer, end.peer_host, end.write_shut);
                let Some(peer) = peer else { return };
                let at = now + self.draw_delay(host, peer_host);
                if let Some(Socket { state: SocketState::Open(end), .. }) = self.socket(peer) {
                    end.peer = None;
                    end.desertion = silently.then_some(Desertion::Power);
                }
                self.await_sign(peer);
                if !silently && has_unread {
                    self.send_packet(peer, at, Packet::Reset);
                } else if !silently && !was_shut {
                    self.send_packet(peer, at, Packet::End);
                }
            }
            _ => {}
        }
        match local {
            Some(Address::Inet(_, port)) => {
                if let Some(listeners) = self.network.listeners.get_mut(&(host, port)) {
                    listeners.retain(|listener| *listener != id);
                    if listeners.is_empty() {
                        self.network.listeners.remove(&(host, port));
                    }
                }
            }
            Some(Address::Path(path)) if self.network.paths.get(&path) == Some(&id) => {
                self.network.paths.remove(&path);
            }
            _ => {}
        }
    }

    /// Bytes that were sent and have not arrived.
    pub(super) fn in_flight_to_peer(&mut self, id: ObjectId) -> usize {
        let Some(Socket { state: SocketState::Open(end), .. }) = self.socket(id) else { return 0 };
        let Some(peer) = end.peer else { return 0 };
        match self.socket(peer) {
            Some(Socket { state: SocketState::Open(end), .. }) => end.flight_bytes,
            _ => 0,
        }
    }

    /// Bytes that can be read at once.
    pub(super) fn unread(&mut self, id: ObjectId) -> usize {
        match self.socket(id) {
            Some(Socket { state: SocketState::Open(end), .. }) => end.inbox.len(),
            _ => 0,
        }
    }
}

fn conflicts(taken: Option<&Address>, ip: Ipv4Addr) -> bool {
    match taken {
        Some(Address::Inet(other, _)) => *other == ip || other.is_unspecified() || ip.is_unspecified(),
        _ => false,
    }
}

fn accepts(bound: Option<&Address>, ip: Ipv4Addr) -> bool {
    match bound {
        Some(Address::Inet(other, _)) => *other == ip || other.is_unspecified() || ip.is_unspecified(),
        _ => true,
    }
}
