//! The contract on a real file, and properties of io_uring: system calls, other threads, errors, older setups.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};

use super::*;
use crate::files::{DeviceConfig, FolderConfig, open_device, open_file, open_folder};
use crate::testing::{Conformance, conformance};
use crate::{Buffer, IoEngine, IoErrorKind, Operation, PageBuffer, Request};

pub(super) struct Scratch(pub(super) PathBuf);

impl Scratch {
    pub(super) fn new(name: &str) -> Self {
        // The temporary folder is memory on some machines, without direct I/O: `KVASIR_IO_SCRATCH` names
        // another one.
        let base = std::env::var_os("KVASIR_IO_SCRATCH").map_or(std::env::temp_dir(), PathBuf::from);
        let path = base.join(format!("kvasir-uring-{name}-{}", std::process::id()));
        let _absent = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("a scratch folder");
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

fn config(depth: usize) -> RingConfig {
    RingConfig { depth, transfer_bytes_max: 1 << 20, ..RingConfig::default() }
}

fn engine(scratch: &Scratch, config: &RingConfig) -> UringEngine {
    let files = open_file(&scratch.0.join("file"), 32 << 20, true, false).expect("a file");
    open(files, config).expect("io_uring")
}

fn pool(slots: u32) -> Arc<SlotPool> {
    let layout = SlabLayout { slot_bytes: 1 << 20, slot_count: slots };
    SlotPool::new(Arc::new(Slab::create("uring", layout, PageSize::Standard).expect("slab")))
}

fn read(id: u64, offset: u64, buffer: Buffer) -> Request {
    Request { id, operation: Operation::Read, file: 0, offset, buffer }
}

#[test]
fn keeps_the_contract() {
    for (depth, direct, segments) in [(64, true, 2), (5, true, 1), (32, false, 3)] {
        let scratch = Scratch::new("contract");
        let folder = FolderConfig { direct, ..FolderConfig::new(&scratch.0, 8 << 20, segments) };
        let mut make = || {
            let files = open_folder(&folder).expect("segments");
            Box::new(open(files, &config(depth)).expect("io_uring")) as Box<dyn IoEngine>
        };
        conformance(&mut make, &Conformance { seed: 100 + depth as u64, ..Conformance::default() });
    }
}

#[test]
fn keeps_the_contract_with_a_thread_that_submits() {
    let scratch = Scratch::new("sqpoll");
    let folder = FolderConfig::new(&scratch.0, 8 << 20, 1);
    let config = RingConfig { submission_poll_idle_ms: Some(5), ..config(16) };
    let mut make = || {
        let files = open_folder(&folder).expect("segments");
        Box::new(open(files, &config).expect("io_uring")) as Box<dyn IoEngine>
    };
    conformance(&mut make, &Conformance { seed: 4, requests: 300, ..Conformance::default() });
}

#[test]
fn polling_is_refused_with_the_reason_or_keeps_the_contract() {
    let scratch = Scratch::new("iopoll");
    let folder = FolderConfig::new(&scratch.0, 8 << 20, 1);
    let config = RingConfig { io_poll: true, ..config(16) };
    match open(open_folder(&folder).expect("segments"), &config) {
        Err(error) => {
            assert_eq!(error.kind, IoErrorKind::Unsupported);
            assert!(error.reason.contains("poll_queues"), "{error}");
            eprintln!("{error}");
        }
        Ok(engine) => {
            drop(engine);
            let mut make = || {
                let files = open_folder(&folder).expect("segments");
                Box::new(open(files, &config).expect("io_uring")) as Box<dyn IoEngine>
            };
            conformance(&mut make, &Conformance { seed: 9, requests: 300, ..Conformance::default() });
        }
    }
}

/// A block device that may be overwritten, as the lab's VM has: KVASIR_IO_DEVICE=/dev/nvme0n1.
#[test]
fn keeps_the_contract_on_a_block_device() {
    let Some(path) = std::env::var_os("KVASIR_IO_DEVICE") else {
        eprintln!("SKIPPED: KVASIR_IO_DEVICE does not name a device that may be overwritten");
        return;
    };
    let device = DeviceConfig { path: path.into(), force: true, block_bytes: 4096 };
    for io_poll in [false, true] {
        let config = RingConfig { io_poll, ..config(16) };
        match open(open_device(&device).expect("the device"), &config) {
            Err(error) if io_poll && error.kind == IoErrorKind::Unsupported => {
                eprintln!("SKIPPED: {error}");
                continue;
            }
            opened => drop(opened.expect("io_uring")),
        }
        let mut make = || {
            let files = open_device(&device).expect("the device");
            Box::new(open(files, &config).expect("io_uring")) as Box<dyn IoEngine>
        };
        let options = Conformance { seed: 21, requests: 400, bytes_max: 8 << 20, ..Conformance::default() };
        conformance(&mut make, &options);
    }
}

#[test]
fn a_batch_is_one_system_call_and_an_idle_poll_is_none() {
    let scratch = Scratch::new("calls");
    let mut engine = engine(&scratch, &config(64));
    let pool = pool(32);
    engine.register(pool.slab()).expect("register");
    for id in 0..32 {
        let slot = pool.acquire().expect("a slot");
        engine.submit(read(id, id << 16, Buffer::Slot { slot, offset: 0, len: 65536 })).expect("room");
    }
    assert_eq!(engine.enters(), 0, "submitting makes no system call");
    engine.flush().expect("flush");
    assert_eq!(engine.enters(), 1);
    engine.flush().expect("nothing to flush");
    assert_eq!(engine.enters(), 1);
    std::thread::sleep(Duration::from_millis(100));
    let mut arrived = Vec::new();
    while engine.poll(64, &mut arrived) > 0 || arrived.len() < 32 {
        engine.wait(Some(Instant::now() + Duration::from_millis(10))).expect("wait");
    }
    let after = engine.enters();
    for _ in 0..1000 {
        assert_eq!(engine.poll(64, &mut arrived), 0);
    }
    assert_eq!(engine.enters(), after, "a poll that finds nothing makes no system call");
    assert!(after <= 10, "{after} system calls for 32 requests that had 100 ms");

    // A queued request and a sleep cost one call together.
    let slot = pool.acquire();
    assert!(slot.is_none(), "the completions have the buffers");
    arrived.clear();
    let slot = pool.acquire().expect("a slot");
    engine.submit(read(0, 0, Buffer::Slot { slot, offset: 0, len: 4096 })).expect("room");
    engine.wait(None).expect("wait");
    assert_eq!((engine.poll(1, &mut arrived), engine.enters()), (1, after + 1));
}

#[test]
fn another_thread_is_told_and_buffers_in_flight_are_never_reused() {
    let scratch = Scratch::new("threads");
    // An engine may be made on one thread and used on another.
    let mut engine = engine(&scratch, &config(8));
    let pool = pool(4);
    engine.register(pool.slab()).expect("register");
    let slot = pool.acquire().expect("a slot");
    let (sender, receiver) = std::sync::mpsc::channel();
    let (done, wait_for_done) = std::sync::mpsc::channel::<()>();
    let owner = std::thread::spawn(move || {
        let mut arrived = Vec::new();
        engine.submit(read(1, 0, Buffer::Slot { slot, offset: 0, len: 4096 })).expect("room");
        while engine.poll(1, &mut arrived) == 0 {
            engine.wait(None).expect("wait");
        }
        let slot = arrived.pop().map(|completion| completion.buffer).expect("a buffer");
        engine.submit(read(2, 0, slot)).expect("room");
        engine.flush().expect("flush");
        sender.send(engine).expect("hand over");
        // The engine's first thread stays alive.
        let _ended = wait_for_done.recv();
    });
    let mut engine = receiver.recv().expect("the engine");
    engine.submit(read(3, 0, Buffer::Pages(PageBuffer::zeroed(4096)))).expect("room");
    let is_told = |error: &crate::IoError| {
        let reason = "driven by another thread than the one that opened it";
        error.kind == IoErrorKind::Device && error.reason == reason
    };
    let error = engine.flush().expect_err("not its thread");
    assert!(is_told(&error), "{error}");
    // The request that the kernel has not got comes back, as do later ones; no call sleeps.
    engine.submit(read(4, 0, Buffer::Pages(PageBuffer::zeroed(4096)))).expect("room");
    let mut arrived = Vec::new();
    assert_eq!(engine.poll(2, &mut arrived), 2);
    for (completion, id) in arrived.iter().zip([3, 4]) {
        assert!(completion.id == id && completion.result.as_ref().is_err_and(is_told), "{completion:?}");
    }
    assert_eq!(engine.in_flight(), 1, "the kernel has one");
    for _ in 0..3 {
        assert!(
            is_told(&engine.wait(None).expect_err("no sleep")) && is_told(&engine.flush().expect_err("told"))
        );
    }
    drop(engine);
    assert_eq!(pool.used_count(), 1, "the kernel may write there");
    drop(done);
    owner.join().expect("the owner");
}

#[test]
fn an_engine_that_was_used_and_moved_fails_whoever_waits_first() {
    for step in 0..3 {
        let scratch = Scratch::new(&format!("moved-{step}"));
        let mut engine = engine(&scratch, &config(8));
        let mut arrived = Vec::new();
        engine.submit(read(1, 0, Buffer::Pages(PageBuffer::zeroed(4096)))).expect("room");
        while engine.poll(1, &mut arrived) == 0 {
            engine.wait(None).expect("wait");
        }
        let moved = std::thread::spawn(move || {
            engine.submit(read(2, 0, Buffer::Pages(PageBuffer::zeroed(4096)))).expect("room");
            let error = match step {
                0 => engine.wait(None).expect_err("moved"),
                1 => engine.flush().expect_err("moved"),
                _ => engine.wait(Some(Instant::now() + Duration::from_secs(60))).expect_err("moved"),
            };
            assert_eq!(error.kind, IoErrorKind::Device, "{error}");
            let mut arrived = Vec::new();
            assert_eq!((engine.poll(8, &mut arrived), engine.in_flight()), (1, 0));
            engine
        });
        let mut engine = moved.join().expect("no panic");
        // Not even on the first thread: the kernel would take the entry of a request that has come back.
        assert!(engine.flush().is_err() && engine.wait(None).is_err());
    }
}

#[test]
fn unusable_options_are_errors() {
    let scratch = Scratch::new("options");
    for (depth, transfer) in [(0, 4096), (1 << 20, 4096), (8, 0), (8, 2 << 30)] {
        let files = open_file(&scratch.0.join("file"), 1 << 20, true, false).expect("a file");
        let config = RingConfig { depth, transfer_bytes_max: transfer, ..RingConfig::default() };
        let Err(error) = open(files, &config) else { panic!("{config:?} was taken") };
        assert_eq!(error.kind, IoErrorKind::Invalid);
    }
}

#[test]
fn a_file_that_was_cut_behind_our_back_is_an_error() {
    let scratch = Scratch::new("cut");
    let mut engine = engine(&scratch, &config(8));
    let file = std::fs::OpenOptions::new().write(true).open(scratch.0.join("file")).expect("open");
    file.set_len(3 * 4096).expect("cut");
    let mut arrived = Vec::new();
    for (id, offset) in [(1, 0), (2, 1 << 20)] {
        engine.submit(read(id, offset, Buffer::Pages(PageBuffer::zeroed(16384)))).expect("room");
    }
    while arrived.len() < 2 {
        engine.wait(None).expect("wait");
        engine.poll(2, &mut arrived);
    }
    for completion in arrived {
        let error = completion.result.expect_err("it ends before");
        assert!(error.reason.contains("ends"), "{error}");
    }
}
