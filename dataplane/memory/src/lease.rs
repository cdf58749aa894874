//! Leases: slot references held for an owner until an expiry.
//!
//! When a peer asks for blocks, the slots must stay in use until it has them; when the peer dies or stops
//! responding, they must be freed. A lease therefore ends in one of three ways: it is released, its owner
//! is gone ([`LeaseTable::end_owner`]), or it expires ([`LeaseTable::expire`]). Time arrives as an
//! argument.
//!
//! Used by one thread; not a hot path (one operation per transfer or push, not per block). Nothing scans the table: leases are
//! also kept in the order of their expiry, and by owner.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::time::Instant;

/// A held value with its owner and its expiry.
#[derive(Debug)]
pub struct Lease<Owner, Held> {
    /// Owner of the lease.
    pub owner: Owner,
    /// Time at which the lease expires.
    pub expires_at: Instant,
    /// The held value: usually slot references.
    pub held: Held,
}

/// The table is full; returns the lease.
#[derive(Debug)]
pub struct LeaseFull<Owner, Held>(pub Lease<Owner, Held>);

/// Leases by id, at most `capacity` of them.
#[derive(Debug)]
pub struct LeaseTable<Id, Owner, Held> {
    leases: HashMap<Id, Lease<Owner, Held>>,
    expiries: BTreeSet<(Instant, Id)>,
    owned: HashMap<Owner, BTreeSet<Id>>,
    capacity: usize,
}

impl<Id: Hash + Ord + Copy, Owner: Hash + Eq + Clone, Held> LeaseTable<Id, Owner, Held> {
    /// Makes an empty table for at most `capacity` leases.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self {
            leases: HashMap::with_capacity(capacity),
            expiries: BTreeSet::new(),
            owned: HashMap::new(),
            capacity,
        }
    }

    /// Adds a lease. A second one under the same id replaces the first, which is returned.
    pub fn grant(
        &mut self,
        id: Id,
        lease: Lease<Owner, Held>,
    ) -> Result<Option<Lease<Owner, Held>>, LeaseFull<Owner, Held>> {
        if self.leases.len() >= self.capacity && !self.leases.contains_key(&id) {
            return Err(LeaseFull(lease));
        }
        let replaced = self.release(id);
        self.expiries.insert((lease.expires_at, id));
        self.owned.entry(lease.owner.clone()).or_default().insert(id);
        self.leases.insert(id, lease);
        Ok(replaced)
    }

    /// Returns the lease under `id`.
    #[must_use]
    pub fn get(&self, id: Id) -> Option<&Lease<Owner, Held>> {
        self.leases.get(&id)
    }

    /// Returns the held value of the lease under `id`.
    pub fn held_mut(&mut self, id: Id) -> Option<&mut Held> {
        self.leases.get_mut(&id).map(|lease| &mut lease.held)
    }

    /// Changes the expiry of the lease under `id`, if there is one.
    pub fn renew(&mut self, id: Id, expires_at: Instant) {
        let Some(lease) = self.leases.get_mut(&id) else { return };
        self.expiries.remove(&(lease.expires_at, id));
        lease.expires_at = expires_at;
        self.expiries.insert((expires_at, id));
    }

    /// Transfers the lease under `id`, if there is one, to another owner.
    pub fn hand_to(&mut self, id: Id, owner: Owner) {
        let Some(lease) = self.leases.get_mut(&id) else { return };
        let before = std::mem::replace(&mut lease.owner, owner.clone());
        self.disown(&before, id);
        self.owned.entry(owner).or_default().insert(id);
    }

    fn disown(&mut self, owner: &Owner, id: Id) {
        if let Some(ids) = self.owned.get_mut(owner) {
            ids.remove(&id);
            if ids.is_empty() {
                self.owned.remove(owner);
            }
        }
    }

    /// Ends one lease.
    pub fn release(&mut self, id: Id) -> Option<Lease<Owner, Held>> {
        let lease = self.leases.remove(&id)?;
        self.expiries.remove(&(lease.expires_at, id));
        self.disown(&lease.owner, id);
        Some(lease)
    }

    /// Ends every lease that has expired at `now`, in the order of expiry.
    pub fn expire(&mut self, now: Instant) -> Vec<(Id, Lease<Owner, Held>)> {
        let mut ended = Vec::new();
        while let Some(&(_, id)) = self.expiries.first().filter(|(expires_at, _)| *expires_at <= now) {
            ended.extend(self.release(id).map(|lease| (id, lease)));
        }
        ended
    }

    /// Ends every lease of an owner that is gone, in the order of their ids.
    pub fn end_owner(&mut self, owner: &Owner) -> Vec<(Id, Lease<Owner, Held>)> {
        let ids = self.owned.remove(owner).unwrap_or_default();
        ids.into_iter().filter_map(|id| Some((id, self.release(id)?))).collect()
    }

    /// Returns the number of leases of one owner.
    #[must_use]
    pub fn count_owned(&self, owner: &Owner) -> usize {
        self.owned.get(owner).map_or(0, BTreeSet::len)
    }

    /// Returns the number of leases.
    #[must_use]
    pub fn len(&self) -> usize {
        self.leases.len()
    }

    /// Whether the table has no lease.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    /// Returns the time at which the next lease expires.
    #[must_use]
    pub fn next_expiry(&self) -> Option<Instant> {
        self.expiries.first().map(|&(expires_at, _)| expires_at)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn lease(owner: u8, expires_at: Instant) -> Lease<u8, &'static str> {
        Lease { owner, expires_at, held: "slots" }
    }

    #[test]
    fn leases_end_by_release_owner_or_time() {
        let start = Instant::now();
        let later = start + Duration::from_secs(1);
        let mut table = LeaseTable::new(3);
        for (id, owner, expiry) in [(1, 7, later), (2, 7, start), (3, 8, later)] {
            assert!(table.grant(id, lease(owner, expiry)).is_ok());
        }
        assert!(matches!(table.grant(4, lease(1, later)), Err(LeaseFull(_))), "capacity is a bound");
        assert_eq!(table.next_expiry(), Some(start));
        assert_eq!((table.count_owned(&7), table.count_owned(&9)), (2, 0));
        assert_eq!(table.expire(start).len(), 1);
        assert_eq!(table.end_owner(&7).len(), 1);
        assert!(table.release(3).is_some());
        assert!(table.is_empty());
    }

    #[test]
    fn a_lease_that_is_renewed_replaced_or_handed_on_ends_once() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut table = LeaseTable::new(3);
        assert!(table.grant(1, lease(7, at(1))).is_ok_and(|replaced| replaced.is_none()));
        assert!(table.grant(1, lease(8, at(2))).is_ok_and(|replaced| replaced.is_some()));
        assert_eq!((table.count_owned(&7), table.count_owned(&8)), (0, 1));
        table.renew(1, at(5));
        table.renew(9, at(1));
        assert_eq!((table.expire(at(4)).len(), table.next_expiry()), (0, Some(at(5))));
        table.hand_to(1, 9);
        table.hand_to(5, 9);
        assert!(table.end_owner(&8).is_empty());
        assert_eq!(table.expire(at(5)).len(), 1);
        assert!(table.end_owner(&9).is_empty());
        assert_eq!((table.len(), table.next_expiry()), (0, None));
        assert!(table.expiries.is_empty() && table.owned.is_empty());
    }
}
