//! One tier: its records, and under one lock its free list, candidates, accounts and policy.
//!
//! Changes run under the lock, which is held for a batch of blocks and never while anything is copied, written or
//! waited for. Readers never take it. A slot that its last reader hands back lies on `returns` until the next
//! change takes it in.

use std::ops::ControlFlow;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvstore_block::BlockIdentity;

use crate::config::{CatalogConfig, PolicyKind, SlotOrder, TenantId};
use crate::index::{Index, hash_halves};
use crate::list::{List, NONE, Node, ORDER, Place};
use crate::orphans::Orphans;
use crate::policy::{self, End, Policy, PolicyContext};
use crate::record::{Record, State, TakeOutcome, halves};
use crate::returns::Returns;
use crate::sketch::FrequencySketch;
use crate::sync::{AtomicU32, Ordering};
use crate::tenants::Tenants;

/// The clock ticks this often while as many blocks are registered as there are slots.
const TICKS_PER_TURNOVER: u32 = 64;

#[derive(Debug)]
pub(crate) struct Tier {
    pub(crate) number: u8,
    pub(crate) records: Box<[Record]>,
    pub(crate) returns: Returns,
    /// Ticks; readers stamp what they use with it. Relaxed: a stamp that is a tick old is still right enough.
    pub(crate) clock: AtomicU32,
    pub(crate) sketch: Option<FrequencySketch>,
    pub(crate) policy_kind: PolicyKind,
    changes: Mutex<Changes>,
}

/// State that the lock protects.
#[derive(Debug)]
pub(crate) struct Changes {
    pub(crate) nodes: Box<[Node]>,
    pub(crate) free: List<ORDER>,
    pub(crate) tenants: Tenants,
    pub(crate) policy: Box<dyn Policy>,
    order: SlotOrder,
    /// Registrations until the clock's next tick.
    until_tick: u32,
    /// The block registered last, which is the parent of the next one more often than not.
    last: u32,
    /// Registered blocks whose parents are not.
    pub(crate) orphans: Orphans,
    /// Blocks that the policy can pick.
    pub(crate) candidates: u32,
    pub(crate) evicted_total: u64,
    pub(crate) registered_total: u64,
    /// Blocks that can be found or are being evicted.
    pub(crate) blocks: u32,
}

/// A tier with its lock taken.
pub(crate) struct LockedTier<'a> {
    pub(crate) tier: &'a Tier,
    pub(crate) index: &'a Index,
    pub(crate) changes: MutexGuard<'a, Changes>,
    /// The block registered last, while it waits for the next one to be its child: in a chain all but the leaf
    /// need not become candidates first.
    fresh: u32,
}

impl Drop for LockedTier<'_> {
    fn drop(&mut self) {
        self.link_fresh();
    }
}

/// Contents of a slot.
#[derive(Debug, Clone, Copy)]
pub struct Contents {
    /// Identity of the block.
    pub identity: BlockIdentity,
    /// The block before it in its chain.
    pub parent: Option<BlockIdentity>,
    /// Checksum of the block's bytes.
    pub checksum: u64,
    /// Length of the block in bytes.
    pub bytes: u32,
    /// Seconds to compute the block again.
    pub recompute_seconds: f32,
}

impl Tier {
    pub(crate) fn new(number: u8, config: &CatalogConfig) -> Self {
        let tier = config.tiers[usize::from(number)];
        let mut nodes = vec![Node::EMPTY; tier.slots as usize].into_boxed_slice();
        let mut free = List::EMPTY;
        // Low slots first, in either order of reuse.
        match tier.order {
            SlotOrder::LastFreed => (0..tier.slots).rev().for_each(|slot| free.push_newest(&mut nodes, slot)),
            SlotOrder::FirstFreed => (0..tier.slots).for_each(|slot| free.push_newest(&mut nodes, slot)),
        }
        let quotas = config.quotas.iter().filter(|quota| quota.tier.0 == number);
        let quotas = quotas.map(|quota| (quota.tenant, quota.slots));
        Self {
            number,
            records: (0..tier.slots).map(|_| Record::default()).collect(),
            returns: Returns::default(),
            clock: AtomicU32::new(0),
            sketch: (tier.policy == PolicyKind::Cost).then(|| FrequencySketch::new(tier.slots)),
            policy_kind: tier.policy,
            changes: Mutex::new(Changes {
                nodes,
                free,
                tenants: Tenants::new(tier.default_quota, config.tenants_max, quotas),
                policy: policy::create(tier.policy, tier.slots, config.seed),
                order: tier.order,
                until_tick: (tier.slots / TICKS_PER_TURNOVER).max(1),
                last: NONE,
                orphans: Orphans::new(tier.slots as usize),
                candidates: 0,
                evicted_total: 0,
                registered_total: 0,
                blocks: 0,
            }),
        }
    }

    /// The slot that the index and its record name for the block.
    pub(crate) fn find(&self, index: &Index, hash: u64, identity: [u64; 2]) -> Option<u32> {
        index.visit(hash, |tier, slot| {
            let here = tier == self.number && self.records[slot as usize].holds(identity);
            if here { ControlFlow::Break(slot) } else { ControlFlow::Continue(()) }
        })
    }

    /// Notes a use of a registered block.
    pub(crate) fn touch(&self, slot: u32, hash: u64) {
        self.records[slot as usize].touch(self.clock.load(Ordering::Relaxed));
        if let Some(sketch) = &self.sketch {
            sketch.increment_hash(hash);
        }
    }

    pub(crate) fn lock<'a>(&'a self, index: &'a Index) -> LockedTier<'a> {
        // A panic under the lock is a bug that the process has reported already; readers go on regardless.
        let changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut locked = LockedTier { tier: self, index, changes, fresh: NONE };
        locked.take_returned();
        locked
    }
}

impl<'a> LockedTier<'a> {
    fn with_policy<T>(&mut self, work: impl FnOnce(&mut dyn Policy, &mut PolicyContext<'_>) -> T) -> T {
        let changes = &mut *self.changes;
        let mut field = PolicyContext {
            nodes: &mut changes.nodes,
            records: &self.tier.records,
            sketch: self.tier.sketch.as_ref(),
            clock: self.tier.clock.load(Ordering::Relaxed),
        };
        work(&mut *changes.policy, &mut field)
    }

    fn node(&mut self, slot: u32) -> &mut Node {
        &mut self.changes.nodes[slot as usize]
    }

    fn record(&self, slot: u32) -> &'a Record {
        &self.tier.records[slot as usize]
    }

    /// Makes the slot a candidate if it is registered, has no registered child, and is neither a candidate
    /// nor parked.
    fn link(&mut self, slot: u32, end: End) {
        let node = self.changes.nodes[slot as usize];
        if node.place != Place::Away || node.children > 0 || self.record(slot).state() != State::Registered {
            return;
        }
        self.node(slot).place = Place::Candidate;
        self.changes.candidates += 1;
        self.with_policy(|policy, field| policy.link(field, slot, end));
        let changes = &mut *self.changes;
        let account = &mut changes.tenants.accounts[usize::from(node.account)];
        if account.is_limited() {
            match end {
                End::Oldest => account.own.push_oldest(&mut changes.nodes, slot),
                End::Newest => account.own.push_newest(&mut changes.nodes, slot),
            }
        }
    }

    fn unlink(&mut self, slot: u32, place: Place) {
        if std::mem::replace(&mut self.node(slot).place, place) != Place::Candidate {
            return;
        }
        self.changes.candidates -= 1;
        self.with_policy(|policy, field| policy.unlink(field, slot));
        let changes = &mut *self.changes;
        let account = usize::from(changes.nodes[slot as usize].account);
        let account = &mut changes.tenants.accounts[account];
        if account.is_limited() {
            account.own.remove(&mut changes.nodes, slot);
        }
    }

    /// Hangs the slot on its parent, which is no candidate from now on.
    fn attach(&mut self, slot: u32) {
        let Node { parent, parent_generation, is_cut, .. } = *self.node(slot);
        if is_cut {
            return;
        }
        let known = (parent != NONE && self.is_parent(parent, parent_generation)).then_some(parent);
        // The parent that it had may be in another slot by now.
        let identity = self.record(slot).parent();
        let found = known.or_else(|| self.find_parent(&identity?).filter(|&parent| parent != slot));
        let Some(parent) = found else {
            self.node(slot).parent = NONE;
            if let Some(identity) = identity {
                let changes = &mut *self.changes;
                changes.orphans.add(&mut changes.nodes, slot, halves(&identity));
            }
            return;
        };
        if self.is_above(slot, parent) {
            return self.cut(slot);
        }
        let parent_generation = self.record(parent).generation();
        let node = self.node(slot);
        (node.parent, node.parent_generation) = (parent, parent_generation);
        self.node(parent).children += 1;
        if self.node(parent).place == Place::Candidate {
            self.unlink(parent, Place::Away);
        }
    }

    /// Takes the slot off its parent, which may be a candidate from now on.
    fn detach(&mut self, slot: u32) {
        let Node { parent, parent_generation, is_cut, .. } = *self.node(slot);
        if is_cut {
            return;
        }
        if parent == NONE {
            if let Some(identity) = self.record(slot).parent() {
                let changes = &mut *self.changes;
                changes.orphans.remove(&mut changes.nodes, slot, halves(&identity));
            }
        } else if self.is_parent(parent, parent_generation) {
            self.node(parent).children -= 1;
            self.link(parent, End::Oldest);
        }
    }

    /// Hangs the blocks that wait for this one on it.
    fn adopt_orphans(&mut self, slot: u32) {
        if self.changes.orphans.is_empty() {
            return;
        }
        let identity = self.record(slot).halves();
        loop {
            let (records, changes) = (&self.tier.records, &mut *self.changes);
            let waits = |&orphan: &u32| {
                let parent = records[orphan as usize].parent();
                orphan != slot && parent.is_some_and(|parent| halves(&parent) == identity)
            };
            let Some(orphan) = changes.orphans.candidates(&changes.nodes, identity).find(waits) else {
                return;
            };
            changes.orphans.remove(&mut changes.nodes, orphan, identity);
            self.attach(orphan);
        }
    }

    /// Whether the block in `upper` is an ancestor of the one in `lower`.
    fn is_above(&self, upper: u32, lower: u32) -> bool {
        if self.changes.nodes[upper as usize].children == 0 {
            return false;
        }
        let mut at = lower;
        loop {
            let Node { parent, parent_generation, .. } = self.changes.nodes[at as usize];
            if parent == NONE || !self.is_parent(parent, parent_generation) {
                return false;
            }
            // The parent of a block that is being evicted may be an old one: it is looked up when the block
            // is put back.
            if self.record(at).state() != State::Registered {
                return false;
            }
            if parent == upper {
                return true;
            }
            at = parent;
        }
    }

    /// Makes a block a root that its caller put behind one of its own descendants: in a circle no block could
    /// be evicted.
    fn cut(&mut self, slot: u32) {
        let node = self.node(slot);
        (node.parent, node.parent_generation, node.is_cut) = (NONE, 0, true);
    }

    fn is_parent(&self, slot: u32, generation: u32) -> bool {
        let record = self.record(slot);
        matches!(record.state(), State::Registered | State::Evicting) && record.generation() == generation
    }

    fn take_returned(&mut self) {
        let mut next = self.tier.returns.take();
        while let Some(slot) = next {
            next = Returns::below(&self.tier.records, slot);
            self.node(slot).place = Place::Away;
            match self.record(slot).state() {
                State::Registered => self.link(slot, End::Newest),
                State::PendingFree if self.record(slot).park() => self.node(slot).place = Place::Parked,
                State::PendingFree => self.free(slot),
                State::Free | State::Reserved | State::Evicting => {}
            }
        }
    }

    /// Puts a slot without users on the free list.
    pub(crate) fn free(&mut self, slot: u32) {
        self.record(slot).free();
        let changes = &mut *self.changes;
        let account = usize::from(changes.nodes[slot as usize].account);
        changes.tenants.accounts[account].used -= 1;
        changes.nodes[slot as usize] = Node::EMPTY;
        changes.free.push_newest(&mut changes.nodes, slot);
    }

    fn reserve_free(&mut self, slot: u32, account: u16) {
        let changes = &mut *self.changes;
        changes.free.remove(&mut changes.nodes, slot);
        changes.tenants.accounts[usize::from(account)].used += 1;
        changes.nodes[slot as usize].account = account;
        self.record(slot).reserve();
    }

    /// Whether the tenant could have a slot without an eviction.
    pub(crate) fn has_room(&self, account: u16) -> bool {
        self.changes.free.len > 0 && !self.has_quota_used(account)
    }

    /// Takes the block that would have to go for this tenant: `Registered` → `Evicting`.
    pub(crate) fn take_for(&mut self, account: u16) -> Option<u32> {
        if self.has_quota_used(account) { self.take_own(account) } else { self.take_next() }
    }

    /// Reserves one slot for the tenant; evicts if need be.
    pub(crate) fn reserve(
        &mut self,
        account: u16,
        evicted: &mut impl FnMut(BlockIdentity, u32),
    ) -> Option<u32> {
        if !self.has_room(account) {
            let slot = self.take_for(account)?;
            evicted(self.record(slot).identity(), slot);
            self.finish(slot);
        }
        let slot = match self.changes.order {
            SlotOrder::LastFreed => self.changes.free.newest,
            SlotOrder::FirstFreed => self.changes.free.oldest,
        };
        self.reserve_free(slot, account);
        Some(slot)
    }

    pub(crate) fn account_of(&mut self, tenant: TenantId) -> u16 {
        self.changes.tenants.account(tenant)
    }

    /// Tenant whose quota the slot counts against; `None`: the account is shared.
    pub(crate) fn tenant_of(&self, slot: u32) -> Option<TenantId> {
        let account = self.changes.nodes[slot as usize].account;
        self.changes.tenants.accounts[usize::from(account)].tenant
    }

    fn has_quota_used(&self, account: u16) -> bool {
        let account = &self.changes.tenants.accounts[usize::from(account)];
        account.used >= account.quota
    }

    /// Reserves a certain slot. `false`: it is not free, or the tenant has its quota.
    pub(crate) fn reserve_at(&mut self, slot: u32, account: u16) -> Result<(), Refusal> {
        if self.record(slot).state() != State::Free {
            return Err(Refusal::Taken);
        }
        if self.has_quota_used(account) {
            return Err(Refusal::Quota);
        }
        self.reserve_free(slot, account);
        Ok(())
    }

    /// Takes the policy's next victim: `Registered` → `Evicting`.
    pub(crate) fn take_next(&mut self) -> Option<u32> {
        loop {
            let slot = self.with_policy(|policy, field| policy.next(field))?;
            if self.take(slot) {
                return Some(slot);
            }
        }
    }

    /// Takes a block of this account's own, by CLOCK.
    fn take_own(&mut self, account: u16) -> Option<u32> {
        let own = self.changes.tenants.accounts[usize::from(account)].own;
        let mut rounds = u64::from(own.len) * u64::from(crate::record::USES_MAX);
        loop {
            let changes = &mut *self.changes;
            let own = &mut changes.tenants.accounts[usize::from(account)].own;
            let slot = Some(own.oldest).filter(|&slot| slot != NONE)?;
            let record = &self.tier.records[slot as usize];
            if record.uses() > 0 && rounds > 0 {
                rounds -= 1;
                record.set_uses(record.uses().saturating_sub(1));
                own.remove(&mut changes.nodes, slot);
                own.push_newest(&mut changes.nodes, slot);
            } else if self.take(slot) {
                return Some(slot);
            }
        }
    }

    fn take(&mut self, slot: u32) -> bool {
        match self.record(slot).take() {
            TakeOutcome::Taken => {
                self.unlink(slot, Place::Away);
                self.detach(slot);
                true
            }
            TakeOutcome::Pinned => {
                self.unlink(slot, Place::Parked);
                false
            }
            TakeOutcome::Gone => {
                self.unlink(slot, Place::Away);
                false
            }
        }
    }

    fn unindex(&mut self, hash: u64, slot: u32) {
        self.index.remove(hash, self.tier.number, slot);
        self.changes.blocks -= 1;
    }

    /// Ends an eviction: the slot becomes free. `false`: a child of the block was put back, so the block
    /// stays.
    pub(crate) fn finish(&mut self, slot: u32) -> bool {
        if self.record(slot).state() == State::PendingFree {
            self.free(slot);
            return true;
        }
        if self.node(slot).children > 0 {
            self.put_back(slot);
            return false;
        }
        let hash = hash_halves(self.record(slot).halves());
        self.unindex(hash, slot);
        self.with_policy(|policy, field| policy.leave(field, slot, true));
        self.changes.evicted_total += 1;
        self.free(slot);
        true
    }

    /// Takes in the slot of a state that was dropped on its way.
    pub(crate) fn give_back(&mut self, slot: u32) {
        match self.record(slot).state() {
            State::Reserved => self.free(slot),
            _ => self.put_back(slot),
        }
    }

    /// Ends an eviction the other way: the block is registered again.
    pub(crate) fn put_back(&mut self, slot: u32) {
        let identity = self.record(slot).halves();
        let hash = hash_halves(identity);
        let is_pending_free = self.record(slot).state() == State::PendingFree;
        if is_pending_free || self.tier.find(self.index, hash, identity).is_some() {
            // The block was removed, or registered in another slot, during its eviction.
            if !is_pending_free {
                self.unindex(hash, slot);
                self.with_policy(|policy, field| policy.leave(field, slot, false));
            }
            self.free(slot);
            return;
        }
        self.record(slot).restore();
        self.attach(slot);
        self.adopt_orphans(slot);
        self.link(slot, End::Newest);
    }

    /// Registers the block of a reserved slot. `Err`: the block is in that other slot already; this one is
    /// free again.
    pub(crate) fn register(&mut self, slot: u32, entry: &Contents) -> Result<(), u32> {
        let identity = halves(&entry.identity);
        let hash = hash_halves(identity);
        if let Some(present) = self.tier.find(self.index, hash, identity) {
            self.free(slot);
            return Err(present);
        }
        let parent = entry.parent.and_then(|parent| self.find_parent(&parent)).unwrap_or(NONE);
        if parent != self.fresh {
            self.link_fresh();
        }
        let parent_generation = if parent == NONE { 0 } else { self.record(parent).generation() };
        let node = self.node(slot);
        node.parent = parent;
        node.parent_generation = parent_generation;
        node.children = 0;
        node.is_cut = false;
        node.density = entry.recompute_seconds / entry.bytes.max(1) as f32;
        self.tick();
        let clock = self.tier.clock.load(Ordering::Relaxed);
        let record = self.record(slot);
        record.publish(&entry.identity, entry.parent.as_ref(), entry.checksum, entry.bytes, clock);
        let inserted = self.index.insert(hash, self.tier.number, slot);
        debug_assert!(inserted, "the index has room for every slot");
        if let Some(sketch) = &self.tier.sketch {
            sketch.increment_hash(hash);
            sketch.advance(1);
        }
        self.with_policy(|policy, field| policy.register(field, slot));
        self.attach(slot);
        self.adopt_orphans(slot);
        self.fresh = slot;
        self.changes.registered_total += 1;
        self.changes.blocks += 1;
        self.changes.last = slot;
        Ok(())
    }

    fn link_fresh(&mut self) {
        match std::mem::replace(&mut self.fresh, NONE) {
            NONE => {}
            fresh => self.link(fresh, End::Newest),
        }
    }

    fn find_parent(&self, parent: &BlockIdentity) -> Option<u32> {
        let identity = halves(parent);
        let last = self.changes.last;
        if last != NONE && self.record(last).holds(identity) {
            return Some(last);
        }
        self.tier.find(self.index, hash_halves(identity), identity)
    }

    fn tick(&mut self) {
        self.changes.until_tick -= 1;
        if self.changes.until_tick == 0 {
            self.advance_clock();
        }
    }

    pub(crate) fn advance_clock(&mut self) {
        self.changes.until_tick = (self.tier.records.len() as u32 / TICKS_PER_TURNOVER).max(1);
        self.tier.clock.fetch_add(1, Ordering::Relaxed);
        self.with_policy(|policy, field| policy.tick(field));
    }

    /// Takes a block out of look-up at once; its slot is freed when its last user ends.
    pub(crate) fn remove(&mut self, slot: u32) {
        let hash = hash_halves(self.record(slot).halves());
        match self.record(slot).state() {
            State::Registered => {
                self.unindex(hash, slot);
                let parked = self.node(slot).place == Place::Parked;
                self.unlink(slot, if parked { Place::Parked } else { Place::Away });
                self.detach(slot);
                self.with_policy(|policy, field| policy.leave(field, slot, false));
                if self.record(slot).remove(parked) {
                    self.free(slot);
                } else {
                    self.node(slot).place = Place::Parked;
                }
            }
            State::Evicting => {
                self.unindex(hash, slot);
                self.with_policy(|policy, field| policy.leave(field, slot, false));
                self.record(slot).remove_evicting();
            }
            State::Free | State::Reserved | State::PendingFree => {}
        }
    }
}

/// Reason for which a certain slot cannot be reserved.
pub(crate) enum Refusal {
    Taken,
    Quota,
}
