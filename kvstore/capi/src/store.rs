//! [`StoreBackend`]: the product's store, host memory over a disk, as a [`Backend`].
//!
//! A call waits on the calling thread for the store's thread, which copies and moves blocks. The blocks of a
//! chain are evicted from its end; a block without a chain is evicted by itself. `put` and `get` copy a block
//! once and compute its checksum in the same pass. A `put` that finds no free slot in memory copies the block
//! twice, because the store may still hold it after the call has given up.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use kvstore_block::BlockIdentity;
use kvstore_store::{Description, HostBlock, LoadTimes, Store, TenantId};

use crate::backend::{
    Backend, BackendError, ChainPosition, GetOutcome, Identity, LoadReport, Loaded, NewBlock, PutOutcome,
    Statistics,
};
use crate::buffers::{Destination, Source};
use crate::format::{META_BYTES_MAX, Unpacked, head, is_block, pack, unpack};
use crate::key_locks::{KeyLock, KeyLocks};

/// Time to wait for the disk if the caller sets no deadline. Blocks not delivered by then are misses.
pub(crate) const READ_MAX: Duration = Duration::from_secs(10);
/// Pause before retrying a full queue or full memory.
pub(crate) const QUEUE_PAUSE: Duration = Duration::from_millis(1);
/// Time that a removal waits for room in the queue.
const DELETE_MAX: Duration = Duration::from_secs(10);

/// The product's store as a [`Backend`].
pub(crate) struct StoreBackend {
    store: Store,
    payload_bytes_max: usize,
    slot_bytes: u64,
    key_locks: KeyLocks,
    counters: Counters,
}

/// Counters of events that the store does not count itself.
#[derive(Debug, Default)]
struct Counters {
    hits: AtomicU64,
    misses: AtomicU64,
    stored: AtomicU64,
    throttled: AtomicU64,
    damaged: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl ChainPosition {
    /// The description of a block at this place.
    pub(crate) fn description(self) -> Description {
        let Self { parent, position, tenant } = self;
        let (parent, tenant) = (parent.map(BlockIdentity), TenantId(tenant));
        Description { parent, position, meta: [].into(), tenant }
    }
}

pub(crate) fn failed(operation: &'static str, reason: &str) -> BackendError {
    BackendError::Failed { operation, reason: reason.to_owned() }
}

impl StoreBackend {
    /// Wraps a store with slots of `slot_bytes`, which accepts payloads of up to `payload_bytes_max`.
    pub(crate) fn new(store: Store, payload_bytes_max: usize, slot_bytes: u64) -> Self {
        Self {
            store,
            payload_bytes_max,
            slot_bytes,
            key_locks: KeyLocks::default(),
            counters: Counters::default(),
        }
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    pub(crate) fn is_there(&self, identity: &Identity) -> bool {
        self.store.look_up(&[BlockIdentity(*identity)]) > 0
    }

    /// Whether this node keeps the block; if so, this counts as a use of it. A block in a pool's memory does
    /// not count, since the pool may evict it at any time.
    pub(crate) fn touch_if_kept(&self, identity: &Identity) -> bool {
        let is_there = self.store.is_kept(&BlockIdentity(*identity));
        if is_there {
            self.store.touch(&[BlockIdentity(*identity)]);
        }
        is_there
    }

    /// Counts `stored` of `wanted` blocks that a device transfer has saved.
    pub(crate) fn count_saved(&self, wanted: usize, stored: usize) {
        self.counters.stored.fetch_add(stored as u64, Ordering::Relaxed);
        self.counters.throttled.fetch_add((wanted - stored) as u64, Ordering::Relaxed);
    }

    /// Counts blocks that a device transfer has read.
    pub(crate) fn count_hits(&self, count: usize) {
        self.counters.hits.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// Counts a block that a device transfer did not find.
    pub(crate) fn count_miss(&self) {
        count(&self.counters.misses);
    }

    /// Copies a held block to the destinations and releases its memory. A damaged block is discarded.
    fn unpack(
        &self,
        identity: &Identity,
        held: Vec<HostBlock>,
        meta: &mut Destination,
        payload: &mut Destination,
    ) -> Result<GetOutcome, BackendError> {
        let Some(block) = held.first() else { return Ok(self.missed()) };
        let mut read = block.read();
        let unpacked = unpack(&mut read, block.len(), meta, payload);
        let is_intact = read.is_intact();
        match unpacked {
            Unpacked::Whole if is_intact => {
                count(&self.counters.hits);
                Ok(GetOutcome::Read)
            }
            Unpacked::TooSmall { meta_bytes, payload_bytes } if is_intact => {
                Err(BackendError::DestinationTooSmall { meta_bytes, payload_bytes })
            }
            _ if block.is_gone() => {
                drop(held);
                self.store.forget_gone(BlockIdentity(*identity));
                Ok(self.missed())
            }
            _ => {
                count(&self.counters.damaged);
                drop(held);
                let _unless_stopped = self.discard_block(identity);
                Ok(self.missed())
            }
        }
    }

    /// Waits until the store's thread has processed all messages sent before this call.
    fn wait_for_turn(&self, operation: &'static str) -> Result<(), BackendError> {
        let deadline = Instant::now() + DELETE_MAX;
        // The store's thread takes messages in order, and holds an empty chain at once.
        while self.hold(operation, Vec::new(), deadline)?.is_none() {
            if Instant::now() >= deadline {
                return Err(failed(operation, "too many requests are inside"));
            }
            std::thread::sleep(QUEUE_PAUSE);
        }
        Ok(())
    }

    fn missed(&self) -> GetOutcome {
        count(&self.counters.misses);
        GetOutcome::Miss
    }

    fn throttled(&self) -> PutOutcome {
        count(&self.counters.throttled);
        PutOutcome::Throttled
    }

    /// Counts a block that a device found damaged, and discards it.
    pub(crate) fn discard_damaged(&self, identity: &Identity) -> Result<(), BackendError> {
        count(&self.counters.damaged);
        self.discard_block(identity)
    }

    /// Discards a block that a reader found damaged, so that a later `put` by the reader's caller does not find
    /// it present. A block that was put again meanwhile is intact and stays. A block damaged in memory may be
    /// intact on the disk, where the next reader finds it. Intact bytes that are not a block of this library
    /// are removed from all tiers.
    pub(crate) fn discard_block(&self, identity: &Identity) -> Result<(), BackendError> {
        let _turn = self.key_locks.take(identity);
        let held = self.hold("get", vec![BlockIdentity(*identity)], Instant::now() + READ_MAX)?;
        // When too many requests are in flight, the block stays and the next reader finds the damage.
        let condition = held.as_ref().and_then(|held| held.first()).map(Condition::of);
        drop(held);
        match condition {
            None | Some(Condition::Whole) => return Ok(()),
            Some(Condition::Damaged) => self.store.forget_on_host(vec![BlockIdentity(*identity)]),
            Some(Condition::Foreign) => self.store.forget(vec![BlockIdentity(*identity)]),
        }
        self.wait_for_turn("get")
    }
}

/// Condition of a block in host memory.
enum Condition {
    /// The bytes are as they were stored, and are a block of this library.
    Whole,
    /// The bytes differ from what was stored.
    Damaged,
    /// The bytes are as they were stored, but are not a block of this library.
    Foreign,
}

impl Condition {
    fn of(block: &HostBlock) -> Self {
        let mut read = block.read();
        let begins_well = is_block(&mut read, block.len());
        match (read.is_intact(), begins_well) {
            (false, _) => Self::Damaged,
            (true, true) => Self::Whole,
            (true, false) => Self::Foreign,
        }
    }
}

/// State of a put after its first half.
enum BegunPut {
    Over(PutOutcome),
    /// The store's thread reports whether memory has the block.
    InFlight(Receiver<bool>),
    /// No slot of memory is free; the store's thread has to make room.
    NoSlot,
}

impl StoreBackend {
    fn check_size(&self, meta: &Source, payload: &Source) -> Result<(), BackendError> {
        for (what, source, bytes_max) in
            [("a meta", meta, META_BYTES_MAX), ("a payload", payload, self.payload_bytes_max)]
        {
            if source.len() > bytes_max {
                return Err(BackendError::TooLarge { what, bytes: source.len(), bytes_max });
            }
        }
        Ok(())
    }

    /// Copies a block into memory and hands it to the store. Without a free slot, `needs_slot` selects between
    /// [`BegunPut::NoSlot`] and a second copy. The caller holds the block's [`KeyLock`].
    fn begin_put(
        &self,
        identity: &Identity,
        place: ChainPosition,
        (meta, payload): (&Source, &Source),
        needs_slot: bool,
    ) -> Result<BegunPut, BackendError> {
        let throttled = || Ok(BegunPut::Over(self.throttled()));
        if self.touch_if_kept(identity) {
            return Ok(BegunPut::Over(PutOutcome::Present));
        }
        let (done, is_stored) = sync_channel(1);
        let done = move |stored| {
            // The caller may have given up.
            let _gone = done.send(stored);
        };
        let (block, description) = (BlockIdentity(*identity), place.description());
        let taken = match self.store.reserve(description.tenant) {
            Some(mut slot) => {
                // A failed allocation counts as lack of room.
                let Ok(head) = head(meta, 0) else { return throttled() };
                if !slot.fill(std::iter::once(head.as_slice()).chain(payload.pieces())) {
                    return throttled();
                }
                self.store.put_slot(block, description, slot, done)
            }
            None if needs_slot => return Ok(BegunPut::NoSlot),
            None => {
                let Ok(bytes) = pack(meta, payload) else { return throttled() };
                self.store.put(block, description, vec![bytes.into()], done)
            }
        };
        match taken {
            Ok(()) => Ok(BegunPut::InFlight(is_stored)),
            Err(_) if self.store.is_alive() => throttled(),
            Err(_) => Err(failed("put", "the store has stopped")),
        }
    }

    /// Waits until memory has taken or refused the block.
    fn end_put(&self, turn: KeyLock<'_>, is_stored: &Receiver<bool>) -> Result<PutOutcome, BackendError> {
        let is_stored = self.answer("put", is_stored)?;
        drop(turn);
        if !is_stored {
            return Ok(self.throttled());
        }
        count(&self.counters.stored);
        Ok(PutOutcome::Stored)
    }

    /// Ends several puts. Returns how many blocks memory has taken.
    fn end_puts(&self, under_way: &mut Vec<(KeyLock<'_>, Receiver<bool>)>) -> Result<usize, BackendError> {
        let mut stored = 0;
        for (turn, is_stored) in under_way.drain(..) {
            stored += usize::from(self.end_put(turn, &is_stored)? == PutOutcome::Stored);
        }
        Ok(stored)
    }
}

impl Backend for StoreBackend {
    fn matched(&self, identities: &[Identity]) -> Result<usize, BackendError> {
        Ok(identities.iter().take_while(|identity| self.is_there(identity)).count())
    }

    fn get(
        &self,
        identity: &Identity,
        meta: &mut Destination,
        payload: &mut Destination,
    ) -> Result<GetOutcome, BackendError> {
        if !self.is_there(identity) {
            return Ok(self.missed());
        }
        let Some(held) = self.hold("get", vec![BlockIdentity(*identity)], Instant::now() + READ_MAX)? else {
            return Ok(GetOutcome::Throttled);
        };
        self.unpack(identity, held, meta, payload)
    }

    fn get_prefix(
        &self,
        identities: &[Identity],
        places: &mut [Destination],
        deadline: Instant,
    ) -> Result<Loaded, BackendError> {
        let mut loaded = Loaded::default();
        let mut asked = self.request_blocks(identities, deadline, &mut loaded)?;
        for (identity, place) in identities.iter().zip(places) {
            let held = self.arrive(identity, &mut asked, true, deadline, &mut loaded)?;
            let outcome = self.unpack(identity, held, &mut Destination::nowhere(), place);
            match outcome {
                Ok(GetOutcome::Read) if place.room() == 0 => loaded.blocks += 1,
                Ok(_) | Err(BackendError::DestinationTooSmall { .. }) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(loaded)
    }

    fn observe_load(&self, report: &LoadReport) {
        let loaded = report.loaded;
        let elapsed = report.started.elapsed().saturating_sub(loaded.room_wait);
        if loaded.room_wait > elapsed {
            return;
        }
        let bytes = |blocks: usize| blocks as u64 * self.slot_bytes;
        // Copies are not timed apart from waits for the disk, so only a load without disk reads measures host memory.
        let from_host = if loaded.asked_of_disk == 0 { loaded.blocks } else { 0 };
        self.store.observe_load(&LoadTimes {
            elapsed,
            disk_bytes: bytes(loaded.from_disk),
            disk_wanted_bytes: bytes(loaded.asked_of_disk),
            host_bytes: bytes(from_host),
            copying: report.reading,
            is_late: report.is_late(),
        });
    }

    fn payload_bytes_max(&self) -> usize {
        self.payload_bytes_max
    }

    fn put(
        &self,
        identity: &Identity,
        place: ChainPosition,
        meta: &Source,
        payload: &Source,
    ) -> Result<PutOutcome, BackendError> {
        self.check_size(meta, payload)?;
        let turn = self.key_locks.take(identity);
        match self.begin_put(identity, place, (meta, payload), false)? {
            BegunPut::Over(outcome) => Ok(outcome),
            BegunPut::InFlight(is_stored) => self.end_put(turn, &is_stored),
            BegunPut::NoSlot => unreachable!("a block goes in without a slot"),
        }
    }

    fn put_all(&self, blocks: &[NewBlock]) -> Result<usize, BackendError> {
        let (mut stored, mut under_way, mut failure) = (0, Vec::with_capacity(blocks.len()), None);
        for NewBlock { identity, place, payload } in blocks {
            let turn = match self.key_locks.try_take(identity) {
                Some(turn) => turn,
                None => {
                    stored += self.end_puts(&mut under_way)?;
                    self.key_locks.take(identity)
                }
            };
            let meta = Source::nothing();
            let begin = |needs_slot| self.begin_put(identity, *place, (&meta, payload), needs_slot);
            let mut begun = self.check_size(&meta, payload).and_then(|()| begin(!under_way.is_empty()));
            if let Ok(BegunPut::NoSlot) = begun {
                // Once the earlier puts have ended, the store's thread has made room.
                stored += self.end_puts(&mut under_way)?;
                begun = begin(false);
            }
            match begun {
                Ok(BegunPut::Over(outcome)) => stored += usize::from(outcome != PutOutcome::Throttled),
                Ok(BegunPut::InFlight(is_stored)) => under_way.push((turn, is_stored)),
                Ok(BegunPut::NoSlot) => unreachable!("a block goes in without a slot"),
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
        }
        // Puts that began before the failure are still waited for.
        stored += self.end_puts(&mut under_way)?;
        failure.map_or(Ok(stored), Err)
    }

    fn delete(&self, identity: &Identity) -> Result<bool, BackendError> {
        let _turn = self.key_locks.take(identity);
        let was_there = self.is_there(identity);
        // A block that is moving between tiers is not found by the look-up, but is deleted too.
        self.store.forget(vec![BlockIdentity(*identity)]);
        self.wait_for_turn("delete")?;
        Ok(was_there)
    }

    fn statistics(&self) -> Statistics {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counted = self.store.counters().snapshot();
        let of = |name: &str| {
            let found = counted.iter().find(|(known, ..)| *known == name);
            debug_assert!(found.is_some(), "the store has no counter {name}");
            found.map_or(0, |(.., value)| *value)
        };
        let ([blocks, disk_blocks], [slots, disk_slots]) = (self.store.blocks(), self.store.slots());
        let Counters { hits, misses, stored, throttled, damaged } = &self.counters;
        Statistics {
            blocks,
            bytes: blocks * self.slot_bytes,
            bytes_max: slots * self.slot_bytes,
            hits: read(hits),
            misses: read(misses),
            stored: read(stored),
            throttled: read(throttled),
            evicted: of("evicted_blocks"),
            disk_blocks,
            disk_bytes_max: disk_slots * self.slot_bytes,
            disk_read: of("disk_read_blocks"),
            disk_written: of("disk_written_blocks"),
            disk_evicted: of("disk_evicted_blocks"),
            damaged: read(damaged) + of("checksum_failures"),
            far_read: of("far_read_blocks"),
            far_written: of("far_written_blocks"),
            far_too_large: of("far_too_large_blocks"),
            // Set by `kvasir_kv_stats`: the event queue is not part of the backend.
            events_lost: 0,
            recomputed: of("recomputed_blocks"),
            late: of("late_blocks"),
            prefetched: of("prefetched_blocks"),
            prefetch_used: of("prefetch_used_blocks"),
            prefetch_wasted: of("prefetch_wasted_blocks"),
            checksummed_bytes: dataplane_checksum::checksummed_bytes(),
            disk_write_failures: of("disk_write_failures"),
            far_searches: of("far_searches"),
            far_unanswered: of("far_unanswered_questions"),
            far_cut: of("far_cut_searches"),
            far_not_asked: of("far_not_asked_blocks"),
            retained: self.store.retained_blocks() as u64,
            retention_refused: of("retention_refused_blocks"),
        }
    }

    fn close(&self) {
        self.store.close();
    }
}
