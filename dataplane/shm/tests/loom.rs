//! Every interleaving of a node that goes to sleep and of producers that ring, by loom. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p dataplane-shm --test loom --release`; it compiles to nothing otherwise.
//!
//! The steps on the word are the crate's own; the ring is one counter for each producer, and the kernel's
//! eventfd is a count, a lock and a condition variable. A lost wake-up makes the node wait for ever: loom
//! reports the deadlock. Two broken protocols, each without one of the two fences, must be detected.

#![cfg(loom)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use dataplane_shm::word::{ASLEEP, AWAKE, announce, retract, ring};
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

#[derive(Clone, Copy, PartialEq)]
enum Broken {
    Nothing,
    OwnersFence,
    ProducersFence,
}

struct Node {
    word: AtomicU32,
    /// One ring's tail for each producer.
    tails: [AtomicU32; 2],
    /// The eventfd's counter.
    eventfd: Mutex<u32>,
    wakes: Condvar,
}

impl Node {
    fn publish(&self, producer: usize, broken: Broken) {
        self.tails[producer].store(1, Ordering::Release);
        let is_due = match broken {
            Broken::ProducersFence => self.word.load(Ordering::Relaxed) != AWAKE && ring(&self.word),
            _ => ring(&self.word),
        };
        if is_due {
            *self.eventfd.lock().expect("lock") += 1;
            self.wakes.notify_one();
        }
    }

    fn seen(&self) -> u32 {
        self.tails.iter().map(|tail| tail.load(Ordering::Acquire)).sum()
    }

    /// Sleeps once, as between `prepare_wait` and the next `poll`.
    fn sleep(&self, wanted: u32, broken: Broken) {
        match broken {
            Broken::OwnersFence => self.word.store(ASLEEP, Ordering::Relaxed),
            _ => announce(&self.word),
        }
        if self.seen() < wanted {
            let mut eventfd = self.eventfd.lock().expect("lock");
            while *eventfd == 0 {
                eventfd = self.wakes.wait(eventfd).expect("wait");
            }
            *eventfd = 0;
        }
        retract(&self.word);
    }
}

/// Producers publish once each; the node sleeps until it has seen all. Returns true when every execution ends.
fn holds(producers: usize, broken: Broken) -> bool {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 20_000;
    let model = move || {
        let node = Arc::new(Node {
            word: AtomicU32::new(AWAKE),
            tails: [AtomicU32::new(0), AtomicU32::new(0)],
            eventfd: Mutex::new(0),
            wakes: Condvar::new(),
        });
        let threads: Vec<_> = (0..producers)
            .map(|producer| {
                let node = Arc::clone(&node);
                thread::spawn(move || node.publish(producer, broken))
            })
            .collect();
        while node.seen() < producers as u32 {
            node.sleep(producers as u32, broken);
        }
        threads.into_iter().for_each(|thread| thread.join().expect("producer"));
    };
    catch_unwind(AssertUnwindSafe(|| builder.check(model))).is_ok()
}

#[test]
fn no_wake_up_is_lost() {
    for producers in [1, 2] {
        assert!(holds(producers, Broken::Nothing), "{producers} producers");
    }
    println!("loom: no wake-up is lost with one and two producers");
}

#[test]
fn a_missing_fence_is_noticed() {
    for broken in [Broken::OwnersFence, Broken::ProducersFence] {
        assert!(!holds(1, broken), "the model does not see a missing fence");
    }
    println!("loom: both broken protocols were noticed");
}
