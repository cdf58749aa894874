//! The budget of bytes for receiving long values.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::{SOON, ask, expect, request, start};

#[tokio::test]
async fn long_values_share_one_budget() {
    let running = start(|config| {
        config.value_bytes_max = 2 << 20;
        config.command_bytes_max = 2 << 20;
        config.received_bytes_max = 2 << 20;
    })
    .await;
    let (first, second) = (&mut running.client().await, &mut running.client().await);
    let beyond = &mut running.client().await;
    // Two of these are more than the budget.
    let value = vec![b'v'; 3 << 19];
    let set = |key| request(&[b"SET", key, &value]);
    let (one, two) = (set(b"one"), set(b"two"));
    first.write_all(&one[..1_400_000]).await.expect("writes");
    // The budget is charged as bytes come; the other clients' bytes must come after these.
    tokio::time::sleep(Duration::from_millis(200)).await;
    // One may go beyond the budget.
    beyond.write_all(&one[..1_400_000]).await.expect("writes");
    tokio::time::sleep(Duration::from_millis(200)).await;
    let send_and_wait = async {
        second.write_all(&two).await.expect("writes");
        let mut answer = [0; 5];
        second.read_exact(&mut answer).await.expect("answers");
        answer
    };
    tokio::pin!(send_and_wait);
    assert!(timeout(Duration::from_millis(500), &mut send_and_wait).await.is_err(), "the budget is used up");
    first.write_all(&one[1_400_000..]).await.expect("writes");
    expect(first, b"+OK\r\n").await;
    assert_eq!(&timeout(SOON, send_and_wait).await.expect("its turn comes"), b"+OK\r\n");
    ask(first, &[b"STRLEN", b"two"], b":1572864\r\n").await;
    running.stop().await;
}

#[tokio::test]
async fn a_declared_length_takes_nothing_and_a_shortage_ends() {
    const TRY_AGAIN: &[u8] = b"-TRYAGAIN too many large values are being received at the moment\r\n";
    let running = start(|config| {
        config.value_bytes_max = 2 << 20;
        config.command_bytes_max = 2 << 20;
        config.received_bytes_max = 2 << 20;
    })
    .await;
    let value = vec![b'v'; 3 << 19];
    let set = request(&[b"SET", b"k", &value]);
    let client = &mut running.client().await;
    // Each client declares three quarters of the budget and has sent little, so that it holds the room for one
    // read.
    let mut idle = Vec::new();
    for _ in 0..4 {
        let mut other = running.client().await;
        other.write_all(&set[..100]).await.expect("writes");
        idle.push(other);
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    let before = Instant::now();
    ask(client, &[b"SET", b"k", &value], b"+OK\r\n").await;
    assert!(before.elapsed() < Duration::from_secs(2), "{:?}", before.elapsed());
    drop(idle);

    // Two clients have sent nearly all of their command and stop, one of them beyond the budget: the next
    // client is refused, and its connection stays in step.
    let (half, other) = (&mut running.client().await, &mut running.client().await);
    for half in [&mut *half, &mut *other] {
        half.write_all(&set[..1_400_000]).await.expect("writes");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    client.write_all(&set).await.expect("writes");
    client.write_all(b"PING\r\n").await.expect("writes");
    expect(client, TRY_AGAIN).await;
    expect(client, b"+PONG\r\n").await;
    for half in [half, other] {
        half.write_all(&set[1_400_000..]).await.expect("writes");
        expect(half, b"+OK\r\n").await;
    }
    ask(client, &[b"SET", b"k", &value], b"+OK\r\n").await;

    // Each client holds a share and waits for the rest: they finish one by one.
    let mut tasks = Vec::new();
    for _ in 0..8 {
        let (mut client, set) = (running.client().await, set.clone());
        tasks.push(tokio::spawn(async move {
            client.write_all(&set[..600_000]).await.expect("writes");
            tokio::time::sleep(Duration::from_millis(200)).await;
            client.write_all(&set[600_000..]).await.expect("writes");
            let mut first = [0];
            timeout(SOON, client.read_exact(&mut first)).await.expect("in time").expect("answers");
            assert!(matches!(first[0], b'+' | b'-'), "{first:?}");
            first[0] == b'+'
        }));
    }
    let mut stored = 0;
    for task in tasks {
        stored += usize::from(task.await.expect("no panic"));
    }
    println!("{stored} of 8 were stored");
    assert!(stored > 4, "{stored}");
    ask(client, &[b"SET", b"k", &value], b"+OK\r\n").await;
    running.stop().await;
}

#[tokio::test]
async fn many_short_arguments_are_charged_as_long_ones_are() {
    const TRY_AGAIN: &[u8] = b"-TRYAGAIN too many large values are being received at the moment\r\n";
    let running = start(|config| {
        config.value_bytes_max = 2 << 20;
        config.command_bytes_max = 2 << 20;
        config.received_bytes_max = 2 << 20;
    })
    .await;
    // Each argument is far below what counts as long. The first two have sent nearly all of the budget and stop, the second
    // of them beyond it: the third is refused, and stays in step.
    let piece = [b'v'; 16 << 10];
    let mut arguments: Vec<&[u8]> = vec![&b"MSET"[..]];
    for _ in 0..48 {
        arguments.extend([&b"k"[..], &piece, b"l", &piece]);
    }
    let set = request(&arguments);
    let mut halves = [running.client().await, running.client().await];
    for half in &mut halves {
        half.write_all(&set[..1_400_000]).await.expect("writes");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let client = &mut running.client().await;
    client.write_all(&set).await.expect("writes");
    client.write_all(b"PING\r\n").await.expect("writes");
    expect(client, TRY_AGAIN).await;
    expect(client, b"+PONG\r\n").await;
    // Closing the connections frees their shares.
    drop(halves);
    tokio::time::sleep(Duration::from_millis(200)).await;
    ask(client, &arguments, b"+OK\r\n").await;
    running.stop().await;
}

#[tokio::test]
async fn a_client_that_trickles_does_not_keep_its_part_of_the_budget() {
    let running = start(|config| config.stall_timeout = Duration::from_millis(500)).await;
    let set = request(&[b"SET", b"k", &[b'v'; 1 << 20]]);
    let (slow, steady) = (&mut running.client().await, &mut running.client().await);
    slow.write_all(&set[..200_000]).await.expect("writes");
    let trickle = async {
        let mut at = 200_000;
        while slow.write_all(&set[at..at + 10]).await.is_ok() {
            at += 10;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(SOON, trickle).await.expect("closed in time");
    assert_eq!(running.counters.connections_stalled.load(Relaxed), 1);
    // Twice as long as the limit, at twelve times the rate.
    for part in set.chunks(set.len() / 13) {
        steady.write_all(part).await.expect("writes");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    expect(steady, b"+OK\r\n").await;
    running.stop().await;
}
