//! Whether the disk tier would get what it is configured for.

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
        let each: Vec<(String, String)> = tier.path.0.iter().map(|path| of_path(settings, path)).collect();
        let worst = each.iter().find(|(_, consequence)| consequence.contains("not start")).or(each.first());
        let consequence = worst.map_or_else(String::new, |(_, consequence)| consequence.clone());
        (each.into_iter().map(|(found, _)| found).collect::<Vec<_>>().join("; "), consequence)
    };
    Finding { what: "disk tier", found, consequence }
}

/// One of the tier's paths.
fn of_path(settings: &Settings, path: &str) -> (String, String) {
    match settings.disk_tier.engine.as_str() {
        "nvme-user" | "spdk" => in_user_space(path),
        "nvme-passthrough" => character_device(path),
        _ => files(settings, Path::new(path)),
    }
}

fn in_user_space(address: &str) -> (String, String) {
    let driver = fs::read_link(format!("/sys/bus/pci/devices/{address}/driver"));
    let name = driver.ok().and_then(|link| Some(link.file_name()?.to_string_lossy().into_owned()));
    let consequence = match name.as_deref() {
        Some("vfio-pci") => "the driver in user space takes it".to_owned(),
        Some(_) => format!("workers will not start: bind {address} to vfio-pci first"),
        None => "workers will not start: there is no such device, or no driver holds it".to_owned(),
    };
    (format!("{address}, driver {}", name.as_deref().unwrap_or("none")), consequence)
}

fn character_device(path: &str) -> (String, String) {
    match fs::metadata(path) {
        Ok(of) if of.file_type().is_char_device() => {
            (format!("{path}, a character device"), "NVMe commands go through the kernel's driver".to_owned())
        }
        Ok(_) => (
            format!("{path} is no character device"),
            "workers will not start: name the namespace's `/dev/ngXnY`".to_owned(),
        ),
        Err(error) => (format!("{path}: {error}"), "workers will not start".to_owned()),
    }
}

fn files(settings: &Settings, path: &Path) -> (String, String) {
    let tier = &settings.disk_tier;
    if is_block_device(path) {
        let consequence = "one worker can have it; each further one needs a device of its own";
        return (format!("{}, a block device", path.display()), consequence.to_owned());
    }
    let Some(folder) = existing(path) else {
        return (format!("{} does not exist", path.display()), "workers will not start".to_owned());
    };
    let room = match rustix::fs::statfs(&folder) {
        Ok(room) => room,
        Err(errno) => return (format!("{}: {errno}", folder.display()), "workers will not start".to_owned()),
    };
    let magic = room.f_type as i64;
    let name =
        FILE_SYSTEMS.iter().find(|(of, _)| *of == magic).map_or("another file system", |(_, name)| name);
    let free = (room.f_bavail as u64).saturating_mul(room.f_bsize as u64);
    let workers = settings.serve.prefill_workers + settings.serve.decode_workers;
    let needed = (tier.capacity.0 / tier.path.0.len().max(1) as u64).saturating_mul(workers);
    // What the files take already is theirs.
    let held = bytes_of_files(path);
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
    let consequence = if is_refused {
        "workers will not start: they cannot make files there".to_owned()
    } else if free.saturating_add(held) < needed {
        "workers will not start: not enough room for `disk_tier.capacity` of each".to_owned()
    } else if magic == TMPFS {
        "it would keep blocks in memory twice: name a folder on an SSD".to_owned()
    } else if !is_direct {
        "reads and writes go through the page cache: slower, and memory is taken twice".to_owned()
    } else {
        "files are made whole at the start; a worker that dies finds its blocks again".to_owned()
    };
    (found, consequence)
}

/// Whether a path names a block device.
pub(crate) fn is_block_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|of| of.file_type().is_block_device())
}

/// The folder, or the nearest one above it that there is.
pub(crate) fn existing(path: &Path) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    path.ancestors().find(|folder| folder.is_dir()).map(Path::to_owned)
}

/// Bytes of the segments in a folder and in those right below it.
pub(crate) fn bytes_of_files(folder: &Path) -> u64 {
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
        let second = format!("{there},{there}/second");
        let two = with(1 << 20, &second, "auto");
        assert!(
            two.found.contains("; ") && !two.consequence.contains("not start"),
            "{} {}",
            two.found,
            two.consequence
        );
        let missing = with(1 << 20, &format!("{there},relative/none"), "nvme-passthrough");
        assert!(missing.consequence.contains("not start"), "{}", missing.consequence);
        assert!(with(1 << 20, there, "nvme-passthrough").found.contains("no character device"));
        assert!(with(1 << 20, "/dev/ng99n1", "nvme-passthrough").consequence.contains("not start"));
        assert!(with(1 << 20, "ffff:ff:1f.7", "nvme-user").consequence.contains("no such device"));
        assert!(with(1 << 20, "ffff:ff:1f.7", "spdk").consequence.contains("no such device"));
    }
}
