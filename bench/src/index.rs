//! Prefix look-ups in the index, beside the plain way: a hash set per worker, asked block by block.

use std::collections::HashSet;
use std::hint::black_box;

use anyhow::{Context, Result};
use kvstore_block::{SequenceHasher, sequence_hashes};
use router_policy::{Candidate, Strategy, Weights, choose};
use router_radix::{Index, Level, WorkerSlot};

use crate::measure::{Latencies, time};

const BLOCKS: usize = 128;
const BLOCK_TOKENS: usize = 16;
/// Prompts in the index; each look-up takes another one, so that the cache does not hold the answer.
const PROMPTS: usize = 2000;

pub(crate) fn run(smoke: bool) -> Result<()> {
    println!("# index: prompts of {BLOCKS} blocks, held whole by one worker and in part by others");
    let rounds = if smoke { 200 } else { 40_000 };
    for workers in [8, 64] {
        look_ups(workers, rounds)?;
    }
    Ok(())
}

fn tokens_of(prompt: usize) -> Vec<u32> {
    (0..BLOCKS * BLOCK_TOKENS).map(|at| (prompt * 7919 + at * 31) as u32 % 50_000).collect()
}

fn look_ups(workers: usize, rounds: usize) -> Result<()> {
    let index = Index::new(PROMPTS * BLOCKS);
    let slots: Vec<WorkerSlot> = (0..workers).map_while(|_| index.add_worker()).collect();
    let mut plain: Vec<HashSet<u64>> = vec![HashSet::new(); workers];
    let mut prompts = Vec::with_capacity(PROMPTS);
    for prompt in 0..PROMPTS {
        let mut hashes = Vec::with_capacity(BLOCKS);
        sequence_hashes(SequenceHasher::new(), &tokens_of(prompt), BLOCK_TOKENS, &mut hashes);
        for (worker, slot) in slots.iter().enumerate() {
            let held = if worker == prompt % workers { BLOCKS } else { (prompt * 13 + worker * 7) % 24 };
            for &hash in &hashes[..held] {
                index.insert(*slot, Level::Device, hash);
                plain[worker].insert(hash);
            }
        }
        prompts.push(hashes);
    }
    let (mut ours, mut theirs, mut decisions) = (Latencies::new()?, Latencies::new()?, Latencies::new()?);
    let weights = Weights::default();
    let mut candidates = vec![Candidate::default(); workers];
    for round in 0..rounds {
        let at = round * 17 % PROMPTS;
        let hashes = &prompts[at];
        let (spent, overlaps) = time(|| index.overlaps(black_box(hashes)));
        ours.record(spent);
        let (spent, counts) = time(|| -> Vec<u32> {
            let held =
                |set: &HashSet<u64>| hashes.iter().take_while(|hash| set.contains(hash)).count() as u32;
            plain.iter().map(held).collect()
        });
        theirs.record(spent);
        assert!(
            slots.iter().zip(&counts).all(|(slot, count)| overlaps.device(*slot) == *count),
            "both agree"
        );
        let tokens = tokens_of(at);
        let (spent, choice) = time(|| {
            let mut hashes = Vec::with_capacity(BLOCKS);
            sequence_hashes(SequenceHasher::new(), black_box(&tokens), BLOCK_TOKENS, &mut hashes);
            let overlaps = index.overlaps(&hashes);
            for (candidate, slot) in candidates.iter_mut().zip(&slots) {
                candidate.device_blocks = overlaps.device(*slot);
                candidate.any_blocks = overlaps.any(*slot);
            }
            choose(Strategy::Cost, BLOCKS as u32, &candidates, &weights, round as u64, round as u64)
        });
        decisions.record(spent);
        assert_eq!(choice.context("a choice")?.index, at % workers, "the worker that holds it all");
    }
    println!("{workers:>2} workers, look-up:   {}", ours.render());
    println!(
        "{workers:>2} workers, plain sets: {}  (ratio of p50 {:.2})",
        theirs.render(),
        ours.at(0.5) / theirs.at(0.5)
    );
    println!("{workers:>2} workers, decision:  {}  (hash 2,048 tokens, look up, choose)", decisions.render());
    Ok(())
}
