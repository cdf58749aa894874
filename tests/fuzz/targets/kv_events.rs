//! Whatever bytes come: no panic, an error that says where, and no event lost behind an odd one.

#![no_main]

use router_events::wire::{KvEvent, decode};

/// `AllBlocksCleared`, in the array form.
const CLEARED: [u8; 18] = *b"\x91\xB0AllBlocksCleared";

/// A batch of three events, the middle one made of any bytes.
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
    // As one event between two good ones. If the bytes are one whole value, the batch is whole, and whatever is odd
    // about the middle one, both others are there.
    let payload = around(data);
    if let Ok(batch) = decode(&payload) {
        assert_eq!(batch.events.len() + batch.skipped + batch.broken.len(), 3);
        let cleared = batch.events.iter().filter(|event| **event == KvEvent::Cleared).count();
        let is_whole = is_one_value(data);
        assert!(cleared >= if is_whole { 2 } else { 1 }, "{batch:?}");
    }
});

/// Whether a batch that ends with these bytes ends with them.
fn is_one_value(bytes: &[u8]) -> bool {
    // An unknown event of one field: it is skipped if it is whole, and nothing may follow it.
    let mut payload = vec![0x92, 0xCB, 0, 0, 0, 0, 0, 0, 0, 0, 0x91, 0x92, 0xA1, b'?'];
    payload.extend_from_slice(bytes);
    let is_complete = decode(&payload).is_ok();
    let is_shorter = !bytes.is_empty() && decode(&payload[..payload.len() - 1]).is_ok();
    is_complete && !is_shorter
}
