//! A real etcd on this machine, with its own folder; Debian's package is `etcd-server`.

use std::io::Write;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

/// An etcd process; it is killed and its folder removed on drop.
pub struct Etcd {
    child: Child,
    namespace: Option<String>,
    folder: PathBuf,
    address: String,
    peer: String,
    extra: Vec<String>,
}

/// Returns two ports that no other etcd of this process has.
fn ports() -> (u16, u16) {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Below the kernel's range of ephemeral ports, because etcd is restarted on the same ports.
    let first = 12_000 + (std::process::id() % 500) as u16 * 32;
    let mut free = std::iter::from_fn(|| Some(first + NEXT.fetch_add(1, Ordering::Relaxed)))
        .filter(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok());
    let mut next = || free.next().expect("ports without end");
    (next(), next())
}

impl Etcd {
    /// Returns `None`, with a printed message, if this machine has no etcd.
    pub fn start(name: &str, extra: &[&str]) -> Option<Self> {
        Self::start_in(name, None, extra)
    }

    /// Starts etcd in a network namespace, on its address there.
    pub fn start_in(name: &str, namespace: Option<(&str, &str)>, extra: &[&str]) -> Option<Self> {
        let is_there = |program: &str, argument: &str| {
            let output = Command::new(program).env("ETCDCTL_API", "3").arg(argument).output();
            output.is_ok_and(|output| output.status.success())
        };
        if !is_there("etcd", "--version") || !is_there("etcdctl", "version") {
            eprintln!("SKIPPED {name}: etcd and etcdctl are needed (Debian: etcd-server etcd-client)");
            return None;
        }
        let folder = std::env::temp_dir().join(format!("kvasir-{name}-{}", std::process::id()));
        drop(std::fs::remove_dir_all(&folder));
        let (client, peer) = ports();
        let ip = namespace.map_or("127.0.0.1", |(_, ip)| ip);
        let (address, peer) = (format!("{ip}:{client}"), format!("{ip}:{peer}"));
        let namespace = namespace.map(|(namespace, _)| namespace.to_owned());
        let extra: Vec<String> = extra.iter().map(|argument| (*argument).to_owned()).collect();
        let child = spawn(namespace.as_deref(), &folder, &address, &peer, &extra);
        let etcd = Self { child, namespace, folder, address, peer, extra };
        etcd.wait();
        Some(etcd)
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Kills the process, like a power failure.
    pub fn kill(&mut self) {
        // The process may already have exited.
        let _gone = self.child.kill();
        let _status = self.child.wait();
    }

    /// Starts etcd again with its data.
    pub fn restart(&mut self) {
        self.kill();
        self.child = spawn(self.namespace.as_deref(), &self.folder, &self.address, &self.peer, &self.extra);
        self.wait();
    }

    /// Starts etcd again without its data.
    pub fn restart_empty(&mut self) {
        self.kill();
        std::fs::remove_dir_all(&self.folder).expect("removed");
        self.restart();
    }

    /// Runs `etcdctl`; returns its output.
    pub fn ctl(&self, arguments: &[&str]) -> String {
        let output = Command::new("etcdctl")
            .env("ETCDCTL_API", "3")
            .args(["--endpoints", &self.url()])
            .args(arguments)
            .output()
            .expect("etcdctl, of Debian's etcd-client");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Writes the keys of all `put KEY VALUE` lines at one revision.
    pub fn transaction(&self, puts: &str) {
        let mut child = Command::new("etcdctl")
            .env("ETCDCTL_API", "3")
            .args(["--endpoints", &self.url(), "txn"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("etcdctl, of Debian's etcd-client");
        let mut stdin = child.stdin.take().expect("piped");
        // No comparison, then the operations on success, then none on failure.
        stdin.write_all(format!("\n{puts}\n\n").as_bytes()).expect("written");
        drop(stdin);
        assert!(child.wait().expect("an end").success());
    }

    /// Returns the newest revision.
    pub fn revision(&self) -> String {
        let status = self.ctl(&["get", "--write-out", "json", "no-such-key"]);
        let (_, rest) = status.split_once("\"revision\":").expect("a revision");
        rest.chars().take_while(char::is_ascii_digit).collect()
    }

    fn wait(&self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while std::net::TcpStream::connect(&self.address).is_err() {
            assert!(Instant::now() < deadline, "etcd does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn spawn(
    namespace: Option<&str>,
    folder: &std::path::Path,
    address: &str,
    peer: &str,
    extra: &[String],
) -> Child {
    let mut command = Command::new(if namespace.is_some() { "ip" } else { "etcd" });
    if let Some(namespace) = namespace {
        command.args(["netns", "exec", namespace, "etcd"]);
    }
    command
        .arg("--data-dir")
        .arg(folder)
        .args(["--listen-client-urls", &format!("http://{address}")])
        .args(["--advertise-client-urls", &format!("http://{address}")])
        .args(["--listen-peer-urls", &format!("http://{peer}")])
        .args(["--initial-advertise-peer-urls", &format!("http://{peer}")])
        .args(["--initial-cluster", &format!("default=http://{peer}")])
        .args(["--log-level", "error"])
        .args(extra)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("etcd")
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
        drop(std::fs::remove_dir_all(&self.folder));
    }
}
