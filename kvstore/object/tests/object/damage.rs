//! Objects whose contents are not what was stored: never served, detected by two reads, deleted, healed by the
//! next put.

use kvstore_object::{Location, ObjectConfig, ObjectTier, Outcome};

use crate::support::{Directory, FINGERPRINT, Random, assert_true, blocks, chain, quick, soon};

const PAYLOAD: usize = 500;

fn config(directory: &Directory) -> ObjectConfig {
    let config = quick(ObjectConfig::new(Location::Directory(directory.0.clone()), FINGERPRINT));
    ObjectConfig { retry_burst: 1000, retry_percent: 100, ..config }
}

#[tokio::test]
async fn flipped_bits_and_cut_ends_are_misses() {
    let seed = 0xdead;
    println!("seed {seed}");
    let mut random = Random(seed);
    let directory = Directory::new();
    let chain = chain(1, 4);
    let (mut served, mut damaged) = (0, 0);
    for round in 0..400 {
        let tier = ObjectTier::open(config(&directory)).expect("opens");
        assert_eq!(tier.put(&blocks(&chain, PAYLOAD), soon()).await, Ok(Outcome::Stored), "round {round}");
        let file = directory.files().pop().expect("one object");
        let mut bytes = std::fs::read(&file).expect("readable");
        if round % 2 == 0 {
            let bit = random.below(bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
        } else {
            bytes.truncate(random.below(bytes.len()));
        }
        std::fs::write(&file, bytes).expect("writable");

        // A reader with the index in its cache, then one without.
        for reader in [&tier, &ObjectTier::open(config(&directory)).expect("opens")] {
            let read = reader.get(&chain, 0..4, soon()).await;
            assert_true(&read, &chain, PAYLOAD);
            served += usize::from(read.len() == 4);
            damaged += reader.counters().get("damaged_objects");
        }
        let reader = ObjectTier::open(config(&directory)).expect("opens");
        if reader.look_up(&chain, soon()).await > 0 {
            reader.delete(chain[3], soon()).await.expect("deleted for the next round");
        }
        assert!(directory.files().is_empty(), "round {round}: the damaged object was deleted");
    }
    println!("{damaged} damaged objects, {served} reads not hit by the damage");
    assert!(damaged >= 380, "{damaged}");
    assert!(served < 60, "{served}: only padding between payloads may be spoilt unnoticed");
}

#[tokio::test]
async fn a_wrong_object_under_a_key_is_never_served() {
    let directory = Directory::new();
    let (ours, theirs) = (chain(1, 4), chain(2, 4));
    let tier = ObjectTier::open(config(&directory)).expect("opens");
    tier.put(&blocks(&ours, PAYLOAD), soon()).await.expect("stored");
    let ours_file = directory.files().pop().expect("one object");
    tier.put(&blocks(&theirs, PAYLOAD), soon()).await.expect("stored");
    let both = directory.files();
    let theirs_file = both.iter().find(|file| **file != ours_file).expect("two objects");
    std::fs::copy(theirs_file, &ours_file).expect("copied");

    let reader = ObjectTier::open(config(&directory)).expect("opens");
    assert_eq!(reader.look_up(&ours, soon()).await, 0);
    assert!(reader.get(&ours, 0..4, soon()).await.is_empty());
    assert_eq!(reader.counters().get("damaged_objects"), 1);
    assert_eq!(reader.look_up(&theirs, soon()).await, 4);
    assert_eq!(directory.files(), std::slice::from_ref(theirs_file), "the wrong one is gone");
    assert_eq!(reader.put(&blocks(&ours, PAYLOAD), soon()).await, Ok(Outcome::Stored), "healed");
    assert_true(&reader.get(&ours, 0..4, soon()).await, &ours, PAYLOAD);
}

#[tokio::test]
async fn another_layout_is_never_served() {
    let directory = Directory::new();
    let chain = chain(1, 4);
    let tier = ObjectTier::open(config(&directory)).expect("opens");
    tier.put(&blocks(&chain, PAYLOAD), soon()).await.expect("stored");
    let file = directory.files().pop().expect("one object");
    let other = ObjectTier::open(ObjectConfig { layout_fingerprint: 0xbad, ..config(&directory) });
    let other = other.expect("opens");
    assert_eq!(other.look_up(&chain, soon()).await, 0, "another key");
    let moved = file.to_string_lossy().replace("000000000000feed", "0000000000000bad");
    let moved = std::path::PathBuf::from(moved);
    std::fs::create_dir_all(moved.parent().expect("a folder")).expect("created");
    std::fs::copy(&file, &moved).expect("copied");
    let other = ObjectTier::open(other.config().clone()).expect("opens");
    assert_eq!(other.look_up(&chain, soon()).await, 0, "the object says its layout");
    assert_eq!(other.counters().get("damaged_objects"), 1);
}

#[tokio::test]
async fn without_the_right_to_delete_damage_is_avoided() {
    let directory = Directory::new();
    let chain = chain(1, 4);
    let config = ObjectConfig { delete_damaged: false, ..config(&directory) };
    let tier = ObjectTier::open(config.clone()).expect("opens");
    tier.put(&blocks(&chain, PAYLOAD), soon()).await.expect("stored");
    let file = directory.files().pop().expect("one object");
    std::fs::write(&file, "nonsense").expect("writable");
    let reader = ObjectTier::open(config).expect("opens");
    assert_eq!(reader.look_up(&chain, soon()).await, 0);
    let requests = reader.counters().get("requests");
    assert_eq!(reader.look_up(&chain, soon()).await, 0);
    assert_eq!(reader.counters().get("requests"), requests, "not asked for again");
    assert_eq!(reader.put(&blocks(&chain, PAYLOAD), soon()).await, Ok(Outcome::Throttled));
    assert!(file.exists());
}
