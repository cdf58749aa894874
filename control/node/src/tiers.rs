//! The tiers of a store: chosen here, from the settings and from what the machine has.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use control_config::Settings;
use dataplane_memory::PageSize;
use kvstore_catalog::PolicyKind;
use kvstore_disk::{AdmissionConfig, Area, DiskConfig, DiskCounters, DiskLog, Moment, Recovered};
use kvstore_io::IoEngine;
use kvstore_io::files::{
    DeviceConfig, Files, FolderConfig, SIGNATURE_BYTES, open_device, open_folders, remove_surplus, signature,
};
use kvstore_io::passthrough::{self, NvmeDevice, NvmeDeviceConfig};
use kvstore_io::pread::{PreadConfig, PreadEngine};
use kvstore_io::ring::RingConfig;
use kvstore_io::uring;
use kvstore_nvme::spdk::{SpdkConfig, SpdkEngine};
use kvstore_nvme::{NvmeConfig, NvmeEngine, PciAddress};
use kvstore_object::ObjectCounters;
use kvstore_remote::RemoteCounters;
use kvstore_store::far::object::{ObjectTier, ObjectTierConfig};
use kvstore_store::far::remote::{RemoteTier, RemoteTierConfig};
use kvstore_store::{
    BandwidthLimit, BandwidthTier, DISK_META_BYTES_MAX, DiskTier, HostTier, Moved, ReturnConfig, Store,
    StoreBuilder, StoreConfig, Survivor, WriteMode,
};

use crate::rails;

/// The longest single read or write: longer blocks are moved in pieces of this.
const TRANSFER_BYTES_MAX: usize = 1 << 20;
/// What a raw device is formatted in.
const BLOCK_BYTES: usize = 4096;

/// What is to be stored.
pub(crate) struct Blocks<'a> {
    /// Bytes of one.
    pub(crate) bytes: usize,
    /// Tokens of one.
    pub(crate) tokens: u32,
    /// Of model, weights and layout.
    pub(crate) fingerprint: u64,
    /// Slots of host memory.
    pub(crate) host_slots: usize,
    pub(crate) pages: PageSize,
    /// Name of this process among those that share a configuration, for the disk tier's folder.
    pub(crate) instance: Option<&'a str>,
}

/// A store that runs.
pub(crate) struct Opened {
    pub(crate) store: Arc<Store>,
    pub(crate) survivors: Vec<Survivor>,
    pub(crate) counters: TierCounters,
}

/// What the tiers count.
#[derive(Default)]
pub(crate) struct TierCounters {
    disk: Option<Arc<DiskCounters>>,
    remote: Option<Arc<RemoteCounters>>,
    object: Option<Arc<ObjectCounters>>,
}

impl TierCounters {
    pub(crate) fn render(&self, out: &mut String) {
        let mut write = |tier: &str, counters: &[(&'static str, &'static str, u64)]| {
            for (name, help, value) in counters {
                router_engines::exposition::metric(out, &format!("kvasir_{tier}_{name}"), help, *value);
            }
        };
        if let Some(disk) = &self.disk {
            write("disk_log", &disk.snapshot());
        }
        if let Some(remote) = &self.remote {
            write("remote", &remote.snapshot());
        }
        if let Some(object) = &self.object {
            write("object", &object.snapshot());
        }
    }
}

/// Opens the tiers that the settings name; `None` without host memory, which all of them need.
pub(crate) fn open(
    settings: &Settings,
    blocks: &Blocks<'_>,
    notify: impl FnMut(Moved) + Send + 'static,
) -> Result<Option<Opened>> {
    if blocks.host_slots == 0 {
        ensure!(
            settings.disk_tier.capacity.0 == 0
                && settings.remote_tier.nodes.is_empty()
                && settings.object_tier.url.is_empty(),
            "host_tier.capacity holds no block of {} bytes, and the tiers below need host memory",
            blocks.bytes
        );
        return Ok(None);
    }
    let tier = &settings.host_tier;
    let host = HostTier {
        slots: u32::try_from(blocks.host_slots).context("host_tier.capacity: too many blocks")?,
        pages: blocks.pages,
        eviction: eviction(&tier.eviction),
    };
    let config = StoreConfig {
        disk_write: if settings.disk_tier.write == "back" { WriteMode::Back } else { WriteMode::Through },
        others_deadline: others_deadline(settings),
        tenant_share: tier.tenant_share,
        prefetch: tier
            .prefetch
            .then_some(ReturnConfig { prefetch_chance: tier.prefetch_chance, lead: tier.prefetch_lead }),
        bandwidth: bandwidth(settings, blocks.bytes),
        ..StoreConfig::new(blocks.bytes, blocks.tokens)
    };
    let mut builder = StoreBuilder::new(config, host)?;
    let mut counters = TierCounters::default();
    if settings.disk_tier.capacity.0 > 0 {
        builder = builder.disk(disk(settings, blocks)?);
    }
    if !settings.remote_tier.nodes.is_empty() {
        let (tier, counted) = remote(settings, blocks, &builder)?;
        counters.remote = Some(counted);
        builder = builder.other(Box::new(tier));
    }
    if !settings.object_tier.url.is_empty() {
        let (tier, counted) = object(settings, blocks, &builder)?;
        counters.object = Some(counted);
        builder = builder.other(Box::new(tier));
    }
    let (store, survivors) = builder.start(notify)?;
    counters.disk = store.disk_counters().cloned();
    Ok(Some(Opened { store: Arc::new(store), survivors, counters }))
}

/// What each tier may take, by its place among the tiers.
fn bandwidth(settings: &Settings, block_bytes: usize) -> [Option<BandwidthLimit>; BandwidthTier::ALL.len()] {
    let mut limits = [None; BandwidthTier::ALL.len()];
    for (tier, bytes) in [
        (BandwidthTier::Disk, settings.disk_tier.bandwidth),
        (BandwidthTier::Remote, settings.remote_tier.bandwidth),
        (BandwidthTier::Object, settings.object_tier.bandwidth),
    ] {
        limits[tier.index()] = BandwidthLimit::per_second(bytes.0, block_bytes);
    }
    limits
}

/// The slower tiers are asked one after the other, each within its own deadline.
fn others_deadline(settings: &Settings) -> std::time::Duration {
    let mut deadline = std::time::Duration::ZERO;
    if !settings.remote_tier.nodes.is_empty() {
        deadline += settings.remote_tier.deadline;
    }
    if !settings.object_tier.url.is_empty() {
        deadline += settings.object_tier.deadline;
    }
    deadline
}

fn eviction(name: &str) -> PolicyKind {
    match name {
        "lru" => PolicyKind::Lru,
        "cost" => PolicyKind::Cost,
        _ => PolicyKind::S3Fifo,
    }
}

fn disk(settings: &Settings, blocks: &Blocks<'_>) -> Result<DiskTier> {
    let tier = &settings.disk_tier;
    ensure!(!tier.path.is_empty(), "disk_tier.path is empty, and disk_tier.capacity is {}", tier.capacity);
    let slot_bytes = blocks.bytes.next_multiple_of(BLOCK_BYTES);
    let config = DiskConfig {
        fingerprint: blocks.fingerprint,
        slot_bytes: u32::try_from(slot_bytes).context("a block is too large for the disk tier")?,
        meta_bytes_max: DISK_META_BYTES_MAX as u16,
        stripes: tier.path.0.len().max(1) as u32,
        reformat: tier.reformat,
        operations_max: tier.depth as u32,
        ..DiskConfig::default()
    };
    let admission = AdmissionConfig {
        frequency_min: tier.write_frequency as u32,
        bytes_per_second: tier.write_bandwidth.0,
        burst_bytes: tier.write_bandwidth.0.max(slot_bytes as u64),
        bytes_per_day: tier.write_per_day.0,
    };
    let (settings, instance) = (settings.clone(), blocks.instance.map(str::to_owned));
    let open = move || Ok(open_log(&settings, instance.as_deref(), config)?);
    Ok(DiskTier {
        open: Box::new(open),
        depth: tier.depth as usize,
        eviction: eviction(&tier.eviction),
        admission,
    })
}

/// Opens the log; called on the thread that drives it.
fn open_log(
    settings: &Settings,
    instance: Option<&str>,
    config: DiskConfig,
) -> Result<(DiskLog, Vec<Recovered>)> {
    let tier = &settings.disk_tier;
    let slot_bytes = config.slot_bytes;
    let segments = segments(settings, instance)?;
    let engine = engine(settings, segments.as_ref())?;
    let areas = areas(engine.geometry().files.as_slice(), tier.segment.0, tier.capacity.0);
    let name = engine.name();
    let (log, recovered, report) = DiskLog::open(config, &areas, engine, fresh_id(), Moment::now())
        .with_context(|| format!("the disk tier in {}", tier.path))?;
    if let Some((folders, config)) = &segments {
        remove_surplus(folders, config)?;
    }
    tracing::info!(
        "disk tier: {} slots of {slot_bytes} bytes in {} over {name}; {} blocks from before, found in {:.1} ms",
        log.slot_count(),
        tier.path,
        report.recovered,
        report.elapsed.as_secs_f64() * 1e3
    );
    Ok((log, recovered))
}

/// One segment of each file, or as many as fit into a device.
fn areas(files: &[u64], segment_bytes: u64, capacity: u64) -> Vec<Area> {
    let mut areas = Vec::new();
    for (file, &bytes) in (0..).zip(files) {
        let usable = bytes.min(capacity);
        let mut offset = 0;
        while offset + segment_bytes.min(usable) <= usable && offset < usable {
            areas.push(Area { file, offset, bytes: segment_bytes.min(usable) });
            offset += segment_bytes;
        }
    }
    areas
}

fn engine(settings: &Settings, segments: Option<&Segments>) -> Result<Box<dyn IoEngine>> {
    let tier = &settings.disk_tier;
    let depth = tier.depth as usize;
    let ring = RingConfig { depth, transfer_bytes_max: TRANSFER_BYTES_MAX, ..RingConfig::default() };
    let one =
        || tier.path.single().with_context(|| format!("disk_tier.path: `{}` takes one device", tier.engine));
    match tier.engine.as_str() {
        "nvme-passthrough" => {
            let config =
                NvmeDeviceConfig { path: one()?.into(), force: tier.reformat, block_bytes: BLOCK_BYTES };
            return Ok(Box::new(passthrough::open(NvmeDevice::open(&config)?, &ring)?));
        }
        "nvme-user" => return nvme_user(one()?, depth, tier.reformat),
        "spdk" => return spdk(one()?, depth, tier.reformat),
        _ => {}
    }
    let mut open = files(settings, segments)?;
    if tier.engine != "pread" {
        match uring::open(open, &ring) {
            Ok(engine) => return Ok(Box::new(engine)),
            Err(error) if tier.engine == "io_uring" => return Err(error.into()),
            Err(error) => tracing::info!("io_uring is not used: {error}"),
        }
        open = files(settings, segments)?;
    }
    let config = PreadConfig { depth, transfer_bytes_max: TRANSFER_BYTES_MAX, ..PreadConfig::default() };
    Ok(Box::new(PreadEngine::new(open, &config)?))
}

fn nvme_user(address: &str, depth: usize, reformat: bool) -> Result<Box<dyn IoEngine>> {
    let config = NvmeConfig { requests_max: depth, ..NvmeConfig::default() };
    let mut engine = NvmeEngine::open(pci_address(address, "nvme-user")?, &config)?;
    keep_what_is_there(address, &engine.first_bytes(SIGNATURE_BYTES)?, reformat)?;
    Ok(Box::new(engine))
}

fn spdk(address: &str, depth: usize, reformat: bool) -> Result<Box<dyn IoEngine>> {
    let transport = format!("trtype:PCIe traddr:{}", pci_address(address, "spdk")?);
    let config = SpdkConfig { requests_max: depth, ..SpdkConfig::new(transport) };
    let mut engine = SpdkEngine::open(&config)?;
    keep_what_is_there(address, &engine.first_bytes(SIGNATURE_BYTES)?, reformat)?;
    Ok(Box::new(engine))
}

fn pci_address(address: &str, engine: &str) -> Result<PciAddress> {
    address.parse().with_context(|| {
        format!(
            "disk_tier.path: \"{address}\" is not a PCI address like `0000:01:00.0`, which `{engine}` needs"
        )
    })
}

fn keep_what_is_there(address: &str, first: &[u8], reformat: bool) -> Result<()> {
    match signature(first) {
        Some(what) if !reformat => bail!("{address}: {what} is on it, and disk_tier.reformat is not set"),
        _ => Ok(()),
    }
}

/// The tier's folders, and the segments in all of them.
type Segments = (Vec<PathBuf>, FolderConfig);

/// The tier's folders, made where they are missing; none where the tier lies on a device.
fn segments(settings: &Settings, instance: Option<&str>) -> Result<Option<Segments>> {
    let tier = &settings.disk_tier;
    let is_device = |path: &str| std::fs::metadata(path).is_ok_and(|of| of.file_type().is_block_device());
    let takes_device = tier.engine.starts_with("nvme") || tier.engine == "spdk";
    if takes_device || tier.path.single().is_some_and(is_device) {
        return Ok(None);
    }
    let mut folders = Vec::new();
    for path in &tier.path.0 {
        ensure!(
            !is_device(path),
            "disk_tier.path lists several paths and {path} is a block device: name a folder on it"
        );
        std::fs::create_dir_all(path).with_context(|| format!("disk_tier.path = \"{path}\""))?;
        folders.push(instance.map_or_else(|| PathBuf::from(path), |instance| Path::new(path).join(instance)));
    }
    let segment_bytes = tier.segment.0.min(tier.capacity.0) / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
    let count = u32::try_from(tier.capacity.0 / segment_bytes.max(1))
        .context("disk_tier.segment: too many segments")?;
    Ok(Some((folders, FolderConfig::new(PathBuf::new(), segment_bytes, count))))
}

fn files(settings: &Settings, segments: Option<&Segments>) -> Result<Files> {
    let tier = &settings.disk_tier;
    if let Some((folders, config)) = segments {
        return Ok(open_folders(folders, config)?);
    }
    let path = tier.path.single().unwrap_or_default();
    let config = DeviceConfig { path: path.into(), force: tier.reformat, block_bytes: BLOCK_BYTES };
    Ok(open_device(&config)?)
}

fn remote(
    settings: &Settings,
    blocks: &Blocks<'_>,
    builder: &StoreBuilder,
) -> Result<(RemoteTier, Arc<RemoteCounters>)> {
    let tier = &settings.remote_tier;
    let config = RemoteTierConfig {
        nodes: RemoteTierConfig::parse_nodes(&tier.nodes)?,
        group: tier.group as u32,
        replicas: tier.replicas,
        deadline: tier.deadline,
        fingerprint: blocks.fingerprint,
        maps: settings.disk_tier.capacity.0 == 0 && settings.object_tier.url.is_empty(),
    };
    let rails = rails::open_client(settings, builder.slab(), &config.nodes)?;
    Ok(RemoteTier::open(&config, rails.bond, builder, rails::thread_policy(settings)?)?)
}

fn object(
    settings: &Settings,
    blocks: &Blocks<'_>,
    builder: &StoreBuilder,
) -> Result<(ObjectTier, Arc<ObjectCounters>)> {
    let tier = &settings.object_tier;
    let config = ObjectTierConfig {
        url: tier.url.clone(),
        endpoint: tier.endpoint.clone(),
        region: tier.region.clone(),
        credentials_file: tier.credentials_file.clone(),
        allow_http: tier.allow_http,
        run: tier.run.parse().context("object_tier.run")?,
        ttl: tier.ttl,
        buffer_bytes: tier.buffers.0,
        deadline: tier.deadline,
        fingerprint: blocks.fingerprint,
    };
    Ok(ObjectTier::open(&config, builder)?)
}

/// A number that differs from store to store.
pub(crate) fn fresh_id() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}
