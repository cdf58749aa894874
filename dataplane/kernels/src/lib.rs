//! GPU kernels between an engine's paged KV layout and transfer slots: their CUDA C++ source, their launches,
//! and their results.
//!
//! * [`PagedLayout`] describes an engine by strides, [`SlotLayout`] a slot in one canonical order,
//!   [`HeadRange`] the heads that two ranks share: every layout is data. [`EngineTensors`] makes both from an
//!   engine's own terms.
//! * [`CopyPlan`] gathers and scatters, [`ChecksumPlan`] verifies. Each batch is one [`Launch`].
//! * [`SOURCE`] is compiled at run time by the code that launches; [`checksum()`] and [`mod@reference`]
//!   compute the same results on a processor.
//!
//! Invariants: this crate opens no device and has no dependency on one. A launch waits for nothing on the
//! host, starts no kernel, keeps nothing between launches (scratch is zero again after each), and accesses
//! only blocks below [`PagedLayout::blocks`]. Results do not depend on the order of threads. An error of an
//! item is in its [`status`] word; content after that is undefined, so a block is published only
//! after its word was read.
//!
//! Bandwidth model (measurements are in `bench/RESULTS.md`): a gather or scatter of `n` bytes reads `n` and
//! writes `n` ([`CopyPlan::bytes_moved`]), like a device-to-device copy, and in addition 16 bytes per item
//! and 8 per plane, which stay in the caches. A thread has four 16-byte loads in flight. A grid has up to
//! eight thread blocks per multiprocessor (a copy without checksums: one for each tile); fewer are resident
//! at a time, and the rest wait for their end. For an H100 or H200 the assembler takes 64 registers for a
//! plain copy and 80 with a checksum, without spills (`tests/nvrtc.sh` prints them): 4 and 3 thread blocks,
//! or 1,024 and 768 threads, so for copies 132 × 48 KiB = 6.5 MB in flight, if loads of all resident threads
//! overlap, where 4.8 TB/s × about 0.7 µs (an assumed latency) need 3.4 MB. Accesses are 16 bytes, and whole
//! sectors as soon as a head has 32 bytes. By a count of the source, not of machine code, the address of a
//! unit costs about 30 integer operations and its share of the checksum about 22, of about 95 that the
//! multiprocessors can do in the time that memory takes for it. The model therefore has memory as the limit
//! of batches a few times larger than the bytes in flight. It leaves out the last wave of thread blocks, the
//! launch, and other users of the memory, and it does not predict the achieved share of a device-to-device
//! copy.

#![deny(unsafe_code)]

mod copy;
mod divider;
mod error;
mod launch;
mod layout;
mod parameters;
pub mod reference;
mod source;
pub mod status;
mod verify;

pub use copy::{CopyPlan, Direction};
pub use dataplane_checksum::{LANE_BYTES, Sum, checksum};
pub use divider::Divider;
pub use error::PlanError;
pub use launch::{Batch, ChecksumArrays, Device, Launch, Parameters};
pub use layout::{
    EngineTensors, HeadRange, InnerOrder, KeyValueLayout, PagedLayout, SlotLayout, alignment_of,
};
pub use parameters::{ChecksumParameters, CopyParameters, Item, PagedParameters, Scratch, SumParameters};
pub use source::{COMPILE_OPTIONS, FILES, FUNCTIONS, SOURCE};
pub use verify::ChecksumPlan;
