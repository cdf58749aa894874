//! What was routed to a worker that publishes no events, on its way into the index.
//!
//! Hot path: a copy of the hashes, a push, and a wake-up only when none is under way already. Waking somebody for each
//! request took a tenth of the gateway's processor time, so what comes within a moment is noted together.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use router_events::approximate::Approximate;
use router_radix::Index;
use tokio::sync::Notify;

/// Prompts that may wait to be noted; more are not noted, so a hit or two will be missed.
const WAITING_MAX: usize = 1024;
/// What comes within this time is noted together.
const TOGETHER: Duration = Duration::from_millis(1);
/// How often what is too old is looked for when nothing comes.
const EXPIRE_EVERY: Duration = Duration::from_secs(1);

/// Prompts that wait to be noted.
#[derive(Debug)]
pub(crate) struct Routed {
    waiting: ArrayQueue<Vec<u64>>,
    /// The bell has been rung for what waits.
    is_told: AtomicBool,
    bell: Notify,
}

impl Routed {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            waiting: ArrayQueue::new(WAITING_MAX),
            is_told: AtomicBool::new(false),
            bell: Notify::new(),
        })
    }

    /// A prompt with these block hashes goes to the worker.
    pub(crate) fn note(&self, block_hashes: &[u64]) {
        let _not_noted = self.waiting.push(block_hashes.to_vec());
        // Release: pairs with the acquire in `keep`, which sees this prompt when it sees the flag.
        if !self.is_told.swap(true, Ordering::AcqRel) {
            self.bell.notify_one();
        }
    }
}

/// Notes what waits, until it is aborted.
pub(crate) async fn keep(routed: Arc<Routed>, mut approximate: Approximate, index: Arc<Index>) {
    loop {
        if tokio::time::timeout(EXPIRE_EVERY, routed.bell.notified()).await.is_err() {
            approximate.expire(&mut index.write(), Instant::now());
            continue;
        }
        tokio::time::sleep(TOGETHER).await;
        // Acquire: pairs with the release in `note`. What comes from now on rings again.
        routed.is_told.swap(false, Ordering::AcqRel);
        while let Some(hashes) = routed.waiting.pop() {
            approximate.routed(&mut index.write(), &hashes, Instant::now());
        }
    }
}
