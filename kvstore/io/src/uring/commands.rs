//! Reads and writes as entries of the submission queue, and results as errors.

use std::os::fd::{AsRawFd, RawFd};

use io_uring::types::Fixed;
use io_uring::{Submitter, cqueue, opcode, squeue};

use super::NAME;
use crate::files::Files;
use crate::ring::{Commands, Outcome, Pending};
use crate::{IoError, IoErrorKind, Operation};

/// Builds entries for files, and translates their results.
#[derive(Debug)]
pub struct FileCommands {
    files: Files,
    /// Maximum bytes of one entry; the remaining bytes are moved by further entries.
    part_bytes_max: usize,
}

impl FileCommands {
    pub(super) fn new(
        files: Files,
        submitter: &Submitter<'_>,
        part_bytes_max: usize,
    ) -> Result<Self, IoError> {
        let descriptors: Vec<RawFd> =
            (0..files.count() as u32).filter_map(|file| Some(files.descriptor(file)?.as_raw_fd())).collect();
        submitter.register_files(&descriptors).map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            IoError::from_errno(NAME, format!("register {} files", descriptors.len()), errno)
        })?;
        Ok(Self { files, part_bytes_max })
    }
}

impl Commands for FileCommands {
    type Submission = squeue::Entry;
    type Completion = cqueue::Entry;

    fn name(&self) -> &'static str {
        NAME
    }

    fn build(&self, pending: &Pending) -> squeue::Entry {
        let file = Fixed(pending.request().file);
        let (place, len, offset) =
            (pending.place(), pending.left().min(self.part_bytes_max) as u32, pending.offset());
        match (pending.request().operation, pending.registered()) {
            (Operation::Read, Some(index)) => {
                opcode::ReadFixed::new(file, place, len, index).offset(offset).build()
            }
            (Operation::Write, Some(index)) => {
                opcode::WriteFixed::new(file, place, len, index).offset(offset).build()
            }
            (Operation::Read, None) => opcode::Read::new(file, place, len).offset(offset).build(),
            (Operation::Write, None) => opcode::Write::new(file, place, len).offset(offset).build(),
        }
    }

    fn outcome(&self, pending: &Pending, completion: &cqueue::Entry) -> Outcome {
        outcome(pending, completion.result())
    }

    fn sync(&self, file: u32) -> Result<(), IoError> {
        self.files.sync(NAME, file)
    }
}

/// Interprets the result of a read or write.
pub(super) fn outcome(pending: &Pending, result: i32) -> Outcome {
    match result {
        _ if result > 0 => Outcome::Moved(result as usize),
        0 => Outcome::Failed(IoError {
            engine: NAME,
            operation: pending.describe(),
            kind: IoErrorKind::Other,
            reason: format!("the file ends {} bytes before the end of the request", pending.left()),
        }),
        _ => match result.wrapping_neg() {
            libc::EAGAIN | libc::EINTR => Outcome::Retry,
            errno => Outcome::Failed(pending.failed(NAME, errno)),
        },
    }
}
