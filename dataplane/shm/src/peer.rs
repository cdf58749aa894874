//! Credentials of the process at the other end of a socket.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use rustix::io::Errno;

use crate::ShmError;

/// The option's number in asm-generic/socket.h.
const SO_PEERPIDFD: libc::c_int = 77;

/// A process, as the kernel reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PeerProcess {
    /// Process id; 0 when the process is not visible in this PID namespace.
    pub(crate) pid: i32,
    /// Effective user id at the time of its connect or listen.
    pub(crate) uid: u32,
}

/// Reads `SO_PEERCRED` (unix(7)). Not through rustix, whose process id cannot be 0.
pub(crate) fn process(socket: impl AsFd) -> Result<PeerProcess, ShmError> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the descriptor is borrowed; value and length point to live locals of the type and size that
    // SO_PEERCRED fills.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
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
    Ok(PeerProcess { pid: found.pid, uid: found.uid })
}

/// Returns a pidfd of the process, which is not affected by the reuse of process ids.
pub(crate) fn pidfd(socket: impl AsFd, pid: i32) -> Option<OwnedFd> {
    let mut found: RawFd = -1;
    let mut len = size_of::<RawFd>() as libc::socklen_t;
    // SAFETY: as above, with the type and size that SO_PEERPIDFD fills.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut found).cast(),
            &raw mut len,
        )
    };
    if result == 0 && found >= 0 {
        // SAFETY: the kernel just made this descriptor for us and nobody else owns it.
        return Some(unsafe { OwnedFd::from_raw_fd(found) });
    }
    if Errno::from_io_error(&std::io::Error::last_os_error()) != Some(Errno::NOPROTOOPT) {
        return None;
    }
    // Before Linux 6.5: the id may have been reused, and then the end is detected late.
    let pid = rustix::process::Pid::from_raw(pid)?;
    rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok()
}

/// Refuses another user's process if `same_user_only` is set.
pub(crate) fn admit(socket: impl AsFd, same_user_only: bool) -> Result<PeerProcess, ShmError> {
    let peer = process(socket)?;
    if same_user_only && peer.uid != rustix::process::geteuid().as_raw() {
        return Err(ShmError::OtherUser { pid: peer.pid, uid: peer.uid });
    }
    Ok(peer)
}
