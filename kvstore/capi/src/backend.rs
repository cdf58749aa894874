//! The store that this interface calls. Every call may block, and any number of threads may call at the same time.

use std::time::{Duration, Instant};

use crate::buffers::{Destination, Source};

/// Names a block: model, layout, tenant and all tokens up to its end (`kvstore-block`'s `BlockIdentity`).
pub type Identity = [u8; 16];

/// Place of a block in its chain (the leading blocks of a prompt, each named by all tokens up to its end), and
/// its tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ChainPosition {
    /// The preceding block. `None`: the block is the first of its chain, or belongs to no chain.
    pub parent: Option<Identity>,
    /// Number of blocks before this one in the chain.
    pub position: u32,
    /// Tenant whose share the block counts against. 0: the share of all blocks without a tenant.
    pub tenant: u32,
}

/// A store of blocks. A block has a payload, and a few bytes of meta that only the caller interprets.
pub trait Backend: Send + Sync + 'static {
    /// Returns the number of leading blocks of `identities` that are in the store.
    ///
    /// # Errors
    /// The store cannot tell.
    fn matched(&self, identities: &[Identity]) -> Result<usize, BackendError>;

    /// Reads a block into the destinations. A block that fails verification is a miss. Unless the outcome is
    /// `Read`, the bytes written are meaningless. Both destinations are checked for room before either is
    /// written to.
    ///
    /// # Errors
    /// [`BackendError::DestinationTooSmall`], or the store cannot read.
    fn get(
        &self,
        identity: &Identity,
        meta: &mut Destination,
        payload: &mut Destination,
    ) -> Result<GetOutcome, BackendError>;

    /// Reads blocks in order into `places` up to the first miss, and returns how many were read. A block is
    /// also a miss if it has a meta, if its length differs from its place's, if it cannot be looked up now, or
    /// if the disk has not delivered it by the deadline. Any of the places may have been written to.
    ///
    /// # Errors
    /// The store cannot read.
    fn get_prefix(
        &self,
        identities: &[Identity],
        places: &mut [Destination],
        deadline: Instant,
    ) -> Result<Loaded, BackendError>;

    /// Reports a load that has just ended; plans use its measured times.
    fn observe_load(&self, report: &LoadReport);

    /// Largest payload in bytes that [`Self::put`] accepts.
    fn payload_bytes_max(&self) -> usize;

    /// Stores a block. Storing a block that is present counts as a use of it.
    ///
    /// # Errors
    /// The store cannot write, or never accepts blocks of this size.
    fn put(
        &self,
        identity: &Identity,
        place: ChainPosition,
        meta: &Source,
        payload: &Source,
    ) -> Result<PutOutcome, BackendError>;

    /// Stores blocks without meta, in order, each as [`Backend::put`] does. Returns how many were stored or present.
    ///
    /// # Errors
    /// As for [`Backend::put`]; earlier blocks of the call may have been stored.
    fn put_all(&self, blocks: &[NewBlock]) -> Result<usize, BackendError> {
        let mut stored = 0;
        for NewBlock { identity, place, payload } in blocks {
            let outcome = self.put(identity, *place, &Source::nothing(), payload)?;
            stored += usize::from(outcome != PutOutcome::Throttled);
        }
        Ok(stored)
    }

    /// Deletes a block and returns whether it was present. A block that is moving between two tiers is deleted
    /// too, and may be reported as absent.
    ///
    /// # Errors
    /// The store cannot write.
    fn delete(&self, identity: &Identity) -> Result<bool, BackendError>;

    /// Returns the counters without blocking.
    fn statistics(&self) -> Statistics;

    /// Ends the work in progress and closes the files. Calls in progress fail; the caller makes none afterwards.
    fn close(&self) {}
}

/// A block to store.
#[derive(Debug)]
pub struct NewBlock {
    /// Identity of the block.
    pub identity: Identity,
    /// Place of the block in its chain.
    pub place: ChainPosition,
    /// Bytes of the block.
    pub payload: Source,
}

/// Outcome of reading a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GetOutcome {
    /// The block was copied to the destinations.
    Read,
    /// The block is not in the store.
    Miss,
    /// The block was not looked up: too many requests are in flight.
    Throttled,
}

/// Result of a load of several blocks, or of a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Loaded {
    /// Blocks read, from the first on.
    pub blocks: usize,
    /// Blocks that were requested from the disk.
    pub asked_of_disk: usize,
    /// Blocks that the disk delivered, of those requested from it.
    pub from_disk: usize,
    /// Time in which host memory had no free slot for a block. Does not measure the speed of the tiers.
    pub room_wait: Duration,
}

/// A load that has ended.
#[derive(Debug, Clone, Copy)]
pub struct LoadReport {
    /// Result of the load.
    pub loaded: Loaded,
    /// Blocks that were requested.
    pub wanted: usize,
    /// Time at which the first blocks were requested.
    pub started: Instant,
    /// Time spent reading blocks, summed over all threads, without waits behind other transfers.
    pub reading: Duration,
    /// Time until which the load waits for the disk.
    pub deadline: Instant,
}

impl LoadReport {
    /// Whether the load ended before its last block because the disk missed the deadline.
    pub(crate) fn is_late(&self) -> bool {
        self.loaded.asked_of_disk > 0 && self.loaded.blocks < self.wanted && Instant::now() >= self.deadline
    }
}

/// Outcome of storing a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutOutcome {
    /// The block was stored.
    Stored,
    /// The block was present, and is unchanged.
    Present,
    /// The block was not stored: no room or no bandwidth now.
    Throttled,
}

/// Counters of a store, as `kvasir_kv_statistics` lays them out.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Statistics {
    /// Blocks in memory now.
    pub blocks: u64,
    /// Bytes of the slots of these blocks.
    pub bytes: u64,
    /// Bytes of all slots in memory.
    pub bytes_max: u64,
    /// Reads that found the block.
    pub hits: u64,
    /// Reads that did not find the block.
    pub misses: u64,
    /// Blocks stored.
    pub stored: u64,
    /// Blocks not stored for lack of room or bandwidth.
    pub throttled: u64,
    /// Blocks evicted from memory.
    pub evicted: u64,
    /// Blocks on the disk now.
    pub disk_blocks: u64,
    /// Bytes of all slots on the disk.
    pub disk_bytes_max: u64,
    /// Blocks read from the disk.
    pub disk_read: u64,
    /// Blocks written to the disk.
    pub disk_written: u64,
    /// Blocks evicted from the disk.
    pub disk_evicted: u64,
    /// Blocks whose bytes differ from what was stored.
    pub damaged: u64,
    /// Blocks read from other nodes or from object storage.
    pub far_read: u64,
    /// Blocks written to other nodes or to object storage.
    pub far_written: u64,
    /// Blocks that exceed the slots of other nodes.
    pub far_too_large: u64,
    /// Events dropped because the event queue was full.
    pub events_lost: u64,
    /// Blocks in the store that plans left to be computed, because loading them would have taken longer.
    pub recomputed: u64,
    /// Blocks that missed the deadline of their load.
    pub late: u64,
    /// Blocks prefetched for conversations.
    pub prefetched: u64,
    /// Prefetched blocks whose conversation continued.
    pub prefetch_used: u64,
    /// Prefetched blocks whose conversation did not continue in time.
    pub prefetch_wasted: u64,
    /// Bytes that processors have checksummed in this process.
    pub checksummed_bytes: u64,
    /// Failed writes to the disk. With write-through they are retried.
    pub disk_write_failures: u64,
    /// Searches for blocks of prompts on other nodes or in object storage.
    pub far_searches: u64,
    /// Requests of these searches that a tier did not answer in time.
    pub far_unanswered: u64,
    /// Searches that found blocks for which host memory had no room.
    pub far_cut: u64,
    /// Blocks known to be on other nodes that plans did not request, because computing them takes no longer.
    pub far_not_asked: u64,
    /// Blocks that are retained now: on the disk, or in memory if there is no disk.
    pub retained: u64,
    /// Blocks whose retention was refused: the limit is reached, the preceding block is not retained, or too
    /// many requests wait.
    pub retention_refused: u64,
}

/// A call that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// The caller's buffers are smaller than the block.
    #[error(
        "the buffers are too small: the block has {meta_bytes} bytes of meta and {payload_bytes} of payload"
    )]
    DestinationTooSmall {
        /// Bytes of the block's meta.
        meta_bytes: usize,
        /// Bytes of the block's payload.
        payload_bytes: usize,
    },
    /// The block is larger than any that this store accepts.
    #[error("{what} of {bytes} bytes is above the store's {bytes_max}")]
    TooLarge {
        /// The part that is too large: the meta or the payload.
        what: &'static str,
        /// Bytes of that part.
        bytes: usize,
        /// Most bytes that the store accepts for that part.
        bytes_max: usize,
    },
    /// The operation was not completed.
    #[error("{operation}: {reason}")]
    Failed {
        /// Operation that failed.
        operation: &'static str,
        /// Cause, with errno where there is one.
        reason: String,
    },
}
