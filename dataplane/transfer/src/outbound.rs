//! The sending side of one transfer: the parts that are ready and the progress of posting them.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use dataplane_fabric::{Fabric, Full, Operation, PeerId, Priority, Source, Target, WorkRequest};
use dataplane_memory::{SlabKind, SlotRef};

use crate::budget::Budget;
use crate::checksum::{RunningChecksum, SlotRows};
use crate::config::ANNOUNCED_BLOCKS_MAX;
use crate::direct::{Purpose, SumRequest};
use crate::negotiation::NegotiatedParameters;
use crate::pieces::{bytes_of, join_rest, split_front};
use crate::stages::{Stage, StageClock};
use crate::wire::{Message, SlotName};

/// Largest write; rows are not cut, so a single row may exceed it. The limit bounds the time of one `post`,
/// in which shared memory copies the whole write.
const WRITE_BYTES_MAX: u32 = 128 << 10;
/// Bytes of a budget that posting one write costs: about the bytes that are checksummed in the same time.
const POST_COST_BYTES: usize = 2 << 10;
/// Time that a part waits for a connection that reaches the receiver's slots; after it the transfer ends.
const REACH_WITHIN: Duration = Duration::from_secs(1);
/// Most parts that are written and not announced yet: the receiver keeps state for each.
const UNANNOUNCED_PARTS_MAX: usize = 64;

/// The receiver's reservation of blocks: the whole of it, or the portion that one message carries.
#[derive(Debug)]
pub(crate) struct Reservation {
    pub(crate) peer: PeerId,
    pub(crate) tag: u16,
    pub(crate) content: [u8; 16],
    pub(crate) first_block: u32,
    /// Blocks of the whole reservation, at most [`crate::config::BLOCKS_MAX`].
    pub(crate) blocks: usize,
    /// Kind of the receiver's slab that holds the slots.
    pub(crate) slab: SlabKind,
    pub(crate) slots: Vec<SlotName>,
    /// Terms agreed with the receiver.
    pub(crate) terms: NegotiatedParameters,
}

impl Reservation {
    /// Whether `part`, which begins at block `offset` of its reservation, is the message that follows this one.
    fn is_continued_by(&self, offset: usize, part: &Self) -> bool {
        offset == self.slots.len()
            && (part.peer, part.tag, part.content, part.slab)
                == (self.peer, self.tag, self.content, self.slab)
            && (part.first_block, part.blocks) == (self.first_block, self.blocks)
    }
}

/// Result of a reservation message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reserved {
    /// Further messages of the same reservation are expected.
    InPart,
    /// The reservation is complete: its blocks can be written.
    Whole,
    /// The peer has reserved this transfer already. The end of the first reservation is still to be
    /// reported, and answers both.
    Repeated,
    /// Nothing is written for this message, and the peer must be told.
    Refused,
}

/// Layers `layers` of the blocks from `first_block` on. They are computed, and are written, checksummed and
/// then announced.
#[derive(Debug)]
struct OutboundPart {
    /// Number of the part within its transfer; consecutive.
    part: u64,
    first_block: u32,
    slots: Vec<SlotRef>,
    layers: Range<u16>,
    /// Sequence number that its immediate and its announcement carry; set when its writing begins.
    sequence: Option<u16>,
    /// Time of the push; once the part is written, the time at which the last write was posted.
    since: Instant,
    /// Leading blocks of which every byte is posted.
    written_blocks: usize,
    /// Remaining write of the block after the written ones.
    writing: Option<Operation>,
    sums: Sums,
}

/// The checksums of the blocks of one part.
#[derive(Debug)]
enum Sums {
    /// Computed by the processor, block after block; those of the leading blocks.
    Processor(Vec<u64>),
    /// Computed by a device, in any order.
    Device {
        /// The checksum of each block, once known.
        values: VecDeque<Option<u64>>,
        /// Number of blocks whose checksum is not known yet.
        missing: usize,
    },
}

/// State of the receiver.
#[derive(Debug, Default)]
enum Receiver {
    /// No peer has reserved the blocks.
    #[default]
    Absent,
    /// Further messages of the reservation are expected.
    Reserving(Reservation),
    /// The reservation is complete and no longer changes: its slots are written to.
    Reserved {
        reservation: Reservation,
        /// Time at which the reservation became complete.
        since: Instant,
    },
}

/// State of the sending of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Sending {
    /// Further pushes are accepted.
    #[default]
    Open,
    /// No further pushes follow; `Finished` is posted after the pushed parts.
    Ended,
    /// The transfer was stopped: the rest is not sent, and `Finished` is posted next.
    Abandoned,
    /// `Finished` is posted; its completion ends the transfer.
    Finishing {
        since: Instant,
        /// Whether every part was sent.
        is_whole: bool,
    },
}

/// Layers of blocks as they were pushed, returned to the caller.
#[derive(Debug)]
pub(crate) struct Pushed {
    pub(crate) first_block: u32,
    pub(crate) slots: Vec<SlotRef>,
    pub(crate) layers: Range<u16>,
}

/// One transfer that this node sends.
#[derive(Debug, Default)]
pub(crate) struct Outbound {
    receiver: Receiver,
    pub(crate) sending: Sending,
    /// Name of the content, once the owner has pushed blocks.
    pub(crate) content: Option<[u8; 16]>,
    ready: VecDeque<OutboundPart>,
    /// Number of leading parts of `ready` that are written.
    written_parts: usize,
    /// Checksum in progress, of the first block in `ready` without one.
    running_checksum: RunningChecksum,
    /// Announcement of the first part that the fabric has not accepted yet.
    announcement: Option<Box<[u8]>>,
    next_sequence: u16,
    pub(crate) bytes_posted: u64,
    /// Bytes that the processor has checksummed.
    pub(crate) bytes_summed: u64,
    /// Number that identifies this transfer's sums at the device; `None` before the first push that a
    /// device checksums.
    pub(crate) number: Option<u64>,
    next_part: u64,
    /// Whether the node's list of transfers with sums to request contains this one.
    pub(crate) is_unasked: bool,
    /// Part number below which all sums were requested from the device.
    next_asked: u64,
    /// Whether a part was announced with checksums of the device.
    pub(crate) is_direct: bool,
    /// Time since which no connection reaches from the slots of the next part to the receiver's.
    out_of_reach_since: Option<Instant>,
}

/// Posting stops: the fabric is full, or the budget is spent.
struct Stopped;

impl Outbound {
    /// Takes one message of a reservation, whose slots begin at block `offset` of the reservation. A second
    /// reservation changes nothing.
    pub(crate) fn reserve(&mut self, offset: usize, part: Reservation, now: Instant) -> Reserved {
        let reservation = match std::mem::take(&mut self.receiver) {
            Receiver::Absent if offset > 0 => return Reserved::Refused,
            Receiver::Absent => part,
            Receiver::Reserving(mut known) if known.is_continued_by(offset, &part) => {
                known.slots.extend(part.slots);
                known
            }
            known @ (Receiver::Reserving(_) | Receiver::Reserved { .. }) => {
                self.receiver = known;
                return self.repeated(&part);
            }
        };
        if reservation.slots.len() < reservation.blocks {
            self.receiver = Receiver::Reserving(reservation);
            return Reserved::InPart;
        }
        self.receiver = Receiver::Reserved { reservation, since: now };
        Reserved::Whole
    }

    /// Returns the answer to a reservation beside the known one. After `Finished` was posted, a peer that
    /// has begun the transfer anew gets no further message, so it must be refused explicitly.
    fn repeated(&self, part: &Reservation) -> Reserved {
        let is_finishing = matches!(self.sending, Sending::Finishing { .. });
        let is_answered = self
            .any_reservation()
            .is_some_and(|known| known.peer == part.peer && (known.tag == part.tag || !is_finishing));
        if is_answered { Reserved::Repeated } else { Reserved::Refused }
    }

    /// Returns the receiver's reservation, complete or not.
    fn any_reservation(&self) -> Option<&Reservation> {
        match &self.receiver {
            Receiver::Absent => None,
            Receiver::Reserving(reservation) | Receiver::Reserved { reservation, .. } => Some(reservation),
        }
    }

    /// Returns the receiver's reservation once it is complete.
    pub(crate) fn reservation(&self) -> Option<&Reservation> {
        match &self.receiver {
            Receiver::Absent | Receiver::Reserving(_) => None,
            Receiver::Reserved { reservation, .. } => Some(reservation),
        }
    }

    /// Whether a peer has reserved the transfer, completely or in part.
    pub(crate) fn has_receiver(&self) -> bool {
        self.any_reservation().is_some()
    }

    /// Number of blocks in the receiver's reservation, those of messages still expected included.
    pub(crate) fn blocks_reserved(&self) -> usize {
        self.any_reservation().map_or(0, |known| known.blocks)
    }

    /// Marks the end of the pushes.
    pub(crate) fn end(&mut self) {
        if self.sending == Sending::Open {
            self.sending = Sending::Ended;
        }
    }

    /// Whether the transfer was stopped before everything was sent.
    pub(crate) fn is_stopped(&self) -> bool {
        matches!(self.sending, Sending::Abandoned | Sending::Finishing { is_whole: false, .. })
    }

    /// Whether `Finished` is the only message left to post.
    fn may_finish(&self) -> bool {
        self.ready.is_empty() && matches!(self.sending, Sending::Ended | Sending::Abandoned)
    }

    /// Adds parts whose sums the processor computes, or, with `is_direct`, parts whose sums
    /// [`Outbound::request_sums`] requests from a device.
    pub(crate) fn push(&mut self, pushed: Pushed, is_direct: bool, now: Instant) {
        let Pushed { mut first_block, slots, layers } = pushed;
        let mut slots = slots.into_iter();
        loop {
            let slots: Vec<SlotRef> = slots.by_ref().take(ANNOUNCED_BLOCKS_MAX).collect();
            let count = slots.len();
            if count == 0 {
                return;
            }
            let sums = if is_direct {
                Sums::Device { values: vec![None; count].into(), missing: count }
            } else {
                Sums::Processor(Vec::with_capacity(count))
            };
            let (part, layers) = (self.next_part, layers.clone());
            let (sequence, written_blocks, writing) = (None, 0, None);
            self.ready.push_back(OutboundPart {
                part,
                first_block,
                slots,
                layers,
                sequence,
                since: now,
                written_blocks,
                writing,
                sums,
            });
            self.next_part += 1;
            first_block += count as u32;
        }
    }

    /// Requests the sums of the next parts, in their order; returns false when `room` is too small for a
    /// part. A layer has `layer_bytes` bytes.
    pub(crate) fn request_sums(
        &mut self,
        transfer: u64,
        layer_bytes: u32,
        mut room: usize,
        mut wanted: impl FnMut(SumRequest),
    ) -> bool {
        let number = self.number.unwrap_or_default();
        let first = self.index_of(self.next_asked).min(self.ready.len());
        for OutboundPart { part, first_block, slots, layers, sums, .. } in self.ready.range(first..) {
            if matches!(sums, Sums::Device { .. }) {
                let Some(left) = room.checked_sub(slots.len()) else { return false };
                room = left;
                let offset = u32::from(layers.start) * layer_bytes;
                let (part, len) = (*part, layers.len() as u32 * layer_bytes);
                for (block, slot) in (*first_block..).zip(slots) {
                    let purpose = Purpose::Announce { transfer, number, part, block };
                    wanted(SumRequest { purpose, slot: slot.clone(), offset, len });
                }
            }
            self.next_asked = part + 1;
        }
        true
    }

    /// Index in `ready` of a part that is not before all ready ones.
    fn index_of(&self, part: u64) -> usize {
        let front = self.ready.front().map_or(self.next_part, |ready| ready.part);
        part.saturating_sub(front) as usize
    }

    /// Stores the device's sum of a block. The sum of a part that was dropped is ignored.
    pub(crate) fn summed(&mut self, part: u64, block: u32, sum: u64) {
        let index = self.index_of(part);
        let Some(ready) = self.ready.get_mut(index).filter(|ready| ready.part == part) else { return };
        let Some(index) = block.checked_sub(ready.first_block) else { return };
        let Sums::Device { values, missing } = &mut ready.sums else { return };
        if let Some(value) = values.get_mut(index as usize) {
            *missing -= usize::from(value.is_none());
            *value = Some(sum);
        }
    }

    /// Whether the sum of this block of a part is still missing, and the part was not dropped.
    pub(crate) fn awaits_sum(&self, part: u64, block: u32) -> bool {
        let ready = self.ready.get(self.index_of(part)).filter(|ready| ready.part == part);
        let is_held = ready.is_some_and(|ready| {
            let index = block.checked_sub(ready.first_block);
            index.is_some_and(|index| (index as usize) < ready.slots.len())
        });
        let is_wanted = |reservation: &Reservation| {
            let index = block.checked_sub(reservation.first_block);
            index.is_some_and(|index| (index as usize) < reservation.slots.len())
        };
        is_held && self.reservation().is_none_or(is_wanted)
    }

    /// Returns the slots of a part whose sums the device computes, if there is one.
    pub(crate) fn direct_slots(&self) -> Option<&[SlotRef]> {
        let direct = self.ready.iter().find(|ready| matches!(ready.sums, Sums::Device { .. }));
        direct.map(|ready| &ready.slots[..])
    }

    /// Takes back all pushed parts, and whether the pushes had ended. No part of them has been written.
    pub(crate) fn take_back(&mut self) -> (Vec<Pushed>, bool) {
        debug_assert!(self.written_parts == 0, "what is given back was written");
        let back = |ready: OutboundPart| {
            let OutboundPart { first_block, slots, layers, .. } = ready;
            Pushed { first_block, slots, layers }
        };
        let is_ended = self.sending == Sending::Ended;
        if is_ended {
            self.sending = Sending::Open;
        }
        (self.ready.drain(..).map(back).collect(), is_ended)
    }

    /// Drops the parts that were not posted, and announces no more.
    pub(crate) fn abandon(&mut self) {
        self.ready.clear();
        (self.written_parts, self.announcement) = (0, None);
        self.running_checksum.reset();
        match &mut self.sending {
            Sending::Finishing { is_whole, .. } => *is_whole = false,
            sending => *sending = Sending::Abandoned,
        }
    }

    /// Writes ready parts until the fabric is full or the budget is spent. A part that the device checksums
    /// is written after its sums are known.
    pub(crate) fn write<F: Fabric>(&mut self, fabric: &mut F, budget: &mut Budget, clock: &StageClock<'_>) {
        if let (Some(known), Some(content)) = (self.reservation(), self.content)
            && known.content != content
        {
            // The content of the two legs differs: they are of different requests, and none of the blocks
            // may be written.
            self.abandon();
        }
        let Receiver::Reserved { reservation, since } = &self.receiver else { return };
        while let Some(ready) =
            self.ready.get_mut(self.written_parts).filter(|_| self.written_parts < UNANNOUNCED_PARTS_MAX)
        {
            ready.skip_unwanted(reservation);
            if ready.awaits_device() {
                return;
            }
            if !ready.slots.is_empty() && ready.sequence.is_none() {
                let (to, slab) = (reservation.peer, ready.slots[0].slab());
                if !fabric.reaches(to, Some(slab), reservation.slab) {
                    let since = *self.out_of_reach_since.get_or_insert(clock.now);
                    if clock.now.saturating_duration_since(since) < REACH_WITHIN {
                        return;
                    }
                    let (from, to_slab) = (slab.kind(), reservation.slab);
                    tracing::warn!(
                        ?to,
                        ?from,
                        ?to_slab,
                        "transfer: no connection leads from these slots to the receiver's"
                    );
                    return self.abandon();
                }
                self.out_of_reach_since = None;
                ready.sequence = Some(self.next_sequence);
                self.next_sequence = self.next_sequence.wrapping_add(1);
            }
            if let Err(Stopped) = ready.write(reservation, fabric, budget, &mut self.bytes_posted) {
                return;
            }
            clock.observe(Stage::Write, ready.since.max(*since));
            ready.since = clock.now;
            self.written_parts += 1;
        }
    }

    /// Checksums written parts until the budget is spent, announces parts that are written and checksummed,
    /// and posts `Finished` after the last. `finish_id` is the completion id of `Finished`.
    pub(crate) fn announce<F: Fabric>(
        &mut self,
        transfer: u64,
        fabric: &mut F,
        finish_id: u64,
        budget: &mut Budget,
        clock: &StageClock<'_>,
    ) {
        let Receiver::Reserved { reservation, .. } = &self.receiver else { return };
        // An earlier transfer may have spent the budget. A transfer that spends the budget itself still
        // announces in this round.
        let (before, may_announce) = (budget.spent(), !budget.is_spent());
        let begun = self.ready.len().min(self.written_parts + 1);
        for ready in self.ready.range_mut(..begun) {
            let is_summed = ready.sum(&reservation.terms, &mut self.running_checksum, budget);
            if !is_summed {
                break;
            }
        }
        self.bytes_summed += (budget.spent() - before) as u64;
        while let Some(ready) = self.ready.front().filter(|_| self.written_parts > 0) {
            if let Some(sequence) = ready.sequence {
                let kept = self.announcement.take();
                let message = kept.or_else(|| {
                    let message =
                        may_announce.then(|| ready.announcement(transfer, sequence)).flatten()?.encode();
                    budget.spend(message.len());
                    Some(message)
                });
                let Some(message) = message else { return };
                if let Err(Full(refused)) = fabric.post(WorkRequest::message(reservation.peer, message)) {
                    if let Operation::Send { message } = refused.operation {
                        self.announcement = Some(message);
                    }
                    return;
                }
                clock.observe(Stage::Sum, ready.since);
                self.is_direct |= matches!(ready.sums, Sums::Device { .. });
            }
            self.ready.pop_front();
            self.written_parts -= 1;
        }
        if self.may_finish() {
            let operation = Operation::Send { message: Message::Finished { transfer }.encode() };
            if fabric.post(urgent(finish_id, reservation.peer, operation)).is_ok() {
                let is_whole = self.sending == Sending::Ended;
                self.sending = Sending::Finishing { since: clock.now, is_whole };
            }
        }
    }

    /// Whether `write` or `announce` can go on without another push, reservation or device sum.
    pub(crate) fn has_work(&self) -> bool {
        let is_writable = self.ready.get(self.written_parts).is_some_and(|ready| !ready.awaits_device());
        self.reservation().is_some() && (self.written_parts > 0 || is_writable || self.may_finish())
    }
}

/// Makes an urgent work request: a decode step waits for every hand-off.
fn urgent(id: u64, peer: PeerId, operation: Operation) -> WorkRequest {
    WorkRequest { id, peer, priority: Priority::Urgent, operation }
}

impl OutboundPart {
    /// Drops blocks outside the reservation: the receiver has them already, or has no slot for them.
    fn skip_unwanted(&mut self, reservation: &Reservation) {
        if self.sequence.is_some() {
            return;
        }
        let before = reservation.first_block.saturating_sub(self.first_block) as usize;
        let before = before.min(self.slots.len());
        self.slots.drain(..before);
        self.first_block += before as u32;
        let wanted_end = reservation.first_block as usize + reservation.slots.len();
        self.slots.truncate(wanted_end.saturating_sub(self.first_block as usize));
        if let Sums::Device { values, missing } = &mut self.sums
            && values.len() != self.slots.len()
        {
            values.drain(..before);
            values.truncate(self.slots.len());
            *missing = values.iter().filter(|value| value.is_none()).count();
        }
    }

    /// Whether the device still has to compute sums of the part.
    fn awaits_device(&self) -> bool {
        matches!(self.sums, Sums::Device { missing, .. } if missing > 0)
    }

    /// Writes the remaining blocks of the part.
    fn write<F: Fabric>(
        &mut self,
        reservation: &Reservation,
        fabric: &mut F,
        budget: &mut Budget,
        bytes_posted: &mut u64,
    ) -> Result<(), Stopped> {
        while self.written_blocks < self.slots.len() {
            if budget.is_spent() {
                return Err(Stopped);
            }
            let mut operation = self.writing.take().unwrap_or_else(|| self.next_write(reservation));
            let front = split_front(&mut operation, WRITE_BYTES_MAX);
            let rest = front.map(|front| std::mem::replace(&mut operation, front));
            let bytes = u64::from(bytes_of(&operation));
            if let Err(Full(refused)) = fabric.post(urgent(0, reservation.peer, operation)) {
                let mut whole = refused.operation;
                rest.iter().for_each(|rest| join_rest(&mut whole, rest));
                self.writing = Some(whole);
                return Err(Stopped);
            }
            budget.spend(POST_COST_BYTES);
            *bytes_posted += bytes;
            self.written_blocks += usize::from(rest.is_none());
            self.writing = rest;
        }
        Ok(())
    }

    /// Checksums written blocks until the budget is spent. Returns true when the processor has none left to
    /// compute.
    fn sum(
        &mut self,
        terms: &NegotiatedParameters,
        running_checksum: &mut RunningChecksum,
        budget: &mut Budget,
    ) -> bool {
        let Sums::Processor(sums) = &mut self.sums else { return true };
        let cut = &terms.cut;
        let (offset, len) = (cut.offset_here(self.layers.start) as usize, cut.len(&self.layers) as usize);
        while let Some(slot) =
            self.slots[..self.written_blocks].get(sums.len()).filter(|_| !budget.is_spent())
        {
            let piece = SlotRows { slab: slot.slab(), slot: slot.slot(), offset, len, row: cut.row_here() };
            let Some(sum) = running_checksum.advance(terms.checksum, &piece, budget) else { return false };
            sums.push(sum);
        }
        sums.len() == self.slots.len()
    }

    /// Returns the announcement; `None` while a sum is missing.
    fn announcement(&self, transfer: u64, sequence: u16) -> Option<Message> {
        let sums: Option<Vec<u64>> = match &self.sums {
            Sums::Processor(sums) => (sums.len() == self.slots.len()).then(|| sums.clone()),
            Sums::Device { values, .. } => values.iter().copied().collect(),
        };
        Some(Message::Announce {
            transfer,
            sequence,
            first_layer: self.layers.start,
            layers: self.layers.len() as u16,
            first_block: self.first_block,
            sums: sums?,
        })
    }

    fn next_write(&self, reservation: &Reservation) -> Operation {
        let cut = &reservation.terms.cut;
        let (offset, len) = (cut.offset_here(self.layers.start), cut.len(&self.layers));
        let there = cut.offset_there(self.layers.start);
        let block = self.first_block as usize + self.written_blocks;
        let name = reservation.slots[block - reservation.first_block as usize];
        let sequence = self.sequence.filter(|_| self.written_blocks + 1 == self.slots.len());
        let (slab, SlotName { slot, generation }) = (reservation.slab, name);
        Operation::Write {
            source: Source::Slot { slot: self.slots[self.written_blocks].clone(), offset, len },
            target: Target { slab, slot, generation, offset: there },
            rows: cut.rows(),
            immediate: sequence.map(|sequence| u32::from(reservation.tag) << 16 | u32::from(sequence)),
        }
    }
}

#[cfg(test)]
mod tests {
    use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};

    use super::*;

    #[test]
    fn sums_are_asked_for_once_in_order_and_as_there_is_room() {
        let layout = SlabLayout { slot_bytes: 64, slot_count: 8 };
        let pool = SlotPool::new(Slab::create("sums", layout, PageSize::Standard).expect("slab").into());
        let mut outbound = Outbound::default();
        for (first_block, is_direct) in [(0, true), (2, false), (4, true), (6, true)] {
            let slots = (0..2).map(|_| pool.acquire().expect("slot")).collect();
            outbound.push(Pushed { first_block, slots, layers: 1..3 }, is_direct, Instant::now());
        }
        let mut asked = Vec::new();
        for (room, is_all, blocks) in
            [(1, false, 0), (3, false, 2), (2, false, 4), (2, true, 6), (9, true, 6)]
        {
            assert_eq!(outbound.request_sums(1, 16, room, |wanted| asked.push(wanted)), is_all);
            assert_eq!(asked.len(), blocks);
        }
        for (wanted, (part, block)) in asked.iter().zip([(0, 0), (0, 1), (2, 4), (2, 5), (3, 6), (3, 7)]) {
            assert_eq!(wanted.purpose, Purpose::Announce { transfer: 1, number: 0, part, block });
            assert_eq!((wanted.offset, wanted.len), (16, 32));
            assert!(outbound.awaits_sum(part, block) && !outbound.awaits_sum(part, block + 2));
            outbound.summed(part, block, 5);
        }
        let missing = |ready: &OutboundPart| match ready.sums {
            Sums::Device { missing, .. } => Some(missing),
            Sums::Processor(_) => None,
        };
        assert_eq!(outbound.ready.iter().map(missing).collect::<Vec<_>>(), [Some(0), None, Some(0), Some(0)]);
    }
}
