//! The part of `<infiniband/verbs.h>` (rdma-core 44) that this crate uses, written by hand.
//!
//! The structs, constants and entry points below are the stable ABI of `libibverbs.so.1`: rdma-core only
//! adds to it. Objects that the library allocates (`ibv_qp`, `ibv_cq`, `ibv_srq`, `ibv_context`) are
//! declared up to the last field that this crate reads, and are only used behind pointers. The line numbers
//! are those of the header in rdma-core 44.
//!
//! `ffi/layout.c` prints the sizes and offsets that a C compiler computes; the assertions in
//! `ffi/layout.rs` check the Rust declarations against them.

mod attributes;
mod constants;
mod layout;
mod objects;
mod work;

pub use attributes::{
    AddressAttributes, DeviceAttributes, Gid, GlobalRoute, PortAttributes, QueuePairAttributes,
    QueuePairCapacity, QueuePairInit, SharedReceiveAttributes, SharedReceiveInit,
};
pub use constants::*;
pub use objects::{
    AsyncEvent, CompletionChannel, CompletionQueue, Context, ContextOperations, Device, MemoryRegion, PollCq,
    PostSend, PostSharedReceive, ProtectionDomain, QueuePair, RequestNotify, SharedReceiveQueue,
};
pub use work::{ReceiveWorkRequest, ScatterGatherEntry, SendWorkRequest, WorkCompletion};
