//! Handling of peers' messages.

use std::time::Instant;

use dataplane_fabric::{Fabric, PeerId};

use super::{Outcome, TransferId, TransferNode};
use crate::metrics::TransferCounters;
use crate::negotiation::{Greeting, NegotiatedParameters, ProtocolError};
use crate::outbound::Reservation;
use crate::timers::Timer;
use crate::wire::{Message, decode_error};

impl<F: Fabric> TransferNode<F> {
    /// Handles a message; an invalid one ends the connection with a reason.
    pub(super) fn take_message(&mut self, peer: PeerId, message: &[u8], now: Instant) {
        let taken = match Message::decode(message) {
            Some(message) => self.dispatch(peer, message, now),
            None => Err(decode_error(message)),
        };
        if let Err(breach) = taken {
            tracing::warn!(?peer, "transfer: {breach}; closing the connection");
            self.fabric.disconnect(peer);
        }
    }

    fn dispatch(&mut self, peer: PeerId, message: Message, now: Instant) -> Result<(), ProtocolError> {
        let terms = self.peers.get(&peer).and_then(|state| state.terms);
        let is_sensible = match message {
            Message::Hello(greeting) => return self.greet(peer, &greeting),
            Message::Reserve { transfer, tag, content, first_block, blocks, offset, slab, slots } => {
                if let Some(terms) = terms {
                    let blocks = blocks as usize;
                    let part = Reservation { peer, tag, content, first_block, blocks, slab, slots, terms };
                    self.reserved(transfer, offset as usize, part, now);
                }
                terms.is_some()
            }
            _ if terms.is_none() => false,
            message @ Message::Announce { .. } => self.announced(peer, message),
            Message::Finished { transfer } => {
                self.finished(peer, transfer);
                true
            }
            Message::Cancel { transfer } => {
                self.cancelled_by(peer, transfer, now);
                true
            }
            Message::CancelAck { transfer } => {
                self.leave_quarantine(peer, transfer);
                true
            }
        };
        if is_sensible { Ok(()) } else { Err(ProtocolError::NoSense) }
    }

    fn greet(&mut self, peer: PeerId, theirs: &Greeting) -> Result<(), ProtocolError> {
        if self.peers.get(&peer).is_some_and(|state| state.terms.is_some()) {
            // A greeting was received already.
            return Err(ProtocolError::NoSense);
        }
        let terms = NegotiatedParameters::between(&self.greeting(), theirs);
        if terms == Err(ProtocolError::Blocks) {
            tracing::warn!(?theirs, ours = ?self.layout, "transfer: the peer's blocks differ from ours");
        }
        let terms = terms?;
        if let Some(state) = self.peers.get_mut(&peer) {
            state.terms = Some(terms);
        }
        self.timers.cancel(Timer::Greeting(peer));
        let waiting = self.inbound_where(|inbound| inbound.peer == peer && !inbound.is_reserved());
        self.unreserved.extend(waiting);
        Ok(())
    }

    fn finished(&mut self, peer: PeerId, transfer: TransferId) {
        self.leave_quarantine(peer, transfer);
        let Some(inbound) = self.inbound.get(&transfer).filter(|inbound| inbound.peer == peer) else {
            return;
        };
        let outcome = if inbound.corrupted { Outcome::Corrupted } else { Outcome::SenderStopped };
        self.writes_ended(transfer, outcome);
    }

    /// Ends a transfer that the peer no longer wants. A transfer that another peer has reserved continues:
    /// it writes nothing to this peer's slots.
    fn cancelled_by(&mut self, peer: PeerId, transfer: TransferId, now: Instant) {
        let owner = self.outbound.get(transfer).map(|lease| lease.owner);
        let is_anothers = owner.flatten().is_some_and(|owner| owner != peer);
        if owner.is_some() && !is_anothers {
            TransferCounters::add(&self.counters.transfers_cancelled, 1);
            self.end_outbound(transfer, false);
        }
        if !is_anothers {
            self.cancelled.insert(transfer, now);
        }
        self.send(peer, Message::CancelAck { transfer });
    }
}
