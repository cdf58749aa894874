//! The transports of one process: opened from a configuration and from what the machine has, and bonded into one.
//!
//! A worker listens on each transport and is announced to its peers by [`Addresses`]; a client neither
//! listens nor shows its memory ([`PeerRole`]). A transport that the machine lacks is skipped and logged,
//! unless the configuration names it. Without named devices, the RDMA ports nearest to the process's memory
//! are used ([`dataplane_topology::select_local`]); if none of them is usable, every device is tried.

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

    /// Returns the name in a configuration and in an address: `cuda_ipc`, `shm`, `rdma`, `tcp`.
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

/// A transport to open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransportRequest {
    /// The kind.
    pub transport: Transport,
    /// Whether the configuration names a part of the transport (a folder, a device, a port); a failure to
    /// open it is then an error.
    pub is_named: bool,
}

/// Parses the place of [`RailsConfig::near`]; `auto` gives `None`.
///
/// # Errors
/// [`RailsError::Near`] if the text is no place.
pub fn parse_near(text: &str) -> Result<Option<Place>, RailsError> {
    if text == "auto" { Ok(None) } else { Ok(Some(text.parse()?)) }
}

/// Role of a process towards its peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerRole {
    /// Connects to peers: it does not listen, and peers cannot access its memory.
    Client,
    /// Receives hand-offs: peers write its slots, and cannot read them.
    Worker,
    /// Serves its memory: peers read and write it.
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

/// Transports to open, and their settings. `role` and `key` apply to all transports and override their own
/// settings.
#[derive(Debug, Clone)]
pub struct RailsConfig {
    /// The transports, best first: of the links to a peer that are up, those of the first transport carry
    /// the bytes.
    pub transports: Vec<TransportRequest>,
    /// Role of the process towards its peers.
    pub role: PeerRole,
    /// The secret that all peers share; nodes with different secrets refuse each other.
    pub key: SharedKey,
    /// Host identity: equal for processes that can share memory, see [`Addresses::host`].
    pub host: String,
    /// Path of the socket for shared memory, at which processes of this host connect. The path for shared
    /// device memory is [`device_socket`] of it.
    pub socket: PathBuf,
    /// Settings of shared memory; for device memory, of the rings for messages.
    pub shm: ShmConfig,
    /// Slots in a device's memory, which peers reach beside those in the host's: over
    /// [`Transport::CudaIpc`], and over RDMA devices that reach that memory.
    pub device: Option<Arc<dyn DeviceSharing>>,
    /// Address at which the TCP transport listens. Peers are told this address, so it must be one of this host.
    pub listen: SocketAddr,
    /// Settings of the TCP transport.
    pub tcp: TcpConfig,
    /// RDMA devices by name; empty: those nearest to `near`, or every device if none of these is usable.
    pub devices: Vec<String>,
    /// The memory for which devices are chosen; `None`: the memory that the process works beside
    /// ([`dataplane_topology::Topology::memory_of_process`]).
    pub near: Option<Place>,
    /// Address at which peers connect to set up queue pairs; with a port other than 0 each further rail
    /// takes the next port.
    pub rdma_listen: SocketAddr,
    /// Settings of the RDMA transport.
    pub rdma: VerbsConfig,
    /// Connections to each peer over one RDMA device, at least 1. Each is a rail of its own, with its own
    /// queue pairs and registrations: over Ethernet each may take another path through the network (its own
    /// UDP source port).
    pub connections_per_device: u16,
    /// The library of software devices, for tests; `None` loads libibverbs.
    pub verbs_library: Option<Arc<Library>>,
    /// Settings of the bond over all transports.
    pub bond: BondConfig,
    /// For tests: corrupts one write in the first number, drawn from the seed in the second.
    pub corrupt: Option<(u64, u64)>,
}

/// Returns a seed for the names of sessions and for the times of retries. It differs in each process and is
/// not secret.
#[must_use]
pub fn fresh_seed() -> u64 {
    use std::hash::BuildHasher;
    std::collections::hash_map::RandomState::new().hash_one(std::process::id())
}
