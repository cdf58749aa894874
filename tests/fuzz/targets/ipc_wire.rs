//! Messages of a peer that shares its device's memory.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dataplane_ipc::fuzz_wire(bytes));
