//! Rules for the reuse of a slot whose position a client was given.
//!
//! The problem: reads and writes are one-sided. The client's NIC carries them out at any later time, and this
//! node's NIC does not know generations (clause 4 of the fabric contract; fabrics that do know them take the
//! connection down for a stale one). So neither a clock nor a generation proves that a slot is safe again: a
//! client that was descheduled for a minute may post an operation that it decided on a minute ago.
//!
//! The rule: such a slot stays referenced until one of three things has happened.
//! 1. The client gave it back. A release says that its reads have completed; a commit travels behind its writes
//!    on their lane, so when it is delivered they have landed (clause 1).
//! 2. The connection has ended: `PeerDown` arrives only once nothing can arrive from the client any more.
//! 3. The lease has expired: then the *connection* is ended, not the lease. Its slots move to `fenced` and stay
//!    there until `PeerDown`. This costs a client that holds several leases all of them; clients know the lease
//!    time and post nothing in its last quarter (see the client's `fetch`), so this is rare.
//!
//! The rule is the same on fabrics that check generations: an exception for them would need its own tests, and
//! expiry is rare. Should all this fail, a reader gets bytes whose checksum, with the identity in it that it
//! asked for, is wrong: a miss.
//!
//! Over TCP a client can access only slots whose positions it was given: reserved ones, until it commits, and
//! those that it has looked up. Over RDMA and shared memory it can write anywhere in the slab. The same
//! checksum protects readers.

use std::time::Instant;

use dataplane_fabric::{Fabric, PeerId};
use dataplane_memory::Lease;

use super::storing::Reserved;
use super::{PoolBlocks, PoolServer, Readable, Writable};
use crate::metrics::add;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum LeaseName {
    /// A read lease, by the id that the client was given.
    Read(u64),
    /// A reservation for writing, by the client's own request id.
    Reservation(PeerId, u64),
}

pub(super) enum LeasedBlocks<B: PoolBlocks> {
    Read(Vec<Readable<B::Reading>>),
    Reservation(Vec<Option<Reserved<B>>>),
}

/// A slot that a client may still read or write.
pub(super) enum QuarantinedSlot<B: PoolBlocks> {
    Read(Readable<B::Reading>),
    Write(Writable<B::Writing>),
}

impl<F: Fabric, B: PoolBlocks> PoolServer<F, B> {
    pub(super) fn has_room_for_lease(&self, peer: PeerId) -> bool {
        let own = self.sessions.get(&peer).map_or(usize::MAX, |session| session.leases);
        own < self.config.leases_per_peer_max
            && self.leases.len() + self.pending_look_ups.len() < self.config.leases_max
    }

    /// Leases blocks for reading; returns the lease's id. The caller has checked for room.
    pub(super) fn lease_out(&mut self, peer: PeerId, blocks: Vec<Readable<B::Reading>>, now: Instant) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.grant(peer, LeaseName::Read(id), LeasedBlocks::Read(blocks), now);
        id
    }

    pub(super) fn grant(&mut self, peer: PeerId, name: LeaseName, held: LeasedBlocks<B>, now: Instant) {
        let expires_at = now + self.config.lease;
        let granted = self.leases.grant(name, Lease { owner: peer, expires_at, held });
        assert!(matches!(granted, Ok(None)), "room and the name were checked before");
        if let Some(session) = self.sessions.get_mut(&peer) {
            session.leases += 1;
        }
        self.next_expiry = Some(self.next_expiry.map_or(expires_at, |next| next.min(expires_at)));
    }

    /// Ends a read lease of a client. An unknown lease has expired; the client learns of that by its
    /// disconnect.
    pub(super) fn release(&mut self, peer: PeerId, lease: u64) {
        let name = LeaseName::Read(lease);
        if self.leases.get(name).is_some_and(|lease| lease.owner == peer) {
            self.leases.release(name);
            self.forget_one(peer);
        }
    }

    pub(super) fn forget_one(&mut self, peer: PeerId) {
        if let Some(session) = self.sessions.get_mut(&peer) {
            session.leases -= 1;
        }
    }

    /// Fences the clients whose leases have expired.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.next_expiry.is_none_or(|next| next > now) {
            return;
        }
        for (_, lease) in self.leases.expire(now) {
            add(&self.counters.expired_leases, 1);
            let peer = lease.owner;
            self.forget_one(peer);
            let slots = self.end_held(lease.held);
            self.fenced.entry(peer).or_default().extend(slots);
            let is_first = self.sessions.get(&peer).is_some_and(|session| !session.ending);
            if is_first {
                tracing::warn!(?peer, "pool: a client did not end its lease in time; closing its connection");
                add(&self.counters.fences, 1);
                self.end_session(peer);
            }
        }
        self.next_expiry = self.leases.next_expiry();
    }

    /// Frees all that a client held. Called once its connection has ended and nothing can arrive from it any
    /// more.
    pub(super) fn peer_down(&mut self, peer: PeerId, reason: &str) {
        tracing::debug!(?peer, reason, "pool: a connection ended");
        self.sessions.remove(&peer);
        self.backlog.retain(|other| *other != peer);
        // `found_later` drops the blocks of these look-ups.
        let of_peer = self.pending_look_ups.values_mut().filter(|pending| pending.peer == Some(peer));
        of_peer.for_each(|pending| pending.peer = None);
        for (_, lease) in self.leases.end_owner(&peer) {
            drop(self.end_held(lease.held));
        }
        self.fenced.remove(&peer);
    }

    /// Ends a lease or reservation. Reserved blocks may be offered again; the caller keeps or drops the slots.
    fn end_held(&mut self, held: LeasedBlocks<B>) -> Vec<QuarantinedSlot<B>> {
        match held {
            LeasedBlocks::Read(blocks) => blocks.into_iter().map(QuarantinedSlot::Read).collect(),
            LeasedBlocks::Reservation(blocks) => blocks
                .into_iter()
                .flatten()
                .map(|block| {
                    self.pending.remove(&block.offer.identity);
                    QuarantinedSlot::Write(Writable { slot: block.granted.end(), hold: block.hold })
                })
                .collect(),
        }
    }
}
