//! The file or device that is read and written, and the engines on it.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use kvstore_io::IoEngine;
use kvstore_io::files::{DeviceConfig, Files, open_device, open_file};
use kvstore_io::passthrough::{self, NvmeDevice, NvmeDeviceConfig};
use kvstore_io::pread::{PreadConfig, PreadEngine};
use kvstore_io::uring::{self, RingConfig};

use super::{DiskArgs, Engine, Mode};

/// The file or device that is read and written. A file created for the run is removed on drop.
pub(super) struct Target {
    path: PathBuf,
    bytes: u64,
    is_device: bool,
    made: bool,
}

impl Drop for Target {
    fn drop(&mut self) {
        if self.made {
            // A file that cannot be removed has a recognisable name.
            let _gone = std::fs::remove_file(&self.path);
        }
    }
}

impl Target {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Number of bytes used; `None`: the whole device.
    pub(super) fn file_bytes(&self) -> Option<u64> {
        (!self.is_device).then_some(self.bytes)
    }

    pub(super) fn prepare(args: &DiskArgs) -> Result<Self> {
        let mut path = args.path.clone();
        if path.is_dir() {
            path.push(format!("kvasir-bench-disk-{}", std::process::id()));
        }
        let found = std::fs::metadata(&path).ok();
        let is_file = found.as_ref().is_none_or(std::fs::Metadata::is_file);
        if !is_file {
            ensure!(
                args.force,
                "{} is a device: its contents would be lost; --force says so",
                path.display()
            );
            return Ok(Self { path, bytes: 0, is_device: true, made: false });
        }
        let only_reads = args.mode.iter().all(|mode| *mode == Mode::Read);
        ensure!(
            found.is_none() || args.force || only_reads,
            "{} exists and would be overwritten; --force says so, or --mode read",
            path.display()
        );
        // A block is the granularity of direct I/O.
        let bytes = match &found {
            Some(found) if found.len() > 0 => found.len(),
            _ => args.file_size - args.file_size % 4096,
        };
        ensure!(
            bytes > 0 && bytes.is_multiple_of(4096),
            "{} has {bytes} bytes, no multiple of 4096",
            path.display()
        );
        if let Some(found) = &found {
            require_no_holes(&path, found.len(), found.blocks())?;
        }
        let target = Self { path, bytes, is_device: false, made: found.is_none() };
        // Opening creates, preallocates and fills the file.
        drop(open_file(&target.path, target.bytes, true, true)?);
        Ok(target)
    }

    pub(super) fn open(&self, args: &DiskArgs, depth: usize, size: u64) -> Result<Box<dyn IoEngine>> {
        let ring = RingConfig {
            depth,
            transfer_bytes_max: size as usize,
            io_poll: args.io_poll,
            ..RingConfig::default()
        };
        Ok(match args.engine {
            Engine::IoUring => Box::new(uring::open(self.files(args)?, &ring)?),
            Engine::Pread => {
                // As many threads as fio has jobs.
                let config = PreadConfig { threads: depth, depth, transfer_bytes_max: size as usize };
                Box::new(PreadEngine::new(self.files(args)?, &config)?)
            }
            Engine::NvmePassthrough => {
                let config =
                    NvmeDeviceConfig { path: self.path.clone(), force: args.force, block_bytes: 4096 };
                Box::new(passthrough::open(NvmeDevice::open(&config)?, &ring)?)
            }
        })
    }

    fn files(&self, args: &DiskArgs) -> Result<Files> {
        Ok(if self.is_device {
            let config = DeviceConfig { path: self.path.clone(), force: args.force, block_bytes: 4096 };
            open_device(&config)?
        } else {
            open_file(&self.path, self.bytes, true, true)?
        })
    }
}

/// Refuses a file with holes, which are read without the disk. `blocks` are of 512 bytes, whatever the file
/// system's are: inode(7).
fn require_no_holes(path: &Path, bytes: u64, blocks: u64) -> Result<()> {
    let allocated = blocks * 512;
    ensure!(
        allocated >= bytes,
        "{} has holes, or is compressed: {allocated} of its {bytes} bytes are on the disk; remove it, and it is made and \
         filled",
        path.display()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_holes_is_refused() {
        let path = std::env::temp_dir().join(format!("kvasir-bench-holes-{}", std::process::id()));
        std::fs::File::create(&path).and_then(|file| file.set_len(1 << 20)).expect("a sparse file");
        let args = DiskArgs { path: path.clone(), mode: vec![Mode::Read], ..DiskArgs::with_defaults() };
        let outcome = Target::prepare(&args).map(drop);
        let is_there = path.exists();
        std::fs::remove_file(&path).expect("it is left alone");
        let error = outcome.expect_err("holes").to_string();
        assert!(error.contains("has holes") && is_there, "{error}");
        assert!(require_no_holes(&path, 4096, 8).is_ok() && require_no_holes(&path, 4097, 8).is_err());
    }
}
