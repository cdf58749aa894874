//! The receiving half of a connection, without its socket: plans the positions of the next bytes and
//! processes the bytes that arrived.
//!
//! The headers of a batch come first, so one `recvmsg` scatters the payloads of many frames to their slots,
//! with the staging buffer as its last piece for the headers of the next batch. Only headers, small payloads
//! that arrived with them and rows too short for vectors pass through the staging buffer. Every header is
//! checked when its batch is decoded, before a byte of the batch is written.

use dataplane_memory::Slab;

use crate::inbound::Inbound;
use crate::lane::Lane;
use crate::plan::{Next, Plan, Planned, VECTORS_MAX, planned_target};
use crate::receive_target::ReceiveTarget;
use crate::wire::{BATCH_FRAMES_MAX, Decoded, HEADER_BYTES, Header};

/// Size of the staging buffer in bytes.
pub(crate) const STAGING_BYTES: usize = 64 << 10;
/// Part of the staging buffer that is offered while a batch is awaited: for headers, small frames and the
/// first bytes of large ones, which are then copied once more.
const AWAITING_BYTES: usize = 16 << 10;
/// Part of the staging buffer that is offered behind payloads that go directly to their slots.
const TAIL_BYTES: usize = 4 << 10;
/// Landed frames are reported to the peer at the end of a batch and, in a long batch, after this many bytes.
const REPORT_AFTER_BYTES: usize = 1 << 20;

pub(crate) struct Receiver {
    staging: Box<[u8]>,
    /// `staging[parsed..filled]` has not been processed yet.
    parsed: usize,
    filled: usize,
    /// Headers of the current batch; those before `next` are done.
    batch: Vec<Decoded>,
    next: usize,
    receive_target: Option<ReceiveTarget>,
    /// Signalled frames that have landed and were not reported to the peer, and the bytes since the last
    /// report.
    unreported: u32,
    unreported_bytes: usize,
    pub(crate) vectors: Vec<libc::iovec>,
    pub(crate) message: libc::msghdr,
    /// Bytes of the receive in flight that go directly to their slots.
    direct_bytes: usize,
    receive_bytes_max: usize,
}

// SAFETY: the raw pointers in `vectors` and `message` point into this struct's own buffers, the fabric's slab and
// slots that the lane's reads keep; only the kernel uses them, during a receive.
unsafe impl Send for Receiver {}

impl Receiver {
    pub(crate) fn new(receive_bytes_max: usize) -> Self {
        // SAFETY: an all-zero `msghdr` is a valid empty message.
        let message = unsafe { std::mem::zeroed() };
        Self {
            staging: vec![0; STAGING_BYTES].into_boxed_slice(),
            parsed: 0,
            filled: 0,
            batch: Vec::with_capacity(BATCH_FRAMES_MAX),
            next: 0,
            receive_target: None,
            unreported: 0,
            unreported_bytes: 0,
            vectors: Vec::with_capacity(VECTORS_MAX),
            message,
            direct_bytes: 0,
            receive_bytes_max,
        }
    }

    /// Fills `vectors` with the positions of the next bytes. Must not be called while the connection is held
    /// at a fence.
    pub(crate) fn plan(&mut self, slab: &Slab, lane: &Lane) {
        self.vectors.clear();
        let mut plan = Plan { vectors: &mut self.vectors, bytes: 0, bytes_max: self.receive_bytes_max };
        let mut next = self
            .receive_target
            .as_mut()
            .map_or(Next::Following, |receive_target| plan.add(receive_target, slab, lane));
        for Decoded { header, .. } in self.batch.iter().skip(self.next) {
            if next != Next::Following {
                break;
            }
            next = match planned_target(header, lane) {
                Planned::Nothing => Next::Following,
                Planned::Payload(mut receive_target) => plan.add(&mut receive_target, slab, lane),
                Planned::NotYet => Next::Staging,
            };
        }
        self.direct_bytes = plan.bytes;
        self.staging.copy_within(self.parsed..self.filled, 0);
        self.filled -= self.parsed;
        self.parsed = 0;
        let is_awaiting = self.receive_target.is_none() && self.next == self.batch.len();
        let wanted = match (self.direct_bytes, is_awaiting) {
            (0, true) => AWAITING_BYTES,
            (0, false) => STAGING_BYTES,
            _ => TAIL_BYTES,
        };
        if next != Next::Nothing {
            let room = &mut self.staging[self.filled..];
            let len = room.len().min(wanted);
            self.vectors.push(libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: len });
        }
        self.message.msg_iov = self.vectors.as_mut_ptr();
        self.message.msg_iovlen = self.vectors.len();
    }

    /// Processes `bytes` new bytes. An error ends the connection.
    pub(crate) fn received(&mut self, bytes: usize, inbound: &mut Inbound<'_>) -> Result<(), &'static str> {
        let direct = bytes.min(self.direct_bytes);
        self.filled += bytes - direct;
        self.unreported_bytes += bytes;
        self.digest(direct, inbound)
    }

    /// Continues after the connection was held at a fence.
    pub(crate) fn resume(&mut self, inbound: &mut Inbound<'_>) -> Result<(), &'static str> {
        inbound.lane.is_held = false;
        self.digest(0, inbound)
    }

    /// Processes the bytes: first `direct` bytes that are already in their slots, then the staged ones.
    fn digest(&mut self, mut direct: usize, inbound: &mut Inbound<'_>) -> Result<(), &'static str> {
        loop {
            if let Some(receive_target) = &mut self.receive_target {
                let here = direct.min(receive_target.missing() as usize);
                receive_target.advance(here as u32);
                direct -= here;
                if here > 0 && !receive_target.is_current(inbound.slab) {
                    return Err("a write to a slot that was reused meanwhile");
                }
                let staged = receive_target.missing() as usize;
                let staged = &self.staging[self.parsed..self.filled.min(self.parsed + staged)];
                if direct == 0 && !staged.is_empty() {
                    if !receive_target.is_current(inbound.slab) {
                        return Err("a write to a slot that has been reused");
                    }
                    receive_target.copy_in(inbound.slab, inbound.lane, staged);
                    self.parsed += staged.len();
                }
                if receive_target.missing() > 0 {
                    return Ok(());
                }
                if let Some(receive_target) = self.receive_target.take() {
                    inbound.landed(receive_target)?;
                }
                self.count_landed(inbound);
            }
            let Some(header) = self.batch.get(self.next).map(|decoded| decoded.header) else {
                self.report(inbound);
                if !self.decode_batch(inbound)? {
                    return Ok(());
                }
                continue;
            };
            if let Header::Fence { counts } = header
                && !inbound.lane.is_satisfied(&counts)
            {
                inbound.lane.is_held = true;
                return Ok(());
            }
            self.next += 1;
            self.receive_target = inbound.begin(header)?;
            if self.receive_target.is_none() {
                self.count_landed(inbound);
            }
        }
    }

    /// Counts the frame before `next` as landed.
    fn count_landed(&mut self, inbound: &mut Inbound<'_>) {
        self.unreported += u32::from(self.next > 0 && self.batch[self.next - 1].is_signalled);
        if self.unreported_bytes >= REPORT_AFTER_BYTES {
            self.report(inbound);
        }
    }

    /// Reports the landed frames to the peer.
    fn report(&mut self, inbound: &mut Inbound<'_>) {
        let sender = &mut inbound.sender;
        sender.to_report = sender.to_report.saturating_add(std::mem::take(&mut self.unreported));
        self.unreported_bytes = 0;
    }

    /// Ends the incomplete writes in the slab: the kernel has no more operations of this
    /// connection.
    pub(crate) fn end_writes(&mut self, slab: &Slab) {
        if let Some(ReceiveTarget::Write { extent, .. }) = self.receive_target.take() {
            slab.end_write(extent.slot);
        }
        for Decoded { header, .. } in self.batch.drain(self.next..) {
            if let Header::Write { target, .. } = header {
                slab.end_write(target.slot);
            }
        }
    }

    /// Takes the headers of the next batch off the staging buffer; false when they have not all arrived.
    fn decode_batch(&mut self, inbound: &mut Inbound<'_>) -> Result<bool, &'static str> {
        let staged = &self.staging[self.parsed..self.filled];
        let Some(first) = staged.first_chunk::<HEADER_BYTES>() else { return Ok(false) };
        let followers = Header::decode(first)?.followers;
        let Some(table) = staged.get(..HEADER_BYTES * (1 + usize::from(followers))) else { return Ok(false) };
        self.batch.clear();
        self.next = 0;
        for bytes in table.as_chunks::<HEADER_BYTES>().0 {
            let decoded = Header::decode(bytes)?;
            if decoded.followers > 0 && !self.batch.is_empty() {
                return Err("a batch within a batch");
            }
            inbound.check(&decoded.header)?;
            // From here on a receive may point into the read's slot: the read must not complete before these
            // bytes have arrived, even if another connection of the lane delivers the rest.
            if let Header::Response { number, len, .. } = decoded.header {
                inbound.lane.reads.promise(number, len)?;
            }
            if let Header::Write { target, .. } = decoded.header {
                inbound.slab.begin_write(target.slot);
            }
            self.batch.push(decoded);
        }
        self.parsed += table.len();
        Ok(true)
    }
}
