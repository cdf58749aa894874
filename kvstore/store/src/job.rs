//! Jobs that callers give to the store, and events that the store reports.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;
use kvstore_catalog::{Filling, TenantId};

use crate::HostBlock;

/// A tier, as events name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Medium {
    /// Host memory.
    Host,
    /// The local disk.
    Disk,
}

/// Description of a block: everything but its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// The block before it in its chain.
    pub parent: Option<BlockIdentity>,
    /// Position of the block in its chain, from 0.
    pub position: u32,
    /// Caller's data, kept with the block and returned if the block outlives the process: its tokens, for
    /// events. At most [`crate::META_BYTES_MAX`] bytes; a block with more is not written below host memory.
    pub meta: Arc<[u8]>,
    /// Tenant whose quota the block counts against, where tenants have quotas.
    pub tenant: TenantId,
}

/// A block on its way out of the worker's pool.
#[derive(Debug)]
pub struct Offload {
    /// Identity of the block.
    pub identity: BlockIdentity,
    /// Description of the block.
    pub description: Description,
    /// Slot of the worker's pool with the block's bytes; the reference is dropped after the copy.
    pub slot: SlotRef,
}

/// Blocks wanted in the worker's pool.
#[derive(Debug)]
pub struct Onboard {
    /// The caller's number for the request.
    pub request: u64,
    /// Identities of the blocks, each the child of the one before.
    pub chain: Vec<BlockIdentity>,
    /// Number of blocks before `chain` in the prompt: a block further back costs more to compute again.
    pub first: u32,
    /// A slot for each.
    pub targets: Vec<SlotRef>,
    /// Blocks that have not arrived by this time are not waited for.
    pub deadline: Instant,
}

/// Blocks to look for in the tiers of other nodes, and to bring into host memory.
#[derive(Debug)]
pub struct Prepare {
    /// The caller's number for the request.
    pub request: u64,
    /// The prompt's blocks, from the first.
    pub chain: Vec<BlockIdentity>,
    /// Leading blocks that the worker's pool has.
    pub device_blocks: usize,
    /// Caller's data for the blocks behind those, as in [`Description::meta`]. Blocks beyond the end of this
    /// list have none.
    pub metas: Vec<Arc<[u8]>>,
    /// Tenant whose quota the fetched blocks count against, where tenants have quotas.
    pub tenant: TenantId,
    /// Blocks that have not arrived by this time are not waited for.
    pub deadline: Instant,
}

impl Prepare {
    /// Caller's data for the block at this position of the chain.
    pub(crate) fn meta(&self, position: usize) -> Arc<[u8]> {
        let at = position.checked_sub(self.device_blocks);
        at.and_then(|at| self.metas.get(at)).cloned().unwrap_or_default()
    }
}

/// The queue is full; the job comes back.
#[derive(Debug)]
pub struct Throttled<T>(pub T);

/// Events that the store's thread reports.
#[derive(Debug)]
pub enum StoreEvent {
    /// The tier holds the block now. Host memory below a [`StorePool`](crate::StorePool) may report this, and
    /// the removal, more than once.
    Stored {
        /// The block.
        identity: BlockIdentity,
        /// The tier.
        medium: Medium,
    },
    /// The tier does not hold the block any more.
    Removed {
        /// The block.
        identity: BlockIdentity,
        /// The tier.
        medium: Medium,
    },
    /// An offload has ended, and the slot that it came from is no longer needed. If the block was stored,
    /// `Stored` came before.
    Offloaded {
        /// The block.
        identity: BlockIdentity,
    },
    /// Blocks were brought into the given slots. The leading `verified` of them are verified, or only copied
    /// where the caller verifies them.
    Onboarded {
        /// The caller's number for the request.
        request: u64,
        /// The slots that were given.
        slots: Vec<SlotRef>,
        /// Number of leading slots that hold verified blocks, or copied ones where the caller verifies them.
        verified: usize,
    },
    /// The search in other nodes' tiers is over.
    Prepared {
        /// The caller's number for the request.
        request: u64,
        /// Leading blocks of the chain that are on this node now, those in the worker's pool included.
        blocks: usize,
    },
}

/// A block that the disk tier has kept from an earlier process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecoveredBlock {
    /// Identity of the block.
    pub identity: BlockIdentity,
    /// Description of the block.
    pub description: Description,
}

/// Destination of the blocks of a load.
pub(crate) enum Destination {
    /// Into these slots, one for each.
    Slots(Vec<SlotRef>),
    /// Host memory; the load holds no block at its end.
    Host,
    /// Host memory, where the idle conversation with this last block holds them.
    Ahead(BlockIdentity),
    /// Host memory; the blocks are held and passed to this callback.
    Held(Box<dyn FnOnce(Vec<HostBlock>) + Send>),
}

/// Location of a new block's bytes.
pub(crate) enum Source {
    /// In a slot of the worker's pool.
    Slot(SlotRef),
    /// In pieces on the heap.
    Bytes(Vec<bytes::Bytes>),
    /// In a slot of host memory that the caller has filled and summed.
    Filled { filling: Filling, bytes: usize, checksum: u64 },
}

/// Blocks that a retention request counts for beside its own.
pub(crate) const RETENTION_REQUEST_BLOCKS: usize = 64;

/// Blocks of a chain that are to be retained. Each request counts against a bound on all of them until it is
/// dropped.
#[derive(Debug)]
pub struct RetentionRequest {
    chain: Box<[BlockIdentity]>,
    waiting: Arc<AtomicUsize>,
}

impl RetentionRequest {
    /// Returns `None` if more than `most` blocks would wait with this request.
    pub(crate) fn new(chain: &[BlockIdentity], waiting: &Arc<AtomicUsize>, most: usize) -> Option<Arc<Self>> {
        let request = Self { chain: chain.into(), waiting: Arc::clone(waiting) };
        let before = waiting.fetch_add(request.counted(), Ordering::Relaxed);
        (before + request.counted() <= most).then(|| Arc::new(request))
    }

    fn counted(&self) -> usize {
        self.chain.len() + RETENTION_REQUEST_BLOCKS
    }

    /// The blocks, each behind the one before it.
    #[must_use]
    pub fn chain(&self) -> &[BlockIdentity] {
        &self.chain
    }
}

impl Drop for RetentionRequest {
    fn drop(&mut self) {
        self.waiting.fetch_sub(self.counted(), Ordering::Relaxed);
    }
}

/// Blocks to read from the disk, to learn how long it takes.
pub(crate) struct Probe {
    pub(crate) chain: Vec<BlockIdentity>,
    /// Blocks before them in their chain.
    pub(crate) first: u32,
    /// When to break it off.
    pub(crate) deadline: Instant,
}

/// A request to load blocks.
pub(crate) struct LoadRequest {
    /// The caller's number.
    pub(crate) request: u64,
    pub(crate) chain: Vec<BlockIdentity>,
    /// Number of blocks before `chain` in the prompt.
    pub(crate) first: u32,
    pub(crate) destination: Destination,
    /// Whether the caller verifies blocks in a device's memory after their copy, instead of the store before
    /// it.
    pub(crate) verified_by_caller: bool,
    pub(crate) deadline: Instant,
}

pub(crate) enum Job {
    Load(LoadRequest),
    Prepare(Prepare),
    Cancel(u64),
    /// A prompt has arrived: a conversation begins or continues.
    PromptStarted(Vec<BlockIdentity>),
    /// No worker computes on this chain any more: its conversation is idle.
    ConversationIdle(Vec<BlockIdentity>),
    /// Blocks are to be retained for so long.
    Retain {
        request: Arc<RetentionRequest>,
        how_long: Duration,
    },
    Probe(Probe),
    Forget(Vec<BlockIdentity>),
    ForgetOnHost(Vec<BlockIdentity>),
    /// A block has gone from the pool's memory that it was known to lie in.
    ForgetGone(BlockIdentity),
}

pub(crate) struct NewBlock {
    pub(crate) identity: BlockIdentity,
    pub(crate) description: Description,
    pub(crate) source: Source,
    /// Checksum of the block, if the caller has computed it.
    pub(crate) checksum: Option<u64>,
    /// Called with whether the block was stored.
    pub(crate) done: Option<Box<dyn FnOnce(bool) + Send>>,
}
