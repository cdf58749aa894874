//! The socket files of the shared-memory transport.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Age from which a socket file without a listener counts as left by a killed process.
const STALE_AFTER: Duration = Duration::from_secs(10);

/// Returns the path of a worker's socket in this folder.
#[must_use]
pub fn worker_socket(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("kvasir-{name}.sock"))
}

/// Returns the path of a process's socket for shared device memory, from that of its socket for shared memory.
#[must_use]
pub fn device_socket(socket: &Path) -> PathBuf {
    let mut name = socket.file_stem().unwrap_or_default().to_owned();
    name.push("-device.sock");
    socket.with_file_name(name)
}

/// Removes the socket files of processes that were killed. Files younger than 10 seconds stay: their process may be
/// between `bind` and `listen`.
pub(crate) fn remove_stale_sockets(folder: &Path, now: SystemTime) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let is_ours =
            name.to_str().is_some_and(|name| name.starts_with("kvasir-") && name.ends_with(".sock"));
        let made = entry.metadata().and_then(|file| file.modified());
        let is_old = made.is_ok_and(|made| now.duration_since(made).is_ok_and(|age| age > STALE_AFTER));
        if is_ours && is_old && dataplane_shm::remove_stale(&entry.path().display().to_string()) {
            tracing::debug!(file = %entry.path().display(), "removed the socket of a process that is gone");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_of_killed_processes_are_removed() {
        let folder = std::env::temp_dir().join(format!("kvasir-stale-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let listen = |name: &str| std::os::unix::net::UnixListener::bind(folder.join(name)).expect("bind");
        let living = listen("kvasir-1.sock");
        for dead in ["kvasir-2.sock", "other-3.sock"] {
            drop(listen(dead));
        }
        std::fs::write(folder.join("kvasir-4.sock"), "not a socket").expect("write");
        let names = || {
            let entries = std::fs::read_dir(&folder).expect("the folder").flatten();
            let mut names: Vec<_> =
                entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
            names.sort();
            names
        };
        remove_stale_sockets(&folder, SystemTime::now());
        assert_eq!(names().len(), 4, "a young socket may be about to listen");
        remove_stale_sockets(&folder, SystemTime::now() + STALE_AFTER * 2);
        assert_eq!(names(), ["kvasir-1.sock", "kvasir-4.sock", "other-3.sock"]);
        drop(living);
        std::fs::remove_dir_all(&folder).expect("cleaned up");
    }
}
