//! A count of things that other threads hold, kept by guards that travel with the things: however one ends, it is counted off.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The count. Any thread may drop a guard; the store's thread alone makes them.
///
/// Relaxed throughout: the count guards no other memory, and a guard that came back in a message was dropped, if at all, after
/// the message was taken in.
#[derive(Debug, Default)]
pub(crate) struct GuardedCount(Arc<AtomicUsize>);

impl GuardedCount {
    /// Counts one thing, until the guard is dropped.
    pub(crate) fn guard(&self) -> CountGuard {
        self.0.fetch_add(1, Ordering::Relaxed);
        CountGuard(Arc::clone(&self.0))
    }

    /// Guards that exist.
    pub(crate) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Panics when more guards exist than `known`, the things that the store's own tables say are out: the tables have lost one,
    /// and what it holds would never come back. (Fewer are no fault: a thread that has ended drops what it holds without a
    /// word.)
    pub(crate) fn check(&self, what: &str, known: usize) {
        let counted = self.get();
        assert!(counted <= known, "{counted} guards of {what} exist, and the tables record {known}");
    }
}

/// The share of one thing in the count.
#[derive(Debug)]
pub(crate) struct CountGuard(Arc<AtomicUsize>);

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
