//! The only crate that touches the CUDA driver: device memory, copies, kernel launches, and what a NIC needs to
//! reach device memory. `libcuda` is loaded at run time; without it [`Cuda::open`] says so and nothing panics.
//!
//! * [`Cuda`], [`Device`]: what is there ([`DeviceDescription`]), and one device's context.
//! * [`DeviceSlab`]: equal slots in device memory, which a NIC can register ([`DeviceMemory`]) and another
//!   process can attach ([`IpcHandle`]); or memory that an engine lends ([`DeviceSlab::borrow`]). [`Pinned`]: a host slab
//!   that the device reaches by DMA.
//! * [`CopyQueue`]: asynchronous copies between them, driven by one thread and polled. The hot path: no allocation, no
//!   lock, no callback, no wait.
//! * [`SlotCopier`]: the same as the `Copier` of `dataplane-memory`, for whoever shall not know CUDA; [`IpcSharing`] as its
//!   `DeviceSharing`.
//! * [`Module`], [`Stream::launch`], [`Graph`], [`compile`]: kernels that somebody else wrote.
//! * [`GpuDirect`]: which way bytes take between a NIC and device memory on this machine.
//!
//! Invariants: no address of a device is dereferenced by the processor; memory outlives every copy that names it; a
//! token that was accepted is completed once, also when the device fails, and never while it may still copy; the
//! calling thread's own CUDA context is after each call what it was before.
//!
//! This crate knows nothing of blocks, tokens, hashes or models. It builds, and its tests pass, on a machine without a
//! GPU: they run over a double of the driver (`tests/double`). `cudarc` gives the types, the constants and the
//! library's names; why not its functions is said in `library.rs`.

mod error;
mod library;

mod cuda;
mod description;
mod device;
mod direct;
mod peer;

mod export;
mod foreign;
mod ipc;
mod pinned;
mod sharing;
mod slab;

mod graph;
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
mod against;

pub use compile::{CompileError, Image, compile, compile_for};

pub use copier::SlotCopier;
pub use copy::{CopyRequest, Place, Region, RegionId, Rows};
pub use cuda::Cuda;
pub use dataplane_memory::{DeviceError, DeviceMemory, DirectError, DmaBuf, DmaBufMapping};
pub use description::{DeviceDescription, PciAddress};
pub use device::Device;
pub use direct::{DirectProbe, GpuDirect};
pub use error::{CudaError, DriverVersion, Unavailable};
pub use foreign::BorrowError;
pub use graph::Graph;
pub use ipc::IpcHandle;
pub use module::{Function, Module};
pub use peer::{PeerLink, PeerPath};
pub use pinned::{PinError, Pinned};
pub use queue::CopyQueue;
pub use sharing::IpcSharing;
pub use slab::DeviceSlab;
pub use stream::{Priority, Stream};
pub use submission::{Completion, CopyQueueConfig, CopyQueueCounters, Refusal};
