//! The listener for administrators (`gateway.admin_listen`): metrics, status, decisions and the page, away from the port
//! that clients reach. A Unix socket for its owner, or an address of its own.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::serve::Listener;
use control_config::Settings;
use router_gateway::{Gateway, admin_router};
use router_tls::{PeerAddr, PlainListener, ServerTls, TlsListener};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinHandle;

use crate::{compose, http};

/// How long to wait when the system gives no connection.
const REST: Duration = Duration::from_millis(100);

/// Where administrators ask.
#[derive(Debug, PartialEq)]
pub(crate) enum Place {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// As configured; `None` is the API's own port.
pub(crate) fn place(settings: &Settings) -> Result<Option<Place>> {
    let Some(text) = compose::some(&settings.gateway.admin_listen) else { return Ok(None) };
    let place = match text.strip_prefix("unix:") {
        Some(path) => Place::Unix(path.into()),
        None => Place::Tcp(text.parse().with_context(|| {
            format!("gateway.admin_listen: {text:?} is neither like `127.0.0.1:9090` nor like `unix:/path`")
        })?),
    };
    Ok(Some(place))
}

impl Place {
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(address) => Some(*address),
            Self::Unix(_) => None,
        }
    }
}

/// Listens, and serves in a task until it is told to stop. Beyond loopback it speaks TLS, if the gateway does.
pub(crate) async fn start(
    place: &Place,
    gateway: &Arc<Gateway>,
    tls: Option<&Arc<ServerTls>>,
    stop: &http::Stop,
    write_timeout: Duration,
) -> Result<JoinHandle<()>> {
    let (routes, stop) = (admin_router(Arc::clone(gateway)), stop.clone());
    match place {
        Place::Unix(path) => {
            let listener = SocketListener::bind(path)
                .with_context(|| format!("gateway.admin_listen: cannot listen on {}", path.display()))?;
            Ok(tokio::spawn(http::serve(listener, routes, stop)))
        }
        Place::Tcp(address) => {
            let listener = http::bind(*address).await?;
            Ok(match tls.filter(|_| !address.ip().is_loopback()) {
                None => {
                    let listener = PlainListener::new(listener).with_write_timeout(write_timeout);
                    tokio::spawn(http::serve(listener, routes, stop))
                }
                Some(tls) => {
                    let listener =
                        TlsListener::new(listener, Arc::clone(tls)).with_write_timeout(write_timeout);
                    tokio::spawn(http::serve(listener, routes, stop))
                }
            })
        }
    }
}

/// A Unix socket that its owner alone may use. Its file goes with it.
struct SocketListener {
    socket: UnixListener,
    path: PathBuf,
}

impl SocketListener {
    fn bind(path: &Path) -> io::Result<Self> {
        let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
        let refuses = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
        // A process that was killed has left its file; one that runs answers.
        if is_socket && std::os::unix::net::UnixStream::connect(path).is_err_and(refuses) {
            std::fs::remove_file(path)?;
        }
        let socket = UnixListener::bind(path)?;
        let listener = Self { socket, path: path.to_owned() };
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        Ok(listener)
    }
}

impl Drop for SocketListener {
    fn drop(&mut self) {
        // A file that is gone already needs no removal.
        let _gone = std::fs::remove_file(&self.path);
    }
}

/// Callers of a Unix socket have no address: they are of this machine.
fn this_machine() -> PeerAddr {
    PeerAddr { addr: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), certificate: None }
}

impl Listener for SocketListener {
    type Io = UnixStream;
    type Addr = PeerAddr;

    async fn accept(&mut self) -> (UnixStream, PeerAddr) {
        loop {
            match self.socket.accept().await {
                Ok((stream, _)) => return (stream, this_machine()),
                Err(error) => {
                    tracing::error!(%error, "no connection can be accepted");
                    tokio::time::sleep(REST).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<PeerAddr> {
        Ok(this_machine())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_an_address_or_a_socket() {
        let place_of = |text: &str| {
            let parsed = control_config::parse(&format!("[gateway]\nadmin_listen = {text:?}\n"));
            place(&parsed.expect("settings"))
        };
        assert_eq!(place_of("").expect("good"), None);
        let address = "127.0.0.1:9090".parse().expect("an address");
        assert_eq!(place_of("127.0.0.1:9090").expect("good"), Some(Place::Tcp(address)));
        assert_eq!(place_of("unix:/run/k.sock").expect("good"), Some(Place::Unix("/run/k.sock".into())));
        for bad in ["9090", "/run/k.sock", "localhost:9090"] {
            let error = place_of(bad).expect_err(bad).to_string();
            assert!(error.contains("gateway.admin_listen"), "{error}");
        }
    }
}
