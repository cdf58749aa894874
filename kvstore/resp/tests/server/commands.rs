//! Answers of the commands, their order, and values that come back unchanged.

use std::time::{Duration, Instant};

use kvstore_resp::testing::MemoryValues;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::{SOON, ask, bulk, expect, request, rest, start, start_with};

#[tokio::test]
async fn commands_do_what_redis_says() {
    let running = start(|config| config.allow_flush = true).await;
    let client = &mut running.client().await;
    let cases: &[(&str, &str)] = &[
        ("PING", "+PONG\r\n"),
        ("PING hi", "$2\r\nhi\r\n"),
        ("ECHO there", "$5\r\nthere\r\n"),
        ("GET k", "$-1\r\n"),
        ("SET k value", "+OK\r\n"),
        ("SET k other NX", "$-1\r\n"),
        ("SET absent other XX", "$-1\r\n"),
        ("SET k value2 GET", "$5\r\nvalue\r\n"),
        ("SET k", "-ERR wrong number of arguments for 'set' command\r\n"),
        ("SET k v PX", "-ERR syntax error\r\n"),
        ("SET k v EX 0", "-ERR invalid expire time in 'set' command\r\n"),
        ("STRLEN k", ":6\r\n"),
        ("GETRANGE k 1 -2", "$4\r\nalue\r\n"),
        ("GETRANGE absent 0 -1", "$0\r\n\r\n"),
        ("TYPE k", "+string\r\n"),
        ("TYPE absent", "+none\r\n"),
        ("TTL k", ":-1\r\n"),
        ("TTL absent", ":-2\r\n"),
        ("EXPIRE k 100", ":1\r\n"),
        ("TTL k", ":100\r\n"),
        ("SET k kept KEEPTTL", "+OK\r\n"),
        ("TTL k", ":100\r\n"),
        ("PERSIST k", ":1\r\n"),
        ("PERSIST k", ":0\r\n"),
        ("EXPIRE k -1", ":1\r\n"),
        ("EXISTS k", ":0\r\n"),
        ("SETEX e 100 v", "+OK\r\n"),
        ("PTTL absent", ":-2\r\n"),
        ("SETNX e w", ":0\r\n"),
        ("SETNX n w", ":1\r\n"),
        ("MSET a 1 b 2 a 3", "+OK\r\n"),
        ("MSET a 1 b", "-ERR wrong number of arguments for 'mset' command\r\n"),
        ("MGET a x b", "*3\r\n$1\r\n3\r\n$-1\r\n$1\r\n2\r\n"),
        ("EXISTS a a b x", ":3\r\n"),
        ("DBSIZE", ":4\r\n"),
        ("MEMORY USAGE a", ":2\r\n"),
        ("KEYS [ab]", "*2\r\n$1\r\nb\r\n$1\r\na\r\n"),
        ("SCAN 0 COUNT 1000 MATCH b", "*2\r\n$1\r\n0\r\n*1\r\n$1\r\nb\r\n"),
        ("DEL a a b x", ":2\r\n"),
        ("SELECT 0", "+OK\r\n"),
        ("SELECT 1", "-ERR DB index is out of range\r\n"),
        ("CLIENT SETNAME bob", "+OK\r\n"),
        ("CLIENT GETNAME", "$3\r\nbob\r\n"),
        ("CLIENT SETINFO LIB-NAME x", "+OK\r\n"),
        ("CONFIG GET save", "*2\r\n$4\r\nsave\r\n$0\r\n\r\n"),
        ("COMMAND INFO get", "*1\r\n*6\r\n$3\r\nget\r\n:2\r\n*1\r\n+readonly\r\n:1\r\n:1\r\n:1\r\n"),
        ("MULTI", "-ERR unknown command 'MULTI'\r\n"),
        ("AUTH x", "-ERR AUTH <password> called without"),
    ];
    for (line, expected) in cases {
        let words: Vec<&[u8]> = line.split(' ').map(str::as_bytes).collect();
        client.write_all(&request(&words)).await.expect("writes");
        let mut got = vec![0; expected.len()];
        timeout(SOON, client.read_exact(&mut got)).await.expect("in time").expect("answers");
        assert_eq!(String::from_utf8_lossy(&got), *expected, "{line}");
    }
    let client = &mut running.client().await;
    client.write_all(b"hello 3\r\n").await.expect("writes");
    expect(client, b"%7\r\n$6\r\nserver\r\n$6\r\nkvasir\r\n").await;
    let client = &mut running.client().await;
    ask(client, &[b"FLUSHALL", b"ASYNC"], b"+OK\r\n").await;
    ask(client, &[b"DBSIZE"], b":0\r\n").await;
    client.write_all(b"set 'a b' \"\\x00\\n\"\r\nget 'a b'\r\nquit\r\n").await.expect("writes");
    assert_eq!(rest(client).await, "+OK\r\n$2\r\n\0\n\r\n+OK\r\n");
    running.stop().await;
}

#[tokio::test]
async fn large_values_and_binary_keys_come_back_as_they_were() {
    let running = start(|_| {}).await;
    let client = &mut running.client().await;
    let mut state = 0x1234_5678_u32;
    let value: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    })
    .take(5 << 20)
    .collect();
    let key = b"vllm@model@2@0@\r\n\0\xff";
    for bytes in [0, 1, 32 << 10, (32 << 10) + 1, 65_534, 1 << 20, 5 << 20] {
        let value = &value[..bytes];
        ask(client, &[b"SET", key, value], b"+OK\r\n").await;
        ask(client, &[b"GET", key], &bulk(value)).await;
        ask(client, &[b"STRLEN", key], format!(":{bytes}\r\n").as_bytes()).await;
    }
    ask(client, &[b"GETRANGE", key, b"1048570", b"1048580"], &bulk(&value[1_048_570..=1_048_580])).await;
    running.stop().await;
}

#[tokio::test]
async fn reads_run_side_by_side_and_writes_are_seen_by_what_follows() {
    let pause = Duration::from_millis(100);
    let running = start_with(MemoryValues::new(1 << 20).slow(pause), |_| {}).await;
    let client = &mut running.client().await;
    let before = Instant::now();
    let (mut batch, mut expected) = (Vec::new(), Vec::new());
    for at in 0..16_u32 {
        // Each key is written, read, written again and read again: four in turn, sixteen keys side by side.
        let key = format!("key{at}");
        for round in 0..2 {
            let value = format!("{at}/{round}");
            batch.extend(request(&[b"SET", key.as_bytes(), value.as_bytes()]));
            batch.extend(request(&[b"GET", key.as_bytes()]));
            expected.extend(b"+OK\r\n");
            expected.extend(bulk(value.as_bytes()));
        }
    }
    for at in 0..16_u32 {
        let key = format!("key{at}");
        batch.extend(request(&[b"GET", key.as_bytes()]));
        expected.extend(bulk(format!("{at}/1").as_bytes()));
    }
    client.write_all(&batch).await.expect("writes");
    expect(client, &expected).await;
    let (took, in_turn) = (before.elapsed(), pause * 80);
    println!("80 commands of {pause:?} took {took:?}, in turn they would take {in_turn:?}");
    assert!(took < in_turn * 3 / 4, "{took:?}");
    let before = Instant::now();
    let many: Vec<u8> = (0..32).flat_map(|_| request(&[b"GET", b"key1"])).collect();
    client.write_all(&many).await.expect("writes");
    expect(client, &bulk(b"1/1").repeat(32)).await;
    let took = before.elapsed();
    println!("32 reads of {pause:?} took {took:?}");
    assert!(took < pause * 12, "{took:?}");
    running.stop().await;
}
