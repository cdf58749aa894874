//! The one message that each side sends when a connection is made: eight bytes and four descriptors. And who
//! the other side is.
//!
//! The connecting side speaks first; the accepting side makes nothing for it before it has spoken.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use crate::ShmError;

/// Version 2 of the layout of rings, doorbell and this message.
const MAGIC: [u8; 8] = *b"KVSRSHM2";
const DESCRIPTORS: usize = 4;

/// What a peer gives us.
pub(crate) struct Hello {
    pub(crate) slab: OwnedFd,
    pub(crate) rings: OwnedFd,
    pub(crate) word: OwnedFd,
    pub(crate) eventfd: OwnedFd,
}

/// Sends our descriptors: slab, rings, doorbell word, eventfd. The socket is fresh, so its buffer takes them.
pub(crate) fn send(socket: &OwnedFd, descriptors: [BorrowedFd<'_>; DESCRIPTORS]) -> Result<(), ShmError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let pushed = control.push(SendAncillaryMessage::ScmRights(&descriptors));
    assert!(pushed, "the buffer was sized for four descriptors");
    rustix::net::sendmsg(socket, &[IoSlice::new(&MAGIC)], &mut control, SendFlags::NOSIGNAL)
        .map(drop)
        .map_err(|_| ShmError::Handshake("the peer went away"))
}

/// Takes the peer's hello if it has come; `None` when not yet.
pub(crate) fn receive(socket: &OwnedFd) -> Result<Option<Hello>, ShmError> {
    let mut hello = [0; MAGIC.len()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut hello)], &mut control, flags)
    {
        Ok(received) => received,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(_) => return Err(ShmError::Handshake("the peer went away")),
    };
    if received.bytes == 0 {
        return Err(ShmError::Handshake("the peer closed the connection"));
    }
    let mut descriptors = Vec::with_capacity(DESCRIPTORS);
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.bytes != MAGIC.len() || hello != MAGIC {
        return Err(ShmError::Handshake("not a peer of this version"));
    }
    let [slab, rings, word, eventfd] = <[OwnedFd; DESCRIPTORS]>::try_from(descriptors).map_err(|_| {
        ShmError::Handshake("it did not send four descriptors, or there were none left for them here")
    })?;
    Ok(Some(Hello { slab, rings, word, eventfd }))
}

/// Who is on the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Credentials {
    /// 0 when the process is not visible in our PID namespace.
    pub(crate) pid: i32,
    /// The effective user when it connected or listened.
    pub(crate) uid: u32,
}

/// Reads `SO_PEERCRED` (unix(7)). Not through rustix, whose process id cannot be 0.
pub(crate) fn credentials(socket: &OwnedFd) -> Result<Credentials, ShmError> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the descriptor is owned; value and length point to live locals of the type and size that
    // SO_PEERCRED fills.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        let errno = Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL);
        return Err(ShmError::system("getsockopt(SO_PEERCRED)")(errno));
    }
    Ok(Credentials { pid: found.pid, uid: found.uid })
}

/// Refuses another user's process when that is asked for.
pub(crate) fn admit(socket: &OwnedFd, same_user_only: bool) -> Result<Credentials, ShmError> {
    let peer = credentials(socket)?;
    if same_user_only && peer.uid != rustix::process::geteuid().as_raw() {
        return Err(ShmError::OtherUser { pid: peer.pid, uid: peer.uid });
    }
    Ok(peer)
}
