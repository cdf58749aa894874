//! Blocks that come from other nodes.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, unbounded};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use kvstore_block::BlockIdentity;
use kvstore_catalog::PolicyKind;
use kvstore_io::faulty::Faults;
use kvstore_io::testing::MemoryFiles;
use kvstore_store::far::OfferBatch;
use kvstore_store::{
    BandwidthLimit, BandwidthTier, Delivered, DeliveredSum, Description, FetchRequest, HostTier,
    OfferedBlock, Plan, Prepare, Prompt, PromptGroup, RemoteCoverage, ReturnConfig, SecondaryTier,
    SecondaryTierEvent, SecondaryTierInbox, StoreBuilder, StoreConfig, StoreEvent, TenantId, WriteMode,
};
use xxhash_rust::xxh3::xxh3_64;

use crate::background::wait_for;
use crate::rig::{BLOCK, PATIENCE, Rig, TOKENS, chain, contents, files, open_disk, with_disk};

/// Another node that has every block there is, answers at once, and counts how often it is asked.
struct Elsewhere {
    inbox: SecondaryTierInbox,
    asked: Arc<AtomicUsize>,
}

impl SecondaryTier for Elsewhere {
    fn tier(&self) -> BandwidthTier {
        BandwidthTier::Remote
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    fn look_up(&mut self, request: u64, chain: &[BlockIdentity], first: usize, _deadline: Instant) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.inbox.send(SecondaryTierEvent::Found { request, blocks: chain.len() - first });
        true
    }

    fn read(&mut self, incoming: FetchRequest) -> Result<(), FetchRequest> {
        for (identity, target) in incoming.chain[incoming.first..].iter().zip(&incoming.targets) {
            target.slab().write(target.slot(), 0, &contents(identity));
        }
        let delivered = |identity: &BlockIdentity| Delivered {
            bytes: BLOCK as u32,
            sum: DeliveredSum::Xxh3(xxh3_64(&contents(identity))),
        };
        let blocks =
            incoming.chain[incoming.first..].iter().map(delivered).take(incoming.targets.len()).collect();
        self.inbox.send(SecondaryTierEvent::Arrived { incoming, blocks });
        Ok(())
    }

    fn leave(&mut self, _request: u64) {}

    fn offer_batch(&self) -> OfferBatch {
        OfferBatch::Single { group: 1 }
    }

    fn has_room(&self, _bytes: u64) -> bool {
        true
    }

    fn offer(&mut self, _blocks: Vec<OfferedBlock>, _head: BlockIdentity) -> bool {
        true
    }
}

fn beside_another_node(config: StoreConfig, host: HostTier) -> Rig {
    beside_nodes(config, host, [Arc::default()])
}

/// The same beside several, each with its count.
fn beside_nodes<const NODES: usize>(
    config: StoreConfig,
    host: HostTier,
    asked: [Arc<AtomicUsize>; NODES],
) -> Rig {
    let links = |inbox: SecondaryTierInbox| -> Vec<Box<dyn SecondaryTier>> {
        let link = |asked| -> Box<dyn SecondaryTier> { Box::new(Elsewhere { inbox: inbox.clone(), asked }) };
        asked.into_iter().map(link).collect()
    };
    beside(None, config, host, links)
}

/// The same over a disk, beside whatever tiers.
pub(crate) fn beside(
    disk: Option<&MemoryFiles>,
    config: StoreConfig,
    host: HostTier,
    links: impl FnOnce(SecondaryTierInbox) -> Vec<Box<dyn SecondaryTier>>,
) -> Rig {
    let layout = SlabLayout { slot_bytes: BLOCK, slot_count: 64 };
    let pool = SlotPool::new(Arc::new(Slab::create("pool", layout, PageSize::Standard).expect("slab")));
    let mut builder = StoreBuilder::new(config, host).expect("memory");
    if let Some(disk) = disk {
        builder = builder.disk(open_disk(disk, Faults::default()));
    }
    for link in links(builder.inbox()) {
        builder = builder.other(link);
    }
    let (sender, moved) = unbounded();
    let notify = move |event| {
        let _over = sender.send(event);
    };
    let (store, survivors) = builder.start(notify).expect("threads");
    Rig { pool, store, moved, survivors, told: HashMap::new(), next_request: 0 }
}

/// Asks the other node for a chain; returns how many of its blocks are here then.
pub(crate) fn prepare(rig: &mut Rig, tenant: TenantId, chain: &[BlockIdentity]) -> usize {
    rig.next_request += 1;
    let (request, deadline) = (rig.next_request, Instant::now() + PATIENCE);
    let metas = (0..chain.len()).map(|position| vec![position as u8; 40].into()).collect();
    let job = Prepare { request, chain: chain.to_vec(), device_blocks: 0, metas, tenant, deadline };
    assert!(rig.store.prepare(job).is_ok());
    loop {
        match rig.next() {
            StoreEvent::Prepared { request: answered, blocks } if answered == request => return blocks,
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

/// A tenant that asks other nodes for much evicts its own blocks, and leaves those of other tenants alone.
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

/// A tenant whose own prefix fills its quota gets nothing, asks no further node in vain, and does not make others believe
/// that nothing is there.
#[test]
fn found_without_room_ends_the_search_and_is_no_miss() {
    let host = HostTier { slots: 16, pages: PageSize::Standard, eviction: PolicyKind::Lru };
    let config = StoreConfig { tenant_share: 0.25, ..StoreConfig::new(BLOCK, TOKENS) };
    let asked: [Arc<AtomicUsize>; 2] = Default::default();
    let mut rig = beside_nodes(config, host, asked.clone());
    let talk = chain(1, 8);
    assert_eq!(prepare(&mut rig, TenantId(8), &talk[..4]), 4);
    for _ in 0..200 {
        assert_eq!(prepare(&mut rig, TenantId(8), &talk), 4);
    }
    assert_eq!(asked.each_ref().map(|asked| asked.load(Ordering::Relaxed)), [201, 0]);
    (0..200).for_each(|_| rig.store.observe_prefill(1000, 0, Duration::from_secs(1)));
    let others = chain(2, 8);
    let prompt = Prompt {
        chain: &others,
        groups: &[],
        device_blocks: 0,
        tokens: others.len() * TOKENS as usize,
        block_tokens: TOKENS as usize,
        queued_tokens: 0,
    };
    let plan = rig.store.plan(&prompt, RemoteCoverage::Unknown);
    assert!(matches!(plan, Plan::AskOthers { .. }), "{plan:?}");
}

/// A prefix that is here whole can't be loaded without the windows before its end: nodes that hold these are asked.
#[test]
fn windows_that_are_not_here_are_asked_for() {
    let host = HostTier { slots: 64, pages: PageSize::Standard, eviction: PolicyKind::Lru };
    let mut rig = beside_another_node(StoreConfig::new(BLOCK, TOKENS), host);
    (0..200).for_each(|_| rig.store.observe_prefill(1000, 0, Duration::from_secs(1)));
    let (prefix, windows) = (chain(1, 8), chain(2, 8));
    assert_eq!(prepare(&mut rig, TenantId(0), &prefix), 8);
    let prompt = Prompt {
        chain: &prefix,
        groups: &[PromptGroup { chain: &windows, window_blocks: 2 }],
        device_blocks: 0,
        tokens: prefix.len() * TOKENS as usize + 1,
        block_tokens: TOKENS as usize,
        queued_tokens: 0,
    };
    assert_eq!(rig.store.plan(&prompt, RemoteCoverage::Asked), Plan::Recompute);
    for others in [RemoteCoverage::Unknown, RemoteCoverage::Hold(8)] {
        let plan = rig.store.plan(&prompt, others);
        assert!(matches!(plan, Plan::AskOthers { .. }), "{others:?}: {plan:?}");
    }
    assert_eq!(rig.store.plan(&prompt, RemoteCoverage::Hold(0)), Plan::Recompute);
    assert_eq!(prepare(&mut rig, TenantId(0), &windows), 8);
    for others in [RemoteCoverage::Asked, RemoteCoverage::Unknown, RemoteCoverage::Hold(8)] {
        let plan = rig.store.plan(&prompt, others);
        assert!(matches!(plan, Plan::Onboard { blocks: 8, .. }), "{others:?}: {plan:?}");
    }
}

/// Blocks fetched ahead from other nodes take their bandwidth, and blocks that are here already take none.
#[test]
fn only_what_comes_is_charged_to_prefetching() {
    let host = HostTier { slots: 64, pages: PageSize::Standard, eviction: PolicyKind::Lru };
    let prefetch = ReturnConfig { prefetch_chance: 0.0, ..ReturnConfig::default() };
    let mut config = StoreConfig { prefetch: Some(prefetch), ..StoreConfig::new(BLOCK, TOKENS) };
    // Offers of what is here take twenty blocks, half of the burst is not for prefetching, and next to nothing is added.
    let [bytes_per_s, burst_bytes] =
        [1, 56 * BLOCK as u64].map(|bytes| NonZeroU64::new(bytes).expect("not zero"));
    config.bandwidth[BandwidthTier::Remote.index()] =
        Some(BandwidthLimit { bytes_per_s, burst_bytes, debt_max_bytes: 0 });
    let mut rig = beside_another_node(config, host);
    let talks = [chain(1, 12), chain(2, 12)];
    for talk in &talks {
        (0..10).for_each(|position| rig.offload(talk, position));
        rig.store.mark_conversation_idle(talk);
    }
    let are_here = |rig: &Rig| talks.iter().flatten().all(|identity| rig.store.is_on_host(identity));
    wait_for(&mut rig, "two blocks of each conversation", are_here);
    assert_eq!(rig.counter("far_read_blocks"), 4);
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

/// A conversation whose start another node had is kept on this node's disk whole, with its new turns, and is found there
/// after a restart as if all of it had been computed here.
#[test]
fn a_chain_that_began_on_another_node_is_persisted_with_its_new_blocks() {
    let disk = files(64);
    let host = HostTier { slots: 32, pages: PageSize::Standard, eviction: PolicyKind::Lru };
    let links = |inbox: SecondaryTierInbox| -> Vec<Box<dyn SecondaryTier>> {
        vec![Box::new(Elsewhere { inbox, asked: Arc::default() })]
    };
    let mut rig = beside(Some(&disk), StoreConfig::new(BLOCK, TOKENS), host, links);
    let talk = chain(1, 8);
    assert_eq!(prepare(&mut rig, TenantId(3), &talk[..6]), 6);
    (6..8).for_each(|position| rig.offload_for(TenantId(3), &talk, position));
    rig.wait_until_on_disk(8);
    drop(rig);

    let mut rig = Rig::new(with_disk(32, &disk, WriteMode::Through));
    assert_eq!(rig.survivors.len(), 8);
    for (position, survivor) in rig.survivors.iter().enumerate() {
        let parent = position.checked_sub(1).map(|before| talk[before]);
        let (meta, tenant) = (vec![position as u8; 40].into(), TenantId(3));
        let described = Description { parent, position: position as u32, meta, tenant };
        assert_eq!((survivor.identity, &survivor.description), (talk[position], &described));
    }
    assert_eq!(rig.onboard(&talk, PATIENCE), 8);
}

/// A tier that takes blocks and has none; it tells what it is offered, and under which head.
struct Taker {
    offer_batch: OfferBatch,
    has_room: Arc<AtomicBool>,
    offered: Sender<(BlockIdentity, Vec<BlockIdentity>)>,
}

impl SecondaryTier for Taker {
    fn tier(&self) -> BandwidthTier {
        BandwidthTier::Object
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    fn look_up(&mut self, _: u64, _: &[BlockIdentity], _: usize, _: Instant) -> bool {
        false
    }

    fn read(&mut self, incoming: FetchRequest) -> Result<(), FetchRequest> {
        Err(incoming)
    }

    fn leave(&mut self, _request: u64) {}

    fn offer_batch(&self) -> OfferBatch {
        self.offer_batch
    }

    fn has_room(&self, _bytes: u64) -> bool {
        self.has_room.load(Ordering::Relaxed)
    }

    fn offer(&mut self, blocks: Vec<OfferedBlock>, head: BlockIdentity) -> bool {
        let blocks = blocks.iter().map(|block| block.identity).collect();
        let _over = self.offered.send((head, blocks));
        true
    }
}

fn free() -> Arc<AtomicBool> {
    Arc::new(AtomicBool::new(true))
}

/// New blocks are the first that leave a full S3-FIFO tier. Those that are offered next are held meanwhile, and a group goes on after
/// its first block has left.
#[test]
fn blocks_that_wait_to_be_sent_are_not_evicted_before() {
    let host = HostTier { slots: 40, pages: PageSize::Standard, eviction: PolicyKind::S3Fifo };
    let has_room = Arc::new(AtomicBool::new(true));
    let (offered, is_offered) = unbounded();
    let room = Arc::clone(&has_room);
    let links = |_| -> Vec<Box<dyn SecondaryTier>> {
        vec![Box::new(Taker { offer_batch: OfferBatch::Single { group: 32 }, has_room: room, offered })]
    };
    let mut rig = beside(None, StoreConfig::new(BLOCK, TOKENS), host, links);
    // Used again and again: new blocks have a tenth of the tier.
    let old = chain(1, 40);
    for position in 0..40 {
        rig.offload(&old, position);
        (0..3).for_each(|_| assert_eq!(rig.onboard(&old[..=position], PATIENCE), position + 1));
    }
    // Blocks are offered after the caller has heard that they were taken.
    (0..40).for_each(|_| assert!(is_offered.recv_timeout(PATIENCE).is_ok(), "all old blocks are offered"));
    let new = chain(2, 12);
    rig.offload(&new, 0);
    let first = is_offered.recv_timeout(PATIENCE);
    assert_eq!(first, Ok((new[0], vec![new[0]])));
    has_room.store(false, Ordering::Relaxed);
    (1..6).for_each(|position| rig.offload(&new, position));
    // Of another prompt: these are named, and go.
    let other = chain(3, 20);
    (0..20).for_each(|position| rig.offload(&other, position));
    assert!(new[1..6].iter().all(|identity| rig.store.is_on_host(identity)), "an eighth of the tier is held");
    assert!(!rig.store.is_on_host(&new[0]), "its first block has been sent, and has left");
    has_room.store(true, Ordering::Relaxed);
    rig.offload(&other, 19);
    rig.offload(&chain(4, 1), 0);
    for identity in &new[1..6] {
        let offered = is_offered.recv_timeout(PATIENCE);
        assert_eq!(offered, Ok((new[0], vec![*identity])));
    }
    wait_for(&mut rig, "nothing to be held", |rig| rig.store.leased_slots() == 0);
}

/// Blocks that came from the disk after a restart, or from a tier further away, are what they were: a group or run that has
/// some of them is offered on when its new blocks come.
#[test]
fn blocks_that_came_back_are_offered_on_with_the_new_blocks_of_their_chain() {
    let disk = files(64);
    let mut rig = Rig::new(with_disk(32, &disk, WriteMode::Through));
    let talk = chain(1, 8);
    (0..4).for_each(|position| rig.offload(&talk, position));
    rig.wait_until_on_disk(4);
    drop(rig);

    let host = HostTier { slots: 32, pages: PageSize::Standard, eviction: PolicyKind::Lru };
    let [(group, in_groups), (run, in_runs)] = [unbounded(), unbounded()];
    let links = |inbox: SecondaryTierInbox| -> Vec<Box<dyn SecondaryTier>> {
        vec![
            Box::new(Taker {
                offer_batch: OfferBatch::Single { group: 32 },
                has_room: free(),
                offered: group,
            }),
            Box::new(Elsewhere { inbox, asked: Arc::default() }),
            Box::new(Taker { offer_batch: OfferBatch::Run(8), has_room: free(), offered: run }),
        ]
    };
    let mut rig = beside(Some(&disk), StoreConfig::new(BLOCK, TOKENS), host, links);
    assert_eq!(rig.onboard(&talk[..4], PATIENCE), 4, "from the disk");
    assert_eq!(prepare(&mut rig, TenantId(0), &talk[..6]), 6, "two of them from another node");
    (6..8).for_each(|position| rig.offload(&talk, position));
    for identity in &talk[4..] {
        let offered = in_groups.recv_timeout(PATIENCE);
        assert_eq!(offered, Ok((talk[0], vec![*identity])), "what came from further away, and what is new");
    }
    assert_eq!(in_runs.recv_timeout(PATIENCE), Ok((talk[0], talk.clone())));
    assert!(in_groups.is_empty() && in_runs.is_empty(), "nothing else");
}
