//! A process without file descriptors pauses instead of spinning, and serves again when some are free. The
//! limit is the whole process's, so this test is alone in its file.

#[path = "tls/support.rs"]
#[allow(dead_code, reason = "the other tests use the rest of it")]
mod support;

use std::fs::File;
use std::time::Duration;

use router_tls::{ClientTls, HandshakeLimits};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use support::{TlsFixture, serve, until};
use tokio::net::TcpStream;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn want_of_descriptors_passes() {
    let fixture = TlsFixture::new();
    let (tls, addr) = serve(&fixture.server, HandshakeLimits::default()).await;
    let client = ClientTls::load(&fixture.client).expect("loaded");
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(64), ..limit }).expect("a lower limit");
    let mut held = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        held.push(file);
    }
    assert!(!held.is_empty(), "the limit holds");
    // One descriptor for the client's end, none for the server's.
    held.pop();
    let tcp = TcpStream::connect(addr).await.expect("connected");
    until("the system refuses", || tls.counts().accept_errors > 0).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    // 10, 20, 40, ... ms: a few tries, where a loop without pauses would make thousands.
    let tries = tls.counts().accept_errors;
    assert!((2..10).contains(&tries), "{tries} tries");
    held.clear();
    let connected = client.connect("localhost", tcp).await;
    assert!(connected.is_ok(), "{connected:?}");
    until("the server has its end of it", || tls.counts().completed == 1).await;
}
