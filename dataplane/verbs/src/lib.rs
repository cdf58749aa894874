//! RDMA: reliable connections over `libibverbs`, which is loaded at run time.
//!
//! [`VerbsFabric`] is the transport `rdma` of `dataplane-fabric`. Peers write into and read from each
//! other's slots with the network card alone; messages travel as sends into a receive queue that all peers
//! share. Every peer has two queue pairs, one for each lane, and the TCP connection over which they were
//! set up and which detects the peer's death. Errors name the verb, the device, the peer and the errno.
//!
//! The layers, each of which could be used by itself (see [`raw`]):
//! `ffi` and `library` (the C interface), `device` and `gid` (what there is), `protection`, `memory_region`,
//! `completion`, `shared_receive`, `queue_pair` (objects, freed in the right order), `commands` (the thread that makes and
//! destroys pairs), `post` (chained work requests; posting is honestly unsafe), `geometry`, `lane`, `connection`, `fabric` (safe).
//!
//! Invariants: memory that a work request names is not freed or reused before the device is done with it;
//! the completion queue cannot overflow, since no more work requests are posted than it has room for; no
//! input from a peer causes a panic; a peer's key reaches the slots and nothing else. One thread drives a
//! fabric; another executes its commands for queue pairs. The crate builds, and its tests pass, on a
//! machine without RDMA: `testing` has a software device.

mod bounce;
mod commands;
mod completion;
mod config;
mod connection;
mod control;
mod device;
mod error;
mod fabric;
pub mod ffi;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod fuzzing;
mod geometry;
mod gid;
mod lane;
mod library;
mod local;
mod memory_region;
mod metrics;
mod numbers;
mod post;
mod protection;
mod queue_pair;
pub mod raw;
mod shared_receive;
mod sockets;
mod teardown;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod translate;
mod watch;
mod wire;

pub use config::{PathMtu, VerbsConfig, parse_gid_index, parse_partition};
pub use device::{Device, Limits, LinkLayer, PortDescription};
pub use error::VerbsError;
pub use fabric::VerbsFabric;
pub use gid::GidEntry;
pub use library::{GidType, Library};
pub use memory_region::Registration;
pub use metrics::{Metrics, VerbsCounters};
