//! The folder in which both sides keep their files.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};

const ZEROS_BYTES: usize = 1 << 20;

/// Returns the name of the file system of a folder.
pub fn file_system(folder: &Path) -> Result<&'static str> {
    // include/uapi/linux/magic.h
    Ok(match rustix::fs::statfs(folder)?.f_type as u64 {
        0xEF53 => "ext4",
        0x5846_5342 => "XFS",
        0x9123_683E => "Btrfs",
        0x2FC1_2FC1 => "ZFS",
        0x794C_7630 => "overlayfs",
        0x0102_1994 => "tmpfs: memory, and no disk",
        0x6969 => "NFS",
        _ => "an unknown file system",
    })
}

/// Writes a file of zeros, unless it already has its size.
pub fn fill(path: &Path, bytes: usize) -> Result<()> {
    let what = || format!("cannot fill {}", path.display());
    if fs::metadata(path).is_ok_and(|of| of.len() == bytes as u64) {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).with_context(what)?;
    }
    let mut file = File::create(path).with_context(what)?;
    let zeros = vec![0; ZEROS_BYTES];
    let mut left = bytes;
    while left > 0 {
        let count = left.min(ZEROS_BYTES);
        file.write_all(&zeros[..count]).with_context(what)?;
        left -= count;
    }
    file.sync_all().with_context(what)
}
