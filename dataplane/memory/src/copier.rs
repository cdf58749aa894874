//! Interface for asynchronous copies between slots of any two slabs, host or device.
//!
//! Used as submit → flush → poll, so that one doorbell starts a whole batch. Contract of every [`Copier`]:
//! 1. Each accepted copy ends exactly once, as one [`CopyDone`] with its token: when the device is lost, everything in
//!    flight and everything submitted later ends with an error.
//! 2. Until then the copier holds both slot references, so neither slot can be reused under the copy, even when its
//!    owner has dropped it. An accepted copy cannot be taken back.
//! 3. Copies are not ordered. A copy may begin when it is submitted, and has begun after the next `flush`.
//! 4. No call blocks, and none allocates once `poll`'s vector has its capacity.
//! 5. Dropping a copier waits for the device's remaining work, or leaks the slots.
//! 6. A copier does not wait for other work. Work that wrote the source's bytes, and work that reads or writes the
//!    target's, must be over when the copy is submitted (a kernel: its event has passed, its stream was waited for),
//!    or be ordered before the copy by the owner of the device's stream. Otherwise the copy races with it.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::{DeviceError, SlotRef};

/// Bytes of one slot to copy to another. The references keep both slots in use.
#[derive(Debug, Clone)]
pub struct SlotCopy {
    /// Token that the copy's [`CopyDone`] returns.
    pub token: u64,
    /// Source slot.
    pub from: SlotRef,
    /// Offset of the first byte in the source slot.
    pub from_offset: u32,
    /// Target slot.
    pub to: SlotRef,
    /// Offset of the first byte in the target slot.
    pub to_offset: u32,
    /// Number of bytes.
    pub len: u32,
}

impl SlotCopy {
    /// Whether both ranges lie inside their slots.
    #[must_use]
    pub fn is_inside(&self) -> bool {
        let is_in = |slot: &SlotRef, offset: u32| {
            slot.slab().contains(slot.slot(), offset as usize, self.len as usize)
        };
        is_in(&self.from, self.from_offset) && is_in(&self.to, self.to_offset)
    }

    /// Whether both ranges lie in one slot and overlap: the result of such a copy is undefined.
    #[must_use]
    pub fn overlaps(&self) -> bool {
        Arc::ptr_eq(self.from.slab(), self.to.slab())
            && self.from.slot() == self.to.slot()
            && self.from_offset.abs_diff(self.to_offset) < self.len
    }
}

/// Reason that a copy was not accepted; returns the copy.
#[derive(Debug)]
pub enum CopyRefused {
    /// The copier is full. Poll, then try again.
    Full(SlotCopy),
    /// A range lies outside its slot, or the two overlap.
    Outside(SlotCopy),
    /// The copier cannot reach one of the two memories.
    Unreachable(SlotCopy),
}

/// The end of one copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyDone {
    /// Token of the copy.
    pub token: u64,
    /// `Ok`: every byte has arrived, for the CPU and for every device. An error: any of them may have.
    pub result: Result<(), DeviceError>,
}

/// Copies between slots, driven by one thread. See the module for the contract.
pub trait Copier: Send {
    /// Takes one copy, or returns it. Ranges are checked here; the caller guarantees that earlier work on
    /// the bytes is over (6 of the contract).
    fn submit(&mut self, copy: SlotCopy) -> Result<(), CopyRefused>;

    /// Rings one doorbell for all copies submitted since the last call.
    fn flush(&mut self);

    /// Moves completed copies into `done`, each token once; returns their number.
    fn poll(&mut self, done: &mut Vec<CopyDone>) -> usize;

    /// Returns the number of copies accepted and not yet reported as done.
    fn in_flight(&self) -> usize;

    /// Whether the device is lost: copies were reported as failed although they may still be running.
    fn is_lost(&self) -> bool {
        false
    }
}

/// Copies between slots of host slabs, synchronously on the CPU.
#[derive(Debug)]
pub struct HostCopier {
    ended: VecDeque<u64>,
    capacity: usize,
}

impl HostCopier {
    /// Makes a copier that takes `capacity` copies between two polls.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { ended: VecDeque::with_capacity(capacity), capacity }
    }
}

impl Copier for HostCopier {
    fn submit(&mut self, copy: SlotCopy) -> Result<(), CopyRefused> {
        if self.ended.len() >= self.capacity {
            return Err(CopyRefused::Full(copy));
        }
        let (source, target) = (copy.from.slab(), copy.to.slab());
        if source.device().is_some() || target.device().is_some() {
            return Err(CopyRefused::Unreachable(copy));
        }
        let from = (copy.from.slot(), copy.from_offset as usize);
        let to = (copy.to.slot(), copy.to_offset as usize);
        if copy.overlaps() || !target.try_copy_from(source, from, to, copy.len as usize) {
            return Err(CopyRefused::Outside(copy));
        }
        self.ended.push_back(copy.token);
        Ok(())
    }

    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut Vec<CopyDone>) -> usize {
        let count = self.ended.len();
        done.extend(self.ended.drain(..).map(|token| CopyDone { token, result: Ok(()) }));
        count
    }

    fn in_flight(&self) -> usize {
        self.ended.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Abilities, DeviceDouble};
    use crate::{PageSize, Slab, SlabLayout, SlotPool};

    const LAYOUT: SlabLayout = SlabLayout { slot_bytes: 100, slot_count: 4 };

    fn copy(token: u64, from: &SlotRef, to: &SlotRef, len: u32) -> SlotCopy {
        SlotCopy { token, from: from.clone(), from_offset: 10, to: to.clone(), to_offset: 20, len }
    }

    #[test]
    fn host_slots_are_copied_once_and_refusals_hand_back() {
        let pool = SlotPool::new(Arc::new(Slab::create("host", LAYOUT, PageSize::Standard).expect("slab")));
        let memory = DeviceDouble::new(4096, Abilities::default());
        let device = SlotPool::new(Arc::new(Slab::on_device("device", LAYOUT, memory).expect("slab")));
        let (from, to) = (pool.acquire().expect("slot"), pool.acquire().expect("slot"));
        let away = device.acquire().expect("slot");
        from.slab().write(from.slot(), 10, b"bytes");
        let mut copier = HostCopier::new(2);
        let mut done = Vec::new();
        copier.submit(copy(7, &from, &to, 5)).expect("room");
        assert!(
            matches!(copier.submit(copy(8, &from, &to, 81)), Err(CopyRefused::Outside(back)) if back.token == 8)
        );
        assert!(matches!(copier.submit(copy(8, &from, &from, 11)), Err(CopyRefused::Outside(_))), "overlap");
        assert!(matches!(copier.submit(copy(9, &from, &away, 5)), Err(CopyRefused::Unreachable(_))));
        assert!(matches!(copier.submit(copy(9, &away, &to, 5)), Err(CopyRefused::Unreachable(_))));
        copier.submit(copy(10, &from, &from, 10)).expect("apart within one slot");
        assert!(
            matches!(copier.submit(copy(11, &from, &to, 5)), Err(CopyRefused::Full(back)) if back.token == 11)
        );
        assert_eq!((copier.in_flight(), copier.poll(&mut done), copier.in_flight()), (2, 2, 0));
        assert_eq!(
            done.iter().map(|done| (done.token, done.result.is_ok())).collect::<Vec<_>>(),
            [(7, true), (10, true)]
        );
        let mut bytes = [0; 5];
        to.slab().read(to.slot(), 20, &mut bytes);
        assert_eq!(&bytes, b"bytes");
        drop((from, to, away));
        assert_eq!((pool.used_count(), device.used_count()), (0, 0), "ended copies hold nothing");
    }
}
