//! The layers below the fabric, for benchmarks, tests and other uses of verbs.

pub use crate::completion::CompletionQueue;
pub use crate::ffi::WorkCompletion;
pub use crate::memory_region::{Access, MemoryRegion, Registration};
pub use crate::post::{Batch, PostArray, Posted, Remote, Verb};
pub use crate::protection::ProtectionDomain;
pub use crate::queue_pair::{
    Capacity, Failed, Initialised, Path, QueuePair, ReadyToSend, Reset, Retries, Stopped,
};
pub use crate::shared_receive::SharedReceiveQueue;
