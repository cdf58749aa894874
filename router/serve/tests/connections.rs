//! Connections that are idle, silent or too many.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use http::{Request, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use router_serve::{ServeConfig, serve};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Type of HTTP/2's GOAWAY frame (RFC 9113, section 6.8).
const GOAWAY: u8 = 7;

async fn server(config: ServeConfig) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let slow = || async {
        tokio::time::sleep(Duration::from_millis(1200)).await;
        "late"
    };
    let router = Router::new().route("/", get(|| async { "ok" })).route("/slow", get(slow));
    tokio::spawn(serve(listener, router, config, std::future::pending()));
    address
}

/// Forwards one connection and records the server's bytes.
async fn recording(server: SocketAddr) -> (SocketAddr, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let record = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&record);
    tokio::spawn(async move {
        let (client, _) = listener.accept().await.expect("a client");
        let server = TcpStream::connect(server).await.expect("the server");
        let (mut from_client, mut to_client) = client.into_split();
        let (mut from_server, mut to_server) = server.into_split();
        tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
        let mut piece = [0; 4096];
        while let Ok(count @ 1..) = from_server.read(&mut piece).await {
            kept.lock().expect("no panic").extend_from_slice(&piece[..count]);
            if to_client.write_all(&piece[..count]).await.is_err() {
                return;
            }
        }
    });
    (address, record)
}

/// Returns the frame types in an HTTP/2 server's bytes.
fn frames(mut bytes: &[u8]) -> Vec<u8> {
    let mut types = Vec::new();
    while let [a, b, c, kind, ..] = *bytes {
        types.push(kind);
        let length = 9 + (usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c));
        bytes = bytes.get(length..).unwrap_or_default();
    }
    types
}

fn idle() -> ServeConfig {
    ServeConfig {
        first_call_within: Duration::from_millis(50),
        next_call_within: Duration::from_millis(200),
        ..ServeConfig::default()
    }
}

#[tokio::test]
async fn an_idle_connection_of_http2_is_told_to_end() -> Result<(), Box<dyn std::error::Error>> {
    let (address, record) = recording(server(idle()).await).await;
    let stream = TokioIo::new(TcpStream::connect(address).await?);
    let (mut client, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await?;
    let connection = tokio::spawn(connection);
    let answer = client.send_request(Request::get("http://x/").body(Body::empty())?).await?;
    assert_eq!(answer.status(), StatusCode::OK);
    assert!(!frames(&record.lock().expect("no panic")).contains(&GOAWAY));
    let ended = tokio::time::timeout(Duration::from_secs(10), connection).await??;
    assert!(ended.is_ok(), "{ended:?}");
    assert!(frames(&record.lock().expect("no panic")).contains(&GOAWAY), "it was cut without a word");
    Ok(())
}

#[tokio::test]
async fn a_call_under_way_keeps_its_connection() -> Result<(), Box<dyn std::error::Error>> {
    let stream = TokioIo::new(TcpStream::connect(server(idle()).await).await?);
    let (mut client, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await?;
    tokio::spawn(connection);
    let answer = client.send_request(Request::get("http://x/slow").body(Body::empty())?).await?;
    let text = axum::body::to_bytes(Body::new(answer.into_body()), 64).await?;
    assert_eq!(text, "late", "six times as long as a connection may be idle");
    Ok(())
}

#[tokio::test]
async fn a_connection_that_says_nothing_is_closed() -> Result<(), Box<dyn std::error::Error>> {
    let mut stream = TcpStream::connect(server(idle()).await).await?;
    let began = Instant::now();
    let count = tokio::time::timeout(Duration::from_secs(10), stream.read(&mut [0; 16])).await??;
    assert_eq!(count, 0, "nothing is said to it");
    assert!(began.elapsed() >= Duration::from_millis(40));
    Ok(())
}

#[tokio::test]
async fn connections_beyond_the_most_wait_for_their_turn() -> Result<(), Box<dyn std::error::Error>> {
    let address = server(ServeConfig { connections_max: 1, ..ServeConfig::default() }).await;
    let ask = |mut stream: TcpStream| async move {
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    let first = TcpStream::connect(address).await?;
    // Accepted before the other: it is the first in the kernel's queue.
    let mut second = tokio::spawn(ask(TcpStream::connect(address).await?));
    let early = tokio::time::timeout(Duration::from_millis(300), &mut second).await;
    assert!(early.is_err(), "it was served beside the first");
    assert!(ask(first).await?.ends_with("ok"));
    assert!(tokio::time::timeout(Duration::from_secs(10), second).await???.ends_with("ok"));
    Ok(())
}
