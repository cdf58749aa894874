//! Sleeping of `wait`, and the work that it does before.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvstore_io::{IoEngine, Operation};
use kvstore_nvme::NvmeConfig;
use kvstore_nvme::testing::{Faults, SoftwareDevice};

use crate::rig::{Rig, short_timeouts};

#[test]
fn what_is_queued_is_handed_over_before_the_sleep() {
    let mut rig = Rig::new(SoftwareDevice::default(), Faults::default(), &NvmeConfig::default());
    let buffer = rig.buffer(4096);
    rig.submit(1, Operation::Read, 0, buffer);
    let (waker, started, mut completions) = (rig.engine.waker(), Instant::now(), Vec::new());
    let (done, is_done) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        // A `wait` that forgets the request must fail this test instead of hanging it.
        scope.spawn(move || {
            let _ = is_done.recv_timeout(Duration::from_secs(10));
            waker.wake();
        });
        while rig.engine.poll(1, &mut completions) == 0 && started.elapsed() < Duration::from_secs(5) {
            rig.engine.wait(None).expect("wait");
        }
        drop(done);
    });
    assert_eq!(completions.len(), 1, "nobody called `flush`, and `wait` slept until it was woken");
    drop(completions);
    rig.close();
}

/// Checks that `wait` sleeps for as long as it was told, since nothing completes.
fn sleeps(rig: &mut Rig, length: Duration) {
    let started = Instant::now();
    rig.engine.wait(Some(started + length)).expect("wait");
    assert!(started.elapsed() >= length, "it returned after {:?}", started.elapsed());
}

#[test]
fn completions_that_nobody_will_take_do_not_keep_it_awake() {
    let mut rig = Rig::new(SoftwareDevice::default(), Faults::default(), &short_timeouts());
    for id in 0..8 {
        let buffer = rig.buffer(4096);
        rig.submit(id, Operation::Read, 0, buffer);
    }
    rig.engine.flush().expect("flush");
    while rig.controller.counters().commands < 8 {
        std::thread::yield_now();
    }
    // The commands complete, but their completions are lost with the queues.
    std::thread::sleep(Duration::from_millis(20));
    rig.controller.set_faults(Faults { cannot_be_disabled: true, has_no_reset: true, ..Faults::default() });
    rig.engine.reset();
    sleeps(&mut rig, Duration::from_millis(50));
    // The reset fails within half a second, and the engine stays dead.
    assert_eq!(rig.collect().iter().filter(|completion| completion.result.is_err()).count(), 8);
    sleeps(&mut rig, Duration::from_millis(50));
    rig.close();
}
