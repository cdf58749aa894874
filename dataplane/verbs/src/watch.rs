//! The descriptors that a fabric watches, behind one epoll descriptor.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dataplane_fabric::handshake::Handshakes;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

use crate::VerbsError;
use crate::commands::CommandThread;
use crate::local::FabricResources;

pub(crate) const HANDSHAKES: u64 = 0;
pub(crate) const ASYNC: u64 = 1;
pub(crate) const CHANNEL: u64 = 2;
pub(crate) const COMMANDS: u64 = 3;

/// The epoll descriptor over the handshakes, the asynchronous events, the completion channel and the commands.
#[derive(Debug)]
pub(crate) struct EpollSet {
    pub(crate) epoll: OwnedFd,
}

impl EpollSet {
    pub(crate) fn new(
        local: &FabricResources,
        commands: &CommandThread,
        handshakes: &Handshakes,
    ) -> Result<Self, VerbsError> {
        let failed = |operation: &str| {
            let operation = operation.to_owned();
            move |errno: Errno| VerbsError::System { operation, error: errno.into() }
        };
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed("epoll_create1"))?;
        let events = local.device.async_descriptor();
        rustix::io::ioctl_fionbio(events, true).map_err(failed("ioctl(FIONBIO) of the async descriptor"))?;
        let watched: [(BorrowedFd<'_>, u64); 4] = [
            (handshakes.descriptor(), HANDSHAKES),
            (events, ASYNC),
            (local.completions.descriptor(), CHANNEL),
            (commands.descriptor(), COMMANDS),
        ];
        for (descriptor, token) in watched {
            epoll::add(&epoll, descriptor, EventData::new_u64(token), EventFlags::IN)
                .map_err(failed("epoll_ctl"))?;
        }
        Ok(Self { epoll })
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
