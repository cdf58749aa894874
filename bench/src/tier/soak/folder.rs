//! Folder of the disk tier's file, and a check for enough room before any file is written.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::judge::FOLDER_SLACK_BYTES;
use crate::size;

/// `TMPFS_MAGIC` and `RAMFS_MAGIC`, include/uapi/linux/magic.h.
const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];
/// Memory left to other processes.
const MEMORY_SPARE_BYTES: u64 = 256 << 20;

/// Returns the given folder, or the first of the usual ones whose file system is not in memory.
pub(super) fn choose(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(folder) = given {
        let is_on_disk = is_on_disk(folder).with_context(|| folder.display().to_string())?;
        ensure!(is_on_disk, "{} is memory, not a disk: --folder names another", folder.display());
        return Ok(folder.to_owned());
    }
    let usual = [std::env::temp_dir(), PathBuf::from("/var/tmp"), PathBuf::from(".")];
    let found = usual.iter().find(|folder| is_on_disk(folder).unwrap_or(false));
    found
        .cloned()
        .context("the usual folders for temporary files are memory, not a disk: --folder names another")
}

fn is_on_disk(folder: &Path) -> Result<bool> {
    Ok(!IN_MEMORY.contains(&(rustix::fs::statfs(folder)?.f_type as u64)))
}

/// Fails if the file system lacks room for the tier, or the machine memory for the slabs. The error says how
/// much is needed.
pub(super) fn require_room(folder: &Path, disk_bytes: u64, slab_bytes: u64) -> Result<()> {
    let file_system = rustix::fs::statvfs(folder).with_context(|| folder.display().to_string())?;
    let (free, needed) = (file_system.f_bavail * file_system.f_frsize, disk_bytes + FOLDER_SLACK_BYTES);
    ensure!(
        free >= needed,
        "{} has {} MiB free, and the disk tier needs {}: --folder names another folder, --disk a smaller tier",
        folder.display(),
        free >> 20,
        size::render(needed)
    );
    let memory = std::fs::read_to_string("/proc/meminfo").context("/proc/meminfo")?;
    let value =
        |line: &str| line.strip_prefix("MemAvailable:")?.split_whitespace().next()?.parse::<u64>().ok();
    let free = memory.lines().find_map(value).context("no MemAvailable")? << 10;
    let needed = slab_bytes + MEMORY_SPARE_BYTES;
    ensure!(
        free >= needed,
        "{} MiB of memory are available, and host tier, pool and the rest need {}: --host names a smaller tier",
        free >> 20,
        size::render(needed)
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_room_is_refused_with_what_is_needed() {
        let here = std::env::current_dir().expect("a folder");
        require_room(&here, 1, 1).expect("two MiB and some memory");
        let error = require_room(&here, 1 << 60, 1).expect_err("an EiB").to_string();
        assert!(error.contains("needs 1099511627777 MiB") && error.contains("--folder"), "{error}");
        let error = require_room(&here, 1, 1 << 60).expect_err("an EiB").to_string();
        assert!(error.contains("--host"), "{error}");
    }

    #[test]
    fn memory_is_no_disk() {
        assert!(choose(Some(Path::new("/nowhere/at/all"))).is_err());
        // Only checked if /dev/shm is in memory, which is not certain.
        if is_on_disk(Path::new("/dev/shm")).is_ok_and(|is_on_disk| !is_on_disk) {
            let error = choose(Some(Path::new("/dev/shm"))).expect_err("memory").to_string();
            assert!(error.contains("not a disk"), "{error}");
        }
    }
}
