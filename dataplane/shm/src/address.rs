//! Socket addresses: a path, or `@name` in the abstract namespace.
//!
//! An abstract name leaves no file behind when its process is killed, but any user of the same network
//! namespace can reach it, and containers with namespaces of their own cannot: access is controlled by the
//! peer's credentials, not by the file's permissions.

use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::ShmError;

/// Most connections that wait to be accepted.
const BACKLOG: i32 = 128;

fn parse(address: &str) -> Result<SocketAddrUnix, ShmError> {
    let parsed = match address.strip_prefix('@') {
        Some(name) if !name.is_empty() => SocketAddrUnix::new_abstract_name(name.as_bytes()),
        None if !address.is_empty() => SocketAddrUnix::new(address),
        _ => return Err(ShmError::Address(address.to_owned())),
    };
    parsed.map_err(|_| ShmError::Address(address.to_owned()))
}

fn system<'a>(operation: &'static str, address: &'a str) -> impl FnOnce(Errno) -> ShmError + 'a {
    move |errno| ShmError::System { operation, address: address.to_owned(), errno }
}

fn socket(address: &str) -> Result<OwnedFd, ShmError> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(system("socket", address))
}

/// Connects without blocking: a listener whose backlog is full is an error (`EAGAIN`), not a wait.
pub(crate) fn connect(address: &str) -> Result<OwnedFd, ShmError> {
    let parsed = parse(address)?;
    let socket = socket(address)?;
    rustix::net::connect(&socket, &parsed).map_err(system("connect", address))?;
    Ok(socket)
}

/// Listens, after removing the socket file of a killed process.
pub(crate) fn listen(address: &str) -> Result<OwnedFd, ShmError> {
    let parsed = parse(address)?;
    remove_stale(address);
    let socket = socket(address)?;
    rustix::net::bind(&socket, &parsed).map_err(system("bind", address))?;
    rustix::net::listen(&socket, BACKLOG).map_err(system("listen", address))?;
    Ok(socket)
}

/// Removes the file of a socket without a listener; returns whether it did. Other files are left alone:
/// `bind` refuses them.
///
/// A socket between `bind` and `listen` looks the same, so a caller that removes files of other processes
/// must skip recent ones.
pub fn remove_stale(address: &str) -> bool {
    if address.starts_with('@') {
        return false;
    }
    let is_socket = std::fs::symlink_metadata(address).is_ok_and(|file| file.file_type().is_socket());
    let is_stale =
        is_socket && matches!(connect(address), Err(ShmError::System { errno: Errno::CONNREFUSED, .. }));
    if is_stale {
        remove(address);
    }
    is_stale
}

/// Removes the socket's file, if it exists.
pub(crate) fn remove(address: &str) {
    if !address.starts_with('@') {
        // The file may not exist any more; if it cannot be removed, the next `bind` reports it.
        let _kept = std::fs::remove_file(address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_dead_socket_is_removed() {
        let path = std::env::temp_dir().join(format!("kvasir-shm-address-{}", std::process::id()));
        let address = path.display().to_string();
        drop(listen(&address).expect("listen"));
        assert!(path.exists(), "the file outlives its socket");
        let living = listen(&address).expect("a stale file does not stop a restart");
        assert!(matches!(listen(&address), Err(ShmError::System { operation: "bind", .. })));
        drop(living);
        remove(&address);
        std::fs::write(&path, "a file of somebody").expect("write");
        assert!(matches!(listen(&address), Err(ShmError::System { operation: "bind", .. })));
        assert_eq!(std::fs::read(&path).expect("read"), b"a file of somebody");
        remove(&address);
    }

    #[test]
    fn impossible_addresses_are_errors() {
        for address in ["", "@", &"x".repeat(200), &format!("@{}", "x".repeat(200))] {
            assert!(matches!(connect(address), Err(ShmError::Address(_))), "{address}");
        }
    }
}
