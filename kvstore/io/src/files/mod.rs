//! Opening of files for engines: a folder of segment files, one file, or a block device; and their sync.
//!
//! Invariants: sizes are fixed once opened; files are preallocated and never grown; a [`Files`] is the only one
//! on its files, as the folder is locked with flock(2) and the device opened with O_EXCL (open(2)). All calls
//! block and are for start-up, except [`Files::sync`].

mod device;
mod folder;
mod make;
mod signature;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

pub use device::{DeviceConfig, open_device};
pub(crate) use device::{open_exclusively, refuse_contents};
pub use folder::{FolderConfig, open_file, open_folder, open_folders, remove_surplus};
pub use signature::{SIGNATURE_BYTES, signature};

use crate::{Geometry, IoError, IoErrorKind};

/// Name of this module in errors.
const NAME: &str = "files";
/// Assumed maximum bytes of one command of a device, if sysfs does not tell it.
const DEVICE_BYTES_MAX: u64 = 128 << 10;

/// Open files of a fixed size, by number.
#[derive(Debug)]
pub struct Files {
    files: Vec<StoredFile>,
    block_bytes: usize,
    /// Locks of folders and devices, released on drop.
    locks: Vec<OwnedFd>,
}

#[derive(Debug)]
struct StoredFile {
    path: PathBuf,
    file: OwnedFd,
    bytes: u64,
    is_device: bool,
}

impl Files {
    /// Returns the geometry of an engine on these files.
    #[must_use]
    pub fn geometry(&self, transfer_bytes_max: usize, depth_max: usize) -> Geometry {
        let files = self.files.iter().map(|file| file.bytes).collect();
        Geometry { block_bytes: self.block_bytes, transfer_bytes_max, depth_max, files }
    }

    /// Number of files.
    #[must_use]
    pub fn count(&self) -> usize {
        self.files.len()
    }

    /// Descriptor of a file; `None` for an unknown number.
    #[must_use]
    pub fn descriptor(&self, file: u32) -> Option<BorrowedFd<'_>> {
        self.files.get(file as usize).map(|file| file.file.as_fd())
    }

    /// Path of a file; `None` for an unknown number.
    #[must_use]
    pub fn path(&self, file: u32) -> Option<&Path> {
        self.files.get(file as usize).map(|file| file.path.as_path())
    }

    /// Puts completed writes on stable storage (fdatasync(2)). Blocks.
    pub fn sync(&self, engine: &'static str, file: u32) -> Result<(), IoError> {
        let stored = self.files.get(file as usize).ok_or_else(|| IoError {
            engine,
            operation: format!("sync of file {file}"),
            kind: IoErrorKind::Invalid,
            reason: format!("there are {}", self.files.len()),
        })?;
        loop {
            match rustix::fs::fdatasync(&stored.file) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => {
                    let operation = format!("fdatasync of {}", stored.path.display());
                    return Err(IoError::from_errno(engine, operation, errno.raw_os_error()));
                }
            }
        }
    }

    /// Fails unless the kernel can poll the devices below, according to `queue/io_poll` of sysfs.
    pub(crate) fn require_poll_queues(&self, engine: &'static str) -> Result<(), IoError> {
        for stored in &self.files {
            if stored.queue_setting("io_poll") == Some(0) {
                return Err(IoError {
                    engine,
                    operation: format!("poll the device of {}", stored.path.display()),
                    kind: IoErrorKind::Unsupported,
                    reason: "it has no poll queues; for NVMe load the module with poll_queues=1".to_owned(),
                });
            }
        }
        Ok(())
    }

    /// Maximum bytes that every device below takes in one command, whatever the page size of the memory. In
    /// whole blocks.
    pub(crate) fn device_bytes_max(&self) -> usize {
        let of_file = |stored: &StoredFile| {
            let sectors = stored.queue_setting("max_sectors_kb").map(|kib| kib << 10);
            let segments = stored.queue_setting("max_segments").map(|count| count.saturating_sub(1) << 12);
            [sectors, segments].into_iter().flatten().min()
        };
        let most = self.files.iter().filter_map(of_file).min().unwrap_or(DEVICE_BYTES_MAX);
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        (most - most % self.block_bytes).max(self.block_bytes)
    }
}

impl StoredFile {
    /// Reads a number in the folder `queue` of the device in sysfs.
    fn queue_setting(&self, name: &str) -> Option<u64> {
        let status = rustix::fs::fstat(&self.file).ok()?;
        let number = if self.is_device { status.st_rdev } else { status.st_dev };
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let device = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        // A partition has no queue folder; its device has.
        let setting = ["queue", "../queue"]
            .into_iter()
            .find_map(|folder| std::fs::read_to_string(device.join(folder).join(name)).ok())?;
        setting.trim().parse().ok()
    }
}

/// Error of a failed step of opening.
fn failed(step: &str, path: &Path, errno: Errno) -> IoError {
    IoError::from_errno(NAME, format!("{step} {}", path.display()), errno.raw_os_error())
}

/// Error for a path that must not be used.
fn refused(step: &str, path: &Path, kind: IoErrorKind, reason: String) -> IoError {
    IoError { engine: NAME, operation: format!("{step} {}", path.display()), kind, reason }
}

/// Returns the process that holds a lock of flock(2) on this file, from `/proc/locks`; unknown inside of a PID
/// namespace.
fn lock_holder(file: &OwnedFd) -> Option<u32> {
    let status = rustix::fs::fstat(file).ok()?;
    let (major, minor) = (rustix::fs::major(status.st_dev), rustix::fs::minor(status.st_dev));
    let name = format!("{major:02x}:{minor:02x}:{}", status.st_ino);
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        // "1: FLOCK  ADVISORY  WRITE 1234 fd:00:5678 0 EOF"
        let fields: Vec<&str> = line.split_whitespace().collect();
        let held = fields.get(1) == Some(&"FLOCK") && fields.get(5) == Some(&name.as_str());
        held.then(|| fields.get(4)?.parse().ok()).flatten().filter(|&pid| pid > 0)
    })
}

/// Locks a file exclusively, or fails.
pub(crate) fn lock(file: &OwnedFd, path: &Path) -> Result<(), IoError> {
    match rustix::fs::flock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(()),
        Err(Errno::WOULDBLOCK) => {
            let holder =
                lock_holder(file).map_or("another process".to_owned(), |pid| format!("process {pid}"));
            Err(refused("lock", path, IoErrorKind::Unsupported, format!("in use by {holder}")))
        }
        Err(errno) => Err(failed("lock", path, errno)),
    }
}
