//! The server side: loads the files and makes handshakes.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::SingleCertAndKey;
use rustls::version::{TLS12, TLS13};
use rustls::{RootCertStore, ServerConfig};
use tokio_rustls::TlsAcceptor;

use crate::config::{Alpn, ClientCertificate, ServerTlsConfig};
use crate::error::TlsError;
use crate::identity::{ClientIdentity, PeerAddr};
use crate::material;
use crate::reload::{Loaded, ReloadCounts, Reloadable};
use crate::socket::ClientSocket;

/// A connection of a client, after its handshake.
pub type ServerStream = tokio_rustls::server::TlsStream<ClientSocket>;

/// Outcomes of handshakes, since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HandshakeCounts {
    /// Handshakes that became a connection.
    pub completed: u64,
    /// Handshakes that the client or this side refused.
    pub failed: u64,
    /// Handshakes that exceeded their time, including those aborted at the limit.
    pub timed_out: u64,
    /// Accepts that failed, for example when file descriptors were used up.
    pub accept_errors: u64,
}

/// The counters behind [`HandshakeCounts`]; they synchronise nothing.
#[derive(Default)]
pub(crate) struct HandshakeCounters {
    pub(crate) completed: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) timed_out: AtomicU64,
    pub(crate) accept_errors: AtomicU64,
}

/// A listener's certificate and its requirements on clients. Shared by its handshakes.
pub struct ServerTls {
    files: Arc<Reloadable<ServerConfig>>,
    pub(crate) tally: HandshakeCounters,
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("ServerTls").field("counts", &self.counts()).finish_non_exhaustive()
    }
}

impl ServerTls {
    /// Reads and checks the files. Blocking.
    ///
    /// # Errors
    ///
    /// A file that cannot be read or has wrong contents, a key of another certificate, or settings that
    /// contradict each other.
    pub fn load(config: &ServerTlsConfig) -> Result<Arc<Self>, TlsError> {
        let mut files = vec![config.certificate_file.clone(), config.key_file.clone()];
        files.extend(config.client_ca_file.clone());
        let config = config.clone();
        let files = Reloadable::load("server", files, Box::new(move || build(&config)))?;
        Ok(Arc::new(Self { files, tally: HandshakeCounters::default() }))
    }

    /// Reads all files again. Later handshakes use them; existing connections continue unchanged. Blocking.
    ///
    /// # Errors
    ///
    /// As [`Self::load`]; the previous files stay in use.
    pub fn reload(&self) -> Result<(), TlsError> {
        self.files.reload()
    }

    /// Checks the files periodically, and reloads when one has changed, also by a symbolic link in its
    /// path. To be spawned; it ends only with its task.
    pub async fn watch(self: Arc<Self>, every: Duration) {
        self.files.clone().watch(every).await;
    }

    /// Returns the end of the certificate's validity, in seconds since 1970.
    #[must_use]
    pub fn expires_unix(&self) -> u64 {
        // A server always has a certificate.
        self.files.expires_unix().unwrap_or(0)
    }

    /// Returns how often the files were read again.
    #[must_use]
    pub fn reloads(&self) -> ReloadCounts {
        self.files.counts()
    }

    /// Returns the outcomes of handshakes, over all listeners that share this.
    #[must_use]
    pub fn counts(&self) -> HandshakeCounts {
        HandshakeCounts {
            completed: self.tally.completed.load(Ordering::Relaxed),
            failed: self.tally.failed.load(Ordering::Relaxed),
            timed_out: self.tally.timed_out.load(Ordering::Relaxed),
            accept_errors: self.tally.accept_errors.load(Ordering::Relaxed),
        }
    }

    pub(crate) async fn handshake(
        &self,
        tcp: ClientSocket,
        addr: SocketAddr,
    ) -> io::Result<(ServerStream, PeerAddr)> {
        let stream = TlsAcceptor::from(self.files.config()).accept(tcp).await?;
        let certificate = match stream.get_ref().1.peer_certificates().and_then(<[_]>::first) {
            None => None,
            Some(certificate) => {
                let identity = ClientIdentity::read(certificate)
                    .ok_or_else(|| io::Error::other("the client's certificate cannot be read"))?;
                Some(Arc::new(identity))
            }
        };
        Ok((stream, PeerAddr { addr, certificate }))
    }
}

fn build(config: &ServerTlsConfig) -> Result<Loaded<ServerConfig>, TlsError> {
    let provider = material::provider();
    let (key, expires_unix) = material::certified_key(&config.certificate_file, &config.key_file, &provider)?;
    let verifier = client_verifier(config)?;
    let builder = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13, &TLS12])
        .map_err(TlsError::config)?;
    let builder = match verifier {
        None => builder.with_no_client_auth(),
        Some(verifier) => builder.with_client_cert_verifier(verifier),
    };
    let mut tls = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(key)));
    tls.alpn_protocols = config.alpn.iter().copied().map(Alpn::to_wire).collect();
    if config.client_certificate == ClientCertificate::Off {
        tls.ticketer = rustls::crypto::aws_lc_rs::Ticketer::new().map_err(TlsError::config)?;
    } else {
        // rustls resumes a session without verifying the client's certificate again, for up to 12 hours. A
        // certificate that expires after an hour, as SPIFFE's do, must not give access for longer than
        // that.
        tls.session_storage = Arc::new(NoServerSessionStorage {});
        tls.send_tls13_tickets = 0;
    }
    Ok(Loaded { config: Arc::new(tls), expires_unix: Some(expires_unix) })
}

fn client_verifier(config: &ServerTlsConfig) -> Result<Option<Arc<dyn ClientCertVerifier>>, TlsError> {
    let file = match (&config.client_ca_file, config.client_certificate) {
        (None, ClientCertificate::Off) => return Ok(None),
        (Some(_), ClientCertificate::Off) => {
            return Err(TlsError::config(
                "there are roots for clients' certificates, but none are asked for",
            ));
        }
        (None, _) => {
            return Err(TlsError::config(
                "clients' certificates are asked for, but there are no roots for them",
            ));
        }
        (Some(file), _) => file,
    };
    let mut roots = RootCertStore::empty();
    material::add_roots(&mut roots, file)?;
    let mut builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), material::provider());
    if config.client_certificate == ClientCertificate::Optional {
        builder = builder.allow_unauthenticated();
    }
    builder.build().map(Some).map_err(TlsError::config)
}
