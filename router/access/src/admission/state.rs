//! Numbers of admitted and of waiting requests, in one atomic word.
//!
//! The two must change together. With two words, a request could see "no place" before another one leaves
//! and sees "no waiter", and then the first would wait although a place is free. With one word, of a
//! request that begins to wait and one that leaves, the later sees the earlier: either the leaving request
//! finds a waiter and hands its place over, or the new request finds the free place.
//!
//! The number of waiting requests changes only under the queue's lock; the number inside changes without
//! it.
//!
//! A successful change is `AcqRel`, so that all accesses of a request before it left happen before those of
//! its successor: [`State::try_leave`] pairs with [`State::try_enter`].

use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Default)]
pub(super) struct State(AtomicU64);

/// Numbers of requests: (inside, waiting).
pub(super) type Counts = (u32, u32);

fn unpack(word: u64) -> Counts {
    (word as u32, (word >> 32) as u32)
}

fn pack((inside, waiting): Counts) -> u64 {
    u64::from(waiting) << 32 | u64::from(inside)
}

impl State {
    pub(super) fn get(&self) -> Counts {
        unpack(self.0.load(Ordering::Relaxed))
    }

    /// Changes the counts if `change` returns new ones; returns whether they changed.
    fn change(&self, change: impl Fn(Counts) -> Option<Counts>) -> bool {
        let mut word = self.0.load(Ordering::Relaxed);
        while let Some(next) = change(unpack(word)) {
            match self.0.compare_exchange_weak(word, pack(next), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(seen) => word = seen,
            }
        }
        false
    }

    /// Enters if no request waits and a place is free.
    pub(super) fn try_enter(&self, inside_max: u32) -> bool {
        self.change(|(inside, waiting)| (waiting == 0 && inside < inside_max).then_some((inside + 1, 0)))
    }

    /// Leaves, if no request waits or too many are inside; otherwise returns false: the place is to be
    /// handed over.
    pub(super) fn try_leave(&self, inside_max: u32) -> bool {
        self.change(|(inside, waiting)| {
            debug_assert!(inside > 0, "more left than entered");
            (waiting == 0 || inside > inside_max).then(|| (inside.saturating_sub(1), waiting))
        })
    }

    /// Under the lock: enters if no request waits and a place is free, and begins to wait otherwise; true
    /// when inside.
    pub(super) fn enter_or_wait(&self, inside_max: u32) -> bool {
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            let (inside, waiting) = unpack(word);
            let is_inside = waiting == 0 && inside < inside_max;
            let next = if is_inside { (inside + 1, 0) } else { (inside, waiting.saturating_add(1)) };
            match self.0.compare_exchange_weak(word, pack(next), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return is_inside,
                Err(seen) => word = seen,
            }
        }
    }

    /// Under the lock: moves one waiting request inside, if there is a place.
    pub(super) fn try_advance(&self, inside_max: u32) -> bool {
        self.change(|(inside, waiting)| {
            // Evaluated lazily: without a waiter the subtraction would overflow.
            (waiting > 0 && inside < inside_max).then(|| (inside + 1, waiting - 1))
        })
    }

    /// Under the lock: removes one waiting request, which took an already counted place or gave up.
    pub(super) fn stop_waiting(&self) {
        self.change(|(inside, waiting)| {
            debug_assert!(waiting > 0, "more stopped waiting than began");
            Some((inside, waiting.saturating_sub(1)))
        });
    }
}
