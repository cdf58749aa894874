//! Topology of a node: its memories and links, and the choice of the path for a transfer.
//!
//! [`Topology::read`] looks at `/sys` and `/proc` once; everything after that is a pure function of the
//! result. [`choose`] decides for one pair of memories: shared memory on one host, else RDMA rails near the
//! memory, else TCP, and gives the reason for each path not taken. [`check`] finds the causes that keep a
//! better path from being used; each [`Warning`] has a stable code and a fix. [`render`] turns both into text
//! and a picture.
//!
//! Invariants:
//! - Only files are read, nothing is changed, no device is opened.
//! - What cannot be read or understood is `None`, shown as "unknown". Nothing under `/sys`, and nothing that
//!   a peer says of itself, can make this crate panic, loop or read without bound.
//! - Bandwidths are ceilings computed from link speeds; they are not measured. One that depends on something
//!   that files do not tell (the speed of a copy in memory) is unknown rather than guessed.
//!
//! Not a hot path: read at start-up, on `kvasir doctor`, and when a link changes.
#![forbid(unsafe_code)]

mod bandwidth;
mod check;
mod check_links;
mod check_pair;
mod description;
mod distance;
mod error;
mod host;
mod mount;
mod network;
mod numa;
mod path;
mod pci;
mod pci_config;
mod place;
mod process;
mod rail;
mod rdma;
mod reach;
pub mod render;
mod sysfs;
mod topology;
mod warning;
mod wire;

pub use bandwidth::{infiniband_gb_s, path_mtu_of_roce, pcie_gb_s, roce_gb_s, tcp_gb_s};
pub use check::{NodeRequirements, check};
pub use description::{DescribedGpu, DescribedRail, NodeDescription};
pub use distance::Distance;
pub use error::TopologyError;
pub use host::{GpuDirect, Host, Iommu};
pub use network::{Interface, Subnet};
pub use numa::NumaNode;
pub use path::{Alternative, Decision, RailPair, Request, Transport, Transports, choose};
pub use pci::{PciAddress, PciDevice, PciLink};
pub use place::{LocalPlace, Place};
pub use process::Process;
pub use rail::{Exclusion, Rail, local_rails, remote_rails, select_local, select_remote};
pub use rdma::{Gid, GidKind, LinkLayer, PortState, RdmaDevice, RdmaPort};
pub use topology::{Gpu, GpuVendor, Memory, Nvme, Topology};
pub use warning::{Code, Severity, Warning};
pub use wire::{DESCRIPTION_BYTES_MAX, GPUS_MAX, RAILS_MAX, TCP_ADDRESSES_MAX};
