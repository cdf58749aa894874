//! The namespace of an NVMe device: opened, measured, and locked. For start-up and sync: all calls block.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};

use super::NAME;
use super::command::{
    Command, IDENTIFY_BYTES, NVME_IOCTL_ADMIN_CMD, NVME_IOCTL_ID, NVME_IOCTL_IO_CMD, OPCODE_ADMIN_IDENTIFY,
    OPCODE_FLUSH, parse_controller, parse_namespace,
};
use super::status;
use crate::files::{lock, open_exclusively, refuse_contents};
use crate::{IoError, IoErrorKind};

/// Maximum bytes of a command when neither the device nor the kernel tells a limit.
const COMMAND_BYTES_MAX: usize = 128 << 10;

/// Settings of a namespace's character device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmeDeviceConfig {
    /// Path of the device: `/dev/ng0n1`.
    pub path: PathBuf,
    /// Whether a device with a known signature is used all the same. A mounted device never is.
    pub force: bool,
    /// Alignment of requests, a power of two; the device's block size if that is larger.
    pub block_bytes: usize,
}

/// An open namespace.
#[derive(Debug)]
pub struct NvmeDevice {
    path: PathBuf,
    file: OwnedFd,
    /// The block device of the same namespace, kept open so that it cannot be mounted.
    _block_device: Option<OwnedFd>,
    namespace: u32,
    bytes: u64,
    lba_bytes: usize,
    block_bytes: usize,
    command_bytes_max: usize,
}

/// Returns the block device of a namespace: `/dev/ng0n1` → `/dev/nvme0n1`.
fn block_device_of(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?.strip_prefix("ng")?;
    Some(path.with_file_name(format!("nvme{name}")))
}

impl NvmeDevice {
    /// Opens a namespace exclusively for this process.
    pub fn open(config: &NvmeDeviceConfig) -> Result<Self, IoError> {
        let path = &config.path;
        let refused = |kind, reason: String| IoError {
            engine: NAME,
            operation: format!("open {}", path.display()),
            kind,
            reason,
        };
        let file =
            rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|errno| {
                IoError::from_errno(NAME, format!("open {}", path.display()), errno.raw_os_error())
            })?;
        let status = rustix::fs::fstat(&file);
        if !status.is_ok_and(|status| FileType::from_raw_mode(status.st_mode) == FileType::CharacterDevice) {
            return Err(refused(IoErrorKind::Invalid, "not a character device".to_owned()));
        }
        lock(&file, path)?;
        let block_device = match block_device_of(path) {
            Some(block_path) if block_path.exists() => {
                let held = open_exclusively(&block_path)?;
                if !config.force {
                    refuse_contents(&held, &block_path)?;
                }
                Some(held)
            }
            _ => None,
        };
        let namespace = ioctl(file.as_fd(), NVME_IOCTL_ID, &mut Command::default()).map_err(|errno| {
            IoError::from_errno(NAME, format!("ask {} for its number", path.display()), errno)
        })?;
        let mut device = Self {
            path: path.clone(),
            file,
            _block_device: block_device,
            namespace,
            bytes: 0,
            lba_bytes: 0,
            block_bytes: config.block_bytes,
            command_bytes_max: 0,
        };
        let found = parse_namespace(&*device.identify(namespace, 0)?)
            .map_err(|reason| refused(IoErrorKind::Unsupported, reason))?;
        let controller = parse_controller(&*device.identify(0, 1)?);
        if !config.block_bytes.is_power_of_two() {
            let reason = format!("blocks of {} bytes", config.block_bytes);
            return Err(refused(IoErrorKind::Invalid, reason));
        }
        device.lba_bytes = found.block_bytes;
        device.block_bytes = config.block_bytes.max(found.block_bytes);
        let bytes = found.blocks.checked_mul(found.block_bytes as u64);
        let bytes = bytes.ok_or_else(|| refused(IoErrorKind::Invalid, "an impossible size".to_owned()))?;
        device.bytes = bytes - bytes % device.block_bytes as u64;
        let of_queue = queue_bytes_max(path);
        let most = [controller.transfer_bytes_max, of_queue].into_iter().flatten().min();
        // A command can name at most 65536 blocks.
        let most = most.unwrap_or(COMMAND_BYTES_MAX).min(found.block_bytes << 16);
        device.command_bytes_max = (most - most % device.block_bytes).max(device.block_bytes);
        Ok(device)
    }

    /// Bytes of the namespace, in whole blocks.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Alignment of requests.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Bytes of the device's own block.
    #[must_use]
    pub fn lba_bytes(&self) -> usize {
        self.lba_bytes
    }

    /// Maximum bytes of a command; longer requests are split.
    #[must_use]
    pub fn command_bytes_max(&self) -> usize {
        self.command_bytes_max
    }

    pub(super) fn namespace(&self) -> u32 {
        self.namespace
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(super) fn require_poll_queues(&self) -> Result<(), IoError> {
        match queue_setting(&self.path, "io_poll") {
            Some(0) => Err(IoError {
                engine: NAME,
                operation: format!("poll {}", self.path.display()),
                kind: IoErrorKind::Unsupported,
                reason: "it has no poll queues; load the module nvme with poll_queues=1".to_owned(),
            }),
            _ => Ok(()),
        }
    }

    fn identify(&self, namespace: u32, structure: u32) -> Result<Box<[u8; IDENTIFY_BYTES]>, IoError> {
        let mut answer = Box::new([0; IDENTIFY_BYTES]);
        let mut command = Command {
            opcode: OPCODE_ADMIN_IDENTIFY,
            namespace,
            address: answer.as_mut_ptr().expose_provenance() as u64,
            bytes: IDENTIFY_BYTES as u32,
            dword10: structure,
            ..Command::default()
        };
        self.run(NVME_IOCTL_ADMIN_CMD, &mut command, "identify")?;
        Ok(answer)
    }

    fn run(&self, request: libc::c_ulong, command: &mut Command, verb: &str) -> Result<(), IoError> {
        let operation = || format!("{verb} {}", self.path.display());
        match ioctl(self.file.as_fd(), request, command) {
            Ok(0) => Ok(()),
            Ok(found) => Err(IoError {
                engine: NAME,
                operation: operation(),
                kind: status::meaning(found as u16).0,
                reason: status::describe(found as u16),
            }),
            Err(errno) => Err(IoError::from_errno(NAME, operation(), errno)),
        }
    }

    pub(super) fn flush(&self) -> Result<(), IoError> {
        let namespace = self.namespace;
        let mut command = Command { opcode: OPCODE_FLUSH, namespace, ..Command::default() };
        self.run(NVME_IOCTL_IO_CMD, &mut command, "flush")
    }
}

/// Returns the result of the request, or the errno.
fn ioctl(file: BorrowedFd<'_>, request: libc::c_ulong, command: &mut Command) -> Result<u32, i32> {
    // SAFETY: the structure is what these requests read and write (72 bytes), and the memory that it names lives in the
    // caller's frame until this returns and has the length that it says.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request, std::ptr::from_mut(command)) };
    u32::try_from(result).map_err(|_| std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// Reads a number in the queue folder of the namespace's block device in sysfs.
fn queue_setting(path: &Path, name: &str) -> Option<u64> {
    let block_device = block_device_of(path)?;
    let folder = Path::new("/sys/block").join(block_device.file_name()?).join("queue").join(name);
    std::fs::read_to_string(folder).ok()?.trim().parse().ok()
}

/// Maximum bytes of one command for the kernel: limited by sectors, and by memory segments, each of which may
/// be one page.
fn queue_bytes_max(path: &Path) -> Option<usize> {
    let sectors = queue_setting(path, "max_hw_sectors_kb").map(|kib| kib << 10);
    // Memory that does not start on a page takes one more segment.
    let segments = queue_setting(path, "max_segments").map(|count| count.saturating_sub(1).max(1) * 4096);
    let most = [sectors, segments].into_iter().flatten().min()?;
    usize::try_from(most).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_block_device_is_found_by_its_name() {
        assert_eq!(block_device_of(Path::new("/dev/ng12n3")), Some(PathBuf::from("/dev/nvme12n3")));
        assert_eq!(block_device_of(Path::new("/dev/null")), None);
    }

    #[test]
    fn what_is_no_nvme_is_refused() {
        for path in ["/dev/null", "/nowhere", "/proc/self/status"] {
            let config = NvmeDeviceConfig { path: path.into(), force: false, block_bytes: 4096 };
            let error = NvmeDevice::open(&config).expect_err("no namespace");
            assert!(error.operation.contains(path), "{error}");
        }
    }
}
