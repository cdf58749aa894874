//! A disk in memory that fails as disks do, for the tests of this crate.
//!
//! Requests complete in random order. A write that completed lies in a volatile cache until `sync`. Each completion
//! may meet a fault, drawn from a seeded generator.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use kvstore_io::{
    Buffer, Completion, Full, Geometry, IoEngine, IoError, IoErrorKind, Operation, Request, Waker,
};

/// A small generator (splitmix64), so that equal seeds mean equal runs.
#[derive(Debug, Clone)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// True `count` times in a thousand.
    pub(crate) fn per_mille(&mut self, count: u32) -> bool {
        self.below(1000) < u64::from(count)
    }
}

/// Probability of each fault, per thousand requests.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Faults {
    pub(crate) lost_write: u32,
    pub(crate) torn_write: u32,
    pub(crate) misdirected_write: u32,
    pub(crate) misdirected_read: u32,
    pub(crate) rot: u32,
    pub(crate) media: u32,
}

/// Number of faults of each kind that occurred.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct FaultCounts {
    pub(crate) lost: u32,
    pub(crate) torn: u32,
    pub(crate) misdirected: u32,
    pub(crate) rotten: u32,
    pub(crate) media: u32,
}

pub(crate) struct Disk {
    pub(crate) bytes: Vec<u8>,
    /// Bytes under each write since the last sync, for a loss of power.
    undo: Vec<(usize, Vec<u8>)>,
    queued: Vec<Request>,
    pub(crate) random: Random,
    pub(crate) faults: Faults,
    pub(crate) happened: FaultCounts,
    /// Every request fails.
    pub(crate) is_gone: bool,
    /// Every request to these bytes fails: one of several devices.
    pub(crate) gone_bytes: std::ops::Range<usize>,
    /// Every request of this direction fails in this way.
    pub(crate) failing: Option<(Operation, IoErrorKind)>,
    /// Number of `flush` calls that will fail.
    pub(crate) flushes_to_fail: u32,
    pub(crate) flushes: u32,
    /// Engines that were dropped.
    pub(crate) engines_dropped: u32,
    /// No request completes.
    pub(crate) is_silent: bool,
    pub(crate) requests: u64,
    pub(crate) depth_max: usize,
    pub(crate) transfer_bytes_max: usize,
}

/// A handle to the disk, which outlives the engines that use it.
#[derive(Clone)]
pub(crate) struct SharedDisk(pub(crate) Arc<Mutex<Disk>>);

impl SharedDisk {
    pub(crate) fn new(bytes: usize, seed: u64) -> Self {
        Self(Arc::new(Mutex::new(Disk {
            bytes: vec![0; bytes],
            undo: Vec::new(),
            queued: Vec::new(),
            random: Random(seed),
            faults: Faults::default(),
            happened: FaultCounts::default(),
            is_gone: false,
            gone_bytes: 0..0,
            failing: None,
            flushes_to_fail: 0,
            flushes: 0,
            engines_dropped: 0,
            is_silent: false,
            requests: 0,
            depth_max: 64,
            transfer_bytes_max: 1 << 20,
        })))
    }

    pub(crate) fn with<T>(&self, act: impl FnOnce(&mut Disk) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn engine(&self) -> Box<dyn IoEngine> {
        let geometry = self.with(|disk| Geometry {
            block_bytes: 512,
            transfer_bytes_max: disk.transfer_bytes_max,
            depth_max: disk.depth_max,
            files: vec![disk.bytes.len() as u64],
        });
        Box::new(MemoryEngine { disk: self.clone(), geometry, waker: Arc::default() })
    }
}

impl Disk {
    fn moved(buffer: &Buffer) -> Vec<u8> {
        match buffer {
            Buffer::Slot { slot, offset, len } => {
                let mut bytes = vec![0; *len];
                slot.slab().read(slot.slot(), *offset, &mut bytes);
                bytes
            }
            Buffer::Pages(pages) => pages.to_vec(),
        }
    }

    fn put(&mut self, offset: usize, bytes: &[u8]) {
        self.undo.push((offset, self.bytes[offset..offset + bytes.len()].to_vec()));
        self.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    /// Returns a random block-aligned offset with room for `len` bytes.
    fn astray(&mut self, len: usize) -> usize {
        let places = (self.bytes.len() - len) / 512 + 1;
        self.random.below(places as u64) as usize * 512
    }

    fn flip_bit(&mut self) {
        let at = self.random.below(self.bytes.len() as u64) as usize;
        let bit = self.random.below(8);
        self.bytes[at] ^= 1 << bit;
        self.happened.rotten += 1;
    }

    fn apply(&mut self, request: &mut Request) -> Result<(), IoErrorKind> {
        self.requests += 1;
        let (offset, len) = (request.offset as usize, request.buffer.len());
        let is_valid =
            offset.is_multiple_of(512) && len.is_multiple_of(512) && len <= self.transfer_bytes_max;
        if !is_valid || offset + len > self.bytes.len() || request.buffer.address().is_none() {
            return Err(IoErrorKind::Invalid);
        }
        if self.is_gone || self.gone_bytes.contains(&offset) {
            return Err(IoErrorKind::Device);
        }
        if let Some((operation, kind)) = self.failing
            && operation == request.operation
        {
            return Err(kind);
        }
        if self.random.per_mille(self.faults.rot) {
            self.flip_bit();
        }
        if self.random.per_mille(self.faults.media) {
            self.happened.media += 1;
            return Err(IoErrorKind::Media);
        }
        match request.operation {
            Operation::Write => self.apply_write(offset, &Self::moved(&request.buffer)),
            Operation::Read => {
                let from = if self.random.per_mille(self.faults.misdirected_read) {
                    self.happened.misdirected += 1;
                    self.astray(len)
                } else {
                    offset
                };
                let bytes = &self.bytes[from..from + len];
                match &mut request.buffer {
                    Buffer::Slot { slot, offset, .. } => slot.slab().write(slot.slot(), *offset, bytes),
                    Buffer::Pages(pages) => pages.copy_from_slice(bytes),
                }
            }
        }
        Ok(())
    }

    fn apply_write(&mut self, offset: usize, bytes: &[u8]) {
        if self.random.per_mille(self.faults.lost_write) {
            self.happened.lost += 1;
        } else if self.random.per_mille(self.faults.torn_write) {
            self.happened.torn += 1;
            let sectors = self.random.below((bytes.len() / 512) as u64) as usize;
            self.put(offset, &bytes[..sectors * 512]);
        } else if self.random.per_mille(self.faults.misdirected_write) {
            self.happened.misdirected += 1;
            let offset = self.astray(bytes.len());
            self.put(offset, bytes);
        } else {
            self.put(offset, bytes);
        }
    }

    /// Cuts the power: some unsynced writes are lost, and requests in flight are applied in part, in any order.
    pub(crate) fn cut_power(&mut self) {
        while !self.queued.is_empty() {
            let index = self.random.below(self.queued.len() as u64) as usize;
            let request = self.queued.swap_remove(index);
            if request.operation == Operation::Write && self.random.per_mille(700) {
                let bytes = Self::moved(&request.buffer);
                for (sector, bytes) in bytes.chunks(512).enumerate() {
                    if self.random.per_mille(600) {
                        self.put(request.offset as usize + sector * 512, bytes);
                    }
                }
            }
        }
        for (offset, bytes) in std::mem::take(&mut self.undo).into_iter().rev() {
            if self.random.per_mille(200) {
                self.bytes[offset..offset + bytes.len()].copy_from_slice(&bytes);
            }
        }
    }
}

#[derive(Default)]
struct CompletionWaker {
    is_woken: Mutex<bool>,
    changed: Condvar,
}

impl Waker for CompletionWaker {
    fn wake(&self) {
        *self.is_woken.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }
}

struct MemoryEngine {
    disk: SharedDisk,
    geometry: Geometry,
    waker: Arc<CompletionWaker>,
}

impl Drop for MemoryEngine {
    fn drop(&mut self) {
        self.disk.with(|disk| disk.engines_dropped += 1);
    }
}

fn error(kind: IoErrorKind) -> IoError {
    IoError { engine: "memory", operation: "injected".to_owned(), kind, reason: format!("{kind:?}") }
}

impl IoEngine for MemoryEngine {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn register(&mut self, _slab: &Arc<Slab>) -> Result<(), IoError> {
        Ok(())
    }

    fn submit(&mut self, request: Request) -> Result<(), Full> {
        self.disk.with(|disk| {
            if disk.queued.len() >= self.geometry.depth_max {
                return Err(Full(request));
            }
            disk.queued.push(request);
            Ok(())
        })
    }

    fn flush(&mut self) -> Result<(), IoError> {
        self.disk.with(|disk| {
            disk.flushes += 1;
            if disk.flushes_to_fail > 0 {
                disk.flushes_to_fail -= 1;
                return Err(error(IoErrorKind::Other));
            }
            Ok(())
        })
    }

    fn poll(&mut self, budget: usize, completions: &mut Vec<Completion>) -> usize {
        self.disk.with(|disk| {
            let count = if disk.is_silent || disk.queued.is_empty() {
                0
            } else {
                let most = disk.queued.len().min(budget) as u64;
                disk.random.below(most + 1) as usize
            };
            for _ in 0..count {
                let index = disk.random.below(disk.queued.len() as u64) as usize;
                let mut request = disk.queued.swap_remove(index);
                let result = disk.apply(&mut request).map_err(error);
                completions.push(Completion { id: request.id, buffer: request.buffer, result });
            }
            count
        })
    }

    fn wait(&mut self, until: Option<Instant>) -> Result<(), IoError> {
        if self.disk.with(|disk| !disk.is_silent && !disk.queued.is_empty()) {
            return Ok(());
        }
        let most = Duration::from_millis(5);
        let sleep = until.map_or(most, |until| until.saturating_duration_since(Instant::now()).min(most));
        let is_woken = self.waker.is_woken.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.waker.changed.wait_timeout_while(is_woken, sleep, |is_woken| !*is_woken);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Waker> {
        Arc::clone(&self.waker) as Arc<dyn Waker>
    }

    fn in_flight(&self) -> usize {
        self.disk.with(|disk| disk.queued.len())
    }

    fn sync(&mut self, _file: u32) -> Result<(), IoError> {
        self.disk.with(|disk| {
            if disk.is_gone {
                return Err(error(IoErrorKind::Device));
            }
            disk.undo.clear();
            Ok(())
        })
    }
}

/// Returns a pool of memory slots to write from and read into.
pub(crate) fn pool(slot_bytes: usize, slot_count: u32) -> Arc<SlotPool> {
    let layout = SlabLayout { slot_bytes, slot_count };
    SlotPool::new(Arc::new(Slab::create("blocks", layout, PageSize::Standard).expect("slab")))
}
