//! Retirement of frames: the kernel has taken them, the network no longer needs their bytes, the peer has
//! acknowledged them.

use std::collections::VecDeque;

use dataplane_fabric::Event;
use dataplane_memory::Slab;

use crate::frame::{COPIED_RESPONSE_BYTES_MAX, Frame, Payload};
use crate::lane::Lane;
use crate::send::Sender;
use crate::wire::Header;

impl Sender {
    /// Records that the kernel took `bytes` of the send in flight. `has_more`: a zero-copy send's
    /// notification follows.
    pub(crate) fn sent(
        &mut self,
        bytes: usize,
        has_more: bool,
        slab: &Slab,
        lane: &mut Lane,
        events: &mut VecDeque<Event>,
    ) -> Result<u64, &'static str> {
        self.is_sending = false;
        let zero_copy = self.sending_zero_copy.take();
        if let Some(sequence) = zero_copy.filter(|_| !has_more) {
            self.zero_copy.end(sequence);
        }
        let of_table = bytes.min(self.table_len - self.table_at);
        self.table_at += of_table;
        let mut left = bytes - of_table;
        let first = self.sent;
        while self.table_at == self.table_len && self.sent < self.batch_end {
            let frame = &mut self.frames[self.sent];
            let step = left.min((frame.payload.len() - self.at) as usize);
            left -= step;
            self.at += step as u32;
            self.queued_bytes -= step as u64;
            if step > 0 && zero_copy.is_some() {
                frame.zero_copy = zero_copy;
            }
            if self.at < frame.payload.len() {
                break;
            }
            if let Payload::Served { extent, len, generation, number, .. } = &frame.payload {
                self.served_frames -= 1;
                if *len > COPIED_RESPONSE_BYTES_MAX {
                    if slab.generation(extent.slot) != *generation {
                        return Err("a slot was reused while a peer read it");
                    }
                    lane.verified.push_back((*number, *len));
                }
            }
            self.unlanded += u32::from(frame.is_signalled);
            self.sent += 1;
            self.at = 0;
        }
        let frames = (self.sent - first) as u64;
        self.finish_frames(lane, events);
        Ok(frames)
    }

    /// Records that the network no longer needs the bytes of a zero-copy send.
    pub(crate) fn notified(
        &mut self,
        sequence: u32,
        was_copied: bool,
        lane: &mut Lane,
        events: &mut VecDeque<Event>,
    ) {
        self.zero_copy.end(sequence);
        if was_copied {
            self.zero_copy.give_up();
        }
        self.finish_frames(lane, events);
    }

    /// Records that the peer has acknowledged `count` more signalled frames.
    pub(crate) fn landed(
        &mut self,
        count: u32,
        lane: &mut Lane,
        events: &mut VecDeque<Event>,
    ) -> Result<(), &'static str> {
        // A frame may be acknowledged before the kernel has reported that it took it, but not before it was
        // in a batch.
        let in_batch = self.frames.range(self.sent..self.batch_end);
        let in_batch = in_batch.filter(|frame| frame.is_signalled).count() as u32;
        self.landed = self.landed.checked_add(count).ok_or("more frames landed than were sent")?;
        if self.landed > self.unlanded + in_batch {
            return Err("more frames landed than were sent");
        }
        self.finish_frames(lane, events);
        Ok(())
    }

    /// Gives up zero-copy sends if the failed send was one. Returns whether it was, so that it may be retried
    /// with a copy.
    pub(crate) fn give_up_zero_copy(&mut self) -> bool {
        let was_zero_copy = self.sending_zero_copy.is_some();
        if was_zero_copy {
            self.zero_copy.give_up();
        }
        was_zero_copy
    }

    /// Removes frames from the queue whose bytes neither the network nor the peer needs any more.
    fn finish_frames(&mut self, lane: &mut Lane, events: &mut VecDeque<Event>) {
        while self.sent > 0 {
            let zero_copy = &self.zero_copy;
            let is_needed = |frame: &Frame| frame.zero_copy.is_some_and(|send| zero_copy.is_pending(send));
            let is_signalled = self.frames.front().is_some_and(|frame| frame.is_signalled);
            if self.frames.front().is_none_or(is_needed) || (is_signalled && self.landed == 0) {
                return;
            }
            let Some(frame) = self.frames.pop_front() else { return };
            if is_signalled {
                self.landed -= 1;
                self.unlanded -= 1;
            }
            self.sent -= 1;
            self.batch_end -= 1;
            if let (Some(conflicts), Header::Write { .. }) = (&mut lane.conflicts, frame.header) {
                conflicts.remove(&frame.header);
            }
            lane.finish(frame.finish, events);
        }
    }
}
