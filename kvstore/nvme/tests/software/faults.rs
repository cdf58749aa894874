//! Errors, silence, resets and removal.

use std::time::{Duration, Instant};

use kvstore_io::{Buffer, IoEngine, IoErrorKind, Operation, PageBuffer, Request};
use kvstore_nvme::testing::{Faults, SoftwareController, SoftwareDevice};
use kvstore_nvme::{NvmeConfig, NvmeEngine, NvmeError};

use crate::rig::{Rig, SLOT_BYTES, short_timeouts, slots};

/// Submits eight reads and returns their results.
fn eight_reads(rig: &mut Rig) -> Vec<Option<IoErrorKind>> {
    for id in 0..8 {
        let buffer = rig.buffer(4096);
        rig.submit(id, Operation::Read, id * 4096, buffer);
    }
    let mut completions = rig.collect();
    completions.sort_by_key(|completion| completion.id);
    assert_eq!(completions.len(), 8, "each request has one completion");
    completions.iter().map(|completion| completion.result.as_ref().err().map(|error| error.kind)).collect()
}

#[test]
fn bad_blocks_are_media_errors_and_the_rest_is_not_touched() {
    let faults = Faults { bad_blocks: 16..17, ..Faults::default() };
    let mut rig = Rig::new(SoftwareDevice::default(), faults, &NvmeConfig::default());
    let kinds = eight_reads(&mut rig);
    for (index, kind) in kinds.into_iter().enumerate() {
        assert_eq!(kind, (index == 2).then_some(IoErrorKind::Media), "read {index}");
    }
    // One bad block fails a request of several commands as a whole, once.
    let buffer = Buffer::Pages(PageBuffer::zeroed(1 << 20));
    let error = rig.run(Operation::Read, 0, buffer).expect_err("a bad block");
    assert_eq!(error.kind, IoErrorKind::Media);
    let text =
        "nvme_user: read 1048576 bytes at 0x0 of file 0: unrecovered read error (status type 2, code 0x81)";
    assert_eq!(error.to_string(), text);
    rig.check_write_and_read();
    assert_eq!(rig.engine.counters().resets, 0);
    rig.close();
}

#[test]
fn internal_errors_are_device_errors() {
    let faults = Faults { seed: 5, internal_errors_per_mille: 1000, ..Faults::default() };
    let mut rig = Rig::new(SoftwareDevice::default(), faults, &NvmeConfig::default());
    assert_eq!(eight_reads(&mut rig), [Some(IoErrorKind::Device); 8]);
    rig.controller.set_faults(Faults::default());
    rig.check_write_and_read();
    rig.close();
}

#[test]
fn lost_commands_are_aborted_one_by_one() {
    let faults = Faults { seed: 3, lost_per_mille: 1000, ..Faults::default() };
    let mut rig = Rig::new(SoftwareDevice::default(), faults, &short_timeouts());
    assert_eq!(eight_reads(&mut rig), [Some(IoErrorKind::Device); 8]);
    let counters = rig.engine.counters();
    assert_eq!((counters.aborts, counters.resets), (8, 0));
    rig.controller.set_faults(Faults::default());
    rig.check_write_and_read();
    rig.close();
}

#[test]
fn a_lost_command_that_cannot_be_aborted_ends_in_a_reset() {
    let faults = Faults { seed: 3, lost_per_mille: 1000, ignores_aborts: true, ..Faults::default() };
    let mut rig = Rig::new(SoftwareDevice::default(), faults, &short_timeouts());
    assert_eq!(eight_reads(&mut rig), [Some(IoErrorKind::Device); 8]);
    rig.controller.set_faults(Faults::default());
    rig.check_write_and_read();
    assert_eq!(rig.engine.counters().resets, 1);
    assert_eq!(rig.close().counters().enables, 2);
}

#[test]
fn wrong_completions_end_in_a_reset() {
    let base = Faults { seed: 9, ignores_aborts: true, ..Faults::default() };
    for faults in
        [Faults { wrong_phase_per_mille: 1000, ..base.clone() }, Faults { wrong_id_per_mille: 1000, ..base }]
    {
        let mut rig = Rig::new(SoftwareDevice::default(), faults, &short_timeouts());
        assert_eq!(eight_reads(&mut rig), [Some(IoErrorKind::Device); 8]);
        rig.controller.set_faults(Faults::default());
        rig.check_write_and_read();
        assert_eq!(rig.engine.counters().resets, 1);
        rig.close();
    }
}

#[test]
fn a_fatal_status_ends_in_a_reset_and_pending_requests_go_on() {
    let faults = Faults { fatal_after: Some(20), ..Faults::default() };
    let config = NvmeConfig { queue_entries: 9, ..short_timeouts() };
    let mut rig = Rig::new(SoftwareDevice::default(), faults, &config);
    for id in 0..60 {
        let buffer = rig.buffer(4096);
        rig.submit(id, Operation::Write, id * 4096, buffer);
    }
    let completions = rig.collect();
    let failed: Vec<_> =
        completions.iter().filter_map(|completion| completion.result.as_ref().err()).collect();
    assert_eq!(completions.len(), 60);
    assert!((1..=8).contains(&failed.len()), "what was in flight failed: {}", failed.len());
    assert!(failed.iter().all(|error| error.kind == IoErrorKind::Device), "{failed:?}");
    assert!(failed[0].to_string().contains("fatal status"), "{}", failed[0]);
    drop(completions);
    rig.check_write_and_read();
    rig.close();
}

#[test]
fn a_reset_that_was_asked_for_fails_what_is_in_flight_and_nothing_else() {
    let faults = Faults { seed: 3, lost_per_mille: 1000, ..Faults::default() };
    let mut rig = Rig::new(SoftwareDevice::default(), faults, &NvmeConfig::default());
    for id in 0..2 {
        let buffer = rig.buffer(4096);
        rig.submit(id, Operation::Read, 0, buffer);
        if id == 0 {
            rig.engine.flush().expect("flush");
        }
    }
    while rig.controller.counters().commands == 0 {
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(5));
    rig.controller.set_faults(Faults::default());
    rig.engine.reset();
    rig.engine.reset();
    let mut completions = rig.collect();
    completions.sort_by_key(|completion| completion.id);
    assert_eq!(completions[0].result.as_ref().expect_err("in flight").kind, IoErrorKind::Device);
    assert_eq!(completions[1].result, Ok(()), "was not handed over before");
    assert_eq!(rig.engine.counters().resets, 1);
    drop(completions);
    rig.close();
}

#[test]
fn after_a_reset_one_sync_says_that_writes_may_be_lost() {
    let mut rig = Rig::new(SoftwareDevice::default(), Faults::default(), &short_timeouts());
    rig.check_write_and_read();
    rig.controller.set_faults(Faults { fatal_after: Some(0), ..Faults::default() });
    eight_reads(&mut rig);
    let error = rig.engine.sync(0).expect_err("a reset came between");
    assert_eq!(error.kind, IoErrorKind::Device);
    rig.engine.sync(0).expect("once");
    // Without writes in between, or without a cache, there is nothing to lose.
    rig.controller.set_faults(Faults { fatal_after: Some(0), ..Faults::default() });
    eight_reads(&mut rig);
    rig.engine.sync(0).expect("nothing was written");
    assert_eq!(rig.engine.counters().resets, 2);
    rig.close();
}

#[test]
fn a_flush_that_a_reset_ends_says_once_more_that_writes_may_be_lost() {
    let mut rig = Rig::new(SoftwareDevice::default(), Faults::default(), &short_timeouts());
    rig.check_write_and_read();
    let lost = Faults { seed: 1, lost_per_mille: 1000, ignores_aborts: true, ..Faults::default() };
    rig.controller.set_faults(lost);
    assert_eq!(rig.engine.sync(0).expect_err("lost").kind, IoErrorKind::Device);
    rig.controller.set_faults(Faults::default());
    let error = rig.engine.sync(0).expect_err("the reset came between the writes and this");
    assert!(error.reason.contains("may be lost"), "{error}");
    rig.engine.sync(0).expect("once");
    rig.close();
}

#[test]
fn a_flush_after_a_reset_that_sync_waited_for_is_no_success() {
    let mut rig = Rig::new(SoftwareDevice::default(), Faults::default(), &short_timeouts());
    rig.check_write_and_read();
    let lost = Faults { seed: 1, lost_per_mille: 1000, ignores_aborts: true, ..Faults::default() };
    rig.controller.set_faults(lost);
    let buffer = rig.buffer(4096);
    rig.submit(1, Operation::Read, 0, buffer);
    rig.engine.flush().expect("flush");
    while rig.engine.counters().aborts == 0 {
        assert_eq!(rig.engine.poll(1, &mut Vec::new()), 0);
    }
    // The abort is refused by now; the engine learns of it in `sync`.
    std::thread::sleep(Duration::from_millis(20));
    rig.controller.set_faults(Faults::default());
    let error = rig.engine.sync(0).expect_err("the reset came between the writes and the flush");
    assert!(error.reason.contains("may be lost"), "{error}");
    assert_eq!(rig.engine.counters().resets, 1);
    rig.engine.sync(0).expect("once");
    assert_eq!(rig.collect().len(), 1);
    rig.close();
}

#[test]
fn a_blocking_command_survives_or_reports_a_reset() {
    let mut rig = Rig::new(SoftwareDevice::default(), Faults::default(), &short_timeouts());
    let lost = Faults { seed: 1, lost_per_mille: 1000, ignores_aborts: true, ..Faults::default() };
    rig.controller.set_faults(lost);
    assert_eq!(rig.engine.sync(0).expect_err("lost").kind, IoErrorKind::Device);
    rig.controller.set_faults(Faults::default());
    rig.engine.sync(0).expect("sync");
    assert_eq!(rig.engine.sync(1).expect_err("no file").kind, IoErrorKind::Invalid);
    rig.close();
}

#[test]
fn a_controller_that_cannot_be_disabled_is_reset_from_outside() {
    let faults = Faults {
        seed: 2,
        lost_per_mille: 1000,
        ignores_aborts: true,
        cannot_be_disabled: true,
        ..Faults::default()
    };
    let mut rig = Rig::new(SoftwareDevice::default(), faults, &short_timeouts());
    assert_eq!(eight_reads(&mut rig), [Some(IoErrorKind::Device); 8]);
    rig.controller.set_faults(Faults::default());
    rig.check_write_and_read();
    assert_eq!(rig.close().counters().resets, 1);
}

/// Checks that every request of a dead engine completes with an error at once, and that buffers come back.
fn is_dead(rig: &mut Rig) {
    for _ in 0..2 {
        let started = Instant::now();
        assert_eq!(eight_reads(rig), [Some(IoErrorKind::Device); 8]);
        assert!(started.elapsed() < Duration::from_secs(5));
    }
    assert_eq!(rig.engine.sync(0).expect_err("dead").kind, IoErrorKind::Device);
    let woken = rig.engine.waker();
    std::thread::scope(|scope| {
        scope.spawn(|| woken.wake());
        rig.engine.wait(None).expect("woken");
    });
}

#[test]
fn a_controller_that_stays_dead_fails_everything() {
    let dead = Faults { seed: 2, lost_per_mille: 1000, ignores_aborts: true, ..Faults::default() };
    for faults in [
        Faults { cannot_be_disabled: true, has_no_reset: true, ..dead.clone() },
        Faults { cannot_be_enabled: true, ..dead },
    ] {
        let mut rig = Rig::new(SoftwareDevice::default(), Faults::default(), &short_timeouts());
        rig.controller.set_faults(faults);
        is_dead(&mut rig);
        rig.close();
    }
}

#[test]
fn a_device_that_is_pulled_out_fails_everything() {
    let faults = Faults { removed_after: Some(3), ..Faults::default() };
    let mut rig = Rig::new(SoftwareDevice::default(), faults, &short_timeouts());
    let kinds = eight_reads(&mut rig);
    assert_eq!(kinds.iter().filter(|kind| kind.is_some()).count(), 5, "{kinds:?}");
    is_dead(&mut rig);
    let error = {
        let buffer = rig.buffer(4096);
        rig.run(Operation::Read, 0, buffer).expect_err("gone")
    };
    assert!(error.reason.contains("gone"), "{error}");
    rig.close();
}

#[test]
fn dropping_an_engine_with_a_command_that_never_ends_gives_the_buffer_back() {
    let faults = Faults { seed: 4, lost_per_mille: 1000, ignores_aborts: true, ..Faults::default() };
    let mut rig = Rig::new(SoftwareDevice::default(), faults, &short_timeouts());
    let buffer = rig.buffer(SLOT_BYTES);
    rig.submit(1, Operation::Read, 0, buffer);
    rig.engine.flush().expect("flush");
    rig.close();
}

#[test]
fn memory_that_is_not_registered_is_refused() {
    let mut rig = Rig::new(SoftwareDevice::default(), Faults::default(), &NvmeConfig::default());
    let foreign = slots(1);
    let buffer = Buffer::Slot { slot: foreign.acquire().expect("slot"), offset: 0, len: 4096 };
    let error = rig.run(Operation::Read, 0, buffer).expect_err("not registered");
    assert_eq!(error.kind, IoErrorKind::Unmapped);
    rig.engine.register(foreign.slab()).expect("register");
    rig.engine.register(foreign.slab()).expect("twice is once");
    let buffer = Buffer::Slot { slot: foreign.acquire().expect("slot"), offset: 0, len: 4096 };
    rig.run(Operation::Read, 0, buffer).expect("registered");
    assert_eq!(rig.controller.mapping_count(), 3);
    for _ in 0..14 {
        rig.engine.register(slots(1).slab()).expect("room for 16");
    }
    let error = rig.engine.register(slots(1).slab()).expect_err("no room");
    assert_eq!(error.kind, IoErrorKind::Unmapped, "{error}");
    rig.close();
}

#[test]
fn devices_that_cannot_be_used_are_refused_and_unmapped() {
    let attach = |controller: &SoftwareController, config: &NvmeConfig| {
        NvmeEngine::attach(controller.bus(), config).map(drop).expect_err("refused")
    };
    let controller = SoftwareController::start(SoftwareDevice::default(), Faults::default());
    let config = NvmeConfig { namespace: 2, ..short_timeouts() };
    assert!(
        matches!(attach(&controller, &config), NvmeError::Unsupported { .. }),
        "namespace 2 is not active"
    );
    let config = NvmeConfig { queue_pairs: 0, ..short_timeouts() };
    assert!(matches!(attach(&controller, &config), NvmeError::Config { key: "queue_pairs", .. }));
    controller.set_faults(Faults { cannot_be_enabled: true, ..Faults::default() });
    let error = attach(&controller, &short_timeouts());
    assert_eq!(error.to_string(), "software: enable: no answer in 500 ms");
    assert_eq!(controller.mapping_count(), 0);
    controller.remove();
    assert!(matches!(attach(&controller, &short_timeouts()), NvmeError::Removed { .. }));
}

#[test]
fn a_batch_is_one_doorbell() {
    let mut rig = Rig::new(SoftwareDevice::default(), Faults::default(), &NvmeConfig::default());
    for id in 0..50 {
        let buffer = rig.buffer(4096);
        rig.submit(id, Operation::Read, id * 4096, buffer);
    }
    assert_eq!(rig.controller.counters().commands, 0, "nothing is handed over before the flush");
    assert!(rig.collect().iter().all(|completion| completion.result.is_ok()));
    let counters = rig.engine.counters();
    assert_eq!((counters.commands, counters.doorbells), (50, 1));
    rig.close();
}

#[test]
fn a_full_engine_hands_the_request_back_also_while_the_controller_is_reset() {
    let faults = Faults { seed: 3, lost_per_mille: 1000, ignores_aborts: true, ..Faults::default() };
    let config = NvmeConfig { requests_max: 4, ..short_timeouts() };
    let mut rig = Rig::new(SoftwareDevice::default(), faults, &config);
    for round in 0..3 {
        for id in 0..4 {
            let buffer = rig.buffer(4096);
            rig.submit(id, Operation::Read, 0, buffer);
        }
        let buffer = rig.buffer(4096);
        let request = Request { id: 99, operation: Operation::Read, file: 0, offset: 0, buffer };
        assert_eq!(rig.engine.submit(request).expect_err("full").0.id, 99);
        assert_eq!(rig.collect().len(), 4, "round {round}");
    }
    assert_eq!(rig.engine.counters().resets, 3);
    rig.close();
}
