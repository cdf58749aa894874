//! Hand-offs directly between devices' memory: the fabric writes from and to device slots, and the devices themselves
//! sum what they send and verify what has come.
//!
//! ```text
//! sender                                      receiver
//! Push(device slots) ─▶ sums, by the device   Expect(device slots) ─▶ Reserve(their names)
//!   one-sided writes from device slots ══════▶ imm
//!   Announce(sums) ──────────────────────────▶ with imm: flush, sums by the device, compared ─▶ Arrived
//! ```
//!
//! The sums of a push begin at once, before the receiver is known, so they add to the latency of a hand-off
//! only when the receiver is there first. A part is written when the device has all of its sums, and
//! announced after its writes; parts keep their order.
//!
//! A hand-off is direct at one of its sides when connections to the peer reach the slots there
//! ([`Fabric::reaches`](dataplane_fabric::Fabric::reaches),
//! [`Fabric::shows`](dataplane_fabric::Fabric::shows)), the [`Checksummer`] does, and the terms of the
//! connection allow it: equal heads, since the device checksums contiguous bytes. Each side decides for
//! itself, transfer by transfer, when the peer is known. A hand-off that cannot be direct is staged where
//! there is a [`crate::Staging`], and refused otherwise.
//!
//! Invariants: a sum holds its slot until the device is done with it ([`Checksummer`]), also when its
//! transfer has ended; the result of such a sum is dropped, by a number that no two transfers share. Bytes
//! are checksummed only after [`flush_nic_writes`](dataplane_memory::DeviceMemory::flush_nic_writes). A failed sum ends its
//! transfer.
//!
//! Direct hand-offs are part of the node, unlike staging, which wraps it: verification lies between the
//! immediate and the notice, and the sums of an announcement between the push and the message. A wrapper
//! would have to reach into the node at both places. Only the part that both directions share is separate:
//! this queue of sums.
//!
//! Hot path, driven by the node's thread: per block and piece one sum and a few table steps, one doorbell a
//! poll. While sums are in flight the node must be polled: their completion is not signalled on a
//! descriptor.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use dataplane_memory::{Checksummer, DeviceError, Slab, SlotRef, SlotSum, SumDone, SumRefused};

use crate::config::ANNOUNCED_BLOCKS_MAX;
use crate::node::TransferId;

/// Most sums for announcements that wait for the device: one part is checksummed while the next one waits.
/// Further parts wait in their transfers.
pub(crate) const ANNOUNCING_MAX: usize = 2 * ANNOUNCED_BLOCKS_MAX;

/// Use of a sum. `number` is that of the transfer's [`Inbound`](crate::inbound::Inbound) or
/// [`Outbound`](crate::outbound::Outbound), because ids of transfers are reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The sum is announced with this block of a part.
    Announce { transfer: TransferId, number: u64, part: u64, block: u32 },
    /// The sum is compared with the announced one of `layers` layers of a block.
    Verify { transfer: TransferId, number: u64, block: u32, layers: u16, expected: u64 },
}

impl Purpose {
    pub(crate) fn transfer(&self) -> TransferId {
        match *self {
            Self::Announce { transfer, .. } | Self::Verify { transfer, .. } => transfer,
        }
    }

    pub(crate) fn number(&self) -> u64 {
        match *self {
            Self::Announce { number, .. } | Self::Verify { number, .. } => number,
        }
    }
}

/// A sum to be computed.
#[derive(Debug)]
pub(crate) struct SumRequest {
    pub(crate) purpose: Purpose,
    pub(crate) slot: SlotRef,
    pub(crate) offset: u32,
    pub(crate) len: u32,
}

/// The sums of a node: the ones that wait, and the ones that its device computes.
pub(crate) struct SumQueue {
    checksummer: Box<dyn Checksummer>,
    /// Sums for verification, then sums for announcements: a receiver waits for the former. There are at
    /// most as many of the former as layers of blocks are expected, since each is verified once; of the
    /// latter [`ANNOUNCING_MAX`].
    waiting: [VecDeque<SumRequest>; 2],
    under_way: HashMap<u64, Purpose>,
    next_token: u64,
    next_number: u64,
    done: Vec<SumDone>,
}

impl SumQueue {
    pub(crate) fn new(checksummer: Box<dyn Checksummer>) -> Self {
        Self {
            checksummer,
            waiting: Default::default(),
            under_way: HashMap::new(),
            next_token: 0,
            next_number: 0,
            done: Vec::new(),
        }
    }

    pub(crate) fn reaches(&self, slab: &Arc<Slab>) -> bool {
        self.checksummer.reaches(slab)
    }

    /// Returns a number that is unique to one transfer.
    pub(crate) fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.under_way.is_empty() && !self.has_waiting()
    }

    /// Whether sums wait for the device.
    pub(crate) fn has_waiting(&self) -> bool {
        self.waiting.iter().any(|queue| !queue.is_empty())
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.under_way.len()
    }

    /// Returns the number of sums for announcements that can still be queued.
    pub(crate) fn room(&self) -> usize {
        ANNOUNCING_MAX.saturating_sub(self.waiting[1].len())
    }

    pub(crate) fn want(&mut self, wanted: SumRequest) {
        let queue = usize::from(matches!(wanted.purpose, Purpose::Announce { .. }));
        self.waiting[queue].push_back(wanted);
    }

    /// Drops the waiting sums of a transfer that has ended.
    pub(crate) fn forget(&mut self, number: u64) {
        self.waiting.iter_mut().for_each(|queue| queue.retain(|wanted| wanted.purpose.number() != number));
    }

    /// Starts as many sums as the device accepts. Returns the purpose of a sum that the device can never
    /// compute, else `None`.
    pub(crate) fn start(&mut self) -> Option<Purpose> {
        for queue in &mut self.waiting {
            while let Some(SumRequest { purpose, slot, offset, len }) = queue.pop_front() {
                let token = self.next_token;
                match self.checksummer.submit(SlotSum { token, slot, offset, len }) {
                    Ok(()) => {
                        self.next_token += 1;
                        self.under_way.insert(token, purpose);
                    }
                    Err(SumRefused::Full(SlotSum { slot, .. })) => {
                        queue.push_front(SumRequest { purpose, slot, offset, len });
                        self.checksummer.flush();
                        return None;
                    }
                    Err(SumRefused::Outside(_) | SumRefused::Unreachable(_)) => return Some(purpose),
                }
            }
        }
        self.checksummer.flush();
        None
    }

    /// Takes the sums that have completed.
    pub(crate) fn reap(&mut self, ended: &mut Vec<(Purpose, Result<u64, DeviceError>)>) {
        self.checksummer.poll(&mut self.done);
        for SumDone { token, result } in self.done.drain(..) {
            let purpose = self.under_way.remove(&token);
            assert!(purpose.is_some(), "sum {token} ended twice, or was never submitted");
            ended.extend(purpose.map(|purpose| (purpose, result)));
        }
    }
}
