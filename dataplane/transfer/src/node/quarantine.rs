//! Slots that a peer was told of and may still write to: they are not reused before the peer has confirmed
//! that it writes no more, or its connection is over.

use std::collections::BTreeMap;

use dataplane_fabric::PeerId;
use dataplane_memory::{SlotGrant, SlotRef};

use super::TransferId;

/// Slots of one transfer that a peer may still write.
pub(super) struct Quarantined {
    pub(super) slots: Vec<SlotRef>,
    /// Grants of the peer, ended when it has confirmed that it writes no more.
    pub(super) granted: Vec<SlotGrant>,
}

/// State of a transfer's slots at the end of the peer's writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReleaseOutcome {
    /// The slots are free, or were not in quarantine.
    Free,
    /// Writes are in progress although the peer may no longer write: its connection has to end first.
    Written,
}

/// All slots in quarantine at a node.
#[derive(Default)]
pub(super) struct Quarantine {
    held: BTreeMap<(PeerId, TransferId), Quarantined>,
    /// Slots of disconnected peers into which another peer's write is in progress: checked in each round,
    /// and rarely any.
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

    /// Returns the number of transfers with slots in quarantine.
    pub(super) fn len(&self) -> usize {
        self.held.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty() && self.strays.is_empty()
    }

    /// Returns the number of slots in quarantine.
    pub(super) fn slots(&self) -> usize {
        self.slots + self.strays.len()
    }

    /// Handles the peer's confirmation that it writes no more of a transfer.
    pub(super) fn leave(&mut self, peer: PeerId, transfer: TransferId) -> ReleaseOutcome {
        let Some(mut quarantined) = self.held.remove(&(peer, transfer)) else { return ReleaseOutcome::Free };
        self.slots -= quarantined.slots.len();
        quarantined.granted.clear();
        quarantined.slots.retain(SlotRef::has_stray_writes);
        if quarantined.slots.is_empty() {
            return ReleaseOutcome::Free;
        }
        self.insert(peer, transfer, quarantined);
        ReleaseOutcome::Written
    }

    /// Returns the transfers whose slots this peer may still write.
    pub(super) fn transfers_of(&self, peer: PeerId) -> impl Iterator<Item = TransferId> + '_ {
        self.held.range((peer, 0)..=(peer, TransferId::MAX)).map(|(&(_, transfer), _)| transfer)
    }

    /// Handles the end of the peer's connection: nothing of it arrives any more.
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

    /// Frees slots in which the writes of other peers have ended.
    pub(super) fn free_strays(&mut self) {
        self.strays.retain(SlotRef::has_stray_writes);
    }
}
