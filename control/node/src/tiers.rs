//! Construction of a store's tiers from the settings and the machine's capabilities.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use control_config::Settings;
use dataplane_memory::PageSize;
use dataplane_rails::{nearest_node, parse_near};
use kvstore_catalog::PolicyKind;
use kvstore_disk::DiskCounters;
use kvstore_object::ObjectCounters;
use kvstore_remote::RemoteCounters;
use kvstore_store::far::object::{ObjectTier, ObjectTierConfig};
use kvstore_store::far::remote::{RemoteTier, RemoteTierConfig};
use kvstore_store::{
    BandwidthLimit, BandwidthTier, DiskEngine, DiskTier, DiskTierConfig, HostTier, RecoveredBlock,
    RetentionConfig, ReturnConfig, Store, StoreBuilder, StoreConfig, StoreEvent, WriteMode,
};
use router_engines::exposition;

use crate::rails;

/// Description of the blocks to store.
pub(crate) struct Blocks<'a> {
    /// Bytes of one block.
    pub(crate) bytes: usize,
    /// Tokens of one block.
    pub(crate) tokens: u32,
    /// Fingerprint of model, weights and layout.
    pub(crate) fingerprint: u64,
    /// Slots of host memory.
    pub(crate) host_slots: usize,
    pub(crate) pages: PageSize,
    /// Name of this process among those that share a configuration, for the disk tier's folder.
    pub(crate) instance: Option<&'a str>,
}

/// A running store with its counters.
pub(crate) struct OpenTiers {
    pub(crate) store: Arc<Store>,
    pub(crate) survivors: Vec<RecoveredBlock>,
    pub(crate) counters: TierCounters,
}

/// Counters of the tiers.
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
                exposition::metric(out, &format!("kvasir_{tier}_{name}"), help, *value);
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
        if let Some(remote) = &self.remote {
            node_metrics(out, remote);
        }
    }
}

/// Appends state and counters of each node of the remote tier.
fn node_metrics(out: &mut String, remote: &RemoteCounters) {
    let nodes = remote.nodes();
    let counted: Vec<_> =
        nodes.iter().map(|(name, node)| (exposition::label("node", name), node.snapshot())).collect();
    let Some((_, first)) = counted.first() else { return };
    for (at, (name, help, _)) in first.iter().enumerate() {
        let series = counted.iter().map(|(labels, values)| (labels.as_str(), values[at].2));
        exposition::family(out, &format!("kvasir_remote_node_{name}"), help, series);
    }
}

/// Opens the configured tiers; `None` without host memory, which all tiers need.
pub(crate) fn open(
    settings: &Settings,
    blocks: &Blocks<'_>,
    notify: impl FnMut(StoreEvent) + Send + 'static,
) -> Result<Option<OpenTiers>> {
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
    let near = parse_near(&settings.rdma.near)?;
    let config = StoreConfig {
        numa_node: nearest_node(near.as_ref()).map(|node| node.number),
        disk_write: if settings.disk_tier.write == "back" { WriteMode::Back } else { WriteMode::Through },
        others_deadline: others_deadline(settings),
        tenant_share: tier.tenant_share,
        retention: RetentionConfig { share: tier.retention_share, longest: tier.retention_max },
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
    Ok(Some(OpenTiers { store: Arc::new(store), survivors, counters }))
}

/// Returns the bandwidth limit of each tier, indexed by tier.
fn bandwidth(settings: &Settings, block_bytes: usize) -> [Option<BandwidthLimit>; BandwidthTier::ALL.len()] {
    let limits = [
        (BandwidthTier::Disk, settings.disk_tier.bandwidth.0),
        (BandwidthTier::Remote, settings.remote_tier.bandwidth.0),
        (BandwidthTier::Object, settings.object_tier.bandwidth.0),
    ];
    BandwidthLimit::of_tiers(&limits, block_bytes)
}

/// Returns the sum of the slower tiers' deadlines, because these tiers are queried one after the other.
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
    let config = DiskTierConfig {
        engine: DiskEngine::from_name(&tier.engine).context("disk_tier.engine")?,
        paths: tier.path.0.clone(),
        folder: blocks.instance.map(str::to_owned),
        capacity: tier.capacity.0,
        segment: tier.segment.0,
        depth: tier.depth as usize,
        eviction: eviction(&tier.eviction),
        write_frequency: tier.write_frequency as u32,
        write_bandwidth: tier.write_bandwidth.0,
        write_per_day: tier.write_per_day.0,
        reformat: tier.reformat,
        fingerprint: blocks.fingerprint,
        block_bytes: blocks.bytes,
    };
    Ok(config.tier())
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

/// Returns an id that differs between stores.
pub(crate) fn fresh_id() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}
