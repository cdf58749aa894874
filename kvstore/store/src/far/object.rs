//! Objects in S3 or a folder: the runtime that their requests run on.
//!
//! An object is read and written on the heap. The bytes in flight are bounded, apart for reads and for
//! writes, so that no upload makes a read late: a read goes on piece by piece and waits for room until its
//! deadline, a write does not begin before there is room. One run always fits. The thread copies and hashes a
//! block at a time between requests.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::plan::Tier;
use kvstore_block::BlockIdentity;
use kvstore_object::{
    Block, Credentials, Location, ObjectConfig, ObjectCounters, ObjectError, ObjectTier as Objects, Outcome,
    S3Config,
};
use tokio::runtime::Runtime;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::StoreBuilder;
use crate::error::StoreError;
use crate::far::{
    Delivered, DeliveredSum, FetchRequest, OfferBatch, OfferedBlock, SecondaryTier, SecondaryTierEvent,
    SecondaryTierInbox,
};

/// Look-ups and reads under way at a time.
const REQUESTS_MAX: usize = 256;
/// Runs being written at a time.
const PUTS_MAX: usize = 8;
/// Writes may have this part of the heap that objects on their way take, as a divisor; reads have the rest.
const PUTS_SHARE: u64 = 4;
/// Divisor of the reads' heap: the part of it that one piece of a read may have.
const PIECE_SHARE: u64 = 2;
/// The heap is counted in these.
const PAGE_BYTES: u64 = 4096;
/// Objects that are too old are deleted so often, and so many at a time.
const SWEEP_EVERY: Duration = Duration::from_secs(3600);
const SWEEP_MAX: u64 = 100_000;
/// Longest time that the upload of one run may take.
const PUT_MAX: Duration = Duration::from_secs(60);

/// Bytes of the heap that blocks on their way may take.
#[derive(Clone)]
struct Heap {
    pages: Arc<Semaphore>,
    pages_max: u32,
}

impl Heap {
    fn new(bytes: u64) -> Self {
        let pages_max = (bytes / PAGE_BYTES).clamp(1, u64::from(u32::MAX >> 3)) as u32;
        Self { pages: Arc::new(Semaphore::new(pages_max as usize)), pages_max }
    }

    fn bytes_max(&self) -> u64 {
        u64::from(self.pages_max) * PAGE_BYTES
    }

    /// Pages that so many bytes take, at most all pages: a longer run is moved alone.
    fn pages_of(&self, bytes: u64) -> u32 {
        bytes.div_ceil(PAGE_BYTES).min(u64::from(self.pages_max)) as u32
    }

    /// Reserves heap for so many bytes, if there is enough now.
    fn try_take(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.pages).try_acquire_many_owned(self.pages_of(bytes)).ok()
    }

    /// Reserves heap for so many bytes; `None` if there is not enough until the deadline. First come, first
    /// served.
    async fn take(&self, bytes: u64, deadline: tokio::time::Instant) -> Option<OwnedSemaphorePermit> {
        let taken = Arc::clone(&self.pages).acquire_many_owned(self.pages_of(bytes));
        tokio::time::timeout_at(deadline, taken).await.ok()?.ok()
    }
}

/// Blocks of a chain in pieces of at most so many bytes that end where runs do, and of one run at least.
fn pieces(
    blocks: Range<usize>,
    run: usize,
    block_bytes: u64,
    bytes_max: u64,
) -> impl Iterator<Item = Range<usize>> {
    let run = run.max(1);
    let runs = (bytes_max / (run as u64 * block_bytes).max(1)).max(1) as usize;
    let mut start = blocks.start;
    std::iter::from_fn(move || {
        let end = (start / run).saturating_add(runs).saturating_mul(run).min(blocks.end);
        let piece = start..end;
        start = end;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Object storage, as a configuration names it (`[object_tier]`).
#[derive(Debug, Clone)]
pub struct ObjectTierConfig {
    /// `s3://bucket/prefix` or `file:///folder`.
    pub url: String,
    /// The S3 service, when it is not Amazon's; else empty.
    pub endpoint: String,
    /// Region.
    pub region: String,
    /// File in the form of AWS's `credentials`; empty: the environment.
    pub credentials_file: String,
    /// Whether plain HTTP is allowed.
    pub allow_http: bool,
    /// Blocks of a chain in one object.
    pub run: u32,
    /// Objects older than that are misses and are deleted.
    pub ttl: Duration,
    /// Bytes of the heap for objects on their way.
    pub buffer_bytes: u64,
    /// Longest time that a look-up and a read may take.
    pub deadline: Duration,
    /// Fingerprint of the blocks' format, part of each key.
    pub fingerprint: u64,
}

impl ObjectTierConfig {
    /// Location of the objects, and the prefix of their keys.
    fn location(&self) -> Result<(Location, String), StoreError> {
        if let Some(folder) = self.url.strip_prefix("file://") {
            return Ok((Location::Directory(folder.into()), "kvasir".to_owned()));
        }
        let Some(rest) = self.url.strip_prefix("s3://") else {
            let reason = format!("\"{}\" starts neither with s3:// nor with file://", self.url);
            return Err(StoreError::Setting { key: "object_tier.url", reason });
        };
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, "kvasir"));
        let credentials = match self.credentials_file.as_str() {
            "" => Credentials::from_environment(|name| std::env::var(name).ok())?,
            path => Credentials::File { path: path.into(), profile: "default".to_owned() },
        };
        let config = S3Config {
            region: self.region.clone(),
            endpoint: Some(self.endpoint.clone()).filter(|endpoint| !endpoint.is_empty()),
            allow_http: self.allow_http,
            ..S3Config::new(bucket, credentials)
        };
        Ok((Location::S3(config), prefix.trim_end_matches('/').to_owned()))
    }
}

/// Connection to the object storage.
pub struct ObjectTier {
    runtime: Option<Runtime>,
    objects: Arc<Objects>,
    run: u32,
    patience: Duration,
    inbox: SecondaryTierInbox,
    requests: Arc<Semaphore>,
    puts: Arc<Semaphore>,
    /// Longest block, in bytes.
    block_bytes: u64,
    read_heap: Heap,
    put_heap: Heap,
}

impl ObjectTier {
    /// Opens the tier of a store that is being built. No request is made yet.
    pub fn open(
        config: &ObjectTierConfig,
        store: &StoreBuilder,
    ) -> Result<(Self, Arc<ObjectCounters>), StoreError> {
        let (location, prefix) = config.location()?;
        let of_objects = ObjectConfig {
            prefix,
            run_blocks: config.run as usize,
            ttl: Some(config.ttl),
            puts_max: PUTS_MAX,
            ..ObjectConfig::new(location, config.fingerprint)
        };
        let objects = Arc::new(Objects::open(of_objects)?);
        let counters = objects.counters();
        let ObjectTierConfig { run, buffer_bytes, deadline, .. } = *config;
        let tier = Self::start(objects, run, store.block_bytes(), buffer_bytes, deadline, store.inbox())?;
        Ok((tier, counters))
    }

    /// Starts the runtime, one thread. Blocks of at most `block_bytes` bytes; those on their way take `buffer_bytes` of the
    /// heap at most, or one run each way.
    pub fn start(
        objects: Arc<Objects>,
        run: u32,
        block_bytes: usize,
        buffer_bytes: u64,
        patience: Duration,
        inbox: SecondaryTierInbox,
    ) -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("kvasir-object-tier")
            .enable_all()
            .build()?;
        let (requests, puts) = (Arc::new(Semaphore::new(REQUESTS_MAX)), Arc::new(Semaphore::new(PUTS_MAX)));
        let sweeping = Arc::clone(&objects);
        drop(runtime.spawn(async move {
            loop {
                tokio::time::sleep(SWEEP_EVERY).await;
                if let Err(error) = sweeping.sweep(SWEEP_MAX, (Instant::now() + SWEEP_EVERY).into()).await {
                    tracing::warn!("object tier: old objects were not deleted: {error}");
                }
            }
        }));
        let put_heap = Heap::new(buffer_bytes / PUTS_SHARE);
        let read_heap = Heap::new(buffer_bytes - buffer_bytes / PUTS_SHARE);
        Ok(Self {
            runtime: Some(runtime),
            objects,
            run,
            patience,
            inbox,
            requests,
            puts,
            block_bytes: block_bytes as u64,
            read_heap,
            put_heap,
        })
    }

    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = &self.runtime {
            // The task answers through the inbox.
            drop(runtime.spawn(work));
        }
    }
}

impl SecondaryTier for ObjectTier {
    fn tier(&self) -> Tier {
        Tier::Object
    }

    fn patience(&self) -> Duration {
        self.patience
    }

    fn look_up(&mut self, request: u64, chain: &[BlockIdentity], first: usize, deadline: Instant) -> bool {
        let Ok(permit) = Arc::clone(&self.requests).try_acquire_owned() else { return false };
        let (objects, inbox, chain) = (Arc::clone(&self.objects), self.inbox.clone(), chain.to_vec());
        self.spawn(async move {
            let found = objects.look_up_from(&chain, first, deadline.into()).await;
            drop(permit);
            inbox.send(SecondaryTierEvent::Found { request, blocks: found.saturating_sub(first) });
        });
        true
    }

    fn read(&mut self, incoming: FetchRequest) -> Result<(), FetchRequest> {
        let Ok(permit) = Arc::clone(&self.requests).try_acquire_owned() else { return Err(incoming) };
        let (objects, inbox, heap) = (Arc::clone(&self.objects), self.inbox.clone(), self.read_heap.clone());
        let (run, block_bytes) = (self.run as usize, self.block_bytes);
        self.spawn(async move {
            let (first, deadline) = (incoming.first, incoming.deadline.into());
            let range = first..first + incoming.targets.len();
            let mut arrived = Vec::with_capacity(range.len());
            for piece in pieces(range, run, block_bytes, heap.bytes_max() / PIECE_SHARE) {
                // Until the blocks of this piece are in their slots.
                let Some(_room) = heap.take(piece.len() as u64 * block_bytes, deadline).await else { break };
                let blocks = objects.get(&incoming.chain, piece.clone(), deadline).await;
                for (block, target) in blocks.into_iter().zip(&incoming.targets[piece.start - first..]) {
                    if block.payload.len() > target.slab().layout().slot_bytes {
                        break;
                    }
                    target.slab().write(target.slot(), 0, &block.payload);
                    arrived.push(Delivered {
                        bytes: block.payload.len() as u32,
                        sum: DeliveredSum::Xxh3(block.checksum),
                    });
                    tokio::task::yield_now().await;
                }
                if first + arrived.len() < piece.end {
                    break;
                }
            }
            drop(permit);
            inbox.send(SecondaryTierEvent::Arrived { incoming, blocks: arrived });
        });
        Ok(())
    }

    fn leave(&mut self, _request: u64) {}

    fn offer_batch(&self) -> OfferBatch {
        OfferBatch::Run(self.run)
    }

    fn has_room(&self, bytes: u64) -> bool {
        let pages = self.put_heap.pages_of(bytes) as usize;
        self.puts.available_permits() > 0 && self.put_heap.pages.available_permits() >= pages
    }

    fn offer(&mut self, blocks: Vec<OfferedBlock>, _head: BlockIdentity) -> bool {
        let Ok(permit) = Arc::clone(&self.puts).try_acquire_owned() else { return false };
        let bytes = blocks.iter().map(|block| block.block.len() as u64).sum();
        let Some(room) = self.put_heap.try_take(bytes) else { return false };
        let (objects, inbox) = (Arc::clone(&self.objects), self.inbox.clone());
        self.spawn(async move {
            let last = blocks.last().map(|block| block.identity);
            let (mut kept, mut failed) = (0, Vec::new());
            match write_run(&objects, blocks).await {
                Ok(Some(blocks)) => kept = blocks,
                Ok(None) => failed.extend(last),
                Err(error) => {
                    tracing::warn!("object tier: {error}");
                    failed.extend(last);
                }
            }
            // Released before the answer, so that the next portion finds room.
            drop((room, permit));
            inbox.send(SecondaryTierEvent::Offered {
                tier: Tier::Object,
                kept,
                too_large: 0,
                failed,
                refused: Vec::new(),
            });
        });
        true
    }
}

/// Uploads a run of blocks; returns the number of blocks stored, or `None` if the run is to be tried again
/// later.
async fn write_run(objects: &Objects, blocks: Vec<OfferedBlock>) -> Result<Option<usize>, ObjectError> {
    let count = blocks.len();
    let mut run = Vec::with_capacity(count);
    for block in blocks {
        let (identity, meta) = (block.identity, block.description.meta.to_vec().into());
        // A damaged block is no part of an object, and neither is its run.
        let Some(payload) = block.block.to_bytes() else { return Ok(Some(0)) };
        // The slot is free again; the upload has bytes of its own.
        drop(block);
        run.push(Block { identity, meta, payload: payload.into() });
        tokio::task::yield_now().await;
    }
    let outcome = objects.put(&run, (Instant::now() + PUT_MAX).into()).await?;
    Ok(match outcome {
        Outcome::Stored => Some(count),
        Outcome::Present => Some(0),
        Outcome::Throttled => None,
    })
}

impl Drop for ObjectTier {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::unbounded;
    use kvstore_catalog::{PolicyKind, TenantId};
    use kvstore_object::{Location, ObjectConfig};

    use super::*;
    use crate::far::SecondaryTiers;
    use crate::job::{Prepare, StoreEvent};
    use crate::store_thread::Message;
    use crate::tiers::testing::{host_tiers, numbered_chain};

    const BLOCK: usize = 4096;
    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn a_piece_of_a_read_has_no_more_bytes_than_it_may_and_ends_where_a_run_does() {
        let block = BLOCK as u64;
        for (blocks, run, bytes_max) in [
            (0..64, 16, 32 * block),
            (5..64, 16, 47 * block),
            (5..9, 16, 1),
            (0..1000, 1, 10 * block),
            (8..9, 4, 1),
        ] {
            let made: Vec<Range<usize>> = pieces(blocks.clone(), run, block, bytes_max).collect();
            let joined: Vec<usize> = made.iter().cloned().flatten().collect();
            assert_eq!(joined, blocks.clone().collect::<Vec<usize>>(), "{blocks:?}");
            for piece in &made {
                assert!(piece.len() as u64 * block <= bytes_max.max(run as u64 * block), "{piece:?}");
                assert!(piece.end.is_multiple_of(run) || piece.end == blocks.end, "{piece:?}");
            }
        }
    }

    #[test]
    fn what_is_too_long_for_the_heap_takes_all_of_it() {
        let heap = Heap::new(10 * PAGE_BYTES);
        let some = heap.try_take(6 * PAGE_BYTES - 1).expect("room for six pages of ten");
        assert!(heap.try_take(5 * PAGE_BYTES).is_none());
        drop(some);
        let all = heap.try_take(1000 * PAGE_BYTES).expect("it is alone");
        assert!(heap.try_take(1).is_none());
        drop(all);
        assert_eq!(heap.pages.available_permits(), 10);
    }

    /// A read of seven runs, and an upload, over a heap that holds one run each way at a time: every block is read, and all of
    /// the heap is given back.
    #[test]
    fn a_read_longer_than_its_heap_comes_whole_piece_by_piece() {
        const RUN: u32 = 4;
        let folder = std::env::temp_dir().join(format!("kvasir-object-heap-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let location = Location::Directory(folder.clone());
        let config = ObjectConfig { run_blocks: RUN as usize, ..ObjectConfig::new(location, 7) };
        let objects = Arc::new(Objects::open(config).expect("a folder"));
        let (mut tiers, moved) = host_tiers(64, BLOCK, PolicyKind::Lru);
        let (sender, messages) = unbounded();
        let (heap, inbox) = (u64::from(RUN) * BLOCK as u64 * 4, SecondaryTierInbox(sender));
        let tier =
            ObjectTier::start(Arc::clone(&objects), RUN, BLOCK, heap, PATIENCE, inbox).expect("a thread");
        let (read_heap, runtime) = (tier.read_heap.clone(), tier.runtime.as_ref().expect("it runs"));
        let chain = numbered_chain(1, 28);
        for run in chain.chunks(RUN as usize) {
            let block = |identity: &BlockIdentity| {
                let payload = vec![identity.0[8]; BLOCK].into();
                Block { identity: *identity, meta: bytes::Bytes::new(), payload }
            };
            let blocks: Vec<Block> = run.iter().map(block).collect();
            let stored = runtime.block_on(objects.put(&blocks, (Instant::now() + PATIENCE).into()));
            assert!(matches!(stored, Ok(Outcome::Stored)), "{stored:?}");
        }

        let mut far = SecondaryTiers::new(vec![Box::new(tier)]);
        let (metas, deadline) = (Vec::new(), Instant::now() + PATIENCE);
        let (chain, tenant) = (chain.clone(), TenantId(0));
        far.prepare(Prepare { request: 1, chain, device_blocks: 0, metas, tenant, deadline }, &mut tiers);
        let blocks = loop {
            let Ok(Message::Far(result)) = messages.recv_timeout(PATIENCE) else { panic!("no answer") };
            far.answered(result, &mut tiers);
            while far.advance(&mut tiers) {
                tiers.hashing.refill();
            }
            let prepared = moved.try_iter().find_map(|moved| match moved {
                StoreEvent::Prepared { blocks, .. } => Some(blocks),
                _ => None,
            });
            if let Some(blocks) = prepared {
                break blocks;
            }
        };
        assert_eq!(blocks, 28);
        assert_eq!(read_heap.pages.available_permits(), read_heap.pages_max as usize);
        drop(far);
        std::fs::remove_dir_all(&folder).expect("it is there");
    }
}
