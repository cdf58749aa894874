//! The io_uring of one node: queueing operations and reaping completions.

use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::{IoUring, squeue};

use crate::TcpError;

/// Entries of the submission queue. Each connection has at most three operations in flight.
const ENTRIES: u32 = 256;

pub(crate) struct Ring(IoUring);

/// What a completion belongs to, packed into its user data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Token {
    pub(crate) connection: u64,
    pub(crate) kind: OperationKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OperationKind {
    Accept,
    Connect,
    Receive,
    Send,
}

impl Token {
    fn pack(self) -> u64 {
        self.connection << 2 | self.kind as u64
    }

    fn unpack(word: u64) -> Self {
        let kind = match word & 3 {
            0 => OperationKind::Accept,
            1 => OperationKind::Connect,
            2 => OperationKind::Receive,
            _ => OperationKind::Send,
        };
        Self { connection: word >> 2, kind }
    }
}

impl Ring {
    pub(crate) fn new() -> Result<Self, TcpError> {
        let ring = IoUring::builder()
            .setup_clamp()
            .setup_cqsize(ENTRIES * 8)
            .build(ENTRIES)
            .map_err(|error| TcpError::System { operation: "io_uring_setup".to_owned(), error })?;
        Ok(Self(ring))
    }

    /// Readable when there are completions to reap.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the ring, which the result borrows.
        unsafe { BorrowedFd::borrow_raw(self.0.as_raw_fd()) }
    }

    /// Queues one operation.
    ///
    /// # Safety
    /// Every buffer and descriptor that `entry` names stays valid until its completion has been reaped.
    pub(crate) unsafe fn push(&mut self, entry: squeue::Entry, token: Token) {
        let entry = entry.user_data(token.pack());
        loop {
            // SAFETY: the caller upholds that what the entry names outlives the operation.
            if unsafe { self.0.submission().push(&entry) }.is_ok() {
                return;
            }
            self.submit();
        }
    }

    /// Hands queued operations to the kernel.
    pub(crate) fn submit(&mut self) {
        // EBUSY and EINTR leave the entries queued; the next submit takes them.
        let _later = self.0.submit();
    }

    /// Number of queued operations that the kernel has not seen.
    pub(crate) fn has_queued(&mut self) -> bool {
        !self.0.submission().is_empty()
    }

    /// The next completion: its token and result.
    pub(crate) fn reap(&mut self) -> Option<(Token, i32)> {
        let entry = self.0.completion().next()?;
        Some((Token::unpack(entry.user_data()), entry.result()))
    }

    pub(crate) fn has_completions(&mut self) -> bool {
        !self.0.completion().is_empty()
    }
}
