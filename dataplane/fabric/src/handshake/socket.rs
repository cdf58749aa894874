//! A socket in its handshake: the opening, and frames with proofs and descriptors, read and written without blocking.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, sockopt,
};

use super::{DESCRIPTORS_MAX, HandshakeConfig, HandshakeError};
use crate::auth::{Authentication, DialledAddress, OPENING_BYTES, PROOF_BYTES, Protocol, Transport};

#[derive(Debug)]
pub(super) struct Socket {
    pub(super) descriptor: OwnedFd,
    /// Whether this side made the connection.
    pub(super) is_initiator: bool,
    /// Whether the socket was accepted and the peer's proof has not been verified.
    pub(super) is_unauthenticated: bool,
    /// Whether the failure has been reported: further input is discarded until the socket ends.
    pub(super) has_failed: bool,
    pub(super) is_watched_for_output: bool,
    /// Time by which the handshake must be complete.
    pub(super) deadline: Option<Instant>,
    authentication: Authentication,
    /// Opening of a connecting side, until the socket is connected and the opening is sent.
    opening: Option<[u8; OPENING_BYTES]>,
    /// The opening or frame that is being received, and its descriptors.
    incoming: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

/// The result of reading.
#[derive(Debug)]
pub(super) enum Incoming {
    /// Nothing is complete yet.
    Nothing,
    /// The openings are exchanged: frames may follow.
    Opened,
    /// A frame of a peer that holds the secret.
    Frame(Vec<u8>, Vec<OwnedFd>),
    Failed(HandshakeError),
    Closed(String),
}

impl Socket {
    pub(super) fn accepted(descriptor: OwnedFd, protocol: Protocol, deadline: Instant) -> Self {
        Self {
            descriptor,
            is_initiator: false,
            is_unauthenticated: true,
            has_failed: false,
            is_watched_for_output: false,
            deadline: Some(deadline),
            authentication: Authentication::accepting(protocol),
            opening: None,
            incoming: Vec::new(),
            descriptors: Vec::new(),
        }
    }

    pub(super) fn connecting(
        descriptor: OwnedFd,
        protocol: Protocol,
        deadline: Instant,
    ) -> std::io::Result<Self> {
        let (authentication, opening) =
            Authentication::connecting(protocol).map_err(std::io::Error::other)?;
        Ok(Self {
            is_initiator: true,
            is_unauthenticated: false,
            authentication,
            opening: Some(opening),
            ..Self::accepted(descriptor, protocol, deadline)
        })
    }

    pub(super) fn is_connecting(&self) -> bool {
        self.opening.is_some()
    }

    /// Whether the socket is connected and its opening is sent. An error is the reason why connecting failed.
    pub(super) fn finish_connecting(&mut self) -> Result<bool, String> {
        let Some(opening) = self.opening else { return Ok(true) };
        let failed = |errno: Errno| format!("cannot connect: {}", std::io::Error::from(errno));
        sockopt::socket_error(&self.descriptor).and_then(|outcome| outcome).map_err(failed)?;
        match rustix::net::send(&self.descriptor, &opening, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(OPENING_BYTES) => {
                self.opening = None;
                Ok(true)
            }
            Ok(_) => Err("the peer takes no bytes".to_owned()),
            // Still connecting.
            Err(Errno::AGAIN | Errno::NOTCONN | Errno::INTR) => Ok(false),
            Err(errno) => Err(failed(errno)),
        }
    }

    pub(super) fn send(
        &mut self,
        config: &HandshakeConfig,
        frame: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), String> {
        let mut covered = frame.to_vec();
        if let Some(how) = config.descriptors {
            assert_eq!(descriptors.len(), how.count, "every frame has as many descriptors");
            (how.identify)(descriptors, &mut covered)?;
        }
        let proof = self.authentication.prove(&config.key, &covered).map_err(|error| error.to_string())?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            let is_in = control.push(SendAncillaryMessage::ScmRights(descriptors));
            assert!(is_in, "at most {DESCRIPTORS_MAX} descriptors");
        }
        let parts = [IoSlice::new(frame), IoSlice::new(&proof)];
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            return match rustix::net::sendmsg(&self.descriptor, &parts, &mut control, flags) {
                Ok(count) if count == frame.len() + PROOF_BYTES => Ok(()),
                Ok(_) | Err(Errno::AGAIN) => Err("the peer takes no bytes".to_owned()),
                Err(Errno::INTR) => continue,
                Err(errno) => Err(std::io::Error::from(errno).to_string()),
            };
        }
    }

    /// Reads at most one opening or frame.
    pub(super) fn read(&mut self, config: &HandshakeConfig) -> Incoming {
        let is_agreed = self.authentication.is_agreed();
        let awaited = if is_agreed { config.frame_bytes + PROOF_BYTES } else { OPENING_BYTES };
        while self.incoming.len() < awaited {
            let taken = self.incoming.len();
            self.incoming.resize(awaited, 0);
            let received = self.receive(taken, is_agreed && config.descriptors.is_some());
            self.incoming.truncate(taken + received.unwrap_or(0));
            match received {
                Ok(0) if self.deadline.is_some() => {
                    let reason =
                        "the peer closed the connection in the handshake; one with another secret does so";
                    return Incoming::Closed(reason.to_owned());
                }
                Ok(0) => return Incoming::Closed("the peer closed the connection or died".to_owned()),
                Ok(_) if self.has_failed => {
                    self.descriptors.clear();
                    self.incoming.clear();
                    return Incoming::Nothing;
                }
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Incoming::Nothing,
                Err(errno) => return Incoming::Closed(std::io::Error::from(errno).to_string()),
            }
        }
        let whole = std::mem::take(&mut self.incoming);
        let taken = if is_agreed { self.frame(config, whole) } else { self.opening(config, &whole) };
        taken.unwrap_or_else(Incoming::Failed)
    }

    /// Reads into `incoming` from `start` on. The kernel closes descriptors that are not expected.
    fn receive(&mut self, start: usize, with_descriptors: bool) -> Result<usize, Errno> {
        let room = &mut self.incoming[start..];
        if !with_descriptors {
            return rustix::net::recv(&self.descriptor, room, RecvFlags::DONTWAIT).map(|(count, _)| count);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received =
            rustix::net::recvmsg(&self.descriptor, &mut [IoSliceMut::new(room)], &mut control, flags)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                // Surplus descriptors make the frame invalid, so at most one too many is kept.
                let more = (DESCRIPTORS_MAX + 1).saturating_sub(self.descriptors.len());
                self.descriptors.extend(rights.take(more));
            }
        }
        Ok(received.bytes)
    }

    fn opening(&mut self, config: &HandshakeConfig, bytes: &[u8]) -> Result<Incoming, HandshakeError> {
        let Some(opening) = bytes.first_chunk() else { return Ok(Incoming::Nothing) };
        let Some(dialled) = self.dialled(config.protocol.transport) else {
            return Ok(Incoming::Closed("the connection has no address any more".to_owned()));
        };
        let Some(answer) = self.authentication.opened(opening, dialled)? else { return Ok(Incoming::Opened) };
        match rustix::net::send(&self.descriptor, &answer, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(OPENING_BYTES) => Ok(Incoming::Opened),
            _ => Ok(Incoming::Closed("the peer takes no bytes".to_owned())),
        }
    }

    /// Returns the remote address of a connection that this side made, and the local address of an accepted
    /// one.
    fn dialled(&self, transport: Transport) -> Option<DialledAddress> {
        if matches!(transport, Transport::Shm | Transport::CudaIpc) {
            return Some(DialledAddress::LOCAL);
        }
        let name = if self.is_initiator {
            rustix::net::getpeername(&self.descriptor).ok().flatten()
        } else {
            rustix::net::getsockname(&self.descriptor).ok()
        };
        name.and_then(|name| SocketAddr::try_from(name).ok()).map(DialledAddress::of)
    }

    fn frame(&mut self, config: &HandshakeConfig, mut bytes: Vec<u8>) -> Result<Incoming, HandshakeError> {
        let descriptors = std::mem::take(&mut self.descriptors);
        let proof = bytes.split_off(config.frame_bytes);
        let Some(proof) = proof.first_chunk() else { return Ok(Incoming::Nothing) };
        let mut covered = bytes.clone();
        if let Some(how) = config.descriptors {
            if descriptors.len() != how.count {
                let reason = format!(
                    "it did not send {} descriptors, or there were none left for them here",
                    how.count
                );
                return Err(HandshakeError::Descriptors(reason));
            }
            let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
            (how.identify)(&borrowed, &mut covered).map_err(HandshakeError::Descriptors)?;
        }
        self.authentication.check(&config.key, &covered, proof)?;
        Ok(Incoming::Frame(bytes, descriptors))
    }
}
