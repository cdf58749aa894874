//! The sending side of one transfer: what is ready to go and how far it has been posted.

use std::collections::VecDeque;
use std::ops::Range;

use dataplane_fabric::{Fabric, Operation, PeerId, Priority, Source, Target, WorkRequest};
use dataplane_memory::SlotRef;

use crate::checksum;
use crate::config::ANNOUNCED_BLOCKS_MAX;
use crate::shard::Cut;
use crate::wire::{Message, SlotName};

/// Where the receiver wants the blocks.
#[derive(Debug)]
pub(crate) struct Reservation {
    pub(crate) peer: PeerId,
    pub(crate) tag: u16,
    pub(crate) content: [u8; 16],
    pub(crate) first_block: u32,
    pub(crate) slots: Vec<SlotName>,
    /// What the receiver has in common with us.
    pub(crate) cut: Cut,
}

/// Layers `layers` of blocks `first_block..`, computed and waiting.
#[derive(Debug)]
struct Ready {
    first_block: u32,
    slots: Vec<SlotRef>,
    layers: Range<u16>,
    announced: bool,
    /// Blocks of this part already posted.
    posted: usize,
}

/// One transfer that we send.
#[derive(Debug, Default)]
pub(crate) struct Outbound {
    pub(crate) reservation: Option<Reservation>,
    /// What the blocks are, once the owner has pushed some.
    pub(crate) content: Option<[u8; 16]>,
    ready: VecDeque<Ready>,
    sequence: u16,
    pub(crate) ended: bool,
    /// `Finished` has been posted; its completion ends the transfer.
    pub(crate) finish_posted: bool,
    pub(crate) bytes_posted: u64,
}

/// How far posting came.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Everything that was ready is posted.
    Idle,
    /// The fabric took no more; try again later.
    Full,
}

impl Outbound {
    pub(crate) fn push(&mut self, first_block: u32, slots: Vec<SlotRef>, layers: Range<u16>) {
        let mut slots = slots.into_iter();
        let mut first_block = first_block;
        loop {
            let part: Vec<SlotRef> = slots.by_ref().take(ANNOUNCED_BLOCKS_MAX).collect();
            if part.is_empty() {
                return;
            }
            let next = first_block + part.len() as u32;
            self.ready.push_back(Ready {
                first_block,
                slots: part,
                layers: layers.clone(),
                announced: false,
                posted: 0,
            });
            first_block = next;
        }
    }

    /// Forgets what was not posted.
    pub(crate) fn abandon(&mut self) {
        self.ready.clear();
        self.ended = true;
    }

    /// Posts as much as the fabric takes. `finish_id` is the completion id for `Finished`.
    pub(crate) fn pump<F: Fabric>(&mut self, transfer: u64, fabric: &mut F, finish_id: u64) -> Progress {
        let Some(reservation) = &self.reservation else { return Progress::Idle };
        if self.content.is_some_and(|content| content != reservation.content) {
            // The two legs are of different requests: not one byte may be mistaken for the other's.
            self.ready.clear();
            self.ended = true;
        }
        while let Some(ready) = self.ready.front_mut() {
            ready.skip_unwanted(reservation);
            if ready.posted < ready.slots.len() {
                if !ready.announced {
                    let announce = ready.announcement(transfer, self.sequence, &reservation.cut);
                    if fabric.post(WorkRequest::message(reservation.peer, announce.encode())).is_err() {
                        return Progress::Full;
                    }
                    ready.announced = true;
                }
                while ready.posted < ready.slots.len() {
                    let operation = ready.next_write(reservation, self.sequence);
                    let bytes = u64::from(reservation.cut.len(&ready.layers));
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
    }

    fn announcement(&self, transfer: u64, sequence: u16, cut: &Cut) -> Message {
        let (offset, len) = (cut.offset_here(self.layers.start) as usize, cut.len(&self.layers) as usize);
        let sum = |slot: &SlotRef| checksum::of_rows(slot.slab(), slot.slot(), offset, len, cut.row_here());
        Message::Announce {
            transfer,
            sequence,
            first_layer: self.layers.start,
            layers: self.layers.len() as u16,
            first_block: self.first_block,
            sums: self.slots.iter().map(sum).collect(),
        }
    }

    fn next_write(&self, reservation: &Reservation, sequence: u16) -> Operation {
        let cut = &reservation.cut;
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
