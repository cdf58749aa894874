use std::sync::atomic::{AtomicU64, Ordering};

/// What the store has done so far. Each counter only grows, except `blocks`, which is a level.
#[derive(Debug, Default)]
pub struct StoreCounters {
    pub(crate) blocks: AtomicU64,
    pub(crate) offloaded: AtomicU64,
    pub(crate) onboarded: AtomicU64,
    pub(crate) throttled: AtomicU64,
    pub(crate) evicted: AtomicU64,
    pub(crate) checksum_failures: AtomicU64,
}

impl StoreCounters {
    /// Name, help text and value of each counter.
    #[must_use]
    pub fn snapshot(&self) -> [(&'static str, &'static str, u64); 6] {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [
            ("blocks", "Blocks in the host tier", read(&self.blocks)),
            ("offloaded_blocks", "Blocks copied to the host tier", read(&self.offloaded)),
            ("onboarded_blocks", "Blocks brought back", read(&self.onboarded)),
            ("throttled_blocks", "Offloads dropped because the queue was full", read(&self.throttled)),
            ("evicted_blocks", "Blocks that left the host tier", read(&self.evicted)),
            ("checksum_failures", "Blocks that were not what had been stored", read(&self.checksum_failures)),
        ]
    }
}
