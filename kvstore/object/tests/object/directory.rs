//! The tier over a directory: runs, partial runs, time to live, concurrent writers, and a random model test.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use kvstore_object::{Location, ObjectConfig, ObjectError, ObjectTier, Outcome, SweepReport};

use crate::support::{Directory, FINGERPRINT, Random, assert_true, blocks, chain, later_clock, quick, soon};

const PAYLOAD: usize = 700;

fn config(directory: &Directory) -> ObjectConfig {
    quick(ObjectConfig::new(Location::Directory(directory.0.clone()), FINGERPRINT))
}

#[tokio::test]
async fn runs_come_back_bit_for_bit() {
    let directory = Directory::new();
    let tier = ObjectTier::open(config(&directory)).expect("opens");
    let chain = chain(1, 14);
    assert_eq!(tier.look_up(&chain, soon()).await, 0);
    for run in chain[..12].chunks(4) {
        assert_eq!(tier.put(&blocks(run, PAYLOAD), soon()).await, Ok(Outcome::Stored));
        assert_eq!(tier.put(&blocks(run, PAYLOAD), soon()).await, Ok(Outcome::Present));
    }
    assert_eq!(directory.files().len(), 3);
    let other = ObjectTier::open(config(&directory)).expect("another cluster");
    assert_eq!(other.look_up(&chain, soon()).await, 12);
    assert_eq!(other.look_up(&chain[..7], soon()).await, 4, "half a run is none");
    for (from, to) in [(0, 12), (0, 14), (3, 9), (5, 6), (11, 12)] {
        let read = other.get(&chain, from..to, soon()).await;
        assert_eq!(read.len(), to.min(12) - from, "{from}..{to}");
        assert_true(&read, &chain[from..to], PAYLOAD);
    }
    assert!(other.get(&chain, 12..14, soon()).await.is_empty());
    assert!(
        other.get(&chain, 3..3, soon()).await.is_empty() && other.get(&[], 0..4, soon()).await.is_empty()
    );
    tier.delete(chain[7], soon()).await.expect("deleted");
    tier.delete(chain[7], soon()).await.expect("not there is no error");
    let fresh = ObjectTier::open(config(&directory)).expect("opens");
    assert_eq!(fresh.look_up(&chain, soon()).await, 4, "a chain ends at its first gap");
    for (first, found) in [(0, 4), (3, 4), (4, 4), (7, 4), (8, 12), (11, 12), (12, 12), (13, 12)] {
        assert_eq!(fresh.look_up_from(&chain, first, soon()).await, found, "from {first}");
    }
    assert_true(&fresh.get(&chain, 0..12, soon()).await, &chain[..4], PAYLOAD);
}

#[tokio::test]
async fn empty_and_uneven_payloads_are_fine() {
    let directory = Directory::new();
    let tier = ObjectTier::open(config(&directory)).expect("opens");
    let chain = chain(1, 4);
    let mut run = blocks(&chain, 0);
    run[2].payload = vec![5; 333].into();
    assert_eq!(tier.put(&run, soon()).await, Ok(Outcome::Stored));
    let read = tier.get(&chain, 0..4, soon()).await;
    let lengths: Vec<usize> = read.iter().map(|block| block.payload.len()).collect();
    assert_eq!(lengths, [0, 0, 333, 0]);
    assert_eq!(tier.get(&chain, 0..2, soon()).await.len(), 2);
}

#[tokio::test]
async fn parts_of_runs_only_when_asked() {
    let directory = Directory::new();
    let chain = chain(1, 23);
    let whole = ObjectTier::open(ObjectConfig { run_blocks: 16, ..config(&directory) }).expect("opens");
    let refused = whole.put(&blocks(&chain[..4], PAYLOAD), soon()).await;
    assert!(matches!(refused, Err(ObjectError::RunLength { blocks: 4, .. })), "{refused:?}");
    let partial = ObjectConfig { run_blocks: 16, store_partial: true, ..config(&directory) };
    let tier = ObjectTier::open(partial.clone()).expect("opens");
    let odd = tier.put(&blocks(&chain[16..23], PAYLOAD), soon()).await;
    assert!(matches!(odd, Err(ObjectError::RunLength { blocks: 7, .. })), "{odd:?}");
    assert_eq!(tier.put(&blocks(&chain[..16], PAYLOAD), soon()).await, Ok(Outcome::Stored));
    assert_eq!(tier.put(&blocks(&chain[16..18], PAYLOAD), soon()).await, Ok(Outcome::Stored));
    assert_eq!(tier.put(&blocks(&chain[16..20], PAYLOAD), soon()).await, Ok(Outcome::Stored));

    assert_eq!(whole.look_up(&chain, soon()).await, 16);
    let reader = ObjectTier::open(partial).expect("opens");
    let before = reader.counters().get("requests");
    assert_eq!(reader.look_up(&chain, soon()).await, 20, "the longest part");
    assert_eq!(reader.counters().get("requests") - before, 1 + 3, "one run, and parts of 4, 2 and 1");
    assert_eq!(reader.look_up(&chain[..19], soon()).await, 18);
    assert_eq!(reader.look_up(&chain[..17], soon()).await, 16);
    let read = reader.get(&chain, 10..23, soon()).await;
    assert_eq!(read.len(), 10);
    assert_true(&read, &chain[10..23], PAYLOAD);
}

#[tokio::test]
async fn old_objects_are_misses_are_replaced_and_are_swept() {
    let directory = Directory::new();
    let clock = later_clock();
    let config = ObjectConfig { ttl: Some(Duration::from_secs(3600)), ..config(&directory) };
    let open = || ObjectTier::open_with_clock(config.clone(), clock.clone()).expect("opens");
    let (old, young) = (chain(1, 8), chain(2, 8));
    let tier = open();
    for run in old.chunks(4) {
        assert_eq!(tier.put(&blocks(run, PAYLOAD), soon()).await, Ok(Outcome::Stored));
    }
    clock.advance(Duration::from_secs(3601));
    for tier in [&tier, &open()] {
        assert_eq!(tier.look_up(&old, soon()).await, 0);
        assert!(tier.get(&old, 0..8, soon()).await.is_empty());
        assert!(tier.counters().get("expired_runs") > 0);
    }
    assert_eq!(tier.put(&blocks(&old[..4], PAYLOAD), soon()).await, Ok(Outcome::Stored), "replaced");
    // The file system's time is the real one; the clock is set forward, so all files are old.
    assert_eq!(open().look_up(&old, soon()).await, 4);
    let stranger = directory.0.join("kvasir/v1/00000000000000aa/ab");
    std::fs::create_dir_all(&stranger).expect("folder");
    std::fs::write(stranger.join("notes.txt"), "keep").expect("file");
    let limited = tier.sweep(1, soon()).await.expect("sweeps");
    assert_eq!((limited.deleted, limited.complete), (1, false));
    let rest = tier.sweep(100, soon()).await.expect("sweeps");
    assert_eq!((rest.deleted, rest.complete), (1, true));
    assert_eq!(directory.files(), [stranger.join("notes.txt")], "only our own files go");
    assert_eq!(open().look_up(&old, soon()).await, 0);

    assert_eq!(tier.put(&blocks(&young[..4], PAYLOAD), soon()).await, Ok(Outcome::Stored));
    let keep = ObjectTier::open(ObjectConfig { ttl: Some(Duration::from_secs(3600)), ..config.clone() });
    let report = keep.expect("opens").sweep(100, soon()).await.expect("sweeps");
    assert_eq!(report, SweepReport { listed: 2, deleted: 0, complete: true });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_many_writers_one_stores() {
    let directory = Directory::new();
    for round in 0..20 {
        let chain = chain(round, 4);
        let tiers: Vec<_> =
            (0..8).map(|_| Arc::new(ObjectTier::open(config(&directory)).expect("opens"))).collect();
        let writers = tiers.iter().cloned().map(|tier| {
            let run = blocks(&chain, PAYLOAD);
            tokio::spawn(async move { tier.put(&run, soon()).await })
        });
        let outcomes = join_all(writers).await;
        let stored = outcomes.iter().filter(|outcome| matches!(outcome, Ok(Ok(Outcome::Stored)))).count();
        let present = outcomes.iter().filter(|outcome| matches!(outcome, Ok(Ok(Outcome::Present)))).count();
        assert_eq!((stored, present), (1, 7), "round {round}: {outcomes:?}");
        assert_true(&tiers[3].get(&chain, 0..4, soon()).await, &chain, PAYLOAD);
    }
}

#[tokio::test]
async fn another_run_length_is_a_miss_and_stays() {
    let directory = Directory::new();
    let chain = chain(1, 16);
    let long = ObjectTier::open(ObjectConfig { run_blocks: 8, ..config(&directory) }).expect("opens");
    for run in chain.chunks(8) {
        assert_eq!(long.put(&blocks(run, PAYLOAD), soon()).await, Ok(Outcome::Stored));
    }
    // Runs of 4 end where runs of 8 end: the second and the fourth key are the same.
    let short = ObjectTier::open(config(&directory)).expect("opens");
    assert_eq!(short.put(&blocks(&chain[..4], PAYLOAD), soon()).await, Ok(Outcome::Stored));
    assert_eq!(short.look_up(&chain, soon()).await, 4);
    assert_true(&short.get(&chain, 0..16, soon()).await, &chain[..4], PAYLOAD);
    assert!(short.counters().get("foreign_runs") > 0);
    assert_eq!(short.counters().get("damaged_objects"), 0);
    let fresh = ObjectTier::open(ObjectConfig { run_blocks: 8, ..config(&directory) }).expect("opens");
    assert_eq!(fresh.look_up(&chain, soon()).await, 16, "untouched");
}

/// Random puts, deletions, look-ups and gets by two tiers without caches, against a set of stored runs.
#[tokio::test]
async fn random_operations_agree_with_a_model() {
    let seed = 0x0b1ec7;
    println!("seed {seed}");
    let directory = Directory::new();
    let mut random = Random(seed);
    let none = Duration::ZERO;
    let config = ObjectConfig { present_ttl: none, absent_ttl: none, ..config(&directory) };
    let tiers = [0, 1].map(|_| ObjectTier::open(config.clone()).expect("opens"));
    let chains: Vec<_> = (0..5).map(|conversation| chain(conversation, 18)).collect();
    let mut stored = BTreeSet::new();
    let mut hits = 0;
    for step in 0..1500 {
        let (number, run) = (random.below(chains.len()), random.below(4));
        let (chain, tier) = (&chains[number], &tiers[random.below(2)]);
        let there = (0..4).take_while(|run| stored.contains(&(number, *run))).count() * 4;
        match random.below(8) {
            0..3 => {
                let outcome = tier.put(&blocks(&chain[run * 4..run * 4 + 4], PAYLOAD), soon()).await;
                let expected = if stored.insert((number, run)) { Outcome::Stored } else { Outcome::Present };
                assert_eq!(outcome, Ok(expected), "step {step}");
            }
            3 => {
                tier.delete(chain[run * 4 + 3], soon()).await.expect("deletes");
                stored.remove(&(number, run));
            }
            4..6 => assert_eq!(tier.look_up(chain, soon()).await, there, "step {step}"),
            _ => {
                let from = random.below(18);
                let to = from + random.below(19 - from);
                let expected = (from..to).take_while(|block| stored.contains(&(number, block / 4))).count();
                let read = tier.get(chain, from..to, soon()).await;
                assert_eq!(read.len(), expected, "step {step}: {from}..{to}");
                assert_true(&read, &chain[from..to], PAYLOAD);
                hits += expected;
            }
        }
    }
    assert!(hits > 500, "{hits} blocks read: the test saw hits");
}
