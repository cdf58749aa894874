//! Whatever bytes come as a snapshot or as TensorRT-LLM's events: no panic, and what is read is written back equal.

#![no_main]

use router_events::snapshot::{decode, encode};
use router_events::trtllm::Decoder;

/// xxh3 of nothing that a fuzzer could guess: the checksum is put in place for it.
fn with_checksum(data: &[u8]) -> Vec<u8> {
    let mut bytes = encode(&[]);
    bytes.truncate(8);
    bytes.extend(data);
    // The writer knows how: an error names the right sum.
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
