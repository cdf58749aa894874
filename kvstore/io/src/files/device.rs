//! A raw block device as one file.
//!
//! O_EXCL on a block device fails with EBUSY when it is mounted or held by another O_EXCL, by LVM or by RAID
//! (open(2)), so the kernel denies those to others for as long as it is open. A device with a known signature
//! is refused unless forced.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use super::signature::{SIGNATURE_BYTES, signature};
use super::{Files, StoredFile, failed, lock, refused};
use crate::{IoError, IoErrorKind, PageBuffer};

/// Settings of a raw block device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Path of the device: `/dev/nvme0n1`, `/dev/disk/by-id/…`.
    pub path: PathBuf,
    /// Whether a device with a known signature is used all the same. A mounted device never is.
    pub force: bool,
    /// Alignment of requests, a power of two; at least the device's logical block size.
    pub block_bytes: usize,
}

/// Opens a device exclusively for this process.
pub fn open_device(config: &DeviceConfig) -> Result<Files, IoError> {
    let path = &config.path;
    let file = open_exclusively(path)?;
    lock(&file, path)?;
    if !config.force {
        refuse_contents(&file, path)?;
    }
    let logical = rustix::fs::ioctl_blksszget(&file)
        .map_err(|errno| failed("ask for the block size of", path, errno))? as usize;
    if !config.block_bytes.is_power_of_two() || config.block_bytes < logical {
        let reason = format!("its blocks have {logical} bytes, requests {}", config.block_bytes);
        return Err(refused("open", path, IoErrorKind::Invalid, reason));
    }
    let bytes = rustix::fs::seek(&file, SeekFrom::End(0))
        .map_err(|errno| failed("ask for the size of", path, errno))?;
    let bytes = bytes - bytes % config.block_bytes as u64;
    if bytes == 0 {
        return Err(refused("open", path, IoErrorKind::NoSpace, "it has no bytes".to_owned()));
    }
    let stored = StoredFile { path: path.clone(), file, bytes, is_device: true };
    Ok(Files { files: vec![stored], block_bytes: config.block_bytes, locks: Vec::new() })
}

/// Opens a block device so that it can be neither mounted nor opened with O_EXCL elsewhere.
pub(crate) fn open_exclusively(path: &Path) -> Result<OwnedFd, IoError> {
    // Check the type first: O_EXCL has another meaning for files.
    let status = rustix::fs::stat(path).map_err(|errno| failed("open", path, errno))?;
    if FileType::from_raw_mode(status.st_mode) != FileType::BlockDevice {
        return Err(refused("open", path, IoErrorKind::Invalid, "not a block device".to_owned()));
    }
    let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::EXCL | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => Ok(file),
        Err(Errno::BUSY) => {
            let (major, minor) = (rustix::fs::major(status.st_rdev), rustix::fs::minor(status.st_rdev));
            let reason = match mounted_on(major, minor) {
                Some(place) => format!("it is mounted on {place}"),
                None => "it is in use: mounted, part of LVM or RAID, or opened by another process".to_owned(),
            };
            Err(refused("open", path, IoErrorKind::Unsupported, reason))
        }
        Err(errno) => Err(failed("open", path, errno)),
    }
}

/// Fails when the device has a known signature.
pub(crate) fn refuse_contents(device: &OwnedFd, path: &Path) -> Result<(), IoError> {
    let mut start = PageBuffer::zeroed(SIGNATURE_BYTES);
    let mut filled = 0;
    while filled < start.len() {
        match rustix::io::pread(device, &mut start[filled..], filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(failed("read the start of", path, errno)),
        }
    }
    match signature(&start) {
        None => Ok(()),
        Some(what) => {
            let reason = format!("{what} is on it, and `force` is not set");
            Err(refused("open", path, IoErrorKind::Unsupported, reason))
        }
    }
}

/// Returns the mount point of a device, from `/proc/self/mountinfo` (proc(5)): "36 35 8:1 / /mnt …".
fn mounted_on(major: u32, minor: u32) -> Option<String> {
    let number = format!("{major}:{minor}");
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(2);
        (fields.next() == Some(&number)).then(|| fields.nth(1).map(str::to_owned)).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_block_device_is_refused() {
        for path in ["/dev/null", "/proc/self/exe", "/nowhere/at/all"] {
            let config = DeviceConfig { path: path.into(), force: true, block_bytes: 4096 };
            let error = open_device(&config).expect_err("no device");
            assert!(error.operation.ends_with(path), "{error}");
        }
    }

    #[test]
    fn a_mounted_device_is_refused_even_by_force() {
        // The device of the root file system varies; one that is not a plain device cannot be tested.
        let mounts = std::fs::read_to_string("/proc/mounts").expect("mounts");
        let device = mounts.lines().filter_map(|line| line.split(' ').next()).find(|name| {
            std::fs::metadata(name)
                .is_ok_and(|status| std::os::unix::fs::FileTypeExt::is_block_device(&status.file_type()))
        });
        let Some(device) = device else {
            eprintln!("SKIPPED: no block device is mounted here under its name");
            return;
        };
        let config = DeviceConfig { path: device.into(), force: true, block_bytes: 4096 };
        let error = open_device(&config).expect_err("mounted");
        assert!(error.operation.contains(device), "{error}");
        eprintln!("{error}");
    }
}
