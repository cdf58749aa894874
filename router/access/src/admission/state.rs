//! Who is inside and how many wait, as one atomic number.
//!
//! The two must change together. If they were two numbers, one could see "no place", another leave and see "nobody
//! waits", and then the first would wait for a place that is free. In one word, of a request that begins to wait
//! and one that leaves, the later sees the earlier: either the leaver finds somebody waiting and hands its place
//! over, or the newcomer finds the place free.
//!
//! The number of waiting changes only under the queue's lock; the number inside changes anywhere.
//!
//! A successful change is `AcqRel`, so that what a request did before it left happened before what its successor
//! does: [`State::try_leave`] pairs with [`State::try_enter`].

use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Default)]
pub(super) struct State(AtomicU64);

/// (inside, waiting)
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

    /// Changes the counts if `change` wants it; returns whether it did.
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

    /// Goes inside, past nobody.
    pub(super) fn try_enter(&self, inside_max: u32) -> bool {
        self.change(|(inside, waiting)| (waiting == 0 && inside < inside_max).then_some((inside + 1, 0)))
    }

    /// Leaves, if nobody waits or if there are too many inside; otherwise the place is to be handed over.
    pub(super) fn try_leave(&self, inside_max: u32) -> bool {
        self.change(|(inside, waiting)| {
            debug_assert!(inside > 0, "more left than entered");
            (waiting == 0 || inside > inside_max).then(|| (inside.saturating_sub(1), waiting))
        })
    }

    /// Goes inside if nobody waits and there is a place, and begins to wait otherwise, under the lock; true when
    /// inside.
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

    /// Goes from waiting to inside, under the lock, if there is a place.
    pub(super) fn try_advance(&self, inside_max: u32) -> bool {
        self.change(|(inside, waiting)| {
            // Lazy: with nobody waiting there is nothing to subtract from.
            (waiting > 0 && inside < inside_max).then(|| (inside + 1, waiting - 1))
        })
    }

    /// Waits no more, under the lock: it took a place that is counted already, or it gave up.
    pub(super) fn stop_waiting(&self) {
        self.change(|(inside, waiting)| {
            debug_assert!(waiting > 0, "more stopped waiting than began");
            Some((inside, waiting.saturating_sub(1)))
        });
    }
}
