//! Counters of the disk log.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of a log. Each only grows. Written by the log's thread, readable by any thread.
#[derive(Debug, Default)]
pub struct DiskCounters {
    pub(crate) writes: AtomicU64,
    pub(crate) written_bytes: AtomicU64,
    pub(crate) write_failures: AtomicU64,
    pub(crate) reads: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) misses_damaged: AtomicU64,
    pub(crate) misses_stale: AtomicU64,
    pub(crate) misses_media: AtomicU64,
    pub(crate) misses_device: AtomicU64,
    pub(crate) table_writes: AtomicU64,
    pub(crate) table_write_failures: AtomicU64,
    pub(crate) tombstones: AtomicU64,
    pub(crate) recovered: AtomicU64,
    pub(crate) dropped: AtomicU64,
    pub(crate) timeouts: AtomicU64,
    pub(crate) outages: AtomicU64,
}

impl DiskCounters {
    /// Name, help text and value of each counter.
    #[must_use]
    pub fn snapshot(&self) -> [(&'static str, &'static str, u64); 16] {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [
            ("writes", "Blocks written", read(&self.writes)),
            ("written_bytes", "Payload bytes written", read(&self.written_bytes)),
            ("write_failures", "Blocks that could not be written", read(&self.write_failures)),
            ("reads", "Blocks read; their readers verify them", read(&self.reads)),
            ("read_bytes", "Payload bytes read", read(&self.read_bytes)),
            (
                "misses_damaged",
                "Reads whose bytes were not what had been written",
                read(&self.misses_damaged),
            ),
            ("misses_stale", "Reads of a block that the slot no longer held", read(&self.misses_stale)),
            ("misses_media", "Reads that the medium could not give back", read(&self.misses_media)),
            ("misses_device", "Reads that failed with the device", read(&self.misses_device)),
            ("table_writes", "Table pages written", read(&self.table_writes)),
            ("table_write_failures", "Table pages given up after retries", read(&self.table_write_failures)),
            ("tombstones", "Records of blocks that were forgotten", read(&self.tombstones)),
            ("recovered_blocks", "Blocks found when the store was opened", read(&self.recovered)),
            ("dropped_records", "Records that were damaged or duplicate at opening", read(&self.dropped)),
            ("timeouts", "Requests without an answer in time", read(&self.timeouts)),
            ("outages", "Times the device became unavailable", read(&self.outages)),
        ]
    }

    pub(crate) fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }
}
