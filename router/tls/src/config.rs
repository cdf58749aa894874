//! What the operator sets, and the limits of handshakes.

use std::path::PathBuf;
use std::time::Duration;

/// Whether clients show a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ClientCertificate {
    /// None is asked for.
    #[default]
    Off,
    /// One is asked for. A client may come without; one that is shown must be good.
    Optional,
    /// No handshake succeeds without a good one.
    Required,
}

/// A protocol that is offered inside TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alpn {
    /// `http/1.1`.
    Http1,
    /// `h2`. To be offered only where the HTTP server or client was built with it: the other side will take it.
    Http2,
}

impl Alpn {
    pub(crate) fn to_wire(self) -> Vec<u8> {
        match self {
            Self::Http1 => b"http/1.1".to_vec(),
            Self::Http2 => b"h2".to_vec(),
        }
    }
}

/// The files and demands of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerTlsConfig {
    /// The listener's certificate in PEM form, followed by those between it and the root.
    pub certificate_file: PathBuf,
    /// Its private key in PEM form: PKCS#8, PKCS#1 or SEC1, not encrypted.
    pub key_file: PathBuf,
    /// Roots of clients' certificates, in PEM form. Needed unless `client_certificate` is off.
    pub client_ca_file: Option<PathBuf>,
    /// Whether clients show a certificate. Unless this is off, no session is resumed: each connection is verified.
    pub client_certificate: ClientCertificate,
    /// What is offered, the preferred first.
    pub alpn: Vec<Alpn>,
}

impl ServerTlsConfig {
    /// Asks clients for nothing and offers HTTP/1.1.
    #[must_use]
    pub fn new(certificate_file: impl Into<PathBuf>, key_file: impl Into<PathBuf>) -> Self {
        Self {
            certificate_file: certificate_file.into(),
            key_file: key_file.into(),
            client_ca_file: None,
            client_certificate: ClientCertificate::Off,
            alpn: vec![Alpn::Http1],
        }
    }
}

/// Whom the client side trusts and as whom it comes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientTlsConfig {
    /// Roots in PEM form, for servers with certificates of the house.
    pub ca_file: Option<PathBuf>,
    /// Whether the system's roots are trusted, in addition to those of `ca_file`.
    pub system_roots: bool,
    /// The own certificate in PEM form, followed by those between it and the root, for servers that ask for one.
    pub certificate_file: Option<PathBuf>,
    /// Its private key, as in [`ServerTlsConfig::key_file`].
    pub key_file: Option<PathBuf>,
    /// The name that servers' certificates must have, in place of the host that is connected to.
    pub server_name: Option<String>,
    /// What is offered, the preferred first.
    pub alpn: Vec<Alpn>,
}

impl Default for ClientTlsConfig {
    /// Trusts the system's roots, has no certificate, and offers HTTP/1.1.
    fn default() -> Self {
        Self {
            ca_file: None,
            system_roots: true,
            certificate_file: None,
            key_file: None,
            server_name: None,
            alpn: vec![Alpn::Http1],
        }
    }
}

/// How much of the process clients may hold before they have shown that they speak TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandshakeLimits {
    /// Handshakes at the same time; at least 1. At the limit, further connections wait in the kernel's backlog.
    pub in_flight_max: usize,
    /// A handshake that takes longer fails.
    pub timeout: Duration,
    /// What remains of that patience at the limit: the oldest handshake fails when it is older, so that clients who
    /// connect and say nothing cannot keep others out for long.
    pub timeout_when_full: Duration,
}

impl Default for HandshakeLimits {
    /// 1024 handshakes of about 10 KiB, 10 s, and 1 s at the limit.
    fn default() -> Self {
        Self {
            in_flight_max: 1024,
            timeout: Duration::from_secs(10),
            timeout_when_full: Duration::from_secs(1),
        }
    }
}
