//! Blocks that callers want kept for a time.

use std::time::Duration;

use kvstore_block::BlockIdentity;
use kvstore_store::{StoreConfig, TenantId, WriteMode};

use crate::background::wait_for;
use crate::rig::{BLOCK, Rig, TOKENS, chain, files, no_disk, with_disk};

const HOUR: Duration = Duration::from_secs(3600);

/// So many new blocks, of a chain that nobody has seen.
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
    wait_for(&mut rig, "kept", |rig| rig.counter("retained_blocks") == 8);
    assert_eq!(rig.counter("retention_refused_blocks"), 2, "a quarter of host memory is 8 blocks");
    flood(&mut rig, 1, 100);
    assert_eq!((rig.store.look_up(&first), rig.store.look_up(&second)), (6, 2));
    assert_eq!(rig.store.leased_slots(), 0, "kept blocks are no leak");
    rig.store.forget(first.clone());
    wait_for(&mut rig, "forgotten", |rig| rig.store.look_up(&first) == 0);
    rig.store.retain(&second, HOUR).expect("few are inside");
    offload_all(&mut rig, &second);
    wait_for(&mut rig, "there is room again", |rig| rig.counter("retained_blocks") == 10);
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
    rig.settle(talk.len() as u64);
    rig.store.retain(&talk, HOUR).expect("few are inside");
    wait_for(&mut rig, "kept", |rig| rig.counter("retained_blocks") == most as u64);
    for seed in 0..6 {
        flood(&mut rig, seed, 32);
        rig.settle(on_disk.min(talk.len() as u64 + 32 * (seed + 1)));
    }
    assert_eq!(rig.store.look_up(&talk), most, "of {on_disk} slots");
    assert!(talk[..most].iter().all(|identity| !rig.store.is_on_host(identity)), "host memory is for others");
    assert_eq!(rig.onboard(&talk[..most], Duration::from_secs(20)), most);
}

#[test]
fn after_their_time_retained_blocks_are_like_others() {
    let mut rig = Rig::new(no_disk(16));
    let talk = chain(1, 3);
    offload_all(&mut rig, &talk);
    rig.store.retain(&talk, Duration::from_millis(200)).expect("few are inside");
    wait_for(&mut rig, "kept", |rig| rig.counter("retained_blocks") == 3);
    flood(&mut rig, 1, 32);
    std::thread::sleep(Duration::from_millis(300));
    flood(&mut rig, 2, 32);
    assert_eq!(rig.store.look_up(&talk), 0);
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
    wait_for(&mut rig, "half of 8", |rig| rig.counter("retained_blocks") == 4);
    of_tenant(&mut rig, 2);
    wait_for(&mut rig, "the other half", |rig| rig.counter("retained_blocks") == 8);
    wait_for(&mut rig, "the rest is refused", |rig| rig.counter("retention_refused_blocks") == 4);
}
