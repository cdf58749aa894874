//! Making one segment: filled and synced under another name, then renamed.
//!
//! Invariant: a file that has a segment's name is whole. A file that a crash leaves under the other name is
//! emptied and filled again by the next start. Start-up only; all calls block.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FallocateFlags, FlockOperation, OFlags, RenameFlags};
use rustix::io::Errno;

use super::folder::{FolderConfig, open};
use super::{failed, lock, refused};
use crate::{IoError, IoErrorKind, PageBuffer};

/// Bytes of one write of zeros.
const ZEROS_BYTES: usize = 1 << 20;
/// Suffix of the name of a segment that is being made.
const NEW_SUFFIX: &str = ".new";

/// Returns the name that a segment has until it is whole.
pub(super) fn path_while_made(path: &Path) -> PathBuf {
    let mut new = path.as_os_str().to_owned();
    new.push(NEW_SUFFIX);
    PathBuf::from(new)
}

/// Makes a segment under its temporary name and renames it once it is whole.
pub(super) fn make_segment(path: &Path, config: &FolderConfig) -> Result<OwnedFd, IoError> {
    let new = path_while_made(path);
    let direct = if config.direct { OFlags::DIRECT } else { OFlags::empty() };
    let file = match open(&new, OFlags::RDWR | OFlags::CREATE | direct) {
        Err(error) if config.direct && error.kind == IoErrorKind::Invalid => {
            // Some file systems create the file before they refuse the flag.
            let _absent = rustix::fs::unlink(&new);
            return Err(no_direct(path));
        }
        opened => opened?,
    };
    // Locked while it is made: a folder is locked already, a single file only once it has its final name.
    lock(&file, path)?;
    let made = fill(&file, path, config).and_then(|()| give_name(&new, path));
    if made.is_err() {
        let _absent = rustix::fs::unlink(&new);
    }
    made?;
    if config.path != path {
        // The folder's lock covers its segments; `open_file` locks its file itself.
        let _unlocked = rustix::fs::flock(&file, FlockOperation::Unlock);
    }
    Ok(file)
}

fn fill(file: &OwnedFd, path: &Path, config: &FolderConfig) -> Result<(), IoError> {
    rustix::fs::ftruncate(file, 0).map_err(|errno| failed("empty", path, errno))?;
    preallocate(file, path, config)
}

/// Renames the file. Replaces only an empty file of that name, unless the file system lacks RENAME_NOREPLACE.
fn give_name(new: &Path, path: &Path) -> Result<(), IoError> {
    let renamed = match rustix::fs::renameat_with(CWD, new, CWD, path, RenameFlags::NOREPLACE) {
        Err(Errno::EXIST) if std::fs::metadata(path).is_ok_and(|status| status.len() == 0) => {
            rustix::fs::rename(new, path)
        }
        // The file system does not support the flag.
        Err(Errno::INVAL | Errno::NOSYS) => rustix::fs::rename(new, path),
        renamed => renamed,
    };
    renamed.map_err(|errno| failed("name", path, errno))
}

fn preallocate(file: &OwnedFd, path: &Path, config: &FolderConfig) -> Result<(), IoError> {
    let whole = format!("preallocate {} bytes for", config.segment_bytes);
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, config.segment_bytes) {
        Ok(()) if !config.write_zeros => {}
        // Without fallocate, writing zeros allocates the space.
        Ok(()) | Err(Errno::OPNOTSUPP) => write_zeros(file, config).map_err(|e| failed(&whole, path, e))?,
        Err(errno) => return Err(failed(&whole, path, errno)),
    }
    rustix::fs::fsync(file).map_err(|errno| failed("fsync", path, errno))
}

fn write_zeros(file: &OwnedFd, config: &FolderConfig) -> Result<(), Errno> {
    let zeros = PageBuffer::zeroed(ZEROS_BYTES);
    let mut at = 0;
    while at < config.segment_bytes {
        let count = (config.segment_bytes - at).min(ZEROS_BYTES as u64) as usize;
        match rustix::io::pwrite(file, &zeros[..count], at) {
            Ok(written) => at += written as u64,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

pub(super) fn no_direct(path: &Path) -> IoError {
    let reason = "this file system has no direct I/O (O_DIRECT)".to_owned();
    refused("open", path, IoErrorKind::Unsupported, reason)
}
