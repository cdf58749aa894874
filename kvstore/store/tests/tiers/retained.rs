//! Blocks that callers want kept for a time.

use std::time::Duration;

use dataplane_memory::PageSize;
use kvstore_block::BlockIdentity;
use kvstore_catalog::PolicyKind;
use kvstore_disk::AdmissionConfig;
use kvstore_io::faulty::Faults;
use kvstore_store::{DiskTier, HostTier, StoreBuilder, StoreConfig, TenantId, WriteMode};

use crate::background::wait_for;
use crate::rig::{BLOCK, Rig, TOKENS, chain, files, no_disk, open_disk, with_disk};

const HOUR: Duration = Duration::from_secs(3600);

/// Offloads so many new blocks, of a chain of their own.
fn flood(rig: &mut Rig, seed: u64, blocks: usize) {
    let others = chain(5000 + seed, blocks);
    (0..blocks).for_each(|position| rig.offload(&others, position));
}

fn offload_all(rig: &mut Rig, blocks: &[BlockIdentity]) {
    (0..blocks.len()).for_each(|position| rig.offload(blocks, position));
}

#[test]
fn retained_blocks_outlast_others_in_host_memory_as_far_as_their_share_goes() {
    let mut rig = Rig::new(no_disk(32));
    let (first, second) = (chain(1, 6), chain(2, 4));
    // Wanted before they are there.
    rig.store.retain(&first, HOUR).expect("few are inside");
    offload_all(&mut rig, &first);
    offload_all(&mut rig, &second);
    rig.store.retain(&second, HOUR).expect("few are inside");
    wait_for(&mut rig, "kept", |rig| rig.counter("retention_pinned_blocks") == 8);
    assert_eq!(rig.counter("retention_refused_blocks"), 2, "a quarter of host memory is 8 blocks");
    flood(&mut rig, 1, 100);
    assert_eq!((rig.store.look_up(&first), rig.store.look_up(&second)), (6, 2));
    assert_eq!(rig.store.leased_slots(), 0, "kept blocks are no leak");
    rig.store.forget(first.clone());
    wait_for(&mut rig, "forgotten", |rig| rig.store.look_up(&first) == 0);
    rig.store.retain(&second, HOUR).expect("few are inside");
    offload_all(&mut rig, &second);
    wait_for(&mut rig, "there is room again", |rig| rig.counter("retention_pinned_blocks") == 10);
    flood(&mut rig, 2, 100);
    assert_eq!(rig.store.look_up(&second), 4);
}

#[test]
fn the_disk_keeps_retained_blocks_if_there_is_one() {
    let disk = files(64);
    let mut rig = Rig::new(with_disk(16, &disk, WriteMode::Through));
    let on_disk = rig.store.slots()[1];
    let most = on_disk as usize / 4;
    let talk = chain(1, most + 2);
    offload_all(&mut rig, &talk);
    rig.wait_until_on_disk(talk.len() as u64);
    rig.store.retain(&talk, HOUR).expect("few are inside");
    wait_for(&mut rig, "kept", |rig| rig.counter("retention_pinned_blocks") == most as u64);
    for seed in 0..6 {
        flood(&mut rig, seed, 32);
        rig.wait_until_on_disk(on_disk.min(talk.len() as u64 + 32 * (seed + 1)));
    }
    assert_eq!(rig.store.look_up(&talk), most, "of {on_disk} slots");
    assert!(talk[..most].iter().all(|identity| !rig.store.is_on_host(identity)), "host memory is for others");
    assert_eq!(rig.onboard(&talk[..most], Duration::from_secs(20)), most);
}

#[test]
fn after_their_time_retained_blocks_are_like_others() {
    let mut rig = Rig::new(no_disk(16));
    let (short, long) = (chain(1, 2), chain(2, 2));
    for (blocks, how_long) in [(&short, Duration::from_millis(50)), (&long, HOUR)] {
        offload_all(&mut rig, blocks);
        rig.store.retain(blocks, how_long).expect("few are inside");
    }
    wait_for(&mut rig, "all are retained", |rig| rig.counter("retention_pinned_blocks") == 4);
    wait_for(&mut rig, "the time of some is over", |rig| rig.store.retained_blocks() == 2);
    for seed in 0..4 {
        flood(&mut rig, seed, 32);
    }
    assert_eq!((rig.store.look_up(&short), rig.store.look_up(&long)), (0, 2));
}

/// A block that never comes is given up after a minute, or its time; until then it takes the place of another
/// awaited block only.
#[test]
fn blocks_that_never_come_are_given_up() {
    let mut rig = Rig::new(no_disk(32));
    let absent = chain(1, 12);
    rig.store.retain(&absent, Duration::from_millis(50)).expect("few are inside");
    wait_for(&mut rig, "given up", |rig| rig.counter("retention_unmet_blocks") == 8);
    assert_eq!(rig.counter("retention_refused_blocks"), 4, "a quarter of 32 may be awaited");
    rig.store.retain(&absent, HOUR).expect("few are inside");
    let present = chain(2, 8);
    offload_all(&mut rig, &present);
    rig.store.retain(&present, HOUR).expect("few are inside");
    wait_for(&mut rig, "those that are there need no place of those", |rig| rig.store.retained_blocks() == 8);
    assert_eq!(rig.counter("retention_refused_blocks"), 8);
}

#[test]
fn a_tenant_keeps_its_share_of_what_may_be_kept() {
    let config = StoreConfig { tenant_share: 0.5, ..StoreConfig::new(BLOCK, TOKENS) };
    let mut rig = Rig::configured(no_disk(32), config);
    let of_tenant = |rig: &mut Rig, tenant: u32| {
        let blocks = chain(u64::from(tenant), 6);
        (0..6).for_each(|position| rig.offload_for(TenantId(tenant), &blocks, position));
        rig.store.retain(&blocks, HOUR).expect("few are inside");
    };
    of_tenant(&mut rig, 1);
    wait_for(&mut rig, "half of 8", |rig| rig.counter("retention_pinned_blocks") == 4);
    of_tenant(&mut rig, 2);
    wait_for(&mut rig, "the other half", |rig| rig.counter("retention_pinned_blocks") == 8);
    wait_for(&mut rig, "the rest is refused", |rig| rig.counter("retention_refused_blocks") == 4);
}

/// A retained block keeps those before it from being evicted, which therefore count as well.
#[test]
fn a_block_is_retained_only_with_those_before_it() {
    let mut rig = Rig::new(no_disk(64));
    let talk = chain(1, 6);
    offload_all(&mut rig, &talk);
    rig.store.retain(&talk[3..], HOUR).expect("few are inside");
    wait_for(&mut rig, "refused", |rig| rig.counter("retention_refused_blocks") == 3);
    assert_eq!(rig.store.retained_blocks(), 0);
    rig.store.retain(&talk, Duration::from_millis(50)).expect("few are inside");
    rig.store.retain(&talk[5..], HOUR).expect("few are inside");
    wait_for(&mut rig, "retained", |rig| rig.store.retained_blocks() == 6);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(rig.store.retained_blocks(), 6, "the last one needs the others");
    rig.store.forget(talk[5..].to_vec());
    wait_for(&mut rig, "the time of the others is over", |rig| rig.store.retained_blocks() == 0);
    // The last one comes first, and is retained with the one before it when that has come.
    let other = chain(2, 2);
    rig.store.retain(&other, HOUR).expect("few are inside");
    rig.offload(&other, 1);
    wait_for(&mut rig, "alone", |rig| rig.store.retained_blocks() == 1);
    rig.offload(&other, 0);
    wait_for(&mut rig, "both", |rig| rig.store.retained_blocks() == 2);
    // If the one before it is not to be retained, it is not either.
    let third = chain(3, 2);
    rig.store.retain(&third[1..], HOUR).expect("few are inside");
    rig.offload(&third, 1);
    wait_for(&mut rig, "alone", |rig| rig.store.retained_blocks() == 3);
    rig.offload(&third, 0);
    wait_for(&mut rig, "neither", |rig| rig.store.retained_blocks() == 2);
}

/// A disk that takes only blocks which are seen twice takes those that are to be retained at once.
#[test]
fn a_retained_block_is_written_though_it_was_seen_once() {
    let disk = files(64);
    let frequency_min = 2;
    let config = DiskTier {
        admission: AdmissionConfig { frequency_min, ..AdmissionConfig::default() },
        ..open_disk(&disk, Faults::default())
    };
    let host = HostTier { slots: 16, pages: PageSize::Standard, eviction: PolicyKind::Lru };
    let builder = StoreBuilder::new(StoreConfig::new(BLOCK, TOKENS), host).expect("memory").disk(config);
    let mut rig = Rig::of(builder);
    let (talk, other) = (chain(1, 4), chain(2, 4));
    offload_all(&mut rig, &talk);
    offload_all(&mut rig, &other);
    // Blocks behind the first ones wait for these.
    wait_for(&mut rig, "seen too rarely", |rig| rig.counter("disk_not_admitted_blocks") == 2);
    rig.store.retain(&talk, HOUR).expect("few are inside");
    wait_for(&mut rig, "written and retained", |rig| rig.store.retained_blocks() == 4);
    assert_eq!(rig.store.blocks()[1], 4);
}
