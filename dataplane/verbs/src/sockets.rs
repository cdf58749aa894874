//! The sockets of handshakes: creation, options, binding.
//!
//! A socket stays open after the handshake to detect the peer's end: the kernel reports a killed peer at
//! once, and a silent one after keepalive probes or unacknowledged bytes have waited for the configured
//! time.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::VerbsError;

/// Starts a connection.
pub(crate) fn connect(address: SocketAddr, peer_dead_after: Duration) -> std::io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    tune(&socket, peer_dead_after);
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(errno) => Err(errno.into()),
    }
}

pub(crate) fn listen(address: SocketAddr) -> Result<OwnedFd, VerbsError> {
    let failed = |error| VerbsError::System { operation: format!("listen on {address}"), error };
    TcpListener::bind(address).map(OwnedFd::from).map_err(failed)
}

/// Sets the options of every connection. A kernel that lacks one of them detects a dead peer later, or not
/// at all.
pub(crate) fn tune(socket: impl AsFd, peer_dead_after: Duration) {
    let (socket, probe_every) = (socket.as_fd(), (peer_dead_after / 4).max(Duration::from_secs(1)));
    let millis = u32::try_from(peer_dead_after.as_millis()).unwrap_or(u32::MAX);
    let results = [
        sockopt::set_tcp_nodelay(socket, true).map_err(|_| "TCP_NODELAY"),
        sockopt::set_tcp_user_timeout(socket, millis).map_err(|_| "TCP_USER_TIMEOUT"),
        sockopt::set_socket_keepalive(socket, true).map_err(|_| "SO_KEEPALIVE"),
        sockopt::set_tcp_keepidle(socket, probe_every).map_err(|_| "TCP_KEEPIDLE"),
        sockopt::set_tcp_keepintvl(socket, probe_every).map_err(|_| "TCP_KEEPINTVL"),
        sockopt::set_tcp_keepcnt(socket, 3).map_err(|_| "TCP_KEEPCNT"),
    ];
    for option in results.into_iter().filter_map(Result::err) {
        tracing::warn!(option, "the kernel refuses a socket option of the RDMA handshake");
    }
}
