//! The doorbell word: whether its owner sleeps, in one word of shared memory. One owner, many producers.
//!
//! The problem is the store-buffer litmus test (Dekker): the owner writes "I sleep" and then reads the rings, a
//! producer writes its ring and then reads "does it sleep". Without more, both reads may miss both writes, and
//! a message lies in the ring of a sleeping node. Therefore each side has a `SeqCst` fence between its write
//! and its read. The two fences are ordered one way or the other: if the owner's is first, the producer's read
//! sees the announcement; else the owner's read sees the ring, and it does not sleep.
//!
//! A producer that finds the owner asleep exchanges that for `AWAKE`, and so wakes it once. A producer B that finds `AWAKE`
//! because producer A has just exchanged it relies on A: the owner is up or will be, and before it sleeps again it announces
//! and reads B's ring too.
//!
//! Hot path: producers, once for each flush: a fence and a load; the exchange only when the owner sleeps, so
//! that the word's cache line stays shared while it is awake. Model-checked in `tests/loom.rs`.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// The owner runs, or will check its rings before it sleeps.
pub const AWAKE: u32 = 0;
/// The owner waits in `poll(2)` for the eventfd, or is about to. Every other value, which only a faulty
/// process writes, counts as this.
pub const ASLEEP: u32 = 1;

/// Announces a sleep of the owner, which must then check its rings, and call [`retract`] if they hold records.
#[inline]
pub fn announce(word: &AtomicU32) {
    word.store(ASLEEP, Ordering::Relaxed);
    // Pairs with the fence in `ring`.
    fence(Ordering::SeqCst);
}

/// Withdraws the announcement: the owner is awake.
#[inline]
pub fn retract(word: &AtomicU32) {
    word.store(AWAKE, Ordering::Relaxed);
}

/// Called by a producer that has published a record. Returns true if the producer must write to the owner's
/// eventfd.
#[inline]
pub fn ring(word: &AtomicU32) -> bool {
    // Pairs with the fence in `announce`.
    fence(Ordering::SeqCst);
    word.load(Ordering::Relaxed) != AWAKE && word.swap(AWAKE, Ordering::Relaxed) != AWAKE
}
