//! Privileges of this process and features of this machine: capabilities, kernel type information, cgroups.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::EbpfError;

// Numbers of linux/capability.h.
const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;

/// CGROUP2_SUPER_MAGIC of linux/magic.h.
const CGROUP2_MAGIC: u64 = 0x6367_7270;

/// Capabilities that the network programs need. Programs that read kernel structures also need `CAP_PERFMON`.
pub(crate) const NETWORK: &[u32] = &[CAP_BPF, CAP_NET_ADMIN];
pub(crate) const NETWORK_AND_STRUCTURES: &[u32] = &[CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON];
pub(crate) const STRUCTURES: &[u32] = &[CAP_BPF, CAP_PERFMON];

/// Fails with the names of the missing capabilities.
pub(crate) fn check_capabilities(feature: &'static str, needed: &[u32]) -> Result<(), EbpfError> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let missing = missing(effective(&status), needed);
    if missing.is_empty() {
        Ok(())
    } else {
        Err(EbpfError::Capability { feature, missing: missing.join(" + ") })
    }
}

/// Returns the `CapEff` set of a `/proc/<pid>/status`; 0 when it cannot be read.
fn effective(status: &str) -> u64 {
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok())
        .unwrap_or(0)
}

fn missing(effective: u64, needed: &[u32]) -> Vec<&'static str> {
    let has = |capability: u32| effective >> capability & 1 == 1;
    // CAP_SYS_ADMIN implies the other capabilities here (bpf_token_capable).
    if has(CAP_SYS_ADMIN) {
        return Vec::new();
    }
    needed
        .iter()
        .filter(|capability| !has(**capability))
        .map(|capability| match *capability {
            CAP_NET_ADMIN => "CAP_NET_ADMIN",
            CAP_PERFMON => "CAP_PERFMON",
            CAP_BPF => "CAP_BPF",
            _ => "CAP_SYS_ADMIN",
        })
        .collect()
}

pub(crate) fn check_btf(feature: &'static str) -> Result<(), EbpfError> {
    if Path::new("/sys/kernel/btf/vmlinux").exists() { Ok(()) } else { Err(EbpfError::NoBtf { feature }) }
}

/// Returns the cgroup v2 directory of this process.
///
/// # Errors
///
/// [`EbpfError::NoCgroup2`] where no such hierarchy is mounted, [`EbpfError::NotACgroup`] where the directory is not
/// visible to this process, as in a container with a private mount.
pub fn own_cgroup() -> Result<PathBuf, EbpfError> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = cgroup_directory(&mounts, &groups).ok_or(EbpfError::NoCgroup2)?;
    check_cgroup(&path)?;
    Ok(path)
}

/// Joins the mount point of the cgroup v2 hierarchy with this process's path in it (proc(5), cgroups(7)).
fn cgroup_directory(mounts: &str, groups: &str) -> Option<PathBuf> {
    let (root, mount_point) = mounts.lines().find_map(|line| {
        let (place, source) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3);
        (source.split(' ').next() == Some("cgroup2")).then_some(())?;
        Some((place.next()?, place.next()?))
    })?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let below = group.strip_prefix(root.trim_end_matches('/')).unwrap_or(group);
    Some(Path::new(mount_point).join(below.trim_start_matches('/')))
}

pub(crate) fn check_cgroup(path: &Path) -> Result<(), EbpfError> {
    let wrong = |reason: String| EbpfError::NotACgroup { path: path.to_owned(), reason };
    let found = rustix::fs::statfs(path).map_err(|errno| wrong(errno.to_string()))?;
    if found.f_type.cast_unsigned() != CGROUP2_MAGIC {
        return Err(wrong("it lies on another file system".to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{cgroup_directory, effective, missing};
    use std::path::PathBuf;

    #[test]
    fn capabilities() {
        let all = effective("Name:\tx\nCapEff:\t000001fffeffffff\n");
        assert_eq!(all, 0x01ff_feff_ffff);
        for (set, absent) in [
            (all, vec![]),
            (0, vec!["CAP_BPF", "CAP_NET_ADMIN", "CAP_PERFMON"]),
            (1 << 39, vec!["CAP_NET_ADMIN", "CAP_PERFMON"]),
            (1 << 39 | 1 << 12 | 1 << 38, vec![]),
            (1 << 21, vec![]),
        ] {
            assert_eq!(missing(set, super::NETWORK_AND_STRUCTURES), absent, "{set:x}");
        }
        assert_eq!(effective("garbage"), 0);
    }

    #[test]
    fn cgroups() {
        let hybrid = "25 24 0:22 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                      36 25 0:30 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
        let container = "36 25 0:30 /pod /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw\n";
        for (mounts, groups, found) in [
            (hybrid, "9:name=systemd:/\n0::/\n", Some("/sys/fs/cgroup/unified")),
            (hybrid, "0::/kvasir.slice/node\n", Some("/sys/fs/cgroup/unified/kvasir.slice/node")),
            (container, "0::/pod/main\n", Some("/sys/fs/cgroup/main")),
            ("", "0::/\n", None),
            (hybrid, "1:cpu:/\n", None),
        ] {
            assert_eq!(cgroup_directory(mounts, groups), found.map(PathBuf::from), "{mounts} {groups}");
        }
    }
}
