//! What a cache of blocks in memory and on a disk can do here, and what it took.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use hdrhistogram::Histogram;
use rustix::time::{ClockId, clock_gettime};

use crate::workload::Contents;

/// Sizes in bytes, equal for all.
#[derive(Clone)]
pub struct Setup {
    pub folder: PathBuf,
    pub block_bytes: usize,
    pub memory_bytes: usize,
    pub disk_bytes: usize,
    pub contents: Contents,
    /// Differs from store to store, so that none finds the blocks of the one before.
    pub instance: u64,
    /// Whether all bytes of what is read are compared, and not a sample.
    pub compares_all: bool,
}

/// When a block goes to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// When it is stored.
    Insertion,
    /// When it has to leave memory.
    Eviction,
}

/// How blocks are offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// As fast as memory takes them.
    Flood,
    /// At most so many bytes that are not on the disk yet.
    Window(usize),
}

/// What a phase took.
#[derive(Debug, Clone, Copy, Default)]
pub struct Spent {
    pub elapsed: Duration,
    pub processor: Duration,
}

/// Where requests of the mixed phase found their blocks.
#[derive(Debug, Clone, Copy, Default)]
pub struct Found {
    pub memory: usize,
    pub disk: usize,
    pub missed: usize,
}

pub trait Side {
    /// Stores blocks and returns when each is on the disk or dropped.
    fn write(&mut self, keys: &[u64], pace: Pace) -> Result<Spent>;
    /// Whether the disk has the block.
    fn is_on_disk(&self, key: u64) -> bool;
    /// Whether memory has it.
    fn is_in_memory(&self, key: u64) -> bool;
    /// Reads blocks that only the disk has, so many at a time. It is an error if one is not read from there, or wrong.
    fn read(&mut self, keys: &[u64], concurrency: usize, latency: &mut Histogram<u64>) -> Result<Spent>;
    /// Asks for blocks, so many at a time, and stores those that are not there.
    fn mixed(&mut self, keys: &[u64], concurrency: usize) -> Result<(Spent, Found)>;
    /// What the side itself has counted, if it says.
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
