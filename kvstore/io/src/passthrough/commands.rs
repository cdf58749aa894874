//! Reads and writes as NVMe commands in entries of 128 bytes, and their status as errors.
//!
//! Hot path: one command is built on the stack. Registered memory is named by its index, if the kernel supports
//! that, so that the kernel maps nothing.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use io_uring::types::Fixed;
use io_uring::{Submitter, cqueue, opcode, squeue};

use super::command::{Command, NVME_URING_CMD_IO, OPCODE_READ, OPCODE_WRITE};
use super::device::NvmeDevice;
use super::{NAME, status};
use crate::ring::{Commands, Outcome, Pending};
use crate::{IoError, IoErrorKind, Operation};

/// Builds NVMe commands for a ring, and translates their results.
#[derive(Debug)]
pub struct NvmeCommands {
    device: NvmeDevice,
    /// Whether the kernel refused registered memory. Kernels before 6.5 or so count all pages of a registered
    /// buffer, not those of the command, and refuse a command on a large slab (`blk_rq_map_user_bvec`, EINVAL).
    /// Relaxed: only ever set, and only a hint.
    registered_refused: AtomicBool,
}

impl NvmeCommands {
    pub(super) fn new(device: NvmeDevice, submitter: &Submitter<'_>) -> Result<Self, IoError> {
        submitter.register_files(&[device.descriptor().as_raw_fd()]).map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            IoError::from_errno(NAME, "register the device".to_owned(), errno)
        })?;
        Ok(Self { device, registered_refused: AtomicBool::new(false) })
    }

    /// The namespace that commands go to.
    #[must_use]
    pub fn device(&self) -> &NvmeDevice {
        &self.device
    }

    fn command_bytes(&self, pending: &Pending) -> usize {
        pending.left().min(self.device.command_bytes_max())
    }
}

impl Commands for NvmeCommands {
    type Submission = squeue::Entry128;
    type Completion = cqueue::Entry32;

    fn name(&self) -> &'static str {
        NAME
    }

    fn build(&self, pending: &Pending) -> squeue::Entry128 {
        let opcode = match pending.request().operation {
            Operation::Read => OPCODE_READ,
            Operation::Write => OPCODE_WRITE,
        };
        let (bytes, lba_bytes) = (self.command_bytes(pending), self.device.lba_bytes());
        let (block, blocks) = (pending.offset() / lba_bytes as u64, (bytes / lba_bytes) as u32);
        let address = pending.place().expose_provenance() as u64;
        let namespace = self.device.namespace();
        let command = Command::transfer(opcode, namespace, block, blocks, address, bytes as u32);
        let registered = pending.registered().filter(|_| !self.registered_refused.load(Ordering::Relaxed));
        opcode::UringCmd80::new(Fixed(0), NVME_URING_CMD_IO)
            .cmd(command.to_entry())
            .buf_index(registered)
            .build()
    }

    fn outcome(&self, pending: &Pending, completion: &cqueue::Entry32) -> Outcome {
        match completion.result() {
            // A command moves all bytes or none.
            0 => Outcome::Moved(self.command_bytes(pending)),
            found if found > 0 => Outcome::Failed(IoError {
                engine: NAME,
                operation: pending.describe(),
                kind: status::meaning(found as u16).0,
                reason: status::describe(found as u16),
            }),
            negative => match negative.wrapping_neg() {
                libc::EAGAIN | libc::EINTR => Outcome::Retry,
                libc::EINVAL if pending.registered().is_some() => {
                    self.registered_refused.store(true, Ordering::Relaxed);
                    Outcome::RetryUnregistered
                }
                errno => Outcome::Failed(pending.failed(NAME, errno)),
            },
        }
    }

    fn sync(&self, file: u32) -> Result<(), IoError> {
        if file != 0 {
            return Err(IoError {
                engine: NAME,
                operation: format!("sync of file {file}"),
                kind: IoErrorKind::Invalid,
                reason: "the namespace is file 0, the only one".to_owned(),
            });
        }
        self.device.flush()
    }
}
