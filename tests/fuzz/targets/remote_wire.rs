//! Messages between pool nodes and their clients: no panic, and decoded values encode to the same bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvstore_remote::fuzz_wire(bytes));
