//! Builds a store from a configuration. The only module that knows the parts of a store.

mod far;

use std::sync::Arc;

use dataplane_memory::PageSize;
use dataplane_rails::{is_here, nearest_node, parse_near};
use dataplane_verbs::Library;
use kvstore_catalog::PolicyKind;
use kvstore_io::IoEngine;
use kvstore_remote::RemoteCounters;
use kvstore_store::{
    DiskTier, DiskTierConfig, HostTier, RetentionConfig, ReturnConfig, StoreBuilder, StoreConfig, StoreEvent,
    WriteMode,
};

use crate::config::{Eviction, QueueSettings, RdmaSettings, Settings, Size, TransferSettings, Write};
use crate::device::{MakeKernels, Prepared, Reports, open_device, place_of};
use crate::events::Events;
use crate::fetch::Fetches;
use crate::format::HEAD_BYTES_MAX;
use crate::memory;
use crate::status::{Failure, Status};
use crate::store::StoreBackend;

/// Fingerprint of the disk's log: blocks with a head of `format`. Identities distinguish models and layouts.
const FINGERPRINT: u64 = u64::from_le_bytes(*b"kvcapi-1");
/// Tokens of a block, with which the store weighs the cost of an eviction. Not known here, and equal for all
/// blocks; the caller of a plan gives its own number.
const TOKENS: u32 = 1;

/// A store and its companions.
pub(crate) struct StoreParts {
    pub(crate) backend: Arc<StoreBackend>,
    /// Searches in the tiers outside this node.
    pub(crate) fetches: Arc<Fetches>,
    pub(crate) events: Arc<Events>,
    pub(crate) queue: QueueSettings,
    /// Resources of the device, if the configuration has one.
    pub(crate) device: Option<Prepared>,
    /// Settings of hand-offs, if the configuration has them.
    pub(crate) transfer: Option<TransferSettings>,
    pub(crate) rdma: RdmaSettings,
    /// Counters of the remote tier; `None` without `[remote_tier]`.
    pub(crate) remote_counters: Option<Arc<RemoteCounters>>,
}

/// Reads a configuration and opens its store. If it has a device, `kernels` loads the device's kernels. Network
/// cards are opened through `verbs_library`; `None`: the machine's own.
pub(crate) fn open(
    text: &str,
    kernels: MakeKernels<'_>,
    verbs_library: Option<&Arc<Library>>,
) -> Result<StoreParts, Failure> {
    let settings = Settings::parse(text)?;
    let payload_bytes_max = settings.store.slot.0 as usize;
    let slot_bytes = settings.slot_bytes();
    let failed = |error: &dyn std::fmt::Display| Failure::new(Status::Failed, format!("open: {error}"));
    within_memory(settings.host_tier.capacity)?;
    let host = HostTier {
        // `Settings::parse` has checked that the quotient is a number of slots.
        slots: u32::try_from(settings.host_tier.capacity.0 / slot_bytes).map_err(|error| failed(&error))?,
        pages: PageSize::HugeIfAvailable,
        eviction: policy(settings.host_tier.eviction),
    };
    let block_bytes = payload_bytes_max + HEAD_BYTES_MAX;
    let search_deadline = far::search_deadline(&settings);
    let defaults = StoreConfig::new(block_bytes, TOKENS);
    let device = settings.device.as_ref().map(open_device).transpose()?;
    let named = parse_near(&settings.rdma.near)
        .map_err(|error| Failure::new(Status::Configuration, error.to_string()))?;
    let near = named.or_else(|| device.as_ref().and_then(place_of).filter(is_here));
    let config = StoreConfig {
        numa_node: nearest_node(near.as_ref()).map(|node| node.number),
        others_deadline: search_deadline.unwrap_or(defaults.others_deadline),
        bandwidth: far::bandwidth(&settings, block_bytes),
        disk_write: match settings.disk_tier.write {
            Write::Through => WriteMode::Through,
            Write::Back => WriteMode::Back,
        },
        tenant_share: settings.host_tier.tenant_share,
        retention: RetentionConfig {
            share: settings.host_tier.retention_share,
            longest: settings.host_tier.retention_max.0,
        },
        prefetch: settings.host_tier.prefetch.then_some(ReturnConfig {
            prefetch_chance: settings.host_tier.prefetch_chance,
            lead: settings.host_tier.prefetch_lead.0,
        }),
        ..defaults
    };
    let mut builder = StoreBuilder::new(config, host).map_err(|error| failed(&error))?;
    if settings.disk_tier.capacity.0 > 0 {
        builder = builder.disk(disk(&settings, |engine| engine));
    }
    let (mut prepared, mut reports) = (None, None);
    if let Some((section, device)) = settings.device.as_ref().zip(device) {
        let (opened, to, with_copier) = Prepared::new(section, device, kernels, builder)?;
        (prepared, reports, builder) = (Some(opened), Some(to), with_copier);
    }
    let (builder, remote_counters) = far::add_tiers(&settings, near.as_ref(), verbs_library, builder)?;
    let fetches = Arc::new(Fetches::new(search_deadline));
    let fetch_reports = fetches.reports();
    let events = Arc::new(Events::new(settings.queue.events));
    let event_queue = Arc::clone(&events);
    let notify = move |moved| {
        event_queue.note(&moved);
        match moved {
            StoreEvent::Prepared { request, blocks } => fetch_reports.ended(request, blocks),
            moved => {
                if let Some(reports) = &reports {
                    Reports::send(reports, moved);
                }
            }
        }
    };
    // Blocks of an earlier run are not reported as events: some may have been written by an engine with other
    // weights.
    let (store, _survivors) = builder.start(notify).map_err(|error| failed(&error))?;
    let backend = Arc::new(StoreBackend::new(store, payload_bytes_max, slot_bytes));
    let Settings { queue, transfer, rdma, .. } = settings;
    Ok(StoreParts { backend, fetches, events, queue, device: prepared, transfer, rdma, remote_counters })
}

/// Refuses a capacity beyond the memory limit. Pages are touched shortly before use, so the kernel would
/// otherwise kill the process later.
fn within_memory(capacity: Size) -> Result<(), Failure> {
    let (memory, whose) = memory::most();
    if capacity.0 > memory {
        let reason =
            format!("open: host_tier.capacity = {capacity} is above this {whose} memory of {memory} bytes");
        return Err(Failure::new(Status::Failed, reason));
    }
    Ok(())
}

fn policy(eviction: Eviction) -> PolicyKind {
    match eviction {
        Eviction::Lru => PolicyKind::Lru,
        Eviction::S3Fifo => PolicyKind::S3Fifo,
    }
}

/// Creates the disk tier of a configuration. Tests `wrap` its engine.
pub(crate) fn disk(
    settings: &Settings,
    wrap: impl FnOnce(Box<dyn IoEngine>) -> Box<dyn IoEngine> + Send + 'static,
) -> DiskTier {
    let tier = &settings.disk_tier;
    let config = DiskTierConfig {
        engine: tier.engine.0,
        paths: tier.path.0.clone(),
        folder: None,
        capacity: tier.capacity.0,
        segment: tier.segment.0,
        depth: tier.depth as usize,
        eviction: policy(tier.eviction),
        write_frequency: tier.write_frequency as u32,
        write_bandwidth: tier.write_bandwidth.0,
        write_per_day: tier.write_per_day.0,
        reformat: tier.reformat,
        fingerprint: FINGERPRINT,
        block_bytes: settings.store.slot.0 as usize + HEAD_BYTES_MAX,
    };
    config.tier_over(wrap)
}
