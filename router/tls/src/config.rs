//! Settings of TLS, and limits of handshakes.

use std::path::PathBuf;
use std::time::Duration;

/// Whether clients show a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ClientCertificate {
    /// No certificate is requested.
    #[default]
    Off,
    /// A certificate is requested. A client may connect without one; a certificate that is shown must be
    /// valid.
    Optional,
    /// A handshake without a valid certificate fails.
    Required,
}

/// A protocol that is offered inside TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alpn {
    /// `http/1.1`.
    Http1,
    /// `h2`. Offer it only where the HTTP server or client supports it: the other side will select it.
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

/// Files and requirements of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerTlsConfig {
    /// File with the listener's certificate in PEM form, followed by those between it and the root.
    pub certificate_file: PathBuf,
    /// File with the certificate's private key in PEM form: PKCS#8, PKCS#1 or SEC1, not encrypted.
    pub key_file: PathBuf,
    /// File with the roots of clients' certificates, in PEM form. Required unless `client_certificate` is
    /// off.
    pub client_ca_file: Option<PathBuf>,
    /// Whether clients show a certificate. Unless this is off, no session is resumed: each connection is
    /// verified.
    pub client_certificate: ClientCertificate,
    /// Protocols that are offered, the preferred first.
    pub alpn: Vec<Alpn>,
}

impl ServerTlsConfig {
    /// Requests no certificate of clients and offers HTTP/1.1.
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

/// Trusted roots, own certificate and protocols of the client side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientTlsConfig {
    /// File with roots in PEM form, for servers with private certificates.
    pub ca_file: Option<PathBuf>,
    /// Whether the system's roots are trusted, in addition to those of `ca_file`.
    pub system_roots: bool,
    /// File with the own certificate in PEM form, followed by those between it and the root, for servers
    /// that request one.
    pub certificate_file: Option<PathBuf>,
    /// File with the certificate's private key, as in [`ServerTlsConfig::key_file`].
    pub key_file: Option<PathBuf>,
    /// Name that servers' certificates must have, in place of the host of the connection.
    pub server_name: Option<String>,
    /// Protocols that are offered, the preferred first.
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

/// Limits on handshakes: resources that clients may hold before they have completed one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandshakeLimits {
    /// Largest number of handshakes in flight; at least 1. At the limit, further connections wait in the
    /// kernel's backlog.
    pub in_flight_max: usize,
    /// Longest time of a handshake.
    pub timeout: Duration,
    /// Longest time of the oldest handshake while `in_flight_max` are in flight, so that clients which
    /// connect and send nothing cannot block other clients for long.
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
