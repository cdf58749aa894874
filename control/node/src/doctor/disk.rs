//! Checks whether the disk tier can run as configured.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use control_config::Settings;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::Finding;

/// File systems by the magic number of statfs(2).
const FILE_SYSTEMS: [(i64, &str); 6] = [
    (0xEF53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683E, "btrfs"),
    (TMPFS, "tmpfs"),
    (0x794C_7630, "overlayfs"),
    (0x6969, "nfs"),
];
const TMPFS: i64 = 0x0102_1994;

pub(super) fn disk(settings: &Settings) -> Finding {
    let tier = &settings.disk_tier;
    let (found, consequence) = if tier.capacity.0 == 0 {
        let consequence = "blocks that leave host memory are computed again (`disk_tier.capacity` is 0)";
        ("not configured".to_owned(), consequence.to_owned())
    } else if tier.path.is_empty() {
        ("`disk_tier.path` is empty".to_owned(), "workers will not start".to_owned())
    } else {
        let each: Vec<DiskPathFinding> = tier.path.0.iter().map(|path| of_path(settings, path)).collect();
        let worst = each.iter().max_by_key(|of| of.severity).map(|of| of.consequence.clone());
        let found: Vec<String> = each.into_iter().map(|of| of.found).collect();
        (found.join("; "), worst.unwrap_or_default())
    };
    Finding { what: "disk tier", found, consequence }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Severity {
    Fine,
    Slow,
    Fails,
}

/// Finding for one path of the disk tier.
struct DiskPathFinding {
    found: String,
    consequence: String,
    severity: Severity,
}

impl DiskPathFinding {
    fn new(severity: Severity, found: String, consequence: impl Into<String>) -> Self {
        Self { found, consequence: consequence.into(), severity }
    }

    fn fails(found: String) -> Self {
        Self::new(Severity::Fails, found, "workers will not start")
    }
}

fn of_path(settings: &Settings, path: &str) -> DiskPathFinding {
    match settings.disk_tier.engine.as_str() {
        "nvme-user" | "spdk" => in_user_space(path),
        "nvme-passthrough" => character_device(path),
        _ => files(settings, Path::new(path)),
    }
}

fn in_user_space(address: &str) -> DiskPathFinding {
    let driver = fs::read_link(format!("/sys/bus/pci/devices/{address}/driver"));
    let name = driver.ok().and_then(|link| Some(link.file_name()?.to_string_lossy().into_owned()));
    let (severity, consequence) = match name.as_deref() {
        Some("vfio-pci") => (Severity::Fine, "the driver in user space takes it".to_owned()),
        Some(_) => (Severity::Fails, format!("workers will not start: bind {address} to vfio-pci first")),
        None => (
            Severity::Fails,
            "workers will not start: there is no such device, or no driver holds it".to_owned(),
        ),
    };
    DiskPathFinding::new(
        severity,
        format!("{address}, driver {}", name.as_deref().unwrap_or("none")),
        consequence,
    )
}

fn character_device(path: &str) -> DiskPathFinding {
    match fs::metadata(path) {
        Ok(of) if of.file_type().is_char_device() => {
            let consequence = "NVMe commands go through the kernel's driver";
            DiskPathFinding::new(Severity::Fine, format!("{path}, a character device"), consequence)
        }
        Ok(_) => DiskPathFinding::new(
            Severity::Fails,
            format!("{path} is no character device"),
            "workers will not start: name the namespace's `/dev/ngXnY`",
        ),
        Err(error) => DiskPathFinding::fails(format!("{path}: {error}")),
    }
}

fn files(settings: &Settings, path: &Path) -> DiskPathFinding {
    if is_block_device(path) {
        if settings.disk_tier.path.0.len() > 1 {
            let consequence = "workers will not start: several paths must be folders";
            return DiskPathFinding::new(
                Severity::Fails,
                format!("{}, a block device", path.display()),
                consequence,
            );
        }
        let consequence = "one worker can have it; each further one needs a device of its own";
        return DiskPathFinding::new(
            Severity::Fine,
            format!("{}, a block device", path.display()),
            consequence,
        );
    }
    let Some(folder) = existing(path) else {
        return DiskPathFinding::fails(format!("{} does not exist", path.display()));
    };
    let room = match rustix::fs::statfs(&folder) {
        Ok(room) => room,
        Err(errno) => return DiskPathFinding::fails(format!("{}: {errno}", folder.display())),
    };
    let magic = room.f_type as i64;
    let name =
        FILE_SYSTEMS.iter().find(|(of, _)| *of == magic).map_or("another file system", |(_, name)| name);
    let free = (room.f_bavail as u64).saturating_mul(room.f_bsize as u64);
    let workers = settings.serve.prefill_workers + settings.serve.decode_workers;
    let neighbours = paths_on_device_of(settings, path).len();
    let needed = bytes_on_device_of(settings, path).saturating_mul(workers);
    // Space that the tier's files already take counts as available.
    let held = held_on_device_of(settings, path);
    let opened = rustix::fs::open(&folder, OFlags::TMPFILE | OFlags::RDWR | OFlags::DIRECT, Mode::RUSR);
    let is_refused = matches!(opened, Err(Errno::ACCESS | Errno::PERM | Errno::ROFS));
    let is_direct = !matches!(opened, Err(Errno::INVAL));
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let found = format!(
        "{} on {name}, {:.1} GiB free, {:.1} GiB wanted{}",
        path.display(),
        gib(free),
        gib(needed),
        if is_direct { "" } else { ", no direct I/O" }
    );
    let (severity, consequence) = if is_refused {
        (Severity::Fails, "workers will not start: they cannot make files there")
    } else if free.saturating_add(held) < needed {
        (Severity::Fails, "workers will not start: not enough room for `disk_tier.capacity` of each")
    } else if magic == TMPFS {
        (Severity::Slow, "it would keep blocks in memory twice: name a folder on an SSD")
    } else if !is_direct {
        (Severity::Slow, "reads and writes go through the page cache: slower, and memory is taken twice")
    } else if neighbours > 1 {
        (Severity::Slow, "several folders are on one device: their bandwidths do not add up")
    } else {
        (Severity::Fine, "files are made whole at the start; a worker that dies finds its blocks again")
    };
    DiskPathFinding::new(severity, found, consequence)
}

/// Returns the paths of the tier on the same device as `path`, `path` included.
fn paths_on_device_of<'a>(settings: &'a Settings, path: &'a Path) -> Vec<&'a Path> {
    use std::os::unix::fs::MetadataExt;
    let device = |path: &Path| existing(path).and_then(|folder| Some(fs::metadata(folder).ok()?.dev()));
    let own = device(path);
    let others = settings.disk_tier.path.0.iter().map(Path::new);
    let others = others.filter(|other| *other != path && own.is_some() && device(other) == own);
    std::iter::once(path).chain(others).collect()
}

/// Returns the bytes of the tier's existing files on the device of `path`.
pub(crate) fn held_on_device_of(settings: &Settings, path: &Path) -> u64 {
    paths_on_device_of(settings, path).into_iter().map(bytes_of_files).sum()
}

/// Returns the bytes of a worker's share of the tier on the device of `path`.
pub(crate) fn bytes_on_device_of(settings: &Settings, path: &Path) -> u64 {
    let tier = &settings.disk_tier;
    let each = tier.capacity.0 / tier.path.0.len().max(1) as u64;
    each.saturating_mul(paths_on_device_of(settings, path).len() as u64)
}

/// Whether a path names a block device.
pub(crate) fn is_block_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|of| of.file_type().is_block_device())
}

/// Returns the folder, or its nearest existing ancestor.
pub(crate) fn existing(path: &Path) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    path.ancestors().find(|folder| folder.is_dir()).map(Path::to_owned)
}

/// Returns the bytes of the segments in a folder and in its direct subfolders.
fn bytes_of_files(folder: &Path) -> u64 {
    let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    let is_segment = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with("segment-");
    let sum = |folder: &Path| -> u64 {
        let files = entries(folder).filter(is_segment).filter_map(|entry| entry.metadata().ok());
        files.map(|of| of.len()).sum()
    };
    let below = entries(folder).filter(|entry| entry.path().is_dir()).map(|entry| sum(&entry.path()));
    sum(folder) + below.sum::<u64>()
}

#[cfg(test)]
mod tests {
    use control_config::{Bytes, Paths};

    use super::*;

    fn with(capacity: u64, path: &str, engine: &str) -> Finding {
        let mut settings = Settings::default();
        settings.disk_tier.capacity = Bytes(capacity);
        settings.disk_tier.path = Paths(path.split(',').map(str::to_owned).collect());
        settings.disk_tier.engine = engine.to_owned();
        disk(&settings)
    }

    #[test]
    fn what_is_wrong_with_the_disk_tier_is_said() {
        assert_eq!(with(0, "", "auto").found, "not configured");
        assert!(with(1 << 20, "", "auto").consequence.contains("not start"));
        let there = std::env::temp_dir();
        let there = there.to_str().expect("a path");
        assert!(with(1 << 50, there, "auto").consequence.contains("not enough room"));
        assert!(!with(1 << 20, there, "auto").consequence.contains("not start"), "there is a megabyte");
        // Of two folders the worse finding is reported, in either order; folders on one device share its
        // space.
        let pair = |other: &str| with(1 << 20, &format!("{there},{other}"), "auto");
        assert!(pair("/proc/none").consequence.contains("not start"), "{}", pair("/proc/none").consequence);
        let second = pair(&format!("{there}/second"));
        assert!(
            second.found.contains("; ") && second.consequence.contains("one device"),
            "{}",
            second.consequence
        );
        // Two workers: there is space for each folder's share alone, but not for both.
        let room = rustix::fs::statvfs(std::env::temp_dir()).expect("a file system");
        let most = room.f_bavail * room.f_frsize * 3 / 4;
        let shared = with(most, &format!("{there},{there}/second"), "auto").consequence;
        assert!(shared.contains("not enough room"), "{shared}");
        assert!(with(1 << 20, there, "nvme-passthrough").found.contains("no character device"));
        assert!(with(1 << 20, "/dev/ng99n1", "nvme-passthrough").consequence.contains("not start"));
        assert!(with(1 << 20, "ffff:ff:1f.7", "nvme-user").consequence.contains("no such device"));
        assert!(with(1 << 20, "ffff:ff:1f.7", "spdk").consequence.contains("no such device"));
    }
}
