//! Tiers without threads, for tests that play every other part themselves.

use std::sync::Arc;
use std::time::Instant;

use crate::plan::{TIERS, Tier};
use crossbeam_channel::{Receiver, unbounded};
use dataplane_memory::PageSize;
use kvstore_block::BlockIdentity;
use kvstore_catalog::{Catalog, CatalogConfig, PolicyKind, TierConfig};

use super::Tiers;
use crate::bandwidth::Bandwidth;
use crate::config::StoreConfig;
use crate::job::StoreEvent;
use crate::memory::HostMemory;
use crate::shared::Shared;

/// Host memory of so many slots of so many bytes, and what is told of it.
pub(crate) fn host_tiers(
    slots: u32,
    block_bytes: usize,
    policy: PolicyKind,
) -> (Tiers, Receiver<StoreEvent>) {
    let memory = HostMemory::new(block_bytes, slots, PageSize::Standard, None).expect("memory");
    let catalog = Catalog::new(&CatalogConfig::new(vec![TierConfig::new(slots, policy)])).expect("a catalog");
    let config = StoreConfig::new(block_bytes, 16);
    let shared = Shared::new(Arc::new(catalog), Arc::new(memory), config, false, vec![Tier::Remote]);
    let bandwidth = Bandwidth::new([None; TIERS], Instant::now(), Instant::now);
    let (sender, moved) = unbounded();
    let notify = move |event| {
        let _over = sender.send(event);
    };
    (Tiers::new(Arc::new(shared), Box::new(notify), None, bandwidth), moved)
}

/// A chain that no other number has a block of.
pub(crate) fn numbered_chain(number: u64, blocks: u64) -> Vec<BlockIdentity> {
    let identity = |block: u64| {
        let mut identity = [0; 16];
        identity[..8].copy_from_slice(&number.to_le_bytes());
        identity[8..].copy_from_slice(&(block + 1).to_le_bytes());
        BlockIdentity(identity)
    };
    (0..blocks).map(identity).collect()
}
