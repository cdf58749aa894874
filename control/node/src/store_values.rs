//! Named values of any length in the store's fixed blocks, for the Redis protocol.
//!
//! A value is stored in as many blocks as its length takes. The block identities are chained hashes of (key,
//! number of the `SET`, position), so a value that replaces another has other blocks, and an old value that
//! is still in transfer can never be taken for the new one. The directory of keys and their latest `SET` is
//! in memory, for at most as many keys as there are blocks. Each value's first block carries its key, so that
//! values on disk are found again after a restart. Keys of more than [`KEY_KEPT_MAX`] bytes and later changes
//! by `EXPIRE` do not survive a restart.
//!
//! A value of which a block has been evicted is absent. A `SET` that has begun runs to its end even if its
//! client disconnects, so that no stray blocks remain.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use kvstore_block::{BlockIdentity, IdentityChain};
use kvstore_resp::{
    Condition, Entry, Expiry, KeyPage, SetOptions, SetOutcome, Usage, Value, ValueError, Values,
};
use kvstore_store::{Description, HostBlock, META_BYTES_MAX, RecoveredBlock, Store, TenantId};
use tokio::sync::{Semaphore, oneshot};

/// Longest time that a `GET` waits for the tiers.
const READ_MAX: Duration = Duration::from_secs(10);
/// Most blocks in transfer into the store at a time: fewer than its queue holds, so that this service cannot
/// fill the queue.
const PUTS_MAX: usize = 512;
/// Bytes before the key: number of the `SET`, length of the value, and expiry time, each as little-endian
/// u64.
const META_FIXED: usize = 24;
/// Longest key that survives a restart, in bytes.
const KEY_KEPT_MAX: usize = META_BYTES_MAX - META_FIXED;
const KEY_CONTEXT: &str = "kvasir 2026-11 named values v1";
/// Divisor of host memory that bounds the values being read at a time: a value is held there as a whole while
/// it is read.
const READS_SHARE: u64 = 2;
/// Least memory for keys, in bytes.
const KEY_BYTES_MIN: u64 = 16 << 20;
/// Memory that a key takes in addition to its bytes, for the bound on all keys.
const KEY_OVERHEAD_BYTES: u64 = 256;

#[derive(Debug, Clone)]
struct ValueEntry {
    key: Bytes,
    number: u64,
    bytes: u64,
    /// Expiry time in milliseconds since 1970; `None`: the value does not expire.
    ends_at: Option<u64>,
}

#[derive(Debug, Default)]
struct Directory {
    by_key: HashMap<Bytes, usize>,
    /// Slots with stable indices, so that a cursor over them stays valid. Indices of free slots are on
    /// `free`.
    places: Vec<Option<ValueEntry>>,
    free: Vec<usize>,
    /// Next index for the eviction of keys.
    hand: usize,
    bytes: u64,
    /// Memory of all keys, overhead included.
    key_bytes: u64,
    keys_max: usize,
    key_bytes_max: u64,
}

impl Directory {
    fn get(&self, key: &[u8]) -> Option<&ValueEntry> {
        self.by_key.get(key).and_then(|&place| self.places[place].as_ref())
    }

    /// Inserts a value and returns the values that it replaced or, if there are too many keys, evicted.
    fn insert(&mut self, entry: ValueEntry) -> Vec<ValueEntry> {
        let mut gone: Vec<ValueEntry> = self.remove(&entry.key.clone()).into_iter().collect();
        self.key_bytes += entry.key.len() as u64 + KEY_OVERHEAD_BYTES;
        let is_full = |of: &Self| of.by_key.len() >= of.keys_max || of.key_bytes > of.key_bytes_max;
        while is_full(self) && !self.by_key.is_empty() {
            let place = self.hand % self.places.len();
            self.hand = place + 1;
            let key = self.places[place].as_ref().map(|entry| entry.key.clone());
            gone.extend(key.and_then(|key| self.remove(&key)));
        }
        self.bytes += entry.bytes;
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push(None);
            self.places.len() - 1
        });
        self.by_key.insert(entry.key.clone(), place);
        self.places[place] = Some(entry);
        gone
    }

    fn remove(&mut self, key: &[u8]) -> Option<ValueEntry> {
        let place = self.by_key.remove(key)?;
        self.free.push(place);
        let entry = self.places[place].take()?;
        self.bytes -= entry.bytes;
        self.key_bytes -= entry.key.len() as u64 + KEY_OVERHEAD_BYTES;
        Some(entry)
    }
}

/// Values of the Redis service, stored in the blocks of a [`Store`].
pub(crate) struct StoredValues(Arc<Inner>);

struct Inner {
    store: Arc<Store>,
    slot_bytes: usize,
    bytes_max: u64,
    value_bytes_max: u64,
    directory: Mutex<Directory>,
    next_number: AtomicU64,
    /// Permits for blocks in transfer into the store.
    puts: Arc<Semaphore>,
    /// Permits for blocks of host memory that reads hold.
    reads: Semaphore,
}

impl StoredValues {
    /// Creates the values of a store with slots of `slot_bytes`, including the survivors of the previous run.
    pub(crate) fn new(store: Arc<Store>, slot_bytes: usize, survivors: Vec<RecoveredBlock>) -> Self {
        let [host_slots, disk_slots] = store.slots();
        let slots = host_slots + disk_slots;
        let mut kept: Vec<ValueEntry> = survivors.iter().filter_map(entry_of).collect();
        // The last `SET` of a key is kept, if all its blocks are present.
        kept.sort_unstable_by_key(|entry| entry.number);
        let newest = kept.last().map_or(0, |entry| entry.number);
        let reads = (host_slots / READS_SHARE).max(1);
        let inner = Inner {
            slot_bytes,
            bytes_max: slots * slot_bytes as u64,
            value_bytes_max: reads * slot_bytes as u64,
            directory: Mutex::new(Directory {
                keys_max: slots.max(1) as usize,
                key_bytes_max: (host_slots * slot_bytes as u64).max(KEY_BYTES_MIN),
                ..Directory::default()
            }),
            // Larger than the numbers of earlier processes, which are earlier times, even if the clock was
            // set back.
            next_number: AtomicU64::new((now_ms() << 20).max(newest + 1)),
            puts: Arc::new(Semaphore::new(PUTS_MAX)),
            reads: Semaphore::new(reads.min(Semaphore::MAX_PERMITS as u64) as usize),
            store,
        };
        for entry in kept {
            let chain = inner.chain(&entry.key, entry.number, entry.bytes);
            let is_alive = entry.ends_at.is_none_or(|ends_at| ends_at > now_ms());
            let gone = match is_alive && inner.store.look_up(&chain) == chain.len() {
                true => inner.directory().insert(entry),
                false => vec![entry],
            };
            gone.iter().for_each(|entry| inner.forget(entry));
        }
        Self(Arc::new(inner))
    }
}

impl Inner {
    /// Locks the directory. Held for map operations only.
    fn directory(&self) -> MutexGuard<'_, Directory> {
        self.directory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the key's value unless it has expired.
    fn find(&self, key: &[u8]) -> Option<ValueEntry> {
        let entry = self.directory().get(key).cloned()?;
        if entry.ends_at.is_some_and(|ends_at| ends_at <= now_ms()) {
            self.drop_value(&entry);
            return None;
        }
        Some(entry)
    }

    /// Returns the key's value if it has not expired and all its blocks are present.
    fn find_whole(&self, key: &[u8]) -> Option<ValueEntry> {
        self.find(key).filter(|entry| self.is_whole(entry))
    }

    fn is_whole(&self, entry: &ValueEntry) -> bool {
        let chain = self.chain(&entry.key, entry.number, entry.bytes);
        entry.bytes == 0 || self.store.look_up(&chain) == chain.len()
    }

    fn chain(&self, key: &[u8], number: u64, bytes: u64) -> Vec<BlockIdentity> {
        let hash = blake3::derive_key(KEY_CONTEXT, key);
        let words: Vec<u32> = (hash.chunks_exact(4))
            .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect();
        let mut chain = IdentityChain::new(number, &[]);
        let pieces = bytes.div_ceil(self.slot_bytes as u64).max(1);
        (0..pieces).map(|_| chain.next(&words)).collect()
    }

    fn forget(&self, entry: &ValueEntry) {
        self.store.forget(self.chain(&entry.key, entry.number, entry.bytes));
    }

    /// Removes a value; returns false if the key has another value by now.
    fn drop_value(&self, entry: &ValueEntry) -> bool {
        let mut directory = self.directory();
        let is_same = directory.get(&entry.key).is_some_and(|now| now.number == entry.number);
        if is_same {
            directory.remove(&entry.key);
        }
        drop(directory);
        self.forget(entry);
        is_same
    }

    /// Assembles a value from its blocks. A damaged value is removed.
    fn value_of(&self, entry: &ValueEntry, blocks: &[HostBlock]) -> Option<Value> {
        let pieces = blocks.iter().map(|block| block.to_bytes().map(Bytes::from)).collect::<Option<Value>>();
        let value = pieces.filter(|value| value.len() as u64 == entry.bytes);
        if value.is_none() {
            tracing::warn!("a damaged value is removed");
            self.drop_value(entry);
        }
        value
    }

    /// Writes the blocks of a value and returns whether all are stored. Returns only when no block is in
    /// transfer.
    async fn put(&self, entry: &ValueEntry, chain: &[BlockIdentity], value: &Value) -> bool {
        let mut waiting = Vec::with_capacity(chain.len());
        let mut all = true;
        for (position, identity) in chain.iter().enumerate() {
            let start = position * self.slot_bytes;
            let piece = value.slice(start..start + self.slot_bytes);
            let meta = if position == 0 { meta_of(entry) } else { Vec::new() };
            let parent = position.checked_sub(1).map(|parent| chain[parent]);
            let description =
                Description { parent, position: position as u32, meta: meta.into(), tenant: TenantId(0) };
            let Ok(permit) = Arc::clone(&self.puts).acquire_owned().await else { return false };
            let (done, is_stored) = oneshot::channel();
            let done = move |stored| {
                // The permit is released with the block, even if the caller no longer waits.
                drop(permit);
                let _gone = done.send(stored);
            };
            if self.store.put(*identity, description, piece.into_pieces(), done).is_err() {
                all = false;
                break;
            }
            waiting.push(is_stored);
        }
        for is_stored in waiting {
            all &= is_stored.await.unwrap_or(false);
        }
        all
    }

    async fn set(&self, key: Bytes, value: Value, options: SetOptions) -> SetOutcome {
        let is_met = |before: Option<&ValueEntry>| match options.condition {
            Condition::Always => true,
            Condition::IfAbsent => before.is_none(),
            Condition::IfPresent => before.is_some(),
        };
        let before = self.find_whole(&key);
        if !is_met(before.as_ref()) {
            return SetOutcome::ConditionUnmet;
        }
        let bytes = value.len() as u64;
        if bytes > self.value_bytes_max {
            return SetOutcome::TooLarge { bytes_max: self.value_bytes_max };
        }
        let ends_at = match options.expiry {
            Expiry::Never => None,
            Expiry::After(after) => Some(now_ms().saturating_add(after.as_millis() as u64)),
            Expiry::Keep => before.as_ref().and_then(|entry| entry.ends_at),
        };
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let entry = ValueEntry { key, number, bytes, ends_at };
        let chain = self.chain(&entry.key, number, bytes);
        if bytes > 0 && !self.put(&entry, &chain, &value).await {
            self.store.forget(chain);
            return SetOutcome::Throttled;
        }
        let mut directory = self.directory();
        let other = directory.get(&entry.key);
        // Other clients may have set the key meanwhile: the condition is checked now, and of two `SET`s the
        // one that began later wins.
        let was_there = before.as_ref().map(|entry| entry.number);
        let is_changed = other.map(|other| other.number) != was_there;
        let is_unmet = is_changed && !is_met(other);
        let is_last = other.is_none_or(|other| other.number < number);
        let gone = if is_last && !is_unmet { directory.insert(entry) } else { vec![entry] };
        drop(directory);
        gone.iter().for_each(|entry| self.forget(entry));
        if is_unmet { SetOutcome::ConditionUnmet } else { SetOutcome::Stored }
    }
}

impl Values for StoredValues {
    async fn get(&self, key: &[u8]) -> Result<Option<Value>, ValueError> {
        let inner = &self.0;
        let Some(entry) = inner.find(key) else { return Ok(None) };
        if entry.bytes == 0 {
            return Ok(Some(Value::default()));
        }
        let chain = inner.chain(key, entry.number, entry.bytes);
        if let Some(blocks) = inner.store.hold_now(&chain) {
            return Ok(inner.value_of(&entry, &blocks));
        }
        let wanted = chain.len();
        let failed = |reason: &str| ValueError::Failed { operation: "GET", reason: reason.to_owned() };
        let room =
            inner.reads.acquire_many(wanted as u32).await.map_err(|_| failed("the store has stopped"))?;
        let (reply, blocks) = oneshot::channel();
        let sent = inner.store.hold(chain, Instant::now() + READ_MAX, move |blocks| {
            // The caller may have gone; dropping the answer releases the blocks.
            let _gone = reply.send(blocks);
        });
        if sent.is_err() {
            return Err(failed("too many requests are inside"));
        }
        let blocks = blocks.await.unwrap_or_default();
        if blocks.len() < wanted {
            // A block was evicted or late; the blocks that are present stay until they are evicted.
            return Ok(None);
        }
        let value = inner.value_of(&entry, &blocks);
        drop((blocks, room));
        Ok(value)
    }

    async fn set(&self, key: &[u8], value: Value, options: SetOptions) -> Result<SetOutcome, ValueError> {
        let (inner, key) = (Arc::clone(&self.0), Bytes::copy_from_slice(key));
        // Runs in its own task, so that it completes even if the client disconnects.
        let set = tokio::spawn(async move { inner.set(key, value, options).await });
        set.await.map_err(|error| ValueError::Failed { operation: "SET", reason: error.to_string() })
    }

    fn size_hint(&self, key: &[u8]) -> Option<u64> {
        Some(self.0.find(key).map_or(0, |entry| entry.bytes))
    }

    async fn look(&self, key: &[u8]) -> Result<Option<Entry>, ValueError> {
        let Some(entry) = self.0.find_whole(key) else { return Ok(None) };
        let left = |ends_at: u64| Duration::from_millis(ends_at.saturating_sub(now_ms()));
        Ok(Some(Entry { bytes: entry.bytes, expires_in: entry.ends_at.map(left) }))
    }

    async fn delete(&self, key: &[u8]) -> Result<bool, ValueError> {
        let Some(entry) = self.0.find(key) else { return Ok(false) };
        let was_whole = self.0.is_whole(&entry);
        Ok(self.0.drop_value(&entry) && was_whole)
    }

    async fn expire(&self, key: &[u8], after: Option<Duration>) -> Result<bool, ValueError> {
        let Some(found) = self.0.find_whole(key) else { return Ok(false) };
        let ends_at = after.map(|after| now_ms().saturating_add(after.as_millis() as u64));
        let mut directory = self.0.directory();
        let place = directory.by_key.get(key).copied();
        let entry = place.and_then(|place| directory.places[place].as_mut());
        let same = entry.filter(|entry| entry.number == found.number);
        Ok(same.map(|entry| entry.ends_at = ends_at).is_some())
    }

    async fn keys(&self, cursor: u64, limit: usize) -> Result<KeyPage, ValueError> {
        let directory = self.0.directory();
        let (start, now) = (cursor as usize, now_ms());
        let mut page = KeyPage::default();
        for (place, entry) in directory.places.iter().enumerate().skip(start) {
            if page.keys.len() >= limit {
                page.next = place as u64;
                break;
            }
            let alive = entry.as_ref().filter(|entry| entry.ends_at.is_none_or(|ends_at| ends_at > now));
            page.keys.extend(alive.map(|entry| entry.key.clone()));
        }
        Ok(page)
    }

    async fn clear(&self) -> Result<(), ValueError> {
        let mut directory = self.0.directory();
        let (keys_max, key_bytes_max) = (directory.keys_max, directory.key_bytes_max);
        let empty = Directory { keys_max, key_bytes_max, ..Directory::default() };
        let old = std::mem::replace(&mut *directory, empty);
        drop(directory);
        old.places.iter().flatten().for_each(|entry| self.0.forget(entry));
        Ok(())
    }

    fn usage(&self) -> Usage {
        let directory = self.0.directory();
        Usage { keys: directory.by_key.len() as u64, bytes: directory.bytes, bytes_max: self.0.bytes_max }
    }
}

fn meta_of(entry: &ValueEntry) -> Vec<u8> {
    if entry.key.len() > KEY_KEPT_MAX {
        return Vec::new();
    }
    let mut meta = Vec::with_capacity(META_FIXED + entry.key.len());
    for number in [entry.number, entry.bytes, entry.ends_at.unwrap_or(0)] {
        meta.extend_from_slice(&number.to_le_bytes());
    }
    meta.extend_from_slice(&entry.key);
    meta
}

fn entry_of(survivor: &RecoveredBlock) -> Option<ValueEntry> {
    let mut rest: &[u8] = &survivor.description.meta;
    let mut number = || {
        let (number, after) = rest.split_first_chunk::<8>()?;
        rest = after;
        Some(u64::from_le_bytes(*number))
    };
    let (serial, bytes, ends_at) = (number()?, number()?, number()?);
    let key = Bytes::copy_from_slice(rest);
    Some(ValueEntry { key, number: serial, bytes, ends_at: (ends_at > 0).then_some(ends_at) })
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
