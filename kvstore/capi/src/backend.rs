//! What a store does for this interface. All calls may block; any number of threads may make them.

use std::time::{Duration, Instant};

use crate::buffers::{Destination, Source};

/// Names a block: model, layout, tenant and all tokens up to its end (`kvstore-block`'s `BlockIdentity`).
pub type Identity = [u8; 16];

/// The place of a block in its chain (the blocks that a prompt begins with, each named with all before it), and whose it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ChainPlace {
    /// The block before it; `None`: it is the first, or stands for itself.
    pub parent: Option<Identity>,
    /// Blocks before it.
    pub position: u32,
    /// The tenant whose share it counts against; 0: that of all without one.
    pub tenant: u32,
}

/// A store of blocks. Each has a few bytes of meta, which are the caller's own, and a payload.
pub trait Backend: Send + Sync + 'static {
    /// How many of these, from the first on, are there.
    ///
    /// # Errors
    /// The store cannot tell.
    fn matched(&self, identities: &[Identity]) -> Result<usize, BackendError>;

    /// Writes a block to where it is wanted; when it was not, what was written is of no use. A block that fails
    /// verification is a miss. Looks at the room of both destinations before it writes to either.
    ///
    /// # Errors
    /// [`BackendError::DestinationTooSmall`], or the store cannot read.
    fn get(
        &self,
        identity: &Identity,
        meta: &mut Destination,
        payload: &mut Destination,
    ) -> Result<GetOutcome, BackendError>;

    /// Reads blocks in order up to the first that is a miss, each to the place of its number; tells how many. A block with
    /// a meta, or of another length than its place, is a miss too, as is one that cannot be looked for now, or that the disk has
    /// not given at the deadline. All places may have been written to.
    ///
    /// # Errors
    /// The store cannot read.
    fn get_prefix(
        &self,
        identities: &[Identity],
        places: &mut [Destination],
        deadline: Instant,
    ) -> Result<Loaded, BackendError>;

    /// Reports a load that has ended just now, from which plans learn.
    fn observe_load(&self, report: &LoadReport);

    /// The longest payload that [`Self::put`] takes.
    fn payload_bytes_max(&self) -> usize;

    /// Stores a block. One that is there already counts as used.
    ///
    /// # Errors
    /// The store cannot write, or never takes blocks of this size.
    fn put(
        &self,
        identity: &Identity,
        place: ChainPlace,
        meta: &Source,
        payload: &Source,
    ) -> Result<PutOutcome, BackendError>;

    /// Stores blocks without meta, in order, each as [`Backend::put`] does; how many are stored or were there.
    ///
    /// # Errors
    /// As for [`Backend::put`]; blocks before may have been stored.
    fn put_all(&self, blocks: &[NewBlock]) -> Result<usize, BackendError> {
        let mut stored = 0;
        for NewBlock { identity, place, payload } in blocks {
            let outcome = self.put(identity, *place, &Source::nothing(), payload)?;
            stored += usize::from(outcome != PutOutcome::Throttled);
        }
        Ok(stored)
    }

    /// Forgets a block; tells whether it was there. One that is on its way between two tiers is forgotten too, and may
    /// count as one that was not.
    ///
    /// # Errors
    /// The store cannot write.
    fn delete(&self, identity: &Identity) -> Result<bool, BackendError>;

    /// Counters, at once.
    fn statistics(&self) -> Statistics;

    /// Ends what is under way and lets go of files. Calls that are inside fail; there are none afterwards.
    fn close(&self) {}
}

/// A block that is to be stored.
#[derive(Debug)]
pub struct NewBlock {
    /// Its name.
    pub identity: Identity,
    /// Where it stands.
    pub place: ChainPlace,
    /// Its bytes.
    pub payload: Source,
}

/// What became of a block that was to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GetOutcome {
    /// It is where it was wanted.
    Read,
    /// It is not there.
    Miss,
    /// Too many requests are inside to look for it now.
    Throttled,
}

/// Result of a load of several blocks, or of a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Loaded {
    /// Blocks read, from the first on.
    pub blocks: usize,
    /// Blocks that the disk was asked for.
    pub asked_of_disk: usize,
    /// Of those, blocks that came.
    pub from_disk: usize,
    /// Time in which memory had no room for some block: it says nothing of the tiers.
    pub room_wait: Duration,
}

/// A load that has ended.
#[derive(Debug, Clone, Copy)]
pub struct LoadReport {
    /// Blocks that it read.
    pub loaded: Loaded,
    /// Blocks that it was to read.
    pub wanted: usize,
    /// When its first blocks were asked for.
    pub started: Instant,
    /// Time in which its blocks were read, those of all threads together, without waits behind other transfers.
    pub reading: Duration,
    /// The end of the wait for the disk.
    pub deadline: Instant,
}

impl LoadReport {
    /// Whether it ended without some blocks because the disk was late.
    pub(crate) fn is_late(&self) -> bool {
        self.loaded.asked_of_disk > 0 && self.loaded.blocks < self.wanted && Instant::now() >= self.deadline
    }
}

/// What became of a block that was to be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutOutcome {
    /// It is stored.
    Stored,
    /// It was there already, and remains as it was.
    Present,
    /// There is no room or bandwidth for it now.
    Throttled,
}

/// Counters of a store, as `kvasir_kv_statistics` lays them out.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Statistics {
    /// Blocks in memory now.
    pub blocks: u64,
    /// Bytes of their slots.
    pub bytes: u64,
    /// Bytes of all slots in memory.
    pub bytes_max: u64,
    /// Blocks read that were there.
    pub hits: u64,
    /// Blocks read that were not.
    pub misses: u64,
    /// Blocks stored.
    pub stored: u64,
    /// Blocks that were not taken for lack of room or bandwidth.
    pub throttled: u64,
    /// Blocks that left memory to make room.
    pub evicted: u64,
    /// Blocks on the disk now.
    pub disk_blocks: u64,
    /// Bytes of all slots on the disk.
    pub disk_bytes_max: u64,
    /// Blocks that came from the disk.
    pub disk_read: u64,
    /// Blocks written to the disk.
    pub disk_written: u64,
    /// Blocks that left the disk to make room.
    pub disk_evicted: u64,
    /// Blocks that were not what had been stored.
    pub damaged: u64,
    /// Blocks that came from other nodes or from object storage.
    pub far_read: u64,
    /// Blocks that were sent there.
    pub far_written: u64,
    /// Blocks that do not fit the slots of other nodes.
    pub far_too_large: u64,
    /// Events that there was no room for.
    pub events_lost: u64,
    /// Blocks that plans left to be computed although they were here: loading them would have taken longer.
    pub recomputed: u64,
    /// Blocks that did not come within the time that their loads had.
    pub late: u64,
    /// Blocks that were fetched ahead for conversations.
    pub prefetched: u64,
    /// Of those, blocks whose conversations went on.
    pub prefetch_used: u64,
    /// Of those, blocks whose conversations did not in time.
    pub prefetch_wasted: u64,
    /// Bytes whose checksums processors have taken in this process.
    pub checksummed_bytes: u64,
    /// Writes to the disk that failed; with write-through they are tried again.
    pub disk_write_failures: u64,
    /// Searches of prompts' blocks on other nodes or in object storage.
    pub far_searches: u64,
    /// Questions of these searches to a tier that were not answered in time.
    pub far_unanswered: u64,
    /// Such searches that found blocks for which there was no room here.
    pub far_cut: u64,
    /// Blocks that other nodes were known to hold and that plans did not ask for: computing them takes no longer.
    pub far_not_asked: u64,
    /// Blocks that are retained now, on the disk or, without one, in memory.
    pub retained: u64,
    /// Blocks that were not retained: as many are as may be, or the block before it is not, or too many requests wait.
    pub retention_refused: u64,
}

/// A call that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// The caller's buffers have less room than the block has bytes.
    #[error(
        "the buffers are too small: the block has {meta_bytes} bytes of meta and {payload_bytes} of payload"
    )]
    DestinationTooSmall {
        /// What the meta needs.
        meta_bytes: usize,
        /// What the payload needs.
        payload_bytes: usize,
    },
    /// A block larger than any that this store takes.
    #[error("{what} of {bytes} bytes is above the store's {bytes_max}")]
    TooLarge {
        /// Which part of it.
        what: &'static str,
        /// What it has.
        bytes: usize,
        /// What is taken.
        bytes_max: usize,
    },
    /// The store failed.
    #[error("{operation}: {reason}")]
    Failed {
        /// What was asked.
        operation: &'static str,
        /// What went wrong, with errno where there is one.
        reason: String,
    },
}
