//! The copy queue over the double of the driver: results, order, and the completions after failures.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_cuda::{
    Completion, CopyQueue, CopyQueueConfig, CopyRequest, Cuda, Device, DeviceMemory, DeviceSlab, Pinned,
    Place, Priority, Region, RegionId, Rows, Stream, SubmitError,
};
use dataplane_memory::{PageSize, Slab, SlabLayout};

use crate::double::Double;

const SLOT_BYTES: usize = 4096;
const SLOTS: u32 = 8;

/// A queue with a host region, one on its device, and one on the other device.
struct Rig {
    queue: CopyQueue,
    host: Arc<Slab>,
    near: Arc<DeviceSlab>,
    far: Arc<DeviceSlab>,
    regions: [RegionId; 3],
    completions: Vec<Completion>,
}

impl Rig {
    fn new(config: CopyQueueConfig) -> Self {
        let cuda = Cuda::open().expect("the double starts");
        let device = |ordinal| -> Device { cuda.device(ordinal).expect("device") };
        let (first, second) = (device(0), device(1));
        let layout = SlabLayout { slot_bytes: SLOT_BYTES, slot_count: SLOTS };
        let host = Arc::new(Slab::create("copies", layout, PageSize::Standard).expect("slab"));
        let near = Arc::new(DeviceSlab::allocate(&first, layout).expect("slab"));
        let far = Arc::new(DeviceSlab::allocate(&second, layout).expect("slab"));
        near.fill(0).expect("fill");
        far.fill(0).expect("fill");
        let stream = Stream::new(&first, Priority::Urgent).expect("stream");
        let mut queue = CopyQueue::new(stream, config).expect("queue");
        let pinned = Arc::new(Pinned::register(&first, host.clone()).expect("register"));
        let regions = [Region::Host(pinned), Region::Device(near.clone()), Region::Device(far.clone())];
        let regions = regions.map(|region| queue.add_region(region).expect("region"));
        Self { queue, host, near, far, regions, completions: Vec::new() }
    }

    fn place(&self, region: usize, slot: u32, offset: usize) -> Place {
        Place { region: self.regions[region], slot, offset }
    }

    /// Returns a copy from the host's slot to the device's.
    fn down(&self, from: u32, to: u32) -> CopyRequest {
        CopyRequest::contiguous(self.place(0, from, 0), self.place(1, to, 0), SLOT_BYTES)
    }

    /// Polls until no token is in flight and returns the completions.
    fn drain(&mut self) -> Vec<Completion> {
        let started = Instant::now();
        self.queue.flush();
        while self.queue.in_flight() > 0 {
            self.queue.poll(3, &mut self.completions);
            assert!(started.elapsed() < Duration::from_secs(30), "{} stuck", self.queue.in_flight());
        }
        assert_eq!(self.queue.poll(100, &mut self.completions), 0, "no token twice");
        std::mem::take(&mut self.completions)
    }

    fn bytes(&self, region: usize) -> Vec<u8> {
        let mut bytes = vec![0; SLOT_BYTES * SLOTS as usize];
        match region {
            0 => {
                for (slot, bytes) in bytes.chunks_mut(SLOT_BYTES).enumerate() {
                    self.host.read(slot as u32, 0, bytes);
                }
            }
            1 => self.near.read(0, &mut bytes).expect("read"),
            _ => self.far.read(0, &mut bytes).expect("read"),
        }
        bytes
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % end
    }
}

/// Random copies between all regions, against a model of byte arrays. Within a flush no copy accesses bytes
/// that another one writes.
fn model(double: &Double, seed: u64, flushes: usize) {
    let mut random = Random(seed);
    let mut rig = Rig::new(CopyQueueConfig { copies_max: 40, tokens_max: 64, flushes_max: 3 });
    let mut expected: Vec<Vec<u8>> = Vec::new();
    for slot in 0..SLOTS {
        let bytes: Vec<u8> = (0..SLOT_BYTES).map(|_| random.below(256) as u8).collect();
        rig.host.write(slot, 0, &bytes);
    }
    (0..3).for_each(|region| expected.push(rig.bytes(region)));
    let (mut token, mut seen) = (0_u64, Vec::new());
    let pageable = double.get("pageable");
    for _ in 0..flushes {
        // Slots that no copy of this flush reads or writes yet.
        let mut free: Vec<(usize, u32)> =
            (0..3).flat_map(|region| (0..SLOTS).map(move |slot| (region, slot))).collect();
        let before = expected.clone();
        for _ in 0..1 + random.below(6) {
            let to = free.swap_remove(random.below(free.len()));
            let sources: Vec<_> = free.split_off(free.len() / 2);
            let from = sources[random.below(sources.len())];
            free.extend(sources.iter().filter(|slot| **slot != from));
            let rows = match random.below(3) {
                0 => Rows::contiguous(random.below(SLOT_BYTES + 1)),
                1 => Rows {
                    bytes: 64,
                    count: 1 + random.below(8),
                    from_stride: 64 + random.below(300),
                    to_stride: 128,
                },
                _ => Rows { bytes: 32, count: 10, from_stride: 32, to_stride: 32 },
            };
            let copy = CopyRequest { from: rig.place(from.0, from.1, 0), to: rig.place(to.0, to.1, 0), rows };
            loop {
                match rig.queue.submit(&copy, token) {
                    Ok(()) => break,
                    Err(SubmitError::Full) => _ = rig.queue.poll(2, &mut seen),
                    Err(refusal) => panic!("{refusal}"),
                }
            }
            for row in 0..rows.count {
                let source = from.1 as usize * SLOT_BYTES + row * rows.from_stride;
                let target = to.1 as usize * SLOT_BYTES + row * rows.to_stride;
                let bytes = before[from.0][source..source + rows.bytes].to_vec();
                expected[to.0][target..target + rows.bytes].copy_from_slice(&bytes);
            }
            token += 1;
        }
        rig.queue.flush();
        rig.queue.poll(random.below(4), &mut seen);
    }
    seen.extend(rig.drain());
    assert_eq!(double.get("pageable"), pageable, "host memory was pinned");
    assert!(seen.iter().all(|completion| completion.result.is_ok()), "seed {seed}");
    let tokens: Vec<u64> = seen.iter().map(|completion| completion.token).collect();
    assert!(tokens.iter().copied().eq(0..token), "seed {seed}: each once, in order: {tokens:?}");
    for (region, expected) in expected.iter().enumerate() {
        assert!(rig.bytes(region) == *expected, "seed {seed}: region {region}");
    }
}

#[test]
fn bytes_arrive_as_in_the_model() {
    let Some(double) = Double::load() else { return };
    let base =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("clock").as_nanos() as u64;
    eprintln!("seeds {base} and following");
    for round in 0..12 {
        double.set("delay_us", if round % 3 == 0 { 200 } else { 0 });
        double.set("refuse_batch", if round % 4 == 1 { 801 } else { 0 });
        model(&double, base + round, 60);
    }
}

#[test]
fn flushes_run_in_order_and_completions_wait_for_the_device() {
    let Some(double) = Double::load() else { return };
    let mut rig = Rig::new(CopyQueueConfig { flushes_max: 4, ..CopyQueueConfig::default() });
    double.set("delay_us", 20_000);
    rig.host.write(0, 0, &[9; SLOT_BYTES]);
    let hops = [(0, 1), (1, 1), (1, 2), (2, 0)];
    for (hop, (from, to)) in hops.into_iter().enumerate() {
        let copy = CopyRequest::contiguous(
            rig.place(from, hop as u32, 0),
            rig.place(to, hop as u32 + 1, 0),
            SLOT_BYTES,
        );
        rig.queue.submit(&copy, hop as u64).expect("room");
        rig.queue.flush();
    }
    assert_eq!(rig.queue.poll(10, &mut rig.completions), 0, "the first takes 20 ms");
    let tokens: Vec<u64> = rig.drain().iter().map(|completion| completion.token).collect();
    assert_eq!(tokens, [0, 1, 2, 3]);
    let mut bytes = [0; SLOT_BYTES];
    rig.host.read(4, 0, &mut bytes);
    assert_eq!(bytes, [9; SLOT_BYTES], "each hop saw the one before");
}

#[test]
fn small_copies_are_one_call_and_neighbours_one_piece() {
    let Some(double) = Double::load() else { return };
    let mut rig = Rig::new(CopyQueueConfig::default());
    (0..SLOTS).for_each(|slot| rig.queue.submit(&rig.down(slot, SLOTS - 1 - slot), 1).expect("room"));
    assert_eq!(double.growth("batch_calls", || rig.queue.flush()), 1);
    let all: Vec<CopyRequest> = (0..SLOTS).map(|slot| rig.down(slot, slot)).collect();
    rig.queue.submit_batch(&all, 2).expect("room");
    let before = double.get("batch_calls");
    assert_eq!(double.growth("copy_calls", || rig.queue.flush()), 1, "they are one piece");
    assert_eq!(double.get("batch_calls"), before);
    assert_eq!(rig.drain().len(), SLOTS as usize + 1);
    let counters = rig.queue.counters();
    assert_eq!((counters.copies, counters.calls, counters.flushes), (16, 2, 2));
    assert_eq!(counters.bytes, 2 * SLOT_BYTES as u64 * u64::from(SLOTS));
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_of_it_is_done() {
    let Some(double) = Double::load() else { return };
    let mut rig = Rig::new(CopyQueueConfig { copies_max: 4, tokens_max: 3, flushes_max: 1 });
    let apart: Vec<CopyRequest> = (0..5).map(|slot| rig.down(slot, 7 - slot)).collect();
    assert_eq!(rig.queue.submit_batch(&apart, 1), Err(SubmitError::TooMany { copies: 5, copies_max: 4 }));
    let outside = CopyRequest::contiguous(rig.place(0, 0, 1), rig.place(1, 0, 0), SLOT_BYTES);
    assert_eq!(rig.queue.submit_batch(&[apart[0], outside], 1), Err(SubmitError::Outside { index: 1 }));
    let overlapping = Rows { bytes: 64, count: 2, from_stride: 63, to_stride: 64 };
    assert_eq!(
        rig.queue.submit(&CopyRequest { rows: overlapping, ..apart[0] }, 1),
        Err(SubmitError::Outside { index: 0 })
    );
    assert_eq!(rig.queue.in_flight(), 0);

    double.set("delay_us", 20_000);
    rig.queue.submit_batch(&apart[..3], 1).expect("room");
    assert_eq!(rig.queue.submit_batch(&apart[3..], 2), Err(SubmitError::Full), "five pieces, four places");
    rig.queue.flush();
    rig.queue.submit(&apart[4], 2).expect("room");
    rig.queue.flush();
    assert_eq!(rig.queue.submit(&apart[3], 3), Err(SubmitError::Full), "a flush waits for the only event");
    let tokens: Vec<u64> = rig.drain().iter().map(|completion| completion.token).collect();
    assert_eq!(tokens, [1, 2]);
    (0..3).for_each(|token| rig.queue.submit(&apart[0], token).expect("room"));
    assert_eq!(rig.queue.submit(&apart[0], 3), Err(SubmitError::Full), "three tokens are in flight");
    rig.drain();
}

#[test]
fn a_refused_copy_fails_alone() {
    let Some(double) = Double::load() else { return };
    for refuse_batch in [0, 801] {
        let mut rig = Rig::new(CopyQueueConfig::default());
        double.set("refuse_batch", refuse_batch);
        for slot in 0..SLOTS {
            rig.host.write(slot, 0, &[slot as u8 + 1; SLOT_BYTES]);
            rig.queue.submit(&rig.down(slot, SLOTS - 1 - slot), u64::from(slot)).expect("room");
        }
        // The batch is refused for its third copy; then the third of the copies that are issued one by one is
        // refused.
        double.set("refuse_copy", 3);
        rig.queue.flush();
        let is_first = refuse_batch == 0;
        let failed: Vec<u64> = rig
            .drain()
            .iter()
            .filter(|completion| completion.result.is_err())
            .map(|completion| completion.token)
            .collect();
        assert_eq!(failed, if is_first { vec![] } else { vec![2] }, "the double refuses once");
        assert_eq!(rig.queue.dead(), None);
        let bytes = rig.bytes(1);
        for slot in 0..SLOTS as usize {
            let expected = if !is_first && slot == 5 { 0 } else { SLOTS as u8 - slot as u8 };
            assert_eq!(bytes[slot * SLOT_BYTES], expected, "slot {slot}");
        }
    }
}

/// A copy to freed memory fails alone: the other copies of its batch and of merged pieces succeed.
#[test]
fn a_copy_into_freed_memory_fails_alone() {
    let Some(_double) = Double::load() else { return };
    let mut rig = Rig::new(CopyQueueConfig::default());
    let device = rig.near.device().clone();
    let stale = DeviceSlab::allocate(&device, rig.near.layout()).expect("slab");
    // SAFETY: not upheld on purpose; the double checks each access.
    let adopted = unsafe { DeviceSlab::adopt(&device, stale.address(), stale.layout()) }.expect("adopt");
    drop(stale);
    let gone = rig.queue.add_region(Region::Device(Arc::new(adopted))).expect("region");
    for token in 0..SLOTS {
        let mut copy = rig.down(token, token);
        // Neighbours: 2 and 3 are merged into one piece, and so are those before and after.
        if matches!(token, 2 | 3) {
            copy.to.region = gone;
        }
        rig.queue.submit(&copy, u64::from(token)).expect("room");
    }
    let is_ok = |end: &Completion| end.result.is_ok();
    let ends: Vec<bool> = rig.drain().iter().map(is_ok).collect();
    assert_eq!(ends, [true, true, false, false, true, true, true, true]);
    assert_eq!(
        (rig.queue.dead(), rig.queue.counters().calls),
        (None, 4),
        "a batch, then each of three pieces"
    );
    rig.queue.submit(&rig.down(0, 1), 9).expect("room");
    rig.queue.submit(&rig.down(1, 0), 9).expect("room");
    rig.queue.flush();
    assert_eq!(rig.queue.counters().calls, 5, "batches go on");
    rig.drain();
}

#[test]
fn after_a_fault_every_token_ends_once_and_the_queue_is_dead() {
    let Some(double) = Double::load() else { return };
    let base =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("clock").as_nanos() as u64;
    eprintln!("seeds {base} and following");
    for round in 0..20 {
        let mut random = Random(base + round);
        let mut rig = Rig::new(CopyQueueConfig { copies_max: 64, tokens_max: 64, flushes_max: 4 });
        double.set("delay_us", 100);
        double.set("fault_copy", 1 + random.below(60) as i64);
        let mut ends: BTreeMap<u64, bool> = BTreeMap::new();
        let mut submitted = 0;
        while submitted < 200 {
            let (from, to) = (random.below(8) as u32, random.below(8) as u32);
            match rig.queue.submit(&rig.down(from, to), submitted) {
                Ok(()) => submitted += 1,
                Err(refusal) => assert_eq!(refusal, SubmitError::Full),
            }
            if random.below(4) == 0 {
                rig.queue.flush();
            }
            rig.queue.poll(random.below(8), &mut rig.completions);
            if rig.queue.in_flight() == 64 {
                rig.queue.flush();
            }
        }
        for Completion { token, result } in rig.drain() {
            assert_eq!(ends.insert(token, result.is_ok()), None, "seed {}: {token} twice", base + round);
            if let Err(error) = result {
                assert_eq!(error.name, "CUDA_ERROR_ILLEGAL_ADDRESS");
            }
        }
        assert!(ends.keys().copied().eq(0..200), "seed {}", base + round);
        let first_failed = ends.values().position(|is_ok| !is_ok).expect("it failed");
        assert!(ends.values().skip(first_failed).all(|is_ok| !is_ok), "nothing is well after the fault");
        assert_eq!(rig.queue.dead().expect("dead").name, "CUDA_ERROR_ILLEGAL_ADDRESS");
        assert!(rig.near.read(0, &mut [0]).expect_err("dead").reason.contains("ILLEGAL_ADDRESS"));
        double.set("fault_copy", 0);
    }
}

#[test]
fn a_flush_that_cannot_be_told_the_end_of_waits_and_ends_the_queue() {
    let Some(double) = Double::load() else { return };
    let mut rig = Rig::new(CopyQueueConfig::default());
    double.set("delay_us", 30_000);
    double.set("refuse_record", 1);
    rig.host.write(0, 0, &[5; SLOT_BYTES]);
    rig.queue.submit(&rig.down(0, 0), 1).expect("room");
    let started = Instant::now();
    rig.queue.flush();
    assert!(
        started.elapsed() >= Duration::from_millis(30),
        "nothing is under way when tokens are handed back"
    );
    rig.queue.submit(&rig.down(0, 1), 2).expect("room");
    let ends: Vec<(u64, bool)> = rig.drain().iter().map(|end| (end.token, end.result.is_ok())).collect();
    assert_eq!(ends, [(1, false), (2, false)]);
    assert_eq!(rig.queue.dead().expect("dead").operation, "cuEventRecord");
}

/// After a failure that leaves open whether copies run, and a failed wait, tokens are kept until a wait
/// succeeds.
#[test]
fn tokens_are_kept_while_it_is_unknown_whether_copies_run() {
    let Some(double) = Double::load() else { return };
    let mut rig = Rig::new(CopyQueueConfig::default());
    double.set("refuse_record", 1);
    double.set("refuse_synchronise", 999);
    rig.queue.submit(&rig.down(0, 0), 1).expect("room");
    rig.queue.flush();
    assert_eq!(rig.queue.dead().expect("dead").operation, "cuEventRecord");
    for _ in 0..3 {
        assert_eq!(rig.queue.poll(10, &mut rig.completions), 0, "it may be under way");
    }
    rig.queue.submit(&rig.down(0, 1), 2).expect("room");
    assert_eq!(rig.queue.in_flight(), 2);
    double.set("refuse_synchronise", 0);
    let ends: Vec<(u64, bool)> = rig.drain().iter().map(|end| (end.token, end.result.is_ok())).collect();
    assert_eq!(ends, [(1, false), (2, false)]);
}

/// An engine's thread records a graph in the mode that forbids other threads' calls: the queue's calls are
/// made in the exempt mode, or, with a driver that has none, tried again. No token fails and the recording is
/// not invalidated.
#[test]
fn a_recording_by_another_thread_is_waited_out() {
    let Some(double) = Double::load() else { return };
    let mut rig = Rig::new(CopyQueueConfig::default());
    rig.host.write(0, 0, &[6; SLOT_BYTES]);
    double.set("capturing", 1);
    let spoilt = double.get("captures_spoilt");
    rig.queue.submit(&rig.down(0, 0), 1).expect("room");
    assert!(rig.drain()[0].result.is_ok());
    assert_eq!(rig.bytes(1)[..4], [6; 4], "blocking copies too");
    assert_eq!(double.get("captures_spoilt"), spoilt);

    double.set("no_capture_mode", 1);
    rig.queue.submit(&rig.down(0, 1), 2).expect("room");
    rig.queue.flush();
    for _ in 0..3 {
        assert_eq!(rig.queue.poll(10, &mut rig.completions), 0, "its event could not be recorded");
    }
    rig.queue.submit(&rig.down(0, 2), 3).expect("room all the same");
    let copies = double.growth("copy_calls", || rig.queue.flush());
    assert_eq!(
        (copies, rig.queue.poll(10, &mut rig.completions)),
        (1, 0),
        "copied, and not known to be over"
    );
    double.set("capturing", 0);
    rig.queue.flush();
    double.set("capturing", 1);
    assert_eq!(rig.queue.poll(10, &mut rig.completions), 0, "no event can be asked");
    double.set("capturing", 0);
    let ends: Vec<(u64, bool)> = rig.drain().iter().map(|end| (end.token, end.result.is_ok())).collect();
    assert_eq!((ends, rig.queue.dead()), (vec![(2, true), (3, true)], None));
}

/// A lack of memory does not disable batches; a driver without them does.
#[test]
fn batches_are_given_up_for_good_reasons_only() {
    let Some(double) = Double::load() else { return };
    let mut rig = Rig::new(CopyQueueConfig::default());
    let batches = |rig: &mut Rig, refusal| {
        double.set("refuse_batch", refusal);
        (0..4).for_each(|slot| rig.queue.submit(&rig.down(slot, 7 - slot), 1).expect("room"));
        let asked = double.growth("batch_calls", || rig.queue.flush());
        assert!(rig.drain().iter().all(|end| end.result.is_ok()));
        asked
    };
    let asked: Vec<i64> = [2, 0, 801, 0].into_iter().map(|refusal| batches(&mut rig, refusal)).collect();
    assert_eq!((asked, rig.queue.counters().batches_refused), (vec![1, 1, 1, 0], 2));
    assert_eq!(double.get("resolved_by_version"), 1, "the form of 12.8 was asked for");
}

#[test]
fn a_dropped_queue_waits_for_what_is_under_way() {
    let Some(double) = Double::load() else { return };
    let mut rig = Rig::new(CopyQueueConfig::default());
    double.set("delay_us", 30_000);
    rig.host.write(0, 0, &[5; SLOT_BYTES]);
    rig.queue.submit(&rig.down(0, 0), 1).expect("room");
    rig.queue.flush();
    // The end of a registration would wait too.
    let _pinned = Pinned::register(rig.near.device(), rig.host.clone()).expect("register");
    let Rig { queue, near, .. } = rig;
    drop(queue);
    double.set("delay_us", 0);
    let mut bytes = [0; 4];
    near.read(0, &mut bytes).expect("read");
    assert_eq!(bytes, [5; 4]);
}
