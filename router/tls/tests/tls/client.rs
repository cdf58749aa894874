//! Tests of the client side: the servers that it trusts.

use axum::serve::Listener;
use router_tls::{
    Alpn, ClientStream, ClientTls, ClientTlsConfig, HandshakeLimits, PlainListener, ServerTls, TlsError,
    TlsListener,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{Authority, Link, TlsFixture, ask, certificate_of, router, serve, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_and_its_answer_pass_and_nothing_is_installed_for_the_process() {
    let fixture = TlsFixture::new();
    let (tls, addr) = serve(&fixture.server, HandshakeLimits::default()).await;
    assert_eq!(ask(&fixture.client, addr).await.as_deref(), Ok("nobody"));
    assert_eq!(tls.counts().completed, 1);
    assert_eq!(tls.expires_unix(), 4_000_000_000);
    assert!(rustls::crypto::CryptoProvider::get_default().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_of_another_authority_is_refused() {
    let fixture = TlsFixture::new();
    let (tls, addr) = serve(&fixture.server, HandshakeLimits::default()).await;
    let ca_file = Some(fixture.folder.write("other.pem", &Authority::new().pem));
    let error = ask(&ClientTlsConfig { ca_file, ..fixture.client.clone() }, addr).await.expect_err("refused");
    assert!(error.contains("UnknownIssuer"), "{error}");
    assert_eq!(ask(&fixture.client, addr).await.as_deref(), Ok("nobody"), "others are served");
    until("both are counted", || (tls.counts().completed, tls.counts().failed) == (1, 1)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_name_or_address_must_be_the_servers() {
    let fixture = TlsFixture::new();
    let (_tls, addr) = serve(&fixture.server, HandshakeLimits::default()).await;
    let as_it_is = ClientTls::load(&fixture.client).expect("loaded");
    let renamed = ClientTlsConfig { server_name: Some("localhost".to_owned()), ..fixture.client.clone() };
    let renamed = ClientTls::load(&renamed).expect("loaded");
    let cases = [
        (&as_it_is, "localhost", true),
        (&as_it_is, "127.0.0.1", true),
        (&as_it_is, "engine.example", false),
        (&as_it_is, "127.0.0.2", false),
        (&as_it_is, "[::1]", false),
        (&renamed, "engine.example", true),
    ];
    for (tls, host, expected) in cases {
        let tcp = TcpStream::connect(addr).await.expect("connected");
        let connected = tls.connect(host, tcp).await;
        assert_eq!(connected.is_ok(), expected, "{host}: {connected:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_connection_resumes_the_session() {
    let fixture = TlsFixture::new();
    let (_tls, addr) = serve(&fixture.server, HandshakeLimits::default()).await;
    let tls = ClientTls::load(&fixture.client).expect("loaded");
    let mut first = Link::open(&tls, addr).await.expect("connected");
    assert_eq!(first.ask().await.as_deref(), Ok("nobody"));
    assert!(!first.is_resumed);
    let mut second = Link::open(&tls, addr).await.expect("connected");
    assert!(second.is_resumed);
    assert_eq!(second.ask().await.as_deref(), Ok("nobody"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_does_not_speak_tls_is_an_error() {
    let tcp = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let addr = tcp.local_addr().expect("address");
    tokio::spawn(async move {
        let (mut stream, _) = tcp.accept().await.expect("accepted");
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.expect("written");
        // Until the client leaves.
        let _left = stream.read_to_end(&mut Vec::new()).await;
    });
    let tls = ClientTls::load(&TlsFixture::new().client).expect("loaded");
    let connected = tls.connect("localhost", TcpStream::connect(addr).await.expect("connected")).await;
    assert!(matches!(connected, Err(TlsError::Handshake { .. })), "{connected:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_ends_send_without_delay() {
    let fixture = TlsFixture::new();
    let tcp = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let mut listener = TlsListener::new(tcp, ServerTls::load(&fixture.server).expect("loaded"));
    let addr = listener.local_addr().expect("address").addr;
    let client = ClientTls::load(&fixture.client).expect("loaded");
    let connect = async {
        let tcp = TcpStream::connect(addr).await.expect("connected");
        client.connect("localhost", tcp).await.expect("a handshake")
    };
    let (stream, (served, peer)) = tokio::join!(connect, listener.accept());
    let ClientStream::Tls(stream) = stream else { panic!("not TLS") };
    let (own, other) = (stream.get_ref().0, served.get_ref().0);
    assert_eq!((own.nodelay().ok(), other.get_ref().nodelay().ok()), (Some(true), Some(true)));
    assert_eq!(own.local_addr().ok(), Some(peer.addr));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plain_listener_serves_the_same_handlers() {
    let tcp = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let addr = tcp.local_addr().expect("address");
    tokio::spawn(async move { axum::serve(PlainListener::new(tcp), router()).await });
    let stream = ClientStream::Plain(TcpStream::connect(addr).await.expect("connected"));
    assert_eq!(Link::over(stream).await.expect("HTTP").ask().await.as_deref(), Ok("nobody"));
}

/// One protocol version only, by rustls's own client, as an old client would offer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_versions_are_spoken() {
    use rustls::version::{TLS12, TLS13};
    let fixture = TlsFixture::new();
    let (_tls, addr) = serve(&fixture.server, HandshakeLimits::default()).await;
    for version in [&TLS12, &TLS13] {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(certificate_of(&fixture.folder.path("ca.pem")).into()).expect("a root");
        let provider = std::sync::Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[version])
            .expect("versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
        let tcp = TcpStream::connect(addr).await.expect("connected");
        let name = "localhost".try_into().expect("a name");
        let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(config));
        let stream = connector.connect(name, tcp).await.expect("a handshake");
        assert_eq!(stream.get_ref().1.protocol_version(), Some(version.version));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_in_common_to_speak_is_refused() {
    let fixture = TlsFixture::new();
    let (_tls, addr) = serve(&fixture.server, HandshakeLimits::default()).await;
    let client = ClientTlsConfig { alpn: vec![Alpn::Http2], ..fixture.client.clone() };
    let error = ask(&client, addr).await.expect_err("refused");
    assert!(error.contains("NoApplicationProtocol"), "{error}");
}

#[test]
fn settings_that_contradict_each_other_are_refused() {
    let fixture = TlsFixture::new();
    let nobody = ClientTlsConfig { ca_file: None, ..fixture.client.clone() };
    let half = ClientTlsConfig {
        certificate_file: Some(fixture.folder.path("server.pem")),
        ..fixture.client.clone()
    };
    let name = ClientTlsConfig { server_name: Some("a b".to_owned()), ..fixture.client.clone() };
    for (config, expected) in [(nobody, "no roots"), (half, "go together"), (name, "\"a b\" is no name")] {
        let error = ClientTls::load(&config).expect_err("refused").to_string();
        assert!(error.contains(expected), "{error}");
    }
    let with_roots = router_tls::ServerTlsConfig {
        client_ca_file: Some(fixture.folder.path("ca.pem")),
        ..fixture.server.clone()
    };
    let error = ServerTls::load(&with_roots).expect_err("refused").to_string();
    assert!(error.contains("none are asked for"), "{error}");
}
