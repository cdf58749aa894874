//! Checks of driving an engine: bounds, budget, sleep and drop.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::rig::{Rig, fill};
use super::{Conformance, Open};
use crate::{Full, Operation, Request};

/// Exactly `depth_max` requests are accepted; one more is handed back unchanged; room returns.
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

/// `poll` moves at most `budget` completions, keeps the rest, and does not clear the vector.
pub fn poll_keeps_its_budget(open: &mut Open<'_>, options: &Conformance) {
    let mut rig = Rig::new(open, options, 64 << 10, 16);
    let count = rig.engine.geometry().depth_max.min(8);
    for id in 0..count as u64 {
        // Every other request is invalid: it needs no device, but counts against the budget as well.
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

/// `wait` sleeps, ends in time, ends for a completion, and a waker ends it from another thread, also in
/// advance.
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

    // Woken from another thread; `wait` may return early, but not all the time: it must sleep.
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

    // A completion also ends the sleep.
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

/// Dropping an engine waits for requests in flight: buffers are free, and flushed writes have landed.
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
        // Requests that were not flushed give back their buffers as well.
        let buffer = rig.buffer(0, len);
        rig.submit(Request { id: 0, operation: Operation::Read, file: 0, offset: 0, buffer });
        let Rig { engine, slots, .. } = rig;
        drop(engine);
        assert_eq!(slots.used_count(), 0, "a request that was not flushed keeps its buffer (round {round})");
    }
}

/// `sync` succeeds, and writes from before and after it are read back, also by the next engine.
pub fn sync(open: &mut Open<'_>, options: &Conformance) {
    let mut rig = Rig::new(open, options, 64 << 10, 1);
    let len = rig.engine.geometry().transfer_bytes_max.min(64 << 10);
    for (index, tag) in [(0, 5 << 20), (1, 6 << 20), (2, 7 << 20)] {
        let buffer = rig.buffer(0, len);
        rig.write(0, index * len as u64, buffer, tag);
    }
    for file in 0..rig.engine.geometry().files.len() as u32 {
        rig.engine.sync(file).expect("sync");
    }
    for (index, tag) in [(0, 5 << 20), (1, 6 << 20), (2, 7 << 20)] {
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
