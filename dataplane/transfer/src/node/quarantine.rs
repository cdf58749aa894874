//! Slots that a peer was told of and may still write to: they are not reused before it has said that it writes no more, or its
//! connection is over.

use std::collections::BTreeMap;

use dataplane_fabric::PeerId;
use dataplane_memory::{SlotGrant, SlotRef};

use super::TransferId;

/// Slots of one transfer that a peer may still write.
pub(super) struct Quarantined {
    pub(super) slots: Vec<SlotRef>,
    /// Ended when the peer has said that it writes no more.
    pub(super) granted: Vec<SlotGrant>,
}

/// State of a transfer's slots at the end of the peer's writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Left {
    /// The slots are free, or were never here.
    Free,
    /// Writes are under way where the peer may not write: its connection has to end first.
    Written,
}

/// All that is in quarantine at a node.
#[derive(Default)]
pub(super) struct Quarantine {
    held: BTreeMap<(PeerId, TransferId), Quarantined>,
    /// Slots of peers that are gone into which another's write is under way: looked at in each round, and hardly ever any.
    strays: Vec<SlotRef>,
    slots: usize,
}

impl Quarantine {
    pub(super) fn insert(&mut self, peer: PeerId, transfer: TransferId, quarantined: Quarantined) {
        self.slots += quarantined.slots.len();
        if let Some(before) = self.held.insert((peer, transfer), quarantined) {
            self.slots -= before.slots.len();
        }
    }

    pub(super) fn contains(&self, peer: PeerId, transfer: TransferId) -> bool {
        self.held.contains_key(&(peer, transfer))
    }

    /// Transfers with slots here.
    pub(super) fn len(&self) -> usize {
        self.held.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty() && self.strays.is_empty()
    }

    /// Slots in quarantine, for whatever reason.
    pub(super) fn slots(&self) -> usize {
        self.slots + self.strays.len()
    }

    /// The peer has said that it writes no more of a transfer.
    pub(super) fn leave(&mut self, peer: PeerId, transfer: TransferId) -> Left {
        let Some(mut quarantined) = self.held.remove(&(peer, transfer)) else { return Left::Free };
        self.slots -= quarantined.slots.len();
        quarantined.granted.clear();
        quarantined.slots.retain(SlotRef::has_stray_writes);
        if quarantined.slots.is_empty() {
            return Left::Free;
        }
        self.insert(peer, transfer, quarantined);
        Left::Written
    }

    /// Transfers whose slots this peer may still write.
    pub(super) fn transfers_of(&self, peer: PeerId) -> impl Iterator<Item = TransferId> + '_ {
        self.held.range((peer, 0)..=(peer, TransferId::MAX)).map(|(&(_, transfer), _)| transfer)
    }

    /// The peer's connection is over: nothing of it arrives any more.
    pub(super) fn peer_down(&mut self, peer: PeerId) {
        let own: Vec<TransferId> = self.transfers_of(peer).collect();
        for transfer in own {
            if let Some(quarantined) = self.held.remove(&(peer, transfer)) {
                self.slots -= quarantined.slots.len();
                let strays = quarantined.slots.into_iter().filter(SlotRef::has_stray_writes);
                self.strays.extend(strays);
            }
        }
    }

    /// Frees slots into which writes of strangers have ended.
    pub(super) fn free_strays(&mut self) {
        self.strays.retain(SlotRef::has_stray_writes);
    }
}
