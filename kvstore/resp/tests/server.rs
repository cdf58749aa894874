//! The server over real sockets: order, bounds, time limits, authentication, hostile bytes.

use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use kvstore_resp::testing::MemoryValues;
use kvstore_resp::{
    Bound, Entry, KeyPage, Listen, Password, RespConfig, RespCounters, Server, SetOptions, SetOutcome, Usage,
    Value, ValueError, Values,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(20);

struct Running {
    port: u16,
    counters: Arc<RespCounters>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

async fn start_with(values: impl Values, change: impl FnOnce(&mut RespConfig)) -> Running {
    let listen = vec![Listen::Tcp((Ipv4Addr::LOCALHOST, 0).into())];
    let mut config = RespConfig { listen, ..RespConfig::default() };
    change(&mut config);
    let server = Server::bind(values, config).await.expect("binds");
    let port = server.bound().iter().find_map(|place| match place {
        Bound::Tcp(address) => Some(address.port()),
        Bound::Unix(_) => None,
    });
    let counters = server.counters();
    let (stop, stopped) = oneshot::channel();
    let task = tokio::spawn(server.run(async { drop(stopped.await) }));
    Running { port: port.expect("a TCP port"), counters, stop, task }
}

async fn start(change: impl FnOnce(&mut RespConfig)) -> Running {
    start_with(MemoryValues::new(256 << 20), change).await
}

impl Running {
    async fn client(&self) -> TcpStream {
        TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).await.expect("connects")
    }

    async fn stop(self) {
        self.stop.send(()).expect("the server runs");
        timeout(SOON, self.task).await.expect("stops in time").expect("without a panic");
    }
}

fn request(arguments: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", arguments.len()).into_bytes();
    for argument in arguments {
        bytes.extend(format!("${}\r\n", argument.len()).bytes());
        bytes.extend_from_slice(argument);
        bytes.extend(b"\r\n");
    }
    bytes
}

async fn expect(client: &mut TcpStream, expected: &[u8]) {
    let mut got = vec![0; expected.len()];
    timeout(SOON, client.read_exact(&mut got)).await.expect("in time").expect("answers");
    let shown = got.iter().take(200).copied().collect::<Vec<_>>();
    assert!(got == expected, "{}", shown.escape_ascii());
}

async fn ask(client: &mut TcpStream, arguments: &[&[u8]], expected: &[u8]) {
    client.write_all(&request(arguments)).await.expect("writes");
    expect(client, expected).await;
}

/// Everything until the server closes.
async fn rest(client: &mut TcpStream) -> String {
    let mut rest = Vec::new();
    // A server that closes while bytes are unread resets the connection, after what it had to say.
    let _ = timeout(SOON, client.read_to_end(&mut rest)).await.expect("closed in time");
    String::from_utf8_lossy(&rest).into_owned()
}

fn bulk(bytes: &[u8]) -> Vec<u8> {
    [format!("${}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
}

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
    // Four and one are buffered here, up to about ten lie in the sockets' buffers.
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
    // The budget is taken as bytes come; the other clients' must not come in before that.
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
    // Each declares three quarters of the budget and has sent little, so that it has taken the room for one read.
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

    // Two have sent nearly all of it and stop, one of them beyond the budget: the next is refused, and stays in step.
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

    // Each has a part and waits for the rest: they finish one by one.
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

/// Every key has a value of 1 MiB, which takes a while to read.
struct Heavy {
    hints: bool,
    reading: AtomicUsize,
    /// Most reads at a time, and all reads.
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
    // Four fit, and of a store that does not know sizes at once, four more may be under way.
    for (hints, reads_max) in [(true, 4), (false, 8)] {
        let seen = Arc::<(AtomicUsize, AtomicUsize)>::default();
        let values = Heavy { hints, reading: AtomicUsize::new(0), seen: Arc::clone(&seen) };
        let running = start_with(values, |config| config.buffered_bytes_max = 4 * HEAVY_BYTES).await;
        let client = &mut running.client().await;
        // A write among them holds its argument, and an answer that is short holds its value.
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
        // This many are refused before anything is read.
        ask(client, &[b"MGET", b"a", b"b", b"c", b"d", b"e"], b"-ERR the values exceed 4194304 bytes").await;
        assert_eq!(seen.1.load(Relaxed), all);
        running.stop().await;
    }
}

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
    // What comes in the same packet as the password is already the word of a known client.
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
    // A socket that nobody listens on any more, as a killed server leaves it.
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
