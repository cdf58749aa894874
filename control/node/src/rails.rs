//! The transports of a process, as configured.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use dataplane_fabric::wait::{ThreadPolicy, WaitPolicy};
use dataplane_memory::Slab;
use dataplane_rails::{
    Addresses, PeerRole, Rails, RailsConfig, Transport, TransportRequest, fresh_seed, is_loopback,
    parse_near, shared_key, worker_socket,
};
use dataplane_shm::ShmConfig;
use dataplane_tcp::TcpConfig;
use dataplane_transfer::BondConfig;
use dataplane_verbs::{PathMtu, VerbsConfig, parse_gid_index, parse_partition};
use kvstore_remote::PoolNode;
use router_engines::handoff::DataPlaneAddress;

use control_config::Settings;

use crate::{compose, path_command};

/// Opens the configured transports. With `auto`, a transport that this machine lacks is skipped and logged.
/// An explicitly named transport, device or address other than loopback must be available, and contradictory
/// settings are an error.
pub(crate) fn open(settings: &Settings, slab: &Arc<Slab>) -> Result<Rails> {
    open_as(settings, slab, PeerRole::Worker)
}

fn open_as(settings: &Settings, slab: &Arc<Slab>, role: PeerRole) -> Result<Rails> {
    let config = rails_config(settings, role)?;
    let rails = dataplane_rails::open(&config, slab)?;
    mention_loopback(settings, &rails.address, role);
    Ok(rails)
}

/// Opens the transports of a client with its own registered memory: those that reach these nodes.
pub(crate) fn open_client(settings: &Settings, slab: &Arc<Slab>, nodes: &[PoolNode]) -> Result<Rails> {
    let mut settings = settings.clone();
    settings.transfer.transport = PoolNode::only_transport(nodes).unwrap_or("auto").to_owned();
    // Peers never connect to a client, so it does not listen.
    settings.transfer.listen = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
    open_as(&settings, slab, PeerRole::Client)
}

/// Opens the transports of a node that serves its memory.
pub(crate) fn open_server(settings: &Settings, slab: &Arc<Slab>, listen: SocketAddr) -> Result<Rails> {
    let mut settings = settings.clone();
    settings.transfer.listen = listen;
    open_as(&settings, slab, PeerRole::Store)
}

/// Returns the address in the form in which a gateway passes it to the workers that connect.
pub(crate) fn data_plane_address(address: Addresses) -> DataPlaneAddress {
    let Addresses { host, cuda_ipc, shm, tcp, rdma } = address;
    DataPlaneAddress { host, cuda_ipc, shm, tcp, rdma, processes: 1 }
}

/// Returns the wait policy and the cores of the threads that move blocks.
pub(crate) fn thread_policy(settings: &Settings) -> Result<ThreadPolicy> {
    let transfer = &settings.transfer;
    let wait = if transfer.busy_poll { WaitPolicy::Busy } else { WaitPolicy::Sleep(transfer.spin) };
    let cores = transfer.cores.parse().with_context(|| format!("transfer.cores = {:?}", transfer.cores))?;
    Ok(ThreadPolicy { wait, cores })
}

fn rails_config(settings: &Settings, role: PeerRole) -> Result<RailsConfig> {
    let transfer = &settings.transfer;
    if transfer.listen.ip().is_unspecified() {
        let key = if role == PeerRole::Store { "store.listen" } else { "transfer.listen" };
        bail!("{key} = \"{}\": peers are told this address, so it must be one of this host", transfer.listen);
    }
    let wanted = |transport| TransportRequest {
        transport,
        is_named: match transport {
            // The reference engine's slots are in host memory.
            Transport::CudaIpc => false,
            // A pool with another pool's name would serve that pool's clients.
            Transport::Shm => !transfer.socket_folder.is_empty() || role == PeerRole::Store,
            Transport::Rdma => {
                let rdma = &settings.rdma;
                !rdma.devices.is_empty() || rdma.near != "auto" || rdma.partition != "default"
            }
            Transport::Tcp => transfer.listen.port() != 0,
        },
    };
    let faults = &settings.faults;
    Ok(RailsConfig {
        transports: compose::transports(settings).into_iter().map(wanted).collect(),
        role,
        key: shared_key(&transfer.secret_file)?,
        host: host_identity(settings),
        socket: shm_socket(settings, role),
        shm: ShmConfig { same_user_only: transfer.same_user_only, ..ShmConfig::default() },
        listen: transfer.listen,
        tcp: TcpConfig {
            connections_per_peer: transfer.connections_per_peer as usize,
            zero_copy_from: Some(transfer.zero_copy_from.0 as usize).filter(|&bytes| bytes > 0),
            peer_dead_after: transfer.peer_dead_after,
            ..TcpConfig::default()
        },
        devices: settings.rdma.devices.clone(),
        near: parse_near(&settings.rdma.near)?,
        rdma_listen: settings.rdma.listen,
        rdma: verbs_config(settings)?,
        connections_per_device: settings.rdma.connections_per_device as u16,
        device: None,
        verbs_library: None,
        bond: BondConfig {
            retry_max: transfer.reconnect_max.max(BondConfig::default().retry_first),
            slice_bytes: transfer.rail_slice.0 as u32,
            seed: fresh_seed(),
            ..BondConfig::default()
        },
        corrupt: (faults.corrupt_one_in > 0).then_some((faults.corrupt_one_in, faults.seed)),
    })
}

/// Logs that rails on loopback serve this host's peers only: as a warning if other hosts may be meant.
fn mention_loopback(settings: &Settings, address: &Addresses, role: PeerRole) {
    if !address.rdma.iter().any(|address| is_loopback(address)) {
        return;
    }
    let listen = settings.rdma.listen;
    let for_others = address.tcp.as_ref().is_some_and(|tcp| !is_loopback(tcp));
    if for_others || !settings.rdma.devices.is_empty() || settings.transfer.transport == "rdma" {
        tracing::warn!(%listen, ?role, "rdma.listen is a loopback address: other hosts do not reach this node by RDMA");
    } else {
        tracing::info!(%listen, ?role, "RDMA is for peers on this host: rdma.listen is a loopback address");
    }
}

fn verbs_config(settings: &Settings) -> Result<VerbsConfig> {
    let rdma = &settings.rdma;
    let path_mtu = rdma.path_mtu.parse().ok().and_then(PathMtu::from_bytes);
    let path_mtu = path_mtu.with_context(|| format!("rdma.path_mtu = {:?}", rdma.path_mtu))?;
    let config = VerbsConfig {
        gid_index: parse_gid_index(&rdma.gid)?,
        partition: parse_partition(&rdma.partition)?,
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
        completion_vector: rdma.completion_vector as u32,
        ..VerbsConfig::default()
    };
    config.check()?;
    Ok(config)
}

/// Returns the socket of a role: a process may have transports in several roles. A pool's socket is named
/// after its node, so that clients find it again after a restart.
fn shm_socket(settings: &Settings, role: PeerRole) -> PathBuf {
    let name = match role {
        PeerRole::Worker => std::process::id().to_string(),
        PeerRole::Client => format!("{}-client", std::process::id()),
        PeerRole::Store => {
            let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
            let name = settings.store.name.chars();
            format!(
                "{}-pool",
                name.map(|letter| if is_plain(letter) { letter } else { '_' }).collect::<String>()
            )
        }
    };
    worker_socket(&compose::socket_folder(settings), &name)
}

/// Returns an identity that is equal for processes that can share memory: one boot of one machine, and one
/// socket folder.
fn host_identity(settings: &Settings) -> String {
    let host = path_command::topology(settings).host;
    let boot = host.boot_id.clone().unwrap_or_else(|| format!("unknown-{}", std::process::id()));
    format!("{boot}/{}", host.shared_directory_id.clone().unwrap_or_default())
}
