//! Tests of the HTTP/1.1 client of engines.

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

use super::*;

fn head(text: &str) -> io::Result<Answer> {
    parse(&Bytes::copy_from_slice(text.as_bytes()), &Method::POST)
}

/// Decodes a body that arrives in these pieces.
fn body(pieces: &[&[u8]], mut framing: Framing) -> Result<(Vec<u8>, Framing, usize), String> {
    let (mut input, mut out) = (BytesMut::new(), Vec::new());
    for piece in pieces {
        input.extend_from_slice(piece);
        loop {
            match next(&mut input, &mut framing).map_err(|error| error.to_string())? {
                Next::Data(data) => out.extend_from_slice(&data),
                Next::Starved => break,
                Next::Ended => return Ok((out, framing, input.len())),
            }
        }
    }
    Ok((out, framing, input.len()))
}

const CHUNKED: Framing = Framing::Chunked(Chunk::Size);

#[test]
fn how_a_body_comes_is_said_by_its_head() {
    for (fields, framing, is_reusable) in [
        ("content-length: 5\r\n", Framing::Length(5), true),
        ("content-length: 5\r\ncontent-length: 5\r\n", Framing::Length(5), true),
        ("content-length: 0\r\n", Framing::Ended, true),
        ("transfer-encoding: chunked\r\n", CHUNKED, true),
        ("Transfer-Encoding: gzip, Chunked\r\n", CHUNKED, true),
        ("transfer-encoding: chunked\r\nconnection: x, Close\r\n", CHUNKED, false),
        // An intermediary may have believed either of the two headers.
        ("transfer-encoding: chunked\r\ncontent-length: 5\r\n", CHUNKED, false),
        ("", Framing::UntilClose, false),
    ] {
        let answer = head(&format!("HTTP/1.1 200 OK\r\n{fields}\r\n")).expect("a head");
        assert_eq!((answer.framing, answer.is_reusable), (framing, is_reusable), "{fields}");
    }
    let old = head("HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\n").expect("a head");
    assert!(!old.is_reusable);
    let old = head("HTTP/1.0 200 OK\r\ncontent-length: 5\r\nconnection: keep-alive\r\n\r\n").expect("a head");
    assert!(old.is_reusable);
    for status in ["204 No Content", "304 Not Modified"] {
        let answer = head(&format!("HTTP/1.1 {status}\r\ncontent-length: 5\r\n\r\n")).expect("a head");
        assert_eq!(answer.framing, Framing::Ended, "{status}");
    }
    for bad in [
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: +5\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked, gzip\r\n\r\n",
        "HTTP/1.1 2000 OK\r\n\r\n",
        "HTTP/1.1 200 OK\ncontent-length: 2\n\n{}\r\n\r\n",
        "HTTP/2 200 OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\n folded: x\r\n\r\n",
        "HTTP/1.1 200 OK\r\na b: x\r\n\r\n",
        "SSH-2.0-x\r\n\r\n",
    ] {
        assert!(head(bad).is_err(), "{bad}");
    }
    let many: String = (0..=HEADERS_MAX).map(|number| format!("x-{number}: y\r\n")).collect();
    assert!(head(&format!("HTTP/1.1 200 OK\r\n{many}\r\n")).is_err());
}

#[test]
fn a_body_is_the_same_however_it_is_cut() {
    let wire = b"5\r\nhello\r\n0006;name=\"x\"\r\n world\r\n1\n!\n0\r\ntrailer: x\r\n\r\nnext";
    for cut in 0..=wire.len() {
        for second in cut..=wire.len() {
            let pieces = [&wire[..cut], &wire[cut..second], &wire[second..]];
            let (text, framing, left) = body(&pieces, CHUNKED).expect("well formed");
            assert_eq!(text, b"hello world!", "{cut} {second}");
            assert_eq!(framing, Framing::Ended);
            assert!(left <= 4, "what follows stays");
        }
    }
    let pieces: Vec<&[u8]> = b"hello world".chunks(1).collect();
    assert_eq!(body(&pieces, Framing::Length(5)).expect("well formed").0, b"hello");
    assert_eq!(body(&pieces, Framing::UntilClose).expect("well formed").0, b"hello world");
}

#[test]
fn what_is_no_chunk_is_an_error() {
    for bad in [
        &b"x\r\n"[..],
        b"\r\n",
        b"-1\r\n",
        b"0x5\r\n",
        b"11111111111111111\r\n",
        b"5 5\r\n",
        b"5\r\nhelloX",
        b"5\r\nhello\rX",
    ] {
        assert!(body(&[bad], CHUNKED).is_err(), "{:?}", String::from_utf8_lossy(bad));
    }
    let endless = vec![b'1'; CHUNK_LINE_MAX + 1];
    assert!(body(&[&endless], CHUNKED).is_err());
    let mut trailers = b"0\r\n".to_vec();
    trailers.extend(b"a: b\r\n".repeat(TRAILER_BYTES_MAX / 6 + 1));
    assert!(body(&[&trailers], CHUNKED).is_err());
    let trailer = vec![b'x'; TRAILER_BYTES_MAX + 1];
    assert!(body(&[b"0\r\n", &trailer], CHUNKED).is_err());
}

/// A connection and its other end.
async fn pair() -> (Connection, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let (ours, theirs) = tokio::join!(TcpStream::connect(address), listener.accept());
    (Connection::new(ClientStream::Plain(ours.expect("connects"))), theirs.expect("accepts").0)
}

fn post<'a>(body: &'a Bytes, headers: &'a HeaderMap) -> Request<'a> {
    const HOST: HeaderValue = HeaderValue::from_static("engine:1");
    static HOST_OF_ALL: std::sync::LazyLock<HeaderValue> = std::sync::LazyLock::new(|| HOST);
    Request {
        method: &Method::POST,
        path: "/v1/x?y=1",
        host: &HOST_OF_ALL,
        authorization: None,
        headers,
        body,
    }
}

async fn rest(connection: &mut Connection, mut framing: Framing) -> io::Result<Vec<u8>> {
    let mut out = Vec::new();
    loop {
        match poll_fn(|context| connection.poll_next(&mut framing, context)).await? {
            Next::Data(data) => out.extend_from_slice(&data),
            Next::Ended => return Ok(out),
            Next::Starved => unreachable!("it reads until there is something"),
        }
    }
}

#[tokio::test]
async fn requests_follow_each_other_on_a_connection() {
    let (mut connection, mut engine) = pair().await;
    let mut headers = HeaderMap::new();
    headers.insert("x-a", HeaderValue::from_static("b"));
    headers.insert(CONTENT_LENGTH, HeaderValue::from_static("99"));
    for size in [0, 3, COPIED_BYTES_MAX + 1, 3 << 20] {
        let body = Bytes::from(vec![b'z'; size]);
        let expected = format!(
            "POST /v1/x?y=1 HTTP/1.1\r\nhost: engine:1\r\nx-a: b\r\ncontent-length: {size}\r\n\r\n{}",
            "z".repeat(size)
        );
        let served = async {
            let mut got = vec![0; expected.len()];
            engine.read_exact(&mut got).await.expect("the request");
            // In pieces, after an informational answer.
            for piece in [
                "HTTP/1.1 103 Early",
                " Hints\r\nx: y\r\n\r\nHTTP/1.1 200 OK\r\ncontent-le",
                "ngth: 5\r\n\r\nhel",
                "lo",
            ] {
                engine.write_all(piece.as_bytes()).await.expect("written");
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
            got
        };
        let request = post(&body, &headers);
        let (answer, got) = tokio::join!(connection.exchange(&request), served);
        assert!(got == expected.as_bytes(), "{size}");
        let answer = answer.expect("an answer");
        assert!(answer.is_reusable && answer.head.status == 200, "{answer:?}");
        assert_eq!(rest(&mut connection, answer.framing).await.expect("a body"), b"hello");
        let mut context = Context::from_waker(std::task::Waker::noop());
        assert!(connection.is_quiet(&mut context));
    }
    engine.write_all(b"x").await.expect("written");
    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    let mut context = Context::from_waker(std::task::Waker::noop());
    assert!(!connection.is_quiet(&mut context), "something came that nobody asked for");
}

#[tokio::test]
async fn an_answer_that_comes_early_ends_the_request() {
    let (mut connection, mut engine) = pair().await;
    let (body, headers) = (Bytes::from(vec![b'z'; 64 << 20]), HeaderMap::new());
    let request = post(&body, &headers);
    let served = async {
        engine.write_all(b"HTTP/1.1 413 No\r\ncontent-length: 2\r\n\r\nno").await.expect("written");
    };
    let (answer, ()) = tokio::join!(connection.exchange(&request), served);
    let answer = answer.expect("an answer");
    assert!(answer.head.status == 413 && !answer.is_reusable, "the rest was not sent");
    assert_eq!(rest(&mut connection, answer.framing).await.expect("a body"), b"no");
}

#[tokio::test]
async fn an_engine_that_breaks_off_or_never_ends_is_an_error() {
    let (body, headers) = (Bytes::from_static(b"{}"), HeaderMap::new());
    for (wire, is_head_whole) in [
        (String::new(), false),
        ("HTTP/1.1 200 OK\r\ncontent".to_owned(), false),
        ("HTTP/1.1 101 Switching Protocols\r\n\r\n".to_owned(), false),
        ("HTTP/1.1 100 Continue\r\n\r\n".repeat(9), false),
        (format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(HEAD_BYTES_MAX + READ_BYTES)), false),
        ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhell".to_owned(), true),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n".to_owned(), true),
    ] {
        let (mut connection, mut engine) = pair().await;
        let served = async move {
            let _closed_first = engine.write_all(wire.as_bytes()).await;
            // Read to the end, so that what was written arrives.
            let _gone = engine.shutdown().await;
            let mut sink = Vec::new();
            let _reset =
                tokio::time::timeout(std::time::Duration::from_millis(50), engine.read_to_end(&mut sink))
                    .await;
        };
        let request = post(&body, &headers);
        let (answer, ()) = tokio::join!(connection.exchange(&request), served);
        match answer {
            Err(_) => assert!(!is_head_whole),
            Ok(answer) => {
                assert!(is_head_whole, "{answer:?}");
                assert!(rest(&mut connection, answer.framing).await.is_err());
            }
        }
    }
}
