//! Memory available to this process: the machine's memory or the limit of its control group, whichever is less.
//!
//! Source: cgroups(7); `memory.max` in the kernel's `admin-guide/cgroup-v2.rst`, `memory.limit_in_bytes` in
//! `admin-guide/cgroup-v1/memory.rst`.

use std::path::Path;

/// Most bytes of memory, and a name for the limit that applies.
pub(crate) fn most() -> (u64, &'static str) {
    let system = rustix::system::sysinfo();
    let machine = (system.totalram as u64).saturating_mul(u64::from(system.mem_unit));
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    match group_limit(Path::new("/sys/fs/cgroup"), &groups) {
        Some(limit) if limit < machine => (limit, "control group's"),
        _ => (machine, "machine's"),
    }
}

/// Lowest limit of the groups named in `/proc/self/cgroup` and of their parents, as far as they are visible: in
/// a container, often only the root is.
fn group_limit(root: &Path, groups: &str) -> Option<u64> {
    let limits = groups.lines().flat_map(|line| {
        let (controllers, group) =
            line.split_once(':').and_then(|(_, rest)| rest.split_once(':')).unwrap_or_default();
        let (root, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            _ => (root.join("memory"), "memory.limit_in_bytes"),
        };
        let is_about_memory = controllers.is_empty() || controllers.split(',').any(|name| name == "memory");
        let folders = Path::new(group).ancestors().filter(move |_| is_about_memory);
        folders.filter_map(move |folder| {
            let folder = root.join(folder.strip_prefix("/").unwrap_or(folder));
            // "max" is not a number, and means no limit.
            std::fs::read_to_string(folder.join(file)).ok()?.trim().parse::<u64>().ok()
        })
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_limit_on_the_way_up_counts() {
        let root = std::env::temp_dir().join(format!("kvasir-capi-groups-{}", std::process::id()));
        for (folder, file, limit) in [
            ("a/b", "memory.max", "max\n"),
            ("a", "memory.max", "5000\n"),
            ("", "memory.max", "9000\n"),
            ("memory", "memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/c", "memory.limit_in_bytes", "4000\n"),
        ] {
            std::fs::create_dir_all(root.join(folder)).expect("a folder");
            std::fs::write(root.join(folder).join(file), limit).expect("a file");
        }
        for (groups, limit) in [
            ("0::/a/b\n", Some(5000)),
            ("0::/not/seen/from/here\n", Some(9000)),
            ("4:cpu,cpuacct:/c\n", None),
            ("5:hugetlb,memory:/c\n4:cpu:/\n", Some(4000)),
            ("5:memory:/c\n0::/a\n", Some(4000)),
            ("5:memory:/elsewhere\n", Some(9_223_372_036_854_771_712)),
            ("", None),
            // An unreadable line is treated as the root group.
            ("nonsense\n", Some(9000)),
        ] {
            assert_eq!(group_limit(&root, groups), limit, "{groups}");
        }
        std::fs::remove_dir_all(&root).expect("removed");
        assert!(most().0 > 1 << 20, "{:?}", most());
    }
}
