//! The part of `<infiniband/verbs.h>` (rdma-core 44) that this crate uses, written by hand.
//!
//! The structs, constants and entry points below are the stable ABI of `libibverbs.so.1`: rdma-core only adds
//! to it. Of objects that the library allocates (`ibv_qp`, `ibv_cq`, `ibv_srq`, `ibv_context`) the fields up to
//! the last one that we read are declared, and they are only ever used behind pointers. The line numbers are
//! those of the header in rdma-core 44.
//!
//! `ffi/layout.c` prints the sizes and offsets that a C compiler sees; the assertions in `ffi/layout.rs`
//! hold the Rust declarations to them.

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
