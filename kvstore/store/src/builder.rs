//! Construction of a store: its tiers, its memory, and the threads that run it.

use std::sync::Arc;
use std::time::Instant;

use crate::plan::Tier;
use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use dataplane_memory::{Copier, PageSize, Slab};
use kvstore_catalog::{Catalog, CatalogConfig, Contents, PolicyKind, SlotOrder, TenantId, TierConfig};
use kvstore_disk::{AdmissionConfig, Recovered};

use crate::Description;
use crate::background::Background;
use crate::bandwidth::Bandwidth;
use crate::config::StoreConfig;
use crate::device::DeviceCopies;
use crate::disk::{DiskLink, LocalDisk, NO_PARENT, OpenDisk, Opened};
use crate::error::StoreError;
use crate::far::{SecondaryTier, SecondaryTierInbox, SecondaryTiers};
use crate::job::{RecoveredBlock, StoreEvent};
use crate::load::Loads;
use crate::memory::{HostMemory, MAPPED_SLOTS};
use crate::metrics::StoreCounters;
use crate::offload::Offloads;
use crate::quota;
use crate::shared::{DISK, MAPPED, Shared};
use crate::store::Store;
use crate::store_thread::{Message, StoreThread};
use crate::tiers::{META_FIXED, Tiers, parse_meta};

/// Blocks that may wait for the copying thread.
const OFFLOADS_MAX: usize = 1024;

/// The disk tier.
pub struct DiskTier {
    /// Opens its log, on the thread that will drive it.
    pub open: OpenDisk,
    /// Operations that may be in flight.
    pub depth: usize,
    /// Policy that chooses the block to evict.
    pub eviction: PolicyKind,
    /// Rules by which blocks are admitted to the disk.
    pub admission: AdmissionConfig,
}

/// Host memory that becomes the host tier.
#[derive(Debug, Clone, Copy)]
pub struct HostTier {
    /// Number of slots.
    pub slots: u32,
    /// Size of the pages that back the slots.
    pub pages: PageSize,
    /// Policy that chooses the block to evict.
    pub eviction: PolicyKind,
}

/// A store that is not running yet: its memory exists, so that the tiers of other nodes can register it.
pub struct StoreBuilder {
    config: StoreConfig,
    host: HostTier,
    memory: Arc<HostMemory>,
    disk: Option<DiskTier>,
    copier: Option<Box<dyn Copier>>,
    others: Vec<Box<dyn SecondaryTier>>,
    sender: Sender<Message>,
    inbox: Receiver<Message>,
}

impl StoreBuilder {
    /// Takes the host tier's memory.
    pub fn new(config: StoreConfig, host: HostTier) -> Result<Self, StoreError> {
        let memory = HostMemory::new(config.block_bytes, host.slots, host.pages, config.numa_node)?;
        let (sender, inbox) = unbounded();
        Ok(Self {
            config,
            host,
            memory: Arc::new(memory),
            disk: None,
            copier: None,
            others: Vec::new(),
            sender,
            inbox,
        })
    }

    /// The host tier's memory.
    #[must_use]
    pub fn slab(&self) -> &Arc<Slab> {
        self.memory.slab()
    }

    /// Slots of the host tier.
    #[must_use]
    pub fn host_slots(&self) -> usize {
        self.host.slots as usize
    }

    /// Longest block, in bytes.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.config.block_bytes
    }

    /// Inbox for the answers of tiers that are added.
    #[must_use]
    pub fn inbox(&self) -> SecondaryTierInbox {
        SecondaryTierInbox(self.sender.clone())
    }

    /// Adds the disk tier.
    #[must_use]
    pub fn disk(mut self, disk: DiskTier) -> Self {
        self.disk = Some(disk);
        self
    }

    /// Lets pools lie in a device's memory: blocks go there and come from there through `copier`, which must reach the
    /// host tier's memory ([`StoreBuilder::slab`]).
    #[must_use]
    pub fn copier(mut self, copier: Box<dyn Copier>) -> Self {
        self.copier = Some(copier);
        self
    }

    /// Adds a tier that is not on this node; such tiers are asked in the order in which they were added.
    #[must_use]
    pub fn other(mut self, tier: Box<dyn SecondaryTier>) -> Self {
        self.others.push(tier);
        self
    }

    /// Starts the threads. `notify` is called on one of them and must not block. Also returns the blocks that
    /// the disk has kept, each after its parent.
    pub fn start(
        self,
        notify: impl FnMut(StoreEvent) + Send + 'static,
    ) -> Result<(Store, Vec<RecoveredBlock>), StoreError> {
        let Self { config, host, memory, disk, copier, others, sender, inbox } = self;
        let default_quota = quota::of_share(config.tenant_share, host.slots);
        let mut tiers = vec![TierConfig { default_quota, ..TierConfig::new(host.slots, host.eviction) }];
        let (mut local, mut recovered, mut disk_counters) = (None, Vec::new(), None);
        if let Some(DiskTier { open, depth, eviction, admission }) = disk {
            let (link, opened) = open_disk(open, depth, &memory, sender.clone())?;
            let default_quota = quota::of_share(config.tenant_share, opened.slots);
            let order = SlotOrder::FirstFreed;
            tiers.push(TierConfig { order, default_quota, ..TierConfig::new(opened.slots, eviction) });
            local = Some(LocalDisk::new(link, admission, opened.usage, host.slots));
            (recovered, disk_counters) = (opened.recovered, Some(opened.counters));
        }
        let slots = tiers.iter().map(|tier| tier.slots).collect();
        if tiers.len() < usize::from(MAPPED.0) {
            // Placeholder at the disk's tier index.
            tiers.push(TierConfig::new(1, PolicyKind::Lru));
        }
        let reads_mapped = others.iter().any(|tier| tier.tier() == Tier::Remote);
        tiers.push(TierConfig::new(if reads_mapped { MAPPED_SLOTS } else { 1 }, PolicyKind::Lru));
        let quotas = quota::unlimited(tiers.len());
        let catalog = CatalogConfig { quotas, tenants_max: quota::TENANTS_MAX, ..CatalogConfig::new(tiers) };
        let catalog = Arc::new(Catalog::new(&catalog)?);
        let kinds = others.iter().map(|tier| tier.tier()).collect();
        let shared = Arc::new(Shared::new(catalog, memory, config, local.is_some(), kinds));
        let survivors = adopt(&shared, recovered);
        StoreCounters::add(&shared.counters.survivors, survivors.len());
        let (offloads, new_blocks) = bounded(OFFLOADS_MAX);
        let now = Instant::now();
        let bandwidth = Bandwidth::new(shared.config.bandwidth, now, Instant::now);
        let store_thread = StoreThread {
            inbox,
            offloads: Offloads::new(new_blocks),
            tiers: Tiers::new(Arc::clone(&shared), Box::new(notify), local, bandwidth),
            loads: Loads::default(),
            far: SecondaryTiers::new(others),
            background: Background::new(shared.config.prefetch, now),
            device: DeviceCopies::new(copier),
            busy_rounds: 0,
        };
        let thread =
            std::thread::Builder::new().name("kvasir-store".to_owned()).spawn(move || store_thread.run())?;
        Ok((Store::new(shared, sender, offloads, slots, disk_counters, thread), survivors))
    }
}

/// Starts the disk's thread; its results go to the store's thread.
fn open_disk(
    open: OpenDisk,
    depth: usize,
    memory: &HostMemory,
    results: Sender<Message>,
) -> Result<(DiskLink, Opened), StoreError> {
    let report = move |result| {
        // A store that has stopped needs no results.
        let _stopped = results.send(Message::Disk(result));
    };
    DiskLink::start(open, Arc::clone(memory.slab()), depth, report)
}

/// Makes the recovered blocks known, parents first; a block whose parent is gone is of no use and is left out.
fn adopt(shared: &Shared, recovered: Vec<Recovered>) -> Vec<RecoveredBlock> {
    let mut blocks: Vec<(u32, Recovered)> =
        recovered.into_iter().filter_map(|block| Some((parse_meta(&block.meta)?.0, block))).collect();
    blocks.sort_unstable_by_key(|(position, _)| *position);
    let mut survivors = Vec::with_capacity(blocks.len());
    for (position, block) in blocks {
        let Recovered { slot, identity, bytes, tenant, checksum, .. } = block;
        let tenant = TenantId(tenant);
        let cost = shared.recompute_cost(position);
        let parent = (block.parent != NO_PARENT).then_some(block.parent);
        let parent_is_here = parent.is_none_or(|parent| shared.holds(DISK, &parent));
        let adopted = Contents { identity, parent, checksum, bytes, recompute_seconds: cost };
        if parent_is_here && shared.catalog.adopt(DISK, slot, adopted, tenant).is_ok() {
            let description = Description { parent, position, meta: block.meta[META_FIXED..].into(), tenant };
            survivors.push(RecoveredBlock { identity, description });
        }
    }
    survivors
}
