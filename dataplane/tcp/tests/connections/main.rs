//! Connections of two nodes: handshakes, order, reads, and peers that break the protocol.

#[path = "../nodes/mod.rs"]
mod nodes;

mod device_memory;
mod handshakes;
mod order;
mod raw_peer;
mod reads;
