//! Discarding forgotten slots (TRIM).
//!
//! Only runs of neighbouring slots of at least `trim_bytes_min`, since short discards cost a device more than
//! they gain, and only slots whose tombstone is on the disk, since a record must not outlive its payload
//! without need. Each slot is discarded once. The engine's discard blocks, so it is rate limited and one `poll`
//! makes at most one.

use std::time::{Duration, Instant};

use kvstore_block::TokenBucket;
use kvstore_io::{IoErrorKind, Operation as Direction};

use crate::admission;
use crate::log::SlotUse;
use crate::{DiskConfig, DiskCounters, DiskLog};

/// Maximum number of slots that one scan looks at.
const SLOTS_PER_SCAN: u32 = 16_384;
const SCAN_INTERVAL: Duration = Duration::from_millis(100);

/// State of the search for slots to discard.
pub(crate) struct Trim {
    bytes_min: u64,
    slot_bytes: u64,
    bucket: Option<TokenBucket>,
    next_scan: Instant,
    cursor: u32,
    /// Number of free slots that were not discarded.
    untold: u64,
    is_supported: bool,
}

impl Trim {
    pub(crate) fn new(config: &DiskConfig, now: Instant) -> Self {
        let rate = config.trim_bytes_per_second;
        Self {
            bytes_min: config.trim_bytes_min,
            slot_bytes: config.slot_bytes.into(),
            bucket: admission::bucket(rate, rate, now),
            next_scan: now,
            cursor: 0,
            untold: 0,
            is_supported: true,
        }
    }

    /// Counts slots that became free.
    pub(crate) fn freed(&mut self, slots: u64) {
        self.untold += slots;
    }

    /// Counts a free slot that is used again without having been discarded.
    pub(crate) fn reused(&mut self) {
        self.untold = self.untold.saturating_sub(1);
    }

    fn has_enough(&self) -> bool {
        self.bytes_min > 0 && self.is_supported && self.untold * self.slot_bytes >= self.bytes_min
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.has_enough().then_some(self.next_scan)
    }
}

impl DiskLog {
    /// Searches for one run of free slots and discards it.
    pub(crate) fn trim_some(&mut self) {
        if !self.trim.has_enough() || self.now.instant < self.trim.next_scan || !self.can_write() {
            return;
        }
        self.trim.next_scan = self.now.instant + SCAN_INTERVAL;
        let slots_min = self.trim.bytes_min.div_ceil(self.trim.slot_bytes).max(1);
        let Some((first, count)) = self.find_run(u32::try_from(slots_min).unwrap_or(u32::MAX)) else {
            return;
        };
        let bytes = u64::from(count) * self.trim.slot_bytes;
        if !admission::passes(&mut self.trim.bucket, self.now.instant, bytes) {
            self.trim.cursor = first;
            return;
        }
        let (segment, local) = self.tables.locate(first);
        let layout = &self.tables.segments[segment].layout;
        match self.engine.discard(layout.area.file, layout.slot_offset(local), bytes) {
            Ok(true) => {
                self.slots[first as usize..(first + count) as usize].fill(SlotUse::Blank);
                self.trim.untold = self.trim.untold.saturating_sub(count.into());
                self.trim.next_scan = self.now.instant;
                DiskCounters::add(&self.counters.trims, 1);
                DiskCounters::add(&self.counters.trimmed_bytes, bytes);
            }
            Ok(false) => self.trim.is_supported = false,
            Err(error) if error.kind == IoErrorKind::Unsupported => self.trim.is_supported = false,
            Err(error) => self.note_failure(error.kind, Direction::Write),
        }
    }

    /// Returns the next run of at least `slots_min` slots in one segment, within the budget of one scan.
    fn find_run(&mut self, slots_min: u32) -> Option<(u32, u32)> {
        let slots = self.slot_count();
        let mut run: Option<(u32, u32)> = None;
        let from = if self.trim.cursor < slots { self.trim.cursor } else { 0 };
        let end = slots.min(from.saturating_add(SLOTS_PER_SCAN.max(slots_min.saturating_mul(2))));
        for slot in from..end {
            let starts_segment = self.tables.locate(slot).1 == 0;
            if starts_segment && run.is_some_and(|(_, count)| count >= slots_min) {
                break;
            }
            if self.slots[slot as usize] == SlotUse::Free && self.tables.is_clean(slot) {
                run = match run {
                    Some((first, count)) if !starts_segment => Some((first, count + 1)),
                    _ => Some((slot, 1)),
                };
            } else if run.is_some_and(|(_, count)| count >= slots_min) {
                break;
            } else {
                run = None;
            }
        }
        let found = run.filter(|&(_, count)| count >= slots_min);
        self.trim.cursor = match (found, run) {
            (Some((first, count)), _) => first + count,
            // The scan ended inside this run; the next scan starts at its beginning.
            (None, Some((first, _))) if end < slots && first > from => first,
            (None, _) => end,
        };
        found
    }
}
