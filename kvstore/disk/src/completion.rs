//! Inputs and results of a log: blocks, refusals, outcomes.

use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;
use kvstore_io::IoErrorKind;

/// Description of a block, stored beside its payload.
#[derive(Debug, Clone, Copy)]
pub struct Block<'a> {
    /// The block.
    pub identity: BlockIdentity,
    /// Identity of the preceding block of the chain.
    pub parent: BlockIdentity,
    /// Tenant whose quota the block counts against.
    pub tenant: u32,
    /// `dataplane-checksum` of the payload, as it was when the block was made: bytes that were damaged since then are found when they
    /// are read.
    pub checksum: u64,
    /// Opaque bytes, at most `meta_bytes_max`.
    pub meta: &'a [u8],
}

/// A refused operation, with the memory that was passed in.
#[derive(Debug)]
pub struct RefusedOperation {
    /// Reason of the refusal.
    pub reason: Refusal,
    /// The memory that was passed in.
    pub memory: SlotRef,
}

/// Reason why an operation was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The maximum number of operations is in flight: poll, then try again.
    Full,
    /// An earlier write to this slot is in flight.
    SlotBusy,
    /// The device failed and is being probed; for a write also: writes failed in a row and are refused for a
    /// while.
    Unavailable,
    /// No such slot, or lengths that do not fit into it or into the memory: a fault of the caller.
    Invalid,
}

/// Reason of a read miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissReason {
    /// The bytes are not what was written: torn, lost, misdirected or rotten. The block was forgotten.
    Damaged,
    /// The slot does not hold this block, or stopped to while it was read.
    Stale,
    /// The medium cannot give the bytes back, and says so. The block was forgotten.
    Media,
    /// The device failed, did not answer, or did not say why it failed (EIO). The block may be there later.
    Device,
}

/// The side that compares a read block with its checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadCheck {
    /// The log, before it reports the read.
    Log,
    /// The caller, who has the checksum from [`Block::checksum`]: the log takes no time for it.
    Caller,
}

/// Result of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadOutcome {
    /// The memory holds the block.
    Verified {
        /// Bytes of the payload.
        bytes: u32,
    },
    /// The memory holds what the device gave for the block ([`ReadCheck::Caller`]).
    Unverified {
        /// Bytes of the payload.
        bytes: u32,
    },
    /// The block could not be read; the contents of the memory are undefined.
    Miss(MissReason),
}

/// Result of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The block can be read. Its record follows with the next table write.
    Stored,
    /// The slot was forgotten during the write; it is free.
    Superseded,
    /// The write failed; the slot is free.
    Failed(IoErrorKind),
}

/// A completed operation.
#[derive(Debug)]
pub enum DiskCompletion {
    /// A write.
    Written {
        /// The caller's number.
        token: u64,
        /// Slot of the block.
        slot: u32,
        /// The payload's memory; `None` when the device still holds it after a timeout.
        memory: Option<SlotRef>,
        /// Result of the write.
        outcome: WriteOutcome,
    },
    /// A read.
    Read {
        /// The caller's number.
        token: u64,
        /// Slot of the block.
        slot: u32,
        /// The target's memory; `None` when the device still holds it after a timeout.
        memory: Option<SlotRef>,
        /// Result of the read.
        outcome: ReadOutcome,
    },
    /// A flush: the records of all writes that were reported before it are on the disk.
    Flushed {
        /// The caller's number.
        token: u64,
        /// Pages that could not be written; the next flush tries them again.
        failed_pages: u32,
        /// Whether the files were synced: what was written survives a loss of power.
        is_synced: bool,
    },
}

/// Result of closing a log.
#[derive(Debug)]
pub struct Closed {
    /// Whether every record is on stable storage.
    pub is_clean: bool,
    /// Operations that completed before the log was closed.
    pub done: Vec<DiskCompletion>,
}
