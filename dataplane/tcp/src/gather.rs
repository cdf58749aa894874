//! Building of one send from the rest of a batch: pieces in place, and copied runs in the staging buffer.

use std::ptr::NonNull;
use std::sync::Arc;

use dataplane_memory::Slab;
use io_uring::{opcode, squeue, types};

use crate::frame::{Payload, PayloadChunk};
use crate::ring::{Ring, set_registered_buffer};
use crate::send::{NextSend, Sender, VECTORS_MAX};

/// `IORING_RECVSEND_FIXED_BUF` and `IORING_SEND_ZC_REPORT_USAGE` of io_uring.h.
const FIXED_BUFFER: u16 = 4;
const REPORT_USAGE: u16 = 8;

/// A vector that is being filled. Adjacent pieces are merged.
struct Vector<'a> {
    pieces: &'a mut Vec<libc::iovec>,
    bytes: usize,
    bytes_max: usize,
}

impl Vector<'_> {
    fn room(&self) -> usize {
        if self.pieces.len() < VECTORS_MAX { self.bytes_max - self.bytes } else { 0 }
    }

    fn push(&mut self, start: *const u8, len: usize) {
        self.bytes += len;
        if let Some(last) = self.pieces.last_mut()
            && last.iov_base.wrapping_byte_add(last.iov_len).cast_const() == start.cast()
        {
            last.iov_len += len;
            return;
        }
        self.pieces.push(libc::iovec { iov_base: start.cast_mut().cast(), iov_len: len });
    }
}

impl Sender {
    /// Fills the vector from the current position of the batch. True when a zero-copy send is to follow.
    pub(crate) fn gather(&mut self, slab: &Arc<Slab>) -> Result<bool, &'static str> {
        self.vectors.clear();
        let mut vector = Vector { pieces: &mut self.vectors, bytes: 0, bytes_max: self.send_bytes_max };
        let mut staged = 0;
        if self.table_at < self.table_len {
            vector.push(self.staging[self.table_at..].as_ptr(), self.table_len - self.table_at);
            staged = self.table_len;
        }
        let zero_copy_from = self.zero_copy.from();
        let mut at = self.at;
        for frame in self.frames.range(self.sent..self.batch_end) {
            if zero_copy_from.is_some_and(|from| frame.payload.suits_zero_copy(slab, at, from)) {
                // Without any piece this would send nothing. The first payload is never suited here, see
                // `next_send`.
                return Ok(true);
            }
            while at < frame.payload.len() {
                let room = vector.room();
                let staging_room = room.min(self.staging.len() - staged);
                let (len, is_copied) = match frame.payload.run(slab, at) {
                    PayloadChunk::InPlace(start, len) => {
                        let len = room.min(len as usize);
                        if len > 0 {
                            vector.push(start.as_ptr(), len);
                        }
                        (len, false)
                    }
                    PayloadChunk::ToCopy(len) => (staging_room.min(len as usize), true),
                    PayloadChunk::ToCopyWhole(len) if staging_room < len as usize => (0, true),
                    PayloadChunk::ToCopyWhole(len) => (len as usize, true),
                };
                if len == 0 {
                    return Ok(false);
                }
                if is_copied {
                    let place = &mut self.staging[staged..staged + len];
                    frame.payload.copy_out(slab, at, place);
                    vector.push(place.as_ptr(), len);
                    staged += len;
                }
                if let Payload::Served { extent, generation, .. } = &frame.payload
                    && slab.generation(extent.slot) != *generation
                {
                    return Err("a slot was reused before a peer had read it");
                }
                at += len as u32;
            }
            at = 0;
        }
        Ok(false)
    }

    /// Fills the vector with payloads to send without a copy, if the batch's position is at such payloads.
    /// Returns the registered buffer that holds all of them, if there is one.
    pub(crate) fn gather_zero_copy(&mut self, slab: &Arc<Slab>, ring: &Ring) -> Option<Option<u16>> {
        let from = self.zero_copy.from()?;
        if self.table_at < self.table_len {
            return None;
        }
        self.vectors.clear();
        let mut vector = Vector { pieces: &mut self.vectors, bytes: 0, bytes_max: self.send_bytes_max };
        let mut at = self.at;
        let mut common = None;
        for frame in self.frames.range(self.sent..self.batch_end) {
            if !frame.payload.suits_zero_copy(slab, at, from) {
                break;
            }
            while at < frame.payload.len() {
                let PayloadChunk::InPlace(start, len) = frame.payload.run(slab, at) else { break };
                let len = vector.room().min(len as usize);
                let buffer = ring.registered_buffer(start.as_ptr(), len);
                if len == 0 || *common.get_or_insert(buffer) != buffer {
                    return common;
                }
                vector.push(start.as_ptr(), len);
                at += len as u32;
            }
            at = 0;
        }
        common
    }

    pub(crate) fn entry(&mut self, descriptor: types::Fd, flags: u32) -> squeue::Entry {
        if let [only] = &self.vectors[..] {
            let (start, len) = (only.iov_base.cast(), only.iov_len as u32);
            return opcode::Send::new(descriptor, start, len).flags(flags as i32).build();
        }
        let message = self.message();
        opcode::SendMsg::new(descriptor, message.as_ptr()).flags(flags).build()
    }

    pub(crate) fn zero_copy_entry(
        &mut self,
        descriptor: types::Fd,
        flags: u32,
        buffer: Option<u16>,
    ) -> NextSend {
        let sequence = self.zero_copy.begin();
        self.sending_zero_copy = Some(sequence);
        let fixed = if buffer.is_some() { FIXED_BUFFER } else { 0 };
        let message = self.message();
        let send = opcode::SendMsgZc::new(descriptor, message.as_ptr()).flags(flags);
        let mut entry = send.ioprio(REPORT_USAGE | fixed).build();
        if let Some(buffer) = buffer {
            set_registered_buffer(&mut entry, buffer);
        }
        NextSend { entry, sequence }
    }

    fn message(&mut self) -> NonNull<libc::msghdr> {
        self.message.msg_iov = self.vectors.as_mut_ptr();
        self.message.msg_iovlen = self.vectors.len();
        NonNull::from_mut(&mut self.message)
    }
}
