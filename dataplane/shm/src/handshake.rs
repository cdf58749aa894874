//! The one message that each side sends when a connection is made: 16 bytes and three descriptors.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use crate::ShmError;

const MAGIC: u64 = u64::from_le_bytes(*b"KVSRSHM1");
const HELLO_BYTES: usize = 16;
const DESCRIPTORS: usize = 3;

/// What a peer gives us.
pub(crate) struct Hello {
    pub(crate) slab: OwnedFd,
    pub(crate) ring: OwnedFd,
    pub(crate) doorbell: OwnedFd,
}

/// Sends our descriptors: slab, ring, doorbell. The socket is fresh, so its buffer takes them at once.
pub(crate) fn send(stream: &UnixStream, descriptors: [BorrowedFd<'_>; DESCRIPTORS]) -> Result<(), Errno> {
    let mut hello = [0; HELLO_BYTES];
    hello[..8].copy_from_slice(&MAGIC.to_le_bytes());
    hello[8..12].copy_from_slice(&std::process::id().to_le_bytes());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let pushed = control.push(SendAncillaryMessage::ScmRights(&descriptors));
    assert!(pushed, "the buffer was sized for three descriptors");
    rustix::net::sendmsg(stream, &[IoSlice::new(&hello)], &mut control, SendFlags::NOSIGNAL).map(drop)
}

/// Takes the peer's hello if it has come; `None` when not yet.
pub(crate) fn receive(stream: &UnixStream) -> Result<Option<Hello>, ShmError> {
    let mut hello = [0; HELLO_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = match rustix::net::recvmsg(stream, &mut [IoSliceMut::new(&mut hello)], &mut control, flags)
    {
        Ok(received) => received,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(_) => return Err(ShmError::Handshake("the peer went away")),
    };
    if received.bytes == 0 {
        return Err(ShmError::Handshake("the peer went away"));
    }
    let mut descriptors = Vec::with_capacity(DESCRIPTORS);
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.bytes != HELLO_BYTES || hello[..8] != MAGIC.to_le_bytes() {
        return Err(ShmError::Handshake("not a peer of this version"));
    }
    let [slab, ring, doorbell] = <[OwnedFd; DESCRIPTORS]>::try_from(descriptors)
        .map_err(|_| ShmError::Handshake("it did not send three descriptors"))?;
    Ok(Some(Hello { slab, ring, doorbell }))
}
