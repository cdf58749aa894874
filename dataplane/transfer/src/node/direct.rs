//! Hand-offs whose blocks stay in a device's memory: which ones do, and what the ends of the device's sums mean. See
//! [`crate::direct`].

use std::sync::Arc;

use dataplane_fabric::Fabric;
use dataplane_memory::{Checksummer, DeviceError, Slab, SlabKind, SlotPool, SlotRef};

use super::{Notice, Outcome, TransferId, TransferNode};
use crate::checksum::Checksum;
use crate::direct::{Purpose, Summing};
use crate::outbound::{Pushed, Reservation};
use crate::terms::Greeting;

/// A transfer pushed to be sent directly that cannot be: its receiver does not have our heads, or no connection to it reaches from
/// these slots to its.
#[derive(Debug)]
pub(crate) struct Returned {
    pub(crate) transfer: TransferId,
    pub(crate) content: [u8; 16],
    pub(crate) pushed: Vec<Pushed>,
    /// Whether nothing more will be pushed.
    pub(crate) is_ended: bool,
}

/// A transfer expected into a device's slots that cannot be received there. [`TransferNode::receive_into`] or
/// [`TransferNode::refuse_expectation`] has to follow.
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
    /// Lets a device sum what lies in its memory: hand-offs whose slots the fabric reaches there are then direct, and
    /// peers are asked for the checksum that a device takes. While [`TransferNode::sums_in_flight`] is not zero, the
    /// node must be polled.
    #[must_use]
    pub fn with_checksummer(mut self, checksummer: impl Checksummer + 'static) -> Self {
        self.summing = Some(Summing::new(Box::new(checksummer)));
        self
    }

    /// Sums that a device takes: nobody rings when one has ended.
    #[must_use]
    pub fn sums_in_flight(&self) -> usize {
        self.summing.as_ref().map_or(0, Summing::in_flight)
    }

    /// What this node says of itself to a peer.
    pub(super) fn greeting(&self) -> Greeting {
        Greeting::new(self.layout, if self.summing.is_some() { Checksum::Lanes } else { Checksum::Xxh3 })
    }

    /// Whether a push of these slots needs no staging, by all that is known of its receiver.
    pub(crate) fn sends_directly(&self, transfer: TransferId, slots: &[SlotRef]) -> bool {
        let reservation = self.outbound.get(transfer).and_then(|lease| lease.held.reservation());
        self.device_sums_all(slots, |slab| match reservation {
            None => self.fabric.carries(slab),
            Some(reservation) => self.can_write_directly(slab, reservation),
        })
    }

    /// Whether blocks can go from this slab, in a device's memory, to the slots of a reservation.
    fn can_write_directly(&self, slab: &Arc<Slab>, to: &Reservation) -> bool {
        to.terms.allow_direct() && self.fabric.reaches(to.peer, Some(slab), to.slab)
    }

    /// Whether some peers can write to these slots, and a device verify them.
    pub(crate) fn receives_directly(&self, slots: &[SlotRef]) -> bool {
        self.device_sums_all(slots, |slab| self.fabric.shows_slab(slab))
    }

    /// Whether a slot lies in a slab that peers write to. The number of any other would be taken for one of that slab's.
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

    /// Whether the device sums each of these slots, and their slabs are as wanted.
    fn device_sums_all(&self, slots: &[SlotRef], is_wanted: impl Fn(&Arc<Slab>) -> bool) -> bool {
        let Some(summing) = &self.summing else { return false };
        // Slots of one transfer lie in one slab, as a rule: it is looked at once.
        let mut known: Option<&Arc<Slab>> = None;
        slots.iter().all(|slot| {
            let slab = slot.slab();
            let is_known = known.replace(slab).is_some_and(|known| Arc::ptr_eq(known, slab));
            is_known || (is_on_device(slot) && summing.reaches(slab) && is_wanted(slab))
        })
    }

    /// A number for the sums of a transfer that is received into these slots; `None` when the processor takes them.
    pub(super) fn direct_number(&mut self, slots: &[SlotRef]) -> Option<u64> {
        slots.first().filter(|slot| is_on_device(slot))?;
        self.summing.as_mut().map(Summing::number)
    }

    /// Adds a push to a transfer that is known: to be summed by the device, or by the processor.
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
            self.ask_sums();
        }
    }

    /// Asks the device for sums that wait in their transfers, as far as there is room.
    fn ask_sums(&mut self) {
        let layer_bytes = self.layout.layer_bytes();
        while let (Some(&transfer), Some(summing)) = (self.unasked.front(), &mut self.summing) {
            if let Some(outbound) = self.outbound.held_mut(transfer) {
                let room = summing.room();
                let want = |wanted| summing.want(wanted);
                if !outbound.ask_sums(transfer, layer_bytes, room, want) {
                    return;
                }
                outbound.is_unasked = false;
            }
            self.unasked.pop_front();
        }
    }

    /// Nobody waits for a transfer's sums any more.
    pub(super) fn forget_sums(&mut self, number: Option<u64>) {
        if let Some((summing, number)) = self.summing.as_mut().zip(number) {
            summing.forget(number);
            self.landed.retain(|wanted| wanted.purpose.number() != number);
        }
    }

    /// A transfer that cannot be sent directly to the receiver that has asked for it is left to staging, or is given up when
    /// nobody has taken it by the next poll.
    pub(super) fn give_back_out_of_reach(&mut self, transfer: TransferId) {
        let Some(outbound) = self.outbound.get(transfer).map(|lease| &lease.held) else { return };
        let slab = outbound.direct_slots().and_then(|slots| slots.first()).map(SlotRef::slab);
        let Some((slab, reservation)) = slab.zip(outbound.reservation()) else { return };
        if self.can_write_directly(slab, reservation) {
            return;
        }
        let Some(outbound) = self.outbound.held_mut(transfer) else { return };
        let Some(content) = outbound.content else { return };
        let (pushed, is_ended) = outbound.take_back();
        // What the device still sums is not of what will be sent: neither its value nor its failure counts.
        let number = outbound.number.take();
        self.returned.push(Returned { transfer, content, pushed, is_ended });
        self.forget_sums(number);
    }

    /// Takes what cannot be sent directly.
    pub(crate) fn take_returned(&mut self) -> impl Iterator<Item = Returned> + '_ {
        let outbound = &self.outbound;
        self.returned.drain(..).filter(|returned| outbound.get(returned.transfer).is_some())
    }

    /// Takes the expectations that cannot be received directly: their senders do not have our heads, or no connection to them leads
    /// to the device.
    pub(crate) fn take_returned_expectations(&mut self) -> Vec<ReturnedExpectation> {
        let inbound = &mut self.inbound;
        let take = |transfer| {
            let slots = std::mem::take(&mut inbound.get_mut(&transfer)?.slots);
            Some(ReturnedExpectation { transfer, slots })
        };
        self.returned_expectations.drain(..).filter_map(take).collect()
    }

    /// Receives a transfer into these host slots, as many as were expected, instead of those of a device.
    pub(crate) fn receive_into(&mut self, transfer: TransferId, slots: Vec<SlotRef>) {
        let Some(inbound) = self.inbound.get_mut(&transfer) else { return };
        inbound.number = None;
        inbound.slots = slots;
        self.unreserved.push_back(transfer);
    }

    /// There is no memory for what cannot be received directly.
    pub(crate) fn refuse_expectation(&mut self, transfer: TransferId) {
        self.end_inbound(transfer, Outcome::Refused, false);
    }

    /// Nobody stages what was given back.
    pub(super) fn stop_returned(&mut self) {
        const NO_STAGING: &str = "transfer: the peer has other heads, or no connection leads to the device's memory; and there are no staging slots";
        while let Some(Returned { transfer, .. }) = self.returned.pop() {
            tracing::warn!(transfer, "{NO_STAGING}");
            self.stop_outbound(transfer);
        }
        while let Some(transfer) = self.returned_expectations.pop() {
            tracing::warn!(transfer, "{NO_STAGING}");
            self.refuse_expectation(transfer);
        }
    }

    /// Makes what has landed visible to its device, and begins the sums that wait.
    pub(super) fn start_sums(&mut self) {
        let mut landed = std::mem::take(&mut self.landed);
        let mut settled: Option<(Arc<Slab>, Result<(), DeviceError>)> = None;
        for wanted in landed.drain(..) {
            // Its transfer may have ended by the failure of another piece.
            if !self.is_open(&wanted.purpose) {
                continue;
            }
            let slab = wanted.slot.slab();
            if settled.as_ref().is_none_or(|(known, _)| !Arc::ptr_eq(known, slab)) {
                let result = slab.device().map_or(Ok(()), |device| device.settle());
                if let Err(error) = &result {
                    tracing::warn!(%error, "transfer: what has landed cannot be read by its device");
                }
                settled = Some((Arc::clone(slab), result));
            }
            let is_readable = settled.as_ref().is_none_or(|(_, result)| result.is_ok());
            match self.summing.as_mut().filter(|_| is_readable) {
                Some(summing) => summing.want(wanted),
                None => self.sum_failed(wanted.purpose),
            }
        }
        self.landed = landed;
        self.ask_sums();
        while let Some(purpose) = self.summing.as_mut().and_then(Summing::start) {
            tracing::warn!(?purpose, "transfer: the device cannot sum this");
            self.sum_failed(purpose);
        }
    }

    /// Takes the sums that have ended; returns how many.
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

    /// Whether it is of a transfer that goes on, and not of an earlier one with the same id.
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

    /// A push that cannot be sent ends its transfer: the receiver would take what is pushed after it for all there is.
    pub(super) fn refuse_push(&mut self, transfer: TransferId) {
        let is_known = self.outbound.get(transfer).is_some();
        self.stop_outbound(transfer);
        if !is_known {
            self.notices.push(Notice::Pushed { transfer, complete: false });
        }
    }

    /// Nothing more of a transfer is sent, for a reason of this node's.
    fn stop_outbound(&mut self, transfer: TransferId) {
        self.cancelled.insert(transfer, self.now);
        self.abandon_outbound(transfer);
    }
}
