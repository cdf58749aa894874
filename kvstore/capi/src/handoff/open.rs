//! Opening the transports of hand-offs.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use dataplane_rails::{
    PeerRole, Rails, RailsConfig, RailsError, Transport, TransportRequest, fresh_seed, is_here, nearest_node,
    parse_near, shared_key, worker_socket,
};
use dataplane_transfer::{
    BondConfig, Cores, HeadRange, Limits, PieceLayout, ThreadPolicy, TransferCounters, TransferNode,
    TransferService, WaitPolicy,
};
use dataplane_verbs::{VerbsConfig, VerbsError, parse_gid_index, parse_partition};

use super::device::{DeviceCopyThreads, DeviceParts, DirectParts, OpenedDevice};
use super::{HandOffs, Shape, Transfers};
use crate::config::{RdmaSettings, SLOT_GRAIN, TransferSettings, Transports};
use crate::queue::Completions;
use crate::status::{Failure, Status};
use crate::tensors::Memory;

impl HandOffs {
    /// Opens the configured transports, and starts the service's thread.
    pub(crate) fn open(
        settings: &TransferSettings,
        mut config: RailsConfig,
        device: Option<DeviceParts>,
        completions: Completions,
    ) -> Result<Arc<Self>, Failure> {
        let failed = |error: &dyn std::fmt::Display| failed(error);
        let pieces = pieces(settings);
        let slot_bytes = pieces.slot_bytes().next_multiple_of(SLOT_GRAIN as usize);
        // `Settings::parse` has checked that there is at least one slot, and that their number fits.
        let slot_count = (settings.capacity.0 / slot_bytes as u64).max(1) as u32;
        let layout = SlabLayout { slot_bytes, slot_count };
        let slab =
            Slab::create("kvasir-handoff", layout, PageSize::Standard).map_err(|error| failed(&error))?;
        if config.near.is_none() {
            // Without named cards, take those nearest to this device, whichever of the process's devices it is.
            config.near = device.as_ref().and_then(DeviceParts::place).filter(is_here);
        }
        let numa = nearest_node(config.near.as_ref());
        if let Some(numa) = &numa {
            // A container may not be allowed to set a memory policy; then pages are placed where they are first
            // touched.
            let _not_allowed = slab.prefer_numa_node(numa.number);
        }
        let host = SlotPool::new(Arc::new(slab));
        let memory =
            device.as_ref().map_or(Memory::Host, |parts| Memory::Cuda(parts.device.description().ordinal));
        let shape = Shape { memory, layers: pieces.layers, layer_bytes: pieces.layer_bytes() as usize };
        let opened = device
            .map(|parts| DeviceCopyThreads::open(parts, slot_bytes, &host, &completions))
            .transpose()?;
        let direct = opened.as_ref().and_then(|opened| opened.direct.as_ref());
        config.device = direct.map(|direct| Arc::clone(&direct.sharing));
        let Rails { bond, address, counters: rails, .. } = dataplane_rails::open(&config, host.slab())
            .map_err(|error| match error {
                // The reason alone does not name the key that requires direct access.
                RailsError::DeviceOutOfReach(_) | RailsError::Unusable { .. } if direct.is_some() => {
                    failed(&format_args!("device.direct = true: {error}"))
                }
                other => failed(&other),
            })?;
        let counters = Arc::new(TransferCounters::default());
        let limits = Limits { lease: settings.lease.0, seed: fresh_seed(), ..Limits::default() };
        let mut node = TransferNode::new(bond, pieces, limits, Arc::clone(&counters));
        let (pool, staging_pool, device, staging) = match opened {
            Some(OpenedDevice { threads, pool, staging, direct }) => {
                if let Some(DirectParts { checksummer, .. }) = direct {
                    node = node.with_checksummer(checksummer);
                }
                (pool, Some(host), Some(threads), Some(staging))
            }
            None => (host, None, None, None),
        };
        let handoffs = Arc::new(Self {
            shape,
            pool,
            staging_pool,
            device,
            completions,
            address,
            counters,
            rails,
            transfers: Mutex::new(Transfers::default()),
            submitting: Mutex::new(()),
            service: RwLock::new(None),
        });
        // Weak: `HandOffs` owns the service, and the service ends with it.
        let told = Arc::downgrade(&handoffs);
        let notify = move |notice| {
            if let Some(handoffs) = told.upgrade() {
                handoffs.notice(notice);
            }
        };
        let wait = if settings.busy_poll { WaitPolicy::Busy } else { WaitPolicy::default() };
        let named: Cores = settings.cores.parse().map_err(|error| configuration(&error))?;
        let near = numa.and_then(|numa| numa.cpus.parse::<Cores>().ok()?.allowed());
        let cores = if settings.cores.trim().is_empty() { near.unwrap_or_default() } else { named };
        let policy = ThreadPolicy { wait, cores };
        let service = match staging {
            Some(staging) => TransferService::start_staged(node, staging, policy, notify),
            None => TransferService::start(node, policy, notify),
        };
        let service = service.map_err(|error| failed(&error))?;
        *handoffs.service.write().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(service);
        Ok(handoffs)
    }
}

fn pieces(settings: &TransferSettings) -> PieceLayout {
    PieceLayout {
        layers: settings.layers as u16,
        rows: settings.rows as u32,
        heads: HeadRange { first: settings.first_head as u16, count: settings.heads as u16 },
        head_bytes: settings.head_bytes.0 as u32,
        fingerprint: settings.fingerprint().unwrap_or_default(),
    }
}

pub(crate) fn rails_config(
    settings: &TransferSettings,
    rdma: &RdmaSettings,
    is_direct: bool,
) -> Result<RailsConfig, Failure> {
    let transports = match settings.transport {
        Transports::Auto if is_direct => Transport::ALL.to_vec(),
        Transports::Auto => Transport::HOST.to_vec(),
        Transports::CudaIpc => vec![Transport::CudaIpc],
        Transports::Shm => vec![Transport::Shm],
        Transports::Rdma => vec![Transport::Rdma],
        Transports::Tcp => vec![Transport::Tcp],
    };
    let wanted = |transport| TransportRequest {
        transport,
        is_named: match transport {
            // The driver may not support sharing memory between processes; a card can still reach it.
            Transport::CudaIpc => false,
            Transport::Shm => !settings.socket_name.is_empty(),
            Transport::Rdma => rdma.names_hardware(),
            Transport::Tcp => settings.listen.port() != 0,
        },
    };
    let refused = |error: VerbsError| configuration(&error);
    let verbs = VerbsConfig {
        gid_index: parse_gid_index(&rdma.gid).map_err(refused)?,
        partition: parse_partition(&rdma.partition).map_err(refused)?,
        traffic_class: rdma.traffic_class,
        ..VerbsConfig::default()
    };
    Ok(RailsConfig {
        transports: transports.into_iter().map(wanted).collect(),
        role: PeerRole::Worker,
        key: shared_key(&settings.secret_file).map_err(|error| configuration(&error))?,
        host: String::new(),
        socket: socket(settings),
        shm: dataplane_shm::ShmConfig::default(),
        listen: settings.listen,
        tcp: dataplane_tcp::TcpConfig::default(),
        devices: rdma.devices.clone(),
        near: parse_near(&rdma.near).map_err(|error| configuration(&error))?,
        rdma_listen: rdma.listen,
        rdma: verbs,
        connections_per_device: rdma.connections_per_device as u16,
        device: None,
        verbs_library: None,
        bond: BondConfig { seed: fresh_seed(), ..BondConfig::default() },
        corrupt: None,
    })
}

pub(super) fn failed(error: &dyn std::fmt::Display) -> Failure {
    Failure::new(Status::Failed, format!("open: {error}"))
}

fn configuration(error: &dyn std::fmt::Display) -> Failure {
    Failure::new(Status::Configuration, error.to_string())
}

fn socket(settings: &TransferSettings) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let folder = match settings.socket_folder.as_str() {
        "" => std::env::temp_dir(),
        folder => PathBuf::from(folder),
    };
    match settings.socket_name.as_str() {
        "" => {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            worker_socket(&folder, &format!("{}-handoff-{number}", std::process::id()))
        }
        name => worker_socket(&folder, name),
    }
}
