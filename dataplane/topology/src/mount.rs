//! Identity of a directory's file system, by which two processes can tell whether they share it.
//!
//! Containers on one host may see different directories under one name, or one directory under two. The
//! device number of the mount together with the path inside it names the directory itself.
//! Source: proc_pid_mountinfo(5).

/// One line of mountinfo.
struct Mount<'a> {
    device: &'a str,
    root: &'a str,
    point: &'a str,
    options: &'a str,
}

fn parse(line: &str) -> Option<Mount<'_>> {
    let mut fields = line.split_whitespace();
    let (device, root, point) = (fields.nth(2)?, fields.next()?, fields.next()?);
    Some(Mount { device, root, point, options: line.split_whitespace().next_back()? })
}

/// Returns the last mount whose point is the directory or lies above it: later lines hide earlier ones.
fn find<'a>(mountinfo: &'a str, directory: &str) -> Option<Mount<'a>> {
    let above = |point: &str| {
        let rest = directory.strip_prefix(point.trim_end_matches('/'));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let mounts = mountinfo.lines().filter_map(parse).filter(|mount| above(mount.point));
    mounts.reduce(|best, mount| if mount.point.len() >= best.point.len() { mount } else { best })
}

/// Returns an id that is equal for two processes of one boot exactly when they see the same directory.
pub(crate) fn directory_id(mountinfo: &str, directory: &str) -> Option<String> {
    let mount = find(mountinfo, directory)?;
    let inside = directory.strip_prefix(mount.point.trim_end_matches('/'))?;
    let path = format!("{}{inside}", mount.root.trim_end_matches('/'));
    Some(format!("{}:{}", mount.device, if path.is_empty() { "/" } else { &path }))
}

/// Returns the `size=` of the file system that holds a directory, in bytes.
pub(crate) fn size_bytes(mountinfo: &str, directory: &str) -> Option<u64> {
    let mount = find(mountinfo, directory)?;
    let size = mount.options.split(',').find_map(|option| option.strip_prefix("size="))?;
    let (digits, unit) = size.split_at(size.len() - usize::from(size.ends_with(['k', 'm', 'g'])));
    let shift = match unit {
        "k" => 10,
        "m" => 20,
        "g" => 30,
        _ => 0,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: &str =
        "27 1 254:0 / / rw - ext4 /dev/vda rw\n25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw,size=2048k\n";
    const CONTAINER: &str = "27 1 0:90 / / rw - overlay o rw\n30 27 254:0 /run/kvasir /kv rw - ext4 /dev/vda rw\n\
        31 27 0:99 / /dev/shm rw - tmpfs shm rw,size=64m\n";

    #[test]
    fn the_same_directory_has_one_id_under_two_names() {
        assert_eq!(directory_id(HOST, "/run/kvasir"), directory_id(CONTAINER, "/kv"));
        assert_ne!(directory_id(HOST, "/dev/shm"), directory_id(CONTAINER, "/dev/shm"));
        assert_eq!(directory_id(HOST, "/dev/shm").as_deref(), Some("0:23:/"));
        assert_eq!(directory_id(HOST, "/dev/shmoo").as_deref(), Some("254:0:/dev/shmoo"));
        assert_eq!(directory_id("", "/"), None);
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(size_bytes(HOST, "/dev/shm"), Some(2 << 20));
        assert_eq!(size_bytes(CONTAINER, "/dev/shm"), Some(64 << 20));
        assert_eq!(size_bytes(HOST, "/"), None);
        assert_eq!(size_bytes("1 1 0:1 / / rw - tmpfs t size=99999999999999999999g", "/"), None);
    }
}
