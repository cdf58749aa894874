//! The sending half of a connection: a queue of frames, divided into batches and sends.
//!
//! A batch is the headers of up to [`BATCH_FRAMES_MAX`] frames followed by their payloads. One `sendmsg` takes as
//! much of it as its limits allow: all of it, unless the payloads are huge or in very many rows. At most one
//! send is in flight; it points into the slots, the messages and this struct's staging buffer.
//!
//! Runs of less than [`crate::extent::COPIED_RUN_BYTES_MAX`] bytes are copied into the staging buffer, behind
//! the headers, so that a batch of small frames is one contiguous piece.

use std::collections::VecDeque;
use std::sync::Arc;

use dataplane_fabric::{Completion, Event};
use dataplane_memory::Slab;
use io_uring::{squeue, types};

use crate::frame::{COPIED_RESPONSE_BYTES_MAX, Frame, Payload};
use crate::lane::{FrameCompletion, Lane, VERIFIED_MAX};
use crate::ring::Ring;
use crate::wire::{BATCH_FRAMES_MAX, HEADER_BYTES, Header};
use crate::zero_copy::ZeroCopy;

/// Size of the staging buffer for copied runs of one send, in bytes.
const STAGING_BYTES: usize = 64 << 10;
const TABLE_BYTES: usize = BATCH_FRAMES_MAX * HEADER_BYTES;
/// Largest number of pieces of one send. The kernel's limit is 1024 (`UIO_MAXIOV`).
pub(crate) const VECTORS_MAX: usize = 512;
/// Frames that the fabric itself may queue beyond the queue's depth: responses and fences.
const RESERVED_FRAMES: usize = 128;
/// Largest number of response frames in one queue.
pub(crate) const SERVED_FRAMES_MAX: usize = 64;
/// With several connections, responses are cut into pieces of this size so that all connections help.
pub(crate) const PIECE_BYTES: u32 = 1 << 20;

/// Largest number of verifications in one batch.
const VERIFIED_PER_BATCH_MAX: usize = BATCH_FRAMES_MAX / 2;

pub(crate) struct Sender {
    pub(crate) frames: VecDeque<Frame>,
    pub(crate) depth: usize,
    /// `frames[..sent]` are sent and wait for notifications; `frames[sent..batch_end]` are the current batch.
    pub(crate) sent: usize,
    pub(crate) batch_end: usize,
    /// Bytes of `frames[sent]` that are sent.
    pub(crate) at: u32,
    /// The headers of the batch, of which `staging[table_at..table_len]` are not sent yet.
    pub(crate) table_len: usize,
    pub(crate) table_at: usize,
    pub(crate) staging: Box<[u8]>,
    pub(crate) vectors: Vec<libc::iovec>,
    pub(crate) message: libc::msghdr,
    pub(crate) is_sending: bool,
    pub(crate) sending_zero_copy: Option<u32>,
    pub(crate) served_frames: usize,
    /// Signalled frames that the kernel took and the peer has not acknowledged.
    pub(crate) unlanded: u32,
    /// Signalled frames that the peer has acknowledged and that are still in the queue.
    pub(crate) landed: u32,
    /// Signalled frames of the peer that have landed here and are to be acknowledged.
    pub(crate) to_report: u32,
    /// Payload bytes that are not sent yet.
    pub(crate) queued_bytes: u64,
    pub(crate) zero_copy: ZeroCopy,
    /// Largest send, in bytes.
    pub(crate) send_bytes_max: usize,
}

// SAFETY: the raw pointers in `vectors` and `message` point into this struct's own buffers, its queued messages
// and slots that it keeps; only the kernel uses them, during a send, and they are rebuilt for the next one.
unsafe impl Send for Sender {}

/// A send for the kernel.
pub(crate) struct NextSend {
    pub(crate) entry: squeue::Entry,
    pub(crate) sequence: u32,
}

impl Sender {
    pub(crate) fn new(depth: usize, zero_copy_from: Option<usize>, send_bytes_max: usize) -> Self {
        // SAFETY: an all-zero `msghdr` is a valid empty message.
        let message = unsafe { std::mem::zeroed() };
        Self {
            frames: VecDeque::with_capacity(depth + RESERVED_FRAMES),
            depth,
            sent: 0,
            batch_end: 0,
            at: 0,
            table_len: 0,
            table_at: 0,
            staging: vec![0; TABLE_BYTES + STAGING_BYTES].into_boxed_slice(),
            vectors: Vec::with_capacity(VECTORS_MAX),
            message,
            is_sending: false,
            sending_zero_copy: None,
            served_frames: 0,
            unlanded: 0,
            landed: 0,
            to_report: 0,
            queued_bytes: 0,
            zero_copy: ZeroCopy::new(zero_copy_from),
            send_bytes_max,
        }
    }

    /// Returns the number of frames that fit into the queue.
    pub(crate) fn room(&self) -> usize {
        self.depth.saturating_sub(self.frames.len())
    }

    /// Queues a frame. The caller has checked [`Sender::room`].
    pub(crate) fn put(&mut self, header: Header, payload: Payload, finish: FrameCompletion, lane: &mut Lane) {
        let mut is_signalled = finish != FrameCompletion::Silent;
        if let (Some(conflicts), Header::Write { .. }) = (&mut lane.conflicts, header) {
            conflicts.add(&header);
            is_signalled = true;
        }
        debug_assert!(self.frames.len() < self.frames.capacity());
        self.queued_bytes += u64::from(payload.len());
        self.frames.push_back(Frame { header, payload, finish, is_signalled, zero_copy: None });
    }

    /// Queues frames of the reads that the peer has requested.
    pub(crate) fn put_served(&mut self, lane: &mut Lane) {
        let piece_max = if lane.connection_count > 1 { PIECE_BYTES } else { u32::MAX };
        while self.served_frames < SERVED_FRAMES_MAX && lane.verified.len() < VERIFIED_MAX {
            let Some(served) = lane.serving.front_mut() else { return };
            let (from, number, generation, at) = (served.from, served.number, served.generation, served.at);
            let len = (from.len - at).min(piece_max);
            served.at += len;
            if served.at == from.len {
                lane.serving.pop_front();
            }
            let is_verified = len <= COPIED_RESPONSE_BYTES_MAX;
            let payload = Payload::Served { extent: from, at, len, generation, number };
            self.served_frames += 1;
            self.put(
                Header::Response { number, at, len, is_verified },
                payload,
                FrameCompletion::Silent,
                lane,
            );
        }
    }

    /// Returns the next send, if there are bytes to send and no send is in flight. An error ends the
    /// connection.
    pub(crate) fn next_send(
        &mut self,
        descriptor: types::Fd,
        slab: &Arc<Slab>,
        ring: &Ring,
        lane: &mut Lane,
    ) -> Result<Option<NextSend>, &'static str> {
        if self.is_sending {
            return Ok(None);
        }
        if self.is_batch_sent() && !self.begin_batch(lane) {
            return Ok(None);
        }
        let mut flags = (libc::MSG_NOSIGNAL | libc::MSG_WAITALL) as u32;
        let next = match self.gather_zero_copy(slab, ring) {
            Some(buffer) => self.zero_copy_entry(descriptor, flags, buffer),
            None => {
                if self.gather(slab)? {
                    flags |= libc::MSG_MORE as u32;
                }
                NextSend { entry: self.entry(descriptor, flags), sequence: 0 }
            }
        };
        self.is_sending = true;
        Ok(Some(next))
    }

    fn is_batch_sent(&self) -> bool {
        self.table_at == self.table_len && self.sent == self.batch_end
    }

    /// Encodes the headers of the next batch; false when there is nothing to send.
    fn begin_batch(&mut self, lane: &mut Lane) -> bool {
        let mut places = self.staging.chunks_exact_mut(HEADER_BYTES);
        let mut count = 0;
        let landed = (self.to_report > 0).then_some(Header::Landed { count: self.to_report });
        self.to_report = 0;
        let verified = (0..VERIFIED_PER_BATCH_MAX).map_while(|_| lane.verified.pop_front());
        let verified = verified.map(|(number, len)| Header::Verified { number, len });
        // Headers first: a zip takes from its left side before it sees that the right side has ended.
        for (header, place) in landed.into_iter().chain(verified).zip(&mut places) {
            place.copy_from_slice(&header.encode(0, false));
            count += 1;
        }
        let frames = self.frames.iter().skip(self.sent).take(BATCH_FRAMES_MAX - count);
        self.batch_end = self.sent + frames.len();
        for (frame, place) in frames.zip(places) {
            place.copy_from_slice(&frame.header.encode(0, frame.is_signalled));
            count += 1;
        }
        (self.table_at, self.table_len) = (0, count * HEADER_BYTES);
        // The first header states how many headers follow it.
        self.staging[1] = count.saturating_sub(1) as u8;
        count > 0
    }

    /// Whether nothing waits to be sent and no send is in flight. Frames may still wait for notifications and
    /// acknowledgements.
    pub(crate) fn is_idle(&self) -> bool {
        !self.is_sending && self.is_batch_sent() && self.sent == self.frames.len() && self.to_report == 0
    }

    /// Ends the queued frames. May be called only when no operation is in flight.
    pub(crate) fn abandon(&mut self, events: &mut VecDeque<Event>) {
        for frame in self.frames.drain(..) {
            if let FrameCompletion::Request(id) = frame.finish {
                events.push_back(Event::Completed { id, completion: Completion::PeerDown });
            }
        }
        (self.sent, self.batch_end, self.at) = (0, 0, 0);
    }
}
