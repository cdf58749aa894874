//! Every interleaving of a node that goes to sleep and of producers that ring, by loom. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p dataplane-shm --test loom --release`; it compiles to nothing otherwise.
//!
//! The steps on the word are the crate's own; the ring is one counter for each producer, and the kernel's futex
//! is a lock and a condition variable. A wake-up that is lost is a node that waits for ever: loom reports the
//! deadlock. Two broken protocols, each with one of the two fences left out, must be noticed.

#![cfg(loom)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use dataplane_shm::word::{AWAKE, IN_FUTEX, IN_POLL, SPINNING, Wake, announce, change, retract, ring};
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

#[derive(Clone, Copy, PartialEq)]
enum Sleep {
    Futex,
    SpinThenFutex,
    Poll,
}

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
    /// The eventfd's counter, and the lock that the kernel holds while it compares the futex word.
    kernel: Mutex<u32>,
    wakes: Condvar,
}

impl Node {
    fn publish(&self, producer: usize, broken: Broken) {
        self.tails[producer].store(1, Ordering::Release);
        let due = match broken {
            Broken::ProducersFence => match self.word.load(Ordering::Relaxed) {
                AWAKE => Wake::Nothing,
                _ => ring(&self.word),
            },
            _ => ring(&self.word),
        };
        if due != Wake::Nothing {
            let mut eventfd = self.kernel.lock().expect("lock");
            *eventfd += u32::from(due == Wake::Eventfd);
            assert!(due != Wake::Both, "no state is nonsense");
            self.wakes.notify_one();
        }
    }

    fn seen(&self) -> u32 {
        self.tails.iter().map(|tail| tail.load(Ordering::Acquire)).sum()
    }

    /// One sleep, as `prepare_wait` and `Sleeper::sleep` take it.
    fn sleep(&self, how: Sleep, wanted: u32, broken: Broken) {
        match broken {
            Broken::OwnersFence => self.word.store(IN_POLL, Ordering::Relaxed),
            _ => announce(&self.word),
        }
        if self.seen() < wanted {
            match how {
                Sleep::Poll => {
                    let mut eventfd = self.kernel.lock().expect("lock");
                    while *eventfd == 0 {
                        eventfd = self.wakes.wait(eventfd).expect("wait");
                    }
                    *eventfd = 0;
                }
                Sleep::Futex => self.futex(IN_POLL),
                Sleep::SpinThenFutex if change(&self.word, IN_POLL, SPINNING) => {
                    // One look stands for the spinning.
                    if self.word.load(Ordering::Acquire) == SPINNING {
                        self.futex(SPINNING);
                    }
                }
                Sleep::SpinThenFutex => {}
            }
        }
        retract(&self.word);
    }

    fn futex(&self, from: u32) {
        if change(&self.word, from, IN_FUTEX) {
            let mut kernel = self.kernel.lock().expect("lock");
            while self.word.load(Ordering::Relaxed) == IN_FUTEX {
                kernel = self.wakes.wait(kernel).expect("wait");
            }
        }
    }
}

/// Producers publish once each; the node sleeps until it has seen all. True when every execution ends.
fn holds(producers: usize, how: Sleep, broken: Broken) -> bool {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 20_000;
    let model = move || {
        let node = Arc::new(Node {
            word: AtomicU32::new(AWAKE),
            tails: [AtomicU32::new(0), AtomicU32::new(0)],
            kernel: Mutex::new(0),
            wakes: Condvar::new(),
        });
        let threads: Vec<_> = (0..producers)
            .map(|producer| {
                let node = Arc::clone(&node);
                thread::spawn(move || node.publish(producer, broken))
            })
            .collect();
        while node.seen() < producers as u32 {
            node.sleep(how, producers as u32, broken);
        }
        threads.into_iter().for_each(|thread| thread.join().expect("producer"));
    };
    catch_unwind(AssertUnwindSafe(|| builder.check(model))).is_ok()
}

#[test]
fn no_wake_up_is_lost() {
    for how in [Sleep::Futex, Sleep::SpinThenFutex, Sleep::Poll] {
        for producers in [1, 2] {
            assert!(holds(producers, how, Broken::Nothing), "{producers} producers");
        }
    }
    println!("loom: no wake-up is lost with one and two producers, three ways to sleep");
}

#[test]
fn a_missing_fence_is_noticed() {
    for broken in [Broken::OwnersFence, Broken::ProducersFence] {
        for how in [Sleep::Futex, Sleep::Poll] {
            assert!(!holds(1, how, broken), "the model does not see a missing fence");
        }
    }
    println!("loom: both broken protocols were noticed");
}
