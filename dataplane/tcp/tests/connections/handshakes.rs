//! Connections of strangers: silent, invalid, incomplete, too many.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use dataplane_fabric::auth::{Authentication, DialledAddress, PROOF_BYTES, SharedKey, Transport, Versions};
use dataplane_fabric::{Completion, Event, Fabric, Operation, PeerAccess, Priority, SlotRange};
use dataplane_tcp::{TcpConfig, TcpFabric};

use crate::nodes::{self, Nodes, PATIENCE, hello, listening, pool, say_hello};

fn poll_until(
    fabric: &mut TcpFabric,
    what: &str,
    mut done: impl FnMut(&TcpFabric, &[Event]) -> bool,
) -> Vec<Event> {
    let (start, mut events) = (Instant::now(), Vec::new());
    while !done(fabric, &events) {
        fabric.flush();
        fabric.poll(64, &mut events);
        assert!(start.elapsed() < PATIENCE, "never: {what}");
    }
    events
}

/// Whether the other side has closed this connection.
fn is_closed(stream: &mut TcpStream) -> bool {
    stream.set_nonblocking(true).expect("nonblocking");
    match stream.read(&mut [0; 32]) {
        Ok(0) => true,
        Ok(_) => false,
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    }
}

fn address(fabric: &TcpFabric) -> SocketAddr {
    fabric.listening_on().expect("bound")
}

#[test]
fn silent_connections_hold_no_place_and_time_out() {
    let config = TcpConfig {
        peers_max: 1,
        handshakes_max: 16,
        handshake_timeout: Duration::from_secs(2),
        ..TcpConfig::default()
    };
    let mut node = listening(&pool(4096, 1), config);
    let mut strangers: Vec<TcpStream> =
        (0..40).map(|_| TcpStream::connect(address(&node)).expect("connect")).collect();
    // The strangers exceed the limit, so the oldest were closed. A peer can still connect.
    poll_until(&mut node, "room", |node, _| node.counters().refused_handshakes.get() >= 24);
    assert_eq!(node.counters().handshake_timeouts.get(), 0, "room was made at once");
    let mut friends = [TcpStream::connect(address(&node)), TcpStream::connect(address(&node))]
        .map(|it| it.expect("connect"));
    let (key, mut events) = (SharedKey::default(), Vec::new());
    let mut proofs: Vec<Authentication> = Vec::new();
    for (lane, friend) in friends.iter_mut().enumerate() {
        let hello = hello(7, lane as u8, 0, 1);
        proofs.extend(say_hello(&mut node, friend, &hello, &key, &mut events));
    }
    events.extend(poll_until(&mut node, "accepted", |_, events| !events.is_empty()));
    assert!(matches!(events[..], [Event::Accepted { .. }]));
    for (friend, proofs) in friends.iter_mut().zip(proofs) {
        let mut answer = [0; 64];
        friend.read_exact(&mut answer).expect("answer");
        assert_eq!(answer[..13], hello(7, answer[10], 0, 1)[..13]);
        let proof = answer.last_chunk::<PROOF_BYTES>().expect("a proof");
        assert_eq!(proofs.check(&key, &answer[..32], proof), Ok(()), "the node proves itself too");
    }
    poll_until(&mut node, "all strangers gone", |node, _| node.counters().refused_handshakes.get() == 40);
    assert!(node.counters().handshake_timeouts.get() >= 14);
    assert!(strangers.iter_mut().all(is_closed));
    assert!(!friends.iter_mut().any(is_closed), "a greeted connection is no stranger");
}

#[test]
fn wrong_duplicate_and_late_connections_are_refused() {
    let config = TcpConfig { handshake_timeout: Duration::from_millis(300), ..TcpConfig::default() };
    let mut node = listening(&pool(4096, 1), config);
    let key = SharedKey::default();
    let mut greet = |bytes: [u8; 32]| {
        let mut stream = TcpStream::connect(address(&node)).expect("connect");
        let mut events = Vec::new();
        assert!(say_hello(&mut node, &mut stream, &bytes, &key, &mut events).is_some());
        // One connection after the other, so that their order is known.
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(20) {
            node.poll(16, &mut events);
        }
        (stream, events)
    };
    let mut other_version = hello(1, 0, 0, 1);
    other_version[8] = 1;
    for bad in [[7; 32], other_version, hello(1, 2, 0, 1), hello(1, 0, 1, 1), hello(1, 0, 0, 9)] {
        assert!(is_closed(&mut greet(bad).0), "{bad:?}");
    }
    let (mut first, _) = greet(hello(5, 0, 0, 1));
    assert!(is_closed(&mut greet(hello(5, 0, 0, 1)).0), "a second one for one place");
    assert!(is_closed(&mut greet(hello(5, 1, 0, 2)).0), "it does not agree on their number");
    let (mut second, events) = greet(hello(5, 1, 0, 1));
    assert!(matches!(events[..], [Event::Accepted { .. }]), "{events:?}");
    assert!(is_closed(&mut greet(hello(5, 1, 0, 1)).0), "the session is complete");
    assert!(!is_closed(&mut first) && !is_closed(&mut second));

    // A session whose second connection does not arrive.
    let (mut half, _) = greet(hello(6, 0, 0, 1));
    let events =
        poll_until(&mut node, "the time-out", |node, _| node.counters().handshake_timeouts.get() == 1);
    assert!(events.is_empty(), "nobody was told of it, so nobody is told of its end: {events:?}");
    let mut answer = [0; 64];
    half.set_nonblocking(false).expect("blocking");
    assert!(half.read_exact(&mut answer).is_err() || is_closed(&mut half));
}

#[test]
fn a_peer_that_never_answers_is_reported() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let config = TcpConfig { handshake_timeout: Duration::from_millis(200), ..TcpConfig::default() };
    let mut node = listening(&pool(4096, 1), config);
    let peer = node.connect(&silent.local_addr().expect("address").to_string()).expect("address");
    let events = poll_until(&mut node, "the end", |_, events| !events.is_empty());
    assert!(matches!(&events[..], [Event::PeerDown { peer: down, .. }] if *down == peer), "{events:?}");
}

/// Garbage in place of a batch ends an open session.
#[test]
fn garbage_after_the_hello_ends_the_session() {
    let mut node = listening(&pool(4096, 1), TcpConfig::default());
    let mut events = Vec::new();
    let mut streams = [0, 1].map(|lane| {
        let mut stream = TcpStream::connect(address(&node)).expect("connect");
        let (key, hello) = (SharedKey::default(), hello(9, lane, 0, 1));
        say_hello(&mut node, &mut stream, &hello, &key, &mut events).expect("greeted");
        stream
    });
    poll_until(&mut node, "accepted", |_, more| !more.is_empty() || !events.is_empty());
    streams[1].write_all(&[0xEE; 100]).expect("garbage");
    let events = poll_until(&mut node, "the end", |_, events| !events.is_empty());
    assert!(
        matches!(&events[..], [Event::PeerDown { reason, .. }] if reason.contains("protocol")),
        "{events:?}"
    );
    streams[0].set_nonblocking(false).expect("blocking");
    let mut answer = [0; 64];
    while streams[0].read(&mut answer).is_ok_and(|bytes| bytes > 0) {}
    assert!(is_closed(&mut streams[0]), "the other lane ends too");
}

fn with_secret(letter: &str) -> TcpConfig {
    let key = SharedKey::from_secret(letter.repeat(32).as_bytes()).expect("long enough");
    TcpConfig { key, ..TcpConfig::default() }
}

#[test]
fn only_peers_with_the_same_secret_are_admitted() {
    let (ours, other, none) = (with_secret("a"), with_secret("b"), TcpConfig::default());
    for (here, there, is_admitted) in [
        (&ours, &ours, true),
        (&ours, &other, false),
        (&ours, &none, false),
        (&none, &ours, false),
        (&none, &none, true),
    ] {
        let mut acceptor = listening(&pool(4096, 1), here.clone());
        let mut initiator = listening(&pool(4096, 1), there.clone());
        initiator.connect(&address(&acceptor).to_string()).expect("address");
        let (mut seen, mut heard, start) = (Vec::new(), Vec::new(), Instant::now());
        while heard.is_empty() || is_admitted && seen.is_empty() {
            acceptor.flush();
            acceptor.poll(16, &mut seen);
            initiator.flush();
            initiator.poll(16, &mut heard);
            assert!(start.elapsed() < PATIENCE, "neither admitted nor refused");
        }
        let refused = acceptor.counters().unproved_handshakes.get();
        if is_admitted {
            assert!(matches!(heard[..], [Event::Connected { .. }]), "{heard:?}");
            assert_eq!(refused, 0);
        } else {
            let is_told = |reason: &str| reason.contains("another secret") || reason.contains("reset");
            assert!(matches!(&heard[..], [Event::PeerDown { reason, .. }] if is_told(reason)), "{heard:?}");
            assert!(refused > 0 && seen.is_empty(), "the acceptor tells nobody of a stranger: {seen:?}");
        }
    }
}

/// A rolling upgrade: nodes of two releases work together while their versions overlap, and report the reason
/// otherwise.
#[test]
fn nodes_of_two_releases_meet_while_their_versions_overlap() {
    let speaking =
        |oldest, newest| TcpConfig { versions: Versions { oldest, newest }, ..TcpConfig::default() };
    for (there, refusal) in [
        (speaking(1, 2), None),
        (speaking(2, 3), Some("the peer speaks version 1 of the protocol, and this process versions 2 to 3")),
    ] {
        let mut acceptor = listening(&pool(4096, 1), speaking(1, 1));
        let mut initiator = listening(&pool(4096, 1), there);
        initiator.connect(&address(&acceptor).to_string()).expect("address");
        let (mut seen, mut heard, start) = (Vec::new(), Vec::new(), Instant::now());
        while heard.is_empty() {
            acceptor.flush();
            acceptor.poll(16, &mut seen);
            initiator.flush();
            initiator.poll(16, &mut heard);
            assert!(start.elapsed() < PATIENCE, "neither admitted nor refused");
        }
        match refusal {
            None => assert!(matches!(heard[..], [Event::Connected { .. }]), "{heard:?}"),
            Some(text) => {
                let is_told = matches!(&heard[..], [Event::PeerDown { reason, .. }] if reason.contains(text));
                assert!(is_told && seen.is_empty(), "{heard:?} {seen:?}");
                assert_eq!(acceptor.counters().unproved_handshakes.get(), 0);
            }
        }
    }
}

/// A listener without the secret gets only a proof from the node, and is refused.
#[test]
fn a_listener_without_the_secret_is_refused_by_the_side_that_connects() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let mut node = listening(&pool(4096, 1), with_secret("a"));
    node.connect(&listener.local_addr().expect("address").to_string()).expect("address");
    listener.set_nonblocking(true).expect("nonblocking");
    let mut events = Vec::new();
    let mut stream = loop {
        node.flush();
        node.poll(16, &mut events);
        if let Ok((stream, _)) = listener.accept() {
            break stream;
        }
    };
    stream.set_nonblocking(false).expect("blocking");
    let mut authentication = Authentication::accepting(Transport::Tcp.into());
    let mut opening = [0; 32];
    stream.read_exact(&mut opening).expect("an opening");
    let answer = authentication
        .opened(&opening, DialledAddress::of(listener.local_addr().expect("address")))
        .expect("an opening")
        .expect("an answer");
    stream.write_all(&answer).expect("sent");
    let mut theirs = [0; 64];
    stream.set_nonblocking(true).expect("nonblocking");
    let start = Instant::now();
    while stream.peek(&mut theirs).map_or(0, |bytes| bytes) < 64 {
        node.flush();
        node.poll(16, &mut events);
        assert!(start.elapsed() < PATIENCE);
    }
    // The node's own hello sent back, with a proof by another key.
    let proof = authentication.prove(&SharedKey::default(), &theirs[..32]).expect("agreed");
    stream.write_all(&[&theirs[..32], &proof].concat()).expect("sent");
    let events = poll_until(&mut node, "the end", |_, events| !events.is_empty());
    assert!(
        matches!(&events[..], [Event::PeerDown { reason, .. }] if reason.contains("transfer.secret_file")),
        "{events:?}"
    );
}

#[test]
fn peers_do_with_slots_only_what_they_may() {
    for (access, may_write, may_read) in [
        (PeerAccess::None, false, false),
        (PeerAccess::Write, true, false),
        (PeerAccess::ReadWrite, true, true),
    ] {
        for (is_read, may) in [(false, may_write), (true, may_read)] {
            let mut nodes = Nodes::new(&TcpConfig { access, ..TcpConfig::default() }, 4096, 2);
            let (source, target) =
                (nodes.pool_a.acquire().expect("slot"), nodes.pool_b.acquire().expect("slot"));
            let operation = if is_read {
                let into = SlotRange { slot: source.clone(), offset: 0, len: 64 };
                Operation::Read { into, from: nodes::target(&target), rows: None }
            } else {
                nodes::write(&source, &target, 64, None)
            };
            nodes.post(Priority::Urgent, 1, operation);
            nodes.until("the answer", |nodes| nodes::completed(&nodes.seen_a, 1).is_some());
            let expected = if may { Completion::Done } else { Completion::PeerDown };
            assert_eq!(nodes::completed(&nodes.seen_a, 1), Some(expected), "{access:?} read: {is_read}");
        }
    }
}

/// A relay between two nodes does not connect them, because they see different addresses.
#[test]
fn a_handshake_that_is_passed_on_connects_nobody() {
    let relay = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    relay.set_nonblocking(true).expect("nonblocking");
    let (mut acceptor, mut initiator) =
        (listening(&pool(4096, 1), with_secret("a")), listening(&pool(4096, 1), with_secret("a")));
    let relayed = relay.local_addr().expect("address").to_string();
    initiator.connect(&relayed).expect("address");
    let (mut seen, mut heard, start) = (Vec::new(), Vec::new(), Instant::now());
    let mut pairs: Vec<[TcpStream; 2]> = Vec::new();
    while heard.is_empty() {
        acceptor.flush();
        acceptor.poll(16, &mut seen);
        initiator.flush();
        initiator.poll(16, &mut heard);
        if let Ok((near, _)) = relay.accept() {
            let far = TcpStream::connect(address(&acceptor)).expect("connect");
            let pair = [near, far];
            pair.iter().for_each(|stream| stream.set_nonblocking(true).expect("nonblocking"));
            pairs.push(pair);
        }
        for [near, far] in &mut pairs {
            let mut bytes = [0; 256];
            for is_back in [false, true] {
                let (from, to) = if is_back { (&mut *far, &mut *near) } else { (&mut *near, &mut *far) };
                if let Ok(count @ 1..) = from.read(&mut bytes) {
                    // The other side may have closed the connection already.
                    let _hung_up = to.write_all(&bytes[..count]);
                } else if matches!(from.peek(&mut bytes), Ok(0)) {
                    let _hung_up = to.shutdown(std::net::Shutdown::Both);
                }
            }
        }
        assert!(start.elapsed() < PATIENCE, "neither admitted nor refused");
    }
    assert!(matches!(&heard[..], [Event::PeerDown { .. }]), "{heard:?}");
    assert!(seen.is_empty() && acceptor.counters().unproved_handshakes.get() > 0, "{seen:?}");
}
