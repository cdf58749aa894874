//! The fabric itself: connections, posting and polling. Driven by one thread.

use std::collections::{BTreeMap, VecDeque};
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dataplane_fabric::{
    Completion, ConnectError, Event, Fabric, Full, MESSAGE_BYTES_MAX, Operation, PeerId, Source, Target,
    WorkRequest,
};
use dataplane_memory::Slab;
use rustix::event::EventfdFlags;

use crate::ShmError;
use crate::handshake;
use crate::ring::{Record, Ring};

/// Most connections of one node.
pub const CONNECTIONS_MAX: usize = 256;
/// Local events (completions) that may wait for `poll` before `post` says full.
const PENDING_EVENTS_MAX: usize = 4096;
/// Sockets are looked at when a poll finds nothing, and at least every so many polls.
const SOCKET_CHECK_PERIOD: u32 = 64;

struct Connection {
    socket: UnixStream,
    /// What the peer writes to us.
    inbound: Ring,
    we_connected: bool,
    /// We have said goodbye and wait until the peer, who may still write to our slab, does too.
    closing: bool,
    /// Why we did.
    reason: String,
    /// Set once the peer's hello has arrived.
    remote: Option<Remote>,
}

struct Remote {
    slab: Slab,
    /// What we write to the peer.
    outbound: Ring,
    doorbell: OwnedFd,
}

/// Shared memory between the processes of one host.
pub struct ShmFabric {
    slab: Arc<Slab>,
    listener: Option<(UnixListener, PathBuf)>,
    doorbell: OwnedFd,
    connections: BTreeMap<PeerId, Connection>,
    events: VecDeque<Event>,
    next_peer: u64,
    polls: u32,
}

impl ShmFabric {
    /// A node whose peers may write into `slab`. With a path, others can connect to it there.
    pub fn new(slab: Arc<Slab>, listen: Option<&Path>) -> Result<Self, ShmError> {
        let system = |operation, error| ShmError::System {
            operation,
            path: listen.map(|path| path.display().to_string()).unwrap_or_default(),
            error,
        };
        let doorbell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| system("eventfd", errno.into()))?;
        let listener = match listen {
            None => None,
            Some(path) => {
                remove_stale_socket(path);
                let listener = UnixListener::bind(path).map_err(|error| system("bind", error))?;
                listener.set_nonblocking(true).map_err(|error| system("set_nonblocking", error))?;
                Some((listener, path.to_owned()))
            }
        };
        Ok(Self {
            slab,
            listener,
            doorbell,
            connections: BTreeMap::new(),
            events: VecDeque::new(),
            next_peer: 1,
            polls: 0,
        })
    }

    fn add_connection(&mut self, socket: UnixStream, we_connected: bool) -> Result<PeerId, ShmError> {
        socket.set_nonblocking(true).map_err(|error| ShmError::System {
            operation: "set_nonblocking",
            path: String::new(),
            error,
        })?;
        let inbound = Ring::create()?;
        handshake::send(&socket, [self.slab.memory(), inbound.memory(), self.doorbell.as_fd()])
            .map_err(|_| ShmError::Handshake("the peer went away"))?;
        let peer = PeerId(self.next_peer);
        self.next_peer += 1;
        self.connections.insert(
            peer,
            Connection { socket, inbound, we_connected, closing: false, reason: String::new(), remote: None },
        );
        Ok(peer)
    }

    fn accept(&mut self) {
        while let Some(Ok((socket, _))) = self.listener.as_ref().map(|(listener, _)| listener.accept()) {
            if self.connections.len() < CONNECTIONS_MAX {
                // A peer that vanished between connect and accept is nobody's business.
                let _gone = self.add_connection(socket, false);
            }
        }
    }

    /// Looks at the sockets: new peers, hellos, and ends.
    fn check_sockets(&mut self) {
        self.accept();
        let mut down = Vec::new();
        for (&peer, connection) in &mut self.connections {
            match connection.check_socket() {
                Ok(false) => {}
                Ok(true) => self.events.push_back(match connection.we_connected {
                    true => Event::Connected { peer },
                    false => Event::Accepted { peer },
                }),
                Err(_) if connection.closing => down.push((peer, std::mem::take(&mut connection.reason))),
                Err(error) => down.push((peer, error.to_string())),
            }
        }
        down.into_iter().for_each(|(peer, reason)| self.drop_connection(peer, reason));
    }

    fn drop_connection(&mut self, peer: PeerId, reason: String) {
        self.connections.remove(&peer);
        self.events.push_back(Event::PeerDown { peer, reason });
    }

    /// Says goodbye. The end is reported when the peer has closed its side: until then it may be in the middle
    /// of a copy into our slab.
    fn start_closing(&mut self, peer: PeerId, reason: &str) {
        if let Some(connection) = self.connections.get_mut(&peer).filter(|connection| !connection.closing) {
            connection.closing = true;
            connection.reason = reason.to_owned();
            connection.remote = None;
            // If the peer is gone already, the next look at the socket says so.
            let _gone = connection.socket.shutdown(std::net::Shutdown::Write);
        }
    }

    fn poll_rings(&mut self, budget: usize) {
        let mut down = Vec::new();
        for (&peer, connection) in &mut self.connections {
            if connection.remote.is_none() {
                continue;
            }
            while self.events.len() < budget {
                match connection.inbound.pop() {
                    Ok(None) => break,
                    Ok(Some(Record::Message(message))) => {
                        self.events.push_back(Event::Message { peer, message });
                    }
                    Ok(Some(Record::Immediate(value))) => {
                        self.events.push_back(Event::Immediate { peer, value });
                    }
                    Err(reason) => {
                        down.push((peer, reason));
                        break;
                    }
                }
            }
        }
        down.into_iter().for_each(|(peer, reason)| self.start_closing(peer, reason));
    }
}

impl Connection {
    /// True when the handshake has just been completed; an error when the connection is over.
    fn check_socket(&mut self) -> Result<bool, ShmError> {
        if self.remote.is_none() && !self.closing {
            let Some(hello) = handshake::receive(&self.socket)? else { return Ok(false) };
            self.remote = Some(Remote {
                slab: Slab::attach(hello.slab)?,
                outbound: Ring::attach(hello.ring)?,
                doorbell: hello.doorbell,
            });
            return Ok(true);
        }
        match self.socket.read(&mut [0; 16]) {
            Ok(0) => Err(ShmError::Handshake("the peer closed the connection")),
            // A hello may cross our goodbye.
            Ok(_) if self.closing => Ok(false),
            Ok(_) => Err(ShmError::Handshake("the peer spoke after its hello")),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(false),
            Err(_) => Err(ShmError::Handshake("the peer died")),
        }
    }
}

impl Remote {
    /// Copies the bytes over; false when the target is not what the peer announced.
    fn write(&self, source: &Source, target: Target) -> bool {
        let (offset, len) = (target.offset as usize, source.len());
        if !self.slab.contains(target.slot, offset, len)
            || self.slab.generation(target.slot) != target.generation
        {
            return false;
        }
        match source {
            Source::Inline { bytes, len } => {
                self.slab.write(target.slot, offset, &bytes[..usize::from(*len)])
            }
            Source::Slot { slot, offset: from, .. } => {
                self.slab.copy_from(slot.slab(), (slot.slot(), *from as usize), (target.slot, offset), len)
            }
        }
        true
    }
}

impl Fabric for ShmFabric {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, ConnectError> {
        if self.connections.len() >= CONNECTIONS_MAX {
            return Err(ConnectError::TooMany { fabric: "shm", limit: CONNECTIONS_MAX });
        }
        let system = |error| ConnectError::System { fabric: "shm", address: address.to_owned(), error };
        let socket = UnixStream::connect(address).map_err(system)?;
        self.add_connection(socket, true).map_err(|error| system(std::io::Error::other(error)))
    }

    fn post(&mut self, request: WorkRequest) -> Result<(), Full> {
        let peer = request.peer;
        let pending = self.events.len();
        let Some(remote) = self.connections.get_mut(&peer).and_then(|connection| connection.remote.as_mut())
        else {
            return Err(Full(request));
        };
        if pending >= PENDING_EVENTS_MAX {
            return Err(Full(request));
        }
        match &request.operation {
            Operation::Send { message } => {
                assert!(message.len() <= MESSAGE_BYTES_MAX, "a message of {} bytes", message.len());
                if !remote.outbound.push_message(message) {
                    return Err(Full(request));
                }
            }
            Operation::Write { source, target, immediate } => {
                if immediate.is_some() && !remote.outbound.has_room(size_of::<u32>()) {
                    return Err(Full(request));
                }
                if !remote.write(source, *target) {
                    let id = request.id;
                    self.complete(id, Completion::PeerDown);
                    self.start_closing(peer, "remote access error: stale slot or bad range");
                    return Ok(());
                }
                if let Some(value) = immediate {
                    let pushed = remote.outbound.push_immediate(*value);
                    assert!(pushed, "room was checked and we are the only producer");
                }
            }
        }
        self.complete(request.id, Completion::Done);
        Ok(())
    }

    fn flush(&mut self) {
        for remote in self.connections.values_mut().filter_map(|connection| connection.remote.as_mut()) {
            if remote.outbound.publish() {
                // Fails only when the counter is at its maximum, and then the peer is awake anyway.
                let _full = rustix::io::write(&remote.doorbell, &1_u64.to_ne_bytes());
            }
        }
    }

    fn poll(&mut self, budget: usize, events: &mut Vec<Event>) -> usize {
        self.polls = self.polls.wrapping_add(1);
        self.poll_rings(budget);
        if self.events.is_empty() || self.polls.is_multiple_of(SOCKET_CHECK_PERIOD) {
            self.check_sockets();
        }
        let count = self.events.len().min(budget);
        events.extend(self.events.drain(..count));
        count
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.start_closing(peer, "disconnected by this node");
    }

    fn wait_descriptors<'a>(&'a self, descriptors: &mut Vec<BorrowedFd<'a>>) {
        descriptors.push(self.doorbell.as_fd());
        descriptors.extend(self.listener.iter().map(|(listener, _)| listener.as_fd()));
        descriptors.extend(self.connections.values().map(|connection| connection.socket.as_fd()));
    }

    fn prepare_wait(&mut self) -> bool {
        // An empty doorbell reads as EAGAIN; either way it is reset.
        let _empty = rustix::io::read(&self.doorbell, &mut [0_u8; 8]);
        self.events.is_empty()
            && self
                .connections
                .values()
                .filter(|connection| connection.remote.is_some())
                .all(|connection| connection.inbound.prepare_sleep())
    }
}

impl ShmFabric {
    fn complete(&mut self, id: u64, completion: Completion) {
        if id != 0 {
            self.events.push_back(Event::Completed { id, completion });
        }
    }
}

impl Drop for ShmFabric {
    fn drop(&mut self) {
        if let Some((_, path)) = &self.listener {
            // It may be gone already; then there is nothing to tidy up.
            let _gone = std::fs::remove_file(path);
        }
    }
}

/// Removes a socket file that nobody listens on any more (its process was killed).
fn remove_stale_socket(path: &Path) {
    if path.exists() && UnixStream::connect(path).is_err() {
        // If it cannot be removed, `bind` will say so.
        let _kept = std::fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use dataplane_fabric::testing::{Pair, conformance, pool};

    use super::*;

    #[test]
    fn conforms_to_the_contract() {
        let mut round = 0;
        conformance(&mut || {
            round += 1;
            let path = std::env::temp_dir().join(format!("kvasir-shm-test-{}-{round}", std::process::id()));
            let (pool_a, pool_b) = (pool("a"), pool("b"));
            let a = ShmFabric::new(Arc::clone(pool_a.slab()), None).expect("a");
            let b = ShmFabric::new(Arc::clone(pool_b.slab()), Some(&path)).expect("b");
            Pair {
                a: Some(Box::new(a)),
                b: Some(Box::new(b)),
                pool_a,
                pool_b,
                address_of_b: path.display().to_string(),
                tick: Box::new(|| {}),
            }
        });
    }

    #[test]
    fn a_stale_socket_file_does_not_stop_a_restart() {
        let path = std::env::temp_dir().join(format!("kvasir-shm-stale-{}", std::process::id()));
        drop(UnixListener::bind(&path).expect("bind"));
        assert!(path.exists(), "the file outlives its socket");
        let fabric = ShmFabric::new(Arc::clone(pool("a").slab()), Some(&path));
        assert!(fabric.is_ok());
        drop(fabric);
        assert!(!path.exists());
    }
}
