//! The tests of the software device over a real device, if there is one; Soft-RoCE in a VM is enough.
//! Otherwise each test prints why it does nothing. Run with `--test-threads=1`: some count the objects of
//! the process or the device.

mod support;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::testing::{Pair, conformance, pool};
use dataplane_fabric::{
    Completion, Event, Fabric, INLINE_BYTES_MAX, MESSAGE_BYTES_MAX, Operation, PeerAccess, Priority, Rows,
    SlotRange, Source, Target, WorkRequest,
};
use dataplane_memory::testing::{Abilities, DeviceDouble};
use dataplane_memory::{PageSize, Slab, SlabKind, SlabLayout};
use dataplane_verbs::raw::SharedReceiveQueue;
use dataplane_verbs::raw::{Access, Capacity, CompletionQueue, MemoryRegion, ProtectionDomain, QueuePair};
use dataplane_verbs::testing::{forge_remote_key, forge_slot_count};
use dataplane_verbs::{Device, Library, VerbsConfig, VerbsFabric};
use support::{Two, loopback, small, write};

/// Settings with a short acknowledgement timeout, so that failures do not take minutes.
fn quick() -> VerbsConfig {
    VerbsConfig { timeout: 12, retry_count: 4, ..small() }
}

fn library() -> Option<Arc<Library>> {
    let found = Library::load().and_then(|library| Device::names(&library).map(|names| (library, names)));
    match found {
        Ok((library, names)) => {
            println!("RDMA devices: {}", names.join(", "));
            Some(library)
        }
        Err(error) => {
            println!("SKIPPED: no RDMA device ({error})");
            None
        }
    }
}

fn open(library: &Arc<Library>) -> Arc<Device> {
    Device::open(library, None).expect("the first device opens")
}

fn two(library: &Arc<Library>, config: &VerbsConfig) -> Two {
    Two::new(open(library), open(library), config.clone(), config.clone())
}

#[test]
fn ports_and_addresses_are_found() {
    let Some(library) = library() else { return };
    let device = open(&library);
    let (port, gid) = device.choose_port(&VerbsConfig::default()).expect("a port");
    println!("{} {:?}\n{port:?}\nchosen {gid:?}", device.name(), device.limits());
    assert!(port.active && port.message_bytes_max >= 4096 && gid.gid != [0; 16]);
    let error = device.choose_port(&VerbsConfig { port: Some(77), ..VerbsConfig::default() });
    assert!(error.expect_err("no port 77").to_string().contains("port 77: there is no such port"));
    let error = Device::open(&library, Some("mlx9_9")).expect_err("no such device").to_string();
    assert!(error.contains("'mlx9_9'") && error.contains(device.name()), "{error}");
}

#[test]
fn conforms_to_the_contract() {
    let Some(library) = library() else { return };
    let mut clause = 0;
    conformance(&mut || {
        clause += 1;
        println!("clause {clause}");
        let (pool_a, pool_b) = (pool("a"), pool("b"));
        let make = |slab| VerbsFabric::new(open(&library), slab, Some(loopback()), quick()).expect("fabric");
        let (a, b) = (make(pool_a.slab()), make(pool_b.slab()));
        let address_of_b = b.listening_on().expect("listening").to_string();
        Pair {
            a: Some(Box::new(a)),
            b: Some(Box::new(b)),
            pool_a,
            pool_b,
            address_of_b,
            tick: Box::new(std::thread::yield_now),
        }
    });
}

/// WRITE, gathered WRITE, WRITE WITH IMMEDIATE, inline WRITE, READ, scattered READ, SEND in one and in many
/// pieces, on both lanes, with every byte checked.
#[test]
fn every_verb_does_what_it_says() {
    let Some(library) = library() else { return };
    let mut two = two(&library, &quick());
    for priority in Priority::ALL {
        let content: Vec<u8> = (0..4096_u32).map(|at| (at * 31 + at / 251) as u8).collect();
        two.source.slab().write(two.source.slot(), 0, &content);
        let target = Target { slab: SlabKind::Host, slot: two.target.slot(), generation: 0, offset: 0 };
        let slot = Source::Slot { slot: two.source.clone(), offset: 0, len: 4096 };
        let gathered = Source::Slot { slot: two.source.clone(), offset: 0, len: 1024 };
        let rows = Some(Rows { bytes: 64, local_stride: 128, remote_stride: 64 });
        let inline = Source::Inline { bytes: [0xAB; INLINE_BYTES_MAX], len: 16 };
        let into = two.pool_a.acquire().expect("slot");
        let range = |len| SlotRange { slot: into.clone(), offset: 0, len };
        let at = |offset| Target { offset, ..target };
        let message: Box<[u8]> = (0..MESSAGE_BYTES_MAX).map(|at| (at % 253) as u8).collect();
        let operations = [
            Operation::Write { source: slot, target, rows: None, immediate: Some(0xCAFE_F00D) },
            Operation::Write { source: gathered, target: at(8192), rows, immediate: None },
            Operation::Write { source: inline, target: at(16384), rows: None, immediate: Some(7) },
            Operation::Read { into: range(4096), from: target, rows: None },
            Operation::Send { message: message[..100].into() },
            Operation::Send { message: message.clone() },
        ];
        for (id, operation) in (1..).zip(operations) {
            two.post(WorkRequest { id, peer: two.to_b, priority, operation });
            two.until("done", |two| two.completion_at_a(id).is_some());
            assert_eq!(two.completion_at_a(id), Some(Completion::Done), "operation {id}");
        }
        two.until("both immediates and both messages", |two| two.seen_b.len() == 4);
        let peer = two.to_a;
        assert_eq!(two.seen_b[0], Event::Immediate { peer, value: 0xCAFE_F00D });
        assert_eq!(two.seen_b[1], Event::Immediate { peer, value: 7 });
        assert_eq!(two.seen_b[2], Event::Message { peer, message: message[..100].into() });
        assert!(two.seen_b[3] == Event::Message { peer, message });
        let mut found = vec![0; 16384 + 16];
        two.target.slab().read(two.target.slot(), 0, &mut found);
        assert_eq!(found[..4096], content);
        let dense: Vec<u8> = (0..16).flat_map(|row| content[row * 128..row * 128 + 64].to_vec()).collect();
        assert_eq!(found[8192..8192 + 1024], dense);
        assert_eq!(found[16384..], [0xAB; 16]);
        let mut read = vec![0; 4096];
        into.slab().read(into.slot(), 0, &mut read);
        assert_eq!(read, content);
        let rows = Some(Rows { bytes: 64, local_stride: 256, remote_stride: 64 });
        let operation = Operation::Read { into: range(1024), from: at(8192), rows };
        two.post(WorkRequest { id: 20, peer: two.to_b, priority, operation });
        two.until("the scattered read", |two| two.completion_at_a(20) == Some(Completion::Done));
        into.slab().read(into.slot(), 0, &mut read);
        for row in 0..16 {
            assert_eq!(read[row * 256..row * 256 + 64], dense[row * 64..row * 64 + 64], "row {row}");
        }
        two.target.slab().write(two.target.slot(), 0, &vec![0; 16384 + 16]);
        two.seen_a.clear();
        two.seen_b.clear();
    }
    println!("{:?}", two.a.metrics());
}

#[test]
fn a_bad_remote_key_is_a_remote_access_error() {
    let Some(library) = library() else { return };
    let mut two = two(&library, &quick());
    let to_b = two.to_b;
    forge_remote_key(&mut two.a, to_b, 0x00BA_D000);
    let request = two.slot_write(7, 64);
    two.post(request);
    two.until("both ends", |two| two.is_down());
    println!("{}", two.reason_at_a());
    assert!(two.reason_at_a().contains("remote access error"), "{}", two.reason_at_a());
    assert_eq!(two.completion_at_a(7), Some(Completion::PeerDown));
    assert!(two.target_bytes().iter().all(|&byte| byte == 0), "nothing was written");
}

#[test]
fn bytes_behind_the_slots_are_out_of_reach() {
    let Some(library) = library() else { return };
    let mut two = two(&library, &quick());
    let (to_b, count) = (two.to_b, two.pool_b.slab().layout().slot_count);
    forge_slot_count(&mut two.a, to_b, count + 1);
    let source = Source::Slot { slot: two.source.clone(), offset: 0, len: 8 };
    two.post(write(to_b, 7, source, Target { slab: SlabKind::Host, slot: count, generation: 0, offset: 0 }));
    two.until("both ends", |two| two.is_down());
    assert!(two.reason_at_a().contains("remote access error"), "{}", two.reason_at_a());
}

#[test]
fn a_dma_buf_that_cannot_be_registered_says_why() {
    let Some(library) = library() else { return };
    let device = open(&library);
    let domain = ProtectionDomain::new(&device).expect("domain");
    let memory = rustix::fs::memfd_create("not-a-dma-buf", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
    rustix::fs::ftruncate(&memory, 65536).expect("truncate");
    let access = Access { remote: PeerAccess::ReadWrite, relaxed_ordering: false };
    // SAFETY: nothing refers to the bytes of the descriptor.
    let region = unsafe { MemoryRegion::of_dmabuf(&domain, memory.as_fd(), 0, 65536, 0, access) };
    let error = region.expect_err("a memfd is no dma-buf").to_string();
    println!("{error}");
    assert!(
        error.starts_with(&format!("ibv_reg_dmabuf_mr on {} for 65536 bytes at 0", device.name())),
        "{error}"
    );
}

/// A device whose driver accepts neither dma-bufs nor foreign addresses, as Soft-RoCE: the error holds both
/// reasons.
#[test]
fn slots_in_device_memory_are_refused_with_both_reasons() {
    let Some(library) = library() else { return };
    let device = open(&library);
    let layout = SlabLayout { slot_bytes: 65536, slot_count: 2 };
    for abilities in [Abilities { dma_buf: true, peer_memory: true }, Abilities::default()] {
        let memory = DeviceDouble::new(layout.slots_bytes(), abilities);
        let slab = Arc::new(Slab::on_device("device", layout, memory).expect("slab"));
        let refused = VerbsFabric::new(Arc::clone(&device), &slab, None, quick()).expect_err("out of reach");
        println!("{refused}");
        let text = refused.to_string();
        assert!(text.contains(&format!("{} cannot reach 131072 bytes", device.name())), "{text}");
        let reasons = match abilities.dma_buf {
            true => ["as a dma-buf: ibv_reg_dmabuf_mr: E", "as peer memory: ibv_reg_mr: EFAULT"],
            false => ["has no dma-buf", "no peer-memory module"],
        };
        assert!(reasons.iter().all(|reason| text.contains(reason)), "{text}");
    }
}

/// Slabs of 4 KiB and of 2 MiB pages, with and without relaxed ordering, are registered whole.
#[test]
fn slabs_of_all_pages_are_registered() {
    let Some(library) = library() else { return };
    let domain = ProtectionDomain::new(&open(&library)).expect("domain");
    for pages in [PageSize::Standard, PageSize::HugeIfAvailable] {
        let layout = SlabLayout { slot_bytes: 1 << 20, slot_count: 9 };
        let slab = Arc::new(Slab::create("pages", layout, pages).expect("slab"));
        for (remote, relaxed_ordering) in [(PeerAccess::None, false), (PeerAccess::ReadWrite, true)] {
            let region =
                MemoryRegion::of_slab(&domain, &slab, Access { remote, relaxed_ordering }).expect("region");
            assert_eq!((region.length(), region.address()), (9 << 20, slab.address(0, 0, 0).as_ptr() as u64));
        }
        println!("{pages:?}: huge pages: {}", slab.has_huge_pages());
    }
}

/// Pairs are made until the device has no more; the error is clear, and all of them can be made again.
#[test]
fn queue_pairs_run_out_with_a_clear_error() {
    const PAIRS_TRIED: usize = 20_000;
    let Some(library) = library() else { return };
    let device = open(&library);
    let domain = ProtectionDomain::new(&device).expect("domain");
    let completions = CompletionQueue::new(&device, 256, 0).expect("queue");
    let receives = SharedReceiveQueue::new(&domain, 16, 256, 1 << 63).expect("receives");
    let capacity = Capacity { send_requests: 4, entries: 1, inline_bytes: 0 };
    let mut rounds = Vec::new();
    for _ in 0..2 {
        let mut pairs = Vec::new();
        let start = Instant::now();
        let error = loop {
            match QueuePair::new(&domain, &completions, &receives, capacity) {
                Ok(pair) => pairs.push(pair),
                Err(error) => break Some(error.to_string()),
            }
            if pairs.len() == PAIRS_TRIED || start.elapsed() > Duration::from_secs(60) {
                break None;
            }
        };
        println!("{} pairs in {:?}, then {error:?}", pairs.len(), start.elapsed());
        if let Some(error) = &error {
            assert!(error.starts_with(&format!("ibv_create_qp on {} for 4 sends", device.name())), "{error}");
        }
        rounds.push((pairs.len(), error.is_some()));
    }
    if rounds.iter().all(|(_, is_exhausted)| *is_exhausted) {
        assert_eq!(rounds[0], rounds[1], "pairs were not given back");
    }
}

#[test]
fn a_storm_of_connections_leaves_nothing_behind() {
    let Some(library) = library() else { return };
    let before = support::descriptor_count();
    let config = VerbsConfig {
        send_queue_depth: 32,
        request_queue_depth: 16,
        handshake_timeout: Duration::from_secs(60),
        ..quick()
    };
    support::storm(open(&library), open(&library), &config, 200);
    assert_eq!(support::descriptor_count(), before, "descriptors leaked");
}

#[test]
fn a_sleeper_is_woken_and_sleeps_until_then() {
    let Some(library) = library() else { return };
    support::sleeps_and_wakes(two(&library, &quick()));
}

#[test]
fn a_killed_peer_is_noticed_at_once() {
    let Some(library) = library() else { return };
    let mut two = two(&library, &quick());
    two.write_and_wait(1, 64);
    let Two { mut a, b, to_b, source, .. } = two;
    let start = Instant::now();
    drop(b);
    let mut events = Vec::new();
    while !events.iter().any(|event| matches!(event, Event::PeerDown { peer, .. } if *peer == to_b)) {
        a.poll(64, &mut events);
        assert!(start.elapsed() < Duration::from_secs(10), "not noticed");
    }
    println!("noticed after {:?}", start.elapsed());
    assert_eq!((source.reference_count(), a.metrics().queue_pairs_open), (1, 0));
}

/// Run by [`a_killed_process_is_noticed_at_once`] in a process of its own: a fabric that prints its
/// listening address.
#[test]
#[ignore = "the other half of another test"]
fn a_peer_that_will_be_killed() {
    let Some(library) = library() else { return };
    let pool = pool("victim");
    let mut fabric =
        VerbsFabric::new(open(&library), pool.slab(), Some(loopback()), quick()).expect("fabric");
    println!("LISTENING {}", fabric.listening_on().expect("listening"));
    let (start, mut events) = (Instant::now(), Vec::new());
    while start.elapsed() < Duration::from_secs(60) {
        fabric.poll(64, &mut events);
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_killed_process_is_noticed_at_once() {
    use std::io::{BufRead, BufReader};
    let Some(library) = library() else { return };
    let mut child = std::process::Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "a_peer_that_will_be_killed", "--ignored", "--nocapture"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("the peer starts");
    let lines = BufReader::new(child.stdout.take().expect("its output")).lines();
    let address = lines
        .map_while(Result::ok)
        .find_map(|line| line.split_once("LISTENING ").map(|(_, address)| address.trim().to_owned()))
        .expect("the peer listens");
    let pool = pool("a");
    let mut a = VerbsFabric::new(open(&library), pool.slab(), None, quick()).expect("fabric");
    let peer = a.connect(&address).expect("connect starts");
    let mut events = Vec::new();
    let mut until = |a: &mut VerbsFabric, what: &str, wanted: &dyn Fn(&Event) -> bool| {
        let start = Instant::now();
        while !events.iter().any(wanted) {
            a.poll(64, &mut events);
            assert!(start.elapsed() < Duration::from_secs(20), "never: {what} {events:?}");
        }
        start.elapsed()
    };
    until(&mut a, "connected", &|event| *event == Event::Connected { peer });
    // Reads run all the time: work is in flight when the peer dies.
    let slot = pool.acquire().expect("slot");
    for id in 1..=100 {
        let into = SlotRange { slot: slot.clone(), offset: 0, len: 65536 };
        let from = Target { slab: SlabKind::Host, slot: 0, generation: 0, offset: 0 };
        let operation = Operation::Read { into, from, rows: None };
        a.post(WorkRequest { id, peer, priority: Priority::Background, operation }).expect("room");
    }
    a.flush();
    child.kill().expect("SIGKILL");
    let took = until(&mut a, "news of the death", &|event| matches!(event, Event::PeerDown { .. }));
    child.wait().expect("reaped");
    println!("noticed after {took:?}: {:?}", events.last());
    let completed = events.iter().filter(|event| matches!(event, Event::Completed { .. })).count();
    assert_eq!((completed, slot.reference_count()), (100, 1), "every request ends, and holds nothing");
}

/// Needs the name of the network device below in RXE_NETDEV, and the permission to move it.
#[test]
fn a_link_that_goes_down_and_up_again_is_survived_or_reported() {
    let Some(library) = library() else { return };
    let Ok(device) = std::env::var("RXE_NETDEV") else {
        println!("SKIPPED: RXE_NETDEV does not name the network device below");
        return;
    };
    let link = |state: &str| {
        let set = std::process::Command::new("ip").args(["link", "set", &device, state]).status();
        assert!(set.expect("ip runs").success());
    };
    struct Up<F: Fn(&str)>(F);
    impl<F: Fn(&str)> Drop for Up<F> {
        fn drop(&mut self) {
            (self.0)("up");
        }
    }
    let _even_if_it_fails = Up(link);
    let mut two = two(&library, &VerbsConfig { timeout: 14, retry_count: 7, ..small() });
    two.write_and_wait(1, 4096);
    link("down");
    let request = two.slot_write(2, 4096);
    two.post(request);
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(200) {
        two.step();
    }
    link("up");
    two.until("an answer", |two| two.completion_at_a(2).is_some());
    let (completion, events) = (two.completion_at_a(2), two.a.metrics().port_events);
    println!("the write ended as {completion:?}; {events} port events; {:?}", two.seen_a);
    assert!(events >= 1, "the device told of its port");
    if completion == Some(Completion::PeerDown) {
        two.until("both ends", |two| two.is_down());
    }
    let again = Two::new(open(&library), open(&library), quick(), quick());
    drop(again);
}

/// One program with RXE_LISTEN=ip:port and one with RXE_CONNECT set to the same, on two machines: bytes
/// written are read back and compared. The network between them may lose packets.
#[test]
fn traffic_between_two_machines_arrives_unharmed() {
    const ROUNDS: u64 = 150;
    let Some(library) = library() else { return };
    let (listen, connect) = (std::env::var("RXE_LISTEN").ok(), std::env::var("RXE_CONNECT").ok());
    let config =
        VerbsConfig { timeout: 14, retry_count: 7, peer_dead_after: Duration::from_secs(30), ..small() };
    let pool = pool("slots");
    let address = listen.as_ref().map(|address| address.parse().expect("an ip:port"));
    let (start, mut events) = (Instant::now(), Vec::new());
    if address.is_some() {
        let mut fabric = VerbsFabric::new(open(&library), pool.slab(), address, config).expect("fabric");
        while !events.iter().any(|event| matches!(event, Event::PeerDown { .. })) {
            fabric.poll(64, &mut events);
            if fabric.prepare_wait() {
                support::sleep_on(&fabric, Duration::from_millis(100));
            }
            assert!(start.elapsed() < Duration::from_secs(200), "nobody came, or nobody went: {events:?}");
        }
        let messages = events.iter().filter(|event| matches!(event, Event::Message { .. })).count() as u64;
        assert_eq!(messages, ROUNDS);
        return;
    }
    let Some(connect) = connect else {
        println!("SKIPPED: neither RXE_LISTEN nor RXE_CONNECT is set");
        return;
    };
    let mut fabric = VerbsFabric::new(open(&library), pool.slab(), None, config).expect("fabric");
    let peer = loop {
        let peer = fabric.connect(&connect).expect("connect starts");
        let wanted = [Event::Connected { peer }];
        while !events.iter().any(|event| {
            wanted.contains(event) || matches!(event, Event::PeerDown { peer: down, .. } if *down == peer)
        }) {
            fabric.poll(64, &mut events);
        }
        if events.contains(&wanted[0]) {
            break peer;
        }
        assert!(start.elapsed() < Duration::from_secs(100), "{events:?}");
        std::thread::sleep(Duration::from_millis(500));
    };
    let (source, into) = (pool.acquire().expect("slot"), pool.acquire().expect("slot"));
    let began = Instant::now();
    for round in 1..=ROUNDS {
        let len = (round * 7919 % 100_000) as u32 + 1;
        let content: Vec<u8> =
            (0..len).map(|at| ((u64::from(at) * round) >> 3) as u8 ^ round as u8).collect();
        source.slab().write(source.slot(), 0, &content);
        let target = Target { slab: SlabKind::Host, slot: round as u32 % 16, generation: 0, offset: 128 };
        let operations = [
            Operation::Write {
                source: Source::Slot { slot: source.clone(), offset: 0, len },
                target,
                rows: None,
                immediate: Some(round as u32),
            },
            Operation::Send { message: content[..(len as usize).min(3000)].into() },
            Operation::Read {
                into: SlotRange { slot: into.clone(), offset: 0, len },
                from: target,
                rows: None,
            },
        ];
        for (step, operation) in (0..).zip(operations) {
            let id = round * 4 + step;
            fabric.post(WorkRequest { id, peer, priority: Priority::Urgent, operation }).expect("room");
        }
        fabric.flush();
        events.clear();
        while events.iter().filter(|event| matches!(event, Event::Completed { .. })).count() < 3 {
            fabric.poll(64, &mut events);
            assert!(!events.iter().any(|event| matches!(event, Event::PeerDown { .. })), "{events:?}");
        }
        let mut found = vec![0; len as usize];
        into.slab().read(into.slot(), 0, &mut found);
        assert!(found == content, "round {round}");
    }
    println!("{ROUNDS} rounds in {:?}, {:?}", began.elapsed(), fabric.metrics());
    std::thread::sleep(Duration::from_millis(500));
    fabric.disconnect(peer);
    while fabric.connection_count() > 0 {
        fabric.poll(64, &mut events);
    }
}

/// In a cgroup with `rdma.max`, connecting fails at some point with a clear error, and works again afterwards.
#[test]
fn a_fabric_survives_that_queue_pairs_run_out() {
    const CONNECTIONS_TRIED: usize = 300;
    let Some(library) = library() else { return };
    let config = VerbsConfig { send_queue_depth: 16, request_queue_depth: 16, ..quick() };
    let mut two = two(&library, &config);
    let address = two.b.listening_on().expect("listening").to_string();
    for round in 0..2 {
        let (mut peers, mut error) = (Vec::new(), None);
        while peers.len() < CONNECTIONS_TRIED && error.is_none() {
            match two.a.connect(&address) {
                Ok(peer) => peers.push(peer),
                Err(refused) => error = Some(refused.to_string()),
            }
        }
        println!("round {round}: {} connections, then {error:?}", peers.len());
        if let Some(error) = &error {
            assert!(error.contains("ibv_create_qp on"), "{error}");
        }
        two.until("each is up or refused", |two| {
            peers.iter().all(|&wanted| {
                two.seen_a.iter().any(|event| {
                    matches!(event, Event::Connected { peer } | Event::PeerDown { peer, .. } if *peer == wanted)
                })
            })
        });
        peers.iter().for_each(|&peer| two.a.disconnect(peer));
        two.until("all are gone", |two| (two.a.connection_count(), two.b.connection_count()) == (1, 1));
        two.seen_a.clear();
        two.seen_b.clear();
        two.write_and_wait(1, 64);
    }
    assert_eq!((two.a.metrics().queue_pairs_open, two.b.metrics().queue_pairs_open), (2, 2));
}

/// Random writes, reads and messages both ways for a while, every byte checked.
#[test]
fn random_traffic_arrives_unharmed() {
    const ROUNDS: u32 = 400;
    let Some(library) = library() else { return };
    let mut two = two(&library, &quick());
    let seed = 0x5EED;
    println!("seed {seed:#x}");
    let mut numbers = fastrand::Rng::with_seed(seed);
    for round in 1..=ROUNDS {
        let random = numbers.u64(..);
        let (len, offset) = ((random % 60_000) as usize + 1, (random >> 20 & 0xFFF) as u32);
        let content: Vec<u8> = (0..len).map(|at| (at as u32 ^ round ^ (at as u32 >> 8)) as u8).collect();
        two.source.slab().write(two.source.slot(), offset as usize, &content);
        let source = Source::Slot { slot: two.source.clone(), offset, len: len as u32 };
        let target =
            Target { slab: SlabKind::Host, slot: two.target.slot(), generation: 0, offset: offset / 2 };
        let priority = Priority::ALL[random as usize >> 40 & 1];
        let operation = Operation::Write { source, target, rows: None, immediate: Some(round) };
        two.post(WorkRequest { id: u64::from(round), peer: two.to_b, priority, operation });
        two.until("the immediate", |two| {
            two.seen_b.iter().any(|event| matches!(event, Event::Immediate { value, .. } if *value == round))
        });
        let mut found = vec![0; len];
        two.target.slab().read(two.target.slot(), (offset / 2) as usize, &mut found);
        assert!(found == content, "round {round}");
        two.seen_a.clear();
        two.seen_b.clear();
    }
    println!("{:?}", two.b.metrics());
}
