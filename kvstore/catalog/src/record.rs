//! One slot's public side, read by all threads without a lock: the protocol between readers and the evictor.
//!
//! The problem: a reader finds a slot in the index and wants to keep the block there while it reads the bytes;
//! meanwhile the evictor may take the block out and another block may move in. The reader must end up with a
//! pin on the block it asked for, or with nothing.
//!
//! The theorem: (1) state, generation and pins are one word, so "nobody holds it" and "it is going" are decided
//! by one compare-and-swap, and only one of a pin and an eviction can succeed on the same word. (2) Identity,
//! parent, checksum and length change only while the state is `Reserved`, which needs that pins were 0. (3) A
//! reader compares the identity between loading the word and swapping in its pin; a swap that succeeds proves
//! that state and generation were the same all along, hence the identity too. (4) The generation grows with
//! every publication, so an old word never comes back.
//!
//! The encoding: bits 0–19 pins, bit 20 `parked` (the last pin that goes must hand the slot to the writer,
//! see `returns`), bits 21–23 state, bits 24–63 generation.
//!
//! Hot path: one line of 64 bytes per block; a lease is one compare-and-swap, a look-up two loads of the word.

use kvstore_block::BlockIdentity;

use crate::sync::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

const PINS: u64 = (1 << 20) - 1;
const PARKED: u64 = 1 << 20;
const STATE_SHIFT: u32 = 21;
const STATE: u64 = 0b111 << STATE_SHIFT;
const GENERATION_SHIFT: u32 = 24;

/// Uses are counted to here, as in the S3-FIFO paper (two bits).
pub(crate) const USES_MAX: u8 = 3;

/// State of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// On the free list.
    Free,
    /// Owned by one `Reserved`, `Filling` or `Complete`.
    Reserved,
    /// Visible to look-ups.
    Registered,
    /// Owned by one `Evicting`; the bytes are still there.
    Evicting,
    /// Removed while pinned or evicting; freed when the last pin or the `Evicting` goes.
    PendingFree,
}

impl State {
    const fn bits(self) -> u64 {
        (self as u64) << STATE_SHIFT
    }

    fn of(word: u64) -> Self {
        match (word & STATE) >> STATE_SHIFT {
            0 => Self::Free,
            1 => Self::Reserved,
            2 => Self::Registered,
            3 => Self::Evicting,
            _ => Self::PendingFree,
        }
    }
}

/// Outcome of an attempt to take a block for eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TakeOutcome {
    /// The slot is the caller's.
    Taken,
    /// The block is pinned; its last reader hands it back.
    Pinned,
    /// The block is not registered.
    Gone,
}

/// State of a slot that readers access without the lock.
#[derive(Debug)]
#[repr(align(64))]
pub struct Record {
    word: AtomicU64,
    identity: [AtomicU64; 2],
    parent: [AtomicU64; 2],
    checksum: AtomicU64,
    bytes: AtomicU32,
    /// The tier's clock when the block was last used.
    stamp: AtomicU32,
    /// The next slot on the stack of returned ones.
    pub(crate) returned: AtomicU32,
    has_parent: AtomicU8,
    uses: AtomicU8,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Record>() == 64);

impl Default for Record {
    fn default() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            word: zero(),
            identity: [zero(), zero()],
            parent: [zero(), zero()],
            checksum: zero(),
            bytes: AtomicU32::new(0),
            stamp: AtomicU32::new(0),
            returned: AtomicU32::new(0),
            has_parent: AtomicU8::new(0),
            uses: AtomicU8::new(0),
        }
    }
}

/// The two halves of an identity.
pub(crate) fn halves(identity: &BlockIdentity) -> [u64; 2] {
    let whole = u128::from_le_bytes(identity.0);
    [whole as u64, (whole >> 64) as u64]
}

fn joined(halves: &[AtomicU64; 2]) -> BlockIdentity {
    let [low, high] = halves.each_ref().map(|half| u128::from(half.load(Ordering::Relaxed)));
    BlockIdentity((low | (high << 64)).to_le_bytes())
}

fn store(halves_of: &[AtomicU64; 2], identity: &BlockIdentity) {
    let [low, high] = halves(identity);
    halves_of[0].store(low, Ordering::Relaxed);
    halves_of[1].store(high, Ordering::Relaxed);
}

/// Reader's side: any thread.
impl Record {
    fn is(&self, [low, high]: [u64; 2]) -> bool {
        self.identity[0].load(Ordering::Relaxed) == low && self.identity[1].load(Ordering::Relaxed) == high
    }

    /// Whether the block is registered here.
    #[must_use]
    pub fn holds(&self, identity: [u64; 2]) -> bool {
        // Acquire pairs with the Release of `publish`: who sees the generation sees its identity.
        let before = self.word.load(Ordering::Acquire);
        if State::of(before) != State::Registered || !self.is(identity) {
            return false;
        }
        // Pairs with the Release fence of `publish`: who saw a later identity sees that the word has moved on.
        fence(Ordering::Acquire);
        let after = self.word.load(Ordering::Relaxed);
        (before ^ after) & !(PINS | PARKED) == 0
    }

    /// Pins the block if it is registered here.
    #[must_use]
    pub fn pin(&self, identity: [u64; 2]) -> bool {
        // Acquire pairs with the Release of `publish`: the identity and the slot's bytes are those of this word.
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            if State::of(word) != State::Registered || !self.is(identity) || word & PINS == PINS {
                return false;
            }
            // Acquire on both outcomes, for the same pairing as above.
            match self.word.compare_exchange_weak(word, word + 1, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
    }

    /// A reader's mistake: check, then count. The model check must find it.
    #[cfg(loom)]
    #[must_use]
    pub fn pin_without_swap(&self, identity: [u64; 2]) -> bool {
        let word = self.word.load(Ordering::Acquire);
        if State::of(word) != State::Registered || !self.is(identity) {
            return false;
        }
        self.word.fetch_add(1, Ordering::Acquire);
        true
    }

    /// Takes one pin off. `true`: it was the last of a parked slot, and the caller must push the slot on the
    /// stack of returned ones.
    #[must_use]
    pub fn unpin(&self) -> bool {
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            debug_assert!(word & PINS != 0, "a pin is taken off once");
            let last = word & (PINS | PARKED) == (PARKED | 1);
            let next = if last { (word - 1) & !PARKED } else { word - 1 };
            // Release pairs with the Acquire of `take`, `remove` and `pins`: this reader's reads of the slot's
            // bytes come before the next owner's writes.
            match self.word.compare_exchange_weak(word, next, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return last,
                Err(now) => word = now,
            }
        }
    }

    /// Notes a use: two plain stores, and none when nothing changes. A lost race between two readers costs
    /// one count.
    pub(crate) fn touch(&self, clock: u32) {
        if self.stamp.load(Ordering::Relaxed) != clock {
            self.stamp.store(clock, Ordering::Relaxed);
        }
        let uses = self.uses.load(Ordering::Relaxed);
        if uses < USES_MAX {
            self.uses.store(uses + 1, Ordering::Relaxed);
        }
    }

    /// The block's identity. Meaningful only to the holder of a pin, of the slot or of the tier's lock.
    #[must_use]
    pub fn identity(&self) -> BlockIdentity {
        joined(&self.identity)
    }

    pub(crate) fn halves(&self) -> [u64; 2] {
        self.identity.each_ref().map(|half| half.load(Ordering::Relaxed))
    }

    pub(crate) fn parent(&self) -> Option<BlockIdentity> {
        (self.has_parent.load(Ordering::Relaxed) != 0).then(|| joined(&self.parent))
    }

    pub(crate) fn checksum(&self) -> u64 {
        self.checksum.load(Ordering::Relaxed)
    }

    pub(crate) fn bytes(&self) -> u32 {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// Writer's side: under the tier's lock.
impl Record {
    /// State of the slot.
    #[must_use]
    pub fn state(&self) -> State {
        State::of(self.word.load(Ordering::Relaxed))
    }

    pub(crate) fn generation(&self) -> u32 {
        (self.word.load(Ordering::Relaxed) >> GENERATION_SHIFT) as u32
    }

    /// Pins out. Acquire pairs with the Release of every `unpin` so far: at 0 the slot's readers are done.
    #[must_use]
    pub fn pins(&self) -> u32 {
        (self.word.load(Ordering::Acquire) & PINS) as u32
    }

    /// `Free` → `Reserved`.
    pub fn reserve(&self) {
        self.set(State::Reserved, Ordering::Relaxed);
    }

    /// Any state without pins → `Free`.
    pub fn free(&self) {
        self.set(State::Free, Ordering::Relaxed);
    }

    /// `Evicting` → `Registered`: the block stays after all. Release as in `publish`.
    pub fn restore(&self) {
        self.set(State::Registered, Ordering::Release);
    }

    /// `Evicting` → `PendingFree`.
    pub(crate) fn remove_evicting(&self) {
        self.set(State::PendingFree, Ordering::Relaxed);
    }

    /// Only for states that readers do not swap: a plain store would lose a pin otherwise.
    fn set(&self, state: State, ordering: Ordering) {
        let word = self.word.load(Ordering::Relaxed);
        debug_assert!(word & PINS == 0, "a pinned slot changes by swaps only");
        self.word.store((word & !(STATE | PARKED)) | state.bits(), ordering);
    }

    /// `Reserved` → `Registered` under a new generation.
    pub fn publish(
        &self,
        identity: &BlockIdentity,
        parent: Option<&BlockIdentity>,
        checksum: u64,
        bytes: u32,
        clock: u32,
    ) {
        let word = self.word.load(Ordering::Relaxed);
        // Pairs with the Acquire fence of `holds`: the word left `Registered` before the identity changes.
        fence(Ordering::Release);
        store(&self.identity, identity);
        if let Some(parent) = parent {
            store(&self.parent, parent);
        }
        self.has_parent.store(u8::from(parent.is_some()), Ordering::Relaxed);
        self.checksum.store(checksum, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
        self.stamp.store(clock, Ordering::Relaxed);
        self.uses.store(0, Ordering::Relaxed);
        let generation = (word >> GENERATION_SHIFT).wrapping_add(1) << GENERATION_SHIFT;
        // Release pairs with the Acquire of `holds` and `pin`.
        self.word.store(generation | State::Registered.bits(), Ordering::Release);
    }

    /// `Registered` → `Evicting` if the block has no pins, otherwise parks it.
    pub fn take(&self) -> TakeOutcome {
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            if State::of(word) != State::Registered {
                return TakeOutcome::Gone;
            }
            let (next, outcome) = match word & PINS {
                0 => ((word & !STATE) | State::Evicting.bits(), TakeOutcome::Taken),
                _ => (word | PARKED, TakeOutcome::Pinned),
            };
            // Acquire pairs with the Release of `unpin`: the readers' loads are over.
            match self.word.compare_exchange_weak(word, next, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return outcome,
                Err(now) => word = now,
            }
        }
    }

    /// `Registered` → `PendingFree`; parked while pinned. `in_return`: a push of this slot on the stack of
    /// returned ones is out already, so that there must be no second one. Returns `true` if the slot has no
    /// pins and no push is out: the caller frees it.
    pub fn remove(&self, in_return: bool) -> bool {
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            let coming = in_return && word & PARKED == 0;
            let pinned = word & PINS != 0;
            let flag = if pinned && !coming { PARKED } else { 0 };
            let next = (word & !(STATE | PARKED)) | State::PendingFree.bits() | flag;
            // Acquire pairs with the Release of `unpin`, as in `take`.
            match self.word.compare_exchange_weak(word, next, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return !pinned && !coming,
                Err(now) => word = now,
            }
        }
    }

    /// Parks a `PendingFree` slot that came back while pinned. `false`: no pin is left.
    pub(crate) fn park(&self) -> bool {
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            if word & PINS == 0 {
                return false;
            }
            // Acquire on failure: the last `unpin` may be what got in between.
            match self.word.compare_exchange_weak(word, word | PARKED, Ordering::Relaxed, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
    }

    pub(crate) fn stamp(&self) -> u32 {
        self.stamp.load(Ordering::Relaxed)
    }

    pub(crate) fn uses(&self) -> u8 {
        self.uses.load(Ordering::Relaxed)
    }

    pub(crate) fn set_uses(&self, uses: u8) {
        self.uses.store(uses, Ordering::Relaxed);
    }
}
