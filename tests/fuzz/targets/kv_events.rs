//! Whatever bytes come: no panic, an error that says where, and no event lost behind an odd one.

#![no_main]

use router_events::wire::decode;

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
            // A good event behind it is there whatever this one is: every event is accounted for.
            let read = batch.events.len() + batch.skipped + batch.broken.len();
            assert!(read <= data.len());
        }
    }
});
