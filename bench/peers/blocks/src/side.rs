//! Interface of a cache of blocks in memory and on a disk, and the resources that a phase used.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use hdrhistogram::Histogram;
use rustix::time::{ClockId, clock_gettime};

use crate::workload::Contents;

/// Sizes in bytes, equal for all sides.
#[derive(Clone)]
pub struct Setup {
    pub folder: PathBuf,
    pub block_bytes: usize,
    pub memory_bytes: usize,
    pub disk_bytes: usize,
    pub contents: Contents,
    /// Different for each store, so that no store finds the blocks of the previous one.
    pub instance: u64,
    /// Whether all bytes of read blocks are compared, instead of a sample.
    pub compares_all: bool,
}

/// Time at which a block is written to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// When the block is stored.
    Insertion,
    /// When the block is evicted from memory.
    Eviction,
}

/// Rate at which blocks are offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// As fast as memory takes them.
    Flood,
    /// At most this many bytes that are not on the disk yet.
    Window(usize),
}

/// Time that a phase took.
#[derive(Debug, Clone, Copy, Default)]
pub struct Spent {
    pub elapsed: Duration,
    pub processor: Duration,
}

/// Number of blocks that requests of the mixed phase found in each tier.
#[derive(Debug, Clone, Copy, Default)]
pub struct Found {
    pub memory: usize,
    pub disk: usize,
    pub missed: usize,
}

pub trait Side {
    /// Stores blocks. Returns once each is on the disk or dropped.
    fn write(&mut self, keys: &[u64], pace: Pace) -> Result<Spent>;
    /// Whether the disk has the block.
    fn is_on_disk(&self, key: u64) -> bool;
    /// Whether memory has the block.
    fn is_in_memory(&self, key: u64) -> bool;
    /// Reads blocks that only the disk has, `concurrency` at a time. A block that is wrong or was not read from
    /// the disk is an error.
    fn read(&mut self, keys: &[u64], concurrency: usize, latency: &mut Histogram<u64>) -> Result<Spent>;
    /// Requests blocks, `concurrency` at a time, and stores the missing ones.
    fn mixed(&mut self, keys: &[u64], concurrency: usize) -> Result<(Spent, Found)>;
    /// The side's own counters as text, if it has any.
    fn counters(&self) -> Option<String> {
        None
    }
}

/// Measures wall and processor time of all threads of the process.
pub struct Stopwatch {
    started: Instant,
    processor: Duration,
}

impl Stopwatch {
    pub fn start() -> Self {
        Self { started: Instant::now(), processor: processor_time() }
    }

    pub fn stop(&self) -> Spent {
        Spent { elapsed: self.started.elapsed(), processor: processor_time() - self.processor }
    }
}

pub fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
