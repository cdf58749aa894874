//! Blocks that come from other nodes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::unbounded;
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use kvstore_block::BlockIdentity;
use kvstore_catalog::PolicyKind;
use kvstore_store::far::Portion;
use kvstore_store::{
    BandwidthTier, FarInbox, FarResult, FarTier, HostTier, Incoming, Moved, Outgoing, Prepare, StoreBuilder,
    StoreConfig, TenantId,
};

use crate::rig::{BLOCK, PATIENCE, Rig, TOKENS, chain, contents};

/// Another node that has every block there is, and answers at once.
struct Elsewhere(FarInbox);

impl FarTier for Elsewhere {
    fn tier(&self) -> BandwidthTier {
        BandwidthTier::Remote
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    fn look_up(&mut self, request: u64, chain: &[BlockIdentity], first: usize, _deadline: Instant) -> bool {
        self.0.send(FarResult::Found { request, blocks: chain.len() - first });
        true
    }

    fn read(&mut self, incoming: Incoming) -> Result<(), Incoming> {
        for (identity, target) in incoming.chain[incoming.first..].iter().zip(&incoming.targets) {
            target.slab().write(target.slot(), 0, &contents(identity));
        }
        let bytes = vec![BLOCK as u32; incoming.targets.len()];
        self.0.send(FarResult::Arrived { incoming, bytes });
        Ok(())
    }

    fn leave(&mut self, _request: u64) {}

    fn portion(&self) -> Portion {
        Portion::Single { group: 1 }
    }

    fn offer(&mut self, _blocks: Vec<Outgoing>, _head: BlockIdentity) {}
}

fn beside_another_node(config: StoreConfig, host: HostTier) -> Rig {
    let layout = SlabLayout { slot_bytes: BLOCK, slot_count: 64 };
    let pool = SlotPool::new(Arc::new(Slab::create("pool", layout, PageSize::Standard).expect("slab")));
    let builder = StoreBuilder::new(config, host).expect("memory");
    let elsewhere = Elsewhere(builder.inbox());
    let (sender, moved) = unbounded();
    let notify = move |event| {
        let _over = sender.send(event);
    };
    let (store, survivors) = builder.other(Box::new(elsewhere)).start(notify).expect("threads");
    Rig { pool, store, moved, survivors, told: HashMap::new(), next_request: 0 }
}

/// Asks the other node for a chain; returns how many of its blocks are here then.
fn prepare(rig: &mut Rig, tenant: TenantId, chain: &[BlockIdentity]) -> usize {
    rig.next_request += 1;
    let (request, deadline) = (rig.next_request, Instant::now() + PATIENCE);
    let job = Prepare { request, chain: chain.to_vec(), device_blocks: 0, tenant, deadline };
    assert!(rig.store.prepare(job).is_ok());
    loop {
        match rig.next() {
            Moved::Prepared { request: answered, blocks } if answered == request => return blocks,
            _ => {}
        }
    }
}

#[test]
fn what_other_nodes_have_comes_as_it_was() {
    let host = HostTier { slots: 16, pages: PageSize::Standard, eviction: PolicyKind::Lru };
    let mut rig = beside_another_node(StoreConfig::new(BLOCK, TOKENS), host);
    let talk = chain(1, 6);
    assert_eq!(prepare(&mut rig, TenantId(0), &talk), 6);
    assert_eq!(rig.counter("far_read_blocks"), 6);
    assert_eq!(rig.onboard(&talk, PATIENCE), 6);
    rig.events_are_true(&talk);
    assert_eq!(rig.store.leased_slots(), 0);
}

/// A tenant that asks other nodes for much evicts its own blocks, and leaves those of others alone.
#[test]
fn what_other_nodes_give_counts_for_the_tenant_that_asked() {
    let host = HostTier { slots: 16, pages: PageSize::Standard, eviction: PolicyKind::Lru };
    let config = StoreConfig { tenant_share: 0.25, ..StoreConfig::new(BLOCK, TOKENS) };
    let mut rig = beside_another_node(config, host);
    let quiet = chain(1, 4);
    (0..4).for_each(|position| rig.offload_for(TenantId(7), &quiet, position));
    let loud: Vec<Vec<BlockIdentity>> = (10..20).map(|seed| chain(seed, 4)).collect();
    for chain in &loud {
        assert_eq!(prepare(&mut rig, TenantId(8), chain), 4);
    }
    assert!(quiet.iter().all(|identity| rig.store.is_on_host(identity)), "nobody else's blocks go");
    let kept = loud.iter().flatten().filter(|identity| rig.store.is_on_host(identity)).count();
    assert_eq!(kept, 4, "a quarter of 16 slots");
}

/// Each block that comes from there counts with what its own place in the prompt would cost, not with that of the first.
#[test]
fn blocks_from_other_nodes_cost_what_their_places_do() {
    let host = HostTier { slots: 12, pages: PageSize::Standard, eviction: PolicyKind::Cost };
    let mut rig = beside_another_node(StoreConfig::new(BLOCK, TOKENS), host);
    let far = chain(1, 6);
    assert_eq!(prepare(&mut rig, TenantId(0), &far), 6);
    // Younger, but none of them stands as far back as the last of the others.
    let near = [chain(2, 3), chain(3, 3)];
    near.iter().for_each(|talk| (0..3).for_each(|position| rig.offload(talk, position)));
    rig.offload(&chain(4, 1), 0);
    assert!(far.iter().all(|identity| rig.store.is_on_host(identity)), "the last of them costs most");
    assert!(!rig.store.is_on_host(&near[0][2]));
}
