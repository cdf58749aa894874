//! Messages of an RDMA peer: the frames of the handshake, and the pieces of messages.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    dataplane_verbs::fuzzing::handshake(bytes);
    dataplane_verbs::fuzzing::segments(bytes);
});
