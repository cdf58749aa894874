//! Arbitrary bytes as a snapshot or as TensorRT-LLM's events: no panic, and data that is read is written back
//! equal.

#![no_main]

use router_events::snapshot::{decode, encode};
use router_events::trtllm::Decoder;

/// Inserts the xxh3 checksum, which a fuzzer cannot guess.
fn with_checksum(data: &[u8]) -> Vec<u8> {
    let mut bytes = encode(&[]);
    bytes.truncate(8);
    bytes.extend(data);
    // The decoder's error contains the right checksum.
    match decode(&[&bytes[..], &[0; 8]].concat()) {
        Err(router_events::snapshot::SnapshotError::Checksum { found, .. }) => {
            bytes.extend(found.to_le_bytes())
        }
        _ => bytes.extend([0; 8]),
    }
    bytes
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _refused = decode(data);
    if let Ok(states) = decode(&with_checksum(data)) {
        assert_eq!(decode(&encode(&states)), Ok(states));
    }
    let _refused = Decoder::default().decode(data);
});
