//! Clients that do not speak TLS, or send nothing.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use router_tls::HandshakeLimits;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{TlsFixture, ask, serve, until};

/// Sends bytes and returns the server's answer until it closes; a reset also counts as the end.
async fn send(addr: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(addr).await.expect("connected");
    stream.write_all(bytes).await.expect("written");
    let mut answer = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut answer)).await;
    let _reset = read.expect("the server ends the connection");
    answer
}

/// A ClientHello of the given version: record, handshake header, version, random, no session, two cipher suites of
/// TLS 1.0, no compression, one extension (signature_algorithms, without which rustls looks no further).
fn client_hello(version: [u8; 2]) -> Vec<u8> {
    let mut body = version.to_vec();
    body.extend([7; 32]);
    body.extend([0, 0, 4, 0xc0, 0x13, 0x00, 0x2f, 1, 0]);
    body.extend([0, 8, 0, 13, 0, 4, 0, 2, 4, 3]);
    let mut record = vec![0x16, 3, 1, 0, body.len() as u8 + 4, 1, 0, 0, body.len() as u8];
    record.extend(body);
    record
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_tls_fails_alone() {
    let fixture = TlsFixture::new();
    let (tls, addr) = serve(&fixture.server, HandshakeLimits::default()).await;
    let garbage: Vec<u8> = (0..2000_u32).map(|index| (index * 167 % 251) as u8).collect();
    let cases: [(&str, &[u8]); 4] = [
        ("HTTP", b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"),
        ("garbage", &garbage),
        ("zeros", &[0; 64]),
        ("a record that is too long", &[0x16, 3, 1, 0xff, 0xff, 1]),
    ];
    for (what, bytes) in cases {
        let failed = tls.counts().failed;
        let answer = send(addr, bytes).await;
        assert!(!answer.starts_with(b"HTTP"), "{what}: {answer:?}");
        until(what, || tls.counts().failed == failed + 1).await;
        assert_eq!(ask(&fixture.client, addr).await.as_deref(), Ok("nobody"), "after {what}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_versions_are_refused_with_the_alert_that_says_so() {
    let fixture = TlsFixture::new();
    let (tls, addr) = serve(&fixture.server, HandshakeLimits::default()).await;
    // TLS 1.0, TLS 1.1, SSL 3: a fatal (2) alert (0x15), protocol_version (70).
    for version in [[3, 1], [3, 2], [3, 0]] {
        let answer = send(addr, &client_hello(version)).await;
        assert_eq!(
            (answer.first(), answer.get(5..7)),
            (Some(&0x15), Some(&[2, 70][..])),
            "{version:?} {answer:?}"
        );
    }
    until("all are counted", || (tls.counts().completed, tls.counts().failed) == (0, 3)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_silent_clients_hold_nobody_up() {
    let fixture = TlsFixture::new();
    let (tls, addr) = serve(&fixture.server, HandshakeLimits::default()).await;
    let mut silent = Vec::new();
    for _ in 0..200 {
        silent.push(TcpStream::connect(addr).await.expect("connected"));
    }
    let started = Instant::now();
    for _ in 0..5 {
        assert_eq!(ask(&fixture.client, addr).await.as_deref(), Ok("nobody"));
    }
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    assert_eq!(tls.counts().completed, 5);
    assert_eq!(tls.counts().timed_out, 0, "the silent ones still have their time");
    drop(silent);
    until("they left", || tls.counts().failed == 200).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_client_is_sent_away_in_time() {
    let fixture = TlsFixture::new();
    let limits = HandshakeLimits { timeout: Duration::from_millis(200), ..HandshakeLimits::default() };
    let (tls, addr) = serve(&fixture.server, limits).await;
    let started = Instant::now();
    assert_eq!(send(addr, &[0x16]).await, []);
    assert!(started.elapsed() >= Duration::from_millis(190), "{:?}", started.elapsed());
    until("it is counted", || tls.counts().timed_out == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_the_limit_the_oldest_gives_way_when_it_had_its_time() {
    let fixture = TlsFixture::new();
    let patience = Duration::from_millis(400);
    let limits =
        HandshakeLimits { in_flight_max: 4, timeout_when_full: patience, ..HandshakeLimits::default() };
    let (tls, addr) = serve(&fixture.server, limits).await;
    let started = Instant::now();
    let mut silent = Vec::new();
    for _ in 0..4 {
        silent.push(TcpStream::connect(addr).await.expect("connected"));
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(ask(&fixture.client, addr).await.as_deref(), Ok("nobody"));
    let took = started.elapsed();
    assert!(took >= patience - Duration::from_millis(10) && took < 5 * patience, "{took:?}");
    assert!((1..=4).contains(&tls.counts().timed_out), "{:?}", tls.counts());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_number_of_handshakes_is_bounded() {
    let fixture = TlsFixture::new();
    let limits = HandshakeLimits {
        in_flight_max: 2,
        timeout: Duration::from_millis(600),
        timeout_when_full: Duration::from_secs(60),
    };
    let (tls, addr) = serve(&fixture.server, limits).await;
    let _silent = [
        TcpStream::connect(addr).await.expect("connected"),
        TcpStream::connect(addr).await.expect("connected"),
    ];
    tokio::time::sleep(Duration::from_millis(50)).await;
    let started = Instant::now();
    assert_eq!(ask(&fixture.client, addr).await.as_deref(), Ok("nobody"));
    assert!(
        started.elapsed() >= Duration::from_millis(300),
        "a third got in beside two: {:?}",
        started.elapsed()
    );
    until("both are counted", || tls.counts().timed_out == 2).await;
}
