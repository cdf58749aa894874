//! A TCP connection of a session: its socket, its position, and its two halves.
//!
//! The kernel works on the memory of this struct while operations are in flight. It therefore lives in a `Box`,
//! never moves, and is freed only when `operations_in_flight` is zero.

use std::os::fd::{AsRawFd, OwnedFd};

use dataplane_fabric::Priority;
use io_uring::{opcode, squeue, types};

use crate::TcpConfig;
use crate::receive::Receiver;
use crate::send::Sender;

/// Largest send and largest receive in bytes, by lane. The kernel copies that many before this thread does
/// anything else, so the background lane has the smaller limit.
pub(crate) const TURN_BYTES_MAX: [usize; Priority::ALL.len()] = [4 << 20, 256 << 10];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The handshake is complete; used once the session is open.
    Greeted,
    /// Aborted; waiting for the last operation.
    Closing,
    /// No operation is in flight; kept until this holds for the whole session.
    Closed,
}

pub(crate) struct Connection {
    pub(crate) socket: OwnedFd,
    /// Position of the registered descriptor; `None`: not registered.
    pub(crate) registered: Option<u32>,
    pub(crate) phase: Phase,
    /// Number of the session in the fabric's table.
    pub(crate) session: u32,
    pub(crate) lane: usize,
    pub(crate) index: usize,
    pub(crate) operations_in_flight: u32,
    pub(crate) is_receiving: bool,
    /// Whether the connection is in the list of those that may have frames to send.
    pub(crate) is_dirty: bool,
    pub(crate) halves: Halves,
}

pub(crate) struct Halves {
    pub(crate) sender: Sender,
    pub(crate) receiver: Receiver,
}

impl Connection {
    pub(crate) fn new(
        socket: OwnedFd,
        session: u32,
        (lane, index): (usize, usize),
        config: &TcpConfig,
    ) -> Self {
        let turn = TURN_BYTES_MAX[lane];
        let sender = Sender::new(config.queue_depth, config.zero_copy_from, turn);
        Self {
            socket,
            registered: None,
            phase: Phase::Greeted,
            session,
            lane,
            index,
            operations_in_flight: 0,
            is_receiving: false,
            is_dirty: false,
            halves: Halves { sender, receiver: Receiver::new(turn) },
        }
    }

    /// Returns the descriptor for an entry: the registered position or the socket. [`Connection::named`]
    /// marks which one it is.
    pub(crate) fn descriptor(&self) -> types::Fd {
        types::Fd(self.registered.map_or(self.socket.as_raw_fd(), |position| position as i32))
    }

    pub(crate) fn named(&self, entry: squeue::Entry) -> squeue::Entry {
        match self.registered {
            Some(_) => entry.flags(squeue::Flags::FIXED_FILE),
            None => entry,
        }
    }

    /// Returns the receive entry for the receiver's plan.
    pub(crate) fn receive(&mut self) -> squeue::Entry {
        let descriptor = self.descriptor();
        let receiver = &mut self.halves.receiver;
        let entry = match &receiver.vectors[..] {
            [only] => opcode::Recv::new(descriptor, only.iov_base.cast(), only.iov_len as u32).build(),
            _ => opcode::RecvMsg::new(descriptor, &raw mut receiver.message).build(),
        };
        self.named(entry)
    }
}
