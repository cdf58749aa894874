//! The socket redirect on real sockets: every byte arrives, in order, for all sizes, readers and ends of
//! connections.

mod lab;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use dataplane_ebpf::{Redirect, RedirectConfig, RedirectCounters};
use lab::{Cgroup, Grandchild, Random, alone, eventually, or_skip, programs};

/// A cgroup with the redirect attached, for one listener.
struct Rig {
    redirect: Redirect,
    listener: TcpListener,
    group: Cgroup,
}

fn rig(address: &str, change: impl FnOnce(&mut RedirectConfig)) -> Option<Rig> {
    let group = Cgroup::enter()?;
    let listener = match TcpListener::bind(address) {
        Ok(listener) => listener,
        Err(error) => {
            println!("SKIPPED: {address}: {error}");
            return None;
        }
    };
    let port = listener.local_addr().expect("it is bound").port();
    let mut config =
        RedirectConfig { cgroup: Some(group.path.clone()), ports: vec![port], ..RedirectConfig::default() };
    change(&mut config);
    let redirect = or_skip(Redirect::attach(&config))?;
    Some(Rig { redirect, listener, group })
}

impl Rig {
    fn connect(&self, to: &str) -> (TcpStream, TcpStream) {
        let port = self.listener.local_addr().expect("it is bound").port();
        let client = TcpStream::connect((to, port)).expect("the listener is there");
        let (server, _) = self.listener.accept().expect("a client waits");
        for stream in [&client, &server] {
            stream.set_read_timeout(Some(Duration::from_secs(10))).expect("it can be set");
            stream.set_write_timeout(Some(Duration::from_secs(10))).expect("it can be set");
        }
        (client, server)
    }

    fn counters(&self) -> RedirectCounters {
        self.redirect.counters().expect("the maps are there")
    }
}

fn send(stream: &mut TcpStream, bytes: &[u8]) {
    stream.write_all(bytes).expect("the peer is there");
}

fn receive(stream: &mut TcpStream, bytes: usize) -> Vec<u8> {
    let mut buffer = vec![0; bytes];
    stream.read_exact(&mut buffer).expect("the bytes were sent");
    buffer
}

fn round_trips(client: &mut TcpStream, server: &mut TcpStream, count: usize) {
    for number in 0..count {
        let text = format!("request {number:08}");
        send(client, text.as_bytes());
        assert_eq!(receive(server, text.len()), text.as_bytes());
        let text = format!("answer {number:08}, a little longer");
        send(server, text.as_bytes());
        assert_eq!(receive(client, text.len()), text.as_bytes());
    }
}

#[test]
fn short_messages_skip_the_stack() {
    let _alone = alone();
    for (listen, connect) in [
        ("127.0.0.1:0", "127.0.0.1"),
        ("127.0.0.7:0", "127.0.0.7"),
        ("[::1]:0", "::1"),
        // A listener on [::] sees an IPv4 client as an IPv6 one; the client does not.
        ("[::]:0", "127.0.0.1"),
    ] {
        let Some(rig) = rig(listen, |_| ()) else { return };
        let (mut client, mut server) = rig.connect(connect);
        round_trips(&mut client, &mut server, 500);
        let counters = rig.counters();
        println!("{listen} {connect}: {counters:?}");
        assert_eq!(counters.sockets_added, 2);
        // The first message may be sent before the server's socket is in the map.
        assert!(counters.redirected_messages >= 999, "{counters:?}");
        assert_eq!(counters.refused, 0);
        drop((client, server));
        eventually("sockets leave the map at close", || rig.redirect.sockets() == 0);
    }
}

#[test]
fn other_connections_are_left_alone() {
    let _alone = alone();
    let Some(rig) = rig("127.0.0.1:0", |_| ()) else { return };
    // A listener on a port that is not listed.
    let other = TcpListener::bind("127.0.0.1:0").expect("loopback is there");
    let mut client = TcpStream::connect(other.local_addr().expect("it is bound")).expect("it listens");
    let (mut server, _) = other.accept().expect("a client waits");
    round_trips(&mut client, &mut server, 10);
    assert_eq!(rig.counters(), RedirectCounters::default());
    // A client outside of the cgroup: the server's socket is tracked, has no peer in the map, and uses the
    // stream.
    let port = rig.listener.local_addr().expect("it is bound").port();
    let mut outside = Grandchild::start("child_client", &port.to_string());
    rig.group.release(outside.id());
    outside.nudge();
    let (mut server, _) = rig.listener.accept().expect("the child connects");
    for _ in 0..10 {
        let text = receive(&mut server, 5);
        send(&mut server, &text);
    }
    outside.wait_for("served");
    let counters = rig.counters();
    assert_eq!((counters.sockets_added, counters.passed_no_peer), (1, 10), "{counters:?}");
    assert_eq!(counters.redirected_messages, 0);
}

#[test]
fn child_client() {
    let Some(port) = lab::child_argument() else { return };
    lab::wait_for_parent();
    let address: SocketAddr = format!("127.0.0.1:{port}").parse().expect("it is an address");
    let mut client = TcpStream::connect(address).expect("the parent listens");
    for number in 0..10 {
        let text = format!("{number:05}");
        send(&mut client, text.as_bytes());
        assert_eq!(receive(&mut client, 5), text.as_bytes());
    }
    println!("served");
}

/// Unread bytes in the stream, then a short message: the two queues must not change the order.
#[test]
fn order_survives_a_change_of_path() {
    let _alone = alone();
    let Some(rig) = rig("127.0.0.1:0", |_| ()) else { return };
    let (mut client, mut server) = rig.connect("127.0.0.1");
    round_trips(&mut client, &mut server, 10);
    let large = vec![7u8; 100_000];
    for _ in 0..3 {
        send(&mut client, &large);
        send(&mut client, b"short");
        assert_eq!(receive(&mut server, large.len()), large);
        assert_eq!(receive(&mut server, 5), b"short");
        let before = rig.counters();
        assert!(before.passed_unread > 0, "{before:?}");
        // The answer shows the client's side that all bytes were read: the next short message is redirected
        // again.
        send(&mut server, b"ok");
        assert_eq!(receive(&mut client, 2), b"ok");
        send(&mut client, b"again");
        assert_eq!(receive(&mut server, 5), b"again");
        assert_eq!(rig.counters().redirected_messages, before.redirected_messages + 2);
        // The other order: a short message waits, then a large one follows.
        send(&mut client, b"short");
        send(&mut client, &large);
        assert_eq!(receive(&mut server, 5), b"short");
        assert_eq!(receive(&mut server, large.len()), large);
        send(&mut server, b"ok");
        assert_eq!(receive(&mut client, 2), b"ok");
    }
}

/// 64 MiB in both directions at once, to readers that pause and that wait for an edge after each short read,
/// as tokio's readers do.
#[test]
fn sixty_four_mebibytes_through_a_slow_reader() {
    const TOTAL: usize = 64 << 20;
    let _alone = alone();
    for (name, head, sizes, expect_redirects) in [
        ("short", 64, 1024..=16384u64, true),
        ("short, then large", 64, 65536..=262_144, true),
        ("large", 65536, 65536..=262_144, false),
    ] {
        let Some(rig) = rig("127.0.0.1:0", |_| ()) else { return };
        let (client, server) = rig.connect("127.0.0.1");
        let writer = |mut stream: TcpStream, seed: u64| {
            let sizes = sizes.clone();
            std::thread::spawn(move || {
                let mut content = Random(seed);
                let mut size = Random(seed ^ 0xabcd);
                let mut left = TOTAL;
                let mut bytes = head;
                while left > 0 {
                    let mut message = vec![0; bytes];
                    content.fill(&mut message);
                    stream.write_all(&message).expect("the reader is there");
                    left -= bytes;
                    let span = sizes.end() - sizes.start() + 1;
                    bytes = ((sizes.start() + size.next() % span) as usize / 8 * 8).min(left);
                }
            })
        };
        let reader = |stream: TcpStream, seed: u64| {
            std::thread::spawn(move || read_edges(&stream, seed, TOTAL, Duration::from_millis(1), |_| ()))
        };
        let started = std::time::Instant::now();
        let threads = [
            writer(client.try_clone().expect("a descriptor is free"), 1),
            writer(server.try_clone().expect("a descriptor is free"), 2),
            reader(server, 1),
            reader(client, 2),
        ];
        for thread in threads {
            thread.join().expect("all bytes arrived, in order");
        }
        let counters = rig.counters();
        println!("{name}, {} MiB each way: {:?} {counters:?}", TOTAL >> 20, started.elapsed());
        assert_eq!(counters.refused, 0);
        assert_eq!(counters.redirected_messages > 0, expect_redirects);
    }
}

/// Messages around the limit, with answers at random times: the path changes thousands of times.
#[test]
fn bytes_keep_their_order_while_paths_alternate() {
    let _alone = alone();
    let Some(rig) = rig("127.0.0.1:0", |config| config.message_bytes_max = 4096) else { return };
    for seed in 1..=8 {
        let (mut client, server) = rig.connect("127.0.0.1");
        let mut choice = Random(seed * 77);
        let lengths: Vec<usize> = (0..4000).map(|_| 8 + choice.next() as usize % 1024 * 8).collect();
        let total: usize = lengths.iter().sum();
        let reader = std::thread::spawn(move || {
            let mut answers = server.try_clone().expect("a descriptor is free");
            read_edges(&server, seed, total, Duration::from_micros(50), |read| {
                answers.write_all(&(read as u64).to_le_bytes()).expect("the writer is there");
            });
        });
        let mut content = Random(seed);
        let mut sent = 0;
        for bytes in lengths {
            let mut message = vec![0; bytes];
            content.fill(&mut message);
            send(&mut client, &message);
            sent += bytes as u64;
            // The writer waits for the reader after one in four messages.
            if choice.next().is_multiple_of(4) {
                while u64::from_le_bytes(receive(&mut client, 8).try_into().expect("eight bytes")) != sent {}
            }
        }
        reader.join().expect("all bytes arrived, in order");
    }
    let counters = rig.counters();
    println!("{counters:?}");
    assert_eq!(counters.refused, 0);
    assert!(counters.redirected_messages > 1000 && counters.passed_large > 1000, "{counters:?}");
}

/// Reads as an edge-triggered event loop does: a read shorter than its buffer means that the socket is
/// drained, and the next read waits for the next edge. Pauses after every sixteenth read, and calls `drained`
/// with the number of bytes read so far whenever the socket seems drained.
fn read_edges(stream: &TcpStream, seed: u64, total: usize, pause: Duration, mut drained: impl FnMut(usize)) {
    use rustix::event::epoll;
    use rustix::net::{RecvFlags, recv};
    let poll = epoll::create(epoll::CreateFlags::CLOEXEC).expect("a descriptor is free");
    let flags = epoll::EventFlags::IN | epoll::EventFlags::ET | epoll::EventFlags::RDHUP;
    epoll::add(&poll, stream.as_fd(), epoll::EventData::new_u64(0), flags).expect("it can be polled");
    let mut expected = Random(seed);
    let mut buffer = vec![0; 16384];
    let mut pending: Vec<u8> = Vec::new();
    let mut read = 0;
    let mut turn = 0;
    while read < total {
        let mut events = Vec::with_capacity(1);
        let timeout = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
        let count = epoll::wait(&poll, rustix::buffer::spare_capacity(&mut events), Some(&timeout))
            .expect("it waits");
        assert!(count > 0, "no edge in 10 s after {read} of {total} bytes: the reader is stuck");
        loop {
            turn += 1;
            if turn % 16 == 0 {
                std::thread::sleep(pause);
            }
            // The flag makes this read nonblocking: the socket itself stays blocking for the writer.
            let bytes = match recv(stream, &mut buffer[..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => panic!("closed after {read} bytes"),
                Ok((_, bytes)) => bytes,
                Err(rustix::io::Errno::AGAIN) => break,
                Err(errno) => panic!("after {read} bytes: {errno}"),
            };
            read += bytes;
            pending.extend_from_slice(&buffer[..bytes]);
            let whole = pending.len() / 8 * 8;
            for word in pending[..whole].chunks(8) {
                assert_eq!(word, expected.next().to_le_bytes(), "before byte {read}");
            }
            pending.drain(..whole);
            if bytes < buffer.len() || read == total {
                break;
            }
        }
        drained(read);
    }
}

#[test]
fn half_close_delivers_what_was_sent() {
    let _alone = alone();
    let Some(rig) = rig("127.0.0.1:0", |_| ()) else { return };
    for _ in 0..100 {
        let (mut client, mut server) = rig.connect("127.0.0.1");
        round_trips(&mut client, &mut server, 2);
        for _ in 0..50 {
            send(&mut client, b"last words");
        }
        client.shutdown(Shutdown::Write).expect("it is open");
        let mut all = Vec::new();
        server.read_to_end(&mut all).expect("the end comes after the bytes");
        assert_eq!(all, b"last words".repeat(50));
        // The other direction still works.
        send(&mut server, b"understood");
        assert_eq!(receive(&mut client, 10), b"understood");
        // A close right after a message.
        send(&mut server, b"bye");
        drop(server);
        all.clear();
        client.read_to_end(&mut all).expect("the end comes after the bytes");
        assert_eq!(all, b"bye");
    }
    eventually("sockets leave the map", || rig.redirect.sockets() == 0);
}

#[test]
fn an_abort_ends_the_connection_and_nothing_else() {
    let _alone = alone();
    let Some(rig) = rig("127.0.0.1:0", |_| ()) else { return };
    for _ in 0..50 {
        let (mut client, mut server) = rig.connect("127.0.0.1");
        round_trips(&mut client, &mut server, 1);
        send(&mut client, b"maybe");
        rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).expect("it can be set");
        drop(client);
        // TCP does not guarantee delivery of bytes before an abort: all or none arrive, no other bytes, and
        // the read ends.
        let mut all = Vec::new();
        match server.read_to_end(&mut all) {
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
            Ok(_) => panic!("an abort is not an end"),
        }
        assert!(all.is_empty() || all == b"maybe");
    }
    eventually("sockets leave the map", || rig.redirect.sockets() == 0);
    let (mut client, mut server) = rig.connect("127.0.0.1");
    round_trips(&mut client, &mut server, 10);
}

#[test]
fn a_peer_that_is_gone_looks_as_without_us() {
    let _alone = alone();
    let Some(rig) = rig("127.0.0.1:0", |_| ()) else { return };
    let (mut client, mut server) = rig.connect("127.0.0.1");
    round_trips(&mut client, &mut server, 5);
    drop(server);
    let error = (0..1000).find_map(|_| {
        std::thread::sleep(Duration::from_millis(1));
        client.write(b"anybody?").err()
    });
    let kind = error.expect("a write to nobody fails at last").kind();
    assert!(matches!(kind, ErrorKind::BrokenPipe | ErrorKind::ConnectionReset), "{kind:?}");
}

#[test]
fn too_much_unread_is_refused() {
    let _alone = alone();
    let Some(rig) = rig("127.0.0.1:0", |config| config.unread_bytes_max = 1 << 20) else { return };
    let (mut client, mut server) = rig.connect("127.0.0.1");
    round_trips(&mut client, &mut server, 1);
    let message = [5u8; 1024];
    let sent = (0..10_000).take_while(|_| client.write_all(&message).is_ok()).count();
    // 1 MiB at 1 KiB of data and 1 KiB of overhead per message.
    assert_eq!(sent, 512);
    assert_eq!(rig.counters().refused, 1);
    assert_eq!(receive(&mut server, sent * 1024), vec![5; sent * 1024]);
}

#[test]
fn a_detach_loses_nothing() {
    let _alone = alone();
    let Some(rig) = rig("127.0.0.1:0", |_| ()) else { return };
    let (mut client, mut server) = rig.connect("127.0.0.1");
    round_trips(&mut client, &mut server, 3);
    send(&mut client, b"before ");
    let Rig { redirect, listener, group } = rig;
    drop(redirect);
    send(&mut client, b"and after ");
    assert_eq!(receive(&mut server, 17), b"before and after ");
    round_trips(&mut client, &mut server, 100);
    // New connections are not tracked; old ones keep the program until they close.
    assert_eq!((programs(&["track"]), programs(&["forward"])), (0, 1));
    let mut fresh = TcpStream::connect(listener.local_addr().expect("it is bound")).expect("it listens");
    let (mut other, _) = listener.accept().expect("a client waits");
    round_trips(&mut fresh, &mut other, 10);
    drop((client, server));
    eventually("the program goes with its last socket", || programs(&["forward"]) == 0);
    drop(group);
}

#[test]
fn a_killed_owner_loses_nothing() {
    let _alone = alone();
    let Some(group) = Cgroup::enter() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback is there");
    let address = listener.local_addr().expect("it is bound");
    let config =
        RedirectConfig { cgroup: Some(group.path.clone()), ports: vec![1], ..RedirectConfig::default() };
    if or_skip(Redirect::attach(&config)).is_none() {
        return;
    }
    eventually("earlier programs are gone", || programs(&["track", "forward"]) == 0);
    let mut owner = Grandchild::start("child_owner", &format!("{} {}", group.path.display(), address.port()));
    owner.wait_for("attached");
    let mut client = TcpStream::connect(address).expect("it listens");
    let (mut server, _) = listener.accept().expect("a client waits");
    round_trips(&mut client, &mut server, 10);
    assert_eq!(programs(&["track", "forward"]), 2);
    send(&mut client, b"in flight ");
    owner.kill();
    eventually("the cgroup is free", || programs(&["track"]) == 0);
    send(&mut client, b"and later");
    assert_eq!(receive(&mut server, 19), b"in flight and later");
    round_trips(&mut client, &mut server, 100);
    drop((client, server));
    eventually("the program goes with its last socket", || programs(&["forward"]) == 0);
}

#[test]
fn child_owner() {
    let Some(argument) = lab::child_argument() else { return };
    let (path, port) = argument.split_once(' ').expect("the parent says both");
    let config = RedirectConfig {
        cgroup: Some(path.into()),
        ports: vec![port.parse().expect("it is a port")],
        ..RedirectConfig::default()
    };
    let _redirect = Redirect::attach(&config).expect("the parent could");
    println!("attached");
    lab::wait_for_parent();
}

#[test]
fn what_is_wrong_is_said() {
    let _alone = alone();
    let ports = vec![8000];
    let config = RedirectConfig { cgroup: Some("/proc".into()), ports, ..RedirectConfig::default() };
    let Err(off) = Redirect::attach(&config) else { panic!("/proc is no cgroup") };
    println!("{off}");
    let text = off.to_string();
    assert!(
        ["/proc is no cgroup v2 directory", "CAP_", "built without eBPF"]
            .iter()
            .any(|part| text.contains(part)),
        "{text}"
    );
}
