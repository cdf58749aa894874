//! Resources of the machine that the tests use, each released on drop, also in a panic: a cgroup, network
//! namespaces, child processes.

#![allow(dead_code)]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dataplane_ebpf::EbpfError;

/// The tests of one binary share the process's cgroup and the machine's programs, so they run one at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
static NUMBER: AtomicU32 = AtomicU32::new(0);

pub(crate) fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn unique(what: &str) -> String {
    format!("kv{}-{what}{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// Returns the value, or prints why the test is skipped and returns `None`. An error that a suitable machine
/// must not return fails the test.
pub(crate) fn or_skip<T>(result: Result<T, EbpfError>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(
            off @ (EbpfError::NotBuilt(_)
            | EbpfError::Capability { .. }
            | EbpfError::NoBtf { .. }
            | EbpfError::NoCgroup2
            | EbpfError::NotACgroup { .. }),
        ) => {
            println!("SKIPPED: {off}");
            None
        }
        Err(off) => panic!("{off}"),
    }
}

/// Runs a command; `Err` with its output when it fails or does not exist.
pub(crate) fn run(words: &[&str]) -> Result<String, String> {
    let output = Command::new(words[0])
        .args(&words[1..])
        .output()
        .map_err(|error| format!("{}: {error}", words[0]))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(format!("{}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
    }
}

/// A child cgroup that this process moves into; drop moves the process back.
pub(crate) struct Cgroup {
    pub(crate) path: PathBuf,
    home: PathBuf,
    mounted: Option<PathBuf>,
}

impl Cgroup {
    pub(crate) fn enter() -> Option<Self> {
        let (home, mounted) = match dataplane_ebpf::own_cgroup() {
            Ok(home) => (home, None),
            Err(_) => {
                // No hierarchy is mounted: the kernel has one all the same, and root may mount it anywhere.
                let point = std::env::temp_dir().join(unique("cgroup2"));
                fs::create_dir_all(&point).expect("the temporary directory is writable");
                if let Err(why) = run(&["mount", "-t", "cgroup2", "none", &point.to_string_lossy()]) {
                    println!("SKIPPED: {why}");
                    let _ = fs::remove_dir(&point);
                    return None;
                }
                (point.clone(), Some(point))
            }
        };
        let path = home.join(unique("group"));
        let group = Self { path, home, mounted };
        if let Err(error) =
            fs::create_dir(&group.path).and_then(|()| group.take(&group.path, std::process::id()))
        {
            println!("SKIPPED: {}: {error}", group.path.display());
            return None;
        }
        Some(group)
    }

    fn take(&self, path: &Path, process: u32) -> std::io::Result<()> {
        fs::write(path.join("cgroup.procs"), process.to_string())
    }

    /// Moves another process to the original cgroup of this process.
    pub(crate) fn release(&self, process: u32) {
        self.take(&self.home, process).expect("root may move processes");
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = self.take(&self.home, std::process::id());
        for _ in 0..100 {
            if !self.path.exists() || fs::remove_dir(&self.path).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        if let Some(point) = &self.mounted {
            let _ = run(&["umount", &point.to_string_lossy()]);
            let _ = fs::remove_dir(point);
        }
    }
}

/// Two network namespaces joined by a veth pair: `left` 10.99.0.1 and fd99::1, `right` 10.99.0.2 and fd99::2.
pub(crate) struct Namespaces {
    pub(crate) left: String,
    pub(crate) right: String,
}

/// Name of the interface in both namespaces.
pub(crate) const VETH: &str = "veth0";

impl Namespaces {
    pub(crate) fn new() -> Option<Self> {
        let pair = Self { left: unique("l"), right: unique("r") };
        let set_up = || -> Result<(), String> {
            run(&["ip", "netns", "add", &pair.left])?;
            run(&["ip", "netns", "add", &pair.right])?;
            run(&[
                "ip",
                "-n",
                &pair.left,
                "link",
                "add",
                VETH,
                "type",
                "veth",
                "peer",
                "name",
                VETH,
                "netns",
                &pair.right,
            ])?;
            for (namespace, host) in [(&pair.left, 1), (&pair.right, 2)] {
                run(&["ip", "-n", namespace, "link", "set", "lo", "up"])?;
                run(&["ip", "-n", namespace, "link", "set", VETH, "up"])?;
                run(&["ip", "-n", namespace, "addr", "add", &format!("10.99.0.{host}/24"), "dev", VETH])?;
                run(&[
                    "ip",
                    "-n",
                    namespace,
                    "addr",
                    "add",
                    &format!("fd99::{host}/64"),
                    "dev",
                    VETH,
                    "nodad",
                ])?;
            }
            Ok(())
        };
        match set_up() {
            Ok(()) => Some(pair),
            Err(why) => {
                println!("SKIPPED: no network namespaces: {why}");
                None
            }
        }
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        let _ = run(&["ip", "netns", "del", &self.left]);
        let _ = run(&["ip", "netns", "del", &self.right]);
    }
}

/// Moves the calling thread into a namespace; use a thread of its own.
pub(crate) fn enter(namespace: &str) {
    let file = fs::File::open(format!("/run/netns/{namespace}")).expect("ip netns made it");
    rustix::thread::move_into_link_name_space(
        std::os::fd::AsFd::as_fd(&file),
        Some(rustix::thread::LinkNameSpaceType::Network),
    )
    .expect("root may enter it");
}

/// Runs `work` in a namespace and returns its result.
pub(crate) fn within<T: Send + 'static>(namespace: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let namespace = namespace.to_owned();
    std::thread::spawn(move || {
        enter(&namespace);
        work()
    })
    .join()
    .expect("the thread did not panic")
}

/// A process of this binary that runs only the test `name` with `KVASIR_CHILD` set. Killed on drop.
pub(crate) struct Grandchild {
    child: Child,
}

impl Grandchild {
    pub(crate) fn start(name: &str, argument: &str) -> Self {
        let child = Command::new(std::env::current_exe().expect("a test runs from a file"))
            .args([name, "--exact", "--nocapture", "--test-threads=1"])
            .env("KVASIR_CHILD", argument)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a test binary can be run");
        Self { child }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line that contains `word`.
    pub(crate) fn wait_for(&mut self, word: &str) -> String {
        let output = self.child.stdout.as_mut().expect("it is piped");
        let mut line = String::new();
        let mut output = BufReader::with_capacity(1, output);
        while output.read_line(&mut line).expect("a pipe can be read") > 0 {
            if line.contains(word) {
                return line;
            }
            line.clear();
        }
        panic!("the child ended before it said {word:?}");
    }

    /// Releases the child that waits in [`wait_for_parent`].
    pub(crate) fn nudge(&mut self) {
        use std::io::Write as _;
        self.child.stdin.as_mut().expect("it is piped").write_all(b"\n").expect("the child reads");
    }

    /// Kills the process with SIGKILL and waits for its end.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it is ours");
    }
}

impl Drop for Grandchild {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the argument that the parent set for this process; `None` in an ordinary test run.
pub(crate) fn child_argument() -> Option<String> {
    std::env::var("KVASIR_CHILD").ok()
}

pub(crate) fn wait_for_parent() {
    let mut line = String::new();
    let _ = std::io::stdin().read_line(&mut line);
}

pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not within 10 s");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns the number of programs with these names that the kernel holds.
pub(crate) fn programs(names: &[&str]) -> usize {
    aya::programs::loaded_programs()
        .filter_map(Result::ok)
        .filter(|program| program.name_as_str().is_some_and(|name| names.contains(&name)))
        .count()
}

/// A repeatable stream of random bytes: xorshift64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}
