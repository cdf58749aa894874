//! The administrators' listener (`gateway.admin_listen`) for metrics, status, decisions and the page,
//! separate from the port of the API: a Unix socket of the gateway's user, or a TCP address.

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

/// Pause after an accept that failed.
const REST: Duration = Duration::from_millis(100);

/// Address of the administrators' listener.
#[derive(Debug, PartialEq)]
pub(crate) enum AdminAddress {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// Parses `gateway.admin_listen`; `None`: the API's port serves administrators.
pub(crate) fn address(settings: &Settings) -> Result<Option<AdminAddress>> {
    let Some(text) = compose::some(&settings.gateway.admin_listen) else { return Ok(None) };
    let address = match text.strip_prefix("unix:") {
        Some(path) => AdminAddress::Unix(path.into()),
        None => AdminAddress::Tcp(text.parse().with_context(|| {
            format!("gateway.admin_listen: {text:?} is neither like `127.0.0.1:9090` nor like `unix:/path`")
        })?),
    };
    Ok(Some(address))
}

impl AdminAddress {
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(address) => Some(*address),
            Self::Unix(_) => None,
        }
    }
}

/// Binds the listener and serves it in a task until `stop`. Beyond loopback it uses TLS if the gateway does.
pub(crate) async fn start(
    address: &AdminAddress,
    gateway: &Arc<Gateway>,
    tls: Option<&Arc<ServerTls>>,
    stop: &http::Stop,
    write_timeout: Duration,
) -> Result<JoinHandle<()>> {
    let (routes, stop) = (admin_router(Arc::clone(gateway)), stop.clone());
    match address {
        AdminAddress::Unix(path) => {
            let listener = SocketListener::bind(path)
                .with_context(|| format!("gateway.admin_listen: cannot listen on {}", path.display()))?;
            Ok(tokio::spawn(http::serve(listener, routes, stop)))
        }
        AdminAddress::Tcp(address) => {
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

/// A Unix socket that only its owner may use. Its file is removed on drop.
struct SocketListener {
    socket: UnixListener,
    path: PathBuf,
}

impl SocketListener {
    fn bind(path: &Path) -> io::Result<Self> {
        let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
        let refuses = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
        // A killed process has left its socket file behind, which refuses connections; a live process accepts
        // them.
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
        // The file may already be gone.
        let _gone = std::fs::remove_file(&self.path);
    }
}

/// Address of the callers of a Unix socket, which have none: loopback.
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
    fn an_address_is_of_tcp_or_of_a_socket_file() {
        let address_of = |text: &str| {
            let parsed = control_config::parse(&format!("[gateway]\nadmin_listen = {text:?}\n"));
            address(&parsed.expect("settings"))
        };
        assert_eq!(address_of("").expect("good"), None);
        let address = "127.0.0.1:9090".parse().expect("an address");
        assert_eq!(address_of("127.0.0.1:9090").expect("good"), Some(AdminAddress::Tcp(address)));
        assert_eq!(
            address_of("unix:/run/k.sock").expect("good"),
            Some(AdminAddress::Unix("/run/k.sock".into()))
        );
        for bad in ["9090", "/run/k.sock", "localhost:9090"] {
            let error = address_of(bad).expect_err(bad).to_string();
            assert!(error.contains("gateway.admin_listen"), "{error}");
        }
    }
}
