//! The public interface of the index: members, readers, and one writer at a time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::arena::Arena;
use crate::children::Children;
use crate::grace::Grace;
use crate::holders::Tier;
use crate::keys::EngineHash;
use crate::limits::{IDS_MAX, MEMBERS_MAX, WORDS_MAX};
use crate::reader::Reader;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::writer::{Garbage, Writer};

/// A (worker, rank) pair in the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Member(pub(crate) u16);

impl Member {
    /// Index in an array of members, below [`MEMBERS_MAX`].
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// Returns the member with this array index; `None` from [`MEMBERS_MAX`] on.
    #[must_use]
    pub fn from_index(index: usize) -> Option<Self> {
        u16::try_from(index).ok().filter(|_| index < MEMBERS_MAX).map(Self)
    }
}

/// State shared by readers and the writer.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) arena: Arena,
    pub(crate) children: Children,
    pub(crate) grace: Grace,
    /// Internal numbers that are valid, as bits; a number that is being swept is not.
    pub(crate) live: Box<[AtomicU64]>,
    /// Number of words of a set that can have a bit.
    words: AtomicU32,
    /// Internal number of each member.
    internal_ids: Box<[AtomicU32]>,
    /// Number of assignments of internal numbers so far; `assigned` has the count at each number's last assignment.
    assignments: AtomicU64,
    assigned: Box<[AtomicU64]>,
    /// Last owner of each internal number.
    owners: Box<[AtomicU32]>,
    /// Memory that the writer had unlinked when it was dropped; freed with the last reader.
    pub(crate) leftovers: Mutex<Vec<Garbage>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        let left = std::mem::take(self.leftovers.get_mut().unwrap_or_else(PoisonError::into_inner));
        left.into_iter().for_each(Garbage::free_at_last);
    }
}

impl Shared {
    fn new() -> Self {
        let internal_ids = if cfg!(loom) { 2 } else { MEMBERS_MAX };
        Self {
            arena: Arena::new(),
            children: Children::new(),
            grace: Grace::new(),
            live: (0..WORDS_MAX).map(|_| AtomicU64::new(0)).collect(),
            words: AtomicU32::new(1),
            internal_ids: (0..internal_ids).map(|_| AtomicU32::new(u32::MAX)).collect(),
            assignments: AtomicU64::new(0),
            assigned: (0..IDS_MAX).map(|_| AtomicU64::new(0)).collect(),
            owners: (0..IDS_MAX).map(|_| AtomicU32::new(0)).collect(),
            leftovers: Mutex::new(Vec::new()),
        }
    }

    pub(crate) fn words(&self) -> usize {
        self.words.load(Ordering::Acquire) as usize
    }

    pub(crate) fn set_words(&self, words: usize) {
        self.words.store(words as u32, Ordering::Release);
    }

    pub(crate) fn id_of(&self, member: Member) -> usize {
        self.internal_ids[member.index()].load(Ordering::Acquire) as usize
    }

    /// Number of assignments of internal numbers so far.
    pub(crate) fn assignments(&self) -> u64 {
        self.assignments.load(Ordering::Acquire)
    }

    /// Whether a number has had the same owner since `since` assignments.
    pub(crate) fn is_same_owner(&self, id: usize, since: u64) -> bool {
        self.assigned[id].load(Ordering::Acquire) <= since
    }

    pub(crate) fn internal_id(&self, member: Member, id: Option<u16>) {
        if let Some(id) = id {
            // Before any reader can find the number: an earlier look-up must not be attributed to the new owner.
            let now = self.assignments.fetch_add(1, Ordering::AcqRel) + 1;
            // Relaxed: a caller that acts on an owner compares the owner's number with it first (`Overlaps::deepest`).
            self.owners[usize::from(id)].store(u32::from(member.0), Ordering::Relaxed);
            self.assigned[usize::from(id)].store(now, Ordering::Release);
        }
        self.internal_ids[member.index()].store(id.map_or(u32::MAX, u32::from), Ordering::Release);
    }

    /// The member that owns this number now; `None` if it has no owner.
    pub(crate) fn owner_of(&self, id: usize) -> Option<Member> {
        let member = Member(self.owners[id].load(Ordering::Relaxed) as u16);
        (self.id_of(member) == id).then_some(member)
    }

    pub(crate) fn internal_ids(&self) -> usize {
        self.internal_ids.len()
    }
}

/// Size of an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexConfig {
    /// Memory limit in bytes, checked before each store of up to 512 blocks. Beyond it new blocks are left out and counted, and the
    /// indexed ones stay exact: a missed hit costs time, a wrong one costs more, and the engines' own pools bound the blocks of exact
    /// feeds. Removals are never refused: a hole in a prefix that many members hold takes a set of its own, so removals can exceed
    /// the limit by a little until more has gone.
    pub memory_max: usize,
}

impl Default for IndexConfig {
    fn default() -> Self {
        Self { memory_max: 8 << 30 }
    }
}

/// Effect of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outcome {
    /// Blocks that the member did not hold in that tier before (or held, and no longer holds).
    pub changed: u64,
    /// Blocks of which the member has one copy more (or less), and still at least one.
    pub copies: u64,
    /// Blocks whose parent is not known, and which wait for it.
    pub parked: u64,
    /// Blocks left out: their parent is unknown and the waiting places are used up, or memory is at its limit.
    pub refused: u64,
    /// Removals of blocks that the member did not hold.
    pub unknown: u64,
}

impl std::ops::AddAssign for Outcome {
    fn add_assign(&mut self, other: Self) {
        self.changed += other.changed;
        self.copies += other.copies;
        self.parked += other.parked;
        self.refused += other.refused;
        self.unknown += other.unknown;
    }
}

/// Size and contents of the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Bytes of all memory that grows with blocks and members.
    pub bytes: usize,
    /// The part of `bytes` that is mapped instead of allocated from the heap.
    pub mapped_bytes: usize,
    /// Number of nodes of the tree.
    pub nodes: usize,
    /// Number of (member, block) pairs.
    pub entries: usize,
    /// Number of blocks that wait for their parent.
    pub parked: usize,
    /// Number of members.
    pub members: usize,
}

/// One block of a member, in a copy of its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// The engine's hash of the block.
    pub key: EngineHash,
    /// The engine's hash of the block before; `None` at the start of a chain.
    pub parent: Option<EngineHash>,
    /// Hash of the block's tokens.
    pub block: u64,
    /// Number of copies per tier.
    pub copies: [u32; 4],
}

/// The prefix index. Shared by `Arc`.
#[derive(Debug)]
pub struct Index {
    shared: Arc<Shared>,
    writer: Mutex<Writer>,
}

impl Index {
    /// Returns an empty index.
    #[must_use]
    pub fn new(config: IndexConfig) -> Self {
        let shared = Arc::new(Shared::new());
        let writer = Mutex::new(Writer::new(Arc::clone(&shared), config));
        Self { shared, writer }
    }

    /// Returns a reader, one per routing thread. `None` when there are [`crate::READERS_MAX`].
    #[must_use]
    pub fn reader(&self) -> Option<Reader> {
        Reader::new(&self.shared)
    }

    /// Locks the writing side. Take it once for a batch of changes.
    pub fn write(&self) -> IndexWriter<'_> {
        IndexWriter(self.writer.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The writing side of an [`Index`], for as long as it is held. Readers never wait for it.
pub struct IndexWriter<'a>(MutexGuard<'a, Writer>);

impl IndexWriter<'_> {
    /// Adds a member; `None` when there are [`MEMBERS_MAX`].
    pub fn join(&mut self) -> Option<Member> {
        self.0.join()
    }

    /// Removes a member and its blocks, at once for readers; memory is freed in steps.
    pub fn leave(&mut self, member: Member) {
        self.0.leave(member);
    }

    /// Removes the blocks of a member, at once for readers; memory is freed in steps.
    pub fn clear(&mut self, member: Member) {
        self.0.clear(member);
    }

    /// Adds one copy of each of these blocks in `tier`. `keys` are the engine's hashes, `blocks` the hashes of their tokens; each
    /// is the child of the one before, the first of `parent`.
    ///
    /// # Panics
    /// When there are not as many keys as blocks.
    pub fn stored(
        &mut self,
        member: Member,
        tier: Tier,
        parent: Option<EngineHash>,
        keys: &[EngineHash],
        blocks: &[u64],
    ) -> Outcome {
        self.0.stored(member, tier, parent, keys, blocks)
    }

    /// Adds one copy of each of these blocks in `tier`, by the engine's hashes alone: blocks that the member holds in no tier stay
    /// unknown.
    pub fn stored_known(&mut self, member: Member, tier: Tier, keys: &[EngineHash]) -> Outcome {
        self.0.stored_as((member, tier), member, keys, &mut Vec::new())
    }

    /// Adds copies of blocks that another member, `source`, holds under these keys. Keys that could not be placed are appended to
    /// `unplaced`: blocks that `source` does not hold (counted as unknown), and at the memory limit new ones (refused).
    pub fn stored_as(
        &mut self,
        member: Member,
        tier: Tier,
        source: Member,
        keys: &[EngineHash],
        unplaced: &mut Vec<EngineHash>,
    ) -> Outcome {
        self.0.stored_as((member, tier), source, keys, unplaced)
    }

    /// Removes one copy of each of these blocks in `tier`.
    pub fn removed(&mut self, member: Member, tier: Tier, keys: &[EngineHash]) -> Outcome {
        self.0.removed(member, tier, keys)
    }

    /// Moves these blocks to another tier, with as many copies.
    pub fn moved(&mut self, member: Member, keys: &[EngineHash], from: Tier, to: Tier) -> Outcome {
        self.0.moved(member, keys, from, to)
    }

    /// Whether the member holds the block in some tier.
    #[must_use]
    pub fn holds(&self, member: Member, key: EngineHash) -> bool {
        self.0.holds(member, key)
    }

    /// Number of (member, block) pairs of one member.
    #[must_use]
    pub fn entries_of(&self, member: Member) -> usize {
        self.0.entries_of(member)
    }

    /// Number of blocks that a member holds, by tier. A block with several names or copies counts once in each tier.
    #[must_use]
    pub fn blocks_of(&self, member: Member) -> [u32; 4] {
        self.0.blocks_of(member)
    }

    /// All blocks of a member, parents before children. Blocks whose prefix the member does not hold are left out, since their
    /// parent has no name.
    #[must_use]
    pub fn held(&self, member: Member) -> Vec<Held> {
        self.0.held(member)
    }

    /// Continues to clean up after removed members and frees memory that no reader can see any more. Called by every change; call
    /// it when nothing changes for a while. Returns whether there is more to do.
    pub fn sweep(&mut self) -> bool {
        self.0.sweep()
    }

    /// Size and contents of the index.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.0.usage()
    }
}

impl std::fmt::Debug for IndexWriter<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("IndexWriter").field(&self.0.usage()).finish()
    }
}
