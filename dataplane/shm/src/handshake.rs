//! What each side sends when a connection is made: an opening, then a hello of eight bytes, a proof and four descriptors
//! (`dataplane_fabric::auth`). And who the other side is.
//!
//! The connecting side speaks first; the accepting side makes nothing for it before it has proved that it holds the same
//! secret. The proof is over the inode numbers of slab, rings and word too (stat(2)): whoever passes a hello on cannot put
//! other memory into it. (All eventfds have one inode: a wake-up could be diverted.)

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use dataplane_fabric::auth::{Authentication, OPENING_BYTES, PROOF_BYTES, SharedKey};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use crate::ShmError;

const MAGIC: [u8; 8] = *b"KVSRSHM\0";
const DESCRIPTORS: usize = 4;
const HELLO_BYTES: usize = MAGIC.len() + PROOF_BYTES;

/// What a peer gives us.
pub(crate) struct Hello {
    pub(crate) slab: OwnedFd,
    pub(crate) rings: OwnedFd,
    pub(crate) word: OwnedFd,
    pub(crate) eventfd: OwnedFd,
}

/// Sends an opening. The socket is fresh, so its buffer takes it.
pub(crate) fn send_opening(socket: &OwnedFd, opening: &[u8; OPENING_BYTES]) -> Result<(), ShmError> {
    match rustix::net::send(socket, opening, SendFlags::NOSIGNAL) {
        Ok(OPENING_BYTES) => Ok(()),
        _ => Err(ShmError::Handshake("the peer went away")),
    }
}

/// Takes the peer's opening if it has come; `None` when not yet.
pub(crate) fn receive_opening(socket: &OwnedFd) -> Result<Option<[u8; OPENING_BYTES]>, ShmError> {
    let mut opening = [0; OPENING_BYTES];
    match rustix::net::recv(socket, &mut opening, RecvFlags::DONTWAIT) {
        Ok((OPENING_BYTES, _)) => Ok(Some(opening)),
        Ok((0, _)) => Err(ShmError::Handshake("the peer closed the connection")),
        Ok(_) => Err(ShmError::Handshake("not a peer of ours")),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(_) => Err(ShmError::Handshake("the peer went away")),
    }
}

/// Descriptors of memory, which come first: slab, rings and word.
const MEMORIES: usize = 3;

/// What the proof of a hello is over: its magic, and device and inode of each memory. Only memory that is sealed is looked at:
/// a stranger's descriptor could be a file of a file system that does not answer.
fn proved(memories: [BorrowedFd<'_>; MEMORIES]) -> Result<[u8; MAGIC.len() + MEMORIES * 16], ShmError> {
    let mut bytes = [0; MAGIC.len() + MEMORIES * 16];
    let (magic, identities) = bytes.split_at_mut(MAGIC.len());
    magic.copy_from_slice(&MAGIC);
    for (identity, descriptor) in identities.chunks_exact_mut(16).zip(memories) {
        rustix::fs::fcntl_get_seals(descriptor).map_err(|_| ShmError::Handshake("it did not send memory"))?;
        let stat = rustix::fs::fstat(descriptor).map_err(ShmError::system("fstat"))?;
        let (device, inode) = identity.split_at_mut(8);
        device.copy_from_slice(&stat.st_dev.to_le_bytes());
        inode.copy_from_slice(&stat.st_ino.to_le_bytes());
    }
    Ok(bytes)
}

/// Sends our descriptors: slab, rings, doorbell word, eventfd. The socket is fresh, so its buffer takes them.
pub(crate) fn send(
    socket: &OwnedFd,
    descriptors: [BorrowedFd<'_>; DESCRIPTORS],
    authentication: &Authentication,
    key: &SharedKey,
) -> Result<(), ShmError> {
    let proof = authentication
        .prove(key, &proved([descriptors[0], descriptors[1], descriptors[2]])?)
        .map_err(ShmError::Auth)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let pushed = control.push(SendAncillaryMessage::ScmRights(&descriptors));
    assert!(pushed, "the buffer was sized for four descriptors");
    let parts = [IoSlice::new(&MAGIC), IoSlice::new(&proof)];
    match rustix::net::sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL) {
        Ok(HELLO_BYTES) => Ok(()),
        _ => Err(ShmError::Handshake("the peer went away")),
    }
}

/// Takes the peer's hello if it has come, and checks its proof; `None` when not yet.
pub(crate) fn receive(
    socket: &OwnedFd,
    authentication: &Authentication,
    key: &SharedKey,
) -> Result<Option<Hello>, ShmError> {
    let mut hello = [0; HELLO_BYTES];
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
        return Err(ShmError::Handshake("the peer closed the connection; one with another secret does so"));
    }
    let mut descriptors = Vec::with_capacity(DESCRIPTORS);
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    let proof = hello.last_chunk::<PROOF_BYTES>().filter(|_| received.bytes == HELLO_BYTES);
    let Some(proof) = proof.filter(|_| hello[..MAGIC.len()] == MAGIC) else {
        return Err(ShmError::Handshake("not a peer of ours"));
    };
    let [slab, rings, word, eventfd] = <[OwnedFd; DESCRIPTORS]>::try_from(descriptors).map_err(|_| {
        ShmError::Handshake("it did not send four descriptors, or there were none left for them here")
    })?;
    let proved = proved([slab.as_fd(), rings.as_fd(), word.as_fd()])?;
    authentication.check(key, &proved, proof).map_err(ShmError::Auth)?;
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
