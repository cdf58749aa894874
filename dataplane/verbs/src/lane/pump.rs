//! Turns waiting requests into posted work requests: the sending half of a lane's hot path.

use dataplane_memory::Slab;

use super::{Flight, Held, Lane, Pair, Pending, PumpResources, Work};
use crate::VerbsError;
use crate::memory_region::MemoryRegion;
use crate::post::{Batch, Remote, Verb};
use crate::wire::{SEGMENT_HEADER_BYTES, Segment};

impl Lane {
    /// Builds and posts work requests while there is room, with one doorbell. Returns the number posted.
    /// After an error the connection must end.
    pub(crate) fn pump(&mut self, supplies: &mut PumpResources<'_>) -> Result<usize, VerbsError> {
        let Pair::Ready(pair) = std::mem::replace(&mut self.pair, Pair::Absent) else { return Ok(0) };
        let PumpResources { array, regions, bounce_region, bounce_slab, bounce_free, .. } = supplies;
        let mut filling = Filling {
            batch: array.acquire(),
            regions,
            bounce_region,
            bounce_slab,
            bounce_free,
            bounce_reserve: supplies.bounce_reserve,
            message_bytes_max: supplies.message_bytes_max,
            signal_every: supplies.signal_every,
        };
        let free = usize::try_from(self.depth - self.outstanding()).unwrap_or(usize::MAX);
        let room = free.min(supplies.completion_room).min(filling.batch.room());
        // Leaves room for a credit message: a lane that is busy with writes must not withhold the peer's credits.
        self.fill(&mut filling, room.saturating_sub(usize::from(self.owes_credits())));
        let credit_messages = self.fill_credits(&mut filling, room);
        let count = filling.batch.len();
        if count == 0 {
            self.pair = Pair::Ready(pair);
            return Ok(0);
        }
        // `Batch::post` signals the last request.
        self.unsignalled = 0;
        // SAFETY: 1. regions of slabs and of the bounce buffers live in the fabric until every pair is
        // destroyed; 2. `in_flight` and `queue` hold slots and bounce buffers until the completion, and nobody
        // has references into them; 3. `room` was cut to the depth, and to what the completion queue holds.
        let posted = unsafe { filling.batch.post(&pair) };
        self.pair = Pair::Ready(pair);
        let posted = match posted {
            Ok(posted) => posted,
            Err(error) => {
                if let VerbsError::Post { accepted, .. } = &error {
                    // The device has not seen the other requests; their records are dropped with the connection.
                    self.posted -= (count - accepted) as u64;
                }
                return Err(error);
            }
        };
        supplies.metrics.doorbells += 1;
        supplies.metrics.work_requests += count as u64;
        supplies.metrics.signalled += posted.signalled() as u64;
        supplies.metrics.credit_messages += u64::from(credit_messages);
        // SAFETY: the fabric keeps the regions, as above.
        unsafe { posted.completed() };
        Ok(count)
    }

    fn fill(&mut self, filling: &mut Filling<'_, '_>, room: usize) {
        while filling.batch.len() < room {
            let Some(Pending { id, work }) = self.queue.front_mut() else { return };
            let id = *id;
            let is_finished = match work {
                Work::Slot { region, local, remote, geometry, cursor, is_read, immediate, .. } => {
                    let mut next = *cursor;
                    let entries_max = if *is_read { self.read_entries_max } else { self.entries_max };
                    let piece = geometry.next(&mut next, entries_max, filling.message_bytes_max);
                    let immediate = immediate.filter(|_| piece.is_last);
                    if immediate.is_some() && self.credits == 0 {
                        return;
                    }
                    self.credits -= u32::from(immediate.is_some());
                    *cursor = next;
                    let remote = Remote { address: remote.address + u64::from(piece.remote), ..*remote };
                    let verb = match (immediate, *is_read) {
                        (Some(value), _) => Verb::WriteWithImmediate(remote, value),
                        (None, true) => Verb::Read(remote),
                        (None, false) => Verb::Write(remote),
                    };
                    filling.begin(verb, self.posted, &mut self.unsignalled);
                    if piece.bytes > 0 {
                        let region = &filling.regions[*region as usize];
                        let address = *local + u64::from(piece.local);
                        filling.batch.gather_rows(
                            region,
                            address,
                            piece.bytes,
                            piece.local_stride,
                            piece.rows,
                        );
                    }
                    self.posted += 1;
                    piece.is_last
                }
                Work::Inline { bytes, len, remote, immediate } => {
                    if immediate.is_some() && self.credits == 0 {
                        return;
                    }
                    let bytes = &bytes[..usize::from(*len)];
                    let verb = immediate
                        .map_or(Verb::Write(*remote), |value| Verb::WriteWithImmediate(*remote, value));
                    let has_immediate = immediate.is_some();
                    let Some(held) =
                        filling.small(verb, self.posted, &mut self.unsignalled, self.inline_max, bytes, &[])
                    else {
                        return;
                    };
                    self.credits -= u32::from(has_immediate);
                    self.in_flight.push_back(Flight { last: self.posted, id, held });
                    self.posted += 1;
                    self.queue.pop_front();
                    continue;
                }
                Work::Message { message, offset } => {
                    if self.credits == 0 {
                        return;
                    }
                    let start = *offset;
                    let payload =
                        (message.len() - start).min(self.agreement.segment_bytes - SEGMENT_HEADER_BYTES);
                    let header = Segment {
                        carries_message: true,
                        credits: u16::try_from(self.owed).unwrap_or(u16::MAX),
                        number: self.next_piece,
                        message_bytes: message.len() as u32,
                        offset: start as u32,
                    };
                    let body = &message[start..start + payload];
                    let Some(held) = filling.small(
                        Verb::Send,
                        self.posted,
                        &mut self.unsignalled,
                        self.inline_max,
                        &header.encode(),
                        body,
                    ) else {
                        return;
                    };
                    *offset += payload;
                    let is_last = *offset == message.len();
                    self.owed -= u32::from(header.credits);
                    self.next_piece = self.next_piece.wrapping_add(1);
                    self.credits -= 1;
                    let id = if is_last { id } else { 0 };
                    self.in_flight.push_back(Flight { last: self.posted, id, held });
                    self.posted += 1;
                    if is_last {
                        self.queue.pop_front();
                    }
                    continue;
                }
            };
            if is_finished {
                let held = match self.queue.pop_front() {
                    Some(Pending { work: Work::Slot { slot, .. }, .. }) => Held::Slot(slot),
                    _ => Held::Nothing,
                };
                self.in_flight.push_back(Flight { last: self.posted - 1, id, held });
            }
        }
    }

    /// Posts a credit message for credits that no message piece carried.
    fn fill_credits(&mut self, filling: &mut Filling<'_, '_>, room: usize) -> bool {
        if !self.owes_credits() || filling.batch.len() >= room {
            return false;
        }
        let credits = u16::try_from(self.owed).unwrap_or(u16::MAX);
        let header = Segment { carries_message: false, credits, number: 0, message_bytes: 0, offset: 0 };
        let header = header.encode();
        let Some(held) =
            filling.small(Verb::Send, self.posted, &mut self.unsignalled, self.inline_max, &header, &[])
        else {
            return false;
        };
        self.owed -= u32::from(credits);
        self.in_flight.push_back(Flight { last: self.posted, id: 0, held });
        self.posted += 1;
        true
    }
}

/// A batch, with the resources that fill it.
struct Filling<'array, 'region> {
    batch: Batch<'array, 'region>,
    regions: &'region [MemoryRegion],
    bounce_region: &'region MemoryRegion,
    bounce_slab: &'region Slab,
    bounce_free: &'array mut Vec<u32>,
    bounce_reserve: usize,
    message_bytes_max: u32,
    signal_every: u32,
}

impl Filling<'_, '_> {
    fn begin(&mut self, verb: Verb, number: u64, unsignalled: &mut u32) {
        *unsignalled += 1;
        let signalled = *unsignalled >= self.signal_every;
        if signalled {
            *unsignalled = 0;
        }
        self.batch.begin(verb, number, signalled);
    }

    /// Begins a request of `head` and `body`, inline if they fit into the work request, else in a bounce
    /// buffer; returns `None` when no buffer is free.
    fn small(
        &mut self,
        verb: Verb,
        number: u64,
        unsignalled: &mut u32,
        inline_max: usize,
        head: &[u8],
        body: &[u8],
    ) -> Option<Held> {
        let len = head.len() + body.len();
        if len == 0 {
            self.begin(verb, number, unsignalled);
            return Some(Held::Nothing);
        }
        if len <= inline_max {
            self.begin(verb, number, unsignalled);
            self.batch.inline(head);
            self.batch.inline(body);
            return Some(Held::Nothing);
        }
        if self.bounce_free.len() <= self.bounce_reserve {
            return None;
        }
        let buffer = self.bounce_free.pop()?;
        self.bounce_slab.write(buffer, 0, head);
        self.bounce_slab.write(buffer, head.len(), body);
        self.begin(verb, number, unsignalled);
        let address = self.bounce_slab.address(buffer, 0, len).as_ptr() as u64;
        self.batch.gather(self.bounce_region, address, len as u32);
        Some(Held::Bounce(buffer))
    }
}
