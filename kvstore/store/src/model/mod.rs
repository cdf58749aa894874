//! A model test of a block's states (the picture in the crate's documentation): the real store on one thread, with a disk, tiers of
//! other nodes, clients and a clock that the test plays, and faults drawn from a seed.
//!
//! After each round of the store's thread: what is served is what was stored, events alternate, forgotten blocks are gone, and
//! the counts agree. Every [`QUIET_EVERY`] steps everything that is under way is answered: every request has ended once, no slot is
//! held, and events, catalog and disk tell of the same blocks.
//!
//! `KVASIR_STEPS` and `KVASIR_SEED` set how many steps are taken, and the seed of the first world. A panic prints the world's seed.

mod disk;
mod far;
mod pool;
mod retained;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use kvstore_block::BlockIdentity;

use crate::fault_injection::{Planted, plant};
use world::World;

/// Bytes of a block.
const BLOCK: usize = 256;
/// Steps of one world.
const WORLD_STEPS: u64 = 5_000;
/// Steps between two times of quiet.
const QUIET_EVERY: u64 = 250;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// From `0` to `end`, without it.
    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// True this often of 100 times.
    fn percent(&mut self, chance: usize) -> bool {
        self.below(100) < chance
    }

    fn of<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len())]
    }
}

/// The bytes of a block: no other block has them.
fn content(identity: &BlockIdentity) -> [u8; BLOCK] {
    let mut random = Random(identity.short() ^ 0x5eed);
    let mut bytes = [0; BLOCK];
    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()));
    bytes
}

fn setting(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|error| panic!("{name}={text}: {error}")),
        Err(_) => default,
    }
}

/// Runs worlds until the steps are taken. Panics with what is wrong.
fn run(first_seed: u64, steps: u64) {
    struct OnPanic(u64);
    impl Drop for OnPanic {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("KVASIR_SEED={} KVASIR_STEPS={WORLD_STEPS} takes this world again", self.0);
            }
        }
    }
    let mut totals = world::Totals::default();
    for seed in first_seed..first_seed + steps.div_ceil(WORLD_STEPS) {
        let _seed = OnPanic(seed);
        totals += World::new(seed).run(WORLD_STEPS);
    }
    eprintln!("{steps} steps from seed {first_seed}: {totals:?}");
    let is_enough = steps >= 20 * WORLD_STEPS;
    assert!(!is_enough || totals.is_everything_used(), "some part of the model was never used: {totals:?}");
}

#[test]
fn blocks_go_through_their_states() {
    run(setting("KVASIR_SEED", 1), setting("KVASIR_STEPS", 100_000));
}

#[test]
fn planted_faults_are_found() {
    let faults = [
        (Planted::ForgottenWrite, "a block that was forgotten is there"),
        (Planted::LostTombstone, "the disk would give back a block that is gone"),
        (Planted::DamageServed, "another block"),
        (Planted::LostWaiter, "a load waits for a read that does not know of it"),
        (Planted::KeptLease, "leases at pools that never end"),
        (Planted::SilentRemoval, "stored twice"),
        (Planted::LostRetention, "a block that is retained is not there"),
        (Planted::LostWrite, "guards of writes to the disk exist"),
    ];
    for (fault, expected) in faults {
        plant(Some(fault));
        let found = (1..=20).find_map(|seed| {
            let run = catch_unwind(AssertUnwindSafe(|| World::new(seed).run(WORLD_STEPS)));
            let reason = run.err()?;
            let text = reason.downcast_ref::<String>().cloned();
            let text = text.or_else(|| reason.downcast_ref::<&str>().map(|&text| text.to_owned()));
            Some((seed, text.unwrap_or_default()))
        });
        plant(None);
        let (seed, text) = found.unwrap_or_else(|| panic!("{fault:?} is not found in 20 worlds"));
        assert!(text.contains(expected), "{fault:?} is found in world {seed} by another check: {text}");
        eprintln!("{fault:?} is found in world {seed}: {text}");
    }
}
