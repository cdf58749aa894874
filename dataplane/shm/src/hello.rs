//! The hello of each side of a new connection: eight bytes, and four descriptors, of which three are memory.
//!
//! The proof of a hello also covers device and inode number of slab, rings and word (stat(2)): a process
//! that relays a hello cannot substitute other memory. (All eventfds have one inode: a wake-up could be
//! diverted.)

use std::os::fd::{BorrowedFd, OwnedFd};

use dataplane_fabric::handshake::FrameDescriptors;

use crate::ShmError;

pub(crate) const MAGIC: [u8; 8] = *b"KVSRSHM\0";
/// Slab, rings, doorbell word, eventfd.
const COUNT: usize = 4;
/// Number of leading descriptors that are memory.
const MEMORIES: usize = 3;
pub(crate) const DESCRIPTORS: FrameDescriptors = FrameDescriptors { count: COUNT, identify };

/// Descriptors received from a peer.
pub(crate) struct Hello {
    pub(crate) slab: OwnedFd,
    pub(crate) rings: OwnedFd,
    pub(crate) word: OwnedFd,
    pub(crate) eventfd: OwnedFd,
}

impl Hello {
    pub(crate) fn take(frame: &[u8], descriptors: Vec<OwnedFd>) -> Result<Self, ShmError> {
        let descriptors = <[OwnedFd; COUNT]>::try_from(descriptors).ok().filter(|_| frame == MAGIC);
        let [slab, rings, word, eventfd] = descriptors.ok_or(ShmError::Handshake("not a peer of ours"))?;
        Ok(Self { slab, rings, word, eventfd })
    }
}

/// Adds device and inode of each memory. Only sealed memory is examined: a stranger's descriptor could be a
/// file of a file system that does not respond.
fn identify(descriptors: &[BorrowedFd<'_>], covered: &mut Vec<u8>) -> Result<(), String> {
    for descriptor in descriptors.iter().take(MEMORIES) {
        rustix::fs::fcntl_get_seals(descriptor).map_err(|_| "it did not send memory".to_owned())?;
        let stat = rustix::fs::fstat(descriptor).map_err(|errno| format!("fstat: {errno}"))?;
        covered.extend(stat.st_dev.to_le_bytes());
        covered.extend(stat.st_ino.to_le_bytes());
    }
    Ok(())
}
