//! An NVMe driver in user space: the smallest that is complete for reads and writes.
//!
//! The device is behind VFIO, so that an IOMMU confines it to memory that was mapped for it; this process uses
//! it exclusively, without interrupts, and a request costs no system call: entries are written into a
//! submission queue in memory, a doorbell tells the controller, and the completion queue is polled. The method
//! is SPDK's, without SPDK; where SPDK is installed, [`spdk`] drives a device through it instead.
//!
//! In reading order: [`NvmeConfig`]; `registers`, `command`, `status`, `identify` (what the specification defines);
//! `bus` (how a device is reached) with `vfio` behind it; `dma` and `layout` (memory of the queues); `queue_pair`;
//! `controller` (start, shutdown, start again); `registrations`, `commands`, `requests` (tables of the engine);
//! `request_queue` and `volatile_cache` (what every engine does with requests and syncs);
//! [`NvmeEngine`] with `data_path` (hot), `recovery` (timeouts, resets, removal) and `start` (what a device begins
//! with); `wake`; [`testing`], a software controller that the whole driver runs against on any machine.
//!
//! Invariants: memory that a command names is neither freed nor handed back before the controller completed it,
//! was disabled, or was cut off from memory; no answer of a device can make this crate panic or access memory
//! that is not mapped; a device is never taken away from a kernel driver. A device belongs to one engine, an
//! engine to one thread. Not supported: metadata, several namespaces at once, multipath, interrupts.

mod address;
mod bus;
mod command;
mod commands;
mod config;
mod controller;
mod data_path;
mod dma;
mod engine;
mod error;
mod identify;
mod layout;
mod queue_pair;
mod recovery;
mod registers;
mod registrations;
mod request_queue;
mod requests;
pub mod spdk;
mod start;
mod status;
pub mod testing;
mod vfio;
mod volatile_cache;
mod wake;

pub use address::PciAddress;
pub use bus::Bus;
pub use config::NvmeConfig;
pub use engine::{NvmeCounters, NvmeEngine};
pub use error::NvmeError;
pub use identify::{ControllerIdentity, NamespaceIdentity};
pub use status::Status;
pub use vfio::VfioBus;

/// Name of the engine in logs, metrics and errors.
const ENGINE_NAME: &str = "nvme_user";
