//! The doorbell word: how its owner sleeps, in one word of shared memory. One owner, many producers.
//!
//! The problem is the store-buffer litmus test (Dekker): the owner writes "I sleep" and then reads the rings, a
//! producer writes its ring and then reads "does it sleep". Without more, both reads may miss both writes, and
//! a message lies in the ring of a sleeping node. Therefore each side has a `SeqCst` fence between its write
//! and its read. The two fences are ordered one way or the other: if the owner's is first, the producer's read
//! sees the announcement; else the owner's read sees the ring, and it does not sleep.
//!
//! After the announcement the owner may change its mind about *how* it sleeps (the states below), by
//! compare-and-exchange only. A producer that sees any sleeping state exchanges it for `AWAKE`; since all of
//! these are read-modify-writes of one word, each sleep is ended by exactly one of: a producer (whose exchange
//! returns the state and so the call that is due) or the owner itself. The futex compares the word with
//! `IN_FUTEX` under the kernel's lock, so an exchange before the wait makes the wait return at once.
//!
//! A producer B that finds `AWAKE` because producer A has just exchanged it relies on A: the owner is up or
//! will be, and before it sleeps again it announces and reads B's ring too.
//!
//! Hot path: producers, once for each flush: a fence and a load; the exchange only when the owner sleeps, so
//! that the word's cache line stays shared while it is awake. Model-checked in `tests/loom.rs`.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// The owner runs, or will look at its rings before it sleeps.
pub const AWAKE: u32 = 0;
/// The owner watches the word: changing it is enough.
pub const SPINNING: u32 = 1;
/// The owner waits in `futex(2)` on the word.
pub const IN_FUTEX: u32 = 2;
/// The owner waits in `poll(2)` for the eventfd, or is about to decide how it waits.
pub const IN_POLL: u32 = 3;

/// The call that a producer owes the owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// None.
    Nothing,
    /// `FUTEX_WAKE` on the word.
    Futex,
    /// A write to the eventfd.
    Eventfd,
    /// Both: the word held nonsense, so some process overwrote it.
    Both,
}

/// The owner's first step before it sleeps; then it must look at its rings, and call [`retract`] if they hold
/// something.
#[inline]
pub fn announce(word: &AtomicU32) {
    word.store(IN_POLL, Ordering::Relaxed);
    // Pairs with the fence in `ring`.
    fence(Ordering::SeqCst);
}

/// The owner is awake.
#[inline]
pub fn retract(word: &AtomicU32) {
    word.store(AWAKE, Ordering::Relaxed);
}

/// The owner sleeps in another way from now on; false when a producer has rung meanwhile.
#[inline]
pub fn change(word: &AtomicU32, from: u32, to: u32) -> bool {
    // AcqRel: on failure and success the owner sees what a producer published before its exchange.
    word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
}

/// A producer has published something.
#[inline]
pub fn ring(word: &AtomicU32) -> Wake {
    // Pairs with the fence in `announce`.
    fence(Ordering::SeqCst);
    if word.load(Ordering::Relaxed) == AWAKE {
        return Wake::Nothing;
    }
    // Release: pairs with the acquire of an owner that spins on the word or changes it.
    match word.swap(AWAKE, Ordering::AcqRel) {
        AWAKE | SPINNING => Wake::Nothing,
        IN_FUTEX => Wake::Futex,
        IN_POLL => Wake::Eventfd,
        _ => Wake::Both,
    }
}
