//! The only crate that calls the CUDA driver: device memory, copies, kernel launches, and access of NICs to
//! device memory. `libcuda` is loaded at run time; without it [`Cuda::open`] returns an error and nothing
//! panics.
//!
//! * [`Cuda`], [`Device`]: the devices ([`DeviceDescription`]), and one device's context.
//! * [`DeviceSlab`]: equal slots in device memory, which a NIC can register ([`DeviceMemory`]) and another
//!   process can attach ([`IpcHandle`]); or memory that an engine lends ([`DeviceSlab::borrow`]). [`Pinned`]:
//!   a host slab that the device accesses by DMA.
//! * [`CopyQueue`]: asynchronous copies between them, driven by one thread and polled. The hot path: no
//!   allocation, no lock, no callback, no wait.
//! * [`SlotCopier`]: the `Copier` of `dataplane-memory` over such queues, for code without CUDA types;
//!   [`IpcSharing`]: its `DeviceSharing`.
//! * [`Module`], [`Stream::launch`], [`compile`]: kernels of other crates.
//! * [`GpuDirect`]: the path of bytes between a NIC and device memory on this machine.
//!
//! Invariants: the processor dereferences no device address; memory outlives every copy that names it; an
//! accepted token completes exactly once, also when the device fails, and never while one of its copies may
//! still run; after each call the calling thread's own CUDA context is the same as before.
//!
//! This crate does not handle blocks, tokens, hashes or models. It builds, and its tests pass, on a machine
//! without a GPU: they run over a double of the driver (`tests/double`). `cudarc` provides the types, the
//! constants and the library's names; `library.rs` explains why its functions are not used.

mod error;
mod library;

mod cuda;
mod description;
mod device;
mod direct;

mod borrowed_memory;
mod export;
mod ipc;
mod pinned;
mod sharing;
mod slab;

mod module;
mod stream;

mod copier;
mod copy;
mod issue;
mod plan;
mod queue;
mod submission;

mod compile;
mod compiler;

#[cfg(test)]
mod driver_abi_tests;

pub use compile::{CompileError, Image, compile, compile_for};

pub use borrowed_memory::BorrowError;
pub use copier::SlotCopier;
pub use copy::{CopyRequest, Place, Region, RegionId, Rows};
pub use cuda::Cuda;
pub use dataplane_memory::{DeviceError, DeviceMemory, DmaBuf, DmaBufError, DmaBufMapping};
pub use description::{DeviceDescription, PciAddress};
pub use device::Device;
pub use direct::{DirectProbe, GpuDirect};
pub use error::{CudaError, DriverVersion, Unavailable};
pub use ipc::IpcHandle;
pub use module::{Function, Module};
pub use pinned::{PinError, Pinned};
pub use queue::CopyQueue;
pub use sharing::IpcSharing;
pub use slab::DeviceSlab;
pub use stream::{Priority, Stream};
pub use submission::{Completion, CopyQueueConfig, CopyQueueCounters, SubmitError};
