//! Engines that `kvasir register` puts into etcd.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use super::etcd::Etcd;

/// `kvasir register` beside an engine; it is killed when the test is over.
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
        // What it prints later is read, so that it can go on.
        std::thread::spawn(move || lines.for_each(drop));
        Self(child)
    }

    /// As a crash would: its lease runs out.
    pub fn kill(&mut self) {
        self.0.kill().expect("killed");
    }

    /// Tells it to take its key back.
    pub fn terminate(&mut self) {
        let sent = Command::new("kill").args(["-TERM", &self.0.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()));
    }
}

impl Drop for Register {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _gone = self.0.kill();
        let _status = self.0.wait();
    }
}
