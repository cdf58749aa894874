//! Fixtures of the tests: numbered blocks, a catalog of one tier, a seeded generator.
#![allow(dead_code, reason = "each test file uses its part")]

use kvstore_block::BlockIdentity;
use kvstore_catalog::{
    Catalog, CatalogConfig, Contents, Evicted, PolicyKind, Registered, Reserved, TenantId, TierConfig,
    TierIndex,
};

pub(crate) const TIER: TierIndex = TierIndex(0);
pub(crate) const ANYBODY: TenantId = TenantId(0);

pub(crate) fn identity(number: u64) -> BlockIdentity {
    BlockIdentity(u128::from(number).to_le_bytes())
}

pub(crate) fn contents(block: u64, parent: Option<BlockIdentity>, checksum: u64, bytes: u32) -> Contents {
    Contents { identity: identity(block), parent, checksum, bytes, recompute_seconds: 1.0 }
}

pub(crate) fn number(identity: &BlockIdentity) -> u64 {
    u128::from_le_bytes(identity.0) as u64
}

pub(crate) fn catalog(policy: PolicyKind, slots: u32) -> Catalog {
    Catalog::new(&CatalogConfig::new(vec![TierConfig::new(slots, policy)])).expect("a valid configuration")
}

/// Reserves one slot; returns the blocks that were evicted for it too.
pub(crate) fn reserve(catalog: &Catalog, tenant: TenantId) -> (Option<Reserved>, Vec<Evicted>) {
    let (mut evicted, mut reserved) = (Vec::new(), Vec::new());
    catalog.reserve(TIER, 1, tenant, &mut evicted, &mut reserved);
    (reserved.pop(), evicted)
}

/// Stores one block; `None`: there was no slot.
pub(crate) fn store(
    catalog: &Catalog,
    tenant: TenantId,
    block: u64,
    parent: Option<u64>,
) -> Option<Registered> {
    let complete = reserve(catalog, tenant).0?.fill().complete(block, 64);
    Some(complete.register(identity(block), parent.map(identity), 1.0))
}

/// Stores a chain, root first.
pub(crate) fn store_chain(catalog: &Catalog, tenant: TenantId, chain: impl IntoIterator<Item = u64>) {
    let mut parent = None;
    for block in chain {
        assert_eq!(store(catalog, tenant, block, parent), Some(Registered::New));
        parent = Some(block);
    }
}

/// Evicts up to `count` blocks and returns their numbers, in order.
pub(crate) fn evict(catalog: &Catalog, count: usize) -> Vec<u64> {
    let mut evicting = Vec::new();
    catalog.evict(TIER, count, &mut evicting);
    let gone = evicting.iter().map(|block| number(&block.identity())).collect();
    assert_eq!(catalog.finish(&mut evicting), Vec::len(&gone));
    gone
}

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn draw(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((u128::from(mixed ^ (mixed >> 31)) * u128::from(bound)) >> 64) as u64
    }

    /// Evenly in 0 to 1.
    pub(crate) fn share(&mut self) -> f64 {
        self.draw(1 << 53) as f64 / (1_u64 << 53) as f64
    }
}
