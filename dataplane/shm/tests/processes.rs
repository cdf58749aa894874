//! Two processes: every byte of random writes and reads is checked; the death of a peer in the middle of
//! its stream is detected in time and leaves no resources behind.
//!
//! The other process is this test program, started as the writer through its environment. Writer and
//! receiver draw the same sequence of operations from the same seed.

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dataplane_fabric::testing::{SLOT_BYTES, pool, sleep};
use dataplane_fabric::{
    Completion, Event, Fabric, Full, Operation, PeerId, Priority, Rows, SlotRange, Source, Target,
    WorkRequest,
};
use dataplane_memory::{SlabKind, SlotRef};
use dataplane_shm::{ShmConfig, ShmFabric};

const SEED: u64 = 0x5EED_0007;
const OPERATIONS: u32 = 6_000;
const ADDRESS: &str = "KVASIR_SHM_TEST_ADDRESS";
const COUNT: &str = "KVASIR_SHM_TEST_COUNT";
const PATIENCE: Duration = Duration::from_secs(60);

/// Descriptors and mappings are counted, so tests of this file take turns.
static TURN: Mutex<()> = Mutex::new(());

/// One operation, with the position of its bytes at the receiver.
#[derive(Clone, Copy)]
struct Piece {
    offset: u32,
    len: u32,
    rows: Option<Rows>,
    priority: Priority,
}

fn draw(random: &mut fastrand::Rng) -> Piece {
    let priority = Priority::ALL[random.u32(..2) as usize];
    if random.u32(..4) == 0 {
        let (bytes, count) = (1 + random.u32(..700), 1 + random.u32(..40));
        let rows =
            Rows { bytes, local_stride: bytes + random.u32(..900), remote_stride: bytes + random.u32(..900) };
        let span = (count - 1) * rows.remote_stride + bytes;
        let offset = random.u32(..SLOT_BYTES as u32 - span + 1);
        return Piece { offset, len: bytes * count, rows: Some(rows), priority };
    }
    let largest = [64, 5_000, 20_000, SLOT_BYTES as u32][random.u32(..4) as usize];
    let len = 1 + random.u32(..largest);
    Piece { offset: random.u32(..SLOT_BYTES as u32 - len + 1), len, rows: None, priority }
}

/// Byte `at` of operation `number`, gaps not counted.
fn byte(number: u32, at: usize) -> u8 {
    (number as usize * 197 + at * 31 + at / 255) as u8
}

fn ranges(piece: Piece, stride: impl Fn(Rows) -> u32, offset: u32) -> impl Iterator<Item = (usize, usize)> {
    let (bytes, stride) = piece.rows.map_or((piece.len, 0), |rows| (rows.bytes, stride(rows)));
    (0..piece.len / bytes).map(move |row| ((offset + row * stride) as usize, bytes as usize))
}

fn check(slot: &SlotRef, number: u32, piece: Piece) {
    let mut at = 0;
    let mut found = vec![0; SLOT_BYTES];
    for (start, len) in ranges(piece, |rows| rows.remote_stride, piece.offset) {
        slot.slab().read(slot.slot(), start, &mut found[..len]);
        let wrong = found[..len].iter().zip(at..).position(|(&found, at)| found != byte(number, at));
        assert_eq!(wrong, None, "seed {SEED:#x}, operation {number}: first wrong byte of a row");
        at += len;
    }
}

/// Polls, and sleeps between polls.
fn wait(fabric: &mut ShmFabric, events: &mut Vec<Event>, until: Instant) {
    while fabric.poll(64, events) == 0 {
        assert!(Instant::now() < until, "nothing came");
        if fabric.prepare_wait() {
            sleep(fabric, Some(until));
        }
    }
}

fn post(fabric: &mut ShmFabric, events: &mut Vec<Event>, mut request: WorkRequest) {
    let start = Instant::now();
    while let Err(Full(back)) = fabric.post(request) {
        request = back;
        fabric.flush();
        fabric.poll(64, events);
        assert!(start.elapsed() < PATIENCE, "the queue stays full");
    }
}

/// The writer process. Does nothing in an ordinary test run.
#[test]
fn writer_process() {
    let Ok(address) = std::env::var(ADDRESS) else { return };
    let count: u32 = std::env::var(COUNT).ok().and_then(|count| count.parse().ok()).expect("a count");
    let pool = pool("writer");
    let mut fabric = ShmFabric::new(Arc::clone(pool.slab()), None, ShmConfig::default()).expect("fabric");
    let peer = fabric.connect(&address).expect("connect");
    let until = Instant::now() + PATIENCE;
    let mut events = Vec::new();
    let names = loop {
        wait(&mut fabric, &mut events, until);
        let names = events.iter().find_map(|event| match event {
            Event::Message { message, .. } => Some(message.clone()),
            _ => None,
        });
        if let Some(names) = names {
            break names;
        }
    };
    events.clear();
    let words: Vec<u32> = names.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    let targets = words.as_chunks::<2>().0;
    let mut random = fastrand::Rng::with_seed(SEED);
    let mut acknowledged = vec![true; targets.len()];
    let (here, back) = (pool.acquire().expect("a slot"), pool.acquire().expect("a slot"));
    for number in 0..count {
        let piece = draw(&mut random);
        let at = number as usize % targets.len();
        while !acknowledged[at] {
            wait(&mut fabric, &mut events, until);
            for event in events.drain(..) {
                match event {
                    Event::Message { message, .. } => acknowledged[usize::from(message[0])] = true,
                    Event::PeerDown { .. } => return,
                    _ => {}
                }
            }
        }
        acknowledged[at] = false;
        let mut bytes = (0..).map(|at| byte(number, at));
        let local: u32 = if piece.rows.is_some() { 0 } else { piece.offset };
        for (start, len) in ranges(piece, |rows| rows.local_stride, local) {
            let row: Vec<u8> = bytes.by_ref().take(len).collect();
            here.slab().write(here.slot(), start, &row);
        }
        let [slot, generation] = targets[at];
        let target = Target { slab: SlabKind::Host, slot, generation, offset: piece.offset };
        let source = Source::Slot { slot: here.clone(), offset: local, len: piece.len };
        // First without the immediate, so that the bytes are read back before the receiver acknowledges them.
        let write = Operation::Write { source: source.clone(), target, rows: piece.rows, immediate: None };
        let request = WorkRequest { id: 0, peer, priority: piece.priority, operation: write };
        post(&mut fabric, &mut events, request);
        let into = SlotRange { slot: back.clone(), offset: piece.offset, len: piece.len };
        let rows = piece.rows.map(|rows| Rows { local_stride: rows.remote_stride, ..rows });
        let read = Operation::Read { into, from: target, rows };
        let request = WorkRequest { id: 1, peer, priority: piece.priority, operation: read };
        post(&mut fabric, &mut events, request);
        check(&back, number, piece);
        let source = Source::Inline { bytes: [byte(number, 0); 16], len: 1 };
        let write = Operation::Write { source, target, rows: None, immediate: Some(number) };
        let request = WorkRequest { id: 0, peer, priority: piece.priority, operation: write };
        post(&mut fabric, &mut events, request);
        fabric.flush();
    }
    while !acknowledged.iter().all(|&acknowledged| acknowledged) {
        wait(&mut fabric, &mut events, until);
        for event in events.drain(..) {
            match event {
                Event::Message { message, .. } => acknowledged[usize::from(message[0])] = true,
                Event::Completed { completion, .. } => assert_eq!(completion, Completion::Done),
                _ => {}
            }
        }
    }
}

fn spawn(address: &str, count: u32) -> Child {
    Command::new(std::env::current_exe().expect("this program"))
        .args(["writer_process", "--exact", "--nocapture"])
        .env(ADDRESS, address)
        .env(COUNT, count.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .expect("spawn")
}

/// Receives and checks until `enough` pieces have arrived or the writer is gone; returns the number of pieces.
fn receive(fabric: &mut ShmFabric, slots: &[SlotRef], enough: u32) -> (u32, Option<PeerId>) {
    let mut random = fastrand::Rng::with_seed(SEED);
    let mut pieces: BTreeMap<u32, Piece> = BTreeMap::new();
    let mut drawn = 0;
    let (mut seen, mut peer) = (0, None);
    let mut events = Vec::new();
    let until = Instant::now() + PATIENCE;
    while seen < enough {
        wait(fabric, &mut events, until);
        for event in events.drain(..) {
            let (to, message): (PeerId, Box<[u8]>) = match event {
                Event::Accepted { peer: writer } => {
                    peer = Some(writer);
                    let names = slots.iter().flat_map(|slot| [slot.slot(), slot.generation()]);
                    (writer, names.flat_map(u32::to_le_bytes).collect())
                }
                Event::Immediate { peer, value } => {
                    while drawn <= value {
                        pieces.insert(drawn, draw(&mut random));
                        drawn += 1;
                    }
                    let at = value as usize % slots.len();
                    check(&slots[at], value, pieces.remove(&value).expect("each number comes once"));
                    seen += 1;
                    (peer, Box::new([at as u8]))
                }
                Event::PeerDown { reason, .. } => panic!("the writer ended early: {reason}"),
                _ => continue,
            };
            post(fabric, &mut Vec::new(), WorkRequest::message(to, message));
        }
        fabric.flush();
    }
    (seen, peer)
}

#[test]
fn every_byte_between_two_processes_is_right() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let address = format!("@kvasir-shm-stress-{}", std::process::id());
    let pool = pool("receiver");
    let mut fabric =
        ShmFabric::new(Arc::clone(pool.slab()), Some(&address), ShmConfig::default()).expect("fabric");
    let slots: Vec<SlotRef> = std::iter::from_fn(|| pool.acquire()).collect();
    let mut writer = spawn(&address, OPERATIONS);
    let (seen, _) = receive(&mut fabric, &slots, OPERATIONS);
    assert_eq!(seen, OPERATIONS);
    assert!(writer.wait().expect("wait").success(), "the writer found what it wrote");
    println!("seed {SEED:#x}: {seen} pieces written, read back and checked");
}

/// Returns the number of open descriptors, and of mappings of the kinds that a connection makes.
fn held() -> (usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").expect("fd").count();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    (descriptors, maps.lines().filter(|line| line.contains("memfd:")).count())
}

#[test]
fn a_killed_writer_is_noticed_and_leaves_nothing() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let address = format!("@kvasir-shm-kill-{}", std::process::id());
    let pool = pool("receiver");
    let mut fabric =
        ShmFabric::new(Arc::clone(pool.slab()), Some(&address), ShmConfig::default()).expect("fabric");
    let before = held();
    for round in 0..8 {
        let slots: Vec<SlotRef> = std::iter::from_fn(|| pool.acquire()).collect();
        let mut writer = spawn(&address, u32::MAX);
        let (_, peer) = receive(&mut fabric, &slots, 40 + round * 37);
        let peer = peer.expect("accepted");
        if let Some(pidfd) = fabric.peer_pidfd(peer) {
            let named = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()));
            let line = format!("Pid:\t{}", writer.id());
            assert!(
                named.expect("fdinfo").lines().any(|found| found == line),
                "the descriptor is the writer's"
            );
        } else {
            eprintln!("SKIPPED: whose process a descriptor names: this kernel gives no pidfd of a peer");
        }
        assert!(held().0 >= before.0 + 5, "the count sees a connection");
        writer.kill().expect("kill");
        let killed = Instant::now();
        let mut events = Vec::new();
        let reason = loop {
            wait(&mut fabric, &mut events, killed + Duration::from_secs(10));
            let reason = events.drain(..).find_map(|event| match event {
                Event::PeerDown { peer: down, reason } if down == peer => Some(reason),
                _ => None,
            });
            if let Some(reason) = reason {
                break reason;
            }
        };
        let noticed = killed.elapsed();
        println!("round {round}: noticed after {} us: {reason}", noticed.as_micros());
        // The bound is 50 ms of sleep; the rest allows a busy machine to end the process.
        assert!(noticed < Duration::from_secs(1), "{noticed:?}");
        assert!(reason.contains(&writer.id().to_string()), "{reason}");
        writer.wait().expect("wait");
        drop(slots);
        assert_eq!(pool.used_count(), 0);
        assert_eq!(held(), before, "round {round}: descriptors and mappings");
        let operation = Operation::Send { message: Box::new([1]) };
        let request = WorkRequest { id: 1, peer, priority: Priority::Urgent, operation };
        assert!(fabric.post(request).is_err(), "the dead take nothing");
    }
}
