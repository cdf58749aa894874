//! The sending side of one transfer: what is ready to go and how far it has been posted.

use std::collections::VecDeque;
use std::ops::Range;

use dataplane_fabric::{Fabric, Operation, PeerId, Priority, Source, Target, WorkRequest};
use dataplane_memory::SlotRef;

use crate::config::ANNOUNCED_BLOCKS_MAX;
use crate::direct::{Purpose, Wanted};
use crate::terms::Terms;
use crate::wire::{Message, SlotName};

/// Where the receiver wants the blocks.
#[derive(Debug)]
pub(crate) struct Reservation {
    pub(crate) peer: PeerId,
    pub(crate) tag: u16,
    pub(crate) content: [u8; 16],
    pub(crate) first_block: u32,
    pub(crate) slots: Vec<SlotName>,
    /// What was agreed with the receiver.
    pub(crate) terms: Terms,
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
    /// The device's sums; `None`: the processor takes them when the part is announced.
    sums: Option<DeviceSums>,
}

/// The sums of one part, as they come.
#[derive(Debug)]
struct DeviceSums {
    /// Number of the part within its transfer.
    part: u64,
    /// For each block.
    values: VecDeque<Option<u64>>,
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
    pub(crate) reservation: Option<Reservation>,
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
    /// Parts whose sums the processor takes.
    pub(crate) fn push(&mut self, first_block: u32, slots: Vec<SlotRef>, layers: Range<u16>) {
        self.push_parts(first_block, slots, layers, |_, _| None);
    }

    /// Parts whose sums the device takes: those that are `wanted`. A layer has so many bytes.
    pub(crate) fn push_direct(
        &mut self,
        transfer: u64,
        pushed: Pushed,
        layer_bytes: u32,
        mut wanted: impl FnMut(Wanted),
    ) {
        let Pushed { first_block, slots, layers } = pushed;
        let (offset, len) = (u32::from(layers.start) * layer_bytes, layers.len() as u32 * layer_bytes);
        let (number, mut part) = (self.number.unwrap_or_default(), self.next_part);
        self.push_parts(first_block, slots, layers, |first_block, slots| {
            for (block, slot) in (first_block..).zip(slots) {
                let purpose = Purpose::Announce { transfer, number, part, block };
                wanted(Wanted { purpose, slot: slot.clone(), offset, len });
            }
            part += 1;
            Some(DeviceSums { part: part - 1, values: slots.iter().map(|_| None).collect() })
        });
        self.next_part = part;
    }

    /// The device has summed a block. What nobody waits for any more is dropped.
    pub(crate) fn summed(&mut self, part: u64, block: u32, sum: u64) {
        for ready in &mut self.ready {
            let Some(sums) = ready.sums.as_mut().filter(|sums| sums.part == part) else { continue };
            let index = block.checked_sub(ready.first_block);
            if let Some(value) = index.and_then(|index| sums.values.get_mut(index as usize)) {
                *value = Some(sum);
            }
        }
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

    fn push_parts(
        &mut self,
        first_block: u32,
        slots: Vec<SlotRef>,
        layers: Range<u16>,
        mut sums: impl FnMut(u32, &[SlotRef]) -> Option<DeviceSums>,
    ) {
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
                sums: sums(first_block, &part),
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
        if let Some(sums) = &mut self.sums {
            sums.values.drain(..before);
            sums.values.truncate(self.slots.len());
        }
    }

    /// `None` while sums are missing.
    fn announcement(&self, transfer: u64, sequence: u16, terms: &Terms) -> Option<Message> {
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
