//! What goes into a log and what comes out: blocks, refusals, outcomes.

use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;
use kvstore_io::IoErrorKind;

/// What is stored beside a payload.
#[derive(Debug, Clone, Copy)]
pub struct Block<'a> {
    /// The block.
    pub identity: BlockIdentity,
    /// The block before it.
    pub parent: BlockIdentity,
    /// Whose quota.
    pub tenant: u32,
    /// `dataplane-checksum` of the payload, as it was when the block was made: bytes that were damaged since then are found when they
    /// are read.
    pub checksum: u64,
    /// Opaque bytes, at most `meta_bytes_max`.
    pub meta: &'a [u8],
}

/// An operation was not begun; the memory comes back.
#[derive(Debug)]
pub struct Refused {
    /// Why.
    pub reason: RefusedReason,
    /// What was given.
    pub memory: SlotRef,
}

/// Why an operation was not begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusedReason {
    /// As many as are allowed are under way: poll, then try again.
    Full,
    /// An earlier write to this slot is under way.
    SlotBusy,
    /// The device failed and is being probed; for a write also: its writes fail, and it rests from them.
    Unavailable,
    /// No such slot, or lengths that do not fit into it or into the memory: a fault of the caller.
    Invalid,
}

/// Why a read is a miss.
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

/// How a read ended.
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
    /// It does not; its contents are undefined.
    Miss(MissReason),
}

/// How a write ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The block can be read. Its record follows with the next table write.
    Stored,
    /// The slot was forgotten meanwhile; it is free.
    Superseded,
    /// It could not be written; the slot is free.
    Failed(IoErrorKind),
}

/// Something is over.
#[derive(Debug)]
pub enum Done {
    /// A write.
    Written {
        /// The caller's number.
        token: u64,
        /// Where.
        slot: u32,
        /// The payload's memory; `None` when the device still holds it after a timeout.
        memory: Option<SlotRef>,
        /// How.
        outcome: WriteOutcome,
    },
    /// A read.
    Read {
        /// The caller's number.
        token: u64,
        /// Where.
        slot: u32,
        /// The target's memory; `None` when the device still holds it after a timeout.
        memory: Option<SlotRef>,
        /// How.
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

/// How a log was closed.
#[derive(Debug)]
pub struct Closed {
    /// Whether every record is on stable storage.
    pub is_clean: bool,
    /// What was over by then.
    pub done: Vec<Done>,
}
