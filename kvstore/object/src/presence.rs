//! Cache of the state of keys: present (with the index), absent, or avoided; each for a limited time, all of it
//! in limited memory. A wrong entry costs a request or a miss, never a wrong block: payloads are verified
//! against the index, and the index against the requested chain.

use std::sync::Arc;
use std::time::Duration;

use kvstore_block::BlockIdentity;
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use tokio::time::Instant;

use crate::format::RunIndex;

/// Approximate memory of an entry besides its index, in bytes.
const ENTRY_BYTES: u64 = 160;

/// Cached state of one key.
#[derive(Debug, Clone)]
pub(crate) enum Presence {
    Present(StoredRun),
    Absent,
    /// Damaged: not requested; a put deletes the object before it stores another, or is refused.
    Avoided,
}

/// Index and ETag of a stored run.
#[derive(Debug, Clone)]
pub(crate) struct StoredRun {
    pub(crate) index: Arc<RunIndex>,
    pub(crate) e_tag: Option<String>,
}

#[derive(Debug, Clone)]
struct Entry {
    presence: Presence,
    until: Instant,
}

#[derive(Debug, Clone)]
struct ByMemory;

impl Weighter<BlockIdentity, Entry> for ByMemory {
    fn weight(&self, _: &BlockIdentity, entry: &Entry) -> u64 {
        match &entry.presence {
            Presence::Present(run) => ENTRY_BYTES + run.index.memory_bytes() as u64,
            _ => ENTRY_BYTES,
        }
    }
}

#[derive(Debug)]
pub(crate) struct PresenceCache {
    entries: Cache<BlockIdentity, Entry, ByMemory>,
    present_ttl: Duration,
    absent_ttl: Duration,
    avoid_ttl: Duration,
}

impl PresenceCache {
    pub(crate) fn new(bytes: u64, present_ttl: Duration, absent_ttl: Duration, avoid_ttl: Duration) -> Self {
        let entries = (bytes / (ENTRY_BYTES * 8)).max(16) as usize;
        Self { entries: Cache::with_weighter(entries, bytes, ByMemory), present_ttl, absent_ttl, avoid_ttl }
    }

    pub(crate) fn get(&self, last: &BlockIdentity, now: Instant) -> Option<Presence> {
        self.entries.get(last).filter(|entry| now < entry.until).map(|entry| entry.presence)
    }

    pub(crate) fn set(&self, last: BlockIdentity, presence: Presence, now: Instant) {
        let ttl = match presence {
            Presence::Present(_) => self.present_ttl,
            Presence::Absent => self.absent_ttl,
            Presence::Avoided => self.avoid_ttl,
        };
        self.entries.insert(last, Entry { presence, until: now + ttl });
    }

    pub(crate) fn forget(&self, last: &BlockIdentity) {
        self.entries.remove(last);
    }

    #[cfg(test)]
    fn memory_bytes(&self) -> u64 {
        self.entries.weight()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_expire_and_memory_is_bounded() {
        let second = Duration::from_secs(1);
        let cache = PresenceCache::new(64 << 10, second * 9, second, second * 5);
        let now = Instant::now();
        let identity = |number: u64| {
            let mut identity = [0; 16];
            identity[..8].copy_from_slice(&number.to_le_bytes());
            BlockIdentity(identity)
        };
        cache.set(identity(0), Presence::Absent, now);
        assert!(matches!(cache.get(&identity(0), now), Some(Presence::Absent)));
        assert!(cache.get(&identity(0), now + second).is_none());
        cache.set(identity(0), Presence::Avoided, now);
        assert!(cache.get(&identity(0), now + second * 4).is_some());
        for number in 0..100_000 {
            cache.set(identity(number), Presence::Absent, now);
        }
        assert!(cache.memory_bytes() <= 64 << 10, "{} bytes", cache.memory_bytes());
    }
}
