//! The transports of one process: opened from a configuration and from what the machine has, and bonded into one.
//!
//! A worker listens on each of them and is told to its peers by [`Addresses`]; a client neither listens nor shows its
//! memory ([`PeerRole`]). What the machine does not have is passed over with a line in the log, unless the configuration names
//! it. Without names, the RDMA ports nearest to the process's memory are used ([`dataplane_topology::select_local`]); where
//! none of them is usable, every device is tried.

#![forbid(unsafe_code)]

mod address;
mod open;
mod secret;
mod sockets;

pub use address::{Addresses, is_loopback};
pub use dataplane_fabric::auth::SharedKey;
pub use dataplane_topology::Place;
pub use open::{
    CounterSample, NearestNode, NearestPorts, RailCounters, Rails, RailsError, is_here, nearest_node,
    nearest_ports, open,
};
pub use secret::{SECRET_VARIABLE, SecretError, shared_key};
pub use sockets::{device_socket, worker_socket};

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use dataplane_fabric::PeerAccess;
use dataplane_memory::DeviceSharing;
use dataplane_shm::ShmConfig;
use dataplane_tcp::TcpConfig;
use dataplane_transfer::BondConfig;
use dataplane_verbs::{Library, VerbsConfig};

/// A kind of transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// Device memory that processes of one host share ([`RailsConfig::device`]).
    CudaIpc,
    /// Memory that processes of one host share.
    Shm,
    /// RDMA over every device that was chosen.
    Rdma,
    /// Sockets.
    Tcp,
}

impl Transport {
    /// The kinds for slots in host memory, best first.
    pub const HOST: [Self; 3] = [Self::Shm, Self::Rdma, Self::Tcp];
    /// The kinds for slots in a device's memory and in the host's, best first.
    pub const ALL: [Self; 4] = [Self::CudaIpc, Self::Shm, Self::Rdma, Self::Tcp];

    /// As in a configuration and in an address: `cuda_ipc`, `shm`, `rdma`, `tcp`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::CudaIpc => "cuda_ipc",
            Self::Shm => "shm",
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
        }
    }
}

/// A transport that is to be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransportRequest {
    /// The kind.
    pub transport: Transport,
    /// Whether the configuration names a part of it (a folder, a device, a port): it is then an error when it cannot be
    /// opened.
    pub is_named: bool,
}

/// The place that a configuration names for [`RailsConfig::near`]: `auto` is none.
///
/// # Errors
/// [`RailsError::Near`] for what names no place.
pub fn parse_near(text: &str) -> Result<Option<Place>, RailsError> {
    if text == "auto" { Ok(None) } else { Ok(Some(text.parse()?)) }
}

/// What a process is to its peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerRole {
    /// Connects to others: it does not listen, and peers cannot reach its memory.
    Client,
    /// Receives hand-offs: peers write into its slots, and read none.
    Worker,
    /// Serves its memory: peers write and read it.
    Store,
}

impl PeerRole {
    fn access(self) -> PeerAccess {
        match self {
            Self::Client => PeerAccess::None,
            Self::Worker => PeerAccess::Write,
            Self::Store => PeerAccess::ReadWrite,
        }
    }

    fn listens(self) -> bool {
        self != Self::Client
    }
}

/// Transports to open, and their settings. PeerRole and key hold for all of them, whatever their own settings say.
#[derive(Debug, Clone)]
pub struct RailsConfig {
    /// Best first: of the links to a peer that are up, those of the first transport carry the bytes.
    pub transports: Vec<TransportRequest>,
    /// What the process is to its peers.
    pub role: PeerRole,
    /// The secret that peers share; with another one neither side admits the other.
    pub key: SharedKey,
    /// Equal for processes that can share memory, see [`Addresses::host`].
    pub host: String,
    /// Path of the socket at which processes of this host connect, for shared memory. That for shared device memory is
    /// [`device_socket`] of it.
    pub socket: PathBuf,
    /// Shared memory; of device memory, the rings for messages.
    pub shm: ShmConfig,
    /// Slots in a device's memory, which peers reach beside those in the host's: over [`Transport::CudaIpc`], and over RDMA devices
    /// that reach that memory.
    pub device: Option<Arc<dyn DeviceSharing>>,
    /// Where the TCP transport listens. Peers are told this address, so it must be one of this host.
    pub listen: SocketAddr,
    /// TCP.
    pub tcp: TcpConfig,
    /// RDMA devices by name; empty: those nearest to `near`, or every one where none of these is usable.
    pub devices: Vec<String>,
    /// The memory that devices are chosen for; `None`: that which the process works beside
    /// ([`dataplane_topology::Topology::memory_of_process`]).
    pub near: Option<Place>,
    /// Where peers connect to make queue pairs; with a port other than 0 each further rail takes the next one.
    pub rdma_listen: SocketAddr,
    /// RDMA.
    pub rdma: VerbsConfig,
    /// Connections to each peer over one RDMA device, at least 1. Each is a rail of its own, with its own queue pairs and
    /// registrations: over Ethernet each takes its own way through the network (its own UDP source port).
    pub connections_per_device: u16,
    /// The library of software devices, for tests; `None` loads libibverbs.
    pub verbs_library: Option<Arc<Library>>,
    /// Settings of the bond over all transports.
    pub bond: BondConfig,
    /// For tests: damages one in so many writes, drawn from this seed.
    pub corrupt: Option<(u64, u64)>,
}

/// A seed for the names of sessions and for the times of retries: another one in each process, and not a secret.
#[must_use]
pub fn fresh_seed() -> u64 {
    use std::hash::BuildHasher;
    std::collections::hash_map::RandomState::new().hash_one(std::process::id())
}
