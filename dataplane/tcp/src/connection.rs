//! One connection: the send queue and the receive state machine. It makes io_uring entries and digests their
//! results; it does not touch the ring.
//!
//! The kernel works on this struct's buffers while operations are in flight. A connection therefore lives in
//! a `Box`, never moves, and is freed only when `operations_in_flight` is zero.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};

use dataplane_fabric::{Completion, Event, Operation, PeerId, Source, WorkRequest};
use dataplane_memory::Slab;
use io_uring::{opcode, squeue, types};

use crate::wire::{HEADER_BYTES, Header};

/// Frames that may wait on one connection before `post` says full.
pub const QUEUED_FRAMES_MAX: usize = 1024;
/// Frames gathered into one `sendmsg`.
pub const FRAMES_PER_SEND_MAX: usize = 64;
/// Bytes of the receive buffer; larger than the largest message with its header.
const RECEIVE_BYTES: usize = 256 << 10;
/// A payload with at least so many bytes still to come is received straight into its slot.
const DIRECT_BYTES_MIN: usize = 16 << 10;

struct Frame {
    header: [u8; HEADER_BYTES],
    payload: Payload,
    id: u64,
}

enum Payload {
    Message(Box<[u8]>),
    Source(Source),
}

impl Payload {
    fn start(&self) -> (*const u8, usize) {
        match self {
            Self::Message(bytes) => (bytes.as_ptr(), bytes.len()),
            Self::Source(Source::Inline { bytes, len }) => (bytes.as_ptr(), usize::from(*len)),
            Self::Source(Source::Slot { slot, offset, len }) => {
                let start = slot.slab().address(slot.slot(), *offset as usize, *len as usize);
                (start.as_ptr().cast_const(), *len as usize)
            }
        }
    }
}

/// A write whose payload has not wholly arrived.
#[derive(Debug, Clone, Copy)]
struct Landing {
    slot: u32,
    at: usize,
    remaining: usize,
    immediate: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Waiting for `connect` to finish.
    Connecting,
    /// Waiting for the peer's hello.
    Greeting,
    /// In use.
    Open,
    /// Shut down; waiting for the last operation.
    Closing,
}

pub(crate) struct Connection {
    pub(crate) socket: OwnedFd,
    pub(crate) peer: PeerId,
    pub(crate) phase: Phase,
    pub(crate) we_connected: bool,
    pub(crate) operations_in_flight: u32,
    pub(crate) reason: String,
    queue: VecDeque<Frame>,
    /// Bytes of the queue's head that earlier sends have taken.
    sent_bytes: usize,
    sending: bool,
    vectors: Vec<libc::iovec>,
    message: libc::msghdr,
    buffer: Box<[u8]>,
    /// Bytes of `buffer` not yet parsed: `parsed..filled`.
    parsed: usize,
    filled: usize,
    receiving_direct: bool,
    landing: Option<Landing>,
    pub(crate) address: Option<Box<(libc::sockaddr_storage, libc::socklen_t)>>,
}

// SAFETY: the raw pointers in `vectors` and `message` point into this connection's own queue (and slots that
// it keeps alive); they are used only by the kernel during a send and rebuilt for the next one.
unsafe impl Send for Connection {}

impl Connection {
    pub(crate) fn new(socket: OwnedFd, peer: PeerId, we_connected: bool, phase: Phase) -> Box<Self> {
        // SAFETY: an all-zero `msghdr` is a valid empty message.
        let message = unsafe { std::mem::zeroed() };
        let mut connection = Box::new(Self {
            socket,
            peer,
            phase,
            we_connected,
            operations_in_flight: 0,
            reason: String::new(),
            // The kernel reads headers in place while a send is in flight: the buffer must never move, so it is
            // made for every frame that may wait, the hello included.
            queue: VecDeque::with_capacity(QUEUED_FRAMES_MAX + 1),
            sent_bytes: 0,
            sending: false,
            vectors: Vec::with_capacity(2 * FRAMES_PER_SEND_MAX),
            message,
            buffer: vec![0; RECEIVE_BYTES].into_boxed_slice(),
            parsed: 0,
            filled: 0,
            receiving_direct: false,
            landing: None,
            address: None,
        });
        let payload = Payload::Message(Box::default());
        connection.queue.push_back(Frame { header: Header::Hello.encode(), payload, id: 0 });
        connection
    }

    fn descriptor(&self) -> types::Fd {
        types::Fd(self.socket.as_raw_fd())
    }

    // --- sending ---

    pub(crate) fn enqueue(&mut self, request: WorkRequest) -> Result<(), WorkRequest> {
        if self.phase != Phase::Open || self.queue.len() >= QUEUED_FRAMES_MAX {
            return Err(request);
        }
        let (header, payload) = match request.operation {
            Operation::Send { message } => {
                (Header::Message { len: message.len() as u32 }, Payload::Message(message))
            }
            Operation::Write { source, target, immediate } => {
                let len = source.len() as u32;
                (Header::Write { len, target, immediate }, Payload::Source(source))
            }
        };
        assert!(self.queue.len() < self.queue.capacity(), "the queue's buffer must not move");
        self.queue.push_back(Frame { header: header.encode(), payload, id: request.id });
        Ok(())
    }

    /// The next send, when there is something to send and none is in flight.
    pub(crate) fn next_send(&mut self) -> Option<squeue::Entry> {
        if self.sending || self.queue.is_empty() || matches!(self.phase, Phase::Connecting | Phase::Closing) {
            return None;
        }
        self.vectors.clear();
        let mut skip = self.sent_bytes;
        for frame in self.queue.iter().take(FRAMES_PER_SEND_MAX) {
            let (payload, payload_len) = frame.payload.start();
            for (start, len) in [(frame.header.as_ptr(), HEADER_BYTES), (payload, payload_len)] {
                let skipped = skip.min(len);
                skip -= skipped;
                if len > skipped {
                    let base = start.wrapping_add(skipped).cast_mut().cast();
                    self.vectors.push(libc::iovec { iov_base: base, iov_len: len - skipped });
                }
            }
        }
        self.message.msg_iov = self.vectors.as_mut_ptr();
        self.message.msg_iovlen = self.vectors.len();
        self.sending = true;
        Some(
            opcode::SendMsg::new(self.descriptor(), &raw const self.message)
                .flags(libc::MSG_NOSIGNAL as u32)
                .build(),
        )
    }

    /// Takes what the kernel has sent off the queue and reports finished requests.
    pub(crate) fn sent(&mut self, bytes: usize, events: &mut VecDeque<Event>) {
        self.sending = false;
        self.sent_bytes += bytes;
        while let Some(frame) = self.queue.front() {
            let frame_bytes = HEADER_BYTES + frame.payload.start().1;
            if self.sent_bytes < frame_bytes {
                break;
            }
            self.sent_bytes -= frame_bytes;
            if frame.id != 0 {
                events.push_back(Event::Completed { id: frame.id, completion: Completion::Done });
            }
            self.queue.pop_front();
        }
    }

    /// Ends what is still queued. Call only when nothing is in flight any more.
    pub(crate) fn abandon_queue(&mut self, events: &mut VecDeque<Event>) {
        for frame in self.queue.drain(..).filter(|frame| frame.id != 0) {
            events.push_back(Event::Completed { id: frame.id, completion: Completion::PeerDown });
        }
    }

    // --- receiving ---

    /// The next receive. There is always one in flight on an open connection.
    pub(crate) fn next_receive(&mut self, slab: &Slab) -> squeue::Entry {
        if let Some(landing) = self.landing.filter(|landing| landing.remaining >= DIRECT_BYTES_MIN) {
            self.receiving_direct = true;
            let start = slab.address(landing.slot, landing.at, landing.remaining);
            return opcode::Recv::new(self.descriptor(), start.as_ptr(), landing.remaining as u32).build();
        }
        self.receiving_direct = false;
        self.buffer.copy_within(self.parsed..self.filled, 0);
        self.filled -= self.parsed;
        self.parsed = 0;
        let descriptor = self.descriptor();
        let room = &mut self.buffer[self.filled..];
        opcode::Recv::new(descriptor, room.as_mut_ptr(), room.len() as u32).build()
    }

    /// Digests `bytes` newly received bytes.
    pub(crate) fn received(
        &mut self,
        bytes: usize,
        slab: &Slab,
        events: &mut VecDeque<Event>,
    ) -> Result<(), &'static str> {
        if self.receiving_direct {
            self.landed(bytes, events);
            return Ok(());
        }
        self.filled += bytes;
        loop {
            if let Some(landing) = self.landing {
                let here = landing.remaining.min(self.filled - self.parsed);
                slab.write(landing.slot, landing.at, &self.buffer[self.parsed..self.parsed + here]);
                self.parsed += here;
                self.landed(here, events);
                if self.landing.is_some() {
                    return Ok(());
                }
            }
            if !self.parse_frame(slab, events)? {
                return Ok(());
            }
        }
    }

    fn landed(&mut self, bytes: usize, events: &mut VecDeque<Event>) {
        let Some(landing) = &mut self.landing else { return };
        landing.at += bytes;
        landing.remaining -= bytes;
        if landing.remaining == 0 {
            events.extend(landing.immediate.map(|value| Event::Immediate { peer: self.peer, value }));
            self.landing = None;
        }
    }

    /// Parses one frame from the buffer; false when it is not all there yet.
    fn parse_frame(&mut self, slab: &Slab, events: &mut VecDeque<Event>) -> Result<bool, &'static str> {
        let rest = &self.buffer[self.parsed..self.filled];
        let Some((header, rest)) = rest.split_first_chunk::<HEADER_BYTES>() else { return Ok(false) };
        let header = Header::decode(header)?;
        match header {
            Header::Hello if self.phase == Phase::Greeting => {
                self.phase = Phase::Open;
                events.push_back(match self.we_connected {
                    true => Event::Connected { peer: self.peer },
                    false => Event::Accepted { peer: self.peer },
                });
                self.parsed += HEADER_BYTES;
            }
            Header::Hello => return Err("a second hello"),
            _ if self.phase == Phase::Greeting => return Err("the first frame is not a hello"),
            Header::Message { len } => {
                let Some(message) = rest.get(..len as usize) else { return Ok(false) };
                events.push_back(Event::Message { peer: self.peer, message: message.into() });
                self.parsed += HEADER_BYTES + len as usize;
            }
            Header::Write { len, target, immediate } => {
                let (at, remaining) = (target.offset as usize, len as usize);
                if !slab.contains(target.slot, at, remaining) {
                    return Err("a write outside of our slots");
                }
                if slab.generation(target.slot) != target.generation {
                    return Err("a write to a slot that has been reused");
                }
                self.parsed += HEADER_BYTES;
                self.landing = Some(Landing { slot: target.slot, at, remaining, immediate });
                self.landed(0, events);
            }
        }
        Ok(true)
    }
}
