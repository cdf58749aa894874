//! Tests of the handshake between two peers.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;

use super::*;
use crate::auth::{Authentication, DialledAddress, OPENING_BYTES, Transport, Versions};

const FRAME_BYTES: usize = 8;

fn config() -> HandshakeConfig {
    HandshakeConfig {
        protocol: Transport::Tcp.into(),
        key: SharedKey::default(),
        frame_bytes: FRAME_BYTES,
        descriptors: None,
        timeout: Duration::from_secs(10),
        unauthenticated_max: 4,
    }
}

fn listening(config: HandshakeConfig) -> (Handshakes, std::net::SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    (Handshakes::new(config, Some(listener.into())).expect("handshakes"), address)
}

fn dial(handshakes: &mut Handshakes, address: std::net::SocketAddr) -> SocketId {
    let socket = TcpStream::connect(address).expect("connect");
    socket.set_nonblocking(true).expect("an option");
    handshakes.connect(socket.into()).expect("a socket_id")
}

/// Polls both sides until `done`. Events of a side are appended to its earlier ones.
fn until(
    sides: &mut [(&mut Handshakes, &mut Vec<HandshakeEvent>)],
    what: &str,
    mut done: impl FnMut(&[&Vec<HandshakeEvent>]) -> bool,
) {
    let started = Instant::now();
    loop {
        for (handshakes, events) in sides.iter_mut() {
            handshakes.poll(|_| true, events);
        }
        let all: Vec<&Vec<HandshakeEvent>> = sides.iter().map(|(_, events)| &**events).collect();
        if done(&all) {
            return;
        }
        assert!(started.elapsed() < Duration::from_secs(20), "{what}: {all:?}");
        std::thread::yield_now();
    }
}

/// Runs both sides up to the arrival of the initiator's hello.
fn greeted(a: &mut Handshakes, b: &mut Handshakes, address: std::net::SocketAddr) -> (SocketId, SocketId) {
    let ours = dial(a, address);
    let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
    until(&mut [(a, &mut of_a), (b, &mut of_b)], "openings", |events| !events[0].is_empty());
    assert!(matches!(of_a[..], [HandshakeEvent::Opened { socket_id }] if socket_id == ours), "{of_a:?}");
    assert!(of_b.is_empty(), "nobody has proved himself: {of_b:?}");
    a.send(ours, b"of-A-abc", &[]).expect("sent");
    until(&mut [(b, &mut of_b)], "the hello", |events| !events[0].is_empty());
    let [HandshakeEvent::Frame { socket_id, frame, descriptors }] = &of_b[..] else { panic!("{of_b:?}") };
    assert_eq!((&frame[..], descriptors.len()), (&b"of-A-abc"[..], 0));
    (ours, *socket_id)
}

#[test]
fn hellos_are_exchanged_and_sockets_are_released_with_what_follows() {
    let (mut b, address) = listening(config());
    let mut a = Handshakes::new(config(), None).expect("handshakes");
    let (of_a, of_b) = greeted(&mut a, &mut b, address);
    b.send(of_b, b"of-B-abc", &[]).expect("sent");
    let mut accepted = TcpStream::from(b.release(of_b).expect("the socket"));
    // Bytes after the hello are not read by the handshake.
    accepted.write_all(b"and more").expect("written");
    let mut events = Vec::new();
    until(&mut [(&mut a, &mut events)], "the answer", |events| !events[0].is_empty());
    assert!(
        matches!(&events[..], [HandshakeEvent::Frame { frame, .. }] if frame == b"of-B-abc"),
        "{events:?}"
    );
    let mut connected = TcpStream::from(a.release(of_a).expect("the socket"));
    let mut bytes = [0; 8];
    connected.read_exact(&mut bytes).expect("blocks until it is there");
    assert_eq!(&bytes, b"and more");
    assert!(a.release(of_a).is_none() && a.socket(of_a).is_none(), "it is gone from here");
    assert_eq!((a.take_counts(), b.take_counts()), (HandshakeCounts::default(), HandshakeCounts::default()));
}

#[test]
fn a_socket_that_is_kept_outlives_the_deadline_and_tells_of_the_end() {
    let short = HandshakeConfig { timeout: Duration::from_millis(1500), ..config() };
    let (mut b, address) = listening(short.clone());
    let mut a = Handshakes::new(config(), None).expect("handshakes");
    let (of_a, of_b) = greeted(&mut a, &mut b, address);
    b.keep_open(of_b);
    let mut events = Vec::new();
    std::thread::sleep(short.timeout + Duration::from_millis(300));
    b.poll(|_| true, &mut events);
    assert!(events.is_empty(), "{events:?}");
    // A frame after `keep_open` is still reported.
    a.send(of_a, b"once-mor", &[]).expect("sent");
    until(&mut [(&mut b, &mut events)], "the frame", |events| !events[0].is_empty());
    assert!(
        matches!(&events[..], [HandshakeEvent::Frame { frame, .. }] if frame == b"once-mor"),
        "{events:?}"
    );
    events.clear();
    a.close(of_a);
    until(&mut [(&mut b, &mut events)], "the end", |events| !events[0].is_empty());
    assert!(
        matches!(&events[..], [HandshakeEvent::Closed { socket_id, .. }] if *socket_id == of_b),
        "{events:?}"
    );
    b.poll(|_| true, &mut events);
    assert_eq!(events.len(), 1, "an end is told once, although the socket is still here");
    assert!(b.socket(of_b).is_some());
}

#[test]
fn a_socket_that_is_neither_kept_nor_released_fails_in_time() {
    let short = HandshakeConfig { timeout: Duration::from_millis(1000), ..config() };
    let (mut b, address) = listening(short);
    let mut a = Handshakes::new(config(), None).expect("handshakes");
    let (_, of_b) = greeted(&mut a, &mut b, address);
    let mut events = Vec::new();
    until(&mut [(&mut b, &mut events)], "the deadline", |events| !events[0].is_empty());
    let [HandshakeEvent::Failed { socket_id, error: HandshakeError::Late }] = events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(socket_id, of_b);
    assert_eq!(b.take_counts(), HandshakeCounts { late: 1, ..HandshakeCounts::default() });
}

/// The oldest stranger is displaced, the rest end at their deadlines, and none is reported to the transport.
#[test]
fn strangers_are_bounded_and_end_in_time() {
    let timeout = Duration::from_millis(400);
    let (mut b, address) = listening(HandshakeConfig { timeout, ..config() });
    let mut events = Vec::new();
    let silent: Vec<TcpStream> = (0..7).map(|_| TcpStream::connect(address).expect("connect")).collect();
    let mut counts = HandshakeCounts::default();
    let started = Instant::now();
    while counts.refused < 7 {
        b.poll(|_| true, &mut events);
        let more = b.take_counts();
        counts.refused += more.refused;
        counts.late += more.late;
        counts.displaced += more.displaced;
        if counts.displaced == 3 && counts.late == 0 {
            assert_eq!(b.sockets.len(), 4);
        }
        assert!(started.elapsed() < Duration::from_secs(20), "{counts:?}");
        std::thread::yield_now();
    }
    assert_eq!(counts, HandshakeCounts { refused: 7, late: 4, displaced: 3, ..HandshakeCounts::default() });
    assert!(events.is_empty() && b.sockets.is_empty() && b.unauthenticated == 0);
    for mut silent in silent {
        assert!(silent.read(&mut [0; 1]).map_or(true, |count| count == 0), "it was closed");
    }
}

/// Stopping to listen ends a pause in accepting: a thread that sleeps on the descriptor is not kept awake.
#[test]
fn a_node_that_stops_listening_is_left_alone() {
    let (mut b, address) = listening(config());
    let mut silent = TcpStream::connect(address).expect("connect");
    let mut events = Vec::new();
    while b.sockets.is_empty() {
        b.poll(|_| true, &mut events);
    }
    b.pause();
    b.stop_listening();
    assert_eq!(silent.read(&mut [0; 1]).expect("closed"), 0, "strangers are closed, too");
    assert!(TcpStream::connect(address).is_err(), "nobody listens");
    std::thread::sleep(2 * ACCEPT_PAUSE);
    // The timer of the pause fires once.
    b.poll(|_| true, &mut events);
    let descriptor = b.descriptor();
    let mut polled = [rustix::event::PollFd::new(&descriptor, rustix::event::PollFlags::IN)];
    let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
    assert_eq!(rustix::event::poll(&mut polled, Some(&timeout)), Ok(0));
    assert!(events.is_empty());
}

#[test]
fn whoever_is_not_admitted_is_closed_at_once() {
    let (mut b, address) = listening(config());
    let mut turned_away = TcpStream::connect(address).expect("connect");
    let mut asked = 0;
    let started = Instant::now();
    while asked == 0 {
        let admit = |_: &OwnedFd| {
            asked += 1;
            false
        };
        b.poll(admit, &mut Vec::new());
        assert!(started.elapsed() < Duration::from_secs(20));
    }
    assert_eq!(turned_away.read(&mut [0; 1]).expect("closed"), 0);
    assert!(b.sockets.is_empty());
}

/// Each byte of an opening and a hello arrives separately; a connection that ends after any of them leaves no
/// socket.
#[test]
fn handshakes_come_in_crumbs_and_break_off_anywhere() {
    let (mut b, address) = listening(config());
    let whole = OPENING_BYTES + FRAME_BYTES + crate::auth::PROOF_BYTES;
    for broken_at in [1, OPENING_BYTES - 1, OPENING_BYTES, OPENING_BYTES + FRAME_BYTES, whole - 1, whole] {
        let mut stream = TcpStream::connect(address).expect("connect");
        stream.set_nodelay(true).expect("an option");
        let (mut authentication, opening) =
            Authentication::connecting(Transport::Tcp.into()).expect("random bytes");
        let (mut bytes, mut events) = (opening.to_vec(), Vec::new());
        for at in 0..broken_at {
            if at == OPENING_BYTES {
                let mut answer = [0; OPENING_BYTES];
                stream.set_nonblocking(true).expect("an option");
                let mut taken = 0;
                while taken < OPENING_BYTES {
                    b.poll(|_| true, &mut events);
                    taken += stream.read(&mut answer[taken..]).unwrap_or(0);
                }
                stream.set_nonblocking(false).expect("an option");
                authentication.opened(&answer, DialledAddress::of(address)).expect("an answer");
                bytes.extend(b"crumbles");
                bytes.extend(authentication.prove(&SharedKey::default(), b"crumbles").expect("agreed"));
            }
            stream.write_all(&bytes[at..=at]).expect("written");
            b.poll(|_| true, &mut events);
        }
        if broken_at == whole {
            until(&mut [(&mut b, &mut events)], "the hello", |events| !events[0].is_empty());
            assert!(
                matches!(&events[..], [HandshakeEvent::Frame { frame, .. }] if frame == b"crumbles"),
                "{events:?}"
            );
            continue;
        }
        drop(stream);
        let mut refused = 0;
        let started = Instant::now();
        while refused == 0 {
            b.poll(|_| true, &mut events);
            refused += b.take_counts().refused;
            assert!(started.elapsed() < Duration::from_secs(20), "broken at {broken_at}");
        }
        assert!(events.is_empty() && b.sockets.is_empty(), "broken at {broken_at}: {events:?}");
    }
}

#[test]
fn another_secret_and_another_release_are_told_to_the_side_that_connected() {
    let secret = |letter: &str| SharedKey::from_secret(letter.repeat(32).as_bytes()).expect("long enough");
    let (mut b, address) = listening(HandshakeConfig { key: secret("b"), ..config() });
    let mut a = Handshakes::new(HandshakeConfig { key: secret("a"), ..config() }, None).expect("handshakes");
    let ours = dial(&mut a, address);
    let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
    until(&mut [(&mut a, &mut of_a), (&mut b, &mut of_b)], "openings", |events| !events[0].is_empty());
    a.send(ours, b"of-A-abc", &[]).expect("sent");
    until(&mut [(&mut a, &mut of_a), (&mut b, &mut of_b)], "the refusal", |events| events[0].len() == 2);
    assert!(
        matches!(&of_a[1], HandshakeEvent::Closed { reason, .. } if reason.contains("another secret")),
        "{of_a:?}"
    );
    assert!(of_b.is_empty());
    assert_eq!(b.take_counts(), HandshakeCounts { refused: 1, unproved: 1, ..HandshakeCounts::default() });

    let newer = Protocol { transport: Transport::Tcp, versions: Versions { oldest: 8, newest: 9 } };
    let mut a = Handshakes::new(HandshakeConfig { protocol: newer, ..config() }, None).expect("handshakes");
    dial(&mut a, address);
    of_a.clear();
    until(&mut [(&mut a, &mut of_a), (&mut b, &mut of_b)], "the refusal", |events| !events[0].is_empty());
    let [HandshakeEvent::Failed { error: HandshakeError::Auth(error @ AuthError::Version { .. }), .. }] =
        &of_a[..]
    else {
        panic!("{of_a:?}")
    };
    assert!(error.to_string().contains("versions 8 to 9"), "{error}");
}

#[test]
fn an_address_where_nobody_listens_is_told() {
    let (b, address) = listening(config());
    drop(b);
    let mut a = Handshakes::new(config(), None).expect("handshakes");
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (family, kind) = (rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM);
    let socket = rustix::net::socket_with(family, kind, flags, None).expect("a socket");
    // `connect(2)` may report the refusal at once, to its caller.
    if rustix::net::connect(&socket, &address).is_err_and(|errno| errno == Errno::CONNREFUSED) {
        return;
    }
    let mut events = Vec::new();
    match a.connect(socket) {
        Ok(_) => {}
        Err(error) => return assert!(error.to_string().contains("refused"), "{error}"),
    }
    until(&mut [(&mut a, &mut events)], "the refusal", |events| !events[0].is_empty());
    assert!(
        matches!(&events[..], [HandshakeEvent::Closed { reason, .. }] if reason.contains("refused")),
        "{events:?}"
    );
}

/// A frame carries its descriptors, the proof covers their identity, and another number of them is refused.
#[test]
fn descriptors_come_with_a_frame() {
    fn identify(descriptors: &[BorrowedFd<'_>], covered: &mut Vec<u8>) -> Result<(), String> {
        for descriptor in descriptors {
            let inode = rustix::fs::fstat(descriptor).map_err(|errno| errno.to_string())?.st_ino;
            covered.extend(inode.to_le_bytes());
        }
        Ok(())
    }
    let with = HandshakeConfig {
        protocol: Transport::Shm.into(),
        descriptors: Some(FrameDescriptors { count: 2, identify }),
        ..config()
    };
    let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
    for sent in [2, 1] {
        let (first, second) = UnixStream::pair().expect("a pair");
        for socket in [&first, &second] {
            socket.set_nonblocking(true).expect("an option");
        }
        let mut a = Handshakes::new(with.clone(), None).expect("handshakes");
        let mut b = Handshakes::new(with.clone(), None).expect("handshakes");
        let ours = a.connect(first.into()).expect("a socket_id");
        b.accepted(second.into(), &mut Vec::new());
        let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
        until(&mut [(&mut a, &mut of_a), (&mut b, &mut of_b)], "openings", |events| !events[0].is_empty());
        let descriptors = [reader.as_fd(), writer.as_fd()];
        if sent < with.descriptors.map_or(0, |how| how.count) {
            a.config.descriptors = Some(FrameDescriptors { count: sent, identify });
        }
        a.send(ours, b"with-fds", &descriptors[..sent]).expect("sent");
        if sent == 2 {
            until(&mut [(&mut b, &mut of_b)], "the hello", |events| !events[0].is_empty());
            let [HandshakeEvent::Frame { descriptors, .. }] = &of_b[..] else { panic!("{of_b:?}") };
            rustix::io::write(&writer, b"x").expect("written");
            let mut byte = [0; 1];
            assert_eq!(rustix::io::read(&descriptors[0], &mut byte), Ok(1), "it is the pipe");
        } else {
            until(&mut [(&mut a, &mut of_a), (&mut b, &mut of_b)], "the end", |events| events[0].len() == 2);
            assert!(of_b.is_empty(), "{of_b:?}");
            assert_eq!(b.take_counts().refused, 1);
        }
    }
}
