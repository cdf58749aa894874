//! Every interleaving (up to three preemptions) of a reader and the writer on small trees, by loom. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p router-radix --test loom --release`; it compiles to nothing otherwise.
//!
//! The code is the crate's own, with nodes of three blocks. Each of the protocol's three ideas (complete before
//! linked, a second look at the shape, grace periods) is also broken on purpose, and the same models must fail.

#![cfg(loom)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use loom::sync::Arc;
use loom::thread;
use router_radix::{Index, IndexConfig, Member, PlantedFault, Tier, break_on_purpose};

/// The switch is global, so models run one at a time.
static TURN: Mutex<()> = Mutex::new(());

fn check(broken: PlantedFault, model: fn()) -> bool {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    break_on_purpose(broken);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 50_000;
    let passed = catch_unwind(AssertUnwindSafe(|| builder.check(model))).is_ok();
    break_on_purpose(PlantedFault::Nothing);
    passed
}

struct Rig {
    index: Arc<Index>,
    a: Member,
    b: Member,
}

fn rig() -> Rig {
    let index = Arc::new(Index::new(IndexConfig::default()));
    let a = index.write().join().expect("room");
    let b = index.write().join().expect("room");
    Rig { index, a, b }
}

fn store(index: &Index, member: Member, parent: Option<u64>, blocks: &[u64]) {
    let outcome = index.write().stored(member, Tier::Device, parent, blocks, blocks);
    assert_eq!(outcome.changed, blocks.len() as u64);
}

/// While a second member splits the node, the first one's prefix is always seen whole, and the second never
/// has more than it stored.
fn split() {
    let Rig { index, a, b } = rig();
    store(&index, a, None, &[1, 2, 3]);
    let mut reader = index.reader().expect("a reader");
    let writer = {
        let index = Arc::clone(&index);
        thread::spawn(move || store(&index, b, None, &[1, 9]))
    };
    let overlaps = reader.overlaps(&[1, 2, 3]);
    assert_eq!(overlaps.device(a), 3);
    assert!(overlaps.device(b) <= 1, "{}", overlaps.device(b));
    writer.join().expect("writer");
    let overlaps = reader.overlaps(&[1, 9]);
    assert_eq!((overlaps.device(a), overlaps.device(b)), (1, 2));
}

/// A member that holds only the beginning becomes a holder of the whole upper part; a reader that began before must not take
/// it for a holder of the whole old node.
fn split_with_partial_holder() {
    let Rig { index, a, b } = rig();
    store(&index, a, None, &[1, 2, 3]);
    store(&index, b, None, &[1]);
    let mut reader = index.reader().expect("a reader");
    let writer = {
        let index = Arc::clone(&index);
        thread::spawn(move || store(&index, a, Some(1), &[9]))
    };
    let overlaps = reader.overlaps(&[1, 2, 3]);
    assert_eq!((overlaps.device(a), overlaps.device(b)), (3, 1));
    writer.join().expect("writer");
}

/// A removed prefix may be found or not, but its node, reused for another prefix, never counts for it.
fn reuse() {
    let Rig { index, a, b } = rig();
    store(&index, b, None, &[5, 6, 7]);
    store(&index, a, None, &[1, 2]);
    let mut reader = index.reader().expect("a reader");
    let writer = {
        let index = Arc::clone(&index);
        thread::spawn(move || {
            let mut writer = index.write();
            writer.removed(a, Tier::Device, &[2, 1]);
            writer.sweep();
            // The same blocks after another prefix, in the freed node.
            writer.stored(b, Tier::Device, Some(7), &[8, 9], &[1, 2]);
        })
    };
    let overlaps = reader.overlaps(&[1, 2]);
    assert!(overlaps.device(a) <= 2);
    assert_eq!(overlaps.device(b), 0);
    writer.join().expect("writer");
}

/// Nodes grow at their end and shrink again during a look-up.
fn grow_and_shrink() {
    let Rig { index, a, .. } = rig();
    store(&index, a, None, &[1]);
    let mut reader = index.reader().expect("a reader");
    let writer = {
        let index = Arc::clone(&index);
        thread::spawn(move || {
            store(&index, a, Some(1), &[2, 3, 4]);
            index.write().removed(a, Tier::Device, &[4, 3]);
        })
    };
    let held = reader.overlaps(&[1, 2, 3, 4]).device(a);
    assert!((1..=4).contains(&held), "{held}");
    writer.join().expect("writer");
    assert_eq!(reader.overlaps(&[1, 2, 3, 4]).device(a), 2);
}

/// A slot gets another hash after a truncation: a holder of the old block never counts for the new one.
fn rewrite() {
    let Rig { index, a, b } = rig();
    store(&index, a, None, &[1, 2, 3]);
    index.write().stored(b, Tier::Device, None, &[1, 2, 3], &[1, 2, 3]);
    let mut reader = index.reader().expect("a reader");
    let writer = {
        let index = Arc::clone(&index);
        thread::spawn(move || {
            let mut writer = index.write();
            writer.removed(b, Tier::Device, &[3, 2, 1]);
            writer.removed(a, Tier::Device, &[3]);
            writer.stored(a, Tier::Device, Some(2), &[4], &[4]);
        })
    };
    let overlaps = reader.overlaps(&[1, 2, 4]);
    assert!(overlaps.device(b) <= 2, "{}", overlaps.device(b));
    assert!((2..=3).contains(&overlaps.device(a)));
    writer.join().expect("writer");
}

#[test]
fn every_interleaving_is_right() {
    for (name, model) in [
        ("split", split as fn()),
        ("split with a partial holder", split_with_partial_holder),
        ("reuse", reuse),
        ("grow and shrink", grow_and_shrink),
        ("rewrite", rewrite),
    ] {
        let started = std::time::Instant::now();
        assert!(check(PlantedFault::Nothing, model), "{name}");
        println!("loom: {name}: every interleaving is right ({:.1} s)", started.elapsed().as_secs_f64());
    }
}

#[test]
fn each_broken_protocol_is_noticed() {
    for (broken, model) in [
        (PlantedFault::EarlySplit, split as fn()),
        (PlantedFault::NoSecondLook, split_with_partial_holder),
        (PlantedFault::NoGrace, reuse),
    ] {
        assert!(!check(broken, model), "{broken:?} was not noticed");
        println!("loom: {broken:?} is noticed");
    }
}
