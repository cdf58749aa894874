//! Writes, reads, forgetting and table writes allocate nothing, on an engine that does not either.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use kvstore_block::BlockIdentity;
use kvstore_disk::{
    Area, Block, ClockReading, DiskCompletion, DiskConfig, DiskLog, ReadCheck, ReadOutcome, WriteOutcome,
};
use kvstore_io::{Buffer, Completion, Full, Geometry, IoEngine, IoError, Operation, Request, Waker};
use tests_allocations::{Counting, count};

const ROUNDS: u64 = 20_000;
const DISK_BYTES: usize = 4 << 20;
const SLOT_BYTES: u32 = 32 << 10;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

struct Silent;

impl Waker for Silent {
    fn wake(&self) {}
}

/// A disk in memory that completes in order.
struct Memory {
    bytes: Vec<u8>,
    queued: VecDeque<Request>,
    geometry: Geometry,
}

impl Memory {
    fn new() -> Self {
        let geometry = Geometry {
            block_bytes: 4096,
            transfer_bytes_max: 16 << 10,
            depth_max: 64,
            files: vec![DISK_BYTES as u64],
        };
        Self { bytes: vec![0; DISK_BYTES], queued: VecDeque::with_capacity(64), geometry }
    }

    fn apply(&mut self, request: &mut Request) {
        let start = request.offset as usize;
        let range = start..start + request.buffer.len();
        match (request.operation, &mut request.buffer) {
            (Operation::Write, Buffer::Slot { slot, offset, .. }) => {
                slot.slab().read(slot.slot(), *offset, &mut self.bytes[range]);
            }
            (Operation::Write, Buffer::Pages(pages)) => self.bytes[range].copy_from_slice(pages),
            (Operation::Read, Buffer::Slot { slot, offset, .. }) => {
                slot.slab().write(slot.slot(), *offset, &self.bytes[range]);
            }
            (Operation::Read, Buffer::Pages(pages)) => pages.copy_from_slice(&self.bytes[range]),
        }
    }
}

impl IoEngine for Memory {
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
        if self.queued.len() >= self.geometry.depth_max {
            return Err(Full(request));
        }
        self.queued.push_back(request);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), IoError> {
        Ok(())
    }

    fn poll(&mut self, budget: usize, completions: &mut Vec<Completion>) -> usize {
        let count = self.queued.len().min(budget);
        for _ in 0..count {
            let Some(mut request) = self.queued.pop_front() else { break };
            self.apply(&mut request);
            completions.push(Completion { id: request.id, buffer: request.buffer, result: Ok(()) });
        }
        count
    }

    fn wait(&mut self, _until: Option<Instant>) -> Result<(), IoError> {
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Waker> {
        Arc::new(Silent)
    }

    fn in_flight(&self) -> usize {
        self.queued.len()
    }

    fn sync(&mut self, _file: u32) -> Result<(), IoError> {
        Ok(())
    }
}

struct Bench {
    log: DiskLog,
    memory: Arc<SlotPool>,
    slot: u32,
    done: Vec<DiskCompletion>,
    start: Instant,
    round: u64,
    /// Checksum of a block of memory that was never written.
    checksum: u64,
}

impl Bench {
    fn poll(&mut self) -> DiskCompletion {
        loop {
            self.round += 1;
            let instant = self.start + Duration::from_micros(self.round * 100);
            self.log.poll(ClockReading { instant, unix_s: 1_790_000_000 }, &mut self.done);
            if let Some(done) = self.done.pop() {
                return done;
            }
        }
    }

    /// Writes a block, reads it, and forgets it.
    fn turn(&mut self) {
        self.slot = (self.slot + 1) % self.log.slot_count();
        let slot = self.slot;
        let identity = BlockIdentity([self.round as u8; 16]);
        let memory = self.memory.acquire().expect("memory");
        let block = Block { identity, parent: identity, tenant: 0, checksum: self.checksum, meta: &[9; 100] };
        assert!(self.log.write(slot, block, memory, SLOT_BYTES, 0).is_ok());
        let DiskCompletion::Written { memory: Some(memory), outcome: WriteOutcome::Stored, .. } = self.poll()
        else {
            panic!("written")
        };
        assert!(self.log.read(slot, identity, memory, ReadCheck::Log, 0).is_ok());
        let done = self.poll();
        assert!(matches!(done, DiskCompletion::Read { outcome: ReadOutcome::Verified { .. }, .. }));
        self.log.forget(slot);
    }
}

fn allocations(mut work: impl FnMut()) -> u64 {
    // Warm up first, for allocations that are made lazily.
    (0..100).for_each(|_| work());
    count(|| (0..ROUNDS).for_each(|_| work())).allocations
}

#[test]
fn blocks_come_and_go_without_allocations() {
    let config =
        DiskConfig { slot_bytes: SLOT_BYTES, table_delay: Duration::from_millis(1), ..DiskConfig::default() };
    let area = Area { file: 0, offset: 0, bytes: DISK_BYTES as u64 };
    let log =
        DiskLog::format(config, &[area], Box::new(Memory::new()), 1, ClockReading::now()).expect("a store");
    let layout = SlabLayout { slot_bytes: SLOT_BYTES as usize, slot_count: 4 };
    let slab = Slab::create("blocks", layout, PageSize::Standard).expect("slab");
    let memory = SlotPool::new(Arc::new(slab));
    let done = Vec::with_capacity(16);
    let checksum = dataplane_checksum::checksum(&[0; SLOT_BYTES as usize]);
    let mut bench = Bench { log, memory, slot: 0, done, start: Instant::now(), round: 0, checksum };
    assert_eq!(allocations(|| bench.turn()), 0);
    let counters = bench.log.counters().snapshot();
    let count =
        |name: &str| counters.iter().find(|(other, ..)| *other == name).map_or(0, |counter| counter.2);
    assert!(count("reads") > ROUNDS && count("table_writes") > 100 && count("tombstones") > ROUNDS);
    assert_eq!(allocations(|| drop(black_box(Box::new(1)))), ROUNDS, "the counter counts");
}
