//! The client side: TLS over a TCP connection that the caller made.

use std::fmt;
use std::io::{self, IoSlice};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::sign::SingleCertAndKey;
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::config::{Alpn, ClientTlsConfig};
use crate::error::TlsError;
use crate::material;
use crate::reload::{Loaded, ReloadCounts, Reloadable};

/// Longest time of a handshake.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);

/// Trusted roots and own certificate of the client side. Shared by its connections.
pub struct ClientTls {
    files: Arc<Reloadable<ClientConfig>>,
    server_name: Option<ServerName<'static>>,
}

impl fmt::Debug for ClientTls {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("ClientTls").field("server_name", &self.server_name).finish_non_exhaustive()
    }
}

impl ClientTls {
    /// Reads and checks the files. Blocking.
    ///
    /// # Errors
    ///
    /// A file that cannot be read or has wrong contents, a key of another certificate, or settings that
    /// contradict each other.
    pub fn load(config: &ClientTlsConfig) -> Result<Arc<Self>, TlsError> {
        let server_name = config.server_name.as_deref().map(server_name).transpose()?;
        let files = [&config.ca_file, &config.certificate_file, &config.key_file];
        let files: Vec<PathBuf> = files.into_iter().flatten().cloned().collect();
        let config = config.clone();
        let files = Reloadable::load("client", files, Box::new(move || build(&config)))?;
        Ok(Arc::new(Self { files, server_name }))
    }

    /// Reads all files again, the system's roots as well. Later connections use them. Blocking.
    ///
    /// # Errors
    ///
    /// As [`Self::load`]; the previous files stay in use.
    pub fn reload(&self) -> Result<(), TlsError> {
        self.files.reload()
    }

    /// Checks the files periodically, and reloads when one has changed; the system's roots are not checked.
    /// To be spawned; it ends only with its task.
    pub async fn watch(self: Arc<Self>, every: Duration) {
        self.files.clone().watch(every).await;
    }

    /// Returns the end of the own certificate's validity, in seconds since 1970; `None` without one.
    #[must_use]
    pub fn expires_unix(&self) -> Option<u64> {
        self.files.expires_unix()
    }

    /// Returns how often the files were read again.
    #[must_use]
    pub fn reloads(&self) -> ReloadCounts {
        self.files.counts()
    }

    /// Makes the handshake with `host`, a name or an address; an IPv6 address may be in brackets.
    ///
    /// With TLS 1.3 a server reports that it refuses this side's certificate only after the handshake: the
    /// first read fails.
    ///
    /// # Errors
    ///
    /// [`TlsError::ServerName`], [`TlsError::Handshake`] or [`TlsError::Timeout`] after 10 s.
    pub async fn connect(&self, host: &str, tcp: TcpStream) -> Result<ClientStream, TlsError> {
        let name = match &self.server_name {
            Some(name) => name.clone(),
            None => server_name(host)?,
        };
        // A connection that is already closed needs no option.
        let _gone = tcp.set_nodelay(true);
        let connecting = TlsConnector::from(self.files.config()).connect(name, tcp);
        match timeout(HANDSHAKE_WITHIN, connecting).await {
            Ok(Ok(stream)) => Ok(ClientStream::Tls(Box::new(stream))),
            Ok(Err(source)) => Err(TlsError::Handshake { host: host.to_owned(), source }),
            Err(_) => Err(TlsError::Timeout { host: host.to_owned() }),
        }
    }
}

fn server_name(host: &str) -> Result<ServerName<'static>, TlsError> {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    ServerName::try_from(bare.to_owned()).map_err(|_| TlsError::ServerName { name: host.to_owned() })
}

fn build(config: &ClientTlsConfig) -> Result<Loaded<ClientConfig>, TlsError> {
    let provider = material::provider();
    let mut roots = RootCertStore::empty();
    if let Some(file) = &config.ca_file {
        material::add_roots(&mut roots, file)?;
    }
    if config.system_roots {
        material::add_system_roots(&mut roots)?;
    }
    if roots.is_empty() {
        return Err(TlsError::config("no roots are trusted, neither of a file nor of the system"));
    }
    let own = match (&config.certificate_file, &config.key_file) {
        (None, None) => None,
        (Some(certificate), Some(key)) => Some(material::certified_key(certificate, key, &provider)?),
        _ => return Err(TlsError::config("a client's certificate and its key go together")),
    };
    let expires_unix = own.as_ref().map(|(_, expires_unix)| *expires_unix);
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13, &TLS12])
        .map_err(TlsError::config)?
        .with_root_certificates(roots);
    let mut tls = match own {
        None => builder.with_no_client_auth(),
        Some((key, _)) => builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(key))),
    };
    tls.alpn_protocols = config.alpn.iter().copied().map(Alpn::to_wire).collect();
    Ok(Loaded { config: Arc::new(tls), expires_unix })
}

/// A connection of the client side. `http` URLs are included, so that a pool of connections has one type.
#[derive(Debug)]
pub enum ClientStream {
    /// Without TLS.
    Plain(TcpStream),
    /// With TLS.
    Tls(Box<tokio_rustls::client::TlsStream<TcpStream>>),
}

impl ClientStream {
    /// Returns the protocol that the server selected of those offered, such as `http/1.1`.
    #[must_use]
    pub fn alpn(&self) -> Option<&[u8]> {
        match self {
            Self::Plain(_) => None,
            Self::Tls(stream) => stream.get_ref().1.alpn_protocol(),
        }
    }
}

/// Calls the same method of the inner stream.
macro_rules! inside {
    ($self:ident, $method:ident $(, $argument:expr)*) => {
        match $self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).$method($($argument),*),
            Self::Tls(stream) => Pin::new(&mut **stream).$method($($argument),*),
        }
    };
}

impl AsyncRead for ClientStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        inside!(self, poll_read, context, buffer)
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        inside!(self, poll_write, context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        inside!(self, poll_write_vectored, context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        inside!(self, poll_flush, context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        inside!(self, poll_shutdown, context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_names_or_addresses() {
        for host in ["engine.example", "engine.example.", "localhost", "10.0.0.1", "::1", "[::1]"] {
            assert!(server_name(host).is_ok(), "{host}");
        }
        for host in ["", "[::1", "a b", "a:80", "-", "http://a"] {
            assert!(matches!(server_name(host), Err(TlsError::ServerName { .. })), "{host}");
        }
    }
}
