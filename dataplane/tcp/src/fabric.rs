//! The fabric: accepts, connects, posts and polls. Driven by one thread.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use dataplane_fabric::{
    ConnectError, Event, Fabric, Full, MESSAGE_BYTES_MAX, Operation, PeerId, WorkRequest,
};
use dataplane_memory::Slab;
use io_uring::{opcode, types};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::TcpError;
use crate::connection::{Connection, Phase};
use crate::ring::{OperationKind, Ring, Token};

/// Most connections of one node.
pub const CONNECTIONS_MAX: usize = 256;
/// Unacknowledged data older than this means that the peer is dead (TCP_USER_TIMEOUT).
const PEER_DEAD_AFTER: Duration = Duration::from_secs(10);
/// Events that may wait for `poll` before no more completions are reaped.
const PENDING_EVENTS_MAX: usize = 16_384;
/// The token of the listener; peers start at 1.
const LISTENER: u64 = 0;
const BACKLOG: i32 = 128;

/// TCP between hosts.
pub struct TcpFabric {
    ring: Ring,
    slab: Arc<Slab>,
    listener: Option<OwnedFd>,
    listening_on: Option<SocketAddr>,
    connections: BTreeMap<u64, Box<Connection>>,
    events: VecDeque<Event>,
    next_peer: u64,
}

impl TcpFabric {
    /// A node whose peers may write into `slab`; with an address, others can connect to it there (port 0:
    /// see [`TcpFabric::listening_on`]).
    pub fn new(slab: Arc<Slab>, listen: Option<SocketAddr>) -> Result<Self, TcpError> {
        let mut fabric = Self {
            ring: Ring::new()?,
            slab,
            listener: None,
            listening_on: None,
            connections: BTreeMap::new(),
            events: VecDeque::new(),
            next_peer: 1,
        };
        if let Some(address) = listen {
            let system = |error: rustix::io::Errno| TcpError::System {
                operation: format!("listen on {address}"),
                error: error.into(),
            };
            let listener = new_socket(&address).map_err(system)?;
            sockopt::set_socket_reuseaddr(&listener, true).map_err(system)?;
            rustix::net::bind(&listener, &address).map_err(system)?;
            rustix::net::listen(&listener, BACKLOG).map_err(system)?;
            fabric.listening_on =
                rustix::net::getsockname(&listener).ok().and_then(|name| SocketAddr::try_from(name).ok());
            fabric.listener = Some(listener);
            fabric.arm_accept();
            fabric.ring.submit();
        }
        Ok(fabric)
    }

    /// The address that peers connect to.
    #[must_use]
    pub fn listening_on(&self) -> Option<SocketAddr> {
        self.listening_on
    }

    fn arm_accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        let entry =
            opcode::Accept::new(types::Fd(listener.as_raw_fd()), std::ptr::null_mut(), std::ptr::null_mut())
                .flags(libc::SOCK_CLOEXEC)
                .build();
        // SAFETY: no buffers; the listener is open as long as the fabric, which reaps before it is dropped.
        unsafe { self.ring.push(entry, Token { connection: LISTENER, kind: OperationKind::Accept }) };
    }

    fn new_peer(&mut self) -> PeerId {
        let peer = PeerId(self.next_peer);
        self.next_peer += 1;
        peer
    }

    fn accepted(&mut self, result: i32) {
        self.arm_accept();
        if result < 0 {
            return;
        }
        // SAFETY: the kernel just made this descriptor for us and nobody else owns it.
        let socket = unsafe { OwnedFd::from_raw_fd(result) };
        if self.connections.len() >= CONNECTIONS_MAX {
            return;
        }
        tune(&socket);
        let peer = self.new_peer();
        let connection = Connection::new(socket, peer, false, Phase::Greeting);
        self.connections.insert(peer.0, connection);
        self.arm_receive(peer.0);
        self.arm_send(peer.0);
    }

    fn connected(&mut self, number: u64, result: i32) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if result < 0 {
            let error = std::io::Error::from_raw_os_error(-result);
            self.close(number, &format!("cannot connect: {error}"));
            return;
        }
        if connection.phase == Phase::Connecting {
            connection.phase = Phase::Greeting;
            self.arm_receive(number);
            self.arm_send(number);
        }
    }

    fn arm_receive(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if connection.phase == Phase::Closing {
            return;
        }
        let entry = connection.next_receive(&self.slab);
        connection.operations_in_flight += 1;
        // SAFETY: the buffer is the connection's own or lies in our slab; both outlive the operation, since a
        // connection is freed, and its end reported, only when nothing is in flight on it.
        unsafe { self.ring.push(entry, Token { connection: number, kind: OperationKind::Receive }) };
    }

    fn arm_send(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let Some(entry) = connection.next_send() else { return };
        connection.operations_in_flight += 1;
        // SAFETY: the vectors point to queued frames, which stay in the queue until `sent` or, on a closing
        // connection, until nothing is in flight.
        unsafe { self.ring.push(entry, Token { connection: number, kind: OperationKind::Send }) };
    }

    fn received(&mut self, number: u64, result: i32) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let digested = match result {
            0 => Err("the peer closed the connection".to_owned()),
            1.. => connection
                .received(result as usize, &self.slab, &mut self.events)
                .map_err(|reason| format!("protocol error: {reason}")),
            code if -code == libc::EINTR || -code == libc::EAGAIN => Ok(()),
            code => Err(std::io::Error::from_raw_os_error(-code).to_string()),
        };
        match digested {
            Ok(()) => self.arm_receive(number),
            Err(reason) => self.close(number, &reason),
        }
    }

    fn sent(&mut self, number: u64, result: i32) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        match result {
            0.. => connection.sent(result as usize, &mut self.events),
            code if -code == libc::EINTR || -code == libc::EAGAIN => {
                connection.sent(0, &mut self.events);
            }
            code => {
                let reason = std::io::Error::from_raw_os_error(-code).to_string();
                self.close(number, &reason);
                return;
            }
        }
        self.arm_send(number);
    }

    /// Starts the end of a connection; `PeerDown` follows when its last operation is reaped.
    fn close(&mut self, number: u64, reason: &str) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if connection.phase != Phase::Closing {
            connection.phase = Phase::Closing;
            connection.reason = reason.to_owned();
            // Wakes a receive or send that is in flight; an unconnected socket has none to wake.
            let _unconnected = rustix::net::shutdown(&connection.socket, rustix::net::Shutdown::Both);
        }
        self.finish_close(number);
    }

    fn finish_close(&mut self, number: u64) {
        let ended = self.connections.get(&number).is_some_and(|connection| {
            connection.phase == Phase::Closing && connection.operations_in_flight == 0
        });
        if !ended {
            return;
        }
        if let Some(mut connection) = self.connections.remove(&number) {
            connection.abandon_queue(&mut self.events);
            let reason = std::mem::take(&mut connection.reason);
            self.events.push_back(Event::PeerDown { peer: connection.peer, reason });
        }
    }

    fn reap(&mut self, budget: usize) {
        for _ in 0..budget {
            // One receive can hold thousands of small frames: take the next only when these are handed out.
            if self.events.len() >= PENDING_EVENTS_MAX {
                return;
            }
            let Some((token, result)) = self.ring.reap() else { return };
            if token.kind == OperationKind::Accept {
                self.accepted(result);
                continue;
            }
            if let Some(connection) = self.connections.get_mut(&token.connection) {
                connection.operations_in_flight -= 1;
            }
            match token.kind {
                OperationKind::Connect => self.connected(token.connection, result),
                OperationKind::Receive => self.received(token.connection, result),
                OperationKind::Send | OperationKind::Accept => self.sent(token.connection, result),
            }
            self.finish_close(token.connection);
        }
    }
}

impl Fabric for TcpFabric {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, ConnectError> {
        if self.connections.len() >= CONNECTIONS_MAX {
            return Err(ConnectError::TooMany { fabric: "tcp", limit: CONNECTIONS_MAX });
        }
        let target: SocketAddr = address.parse().map_err(|_| ConnectError::Address {
            fabric: "tcp",
            address: address.to_owned(),
            reason: "not an ip:port".to_owned(),
        })?;
        let socket = new_socket(&target).map_err(|errno| ConnectError::System {
            fabric: "tcp",
            address: address.to_owned(),
            error: errno.into(),
        })?;
        tune(&socket);
        let peer = self.new_peer();
        let mut connection = Connection::new(socket, peer, true, Phase::Connecting);
        let storage = connection.address.insert(Box::new(socket_address(&target)));
        let (start, len) = (&raw const storage.0, storage.1);
        let descriptor = types::Fd(connection.socket.as_raw_fd());
        let entry = opcode::Connect::new(descriptor, start.cast(), len).build();
        connection.operations_in_flight += 1;
        self.connections.insert(peer.0, connection);
        // SAFETY: the address is boxed in the connection, which lives until the operation is reaped.
        unsafe { self.ring.push(entry, Token { connection: peer.0, kind: OperationKind::Connect }) };
        self.ring.submit();
        Ok(peer)
    }

    fn post(&mut self, request: WorkRequest) -> Result<(), Full> {
        if let Operation::Send { message } = &request.operation {
            assert!(message.len() <= MESSAGE_BYTES_MAX, "a message of {} bytes", message.len());
        }
        match self.connections.get_mut(&request.peer.0) {
            Some(connection) => connection.enqueue(request).map_err(Full),
            None => Err(Full(request)),
        }
    }

    fn flush(&mut self) {
        let numbers: Vec<u64> = self.connections.keys().copied().collect();
        numbers.into_iter().for_each(|number| self.arm_send(number));
        if self.ring.has_queued() {
            self.ring.submit();
        }
    }

    fn poll(&mut self, budget: usize, events: &mut Vec<Event>) -> usize {
        self.reap(budget);
        if self.ring.has_queued() {
            self.ring.submit();
            self.reap(budget);
        }
        let count = self.events.len().min(budget);
        events.extend(self.events.drain(..count));
        count
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.close(peer.0, "disconnected by this node");
    }

    fn wait_descriptors<'a>(&'a self, descriptors: &mut Vec<BorrowedFd<'a>>) {
        descriptors.push(self.ring.descriptor());
    }

    fn prepare_wait(&mut self) -> bool {
        self.flush();
        self.events.is_empty() && !self.ring.has_completions()
    }
}

impl Drop for TcpFabric {
    /// The kernel may hold pointers into our connections: end every operation before they are freed.
    fn drop(&mut self) {
        drop(self.listener.take());
        let numbers: Vec<u64> = self.connections.keys().copied().collect();
        numbers.into_iter().for_each(|number| self.close(number, "the node is going down"));
        let deadline = std::time::Instant::now() + Duration::from_secs(5);
        while !self.connections.is_empty() && std::time::Instant::now() < deadline {
            self.ring.submit();
            self.events.clear();
            self.reap(usize::MAX);
            if !self.connections.is_empty() {
                std::thread::yield_now();
            }
        }
        if !self.connections.is_empty() {
            // Leaking a buffer is safe, freeing one that the kernel may write to is not.
            std::mem::forget(std::mem::take(&mut self.connections));
        }
    }
}

fn new_socket(address: &SocketAddr) -> rustix::io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)
}

/// Options of every connection. A kernel without one of them still moves bytes.
fn tune(socket: &OwnedFd) {
    let _default = sockopt::set_tcp_nodelay(socket.as_fd(), true);
    let _default = sockopt::set_tcp_user_timeout(socket.as_fd(), PEER_DEAD_AFTER.as_millis() as u32);
    let _default = sockopt::set_socket_keepalive(socket.as_fd(), true);
    let _default = sockopt::set_tcp_keepidle(socket.as_fd(), PEER_DEAD_AFTER / 2);
    let _default = sockopt::set_tcp_keepintvl(socket.as_fd(), Duration::from_secs(1));
}

fn socket_address(address: &SocketAddr) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: an all-zero `sockaddr_storage` is a valid value of that plain struct.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let len = match address {
        SocketAddr::V4(v4) => {
            let raw = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: `sockaddr_storage` is at least as large and as aligned as `sockaddr_in` (POSIX).
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in>().write(raw) };
            size_of::<libc::sockaddr_in>()
        }
        SocketAddr::V6(v6) => {
            let raw = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as above, for `sockaddr_in6`.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in6>().write(raw) };
            size_of::<libc::sockaddr_in6>()
        }
    };
    (storage, len as libc::socklen_t)
}

#[cfg(test)]
mod tests {
    use dataplane_fabric::testing::{Pair, conformance, pool};

    use super::*;

    #[test]
    fn conforms_to_the_contract() {
        conformance(&mut || {
            let (pool_a, pool_b) = (pool("a"), pool("b"));
            let a = TcpFabric::new(Arc::clone(pool_a.slab()), None).expect("a");
            let listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
            let b = TcpFabric::new(Arc::clone(pool_b.slab()), listen).expect("b");
            let address_of_b = b.listening_on().expect("bound").to_string();
            let tick = Box::new(|| {});
            Pair { a: Some(Box::new(a)), b: Some(Box::new(b)), pool_a, pool_b, address_of_b, tick }
        });
    }

    #[test]
    fn addresses_are_checked() {
        let mut fabric = TcpFabric::new(Arc::clone(pool("a").slab()), None).expect("fabric");
        assert!(matches!(fabric.connect("nowhere"), Err(ConnectError::Address { .. })));
    }
}
