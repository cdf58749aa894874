//! Random hand-offs between processes, over every transport of this machine, from peers with all heads or half
//! of them: with prefixes that are already present, cancellations, too short deadlines, peers killed in the
//! middle, and peers that send invalid slots, generations and lengths or do not hold the secret. Every byte
//! reported as arrived is compared; at the end no resource may be in use.

mod malicious_peer;
mod node;
mod work;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use dataplane_fabric::auth::{SharedKey, random_bytes};
use dataplane_transfer::HeadRange;
use malicious_peer::{AttackCounts, MaliciousPeer};
pub(crate) use node::run as run_node;
use work::Worker;

use crate::results::{self, Better};

/// Transports of the peers that run at a time: one over both transports, one over each alone.
pub(crate) const PEERS: &str = "shm,tcp;shm;tcp";
/// Allowed growth of open descriptors and resident memory between a time shortly after the start and the end:
/// links being made, buffers at their largest.
const DESCRIPTORS_SLACK: usize = 40;
const MEMORY_SLACK_MIB: u64 = 96;
/// Threads that attack the worker over TCP.
const ATTACKERS: u64 = 2;
/// Longest time until all resources are released at the end.
const REST_WITHIN: Duration = Duration::from_secs(30);

/// Returns the command of a child: this program's arguments up to the name of this benchmark.
fn own_command() -> Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("own executable")?);
    command.args(std::env::args().skip(1).take_while(|argument| argument != "transfer-soak"));
    Ok(command)
}

/// A peer process and its description.
pub(crate) struct Peer {
    child: Child,
    commands: ChildStdin,
    pub(crate) address: String,
    /// Heads of each block that the peer holds.
    pub(crate) heads: HeadRange,
    kill_at: Instant,
}

impl Peer {
    fn start(folder: &Path, transports: &str, secret: &str, number: u64, life: Duration) -> Result<Self> {
        let heads = heads_of(number);
        let mut child = own_command()?
            .arg("transfer-node")
            .args(["--transports", transports])
            .args(["--heads", &format!("{}+{}", heads.first, heads.count)])
            .arg("--socket")
            .arg(folder.join(format!("{number}.sock")))
            .env(node::SECRET, secret)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a peer")?;
        let commands = child.stdin.take().context("its input")?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("its output")?).read_line(&mut line)?;
        let address = line.trim().to_owned();
        ensure!(!address.is_empty(), "a peer did not say where it is");
        Ok(Self { child, commands, address, heads, kill_at: Instant::now() + life })
    }

    /// Tells the peer to push blocks; the peer may be dead already.
    pub(crate) fn push(&mut self, transfer: u64, blocks: usize, seed: u64) {
        let _dead = writeln!(self.commands, "push {transfer} {blocks} {seed}");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Our own child, by its handle. If it has ended by itself, there is no process to kill.
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}

/// Half of the peers have all heads of the model, the others one half or the other: rows with gaps.
fn heads_of(number: u64) -> HeadRange {
    let half = node::HEADS.count / 2;
    match number % 4 {
        1 => HeadRange { first: 0, count: half },
        3 => HeadRange { first: half, count: half },
        _ => node::HEADS,
    }
}

/// Parses the heads with which a peer is started.
pub(crate) fn parse_heads(text: &str) -> Result<HeadRange, String> {
    let heads = text.split_once('+').and_then(|(first, count)| {
        let heads = HeadRange { first: first.parse().ok()?, count: count.parse().ok()? };
        heads.intersection(node::HEADS).filter(|&known| known == heads)
    });
    heads.ok_or_else(|| format!("'{text}' is not FIRST+COUNT within {} heads", node::HEADS.count))
}

struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

fn resident_mib() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    (pages * 4096) >> 20
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map(Iterator::count).unwrap_or(0)
}

/// Runs for `seconds`; `peers` names the transports of each peer: `shm,tcp;rdma:rxe0,rdma:rxe1`.
pub(crate) fn run(seconds: u64, seed: u64, peers: &str, life: Duration) -> Result<()> {
    println!("# transfer-soak: {seconds} s, seed {seed}; peers over {}", peers.replace(';', " · "));
    let kinds: Vec<&str> = peers.split(';').collect();
    let mut own: Vec<&str> = kinds.iter().flat_map(|kind| kind.split(',')).collect();
    own.sort_unstable();
    own.dedup();
    let folder = Folder(std::env::temp_dir().join(format!("kvasir-soak-{}", std::process::id())));
    std::fs::create_dir_all(&folder.0).context("a folder for sockets")?;
    let secret = format!("{:032x}", u128::from_le_bytes(random_bytes()?));
    let key = SharedKey::from_secret(secret.as_bytes())?;
    let mut worker = Worker::new(&folder.0, seed, &own.join(","), &key)?;
    let attack_counts = Arc::new(AttackCounts::default());
    let tcp = worker.node.address.split(',').find_map(|link| link.strip_prefix("tcp:")).map(str::to_owned);
    let attackers: Vec<MaliciousPeer> = tcp
        .iter()
        .flat_map(|address| (0..ATTACKERS).map(move |number| (address, number)))
        .map(|(address, number)| {
            MaliciousPeer::start(
                address.clone(),
                key.clone(),
                worker.unannounced(),
                seed + number,
                Arc::clone(&attack_counts),
            )
        })
        .collect();
    let mut number = 0;
    let mut start = |transports: &str, life: Duration| {
        number += 1;
        Peer::start(&folder.0, transports, &secret, number, life)
    };
    let mut peers = Vec::new();
    for transports in &kinds {
        peers.push(start(transports, life)?);
    }
    let end = Instant::now() + Duration::from_secs(seconds);
    let (mut killed, mut reported_at, mut warm) = (0, Instant::now(), None);
    while Instant::now() < end {
        for (index, transports) in kinds.iter().enumerate() {
            if Instant::now() < peers[index].kill_at {
                continue;
            }
            let life = life.mul_f64(0.2 + worker.below(160) as f64 / 100.0);
            // Killed while its replacement starts, with transfers of all kinds in progress.
            peers[index] = start(transports, life)?;
            killed += 1;
        }
        worker.step(&mut peers)?;
        warm.get_or_insert_with(|| (resident_mib(), descriptors()));
        if reported_at.elapsed() > Duration::from_secs(20) {
            reported_at = Instant::now();
            println!("{} · {killed} peers killed", worker.tally.render());
        }
    }
    drop(peers);
    attackers.into_iter().try_for_each(MaliciousPeer::stop)?;
    worker.check_unannounced()?;
    let rest = Instant::now();
    while !worker.is_at_rest() {
        ensure!(rest.elapsed() < REST_WITHIN, "not at rest: {}", worker.render_held());
        worker.collect()?;
        std::thread::sleep(Duration::from_millis(1));
    }
    let (memory, open) = warm.unwrap_or_default();
    ensure!(
        descriptors() <= open + DESCRIPTORS_SLACK,
        "descriptors leaked: {open} before, {} after",
        descriptors()
    );
    ensure!(
        resident_mib() <= memory + MEMORY_SLACK_MIB,
        "memory grew from {memory} to {} MiB",
        resident_mib()
    );
    println!("{} · {killed} peers killed", worker.tally.render());
    let per_second = |count: u64| count as f64 / seconds as f64;
    let (whole, bytes) = (per_second(worker.tally.whole), per_second(worker.tally.bytes_compared));
    results::add("transfer-soak", "whole hand-offs", ("1/s", Better::Higher), &[whole]);
    results::add("transfer-soak", "bytes compared", ("MB/s", Better::Higher), &[bytes / 1e6]);
    println!(
        "at rest after {:.1} s: no slot and no transfer held; memory {memory} MiB before, {} after; descriptors {open} before, {} after",
        rest.elapsed().as_secs_f64(),
        resident_mib(),
        descriptors()
    );
    let (attacks_sent, rejected_peers) = (
        attack_counts.attacks_sent.load(Ordering::Relaxed),
        attack_counts.rejected_peers.load(Ordering::Relaxed),
    );
    println!(
        "{attacks_sent} invalid frames sent, none accepted; {rejected_peers} peers with a wrong secret, none admitted"
    );
    ensure!(
        tcp.is_none() || attacks_sent > 0 && rejected_peers > 0,
        "no invalid frame and no wrong secret was sent: raise --seconds"
    );
    let links = &worker.node.links;
    println!(
        "links: {} failed while their peer went on, {} made again, {} slices retried, {} markers counted",
        links.links_failed(),
        links.links_restored(),
        links.slices_retried(),
        links.markers_received()
    );
    ensure!(worker.tally.whole > 0, "nothing was handed over: the run shows nothing");
    // Soft-RoCE in an emulated machine is too slow for most of them.
    let is_fast = !own.iter().any(|transport| transport.starts_with("rdma"));
    ensure!(!is_fast || worker.tally.whole > worker.tally.late, "most hand-offs were late");
    Ok(())
}
