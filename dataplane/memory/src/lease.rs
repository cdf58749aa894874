//! References held for somebody else, with an owner and an expiry.
//!
//! When a peer asks for blocks, the slots must stay put until it has them; when the peer dies or goes quiet,
//! they must not stay forever. A lease therefore ends in one of three ways: it is released, its owner is
//! gone ([`LeaseTable::end_owner`]), or its time is up ([`LeaseTable::expire`]). Time arrives as an argument.
//!
//! Used by one thread; not a hot path (one operation per transfer, not per block).

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Instant;

/// What is held, for whom, until when.
#[derive(Debug)]
pub struct Lease<Owner, Held> {
    /// Who asked for it.
    pub owner: Owner,
    /// When it ends by itself.
    pub expires_at: Instant,
    /// What it keeps alive: slot references, usually.
    pub held: Held,
}

/// The table is full; the lease comes back.
#[derive(Debug)]
pub struct LeaseFull<Owner, Held>(pub Lease<Owner, Held>);

/// Leases by id, at most `capacity` of them.
#[derive(Debug)]
pub struct LeaseTable<Id, Owner, Held> {
    leases: HashMap<Id, Lease<Owner, Held>>,
    capacity: usize,
}

impl<Id: Hash + Eq + Copy, Owner: PartialEq, Held> LeaseTable<Id, Owner, Held> {
    /// An empty table for at most `capacity` leases.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { leases: HashMap::with_capacity(capacity), capacity }
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
        Ok(self.leases.insert(id, lease))
    }

    /// The lease under `id`, to look at.
    #[must_use]
    pub fn get(&self, id: Id) -> Option<&Lease<Owner, Held>> {
        self.leases.get(&id)
    }

    /// The lease under `id`.
    pub fn get_mut(&mut self, id: Id) -> Option<&mut Lease<Owner, Held>> {
        self.leases.get_mut(&id)
    }

    /// Ends one lease.
    pub fn release(&mut self, id: Id) -> Option<Lease<Owner, Held>> {
        self.leases.remove(&id)
    }

    /// Ends every lease whose time is up at `now`.
    pub fn expire(&mut self, now: Instant) -> Vec<(Id, Lease<Owner, Held>)> {
        self.leases.extract_if(|_, lease| lease.expires_at <= now).collect()
    }

    /// Ends every lease of an owner that is gone.
    pub fn end_owner(&mut self, owner: &Owner) -> Vec<(Id, Lease<Owner, Held>)> {
        self.leases.extract_if(|_, lease| lease.owner == *owner).collect()
    }

    /// Number of leases of one owner.
    #[must_use]
    pub fn count_owned(&self, owner: &Owner) -> usize {
        self.leases.values().filter(|lease| lease.owner == *owner).count()
    }

    /// What the leases of one owner hold.
    pub fn owned<'table>(&'table self, owner: &'table Owner) -> impl Iterator<Item = &'table Held> {
        self.leases.values().filter(move |lease| lease.owner == *owner).map(|lease| &lease.held)
    }

    /// Number of leases out.
    #[must_use]
    pub fn len(&self) -> usize {
        self.leases.len()
    }

    /// Whether none is out.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    /// When the next lease ends by itself.
    #[must_use]
    pub fn next_expiry(&self) -> Option<Instant> {
        self.leases.values().map(|lease| lease.expires_at).min()
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
        assert_eq!((table.count_owned(&7), table.owned(&7).count(), table.owned(&9).count()), (2, 2, 0));
        assert_eq!(table.expire(start).len(), 1);
        assert_eq!(table.end_owner(&7).len(), 1);
        assert!(table.release(3).is_some());
        assert!(table.is_empty());
    }
}
