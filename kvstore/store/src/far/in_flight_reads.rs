//! Reads of other nodes' memory that are under way, and the slots that the fabric may still write after a read has ended.
//!
//! A read that ends late ends twice: its verified blocks are answered at its deadline ([`SecondaryTierEvent::Arrived`]), and the
//! slots of the others follow once the fabric cannot write to them any more ([`SecondaryTierEvent::Returned`]). Every slot goes back
//! to the store's thread by one of the two.

use std::collections::HashMap;

use kvstore_block::BlockIdentity;
use kvstore_remote::{Ticket, with_identity};

use super::{Delivered, DeliveredSum, FetchRequest, ReturnedSlots, SecondaryTierEvent};

/// The reads of one driver, which its thread alone uses.
#[derive(Default)]
pub(super) struct RemoteReads {
    reading: HashMap<Ticket, FetchRequest>,
    /// Slots that the fabric may still write although their read has been answered.
    held: HashMap<Ticket, ReturnedSlots>,
}

impl RemoteReads {
    pub(super) fn begin(&mut self, ticket: Ticket, incoming: FetchRequest) {
        self.reading.insert(ticket, incoming);
    }

    /// A read has ended with these leading blocks verified, each with its length and checksum. `is_held`: the fabric may still
    /// write to slots behind them.
    pub(super) fn fetched(
        &mut self,
        ticket: Ticket,
        sums: &[(u32, u64)],
        is_held: bool,
    ) -> Option<SecondaryTierEvent> {
        let mut incoming = self.reading.remove(&ticket)?;
        let identities = &incoming.chain[incoming.first..];
        let delivered = |(&(bytes, checksum), identity): (&(u32, u64), &BlockIdentity)| Delivered {
            bytes,
            sum: DeliveredSum::Block(with_identity(checksum, identity)),
        };
        let blocks: Vec<Delivered> = sums.iter().zip(identities).map(delivered).collect();
        if is_held {
            let slots = incoming.slots.split_off(blocks.len().min(incoming.slots.len()));
            incoming.held = slots.len();
            self.held.insert(ticket, ReturnedSlots { request: incoming.request, slots });
        }
        Some(SecondaryTierEvent::Arrived { incoming, blocks })
    }

    /// The fabric cannot write to the read's slots any more.
    pub(super) fn returned(&mut self, ticket: Ticket) -> Option<SecondaryTierEvent> {
        self.held.remove(&ticket).map(SecondaryTierEvent::Returned)
    }
}
