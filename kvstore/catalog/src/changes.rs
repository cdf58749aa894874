//! Changes: any thread; one short lock per call and tier, held for the batch and for nothing else.

use std::ops::ControlFlow;
use std::sync::Arc;

use kvstore_block::BlockIdentity;

use crate::catalog::{Catalog, Outcome, Registration, TierUsage};
use crate::config::{TenantId, TierIndex};
use crate::error::CatalogError;
use crate::index::hash_halves;
use crate::lease::Lease;
use crate::record::{Record, State, halves};
use crate::states::{Evicted, Evicting, Registered, Reserved};
use crate::sync::Ordering;
use crate::tier::{Contents, LockedTier, Refusal};

impl Catalog {
    /// Reserves up to `count` slots for the tenant, appends them and returns their number. Evicts blocks if
    /// needed and appends them to `evicted`: blocks of the tenant when it has its quota, otherwise by the
    /// policy. Gives fewer when everything else is in use.
    pub fn reserve(
        &self,
        tier: TierIndex,
        count: usize,
        tenant: TenantId,
        evicted: &mut Vec<Evicted>,
        reserved: &mut Vec<Reserved>,
    ) -> usize {
        let Some(mut locked) = self.lock(tier) else { return 0 };
        let account = locked.account_of(tenant);
        let mut note = |identity, slot| evicted.push(Evicted { identity, tier, slot });
        for given in 0..count {
            let Some(slot) = locked.reserve(account, &mut note) else { return given };
            reserved.push(Reserved(self.claim(tier.0, slot)));
        }
        count
    }

    /// Reserves a slot that nothing uses, if there is one within the tenant's quota; evicts nothing.
    pub fn reserve_free(&self, tier: TierIndex, tenant: TenantId) -> Option<Reserved> {
        let mut locked = self.lock(tier)?;
        let account = locked.account_of(tenant);
        let slot = locked.has_room(account).then(|| locked.reserve(account, &mut |_, _| ())).flatten()?;
        Some(Reserved(self.claim(tier.0, slot)))
    }

    /// Registers a batch, which is left empty. Parents come before their children.
    pub fn register(&self, batch: &mut Vec<Registration>) -> Outcome {
        let mut outcome = Outcome::default();
        batch.iter().for_each(|block| self.shared.index.warm(hash_halves(halves(&block.identity))));
        let mut locked: Option<LockedTier<'_>> = None;
        for Registration { complete, identity, parent, recompute_seconds } in batch.drain(..) {
            let (shared, tier) = complete.home();
            if !Arc::ptr_eq(&self.shared, shared) {
                // Another catalog's slot is registered there.
                locked = None;
                match complete.register(identity, parent, recompute_seconds) {
                    Registered::New => outcome.new += 1,
                    Registered::Present => outcome.present += 1,
                }
                continue;
            }
            if locked.as_ref().is_none_or(|locked| locked.tier.number != tier) {
                // The old lock goes before the new one is taken.
                drop(locked.take());
            }
            let locked = locked.get_or_insert_with(|| self.shared.lock(tier));
            let (slot, checksum, bytes) = complete.into_parts();
            match locked.register(slot, &Contents { identity, parent, checksum, bytes, recompute_seconds }) {
                Ok(()) => outcome.new += 1,
                Err(_) => outcome.present += 1,
            }
        }
        outcome
    }

    /// Takes up to `count` blocks out of look-up for eviction, leaves before their parents, appends them and
    /// returns how many. Finish them in this order: a parent whose child was put back stays.
    pub fn evict(&self, tier: TierIndex, count: usize, evicting: &mut Vec<Evicting>) -> usize {
        let Some(mut locked) = self.lock(tier) else { return 0 };
        for given in 0..count {
            let Some(slot) = locked.take_next() else { return given };
            evicting.push(Evicting(self.claim(tier.0, slot)));
        }
        count
    }

    /// Whether a slot could be reserved for the tenant without evicting a block.
    #[must_use]
    pub fn has_room(&self, tier: TierIndex, tenant: TenantId) -> bool {
        self.lock(tier).is_some_and(|mut locked| {
            let account = locked.account_of(tenant);
            locked.has_room(account)
        })
    }

    /// Like [`Catalog::evict`], with the blocks that would have to go for this tenant: its own when it has its quota.
    pub fn evict_for(
        &self,
        tier: TierIndex,
        tenant: TenantId,
        count: usize,
        evicting: &mut Vec<Evicting>,
    ) -> usize {
        let Some(mut locked) = self.lock(tier) else { return 0 };
        let account = locked.account_of(tenant);
        for given in 0..count {
            let Some(slot) = locked.take_for(account) else { return given };
            evicting.push(Evicting(self.claim(tier.0, slot)));
        }
        count
    }

    /// Finishes evictions under one lock, in order; returns how many slots became free.
    pub fn finish(&self, evicting: &mut Vec<Evicting>) -> usize {
        let mut freed = 0;
        evicting.iter().for_each(|block| self.shared.index.warm(hash_halves(halves(&block.identity()))));
        let mut locked: Option<LockedTier<'_>> = None;
        for block in evicting.drain(..) {
            let (shared, tier) = block.0.home();
            if !Arc::ptr_eq(&self.shared, shared) {
                locked = None;
                freed += usize::from(block.finish());
                continue;
            }
            if locked.as_ref().is_none_or(|locked| locked.tier.number != tier) {
                drop(locked.take());
            }
            let locked = locked.get_or_insert_with(|| self.shared.lock(tier));
            freed += usize::from(locked.finish(block.0.into_slot()));
        }
        freed
    }

    /// Registers the block that a slot has held since before this process, as after a warm restart, in any
    /// order.
    pub fn adopt(
        &self,
        tier: TierIndex,
        slot: u32,
        block: Contents,
        tenant: TenantId,
    ) -> Result<(), CatalogError> {
        let mut locked = self.lock(tier).ok_or(CatalogError::UnknownTier(tier.0))?;
        let tier = tier.0;
        if slot as usize >= locked.tier.records.len() {
            return Err(CatalogError::UnknownSlot { tier, slot });
        }
        let account = locked.account_of(tenant);
        locked.reserve_at(slot, account).map_err(|refusal| match refusal {
            Refusal::Taken => CatalogError::SlotTaken { tier, slot },
            Refusal::Quota => CatalogError::Quota { tier, tenant: tenant.0 },
        })?;
        locked.register(slot, &block).map_err(|present| CatalogError::Duplicate { tier, slot, present })
    }

    /// Takes a damaged block out of look-up at once. Its slot is freed now, or when the last lease ends.
    pub fn remove(&self, tier: TierIndex, identity: &BlockIdentity) -> bool {
        let Some(mut locked) = self.lock(tier) else { return false };
        let identity = halves(identity);
        let (of, index) = (locked.tier, locked.index);
        let here = |&slot: &u32| {
            let record = &of.records[slot as usize];
            matches!(record.state(), State::Registered | State::Evicting) && record.halves() == identity
        };
        let mut removed = false;
        // A block on its way out may have come in anew: both go.
        while let Some(slot) = index.visit(hash_halves(identity), |number, slot| {
            let found = number == of.number && here(&slot);
            if found { ControlFlow::Break(slot) } else { ControlFlow::Continue(()) }
        }) {
            locked.remove(slot);
            removed = true;
        }
        removed
    }

    /// Removes every block of a tier; returns their number. Slots in use are freed when their last lease
    /// ends.
    pub fn clear(&self, tier: TierIndex) -> usize {
        let Some(mut locked) = self.lock(tier) else { return 0 };
        let is_block = |record: &Record| matches!(record.state(), State::Registered | State::Evicting);
        let of = locked.tier;
        let mut removed = 0;
        for slot in (0..of.records.len() as u32).filter(|&slot| is_block(&of.records[slot as usize])) {
            locked.remove(slot);
            removed += 1;
        }
        removed
    }

    /// Moves a tier's clock on by a tick: uses from now on count as more recent. It ticks by itself 64 times
    /// per turnover; a tier that is only read needs this call now and then.
    pub fn advance_clock(&self, tier: TierIndex) {
        if let Some(mut locked) = self.lock(tier) {
            locked.advance_clock();
        }
    }

    /// A tier in numbers, for metrics.
    #[must_use]
    pub fn usage(&self, tier: TierIndex) -> Option<TierUsage> {
        let locked = self.lock(tier)?;
        let candidates = locked.changes.candidates;
        Some(TierUsage {
            slots: locked.tier.records.len() as u32,
            free: locked.changes.free.len,
            blocks: locked.changes.blocks,
            candidates,
            evicted_total: locked.changes.evicted_total,
            registered_total: locked.changes.registered_total,
        })
    }

    /// Tenant whose quota a leased block counts against; `None`: the account is shared.
    #[must_use]
    pub fn tenant_of(&self, lease: &Lease) -> Option<TenantId> {
        self.lock(lease.tier())?.tenant_of(lease.slot())
    }

    /// Slots that a tenant with a quota has in a tier; 0 for one without.
    #[must_use]
    pub fn tenant_slots(&self, tier: TierIndex, tenant: TenantId) -> u32 {
        self.lock(tier)
            .map_or(0, |locked| locked.changes.tenants.find(tenant).map_or(0, |account| account.used))
    }

    /// The tier's clock, in ticks.
    #[must_use]
    pub fn clock(&self, tier: TierIndex) -> u32 {
        self.tier(tier).map_or(0, |tier| tier.clock.load(Ordering::Relaxed))
    }
}
