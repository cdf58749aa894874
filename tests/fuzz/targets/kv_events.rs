//! Arbitrary bytes as KV events: no panic, errors with their position, and no event lost after an invalid
//! one.

#![no_main]

use router_events::wire::{KvEvent, decode};

/// `AllBlocksCleared`, in the array form.
const CLEARED: [u8; 18] = *b"\x91\xB0AllBlocksCleared";

/// Returns a batch of three events, with arbitrary bytes in the middle.
fn around(odd: &[u8]) -> Vec<u8> {
    [&[0x92, 0xCB, 0, 0, 0, 0, 0, 0, 0, 0, 0x93][..], &CLEARED, odd, &CLEARED].concat()
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let decoded = decode(data);
    #[cfg(planted)]
    if let Ok(batch) = &decoded {
        assert!(batch.rank != Some(0x4B), "planted");
    }
    match decoded {
        Err(error) => assert!(error.at <= data.len() && !error.what.is_empty()),
        Ok(batch) => {
            for broken in &batch.broken {
                assert!(broken.error.at <= data.len() && broken.error.event.is_some());
            }
        }
    }
    // Decoded as one event between two valid ones. If the bytes are one complete value, the batch is complete
    // and contains both valid events, however invalid the middle one is.
    let payload = around(data);
    if let Ok(batch) = decode(&payload) {
        assert_eq!(batch.events.len() + batch.skipped + batch.broken.len(), 3);
        let cleared = batch.events.iter().filter(|event| **event == KvEvent::Cleared).count();
        let is_whole = is_one_value(data);
        assert!(cleared >= if is_whole { 2 } else { 1 }, "{batch:?}");
    }
});

/// Whether these bytes are exactly one value at the end of a batch.
fn is_one_value(bytes: &[u8]) -> bool {
    // An unknown event of one field: it is skipped if it is complete, and no bytes may follow it.
    let mut payload = vec![0x92, 0xCB, 0, 0, 0, 0, 0, 0, 0, 0, 0x91, 0x92, 0xA1, b'?'];
    payload.extend_from_slice(bytes);
    let is_complete = decode(&payload).is_ok();
    let is_shorter = !bytes.is_empty() && decode(&payload[..payload.len() - 1]).is_ok();
    is_complete && !is_shorter
}
