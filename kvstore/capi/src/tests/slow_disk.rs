//! Loads and plans over a disk that becomes slow.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dataplane_memory::Slab;
use kvstore_block::BlockIdentity;
use kvstore_io::{Buffer, Completion, Full, Geometry, IoEngine, IoError, Operation, Request, Waker};
use kvstore_store::{Plan, Prompt, RemoteCoverage};

use super::{Folder, identity, put, wait_until_written, with_slab_over};
use crate::backend::{Backend, LoadReport, Loaded, PutOutcome};
use crate::buffers::{Buffer as Memory, Destination, Ranges};
use crate::compose;
use crate::config::Settings;
use crate::store::StoreBackend;

const BYTES: usize = 16_000;
/// Blocks of host memory.
const HOST: usize = 16;
const BLOCKS: usize = 48;
const TOKENS: usize = 16;

/// Delays the completion of each read by a given number of microseconds.
struct SlowReads {
    inner: Box<dyn IoEngine>,
    delay_us: Arc<AtomicU64>,
    waiting: VecDeque<(Instant, Request)>,
}

impl SlowReads {
    fn submit_due(&mut self) {
        while self.waiting.front().is_some_and(|(due, _)| *due <= Instant::now()) {
            let Some((due, request)) = self.waiting.pop_front() else { return };
            if let Err(Full(request)) = self.inner.submit(request) {
                self.waiting.push_front((due, request));
                return;
            }
        }
    }
}

impl IoEngine for SlowReads {
    fn name(&self) -> &'static str {
        "slow"
    }
    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }
    fn register(&mut self, slab: &Arc<Slab>) -> Result<(), IoError> {
        self.inner.register(slab)
    }
    fn submit(&mut self, request: Request) -> Result<(), Full> {
        let delay = Duration::from_micros(self.delay_us.load(Ordering::Relaxed));
        let is_of_a_block = matches!(request.buffer, Buffer::Slot { .. });
        if request.operation != Operation::Read || !is_of_a_block || delay.is_zero() {
            return self.inner.submit(request);
        }
        self.waiting.push_back((Instant::now() + delay, request));
        Ok(())
    }
    fn flush(&mut self) -> Result<(), IoError> {
        self.submit_due();
        self.inner.flush()
    }
    fn poll(&mut self, budget: usize, completions: &mut Vec<Completion>) -> usize {
        self.inner.poll(budget, completions)
    }
    fn wait(&mut self, until: Option<Instant>) -> Result<(), IoError> {
        self.submit_due();
        let due = self.waiting.front().map(|(due, _)| *due);
        self.inner.wait(until.into_iter().chain(due).min())
    }
    fn waker(&self) -> Arc<dyn Waker> {
        self.inner.waker()
    }
    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.waiting.len()
    }
    fn sync(&mut self, file: u32) -> Result<(), IoError> {
        self.inner.sync(file)
    }
}

/// A store whose disk has all blocks and whose host memory has the last ones, with the disk's delay.
fn filled(folder: &Folder) -> (StoreBackend, Arc<AtomicU64>) {
    let settings = Settings::parse(&folder.configuration("1 MiB", "")).expect("valid");
    let delay_us = Arc::new(AtomicU64::new(0));
    let of_engine = Arc::clone(&delay_us);
    let disk = compose::disk(&settings, move |inner| {
        Box::new(SlowReads { inner, delay_us: of_engine, waiting: VecDeque::new() })
    });
    let (store, _) = with_slab_over(HOST as u32, Some(disk));
    for number in 0..BLOCKS as u32 {
        assert_eq!(put(&store, &identity(number), &[], &payload(number)), Ok(PutOutcome::Stored));
        wait_until_written(&store, u64::from(number) + 1);
    }
    (store, delay_us)
}

fn payload(number: u32) -> Vec<u8> {
    vec![number as u8; BYTES]
}

/// Loads the blocks with these numbers as a transfer does, and reports the time to the store.
fn load(store: &StoreBackend, numbers: &[u32], patience: Duration) -> Loaded {
    let (started, deadline) = (Instant::now(), Instant::now() + patience);
    let mut memory: Vec<Vec<u8>> = numbers.iter().map(|_| vec![0; BYTES]).collect();
    let places = memory.iter_mut().map(|bytes| {
        let buffer = Memory { start: bytes.as_mut_ptr().cast(), bytes: bytes.len() };
        // SAFETY: the memory is this function's own, and is not looked at before the destinations are gone.
        unsafe { Destination::new(Ranges::check(&[buffer]).expect("a vector is valid")) }
    });
    let mut places: Vec<Destination> = places.collect();
    let names: Vec<_> = numbers.iter().copied().map(identity).collect();
    let loaded = store.get_prefix(&names, &mut places, deadline).expect("the store runs");
    drop(places);
    let reading = started.elapsed();
    store.observe_load(&LoadReport { loaded, wanted: names.len(), started, reading, deadline });
    for (number, bytes) in numbers.iter().zip(memory).take(loaded.blocks) {
        assert!(bytes == payload(*number), "block {number}");
    }
    loaded
}

#[test]
fn a_load_ends_at_its_deadline_with_the_blocks_that_memory_has() {
    let folder = Folder::new("deadline");
    let (store, delay_us) = filled(&folder);
    let is_here = |number: &u32| store.store().is_on_host(&BlockIdentity(identity(*number)));
    let mut numbers: Vec<u32> = (0..BLOCKS as u32).filter(is_here).take(5).collect();
    assert_eq!(numbers.len(), 5);
    numbers.extend((0..BLOCKS as u32).filter(|number| !is_here(number)).take(3));
    delay_us.store(5_000_000, Ordering::Relaxed);
    let started = Instant::now();
    let loaded = load(&store, &numbers, Duration::from_millis(50));
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    assert_eq!((loaded.blocks, loaded.from_disk), (5, 0));
    assert!(loaded.asked_of_disk > 0 && store.statistics().late > 0, "{loaded:?} {:?}", store.statistics());
    let passed = load(&store, &numbers, Duration::ZERO);
    assert_eq!((passed.blocks, passed.asked_of_disk), (5, 0), "memory is not slow");
    delay_us.store(0, Ordering::Relaxed);
    assert_eq!(load(&store, &numbers, Duration::from_secs(30)).blocks, 8);
    store.close();
}

#[test]
fn plans_leave_a_disk_alone_that_became_slow_and_come_back() {
    let folder = Folder::new("plans");
    let (store, delay_us) = filled(&folder);
    // 2 ms for each token: a block takes 32 ms.
    for _ in 0..50 {
        store.store().observe_prefill(100, 0, Duration::from_millis(200));
        store.store().observe_prefill(500, 0, Duration::from_secs(1));
    }
    let chain: Vec<_> = (0..BLOCKS as u32).map(|number| BlockIdentity(identity(number))).collect();
    let prompt = Prompt {
        chain: &chain,
        groups: &[],
        device_blocks: 0,
        tokens: BLOCKS * TOKENS + 1,
        block_tokens: TOKENS,
        queued_tokens: 0,
    };
    // Returns the number of blocks that a plan loads, and the load's time beyond that of computing them.
    let ask = || match store.store().plan(&prompt, RemoteCoverage::Unknown) {
        Plan::Onboard { blocks, deadline } => {
            let numbers: Vec<u32> = (0..blocks as u32).collect();
            let started = Instant::now();
            let loaded = load(&store, &numbers, deadline.saturating_duration_since(started));
            (blocks, loaded.blocks, started.elapsed())
        }
        Plan::Recompute => (0, 0, Duration::ZERO),
        Plan::AskOthers { .. } => unreachable!("there are no others"),
    };
    let until = |what: &str, is_so: &dyn Fn(usize, usize) -> bool| {
        let patience = Instant::now() + super::PATIENCE;
        loop {
            let (planned, loaded, _) = ask();
            if is_so(planned, loaded) {
                return;
            }
            assert!(Instant::now() < patience, "{what}: {planned} blocks, {loaded} came");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    until("the first pieces are small, and grow", &|_, loaded| loaded == BLOCKS);
    // All blocks take 1.5 s to compute. The disk alone takes longer from now on; plans notice within a few loads.
    delay_us.store(4_000_000, Ordering::Relaxed);
    let mut wasted = Duration::ZERO;
    for _ in 0..20 {
        let (planned, loaded, elapsed) = ask();
        println!("{planned} planned, {loaded} came in {elapsed:?}");
        wasted += if planned > loaded { elapsed } else { Duration::ZERO };
    }
    let (planned, ..) = ask();
    assert!(planned <= HOST, "the disk is still used: {planned}");
    // The first load waits as long as computing takes; later ones are cut into small pieces.
    assert!(wasted < Duration::from_secs(6), "{wasted:?}: each of 20 loads would have waited for 1.5 s");
    assert!(store.statistics().recomputed > 0);
    delay_us.store(0, Ordering::Relaxed);
    until("probes find that it is fast again", &|_, loaded| loaded == BLOCKS);
    store.close();
}
