//! Prompts routed to a worker without KV events, queued for the index.
//!
//! Hot path: a copy of the hashes, a push, and a wake-up only when none is under way already. Waking the task for each
//! request took a tenth of the gateway's processor time, so prompts that arrive close together are recorded together.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use router_events::approximate::ApproximateTracker;
use router_radix::Index;
use tokio::sync::Notify;

/// Capacity of the queue. Further prompts are dropped, which may cost cache hits.
const WAITING_MAX: usize = 1024;
/// Prompts that arrive within this time are recorded together.
const BATCH_WINDOW: Duration = Duration::from_millis(5);
/// Interval at which expired prompts are removed while no new ones arrive.
const EXPIRE_EVERY: Duration = Duration::from_secs(1);

/// Queue of routed prompts.
#[derive(Debug)]
pub(crate) struct RoutedPromptQueue {
    waiting: ArrayQueue<Vec<u64>>,
    /// Whether the task has been notified of the queued prompts.
    is_notified: AtomicBool,
    queued: Notify,
}

impl RoutedPromptQueue {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            waiting: ArrayQueue::new(WAITING_MAX),
            is_notified: AtomicBool::new(false),
            queued: Notify::new(),
        })
    }

    /// Queues the block hashes of a prompt that is routed to the worker.
    pub(crate) fn note(&self, block_hashes: &[u64]) {
        let _not_noted = self.waiting.push(block_hashes.to_vec());
        // Release: pairs with the acquire in `keep`, which sees this prompt when it sees the flag.
        if !self.is_notified.swap(true, Ordering::AcqRel) {
            self.queued.notify_one();
        }
    }
}

/// Moves queued prompts into the index until the task is aborted.
pub(crate) async fn keep(
    routed: Arc<RoutedPromptQueue>,
    mut approximate: ApproximateTracker,
    index: Arc<Index>,
) {
    loop {
        if tokio::time::timeout(EXPIRE_EVERY, routed.queued.notified()).await.is_err() {
            approximate.expire(&mut index.write(), Instant::now());
            continue;
        }
        tokio::time::sleep(BATCH_WINDOW).await;
        // Acquire: pairs with the release in `note`. Prompts that come from now on notify again.
        routed.is_notified.swap(false, Ordering::AcqRel);
        while let Some(hashes) = routed.waiting.pop() {
            approximate.routed(&mut index.write(), &hashes, Instant::now());
        }
    }
}
