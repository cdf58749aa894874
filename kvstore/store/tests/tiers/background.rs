//! Background work of the store.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, unbounded};
use dataplane_memory::PageSize;
use kvstore_block::BlockIdentity;
use kvstore_catalog::PolicyKind;
use kvstore_io::faulty::Faults;
use kvstore_store::{
    BandwidthLimit, BandwidthTier, Description, HostTier, Medium, Plan, Prompt, RemoteCoverage, ReturnConfig,
    Store, StoreBuilder, StoreConfig, TenantId, WriteMode,
};

use crate::rig::{BLOCK, PATIENCE, Rig, TOKENS, chain, contents, files, open_disk, with_disk};

pub(crate) fn wait_for(rig: &mut Rig, what: &str, is_done: impl Fn(&Rig) -> bool) {
    let started = Instant::now();
    while !is_done(rig) {
        assert!(started.elapsed() < PATIENCE, "{what}: {:?}", rig.store.counters().snapshot());
        std::thread::sleep(Duration::from_millis(1));
        rig.listen();
    }
}

/// Conversations that go on after 300 ms each, behind a host tier that others fill meanwhile: after some turns their blocks
/// are in host memory before they are asked for.
#[test]
fn blocks_of_a_conversation_are_there_before_it_goes_on() {
    let disk = files(256);
    let prefetch = ReturnConfig { lead: Duration::from_millis(250), ..ReturnConfig::default() };
    let config = StoreConfig { prefetch: Some(prefetch), ..StoreConfig::new(BLOCK, TOKENS) };
    let mut rig = Rig::configured(with_disk(24, &disk, WriteMode::Through), config);
    let gap = Duration::from_millis(300);
    let mut ready = 0;
    let mut at_disk = 0;
    for turn in 0..12_u64 {
        let talk = chain(1000 + turn, 6);
        rig.store.prompt_arrived(&talk);
        (0..6).for_each(|position| rig.offload(&talk, position));
        let others = chain(turn, 24);
        (0..24).for_each(|position| rig.offload(&others, position));
        at_disk += 30;
        rig.wait_until_on_disk(at_disk.min(rig.store.slots()[1]));
        assert!(!rig.store.is_on_host(&talk[0]), "others have filled host memory");
        rig.store.mark_conversation_idle(&talk);
        std::thread::sleep(gap);
        rig.listen();
        let longer = chain(1000 + turn, 8);
        ready += usize::from(talk.iter().all(|identity| rig.store.is_on_host(identity)));
        rig.store.prompt_arrived(&longer);
        assert_eq!(rig.onboard(&talk, PATIENCE), 6, "there, whether ahead or not");
    }
    assert!(ready >= 3, "{ready} of 12 were fetched ahead");
    let told = ["prefetched_blocks", "prefetch_used_blocks"].map(|name| rig.counter(name));
    assert!(told[0] >= 18 && told[1] >= 18 && told[1] <= told[0], "{told:?}");
}

/// New blocks are the first to be evicted; blocks that were fetched ahead stay until their conversation
/// continues.
#[test]
fn what_was_fetched_ahead_stays_while_others_fill_host_memory() {
    let disk = files(256);
    let prefetch = ReturnConfig { lead: Duration::from_secs(60), prefetch_chance: 0.0 };
    let config = StoreConfig { prefetch: Some(prefetch), ..StoreConfig::new(BLOCK, TOKENS) };
    let mut rig = Rig::configured(with_disk(24, &disk, WriteMode::Through), config);
    let talk = chain(1000, 6);
    (0..6).for_each(|position| rig.offload(&talk, position));
    let fill = |rig: &mut Rig, seed: u64, at_disk: u64| {
        let others = chain(seed, 24);
        (0..24).for_each(|position| rig.offload(&others, position));
        rig.wait_until_on_disk(at_disk);
    };
    fill(&mut rig, 1, 30);
    assert!(!rig.store.is_on_host(&talk[0]), "others have filled host memory");
    rig.store.mark_conversation_idle(&talk);
    wait_for(&mut rig, "fetched", |rig| talk.iter().all(|identity| rig.store.is_on_host(identity)));
    fill(&mut rig, 2, 54);
    fill(&mut rig, 3, 78);
    assert!(talk.iter().all(|identity| rig.store.is_on_host(identity)), "held");
    rig.store.prompt_arrived(&chain(1000, 8));
    assert_eq!(rig.onboard(&talk, PATIENCE), 6);
    let loaded = Instant::now();
    wait_for(&mut rig, "its load holds them now", |rig| rig.store.leased_slots() == 0);
    assert!(loaded.elapsed() < Duration::from_secs(1), "let go at its load, not after two seconds");
    assert_eq!(rig.counter("prefetch_used_blocks"), 6);
}

/// The part of host memory that conversations fetched ahead may fill is bounded, and blocks fetched in vain
/// are counted.
#[test]
fn what_is_fetched_in_vain_is_bounded_and_counted() {
    let disk = files(256);
    let lead = Duration::from_millis(100);
    // Every idle conversation is fetched.
    let prefetch = ReturnConfig { lead, prefetch_chance: 0.0 };
    let config = StoreConfig { prefetch: Some(prefetch), ..StoreConfig::new(BLOCK, TOKENS) };
    let mut rig = Rig::configured(with_disk(16, &disk, WriteMode::Through), config);
    for seed in 0..6 {
        let talk = chain(seed, 8);
        (0..8).for_each(|position| rig.offload(&talk, position));
    }
    rig.wait_until_on_disk(48);
    for seed in 0..3 {
        rig.store.mark_conversation_idle(&chain(seed, 8));
    }
    wait_for(&mut rig, "fetched", |rig| rig.counter("prefetched_blocks") > 0);
    wait_for(&mut rig, "given up", |rig| rig.counter("prefetch_wasted_blocks") > 0);
    let [fetched, wasted] = ["prefetched_blocks", "prefetch_wasted_blocks"].map(|name| rig.counter(name));
    assert!(wasted <= fetched && fetched <= 8, "a quarter of host memory at a time: {fetched}, {wasted}");
    assert_eq!(rig.counter("prefetch_used_blocks"), 0);
}

/// A disk that plans do not use is read a little now and then, so that they may use it again.
#[test]
fn a_disk_that_does_not_pay_is_probed() {
    let disk = files(256);
    let mut rig = Rig::new(with_disk(8, &disk, WriteMode::Through));
    let talk = chain(3, 40);
    (0..40).for_each(|position| rig.offload(&talk, position));
    rig.wait_until_on_disk(40);
    // Computing is so cheap that no tier is.
    (0..200).for_each(|_| rig.store.observe_prefill(10_000, 0, Duration::from_micros(1)));
    let prompt = Prompt {
        chain: &talk,
        groups: &[],
        device_blocks: 0,
        tokens: 40 * TOKENS as usize,
        block_tokens: TOKENS as usize,
        queued_tokens: 0,
    };
    assert_eq!(rig.store.plan(&prompt, RemoteCoverage::Asked), Plan::Recompute);
    wait_for(&mut rig, "a probe", |rig| rig.counter("probed_blocks") > 0);
    let probed = rig.counter("probed_blocks");
    assert_eq!(rig.store.plan(&prompt, RemoteCoverage::Asked), Plan::Recompute);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(rig.counter("probed_blocks"), probed, "once an interval");
    wait_for(&mut rig, "its end", |rig| rig.store.leased_slots() == 0);
}

/// Writes keep to the tier's bandwidth, none is lost to it, and reads that requests wait for are not held
/// back.
#[test]
fn writes_wait_for_bandwidth_and_reads_do_not() {
    let disk = files(256);
    let bytes = |count: usize| NonZeroU64::new((count * BLOCK) as u64).expect("not zero");
    let mut config = StoreConfig::new(BLOCK, TOKENS);
    // Forty blocks a second, four at once.
    config.bandwidth[BandwidthTier::Disk.index()] = Some(BandwidthLimit {
        bytes_per_s: bytes(40),
        burst_bytes: bytes(4),
        debt_max_bytes: bytes(8).get(),
    });
    let mut rig = Rig::configured(with_disk(64, &disk, WriteMode::Through), config);
    let talk = chain(5, 24);
    let started = Instant::now();
    (0..24).for_each(|position| rig.offload(&talk, position));
    assert!(started.elapsed() < Duration::from_millis(400), "offloading does not wait for the disk");
    rig.wait_until_on_disk(24);
    let took = started.elapsed();
    // Twenty blocks beyond the burst at forty a second.
    assert!(took >= Duration::from_millis(450), "{took:?}");
    assert_eq!(rig.counter("disk_written_blocks"), 24, "none was dropped");
    drop(rig);

    let mut config = StoreConfig::new(BLOCK, TOKENS);
    config.bandwidth[BandwidthTier::Disk.index()] =
        Some(BandwidthLimit { bytes_per_s: bytes(1), burst_bytes: bytes(1), debt_max_bytes: bytes(1).get() });
    let mut rig = Rig::configured(with_disk(64, &disk, WriteMode::Through), config);
    assert_eq!(rig.survivors.len(), 24);
    let started = Instant::now();
    assert_eq!(rig.onboard(&talk, PATIENCE), 24);
    assert!(started.elapsed() < Duration::from_secs(5), "at one block a second it would have taken 23 s");
}

/// Keeps the store's thread busy: each answer asks the next question. Says when it has ended.
fn ask_for_ever(store: Arc<Store>, is_over: Arc<AtomicBool>, ended: Sender<()>) {
    if is_over.load(Ordering::Relaxed) {
        // The store must not be closed by its own thread.
        drop(store);
        return ended.send(()).expect("somebody waits for it");
    }
    let again = Arc::clone(&store);
    let asked =
        store.hold(Vec::new(), Instant::now() + PATIENCE, move |_| ask_for_ever(again, is_over, ended));
    assert!(asked.is_ok(), "few are inside");
}

/// Writes that waited for bandwidth go on when it is there although requests leave the thread no pause, in both modes.
#[test]
fn writes_go_on_under_constant_load() {
    for write in [WriteMode::Through, WriteMode::Back] {
        let disk = files(256);
        let bytes = |count: usize| NonZeroU64::new((count * BLOCK) as u64).expect("not zero");
        let mut config = StoreConfig { disk_write: write, ..StoreConfig::new(BLOCK, TOKENS) };
        config.bandwidth[BandwidthTier::Disk.index()] =
            Some(BandwidthLimit { bytes_per_s: bytes(20), burst_bytes: bytes(2), debt_max_bytes: 0 });
        let host = HostTier { slots: 16, pages: PageSize::Standard, eviction: PolicyKind::Lru };
        let (sender, events) = unbounded();
        let notify = move |event| {
            let _over = sender.send(event);
        };
        let builder = StoreBuilder::new(config, host).expect("memory");
        let (store, _) = builder.disk(open_disk(&disk, Faults::default())).start(notify).expect("threads");
        let store = Arc::new(store);
        // Written back, the blocks after the sixteenth wait until some have left.
        let talk = chain(6, 24);
        let count = if write == WriteMode::Through { 16 } else { 24 };
        for (position, identity) in talk[..count].iter().enumerate() {
            let parent = position.checked_sub(1).map(|before| talk[before]);
            let (meta, tenant) = (Arc::from([]), TenantId(0));
            let description = Description { parent, position: position as u32, meta, tenant };
            assert!(store.put(*identity, description, vec![contents(identity).into()], |_| {}).is_ok());
        }
        let wanted = if write == WriteMode::Through { 16 } else { 8 };
        let started = Instant::now();
        while store.blocks()[0] < 16 {
            assert!(started.elapsed() < PATIENCE, "{write:?}: {:?}", store.blocks());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(store.blocks()[1] < wanted, "{write:?}: nothing is left to be written under load");
        let (is_over, (ended, has_ended)) = (Arc::new(AtomicBool::new(false)), unbounded());
        ask_for_ever(Arc::clone(&store), Arc::clone(&is_over), ended);
        let started = Instant::now();
        while store.blocks()[1] < wanted && started.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
        let written = store.blocks()[1];
        is_over.store(true, Ordering::Relaxed);
        has_ended.recv_timeout(PATIENCE).expect("the last answer");
        assert!(written >= wanted, "{write:?}: {written} of {wanted} blocks were written");
        drop((store, events));
    }
}

/// A tenant with a share of the tiers evicts its own blocks, and leaves those of other tenants alone.
#[test]
fn a_tenant_keeps_to_its_share() {
    let disk = files(256);
    let config = StoreConfig { tenant_share: 0.25, ..StoreConfig::new(BLOCK, TOKENS) };
    let mut rig = Rig::configured(with_disk(16, &disk, WriteMode::Through), config);
    let quiet = chain(1, 4);
    (0..4).for_each(|position| rig.offload_for(TenantId(7), &quiet, position));
    let loud: Vec<Vec<BlockIdentity>> = (10..30).map(|seed| chain(seed, 4)).collect();
    for chain in &loud {
        (0..4).for_each(|position| rig.offload_for(TenantId(8), chain, position));
        // New blocks of a tenant whose quota is full of blocks that wait to be written are dropped.
        wait_for(&mut rig, "the writes", |rig| rig.store.leased_slots() == 0);
    }
    wait_for(&mut rig, "the last chain on the disk", |rig| {
        let is_told = |identity: &BlockIdentity| rig.told.get(&(*identity, Medium::Disk)) == Some(&1);
        loud.last().is_some_and(|chain| chain.iter().all(is_told))
    });
    wait_for(&mut rig, "rest", |rig| rig.store.leased_slots() == 0);
    assert!(quiet.iter().all(|identity| rig.store.is_on_host(identity)), "nobody else's blocks go");
    let kept = loud.iter().flatten().filter(|identity| rig.store.is_on_host(identity)).count();
    assert_eq!(kept, 4, "a quarter of 16 slots");
    drop(rig);

    // The tenants of the blocks are known after a restart, too.
    let config = StoreConfig { tenant_share: 0.25, ..StoreConfig::new(BLOCK, TOKENS) };
    let mut rig = Rig::configured(with_disk(16, &disk, WriteMode::Through), config);
    let tenants: Vec<u32> = rig.survivors.iter().map(|survivor| survivor.description.tenant.0).collect();
    assert!(tenants.iter().filter(|&&tenant| tenant == 7).count() == 4, "{tenants:?}");
    assert_eq!(rig.onboard(&quiet, PATIENCE), 4);
    assert_eq!(rig.onboard(loud.last().expect("twenty"), PATIENCE), 4);
    assert!(quiet.iter().all(|identity| rig.store.is_on_host(identity)));
}

/// Written back when they leave, blocks reach the disk also when a quota, not a full tier, makes them leave, and when there is
/// little bandwidth: they wait for it.
#[test]
fn what_leaves_host_memory_is_written_under_a_quota_and_under_a_bandwidth() {
    let disk = files(256);
    let config = StoreConfig { tenant_share: 0.5, ..StoreConfig::new(BLOCK, TOKENS) };
    let mut rig = Rig::configured(with_disk(16, &disk, WriteMode::Back), config);
    let talk = chain(1, 24);
    (0..24).for_each(|position| rig.offload_for(TenantId(7), &talk, position));
    wait_for(&mut rig, "rest", |rig| rig.store.leased_slots() == 0);
    assert_eq!(rig.onboard(&talk, PATIENCE), 24, "half of them from the disk");
    drop(rig);

    let disk = files(256);
    let bytes = |count: usize| NonZeroU64::new((count * BLOCK) as u64).expect("not zero");
    let mut config = StoreConfig::new(BLOCK, TOKENS);
    config.bandwidth[BandwidthTier::Disk.index()] =
        Some(BandwidthLimit { bytes_per_s: bytes(60), burst_bytes: bytes(2), debt_max_bytes: 0 });
    let mut rig = Rig::configured(with_disk(8, &disk, WriteMode::Back), config);
    let started = Instant::now();
    (0..24).for_each(|position| rig.offload(&talk, position));
    // Sixteen had to leave, two of them at once.
    assert!(started.elapsed() > Duration::from_millis(200), "{:?}", started.elapsed());
    assert_eq!(rig.counter("throttled_blocks"), 0);
    assert_eq!(rig.onboard(&talk, PATIENCE), 24);
}
