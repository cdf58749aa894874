//! Peers that are silent, foreign, slow, dead or faulty, and the order in which lanes are served.

use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use dataplane_fabric::auth::{Authentication, OPENING_BYTES, SharedKey, Transport, Versions};
use dataplane_fabric::testing::{pool, sleep};
use dataplane_fabric::{
    Completion, Event, Fabric, INLINE_BYTES_MAX, Operation, PeerAccess, PeerId, Priority, SlotRange, Source,
    Target, WorkRequest,
};
use dataplane_memory::{PageSize, Slab, SlabKind, SlabLayout, SlotPool, SlotRef};
use dataplane_shm::{ShmConfig, ShmFabric};

const PATIENCE: Duration = Duration::from_secs(10);
const ADDRESS: &str = "KVASIR_SHM_TEST_FOREIGNER";

fn name() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    format!("kvasir-shm-hardship-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

fn node(listen: Option<&str>, config: ShmConfig) -> (ShmFabric, Arc<SlotPool>) {
    let pool = pool("hardship");
    (ShmFabric::new(Arc::clone(pool.slab()), listen, config).expect("fabric"), pool)
}

fn raw(name: &str) -> UnixStream {
    UnixStream::connect_addr(&SocketAddr::from_abstract_name(name).expect("name")).expect("connect")
}

fn counter(fabric: &ShmFabric, wanted: &str) -> u64 {
    let counters = fabric.counters().snapshot();
    counters.iter().find(|(name, ..)| *name == wanted).map(|(.., value)| *value).expect("a counter")
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "never: {what}");
    }
}

/// Connects two nodes; returns the id that each has for the other.
fn connected(a: &mut ShmFabric, b: &mut ShmFabric, address: &str) -> (PeerId, PeerId) {
    let to_b = a.connect(address).expect("connect");
    let (mut seen_a, mut seen_b) = (Vec::new(), Vec::new());
    let mut to_a = None;
    until("connected", || {
        a.poll(16, &mut seen_a);
        b.poll(16, &mut seen_b);
        to_a = seen_b.iter().find_map(|event| match event {
            Event::Accepted { peer } => Some(*peer),
            _ => None,
        });
        to_a.is_some() && seen_a.contains(&Event::Connected { peer: to_b })
    });
    (to_b, to_a.expect("accepted"))
}

fn send(fabric: &mut ShmFabric, peer: PeerId, priority: Priority, number: u8) {
    let operation = Operation::Send { message: Box::new([number]) };
    fabric.post(WorkRequest { id: 0, peer, priority, operation }).expect("room");
}

/// Writes `len` bytes from one slot to another; returns whether there was room.
fn write(
    fabric: &mut ShmFabric,
    peer: PeerId,
    slots: &[&SlotRef; 2],
    len: u32,
    immediate: Option<u32>,
) -> bool {
    let [from, to] = slots;
    let source = Source::Slot { slot: (*from).clone(), offset: 0, len };
    let target = Target::of(to, 0);
    let operation = Operation::Write { source, target, rows: None, immediate };
    fabric.post(WorkRequest { id: 0, peer, priority: Priority::Urgent, operation }).is_ok()
}

#[test]
fn so_much_is_copied_between_two_polls_and_no_more() {
    let name = format!("@{}", name());
    let (mut b, pool_b) = node(Some(&name), ShmConfig::default());
    let (mut a, pool_a) = node(None, ShmConfig::default());
    let (peer, _) = connected(&mut a, &mut b, &name);
    let (from, to) = (pool_a.acquire().expect("a slot"), pool_b.acquire().expect("a slot"));
    let slots = [&from, &to];
    for _ in 0..3 {
        let copied = (0..100).take_while(|_| write(&mut a, peer, &slots, 64 << 10, None)).count();
        assert_eq!(copied, 3, "192 KiB");
        assert!(!a.prepare_wait(), "it must be polled, not waited for");
        send(&mut a, peer, Priority::Urgent, 1);
        a.poll(16, &mut Vec::new());
    }
    // A write that waits for room in the ring is not copied, and takes no share of other requests.
    while write(&mut a, peer, &slots, 1, Some(7)) {
        a.poll(16, &mut Vec::new());
    }
    a.poll(16, &mut Vec::new());
    for _ in 0..10 {
        assert!(!write(&mut a, peer, &slots, 100 << 10, Some(7)), "the ring is full");
    }
    assert!(write(&mut a, peer, &slots, 64 << 10, None));
}

#[test]
fn silent_connections_keep_nobody_out_and_end_in_time() {
    let name = name();
    let config = ShmConfig {
        connections_max: 1,
        handshake_timeout: Duration::from_millis(300),
        ..ShmConfig::default()
    };
    let (mut b, _pool_b) = node(Some(&format!("@{name}")), config);
    // More sockets than may greet at once, but fewer than the backlog.
    let silent: Vec<UnixStream> = (0..100).map(|_| raw(&name)).collect();
    let mut events = Vec::new();
    until("all accepted", || {
        b.poll(16, &mut events);
        counter(&b, "handshake_timeouts") >= 36
    });
    let (mut a, _pool_a) = node(None, ShmConfig::default());
    connected(&mut a, &mut b, &format!("@{name}"));
    // The node sleeps without a deadline of its own; the timer wakes it.
    until("all timed out", || {
        if b.prepare_wait() {
            sleep(&b, None);
        }
        b.poll(16, &mut events);
        counter(&b, "handshake_timeouts") == 100
    });
    assert_eq!(counter(&b, "connections"), 1);
    drop(silent);
}

#[test]
fn a_listener_that_never_answers_is_given_up() {
    let name = name();
    let address = SocketAddr::from_abstract_name(&name).expect("name");
    let _listener = UnixListener::bind_addr(&address).expect("bind");
    let timeout = Duration::from_millis(200);
    let (mut a, _pool) = node(None, ShmConfig { handshake_timeout: timeout, ..ShmConfig::default() });
    let start = Instant::now();
    let peer = a.connect(&format!("@{name}")).expect("connect starts");
    let mut events = Vec::new();
    until("given up", || {
        if a.prepare_wait() {
            sleep(&a, None);
        }
        a.poll(16, &mut events) > 0
    });
    assert!(matches!(&events[..], [Event::PeerDown { peer: down, .. }] if *down == peer), "{events:?}");
    assert!(start.elapsed() >= timeout);
}

#[test]
fn nonsense_instead_of_a_hello_makes_no_event() {
    let name = name();
    let (mut b, _pool) = node(Some(&format!("@{name}")), ShmConfig::default());
    for nonsense in [&b"x"[..], b"KVSRSHM\0", b"KVSRAUTH", &[0; 500]] {
        raw(&name).write_all(nonsense).expect("write");
    }
    let mut events = Vec::new();
    (0..1000).for_each(|_| _ = b.poll(16, &mut events));
    // An opening, followed by bytes that are no hello.
    for nonsense in [&b"KVSRSHM\0"[..], &[0; 40]] {
        let mut socket = raw(&name);
        let (_, opening) = Authentication::connecting(Transport::Shm.into()).expect("random bytes");
        socket.write_all(&opening).expect("write");
        let mut answer = [0; OPENING_BYTES];
        socket.set_nonblocking(true).expect("nonblocking");
        until("an answer", || {
            b.poll(16, &mut events);
            socket.read(&mut answer).is_ok_and(|bytes| bytes == answer.len())
        });
        socket.write_all(nonsense).expect("write");
        socket.set_nonblocking(true).expect("nonblocking");
        until("closed", || {
            b.poll(16, &mut events);
            socket.read(&mut answer).is_ok_and(|bytes| bytes == 0)
        });
    }
    assert_eq!(events, []);
    let (mut a, _pool_a) = node(None, ShmConfig::default());
    connected(&mut a, &mut b, &format!("@{name}"));
}

fn with_secret(letter: &str) -> ShmConfig {
    let key = SharedKey::from_secret(letter.repeat(32).as_bytes()).expect("long enough");
    ShmConfig { key, ..ShmConfig::default() }
}

#[test]
fn only_peers_with_the_same_secret_are_admitted() {
    let address = format!("@{}", name());
    let (mut b, _pool) = node(Some(&address), with_secret("a"));
    for config in [with_secret("b"), ShmConfig::default()] {
        let (mut stranger, _pool) = node(None, config);
        let peer = stranger.connect(&address).expect("connect starts");
        let (mut seen, mut events) = (Vec::new(), Vec::new());
        until("refused", || {
            b.poll(16, &mut seen);
            stranger.poll(16, &mut events) > 0
        });
        assert!(
            matches!(&events[..], [Event::PeerDown { peer: down, reason }] if *down == peer && reason.contains("secret")),
            "{events:?}"
        );
        assert_eq!(seen, [], "nobody is told of a stranger");
    }
    assert_eq!(counter(&b, "unproved_handshakes"), 2);
    let (mut a, _pool_a) = node(None, with_secret("a"));
    connected(&mut a, &mut b, &address);
}

/// A rolling upgrade: nodes of two releases connect while their versions overlap, and report the mismatch
/// when they do not.
#[test]
fn nodes_of_two_releases_meet_while_their_versions_overlap() {
    let speaking =
        |oldest, newest| ShmConfig { versions: Versions { oldest, newest }, ..ShmConfig::default() };
    let address = format!("@{}", name());
    let (mut b, _pool) = node(Some(&address), speaking(1, 1));
    let (mut a, _pool_a) = node(None, speaking(1, 3));
    connected(&mut a, &mut b, &address);
    let (mut later, _pool) = node(None, speaking(2, 3));
    let peer = later.connect(&address).expect("connect starts");
    let (mut seen, mut events) = (Vec::new(), Vec::new());
    until("refused", || {
        b.poll(16, &mut seen);
        later.poll(16, &mut events) > 0
    });
    let [Event::PeerDown { peer: down, reason }] = &events[..] else { panic!("{events:?}") };
    let text = "the peer speaks version 1 of the protocol, and this process versions 2 to 3";
    assert!(*down == peer && reason.contains(text), "{reason}");
    assert_eq!((seen.len(), counter(&b, "unproved_handshakes")), (0, 0));
}

/// A node that shows no memory hands an empty slab to its peers.
#[test]
fn a_node_that_shows_nothing_keeps_its_slab_to_itself() {
    let address = format!("@{}", name());
    let (mut b, pool_b) = node(Some(&address), ShmConfig::default());
    let (mut a, pool_a) = node(None, ShmConfig { access: PeerAccess::None, ..ShmConfig::default() });
    let (to_b, to_a) = connected(&mut a, &mut b, &address);
    assert!(a.shown_slab(SlabKind::Host).is_none() && b.shown_slab(SlabKind::Host).is_some());
    let slot = pool_a.acquire().expect("a slot");
    slot.slab().write(slot.slot(), 0, &[7; 64]);
    let target = Target::of(&slot, 0);
    let from = pool_b.acquire().expect("a slot");
    let source = Source::Slot { slot: from, offset: 0, len: 128 };
    let operation = Operation::Write { source, target, rows: None, immediate: None };
    let refused = b.post(WorkRequest { id: 1, peer: to_a, priority: Priority::Urgent, operation });
    refused.expect("taken");
    let (mut seen, mut events) = (Vec::new(), Vec::new());
    until("the end", || {
        a.poll(16, &mut events);
        b.poll(16, &mut seen);
        events.iter().any(|event| matches!(event, Event::PeerDown { peer, .. } if *peer == to_b))
    });
    let mut bytes = [0; 64];
    slot.slab().read(slot.slot(), 0, &mut bytes);
    assert_eq!(bytes, [7; 64], "nothing was written");
}

/// The other process of the next test.
#[test]
fn foreigner_process() {
    let Ok(address) = std::env::var(ADDRESS) else { return };
    let (mut a, _pool) = node(None, ShmConfig::default());
    let refused = a.connect(&address).err().map(|error| error.to_string());
    assert!(refused.is_some_and(|reason| reason.contains("of user")), "we refuse a listener of another user");
    let (mut a, _pool) = node(None, ShmConfig { same_user_only: false, ..ShmConfig::default() });
    if let Err(error) = a.connect(&address) {
        // The node has closed the socket before this side's hello.
        return println!("foreigner: {error}");
    }
    let mut events = Vec::new();
    until("an answer", || a.poll(16, &mut events) > 0);
    println!("foreigner: {events:?}");
    // Time for the other side to check the credentials before this process ends.
    std::thread::sleep(Duration::from_millis(100));
}

#[test]
fn another_users_process_is_refused_unless_admitted() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can start a process of another user");
        return;
    }
    for same_user_only in [true, false] {
        let address = format!("@{}", name());
        let (mut b, _pool) = node(Some(&address), ShmConfig { same_user_only, ..ShmConfig::default() });
        let foreigner = Command::new(std::env::current_exe().expect("this program"))
            .args(["foreigner_process", "--exact", "--nocapture"])
            .env(ADDRESS, &address)
            .current_dir("/")
            .uid(65_534)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn();
        let mut foreigner = match foreigner {
            Ok(child) => child,
            Err(error) => return println!("skipped: another user may not run this program: {error}"),
        };
        let mut events = Vec::new();
        let mut ended = false;
        until("the foreigner ends", || {
            b.poll(16, &mut events);
            ended = ended || foreigner.try_wait().expect("wait").is_some();
            ended
        });
        let output = foreigner.wait_with_output().expect("output");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}");
        let accepted = events.iter().any(|event| matches!(event, Event::Accepted { .. }));
        assert_eq!(accepted, !same_user_only, "{events:?}");
        assert_eq!(said.contains("Connected"), !same_user_only, "{said}");
        // The foreigner itself gives up its first connection, because the listener is of another user, and
        // sends nothing on it.
        assert_eq!(counter(&b, "other_users_refused") >= 1, same_user_only);
    }
}

#[test]
fn urgent_messages_are_taken_first_and_do_not_starve_the_others() {
    let address = format!("@{}", name());
    let (mut b, _pool_b) = node(Some(&address), ShmConfig::default());
    let (mut a, _pool_a) = node(None, ShmConfig::default());
    let (to_b, _) = connected(&mut a, &mut b, &address);
    (0..100).for_each(|number| send(&mut a, to_b, Priority::Background, 100 + number));
    (0..100).for_each(|number| send(&mut a, to_b, Priority::Urgent, number));
    a.flush();
    let mut numbers = Vec::new();
    while numbers.len() < 200 {
        let mut events = Vec::new();
        assert!(b.poll(16, &mut events) <= 16);
        numbers.extend(events.iter().filter_map(|event| match event {
            Event::Message { message, .. } => Some(message[0]),
            _ => None,
        }));
    }
    assert_eq!(&numbers[..14], (0..14).collect::<Vec<u8>>(), "urgent first");
    assert_eq!(&numbers[14..16], [100, 101], "and a share for the others");
    let last_urgent = numbers.iter().rposition(|&number| number < 100).expect("urgent ones");
    assert!(last_urgent < 120, "position {last_urgent}");
}

#[test]
fn what_a_peer_sent_before_its_end_arrives_before_the_news() {
    let address = format!("@{}", name());
    let (mut b, _pool_b) = node(Some(&address), ShmConfig::default());
    let (mut a, _pool_a) = node(None, ShmConfig::default());
    let (to_b, to_a) = connected(&mut a, &mut b, &address);
    (0..200).for_each(|number| send(&mut a, to_b, Priority::ALL[number as usize % 2], number));
    a.flush();
    drop(a);
    let mut events = Vec::new();
    until("the end", || {
        b.poll(3, &mut events);
        events.iter().any(|event| matches!(event, Event::PeerDown { .. }))
    });
    assert_eq!(events.len(), 201);
    assert!(matches!(&events[200], Event::PeerDown { peer, .. } if *peer == to_a));
}

#[test]
fn a_disconnected_peer_keeps_its_place_until_it_closes() {
    let address = format!("@{}", name());
    let (mut b, _pool_b) = node(Some(&address), ShmConfig::default());
    let (mut a, _pool_a) = node(None, ShmConfig::default());
    let (to_b, _) = connected(&mut a, &mut b, &address);
    a.disconnect(to_b);
    let mut events = Vec::new();
    // Node b does not run, as if it were stopped.
    (0..1000).for_each(|_| _ = a.poll(16, &mut events));
    assert_eq!(events, [], "no end while the peer may still write");
    assert_eq!(counter(&a, "connections"), 1);
    let mut others = Vec::new();
    until("the end", || {
        b.poll(16, &mut others);
        a.poll(16, &mut events) > 0
    });
    assert!(matches!(&events[..], [Event::PeerDown { .. }]));
    assert_eq!(counter(&a, "connections"), 0);
}

/// The slot is freed in the middle of a long read: the copied bytes are not reported as the slot's.
#[test]
fn a_slot_reused_during_a_read_is_noticed() {
    const BYTES: usize = 32 << 20;
    let make = || {
        let layout = SlabLayout { slot_bytes: BYTES, slot_count: 1 };
        let slab = Arc::new(Slab::create("long", layout, PageSize::Standard).expect("slab"));
        slab.populate(usize::MAX).expect("populate");
        SlotPool::new(slab)
    };
    let (pool_a, pool_b) = (make(), make());
    let into = pool_a.acquire().expect("a slot");
    let mut in_the_middle = 0;
    for attempt in 0..60_u64 {
        let address = format!("@{}", name());
        let config = ShmConfig { populate_bytes_max: 1 << 30, ..ShmConfig::default() };
        let mut a = ShmFabric::new(Arc::clone(pool_a.slab()), None, config.clone()).expect("a");
        let mut b = ShmFabric::new(Arc::clone(pool_b.slab()), Some(&address), config).expect("b");
        let (to_b, _) = connected(&mut a, &mut b, &address);
        let slot = pool_b.acquire().expect("a slot");
        slot.slab().write(slot.slot(), 0, &[7]);
        into.slab().write(into.slot(), 0, &[0xEE]);
        let from = Target::of(&slot, 0);
        let range = SlotRange { slot: into.clone(), offset: 0, len: BYTES as u32 };
        let operation = Operation::Read { into: range, from, rows: None };
        let request = WorkRequest { id: 1, peer: to_b, priority: Priority::Urgent, operation };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_micros(attempt % 10 * 300));
                drop(slot);
            });
            a.post(request).expect("room");
        });
        let mut events = Vec::new();
        a.poll(16, &mut events);
        let mut first = [0];
        into.slab().read(into.slot(), 0, &mut first);
        let refused = events.contains(&Event::Completed { id: 1, completion: Completion::PeerDown });
        in_the_middle += u32::from(refused && first == [7]);
    }
    println!("noticed in the middle of the copy: {in_the_middle} of 60");
    assert!(in_the_middle > 0, "no attempt hit the copy; run on a quieter machine");
}

/// A completion means that the peer's fabric has the message, whether or not the batch was flushed.
#[test]
fn a_completed_message_survives_its_sender() {
    let address = format!("@{}", name());
    let (mut b, _pool_b) = node(Some(&address), ShmConfig::default());
    let (mut a, _pool_a) = node(None, ShmConfig::default());
    let (to_b, to_a) = connected(&mut a, &mut b, &address);
    let operation = Operation::Send { message: Box::new([9]) };
    a.post(WorkRequest { id: 5, peer: to_b, priority: Priority::Urgent, operation }).expect("room");
    let mut events = Vec::new();
    a.poll(16, &mut events);
    assert_eq!(events, [Event::Completed { id: 5, completion: Completion::Done }]);
    drop(a);
    events.clear();
    until("the end", || {
        b.poll(16, &mut events);
        events.len() >= 2
    });
    assert_eq!(events[0], Event::Message { peer: to_a, message: Box::new([9]) });
}

#[test]
fn an_inline_write_that_claims_too_much_is_refused() {
    let address = format!("@{}", name());
    let (mut b, pool_b) = node(Some(&address), ShmConfig::default());
    let (mut a, _pool_a) = node(None, ShmConfig::default());
    let (to_b, _) = connected(&mut a, &mut b, &address);
    let slot = pool_b.acquire().expect("a slot");
    let target = Target::of(&slot, 0);
    let source = Source::Inline { bytes: [1; INLINE_BYTES_MAX], len: INLINE_BYTES_MAX as u8 + 1 };
    let operation = Operation::Write { source, target, rows: None, immediate: Some(1) };
    a.post(WorkRequest { id: 9, peer: to_b, priority: Priority::Urgent, operation }).expect("taken");
    let mut events = Vec::new();
    a.poll(16, &mut events);
    assert_eq!(events, [Event::Completed { id: 9, completion: Completion::PeerDown }]);
}
