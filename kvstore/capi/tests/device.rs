//! Tensors in a device's memory, over the double of the driver, whose kernels run in the emulator. Without compilers each
//! test says why it is skipped.

mod engine;

#[path = "../../../dataplane/cuda/tests/double/mod.rs"]
mod double;
#[allow(dead_code, reason = "of the emulator only the library is used")]
#[path = "../../../dataplane/kernels/tests/emulator/harness.rs"]
mod harness;

use std::time::{Duration, Instant};

use dataplane_cuda::{Cuda, Device, DeviceMemory, DeviceSlab};
use dataplane_gpu::LayoutKernels;
use dataplane_memory::SlabLayout;
use double::Double;
use engine::{Engine, Identity, Rig, name, payload};
use harness::{Random, seed};
use kvasir_kv::Status;

const PATIENCE: Duration = Duration::from_secs(30);

/// Returns the driver double, a device, and kernels that the emulator runs.
fn device() -> Option<(Double, Device, String)> {
    let double = Double::load()?;
    let library = harness::build("libkvasir_emulator.so", &["emulator.cpp"], &["-O2", "-shared", "-fPIC"])?;
    let device = Cuda::open().expect("the double starts").device(0).expect("device");
    Some((double, device, format!("emulator:{}\n", library.display())))
}

fn open(image: &str, configuration: &str) -> Rig {
    // SAFETY: the emulator is compiled from the kernels' own text.
    let kernels = |device: &Device| unsafe { LayoutKernels::load(device, image.as_bytes()) };
    Rig::new(kvasir_kv::testing::open(configuration, kernels, None).expect("opens"))
}

const SMALL: &str = "[store]\nslot = \"64 KiB\"\n[host_tier]\ncapacity = \"16 MiB\"\neviction = \"lru\"\n\
                     [device]\nstaging = \"1 MiB\"\n";

/// Shapes of planes that need one launch or several, and accesses of each width.
fn shapes(random: &mut Random) -> Vec<(usize, usize)> {
    let unit = random.one_of(&[1, 2, 4, 8, 16, 16, 16]);
    let mut shapes = Vec::new();
    for _ in 0..random.one_of(&[1, 1, 2, 4]) {
        let bytes = unit * (1 + random.below(1000 / unit as u64) as usize);
        let shape = (bytes + unit * random.below(4) as usize, bytes);
        shapes.extend(std::iter::repeat_n(shape, 1 + random.below(6) as usize));
    }
    shapes
}

/// The numbers below `count` in any order.
fn shuffled(random: &mut Random, count: usize) -> Vec<u64> {
    let mut numbers: Vec<u64> = (0..count as u64).collect();
    for left in (1..count).rev() {
        numbers.swap(left, random.below(left as u64 + 1) as usize);
    }
    numbers
}

#[test]
fn random_blocks_arrive_in_other_tensors_to_the_byte() {
    let Some((_double, device, image)) = device() else { return };
    let random = &mut Random(seed(501));
    let rig = open(&image, SMALL);
    for round in 0..40 {
        let shapes = shapes(random);
        let (mut source, mut target) =
            (Engine::new(&device, random, &shapes, 90), Engine::new(&device, random, &shapes, 120));
        let (from, to) = (rig.register(&source), rig.register(&target));
        let count = 1 + random.below(90) as usize;
        let names: Vec<Identity> = (0..count as u64).map(|at| name(round, at)).collect();
        let blocks = &shuffled(random, 90)[..count];
        assert_eq!(rig.save(from, &names, blocks), (Status::Ok as i32, count as u64), "{shapes:?}");
        assert!(source.read() == source.bytes, "the engine is as before: {shapes:?}");
        let places = &shuffled(random, 120)[..count];
        assert_eq!(rig.load(to, &names, places), (Status::Ok as i32, count as u64), "{shapes:?}");
        for (block, place) in blocks.iter().zip(places) {
            target.put(*place, &source.payload(*block));
        }
        assert!(target.read() == target.bytes, "{shapes:?}");
        // A block saved from a device is an ordinary block: `get` returns its bytes, and it can be loaded into
        // host memory.
        let one = random.below(count as u64) as usize;
        assert!(rig.get(&names[one]) == Some((Vec::new(), source.payload(blocks[one]))));
        let mut host = Engine::on_host(random, &shapes, 3);
        let there = rig.register(&host);
        assert_eq!(rig.load(there, &names[one..=one], &[2]), (0, 1));
        assert!(host.payload_now(2) == source.payload(blocks[one]));
        let ids = [from, to, there];
        assert_eq!(ids.map(|id| rig.unregister(id)), [0; 3]);
        source.bytes.clear();
    }
    let statistics = rig.statistics();
    assert!(statistics.stored > 40 && statistics.hits > 40 && statistics.throttled == 0, "{statistics:?}");
}

#[test]
fn a_load_ends_at_what_is_not_there_or_not_of_these_tensors() {
    let Some((_double, device, image)) = device() else { return };
    let random = &mut Random(seed(502));
    let rig = open(&image, SMALL);
    let shapes = [(1000, 1000), (1000, 1000)];
    let (source, target) =
        (Engine::new(&device, random, &shapes, 30), Engine::new(&device, random, &shapes, 30));
    let (from, to) = (rig.register(&source), rig.register(&target));
    let names: Vec<Identity> = (0..30).map(|at| name(1, at)).collect();
    let blocks: Vec<u64> = (0..30).collect();
    // Only absent blocks are saved: this one stays.
    rig.put(&names[7], &[], &payload(7, 2000));
    assert_eq!(rig.save(from, &names, &blocks), (0, 30));
    assert_eq!(rig.get(&names[7]), Some((Vec::new(), payload(7, 2000))));
    // Same stored length with a longer head: a meta of 62 bytes has a head of 64, one of 63 bytes a head of 128.
    for (meta, bytes, missing) in
        [(None, 0, 25), (Some(5), 2000, 20), (Some(63), 1936, 15), (Some(0), 2001, 10)]
    {
        rig.delete(&names[missing]);
        if let Some(meta) = meta {
            rig.put(&names[missing], &vec![0; meta], &payload(1, bytes));
        }
        assert_eq!(rig.load(to, &names, &blocks), (Status::Miss as i32, missing as u64), "{meta:?}");
    }
    assert_eq!(rig.load(to, &names[..10], &blocks[..10]), (0, 10));
    assert_eq!(rig.load(to, &[], &[]), (0, 0));
    let found = target.read();
    assert!(found[7 * 1000..8 * 1000] == payload(7, 2000)[..1000]);
    assert!(found[9 * 1000..10 * 1000] == source.payload(9)[..1000]);
}

#[test]
fn more_blocks_than_staging_slots_come_in_rounds() {
    let Some((_double, device, image)) = device() else { return };
    let random = &mut Random(seed(510));
    let configuration =
        "[store]\nslot = \"500 KiB\"\n[host_tier]\ncapacity = \"32 MiB\"\n[device]\nstaging = \"1 MiB\"\n";
    // Number of staging slots for saves, and for loads.
    for (slots, bytes) in [(1, 400 << 10), (2, 240 << 10), (3, 160 << 10), (11, 44 << 10)] {
        let bytes = bytes - 64;
        let rig = open(&image, configuration);
        let shapes = [(bytes, bytes)];
        let (source, mut target) =
            (Engine::new(&device, random, &shapes, 40), Engine::new(&device, random, &shapes, 40));
        let (from, to) = (rig.register(&source), rig.register(&target));
        let count = 3 * slots + 2;
        let (names, blocks): (Vec<Identity>, Vec<u64>) = (0..count).map(|at| (name(slots, at), at)).unzip();
        assert_eq!(rig.save(from, &names, &blocks), (0, count), "{slots} slots");
        assert_eq!(rig.load(to, &names, &blocks), (0, count), "{slots} slots");
        blocks.iter().for_each(|block| target.put(*block, &source.payload(*block)));
        assert!(target.read() == target.bytes, "{slots} slots");
        // In the last round.
        rig.delete(&names[count as usize - 1]);
        assert_eq!(rig.load(to, &names, &blocks), (Status::Miss as i32, count - 1), "{slots} slots");
    }
}

#[test]
fn more_than_host_memory_holds_comes_back_from_the_disk() {
    let Some((_double, device, image)) = device() else { return };
    let random = &mut Random(seed(503));
    let folder = std::env::temp_dir().join(format!("kvasir-capi-device-{}", std::process::id()));
    let _absent = std::fs::remove_dir_all(&folder);
    let configuration = format!(
        "[store]\nslot = \"16 KiB\"\n[host_tier]\ncapacity = \"400 KiB\"\n[device]\nstaging = \"2 MiB\"\n\
         [disk_tier]\ncapacity = \"8 MiB\"\nsegment = \"4 MiB\"\nengine = \"pread\"\nwrite = \"back\"\npath = \"{}\"\n",
        folder.display()
    );
    let rig = open(&image, &configuration);
    let shapes = [(8192, 8192), (8192, 8192)];
    let (source, mut target) =
        (Engine::new(&device, random, &shapes, 100), Engine::new(&device, random, &shapes, 100));
    let (from, to) = (rig.register(&source), rig.register(&target));
    let names: Vec<Identity> = (0..100).map(|at| name(1, at)).collect();
    let blocks: Vec<u64> = (0..100).collect();
    assert_eq!(rig.save(from, &names, &blocks), (0, 100));
    assert!(rig.statistics().evicted > 70, "{:?}", rig.statistics());
    assert_eq!(rig.load(to, &names, &blocks), (0, 100));
    blocks.iter().for_each(|block| target.put(*block, &source.payload(*block)));
    assert!(target.read() == target.bytes && rig.statistics().disk_read > 70);
    // Host memory has few blocks: with almost no time, blocks on the disk are misses, and stay there.
    let (before, started) = (rig.statistics(), Instant::now());
    rig.submit_within(6, 4, to, &names, &blocks, std::ptr::null_mut(), 1);
    let end = rig.poll(Duration::from_secs(30));
    assert!(end.status == 1 && end.payload_bytes < 30, "{end:?}");
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    assert_eq!(rig.statistics().damaged, before.damaged);
    assert_eq!(rig.load(to, &names, &blocks), (0, 100));
    drop(rig);
    let _left = std::fs::remove_dir_all(&folder);
}

#[test]
fn what_the_store_took_counts_though_it_has_left_again() {
    let Some((_double, device, image)) = device() else { return };
    let random = &mut Random(seed(506));
    // Two slots.
    let rig = open(&image, "[store]\nslot = \"16 KiB\"\n[host_tier]\ncapacity = \"40 KiB\"\n[device]\n");
    let shapes = [(2000, 2000)];
    let source = Engine::new(&device, random, &shapes, 60);
    let host = Engine::on_host(random, &shapes, 60);
    let blocks: Vec<u64> = (0..60).collect();
    for (round, engine) in [(1, &source), (2, &host)] {
        let id = rig.register(engine);
        let mut names: Vec<Identity> = (0..60).map(|at| name(round, at)).collect();
        names[30] = names[10];
        assert_eq!(rig.save(id, &names, &blocks), (0, 60));
        let there = names.iter().filter(|name| rig.get(name).is_some()).count();
        assert!((1..=2).contains(&there), "{there} blocks");
    }
}

#[test]
fn who_unregisters_waits_and_the_memory_may_go_then() {
    let Some((double, device, image)) = device() else { return };
    let random = &mut Random(seed(504));
    let rig = open(&image, SMALL);
    let shapes = [(500, 500)];
    let source = Engine::new(&device, random, &shapes, 20);
    let from = rig.register(&source);
    let names: Vec<Identity> = (0..20).map(|at| name(1, at)).collect();
    let blocks: Vec<u64> = (0..20).collect();
    double.set("delay_us", 5_000);
    let started = Instant::now();
    rig.submit(5, 1, from, &names, &blocks, std::ptr::null_mut());
    rig.submit(6, 2, from, &names, &blocks, std::ptr::null_mut());
    assert_eq!(rig.unregister(from), 0);
    assert!(started.elapsed() > Duration::from_millis(10), "{:?}", started.elapsed());
    // The double ends the process if a kernel reads freed memory.
    drop(source);
    double.set("delay_us", 0);
    let ends = [rig.poll(PATIENCE), rig.poll(PATIENCE)];
    assert!(ends.iter().any(|end| (end.user, end.status, end.payload_bytes) == (1, 0, 20)), "{ends:?}");
    assert_eq!(rig.unregister(from), Status::InvalidArgument as i32);
}

#[test]
fn who_closes_waits_for_the_device() {
    let Some((double, device, image)) = device() else { return };
    let random = &mut Random(seed(507));
    let rig = open(&image, SMALL);
    let source = Engine::new(&device, random, &[(500, 500)], 20);
    let from = rig.register(&source);
    let names: Vec<Identity> = (0..20).map(|at| name(1, at)).collect();
    let blocks: Vec<u64> = (0..20).collect();
    double.set("delay_us", 5_000);
    for (operation, user) in [(5, 1), (5, 2), (6, 3), (6, 4)] {
        rig.submit(operation, user, from, &names, &blocks, std::ptr::null_mut());
    }
    let launches = double.get("launches");
    while double.get("launches") == launches {
        std::thread::yield_now();
    }
    // Work in progress ends, and queued work is dropped: freed memory is not read.
    drop(rig);
    drop(source);
}

#[test]
fn what_an_event_stands_for_is_over_before_blocks_are_read() {
    let Some((double, device, image)) = device() else { return };
    let rig = open(&image, SMALL);
    let source = Engine::new(&device, &mut Random(1), &[(4096, 4096)], 4);
    let from = rig.register(&source);
    let stream = engine::EngineStream::new(&device);
    assert_eq!(rig.save(from, &[name(1, 0)], &[0]), (0, 1));
    double.set("delay_us", 5_000);
    let [zeros, results] = [0, 0x5A].map(|value| {
        let memory = DeviceSlab::allocate(&device, SlabLayout { slot_bytes: 4 * 4096, slot_count: 1 });
        let memory = memory.expect("memory");
        memory.fill(value).expect("fill");
        memory
    });
    // The engine still computes when the block is submitted, and for longer than the transfer takes.
    (0..60).for_each(|_| stream.copy(zeros.address(), source.address(), 4 * 4096));
    stream.copy(results.address(), source.address(), 4 * 4096);
    let event = stream.record();
    rig.submit(5, 1, from, &[name(1, 1)], &[2], event);
    let end = rig.poll(PATIENCE);
    assert_eq!((end.user, end.status, end.payload_bytes), (1, 0, 1));
    double.set("delay_us", 0);
    stream.destroy(event);
    drop(stream);
    assert!(rig.get(&name(1, 1)) == Some((Vec::new(), vec![0x5A; 4096])));
}

#[test]
fn what_an_event_stands_for_is_over_before_blocks_are_written() {
    let Some((double, device, image)) = device() else { return };
    let random = &mut Random(seed(508));
    let rig = open(&image, SMALL);
    let (source, target) =
        (Engine::new(&device, random, &[(4096, 4096)], 1), Engine::new(&device, random, &[(4096, 4096)], 1));
    let (from, to) = (rig.register(&source), rig.register(&target));
    assert_eq!(rig.save(from, &[name(1, 0)], &[0]), (0, 1));
    let [scratch, seen] = [(); 2].map(|()| {
        DeviceSlab::allocate(&device, SlabLayout { slot_bytes: 4096, slot_count: 1 }).expect("memory")
    });
    let stream = engine::EngineStream::new(&device);
    double.set("delay_us", 5_000);
    // The engine still reads the block when the load is submitted, and for longer than the transfer takes.
    (0..60).for_each(|_| stream.copy(target.address(), scratch.address(), 4096));
    stream.copy(target.address(), seen.address(), 4096);
    let event = stream.record();
    rig.submit(6, 1, to, &[name(1, 0)], &[0], event);
    let end = rig.poll(PATIENCE);
    assert_eq!((end.user, end.status, end.payload_bytes), (1, 0, 1));
    double.set("delay_us", 0);
    stream.destroy(event);
    drop(stream);
    let mut found = vec![0; 4096];
    seen.read(0, &mut found).expect("read");
    assert!(found == target.bytes, "what was there before the load");
    assert!(target.read() == source.bytes, "the load");
}

#[test]
fn a_device_that_fails_is_no_mistake_of_the_planes() {
    let Some((double, device, image)) = device() else { return };
    let rig = open(&image, SMALL);
    let engine = Engine::new(&device, &mut Random(1), &[(4096, 4096)], 4);
    double.set("memory", 0);
    assert_eq!(rig.try_register(&engine), (Status::Failed as i32, 0));
    assert!(rig.last_error().contains("CUDA_ERROR_OUT_OF_MEMORY"), "{}", rig.last_error());
    double.set("memory", 1 << 30);
    let ids: Vec<u64> = (0..64).map(|_| rig.register(&engine)).collect();
    assert_eq!(rig.try_register(&engine), (Status::Throttled as i32, 0));
    ids.iter().for_each(|id| assert_eq!(rig.unregister(*id), 0));
    let id = rig.register(&engine);
    double.set("fault_copy", 1);
    rig.save(id, &[name(1, 0)], &[0]);
    assert_eq!(rig.try_register(&engine), (Status::Failed as i32, 0));
    assert!(rig.last_error().contains("CUDA_ERROR"), "{}", rig.last_error());
}

#[test]
fn a_bit_that_flips_on_the_bus_is_found_by_the_device() {
    let Some((double, device, image)) = device() else { return };
    let random = &mut Random(seed(509));
    let rig = open(&image, SMALL);
    let shapes = [(4096, 4096)];
    let (source, mut target) =
        (Engine::new(&device, random, &shapes, 8), Engine::new(&device, random, &shapes, 8));
    let (from, to) = (rig.register(&source), rig.register(&target));
    let names: Vec<Identity> = (0..8).map(|at| name(1, at)).collect();
    let blocks: Vec<u64> = (0..8).collect();
    assert_eq!(rig.save(from, &names, &blocks), (0, 8));
    // Damage on the way to the device: the block in host memory is intact, and is sent again.
    double.set("damage_copies", 1);
    assert_eq!(rig.load(to, &names, &blocks), (0, 8));
    blocks.iter().for_each(|block| target.put(*block, &source.payload(*block)));
    assert!(target.read() == target.bytes);
    assert_eq!((double.get("damage_copies"), rig.statistics().damaged), (0, 1));
    // A bus that damages every copy: a miss, without endless retries.
    double.set("damage_copies", 1 << 40);
    assert_eq!(rig.load(to, &names, &blocks), (Status::Miss as i32, 0));
    double.set("damage_copies", 0);
    assert_eq!(rig.load(to, &names, &blocks), (0, 8));
    // Damage on the way to the host: found when the block is read, and discarded, also if the head is damaged.
    for (at, copies) in [(2, 1), (3, -1)] {
        double.set("damage_copies", copies);
        assert_eq!(rig.save(from, &[name(at, 0)], &[3]), (0, 1));
        assert_eq!(double.get("damage_copies"), 0);
        assert_eq!(rig.load(to, &[name(at, 0)], &[3]), (Status::Miss as i32, 0));
        assert_eq!(rig.get(&name(at, 0)), None);
        assert_eq!(rig.save(from, &[name(at, 0)], &[3]), (0, 1));
        assert_eq!(rig.load(to, &[name(at, 0)], &[3]), (0, 1));
    }
}

#[cfg(debug_assertions)]
#[test]
fn a_transfer_that_panics_is_told_when_the_device_is_done() {
    let Some((double, device, image)) = device() else { return };
    let rig = open(&image, SMALL);
    let source = Engine::new(&device, &mut Random(1), &[(500, 500)], 20);
    let from = rig.register(&source);
    let (launches, calls) = (double.get("launches"), double.get("copy_calls"));
    double.set("delay_us", 100_000);
    // Too many blocks for a kernel to read their numbers in host memory: the numbers are copied to the device.
    let (names, blocks): (Vec<Identity>, Vec<u64>) = (0..9).map(|at| (name(1, at), at)).unzip();
    rig.submit(5, 1, from, &names, &blocks, std::ptr::null_mut());
    // All work is on the stream, two launches with their arguments and results, and none has run.
    while double.get("copy_calls") < calls + 4 {
        std::thread::yield_now();
    }
    assert_eq!(double.get("launches"), launches);
    // The driver's answer is now one that a build with assertions treats as a bug.
    double.set("wrong_pop", 1);
    let end = rig.poll(PATIENCE);
    assert_eq!((end.user, end.status), (1, Status::Panicked as i32));
    assert_eq!(double.get("launches"), launches + 2, "the kernels have run");
    double.set("delay_us", 0);
    assert_eq!(rig.unregister(from), 0);
    let again = rig.register(&source);
    assert_eq!(rig.save(again, &[name(1, 0)], &[3]), (Status::Failed as i32, 0));
    assert_eq!(rig.load(again, &[name(1, 0)], &[3]), (Status::Miss as i32, 0), "another lane");
}

#[test]
fn a_lost_device_fails_transfers_and_blocks_stay() {
    let Some((double, device, image)) = device() else { return };
    let random = &mut Random(seed(505));
    let rig = open(&image, SMALL);
    let source = Engine::new(&device, random, &[(700, 700), (700, 700)], 10);
    let from = rig.register(&source);
    let names: Vec<Identity> = (0..10).map(|at| name(1, at)).collect();
    assert_eq!(rig.save(from, &names[..5], &[0, 1, 2, 3, 4]), (0, 5));
    double.set("fault_launch", 1);
    for (operation, names, blocks) in [(5, &names[5..], [5, 6, 7, 8, 9]), (6, &names[..5], [0, 1, 2, 3, 4])] {
        for _ in 0..2 {
            rig.submit(operation, 1, from, names, &blocks, std::ptr::null_mut());
            let end = rig.poll(PATIENCE);
            assert_eq!((end.status, end.payload_bytes), (Status::Failed as i32, 0), "operation {operation}");
            assert!(rig.last_error().contains("CUDA_ERROR"), "{}", rig.last_error());
        }
    }
    assert!(rig.get(&names[3]) == Some((Vec::new(), source.payload(3))), "memory has them");
}

#[test]
fn tensors_that_are_not_there_are_refused() {
    let Some((_double, device, image)) = device() else { return };
    let rig = open(&image, SMALL);
    let second = Cuda::open().expect("the double starts").device(1).expect("device");
    let elsewhere = Engine::new(&second, &mut Random(1), &[(4096, 4096)], 4);
    assert!(rig.refused(&elsewhere).contains("of device 1, not of device 0"), "{}", rig.last_error());
    let mut engine = Engine::new(&device, &mut Random(1), &[(4096, 4096)], 4);
    let allocated = engine.memory().bytes().next_multiple_of(2 << 20);
    for (device_of, blocks, text) in
        [(1, 4, "device is not 0"), (0, allocated as u64 / 4096 + 1, "cuMemGetAddressRange")]
    {
        engine.device = device_of;
        engine.blocks = blocks;
        assert!(rig.refused(&engine).contains(text), "{}", rig.last_error());
    }
    engine.device = 0;
    engine.blocks = 4;
    let shape = engine.planes[0];
    for count in 2..=17 {
        let block_stride = if count % 2 == 0 { 4096 } else { 4097 };
        engine.planes.push(kvasir_kv::Plane { block_stride, block_bytes: 64, ..shape });
    }
    assert!(rig.refused(&engine).contains("more than 15 changes"), "{}", rig.last_error());
    engine.planes.pop();
    assert_eq!(rig.unregister(rig.register(&engine)), 0);
}
