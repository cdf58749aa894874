//! Authentication, hostile bytes, the unix socket's file, and the end of the server.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use kvstore_resp::testing::MemoryValues;
use kvstore_resp::{Listen, Password, RespConfig, Server};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::{SOON, ask, expect, request, rest, start, start_with};

#[tokio::test]
async fn strangers_are_kept_out() {
    let running = start(|config| config.password = Some(Password::new("open sesame"))).await;
    let client = &mut running.client().await;
    ask(client, &[b"GET", b"k"], b"-NOAUTH Authentication required.\r\n").await;
    ask(client, &[b"NONSENSE"], b"-NOAUTH Authentication required.\r\n").await;
    ask(client, &[b"AUTH", b"open"], b"-WRONGPASS").await;
    let client = &mut running.client().await;
    ask(client, &[b"AUTH", b"admin", b"open sesame"], b"-WRONGPASS").await;
    let client = &mut running.client().await;
    ask(client, &[b"HELLO", b"3"], b"-NOAUTH HELLO must be called").await;
    let client = &mut running.client().await;
    client.write_all(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n").await.expect("writes");
    assert_eq!(rest(client).await, "-ERR Protocol error: invalid bulk length\r\n");
    let client = &mut running.client().await;
    // Commands in the same packet as the password are those of an authenticated client.
    let mut batch = request(&[b"AUTH", b"open sesame"]);
    batch.extend(request(&[b"SET", b"k", &[b'v'; 20_000]]));
    client.write_all(&batch).await.expect("writes");
    expect(client, b"+OK\r\n+OK\r\n").await;
    ask(client, &[b"RESET"], b"+RESET\r\n").await;
    ask(client, &[b"GET", b"k"], b"-NOAUTH Authentication required.\r\n").await;
    ask(client, &[b"HELLO", b"3", b"AUTH", b"default", b"open sesame"], b"%7\r\n").await;
    running.stop().await;
}

#[tokio::test]
async fn a_unix_socket_is_private_and_leaves_nothing_behind() {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("resp.sock");
    // A socket without a listener, as a killed server leaves it.
    let _ = std::fs::remove_file(&path);
    drop(std::os::unix::net::UnixListener::bind(&path).expect("binds"));
    let running = start(|config| config.listen.push(Listen::Unix(path.clone()))).await;
    let mode = std::fs::metadata(&path).expect("there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut client = UnixStream::connect(&path).await.expect("connects");
    client.write_all(b"PING\r\n").await.expect("writes");
    let mut answer = [0; 7];
    client.read_exact(&mut answer).await.expect("answers");
    assert_eq!(&answer, b"+PONG\r\n");
    let listen = vec![Listen::Unix(path.clone())];
    let again = Server::bind(MemoryValues::new(1), RespConfig { listen, ..RespConfig::default() }).await;
    assert!(again.expect_err("taken").to_string().contains("resp.sock"));
    drop(client);
    running.stop().await;
    assert!(!path.exists());
}

#[tokio::test]
async fn what_has_begun_is_finished_before_the_server_stops() {
    let slow = MemoryValues::new(1 << 20).slow(Duration::from_millis(300));
    let running = start_with(slow, |_| {}).await;
    let client = &mut running.client().await;
    client.write_all(&request(&[b"SET", b"k", b"v"])).await.expect("writes");
    tokio::time::sleep(Duration::from_millis(100)).await;
    running.stop().await;
    assert_eq!(rest(client).await, "+OK\r\n");
}

#[tokio::test]
async fn an_http_request_carries_no_commands() {
    // Also before the client has authenticated.
    for password in [None, Some(Password::new("open sesame"))] {
        let is_open = password.is_none();
        let running = start(|config| {
            config.allow_flush = true;
            config.password = password;
        })
        .await;
        let client = &mut running.client().await;
        if !is_open {
            ask(client, &[b"AUTH", b"open sesame"], b"+OK\r\n").await;
        }
        ask(client, &[b"SET", b"victim", b"x"], b"+OK\r\n").await;
        let heads = [
            "POST / HTTP/1.1\r\nHost: 127.0.0.1:7379\r\nContent-Type: text/plain\r\n\r\n",
            "PUT / HTTP/1.1\r\nhost: 127.0.0.1:7379\r\n\r\n",
            "post / HTTP/1.0\r\n\r\n",
        ];
        for head in heads {
            let attacker = &mut running.client().await;
            let body = "AUTH \"open sesame\"\r\nFLUSHALL\r\nSET victim y\r\n";
            attacker.write_all(format!("{head}{body}").as_bytes()).await.expect("writes");
            let answer = rest(attacker).await;
            assert!(!answer.contains("+OK"), "{head}: {answer}");
        }
        ask(client, &[b"GET", b"victim"], b"$1\r\nx\r\n").await;
        assert_eq!(running.counters.connections_cross_protocol.load(Relaxed), heads.len() as u64);
        running.stop().await;
    }
}

#[tokio::test]
async fn commands_can_be_renamed_or_turned_off() {
    let running = start(|config| {
        config.allow_flush = true;
        config.renamed =
            vec![("FLUSHALL".to_owned(), String::new()), ("FLUSHDB".to_owned(), "empty-it".to_owned())];
    })
    .await;
    let client = &mut running.client().await;
    ask(client, &[b"SET", b"k", b"v"], b"+OK\r\n").await;
    ask(client, &[b"FLUSHALL"], b"-ERR unknown command 'FLUSHALL'\r\n").await;
    ask(client, &[b"flushdb"], b"-ERR unknown command 'flushdb'\r\n").await;
    ask(client, &[b"COMMAND", b"INFO", b"flushall"], b"*1\r\n$-1\r\n").await;
    ask(client, &[b"DBSIZE"], b":1\r\n").await;
    ask(client, &[b"EMPTY-IT"], b"+OK\r\n").await;
    ask(client, &[b"DBSIZE"], b":0\r\n").await;
    running.stop().await;
}

#[tokio::test]
async fn hostile_bytes_end_a_connection_and_nothing_else() {
    let seed: u64 = 0xB00_5EED;
    println!("seed {seed:#x}");
    let running = start(|config| config.stall_timeout = Duration::from_millis(200)).await;
    let mut state = seed;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize
    };
    let parts: [&[u8]; 12] = [
        b"*3\r\n",
        b"$3\r\n",
        b"SET\r\n",
        b"GET\r\n",
        b"\r\n",
        b"*-1\r\n",
        b"$-1\r\n",
        b"$40000\r\n",
        b"\0\xff",
        b"HELLO 3\r\n",
        b"*999999999999\r\n",
        b"SCAN 1 COUNT 9 MATCH [\r\n",
    ];
    for _ in 0..300 {
        let client = &mut running.client().await;
        let bytes: Vec<u8> =
            (0..random() % 30).flat_map(|_| parts[random() % parts.len()].to_vec()).collect();
        // The server may close at any byte.
        let _ = client.write_all(&bytes).await;
        let _ = client.shutdown().await;
        let _ = timeout(SOON, client.read_to_end(&mut Vec::new())).await.expect("closed in time");
    }
    ask(&mut running.client().await, &[b"PING"], b"+PONG\r\n").await;
    assert_eq!(running.counters.connections.load(Relaxed), 301);
    running.stop().await;
}
