//! KV events from the wire to the index: decode, hash the tokens, apply; alone and beside a reader.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, Result};
use router_events::follower::Follower;
use router_events::tracker::Tracker;
use router_events::wire::{EventBatch, KvEvent, Removed, Stored, decode, encode};
use router_radix::{Index, IndexConfig, Tier};
use tools_workload::Random;

use crate::measure::{RoundsArgs, median, time};
use crate::results::{self, Better};

const BLOCK_TOKENS: usize = 16;
/// Blocks of one BlockStored: a prompt of 1,024 tokens.
const EVENT_BLOCKS: usize = 64;
/// Events of one batch: those of a scheduler step.
const BATCH_EVENTS: usize = 4;

/// Returns batches that store, then as many that remove one block per event, as engines evict.
fn payloads(batches: usize) -> (Vec<Vec<u8>>, usize) {
    let mut random = Random::new(9);
    let mut out = Vec::new();
    let mut removals = Vec::new();
    for number in 0..batches {
        let events = (0..BATCH_EVENTS)
            .map(|_| {
                let hashes: Vec<u64> = (0..EVENT_BLOCKS).map(|_| random.bits()).collect();
                removals.push(hashes.clone());
                let tokens = (0..EVENT_BLOCKS * BLOCK_TOKENS).map(|_| random.below(128_000) as u32).collect();
                KvEvent::Stored(Stored { hashes, tokens, block_tokens: BLOCK_TOKENS, ..Stored::default() })
            })
            .collect();
        out.push(encode(&EventBatch { timestamp: number as f64, events, ..EventBatch::default() }));
    }
    for group in removals.chunks(BATCH_EVENTS) {
        let gone =
            |hash: &u64| KvEvent::Removed(Removed { hashes: vec![*hash], tier: Tier::Device, group: None });
        let events = group.iter().flat_map(|hashes| hashes.iter().rev().map(gone)).collect();
        out.push(encode(&EventBatch { events, ..EventBatch::default() }));
    }
    (out, batches * BATCH_EVENTS * EVENT_BLOCKS)
}

pub(crate) fn run(smoke: bool, rounds: RoundsArgs) -> Result<()> {
    let (batches, rounds) = if smoke { (4, rounds.or(1)) } else { (2000, rounds.or(5)) };
    let (payloads, blocks) = payloads(batches);
    println!(
        "# events: {blocks} blocks of {BLOCK_TOKENS} tokens stored, then removed one an event; median of {rounds}"
    );
    let bytes: usize = payloads.iter().map(Vec::len).sum();
    let mut decoding = Vec::new();
    for _ in 0..rounds {
        let (spent, count) = time(|| payloads.iter().filter(|payload| decode(payload).is_ok()).count());
        anyhow::ensure!(count == payloads.len(), "every payload is a batch");
        decoding.push(bytes as f64 / spent.as_secs_f64() / 1e6);
    }
    results::add("events", "decode alone", ("MB/s", Better::Higher), &decoding);
    println!("decode alone: {:.0} MB/s", median(decoding));
    for has_reader in [false, true] {
        let (mut storing, mut removing, mut lookups) = (Vec::new(), Vec::new(), 0);
        for _ in 0..rounds {
            let (stored, removed, looked_up) = drain(&payloads, batches, has_reader)?;
            storing.push(blocks as f64 / stored / 1e6);
            removing.push(blocks as f64 / removed / 1e6);
            lookups += looked_up;
        }
        let beside = if has_reader { ", beside a reader" } else { "" };
        for (verb, rates) in [("stored", &storing), ("removed", &removing)] {
            results::add(
                "events",
                &format!("wire to index, {verb}{beside}"),
                ("M blocks/s", Better::Higher),
                rates,
            );
        }
        println!(
            "wire to index{}: {:.1} M blocks/s stored, {:.1} M blocks/s removed",
            if has_reader { format!(", beside a reader ({lookups} look-ups)") } else { String::new() },
            median(storing),
            median(removing)
        );
    }
    Ok(())
}

/// Block hashes of the first event of a batch.
fn first_chain(payload: &[u8]) -> Vec<u64> {
    let batch = decode(payload).unwrap_or_default();
    let stored = batch.events.into_iter().find_map(|event| match event {
        KvEvent::Stored(stored) => Some(stored.tokens),
        _ => None,
    });
    stored.unwrap_or_default().chunks_exact(BLOCK_TOKENS).map(kvstore_block::block_hash).collect()
}

/// Returns the seconds for storing and for removing, and the number of look-ups made meanwhile.
fn drain(payloads: &[Vec<u8>], batches: usize, has_reader: bool) -> Result<(f64, f64, u64)> {
    let index = Index::new(IndexConfig::default());
    let member = index.write().join().context("room")?;
    let mut follower = Follower::new(Tracker::new(member, BLOCK_TOKENS));
    let (stop, lookups) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut times = [0.0; 2];
    let mut reader = index.reader().context("a reader")?;
    std::thread::scope(|scope| {
        if has_reader {
            let (stop, lookups) = (&stop, &lookups);
            scope.spawn(move || {
                // The first chain that is stored, so that the reader walks where the writer writes.
                let prompt = first_chain(&payloads[0]);
                while !stop.load(Ordering::Relaxed) {
                    std::hint::black_box(reader.overlaps(&prompt));
                    lookups.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let mut sequence = 0;
        for (part, payloads) in [&payloads[..batches], &payloads[batches..]].into_iter().enumerate() {
            let (spent, ()) = time(|| {
                for payload in payloads {
                    follower.live(&mut index.write(), sequence, payload);
                    sequence += 1;
                }
            });
            times[part] = spent.as_secs_f64();
        }
        stop.store(true, Ordering::Relaxed);
    });
    anyhow::ensure!(index.write().usage().entries == 0, "everything was removed");
    Ok((times[0], times[1], lookups.load(Ordering::Relaxed)))
}
