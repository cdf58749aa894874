//! Kills a process that writes blocks, with SIGKILL at random points, reopens its store and judges every block.
//!
//! `cargo test -p kvstore-disk --test crash -- [--kills N] [--seed N] [--engine io_uring|pread] [--planted]`
//!
//! Each block's bytes follow from its identity. The child evicts the oldest blocks first and says which records are
//! on the disk, so the parent knows which blocks must have survived, and not only that the others are not wrong.
//! `--planted` makes the child store wrong bytes now and then under a good checksum: the parent has to find them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use kvstore_block::BlockIdentity;
use kvstore_disk::{
    Area, Block, ClockReading, DiskCompletion, DiskConfig, DiskLog, ReadCheck, ReadOutcome, Recovered,
    RecoveryReport, WriteOutcome,
};
use kvstore_io::files::{FolderConfig, open_folder};
use kvstore_io::ring::RingConfig;
use kvstore_io::{IoEngine, pread, uring};

const SLOT_BYTES: u32 = 128 << 10;
const SEGMENT_BYTES: u64 = 40 << 20;
const SEGMENTS: u32 = 2;
const DEPTH: usize = 24;
/// Maximum number of blocks that the child may write beyond its last report.
const AHEAD_MAX: u64 = 200;
/// Slots that the child keeps free, for writes under way.
const SPARE: u32 = 32;
const RECOVERY_MAX: Duration = Duration::from_secs(2);

#[derive(Debug, Clone)]
struct Options {
    child: bool,
    kills: u32,
    seed: u64,
    first_id: u64,
    planted: bool,
    engine: String,
    folder: PathBuf,
}

impl Options {
    fn parse(arguments: &[String]) -> Self {
        let value = |name: &str| {
            arguments
                .iter()
                .position(|argument| argument == name)
                .and_then(|at| arguments.get(at + 1))
                .cloned()
        };
        let number = |name: &str| value(name).and_then(|value| value.parse().ok());
        let has = |name: &str| arguments.iter().any(|argument| argument == name);
        let folder = std::env::temp_dir().join(format!("kvasir-crash-{}", std::process::id()));
        Self {
            child: has("--child"),
            kills: number("--kills").unwrap_or(20) as u32,
            seed: number("--seed").unwrap_or(1),
            first_id: number("--first-id").unwrap_or(1),
            planted: has("--planted"),
            engine: value("--engine").unwrap_or_else(|| "io_uring".to_owned()),
            folder: value("--folder").map_or(folder, PathBuf::from),
        }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.iter().any(|argument| argument == "--list") {
        println!("crash: test");
        return ExitCode::SUCCESS;
    }
    let options = Options::parse(&arguments);
    if options.child {
        child(&options);
        return ExitCode::SUCCESS;
    }
    let mut is_good = run(&options);
    if !options.planted {
        // The planted fault must make the same check fail.
        let folder = options.folder.with_extension("planted");
        is_good &= run(&Options { planted: true, kills: 3, folder, ..options });
    }
    if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A small generator (splitmix64).
fn mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mixed = (*state ^ *state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 31
}

fn identity(id: u64) -> BlockIdentity {
    let mut bytes = [0xC7; 16];
    bytes[..8].copy_from_slice(&id.to_le_bytes());
    BlockIdentity(bytes)
}

fn id_of(identity: BlockIdentity) -> u64 {
    identity.short()
}

fn content(id: u64) -> Vec<u8> {
    let mut state = id;
    let len = 8 + mix(&mut state) as usize % (SLOT_BYTES as usize - 8);
    let mut bytes = vec![0; len];
    bytes
        .chunks_mut(8)
        .for_each(|chunk| chunk.copy_from_slice(&mix(&mut state).to_le_bytes()[..chunk.len()]));
    bytes[..8].copy_from_slice(&id.to_le_bytes());
    bytes
}

fn engine(options: &Options, name: &str) -> Box<dyn IoEngine> {
    let folder = FolderConfig::new(&options.folder, SEGMENT_BYTES, SEGMENTS);
    let deadline = Instant::now() + Duration::from_secs(10);
    // The kernel frees the lock of a killed process when the last of its requests is over.
    let files = loop {
        match open_folder(&folder) {
            Ok(files) => break files,
            Err(error) if Instant::now() >= deadline => panic!("{error}"),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    if name == "pread" {
        return Box::new(
            pread::PreadEngine::new(files, &pread::PreadConfig::default()).expect("pread engine"),
        );
    }
    Box::new(uring::open(files, &RingConfig::default()).expect("io_uring engine"))
}

fn open(options: &Options) -> (DiskLog, Vec<Recovered>, RecoveryReport) {
    let config = DiskConfig {
        fingerprint: 77,
        slot_bytes: SLOT_BYTES,
        meta_bytes_max: 32,
        // Only the numbering of slots depends on it, so each start may have another value.
        stripes: 1 + std::process::id() % SEGMENTS,
        operations_max: DEPTH as u32,
        table_delay: Duration::from_millis(2),
        ..DiskConfig::default()
    };
    let areas: Vec<Area> = (0..SEGMENTS).map(|file| Area { file, offset: 0, bytes: SEGMENT_BYTES }).collect();
    let now = ClockReading::now();
    let store_id = now.unix_s << 32 | u64::from(std::process::id());
    DiskLog::open(config, &areas, engine(options, &options.engine), store_id, now).expect("a store")
}

fn memory(log: &mut DiskLog) -> Arc<SlotPool> {
    let layout = SlabLayout { slot_bytes: SLOT_BYTES as usize, slot_count: DEPTH as u32 + 1 };
    let slab = Arc::new(Slab::create("crash", layout, PageSize::Standard).expect("slab"));
    log.register(&slab).expect("registered");
    SlotPool::new(slab)
}

/// Writes until killed. Prints `F a b`: the records of all blocks up to `a` are on the disk, and none from `b` on
/// was begun.
fn child(options: &Options) {
    let (mut log, recovered, _) = open(options);
    let memory = memory(&mut log);
    let mut stored: BTreeMap<u64, u32> =
        recovered.iter().map(|block| (id_of(block.identity), block.slot)).collect();
    let mut free: BTreeSet<u32> = (0..log.slot_count()).collect();
    free.retain(|slot| recovered.iter().all(|block| block.slot != *slot));
    // Rotates over the free slots, so that records go into all pages of the tables.
    let mut next_slot = 0;
    let mut writing: BTreeMap<u64, u32> = BTreeMap::new();
    let (mut next, mut reported, mut flushing) = (options.first_id, options.first_id, None);
    let mut random = options.seed;
    let mut done = Vec::new();
    loop {
        while writing.len() < DEPTH && next < reported + AHEAD_MAX {
            while free.len() <= SPARE as usize {
                let Some((_, slot)) = stored.pop_first() else { break };
                log.forget(slot);
                free.insert(slot);
            }
            let Some(slot) = memory.acquire() else { break };
            let Some(target) = free.range(next_slot..).chain(&free).next().copied() else { break };
            let is_planted = options.planted && mix(&mut random).is_multiple_of(10);
            let bytes = content(next);
            let mut stored_bytes = bytes.clone();
            if is_planted {
                stored_bytes[bytes.len() / 2] ^= 1;
            }
            slot.slab().write(slot.slot(), 0, &stored_bytes);
            let meta = next.to_le_bytes();
            // Taken over the bytes written: a planted fault stores wrong bytes under a good checksum.
            let checksum = dataplane_checksum::checksum(&stored_bytes);
            let (identity, parent) = (identity(next), identity(next - 1));
            let block = Block { identity, parent, tenant: 1, checksum, meta: &meta };
            if let Err(refused) = log.write(target, block, slot, bytes.len() as u32, next) {
                assert!(refused.reason == kvstore_disk::Refusal::Full, "{refused:?}");
                break;
            }
            free.remove(&target);
            next_slot = target + 1;
            writing.insert(next, target);
            next += 1;
        }
        if flushing.is_none() {
            let first_open = writing.first_key_value().map_or(next, |(&id, _)| id);
            flushing = log.flush(0, mix(&mut random).is_multiple_of(16)).then_some(first_open - 1);
        }
        log.poll(ClockReading::now(), &mut done);
        let is_idle = done.is_empty();
        for done in done.drain(..) {
            match done {
                DiskCompletion::Written { token, slot, outcome, .. } => {
                    assert_eq!(outcome, WriteOutcome::Stored);
                    writing.remove(&token);
                    stored.insert(token, slot);
                }
                DiskCompletion::Flushed { failed_pages, .. } => {
                    assert_eq!(failed_pages, 0);
                    println!("F {} {next}", flushing.take().unwrap_or(0));
                    std::io::stdout().flush().expect("the parent reads");
                    reported = next;
                }
                DiskCompletion::Read { .. } => {}
            }
        }
        if is_idle {
            log.wait(None).expect("wait");
        }
    }
}

#[derive(Debug, Default)]
struct Judged {
    recovered: u64,
    verified: u64,
    misses: u64,
    wrong: u64,
    lost: u64,
    required: u64,
}

fn run(options: &Options) -> bool {
    let _absent = std::fs::remove_dir_all(&options.folder);
    std::fs::create_dir_all(&options.folder).expect("a folder");
    let (mut sum, mut recoveries, mut random) = (Judged::default(), Vec::new(), options.seed);
    let mut first_id = 1;
    for kill in 0..options.kills {
        let run_for = Duration::from_micros(2_000 + mix(&mut random) % 60_000);
        let (flushed, begun) = run_child(options, first_id, mix(&mut random), run_for);
        let (judged, report) = judge(options, first_id, flushed, begun);
        recoveries.push(report.elapsed);
        if judged.wrong > 0 || judged.lost > 0 {
            println!("kill {kill} after {run_for:?}: {judged:?}, flushed {flushed}, begun {begun}");
        }
        sum.recovered += judged.recovered;
        sum.verified += judged.verified;
        sum.misses += judged.misses;
        sum.wrong += judged.wrong;
        sum.lost += judged.lost;
        sum.required += judged.required;
        // Ids of blocks that the child began and did not report must not be used again.
        first_id = begun.max(first_id) + AHEAD_MAX + 1;
    }
    recoveries.sort_unstable();
    let median = recoveries.get(recoveries.len() / 2).copied().unwrap_or_default();
    let longest = recoveries.last().copied().unwrap_or_default();
    println!(
        "crash: engine {}, seed {}, {} kills{}: {sum:?}; recovery median {median:?}, longest {longest:?}",
        options.engine,
        options.seed,
        options.kills,
        if options.planted { ", planted fault" } else { "" }
    );
    std::fs::remove_dir_all(&options.folder).expect("removed");
    let has_worked = sum.verified > 0 && sum.required > 0 && longest < RECOVERY_MAX;
    if options.planted { has_worked && sum.wrong > 0 } else { has_worked && sum.wrong == 0 && sum.lost == 0 }
}

/// Runs a child for a while and kills it. Returns its last report.
fn run_child(options: &Options, first_id: u64, seed: u64, run_for: Duration) -> (u64, u64) {
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new(program);
    command.args(["--child", "--engine", &options.engine, "--folder", path(&options.folder)]);
    command.args(["--first-id", &first_id.to_string(), "--seed", &seed.to_string()]);
    if options.planted {
        command.arg("--planted");
    }
    let mut child = command.stdout(Stdio::piped()).spawn().expect("a child");
    let stdout = child.stdout.take().expect("its output");
    let (is_running, running) = std::sync::mpsc::sync_channel(1);
    let reader = std::thread::spawn(move || {
        let mut last = (0, 0);
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            last = parse_report(&line).unwrap_or(last);
            let _full = is_running.try_send(());
        }
        last
    });
    // A quarter of the children may be killed during start-up, the rest under load, however slow the machine
    // is.
    if options.planted || !seed.is_multiple_of(4) {
        running.recv_timeout(Duration::from_secs(30)).expect("a report");
    }
    std::thread::sleep(run_for);
    assert!(child.try_wait().expect("a child").is_none(), "the child ended by itself");
    child.kill().expect("killed");
    child.wait().expect("ended");
    reader.join().expect("reports")
}

fn path(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

/// Parses `F a b`; a line that the kill cut short is `None`.
fn parse_report(line: &str) -> Option<(u64, u64)> {
    let mut fields = line.strip_prefix("F ")?.split(' ');
    let report = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    fields.next().is_none().then_some(report)
}

/// Reads every recovered block and checks it.
fn judge(options: &Options, first_id: u64, flushed: u64, begun: u64) -> (Judged, RecoveryReport) {
    let (mut log, recovered, report) = open(options);
    let memory = memory(&mut log);
    let mut judged = Judged { recovered: recovered.len() as u64, ..Judged::default() };
    let mut waiting: VecDeque<&Recovered> = recovered.iter().collect();
    let mut verified = std::collections::BTreeSet::new();
    let mut open_reads = 0;
    let mut done = Vec::new();
    while !waiting.is_empty() || open_reads > 0 {
        while let Some(block) = waiting.front()
            && let Some(slot) = memory.acquire()
        {
            assert_eq!(block.meta[..], id_of(block.identity).to_le_bytes());
            if log.read(block.slot, block.identity, slot, ReadCheck::Log, id_of(block.identity)).is_err() {
                break;
            }
            waiting.pop_front();
            open_reads += 1;
        }
        log.poll(ClockReading::now(), &mut done);
        if done.is_empty() {
            log.wait(None).expect("wait");
        }
        for done in done.drain(..) {
            let DiskCompletion::Read { token, outcome, memory: Some(memory), .. } = done else { continue };
            open_reads -= 1;
            let ReadOutcome::Verified { bytes } = outcome else {
                judged.misses += 1;
                continue;
            };
            let mut found = vec![0; bytes as usize];
            memory.slab().read(memory.slot(), 0, &mut found);
            judged.verified += 1;
            judged.wrong += u64::from(found != content(token));
            verified.insert(token);
        }
    }
    // Every block of this child that was reported and cannot have been evicted since must be there.
    let evictable = (begun + AHEAD_MAX).saturating_sub(u64::from(log.slot_count() - SPARE - DEPTH as u32));
    let first = evictable.max(first_id);
    judged.required = (flushed + 1).saturating_sub(first);
    judged.lost = (first..=flushed).filter(|id| !verified.contains(id)).count() as u64;
    let closed = log.close(Duration::from_secs(10));
    assert!(closed.is_clean, "closed");
    (judged, report)
}
