//! A pool in a device's memory: blocks go and come by copies that end late, out of order, or not at all.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_memory::testing::{Abilities, CopierDouble, CopyFaults, DeviceDouble};
use kvstore_store::{Onboard, StoreEvent, WriteMode};

use crate::rig::{BLOCK, PATIENCE, Rig, chain, contents, files, no_disk, read, with_disk, write};

const POOL_BYTES: usize = 64 * (BLOCK + 64);

fn memory() -> Arc<DeviceDouble> {
    DeviceDouble::new(POOL_BYTES, Abilities::default())
}

fn slow(polls_max: u64) -> CopyFaults {
    CopyFaults { polls_max, ..CopyFaults::default() }
}

fn rest(rig: &mut Rig) {
    let started = Instant::now();
    while rig.store.leased_slots() > 0 || rig.pool.used_count() > 0 {
        assert!(
            started.elapsed() < PATIENCE,
            "{} leased, {} used",
            rig.store.leased_slots(),
            rig.pool.used_count()
        );
        rig.listen();
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn blocks_go_from_the_device_to_host_and_disk_and_come_back_as_they_were() {
    let disk = files(64);
    let copier = CopierDouble::new(1, 8, slow(200));
    let mut rig = Rig::on_device(with_disk(8, &disk, WriteMode::Through), memory(), copier);
    let talk = chain(1, 24);
    (0..24).for_each(|position| rig.offload(&talk, position));
    rig.wait_until_on_disk(24);
    assert_eq!(rig.onboard(&talk[16..], PATIENCE), 8);
    // Three times as many as host memory holds at a time, and more than the copier takes at once.
    assert_eq!(rig.onboard(&talk, PATIENCE), 24);
    rest(&mut rig);
    rig.events_are_true(&talk);
    assert_eq!(rig.counter("device_failures"), 0);
}

/// A load whose time is up while a device writes to its slots ends only when that is over: what it says is not there is
/// not written to any more.
#[test]
fn a_late_load_gives_its_slots_back_untouched_from_then_on() {
    let copier = CopierDouble::new(2, 64, slow(300));
    let mut rig = Rig::on_device(no_disk(32), memory(), copier);
    let talk = chain(2, 16);
    (0..16).for_each(|position| rig.offload(&talk, position));
    for round in 0..6 {
        let targets: Vec<_> = talk.iter().map(|_| rig.pool.acquire().expect("slot")).collect();
        targets.iter().for_each(|slot| write(slot, &[0xEE; BLOCK]));
        let deadline = Instant::now() + Duration::from_micros(500 * round);
        let request = 1000 + round;
        assert!(
            rig.store.onboard(Onboard { request, chain: talk.clone(), first: 0, targets, deadline }).is_ok()
        );
        let (slots, verified) = loop {
            if let StoreEvent::Onboarded { request: answered, slots, verified } = rig.next() {
                assert_eq!(answered, request);
                break (slots, verified);
            }
        };
        for (slot, identity) in slots.iter().zip(&talk).take(verified) {
            assert!(read(slot) == contents(identity), "round {round}");
        }
        // A worker that computes into the other slots must not find them overwritten.
        slots[verified..].iter().for_each(|slot| write(slot, &[0x11; BLOCK]));
        std::thread::sleep(Duration::from_millis(20));
        assert!(slots[verified..].iter().all(|slot| read(slot) == [0x11; BLOCK]), "round {round}");
    }
    rest(&mut rig);
}

#[test]
fn a_copy_that_fails_ends_the_chain_there_and_nothing_is_left() {
    let seed = 3;
    println!("seed {seed}");
    let copier = CopierDouble::new(seed, 16, CopyFaults { polls_max: 50, fail_one_in: 6 });
    let mut rig = Rig::on_device(no_disk(40), memory(), copier);
    let mut short = 0;
    for round in 0..40 {
        let talk = chain(round, 8);
        (0..8).for_each(|position| rig.offload(&talk, position));
        let here = rig.store.look_up(&talk);
        // `onboard` compares every byte of what is said to be good.
        short += usize::from(here > 0 && rig.onboard(&talk[..here], PATIENCE) < here);
        let request = 10_000 + round;
        let targets = talk[..here].iter().map(|_| rig.pool.acquire().expect("slot")).collect();
        let deadline = Instant::now() + PATIENCE;
        let job = Onboard { request, chain: talk[..here].to_vec(), first: 0, targets, deadline };
        assert!(rig.store.onboard(job).is_ok());
        rig.store.cancel(request);
    }
    rest(&mut rig);
    assert!(rig.counter("device_failures") > 20 && short > 5, "{short} of 40");
}

#[test]
fn a_lost_device_costs_its_blocks_and_nobody_waits() {
    let device = memory();
    let copier = CopierDouble::new(4, 16, slow(20));
    let mut rig = Rig::on_device(no_disk(32), Arc::clone(&device), copier);
    let talk = chain(4, 8);
    (0..8).for_each(|position| rig.offload(&talk, position));
    let targets: Vec<_> = talk.iter().map(|_| rig.pool.acquire().expect("slot")).collect();
    device.kill();
    let job = Onboard { request: 1, chain: talk, first: 0, targets, deadline: Instant::now() + PATIENCE };
    assert!(rig.store.onboard(job).is_ok());
    let started = Instant::now();
    loop {
        if let StoreEvent::Onboarded { verified, .. } = rig.next() {
            assert_eq!(verified, 0);
            break;
        }
    }
    assert!(started.elapsed() < Duration::from_secs(5));
    rest(&mut rig);
}
