//! The transports of a worker: chosen here, from the settings and from what the machine has, and bonded into one.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail};
use dataplane_fabric::Fabric;
use dataplane_fabric::faults::CorruptingFabric;
use dataplane_memory::Slab;
use dataplane_shm::{ShmConfig, ShmFabric};
use dataplane_tcp::{TcpConfig, TcpCounters, TcpFabric};
use dataplane_transfer::{Bond, BondConfig, Rail};
use dataplane_verbs::{Device, Library, PathMtu, VerbsConfig, VerbsFabric};
use router_engines::handoff::{DataPlaneAddress, is_loopback};

use control_config::Settings;

use crate::{compose, path_command};

/// Age from which a socket file without a listener is taken for one of a process that was killed.
const STALE_AFTER: Duration = Duration::from_secs(10);

type AnyFabric = Box<dyn Fabric + Send>;

/// A counter of a transport: name, help, value.
pub(crate) type Counted = (&'static str, &'static str, u64);

/// The transports of one worker.
pub(crate) struct Rails {
    pub(crate) bond: Bond<AnyFabric>,
    /// How peers reach them.
    pub(crate) address: DataPlaneAddress,
    /// What is in use, for people.
    pub(crate) names: Vec<String>,
    /// The kinds that opened, best first.
    pub(crate) kinds: Vec<&'static str>,
    pub(crate) counters: Vec<RailCounters>,
}

/// How to read what a transport has counted.
pub(crate) struct RailCounters {
    pub(crate) name: String,
    pub(crate) read: Box<dyn Fn() -> Vec<Counted> + Send + Sync>,
}

struct Building<'a> {
    settings: &'a Settings,
    slab: &'a Arc<Slab>,
    part: &'a str,
    rails: Vec<Rail<AnyFabric>>,
    out: (DataPlaneAddress, Vec<String>),
    counters: Vec<RailCounters>,
}

/// Opens what the settings ask for. With `auto`, what this machine has not is passed over with a word in the log. What was
/// named (a transport, a device, an address other than loopback) must be there, and what makes no sense is an error.
pub(crate) fn open(settings: &Settings, slab: &Arc<Slab>) -> Result<Rails> {
    open_as(settings, slab, "worker")
}

/// `part` tells the sockets of one process apart.
fn open_as(settings: &Settings, slab: &Arc<Slab>, part: &str) -> Result<Rails> {
    verbs_config(settings)?;
    if settings.transfer.listen.ip().is_unspecified() {
        let key = if part == "pool" { "store.listen" } else { "transfer.listen" };
        bail!(
            "{key} = \"{}\": peers are told this address, so it must be one of this host",
            settings.transfer.listen
        );
    }
    let address = DataPlaneAddress { host: host_identity(settings), shm: None, tcp: None, rdma: Vec::new() };
    let mut building = Building {
        settings,
        slab,
        part,
        rails: Vec::new(),
        out: (address, Vec::new()),
        counters: Vec::new(),
    };
    let transports = compose::transports(settings);
    let mut kinds = Vec::new();
    for (rank, &transport) in transports.iter().enumerate() {
        let (opened, is_named) = match transport {
            "shm" => (building.shm(rank as u8), !settings.transfer.socket_folder.is_empty()),
            "rdma" => (building.rdma(rank as u8), !settings.rdma.devices.is_empty()),
            _ => (building.tcp(rank as u8), settings.transfer.listen.port() != 0),
        };
        match opened {
            Ok(()) => kinds.push(transport),
            Err(error) if transports.len() == 1 => {
                return Err(error.context(format!("transfer.transport = \"{transport}\" cannot be used")));
            }
            Err(error) if is_named => {
                return Err(
                    error.context(format!("the transport {transport} is configured and cannot be used"))
                );
            }
            Err(error) => tracing::info!("the transport {transport} is off: {error:#}"),
        }
    }
    if building.rails.is_empty() {
        bail!("no transport can be used; `kvasir doctor` says what is missing");
    }
    let config = BondConfig {
        retry_max: settings.transfer.reconnect_max.max(BondConfig::default().retry_first),
        slice_bytes: settings.transfer.rail_slice.0 as u32,
        seed: fresh_seed(),
        ..BondConfig::default()
    };
    let bond = Bond::new(building.rails, config, Box::new(Instant::now));
    let links = Arc::clone(bond.counters());
    let (address, names) = building.out;
    mention_loopback(settings, &address, part);
    let mut counters = building.counters;
    counters.push(RailCounters { name: "all".to_owned(), read: Box::new(move || links.snapshot().to_vec()) });
    Ok(Rails { bond, address, names, kinds, counters })
}

/// Transports of a client that registers memory of its own: those that `addresses` name.
pub(crate) fn open_client(settings: &Settings, slab: &Arc<Slab>, addresses: &[&str]) -> Result<Rails> {
    let mut settings = settings.clone();
    let names = |kind: &str| {
        addresses.iter().any(|address| address.split(',').any(|rail| rail.starts_with(&format!("{kind}:"))))
    };
    settings.transfer.transport = match (names("shm"), names("rdma"), names("tcp")) {
        (true, false, false) => "shm",
        (false, true, false) => "rdma",
        (false, false, true) => "tcp",
        _ => "auto",
    }
    .to_owned();
    // Nobody connects to a client: it does not listen.
    settings.transfer.listen = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
    open_as(&settings, slab, "client")
}

/// Transports of a node that serves its memory.
pub(crate) fn open_server(settings: &Settings, slab: &Arc<Slab>, listen: SocketAddr) -> Result<Rails> {
    let mut settings = settings.clone();
    settings.transfer.listen = listen;
    open_as(&settings, slab, "pool")
}

/// How peers name it, best first. Loopback addresses are told when there are no others: on other hosts they lead elsewhere.
pub(crate) fn notation(address: &DataPlaneAddress) -> Vec<String> {
    let rails = address.rdma.iter().map(|address| ("rdma", address));
    let tcp = address.tcp.iter().map(|address| ("tcp", address));
    let network: Vec<(&str, &String)> = rails.chain(tcp).collect();
    let is_far = network.iter().any(|(_, address)| !is_loopback(address));
    let network: Vec<String> = network
        .into_iter()
        .filter(|(_, address)| !is_far || !is_loopback(address))
        .map(|(kind, address)| format!("{kind}:{address}"))
        .collect();
    let local = address.shm.iter().map(|path| format!("shm:{path}"));
    local.chain((!network.is_empty()).then(|| network.join(","))).collect()
}

/// Says that only this host's peers use rails that listen on loopback: aloud where others could be meant.
fn mention_loopback(settings: &Settings, address: &DataPlaneAddress, part: &str) {
    if !address.rdma.iter().any(|address| is_loopback(address)) {
        return;
    }
    let listen = settings.rdma.listen;
    let for_others = address.tcp.as_ref().is_some_and(|tcp| !is_loopback(tcp));
    if for_others || !settings.rdma.devices.is_empty() || settings.transfer.transport == "rdma" {
        tracing::warn!(%listen, part, "rdma.listen is a loopback address: other hosts do not reach this node by RDMA");
    } else {
        tracing::info!(%listen, part, "RDMA is for peers on this host: rdma.listen is a loopback address");
    }
}

impl Building<'_> {
    fn add(&mut self, fabric: impl Fabric + Send + 'static, rank: u8, name: String) {
        let faults = &self.settings.faults;
        let fabric: AnyFabric = match faults.corrupt_one_in {
            0 => Box::new(fabric),
            one_in => Box::new(CorruptingFabric::new(fabric, one_in, faults.seed)),
        };
        self.rails.push(Rail { fabric, rank });
        self.out.1.push(name);
    }

    fn shm(&mut self, rank: u8) -> Result<()> {
        remove_stale_sockets(&compose::socket_folder(self.settings), SystemTime::now());
        let path = shm_socket(self.settings, self.part).display().to_string();
        let transfer = &self.settings.transfer;
        let config = ShmConfig {
            spin: transfer.spin,
            same_user_only: transfer.same_user_only,
            ..ShmConfig::default()
        };
        let listen = (self.part != "client").then_some(path.as_str());
        let fabric = ShmFabric::new(Arc::clone(self.slab), listen, config)?;
        let counters = Arc::clone(fabric.counters());
        self.counters.push(RailCounters {
            name: "shm".to_owned(),
            read: Box::new(move || counters.snapshot().to_vec()),
        });
        self.out.0.shm = Some(path);
        self.add(fabric, rank, "shared memory".to_owned());
        Ok(())
    }

    fn tcp(&mut self, rank: u8) -> Result<()> {
        let transfer = &self.settings.transfer;
        let config = TcpConfig {
            connections_per_peer: transfer.connections_per_peer as usize,
            zero_copy_from: Some(transfer.zero_copy_from.0 as usize).filter(|&bytes| bytes > 0),
            peer_dead_after: transfer.peer_dead_after,
            ..TcpConfig::default()
        };
        let listen = (self.part != "client").then_some(transfer.listen);
        let fabric = TcpFabric::new(Arc::clone(self.slab), listen, config)?;
        let counters = fabric.counters();
        self.counters
            .push(RailCounters { name: "tcp".to_owned(), read: Box::new(move || tcp_counted(&counters)) });
        self.out.0.tcp = fabric.listening_on().map(|bound| bound.to_string());
        self.add(fabric, rank, "TCP".to_owned());
        Ok(())
    }

    fn rdma(&mut self, rank: u8) -> Result<()> {
        let settings = &self.settings.rdma;
        let config = verbs_config(self.settings)?;
        let library = Library::load()?;
        let devices = match &settings.devices[..] {
            [] => Device::names(&library)?,
            named => named.to_vec(),
        };
        let (mut opened, mut problems) = (Vec::new(), Vec::new());
        for name in &devices {
            match self.rail(&library, name, &config, opened.len() as u16) {
                Ok((fabric, address)) => opened.push((name, fabric, address)),
                Err(error) => problems.push(format!("{name}: {error:#}")),
            }
        }
        if opened.is_empty() || (!settings.devices.is_empty() && !problems.is_empty()) {
            bail!("{}", if problems.is_empty() { "no RDMA device".to_owned() } else { problems.join("; ") });
        }
        problems.iter().for_each(|problem| tracing::warn!("an RDMA device is not used: {problem}"));
        for (name, fabric, address) in opened {
            let counters = Arc::clone(fabric.counters());
            self.counters.push(RailCounters {
                name: format!("rdma {name}"),
                read: Box::new(move || counters.snapshot().to_vec()),
            });
            self.out.0.rdma.extend(address);
            self.add(fabric, rank, format!("RDMA over {name}"));
        }
        Ok(())
    }

    /// One device's rail, and the address that peers connect to; a client has none, and shows its peers no memory either.
    fn rail(
        &self,
        library: &Arc<Library>,
        name: &str,
        config: &VerbsConfig,
        number: u16,
    ) -> Result<(VerbsFabric, Option<String>)> {
        let device = Device::open(library, Some(name))?;
        if self.part == "client" {
            let config = VerbsConfig { is_shown: false, ..config.clone() };
            return Ok((VerbsFabric::new(device, self.slab, None, config)?, None));
        }
        let (_, gid) = device.choose_port(config)?;
        let mut listen = self.settings.rdma.listen;
        if listen.port() != 0 {
            listen.set_port(listen.port().checked_add(number).context("rdma.listen: no port for this rail")?);
        }
        let fabric = VerbsFabric::new(device, self.slab, Some(listen), config.clone())?;
        let mut bound = fabric.listening_on().context("no address to connect to")?;
        if bound.ip().is_unspecified() {
            // Listening everywhere: peers are told the rail's own address, so that the connection takes its way.
            let own = gid.address().context("rdma.listen names no address, and the rail has none")?;
            bound = SocketAddr::new(own, bound.port());
        }
        Ok((fabric, Some(bound.to_string())))
    }
}

fn tcp_counted(counters: &TcpCounters) -> Vec<Counted> {
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
    ]
}

fn verbs_config(settings: &Settings) -> Result<VerbsConfig> {
    let rdma = &settings.rdma;
    let gid_index = match rdma.gid.as_str() {
        "auto" => None,
        number => Some(number.parse().context("rdma.gid is neither `auto` nor a row from 0 to 255")?),
    };
    let path_mtu = rdma.path_mtu.parse().ok().and_then(PathMtu::from_bytes);
    let path_mtu = path_mtu.with_context(|| format!("rdma.path_mtu = {:?}", rdma.path_mtu))?;
    let config = VerbsConfig {
        gid_index,
        path_mtu,
        service_levels: [rdma.service_level_urgent as u8, rdma.service_level_background as u8],
        traffic_class: rdma.traffic_class as u8,
        hop_limit: rdma.hop_limit as u8,
        timeout: rdma.timeout as u8,
        retry_count: rdma.retry_count as u8,
        receiver_not_ready_retry: rdma.receiver_not_ready_retry as u8,
        receiver_not_ready_timer: rdma.receiver_not_ready_timer as u8,
        reads_in_flight: rdma.reads_in_flight as u8,
        send_queue_depth: rdma.send_queue_depth as u32,
        signal_every: rdma.signal_every as u32,
        receive_buffers: rdma.receive_buffers as u32,
        connections_max: rdma.connections_max as usize,
        handshake_timeout: rdma.handshake_timeout,
        peer_dead_after: settings.transfer.peer_dead_after,
        relaxed_ordering: rdma.relaxed_ordering,
        ..VerbsConfig::default()
    };
    config.check()?;
    Ok(config)
}

fn shm_socket(settings: &Settings, part: &str) -> PathBuf {
    let name = match part {
        "worker" => format!("kvasir-{}.sock", std::process::id()),
        part => format!("kvasir-{}-{part}.sock", std::process::id()),
    };
    compose::socket_folder(settings).join(name)
}

/// Removes the socket files of processes that were killed. Files younger than [`STALE_AFTER`] stay: their process may be
/// between `bind` and `listen`.
fn remove_stale_sockets(folder: &Path, now: SystemTime) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let is_ours =
            name.to_str().is_some_and(|name| name.starts_with("kvasir-") && name.ends_with(".sock"));
        let made = entry.metadata().and_then(|file| file.modified());
        let is_old = made.is_ok_and(|made| now.duration_since(made).is_ok_and(|age| age > STALE_AFTER));
        if is_ours && is_old && dataplane_shm::remove_stale(&entry.path().display().to_string()) {
            tracing::debug!(file = %entry.path().display(), "removed the socket of a process that is gone");
        }
    }
}

/// Equal for processes that can share memory: one boot of one machine, and one folder for the sockets.
fn host_identity(settings: &Settings) -> String {
    let host = path_command::topology(settings).host;
    let boot = host.boot_id.clone().unwrap_or_else(|| format!("unknown-{}", std::process::id()));
    format!("{boot}/{}", host.shared_directory_id.clone().unwrap_or_default())
}

/// Names sessions and spreads retries; not a secret.
fn fresh_seed() -> u64 {
    use std::hash::BuildHasher;
    std::collections::hash_map::RandomState::new().hash_one(std::process::id())
}

#[cfg(test)]
mod tests {
    use dataplane_memory::{PageSize, SlabLayout};
    use dataplane_verbs::testing::SoftwareDevice;

    use super::*;

    #[test]
    fn sockets_of_killed_processes_are_removed() {
        let folder = std::env::temp_dir().join(format!("kvasir-stale-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let listen = |name: &str| std::os::unix::net::UnixListener::bind(folder.join(name)).expect("bind");
        let living = listen("kvasir-1.sock");
        for dead in ["kvasir-2.sock", "other-3.sock"] {
            drop(listen(dead));
        }
        std::fs::write(folder.join("kvasir-4.sock"), "not a socket").expect("write");
        let names = || {
            let entries = std::fs::read_dir(&folder).expect("the folder").flatten();
            let mut names: Vec<_> =
                entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
            names.sort();
            names
        };
        remove_stale_sockets(&folder, SystemTime::now());
        assert_eq!(names().len(), 4, "a young socket may be about to listen");
        remove_stale_sockets(&folder, SystemTime::now() + STALE_AFTER * 2);
        assert_eq!(names(), ["kvasir-1.sock", "kvasir-4.sock", "other-3.sock"]);
        drop(living);
        std::fs::remove_dir_all(&folder).expect("cleaned up");
    }

    fn address(tcp: Option<&str>, rdma: &[&str]) -> DataPlaneAddress {
        let rdma = rdma.iter().map(|&address| address.to_owned()).collect();
        DataPlaneAddress { host: "h".to_owned(), shm: None, tcp: tcp.map(str::to_owned), rdma }
    }

    /// As the tier of other nodes' memory opens them: it reads and writes its nodes' memory, and they never its.
    #[test]
    fn a_client_neither_listens_nor_shows_its_memory() {
        let settings = Settings::default();
        let config = verbs_config(&settings).expect("the defaults");
        let layout = SlabLayout { slot_bytes: 4096, slot_count: 4 };
        let slab = Arc::new(Slab::create("rails", layout, PageSize::Standard).expect("slab"));
        let (library, device) = (SoftwareDevice::library(), SoftwareDevice::new());
        for (part, is_server) in [("worker", true), ("pool", true), ("client", false)] {
            let mut building = Building {
                settings: &settings,
                slab: &slab,
                part,
                rails: Vec::new(),
                out: (address(None, &[]), Vec::new()),
                counters: Vec::new(),
            };
            let (fabric, told) = building.rail(&library, device.name(), &config, 0).expect("a rail");
            assert_eq!((fabric.listening_on().is_some(), told.is_some()), (is_server, is_server), "{part}");
            assert_eq!(device.usage().shown_regions, usize::from(is_server), "{part}");
            if !is_server {
                let local = ShmFabric::new(Arc::clone(&slab), None, ShmConfig::default()).expect("a fabric");
                building.add(local, 0, "shared memory".to_owned());
            }
            building.add(fabric, 1, "RDMA".to_owned());
            let bond = Bond::new(building.rails, BondConfig::default(), Box::new(Instant::now));
            assert_eq!(bond.shown_slab().is_some(), is_server, "{part}");
        }
    }

    #[test]
    fn other_hosts_are_told_of_no_loopback_rail() {
        let (far, near) = ("10.0.0.2:7400", "127.0.0.1:18500");
        for (tcp, rdma, expected) in [
            (Some(far), vec![near], "tcp:10.0.0.2:7400"),
            (
                Some(far),
                vec!["10.0.1.2:1", "10.0.2.2:1"],
                "rdma:10.0.1.2:1,rdma:10.0.2.2:1,tcp:10.0.0.2:7400",
            ),
            (Some("127.0.0.1:7400"), vec![near], "rdma:127.0.0.1:18500,tcp:127.0.0.1:7400"),
            (None, vec![near], "rdma:127.0.0.1:18500"),
        ] {
            assert_eq!(notation(&address(tcp, &rdma)), [expected]);
        }
        assert!(notation(&address(None, &[])).is_empty());
    }
}
