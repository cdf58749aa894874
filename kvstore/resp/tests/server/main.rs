//! The server over real sockets: order, bounds, time limits, authentication, hostile bytes.

mod access;
mod bounds;
mod budget;
mod commands;

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use kvstore_resp::testing::MemoryValues;
use kvstore_resp::{Bound, Listen, RespConfig, RespCounters, Server, Values};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
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

/// Reads until the server closes.
async fn rest(client: &mut TcpStream) -> String {
    let mut rest = Vec::new();
    // A server that closes while bytes are unread resets the connection after its last answer.
    let _ = timeout(SOON, client.read_to_end(&mut rest)).await.expect("closed in time");
    String::from_utf8_lossy(&rest).into_owned()
}

fn bulk(bytes: &[u8]) -> Vec<u8> {
    [format!("${}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
}
