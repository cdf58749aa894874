//! Strangers: silent ones, wrong ones, incomplete ones, too many, and a node without descriptors.

mod nodes;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use dataplane_fabric::{Event, Fabric};
use dataplane_tcp::{TcpConfig, TcpFabric};
use nodes::{PATIENCE, hello, listening, pool};

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
    // They are more than may wait: the oldest had to go. A peer gets in nevertheless.
    poll_until(&mut node, "room", |node, _| node.counters().refused_handshakes.get() >= 24);
    assert_eq!(node.counters().handshake_timeouts.get(), 0, "room was made at once");
    let mut friends = [TcpStream::connect(address(&node)), TcpStream::connect(address(&node))]
        .map(|it| it.expect("connect"));
    for (lane, friend) in friends.iter_mut().enumerate() {
        friend.write_all(&hello(7, lane as u8, 0, 1)).expect("hello");
    }
    let events = poll_until(&mut node, "accepted", |_, events| !events.is_empty());
    assert!(matches!(events[..], [Event::Accepted { .. }]));
    for friend in &mut friends {
        let mut answer = [0; 32];
        friend.read_exact(&mut answer).expect("answer");
        assert_eq!(answer[..13], hello(7, answer[10], 0, 1)[..13]);
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
    let mut greet = |bytes: [u8; 32]| {
        let mut stream = TcpStream::connect(address(&node)).expect("connect");
        stream.write_all(&bytes).expect("hello");
        // One after the other, so that it is known which comes first.
        let start = Instant::now();
        let mut events = Vec::new();
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

    // A session whose second connection never comes.
    let (mut half, _) = greet(hello(6, 0, 0, 1));
    let events =
        poll_until(&mut node, "the time-out", |node, _| node.counters().handshake_timeouts.get() == 1);
    assert!(events.is_empty(), "nobody was told of it, so nobody is told of its end: {events:?}");
    let mut answer = [0; 32];
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

/// The protocol's end of a session after it is open: garbage where a batch should be.
#[test]
fn garbage_after_the_hello_ends_the_session() {
    let mut node = listening(&pool(4096, 1), TcpConfig::default());
    let mut streams = [0, 1].map(|lane| {
        let mut stream = TcpStream::connect(address(&node)).expect("connect");
        stream.write_all(&hello(9, lane, 0, 1)).expect("hello");
        stream
    });
    poll_until(&mut node, "accepted", |_, events| !events.is_empty());
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
