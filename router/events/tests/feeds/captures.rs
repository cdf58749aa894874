//! Payloads made by each engine release's own encoder, and frames of a live publisher.

use std::path::PathBuf;

use router_events::wire::{KvEvent, decode};
use router_radix::Tier;
use serde_json::Value as Json;

fn lines(name: &str) -> Vec<Json> {
    let path =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/engine-captures").join(name);
    let text = std::fs::read_to_string(path).expect("fixture");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn bytes(hex: &Json) -> Vec<u8> {
    let hex = hex.as_str().expect("hex");
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex")).collect()
}

#[test]
fn every_release_is_understood() {
    let captures = lines("kv-events-by-release.jsonl");
    assert!(captures.len() >= 15);
    for capture in captures {
        let name = format!("{} {} {}", capture["engine"], capture["version"], capture["case"]);
        let batch = decode(&bytes(&capture["payload_hex"])).expect(&name);
        assert_eq!(batch.timestamp, 1_700_000_000.5, "{name}");
        assert_eq!((batch.skipped, &batch.broken[..]), (0, &[][..]), "{name}");
        let KvEvent::Stored(stored) = &batch.events[0] else { panic!("{name}: {batch:?}") };
        match capture["case"].as_str().expect("case") {
            "full" => {
                let first = if capture["engine"] == "sglang" { -5_i64 as u64 } else { 0x0123_4567_89AB_CDEF };
                assert_eq!(stored.hashes[0], first, "{name}");
                assert_eq!(stored.hashes.len(), 2, "{name}");
                assert_eq!(stored.parent, Some(42), "{name}");
                assert_eq!(stored.tokens, (100..132).collect::<Vec<u32>>(), "{name}");
                assert_eq!(stored.block_tokens, 16, "{name}");
                let rank = if capture["engine"] == "sglang" { 2 } else { 3 };
                assert_eq!(batch.rank, Some(rank), "{name}");
                assert!(batch.events.iter().any(|event| matches!(event, KvEvent::Removed(_))), "{name}");
            }
            "minimal" => {
                assert_eq!((stored.hashes.as_slice(), stored.parent), (&[1][..], None), "{name}");
                assert_eq!((stored.tokens.as_slice(), stored.block_tokens), (&[1, 2, 3, 4][..], 4), "{name}");
                assert_eq!(stored.tier, Tier::Device, "{name}");
                assert_eq!(batch.events[2], KvEvent::Cleared, "{name}");
                assert_eq!(batch.rank, None, "{name}");
            }
            "bytes" => assert_eq!(stored.hashes[0], 0x1819_1A1B_1C1D_1E1F, "{name}: the low 64 bits"),
            other => panic!("an unknown case {other}"),
        }
    }
}

#[test]
fn a_live_publisher_is_understood() {
    for capture in lines("vllm-0.32.0-live-events.jsonl") {
        let frames = capture["frames_hex"].as_array().expect("frames");
        assert_eq!(frames.len(), 3);
        assert_eq!(bytes(&frames[1]).len(), 8);
        let batch = decode(&bytes(&frames[2])).expect("a batch");
        assert_eq!((batch.skipped, batch.broken.len()), (0, 0));
        for event in &batch.events {
            if let KvEvent::Stored(stored) = event {
                assert_eq!(stored.tokens.len(), stored.hashes.len() * stored.block_tokens);
                assert!(stored.is_full_attention);
            }
        }
    }
}

/// Each payload cut anywhere is an error that says where; each with a flipped bit is an error that says where,
/// or another batch of as many events: none is lost in silence.
#[test]
fn damage_is_named_and_loses_nothing_else() {
    let mut payloads: Vec<Vec<u8>> =
        lines("kv-events-by-release.jsonl").iter().map(|capture| bytes(&capture["payload_hex"])).collect();
    payloads.extend(
        lines("vllm-0.32.0-live-events.jsonl").iter().map(|capture| bytes(&capture["frames_hex"][2])),
    );
    let (mut refused, mut accepted) = (0, 0);
    for payload in payloads {
        let whole = decode(&payload).expect("a batch");
        let count = whole.events.len();
        // The rank at the end may be missing in old releases; everything else is needed.
        for len in 0..payload.len() - 1 {
            if let Ok(cut) = decode(&payload[..len]) {
                panic!("{len} of {} bytes taken for {cut:?}", payload.len());
            }
        }
        for bit in 0..payload.len() * 8 {
            let mut flipped = payload.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            match decode(&flipped) {
                Err(error) => {
                    assert!(error.at <= payload.len() && !error.what.is_empty());
                    refused += 1;
                }
                Ok(batch) => {
                    let is_count = bit / 8 > 12 && bit / 8 < payload.len() - 6;
                    let read = batch.events.len() + batch.skipped + batch.broken.len();
                    assert!(read >= count || !is_count, "bit {bit}: {read} of {count} events");
                    accepted += 1;
                }
            }
        }
    }
    println!("{refused} refused, {accepted} understood as something else");
    assert!(refused > 1000 && accepted > 1000);
}
