//! Every interleaving of the in-flight table's protocol: `tests/loom.sh` builds this with `--cfg loom`.
#![cfg(loom)]

use dataplane_transfer::flight::{MoveOutcome, Step, Word};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use loom::thread;

/// The driver ends a batch while its watcher cancels and walks away: one of them frees the entry, once.
#[test]
fn an_entry_is_freed_by_exactly_one() {
    loom::model(|| {
        let word = Arc::new(Word::new());
        let generation = word.open();
        let freed = Arc::new(AtomicUsize::new(0));
        let driver = {
            let (word, freed) = (Arc::clone(&word), Arc::clone(&freed));
            thread::spawn(move || {
                let outcome =
                    if word.is_cancelled(generation) { MoveOutcome::Cancelled } else { MoveOutcome::Done };
                if word.end(generation, outcome) == Step::Freed {
                    freed.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        word.cancel(generation);
        if word.abandon(generation) == Step::Freed {
            freed.fetch_add(1, Ordering::Relaxed);
        }
        driver.join().expect("driver");
        assert_eq!(freed.load(Ordering::Relaxed), 1);
        assert_eq!(word.cancel(generation), Step::Stale, "an old ticket does nothing");
        assert_eq!(word.open(), generation.wrapping_add(1));
    });
}

/// Who sees the outcome sees the bytes.
#[test]
fn an_outcome_shows_the_bytes() {
    loom::model(|| {
        let shared = Arc::new((Word::new(), UnsafeCell::new(0)));
        let generation = shared.0.open();
        let driver = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                // SAFETY: nobody reads before the outcome is set: what loom checks here.
                shared.1.with_mut(|bytes| unsafe { *bytes = 7 });
                shared.0.end(generation, MoveOutcome::Done);
            })
        };
        if shared.0.outcome(generation) == Some(MoveOutcome::Done) {
            // SAFETY: the driver is done with it.
            assert_eq!(shared.1.with(|bytes| unsafe { *bytes }), 7);
        }
        driver.join().expect("driver");
    });
}

/// The rig: the same with a relaxed step must be found out.
#[test]
#[should_panic]
fn a_relaxed_end_is_found_out() {
    loom::model(|| {
        let shared = Arc::new((AtomicU64::new(0), UnsafeCell::new(0)));
        let driver = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                // SAFETY: as above, but nothing orders it.
                shared.1.with_mut(|bytes| unsafe { *bytes = 7 });
                shared.0.store(1, Ordering::Relaxed);
            })
        };
        if shared.0.load(Ordering::Relaxed) == 1 {
            // SAFETY: none; that is the point.
            shared.1.with(|bytes| unsafe { *bytes });
        }
        driver.join().expect("driver");
    });
}

/// The rig: freeing in two steps (look, then act) frees twice or never.
#[test]
#[should_panic]
fn looking_first_is_found_out() {
    loom::model(|| {
        let ended = Arc::new(AtomicUsize::new(0));
        let abandoned = Arc::new(AtomicUsize::new(0));
        let freed = Arc::new(AtomicUsize::new(0));
        let driver = {
            let (ended, abandoned, freed) = (Arc::clone(&ended), Arc::clone(&abandoned), Arc::clone(&freed));
            thread::spawn(move || {
                ended.store(1, Ordering::SeqCst);
                if abandoned.load(Ordering::SeqCst) == 1 {
                    freed.fetch_add(1, Ordering::SeqCst);
                }
            })
        };
        abandoned.store(1, Ordering::SeqCst);
        if ended.load(Ordering::SeqCst) == 1 {
            freed.fetch_add(1, Ordering::SeqCst);
        }
        driver.join().expect("driver");
        assert_eq!(freed.load(Ordering::SeqCst), 1);
    });
}
