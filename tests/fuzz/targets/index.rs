//! The index against plain maps: operations from bytes, with every look-up compared.

#![no_main]

use std::collections::HashMap;

use router_radix::{Index, IndexConfig, Tier};

const MEMBERS: usize = 3;
const PREFIXES: usize = 200;

/// Prefix `at` follows `parent(at)`: long runs, and an occasional fork.
fn parent(at: usize) -> Option<usize> {
    match at {
        0 => None,
        _ if at % 37 == 0 => None,
        _ if at % 23 == 0 => Some(at / 2),
        _ => Some(at - 1),
    }
}

fn block(at: usize) -> u64 {
    (at as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

fn path(mut at: usize) -> Vec<usize> {
    let mut path = vec![at];
    while let Some(parent) = parent(at) {
        at = parent;
        path.push(at);
    }
    path.reverse();
    path
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let index = Index::new(IndexConfig::default());
    let mut members: Vec<_> = (0..MEMBERS).filter_map(|_| index.write().join()).collect();
    let mut reader = index.reader().expect("a reader");
    let mut model: Vec<HashMap<usize, [u32; 2]>> = vec![HashMap::new(); MEMBERS];
    for operation in data.chunks_exact(3) {
        let who = usize::from(operation[0] >> 4) % MEMBERS;
        let tier = usize::from(operation[0] >> 3 & 1);
        let in_tier = if tier == 0 { Tier::Device } else { Tier::Host };
        let start = usize::from(operation[1]) % PREFIXES;
        let len = usize::from(operation[2] % 40) + 1;
        let run: Vec<usize> = (start..(start + len).min(PREFIXES))
            .take_while(|&at| at == start || parent(at) == Some(at - 1))
            .collect();
        match operation[0] & 7 {
            0..=2 => {
                let keys: Vec<u64> = run.iter().map(|&at| at as u64 + 1).collect();
                let blocks: Vec<u64> = run.iter().map(|&at| block(at)).collect();
                let before = parent(start).map(|at| at as u64 + 1);
                index.write().stored(members[who], in_tier, before, &keys, &blocks);
                run.iter().for_each(|&at| model[who].entry(at).or_default()[tier] += 1);
            }
            3 | 4 => {
                let mut run = run;
                if operation[0] & 7 == 4 {
                    run.reverse();
                }
                let keys: Vec<u64> = run.iter().map(|&at| at as u64 + 1).collect();
                index.write().removed(members[who], in_tier, &keys);
                for at in run {
                    if let Some(copies) = model[who].get_mut(&at) {
                        copies[tier] = copies[tier].saturating_sub(1);
                    }
                }
            }
            5 if len < 4 => {
                index.write().clear(members[who]);
                model[who].clear();
            }
            6 if len < 3 => {
                index.write().leave(members[who]);
                members[who] = index.write().join().expect("room");
                model[who].clear();
            }
            _ => {
                let prompt = path(start);
                let hashes: Vec<u64> = prompt.iter().map(|&at| block(at)).collect();
                let overlaps = reader.overlaps(&hashes);
                for (who, held) in model.iter().enumerate() {
                    let has = |at: &&usize, tiers: usize| {
                        held.get(at).is_some_and(|copies| copies[..tiers].iter().any(|&copies| copies > 0))
                    };
                    let device = prompt.iter().take_while(|at| has(at, 1)).count() as u32;
                    let any = prompt.iter().take_while(|at| has(at, 2)).count() as u32;
                    assert_eq!((overlaps.device(members[who]), overlaps.any(members[who])), (device, any));
                }
            }
        }
    }
    members.into_iter().for_each(|member| index.write().leave(member));
    while index.write().sweep() {}
    let usage = index.write().usage();
    assert_eq!((usage.nodes, usage.entries), (0, 0));
});
