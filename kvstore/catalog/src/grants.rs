//! Leases held for somebody outside: another node that reads the slots by itself.
//!
//! A grant ends when it is released, when its owner is gone, or when its time is up, whichever comes first; the
//! leases go with it. One thread's; time arrives as an argument.

use std::time::Instant;

use dataplane_memory::{Lease as Held, LeaseFull, LeaseTable};

use crate::lease::Lease;

/// Grants by id.
#[derive(Debug)]
pub struct LeaseGrants {
    table: LeaseTable<u64, u64, Vec<Lease>>,
    next: u64,
}

impl LeaseGrants {
    /// No grants; room for `capacity`.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { table: LeaseTable::new(capacity), next: 1 }
    }

    /// Holds leases for `owner` until `expiry`; returns the grant's id. Full: the leases come back.
    pub fn grant(&mut self, owner: u64, expiry: Instant, leases: Vec<Lease>) -> Result<u64, Vec<Lease>> {
        let id = self.next;
        match self.table.grant(id, Held { owner, expires_at: expiry, held: leases }) {
            Ok(_) => {
                self.next += 1;
                Ok(id)
            }
            Err(LeaseFull(lease)) => Err(lease.held),
        }
    }

    /// Ends one grant of this owner. `false`: there is none, or it is another's.
    pub fn release(&mut self, owner: u64, id: u64) -> bool {
        let is_own = self.table.get(id).is_some_and(|lease| lease.owner == owner);
        is_own && self.table.release(id).is_some()
    }

    /// Ends what is due at `now`; returns how many grants that were.
    pub fn expire(&mut self, now: Instant) -> usize {
        self.table.expire(now).len()
    }

    /// Ends all grants of an owner that is gone; returns how many.
    pub fn end_owner(&mut self, owner: u64) -> usize {
        self.table.end_owner(&owner).len()
    }

    /// Grants out.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether none is out.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// When the next grant is due.
    #[must_use]
    pub fn next_expiry(&self) -> Option<Instant> {
        self.table.next_expiry()
    }
}
