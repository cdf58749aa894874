//! One TCP connection: its socket, its place in a session, and the two halves once it is greeted.
//!
//! The kernel works on the memory of this struct while operations are in flight. It therefore lives in a `Box`,
//! never moves, and is freed only when `operations_in_flight` is zero.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;

use dataplane_fabric::auth::{Authentication, OPENING_BYTES, Protocol};
use io_uring::{opcode, squeue, types};

use crate::hello::HELLO_BYTES;
use crate::receive::Receiver;
use crate::send::Sender;
use crate::socket::RawAddress;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Waiting for `connect` to finish.
    Connecting,
    /// Waiting for the peer's hello, or for our answer to be sent.
    Greeting,
    /// Greeted; in use once the session is open.
    Greeted,
    /// Aborted; waiting for the last operation.
    Closing,
    /// Nothing is in flight; kept until the whole session is so.
    Closed,
}

pub(crate) struct Connection {
    pub(crate) socket: OwnedFd,
    /// The ring's own name of the socket, when it is registered.
    pub(crate) registered: Option<u32>,
    pub(crate) phase: Phase,
    /// Position of the session, known from the start or from the hello.
    pub(crate) session: Option<u32>,
    pub(crate) lane: usize,
    pub(crate) index: usize,
    /// When the handshake must be over.
    pub(crate) deadline: Instant,
    pub(crate) operations_in_flight: u32,
    pub(crate) is_receiving: bool,
    /// It is in the list of those to look after.
    pub(crate) is_dirty: bool,
    pub(crate) authentication: Authentication,
    pub(crate) opening_out: [u8; OPENING_BYTES],
    pub(crate) opening_in: [u8; OPENING_BYTES],
    pub(crate) hello_out: [u8; HELLO_BYTES],
    pub(crate) hello_in: [u8; HELLO_BYTES],
    pub(crate) address: Option<Box<RawAddress>>,
    pub(crate) halves: Option<Box<Halves>>,
}

/// Made when the connection is greeted, so that strangers cost little.
pub(crate) struct Halves {
    pub(crate) sender: Sender,
    pub(crate) receiver: Receiver,
}

impl Connection {
    pub(crate) fn new(socket: OwnedFd, phase: Phase, deadline: Instant, protocol: Protocol) -> Self {
        Self {
            socket,
            registered: None,
            phase,
            session: None,
            lane: 0,
            index: 0,
            deadline,
            operations_in_flight: 0,
            is_receiving: false,
            is_dirty: false,
            authentication: Authentication::accepting(protocol),
            opening_out: [0; OPENING_BYTES],
            opening_in: [0; OPENING_BYTES],
            hello_out: [0; HELLO_BYTES],
            hello_in: [0; HELLO_BYTES],
            address: None,
            halves: None,
        }
    }

    /// The socket as an entry names it; [`Connection::named`] says which kind of name it is.
    pub(crate) fn descriptor(&self) -> types::Fd {
        types::Fd(self.registered.map_or(self.socket.as_raw_fd(), |position| position as i32))
    }

    pub(crate) fn named(&self, entry: squeue::Entry) -> squeue::Entry {
        match self.registered {
            Some(_) => entry.flags(squeue::Flags::FIXED_FILE),
            None => entry,
        }
    }

    pub(crate) fn connect(&mut self, address: RawAddress) -> squeue::Entry {
        let address = self.address.insert(Box::new(address));
        let (start, len) = (&raw const address.0, address.1);
        self.named(opcode::Connect::new(self.descriptor(), start.cast(), len).build())
    }

    pub(crate) fn send_opening(&self) -> squeue::Entry {
        self.send_whole(&self.opening_out)
    }

    pub(crate) fn receive_opening(&mut self) -> squeue::Entry {
        let (start, len) = (self.opening_in.as_mut_ptr(), OPENING_BYTES as u32);
        self.receive_whole(start, len)
    }

    pub(crate) fn send_hello(&self) -> squeue::Entry {
        self.send_whole(&self.hello_out)
    }

    pub(crate) fn receive_hello(&mut self) -> squeue::Entry {
        let (start, len) = (self.hello_in.as_mut_ptr(), HELLO_BYTES as u32);
        self.receive_whole(start, len)
    }

    fn send_whole(&self, bytes: &[u8]) -> squeue::Entry {
        let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
        let entry = opcode::Send::new(self.descriptor(), bytes.as_ptr(), bytes.len() as u32);
        self.named(entry.flags(flags).build())
    }

    fn receive_whole(&self, start: *mut u8, len: u32) -> squeue::Entry {
        self.named(opcode::Recv::new(self.descriptor(), start, len).flags(libc::MSG_WAITALL).build())
    }

    /// The receive that the receiver's plan asks for.
    pub(crate) fn receive(&mut self) -> Option<squeue::Entry> {
        let descriptor = self.descriptor();
        let receiver = &mut self.halves.as_mut()?.receiver;
        let entry = match &receiver.vectors[..] {
            [only] => opcode::Recv::new(descriptor, only.iov_base.cast(), only.iov_len as u32).build(),
            _ => opcode::RecvMsg::new(descriptor, &raw mut receiver.message).build(),
        };
        Some(self.named(entry))
    }
}
