//! Identity and address of a connection's peer.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use aws_lc_rs::digest;
use axum::extract::connect_info::Connected;
use axum::serve::IncomingStream;

use crate::format;
use crate::listener::TlsListener;

/// Names in a client's verified certificate, with its fingerprint and validity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientIdentity {
    /// The subject's common name; the last of several, which is the most specific.
    pub common_name: Option<String>,
    /// The alternative names that are DNS names.
    pub dns_names: Vec<String>,
    /// The alternative names that are URIs, a SPIFFE ID among them.
    pub uris: Vec<String>,
    /// SHA-256 of the certificate.
    pub fingerprint: [u8; 32],
    /// End of the certificate's validity, in seconds since 1970.
    pub expires_unix: u64,
}

impl ClientIdentity {
    /// Reads a certificate in DER form; `None` when it cannot be parsed.
    pub(crate) fn read(certificate: &[u8]) -> Option<Self> {
        let fields = format::parse(certificate)?;
        let mut fingerprint = [0; 32];
        fingerprint.copy_from_slice(digest::digest(&digest::SHA256, certificate).as_ref());
        Some(Self {
            common_name: fields.common_name,
            dns_names: fields.dns_names,
            uris: fields.uris,
            fingerprint,
            expires_unix: fields.expires_unix,
        })
    }

    /// Returns the SPIFFE ID. A certificate with more than one URI has none (X.509-SVID, section 2).
    #[must_use]
    pub fn spiffe_id(&self) -> Option<&str> {
        match self.uris.as_slice() {
            [uri] if uri.starts_with("spiffe://") => Some(uri),
            _ => None,
        }
    }

    /// Returns the fingerprint in lower-case hexadecimal digits.
    #[must_use]
    pub fn fingerprint_hex(&self) -> String {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let digits = self.fingerprint.iter().flat_map(|byte| [byte >> 4, byte & 15]);
        digits.map(|digit| char::from(DIGITS[usize::from(digit)])).collect()
    }
}

/// Address of a connection's peer, and its certificate. Handlers get it as `ConnectInfo<PeerAddr>` from a
/// [`TlsListener`] and from a [`crate::PlainListener`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerAddr {
    /// The client's address; for a listener, the listener's own.
    pub addr: SocketAddr,
    /// Identity from the client's verified certificate; `None` when the client showed none.
    pub certificate: Option<Arc<ClientIdentity>>,
}

impl fmt::Display for PeerAddr {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.addr)
    }
}

impl Connected<IncomingStream<'_, TlsListener>> for PeerAddr {
    fn connect_info(stream: IncomingStream<'_, TlsListener>) -> Self {
        stream.remote_addr().clone()
    }
}
