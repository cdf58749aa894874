//! Hit ratios of the policies: requests by Zipf's law with scans in between, where LRU evicts blocks that it
//! needs.

use kvstore_catalog::PolicyKind;

use crate::bed::{self, ANYBODY, Random, TIER, catalog, identity, store};

const SLOTS: u32 = 1_000;
const BLOCKS: usize = 20_000;
const REQUESTS: usize = 200_000;
const EXPONENT: f64 = 0.9;

/// Cumulated shares of the blocks.
fn zipf() -> Vec<f64> {
    let mut sum = 0.0;
    let mut shares: Vec<f64> = (1..=BLOCKS)
        .map(|rank| {
            sum += (rank as f64).powf(-EXPONENT);
            sum
        })
        .collect();
    shares.iter_mut().for_each(|share| *share /= sum);
    shares
}

/// Hits among the requests that are not scans. Halfway the popular blocks change places.
fn hits(policy: PolicyKind, shares: &[f64], seed: u64) -> f64 {
    let catalog = catalog(policy, SLOTS);
    let mut random = Random(seed);
    let (mut hit, mut scanned) = (0, 1 << 40);
    for request in 0..REQUESTS {
        let share = random.share();
        let rank = shares.partition_point(|&upto| upto < share) as u64;
        let block = rank + if request > REQUESTS / 2 { 7_000_000 } else { 1 };
        match catalog.lease(TIER, &identity(block)) {
            Some(lease) => {
                hit += 1;
                drop(lease);
            }
            None => drop(store(&catalog, ANYBODY, block, None)),
        }
        if request % 2_000 == 0 {
            (0..SLOTS).for_each(|_| {
                scanned += 1;
                store(&catalog, ANYBODY, scanned, None);
            });
        }
    }
    catalog.debug_check();
    hit as f64 / REQUESTS as f64
}

#[test]
fn s3_fifo_and_cost_beat_lru_where_scans_come_by() {
    let shares = zipf();
    for seed in [1, 2] {
        let [lru, s3_fifo, cost] =
            [PolicyKind::Lru, PolicyKind::S3Fifo, PolicyKind::Cost].map(|policy| hits(policy, &shares, seed));
        println!("seed {seed}: hit ratio lru {lru:.3}, s3-fifo {s3_fifo:.3}, cost {cost:.3}");
        assert!(s3_fifo > lru * 1.1 && cost > lru * 1.1, "seed {seed}: {lru} {s3_fifo} {cost}");
    }
}

/// At equal use, blocks that are dear to recompute stay, and cheap ones go.
#[test]
fn cost_keeps_what_is_dear() {
    let catalog = catalog(PolicyKind::Cost, SLOTS);
    let mut random = Random(5);
    for _ in 0..50_000 {
        let block = random.draw(4 * u64::from(SLOTS)) + 1;
        if catalog.lease(TIER, &identity(block)).is_none() {
            let seconds = if block.is_multiple_of(4) { 10.0 } else { 1.0 };
            let slot = bed::reserve(&catalog, ANYBODY).0.expect("a slot");
            slot.fill().complete(0, 64).register(identity(block), None, seconds);
        }
    }
    let held = |dear| {
        let blocks = (1..=4 * u64::from(SLOTS)).filter(|block| block.is_multiple_of(4) == dear);
        blocks.filter(|&block| catalog.contains(&identity(block))).count()
    };
    println!("of {SLOTS} slots: {} dear blocks, {} cheap ones", held(true), held(false));
    assert!(held(true) > 9 * SLOTS as usize / 10, "1000 dear blocks exist, {} are here", held(true));
}
