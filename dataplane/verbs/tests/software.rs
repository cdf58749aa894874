//! The fabric over the software device: the contract of transports, and failures of every kind.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::auth::{Authentication, DialledAddress, SharedKey, Transport, Versions};
use dataplane_fabric::testing::{Pair, conformance, pool};
use dataplane_fabric::{
    Completion, Event, Fabric, Full, MESSAGE_BYTES_MAX, Operation, PeerAccess, Priority, Rows, SlotRange,
    Source, Target, WorkRequest,
};
use dataplane_memory::SlabKind;
use dataplane_verbs::testing::{
    EVENT_DEVICE_FATAL, EVENT_PORT_ERROR, Faults, SoftwareDevice, forge_remote_key, forge_slot_count,
};
use dataplane_verbs::{Library, VerbsConfig, VerbsFabric};
use support::{Two, loopback, small, write};

fn two(config: &VerbsConfig) -> (Two, SoftwareDevice, SoftwareDevice) {
    let (device_a, device_b) = (SoftwareDevice::new(), SoftwareDevice::new());
    let two = Two::new(
        device_a.open().expect("open"),
        device_b.open().expect("open"),
        config.clone(),
        config.clone(),
    );
    (two, device_a, device_b)
}

fn conforms(config: &VerbsConfig) {
    conformance(&mut || {
        let (pool_a, pool_b) = (pool("a"), pool("b"));
        let (device_a, device_b) = (SoftwareDevice::new(), SoftwareDevice::new());
        let make = |device: &SoftwareDevice, slab| {
            VerbsFabric::new(device.open().expect("open"), slab, Some(loopback()), config.clone())
                .expect("fabric")
        };
        let (a, b) = (make(&device_a, pool_a.slab()), make(&device_b, pool_b.slab()));
        let address_of_b = b.listening_on().expect("listening").to_string();
        Pair {
            a: Some(Box::new(a)),
            b: Some(Box::new(b)),
            pool_a,
            pool_b,
            address_of_b,
            tick: Box::new(|| {}),
        }
    });
}

#[test]
fn conforms_to_the_contract() {
    conforms(&small());
}

#[test]
fn conforms_with_the_default_settings() {
    conforms(&VerbsConfig::default());
}

/// All sizes as small as possible: queues wrap, credits run out, messages travel in many pieces.
#[test]
fn conforms_when_everything_is_scarce() {
    conforms(&VerbsConfig {
        send_queue_depth: 16,
        request_queue_depth: 16,
        signal_every: 3,
        entries_max: 2,
        inline_bytes: 0,
        completion_entries: 256,
        receive_buffers: 16,
        receive_buffer_bytes: 256,
        receive_credits: 2,
        send_buffers: 8,
        relaxed_ordering: false,
        ..VerbsConfig::default()
    });
}

/// A set of transports moves its fabrics to its own thread.
#[test]
fn a_fabric_can_move_to_another_thread() {
    let (two, ..) = two(&small());
    let fabric: Box<dyn Fabric + Send> = Box::new(two.a);
    let name = std::thread::spawn(move || fabric.name()).join().expect("the thread");
    assert_eq!(name, "rdma");
}

#[test]
fn nothing_is_left_when_fabrics_are_dropped() {
    let (mut two, device_a, device_b) = two(&small());
    two.write_and_wait(1, 100);
    assert_eq!(device_a.usage().queue_pairs, 2);
    let waiting = two.slot_write(2, 4096);
    two.a.post(waiting).expect("room");
    drop(two);
    for device in [device_a, device_b] {
        assert_eq!(device.usage(), Default::default(), "leaked");
    }
}

#[test]
fn a_bad_remote_key_is_an_error_of_the_peers_card() {
    let (mut two, ..) = two(&small());
    let to_b = two.to_b;
    forge_remote_key(&mut two.a, to_b, 0xBAD);
    let request = two.slot_write(7, 64);
    two.a.post(request).expect("room");
    two.until("both ends", |two| two.is_down());
    let reason = two.reason_at_a();
    assert!(reason.contains("remote access error (code 10)"), "{reason}");
    assert!(reason.contains("on soft") && reason.contains("127.0.0.1:"), "names device and peer: {reason}");
    assert_eq!(two.completion_at_a(7), Some(Completion::PeerDown));
    assert_eq!(two.a.metrics().remote_access_errors, 1);
    assert!(two.target_bytes().iter().all(|&byte| byte == 0), "nothing was written");
}

/// The sender's own check is disabled: the region ends with the last slot.
#[test]
fn a_range_behind_the_last_slot_is_refused_by_the_peers_card() {
    let (mut two, ..) = two(&small());
    let to_b = two.to_b;
    let count = two.pool_b.slab().layout().slot_count;
    forge_slot_count(&mut two.a, to_b, count + 1);
    let source = two.pool_a.acquire().expect("slot");
    let source = Source::Slot { slot: source, offset: 0, len: 8 };
    let request =
        write(to_b, 7, source, Target { slab: SlabKind::Host, slot: count, generation: 0, offset: 0 });
    two.a.post(request).expect("room");
    two.until("both ends", |two| two.is_down());
    assert!(two.reason_at_a().contains("remote access error"), "{}", two.reason_at_a());
}

#[test]
fn a_range_outside_is_refused_at_the_sender_and_named() {
    let (mut two, ..) = two(&small());
    let source = two.pool_a.acquire().expect("slot");
    let target = two.target.clone();
    let slot_bytes = target.slab().layout().slot_bytes as u32;
    let target = Target { slab: SlabKind::Host, slot: target.slot(), generation: 0, offset: slot_bytes - 8 };
    let request = write(two.to_b, 7, Source::Slot { slot: source, offset: 0, len: 9 }, target);
    two.a.post(request).expect("accepted and answered");
    two.until("both ends", |two| two.is_down());
    assert!(two.reason_at_a().starts_with("refused at the sender: 9 bytes at"), "{}", two.reason_at_a());
    assert_eq!(two.completion_at_a(7), Some(Completion::PeerDown));
}

#[test]
fn a_refused_post_ends_the_connection_and_completes_everything() {
    let (mut two, device_a, _) = two(&small());
    device_a.set_faults(Faults { post_send_fails_after: Some(3), ..Faults::default() });
    for id in 1..=8 {
        let request = two.slot_write(id, 512);
        two.a.post(request).expect("room");
    }
    two.a.flush();
    two.until("the end", |two| two.is_down());
    let reason = two.reason_at_a();
    assert!(
        reason.contains("ibv_post_send on soft") && reason.contains("3 of 8 work requests accepted"),
        "{reason}"
    );
    assert!(reason.contains("Cannot allocate memory"), "{reason}");
    for id in 1..=8 {
        assert!(two.completion_at_a(id).is_some(), "request {id} never completed");
    }
    assert_eq!(two.source.reference_count(), 1, "ended requests hold no slot");
    assert_eq!(two.a.metrics().outstanding, 0);
}

#[test]
fn a_failed_completion_ends_the_connection_and_earlier_work_counts() {
    let (mut two, device_a, _) = two(&small());
    two.write_and_wait(1, 64);
    device_a.set_faults(Faults { completion_fails_after: Some((2, 4)), ..Faults::default() });
    for id in 2..=6 {
        let request = two.slot_write(id, 64);
        two.a.post(request).expect("room");
    }
    two.until("the end", |two| two.is_down());
    assert!(two.reason_at_a().contains("local protection error (code 4)"), "{}", two.reason_at_a());
    for id in 2..=6 {
        assert_eq!(two.completion_at_a(id), Some(Completion::PeerDown), "request {id}");
    }
}

#[test]
fn a_cut_link_is_found_by_the_retries() {
    let (mut two, device_a, _) = two(&small());
    device_a.cut(true);
    let request = two.slot_write(5, 64);
    two.a.post(request).expect("room");
    two.until("the end", |two| two.is_down());
    assert!(two.reason_at_a().contains("transport retry counter exceeded"), "{}", two.reason_at_a());
    assert_eq!(two.a.metrics().retries_exceeded, 1);
}

/// Slots of work that the device holds back stay held until the device has returned the work or the pair is
/// destroyed.
#[test]
fn slots_in_flight_are_held_until_the_end() {
    let (mut two, device_a, _) = two(&small());
    device_a.hold(true);
    for id in 1..=3 {
        let request = two.slot_write(id, 64);
        two.a.post(request).expect("room");
    }
    two.a.flush();
    assert_eq!((two.source.reference_count(), two.a.metrics().outstanding), (1 + 3, 3));
    two.step();
    assert!(two.seen_a.is_empty());
    let to_b = two.to_b;
    two.a.disconnect(to_b);
    assert_eq!(two.source.reference_count(), 1 + 3, "still the device's");
    two.until("the end", |two| two.is_down());
    assert_eq!((two.source.reference_count(), two.a.metrics().outstanding), (1, 0));
    device_a.hold(false);
    assert!(two.target_bytes().iter().all(|&byte| byte == 0), "written after the end");
}

/// The device may continue the work for ever: its slots are never freed, and the end of the peer's access
/// is never reported.
#[test]
fn slots_of_a_pair_that_cannot_be_ended_are_never_given_back() {
    let (mut two, device_a, _) = two(&VerbsConfig { drain_timeout: Duration::from_millis(50), ..small() });
    device_a.hold(true);
    for id in 1..=3 {
        let request = two.slot_write(id, 64);
        two.a.post(request).expect("room");
    }
    two.a.flush();
    device_a.set_faults(Faults { pairs_go_on: true, ..Faults::default() });
    let to_b = two.to_b;
    two.a.disconnect(to_b);
    two.until("the end of the connection", |two| {
        two.a.connection_count() == 0 && (1..=3).all(|id| two.completion_at_a(id).is_some())
    });
    two.until("the peer has seen it", |two| {
        two.seen_b.iter().any(|event| matches!(event, Event::PeerDown { .. }))
    });
    assert_eq!(two.source.reference_count(), 1 + 3, "the device's for ever");
    assert_eq!(two.completion_at_a(1), Some(Completion::PeerDown));
    assert!(!two.seen_a.iter().any(|event| matches!(event, Event::PeerDown { .. })), "{:?}", two.seen_a);
    let metrics = two.a.metrics();
    assert_eq!((metrics.queue_pairs_leaked, metrics.queue_pairs_open, metrics.outstanding), (2, 0, 3));
    assert_eq!(device_a.usage().queue_pairs, 2, "they are still there");
}

/// A client of other nodes' memory reads and writes theirs, and shows no memory of its own.
#[test]
fn a_fabric_that_is_not_shown_gives_no_peer_access_to_its_slots() {
    let (device_a, device_b) = (SoftwareDevice::new(), SoftwareDevice::new());
    let client = VerbsConfig { access: PeerAccess::None, ..small() };
    let mut two = Two::new(device_a.open().expect("open"), device_b.open().expect("open"), client, small());
    assert_eq!((device_a.usage().shown_regions, device_b.usage().shown_regions), (0, 1));
    assert!(two.a.shown_slab(SlabKind::Host).is_none() && two.b.shown_slab(SlabKind::Host).is_some());
    two.write_and_wait(1, 100);
    let slot = two.source.clone();
    let from = Target::of(&two.target, 0);
    let operation = Operation::Read { into: SlotRange { slot, offset: 200, len: 100 }, from, rows: None };
    two.post(WorkRequest { id: 2, peer: two.to_b, priority: Priority::Urgent, operation });
    two.until("the read", |two| two.completion_at_a(2) == Some(Completion::Done));
    let source = Source::Slot { slot: two.target.clone(), offset: 0, len: 8 };
    let target = Target::of(&two.source, 0);
    two.b.post(write(two.to_a, 3, source, target)).expect("accepted and answered");
    two.until("the end", |two| two.is_down());
    assert!(two.seen_b.contains(&Event::Completed { id: 3, completion: Completion::PeerDown }));
}

#[test]
fn exhausted_queue_pairs_are_a_clear_error_on_either_side() {
    let (mut two, device_a, device_b) = two(&small());
    device_a.set_faults(Faults { create_pair_fails_after: Some(1), ..Faults::default() });
    let address = two.b.listening_on().expect("listening").to_string();
    let peer = two.a.connect(&address).expect("connect starts");
    two.until("the failure", |two| {
        two.seen_a.iter().any(|event| matches!(event, Event::PeerDown { peer: down, .. } if *down == peer))
    });
    let error = two.reason_at_a();
    assert!(error.contains("ibv_create_qp on soft") && error.contains("Cannot allocate memory"), "{error}");
    assert_eq!(device_a.usage().queue_pairs, 2, "the first pair is gone again");
    two.seen_a.clear();

    device_a.set_faults(Faults::default());
    device_b.set_faults(Faults { create_pair_fails_after: Some(1), ..Faults::default() });
    let peer = two.a.connect(&address).expect("connect starts");
    two.until("the refusal", |two| {
        two.seen_a.iter().any(|event| matches!(event, Event::PeerDown { peer: down, .. } if *down == peer))
    });
    assert!(two.reason_at_a().contains("the peer refuses: Exhausted"), "{}", two.reason_at_a());
    two.until("its pair is given back", |_| device_b.usage().queue_pairs == 2);
    assert!(!two.seen_b.iter().any(|event| matches!(event, Event::Accepted { .. })));
    two.seen_a.clear();
    two.write_and_wait(9, 64);
}

#[test]
fn device_events_end_what_they_must() {
    let (mut two, device_a, device_b) = two(&small());
    device_b.raise(EVENT_PORT_ERROR);
    two.write_and_wait(1, 64);
    two.until("the event is counted", |two| two.b.metrics().port_events == 1);
    device_a.raise(EVENT_DEVICE_FATAL);
    two.until("the end", |two| two.is_down());
    assert!(two.reason_at_a().contains("local catastrophic error"), "{}", two.reason_at_a());
    let error = two.a.connect("127.0.0.1:1").expect_err("a dead device").to_string();
    assert!(error.contains("local catastrophic error"), "{error}");
}

#[test]
fn one_batch_is_one_doorbell_and_few_signals() {
    let config = VerbsConfig { signal_every: 16, send_queue_depth: 256, ..small() };
    let (mut two, ..) = two(&config);
    let before = two.a.metrics();
    for id in 1..=100 {
        let request = two.slot_write(id, 64);
        two.a.post(request).expect("room");
    }
    two.a.flush();
    let after = two.a.metrics();
    assert_eq!(after.doorbells - before.doorbells, 1);
    assert_eq!(after.work_requests - before.work_requests, 100);
    assert_eq!(after.signalled - before.signalled, 7, "six of sixteen, and the last");
    two.until("all", |two| (1..=100).all(|id| two.completion_at_a(id) == Some(Completion::Done)));
}

#[test]
fn rows_become_the_fewest_work_requests() {
    let (mut two, ..) = two(&VerbsConfig { entries_max: 16, ..small() });
    // (row bytes, stride here, stride there, rows, work requests)
    for (bytes, here, there, count, expected) in
        [(64, 64, 64, 100, 1), (64, 128, 64, 100, 7), (64, 64, 128, 100, 100), (64, 128, 128, 10, 10)]
    {
        let before = two.a.metrics().work_requests;
        let source = two.pool_a.acquire().expect("slot");
        let source = Source::Slot { slot: source, offset: 0, len: bytes * count };
        let target = Target { slab: SlabKind::Host, slot: two.target.slot(), generation: 0, offset: 0 };
        let rows = Some(Rows { bytes, local_stride: here, remote_stride: there });
        let operation = Operation::Write { source, target, rows, immediate: None };
        let request = WorkRequest { id: 5, peer: two.to_b, priority: Priority::Background, operation };
        two.a.post(request).expect("room");
        two.until("the rows", |two| two.completion_at_a(5).is_some());
        two.seen_a.clear();
        assert_eq!(two.a.metrics().work_requests - before, expected, "{bytes} {here} {there} {count}");
    }
}

/// Messages and immediates in one direction only: credits come back in credit messages alone.
#[test]
fn credits_come_back_without_traffic_the_other_way() {
    let (mut two, ..) = two(&VerbsConfig { receive_credits: 4, ..small() });
    for round in 0..200_u32 {
        let operation = Operation::Send { message: vec![round as u8; 700].into() };
        two.post(WorkRequest { id: 0, peer: two.to_b, priority: Priority::Background, operation });
    }
    two.until("all messages", |two| {
        two.seen_b.iter().filter(|event| matches!(event, Event::Message { .. })).count() == 200
    });
    let metrics = two.b.metrics();
    assert!(metrics.credit_messages >= 40, "{metrics:?}");
    assert_eq!(two.a.metrics().receiver_not_ready, 0);
}

#[test]
fn a_full_lane_hands_requests_back_and_the_other_lane_takes_them() {
    let (mut two, device_a, _) =
        two(&VerbsConfig { send_queue_depth: 16, request_queue_depth: 16, ..small() });
    device_a.hold(true);
    let mut taken = 0;
    loop {
        let mut request = two.slot_write(taken + 1, 8);
        request.priority = Priority::Background;
        match two.a.post(request) {
            Ok(()) => taken += 1,
            Err(Full(back)) => {
                assert_eq!(back.id, taken + 1);
                break;
            }
        }
        two.a.flush();
        assert!(taken < 100, "never full");
    }
    assert_eq!(taken, 32, "sixteen in flight, sixteen waiting");
    let urgent = two.slot_write(1000, 8);
    two.a.post(urgent).expect("the urgent lane has room");
    device_a.hold(false);
    two.until("all", |two| (1..=taken).chain([1000]).all(|id| two.completion_at_a(id).is_some()));
}

#[test]
fn sources_of_other_slabs_are_registered_once() {
    let (mut two, device_a, _) = two(&VerbsConfig { slabs_max: 1, ..small() });
    let (other, third) = (pool("other"), pool("third"));
    two.a.register(other.slab()).expect("register");
    two.a.register(other.slab()).expect("again is nothing");
    let regions = device_a.usage().regions;
    let source = |pool: &Arc<dataplane_memory::SlotPool>| Source::Slot {
        slot: pool.acquire().expect("slot"),
        offset: 0,
        len: 64,
    };
    let target = Target { slab: SlabKind::Host, slot: two.target.slot(), generation: 0, offset: 0 };
    two.a.post(write(two.to_b, 1, source(&other), target)).expect("room");
    two.until("done", |two| two.completion_at_a(1) == Some(Completion::Done));
    assert_eq!(device_a.usage().regions, regions);
    let error = two.a.register(third.slab()).expect_err("one is the limit").to_string();
    assert!(error.contains("registered slabs on soft"), "{error}");
    two.a.post(write(two.to_b, 2, source(&third), target)).expect("accepted and answered");
    two.until("the end", |two| two.is_down());
    assert!(two.reason_at_a().contains("that were not registered"), "{}", two.reason_at_a());
    assert_eq!(device_a.usage().regions, regions);
}

/// Commands for queue pairs do not block the fabric's thread: the command thread executes them.
#[test]
fn slow_commands_delay_nobody_but_their_own_connection() {
    const TAKES: Duration = Duration::from_millis(60);
    let (mut two, device_a, device_b) = two(&small());
    let slow = Faults { command_takes: TAKES, ..Faults::default() };
    device_a.set_faults(slow);
    device_b.set_faults(slow);
    device_a.take_command_threads();
    device_b.take_command_threads();
    let address = two.b.listening_on().expect("listening").to_string();
    let mut slow_calls = 0;
    let mut timed = |call: &mut dyn FnMut()| {
        let start = Instant::now();
        call();
        slow_calls += u32::from(start.elapsed() >= TAKES);
    };
    let (mut peer, start, mut written) = (None, Instant::now(), 0);
    timed(&mut || peer = two.a.connect(&address).ok());
    let peer = peer.expect("connect starts");
    let is_up = |two: &Two| two.seen_a.contains(&Event::Connected { peer });
    let is_over = |two: &Two| {
        two.seen_a.iter().any(|event| matches!(event, Event::PeerDown { peer: down, .. } if *down == peer))
    };
    let mut was_up = false;
    while !is_over(&two) {
        if is_up(&two) && !std::mem::replace(&mut was_up, true) {
            timed(&mut || two.a.disconnect(peer));
        }
        written += 1;
        let request = two.slot_write(written, 64);
        two.post(request);
        while two.completion_at_a(written).is_none() {
            timed(&mut || two.step());
        }
        assert!(start.elapsed() < Duration::from_secs(30), "it never ends");
    }
    // Made, bound, connected, stopped and destroyed: five commands for each of two pairs and more, one after another.
    assert!(was_up && start.elapsed() >= 10 * TAKES, "{:?}", start.elapsed());
    for device in [&device_a, &device_b] {
        let threads = device.take_command_threads();
        assert!(!threads.is_empty() && !threads.contains(&std::thread::current().id()), "{threads:?}");
    }
    // A busy machine may suspend this thread once.
    assert!(slow_calls <= 2, "{slow_calls} calls waited for commands, of {written} writes");
    assert!(written > 100, "{written}");
}

/// The set-up fails at each step, on either side: the pairs made so far are stopped, drained and destroyed,
/// and nothing is lost.
#[test]
fn a_set_up_that_fails_half_way_leaves_nothing() {
    let (mut two, device_a, device_b) = two(&small());
    let address = two.b.listening_on().expect("listening").to_string();
    for (device, other) in [(&device_a, &device_b), (&device_b, &device_a)] {
        for steps in 0..4 {
            device.set_faults(Faults { connect_pair_fails_after: Some(steps), ..Faults::default() });
            let peer = two.a.connect(&address).expect("connect starts");
            two.until("the failure", |two| {
                two.seen_a
                    .iter()
                    .any(|event| matches!(event, Event::PeerDown { peer: down, .. } if *down == peer))
            });
            two.until("both are rid of it", |two| {
                (two.a.connection_count(), two.b.connection_count()) == (1, 1)
            });
            assert_eq!(
                (device.usage().queue_pairs, other.usage().queue_pairs),
                (2, 2),
                "after {steps} steps"
            );
            let reason = two.reason_at_a();
            let is_told = if device.name() == device_a.name() {
                reason.contains("ibv_modify_qp(RT") && reason.contains("Invalid argument")
            } else {
                reason.contains("the peer refuses: Exhausted")
            };
            assert!(is_told, "{reason}");
            two.seen_a.clear();
        }
        device.set_faults(Faults::default());
    }
    assert_eq!((two.a.metrics().queue_pairs_leaked, two.b.metrics().queue_pairs_leaked), (0, 0));
    two.write_and_wait(1, 64);
}

/// Connections that end, and fabrics that are dropped, while their pairs are being made.
#[test]
fn an_end_waits_for_the_pairs_that_are_being_made() {
    let (mut two, device_a, device_b) = two(&small());
    let slow = Faults { command_takes: Duration::from_millis(20), ..Faults::default() };
    device_a.set_faults(slow);
    device_b.set_faults(slow);
    let address = two.b.listening_on().expect("listening").to_string();
    for pause in [None, Some(0), Some(15), Some(40), Some(70), Some(100), Some(150)] {
        let peer = two.a.connect(&address).expect("connect starts");
        let until = Instant::now() + Duration::from_millis(pause.unwrap_or_default());
        // The first of two pairs is made: the command is in progress.
        two.until("a moment in it", |_| match pause {
            None => device_a.usage().queue_pairs == 3,
            Some(_) => Instant::now() >= until,
        });
        two.a.disconnect(peer);
        two.until("the end", |two| {
            two.seen_a
                .iter()
                .any(|event| matches!(event, Event::PeerDown { peer: down, .. } if *down == peer))
        });
        two.until("both are rid of it", |two| (two.a.connection_count(), two.b.connection_count()) == (1, 1));
        assert_eq!(
            (device_a.usage().queue_pairs, device_b.usage().queue_pairs),
            (2, 2),
            "after {pause:?} ms"
        );
    }
    // Connections that end before their command runs get no pairs: executing all commands would take half a
    // minute.
    let begun = Instant::now();
    let peers: Vec<_> = (0..150).map(|_| two.a.connect(&address).expect("connect starts")).collect();
    let until = Instant::now() + Duration::from_millis(100);
    two.until("a moment in it", |_| Instant::now() >= until);
    peers.iter().for_each(|&peer| two.a.disconnect(peer));
    two.until("all are over", |two| (two.a.connection_count(), two.b.connection_count()) == (1, 1));
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    two.seen_a.clear();
    two.write_and_wait(1, 64);
    two.a.connect(&address).expect("connect starts");
    let until = Instant::now() + Duration::from_millis(30);
    two.until("a moment in it", |_| Instant::now() >= until);
    drop(two);
    assert_eq!((device_a.usage(), device_b.usage()), (Default::default(), Default::default()));
}

#[test]
fn silent_and_foreign_callers_are_dropped() {
    use std::io::{Read, Write};
    let config = VerbsConfig {
        handshake_timeout: Duration::from_secs(2),
        handshakes_max: 2,
        connections_max: 8,
        ..small()
    };
    let (mut two, _, device_b) = two(&config);
    let address = two.b.listening_on().expect("listening");
    let mut silent: Vec<_> =
        (0..6).map(|_| std::net::TcpStream::connect(address).expect("backlog")).collect();
    let mut foreign = std::net::TcpStream::connect(address).expect("backlog");
    foreign.write_all(&[b'G'; 200]).expect("bytes");
    two.until("all but the last two make room", |two| two.b.metrics().handshakes_failed >= 5);
    // Silent callers do not keep a peer out.
    let peer = two.a.connect(&address.to_string()).expect("an address");
    let start = Instant::now();
    two.until("a peer is let in", |two| two.seen_a.contains(&Event::Connected { peer }));
    assert!(
        start.elapsed() < Duration::from_millis(1500),
        "before their time is over: {:?}",
        start.elapsed()
    );
    two.a.disconnect(peer);
    two.until("every caller is dropped", |two| {
        two.b.metrics().handshakes_failed == 7 && two.b.connection_count() == 1
    });
    for socket in &mut silent {
        assert!(matches!(socket.read(&mut [0; 8]), Ok(0) | Err(_)));
    }
    assert_eq!(device_b.usage().queue_pairs, 2, "callers without a hello get no queue pair");
    two.write_and_wait(3, 64);
}

/// A frame: magic, kind, and what follows.
fn frame(kind: u16, rest: &[(usize, &[u8])]) -> [u8; 128] {
    let mut frame = [0; 128];
    frame[..8].copy_from_slice(b"KVSRRDMA");
    frame[10..12].copy_from_slice(&kind.to_le_bytes());
    for (at, bytes) in rest {
        frame[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    frame
}

fn hello() -> [u8; 128] {
    let fields: [(usize, &[u8]); 10] = [
        (12, &[3, 2, 16]),
        (34, &[32, 0, 0, 16]),
        (40, &[17]),
        (48, &[18]),
        (65, &[16]),
        (73, &[16]),
        (80, &[4]),
        (84, &[1]),
        (91, &[1]),
        (16, &[0xFE, 0x80]),
    ];
    frame(1, &fields)
}

/// A caller that has exchanged openings with the node, byte by byte.
fn opened(two: &mut Two, address: std::net::SocketAddr) -> (std::net::TcpStream, Authentication) {
    use std::io::{Read, Write};
    let mut socket = std::net::TcpStream::connect(address).expect("backlog");
    socket.set_nodelay(true).expect("an option");
    let (mut authentication, opening) =
        Authentication::connecting(Transport::Rdma.into()).expect("random bytes");
    for byte in opening {
        socket.write_all(&[byte]).expect("sent");
        two.step();
    }
    let mut answer = [0; 32];
    socket.set_nonblocking(true).expect("an option");
    two.until("an answer", |_| socket.peek(&mut answer).is_ok_and(|bytes| bytes == answer.len()));
    socket.set_nonblocking(false).expect("an option");
    socket.read_exact(&mut answer).expect("an answer");
    let dialled = DialledAddress::of(socket.peer_addr().expect("an address"));
    authentication.opened(&answer, dialled).expect("an opening");
    (socket, authentication)
}

fn with_secret(letter: &str) -> VerbsConfig {
    let key = SharedKey::from_secret(letter.repeat(32).as_bytes()).expect("long enough");
    VerbsConfig { key, ..small() }
}

/// A rolling upgrade: nodes of two releases connect while their versions overlap, and report the mismatch
/// when they do not.
#[test]
fn nodes_of_two_releases_meet_while_their_versions_overlap() {
    let speaking = |oldest, newest| VerbsConfig { versions: Versions { oldest, newest }, ..small() };
    let (device_a, device_b) = (SoftwareDevice::new(), SoftwareDevice::new());
    let open = |device: &SoftwareDevice| device.open().expect("open");
    let mut two = Two::new(open(&device_a), open(&device_b), speaking(1, 1), speaking(1, 3));
    two.write_and_wait(1, 64);
    drop(two);
    let mut two = Two::new(open(&device_a), open(&device_b), speaking(1, 1), speaking(1, 1));
    let mut later = VerbsFabric::new(open(&SoftwareDevice::new()), two.pool_a.slab(), None, speaking(2, 3))
        .expect("a fabric");
    let peer = later.connect(&two.b.listening_on().expect("listening").to_string()).expect("connect starts");
    let mut events = Vec::new();
    two.until("refused", |_| {
        later.poll(16, &mut events);
        !events.is_empty()
    });
    let [Event::PeerDown { peer: down, reason }] = &events[..] else { panic!("{events:?}") };
    let text = "the peer speaks version 1 of the protocol, and this process versions 2 to 3";
    assert!(*down == peer && reason.contains(text), "{reason}");
    assert_eq!(two.b.metrics().unproved_handshakes, 0);
}

/// A peer without the secret gets no queue pair and no answer.
#[test]
fn only_peers_with_the_same_secret_are_admitted() {
    let (device_a, device_b) = (SoftwareDevice::new(), SoftwareDevice::new());
    let open = |device: &SoftwareDevice| device.open().expect("open");
    let mut two = Two::new(open(&device_a), open(&device_b), with_secret("a"), with_secret("a"));
    two.write_and_wait(1, 64);
    let address = two.b.listening_on().expect("listening").to_string();
    for config in [with_secret("b"), small()] {
        let device = SoftwareDevice::new();
        let slab = two.source.slab();
        let mut stranger = VerbsFabric::new(open(&device), slab, None, config).expect("a fabric");
        let peer = stranger.connect(&address).expect("an address");
        let mut events = Vec::new();
        two.until("refused", |_| {
            stranger.poll(16, &mut events);
            !events.is_empty()
        });
        let is_told = |reason: &str| reason.contains("another secret");
        assert!(
            matches!(&events[..], [Event::PeerDown { peer: down, reason }] if *down == peer && is_told(reason)),
            "{events:?}"
        );
        assert_eq!(device_b.usage().queue_pairs, 2);
    }
    assert_eq!(two.b.metrics().unproved_handshakes, 2);
    two.write_and_wait(2, 64);
}

#[test]
fn a_peer_that_may_only_write_reads_nothing() {
    let (device_a, device_b) = (SoftwareDevice::new(), SoftwareDevice::new());
    let writes = VerbsConfig { access: PeerAccess::Write, ..small() };
    let mut two = Two::new(device_a.open().expect("open"), device_b.open().expect("open"), small(), writes);
    two.write_and_wait(1, 100);
    let slot = two.source.clone();
    let from = Target::of(&two.target, 0);
    let operation = Operation::Read { into: SlotRange { slot, offset: 200, len: 100 }, from, rows: None };
    two.post(WorkRequest { id: 2, peer: two.to_b, priority: Priority::Urgent, operation });
    two.until("the end", |two| two.completion_at_a(2) == Some(Completion::PeerDown));
}

#[test]
fn handshakes_may_come_in_crumbs_and_break_off_anywhere() {
    use std::io::{Read, Write};
    let (mut two, _, device_b) = two(&small());
    let address = two.b.listening_on().expect("listening");
    let key = SharedKey::default();
    // (the frames, bytes that are omitted at the end, queue pairs that the caller gets)
    let calls = [
        (vec![hello()], 1, 2),
        (vec![hello()], 0, 4),
        (vec![hello(), frame(3, &[(12, &[2])])], 0, 2),
        (vec![hello(), hello()], 0, 2),
        (vec![frame(2, &[])], 0, 2),
        (vec![frame(9, &[])], 0, 2),
        (vec![hello(), [b'G'; 128]], 0, 2),
    ];
    for (failed, (frames, missing, pairs)) in (1..).zip(calls) {
        let (mut socket, authentication) = opened(&mut two, address);
        let proved = frames.iter().flat_map(|frame| {
            let proof = authentication.prove(&key, frame).expect("agreed");
            frame.iter().copied().chain(proof)
        });
        let mut bytes: Vec<u8> = proved.collect();
        bytes.truncate(bytes.len() - missing);
        for crumb in bytes.chunks(7) {
            // The node may have closed the socket already.
            let _hung_up = socket.write_all(crumb);
            (0..40).for_each(|_| two.step());
        }
        let until = Instant::now() + Duration::from_millis(30);
        while Instant::now() < until {
            two.step();
        }
        assert_eq!(device_b.usage().queue_pairs, pairs, "after {} bytes", bytes.len());
        if pairs == 4 {
            let mut answer = [0; 320];
            socket.read_exact(&mut answer).expect("its hello and its ready");
            assert_eq!((answer[10], answer[160 + 10]), (1, 2));
            for frame in answer.chunks(160) {
                let proof = frame.last_chunk().expect("a proof");
                assert_eq!(authentication.check(&key, &frame[..128], proof), Ok(()));
            }
        }
        drop(socket);
        two.until("the handshake failed", |two| two.b.metrics().handshakes_failed == failed);
        two.until("and left nothing", |_| device_b.usage().queue_pairs == 2);
    }
    assert!(two.seen_b.is_empty(), "nobody was told of them: {:?}", two.seen_b);
    two.write_and_wait(1, 64);
}

#[test]
fn connections_are_bounded() {
    let (mut two, ..) = two(&VerbsConfig { connections_max: 3, ..small() });
    let address = two.b.listening_on().expect("listening").to_string();
    let others = [two.a.connect(&address).expect("second"), two.a.connect(&address).expect("third")];
    assert!(two.a.connect(&address).expect_err("a fourth").to_string().contains("limit"));
    two.until("both", |two| others.iter().all(|&peer| two.seen_a.contains(&Event::Connected { peer })));
    two.write_and_wait(1, 64);
}

/// A peer that is refused because all connections are in use is told so, and is admitted once one is free.
#[test]
fn a_node_without_a_place_says_that_it_is_busy() {
    let (device_a, device_b) = (SoftwareDevice::new(), SoftwareDevice::new());
    let full = VerbsConfig { connections_max: 1, ..small() };
    let mut two = Two::new(device_a.open().expect("a"), device_b.open().expect("b"), small(), full);
    let address = two.b.listening_on().expect("listening").to_string();
    two.seen_a.clear();
    let second = two.a.connect(&address).expect("connect starts");
    two.until("the refusal", |two| !two.seen_a.is_empty());
    let [Event::PeerDown { peer, reason }] = &two.seen_a[..] else { panic!("{:?}", two.seen_a) };
    assert!(*peer == second && reason.contains("the peer refuses: Busy"), "{reason}");
    assert_eq!((two.b.metrics().handshakes_failed, device_b.usage().queue_pairs), (1, 2));
    let first = two.to_b;
    two.a.disconnect(first);
    two.until("room", |two| two.b.connection_count() == 0);
    let third = two.a.connect(&address).expect("connect starts");
    two.until("a place", |two| two.seen_a.contains(&Event::Connected { peer: third }));
}

#[test]
fn a_long_message_arrives_whole_on_both_lanes() {
    let (mut two, ..) = two(&small());
    for priority in Priority::ALL {
        for len in [0, 1, 4000, MESSAGE_BYTES_MAX] {
            let message: Box<[u8]> = (0..len).map(|at| (at * 7 + len) as u8).collect();
            let operation = Operation::Send { message: message.clone() };
            two.post(WorkRequest { id: 4, peer: two.to_b, priority, operation });
            two.until("message and completion", |two| {
                two.completion_at_a(4).is_some()
                    && two.seen_b.iter().any(|event| matches!(event, Event::Message { .. }))
            });
            assert!(two.seen_b.contains(&Event::Message { peer: two.to_a, message }), "{len} bytes");
            two.seen_a.clear();
            two.seen_b.clear();
        }
    }
}

/// A write wakes the thread that sleeps on the descriptors; meanwhile it uses no CPU time.
#[test]
fn a_sleeper_is_woken_and_sleeps_until_then() {
    let (two, ..) = two(&small());
    support::sleeps_and_wakes(two);
}

#[test]
fn a_machine_without_devices_says_so() {
    match Library::load() {
        Err(error) => assert!(error.to_string().starts_with("no RDMA here: "), "{error}"),
        Ok(library) => match dataplane_verbs::Device::open(&library, Some("no-such-device")) {
            Ok(_) => panic!("opened a device that does not exist"),
            Err(error) => {
                let text = error.to_string();
                assert!(
                    text.starts_with("no RDMA here: ") || text.starts_with("no RDMA device 'no-such"),
                    "{text}"
                );
            }
        },
    }
}

/// Peers connect within one partition, whichever row of their tables holds it, and in no other.
#[test]
fn queue_pairs_are_in_the_partition_that_is_asked_for() {
    let member = |partition| VerbsConfig { partition, ..small() };
    let between = |here, there| {
        let (device_a, device_b) = (SoftwareDevice::new(), SoftwareDevice::new());
        let mut two = Two::new(
            device_a.open().expect("open"),
            device_b.open().expect("open"),
            member(here),
            member(there),
        );
        let source = Source::Slot { slot: two.source.clone(), offset: 0, len: 8 };
        let target = Target::of(&two.target, 0);
        two.post(write(two.to_b, 1, source, target));
        two.until("an answer", |two| two.completion_at_a(1).is_some());
        two.completion_at_a(1)
    };
    assert_eq!(between(Some(1), Some(0x8001)), Some(Completion::Done), "the membership bit does not count");
    assert_eq!(between(None, Some(0x7FFF)), Some(Completion::Done), "the first row is the default partition");
    assert_eq!(between(Some(1), Some(2)), Some(Completion::PeerDown));
    let slab = pool("partitions").slab().clone();
    let device = SoftwareDevice::new().open().expect("open");
    let error = VerbsFabric::new(device, &slab, None, member(Some(9))).expect_err("no such row").to_string();
    assert!(error.contains("it is not in the partition 0x0009 (rdma.partition)"), "{error}");
}
