//! Interface of an index, and the indexes.

use std::hint::black_box;
use std::sync::Arc;
use std::thread::JoinHandle;

use dynamo_kv_router::indexer::{SyncIndexer, WorkerTask};
use dynamo_kv_router::nested_map::{PositionalIndexer, SearchMode};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, RadixTree};
use kv_index::{ChainBlockMap, ChainIndex, SequenceHash, StoredBlock};
use router_radix::{Index, IndexConfig, Member, Reader, Tier};
use tools_workload::Operation;

/// A prompt in the forms of all sides, made outside of the timed part.
pub struct Prompt {
    pub blocks: Vec<u64>,
    pub local: Vec<LocalBlockHash>,
}

impl Prompt {
    pub fn new(blocks: &[u64]) -> Self {
        Self { blocks: blocks.to_vec(), local: blocks.iter().map(|&hash| LocalBlockHash(hash)).collect() }
    }
}

/// Changes in the form of one side, made outside of the timed part.
pub enum Prepared {
    Ours(Vec<OurChange>),
    Dynamo(Vec<RouterEvent>),
    Chain(Vec<ChainChange>),
}

pub struct OurChange {
    worker: usize,
    stored: Option<(Option<u64>, Vec<u64>)>,
    keys: Vec<u64>,
}

pub struct ChainChange {
    worker: usize,
    parent: Option<SequenceHash>,
    stored: Vec<StoredBlock>,
    removed: Vec<SequenceHash>,
}

pub trait Side {
    fn name(&self) -> &'static str;
    /// Bytes that the side maps itself, outside of the allocator.
    fn mapped_bytes(&self) -> usize {
        0
    }
    fn prepare(&self, operations: &[Operation]) -> Prepared;
    /// Applies changes. Returns once they are visible.
    fn apply(&mut self, changes: Prepared);
    /// Prepares data that a look-up consumes; not timed.
    fn before_lookup(&mut self, _prompt: &Prompt) {}
    /// The look-up alone, which is timed.
    fn lookup(&mut self, prompt: &Prompt);
    /// Leading blocks of each worker.
    fn scores(&mut self, prompt: &Prompt, workers: usize) -> Vec<u32>;
}

pub struct Ours {
    index: Arc<Index>,
    reader: Reader,
    members: Vec<Member>,
}

impl Ours {
    pub fn new(workers: usize) -> anyhow::Result<Self> {
        let index = Index::new(IndexConfig { memory_max: usize::MAX });
        let members = (0..workers).map_while(|_| index.write().join()).collect();
        let reader = index.reader().ok_or_else(|| anyhow::anyhow!("no reader"))?;
        Ok(Self { index: Arc::new(index), reader, members })
    }
}

impl Side for Ours {
    fn name(&self) -> &'static str {
        "kvasir"
    }

    fn mapped_bytes(&self) -> usize {
        self.index.write().usage().mapped_bytes
    }

    fn prepare(&self, operations: &[Operation]) -> Prepared {
        let change = |operation: &Operation| match operation {
            Operation::Stored { worker, parent, blocks } => Some(OurChange {
                worker: *worker,
                stored: Some((*parent, blocks.iter().map(|block| block.0).collect())),
                keys: blocks.iter().map(|block| block.1).collect(),
            }),
            Operation::Removed { worker, sequences } => {
                Some(OurChange { worker: *worker, stored: None, keys: sequences.clone() })
            }
            Operation::Lookup { .. } => None,
        };
        Prepared::Ours(operations.iter().filter_map(change).collect())
    }

    fn apply(&mut self, changes: Prepared) {
        let Prepared::Ours(changes) = changes else { return };
        for change in changes {
            let member = self.members[change.worker];
            // The lock is taken for each change, as by a feed that receives one event at a time.
            let mut writer = self.index.write();
            let outcome = match &change.stored {
                Some((parent, blocks)) => writer.stored(member, Tier::Device, *parent, &change.keys, blocks),
                None => writer.removed(member, Tier::Device, &change.keys),
            };
            assert_eq!(outcome.refused, 0);
        }
    }

    fn lookup(&mut self, prompt: &Prompt) {
        black_box(self.reader.overlaps(&prompt.blocks));
    }

    fn scores(&mut self, prompt: &Prompt, _workers: usize) -> Vec<u32> {
        let overlaps = self.reader.overlaps(&prompt.blocks);
        self.members.iter().map(|&member| overlaps.device(member)).collect()
    }
}

fn dynamo_events(operations: &[Operation]) -> Prepared {
    let event = |(id, operation): (usize, &Operation)| {
        let (worker, data) = match operation {
            Operation::Stored { worker, parent, blocks } => {
                let block = |&(block, sequence): &(u64, u64)| KvCacheStoredBlockData {
                    block_hash: ExternalSequenceBlockHash(sequence),
                    tokens_hash: LocalBlockHash(block),
                    mm_extra_info: None,
                };
                let data = KvCacheStoreData {
                    parent_hash: parent.map(ExternalSequenceBlockHash),
                    start_position: None,
                    blocks: blocks.iter().map(block).collect(),
                };
                (*worker, KvCacheEventData::Stored(data))
            }
            Operation::Removed { worker, sequences } => {
                let block_hashes = sequences.iter().map(|&hash| ExternalSequenceBlockHash(hash)).collect();
                (*worker, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }))
            }
            Operation::Lookup { .. } => return None,
        };
        Some(RouterEvent::new(worker as u64, KvCacheEvent { event_id: id as u64, data, dp_rank: 0 }))
    };
    Prepared::Dynamo(operations.iter().enumerate().filter_map(event).collect())
}

fn dynamo_row(scores: &OverlapScores, workers: usize) -> Vec<u32> {
    let mut row = vec![0; workers];
    for (worker, &blocks) in &scores.scores {
        row[worker.worker_id as usize] = blocks;
    }
    row
}

/// Dynamo's single-threaded tree.
pub struct DynamoRadix {
    tree: RadixTree,
    /// Copy of the prompt, since the tree's look-up takes it by value.
    owned: Vec<LocalBlockHash>,
}

impl DynamoRadix {
    pub fn new() -> Self {
        Self { tree: RadixTree::new(), owned: Vec::new() }
    }
}

impl Side for DynamoRadix {
    fn name(&self) -> &'static str {
        "dynamo radix tree, one thread"
    }

    fn prepare(&self, operations: &[Operation]) -> Prepared {
        dynamo_events(operations)
    }

    fn apply(&mut self, changes: Prepared) {
        let Prepared::Dynamo(events) = changes else { return };
        for event in events {
            // The tree reports an unknown block of a removal as an error, which is ignored.
            let _unknown = self.tree.apply_event(event);
        }
    }

    fn before_lookup(&mut self, prompt: &Prompt) {
        self.owned = prompt.local.clone();
    }

    fn lookup(&mut self, _prompt: &Prompt) {
        black_box(self.tree.find_matches(std::mem::take(&mut self.owned), false));
    }

    fn scores(&mut self, prompt: &Prompt, workers: usize) -> Vec<u32> {
        dynamo_row(&self.tree.find_matches(prompt.local.clone(), false), workers)
    }
}

/// One of Dynamo's concurrent indexes: changes run on a thread with its own loop, look-ups on the calling thread.
pub struct DynamoConcurrent<T: SyncIndexer> {
    name: &'static str,
    backend: Arc<T>,
    tasks: flume::Sender<WorkerTask>,
    thread: Option<JoinHandle<()>>,
}

impl DynamoConcurrent<ConcurrentRadixTreeCompressed> {
    pub fn compressed() -> Self {
        Self::start("dynamo concurrent compressed tree", ConcurrentRadixTreeCompressed::new())
    }
}

impl DynamoConcurrent<PositionalIndexer> {
    pub fn positional() -> Self {
        Self::start("dynamo positional", PositionalIndexer::new_with_mode(32, SearchMode::Binary))
    }
}

impl<T: SyncIndexer> DynamoConcurrent<T> {
    fn start(name: &'static str, backend: T) -> Self {
        let backend = Arc::new(backend);
        let (tasks, received) = flume::unbounded();
        let own = Arc::clone(&backend);
        let thread = std::thread::spawn(move || {
            if let Err(error) = own.worker(received, None) {
                eprintln!("{name}: {error:#}");
            }
        });
        Self { name, backend, tasks, thread: Some(thread) }
    }

    fn flush(&self) {
        let (done, wait) = tokio::sync::oneshot::channel();
        if self.tasks.send(WorkerTask::Flush(done)).is_ok() {
            let _closed = wait.blocking_recv();
        }
    }
}

impl<T: SyncIndexer> Drop for DynamoConcurrent<T> {
    fn drop(&mut self) {
        let _closed = self.tasks.send(WorkerTask::Terminate);
        if let Some(thread) = self.thread.take() {
            let _panicked = thread.join();
        }
    }
}

impl<T: SyncIndexer> Side for DynamoConcurrent<T> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn prepare(&self, operations: &[Operation]) -> Prepared {
        dynamo_events(operations)
    }

    fn apply(&mut self, changes: Prepared) {
        let Prepared::Dynamo(events) = changes else { return };
        for event in events {
            let _closed = self.tasks.send(WorkerTask::Event(event));
        }
        self.flush();
    }

    fn lookup(&mut self, prompt: &Prompt) {
        black_box(self.backend.find_matches(&prompt.local, false));
    }

    fn scores(&mut self, prompt: &Prompt, workers: usize) -> Vec<u32> {
        dynamo_row(&self.backend.find_matches(&prompt.local, false), workers)
    }
}

/// kv-index's chain index.
pub struct Chain {
    index: ChainIndex,
    ids: Vec<u32>,
    maps: Vec<ChainBlockMap>,
    row: Vec<u32>,
}

/// Most workers of a chain index.
pub const CHAIN_WORKERS_MAX: usize = 1024;

impl Chain {
    pub fn new(workers: usize) -> anyhow::Result<Self> {
        let index = ChainIndex::with_max_workers(workers.max(64));
        let intern = |worker: usize| index.intern_worker(&format!("worker-{worker}"));
        let ids = (0..workers).map(intern).collect::<Result<Vec<u32>, _>>();
        let ids = ids.map_err(|error| {
            anyhow::anyhow!("kv-index takes {CHAIN_WORKERS_MAX} workers at most: {error:?}")
        })?;
        let maps = (0..workers).map(|_| ChainBlockMap::new()).collect();
        Ok(Self { index, ids, maps, row: vec![0; workers.max(64)] })
    }
}

impl Side for Chain {
    fn name(&self) -> &'static str {
        "kv-index chain"
    }

    fn prepare(&self, operations: &[Operation]) -> Prepared {
        let change = |operation: &Operation| match operation {
            Operation::Stored { worker, parent, blocks } => {
                let block = |&(block, sequence): &(u64, u64)| StoredBlock {
                    seq_hash: SequenceHash(sequence),
                    content_hash: kv_index::ContentHash(block),
                };
                let stored = blocks.iter().map(block).collect();
                Some(ChainChange {
                    worker: *worker,
                    parent: parent.map(SequenceHash),
                    stored,
                    removed: Vec::new(),
                })
            }
            Operation::Removed { worker, sequences } => {
                let removed = sequences.iter().map(|&hash| SequenceHash(hash)).collect();
                Some(ChainChange { worker: *worker, parent: None, stored: Vec::new(), removed })
            }
            Operation::Lookup { .. } => None,
        };
        Prepared::Chain(operations.iter().filter_map(change).collect())
    }

    fn apply(&mut self, changes: Prepared) {
        let Prepared::Chain(changes) = changes else { return };
        for change in changes {
            let (id, map) = (self.ids[change.worker], &mut self.maps[change.worker]);
            if change.removed.is_empty() {
                let stored = self.index.apply_stored(id, &change.stored, change.parent, map);
                assert!(stored.is_ok(), "{stored:?}");
            } else {
                self.index.apply_removed(id, &change.removed, map);
            }
        }
    }

    fn lookup(&mut self, prompt: &Prompt) {
        self.row.fill(0);
        let row = &mut self.row;
        self.index.score_into(
            &prompt.local,
            |hash| hash.0,
            false,
            |worker, blocks| row[worker as usize] = blocks,
        );
        black_box(&self.row);
    }

    fn scores(&mut self, prompt: &Prompt, workers: usize) -> Vec<u32> {
        self.lookup(prompt);
        self.ids[..workers].iter().map(|&id| self.row[id as usize]).collect()
    }
}
