//! Counters of a mock.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of events. Levels are read at their source.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) requests: AtomicU64,
    pub(crate) finished_stop: AtomicU64,
    pub(crate) finished_length: AtomicU64,
    pub(crate) aborted: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) refused_full: AtomicU64,
    pub(crate) prompt_tokens: AtomicU64,
    pub(crate) generation_tokens: AtomicU64,
    pub(crate) prefix_queries: AtomicU64,
    pub(crate) prefix_hits: AtomicU64,
    pub(crate) external_queries: AtomicU64,
    pub(crate) external_hits: AtomicU64,
    pub(crate) preemptions: AtomicU64,
    pub(crate) leases: AtomicU64,
    pub(crate) leases_expired: AtomicU64,
    pub(crate) pulled: AtomicU64,
    pub(crate) steps: AtomicU64,
    pub(crate) event_batches: AtomicU64,
    pub(crate) retain_seconds: AtomicU64,
}

pub(crate) fn add(counter: &AtomicU64, value: usize) {
    counter.fetch_add(value as u64, Ordering::Relaxed);
}

pub(crate) fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// A worker's numbers at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct MockStats {
    /// Sequences accepted: prompts times choices.
    pub requests: u64,
    /// Sequences running now.
    pub running: usize,
    /// Sequences waiting now.
    pub waiting: usize,
    /// Sequences that completed.
    pub finished: u64,
    /// Sequences whose client disconnected.
    pub aborted: u64,
    /// Sequences that the engine gave up.
    pub failed: u64,
    /// Requests refused because too many waited.
    pub refused_full: u64,
    /// Blocks with references, leases included.
    pub held_blocks: usize,
    /// Blocks leased and not fetched.
    pub leased_blocks: usize,
    /// Copies of blocks in the prefix cache.
    pub cached_blocks: usize,
    /// Different blocks in the prefix cache.
    pub known_blocks: usize,
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Tokens of all outputs.
    pub generation_tokens: u64,
    /// Prompt tokens found in the prefix cache.
    pub prefix_hits: u64,
    /// Prompt tokens transferred from another worker.
    pub external_hits: u64,
    /// Sequences preempted because blocks ran out.
    pub preemptions: u64,
    /// Hand-offs offered.
    pub leases: u64,
    /// Hand-offs that expired without being fetched.
    pub leases_expired: u64,
    /// Hand-offs that were fetched.
    pub pulled: u64,
    /// Steps of the scheduler.
    pub steps: u64,
    /// Batches of KV events.
    pub event_batches: u64,
    /// Sum of the seconds for which requests asked to retain their blocks.
    pub retain_seconds: u64,
    /// Number of occurrences of each fault.
    pub faults: std::collections::BTreeMap<&'static str, u64>,
}
