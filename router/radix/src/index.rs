//! The index as its users see it: members, readers, and one writer at a time.

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
    /// As an array index below [`MEMBERS_MAX`].
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// The member with this array index; `None` from [`MEMBERS_MAX`] on.
    #[must_use]
    pub fn from_index(index: usize) -> Option<Self> {
        u16::try_from(index).ok().filter(|_| index < MEMBERS_MAX).map(Self)
    }
}

/// What readers and the writer share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) arena: Arena,
    pub(crate) children: Children,
    pub(crate) grace: Grace,
    /// Internal numbers that count; one that is being swept does not.
    pub(crate) live: Box<[AtomicU64]>,
    /// Words of a set that can have a bit.
    words: AtomicU32,
    /// The internal number of each member.
    seats: Box<[AtomicU32]>,
    /// Counts the times that a number was given out, and when each was.
    assignments: AtomicU64,
    assigned: Box<[AtomicU64]>,
    /// The member that a number was given to last.
    owners: Box<[AtomicU32]>,
    /// What the writer had unlinked when it went: freed with the last reader.
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
        let seats = if cfg!(loom) { 2 } else { MEMBERS_MAX };
        Self {
            arena: Arena::new(),
            children: Children::new(),
            grace: Grace::new(),
            live: (0..WORDS_MAX).map(|_| AtomicU64::new(0)).collect(),
            words: AtomicU32::new(1),
            seats: (0..seats).map(|_| AtomicU32::new(u32::MAX)).collect(),
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
        self.seats[member.index()].load(Ordering::Acquire) as usize
    }

    /// How many times a number was given out so far.
    pub(crate) fn assignments(&self) -> u64 {
        self.assignments.load(Ordering::Acquire)
    }

    /// Whether a number has had the same owner since then.
    pub(crate) fn is_same_owner(&self, id: usize, since: u64) -> bool {
        self.assigned[id].load(Ordering::Acquire) <= since
    }

    pub(crate) fn seat(&self, member: Member, id: Option<u16>) {
        if let Some(id) = id {
            // Before anybody can find the number: who looked something up before this must not take it for the new owner's.
            let now = self.assignments.fetch_add(1, Ordering::AcqRel) + 1;
            // Relaxed: whoever acts on an owner compares the owner's number with it first (`Overlaps::deepest`).
            self.owners[usize::from(id)].store(u32::from(member.0), Ordering::Relaxed);
            self.assigned[usize::from(id)].store(now, Ordering::Release);
        }
        self.seats[member.index()].store(id.map_or(u32::MAX, u32::from), Ordering::Release);
    }

    /// The member whose number this is now, if it is anybody's.
    pub(crate) fn owner_of(&self, id: usize) -> Option<Member> {
        let member = Member(self.owners[id].load(Ordering::Relaxed) as u16);
        (self.id_of(member) == id).then_some(member)
    }

    pub(crate) fn seats(&self) -> usize {
        self.seats.len()
    }
}

/// Size of an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexConfig {
    /// Bytes at most, looked at before each store of up to 512 blocks. Beyond it new blocks are left out and counted, and what is
    /// indexed stays exact: a missed hit costs time, a wrong one costs more, and engines' own pools bound what exact feeds can
    /// bring. Removals are never refused: a hole in what many hold takes a set of its own, so they can pass the bound by a little
    /// until more has gone.
    pub memory_max: usize,
}

impl Default for IndexConfig {
    fn default() -> Self {
        Self { memory_max: 8 << 30 }
    }
}

/// What a change did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outcome {
    /// Blocks that the member did not hold in that tier before (or held, and no longer does).
    pub changed: u64,
    /// Blocks of which it now has one copy more (or less), and still at least one.
    pub copies: u64,
    /// Blocks whose parent is not known: kept aside until it comes.
    pub parked: u64,
    /// Blocks left out: nothing is known of their parent and no place to wait is left, or memory is at its bound.
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

/// How full the index is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Bytes of everything that grows with blocks and members.
    pub bytes: usize,
    /// Of those, what is mapped and not taken from the heap.
    pub mapped_bytes: usize,
    /// Nodes of the tree.
    pub nodes: usize,
    /// (member, block) pairs.
    pub entries: usize,
    /// Blocks kept aside.
    pub parked: usize,
    /// Members.
    pub members: usize,
}

/// One block of a member, for a copy of its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// The engine's name for it.
    pub key: EngineHash,
    /// The engine's name for the block before; `None` at the start of a chain.
    pub parent: Option<EngineHash>,
    /// Hash of its tokens.
    pub block: u64,
    /// Copies per tier.
    pub copies: [u32; 4],
}

/// The index. Share it by `Arc`.
#[derive(Debug)]
pub struct Index {
    shared: Arc<Shared>,
    writer: Mutex<Writer>,
}

impl Index {
    /// An empty index.
    #[must_use]
    pub fn new(config: IndexConfig) -> Self {
        let shared = Arc::new(Shared::new());
        let writer = Mutex::new(Writer::new(Arc::clone(&shared), config));
        Self { shared, writer }
    }

    /// A reader: one for each thread that routes. `None` when there are [`crate::READERS_MAX`].
    #[must_use]
    pub fn reader(&self) -> Option<Reader> {
        Reader::new(&self.shared)
    }

    /// The writing side. Take it once for a batch of changes.
    pub fn write(&self) -> IndexWriter<'_> {
        IndexWriter(self.writer.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The writing side of an [`Index`], for as long as it is held. Readers never wait for it.
pub struct IndexWriter<'a>(MutexGuard<'a, Writer>);

impl IndexWriter<'_> {
    /// A place for a member; `None` when there are [`MEMBERS_MAX`].
    pub fn join(&mut self) -> Option<Member> {
        self.0.join()
    }

    /// Forgets what a member holds and gives its place back, at once for readers; its memory follows in steps.
    pub fn leave(&mut self, member: Member) {
        self.0.leave(member);
    }

    /// Forgets what a member holds, at once for readers; its memory follows in steps.
    pub fn clear(&mut self, member: Member) {
        self.0.clear(member);
    }

    /// The member now has one more copy of each of these blocks in `tier`. `keys` are the engine's names,
    /// `blocks` the hashes of their tokens; each is the child of the one before, the first of `parent`.
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

    /// The member has one copy more of each of these blocks in `tier`. What they are is not told: blocks that it has nowhere
    /// else stay unknown.
    pub fn stored_known(&mut self, member: Member, tier: Tier, keys: &[EngineHash]) -> Outcome {
        self.0.stored_as((member, tier), member, keys, &mut Vec::new())
    }

    /// The same for blocks that another member, `source`, holds under these keys. What could not be placed goes to `unplaced`:
    /// blocks that it does not hold (counted as unknown), and at the memory bound new ones (refused).
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

    /// The member has one copy less of each of these blocks in `tier`.
    pub fn removed(&mut self, member: Member, tier: Tier, keys: &[EngineHash]) -> Outcome {
        self.0.removed(member, tier, keys)
    }

    /// The member has these blocks in another tier now, with as many copies.
    pub fn moved(&mut self, member: Member, keys: &[EngineHash], from: Tier, to: Tier) -> Outcome {
        self.0.moved(member, keys, from, to)
    }

    /// Whether the member has the block in some tier.
    #[must_use]
    pub fn holds(&self, member: Member, key: EngineHash) -> bool {
        self.0.holds(member, key)
    }

    /// (member, block) pairs of one member.
    #[must_use]
    pub fn entries_of(&self, member: Member) -> usize {
        self.0.entries_of(member)
    }

    /// Blocks that a member holds, by tier. A block with several names or copies counts once in each tier.
    #[must_use]
    pub fn blocks_of(&self, member: Member) -> [u32; 4] {
        self.0.blocks_of(member)
    }

    /// Everything that a member holds, parents before children. Blocks whose prefix the member does not hold
    /// are left out: nothing can name their parent.
    #[must_use]
    pub fn held(&self, member: Member) -> Vec<Held> {
        self.0.held(member)
    }

    /// Goes on with what forgotten members left behind and frees what no reader can see any more. Called by
    /// every change; call it when nothing changes for a while. Returns whether there is more to do.
    pub fn sweep(&mut self) -> bool {
        self.0.sweep()
    }

    /// How full the index is.
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
