//! Blocks go out and come back as they were.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::unbounded;
use kvstore_block::BlockIdentity;
use kvstore_io::faulty::Faults;
use kvstore_store::{Description, TenantId, WriteMode};

use crate::rig::{Behind, PATIENCE, Rig, chain, contents, files, no_disk, with_disk};

#[test]
fn blocks_come_back_from_host_memory_as_they_went() {
    let mut rig = Rig::new(no_disk(3));
    let blocks = chain(1, 4);
    (0..3).for_each(|position| rig.offload(&blocks, position));
    assert_eq!(rig.store.look_up(&blocks), 3);
    assert_eq!(rig.onboard(&blocks, PATIENCE), 3, "the fourth was never stored");
    // A block is the child of the one before it: the last of the chain goes first.
    let other = chain(2, 1);
    rig.offload(&other, 0);
    assert_eq!(rig.store.look_up(&blocks), 2);
    rig.events_are_true(&[blocks, other].concat());
    assert_eq!(rig.pool.used_count(), 0);
    assert_eq!(rig.store.leased_slots(), 0);
}

/// Callers who copy blocks into slots of host memory themselves get free ones as long as some were evicted ahead, and whatever they
/// do with a slot it is not lost.
#[test]
fn blocks_that_callers_copy_themselves_come_back_as_they_went() {
    let files = files(300);
    let mut rig = Rig::new(with_disk(128, &files, WriteMode::Through));
    let (mut copied, mut refused) = (0, 0);
    for seed in 0..60 {
        let blocks = chain(1000 + seed, 4);
        for position in 0..4 {
            let bytes = contents(&blocks[position]);
            let parent = position.checked_sub(1).map(|before| blocks[before]);
            let description =
                Description { parent, position: position as u32, meta: Arc::default(), tenant: TenantId(0) };
            let (done, is_stored) = unbounded();
            let done = move |stored| done.send(stored).expect("the test waits");
            match rig.store.reserve(TenantId(0)) {
                Some(mut slot) => {
                    // Pieces that end anywhere.
                    let cut = 1 + seed as usize * 311;
                    assert!(slot.fill([&bytes[..cut], &[], &bytes[cut..]].into_iter()));
                    rig.store.put_slot(blocks[position], description, slot, done).expect("room");
                    copied += 1;
                }
                None => {
                    rig.store.put(blocks[position], description, vec![bytes.into()], done).expect("room");
                    refused += 1;
                }
            }
            assert_eq!(is_stored.recv_timeout(PATIENCE), Ok(true));
        }
        assert_eq!(rig.onboard(&blocks, PATIENCE), 4, "every byte is compared");
    }
    println!("{copied} copied by the caller, {refused} by the store");
    assert!(copied >= 200, "{copied} of 240");
    rig.wait_until_on_disk(240);
    assert!(rig.store.blocks()[0] > 120, "at most four are free ahead: {:?}", rig.store.blocks());
    // Not used, too long, there already.
    drop(rig.store.reserve(TenantId(0)));
    let mut slot = (0..100).find_map(|_| {
        std::thread::sleep(Duration::from_millis(1));
        rig.store.reserve(TenantId(0))
    });
    let slot = slot.as_mut().expect("a free slot");
    assert!(!slot.fill([vec![0; slot.room()].as_slice(), &[1]].into_iter()));
    let known = chain(1059, 4)[3];
    let held = rig.store.hold_now(&[known]).expect("there");
    let mut slot = rig.store.reserve(TenantId(0));
    if let Some(slot) = slot.as_mut() {
        assert!(slot.fill(std::iter::once(contents(&chain(1, 1)[0]).as_slice())));
    }
    let description = Description { parent: None, position: 0, meta: Arc::default(), tenant: TenantId(0) };
    let (done, is_stored) = unbounded();
    let slot = slot.expect("a free slot");
    rig.store
        .put_slot(known, description, slot, move |stored| done.send(stored).expect("a test"))
        .expect("room");
    assert_eq!(is_stored.recv_timeout(PATIENCE), Ok(true));
    assert_eq!(held[0].to_bytes(), Some(contents(&known)), "what was there stays");
    // In pieces of any length, which cut lanes of the checksum.
    let pattern = [1_usize, 7, 8, 13, 64, 3, 500, 2, 129];
    for start in 0..pattern.len() {
        let mut read = held[0].read();
        assert_eq!(read.read_lanes::<8>().as_ref().map(|bytes| &bytes[..]), Some(&contents(&known)[..8]));
        let (mut copied, mut lengths) = (contents(&known)[..8].to_vec(), pattern[start..].iter().cycle());
        while copied.len() < held[0].len() - start {
            let len = (*lengths.next().expect("a cycle")).min(held[0].len() - start - copied.len());
            let mut piece = vec![std::mem::MaybeUninit::new(0xEE); len];
            assert!(read.copy(&mut piece));
            // SAFETY: all of them were written above.
            copied.extend(piece.iter().map(|byte| unsafe { byte.assume_init() }));
        }
        assert!(!read.copy(&mut vec![std::mem::MaybeUninit::new(0); start + 1]), "more than there is");
        assert_eq!(copied, contents(&known)[..held[0].len() - start]);
        assert!(read.is_intact(), "but for the last {start} bytes");
    }
    drop(held);
    assert_eq!(rig.store.leased_slots(), 1, "the one that is too long for its slot");
}

/// Blocks that wait to be written do not give way to newer ones while the disk can take them: nothing behind them could be written either.
#[test]
fn memory_that_is_full_of_unwritten_blocks_waits_for_the_disk() {
    let files = files(1100);
    let mut rig = Rig::new(with_disk(2, &files, WriteMode::Through));
    let (done, is_stored) = unbounded();
    let mut all = Vec::new();
    for round in 1..=16 {
        let blocks = chain(round, 64);
        all.extend(&blocks);
        for (position, block) in blocks.iter().enumerate() {
            let parent = position.checked_sub(1).map(|before| blocks[before]);
            let description =
                Description { parent, position: position as u32, meta: Arc::default(), tenant: TenantId(0) };
            let done = done.clone();
            let done = move |stored| done.send(stored).expect("the test waits");
            rig.store.put(*block, description, vec![contents(block).into()], done).expect("room");
        }
        for _ in &blocks {
            assert_eq!(is_stored.recv_timeout(PATIENCE), Ok(true));
        }
        rig.wait_until_on_disk(64 * round);
        assert_eq!((rig.store.look_up(&blocks), rig.counter("disk_gone_blocks")), (64, 0));
    }
    rig.events_are_true(&all);
}

/// Several writers of one chain do not keep its order: a block that comes before its parent is written after
/// it.
#[test]
fn blocks_that_come_before_their_parents_are_written_through_too() {
    let files = files(24);
    let blocks = chain(8, 12);
    let mut rig = Rig::new(with_disk(16, &files, WriteMode::Through));
    for position in [3, 1, 2, 7, 0, 11, 5, 4, 6, 10, 9, 8] {
        rig.offload(&blocks, position);
    }
    rig.wait_until_on_disk(12);
    rig.events_are_true(&blocks);
    drop(rig);
    let rig = Rig::new(with_disk(16, &files, WriteMode::Through));
    assert_eq!((rig.survivors.len(), rig.store.look_up(&blocks)), (12, 12));
}

/// A look at a block before or after its load does not make the block recent a second time.
#[test]
fn a_block_that_is_pinned_is_not_used() {
    for is_used in [false, true] {
        let mut rig = Rig::new(no_disk(2));
        let [first, second, third] = [5, 6, 7].map(|seed| chain(seed, 1));
        rig.offload(&first, 0);
        rig.offload(&second, 0);
        let held = if is_used { rig.store.hold_now(&first) } else { rig.store.pin_now(&first) };
        assert_eq!(held.map(|held| held[0].to_bytes()), Some(Some(contents(&first[0]))));
        assert!(rig.store.pin_now(&third).is_none(), "it is not there");
        rig.offload(&third, 0);
        let left = [&first, &second, &third].map(|chain| rig.store.look_up(chain));
        assert_eq!(left, if is_used { [1, 0, 1] } else { [0, 1, 1] });
    }
}

#[test]
fn what_host_memory_has_no_room_for_comes_back_from_the_disk_and_outlives_the_process() {
    for write in [WriteMode::Through, WriteMode::Back] {
        let files = files(24);
        let blocks = chain(3, 16);
        let mut rig = Rig::new(with_disk(4, &files, write));
        (0..16).for_each(|position| rig.offload(&blocks, position));
        let written = if write == WriteMode::Through { 16 } else { rig.store.blocks()[1] };
        rig.wait_until_on_disk(written);
        assert!(written >= 12, "{write:?}: {written}");
        assert_eq!(rig.onboard(&blocks, PATIENCE), 16, "{write:?}");
        rig.wait_until_on_disk(rig.store.blocks()[1]);
        rig.events_are_true(&blocks);
        assert_eq!(rig.counter("checksum_failures"), 0);
        let on_disk = rig.store.blocks()[1] as usize;
        drop(rig);

        let mut rig = Rig::new(with_disk(4, &files, write));
        assert_eq!(rig.survivors.len(), on_disk.min(rig.store.look_up(&blocks)), "{write:?}");
        for survivor in &rig.survivors {
            let position = survivor.description.position as usize;
            assert_eq!(survivor.identity, blocks[position]);
            assert_eq!(survivor.description.parent, position.checked_sub(1).map(|before| blocks[before]));
            assert_eq!(*survivor.description.meta, [position as u8; 40]);
        }
        let kept = rig.store.look_up(&blocks);
        assert!(kept >= 12, "{write:?}: {kept}");
        assert_eq!(rig.onboard(&blocks, PATIENCE), kept);
        rig.events_are_true(&blocks);
    }
}

#[test]
fn a_damaged_block_on_the_disk_is_a_miss_and_is_thrown_away() {
    let files = files(16);
    let blocks = chain(4, 8);
    let mut rig = Rig::new(with_disk(2, &files, WriteMode::Through));
    (0..8).for_each(|position| rig.offload(&blocks, position));
    rig.wait_until_on_disk(8);
    // Every block's first bytes, wherever they are.
    let mut bytes = files.bytes();
    for identity in &blocks[..6] {
        let wanted = &contents(identity)[..64];
        let at = bytes[0].windows(64).position(|window| window == wanted).expect("it is on the disk");
        bytes[0][at + 1000] ^= 4;
    }
    drop(bytes);
    let mut good = 0;
    while rig.store.look_up(&blocks) > 0 && good < 8 {
        good += 1;
        rig.onboard(&blocks, PATIENCE);
    }
    assert!(rig.counter("disk_missed_blocks") >= 1);
    rig.events_are_true(&blocks);
    assert_eq!(rig.pool.used_count(), 0);
}

/// A request's number is used again while a read of its first use is under way.
#[test]
fn an_old_read_never_lands_in_a_new_load_with_the_same_number() {
    let files = files(24);
    let blocks = chain(9, 12);
    let mut rig = Rig::new(with_disk(16, &files, WriteMode::Through));
    (0..12).for_each(|position| rig.offload(&blocks, position));
    rig.wait_until_on_disk(12);
    drop(rig);
    let slow = Faults { delay: 0.7, delay_polls_max: 40, ..Faults::default() };
    let mut rig = Rig::new(Behind { host_slots: 16, disk: Some((files, slow)), write: WriteMode::Through });
    for round in 0..40_u64 {
        rig.next_request = 1000;
        let from = (round as usize * 5) % 8;
        let within = Duration::from_micros(200 + 150 * (round % 7));
        // Every byte that is said to be good is compared.
        rig.onboard(&blocks[from..], within);
        if round % 5 == 0 {
            rig.store.forget(vec![blocks[3], blocks[7]]);
        }
    }
    assert_eq!(rig.pool.used_count(), 0);
}

#[test]
fn what_is_forgotten_on_its_way_stays_forgotten() {
    let files = files(40);
    let mut rig = Rig::new(with_disk(8, &files, WriteMode::Through));
    let chains: Vec<Vec<BlockIdentity>> = (0..12).map(|number| chain(200 + number, 2)).collect();
    for of in &chains {
        rig.offload(of, 0);
        rig.offload(of, 1);
        rig.store.forget(of.clone());
    }
    rig.wait_until_on_disk(0);
    assert_eq!(rig.store.blocks(), [0, 0]);
    rig.events_are_true(&chains.concat());
    drop(rig);
    let rig = Rig::new(with_disk(8, &files, WriteMode::Through));
    assert_eq!(rig.survivors, [], "nothing comes back after a restart");
}

#[test]
fn what_is_forgotten_just_before_the_end_stays_forgotten() {
    for is_written in [true, false] {
        let files = files(40);
        let mut rig = Rig::new(with_disk(8, &files, WriteMode::Through));
        let blocks = chain(300, 4);
        (0..4).for_each(|position| rig.offload(&blocks, position));
        if is_written {
            rig.wait_until_on_disk(4);
            assert_eq!(rig.store.blocks()[1], 4);
        }
        rig.store.forget(blocks);
        // The store ends: results of the disk are not taken in any more.
        drop(rig);
        let rig = Rig::new(with_disk(8, &files, WriteMode::Through));
        assert_eq!(rig.survivors, [], "written before: {is_written}");
    }
}
