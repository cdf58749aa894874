//! Counters of the store.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of a store. Each counter only grows.
#[derive(Debug, Default)]
pub struct StoreCounters {
    pub(crate) offloaded: AtomicU64,
    pub(crate) onboarded: AtomicU64,
    pub(crate) throttled: AtomicU64,
    pub(crate) evicted: AtomicU64,
    pub(crate) checksum_failures: AtomicU64,
    pub(crate) from_disk: AtomicU64,
    pub(crate) from_far: AtomicU64,
    pub(crate) mapped: AtomicU64,
    pub(crate) to_disk: AtomicU64,
    pub(crate) write_failures: AtomicU64,
    pub(crate) to_far: AtomicU64,
    pub(crate) far_too_large: AtomicU64,
    pub(crate) far_searches: AtomicU64,
    pub(crate) far_unanswered: AtomicU64,
    pub(crate) far_cut: AtomicU64,
    pub(crate) far_not_asked: AtomicU64,
    pub(crate) not_admitted: AtomicU64,
    pub(crate) gone_unwritten: AtomicU64,
    pub(crate) disk_evicted: AtomicU64,
    pub(crate) disk_misses: AtomicU64,
    pub(crate) late: AtomicU64,
    pub(crate) not_worth: AtomicU64,
    pub(crate) survivors: AtomicU64,
    pub(crate) unfit: AtomicU64,
    pub(crate) device_failures: AtomicU64,
    pub(crate) prefetched: AtomicU64,
    pub(crate) prefetch_used: AtomicU64,
    pub(crate) prefetch_wasted: AtomicU64,
    pub(crate) probed: AtomicU64,
    pub(crate) retention_pinned: AtomicU64,
    pub(crate) retention_refused: AtomicU64,
    pub(crate) retention_unmet: AtomicU64,
}

impl StoreCounters {
    pub(crate) fn add(counter: &AtomicU64, count: usize) {
        counter.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// Blocks that left host memory.
    #[must_use]
    pub fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }

    /// Name, help text and value of each counter.
    #[must_use]
    pub fn snapshot(&self) -> Vec<(&'static str, &'static str, u64)> {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        vec![
            ("offloaded_blocks", "Blocks copied to host memory", read(&self.offloaded)),
            ("onboarded_blocks", "Blocks brought back into the pool", read(&self.onboarded)),
            (
                "throttled_blocks",
                "Offloads dropped because a queue or the tier was full",
                read(&self.throttled),
            ),
            ("evicted_blocks", "Blocks that left host memory", read(&self.evicted)),
            ("checksum_failures", "Blocks whose checksum did not match", read(&self.checksum_failures)),
            ("disk_read_blocks", "Blocks that came from the disk", read(&self.from_disk)),
            ("disk_written_blocks", "Blocks written to the disk", read(&self.to_disk)),
            (
                "disk_write_failures",
                "Writes to the disk that failed; written through, they are tried again while the blocks are in host memory",
                read(&self.write_failures),
            ),
            ("disk_evicted_blocks", "Blocks that left the disk", read(&self.disk_evicted)),
            ("disk_missed_blocks", "Reads of the disk that gave no block", read(&self.disk_misses)),
            (
                "disk_not_admitted_blocks",
                "Blocks not written: seen too rarely, or over a limit",
                read(&self.not_admitted),
            ),
            (
                "disk_gone_blocks",
                "Blocks that had left host memory before the disk could take them",
                read(&self.gone_unwritten),
            ),
            ("disk_survivor_blocks", "Blocks found on the disk at the start", read(&self.survivors)),
            ("far_read_blocks", "Blocks that came from other nodes or objects", read(&self.from_far)),
            (
                "far_mapped_blocks",
                "Of those, blocks of pools on this host that are read where they lie",
                read(&self.mapped),
            ),
            ("far_written_blocks", "Blocks sent to other nodes or objects", read(&self.to_far)),
            (
                "far_too_large_blocks",
                "Blocks that do not fit the slots of other nodes",
                read(&self.far_too_large),
            ),
            (
                "far_searches",
                "Searches of prompts' blocks on other nodes or in objects",
                read(&self.far_searches),
            ),
            (
                "far_unanswered_questions",
                "Questions of these searches to a tier that were not answered in time",
                read(&self.far_unanswered),
            ),
            (
                "far_cut_searches",
                "Searches that found blocks for which there was no room here",
                read(&self.far_cut),
            ),
            (
                "far_not_asked_blocks",
                "Blocks that other nodes were known to hold and that plans did not ask for, at each look at a prompt: computing takes no longer",
                read(&self.far_not_asked),
            ),
            (
                "device_failures",
                "Copies to or from a device's memory that failed",
                read(&self.device_failures),
            ),
            (
                "unfit_blocks",
                "Blocks not kept: they are too large, or no copier reaches them",
                read(&self.unfit),
            ),
            (
                "prefetched_blocks",
                "Blocks brought into host memory because their conversation was likely to go on",
                read(&self.prefetched),
            ),
            (
                "prefetch_used_blocks",
                "Prefetched blocks whose conversation went on",
                read(&self.prefetch_used),
            ),
            (
                "prefetch_wasted_blocks",
                "Prefetched blocks whose conversation did not go on in time",
                read(&self.prefetch_wasted),
            ),
            (
                "retention_pinned_blocks",
                "Blocks whose retention has begun; again when a damaged copy was replaced",
                read(&self.retention_pinned),
            ),
            (
                "retention_refused_blocks",
                "Blocks that were not retained: as many are as may be, or the block before it is not, or too many requests wait",
                read(&self.retention_refused),
            ),
            (
                "retention_unmet_blocks",
                "Blocks that were to be retained and did not come in time",
                read(&self.retention_unmet),
            ),
            ("probed_blocks", "Blocks read to learn a tier's speed", read(&self.probed)),
            ("late_blocks", "Blocks given up because they came too late", read(&self.late)),
            (
                "recomputed_blocks",
                "Blocks that a tier had and that were faster to recompute",
                read(&self.not_worth),
            ),
        ]
    }
}
