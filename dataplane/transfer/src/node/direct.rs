//! Hand-offs whose blocks stay in a device's memory: their selection, and the handling of the device's
//! sums. See [`crate::direct`].

use std::sync::Arc;

use dataplane_fabric::Fabric;
use dataplane_memory::{Checksummer, DeviceError, Slab, SlabKind, SlotPool, SlotRef};

use super::{Notice, Outcome, TransferId, TransferNode};
use crate::checksum::Checksum;
use crate::direct::{Purpose, SumQueue};
use crate::negotiation::Greeting;
use crate::outbound::{Pushed, Reservation};

/// A pushed transfer that cannot be sent directly: its receiver has other heads, or no connection reaches
/// from these slots to the receiver's.
#[derive(Debug)]
pub(crate) struct ReturnedPush {
    pub(crate) transfer: TransferId,
    pub(crate) content: [u8; 16],
    pub(crate) pushed: Vec<Pushed>,
    /// Whether the pushes have ended.
    pub(crate) is_ended: bool,
}

/// A transfer expected into a device's slots that cannot be received there. [`TransferNode::receive_into`]
/// or [`TransferNode::refuse_expectation`] must follow.
#[derive(Debug)]
#[must_use]
pub(crate) struct ReturnedExpectation {
    pub(crate) transfer: TransferId,
    pub(crate) slots: Vec<SlotRef>,
}

pub(super) fn is_on_device(slot: &SlotRef) -> bool {
    slot.slab().device().is_some()
}

impl<F: Fabric> TransferNode<F> {
    /// Lets a device compute checksums in its memory: hand-offs whose slots the fabric reaches there are
    /// then direct, and peers are asked for the checksum that a device can compute. While
    /// [`TransferNode::sums_in_flight`] is not zero, the node must be polled.
    #[must_use]
    pub fn with_checksummer(mut self, checksummer: impl Checksummer + 'static) -> Self {
        self.summing = Some(SumQueue::new(Box::new(checksummer)));
        self
    }

    /// Returns the number of sums in flight at the device; their completion is not signalled.
    #[must_use]
    pub fn sums_in_flight(&self) -> usize {
        self.summing.as_ref().map_or(0, SumQueue::in_flight)
    }

    /// Returns the greeting that this node sends to a peer.
    pub(super) fn greeting(&self) -> Greeting {
        Greeting::new(self.layout, if self.summing.is_some() { Checksum::Lanes } else { Checksum::Xxh3 })
    }

    /// Whether a push of these slots needs no staging, as far as its receiver is known.
    pub(crate) fn sends_directly(&self, transfer: TransferId, slots: &[SlotRef]) -> bool {
        let reservation = self.outbound.get(transfer).and_then(|lease| lease.held.reservation());
        self.device_sums_all(slots, |slab| match reservation {
            None => self.fabric.carries(slab),
            Some(reservation) => self.can_write_directly(slab, reservation),
        })
    }

    /// Whether this slab, in a device's memory, can be written directly to the slots of a reservation.
    fn can_write_directly(&self, slab: &Arc<Slab>, to: &Reservation) -> bool {
        to.terms.allow_direct() && self.fabric.reaches(to.peer, Some(slab), to.slab)
    }

    /// Whether peers can write to these slots and a device can verify them.
    pub(crate) fn receives_directly(&self, slots: &[SlotRef]) -> bool {
        self.device_sums_all(slots, |slab| self.fabric.shows_slab(slab))
    }

    /// Returns a test of whether a slot lies in a slab that peers write to. A slot number of another slab
    /// would be taken for a slot of that one.
    pub(crate) fn shown_to_peers(&self) -> impl Fn(&SlotRef) -> bool + use<F> {
        let shown = SlabKind::ALL.map(|kind| self.fabric.shown_slab(kind));
        move |slot| {
            let shown = shown[slot.slab().kind().index()].as_ref();
            shown.is_some_and(|shown| Arc::ptr_eq(shown, slot.slab()))
        }
    }

    /// Whether peers write to the slots of this pool.
    pub(crate) fn shows_pool(&self, pool: &SlotPool) -> bool {
        self.fabric.shows_slab(pool.slab())
    }

    /// Whether the device can checksum each of these slots, and their slabs satisfy `is_wanted`.
    fn device_sums_all(&self, slots: &[SlotRef], is_wanted: impl Fn(&Arc<Slab>) -> bool) -> bool {
        let Some(summing) = &self.summing else { return false };
        // Slots of one transfer lie in one slab, as a rule: its check is done once.
        let mut known: Option<&Arc<Slab>> = None;
        slots.iter().all(|slot| {
            let slab = slot.slab();
            let is_known = known.replace(slab).is_some_and(|known| Arc::ptr_eq(known, slab));
            is_known || (is_on_device(slot) && summing.reaches(slab) && is_wanted(slab))
        })
    }

    /// Returns a number for the sums of a transfer that is received into these slots; `None` when the
    /// processor verifies.
    pub(super) fn direct_number(&mut self, slots: &[SlotRef]) -> Option<u64> {
        slots.first().filter(|slot| is_on_device(slot))?;
        self.summing.as_mut().map(SumQueue::number)
    }

    /// Adds a push to a known transfer; the device or the processor computes its sums.
    pub(super) fn add_push(&mut self, transfer: TransferId, content: [u8; 16], pushed: Pushed) {
        let Some(outbound) = self.outbound.held_mut(transfer) else { return };
        if outbound.is_stopped() {
            return;
        }
        outbound.content = Some(content);
        let is_direct = pushed.slots.iter().any(is_on_device);
        let summing = self.summing.as_mut().filter(|_| is_direct);
        outbound.push(pushed, summing.is_some(), self.now);
        if let Some(summing) = summing {
            outbound.number.get_or_insert_with(|| summing.number());
            if !std::mem::replace(&mut outbound.is_unasked, true) {
                if self.unasked.len() >= self.limits.transfers_max {
                    self.unasked.retain(|&transfer| self.outbound.get(transfer).is_some());
                }
                self.unasked.push_back(transfer);
            }
            self.request_sums();
        }
    }

    /// Requests waiting sums of transfers from the device, as far as there is room.
    fn request_sums(&mut self) {
        let layer_bytes = self.layout.layer_bytes();
        while let (Some(&transfer), Some(summing)) = (self.unasked.front(), &mut self.summing) {
            if let Some(outbound) = self.outbound.held_mut(transfer) {
                let room = summing.room();
                let want = |wanted| summing.want(wanted);
                if !outbound.request_sums(transfer, layer_bytes, room, want) {
                    return;
                }
                outbound.is_unasked = false;
            }
            self.unasked.pop_front();
        }
    }

    /// Drops the waiting sums of a transfer that has ended.
    pub(super) fn drop_waiting_sums(&mut self, number: Option<u64>) {
        if let Some((summing, number)) = self.summing.as_mut().zip(number) {
            summing.forget(number);
            self.landed.retain(|wanted| wanted.purpose.number() != number);
        }
    }

    /// Gives back a transfer that cannot be sent directly to the receiver that has reserved it: staging
    /// takes it, and otherwise it is stopped at the next poll.
    pub(super) fn return_push_if_not_direct(&mut self, transfer: TransferId) {
        let Some(outbound) = self.outbound.get(transfer).map(|lease| &lease.held) else { return };
        let slab = outbound.direct_slots().and_then(|slots| slots.first()).map(SlotRef::slab);
        let Some((slab, reservation)) = slab.zip(outbound.reservation()) else { return };
        if self.can_write_directly(slab, reservation) {
            return;
        }
        let Some(outbound) = self.outbound.held_mut(transfer) else { return };
        let Some(content) = outbound.content else { return };
        let (pushed, is_ended) = outbound.take_back();
        // Sums in flight do not apply to the blocks that will be sent: neither their values nor their
        // failures count.
        let number = outbound.number.take();
        self.returned.push(ReturnedPush { transfer, content, pushed, is_ended });
        self.drop_waiting_sums(number);
    }

    /// Takes the pushes that cannot be sent directly.
    pub(crate) fn take_returned(&mut self) -> impl Iterator<Item = ReturnedPush> + '_ {
        let outbound = &self.outbound;
        self.returned.drain(..).filter(|returned| outbound.get(returned.transfer).is_some())
    }

    /// Takes the expectations that cannot be received directly: the sender has other heads, or no
    /// connection to it reaches the device.
    pub(crate) fn take_returned_expectations(&mut self) -> Vec<ReturnedExpectation> {
        let inbound = &mut self.inbound;
        let take = |transfer| {
            let slots = std::mem::take(&mut inbound.get_mut(&transfer)?.slots);
            Some(ReturnedExpectation { transfer, slots })
        };
        self.returned_expectations.drain(..).filter_map(take).collect()
    }

    /// Receives a transfer into these host slots, one for each expected device slot.
    pub(crate) fn receive_into(&mut self, transfer: TransferId, slots: Vec<SlotRef>) {
        let Some(inbound) = self.inbound.get_mut(&transfer) else { return };
        inbound.number = None;
        inbound.slots = slots;
        self.unreserved.push_back(transfer);
    }

    /// Refuses an expectation that cannot be received directly and for which there are no staging slots.
    pub(crate) fn refuse_expectation(&mut self, transfer: TransferId) {
        self.end_inbound(transfer, Outcome::Refused, false);
    }

    /// Ends the given-back transfers that staging has not taken.
    pub(super) fn stop_returned(&mut self) {
        const NO_STAGING: &str = "transfer: no direct transfer (the peer has another range of heads, or no transport reaches the device's memory), and there are no staging slots";
        while let Some(ReturnedPush { transfer, .. }) = self.returned.pop() {
            tracing::warn!(transfer, "{NO_STAGING}");
            self.stop_outbound(transfer);
        }
        while let Some(transfer) = self.returned_expectations.pop() {
            tracing::warn!(transfer, "{NO_STAGING}");
            self.refuse_expectation(transfer);
        }
    }

    /// Makes landed bytes visible to their device, and starts the waiting sums.
    pub(super) fn start_sums(&mut self) {
        let mut landed = std::mem::take(&mut self.landed);
        let mut flushed: Option<(Arc<Slab>, Result<(), DeviceError>)> = None;
        for wanted in landed.drain(..) {
            // The transfer may have ended because another piece failed.
            if !self.is_open(&wanted.purpose) {
                continue;
            }
            let slab = wanted.slot.slab();
            if flushed.as_ref().is_none_or(|(known, _)| !Arc::ptr_eq(known, slab)) {
                let result = slab.device().map_or(Ok(()), |device| device.flush_nic_writes());
                if let Err(error) = &result {
                    tracing::warn!(%error, "transfer: the NIC's writes to device memory cannot be flushed");
                }
                flushed = Some((Arc::clone(slab), result));
            }
            let is_readable = flushed.as_ref().is_none_or(|(_, result)| result.is_ok());
            match self.summing.as_mut().filter(|_| is_readable) {
                Some(summing) => summing.want(wanted),
                None => self.sum_failed(wanted.purpose),
            }
        }
        self.landed = landed;
        self.request_sums();
        while let Some(purpose) = self.summing.as_mut().and_then(SumQueue::start) {
            tracing::warn!(?purpose, "transfer: the device refused to compute a checksum");
            self.sum_failed(purpose);
        }
    }

    /// Takes the sums that have completed; returns their number.
    pub(super) fn reap_sums(&mut self) -> usize {
        let mut ended = std::mem::take(&mut self.sums_ended);
        if let Some(summing) = &mut self.summing {
            summing.reap(&mut ended);
        }
        let count = ended.len();
        for (purpose, result) in ended.drain(..) {
            if !self.is_open(&purpose) {
                continue;
            }
            match result {
                Ok(sum) => self.summed(purpose, sum),
                Err(error) => {
                    tracing::warn!(%error, ?purpose, "transfer: a device's checksum failed");
                    self.sum_failed(purpose);
                }
            }
        }
        self.sums_ended = ended;
        count
    }

    /// Whether the sum belongs to a transfer that is still open, and not to an earlier one with the same id.
    fn is_open(&self, purpose: &Purpose) -> bool {
        let (transfer, number) = (purpose.transfer(), Some(purpose.number()));
        match purpose {
            Purpose::Announce { .. } => {
                self.outbound.get(transfer).is_some_and(|lease| lease.held.number == number)
            }
            Purpose::Verify { .. } => {
                self.inbound.get(&transfer).is_some_and(|inbound| inbound.number == number)
            }
        }
    }

    fn summed(&mut self, purpose: Purpose, sum: u64) {
        match purpose {
            Purpose::Announce { transfer, part, block, .. } => {
                if let Some(outbound) = self.outbound.held_mut(transfer) {
                    outbound.summed(part, block, sum);
                    self.active.insert(transfer);
                }
            }
            Purpose::Verify { transfer, block, layers, expected, .. } => {
                let Some(inbound) = self.inbound.get_mut(&transfer) else { return };
                let failures = inbound.summed(block, layers, sum == expected);
                self.account_verification(transfer, failures);
            }
        }
    }

    fn sum_failed(&mut self, purpose: Purpose) {
        if !self.is_open(&purpose) {
            return;
        }
        match purpose {
            Purpose::Announce { transfer, part, block, .. } => {
                let lease = self.outbound.get(transfer);
                if lease.is_some_and(|lease| lease.held.awaits_sum(part, block)) {
                    self.stop_outbound(transfer);
                }
            }
            Purpose::Verify { transfer, .. } => self.end_inbound(transfer, Outcome::DeviceFailed, false),
        }
    }

    /// Stops the transfer of a push that cannot be sent: otherwise the receiver would take later pushes for
    /// the whole.
    pub(super) fn refuse_push(&mut self, transfer: TransferId) {
        let is_known = self.outbound.get(transfer).is_some();
        self.stop_outbound(transfer);
        if !is_known {
            self.notices.push(Notice::Pushed { transfer, complete: false });
        }
    }

    /// Stops sending a transfer for a reason local to this node.
    fn stop_outbound(&mut self, transfer: TransferId) {
        self.cancelled.insert(transfer, self.now);
        self.abandon_outbound(transfer);
    }
}
