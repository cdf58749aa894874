//! foyer's hybrid cache: memory over its block engine, with O_DIRECT.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use foyer::{
    BlockEngineConfig, DeviceBuilder, FifoPicker, FsDeviceBuilder, HybridCache, HybridCacheBuilder,
    HybridCachePolicy, IoEngineConfig, PsyncIoEngineConfig, RecoverMode, Source, UringIoEngineConfig,
};
use hdrhistogram::Histogram;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use crate::folder;
use crate::side::{Found, Mode, Pace, Setup, Side, Spent, Stopwatch};
use crate::workload::Contents;

/// Unit of foyer's eviction and size of its files: its default.
const BLOCK_BYTES: usize = 16 << 20;
/// As in the fully configured example of foyer's README.
const FLUSHERS: usize = 2;
const RECLAIMERS: usize = 2;
const CLEAN_BLOCKS: usize = 4;
const THREADS: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    Uring,
    Psync,
}

type Cache = HybridCache<u64, Vec<u8>>;

pub struct Theirs {
    cache: Cache,
    contents: Contents,
    block_bytes: usize,
    compares_all: bool,
    /// Dropped last, which ends all of the cache's tasks that still run.
    runtime: Option<Runtime>,
}

impl Theirs {
    pub fn open(setup: &Setup, engine: Engine, mode: Mode) -> Result<Self> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build()?;
        let cache = runtime.block_on(open(setup, engine, mode))?;
        Ok(Self {
            cache,
            contents: setup.contents.clone(),
            block_bytes: setup.block_bytes,
            compares_all: setup.compares_all,
            runtime: Some(runtime),
        })
    }

    fn runtime(&self) -> Result<&Runtime> {
        self.runtime.as_ref().ok_or_else(|| anyhow!("closed"))
    }
}

impl Drop for Theirs {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            let _not_flushed = runtime.block_on(self.cache.close());
            // A shutdown in the background would still poll its ring during the next side.
            runtime.shutdown_timeout(std::time::Duration::from_secs(10));
        }
    }
}

async fn open(setup: &Setup, engine: Engine, mode: Mode) -> Result<Cache> {
    let block_bytes = BLOCK_BYTES.min(setup.disk_bytes / 32);
    let directory = setup.folder.join("foyer");
    // The files that foyer would create, full of zeros: neither side pays for the first write to each range.
    for number in 0..setup.disk_bytes / block_bytes {
        folder::fill(&directory.join(format!("foyer-storage-direct-fs-{number:08}")), block_bytes)?;
    }
    let device =
        FsDeviceBuilder::new(&directory).with_capacity(setup.disk_bytes).with_direct(true).build()?;
    let io: Box<dyn IoEngineConfig> = match engine {
        Engine::Uring => UringIoEngineConfig::new().boxed(),
        Engine::Psync => PsyncIoEngineConfig::new().boxed(),
    };
    let blocks = BlockEngineConfig::new(device)
        .with_block_size(block_bytes)
        .with_flushers(FLUSHERS)
        .with_reclaimers(RECLAIMERS)
        .with_clean_block_threshold(CLEAN_BLOCKS)
        .with_buffer_pool_size(setup.memory_bytes / 4)
        // The default according to foyer's documentation; the actual default is 16 MiB.
        .with_submit_queue_size_threshold(setup.memory_bytes / 2)
        .with_eviction_pickers(vec![Box::<FifoPicker>::default()]);
    let policy = match mode {
        Mode::Insertion => HybridCachePolicy::WriteOnInsertion,
        Mode::Eviction => HybridCachePolicy::WriteOnEviction,
    };
    let cache = HybridCacheBuilder::new()
        .with_policy(policy)
        .with_flush_on_close(false)
        .memory(setup.memory_bytes)
        .with_weighter(|_: &u64, value: &Vec<u8>| value.len())
        .storage()
        .with_io_engine_config(io)
        .with_engine_config(blocks)
        .with_recover_mode(RecoverMode::None)
        .build()
        .await?;
    Ok(cache)
}

impl Side for Theirs {
    fn write(&mut self, keys: &[u64], pace: Pace) -> Result<Spent> {
        let (cache, contents, block_bytes) = (&self.cache, &self.contents, self.block_bytes);
        self.runtime()?.block_on(async {
            let watch = Stopwatch::start();
            let mut flushes = JoinSet::new();
            let mut unflushed = 0;
            for &key in keys {
                cache.insert(key, contents.block(key).to_vec());
                unflushed += block_bytes;
                // Half of the window may be in flight while the other half is offered.
                if let Pace::Window(bytes) = pace
                    && unflushed >= bytes / 2
                {
                    unflushed = 0;
                    while flushes.len() > 1 {
                        flushes.join_next().await;
                    }
                    let cache = cache.clone();
                    flushes.spawn(async move { cache.storage().wait().await });
                }
            }
            cache.storage().wait().await;
            flushes.join_all().await;
            Ok(watch.stop())
        })
    }

    fn is_on_disk(&self, key: u64) -> bool {
        self.cache.storage().may_contains(&key)
    }

    fn is_in_memory(&self, key: u64) -> bool {
        self.cache.memory().contains(&key)
    }

    fn read(&mut self, keys: &[u64], concurrency: usize, latency: &mut Histogram<u64>) -> Result<Spent> {
        let keys: Arc<[u64]> = keys.into();
        let next = Arc::new(AtomicUsize::new(0));
        let (spent, latencies) = self.runtime()?.block_on(async {
            let watch = Stopwatch::start();
            let mut readers = JoinSet::new();
            for _ in 0..concurrency {
                let (keys, next, cache) = (Arc::clone(&keys), Arc::clone(&next), self.cache.clone());
                let (contents, compares_all) = (self.contents.clone(), self.compares_all);
                readers.spawn(async move {
                    let mut nanos = Vec::with_capacity(keys.len());
                    while let Some(&key) = keys.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let started = Instant::now();
                        let entry = cache.get(&key).await?;
                        let entry =
                            entry.with_context(|| format!("block {key} did not come from the disk"))?;
                        ensure!(
                            is_right(&contents, key, compares_all, entry.value()),
                            "block {key} is wrong"
                        );
                        nanos.push(started.elapsed().as_nanos() as u64);
                        ensure!(entry.source() == Source::Disk, "block {key} came from {:?}", entry.source());
                    }
                    Ok::<_, anyhow::Error>(nanos)
                });
            }
            let results = readers.join_all().await;
            let spent = watch.stop();
            let latencies: Vec<Vec<u64>> = results.into_iter().collect::<Result<_>>()?;
            Ok::<_, anyhow::Error>((spent, latencies))
        })?;
        latencies.iter().flatten().for_each(|&nanos| latency.saturating_record(nanos));
        Ok(spent)
    }

    fn mixed(&mut self, keys: &[u64], concurrency: usize) -> Result<(Spent, Found)> {
        let keys: Arc<[u64]> = keys.into();
        let next = Arc::new(AtomicUsize::new(0));
        self.runtime()?.block_on(async {
            let watch = Stopwatch::start();
            let mut readers = JoinSet::new();
            for _ in 0..concurrency {
                let (keys, next, cache) = (Arc::clone(&keys), Arc::clone(&next), self.cache.clone());
                let (contents, compares_all) = (self.contents.clone(), self.compares_all);
                readers.spawn(async move {
                    let mut found = Found::default();
                    while let Some(&key) = keys.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let fetched = contents.clone();
                        let fetch =
                            move || async move { Ok::<_, anyhow::Error>(fetched.block(key).to_vec()) };
                        let entry = cache.get_or_fetch(&key, fetch).await?;
                        match entry.source() {
                            Source::Memory => found.memory += 1,
                            Source::Disk => found.disk += 1,
                            Source::Outer => {
                                found.missed += 1;
                                continue;
                            }
                        }
                        ensure!(
                            is_right(&contents, key, compares_all, entry.value()),
                            "block {key} is wrong"
                        );
                    }
                    Ok::<_, anyhow::Error>(found)
                });
            }
            let results = readers.join_all().await;
            let spent = watch.stop();
            let mut sum = Found::default();
            for found in results {
                let found = found?;
                sum.memory += found.memory;
                sum.disk += found.disk;
                sum.missed += found.missed;
            }
            Ok((spent, sum))
        })
    }
}

fn is_right(contents: &Contents, key: u64, all: bool, value: &[u8]) -> bool {
    contents.is_right(key, all, |at, bytes| bytes.copy_from_slice(&value[at..at + bytes.len()]))
}
