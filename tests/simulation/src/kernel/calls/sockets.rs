//! Sockets.

use std::ffi::{c_int, c_void};
use std::net::Ipv4Addr;

use super::super::connections::WINDOW;
use super::super::objects::{Kind, ObjectId};
use super::super::sockets::{Address, Socket, SocketState};
use super::super::threads::{current, preemption_point};
use super::super::{MILLISECOND, Nanos, SECOND, real, with};
use super::descriptors::{object, until_possible, waits};
use super::{fail, given, outcome, slices};

#[unsafe(no_mangle)]
unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    if current().is_none() {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::SOCKET.get()(domain, kind, protocol) };
    }
    let is_inet = match domain {
        libc::AF_INET => true,
        libc::AF_UNIX => false,
        _ => return fail(libc::EAFNOSUPPORT),
    };
    if kind & 0xF != libc::SOCK_STREAM {
        return fail(libc::EPROTONOSUPPORT);
    }
    with(|kernel| {
        let socket = Socket::new(is_inet, kernel.host(), kernel.process());
        kernel.open(Kind::Socket(Box::new(socket)), kind & libc::SOCK_NONBLOCK != 0)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn socketpair(domain: c_int, kind: c_int, protocol: c_int, pair: *mut c_int) -> c_int {
    if current().is_none() {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::SOCKETPAIR.get()(domain, kind, protocol, pair) };
    }
    let descriptors = with(|kernel| {
        let (first, second) = kernel.pair();
        [first, second].map(|id| {
            if let Some(object) = kernel.objects.get_mut(&id) {
                object.is_nonblocking = kind & libc::SOCK_NONBLOCK != 0;
            }
            kernel.add_descriptor(id)
        })
    });
    // SAFETY: the caller gives room for two.
    let room = unsafe { std::slice::from_raw_parts_mut(pair, 2) };
    room.copy_from_slice(&descriptors);
    0
}

/// # Safety
/// The pointer points to an address of this length.
unsafe fn address_of(address: *const libc::sockaddr, length: libc::socklen_t) -> Option<Address> {
    // SAFETY: as the caller warrants.
    let family = c_int::from(unsafe { given(address) }?.sa_family);
    match family {
        libc::AF_INET => {
            // SAFETY: an address of this family has this form.
            let inet = unsafe { given(address.cast::<libc::sockaddr_in>()) }?;
            Some(Address::Inet(
                Ipv4Addr::from(u32::from_be(inet.sin_addr.s_addr)),
                u16::from_be(inet.sin_port),
            ))
        }
        libc::AF_UNIX => {
            let bytes = (length as usize).saturating_sub(size_of::<libc::sa_family_t>());
            // SAFETY: the path follows the family.
            let path = unsafe { address.cast::<u8>().add(size_of::<libc::sa_family_t>()) };
            // SAFETY: the path has the rest of the length.
            let path = unsafe { std::slice::from_raw_parts(path, bytes) };
            let is_abstract = path.first() == Some(&0);
            let end =
                if is_abstract { bytes } else { path.iter().position(|byte| *byte == 0).unwrap_or(bytes) };
            Some(Address::Path(path[..end].to_vec()))
        }
        _ => None,
    }
}

/// # Safety
/// There is room for an address of the length that is given, or both pointers are null.
unsafe fn write_address(
    address: Option<&Address>,
    is_inet: bool,
    room: *mut libc::sockaddr,
    length: *mut libc::socklen_t,
) {
    // SAFETY: as the caller warrants.
    let Some(length) = (unsafe { length.as_mut() }) else { return };
    if room.is_null() {
        return;
    }
    let mut bytes = Vec::with_capacity(110);
    match address {
        Some(Address::Inet(ip, port)) => {
            bytes.extend((libc::AF_INET as libc::sa_family_t).to_ne_bytes());
            bytes.extend(port.to_be_bytes());
            bytes.extend(ip.octets());
            bytes.extend([0; 8]);
        }
        None if is_inet => {
            bytes.extend((libc::AF_INET as libc::sa_family_t).to_ne_bytes());
            bytes.extend([0; 14]);
        }
        Some(Address::Path(path)) => {
            bytes.extend((libc::AF_UNIX as libc::sa_family_t).to_ne_bytes());
            bytes.extend(path);
            bytes.push(0);
        }
        None => bytes.extend((libc::AF_UNIX as libc::sa_family_t).to_ne_bytes()),
    }
    let count = bytes.len().min(*length as usize);
    // SAFETY: as the caller warrants.
    let room = unsafe { std::slice::from_raw_parts_mut(room.cast::<u8>(), count) };
    room.copy_from_slice(&bytes[..count]);
    *length = bytes.len() as libc::socklen_t;
}

#[unsafe(no_mangle)]
unsafe extern "C" fn bind(
    descriptor: c_int,
    address: *const libc::sockaddr,
    length: libc::socklen_t,
) -> c_int {
    let Some(id) = object(descriptor) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::BIND.get()(descriptor, address, length) };
    };
    // SAFETY: the caller gives an address of this length.
    let Some(address) = (unsafe { address_of(address, length) }) else { return fail(libc::EAFNOSUPPORT) };
    status(with(|kernel| kernel.bind(id, address)))
}

fn status(result: Result<(), c_int>) -> c_int {
    result.map_or_else(fail, |()| 0)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn listen(descriptor: c_int, backlog: c_int) -> c_int {
    let Some(id) = object(descriptor) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::LISTEN.get()(descriptor, backlog) };
    };
    status(with(|kernel| kernel.listen(id, backlog)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn connect(
    descriptor: c_int,
    address: *const libc::sockaddr,
    length: libc::socklen_t,
) -> c_int {
    let Some(id) = object(descriptor) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::CONNECT.get()(descriptor, address, length) };
    };
    // SAFETY: the caller gives an address.
    if unsafe { given(address) }.is_some_and(|address| c_int::from(address.sa_family) == libc::AF_UNSPEC) {
        with(|kernel| kernel.abort(id));
        return 0;
    }
    // SAFETY: the caller gives an address of this length.
    let Some(address) = (unsafe { address_of(address, length) }) else { return fail(libc::EAFNOSUPPORT) };
    let is_inet = matches!(address, Address::Inet(..));
    if let Err(errno) = with(|kernel| kernel.connect(id, address)) {
        return fail(errno);
    }
    // A connection within the host is there at once, or never.
    if !is_inet {
        with(|kernel| kernel.catch_up());
    } else if !waits(id) {
        return fail(libc::EINPROGRESS);
    }
    let connected = until_possible(id, true, 0, || {
        with(|kernel| match kernel.socket(id) {
            Some(Socket { state: SocketState::Connecting { .. }, .. }) => Err(libc::EAGAIN),
            Some(Socket { state: SocketState::Failed, error, .. }) => Err(std::mem::replace(error, 0)),
            _ => Ok(0),
        })
    });
    outcome(connected) as c_int
}

#[unsafe(no_mangle)]
unsafe extern "C" fn accept4(
    descriptor: c_int,
    room: *mut libc::sockaddr,
    length: *mut libc::socklen_t,
    flags: c_int,
) -> c_int {
    let Some(id) = object(descriptor) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::ACCEPT4.get()(descriptor, room, length, flags) };
    };
    let mut accepted = None;
    let found = until_possible(id, waits(id), 0, || {
        accepted = Some(with(|kernel| kernel.accept(id))?);
        Ok(0)
    });
    let Some(accepted) = accepted.filter(|_| found.is_ok()) else { return outcome(found) as c_int };
    let (descriptor, remote, is_inet) = with(|kernel| {
        if let Some(object) = kernel.objects.get_mut(&accepted) {
            object.is_nonblocking = flags & libc::SOCK_NONBLOCK != 0;
        }
        let (remote, is_inet) =
            kernel.socket(accepted).map_or((None, true), |socket| (socket.remote.clone(), socket.is_inet));
        (kernel.add_descriptor(accepted), remote, is_inet)
    });
    // SAFETY: the caller gives room for an address, or none.
    unsafe { write_address(remote.as_ref(), is_inet, room, length) };
    descriptor
}

#[unsafe(no_mangle)]
unsafe extern "C" fn accept(
    descriptor: c_int,
    room: *mut libc::sockaddr,
    length: *mut libc::socklen_t,
) -> c_int {
    // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
    unsafe { accept4(descriptor, room, length, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn getsockname(
    descriptor: c_int,
    room: *mut libc::sockaddr,
    length: *mut libc::socklen_t,
) -> c_int {
    let Some(id) = object(descriptor) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::GETSOCKNAME.get()(descriptor, room, length) };
    };
    let local = with(|kernel| kernel.socket(id).map(|socket| (socket.local.clone(), socket.is_inet)));
    let Some((local, is_inet)) = local else { return fail(libc::ENOTSOCK) };
    // SAFETY: the caller gives room for an address.
    unsafe { write_address(local.as_ref(), is_inet, room, length) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn getpeername(
    descriptor: c_int,
    room: *mut libc::sockaddr,
    length: *mut libc::socklen_t,
) -> c_int {
    let Some(id) = object(descriptor) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::GETPEERNAME.get()(descriptor, room, length) };
    };
    let remote = with(|kernel| match kernel.socket(id) {
        Some(Socket { state: SocketState::Open(_), remote, is_inet, .. }) => Some((remote.clone(), *is_inet)),
        _ => None,
    });
    let Some((remote, is_inet)) = remote else { return fail(libc::ENOTCONN) };
    // SAFETY: the caller gives room for an address.
    unsafe { write_address(remote.as_ref(), is_inet, room, length) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn getsockopt(
    descriptor: c_int,
    level: c_int,
    name: c_int,
    room: *mut c_void,
    length: *mut libc::socklen_t,
) -> c_int {
    let Some(id) = object(descriptor) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::GETSOCKOPT.get()(descriptor, level, name, room, length) };
    };
    let value = match (level, name) {
        (libc::SOL_SOCKET, libc::SO_ERROR) => {
            with(|kernel| kernel.socket(id).map_or(0, |socket| std::mem::replace(&mut socket.error, 0)))
        }
        (libc::SOL_SOCKET, libc::SO_TYPE) => libc::SOCK_STREAM,
        (libc::SOL_SOCKET, libc::SO_SNDBUF | libc::SO_RCVBUF) => 128 << 10,
        (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => {
            let listens = |socket: &mut Socket| matches!(socket.state, SocketState::Listening { .. });
            c_int::from(with(|kernel| kernel.socket(id).is_some_and(listens)))
        }
        // Times, lingering and what is known of a connection: nothing was set, nothing is known.
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO | libc::SO_SNDTIMEO | libc::SO_LINGER) => 0,
        (libc::IPPROTO_TCP, libc::TCP_INFO) => return fail(libc::ENOPROTOOPT),
        _ => 0,
    };
    // SAFETY: the caller gives the length of its room.
    let Some(length) = (unsafe { length.as_mut() }) else { return fail(libc::EFAULT) };
    // SAFETY: the caller gives room of this length.
    let room = unsafe { std::slice::from_raw_parts_mut(room.cast::<u8>(), *length as usize) };
    room.fill(0);
    let bytes = value.to_ne_bytes();
    let count = bytes.len().min(room.len());
    room[..count].copy_from_slice(&bytes[..count]);
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn setsockopt(
    descriptor: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: libc::socklen_t,
) -> c_int {
    let Some(id) = object(descriptor) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::SETSOCKOPT.get()(descriptor, level, name, value, length) };
    };
    let duration =
        |value: &libc::timeval| -> Nanos { value.tv_sec as u64 * SECOND + value.tv_usec as u64 * 1000 };
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_REUSEPORT) => {
            // SAFETY: the value of this option is a number.
            let shares = unsafe { given(value.cast::<c_int>()) }.is_some_and(|value| *value != 0);
            with(|kernel| {
                if let Some(socket) = kernel.socket(id) {
                    socket.shares_port = shares;
                }
            });
        }
        (libc::SOL_SOCKET, libc::SO_RCVBUF) => {
            // SAFETY: the value of this option is a number.
            let bytes = unsafe { given(value.cast::<c_int>()) }.map_or(0, |value| *value as usize);
            with(|kernel| {
                if let Some(socket) = kernel.socket(id) {
                    socket.receive_buffer = bytes.clamp(1, WINDOW);
                }
            });
        }
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE)
        | (
            libc::IPPROTO_TCP,
            libc::TCP_KEEPIDLE | libc::TCP_KEEPINTVL | libc::TCP_KEEPCNT | libc::TCP_USER_TIMEOUT,
        ) => {
            // SAFETY: the values of these options are numbers.
            let number = unsafe { given(value.cast::<c_int>()) }.map_or(0, |value| *value as u64);
            with(|kernel| {
                let Some(socket) = kernel.socket(id) else { return };
                match (level, name) {
                    (libc::SOL_SOCKET, _) => socket.keep_alive.is_on = number != 0,
                    (_, libc::TCP_KEEPIDLE) => socket.keep_alive.idle = number * SECOND,
                    (_, libc::TCP_KEEPINTVL) => socket.keep_alive.interval = number * SECOND,
                    (_, libc::TCP_KEEPCNT) => socket.keep_alive.probes = number,
                    _ => socket.user_timeout = number * MILLISECOND,
                }
            });
        }
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO | libc::SO_SNDTIMEO) => {
            // SAFETY: the value of this option is a time.
            let limit = unsafe { given(value.cast::<libc::timeval>()) }.map_or(0, duration);
            with(|kernel| match kernel.socket(id) {
                Some(socket) if name == libc::SO_RCVTIMEO => socket.receive_timeout = limit,
                Some(socket) => socket.send_timeout = limit,
                None => {}
            });
        }
        _ => {}
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn shutdown(descriptor: c_int, how: c_int) -> c_int {
    let Some(id) = object(descriptor) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::SHUTDOWN.get()(descriptor, how) };
    };
    let (reads, writes) = (how != libc::SHUT_WR, how != libc::SHUT_RD);
    status(with(|kernel| kernel.shut(id, reads, writes)))
}

pub(super) fn receive(id: ObjectId, room: &mut [&mut [u8]], flags: c_int) -> isize {
    let limit = with(|kernel| kernel.socket(id).map_or(0, |socket| socket.receive_timeout));
    let may_wait = waits(id) && flags & libc::MSG_DONTWAIT == 0;
    let received = until_possible(id, may_wait, limit, || {
        with(|kernel| {
            kernel.catch_up();
            kernel.receive(id, room, flags & libc::MSG_PEEK != 0)
        })
    });
    outcome(received)
}

pub(super) fn transmit(id: ObjectId, parts: &[&[u8]], flags: c_int) -> isize {
    let limit = with(|kernel| kernel.socket(id).map_or(0, |socket| socket.send_timeout));
    let may_wait = waits(id) && flags & libc::MSG_DONTWAIT == 0;
    let sent = until_possible(id, may_wait, limit, || with(|kernel| kernel.transmit(id, parts)));
    preemption_point();
    outcome(sent)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn recv(descriptor: c_int, room: *mut c_void, bytes: usize, flags: c_int) -> isize {
    let Some(id) = object(descriptor) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::RECV.get()(descriptor, room, bytes, flags) };
    };
    // SAFETY: the caller gives room for so many bytes.
    let room = unsafe { std::slice::from_raw_parts_mut(room.cast::<u8>(), bytes) };
    receive(id, &mut [room], flags)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn recvfrom(
    descriptor: c_int,
    room: *mut c_void,
    bytes: usize,
    flags: c_int,
    _address: *mut libc::sockaddr,
    _length: *mut libc::socklen_t,
) -> isize {
    // SAFETY: the caller's own arguments; stream sockets tell no address.
    unsafe { recv(descriptor, room, bytes, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn send(descriptor: c_int, content: *const c_void, bytes: usize, flags: c_int) -> isize {
    let Some(id) = object(descriptor) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::SEND.get()(descriptor, content, bytes, flags) };
    };
    // SAFETY: the caller gives so many bytes.
    let content = unsafe { std::slice::from_raw_parts(content.cast::<u8>(), bytes) };
    transmit(id, &[content], flags)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sendto(
    descriptor: c_int,
    content: *const c_void,
    bytes: usize,
    flags: c_int,
    _address: *const libc::sockaddr,
    _length: libc::socklen_t,
) -> isize {
    // SAFETY: the caller's own arguments; stream sockets have one peer.
    unsafe { send(descriptor, content, bytes, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn recvmsg(descriptor: c_int, message: *mut libc::msghdr, flags: c_int) -> isize {
    let Some(id) = object(descriptor) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::RECVMSG.get()(descriptor, message, flags) };
    };
    // SAFETY: the caller gives a message.
    let Some(message) = (unsafe { message.as_mut() }) else { return outcome(Err(libc::EFAULT)) };
    // Neither addresses nor descriptors come along.
    (message.msg_namelen, message.msg_controllen, message.msg_flags) = (0, 0, 0);
    // SAFETY: the caller gives so much room.
    let mut room = unsafe { slices(message.msg_iov, message.msg_iovlen) };
    receive(id, &mut room, flags)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sendmsg(descriptor: c_int, message: *const libc::msghdr, flags: c_int) -> isize {
    let Some(id) = object(descriptor) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::SENDMSG.get()(descriptor, message, flags) };
    };
    // SAFETY: the caller gives a message.
    let Some(message) = (unsafe { given(message) }) else { return outcome(Err(libc::EFAULT)) };
    if message.msg_controllen > 0 {
        // Descriptors go through real sockets alone.
        return outcome(Err(libc::EOPNOTSUPP));
    }
    // SAFETY: the caller gives so many bytes.
    let contents = unsafe { slices(message.msg_iov, message.msg_iovlen) };
    let parts: Vec<&[u8]> = contents.iter().map(|part| &**part).collect();
    transmit(id, &parts, flags)
}
