//! Sockets: made, tuned, named, aborted.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, sockopt};

use crate::TcpConfig;

const BACKLOG: i32 = 1024;
/// Buffers of a connection that does not leave this host, where the kernel would make them megabytes: what is sent is
/// read again while it is in the cache. Measured over loopback: 6.0 GB/s against 3.6 at 1 MiB pieces, 6.1 against 3.8 at
/// 16 MiB. A path with a delay needs larger ones, which the kernel finds by itself.
const LOCAL_SEND_BYTES: usize = 256 << 10;
const LOCAL_RECEIVE_BYTES: usize = 512 << 10;

/// Makes a socket, which does not block until its handshake is over.
pub(crate) fn new_socket(address: &SocketAddr) -> rustix::io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
}

/// A socket that listens. Its buffer sizes pass to what it accepts, before the window scale is agreed on.
pub(crate) fn listener(address: &SocketAddr, config: &TcpConfig) -> rustix::io::Result<OwnedFd> {
    let socket = new_socket(address)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    size_buffers(&socket, config, address.ip().is_loopback());
    rustix::net::bind(&socket, address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Whether both ends of an accepted connection are on this host.
pub(crate) fn is_local(socket: &OwnedFd) -> bool {
    let ip = |name| SocketAddr::try_from(name).ok().map(|address| address.ip());
    let here = rustix::net::getsockname(socket).ok().and_then(ip);
    let there = rustix::net::getpeername(socket).ok().flatten().and_then(ip);
    there.is_some_and(|there| here == Some(there) || there.is_loopback())
}

/// Options of every connection. A kernel without one of them still moves bytes.
pub(crate) fn tune(socket: &OwnedFd, config: &TcpConfig, is_local: bool) {
    let dead_after = config.peer_dead_after;
    let _default = sockopt::set_tcp_nodelay(socket.as_fd(), true);
    let _default = sockopt::set_tcp_user_timeout(socket.as_fd(), dead_after.as_millis() as u32);
    let _default = sockopt::set_socket_keepalive(socket.as_fd(), true);
    let _default = sockopt::set_tcp_keepidle(socket.as_fd(), (dead_after / 2).max(Duration::from_secs(1)));
    let _default = sockopt::set_tcp_keepintvl(socket.as_fd(), (dead_after / 8).max(Duration::from_secs(1)));
    size_buffers(socket, config, is_local);
}

/// Forced sizes (CAP_NET_ADMIN) may pass `net.core.{w,r}mem_max`; others are cut to it by the kernel.
fn size_buffers(socket: &OwnedFd, config: &TcpConfig, is_local: bool) {
    let or_local =
        |configured: usize, local: usize| if configured == 0 && is_local { local } else { configured };
    let send = or_local(config.send_buffer_bytes, LOCAL_SEND_BYTES);
    let receive = or_local(config.receive_buffer_bytes, LOCAL_RECEIVE_BYTES);
    if send > 0 && sockopt::set_socket_send_buffer_size_force(socket, send / 2).is_err() {
        let _default = sockopt::set_socket_send_buffer_size(socket, send / 2);
    }
    if receive > 0 && sockopt::set_socket_recv_buffer_size_force(socket, receive / 2).is_err() {
        let _default = sockopt::set_socket_recv_buffer_size(socket, receive / 2);
    }
}

/// Ends a connection at once: what the peer has not got yet is dropped, and operations in flight end.
pub(crate) fn abort(socket: &OwnedFd) {
    // Dissolving the association sends a reset (tcp_disconnect in net/ipv4/tcp.c) and purges the send queue.
    let _unconnected = rustix::net::connect_unspec(socket);
    let _unconnected = rustix::net::shutdown(socket, Shutdown::Both);
}
