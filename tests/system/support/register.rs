//! Engines that `kvasir register` registers in etcd.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use super::etcd::Etcd;

/// A `kvasir register` process for an engine; it is killed on drop.
pub struct Register(Child);

impl Register {
    pub fn start(etcd: &Etcd, url: &str, more: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvasir"))
            .args(["register", url, "--etcd", &etcd.url()])
            .args(more)
            .stdout(Stdio::piped())
            .spawn()
            .expect("kvasir register");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let is_written = lines.any(|line| line.is_ok_and(|line| line.ends_with(" written")));
        assert!(is_written, "{url} is registered");
        // Further output is read, so that the process does not block.
        std::thread::spawn(move || lines.for_each(drop));
        Self(child)
    }

    /// Kills the process, like a crash: its lease expires.
    pub fn kill(&mut self) {
        self.0.kill().expect("killed");
    }

    /// Tells the process to deregister the engine.
    pub fn terminate(&mut self) {
        let sent = Command::new("kill").args(["-TERM", &self.0.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()));
    }
}

impl Drop for Register {
    fn drop(&mut self) {
        // The process may already have exited.
        let _gone = self.0.kill();
        let _status = self.0.wait();
    }
}
