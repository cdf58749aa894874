//! KV events: what engines say about the blocks that they hold.
//!
//! * [`wire`]: the msgpack forms of vLLM and SGLang, old arrays and new maps, in one decoder.
//! * [`tracker`]: one rank's events in order: sequence check, and the translation of an engine's own hashes
//!   into sequence hashes, applied to the index.
//! * [`subscribe`]: the ZMQ side: subscription, replay of what was missed, restart detection.

#![forbid(unsafe_code)]

mod msgpack;
pub mod subscribe;
pub mod tracker;
pub mod wire;
