//! Bytes of a TCP peer, split at arbitrary positions, through the real receive code: no panic, no write
//! outside the slots.
#![no_main]

use std::cell::RefCell;
use std::sync::Arc;

use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use dataplane_tcp::fuzzing::Stream;

thread_local! {
    static POOL: Arc<SlotPool> = {
        let layout = SlabLayout { slot_bytes: 2400, slot_count: 8 };
        SlotPool::new(Arc::new(Slab::create("fuzz", layout, PageSize::Standard).expect("a small slab")))
    };
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((&first, bytes)) = bytes.split_first() else { return };
    let step = RefCell::new(u64::from(first) | 1);
    POOL.with(|pool| {
        let mut stream = Stream::new(pool);
        let mut cut = |fits: usize| {
            let mut step = step.borrow_mut();
            *step ^= *step << 13;
            *step ^= *step >> 7;
            *step ^= *step << 17;
            1 + (*step >> 8) as usize % fits.max(1)
        };
        let _refused = stream.feed(bytes, &mut cut);
    });
});
