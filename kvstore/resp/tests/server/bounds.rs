//! Bounds on clients, lengths and time: a client that exceeds them is refused, slowed or closed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use kvstore_resp::{Entry, KeyPage, SetOptions, SetOutcome, Usage, Value, ValueError, Values};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::{SOON, ask, bulk, request, rest, start, start_with};

#[tokio::test]
async fn bounds_are_kept() {
    let running = start(|config| {
        config.clients_max = 2;
        config.value_bytes_max = 100_000;
        config.command_bytes_max = 150_000;
        config.buffered_bytes_max = 120_000;
        config.arguments_max = 16;
    })
    .await;
    let (first, second) = (&mut running.client().await, &mut running.client().await);
    ask(first, &[b"SET", b"k", &[b'v'; 100_000]], b"+OK\r\n").await;
    ask(second, &[b"PING"], b"+PONG\r\n").await;
    assert_eq!(rest(&mut running.client().await).await, "-ERR max number of clients reached\r\n");
    ask(first, &[b"MGET", b"k", b"k"], b"-ERR the values exceed 120000 bytes: ask for fewer\r\n").await;
    ask(first, &[b"FLUSHALL"], b"-ERR 'flushall' is not allowed by this server's configuration\r\n").await;
    let long_key = vec![b'k'; 40_000];
    ask(first, &[b"GET", &long_key], b"-ERR key is too long\r\n").await;
    first.write_all(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$100001\r\n").await.expect("writes");
    assert_eq!(rest(first).await, "-ERR Protocol error: invalid bulk length\r\n");
    second.write_all(b"PING\r\n*17\r\n").await.expect("writes");
    assert_eq!(rest(second).await, "+PONG\r\n-ERR Protocol error: invalid multibulk length\r\n");
    running.stop().await;
}

#[tokio::test]
async fn a_client_that_does_not_read_is_slowed_and_then_closed() {
    let running = start(|config| {
        config.buffered_bytes_max = 4 << 20;
        config.stall_timeout = Duration::from_millis(500);
    })
    .await;
    let client = &mut running.client().await;
    ask(client, &[b"SET", b"k", &vec![b'v'; 1 << 20]], b"+OK\r\n").await;
    let before = running.counters.commands.load(Relaxed);
    let many = request(&[b"GET", b"k"]).repeat(1000);
    client.write_all(&many).await.expect("writes");
    let closed = async {
        while running.counters.connections_stalled.load(Relaxed) == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(SOON, closed).await.expect("closed in time");
    let answered = running.counters.commands.load(Relaxed) - before;
    println!("{answered} of 1000 answers were made for a client that reads none");
    // Four and one are buffered here, up to about ten are in the sockets' buffers.
    assert!((4..30).contains(&answered), "{answered}");
    running.stop().await;
}

#[tokio::test]
async fn half_a_command_is_closed_and_an_idle_client_is_not() {
    let running = start(|config| config.stall_timeout = Duration::from_millis(300)).await;
    let idle = &mut running.client().await;
    let half = &mut running.client().await;
    half.write_all(b"*2\r\n$3\r\nGET\r\n$10\r\nabc").await.expect("writes");
    assert_eq!(rest(half).await, "");
    ask(idle, &[b"PING"], b"+PONG\r\n").await;
    running.stop().await;
    let running = start(|config| config.idle_timeout = Duration::from_millis(300)).await;
    assert_eq!(rest(&mut running.client().await).await, "");
    running.stop().await;
}

/// Every key has a value of 1 MiB, which takes a while to read.
struct Heavy {
    hints: bool,
    reading: AtomicUsize,
    /// Maximum number of concurrent reads, and number of all reads.
    seen: Arc<(AtomicUsize, AtomicUsize)>,
}

const HEAVY_BYTES: usize = 1 << 20;

impl Values for Heavy {
    async fn get(&self, _: &[u8]) -> Result<Option<Value>, ValueError> {
        self.seen.0.fetch_max(self.reading.fetch_add(1, Relaxed) + 1, Relaxed);
        self.seen.1.fetch_add(1, Relaxed);
        tokio::time::sleep(Duration::from_millis(5)).await;
        self.reading.fetch_sub(1, Relaxed);
        Ok(Some(Value::from(bytes::Bytes::from(vec![b'h'; HEAVY_BYTES]))))
    }

    async fn look(&self, _: &[u8]) -> Result<Option<Entry>, ValueError> {
        tokio::time::sleep(Duration::from_millis(1)).await;
        Ok(Some(Entry { bytes: HEAVY_BYTES as u64, expires_in: None }))
    }

    fn size_hint(&self, _: &[u8]) -> Option<u64> {
        self.hints.then_some(HEAVY_BYTES as u64)
    }

    async fn set(&self, _: &[u8], _: Value, _: SetOptions) -> Result<SetOutcome, ValueError> {
        Ok(SetOutcome::Stored)
    }

    async fn delete(&self, _: &[u8]) -> Result<bool, ValueError> {
        Ok(false)
    }

    async fn expire(&self, _: &[u8], _: Option<Duration>) -> Result<bool, ValueError> {
        Ok(false)
    }

    async fn keys(&self, _: u64, _: usize) -> Result<KeyPage, ValueError> {
        Ok(KeyPage::default())
    }

    async fn clear(&self) -> Result<(), ValueError> {
        Ok(())
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}

#[tokio::test]
async fn reads_of_large_values_are_bounded_before_they_begin() {
    // Four fit, and four more may be in flight if the store does not know sizes at once.
    for (hints, reads_max) in [(true, 4), (false, 8)] {
        let seen = Arc::<(AtomicUsize, AtomicUsize)>::default();
        let values = Heavy { hints, reading: AtomicUsize::new(0), seen: Arc::clone(&seen) };
        let running = start_with(values, |config| config.buffered_bytes_max = 4 * HEAVY_BYTES).await;
        let client = &mut running.client().await;
        // A write among the reads holds its argument, and an unsent answer holds its value.
        let mut batch = request(&[b"GET", b"k"]).repeat(32);
        batch.extend(request(&[b"SET", b"other", &[b'v'; HEAVY_BYTES]]));
        batch.extend(request(&[b"GETRANGE", b"k", b"0", b"1"]).repeat(32));
        let (mut reader, mut writer) = client.split();
        let mut expected = bulk(&[b'h'; HEAVY_BYTES]).repeat(32);
        expected.extend(b"+OK\r\n");
        expected.extend(bulk(b"hh").repeat(32));
        let mut got = vec![0; expected.len()];
        let both = async { tokio::join!(writer.write_all(&batch), reader.read_exact(&mut got)) };
        let (written, read) = timeout(SOON, both).await.expect("nothing waits for ever");
        written.expect("writes");
        read.expect("answers");
        assert!(got == expected);
        let (most, all) = (seen.0.load(Relaxed), seen.1.load(Relaxed));
        println!("hints {hints}: {most} of {all} reads at a time");
        assert_eq!(all, 64);
        assert!((2..=reads_max).contains(&most), "{most} reads at a time");
        // This many are refused before any value is read.
        ask(client, &[b"MGET", b"a", b"b", b"c", b"d", b"e"], b"-ERR the values exceed 4194304 bytes").await;
        assert_eq!(seen.1.load(Relaxed), all);
        running.stop().await;
    }
}
