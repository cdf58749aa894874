//! Sockets: bound, listening, connecting, and connected.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::net::Ipv4Addr;

use super::connections::{End, WINDOW};
use super::network::{EPHEMERAL, HostId, host_address, host_of};
use super::objects::{Kind, ObjectId};
use super::threads::ProcessId;
use super::{Due, Kernel, Nanos, SECOND};
/// Time until the first retry of a connection attempt; it doubles with each retry.
const CONNECT_AGAIN: Nanos = SECOND;
const CONNECT_ATTEMPTS: u32 = 6;
/// Time for which Linux retransmits unacknowledged bytes (`tcp_retries2` of 15).
pub(super) const UNACKNOWLEDGED_MAX: Nanos = 924 * SECOND;

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
    /// Keep-alive options, which decide when an idle connection without a sign of its peer is given up.
    pub(super) keep_alive: KeepAlive,
    /// Time without an acknowledgement after which a connection is given up.
    pub(super) user_timeout: Nanos,
    /// Value of `SO_RCVBUF`, which counts where it was set before the connection was made.
    pub(super) receive_buffer: usize,
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
            receive_buffer: WINDOW,
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

    pub(super) fn free_port(&mut self, host: HostId) -> u16 {
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

    /// Starts to connect; the outcome is a change of the object.
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

    /// Handles the arrival of a connection attempt at its target.
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
        let is_down =
            target.is_none_or(|target| self.link(host, target).is_down || self.is_powered_off(target));
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
        accepted.state = SocketState::Open(End::new(id, host, WINDOW));
        let accepted = self.add_object(Kind::Socket(Box::new(accepted)), false);
        if let Some(Socket { state: SocketState::Listening { waiting, .. }, .. }) = self.socket(listener) {
            waiting.push_back(accepted);
        }
        if let Some(socket) = self.socket(id) {
            socket.state = SocketState::Open(End::new(accepted, target, socket.receive_buffer));
        }
        self.trace.step("connected", self.now, u64::from(owner.0), u64::from(target.0));
        self.changed(listener);
        self.changed(id);
    }

    pub(super) fn fail_connect(&mut self, id: ObjectId, error: c_int) {
        if let Some(socket) = self.socket(id) {
            socket.state = SocketState::Failed;
            socket.error = error;
        }
        self.trace.step("refused", self.now, error as u64, 0);
        self.changed(id);
    }

    /// Returns the next connection of a listener, as an object without a descriptor.
    pub(super) fn accept(&mut self, id: ObjectId) -> Result<ObjectId, c_int> {
        match self.socket(id).map(|socket| &mut socket.state) {
            Some(SocketState::Listening { waiting, .. }) => waiting.pop_front().ok_or(libc::EAGAIN),
            _ => Err(libc::EINVAL),
        }
    }

    /// Creates two connected sockets.
    pub(super) fn pair(&mut self) -> (ObjectId, ObjectId) {
        let (host, owner) = (self.host(), self.process());
        let first = self.add_object(Kind::Socket(Box::new(Socket::new(false, host, owner))), false);
        let second = self.add_object(Kind::Socket(Box::new(Socket::new(false, host, owner))), false);
        for (id, peer) in [(first, second), (second, first)] {
            if let Some(socket) = self.socket(id) {
                socket.state = SocketState::Open(End::new(peer, host, WINDOW));
            }
        }
        (first, second)
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
