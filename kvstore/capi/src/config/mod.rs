//! The configuration of a store, parsed and checked before anything is opened.
//!
//! Sections, keys, units and meanings are those of the product's configuration (`control/config/REFERENCE.md`),
//! as far as this interface supports them; `[queue]` exists only here. A value that is not supported is
//! refused, not ignored: `eviction = "cost"`, because this interface does not know the cost of recomputing a
//! block.

mod far;
mod value;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use dataplane_transfer::Cores;
use kvstore_store::{DiskEngine, RetentionConfig};
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::format::HEAD_BYTES_MAX;
use crate::status::{Failure, Status};
pub(crate) use far::{ObjectTierSettings, RemoteTierSettings};
pub(crate) use value::{Paths, Size, Time};

/// Alignment in bytes of the slots of hand-offs.
pub(crate) const SLOT_GRAIN: u64 = 64;
/// Size of a page. Slots are whole pages.
pub(crate) const PAGE_BYTES: u64 = 4096;
/// Policy that selects the block to evict from a full tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Eviction {
    /// The least recently used block.
    Lru,
    /// S3-FIFO: scans do not evict blocks that are used often.
    #[serde(rename = "s3-fifo")]
    S3Fifo,
}

/// When a block is written to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Write {
    /// As soon as the block is in host memory.
    Through,
    /// When the block is evicted from host memory.
    Back,
}

/// I/O engine of the disk tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Engine(pub(crate) DiskEngine);

impl TryFrom<String> for Engine {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        let names = DiskEngine::ALL.map(DiskEngine::name).join(", ");
        DiskEngine::from_name(&name).map(Self).ok_or_else(|| format!("{name:?} is none of {names}"))
    }
}

/// The whole configuration.
#[derive(Debug, Clone, PartialEq, Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Settings {
    pub(crate) store: StoreSettings,
    pub(crate) host_tier: HostTierSettings,
    pub(crate) disk_tier: DiskTierSettings,
    pub(crate) remote_tier: RemoteTierSettings,
    pub(crate) object_tier: ObjectTierSettings,
    pub(crate) queue: QueueSettings,
    /// `None`: tensors in a device's memory are not supported.
    pub(crate) device: Option<DeviceSettings>,
    /// `None`: hand-offs are not supported.
    pub(crate) transfer: Option<TransferSettings>,
    pub(crate) rdma: RdmaSettings,
}

/// Section `[store]`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct StoreSettings {
    /// Largest payload of a block. 4 KiB to 512 MiB.
    pub(crate) slot: Size,
    /// Former name of `host_tier.capacity`; refused.
    memory_bytes: Option<IgnoredAny>,
}

/// Section `[host_tier]`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct HostTierSettings {
    /// Memory of all slots. At least one slot, at most 16 TiB.
    pub(crate) capacity: Size,
    pub(crate) eviction: Eviction,
    /// Share of this tier and of the disk that the blocks of one tenant may fill. Above 0, up to 1.
    pub(crate) tenant_share: f64,
    /// Share of this tier, or of the disk if there is one, that retained blocks may fill. 0 to 0.9.
    pub(crate) retention_share: f64,
    /// Longest time for which a block is retained. 1 s to 720 h.
    pub(crate) retention_max: Time,
    /// Whether blocks of idle conversations are loaded into this tier before the conversations continue.
    pub(crate) prefetch: bool,
    /// Least probability that a conversation continues for its blocks to be prefetched. 0 to 1.
    pub(crate) prefetch_chance: f64,
    /// Time before the expected continuation at which the blocks should be loaded. 1 ms to 1 h.
    pub(crate) prefetch_lead: Time,
}

/// Section `[disk_tier]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct DiskTierSettings {
    /// Space of the tier, in whole files; 0 turns the tier off. At most 1 PiB.
    pub(crate) capacity: Size,
    /// Folder of the tier's files, for one open store at a time; with several disks, one folder on each. Or a
    /// device, in the engine's notation.
    pub(crate) path: Paths,
    pub(crate) engine: Engine,
    /// Size of one file. 1 MiB to 64 GiB.
    pub(crate) segment: Size,
    /// Reads and writes in flight. 1 to 1024.
    pub(crate) depth: u64,
    pub(crate) eviction: Eviction,
    pub(crate) write: Write,
    /// Number of puts of a block from which on it is written to the disk. 1 to 15.
    pub(crate) write_frequency: u64,
    /// Most bytes written per second; 0 is no limit.
    pub(crate) write_bandwidth: Size,
    /// Most bytes written per day; 0 is no limit.
    pub(crate) write_per_day: Size,
    /// Whether a log written for another slot size is recreated, and data on a device overwritten, instead of
    /// refusing to open.
    pub(crate) reformat: bool,
}

/// Section `[queue]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct QueueSettings {
    /// Threads that carry out submitted requests. 1 to 64.
    pub(crate) threads: usize,
    /// Requests submitted whose completions have not been polled. 1 to 65,536.
    pub(crate) depth: usize,
    /// Capacity of the event queue; 0 turns events off. At most 16,777,216.
    pub(crate) events: usize,
}

/// Section `[device]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct DeviceSettings {
    /// Ordinal of the device in the CUDA driver. 0 to 255.
    pub(crate) ordinal: u64,
    /// Device memory for staging blocks, half of it for each direction. 1 MiB to 1 TiB.
    pub(crate) staging: Size,
    /// Device memory for the blocks of hand-offs. 1 MiB to 1 TiB, and at least one block.
    pub(crate) handoff_capacity: Size,
    /// Whether hand-offs go between the memories of devices without host memory if a transport reaches device
    /// memory on both sides: RDMA, or the driver between processes of one host.
    pub(crate) direct: bool,
}

/// Transports of hand-offs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Transports {
    /// The best transport that both ends have and that reaches the memory on both sides: `cuda_ipc` with
    /// `device.direct`, then `shm`, `rdma` and `tcp`.
    Auto,
    /// Device memory shared by processes of one host.
    #[serde(rename = "cuda_ipc")]
    CudaIpc,
    /// Host memory shared by processes of one host.
    Shm,
    /// RDMA network cards.
    Rdma,
    /// TCP sockets.
    Tcp,
}

/// Section `[transfer]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct TransferSettings {
    pub(crate) transport: Transports,
    /// Address at which the TCP transport listens.
    pub(crate) listen: SocketAddr,
    /// Folder of the shared-memory transport's socket. Empty: the system's folder for temporary files.
    pub(crate) socket_folder: String,
    /// NAME in the socket's name `kvasir-NAME.sock`, and `kvasir-NAME-device.sock` for device memory. Empty: a
    /// unique name.
    pub(crate) socket_name: String,
    /// File with the secret that the processes of a cluster share. Empty: the environment variable
    /// `KVASIR_TRANSFER_SECRET`.
    pub(crate) secret_file: String,
    /// Time for which blocks are kept for a receiver that has not connected. 10 ms to 600 s.
    pub(crate) lease: Time,
    /// Whether the thread that moves blocks polls without sleeping, which occupies a core.
    pub(crate) busy_poll: bool,
    /// Cores on which that thread runs, as in `0-3,8`. Empty: those of the process.
    pub(crate) cores: String,
    /// Memory for the blocks of hand-offs. At least one block, at most 16 TiB.
    pub(crate) capacity: Size,
    /// Layers of a block; each layer has `rows` rows of `heads` heads. 1 to 4096.
    pub(crate) layers: u64,
    /// Rows of a layer. 1 to 1,048,576.
    pub(crate) rows: u64,
    /// First attention head of this process, counted over the whole model.
    pub(crate) first_head: u64,
    /// Attention heads of this process. 1 to 65,535.
    pub(crate) heads: u64,
    /// Bytes of one head in one row. 1 B to 4 GiB.
    pub(crate) head_bytes: Size,
    /// Sixteen hexadecimal digits, equal in all processes whose blocks have the same meaning.
    pub(crate) fingerprint: String,
}

/// Section `[rdma]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct RdmaSettings {
    /// Names of the devices. Empty: those nearest to `near`.
    pub(crate) devices: Vec<String>,
    /// Memory near which devices are chosen: `gpu0`, a PCI address, `host`, `host:1`; `auto`: the memory of
    /// this process.
    pub(crate) near: String,
    /// Address at which peers connect to create queue pairs.
    pub(crate) listen: SocketAddr,
    /// Connections to each peer per device, each with its own queue pairs. 1 to 8.
    pub(crate) connections_per_device: u64,
    /// Index in the port's GID table, or `auto`.
    pub(crate) gid: String,
    /// P_Key of the partition, or `default`.
    pub(crate) partition: String,
    /// Traffic class of RoCE packets: the DSCP times four. 0 to 255.
    pub(crate) traffic_class: u8,
}

/// Most folders of a disk tier: one for each stripe of the log.
const FOLDERS_MAX: u64 = kvstore_disk::STRIPES_MAX as u64;
/// Least share of the tiers that a tenant may have.
const MIN_SHARE: f64 = 0.001;
const LOOPBACK: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

impl Default for TransferSettings {
    fn default() -> Self {
        Self {
            transport: Transports::Auto,
            listen: LOOPBACK,
            socket_folder: String::new(),
            socket_name: String::new(),
            secret_file: String::new(),
            lease: Time(Duration::from_secs(30)),
            busy_poll: false,
            cores: String::new(),
            capacity: Size(256 << 20),
            layers: 1,
            rows: 1,
            first_head: 0,
            heads: 1,
            head_bytes: Size(128 << 10),
            fingerprint: "0000000000000000".to_owned(),
        }
    }
}

impl TransferSettings {
    /// Bytes of a block. Saturates at `u64::MAX`.
    pub(crate) fn block_bytes(&self) -> u64 {
        let factors = [self.layers, self.rows, self.heads, self.head_bytes.0];
        factors.into_iter().fold(1, u64::saturating_mul)
    }

    /// The value of `fingerprint`.
    pub(crate) fn fingerprint(&self) -> Option<u64> {
        let is_hexadecimal = self.fingerprint.len() == 16;
        is_hexadecimal.then(|| u64::from_str_radix(&self.fingerprint, 16).ok()).flatten()
    }

    /// Values that are within their ranges but contradict each other.
    fn contradictions(&self) -> Vec<String> {
        let mut contradictions = Vec::new();
        let block_bytes = self.block_bytes();
        if block_bytes > u64::from(u32::MAX) {
            contradictions.push(format!("transfer: a block of {block_bytes} bytes is above 4 GiB"));
        } else if !(1..u64::from(u32::MAX)).contains(&(self.capacity.0 / block_bytes)) {
            contradictions.push(format!(
                "transfer.capacity = {} has room for {} blocks of {block_bytes} bytes",
                self.capacity,
                self.capacity.0 / block_bytes
            ));
        }
        if self.first_head + self.heads > 65_536 {
            contradictions.push("transfer.first_head and transfer.heads end above 65536".to_owned());
        }
        if self.fingerprint().is_none() {
            contradictions
                .push(format!("transfer.fingerprint = {:?} is not 16 hexadecimal digits", self.fingerprint));
        }
        if self.listen.ip().is_unspecified() {
            contradictions.push(format!(
                "transfer.listen = \"{}\": peers are told this address, so it must be one of this host",
                self.listen
            ));
        }
        if self.socket_name.contains('/') {
            contradictions.push(format!("transfer.socket_name = {:?} has a slash", self.socket_name));
        }
        if self.socket_name.ends_with("-device") {
            let name = &self.socket_name;
            contradictions.push(format!(
                "transfer.socket_name = {name:?} ends in \"-device\", as the socket of a device's memory does"
            ));
        }
        contradictions
    }
}

impl RdmaSettings {
    /// Whether the configuration names a device, a memory or a partition, which must exist then.
    pub(crate) fn names_hardware(&self) -> bool {
        !self.devices.is_empty() || self.near != "auto" || self.partition != "default"
    }
}

impl Default for RdmaSettings {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            near: "auto".to_owned(),
            listen: LOOPBACK,
            connections_per_device: 1,
            gid: "auto".to_owned(),
            partition: "default".to_owned(),
            traffic_class: 0,
        }
    }
}

impl Default for DeviceSettings {
    fn default() -> Self {
        Self { ordinal: 0, staging: Size(64 << 20), handoff_capacity: Size(256 << 20), direct: false }
    }
}

impl Default for StoreSettings {
    fn default() -> Self {
        Self { slot: Size(128 << 10), memory_bytes: None }
    }
}

impl Default for HostTierSettings {
    fn default() -> Self {
        Self {
            capacity: Size(1 << 30),
            eviction: Eviction::S3Fifo,
            tenant_share: 1.0,
            retention_share: RetentionConfig::default().share,
            retention_max: Time(RetentionConfig::default().longest),
            prefetch: true,
            prefetch_chance: 0.25,
            prefetch_lead: Time(Duration::from_secs(60)),
        }
    }
}

impl Default for DiskTierSettings {
    fn default() -> Self {
        Self {
            capacity: Size(0),
            path: Paths::default(),
            engine: Engine(DiskEngine::Auto),
            segment: Size(256 << 20),
            depth: 64,
            eviction: Eviction::S3Fifo,
            write: Write::Through,
            write_frequency: 1,
            write_bandwidth: Size(0),
            write_per_day: Size(0),
            reformat: false,
        }
    }
}

impl Default for QueueSettings {
    fn default() -> Self {
        Self { threads: 2, depth: 256, events: 0 }
    }
}

impl Settings {
    /// Parses a configuration. The refusal lists all values that are out of range.
    pub(crate) fn parse(text: &str) -> Result<Self, Failure> {
        let refuse = |reason: String| Failure::new(Status::Configuration, reason);
        let settings: Self = toml::from_str(text).map_err(|error| refuse(error.to_string()))?;
        let problems = settings.problems();
        if problems.is_empty() { Ok(settings) } else { Err(refuse(problems.join("; "))) }
    }

    /// Bytes of a slot: the largest payload and its head, in whole pages.
    pub(crate) fn slot_bytes(&self) -> u64 {
        (self.store.slot.0 + HEAD_BYTES_MAX as u64).next_multiple_of(PAGE_BYTES)
    }

    /// Bytes of a file of the disk tier.
    pub(crate) fn segment_bytes(&self) -> u64 {
        self.disk_tier.segment.0.min(self.disk_tier.capacity.0) / PAGE_BYTES * PAGE_BYTES
    }

    fn problems(&self) -> Vec<String> {
        let Self { store, host_tier, disk_tier, queue, device, transfer, .. } = self;
        let (remote_tier, object_tier) = (&self.remote_tier, &self.object_tier);
        let device = device.clone().unwrap_or_default();
        let transfer = transfer.clone().unwrap_or_default();
        let sizes = [
            ("store.slot", store.slot, Size(4 << 10), Size(512 << 20)),
            ("host_tier.capacity", host_tier.capacity, Size(4 << 10), Size(1 << 44)),
            ("disk_tier.capacity", disk_tier.capacity, Size(0), Size(1 << 50)),
            ("disk_tier.segment", disk_tier.segment, Size(1 << 20), Size(64 << 30)),
            ("disk_tier.write_bandwidth", disk_tier.write_bandwidth, Size(0), Size(1 << 40)),
            ("disk_tier.write_per_day", disk_tier.write_per_day, Size(0), Size(1 << 50)),
            ("remote_tier.bandwidth", remote_tier.bandwidth, Size(0), Size(1 << 40)),
            ("object_tier.bandwidth", object_tier.bandwidth, Size(0), Size(1 << 40)),
            ("object_tier.buffers", object_tier.buffers, Size(1 << 20), Size(1 << 40)),
            ("device.staging", device.staging, Size(1 << 20), Size(1 << 40)),
            ("device.handoff_capacity", device.handoff_capacity, Size(1 << 20), Size(1 << 40)),
            ("transfer.capacity", transfer.capacity, Size(1), Size(1 << 44)),
            ("transfer.head_bytes", transfer.head_bytes, Size(1), Size(4 << 30)),
        ];
        let numbers = [
            ("disk_tier.depth", disk_tier.depth, 1, 1024),
            ("disk_tier.write_frequency", disk_tier.write_frequency, 1, 15),
            ("remote_tier.group", remote_tier.group, 1, 64),
            ("remote_tier.replicas", remote_tier.replicas, 1, 2),
            ("queue.threads", queue.threads as u64, 1, 64),
            ("queue.depth", queue.depth as u64, 1, 65_536),
            ("queue.events", queue.events as u64, 0, 1 << 24),
            ("device.ordinal", device.ordinal, 0, 255),
            ("transfer.layers", transfer.layers, 1, 4096),
            ("rdma.connections_per_device", self.rdma.connections_per_device, 1, 8),
            ("transfer.rows", transfer.rows, 1, 1 << 20),
            ("transfer.first_head", transfer.first_head, 0, 65_535),
            ("transfer.heads", transfer.heads, 1, 65_535),
        ];
        let wrong_sizes = (sizes.iter())
            .filter(|(_, value, least, most)| !(least.0..=most.0).contains(&value.0))
            .map(|(name, value, least, most)| format!("{name} = {value} is not in {least} to {most}"));
        let wrong_numbers = (numbers.iter())
            .filter(|(_, value, least, most)| !(least..=most).contains(&value))
            .map(|(name, value, least, most)| format!("{name} = {value} is not in {least} to {most}"));
        let mut problems: Vec<String> = wrong_sizes.chain(wrong_numbers).collect();
        let time = |milliseconds| Time(Duration::from_millis(milliseconds));
        let times = [
            ("transfer.lease", transfer.lease, time(10), time(600_000)),
            ("host_tier.prefetch_lead", host_tier.prefetch_lead, time(1), time(3_600_000)),
            ("host_tier.retention_max", host_tier.retention_max, time(1000), time(2_592_000_000)),
            ("remote_tier.deadline", remote_tier.deadline, time(1), time(60_000)),
            ("object_tier.deadline", object_tier.deadline, time(1), time(600_000)),
            ("object_tier.ttl", object_tier.ttl, time(60_000), time(315_360_000_000)),
        ];
        let wrong_times = (times.iter())
            .filter(|(_, value, least, most)| !(least..=most).contains(&value))
            .map(|(name, value, least, most)| format!("{name} = {value} is not in {least} to {most}"));
        problems.extend(wrong_times);
        let share = host_tier.tenant_share;
        if !(MIN_SHARE..=1.0).contains(&share) {
            problems.push(format!("host_tier.tenant_share = {share} is not in {MIN_SHARE} to 1"));
        }
        for (name, part, most) in [
            ("prefetch_chance", host_tier.prefetch_chance, 1.0),
            ("retention_share", host_tier.retention_share, 0.9),
        ] {
            if !(0.0..=most).contains(&part) {
                problems.push(format!("host_tier.{name} = {part} is not in 0 to {most}"));
            }
        }
        if let Err(error) = transfer.cores.parse::<Cores>() {
            problems.push(format!("transfer.cores = {:?}: {error}", transfer.cores));
        }
        if store.memory_bytes.is_some() {
            problems.push("store.memory_bytes is now host_tier.capacity, written like \"1 GiB\"".to_owned());
        }
        if problems.is_empty() {
            problems.extend(self.contradictions());
        }
        problems
    }

    /// Values that are within their ranges but contradict each other.
    fn contradictions(&self) -> Vec<String> {
        let Self { store, host_tier, disk_tier, .. } = self;
        let slot_bytes = self.slot_bytes();
        let mut contradictions = Vec::new();
        let too_small = |name: &str, value: Size| {
            format!(
                "{name} = {value} holds no slot: one takes {slot_bytes} bytes with store.slot = {}",
                store.slot
            )
        };
        match host_tier.capacity.0 / slot_bytes {
            0 => contradictions.push(too_small("host_tier.capacity", host_tier.capacity)),
            slots if slots >= u64::from(u32::MAX) => {
                contradictions
                    .push(format!("host_tier.capacity = {} has too many slots", host_tier.capacity));
            }
            _ => {}
        }
        if let Some(device) = self.device.as_ref().filter(|device| device.staging.0 / 2 < slot_bytes) {
            contradictions.push(format!(
                "device.staging = {} has no slot for each direction: one takes {slot_bytes} bytes with store.slot = {}",
                device.staging, store.slot
            ));
        }
        contradictions
            .extend(self.remote_tier.contradictions().into_iter().chain(self.object_tier.contradictions()));
        contradictions.extend(self.transfer.iter().flat_map(TransferSettings::contradictions));
        let is_direct = self.device.as_ref().is_some_and(|device| device.direct);
        if self.transfer.as_ref().is_some_and(|transfer| transfer.transport == Transports::CudaIpc)
            && !is_direct
        {
            contradictions.push("transfer.transport = \"cuda_ipc\" takes device.direct = true".to_owned());
        }
        if self.transfer.is_none() && is_direct {
            contradictions.push("device.direct = true needs a section [transfer]".to_owned());
        }
        if let (Some(device), Some(transfer)) = (&self.device, &self.transfer) {
            if device.direct && matches!(transfer.transport, Transports::Shm | Transports::Tcp) {
                let kinds = "\"auto\", \"rdma\" or \"cuda_ipc\"";
                contradictions.push(format!("device.direct = true takes transfer.transport = {kinds}"));
            }
            let (capacity, block_bytes) = (device.handoff_capacity, transfer.block_bytes());
            let is_staged = transfer.transport != Transports::CudaIpc;
            if is_staged && transfer.capacity.0 / block_bytes.saturating_add(SLOT_GRAIN) < 2 {
                contradictions.push(format!(
                    "transfer.capacity = {} has no room for two blocks of {block_bytes} bytes: one to send, one to receive",
                    transfer.capacity
                ));
            }
            if !(1..u64::from(u32::MAX)).contains(&(capacity.0 / block_bytes.saturating_add(SLOT_GRAIN))) {
                let slots = capacity.0 / block_bytes.saturating_add(SLOT_GRAIN);
                contradictions.push(format!(
                    "device.handoff_capacity = {capacity} has room for {slots} blocks of {block_bytes} bytes"
                ));
            }
        }
        if disk_tier.capacity.0 > 0 {
            if disk_tier.path.is_empty() {
                contradictions.push(format!(
                    "disk_tier.path is empty, and disk_tier.capacity is {}",
                    disk_tier.capacity
                ));
            }
            let folders = disk_tier.path.0.len().max(1) as u64;
            let engine = disk_tier.engine.0;
            if engine.takes_device() && folders > 1 {
                let name = engine.name();
                contradictions.push(format!(
                    "disk_tier.engine = \"{name}\" takes one device, and disk_tier.path names {folders}"
                ));
            } else if folders > FOLDERS_MAX || disk_tier.path.0.iter().any(String::is_empty) && folders > 1 {
                contradictions.push(format!(
                    "disk_tier.path names {folders} folders: at most {FOLDERS_MAX}, and none empty"
                ));
            } else if !(disk_tier.capacity.0 / self.segment_bytes().max(1)).is_multiple_of(folders) {
                contradictions.push(format!(
                    "disk_tier.capacity = {} in files of disk_tier.segment = {} cannot be shared out over {folders} folders",
                    disk_tier.capacity, disk_tier.segment
                ));
            }
            if disk_tier.capacity.0 < slot_bytes {
                contradictions.push(too_small("disk_tier.capacity", disk_tier.capacity));
            } else if disk_tier.segment.0 < slot_bytes {
                contradictions.push(too_small("disk_tier.segment", disk_tier.segment));
            } else if !disk_tier.capacity.0.is_multiple_of(self.segment_bytes()) {
                contradictions.push(format!(
                    "disk_tier.capacity = {} is no multiple of a file's {} bytes: disk_tier.segment, in whole 4 KiB",
                    disk_tier.capacity,
                    self.segment_bytes()
                ));
            }
        }
        contradictions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_the_product_are_read() {
        assert_eq!(Settings::parse("").expect("the defaults"), Settings::default());
        let text = "[store]\nslot = \"2 MiB\"\n[host_tier]\ncapacity = \"3 GiB\"\neviction = \"lru\"\n[disk_tier]\n\
            capacity = \"1 TiB\"\npath = \"/kv\"\nengine = \"io_uring\"\nsegment = \"1 GiB\"\nwrite = \"back\"\n";
        let settings = Settings::parse(text).expect("valid");
        assert_eq!((settings.store.slot, settings.slot_bytes()), (Size(2 << 20), (2 << 20) + 4096));
        assert_eq!(
            (settings.host_tier.capacity, settings.host_tier.eviction),
            (Size(3 << 30), Eviction::Lru)
        );
        let disk = &settings.disk_tier;
        assert_eq!(
            (disk.engine, disk.write, disk.path.to_string().as_str()),
            (Engine(DiskEngine::IoUring), Write::Back, "\"/kv\"")
        );
        assert_eq!((disk.eviction, settings.segment_bytes()), (Eviction::S3Fifo, 1 << 30));
    }

    #[test]
    fn what_is_wrong_is_refused_and_named() {
        for (text, part) in [
            ("[store]\nmemory = 1\n", "unknown field `memory`"),
            ("[store]\nmemory_bytes = 1\n", "store.memory_bytes is now host_tier.capacity"),
            ("[store]\nslot = 4096\n", "expected a size like"),
            ("[store]\nslot = \"4 GB\"\n", "slot = \"4 GB\""),
            ("[store]\nslot = \"1 KiB\"\n", "store.slot = \"1 KiB\" is not in \"4 KiB\" to \"512 MiB\""),
            ("[queue]\nthreads = 0\ndepth = 0\n", "threads = 0 is not in 1 to 64; queue.depth = 0"),
            ("[host_tier]\ncapacity = \"100 KiB\"\n", "host_tier.capacity = \"100 KiB\" holds no slot"),
            ("[host_tier]\neviction = \"cost\"\n", "expected `lru` or `s3-fifo`"),
            ("[host_tier]\ntenant_share = 0.0\n", "host_tier.tenant_share = 0 is not in 0.001 to 1"),
            ("[host_tier]\nprefetch_chance = nan\n", "host_tier.prefetch_chance = NaN is not in 0 to 1"),
            ("[host_tier]\nretention_share = 1.5\n", "host_tier.retention_share = 1.5 is not in 0 to 0.9"),
            ("[host_tier]\nretention_max = \"1 ms\"\n", "host_tier.retention_max = \"1 ms\" is not in"),
            ("[host_tier]\nprefetch_lead = \"2 h\"\n", "host_tier.prefetch_lead = \"7200000 ms\" is not in"),
            ("[disk_tier]\ncapacity = \"1 GiB\"\n", "disk_tier.path is empty"),
            (
                "[disk_tier]\ncapacity = \"768 MiB\"\npath = [\"x\", \"y\"]\n",
                "\"256 MiB\" cannot be shared out over 2 folders",
            ),
            ("[disk_tier]\ncapacity = \"512 MiB\"\npath = [\"x\", \"\"]\n", "none empty"),
            ("[disk_tier]\ncapacity = \"512 MiB\"\npath = 3\n", "expected a path or a list of paths"),
            (
                "[disk_tier]\ncapacity = \"4 KiB\"\npath = \"x\"\n",
                "disk_tier.capacity = \"4 KiB\" holds no slot",
            ),
            (
                "[disk_tier]\ncapacity = \"10 MiB\"\nsegment = \"4 MiB\"\npath = \"x\"\n",
                "disk_tier.capacity = \"10 MiB\" is no multiple of a file's 4194304 bytes",
            ),
            (
                "[disk_tier]\ncapacity = \"1000001 B\"\npath = \"x\"\n",
                "is no multiple of a file's 999424 bytes",
            ),
            ("[disk_tier]\ndepth = 0\nwrite_frequency = 16\n", "disk_tier.write_frequency = 16"),
            (
                "[disk_tier]\nengine = \"floppy\"\n",
                "\"floppy\" is none of auto, io_uring, pread, nvme-passthrough, nvme-user, spdk",
            ),
            (
                "[disk_tier]\ncapacity = \"512 MiB\"\nengine = \"spdk\"\npath = [\"0000:01:00.0\", \"0000:02:00.0\"]\n",
                "disk_tier.engine = \"spdk\" takes one device, and disk_tier.path names 2",
            ),
            ("[device]\nordinal = 256\n", "device.ordinal = 256 is not in 0 to 255"),
            (
                "[store]\nslot = \"1 MiB\"\n[device]\nstaging = \"2 MiB\"\n",
                "device.staging = \"2 MiB\" has no slot for each direction: one takes 1052672 bytes",
            ),
            ("[transfer]\nlease = \"5 d\"\n", "expected a time like"),
            (
                "[transfer]\ncores = \"0-x\"\n",
                "transfer.cores = \"0-x\": \"0-x\" is not a range of cores like 0-3",
            ),
            (
                "[transfer]\nlease = \"5ms\"\n",
                "transfer.lease = \"5 ms\" is not in \"10 ms\" to \"600000 ms\"",
            ),
            ("[transfer]\nlayers = 0\n", "transfer.layers = 0"),
            (
                "[transfer]\nfingerprint = \"1\"\n",
                "transfer.fingerprint = \"1\" is not 16 hexadecimal digits",
            ),
            ("[transfer]\ncapacity = \"1 KiB\"\n", "transfer.capacity = \"1 KiB\" has room for 0 blocks"),
            ("[transfer]\nlayers = 4096\nhead_bytes = \"1 GiB\"\n", "above 4 GiB"),
            ("[transfer]\nlisten = \"0.0.0.0:1\"\n", "must be one of this host"),
            ("[transfer]\nsocket_name = \"../x\"\n", "has a slash"),
            ("[transfer]\nsocket_name = \"x-device\"\n", "ends in \"-device\""),
            (
                "[device]\ndirect = true\n[transfer]\ncapacity = \"1 MiB\"\nhead_bytes = \"1 MiB\"\n",
                "transfer.capacity = \"1 MiB\" has no room for two blocks",
            ),
            (
                "[transfer]\ntransport = \"pigeon\"\n",
                "expected one of `auto`, `cuda_ipc`, `shm`, `rdma`, `tcp`",
            ),
            (
                "[transfer]\ntransport = \"cuda_ipc\"\n",
                "transfer.transport = \"cuda_ipc\" takes device.direct = true",
            ),
            ("[rdma]\nlisten = \"x\"\n", "invalid socket address"),
            ("[remote_tier]\nnodes = [\"a\"]\n", "remote_tier.nodes: \"a\" is not like `name=tcp:"),
            (
                "[remote_tier]\nnodes = [\"a=10.0.0.1:7\"]\n",
                "remote_tier.nodes: \"10.0.0.1:7\" of a is not like",
            ),
            ("[remote_tier]\ngroup = 65\nreplicas = 3\n", "remote_tier.group = 65 is not in 1 to 64"),
            ("[remote_tier]\ndeadline = \"2 h\"\n", "remote_tier.deadline = \"7200000 ms\" is not in"),
            ("[object_tier]\nurl = \"/folder\"\n", "object_tier.url = \"/folder\" starts neither with"),
            ("[object_tier]\nrun = \"3\"\n", "object_tier.run = \"3\" is none of"),
            ("[object_tier]\nttl = \"1s\"\n", "object_tier.ttl = \"1000 ms\" is not in"),
            ("[store", "store"),
        ] {
            let failure = Settings::parse(text).expect_err(text);
            assert_eq!(failure.status, Status::Configuration, "{text}");
            assert!(failure.text.contains(part), "{}", failure.text);
        }
    }
}
