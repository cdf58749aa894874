//! Blocks on their way into the pool: reserved, written by the client, verified here, registered.
//!
//! A block is registered only when the bytes in its slot have the checksum that the client announced.
//! Verification runs on this thread, a bounded number of bytes a poll, in the order of the commits.

use std::time::Instant;

use dataplane_fabric::{Fabric, PeerId};
use dataplane_memory::{SlotGrant, SlotRef};
use kvstore_block::BlockIdentity;

use super::leases::{LeaseName, LeasedBlocks, QuarantinedSlot};
use super::{PoolBlocks, PoolServer, Writable};
use crate::checksum::with_identity;
use crate::metrics::add;
use crate::wire::{Grant, Message, Offer};

/// A slot that is reserved for a client.
pub(super) struct Reserved<B: PoolBlocks> {
    pub(super) offer: Offer,
    /// The client's right to write the slot.
    pub(super) granted: SlotGrant,
    /// Keeps the slot reserved.
    pub(super) hold: B::Writing,
}

/// A verified block whose registration is answered later.
#[derive(Debug)]
pub(super) struct PendingRegistration {
    identity: BlockIdentity,
    commit: u64,
    bit: u32,
}

/// Result for a block that a client has written.
#[derive(Debug, Clone, Copy)]
enum Verdict {
    Kept,
    Damaged,
    /// The bytes are right, but the store did not keep the block.
    NotKept,
}

/// A commit whose blocks are being verified.
#[derive(Debug)]
pub(super) struct PendingCommit {
    peer: PeerId,
    request: u64,
    left: usize,
    registered: u64,
    damaged: u64,
}

/// A block to verify.
pub(super) struct Job<B: PoolBlocks> {
    offer: Offer,
    slot: SlotRef,
    purpose: Purpose<B>,
}

enum Purpose<B: PoolBlocks> {
    /// Register the block for a commit; `bit` is its bit in that message.
    Register { commit: u64, bit: u32, hold: B::Writing },
    /// Check a registered block of which a client read wrong bytes.
    Recheck { _hold: B::Reading },
}

impl<F: Fabric, B: PoolBlocks> PoolServer<F, B> {
    /// Handles a reserve message. False when it violates the protocol.
    pub(super) fn reserve(&mut self, peer: PeerId, request: u64, offers: Vec<Offer>, now: Instant) -> bool {
        let name = LeaseName::Reservation(peer, request);
        if self.leases.get(name).is_some() {
            return false;
        }
        if !self.has_room_for_lease(peer) {
            self.send(peer, &Message::Busy { request });
            return true;
        }
        let mut blocks = Vec::with_capacity(offers.len());
        let grants = offers
            .into_iter()
            .map(|offer| {
                let (grant, reserved) = self.answer(peer, offer);
                blocks.push(reserved);
                grant
            })
            .collect();
        if blocks.iter().any(Option::is_some) {
            self.grant(peer, name, LeasedBlocks::Reservation(blocks), now);
        }
        let lease_ms = self.config.lease.as_millis() as u32;
        self.send(peer, &Message::Granted { request, lease_ms, grants });
        true
    }

    fn answer(&mut self, peer: PeerId, offer: Offer) -> (Grant, Option<Reserved<B>>) {
        let bytes = offer.description.bytes as usize;
        if bytes == 0 || bytes > self.blocks.slab().layout().slot_bytes {
            add(&self.counters.refused_blocks, 1);
            return (Grant::Refused, None);
        }
        if self.pending.contains(&offer.identity) {
            return (Grant::Pending, None);
        }
        if self.blocks.contains(&offer.identity) {
            return (Grant::Present, None);
        }
        let Some(session) = self.sessions.get_mut(&peer) else { return (Grant::Full, None) };
        let may = session.reserved_slots < self.config.reserved_slots_per_peer_max;
        let Some(Writable { slot, hold }) = may.then(|| self.blocks.reserve()).flatten() else {
            add(&self.counters.refused_blocks, 1);
            return (Grant::Full, None);
        };
        if let Some(session) = self.sessions.get_mut(&peer) {
            session.reserved_slots += 1;
        }
        add(&self.counters.reserved_blocks, 1);
        self.pending.insert(offer.identity);
        let grant = Grant::Slot { slot: slot.slot(), generation: slot.generation() };
        (grant, Some(Reserved { offer, granted: slot.grant(), hold }))
    }

    /// Handles a commit. False when it violates the protocol.
    pub(super) fn commit(&mut self, peer: PeerId, request: u64, written: u64) -> bool {
        let Some(lease) = self.leases.release(LeaseName::Reservation(peer, request)) else { return false };
        self.forget_one(peer);
        let LeasedBlocks::Reservation(blocks) = lease.held else { return false };
        let commit = self.next_id;
        self.next_id += 1;
        let (mut left, mut strays) = (0, Vec::new());
        for (bit, reserved) in blocks.into_iter().enumerate() {
            let Some(Reserved { offer, granted, hold }) = reserved else { continue };
            if let Some(session) = self.sessions.get_mut(&peer) {
                session.reserved_slots -= 1;
            }
            // The slot's grant ends here, before the bytes are verified. Writes that a well-behaved client
            // has posted have landed before this message.
            let slot = granted.end();
            if slot.has_stray_writes() {
                strays.push(QuarantinedSlot::Write(Writable { slot, hold }));
                self.pending.remove(&offer.identity);
                continue;
            }
            if written & (1 << bit) == 0 {
                self.pending.remove(&offer.identity);
                continue;
            }
            left += 1;
            let purpose = Purpose::Register { commit, bit: bit as u32, hold };
            self.jobs.push_back(Job { offer, slot, purpose });
        }
        if !strays.is_empty() {
            tracing::warn!(
                ?peer,
                "pool: a client wrote to a slot that it has no grant for; closing its connection"
            );
            self.fenced.entry(peer).or_default().extend(strays);
            self.end_session(peer);
        }
        if left == 0 {
            self.send(peer, &Message::Committed { request, registered: 0, damaged: 0 });
        } else {
            let committing = PendingCommit { peer, request, left, registered: 0, damaged: 0 };
            self.committing.insert(commit, committing);
        }
        true
    }

    /// Queues a reported block for verification, so that it is dropped only if it is damaged here too.
    pub(super) fn report_damaged(&mut self, identity: &BlockIdentity) {
        if self.suspected.len() >= self.config.suspects_max || self.suspected.contains(identity) {
            return;
        }
        let Some(block) = self.blocks.find(identity) else { return };
        self.suspected.insert(*identity);
        let offer = Offer { identity: *identity, description: block.description };
        self.jobs.push_back(Job { offer, slot: block.slot, purpose: Purpose::Recheck { _hold: block.hold } });
    }

    /// Verifies a bounded number of bytes; returns the number of blocks it worked on.
    pub(super) fn verify(&mut self) -> usize {
        let mut budget = self.config.verify_bytes_per_poll;
        let mut work = 0;
        while budget > 0 {
            let Some(job) = self.jobs.front() else { break };
            work += 1;
            let Offer { identity, description } = &job.offer;
            let bytes = description.bytes as usize;
            let Some(sum) = self.verifier.advance(&job.slot, bytes, &mut budget) else { break };
            let sum = with_identity(sum, identity);
            let Some(job) = self.jobs.pop_front() else { break };
            self.verified(job, sum);
        }
        work
    }

    fn verified(&mut self, job: Job<B>, sum: u64) {
        let Job { offer, slot, purpose } = job;
        let right = sum == offer.description.checksum;
        if !right {
            add(&self.counters.damaged_blocks, 1);
        }
        match purpose {
            Purpose::Recheck { .. } => {
                self.suspected.remove(&offer.identity);
                if !right {
                    tracing::warn!(
                        identity = offer.identity.short(),
                        "pool: a block is damaged; dropping it"
                    );
                    self.blocks.remove(&offer.identity);
                }
            }
            Purpose::Register { commit, bit, .. } if !right => {
                self.pending.remove(&offer.identity);
                self.count_verified(commit, bit, Verdict::Damaged);
            }
            Purpose::Register { commit, bit, hold } => {
                let (question, Offer { identity, description }) = (self.next_id, offer);
                self.next_id += 1;
                self.registering.insert(question, PendingRegistration { identity, commit, bit });
                let is_kept = self.blocks.register(question, identity, description, Writable { slot, hold });
                if let Some(is_kept) = is_kept {
                    self.registered_later(question, is_kept);
                }
            }
        }
    }

    /// Handles the result of a registration, immediate or delayed: the block can be found from now on, or is
    /// not kept.
    pub(super) fn registered_later(&mut self, question: u64, is_kept: bool) {
        let Some(PendingRegistration { identity, commit, bit }) = self.registering.remove(&question) else {
            return;
        };
        self.pending.remove(&identity);
        if is_kept {
            add(&self.counters.registered_blocks, 1);
        }
        self.count_verified(commit, bit, if is_kept { Verdict::Kept } else { Verdict::NotKept });
    }

    fn count_verified(&mut self, commit: u64, bit: u32, verdict: Verdict) {
        let Some(committing) = self.committing.get_mut(&commit) else { return };
        committing.left -= 1;
        match verdict {
            Verdict::Kept => committing.registered |= 1 << bit,
            Verdict::Damaged => committing.damaged |= 1 << bit,
            Verdict::NotKept => {}
        }
        if committing.left > 0 {
            return;
        }
        if let Some(PendingCommit { peer, request, registered, damaged, .. }) =
            self.committing.remove(&commit)
        {
            self.send(peer, &Message::Committed { request, registered, damaged });
        }
    }
}
