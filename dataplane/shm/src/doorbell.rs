//! Sleep and wake-up of a node: a word in shared memory, and an eventfd.
//!
//! The protocol of the word is in `word.rs`. The node's thread sleeps in `poll(2)` on the eventfd and on
//! the descriptor of its sockets.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU32;

use dataplane_memory::{PageSize, Slab, SlabLayout};
use rustix::event::EventfdFlags;
use rustix::fs::OFlags;

use crate::word;
use crate::{ShmCounters, ShmError};

/// The word's memory: one cache line.
const WORD_BYTES: usize = 64;

/// The word in its shared mapping.
#[derive(Debug)]
struct Word(Slab);

impl Word {
    fn get(&self) -> &AtomicU32 {
        let cell = self.0.address(0, 0, WORD_BYTES).cast::<AtomicU32>();
        // SAFETY: the address is inside the mapping, 64-byte aligned (start of a slot), lives as long as `self`,
        // and every process accesses it atomically only.
        unsafe { cell.as_ref() }
    }
}

/// The owner's side of a doorbell.
#[derive(Debug)]
pub(crate) struct Doorbell {
    word: Word,
    eventfd: OwnedFd,
}

impl Doorbell {
    pub(crate) fn create() -> Result<Self, ShmError> {
        let layout = SlabLayout { slot_bytes: WORD_BYTES, slot_count: 1 };
        let eventfd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(ShmError::system("eventfd"))?;
        Ok(Self { word: Word(Slab::create("kvasir-doorbell", layout, PageSize::Standard)?), eventfd })
    }

    pub(crate) fn word_memory(&self) -> BorrowedFd<'_> {
        self.word.0.memory()
    }

    pub(crate) fn eventfd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }

    /// Empties the eventfd.
    pub(crate) fn drain(&self) {
        // An empty eventfd reads as EAGAIN.
        let _empty = rustix::io::read(&self.eventfd, &mut [0_u8; 8]);
    }

    /// Announces that the fabric's thread is about to sleep; the thread must check the rings after this.
    pub(crate) fn announce(&self) {
        word::announce(self.word.get());
    }

    /// Withdraws the announcement: the fabric's thread is awake.
    pub(crate) fn retract(&self) {
        word::retract(self.word.get());
    }
}

/// A peer's doorbell.
#[derive(Debug)]
pub(crate) struct RemoteDoorbell {
    word: Word,
    eventfd: OwnedFd,
}

impl RemoteDoorbell {
    /// Attaches the descriptors of a peer's doorbell. The second one must be an eventfd: a write to another
    /// file could block this thread, or have an effect for which the peer lacks permission.
    pub(crate) fn attach(word: OwnedFd, eventfd: OwnedFd) -> Result<Self, ShmError> {
        let word = Slab::attach(word)?;
        if word.layout().slot_bytes != WORD_BYTES {
            return Err(ShmError::Handshake("its doorbell has another size"));
        }
        let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&eventfd));
        if std::fs::read_link(link).ok().as_deref() != Some(std::path::Path::new("anon_inode:[eventfd]")) {
            return Err(ShmError::Handshake("its fourth descriptor is not an eventfd (or /proc is missing)"));
        }
        rustix::fs::fcntl_setfl(&eventfd, OFlags::NONBLOCK).map_err(ShmError::system("fcntl(F_SETFL)"))?;
        Ok(Self { word: Word(word), eventfd })
    }

    /// Signals the owner that records were published.
    pub(crate) fn ring(&self, counters: &ShmCounters) {
        if word::ring(self.word.get()) {
            // Fails only when the counter is at its maximum, and then the owner is awake anyway.
            let _full = rustix::io::write(&self.eventfd, &1_u64.to_ne_bytes());
            ShmCounters::count(&counters.wakes);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    fn doorbell() -> Doorbell {
        Doorbell::create().expect("doorbell")
    }

    #[test]
    fn a_word_full_of_nonsense_wakes() {
        let bell = doorbell();
        let (word, eventfd) = (rustix::io::dup(bell.word_memory()), rustix::io::dup(bell.eventfd()));
        let remote = RemoteDoorbell::attach(word.expect("dup"), eventfd.expect("dup")).expect("a doorbell");
        bell.word.get().store(77, Ordering::Relaxed);
        remote.ring(&ShmCounters::default());
        assert_eq!(rustix::io::read(&bell.eventfd, &mut [0_u8; 8]), Ok(8));
        remote.ring(&ShmCounters::default());
        assert!(rustix::io::read(&bell.eventfd, &mut [0_u8; 8]).is_err(), "nobody sleeps");
    }

    #[test]
    fn another_kind_of_descriptor_is_refused() {
        let bell = doorbell();
        let (_, pipe) = rustix::pipe::pipe().expect("pipe");
        let word = rustix::io::dup(bell.word_memory()).expect("dup");
        assert!(matches!(RemoteDoorbell::attach(word, pipe), Err(ShmError::Handshake(_))));
        let word = rustix::io::dup(bell.word_memory()).expect("dup");
        let eventfd = rustix::io::dup(bell.eventfd()).expect("dup");
        assert!(RemoteDoorbell::attach(word, eventfd).is_ok());
    }
}
