//! A suite that proves the contract of [`IoEngine`], clause by clause, on any engine.
//!
//! [`conformance`] opens the engine several times over the same storage, whose contents it destroys. Each check is named
//! for what it proves and panics with the seed when the engine breaks its word. Contents are generated from a tag for
//! each block, so that a block that came from another place, or from an earlier write, is told from the right one.
//!
//! For tests: it allocates and copies as it likes.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};

pub use crate::memory::{MemoryEngine, MemoryFiles};
use crate::{Buffer, Completion, Full, IoEngine, IoErrorKind, Operation, PageBuffer, Request};

/// Deterministic draws (SplitMix64, Steele et al. 2014): equal seed, equal run.
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// Any number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number below `limit`; zero when the limit is.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(limit)) >> 64) as u64
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        (self.draw() >> 11) as f64 / (1_u64 << 53) as f64 <= probability && probability > 0.0
    }
}

fn mix(mut value: u64) -> u64 {
    value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ value >> 31
}

/// What the suite may assume and how much it does.
#[derive(Debug, Clone)]
pub struct Conformance {
    /// Seed of every draw.
    pub seed: u64,
    /// Requests of the random check.
    pub requests: usize,
    /// Bytes of each file that are used, at its start and (a block) at its end.
    pub bytes_max: u64,
    /// Whether the engine takes memory that was not registered; if not, such requests must fail as `Unmapped`.
    pub unregistered: bool,
    /// Pages of the slabs that are registered.
    pub pages: PageSize,
    /// How long a batch may take before the engine counts as stuck.
    pub patience: Duration,
}

impl Default for Conformance {
    fn default() -> Self {
        Self {
            seed: 1,
            requests: 2000,
            bytes_max: 16 << 20,
            unregistered: true,
            pages: PageSize::Standard,
            patience: Duration::from_secs(30),
        }
    }
}

/// Opens the engine under test on the same storage, each time it is called. The one before is gone by then.
pub type Open<'a> = dyn FnMut() -> Box<dyn IoEngine> + 'a;

/// Every check. Needs at least 1 MiB in each file.
///
/// # Panics
/// When the engine breaks the contract; the message says which clause and the seed.
pub fn conformance(open: &mut Open<'_>, options: &Conformance) {
    eprintln!("conformance: seed {}, {} random requests", options.seed, options.requests);
    type Check = fn(&mut Open<'_>, &Conformance);
    let checks: [(&str, Check); 9] = [
        ("geometry", geometry_is_usable),
        ("sizes and alignments", sizes_and_alignments),
        ("invalid requests", invalid_requests),
        ("full", full_hands_back),
        ("budget", poll_keeps_its_budget),
        ("sleep and wake", sleep_and_wake),
        ("random requests", random_requests),
        ("drop", drop_waits),
        ("sync and discard", sync_and_discard),
    ];
    for (name, check) in checks {
        let started = Instant::now();
        check(open, options);
        eprintln!("conformance: {name}: ok, {} ms", started.elapsed().as_millis());
    }
}

/// An engine with memory for it.
struct Rig {
    engine: Box<dyn IoEngine>,
    slots: Arc<SlotPool>,
    block: usize,
    seed: u64,
    patience: Duration,
    arrived: Vec<Completion>,
    /// For messages.
    last: Option<(Operation, u64, usize)>,
}

impl Rig {
    fn new(open: &mut Open<'_>, options: &Conformance, slot_bytes: usize, slot_count: u32) -> Self {
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
    fn file_bytes(&self, file: u32, options: &Conformance) -> u64 {
        let bytes = self.engine.geometry().files[file as usize].min(options.bytes_max);
        bytes - bytes % self.block as u64
    }

    fn buffer(&self, offset: usize, len: usize) -> Buffer {
        Buffer::Slot { slot: self.slots.acquire().expect("a free slot"), offset, len }
    }

    fn submit(&mut self, request: Request) {
        let id = request.id;
        self.last = Some((request.operation, request.offset, request.buffer.len()));
        assert!(self.engine.submit(request).is_ok(), "request {id} did not fit (seed {})", self.seed);
    }

    /// Flushes, and collects completions until so many are in `arrived`.
    fn collect(&mut self, count: usize) {
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

    fn run(&mut self, operation: Operation, file: u32, offset: u64, buffer: Buffer) -> Completion {
        assert_eq!(self.engine.in_flight(), 0, "nothing else under way");
        self.submit(Request { id: offset ^ 0x5A5A, operation, file, offset, buffer });
        self.collect(1);
        assert_eq!(self.engine.in_flight(), 0);
        let completion = self.arrived.pop().expect("just counted");
        assert_eq!(completion.id, offset ^ 0x5A5A, "the caller's number comes back");
        completion
    }

    fn write(&mut self, file: u32, offset: u64, mut buffer: Buffer, tag: u64) {
        fill(&mut buffer, self.block, tag);
        let completion = self.run(Operation::Write, file, offset, buffer);
        completion
            .result
            .unwrap_or_else(|error| panic!("write at {offset:#x}: {error} (seed {})", self.seed));
    }

    fn read(&mut self, file: u32, offset: u64, mut buffer: Buffer, tag: u64) {
        fill(&mut buffer, self.block, !tag);
        let completion = self.run(Operation::Read, file, offset, buffer);
        completion.result.unwrap_or_else(|error| panic!("read at {offset:#x}: {error} (seed {})", self.seed));
        self.expect(&completion.buffer, |_| Some(tag), "what was written is read");
    }

    /// Compares each block of the buffer, tags counted up from what `tag` says for the block's index.
    fn expect(&self, buffer: &Buffer, tag: impl Fn(usize) -> Option<u64>, why: &str) {
        let bytes = copy_out(buffer);
        let mut wanted = vec![0; self.block];
        for (index, found) in bytes.chunks(self.block).enumerate() {
            let Some(tag) = tag(index) else { continue };
            pattern(&mut wanted, tag.wrapping_add(index as u64));
            assert!(found == wanted, "block {index} of {} bytes: {why} (seed {})", bytes.len(), self.seed);
        }
    }
}

/// A block's contents. No two tags have a word in common, nearly always.
fn pattern(block: &mut [u8], tag: u64) {
    let start = mix(tag);
    for (index, word) in block.chunks_mut(8).enumerate() {
        let bytes = start.wrapping_add((index as u64) << 17 | 1).to_le_bytes();
        word.copy_from_slice(&bytes[..word.len()]);
    }
}

/// Writes the pattern of `tag` + index into each block of the buffer.
fn fill(buffer: &mut Buffer, block: usize, tag: u64) {
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

/// What the geometry says can be true.
pub fn geometry_is_usable(open: &mut Open<'_>, _options: &Conformance) {
    let engine = open();
    let geometry = engine.geometry();
    assert!(geometry.block_bytes.is_power_of_two(), "{geometry:?}");
    assert!(geometry.transfer_bytes_max >= geometry.block_bytes, "{geometry:?}");
    assert!(geometry.transfer_bytes_max.is_multiple_of(geometry.block_bytes), "{geometry:?}");
    assert!(geometry.depth_max > 0 && !geometry.files.is_empty(), "{geometry:?}");
    assert!(geometry.files.iter().all(|&bytes| bytes >= 1 << 20), "the suite needs 1 MiB: {geometry:?}");
    assert!(!engine.name().is_empty());
    assert_eq!(engine.in_flight(), 0);
}

/// Every length from one block to the longest, at the file's start, at odd places and at its end, from slots and from
/// memory of their own.
pub fn sizes_and_alignments(open: &mut Open<'_>, options: &Conformance) {
    let transfer_max = open().geometry().transfer_bytes_max;
    let file_max = options.bytes_max as usize;
    let longest = transfer_max.min(file_max / 2);
    let mut rig = Rig::new(open, options, longest + transfer_max.min(64 << 10), 2);
    let block = rig.block;
    let mut random = Random(options.seed);
    let mut lengths: Vec<usize> = (1..=9).map(|blocks| blocks * block).collect();
    lengths.extend(
        std::iter::successors(Some(16 * block), |len| Some(len * 2)).take_while(|len| *len < longest),
    );
    lengths.extend([longest - block, longest]);
    lengths.retain(|len| (block..=longest).contains(len));
    for file in 0..rig.engine.geometry().files.len() as u32 {
        let (used, end) = (rig.file_bytes(file, options), rig.engine.geometry().files[file as usize]);
        let end = end - end % block as u64;
        for &len in lengths.iter().filter(|&&len| len as u64 <= used) {
            let middle = random.below((used - len as u64) / block as u64 + 1) * block as u64;
            for offset in [0, middle, end - len as u64] {
                let slack = (rig.slots.slab().layout().slot_bytes - len) / block;
                let inside = random.below(slack as u64 + 1) as usize * block;
                let tag = random.draw();
                let buffer = rig.buffer(inside, len);
                rig.write(file, offset, buffer, tag);
                let buffer = rig.buffer(0, len);
                rig.read(file, offset, buffer, tag);
                if options.unregistered && len.is_multiple_of(4096) {
                    rig.read(file, offset, Buffer::Pages(PageBuffer::zeroed(len)), tag);
                    rig.write(file, offset, Buffer::Pages(PageBuffer::zeroed(len)), !tag);
                    let buffer = rig.buffer(0, len);
                    rig.read(file, offset, buffer, !tag);
                }
            }
        }
    }
    if !options.unregistered {
        let completion = rig.run(Operation::Read, 0, 0, Buffer::Pages(PageBuffer::zeroed(block)));
        assert_eq!(completion.result.expect_err("not registered").kind, IoErrorKind::Unmapped);
    }
}

/// What breaks clause 5 completes as `Invalid`, comes back with its buffer and changes nothing.
pub fn invalid_requests(open: &mut Open<'_>, options: &Conformance) {
    let geometry = open().geometry().clone();
    let (block, transfer_max) = (geometry.block_bytes, geometry.transfer_bytes_max);
    let mut rig = Rig::new(open, options, transfer_max + 2 * block, 4);
    let (files, end) = (geometry.files.len() as u32, geometry.files[0]);
    let buffer = rig.buffer(0, 2 * block);
    rig.write(0, 0, buffer, 77);
    let (step, slot_bytes) = (block as u64, rig.slots.slab().layout().slot_bytes);
    let cases = [
        ("no such file", files, 0, 0, block),
        ("no such file either", u32::MAX, 0, 0, block),
        ("offset not aligned", 0, step / 2, 0, block),
        ("offset odd", 0, 1, 0, block),
        ("length not aligned", 0, 0, 0, block + block / 2),
        ("length zero", 0, 0, 0, 0),
        ("too long", 0, 0, 0, transfer_max + block),
        ("address not aligned", 0, 0, block / 2, block),
        ("behind the end", 0, end.next_multiple_of(step), 0, block),
        ("across the end", 0, (end / step - 1) * step, 0, 2 * block),
        ("far behind the end", 0, u64::MAX - step + 1, 0, block),
        ("the sum overflows", 0, u64::MAX - step + 1, 0, 2 * block),
        ("outside of its slot", 0, 0, slot_bytes, block),
        ("far outside of its slot", 0, 0, usize::MAX - block + 1, 2 * block),
    ];
    for (what, file, offset, inside, len) in cases {
        for operation in [Operation::Write, Operation::Read] {
            let buffer = rig.buffer(inside, len);
            let completion = rig.run(operation, file, offset, buffer);
            let error = completion.result.err().unwrap_or_else(|| panic!("{what}: {operation:?} succeeded"));
            assert_eq!(error.kind, IoErrorKind::Invalid, "{what}: {error}");
            assert_eq!(completion.buffer.len(), len, "{what}: its buffer comes back");
        }
    }
    let buffer = rig.buffer(0, 2 * block);
    rig.read(0, 0, buffer, 77);
    assert!(rig.engine.sync(files).is_err_and(|error| error.kind == IoErrorKind::Invalid), "sync of no file");
    for (file, offset, bytes) in
        [(files, 0, step), (0, 1, step), (0, end / step * step - step, 2 * step), (0, 0, step / 2)]
    {
        let refused = rig.engine.discard(file, offset, bytes);
        assert!(refused.is_err_and(|error| error.kind == IoErrorKind::Invalid), "discard {offset}+{bytes}");
    }
}

/// As many requests as `depth_max` says are taken; one more comes back whole; and room returns.
pub fn full_hands_back(open: &mut Open<'_>, options: &Conformance) {
    let depth = open().geometry().depth_max;
    let mut rig = Rig::new(open, options, 64 << 10, depth as u32 + 1);
    let len = rig.block;
    for round in 0..3 {
        for id in 0..depth as u64 {
            let buffer = rig.buffer(0, len);
            rig.submit(Request { id, operation: Operation::Read, file: 0, offset: 0, buffer });
        }
        assert_eq!(rig.engine.in_flight(), depth, "all were accepted (round {round})");
        let buffer = rig.buffer(0, len);
        let request = Request { id: 999_999, operation: Operation::Write, file: 0, offset: 0, buffer };
        let Err(Full(back)) = rig.engine.submit(request) else { panic!("{depth} and one more were taken") };
        assert_eq!((back.id, back.operation, back.buffer.len()), (999_999, Operation::Write, len));
        drop(back);
        rig.collect(depth);
        let ids: HashSet<u64> = rig.arrived.drain(..).map(|completion| completion.id).collect();
        assert_eq!(ids.len(), depth, "each completed once (round {round})");
        assert_eq!(rig.engine.in_flight(), 0);
        assert_eq!(rig.slots.used_count(), 0, "every buffer came back (round {round})");
    }
}

/// `poll` moves no more than asked for, keeps the rest, and does not clear what is there.
pub fn poll_keeps_its_budget(open: &mut Open<'_>, options: &Conformance) {
    let mut rig = Rig::new(open, options, 64 << 10, 16);
    let count = rig.engine.geometry().depth_max.min(8);
    for id in 0..count as u64 {
        // Every other one is invalid: those need no device, and must keep to the budget as well.
        let buffer = rig.buffer(0, rig.block);
        let file = if id % 2 == 0 { 0 } else { u32::MAX };
        rig.submit(Request { id, operation: Operation::Read, file, offset: 0, buffer });
    }
    rig.engine.flush().expect("flush");
    let mut arrived = Vec::new();
    let started = Instant::now();
    while arrived.len() < count {
        assert_eq!(rig.engine.poll(0, &mut arrived), 0, "a budget of nothing");
        let before = arrived.len();
        assert!(rig.engine.poll(1, &mut arrived) <= 1 && arrived.len() <= before + 1, "a budget of one");
        assert_eq!(rig.engine.in_flight(), count - arrived.len());
        assert!(started.elapsed() < rig.patience, "stuck with {} of {count}", arrived.len());
    }
    assert_eq!(rig.engine.poll(usize::MAX, &mut arrived), 0);
}

/// `wait` sleeps, ends in time, ends for a completion, and a waker ends it from another thread, also in advance.
pub fn sleep_and_wake(open: &mut Open<'_>, options: &Conformance) {
    let mut rig = Rig::new(open, options, 64 << 10, 2);
    let waker = rig.engine.waker();
    let patience = options.patience;
    let started = Instant::now();
    rig.engine.wait(Some(started)).expect("a moment that has passed");
    rig.engine.wait(Some(started + Duration::from_millis(30))).expect("sleep");
    assert!(started.elapsed() < patience, "slept beyond the moment given");

    waker.wake();
    waker.wake();
    rig.engine.wait(None).expect("woken in advance");

    // From another thread; `wait` may return early, but not all the time: it sleeps.
    let woken = std::sync::atomic::AtomicBool::new(false);
    let returns = std::thread::scope(|scope| {
        let (waker, woken) = (rig.engine.waker(), &woken);
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(150));
            woken.store(true, std::sync::atomic::Ordering::Release);
            waker.wake();
        });
        let mut returns = 0_u32;
        while !woken.load(std::sync::atomic::Ordering::Acquire) {
            rig.engine.wait(None).expect("wait");
            returns += 1;
        }
        returns
    });
    assert!(returns < 50, "wait returned {returns} times in 150 ms: it does not sleep");

    // A completion ends it as well.
    let buffer = rig.buffer(0, rig.block);
    rig.submit(Request { id: 1, operation: Operation::Read, file: 0, offset: 0, buffer });
    rig.engine.flush().expect("flush");
    let (started, mut arrived) = (Instant::now(), Vec::new());
    while arrived.is_empty() {
        rig.engine.wait(Some(Instant::now() + patience)).expect("wait");
        rig.engine.poll(1, &mut arrived);
    }
    assert!(started.elapsed() < patience, "the completion did not end the sleep");
    drop(rig);
    waker.wake();
}

/// Reads and writes of any shape, many under way, against a model of every block; then all of it once more, by an engine
/// that is opened anew.
pub fn random_requests(open: &mut Open<'_>, options: &Conformance) {
    let geometry = open().geometry().clone();
    let depth = geometry.depth_max.min(64);
    let longest = geometry.transfer_bytes_max.min(256 << 10).min(options.bytes_max as usize / 8);
    let mut rig = Rig::new(open, options, longest, depth as u32);
    let (block, mut random) = (rig.block, Random(options.seed));
    let files = geometry.files.len();
    // The tag of each block, once it was written; and who is under way there: writes exclude everything else.
    let blocks: Vec<usize> =
        (0..files).map(|f| (rig.file_bytes(f as u32, options) / block as u64) as usize).collect();
    let mut model: Vec<Vec<Option<u64>>> = blocks.iter().map(|&count| vec![None; count]).collect();
    let mut readers: Vec<Vec<u32>> = blocks.iter().map(|&count| vec![0; count]).collect();
    let mut writing: Vec<Vec<bool>> = blocks.iter().map(|&count| vec![false; count]).collect();
    // Operation, file, first block, how many, tag.
    type UnderWay = (Operation, usize, usize, usize, u64);
    let mut under_way: Vec<Option<UnderWay>> = vec![None; options.requests];
    let (mut next, mut open_count, mut completed) = (0, 0, 0);
    while completed < options.requests {
        let batch = 1 + random.below(8) as usize;
        for _ in 0..batch {
            if next == options.requests || open_count == depth {
                break;
            }
            let file = random.below(files as u64) as usize;
            // Short ones more often, so that many fit beside each other.
            let most = if random.chance(0.2) { longest / block } else { (longest / block).min(8) };
            let count = 1 + random.below(most as u64) as usize;
            let first = random.below((blocks[file] - count) as u64 + 1) as usize;
            let range = first..first + count;
            let operation = if random.chance(0.5) { Operation::Write } else { Operation::Read };
            let free = range
                .clone()
                .all(|at| !writing[file][at] && (operation == Operation::Read || readers[file][at] == 0));
            if !free {
                continue;
            }
            let slack = longest / block - count;
            let mut buffer = rig.buffer(random.below(slack as u64 + 1) as usize * block, count * block);
            let tag = random.draw();
            fill(&mut buffer, block, tag);
            for at in range {
                match operation {
                    Operation::Write => writing[file][at] = true,
                    Operation::Read => readers[file][at] += 1,
                }
            }
            under_way[next] = Some((operation, file, first, count, tag));
            let offset = (first * block) as u64;
            rig.submit(Request { id: next as u64, operation, file: file as u32, offset, buffer });
            next += 1;
            open_count += 1;
        }
        rig.engine.flush().expect("flush");
        let target = if next == options.requests || open_count == depth { 1 } else { 0 };
        let mut arrived = Vec::new();
        let started = Instant::now();
        while rig.engine.poll(16, &mut arrived) == 0 && arrived.len() < target {
            rig.engine.wait(Some(Instant::now() + Duration::from_millis(100))).expect("wait");
            assert!(
                started.elapsed() < rig.patience,
                "stuck with {open_count} under way (seed {})",
                options.seed
            );
        }
        for completion in arrived {
            let request = under_way.get_mut(completion.id as usize).and_then(Option::take);
            let Some((operation, file, first, count, tag)) = request else {
                panic!("request {} completed twice or never was (seed {})", completion.id, options.seed);
            };
            let place = format!("{operation:?} of {count} blocks at block {first} of file {file}");
            completion.result.unwrap_or_else(|error| panic!("{place}: {error} (seed {})", options.seed));
            match operation {
                Operation::Write => {
                    rig.expect(&completion.buffer, |_| Some(tag), "a write leaves its buffer alone");
                    for index in 0..count {
                        model[file][first + index] = Some(tag.wrapping_add(index as u64));
                        writing[file][first + index] = false;
                    }
                }
                Operation::Read => {
                    let known = |at: usize| model[file][first + at].map(|tag| tag.wrapping_sub(at as u64));
                    rig.expect(&completion.buffer, known, &place);
                    (first..first + count).for_each(|at| readers[file][at] -= 1);
                }
            }
            open_count -= 1;
            completed += 1;
        }
        assert_eq!(rig.engine.in_flight(), open_count, "in_flight counts (seed {})", options.seed);
    }
    drop(rig);
    let mut rig = Rig::new(open, options, longest, 1);
    let step = longest / block;
    for (file, tags) in model.iter().enumerate() {
        for (index, tags) in tags.chunks(step).enumerate() {
            if tags.iter().all(Option::is_none) {
                continue;
            }
            let (offset, buffer) = ((index * step * block) as u64, rig.buffer(0, tags.len() * block));
            let completion = rig.run(Operation::Read, file as u32, offset, buffer);
            completion.result.unwrap_or_else(|error| panic!("{error} (seed {})", options.seed));
            let known = |at: usize| tags[at].map(|tag| tag.wrapping_sub(at as u64));
            rig.expect(&completion.buffer, known, &format!("file {file} from {offset:#x}, opened anew"));
        }
    }
}

/// Dropping an engine ends what is in flight first: buffers are free, and what was flushed has landed.
pub fn drop_waits(open: &mut Open<'_>, options: &Conformance) {
    let geometry = open().geometry().clone();
    let count = geometry.depth_max.min(32);
    let len = geometry
        .transfer_bytes_max
        .min(64 << 10)
        .min((1 << 20) / count / geometry.block_bytes * geometry.block_bytes);
    for round in 0..4 {
        let mut rig = Rig::new(open, options, len, count as u32);
        let tag = |index: usize| (round * 1000 + index as u64) << 20;
        for index in 0..count {
            let mut buffer = rig.buffer(0, len);
            fill(&mut buffer, rig.block, tag(index));
            let offset = (index * len) as u64;
            rig.submit(Request { id: index as u64, operation: Operation::Write, file: 0, offset, buffer });
        }
        rig.engine.flush().expect("flush");
        let Rig { engine, slots, .. } = rig;
        drop(engine);
        assert_eq!(slots.used_count(), 0, "no buffer is kept (round {round})");
        let mut rig = Rig::new(open, options, len, 1);
        for index in 0..count {
            let buffer = rig.buffer(0, len);
            rig.read(0, (index * len) as u64, buffer, tag(index));
        }
        // What was not even flushed comes back as well.
        let buffer = rig.buffer(0, len);
        rig.submit(Request { id: 0, operation: Operation::Read, file: 0, offset: 0, buffer });
        let Rig { engine, slots, .. } = rig;
        drop(engine);
        assert_eq!(slots.used_count(), 0, "a request that was not flushed keeps its buffer (round {round})");
    }
}

/// `sync` and `discard` succeed, leave other ranges alone, and a range that was discarded can be used again.
pub fn sync_and_discard(open: &mut Open<'_>, options: &Conformance) {
    let mut rig = Rig::new(open, options, 64 << 10, 1);
    let len = rig.engine.geometry().transfer_bytes_max.min(64 << 10);
    for (index, tag) in [(0, 5 << 20), (1, 6 << 20), (2, 7 << 20)] {
        let buffer = rig.buffer(0, len);
        rig.write(0, index * len as u64, buffer, tag);
    }
    for file in 0..rig.engine.geometry().files.len() as u32 {
        rig.engine.sync(file).expect("sync");
    }
    let told = rig.engine.discard(0, len as u64, len as u64).expect("discard");
    eprintln!("conformance: {} {} discards", rig.engine.name(), if told { "passes on" } else { "ignores" });
    for (index, tag) in [(0, 5 << 20), (2, 7 << 20)] {
        let buffer = rig.buffer(0, len);
        rig.read(0, index * len as u64, buffer, tag);
    }
    let buffer = rig.buffer(0, len);
    rig.write(0, len as u64, buffer, 8 << 20);
    rig.engine.sync(0).expect("sync");
    drop(rig);
    let mut rig = Rig::new(open, options, 64 << 10, 1);
    for (index, tag) in [(0, 5 << 20), (1, 8 << 20), (2, 7 << 20)] {
        let buffer = rig.buffer(0, len);
        rig.read(0, index * len as u64, buffer, tag);
    }
}
