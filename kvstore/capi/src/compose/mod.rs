//! A store from a configuration. The one place that knows what a store is made of.

mod far;

use std::path::PathBuf;
use std::sync::Arc;

use dataplane_memory::PageSize;
use dataplane_verbs::Library;
use kvstore_catalog::PolicyKind;
use kvstore_disk::{AdmissionConfig, Area, DiskConfig, DiskLog, Moment, Recovered};
use kvstore_io::files::{FolderConfig, open_folders, remove_surplus};
use kvstore_io::pread::{PreadConfig, PreadEngine};
use kvstore_io::ring::RingConfig;
use kvstore_io::uring;
use kvstore_io::{IoEngine, IoError, IoErrorKind};
use kvstore_store::{
    DISK_META_BYTES_MAX, DiskTier, HostTier, Moved, ReturnConfig, StoreBuilder, StoreConfig, WriteMode,
};

use crate::config::{
    DiskTierSettings, Engine, Eviction, QueueSettings, RdmaSettings, Settings, Size, TransferSettings, Write,
};
use crate::device::{MakeKernels, Prepared, Reports};
use crate::events::Events;
use crate::fetch::Fetches;
use crate::format::HEAD_BYTES_MAX;
use crate::memory;
use crate::status::{Failure, Status};
use crate::store::StoreBackend;

/// What the disk's log is written for: blocks with a head of `format`. Models and layouts are told apart by identities.
const FINGERPRINT: u64 = u64::from_le_bytes(*b"kvcapi-1");
/// Tokens of a block, by which the store weighs what an eviction costs: not known here, and equal for all blocks. A plan's caller says
/// its own.
const TOKENS: u32 = 1;
/// The longest single read or write: longer blocks are moved in pieces of this.
const TRANSFER_BYTES_MAX: usize = 1 << 20;

type Broken = Box<dyn std::error::Error + Send + Sync>;

/// A store, and what else belongs to it.
pub(crate) struct Composed {
    pub(crate) backend: Arc<StoreBackend>,
    /// Searches in the tiers that are not on this node.
    pub(crate) fetches: Arc<Fetches>,
    pub(crate) events: Arc<Events>,
    pub(crate) queue: QueueSettings,
    /// Where the configuration has a device.
    pub(crate) device: Option<Prepared>,
    /// Where it has hand-offs.
    pub(crate) transfer: Option<TransferSettings>,
    pub(crate) rdma: RdmaSettings,
}

/// Reads a configuration and opens what it says. Where it has a device, `kernels` makes its kernels ready; cards are opened
/// through `verbs_library`, or this machine's.
pub(crate) fn open(
    text: &str,
    kernels: MakeKernels<'_>,
    verbs_library: Option<&Arc<Library>>,
) -> Result<Composed, Failure> {
    let settings = Settings::parse(text)?;
    let payload_bytes_max = settings.store.slot.0 as usize;
    let slot_bytes = settings.slot_bytes();
    let failed = |error: &dyn std::fmt::Display| Failure::new(Status::Failed, format!("open: {error}"));
    within_memory(settings.host_tier.capacity)?;
    let host = HostTier {
        // `Settings::parse` has seen to it that it is a number of slots.
        slots: u32::try_from(settings.host_tier.capacity.0 / slot_bytes).map_err(|error| failed(&error))?,
        pages: PageSize::HugeIfAvailable,
        eviction: policy(settings.host_tier.eviction),
    };
    let block_bytes = payload_bytes_max + HEAD_BYTES_MAX;
    let search_deadline = far::search_deadline(&settings);
    let defaults = StoreConfig::new(block_bytes, TOKENS);
    let config = StoreConfig {
        others_deadline: search_deadline.unwrap_or(defaults.others_deadline),
        bandwidth: far::bandwidth(&settings, block_bytes),
        disk_write: match settings.disk_tier.write {
            Write::Through => WriteMode::Through,
            Write::Back => WriteMode::Back,
        },
        tenant_share: settings.host_tier.tenant_share,
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
    let (mut device, mut reports) = (None, None);
    if let Some(section) = &settings.device {
        let (prepared, to, with_copier) = Prepared::new(section, kernels, builder)?;
        (device, reports, builder) = (Some(prepared), Some(to), with_copier);
    }
    let builder = far::add_tiers(&settings, device.as_ref(), verbs_library, builder)?;
    let fetches = Arc::new(Fetches::new(search_deadline));
    let fetch_reports = fetches.reports();
    let events = Arc::new(Events::new(settings.queue.events));
    let event_queue = Arc::clone(&events);
    let notify = move |moved| {
        event_queue.note(&moved);
        match moved {
            Moved::Prepared { request, blocks } => fetch_reports.ended(request, blocks),
            moved => {
                if let Some(reports) = &reports {
                    Reports::send(reports, moved);
                }
            }
        }
    };
    // Blocks from before are not told as events: some may have been written by an engine with other weights.
    let (store, _survivors) = builder.start(notify).map_err(|error| failed(&error))?;
    let backend = Arc::new(StoreBackend::new(store, payload_bytes_max, slot_bytes));
    let Settings { queue, transfer, rdma, .. } = settings;
    Ok(Composed { backend, fetches, events, queue, device, transfer, rdma })
}

/// The pages are taken shortly before they are used: a capacity that can never be had would only show when the process is killed.
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

/// The disk tier of a configuration. Tests `wrap` its engine.
pub(crate) fn disk(
    settings: &Settings,
    wrap: impl FnOnce(Box<dyn IoEngine>) -> Box<dyn IoEngine> + Send + 'static,
) -> DiskTier {
    let tier = settings.disk_tier.clone();
    let (slot_bytes, segment_bytes) = (settings.slot_bytes(), settings.segment_bytes());
    let config = DiskConfig {
        fingerprint: FINGERPRINT,
        // At most 512 MiB and a page.
        slot_bytes: slot_bytes as u32,
        meta_bytes_max: DISK_META_BYTES_MAX as u16,
        stripes: tier.path.0.len().max(1) as u32,
        reformat: tier.reformat,
        operations_max: tier.depth as u32,
        ..DiskConfig::default()
    };
    let admission = AdmissionConfig {
        frequency_min: tier.write_frequency as u32,
        bytes_per_second: tier.write_bandwidth.0,
        burst_bytes: tier.write_bandwidth.0.max(slot_bytes),
        bytes_per_day: tier.write_per_day.0,
    };
    let (depth, eviction) = (tier.depth as usize, policy(tier.eviction));
    let open = move || {
        open_log(&tier, segment_bytes, config, wrap)
            .map_err(|error| format!("disk_tier.path = {}: {error}", tier.path).into())
    };
    DiskTier { open: Box::new(open), depth, eviction, admission }
}

/// Opens the log; called on the thread that drives it.
fn open_log(
    tier: &DiskTierSettings,
    segment_bytes: u64,
    config: DiskConfig,
    wrap: impl FnOnce(Box<dyn IoEngine>) -> Box<dyn IoEngine>,
) -> Result<(DiskLog, Vec<Recovered>), Broken> {
    tier.path.0.iter().try_for_each(std::fs::create_dir_all)?;
    let folders: Vec<PathBuf> = tier.path.0.iter().map(PathBuf::from).collect();
    let count = u32::try_from(tier.capacity.0 / segment_bytes.max(1))
        .map_err(|_| "disk_tier.segment: too many segments")?;
    let segments = FolderConfig::new(PathBuf::new(), segment_bytes, count);
    let engine = wrap(engine(tier, &folders, &segments)?);
    let areas: Vec<Area> =
        (0..).zip(&engine.geometry().files).map(|(file, &bytes)| Area { file, offset: 0, bytes }).collect();
    let (log, recovered, _report) = DiskLog::open(config, &areas, engine, fresh_id(), Moment::now())?;
    remove_surplus(&folders, &segments)?;
    Ok((log, recovered))
}

fn engine(
    tier: &DiskTierSettings,
    folders: &[PathBuf],
    segments: &FolderConfig,
) -> Result<Box<dyn IoEngine>, Broken> {
    let depth = tier.depth as usize;
    let files = || open_folders(folders, segments);
    if tier.engine != Engine::Pread {
        let ring = RingConfig { depth, transfer_bytes_max: TRANSFER_BYTES_MAX, ..RingConfig::default() };
        match uring::open(files()?, &ring) {
            Ok(engine) => return Ok(Box::new(engine)),
            Err(error) if tier.engine == Engine::Auto && is_not_to_be_had(&error) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let config = PreadConfig { depth, transfer_bytes_max: TRANSFER_BYTES_MAX, ..PreadConfig::default() };
    Ok(Box::new(PreadEngine::new(files()?, &config)?))
}

/// Whether the kernel has no io_uring or does not permit it (ENOSYS, EPERM, EACCES and the like), and pread does as well.
/// Anything else is told: it would hit pread too, or is to be mended.
fn is_not_to_be_had(error: &IoError) -> bool {
    error.kind == IoErrorKind::Unsupported
}

/// A number that differs from store to store.
fn fresh_id() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_kernel_without_io_uring_is_gone_around() {
        // EPERM, EACCES, ENOSYS, EOPNOTSUPP; EIO, ENOMEM, EINVAL, EMFILE, ENOSPC.
        for (errno, is_gone_around) in [
            (1, true),
            (13, true),
            (38, true),
            (95, true),
            (5, false),
            (12, false),
            (22, false),
            (24, false),
            (28, false),
        ] {
            let error = IoError::from_errno("io_uring", "io_uring_setup".to_owned(), errno);
            assert_eq!(is_not_to_be_had(&error), is_gone_around, "{error}");
        }
    }
}
