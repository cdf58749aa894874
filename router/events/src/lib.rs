//! KV events: what engines say about the blocks that they hold.
//!
//! * [`wire`]: the msgpack forms of vLLM and SGLang, old arrays and new maps, in one decoder.
//! * [`trtllm`]: TensorRT-LLM's polled JSON form.
//! * [`tracker`]: one rank's events translated: tokens to block hashes, applied to the index.
//! * [`follower`]: the order of messages: gaps, replays, restarts. Pure.
//! * [`subscribe`]: the subscription to one publisher, over ZMQ.
//! * [`listen`]: publishers that connect to the gateway, distinguished by topic.
//! * [`publish`]: the publishing side, for Kvasir's own engines.
//! * [`snapshot`]: the state of all publishers as bytes, for a restart and for a peer.
//! * [`shared_blocks`]: blocks in stores that several workers share.
//! * [`store_changes`]: what a store tells of its blocks.
//! * [`approximate`]: engines without events: what was routed there.

#![forbid(unsafe_code)]

pub mod approximate;
mod encode;
mod error;
pub mod follower;
pub mod listen;
mod msgpack;
pub mod publish;
pub mod shared_blocks;
pub mod snapshot;
pub mod store_changes;
pub mod subscribe;
pub mod tracker;
pub mod trtllm;
pub mod wire;

pub use error::WireError;
