//! An authority, its certificates in a folder of their own, a gateway-like server, and a client.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::extract::connect_info::IntoMakeServiceWithConnectInfo;
use axum::routing::get;
use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType, date_time_ymd,
};
use router_tls::{
    ClientStream, ClientTls, ClientTlsConfig, HandshakeLimits, PeerAddr, ServerTls, ServerTlsConfig,
    TlsListener,
};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};

/// A folder that is removed on drop.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("router-tls-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, text).expect("written");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Errors are ignored: the system cleans its folder for temporary files.
        let _left = std::fs::remove_dir_all(&self.0);
    }
}

/// An authority that signs.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub(crate) pem: String,
}

/// A certificate with its key, both in PEM form.
pub(crate) struct Pair {
    pub(crate) certificate: String,
    pub(crate) key: String,
    pub(crate) der: Vec<u8>,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut parameters = CertificateParams::new(Vec::<String>::new()).expect("parameters");
        // Each authority has a name of its own; with equal names a wrong one would only be refused for its
        // signature.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("test authority {}", NEXT.fetch_add(1, Ordering::Relaxed));
        parameters.distinguished_name.push(DnType::CommonName, name);
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate().expect("key");
        let pem = parameters.self_signed(&key).expect("certificate").pem();
        Self { issuer: Issuer::new(parameters, key), pem }
    }

    /// Signs a certificate with these names; those with a scheme are URIs.
    pub(crate) fn sign(&self, common_name: &str, names: &[&str]) -> Pair {
        self.sign_with(common_name, names, 4_000_000_000, KeyPair::generate().expect("key"))
    }

    pub(crate) fn sign_with(
        &self,
        common_name: &str,
        names: &[&str],
        expires_unix: u64,
        key: KeyPair,
    ) -> Pair {
        let (uris, names): (Vec<&str>, Vec<&str>) = names.iter().partition(|name| name.contains("://"));
        let names: Vec<_> = names.into_iter().map(str::to_owned).collect();
        let mut parameters = CertificateParams::new(names).expect("names");
        for uri in uris {
            parameters.subject_alt_names.push(SanType::URI(uri.try_into().expect("ASCII")));
        }
        parameters.distinguished_name.push(DnType::CommonName, common_name);
        parameters.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        parameters.not_after = date_time_ymd(1970, 1, 1) + Duration::from_secs(expires_unix);
        let certificate = parameters.signed_by(&key, &self.issuer).expect("certificate");
        Pair { certificate: certificate.pem(), key: key.serialize_pem(), der: certificate.der().to_vec() }
    }
}

/// A folder with an authority's server certificate for `localhost` and 127.0.0.1.
pub(crate) struct TlsFixture {
    pub(crate) folder: Folder,
    pub(crate) authority: Authority,
    pub(crate) server: ServerTlsConfig,
    pub(crate) client: ClientTlsConfig,
}

impl TlsFixture {
    pub(crate) fn new() -> Self {
        let folder = Folder::new();
        let authority = Authority::new();
        let pair = authority.sign("gateway", &["localhost", "127.0.0.1"]);
        let server = ServerTlsConfig::new(
            folder.write("server.pem", &pair.certificate),
            folder.write("server.key", &pair.key),
        );
        let ca_file = Some(folder.write("ca.pem", &authority.pem));
        let client = ClientTlsConfig { ca_file, system_roots: false, ..ClientTlsConfig::default() };
        Self { folder, authority, server, client }
    }

    /// Writes a new server certificate over the old one.
    pub(crate) fn renew(&self) -> Pair {
        let pair = self.authority.sign("gateway", &["localhost", "127.0.0.1"]);
        self.folder.write("server.pem", &pair.certificate);
        self.folder.write("server.key", &pair.key);
        pair
    }

    /// The client's configuration with a certificate of this authority.
    pub(crate) fn client_with(
        &self,
        authority: &Authority,
        common_name: &str,
        names: &[&str],
    ) -> (ClientTlsConfig, Pair) {
        let pair = authority.sign(common_name, names);
        (self.client_as(&pair), pair)
    }

    pub(crate) fn client_as(&self, pair: &Pair) -> ClientTlsConfig {
        ClientTlsConfig {
            certificate_file: Some(self.folder.write("client.pem", &pair.certificate)),
            key_file: Some(self.folder.write("client.key", &pair.key)),
            ..self.client.clone()
        }
    }
}

pub(crate) fn certificate_of(path: &Path) -> Vec<u8> {
    use base64::Engine as _;
    let text = std::fs::read_to_string(path).expect("PEM");
    let lines: String = text.lines().filter(|line| !line.starts_with("-----")).collect();
    base64::engine::general_purpose::STANDARD.decode(lines).expect("base64")
}

/// Starts a server that answers `/` with the caller's identity.
pub(crate) async fn serve(config: &ServerTlsConfig, limits: HandshakeLimits) -> (Arc<ServerTls>, SocketAddr) {
    let tls = ServerTls::load(config).expect("loaded");
    let tcp = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let addr = tcp.local_addr().expect("address");
    let listener = TlsListener::with_limits(tcp, tls.clone(), limits);
    tokio::spawn(async move { axum::serve(listener, router()).await });
    (tls, addr)
}

/// Returns the service of both kinds of listeners.
pub(crate) fn router() -> IntoMakeServiceWithConnectInfo<Router, PeerAddr> {
    Router::new().route("/", get(who)).into_make_service_with_connect_info()
}

async fn who(ConnectInfo(peer): ConnectInfo<PeerAddr>) -> String {
    assert!(peer.addr.ip().is_loopback() && peer.addr.port() != 0);
    match peer.certificate {
        None => "nobody".to_owned(),
        Some(identity) => format!(
            "{}|{}|{}|{}",
            identity.common_name.clone().unwrap_or_default(),
            identity.dns_names.join(","),
            identity.spiffe_id().unwrap_or_default(),
            identity.fingerprint_hex(),
        ),
    }
}

/// An HTTP connection of a client.
pub(crate) struct Link {
    sender: SendRequest<Empty<Bytes>>,
    /// The server's certificate.
    pub(crate) server: Vec<u8>,
    pub(crate) is_resumed: bool,
}

impl Link {
    /// Connects and makes the handshake; the error is the text that a caller would log.
    pub(crate) async fn open(tls: &ClientTls, addr: SocketAddr) -> Result<Self, String> {
        let tcp = TcpStream::connect(addr).await.map_err(|error| error.to_string())?;
        let stream = tls.connect("localhost", tcp).await.map_err(|error| error.to_string())?;
        let ClientStream::Tls(inside) = &stream else { panic!("not TLS") };
        let session = inside.get_ref().1;
        let server = session.peer_certificates().expect("a certificate")[0].to_vec();
        let is_resumed = session.handshake_kind() == Some(rustls::HandshakeKind::Resumed);
        assert_eq!(stream.alpn(), Some(&b"http/1.1"[..]));
        Ok(Self { server, is_resumed, ..Self::over(stream).await? })
    }

    /// Starts HTTP over an existing connection.
    pub(crate) async fn over(stream: ClientStream) -> Result<Self, String> {
        let (sender, driver) = handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
        tokio::spawn(driver);
        Ok(Self { sender, server: Vec::new(), is_resumed: false })
    }

    /// Returns the answer to `GET /`.
    pub(crate) async fn ask(&mut self) -> Result<String, String> {
        let request =
            hyper::Request::get("/").header("host", "localhost").body(Empty::new()).expect("a request");
        let answer = self.sender.send_request(request).await.map_err(|error| format!("{error:?}"))?;
        assert_eq!(answer.status(), 200);
        let body = answer.into_body().collect().await.map_err(|error| format!("{error:?}"))?;
        Ok(String::from_utf8(body.to_bytes().to_vec()).expect("text"))
    }
}

/// Connects and asks once.
pub(crate) async fn ask(config: &ClientTlsConfig, addr: SocketAddr) -> Result<String, String> {
    Link::open(&ClientTls::load(config).expect("loaded"), addr).await?.ask().await
}

/// Returns the error by which the server refuses this client: in the handshake, or at the first read.
pub(crate) async fn refusal(tls: &ClientTls, addr: SocketAddr) -> String {
    let tcp = TcpStream::connect(addr).await.expect("connected");
    match tls.connect("localhost", tcp).await {
        Err(error) => error.to_string(),
        Ok(mut stream) => {
            let read = tokio::time::timeout(Duration::from_secs(5), stream.read(&mut [0])).await;
            read.expect("an answer").expect_err("refused").to_string()
        }
    }
}

/// Waits until the condition holds, for at most 5 s.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..500 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what}: not within 5 s");
}
