//! The driver on a real device, or on one that an emulator plays: `KVSTORE_NVME_DEVICE` is its PCI address, bound to
//! vfio-pci. Its contents are destroyed. `KVSTORE_NVME_BAD_OFFSET` is a byte offset that it cannot read.
//! Run with `--test-threads=1`: a device belongs to one engine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use kvstore_io::testing::{Conformance, conformance};
use kvstore_io::{Buffer, Completion, IoEngine, IoErrorKind, Operation, PageBuffer, Request};
use kvstore_nvme::{Bus, NvmeConfig, NvmeEngine, NvmeError, PciAddress, VfioBus};

fn address() -> Option<PciAddress> {
    let Ok(text) = std::env::var("KVSTORE_NVME_DEVICE") else {
        eprintln!("SKIPPED: KVSTORE_NVME_DEVICE names no device");
        return None;
    };
    Some(text.parse().expect("KVSTORE_NVME_DEVICE is a PCI address"))
}

fn bad_offset() -> Option<u64> {
    let text = std::env::var("KVSTORE_NVME_BAD_OFFSET").ok()?;
    Some(text.parse().expect("KVSTORE_NVME_BAD_OFFSET is a number"))
}

fn slots(slot_bytes: usize, slot_count: u32) -> Arc<SlotPool> {
    let layout = SlabLayout { slot_bytes, slot_count };
    let slab = Slab::create("nvme device test", layout, PageSize::HugeIfAvailable).expect("slab");
    SlotPool::new(Arc::new(slab))
}

fn collect(engine: &mut NvmeEngine, completions: &mut Vec<Completion>) {
    engine.flush().expect("flush");
    let started = Instant::now();
    while engine.in_flight() > 0 {
        if engine.poll(usize::MAX, completions) == 0 {
            assert!(started.elapsed() < Duration::from_secs(60), "{} stuck", engine.in_flight());
            engine.wait(Some(Instant::now() + Duration::from_millis(100))).expect("wait");
        }
    }
}

fn run_conformance(config: NvmeConfig) {
    let Some(address) = address() else { return };
    let mut open = || -> Box<dyn IoEngine> {
        let engine = NvmeEngine::open(address, &config).expect("open");
        let bytes = engine.geometry().files[0];
        let (pairs, huge) = (engine.queue_pairs(), engine.has_huge_pages());
        eprintln!("{address}: {:?}, {bytes} bytes, {pairs} pairs, huge pages: {huge}", engine.identity());
        Box::new(engine)
    };
    conformance(&mut open, &Conformance { requests: 600, ..Conformance::default() });
}

#[test]
fn conforms_with_scatter_gather() {
    run_conformance(NvmeConfig { transfer_bytes_max: 2 << 20, ..NvmeConfig::default() });
}

#[test]
fn conforms_with_page_lists_and_three_pairs() {
    let config = NvmeConfig { queue_pairs: 3, queue_entries: 16, use_sgl: false, ..NvmeConfig::default() };
    run_conformance(NvmeConfig { transfer_bytes_max: 1 << 20, ..config });
}

/// Resets in the middle of reads and writes: each request has one completion, good or a device error, and
/// blocks written before and not touched since are intact afterwards.
#[test]
fn resets_under_load_lose_nothing_that_was_written() {
    let Some(address) = address() else { return };
    let mut engine = NvmeEngine::open(address, &NvmeConfig::default()).expect("open");
    let pool = slots(64 << 10, 64);
    engine.register(pool.slab()).expect("register");
    let mut completions = Vec::new();
    for id in 0..32_u64 {
        let slot = pool.acquire().expect("slot");
        slot.slab().write(slot.slot(), 0, &[id as u8 + 1; 64 << 10]);
        let buffer = Buffer::Slot { slot, offset: 0, len: 64 << 10 };
        engine
            .submit(Request { id, operation: Operation::Write, file: 0, offset: id << 16, buffer })
            .expect("room");
    }
    collect(&mut engine, &mut completions);
    assert!(completions.drain(..).all(|completion| completion.result.is_ok()));
    engine.sync(0).expect("sync");

    let (mut failed, mut succeeded) = (0, 0);
    for round in 0..10 {
        for id in 0..64_u64 {
            let buffer = Buffer::Slot { slot: pool.acquire().expect("slot"), offset: 0, len: 64 << 10 };
            let (operation, offset) = match id % 2 {
                0 => (Operation::Read, (id % 32) << 16),
                _ => (Operation::Write, (64 + id) << 16),
            };
            engine.submit(Request { id, operation, file: 0, offset, buffer }).expect("room");
        }
        engine.flush().expect("flush");
        let until = Instant::now() + Duration::from_micros(300 * round);
        while Instant::now() < until {
            engine.poll(1, &mut completions);
        }
        engine.reset();
        collect(&mut engine, &mut completions);
        assert_eq!(completions.len(), 64, "round {round}");
        for completion in completions.drain(..) {
            match completion.result {
                Ok(()) => succeeded += 1,
                Err(error) => {
                    assert_eq!(error.kind, IoErrorKind::Device, "{error}");
                    failed += 1;
                }
            }
        }
        // The next reset must find a controller that works.
        let buffer = Buffer::Pages(PageBuffer::zeroed(4096));
        engine
            .submit(Request { id: 0, operation: Operation::Read, file: 0, offset: 0, buffer })
            .expect("room");
        collect(&mut engine, &mut completions);
        assert!(completions.drain(..).all(|completion| completion.result.is_ok()));
    }
    eprintln!("{succeeded} requests succeeded and {failed} failed in {:?}", engine.counters());
    assert_eq!(engine.counters().resets, 10);
    assert!(failed > 0, "a reset met requests in flight");
    for id in 0..32_u64 {
        let buffer = Buffer::Slot { slot: pool.acquire().expect("slot"), offset: 0, len: 64 << 10 };
        engine
            .submit(Request { id, operation: Operation::Read, file: 0, offset: id << 16, buffer })
            .expect("room");
    }
    collect(&mut engine, &mut completions);
    for completion in &completions {
        completion.result.as_ref().expect("read after resets");
        let Buffer::Slot { slot, .. } = &completion.buffer else { panic!("a slot") };
        let mut bytes = vec![0; 64 << 10];
        slot.slab().read(slot.slot(), 0, &mut bytes);
        assert!(bytes.iter().all(|&byte| u64::from(byte) == completion.id + 1), "{}", completion.id);
    }
}

#[test]
fn the_function_is_reset_from_outside() {
    let Some(address) = address() else { return };
    let mut bus = VfioBus::open(address).expect("open");
    match bus.reset() {
        Err(NvmeError::Unsupported { .. }) => eprintln!("SKIPPED: the function has no reset"),
        reset => reset.expect("reset"),
    }
    let mut engine = NvmeEngine::attach(bus, &NvmeConfig::default()).expect("attach after a reset");
    let buffer = Buffer::Pages(PageBuffer::zeroed(4096));
    engine.submit(Request { id: 1, operation: Operation::Read, file: 0, offset: 0, buffer }).expect("room");
    let mut completions = Vec::new();
    collect(&mut engine, &mut completions);
    assert_eq!(completions[0].result, Ok(()));
}

#[test]
fn a_device_in_use_is_refused() {
    let Some(address) = address() else { return };
    let engine = NvmeEngine::open(address, &NvmeConfig::default()).expect("open");
    let error = NvmeEngine::open(address, &NvmeConfig::default()).map(drop).expect_err("twice");
    assert!(matches!(error, NvmeError::Busy { .. }), "{error}");
    drop(engine);
    NvmeEngine::open(address, &NvmeConfig::default()).expect("open again");
}

#[test]
fn a_bad_block_is_a_media_error() {
    let (Some(address), Some(bad)) = (address(), bad_offset()) else {
        eprintln!("SKIPPED: KVSTORE_NVME_BAD_OFFSET names no bad block");
        return;
    };
    let mut engine = NvmeEngine::open(address, &NvmeConfig::default()).expect("open");
    let mut completions = Vec::new();
    for id in 0..16_u64 {
        let offset = (bad & !0xfff) + (id << 12) - (8 << 12);
        let buffer = Buffer::Pages(PageBuffer::zeroed(4096));
        engine.submit(Request { id, operation: Operation::Read, file: 0, offset, buffer }).expect("room");
    }
    collect(&mut engine, &mut completions);
    completions.sort_by_key(|completion| completion.id);
    for completion in completions {
        match completion.id {
            8 => {
                let error = completion.result.expect_err("the bad block");
                eprintln!("{error}");
                assert_eq!(error.kind, IoErrorKind::Media);
            }
            _ => assert_eq!(completion.result, Ok(()), "{}", completion.id),
        }
    }
    assert_eq!(engine.counters().resets, 0);
}
