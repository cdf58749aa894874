//! Messages between nodes and frames between bonds: no panic, and decoded values encode to the same bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dataplane_transfer::fuzz_wire(bytes));
