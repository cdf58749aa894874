//! Opens the transports of a configuration.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use dataplane_fabric::Fabric;
use dataplane_fabric::auth::UNPROVED_HELP;
use dataplane_fabric::faults::CorruptingFabric;
use dataplane_ipc::{IpcError, IpcFabric};
use dataplane_memory::{Slab, SlabKind};
use dataplane_shm::{ShmConfig, ShmError, ShmFabric};
use dataplane_tcp::{TcpConfig, TcpCounters, TcpError, TcpFabric};
use dataplane_topology::{self as topology, Exclusion, Memory, Place, Topology, TopologyError, select_local};
use dataplane_transfer::{Bond, LINKS_MAX, Rail};
use dataplane_verbs::{Device, Library, VerbsConfig, VerbsError, VerbsFabric};

use crate::sockets::{device_socket, remove_stale_sockets};
use crate::{Addresses, RailsConfig, Transport, TransportRequest};

/// A transport of any kind.
type AnyFabric = Box<dyn Fabric + Send>;

/// A counter of a transport: name, help text, value.
pub type CounterSample = (&'static str, &'static str, u64);

/// The transports of one process.
pub struct Rails {
    /// The bond over every transport that opened.
    pub bond: Bond<AnyFabric>,
    /// The addresses at which peers reach the transports.
    pub address: Addresses,
    /// Display names of the transports in use.
    pub names: Vec<String>,
    /// The kinds that opened, best first.
    pub kinds: Vec<Transport>,
    /// Counters of each transport, and the bond's counters of its traffic.
    pub counters: Vec<RailCounters>,
}

/// The counters of one transport.
pub struct RailCounters {
    /// `shm`, `cuda_ipc`, `tcp` or `rdma DEVICE`.
    pub name: String,
    /// Reads all counters of the transport.
    pub read: Box<dyn Fn() -> Vec<CounterSample> + Send + Sync>,
}

/// Reason that transports cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum RailsError {
    /// No transport can be opened; holds the reason for each.
    #[error("no transport can be used ({0}); `kvasir doctor` says what is missing")]
    NoTransport(String),
    /// A transport that the configuration names, or the only requested one, cannot be opened.
    #[error("transfer.transport: {} cannot be used: {reason}", transport.name())]
    Unusable {
        /// The transport.
        transport: Transport,
        /// The reason.
        reason: Box<Self>,
    },
    /// Shared memory.
    #[error(transparent)]
    Shm(#[from] ShmError),
    /// Shared device memory.
    #[error(transparent)]
    Ipc(#[from] IpcError),
    /// `cuda_ipc` was requested without slots in a device's memory.
    #[error("cuda_ipc needs slots in a device's memory (device.direct)")]
    HostSlots,
    /// No transport reaches the slots in a device's memory.
    #[error(
        "no transport reaches the device's memory ({0}); set device.direct = false, or see rdma.devices and CUDA_VISIBLE_DEVICES"
    )]
    DeviceOutOfReach(String),
    /// TCP.
    #[error(transparent)]
    Tcp(#[from] TcpError),
    /// RDMA.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// `rdma.near` names no memory of this machine.
    #[error("rdma.near: {0}")]
    Near(#[from] TopologyError),
    /// There is no RDMA device, or none can be used; holds the reason for each.
    #[error("{0}")]
    Devices(String),
    /// The links to a peer would exceed the limit.
    #[error(
        "{devices} RDMA devices with {connections} connections each (rdma.connections_per_device) are more links to a peer than {limit}: \
         of {LINKS_MAX} each other transport takes one"
    )]
    Links {
        /// Most links to a peer.
        limit: usize,
        /// Number of devices.
        devices: usize,
        /// Number of connections over each device.
        connections: usize,
    },
    /// A rail has no address at which peers could connect to it.
    #[error("{0}")]
    Address(&'static str),
}

struct RailsBuilder<'a> {
    config: &'a RailsConfig,
    slab: &'a Arc<Slab>,
    rails: Vec<Rail<AnyFabric>>,
    address: Addresses,
    names: Vec<String>,
    counters: Vec<RailCounters>,
    /// Rails that cannot be used, or not for a device's memory, with the reason.
    unavailable: Vec<(Transport, String)>,
}

/// Joins the reasons of these transports into one text.
fn reasons(unavailable: &[(Transport, String)], of: &[Transport]) -> String {
    let of = unavailable.iter().filter(|(transport, _)| of.contains(transport));
    let texts: Vec<String> =
        of.map(|(transport, reason)| format!("{}: {reason}", transport.name())).collect();
    if texts.is_empty() { "none that could is configured".to_owned() } else { texts.join("; ") }
}

/// A rail over an RDMA device.
struct RdmaRail {
    fabric: VerbsFabric,
    /// Address at which peers connect to the rail.
    address: Option<String>,
    /// Reason that the rail does not reach the slots in a device's memory; `None` if it does, or if there
    /// are none.
    device_problem: Option<VerbsError>,
}

/// Opens the transports of the configuration, over the host slots of `slab` and those of
/// [`RailsConfig::device`]. A transport that this machine lacks is skipped and logged; one that is named,
/// or the only one requested, must open.
pub fn open(config: &RailsConfig, slab: &Arc<Slab>) -> Result<Rails, RailsError> {
    let address = Addresses { host: config.host.clone(), ..Addresses::default() };
    let (rails, names, counters) = (Vec::new(), Vec::new(), Vec::new());
    let mut builder = RailsBuilder { config, slab, rails, address, names, counters, unavailable: Vec::new() };
    let mut kinds = Vec::new();
    for (rank, &TransportRequest { transport, is_named }) in config.transports.iter().enumerate() {
        let opened = match transport {
            Transport::CudaIpc => builder.cuda_ipc(rank as u8),
            Transport::Shm => builder.shm(rank as u8),
            Transport::Rdma => builder.rdma(rank as u8),
            Transport::Tcp => builder.tcp(rank as u8),
        };
        match opened {
            Ok(()) => kinds.push(transport),
            Err(reason) if is_named || config.transports.len() == 1 => {
                return Err(RailsError::Unusable { transport, reason: Box::new(reason) });
            }
            Err(error) => {
                tracing::info!("the transport {} is off: {error}", transport.name());
                builder.unavailable.push((transport, error.to_string()));
            }
        }
    }
    if builder.rails.is_empty() {
        return Err(RailsError::NoTransport(reasons(&builder.unavailable, &Transport::ALL)));
    }
    let shows_device = |rail: &Rail<AnyFabric>| rail.fabric.shown_slab(SlabKind::Device).is_some();
    if config.device.is_some() && config.role.listens() && !builder.rails.iter().any(shows_device) {
        let reasons = reasons(&builder.unavailable, &[Transport::CudaIpc, Transport::Rdma]);
        return Err(RailsError::DeviceOutOfReach(reasons));
    }
    let RailsBuilder { rails, address, names, mut counters, .. } = builder;
    let bond = Bond::new(rails, config.bond, Box::new(Instant::now));
    let links = Arc::clone(bond.counters());
    // Each rail was added with counters of its own (`add`, `count`), so that both have one order.
    assert_eq!(counters.len(), names.len(), "one set of counters for each rail");
    for rail in 0..counters.len() {
        let (links, name) = (Arc::clone(&links), counters[rail].name.clone());
        counters.push(RailCounters { name, read: Box::new(move || links.snapshot(rail).to_vec()) });
    }
    Ok(Rails { bond, address, names, kinds, counters })
}

impl RailsBuilder<'_> {
    fn add(&mut self, fabric: impl Fabric + Send + 'static, rank: u8, name: String) {
        let fabric: AnyFabric = match self.config.corrupt {
            None => Box::new(fabric),
            Some((one_in, seed)) => Box::new(CorruptingFabric::new(fabric, one_in, seed)),
        };
        self.rails.push(Rail { fabric, rank });
        self.names.push(name);
    }

    fn count(&mut self, name: String, read: impl Fn() -> Vec<CounterSample> + Send + Sync + 'static) {
        self.counters.push(RailCounters { name, read: Box::new(read) });
    }

    /// Returns the path of the socket at which processes of this host connect; `None` for a client. Stale
    /// sockets in its folder are removed.
    fn local_socket(&self, path: &Path) -> Option<String> {
        if let Some(folder) = path.parent() {
            remove_stale_sockets(folder, SystemTime::now());
        }
        if !self.config.role.listens() {
            return None;
        }
        let path = path.display().to_string();
        // The socket of an earlier process, without a listener.
        if dataplane_shm::remove_stale(&path) {
            tracing::debug!(file = path, "removed the socket of a process that is gone");
        }
        Some(path)
    }

    fn shm_config(&self) -> ShmConfig {
        let (access, key) = (self.config.role.access(), self.config.key.clone());
        ShmConfig { access, key, ..self.config.shm.clone() }
    }

    fn cuda_ipc(&mut self, rank: u8) -> Result<(), RailsError> {
        let sharing = self.config.device.as_ref().ok_or(RailsError::HostSlots)?;
        let listen = self.local_socket(&device_socket(&self.config.socket));
        let fabric = IpcFabric::new(Arc::clone(sharing), listen.as_deref(), self.shm_config())?;
        let counters = Arc::clone(fabric.counters());
        self.count("cuda_ipc".to_owned(), move || counters.snapshot().to_vec());
        self.address.cuda_ipc = listen;
        self.add(fabric, rank, "shared device memory".to_owned());
        Ok(())
    }

    fn shm(&mut self, rank: u8) -> Result<(), RailsError> {
        let listen = self.local_socket(&self.config.socket);
        let fabric = ShmFabric::new(Arc::clone(self.slab), listen.as_deref(), self.shm_config())?;
        let counters = Arc::clone(fabric.counters());
        self.count("shm".to_owned(), move || counters.snapshot().to_vec());
        self.address.shm = listen;
        self.add(fabric, rank, "shared memory".to_owned());
        Ok(())
    }

    fn tcp(&mut self, rank: u8) -> Result<(), RailsError> {
        let listen = self.config.role.listens().then_some(self.config.listen);
        let (access, key) = (self.config.role.access(), self.config.key.clone());
        let config = TcpConfig { access, key, ..self.config.tcp.clone() };
        let fabric = TcpFabric::new(Arc::clone(self.slab), listen, config)?;
        let counters = fabric.counters();
        self.count("tcp".to_owned(), move || tcp_counted(&counters));
        self.address.tcp = fabric.listening_on().map(|bound| bound.to_string());
        self.add(fabric, rank, "TCP".to_owned());
        Ok(())
    }

    fn rdma(&mut self, rank: u8) -> Result<(), RailsError> {
        let library = match &self.config.verbs_library {
            Some(library) => Arc::clone(library),
            None => Library::load()?,
        };
        let is_named = !self.config.devices.is_empty();
        let devices = if is_named {
            self.config.devices.iter().map(|name| (name.clone(), self.config.rdma.port)).collect()
        } else {
            self.nearest(&library)?
        };
        let connections = usize::from(self.config.connections_per_device.max(1));
        let is_other = |wanted: &&TransportRequest| wanted.transport != Transport::Rdma;
        let limit = LINKS_MAX - self.config.transports.iter().filter(is_other).count();
        if devices.len() * connections > limit {
            return Err(RailsError::Links { limit, devices: devices.len(), connections });
        }
        let (mut opened, mut problems) = (Vec::new(), Vec::new());
        for (name, port) in &devices {
            for connection in 0..connections {
                match self.rail(&library, name, *port, opened.len() as u16) {
                    Ok(RdmaRail { fabric, address, device_problem: problem }) => {
                        let problem = problem.map(|error| format!("{name}: {error}"));
                        // All connections over a card have the same problem as a rule; it is reported once.
                        problems.extend(problem.filter(|problem| !problems.contains(problem)));
                        opened.push((rail_name(name, *port, connection, &devices), fabric, address));
                    }
                    Err(error) => {
                        problems.push(format!("{name}: {error}"));
                        break;
                    }
                }
            }
        }
        if opened.is_empty() || (is_named && !problems.is_empty()) {
            let nothing = || "no RDMA device".to_owned();
            return Err(RailsError::Devices(if problems.is_empty() {
                nothing()
            } else {
                problems.join("; ")
            }));
        }
        for problem in problems {
            tracing::warn!("an RDMA device is not used, or not for the memory of a GPU: {problem}");
            self.unavailable.push((Transport::Rdma, problem));
        }
        for (name, fabric, address) in opened {
            let counters = Arc::clone(fabric.counters());
            self.count(format!("rdma {name}"), move || counters.snapshot().to_vec());
            self.address.rdma.extend(address);
            self.add(fabric, rank, format!("RDMA over {name}"));
        }
        Ok(())
    }

    /// Makes a fabric over the host's slots and, where the card reaches them, those of the device. Its
    /// address is not set yet.
    fn rdma_rail(
        &self,
        device: Arc<Device>,
        listen: Option<SocketAddr>,
        config: VerbsConfig,
    ) -> Result<RdmaRail, RailsError> {
        let mut fabric = VerbsFabric::new(device, self.slab, listen, config)?;
        let slab = self.config.device.as_ref().map(|device| device.slab());
        let device_problem = slab.and_then(|slab| fabric.show(slab).err());
        Ok(RdmaRail { fabric, address: None, device_problem })
    }

    /// Returns the devices and ports to use if the configuration names none.
    fn nearest(&self, library: &Arc<Library>) -> Result<Vec<(String, Option<u8>)>, RailsError> {
        let known = Device::names(library)?;
        let NearestPorts { memory, ports, excluded } = nearest_ports(self.config.near.as_ref(), &known)?;
        if ports.is_empty() {
            return Ok(known.into_iter().map(|name| (name, self.config.rdma.port)).collect());
        }
        for Exclusion { rail, reason } in excluded {
            tracing::info!(?memory, "the RDMA port {rail} is not used: {reason}");
        }
        Ok(ports)
    }

    /// Opens the rail of an RDMA device. A client's rail has no address, and shows no memory to peers.
    fn rail(
        &self,
        library: &Arc<Library>,
        name: &str,
        port: Option<u8>,
        number: u16,
    ) -> Result<RdmaRail, RailsError> {
        let device = Device::open(library, Some(name))?;
        let (access, key) = (self.config.role.access(), self.config.key.clone());
        let config = VerbsConfig { port, access, key, ..self.config.rdma.clone() };
        if !self.config.role.listens() {
            return self.rdma_rail(device, None, config);
        }
        let (_, gid) = device.choose_port(&config)?;
        let mut listen = self.config.rdma_listen;
        if listen.port() != 0 {
            let port = listen.port().checked_add(number);
            listen.set_port(port.ok_or(RailsError::Address("rdma.listen: no port for this rail"))?);
        }
        let rail = self.rdma_rail(device, Some(listen), config)?;
        let mut bound = rail
            .fabric
            .listening_on()
            .ok_or(RailsError::Address("rdma.listen: the device has no address"))?;
        if bound.ip().is_unspecified() {
            // Bound to all addresses: peers are told the rail's own address, so that the connection uses
            // this rail.
            let none = RailsError::Address("rdma.listen names no address, and the rail has none");
            bound = SocketAddr::new(gid.address().ok_or(none)?, bound.port());
        }
        Ok(RdmaRail { address: Some(bound.to_string()), ..rail })
    }
}

/// Returns the name of a rail: the device, the port if several of the device are used, and the connection's
/// number from the second on.
fn rail_name(device: &str, port: Option<u8>, connection: usize, devices: &[(String, Option<u8>)]) -> String {
    let is_one_of_several = devices.iter().filter(|(other, _)| other == device).count() > 1;
    let name = match port.filter(|_| is_one_of_several) {
        Some(port) => format!("{device}:{port}"),
        None => device.to_owned(),
    };
    if connection == 0 { name } else { format!("{name}/{}", connection + 1) }
}

/// The RDMA ports that a process of this machine uses if the configuration names none.
#[derive(Debug)]
pub struct NearestPorts {
    /// The memory to which the ports are nearest.
    pub memory: Memory,
    /// Devices and their ports; empty when none is near, in which case every device is tried.
    pub ports: Vec<(String, Option<u8>)>,
    /// Ports that are not used, with the reason.
    pub excluded: Vec<Exclusion>,
}

/// Returns the ports, of devices with these names, nearest to a place, or to this process's GPU or processors.
///
/// # Errors
/// [`RailsError::Near`] if this machine has no such place.
pub fn nearest_ports(near: Option<&Place>, known: &[String]) -> Result<NearestPorts, RailsError> {
    let topology = Topology::read(Path::new("/"));
    let memory = match near {
        Some(place) => place.memory(&topology)?,
        None => topology.memory_of_process(std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref()),
    };
    let (rails, excluded) = select_local(&topology, memory);
    Ok(NearestPorts { memory, ports: ports_of(&rails, known), excluded })
}

/// The NUMA node that a process's memory and threads should be on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NearestNode {
    /// The number of the node.
    pub number: u32,
    /// The processors of the node, as in `transfer.cores`.
    pub cpus: String,
}

/// Whether this machine has the place, and the place is memory.
#[must_use]
pub fn is_here(place: &Place) -> bool {
    place.memory(&Topology::read(Path::new("/"))).is_ok()
}

/// Returns the NUMA node nearest to a place of this machine; without a place, nearest to this process's
/// processors, or to the first GPU of `CUDA_VISIBLE_DEVICES` if the process may run on several nodes.
/// `None` when the machine does not report it, or has no such place.
#[must_use]
pub fn nearest_node(near: Option<&Place>) -> Option<NearestNode> {
    let topology = Topology::read(Path::new("/"));
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let memory = match (near, topology.process.numa_node) {
        (Some(place), _) => place.memory(&topology).ok()?,
        (None, Some(node)) => Memory::Host { numa: Some(node) },
        // A GPU that `CUDA_VISIBLE_DEVICES` does not name may not be this process's.
        (None, None) => topology.memory_of_process(Some(visible.as_deref()?)),
    };
    let node = topology.numa_node_of(memory)?;
    Some(NearestNode { number: node.number, cpus: node.cpus.clone() })
}

/// Returns the ports of rails whose devices libibverbs knows, in the order of the rails.
fn ports_of(rails: &[topology::Rail], known: &[String]) -> Vec<(String, Option<u8>)> {
    let ports = rails.iter().filter_map(|rail| rail.port.clone());
    ports.filter(|(device, _)| known.contains(device)).map(|(device, port)| (device, Some(port))).collect()
}

fn tcp_counted(counters: &TcpCounters) -> Vec<CounterSample> {
    vec![
        ("sent_bytes", "Payload bytes sent", counters.sent_bytes.get()),
        ("received_bytes", "Payload bytes received", counters.received_bytes.get()),
        ("sent_frames", "Frames sent", counters.sent_frames.get()),
        ("received_frames", "Frames received", counters.received_frames.get()),
        ("system_calls", "Calls of io_uring_enter", counters.system_calls.get()),
        ("zero_copy_sends", "Sends without a copy", counters.zero_copy_sends.get()),
        ("copied_sends", "Zero-copy sends that the kernel copied after all", counters.copied_sends.get()),
        ("accept_pauses", "Times accepting paused for want of descriptors", counters.accept_pauses.get()),
        ("handshake_timeouts", "Connections that did not greet in time", counters.handshake_timeouts.get()),
        ("unproved_handshakes", UNPROVED_HELP, counters.unproved_handshakes.get()),
    ]
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use dataplane_memory::testing::{Abilities, CopyFaults, DeviceDouble, SharingDouble};
    use dataplane_memory::{DeviceMemory, DeviceSharing, PageSize, SlabLayout};
    use dataplane_transfer::BondConfig;
    use dataplane_verbs::testing::{Reach, SoftwareDevice};

    use super::*;
    use crate::{PeerRole, SharedKey};

    #[test]
    fn the_node_of_a_place_is_told_where_the_machine_does() {
        let place = |text: &str| text.parse::<Place>().expect("a place");
        let nearest = |text: &str| nearest_node(Some(&place(text)));
        assert_eq!(nearest("host"), None, "any");
        assert_eq!(nearest("host:1000"), None, "none such");
        assert_eq!(nearest("0000:ff:1f.7"), None, "no such device");
        assert!(!is_here(&place("0000:ff:1f.7")) && is_here(&place("host")));
        if Path::new("/sys/devices/system/node/node0/cpulist").exists() {
            let node = nearest("host:0").expect("node 0");
            assert!(
                node.number == 0 && node.cpus.parse::<dataplane_fabric::cores::Cores>().is_ok(),
                "{node:?}"
            );
        }
    }

    #[test]
    fn ports_of_one_device_have_names_of_their_own() {
        let devices =
            [("mlx4_0".to_owned(), Some(1)), ("mlx4_0".to_owned(), Some(2)), ("mlx5_0".to_owned(), Some(1))];
        let names: Vec<String> =
            devices.iter().map(|(device, port)| rail_name(device, *port, 0, &devices)).collect();
        assert_eq!(names, ["mlx4_0:1", "mlx4_0:2", "mlx5_0"]);
    }

    #[test]
    fn several_connections_over_one_device_are_rails_of_their_own() {
        let (device, other) = (SoftwareDevice::new(), SoftwareDevice::new());
        let of = |devices: &[&SoftwareDevice], connections_per_device| RailsConfig {
            transports: vec![TransportRequest { transport: Transport::Rdma, is_named: true }],
            devices: devices.iter().map(|device| device.name().to_owned()).collect(),
            connections_per_device,
            verbs_library: Some(SoftwareDevice::library()),
            ..config(PeerRole::Worker)
        };
        let rails = open(&of(&[&device, &other], 3), &slab()).expect("opens");
        let [first, second] = [&device, &other].map(SoftwareDevice::name);
        let names = [first, second].map(|name| [name.to_owned(), format!("{name}/2"), format!("{name}/3")]);
        assert_eq!(
            rails.names,
            names.concat().iter().map(|name| format!("RDMA over {name}")).collect::<Vec<_>>()
        );
        assert_eq!((rails.address.rdma.len(), device.usage().contexts), (6, 3));
        let refused = open(&of(&[&device, &other], 9), &slab()).err().expect("too many").to_string();
        let text = "2 RDMA devices with 9 connections each (rdma.connections_per_device) are more links to a peer than 16";
        assert!(refused.contains(text), "{refused}");
    }

    fn config(role: PeerRole) -> RailsConfig {
        let loopback = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
        RailsConfig {
            transports: vec![TransportRequest { transport: Transport::Shm, is_named: false }],
            role,
            key: SharedKey::default(),
            host: "h".to_owned(),
            socket: std::env::temp_dir().join(format!("kvasir-rails-{}.sock", std::process::id())),
            shm: ShmConfig::default(),
            device: None,
            listen: loopback,
            tcp: TcpConfig::default(),
            devices: Vec::new(),
            near: None,
            rdma_listen: loopback,
            rdma: VerbsConfig::default(),
            connections_per_device: 1,
            verbs_library: None,
            bond: BondConfig::default(),
            corrupt: None,
        }
    }

    fn slab() -> Arc<Slab> {
        let layout = SlabLayout { slot_bytes: 4096, slot_count: 4 };
        Arc::new(Slab::create("rails", layout, PageSize::Standard).expect("slab"))
    }

    /// Transports that reach a device's slots show them beside the host's; if none does, opening fails with
    /// the reasons.
    #[test]
    fn slots_of_a_device_are_shown_by_the_transports_that_reach_them() {
        let (near, far) = (SoftwareDevice::new(), SoftwareDevice::new());
        let layout = SlabLayout { slot_bytes: 4096, slot_count: 4 };
        let memory = DeviceDouble::new(layout.slots_bytes(), Abilities { dma_buf: true, peer_memory: false });
        let reach = Reach { dma_buf: true, peer_memory: false };
        near.put_beside(Arc::clone(&memory) as Arc<dyn DeviceMemory>, reach);
        let sharing: Arc<dyn DeviceSharing> =
            Arc::new(SharingDouble::new(layout, &memory, CopyFaults::default()));
        let (host, next) = (slab(), std::cell::Cell::new(0));
        let opened = |transports: &[Transport], devices: &[&SoftwareDevice]| {
            let wanted = |&transport| TransportRequest { transport, is_named: false };
            next.set(next.get() + 1);
            let name = format!("kvasir-rails-{}-{}.sock", std::process::id(), next.get());
            let config = RailsConfig {
                transports: transports.iter().map(wanted).collect(),
                devices: devices.iter().map(|device| device.name().to_owned()).collect(),
                verbs_library: Some(SoftwareDevice::library()),
                device: Some(Arc::clone(&sharing)),
                socket: std::env::temp_dir().join(name),
                ..config(PeerRole::Worker)
            };
            open(&config, &host)
        };
        let rails = opened(&Transport::ALL, &[&near]).expect("opens");
        assert_eq!(rails.kinds, Transport::ALL);
        let shown = SlabKind::ALL.map(|kind| rails.bond.shown_slab(kind).expect("shown"));
        assert!(Arc::ptr_eq(&shown[0], &host) && Arc::ptr_eq(&shown[1], sharing.slab()));
        let notation = rails.address.notation();
        let (shm, device) = (rails.address.shm.expect("a socket"), rails.address.cuda_ipc.expect("a socket"));
        assert_eq!(device, shm.replace(".sock", "-device.sock"));
        assert!(notation[0].starts_with(&format!("cuda_ipc:{device},shm:{shm},rdma:")), "{notation:?}");
        assert!(opened(&[Transport::Rdma, Transport::Tcp], &[&near]).is_ok());
        let refused = |devices: &[&SoftwareDevice]| {
            opened(&[Transport::Rdma, Transport::Tcp], devices).err().expect("out of reach").to_string()
        };
        let reason = refused(&[&far]);
        let text = "no transport reaches the device's memory (rdma: ";
        assert!(reason.starts_with(text) && reason.contains("bytes of device memory"), "{reason}");
        let reason = opened(&[Transport::Tcp], &[]).err().expect("out of reach").to_string();
        assert!(reason.contains("(none that could is configured)"), "{reason}");
    }

    /// A client, such as the tier of other nodes' memory, reads and writes its nodes' memory, and they
    /// never access its own.
    #[test]
    fn a_client_neither_listens_nor_shows_its_memory() {
        let slab = slab();
        let (library, device) = (SoftwareDevice::library(), SoftwareDevice::new());
        for role in [PeerRole::Worker, PeerRole::Client] {
            let is_client = role == PeerRole::Client;
            let config = config(role);
            let (address, names, counters) = (Addresses::default(), Vec::new(), Vec::new());
            let (rails, unavailable) = (Vec::new(), Vec::new());
            let mut builder =
                RailsBuilder { config: &config, slab: &slab, rails, address, names, counters, unavailable };
            let RdmaRail { fabric, address: told, .. } =
                builder.rail(&library, device.name(), None, 0).expect("a rail");
            assert_eq!((fabric.listening_on().is_none(), told.is_none()), (is_client, is_client));
            assert_eq!(device.usage().shown_regions, usize::from(!is_client));
            if is_client {
                builder.shm(0).expect("a fabric");
            }
            builder.add(fabric, 1, "RDMA".to_owned());
            let bond = Bond::new(builder.rails, BondConfig::default(), Box::new(Instant::now));
            assert_eq!(bond.shown_slab(SlabKind::Host).is_none(), is_client);
        }
    }

    /// A process that is restarted at once has the same socket name as its killed predecessor.
    #[test]
    fn the_socket_of_a_killed_process_does_not_keep_its_successor_from_listening() {
        let config = config(PeerRole::Worker);
        drop(std::os::unix::net::UnixListener::bind(&config.socket).expect("bind"));
        let rails = open(&config, &slab()).expect("opens");
        assert_eq!(rails.kinds, [Transport::Shm]);
        assert_eq!(rails.address.notation(), [format!("shm:{}", config.socket.display())]);
        let refused = open(&config, &slab()).err().expect("another process listens there");
        assert!(refused.to_string().contains("transfer.transport: shm cannot be used"), "{refused}");
        drop(rails);
        let _gone = std::fs::remove_file(&config.socket);
    }

    /// Of a card with two ports the chosen one is opened; a device that libibverbs does not know is skipped.
    #[test]
    fn chosen_ports_are_opened_and_no_others() {
        let rail = |device: &str, port: u8| topology::Rail {
            name: format!("{device}:{port}"),
            port: Some((device.to_owned(), port)),
            ..topology::Rail::default()
        };
        let known = ["mlx5_0".to_owned(), "mlx5_1".to_owned()];
        let rails = [rail("mlx5_1", 2), rail("mlx5_9", 1), rail("mlx5_0", 1)];
        assert_eq!(
            ports_of(&rails, &known),
            [("mlx5_1".to_owned(), Some(2)), ("mlx5_0".to_owned(), Some(1))]
        );
        assert_eq!(ports_of(&rails[1..2], &known), []);
    }

    #[test]
    fn places_are_read_and_others_refused() {
        assert!(matches!(crate::parse_near("auto"), Ok(None)));
        assert!(matches!(crate::parse_near("gpu0"), Ok(Some(_))));
        let error = crate::parse_near("the moon").expect_err("no place").to_string();
        assert!(error.starts_with("rdma.near: 'the moon' names no place"), "{error}");
    }
}
