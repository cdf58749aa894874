//! Messages between nodes and frames between bonds: never a panic, and what decodes encodes to the same bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dataplane_transfer::fuzz_wire(bytes));
