//! What the store is asked, and what it reports.

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

/// What a block is, besides its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// The block before it in its chain.
    pub parent: Option<BlockIdentity>,
    /// Its place in the chain, from 0.
    pub position: u32,
    /// Whatever the caller wants back with a block that outlived the process: its tokens, for events. At most
    /// [`crate::META_BYTES_MAX`] bytes; a block with more is not written below host memory.
    pub meta: Arc<[u8]>,
    /// Whose quota it counts against, where there is one.
    pub tenant: TenantId,
}

/// A block on its way out of the worker's pool.
#[derive(Debug)]
pub struct Offload {
    /// Which block.
    pub identity: BlockIdentity,
    /// What it is.
    pub description: Description,
    /// Where it is; the reference is dropped when the copy is made.
    pub slot: SlotRef,
}

/// Blocks wanted in the worker's pool.
#[derive(Debug)]
pub struct Onboard {
    /// The caller's number for the request.
    pub request: u64,
    /// The blocks, each hanging on the one before.
    pub chain: Vec<BlockIdentity>,
    /// Blocks before them in their prompt: what stands further back costs more to compute again.
    pub first: u32,
    /// A slot for each.
    pub targets: Vec<SlotRef>,
    /// What has not arrived by then is not waited for.
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
    /// What the caller keeps with the blocks behind those, as [`Description::meta`] has it; blocks beyond its end have
    /// nothing.
    pub metas: Vec<Arc<[u8]>>,
    /// Whose quota counts what is brought, where there is one.
    pub tenant: TenantId,
    /// What has not arrived by then is not waited for.
    pub deadline: Instant,
}

impl Prepare {
    /// What the caller keeps with the block at this place of the chain.
    pub(crate) fn meta(&self, position: usize) -> Arc<[u8]> {
        let at = position.checked_sub(self.device_blocks);
        at.and_then(|at| self.metas.get(at)).cloned().unwrap_or_default()
    }
}

/// The queue is full; the job comes back.
#[derive(Debug)]
pub struct Throttled<T>(pub T);

/// What the store's thread reports.
#[derive(Debug)]
pub enum Moved {
    /// The tier holds the block now. Of host memory below a [`StorePool`](crate::StorePool) this may be told again, as its removal.
    Stored {
        /// The block.
        identity: BlockIdentity,
        /// The tier.
        medium: Medium,
    },
    /// The tier holds it no more.
    Removed {
        /// The block.
        identity: BlockIdentity,
        /// The tier.
        medium: Medium,
    },
    /// An offload is over, and the slot that it came from no longer needed. `Stored` came before, if it worked.
    Offloaded {
        /// The block.
        identity: BlockIdentity,
    },
    /// Blocks were brought into the given slots; the leading `verified` of them are good, or
    /// copied, where whoever asked verifies them.
    Onboarded {
        /// The caller's number for the request.
        request: u64,
        /// The slots that were given.
        slots: Vec<SlotRef>,
        /// How many of them hold verified, or copied, blocks.
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
pub struct Survivor {
    /// Which block.
    pub identity: BlockIdentity,
    /// What it is.
    pub description: Description,
}

/// Where blocks that were asked for go.
pub(crate) enum Destination {
    /// Into these slots, one for each.
    Slots(Vec<SlotRef>),
    /// They stay in host memory; nobody holds them.
    Host,
    /// The blocks stay in host memory, where the idle conversation with this last block holds them.
    Ahead(BlockIdentity),
    /// They stay in host memory and are held there for whoever gets them.
    Held(Box<dyn FnOnce(Vec<HostBlock>) + Send>),
}

/// Where the bytes of a new block are.
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

/// Blocks of a chain that are to be retained. As long as it exists, it counts against a bound on all of them.
#[derive(Debug)]
pub struct RetentionRequest {
    chain: Box<[BlockIdentity]>,
    waiting: Arc<AtomicUsize>,
}

impl RetentionRequest {
    /// `None`: with these more than `most` blocks would wait.
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

/// Blocks that somebody asked for.
pub(crate) struct LoadRequest {
    /// The caller's number.
    pub(crate) request: u64,
    pub(crate) chain: Vec<BlockIdentity>,
    /// Blocks before them in their prompt.
    pub(crate) first: u32,
    pub(crate) destination: Destination,
    /// What goes to a device's memory is verified there, by whoever asked for it.
    pub(crate) is_verified_there: bool,
    pub(crate) deadline: Instant,
}

pub(crate) enum Job {
    Load(LoadRequest),
    Prepare(Prepare),
    Cancel(u64),
    /// A prompt has come: a conversation begins or goes on.
    Came(Vec<BlockIdentity>),
    /// Nobody computes on this chain any more.
    WentIdle(Vec<BlockIdentity>),
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
    /// Its checksum, where whoever hands it over has taken it.
    pub(crate) checksum: Option<u64>,
    /// Told whether it was stored.
    pub(crate) done: Option<Box<dyn FnOnce(bool) + Send>>,
}
