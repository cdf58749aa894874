//! Hand-offs whose blocks stay in a device's memory: which ones do, and what the ends of the device's sums mean. See
//! [`crate::direct`].

use std::sync::Arc;
use std::time::Instant;

use dataplane_fabric::{DeviceReach, Fabric};
use dataplane_memory::{Checksummer, DeviceError, Slab, SlotRef};

use super::{Outcome, TransferId, TransferNode};
use crate::checksum::Checksum;
use crate::direct::{Purpose, Summing, Wanted};
use crate::outbound::Pushed;
use crate::terms::Greeting;

/// What was pushed to be sent directly, and cannot be: its receiver does not have our heads.
#[derive(Debug)]
pub(crate) struct Returned {
    pub(crate) transfer: TransferId,
    pub(crate) content: [u8; 16],
    pub(crate) pushed: Vec<Pushed>,
    /// Whether nothing more will be pushed.
    pub(crate) is_ended: bool,
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
        let is_direct = self.summing.is_some() && self.fabric.reaches_device_memory();
        Greeting::new(self.layout, if is_direct { Checksum::Lanes } else { Checksum::Xxh3 })
    }

    /// Whether a push of these slots needs no staging, by all that is known of its receiver.
    pub(crate) fn sends_directly(&self, transfer: TransferId, slots: &[SlotRef]) -> bool {
        let reservation = self.outbound.get(transfer).and_then(|lease| lease.held.reservation.as_ref());
        reservation.is_none_or(|reservation| reservation.terms.allow_direct())
            && self.reaches_directly(slots, DeviceReach::Local)
    }

    /// Whether peers can write to these slots, and a device verify them.
    pub(crate) fn receives_directly(&self, slots: &[SlotRef]) -> bool {
        self.reaches_directly(slots, DeviceReach::Peers)
    }

    /// Whether these are the slots that peers write to: no others can stand in for them.
    pub(crate) fn shows_to_peers(&self, slots: &[SlotRef]) -> bool {
        let is_shown = |slot: &SlotRef| self.fabric.device_reach(slot.slab()) == DeviceReach::Peers;
        slots.first().is_some_and(is_shown)
    }

    fn reaches_directly(&self, slots: &[SlotRef], least: DeviceReach) -> bool {
        let Some(summing) = &self.summing else { return false };
        // Slots of one transfer lie in one slab, as a rule: it is looked at once.
        let mut known: Option<&Arc<Slab>> = None;
        slots.iter().all(|slot| {
            let slab = slot.slab();
            let is_known = known.replace(slab).is_some_and(|known| Arc::ptr_eq(known, slab));
            let reaches = || self.fabric.device_reach(slab) >= least && summing.reaches(slab);
            is_known || (is_on_device(slot) && reaches())
        })
    }

    /// A number for the sums of a transfer that is received into these slots; `None` when the processor takes them.
    pub(super) fn direct_number(&mut self, slots: &[SlotRef]) -> Option<u64> {
        slots.first().filter(|slot| is_on_device(slot))?;
        self.summing.as_mut().map(Summing::number)
    }

    /// Adds a push to a transfer that is known: to be summed by the device, or by the processor.
    pub(super) fn add_push(&mut self, transfer: TransferId, content: [u8; 16], pushed: Pushed) {
        let Some(lease) = self.outbound.get_mut(transfer) else { return };
        let outbound = &mut lease.held;
        outbound.content = Some(content);
        match self.summing.as_mut().filter(|_| pushed.slots.iter().any(is_on_device)) {
            Some(summing) => {
                outbound.number.get_or_insert_with(|| summing.number());
                let layer_bytes = self.layout.layer_bytes();
                outbound.push_direct(transfer, pushed, layer_bytes, |wanted| summing.want(wanted));
            }
            None => outbound.push(pushed.first_block, pushed.slots, pushed.layers),
        }
    }

    /// Nobody waits for a transfer's sums any more.
    pub(super) fn forget_sums(&mut self, number: Option<u64>) {
        if let Some((summing, number)) = self.summing.as_mut().zip(number) {
            summing.forget(number);
            self.landed.retain(|wanted| wanted.purpose.number() != number);
        }
    }

    /// The receiver does not have our heads: what was to be sent directly is left to staging, or is given up when
    /// nobody has taken it by the next poll.
    pub(super) fn give_back_direct(&mut self, transfer: TransferId) {
        let Some(lease) = self.outbound.get_mut(transfer) else { return };
        let number = lease.held.number;
        let (Some(content), true) = (lease.held.content, lease.held.has_direct()) else { return };
        let (pushed, is_ended) = lease.held.take_back();
        self.returned.push(Returned { transfer, content, pushed, is_ended });
        self.forget_sums(number);
    }

    /// Takes what cannot be sent directly.
    pub(crate) fn take_returned(&mut self) -> impl Iterator<Item = Returned> + '_ {
        let outbound = &self.outbound;
        self.returned.drain(..).filter(|returned| outbound.get(returned.transfer).is_some())
    }

    /// Nobody stages what was given back.
    pub(super) fn stop_returned(&mut self) {
        while let Some(Returned { transfer, .. }) = self.returned.pop() {
            tracing::warn!(
                transfer,
                "transfer: the receiver has other heads, and there are no staging slots"
            );
            self.stop_outbound(transfer);
        }
    }

    /// Makes what has landed visible to its device, and begins the sums that wait.
    pub(super) fn start_sums(&mut self) {
        let mut landed = std::mem::take(&mut self.landed);
        let mut settled: Option<(Arc<Slab>, Result<(), DeviceError>)> = None;
        for wanted in landed.drain(..) {
            let slab = wanted.slot.slab();
            if settled.as_ref().is_none_or(|(known, _)| !Arc::ptr_eq(known, slab)) {
                let result = slab.device().map_or(Ok(()), |device| device.settle());
                settled = Some((Arc::clone(slab), result));
            }
            match settled.as_ref().and_then(|(_, result)| result.as_ref().err()) {
                Some(error) => {
                    tracing::warn!(%error, "transfer: what has landed cannot be read by its device");
                    self.sum_failed(wanted.purpose);
                }
                None => self.want(wanted),
            }
        }
        self.landed = landed;
        while let Some(purpose) = self.summing.as_mut().and_then(Summing::start) {
            tracing::warn!(?purpose, "transfer: the device cannot sum this");
            self.sum_failed(purpose);
        }
    }

    fn want(&mut self, wanted: Wanted) {
        // Its transfer may have ended by the failure of another piece.
        let is_open = self.is_open(&wanted.purpose);
        if let Some(summing) = self.summing.as_mut().filter(|_| is_open) {
            summing.want(wanted);
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
                if let Some(lease) = self.outbound.get_mut(transfer) {
                    lease.held.summed(part, block, sum);
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
            Purpose::Announce { transfer, .. } => self.stop_outbound(transfer),
            Purpose::Verify { transfer, .. } => self.end_inbound(transfer, Outcome::DeviceFailed, false),
        }
    }

    /// Nothing more of a transfer is sent, for a reason of this node's.
    fn stop_outbound(&mut self, transfer: TransferId) {
        let now: Instant = self.now;
        self.remember_cancelled(transfer, now);
        self.abandon_outbound(transfer);
    }
}
