//! One connection: its state, and the copies that are its one-sided operations.
//!
//! Hot path: `write` and `read`: one check of each range, one look at the generation, the copy. They take parts of
//! the request by reference: to copy what the caller has just stored piece by piece in wider pieces stalls the load.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use dataplane_fabric::handshake::{Handshakes, SocketId};
use dataplane_fabric::{PeerId, Rows, SlotRange, Source, Target};
use dataplane_memory::Slab;

use crate::doorbell::RemoteDoorbell;
use crate::hello::Hello;
use crate::ring::{Inbound, Outbound};
use crate::{ShmConfig, ShmError};

/// Where a connection stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// We connected and wait for the peer's hello.
    Greeting,
    /// Both hellos are exchanged.
    Open,
    /// We have said goodbye and wait until the peer, who may still write to our slab, does too.
    Closing,
    /// The peer is gone; what it had published is still to be delivered.
    Ended,
}

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) peer: PeerId,
    /// The socket of the connection.
    pub(crate) socket_id: SocketId,
    /// The peer's process, 0 when it is not visible from here.
    pub(crate) pid: i32,
    pub(crate) state: State,
    /// What the peer writes to us.
    pub(crate) inbound: Inbound,
    /// While the connection is open.
    pub(crate) remote: Option<Remote>,
    /// Why it ends.
    pub(crate) reason: String,
}

impl Connection {
    /// Whether records may lie in its rings.
    #[inline]
    pub(crate) fn delivers(&self) -> bool {
        matches!(self.state, State::Open | State::Ended)
    }

    /// Says goodbye, if that has not been done. The end is reported when the peer has closed its side: until
    /// then it may be in the middle of a copy into our slab.
    pub(crate) fn start_closing(&mut self, handshakes: &Handshakes, reason: &str) {
        if self.state == State::Open {
            self.state = State::Closing;
            self.reason = self.named(reason);
            self.remote = None;
            if let Some(socket) = handshakes.socket(self.socket_id) {
                // If the peer is gone already, the next look at the socket says so.
                let _gone = rustix::net::shutdown(socket, rustix::net::Shutdown::Write);
            }
        }
    }

    /// A reason with the process that it is about.
    pub(crate) fn named(&self, reason: &str) -> String {
        format!("process {}: {reason}", self.pid)
    }
}

/// What a peer gave us.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(crate) slab: Arc<Slab>,
    /// What we write to the peer.
    pub(crate) outbound: Outbound,
    pub(crate) doorbell: RemoteDoorbell,
    /// Something was pushed since the last flush.
    pub(crate) dirty: bool,
}

/// How a one-sided operation went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Done,
    /// The slot was reused since it was named; for a read, perhaps while we copied.
    Stale,
    /// Bytes outside of a slot on either side, or rows that overlap or do not divide the length.
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

    /// Copies the peer's bytes here. The generation is looked at again afterwards: a slot that was reused
    /// meanwhile has given us some of its new bytes, and `into` holds a mixture that nobody may use.
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
        // The copy's loads come before the second look at the generation, as in the reader of a seqlock.
        fence(Ordering::Acquire);
        if self.names_current(from) { Access::Done } else { Access::Stale }
    }
}
