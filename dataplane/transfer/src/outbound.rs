//! The sending side of one transfer: what is ready to go and how far it has been posted.

use std::collections::VecDeque;
use std::ops::Range;

use dataplane_fabric::{Fabric, Operation, PeerId, Priority, Source, Target, WorkRequest};
use dataplane_memory::SlotRef;

use crate::config::ANNOUNCED_BLOCKS_MAX;
use crate::direct::{Purpose, Wanted};
use crate::terms::Terms;
use crate::wire::{Message, SlotName};

/// Where the receiver wants the blocks: the whole of it, or what one message brings.
#[derive(Debug)]
pub(crate) struct Reservation {
    pub(crate) peer: PeerId,
    pub(crate) tag: u16,
    pub(crate) content: [u8; 16],
    pub(crate) first_block: u32,
    /// Blocks of the whole reservation, at most [`crate::config::BLOCKS_MAX`].
    pub(crate) blocks: usize,
    pub(crate) slots: Vec<SlotName>,
    /// What was agreed with the receiver.
    pub(crate) terms: Terms,
}

impl Reservation {
    /// Whether `part`, which begins at block `offset` of its reservation, is the next message of this one.
    fn is_continued_by(&self, offset: usize, part: &Self) -> bool {
        offset == self.slots.len()
            && (part.peer, part.tag, part.content) == (self.peer, self.tag, self.content)
            && (part.first_block, part.blocks) == (self.first_block, self.blocks)
    }
}

/// What a message of a reservation comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reserved {
    /// More messages of the same reservation have to come.
    InPart,
    /// The reservation is whole: its blocks can be written.
    Whole,
    /// Its peer has reserved this transfer already. The end of that one is still to be told, and answers both.
    Repeated,
    /// Nothing of this transfer is written for this message, which has to be said.
    Refused,
}

/// Layers `layers` of blocks `first_block..`, computed and waiting.
#[derive(Debug)]
struct Ready {
    /// Number of the part within its transfer: one more than that of the part before.
    part: u64,
    first_block: u32,
    slots: Vec<SlotRef>,
    layers: Range<u16>,
    announced: bool,
    /// Blocks of this part already posted.
    posted: usize,
    /// The device's sums; `None`: the processor takes them when the part is announced.
    sums: Option<DeviceSums>,
}

/// The sums of one part, as they come.
#[derive(Debug)]
struct DeviceSums {
    /// For each block.
    values: VecDeque<Option<u64>>,
    /// Blocks without one.
    missing: usize,
}

/// Layers of blocks that were pushed, given back.
#[derive(Debug)]
pub(crate) struct Pushed {
    pub(crate) first_block: u32,
    pub(crate) slots: Vec<SlotRef>,
    pub(crate) layers: Range<u16>,
}

/// One transfer that we send.
#[derive(Debug, Default)]
pub(crate) struct Outbound {
    /// Whole, and from then on as it is: its slots are written to.
    pub(crate) reservation: Option<Reservation>,
    /// A reservation of which messages are still to come.
    reserving: Option<Reservation>,
    /// What the blocks are, once the owner has pushed some.
    pub(crate) content: Option<[u8; 16]>,
    ready: VecDeque<Ready>,
    sequence: u16,
    pub(crate) ended: bool,
    /// `Finished` has been posted; its completion ends the transfer.
    pub(crate) finish_posted: bool,
    pub(crate) bytes_posted: u64,
    /// Tells the device's sums of its slots from others, once there are any.
    pub(crate) number: Option<u64>,
    next_part: u64,
    /// The sums of parts before this one are asked for.
    next_asked: u64,
    /// Whether a part was announced with the device's sums.
    pub(crate) is_direct: bool,
    /// It was stopped: what was to be sent is not.
    pub(crate) is_abandoned: bool,
}

/// How far posting came.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Everything that was ready is posted. What waits for its sums is tried again when one comes.
    Idle,
    /// The fabric took no more; try again later.
    Full,
}

impl Outbound {
    /// Takes one message of a reservation, with the slots from block `offset` of the reservation on. A second reservation
    /// changes nothing.
    pub(crate) fn reserve(&mut self, offset: usize, part: Reservation) -> Reserved {
        let reservation = match self.reserving.take() {
            Some(mut known) if known.is_continued_by(offset, &part) => {
                known.slots.extend(part.slots);
                known
            }
            Some(known) => {
                let answer = self.repeated(&known, &part);
                self.reserving = Some(known);
                return answer;
            }
            None => match &self.reservation {
                Some(known) => return self.repeated(known, &part),
                None if offset > 0 => return Reserved::Refused,
                None => part,
            },
        };
        if reservation.slots.len() < reservation.blocks {
            self.reserving = Some(reservation);
            return Reserved::InPart;
        }
        self.reservation = Some(reservation);
        Reserved::Whole
    }

    /// The answer to a reservation beside the one that is `known`. After `Finished` was posted, a peer that has begun the
    /// transfer anew hears nothing more, unless it is told.
    fn repeated(&self, known: &Reservation, part: &Reservation) -> Reserved {
        let is_answered = known.peer == part.peer && (known.tag == part.tag || !self.finish_posted);
        if is_answered { Reserved::Repeated } else { Reserved::Refused }
    }

    /// Whether a peer has reserved it, or is about to.
    pub(crate) fn has_receiver(&self) -> bool {
        self.reservation.is_some() || self.reserving.is_some()
    }

    /// Blocks that its receiver has reserved, or has said that it will.
    pub(crate) fn blocks_reserved(&self) -> usize {
        self.reservation.iter().chain(&self.reserving).map(|known| known.blocks).sum()
    }

    /// Parts whose sums the processor takes, or those that [`Outbound::ask_sums`] asks a device for.
    pub(crate) fn push(&mut self, pushed: Pushed, is_direct: bool) {
        let Pushed { mut first_block, slots, layers } = pushed;
        let mut slots = slots.into_iter();
        loop {
            let slots: Vec<SlotRef> = slots.by_ref().take(ANNOUNCED_BLOCKS_MAX).collect();
            let count = slots.len();
            if count == 0 {
                return;
            }
            let sums = is_direct.then(|| DeviceSums { values: vec![None; count].into(), missing: count });
            let (part, layers) = (self.next_part, layers.clone());
            self.ready.push_back(Ready {
                part,
                first_block,
                slots,
                layers,
                announced: false,
                posted: 0,
                sums,
            });
            self.next_part += 1;
            first_block += count as u32;
        }
    }

    /// Asks for the sums of parts that were not asked for, in their order; false when there is no `room` for a part. A
    /// layer has so many bytes.
    pub(crate) fn ask_sums(
        &mut self,
        transfer: u64,
        layer_bytes: u32,
        mut room: usize,
        mut wanted: impl FnMut(Wanted),
    ) -> bool {
        let number = self.number.unwrap_or_default();
        let first = self.index_of(self.next_asked).min(self.ready.len());
        for Ready { part, first_block, slots, layers, sums, .. } in self.ready.range(first..) {
            if sums.is_some() {
                let Some(left) = room.checked_sub(slots.len()) else { return false };
                room = left;
                let offset = u32::from(layers.start) * layer_bytes;
                let (part, len) = (*part, layers.len() as u32 * layer_bytes);
                for (block, slot) in (*first_block..).zip(slots) {
                    let purpose = Purpose::Announce { transfer, number, part, block };
                    wanted(Wanted { purpose, slot: slot.clone(), offset, len });
                }
            }
            self.next_asked = part + 1;
        }
        true
    }

    /// Where a part is among those that are ready, when it is not before all of them.
    fn index_of(&self, part: u64) -> usize {
        let front = self.ready.front().map_or(self.next_part, |ready| ready.part);
        part.saturating_sub(front) as usize
    }

    /// The device has summed a block. What nobody waits for any more is dropped.
    pub(crate) fn summed(&mut self, part: u64, block: u32, sum: u64) {
        let index = self.index_of(part);
        let Some(ready) = self.ready.get_mut(index).filter(|ready| ready.part == part) else { return };
        let index = block.checked_sub(ready.first_block);
        let Some((sums, index)) = ready.sums.as_mut().zip(index) else { return };
        if let Some(value) = sums.values.get_mut(index as usize) {
            sums.missing -= usize::from(value.is_none());
            *value = Some(sum);
        }
    }

    /// Whether a sum of this block of a part is needed: neither it nor the part was dropped.
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
        is_held && self.reservation.as_ref().is_none_or(is_wanted)
    }

    /// Whether there are parts whose sums the device takes.
    pub(crate) fn has_direct(&self) -> bool {
        self.ready.iter().any(|ready| ready.sums.is_some())
    }

    /// Takes back what was pushed, and whether that was all; nothing of it was announced.
    pub(crate) fn take_back(&mut self) -> (Vec<Pushed>, bool) {
        let back = |ready: Ready| {
            let Ready { first_block, slots, layers, .. } = ready;
            Pushed { first_block, slots, layers }
        };
        (self.ready.drain(..).map(back).collect(), std::mem::take(&mut self.ended))
    }

    /// Forgets what was not posted.
    pub(crate) fn abandon(&mut self) {
        self.ready.clear();
        (self.ended, self.is_abandoned) = (true, true);
    }

    /// Posts as much as the fabric takes of what has its sums. `finish_id` is the completion id for `Finished`.
    pub(crate) fn pump<F: Fabric>(&mut self, transfer: u64, fabric: &mut F, finish_id: u64) -> Progress {
        let Some(reservation) = &self.reservation else { return Progress::Idle };
        if self.content.is_some_and(|content| content != reservation.content) {
            // The two legs are of different requests: not one byte may be mistaken for the other's.
            self.ready.clear();
            (self.ended, self.is_abandoned) = (true, true);
        }
        while let Some(ready) = self.ready.front_mut() {
            ready.skip_unwanted(reservation);
            if ready.posted < ready.slots.len() {
                if !ready.announced {
                    let Some(announce) = ready.announcement(transfer, self.sequence, &reservation.terms)
                    else {
                        return Progress::Idle;
                    };
                    if fabric.post(WorkRequest::message(reservation.peer, announce.encode())).is_err() {
                        return Progress::Full;
                    }
                    ready.announced = true;
                    self.is_direct |= ready.sums.is_some();
                }
                while ready.posted < ready.slots.len() {
                    let operation = ready.next_write(reservation, self.sequence);
                    let bytes = u64::from(reservation.terms.cut.len(&ready.layers));
                    if fabric.post(urgent(0, reservation.peer, operation)).is_err() {
                        return Progress::Full;
                    }
                    ready.posted += 1;
                    self.bytes_posted += bytes;
                }
                self.sequence = self.sequence.wrapping_add(1);
            }
            self.ready.pop_front();
        }
        if self.ended && !self.finish_posted {
            let operation = Operation::Send { message: Message::Finished { transfer }.encode() };
            if fabric.post(urgent(finish_id, reservation.peer, operation)).is_err() {
                return Progress::Full;
            }
            self.finish_posted = true;
        }
        Progress::Idle
    }
}

/// A decode step waits for whatever a hand-off brings.
fn urgent(id: u64, peer: PeerId, operation: Operation) -> WorkRequest {
    WorkRequest { id, peer, priority: Priority::Urgent, operation }
}

impl Ready {
    /// Drops blocks that the receiver has already, or has no slot for.
    fn skip_unwanted(&mut self, reservation: &Reservation) {
        if self.announced {
            return;
        }
        let before = reservation.first_block.saturating_sub(self.first_block) as usize;
        let before = before.min(self.slots.len());
        self.slots.drain(..before);
        self.first_block += before as u32;
        let wanted_end = reservation.first_block as usize + reservation.slots.len();
        self.slots.truncate(wanted_end.saturating_sub(self.first_block as usize));
        if let Some(sums) = self.sums.as_mut().filter(|sums| sums.values.len() != self.slots.len()) {
            sums.values.drain(..before);
            sums.values.truncate(self.slots.len());
            sums.missing = sums.values.iter().filter(|value| value.is_none()).count();
        }
    }

    /// `None` while sums are missing.
    fn announcement(&self, transfer: u64, sequence: u16, terms: &Terms) -> Option<Message> {
        if self.sums.as_ref().is_some_and(|sums| sums.missing > 0) {
            return None;
        }
        let cut = &terms.cut;
        let (offset, len) = (cut.offset_here(self.layers.start) as usize, cut.len(&self.layers) as usize);
        let sum =
            |slot: &SlotRef| terms.checksum.of_rows(slot.slab(), slot.slot(), offset, len, cut.row_here());
        let sums: Option<Vec<u64>> = match &self.sums {
            Some(sums) => sums.values.iter().copied().collect(),
            None => Some(self.slots.iter().map(sum).collect()),
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

    fn next_write(&self, reservation: &Reservation, sequence: u16) -> Operation {
        let cut = &reservation.terms.cut;
        let (offset, len) = (cut.offset_here(self.layers.start), cut.len(&self.layers));
        let there = cut.offset_there(self.layers.start);
        let block = self.first_block as usize + self.posted;
        let name = reservation.slots[block - reservation.first_block as usize];
        let last = self.posted + 1 == self.slots.len();
        Operation::Write {
            source: Source::Slot { slot: self.slots[self.posted].clone(), offset, len },
            target: Target { slot: name.slot, generation: name.generation, offset: there },
            rows: cut.rows(),
            immediate: last.then_some(u32::from(reservation.tag) << 16 | u32::from(sequence)),
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
            outbound.push(Pushed { first_block, slots, layers: 1..3 }, is_direct);
        }
        let mut asked = Vec::new();
        for (room, is_all, blocks) in
            [(1, false, 0), (3, false, 2), (2, false, 4), (2, true, 6), (9, true, 6)]
        {
            assert_eq!(outbound.ask_sums(1, 16, room, |wanted| asked.push(wanted)), is_all);
            assert_eq!(asked.len(), blocks);
        }
        for (wanted, (part, block)) in asked.iter().zip([(0, 0), (0, 1), (2, 4), (2, 5), (3, 6), (3, 7)]) {
            assert_eq!(wanted.purpose, Purpose::Announce { transfer: 1, number: 0, part, block });
            assert_eq!((wanted.offset, wanted.len), (16, 32));
            assert!(outbound.awaits_sum(part, block) && !outbound.awaits_sum(part, block + 2));
            outbound.summed(part, block, 5);
        }
        let missing = |ready: &Ready| ready.sums.as_ref().map(|sums| sums.missing);
        assert_eq!(outbound.ready.iter().map(missing).collect::<Vec<_>>(), [Some(0), None, Some(0), Some(0)]);
    }
}
