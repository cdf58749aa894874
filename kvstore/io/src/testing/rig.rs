//! An engine with memory for it, and contents that differ for each block of each write.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_memory::{Slab, SlabLayout, SlotPool};

use super::random::mix;
use super::{Conformance, Open};
use crate::{Buffer, Completion, IoEngine, Operation, Request};

/// An engine with memory for it.
pub(super) struct Rig {
    pub(super) engine: Box<dyn IoEngine>,
    pub(super) slots: Arc<SlotPool>,
    pub(super) block: usize,
    pub(super) seed: u64,
    pub(super) patience: Duration,
    pub(super) arrived: Vec<Completion>,
    /// The last request, for messages.
    last: Option<(Operation, u64, usize)>,
}

impl Rig {
    pub(super) fn new(
        open: &mut Open<'_>,
        options: &Conformance,
        slot_bytes: usize,
        slot_count: u32,
    ) -> Self {
        let mut engine = open();
        let slab = Slab::create("conformance", SlabLayout { slot_bytes, slot_count }, options.pages)
            .expect("memory for the suite");
        let slots = SlotPool::new(Arc::new(slab));
        engine.register(slots.slab()).expect("register a slab");
        let block = engine.geometry().block_bytes;
        let (seed, patience) = (options.seed, options.patience);
        Self { engine, slots, block, seed, patience, arrived: Vec::new(), last: None }
    }

    /// Bytes of a file that the suite uses.
    pub(super) fn file_bytes(&self, file: u32, options: &Conformance) -> u64 {
        let bytes = self.engine.geometry().files[file as usize].min(options.bytes_max);
        bytes - bytes % self.block as u64
    }

    pub(super) fn buffer(&self, offset: usize, len: usize) -> Buffer {
        Buffer::Slot { slot: self.slots.acquire().expect("a free slot"), offset, len }
    }

    pub(super) fn submit(&mut self, request: Request) {
        let id = request.id;
        self.last = Some((request.operation, request.offset, request.buffer.len()));
        assert!(self.engine.submit(request).is_ok(), "request {id} did not fit (seed {})", self.seed);
    }

    /// Flushes, and collects completions until `count` are in `arrived`.
    pub(super) fn collect(&mut self, count: usize) {
        self.engine.flush().expect("flush");
        let started = Instant::now();
        while self.arrived.len() < count {
            let before = self.arrived.len();
            let moved = self.engine.poll(usize::MAX, &mut self.arrived);
            assert_eq!(before + moved, self.arrived.len(), "poll says how many it moved");
            if moved == 0 {
                let waited = started.elapsed();
                let missing = count - self.arrived.len();
                let (last, seed) = (self.last, self.seed);
                assert!(
                    waited < self.patience,
                    "{missing} stuck for {waited:?}, last {last:?} (seed {seed})"
                );
                self.engine.wait(Some(Instant::now() + Duration::from_millis(100))).expect("wait");
            }
        }
        assert_eq!(self.arrived.len(), count, "more completions than requests (seed {})", self.seed);
    }

    pub(super) fn run(&mut self, operation: Operation, file: u32, offset: u64, buffer: Buffer) -> Completion {
        assert_eq!(self.engine.in_flight(), 0, "nothing else under way");
        self.submit(Request { id: offset ^ 0x5A5A, operation, file, offset, buffer });
        self.collect(1);
        assert_eq!(self.engine.in_flight(), 0);
        let completion = self.arrived.pop().expect("just counted");
        assert_eq!(completion.id, offset ^ 0x5A5A, "the caller's number comes back");
        completion
    }

    pub(super) fn write(&mut self, file: u32, offset: u64, mut buffer: Buffer, tag: u64) {
        fill(&mut buffer, self.block, tag);
        let completion = self.run(Operation::Write, file, offset, buffer);
        completion
            .result
            .unwrap_or_else(|error| panic!("write at {offset:#x}: {error} (seed {})", self.seed));
    }

    pub(super) fn read(&mut self, file: u32, offset: u64, mut buffer: Buffer, tag: u64) {
        fill(&mut buffer, self.block, !tag);
        let completion = self.run(Operation::Read, file, offset, buffer);
        completion.result.unwrap_or_else(|error| panic!("read at {offset:#x}: {error} (seed {})", self.seed));
        self.expect(&completion.buffer, |_| Some(tag), "what was written is read");
    }

    /// Compares each block of the buffer with the contents for the tag that `tag` returns for its index.
    pub(super) fn expect(&self, buffer: &Buffer, tag: impl Fn(usize) -> Option<u64>, why: &str) {
        let bytes = copy_out(buffer);
        let mut wanted = vec![0; self.block];
        for (index, found) in bytes.chunks(self.block).enumerate() {
            let Some(tag) = tag(index) else { continue };
            pattern(&mut wanted, tag.wrapping_add(index as u64));
            assert!(found == wanted, "block {index} of {} bytes: {why} (seed {})", bytes.len(), self.seed);
        }
    }
}

/// Generates a block's contents. No two tags have a word in common, nearly always.
fn pattern(block: &mut [u8], tag: u64) {
    let start = mix(tag);
    for (index, word) in block.chunks_mut(8).enumerate() {
        let bytes = start.wrapping_add((index as u64) << 17 | 1).to_le_bytes();
        word.copy_from_slice(&bytes[..word.len()]);
    }
}

/// Writes the pattern of `tag` + index into each block of the buffer.
pub(super) fn fill(buffer: &mut Buffer, block: usize, tag: u64) {
    let mut bytes = vec![0; buffer.len()];
    for (index, chunk) in bytes.chunks_mut(block).enumerate() {
        pattern(chunk, tag.wrapping_add(index as u64));
    }
    match buffer {
        Buffer::Slot { slot, offset, .. } => slot.slab().write(slot.slot(), *offset, &bytes),
        Buffer::Pages(pages) => pages.copy_from_slice(&bytes),
    }
}

fn copy_out(buffer: &Buffer) -> Vec<u8> {
    match buffer {
        Buffer::Slot { slot, offset, len } => {
            let mut bytes = vec![0; *len];
            slot.slab().read(slot.slot(), *offset, &mut bytes);
            bytes
        }
        Buffer::Pages(pages) => pages.to_vec(),
    }
}
