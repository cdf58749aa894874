//! One connection: its state, and the copies that are its one-sided operations.
//!
//! Hot path: `write` and `read`: one check of each range, one check of the generation, the copy. They take
//! parts of the request by reference: reading back with wider loads what the caller has just stored in
//! narrower pieces would stall the loads.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use dataplane_fabric::handshake::{Handshakes, SocketId};
use dataplane_fabric::{PeerId, Rows, SlotRange, Source, Target};
use dataplane_memory::Slab;

use crate::doorbell::RemoteDoorbell;
use crate::hello::Hello;
use crate::ring::{Inbound, Outbound};
use crate::{ShmConfig, ShmError};

/// State of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Connected by this node; waiting for the peer's hello.
    Greeting,
    /// Both hellos are exchanged.
    Open,
    /// This node has shut its side down and waits for the peer, which may still write to the slab, to do
    /// the same.
    Closing,
    /// The peer is gone; the records that it had published are still to be delivered.
    Ended,
}

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) peer: PeerId,
    /// The socket of the connection.
    pub(crate) socket_id: SocketId,
    /// Process id of the peer; 0 if it is not visible from here.
    pub(crate) pid: i32,
    pub(crate) state: State,
    /// Rings that the peer writes and this node reads.
    pub(crate) inbound: Inbound,
    /// The peer's memory and rings, while the connection is open.
    pub(crate) remote: Option<Remote>,
    /// Reason for the end of the connection.
    pub(crate) reason: String,
}

impl Connection {
    /// Whether the connection's rings may hold records.
    #[inline]
    pub(crate) fn delivers(&self) -> bool {
        matches!(self.state, State::Open | State::Ended)
    }

    /// Shuts down this node's side of the socket, if that has not been done. The end is reported when the
    /// peer has closed its side: until then it may be in the middle of a copy into the slab.
    pub(crate) fn start_closing(&mut self, handshakes: &Handshakes, reason: &str) {
        if self.state == State::Open {
            self.state = State::Closing;
            self.reason = self.named(reason);
            self.remote = None;
            if let Some(socket) = handshakes.socket(self.socket_id) {
                // If the peer is gone already, the next check of the socket reports it.
                let _gone = rustix::net::shutdown(socket, rustix::net::Shutdown::Write);
            }
        }
    }

    /// Prefixes a reason with the peer's process id.
    pub(crate) fn named(&self, reason: &str) -> String {
        format!("process {}: {reason}", self.pid)
    }
}

/// Memory and descriptors received from a peer.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(crate) slab: Arc<Slab>,
    /// Rings that this node writes and the peer reads.
    pub(crate) outbound: Outbound,
    pub(crate) doorbell: RemoteDoorbell,
    /// Whether records were pushed since the last flush.
    pub(crate) dirty: bool,
}

/// Result of a one-sided operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Done,
    /// The slot was reused since it was named; for a read, possibly during the copy.
    Stale,
    /// Bytes outside a slot on either side, or rows that overlap or do not divide the length.
    Outside,
}

impl Remote {
    pub(crate) fn attach(hello: Hello, config: &ShmConfig) -> Result<Self, ShmError> {
        let slab = Arc::new(Slab::attach(hello.slab)?);
        let outbound = Outbound::attach(hello.rings)?;
        let doorbell = RemoteDoorbell::attach(hello.word, hello.eventfd)?;
        if config.populate_bytes_max > 0 {
            slab.populate(config.populate_bytes_max)?;
        }
        Ok(Self { slab, outbound, doorbell, dirty: false })
    }

    #[inline]
    fn names_current(&self, target: &Target) -> bool {
        self.slab.try_generation(target.slot) == Some(target.generation)
    }

    /// Copies bytes to the peer.
    #[inline]
    pub(crate) fn write(&self, source: &Source, target: &Target, rows: Option<&Rows>) -> Access {
        if !self.names_current(target) {
            return Access::Stale;
        }
        let to = (target.slot, target.offset as usize);
        let copied = match (source, rows) {
            (Source::Slot { slot, offset, len }, None) => {
                self.slab.try_copy_from(slot.slab(), (slot.slot(), *offset as usize), to, *len as usize)
            }
            (Source::Slot { slot, offset, len }, Some(rows)) => {
                let strides = (rows.local_stride as usize, rows.remote_stride as usize);
                let (bytes, count) = (rows.bytes as usize, rows.count(*len) as usize);
                let from = (slot.slot(), *offset as usize);
                rows.is_valid(*len)
                    && self.slab.try_copy_rows_from(slot.slab(), from, to, strides, bytes, count)
            }
            (Source::Inline { bytes, len }, None) => match bytes.get(..usize::from(*len)) {
                Some(bytes) if self.slab.contains(to.0, to.1, bytes.len()) => {
                    self.slab.write(to.0, to.1, bytes);
                    true
                }
                _ => false,
            },
            (Source::Inline { .. }, Some(_)) => false,
        };
        if copied { Access::Done } else { Access::Outside }
    }

    /// Copies the peer's bytes into a local slot. The generation is checked again afterwards: a slot that
    /// was reused meanwhile may have supplied new bytes, and `into` then holds an invalid mixture.
    #[inline]
    pub(crate) fn read(&self, into: &SlotRange, from: &Target, rows: Option<&Rows>) -> Access {
        if !self.names_current(from) {
            return Access::Stale;
        }
        let here = into.slot.slab();
        let (to, len) = ((into.slot.slot(), into.offset as usize), into.len);
        let source = (from.slot, from.offset as usize);
        let copied = match rows {
            None => here.try_copy_from(&self.slab, source, to, len as usize),
            Some(rows) => {
                let strides = (rows.remote_stride as usize, rows.local_stride as usize);
                let (bytes, count) = (rows.bytes as usize, rows.count(len) as usize);
                rows.is_valid(len) && here.try_copy_rows_from(&self.slab, source, to, strides, bytes, count)
            }
        };
        if !copied {
            return Access::Outside;
        }
        // The copy's loads come before the second check of the generation, as in the reader of a seqlock.
        fence(Ordering::Acquire);
        if self.names_current(from) { Access::Done } else { Access::Stale }
    }
}
