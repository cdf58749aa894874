//! Compares the speed of writes and reads with `memcpy` of the same bytes between the same slabs, in one run.
//!
//! `memcpy_limit`: one thread drives both ends. `memcpy_limit processes`: the receiver is another process,
//! and `memcpy` runs within this one. `memcpy_limit count N`: N writes of 4 KiB and nothing else, for
//! `valgrind --tool=callgrind`: run it with two counts and divide the difference.
//! `memcpy_limit count-memcpy N`: the same for `memcpy`.
//!
//! Each line: the median over rounds of the time of `memcpy` divided by the fabric's, measured alternately
//! in each round. Batches are 64 pieces, flushed once, and timed until the receiver has polled the
//! immediate of the last.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::{
    Event, Fabric, Full, Operation, PeerId, Priority, Rows, SlotRange, Source, Target, WorkRequest,
};
use dataplane_memory::{PageSize, Slab, SlabKind, SlabLayout, SlotPool, SlotRef};
use dataplane_shm::{ShmConfig, ShmFabric};

const BATCH: usize = 64;
const SIZES: [usize; 4] = [4 << 10, 64 << 10, 1 << 20, 16 << 20];
/// Bytes of a row; a request has as many rows as a batch has pieces.
const ROW_BYTES: [u32; 4] = [256, 1 << 10, 2 << 10, 4 << 10];

fn fabric(pool: &Arc<SlotPool>, listen: Option<&str>) -> ShmFabric {
    ShmFabric::new(Arc::clone(pool.slab()), listen, ShmConfig::default()).expect("fabric")
}

fn pool(slot_bytes: usize) -> (Arc<SlotPool>, Vec<SlotRef>) {
    let layout = SlabLayout { slot_bytes, slot_count: BATCH as u32 };
    let slab = Arc::new(Slab::create("limit", layout, PageSize::Standard).expect("slab"));
    let pool = SlotPool::new(slab);
    let slots: Vec<SlotRef> = (0..BATCH).filter_map(|_| pool.acquire()).collect();
    for slot in &slots {
        slot.slab().write(slot.slot(), 0, &vec![slot.slot() as u8 + 1; slot_bytes]);
    }
    (pool, slots)
}

/// Baseline of every comparison: the C library's `memcpy`, on the same addresses.
fn memcpy(from: &SlotRef, at: usize, to: &SlotRef, there: usize, len: usize) {
    let from = from.slab().address(from.slot(), at, len);
    let to = to.slab().address(to.slot(), there, len);
    // SAFETY: `address` checked both ranges, and they lie in different slabs.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), len) };
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Write,
    WriteSignalled,
    Read,
    /// A request of rows of this many bytes.
    Rows(u32),
}

struct Rig {
    a: ShmFabric,
    b: ShmFabric,
    to_b: PeerId,
    sources: Vec<SlotRef>,
    targets: Vec<SlotRef>,
    /// Names of the slots, as a peer announces them.
    names: Vec<Target>,
    events: Vec<Event>,
}

impl Rig {
    fn new(slot_bytes: usize) -> Self {
        let address = std::env::temp_dir().join(format!("kvasir-limit-{}", std::process::id()));
        let address = address.display().to_string();
        let ((pool_a, sources), (pool_b, targets)) = (pool(slot_bytes), pool(slot_bytes));
        let (mut a, mut b) = (fabric(&pool_a, None), fabric(&pool_b, Some(&address)));
        let to_b = a.connect(&address).expect("connect");
        let mut events = Vec::with_capacity(1024);
        while !events.contains(&Event::Connected { peer: to_b }) {
            a.poll(16, &mut events);
            b.poll(16, &mut events);
        }
        events.clear();
        let name = |slot: &SlotRef| Target::of(slot, 0);
        let names = targets.iter().map(name).collect();
        Self { a, b, to_b, sources, targets, names, events }
    }

    fn post(&mut self, id: u64, operation: Operation) {
        let mut request = WorkRequest { id, peer: self.to_b, priority: Priority::Urgent, operation };
        while let Err(Full(back)) = self.a.post(request) {
            request = back;
            self.a.flush();
            self.a.poll(BATCH, &mut self.events);
            self.b.poll(BATCH, &mut self.events);
        }
    }

    fn batch(&mut self, kind: Kind, len: u32) {
        self.events.clear();
        for number in 0..self.sources.len() {
            let last = number + 1 == self.sources.len();
            let target = self.names[number];
            let slot = self.sources[number].clone();
            let immediate = last.then_some(7);
            let id = if last || kind == Kind::WriteSignalled { number as u64 + 1 } else { 0 };
            match kind {
                Kind::Write | Kind::WriteSignalled => {
                    let source = Source::Slot { slot, offset: 0, len };
                    self.post(id, Operation::Write { source, target, rows: None, immediate });
                }
                Kind::Read => {
                    let into = SlotRange { slot, offset: 0, len };
                    self.post(id, Operation::Read { into, from: target, rows: None });
                }
                Kind::Rows(bytes) => {
                    let source = Source::Slot { slot, offset: 0, len };
                    let rows = Rows { bytes, local_stride: 2 * bytes, remote_stride: 3 * bytes };
                    self.post(1, Operation::Write { source, target, rows: Some(rows), immediate: Some(7) });
                    break;
                }
            }
        }
        self.a.flush();
        let wanted = |event: &Event| match kind {
            Kind::Read => matches!(event, Event::Completed { .. }),
            _ => matches!(event, Event::Immediate { .. }),
        };
        let mut seen = 0;
        while !self.events[seen..].iter().any(wanted) {
            seen = self.events.len();
            self.b.poll(BATCH, &mut self.events);
            self.a.poll(BATCH, &mut self.events);
        }
    }

    fn copies(&self, kind: Kind, len: usize) {
        let (from, to) = match kind {
            Kind::Read => (&self.targets, &self.sources),
            _ => (&self.sources, &self.targets),
        };
        if let Kind::Rows(bytes) = kind {
            let row = bytes as usize;
            for number in 0..len / row {
                let (at, there) = (number * 2 * row, number * 3 * row);
                memcpy(&from[0], at, &to[0], there, row);
            }
            return;
        }
        for (from, to) in from.iter().zip(to) {
            memcpy(from, 0, to, 0, len);
        }
    }
}

/// Returns the median of the ratios, or of the times.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn report(
    name: &str,
    len: usize,
    bytes: usize,
    rounds: usize,
    mut ours: impl FnMut(),
    mut copies: impl FnMut(),
) {
    ours();
    copies();
    // A round takes about half a millisecond at least, so that the clock and a stray interrupt have little
    // influence.
    let repeats = ((16 << 20) / bytes).clamp(1, 256);
    let time = |work: &mut dyn FnMut()| {
        let start = Instant::now();
        (0..repeats).for_each(|_| work());
        start.elapsed().as_secs_f64() / repeats as f64
    };
    let (mut spent, mut copied, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        let (mine, copy) = if round % 2 == 0 {
            let mine = time(&mut ours);
            (mine, time(&mut copies))
        } else {
            let copy = time(&mut copies);
            (time(&mut ours), copy)
        };
        spent.push(bytes as f64 / mine / 1e9);
        copied.push(bytes as f64 / copy / 1e9);
        ratios.push(copy / mine);
    }
    println!(
        "{name:<24} {:>6} KiB  ours {:>7.2} GB/s  memcpy {:>7.2} GB/s  ratio {:.3}",
        len >> 10,
        median(&mut spent),
        median(&mut copied),
        median(&mut ratios)
    );
}

fn one_thread() {
    let kinds =
        [("write", Kind::Write), ("write, all signalled", Kind::WriteSignalled), ("read", Kind::Read)];
    for len in SIZES {
        let mut rig = Rig::new(len);
        let rounds = if len > 4 << 20 { 9 } else { 101 };
        for (name, kind) in kinds {
            let rig = std::cell::RefCell::new(&mut rig);
            let ours = || rig.borrow_mut().batch(kind, len as u32);
            report(name, len, BATCH * len, rounds, ours, || rig.borrow().copies(kind, len));
        }
    }
    for bytes in ROW_BYTES {
        let len = BATCH * bytes as usize;
        let mut rig = Rig::new(3 * len);
        let rig = std::cell::RefCell::new(&mut rig);
        let ours = || rig.borrow_mut().batch(Kind::Rows(bytes), len as u32);
        let name = format!("64 rows of {bytes} bytes");
        report(&name, len, len, 301, ours, || rig.borrow().copies(Kind::Rows(bytes), len));
    }
}

/// The receiving process: names its slots in a message, then answers each immediate with one.
fn receiver(address: &str, slot_bytes: usize) {
    let (pool, slots) = pool(slot_bytes);
    let mut fabric = fabric(&pool, Some(address));
    let mut events = Vec::with_capacity(64);
    loop {
        fabric.poll(64, &mut events);
        for event in events.drain(..) {
            let (peer, message): (PeerId, Box<[u8]>) = match event {
                Event::Accepted { peer } => {
                    let names = slots.iter().flat_map(|slot| [slot.slot(), slot.generation()]);
                    (peer, names.flat_map(u32::to_le_bytes).collect())
                }
                Event::Immediate { peer, .. } => (peer, Box::new([1])),
                Event::PeerDown { .. } => return,
                _ => continue,
            };
            fabric.post(WorkRequest::message(peer, message)).expect("room");
            fabric.flush();
        }
    }
}

fn two_processes() {
    for len in SIZES {
        let address = std::env::temp_dir().join(format!("kvasir-limit-{}", std::process::id()));
        let address = address.display().to_string();
        let program = std::env::current_exe().expect("this program");
        let arguments = ["receiver".to_owned(), address.clone(), len.to_string()];
        let mut child = Command::new(program).args(arguments).stdin(Stdio::null()).spawn().expect("spawn");
        let (pool, sources) = pool(len);
        let (_other, others) = self::pool(len);
        let mut a = fabric(&pool, None);
        let start = Instant::now();
        let to_b = loop {
            match a.connect(&address) {
                Ok(peer) => break peer,
                Err(error) => assert!(start.elapsed() < Duration::from_secs(20), "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let mut events = Vec::with_capacity(64);
        let names = loop {
            a.poll(64, &mut events);
            let names = events.iter().find_map(|event| match event {
                Event::Message { message, .. } => Some(message.clone()),
                _ => None,
            });
            if let Some(names) = names {
                break names;
            }
        };
        let words: Vec<u32> =
            names.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        let targets: Vec<Target> = words
            .as_chunks::<2>()
            .0
            .iter()
            .map(|&[slot, generation]| Target { slab: SlabKind::Host, slot, generation, offset: 0 })
            .collect();
        // Up to four batches are in flight; the last is awaited at the end of a round.
        let (mut sent, mut answered) = (0_u64, 0_u64);
        let rounds = if len > 4 << 20 { 9 } else { 101 };
        let batches = ((16 << 20) / (BATCH * len)).clamp(1, 64) as u64;
        let mut collect = |a: &mut ShmFabric, answered: &mut u64| {
            events.clear();
            a.poll(64, &mut events);
            *answered += events.iter().filter(|event| matches!(event, Event::Message { .. })).count() as u64;
        };
        let (mut ratios, mut mine, mut copied) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..rounds + 2 {
            let start = Instant::now();
            for _ in 0..batches {
                for (number, (slot, target)) in sources.iter().zip(&targets).enumerate() {
                    let source = Source::Slot { slot: slot.clone(), offset: 0, len: len as u32 };
                    let immediate = (number + 1 == BATCH).then_some(1);
                    let operation = Operation::Write { source, target: *target, rows: None, immediate };
                    a.post(WorkRequest { id: 0, peer: to_b, priority: Priority::Urgent, operation })
                        .expect("room");
                }
                a.flush();
                sent += 1;
                while sent - answered > 4 {
                    collect(&mut a, &mut answered);
                }
            }
            while answered < sent {
                collect(&mut a, &mut answered);
            }
            let ours = start.elapsed().as_secs_f64();
            let start = Instant::now();
            for _ in 0..batches {
                for (from, to) in sources.iter().zip(&others) {
                    memcpy(from, 0, to, 0, len);
                }
            }
            let copy = start.elapsed().as_secs_f64();
            // The first rounds map the pages.
            if round >= 2 {
                let bytes = (batches as usize * BATCH * len) as f64;
                ratios.push(copy / ours);
                mine.push(bytes / ours / 1e9);
                copied.push(bytes / copy / 1e9);
            }
        }
        println!(
            "{:<24} {:>6} KiB  ours {:>7.2} GB/s  memcpy {:>7.2} GB/s  ratio {:.3}",
            "write, two processes",
            len >> 10,
            median(&mut mine),
            median(&mut copied),
            median(&mut ratios)
        );
        drop(a);
        child.wait().expect("the receiver ends");
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let count = || arguments.get(2).and_then(|count| count.parse::<usize>().ok()).expect("a count");
    match arguments.get(1).map(String::as_str) {
        None => one_thread(),
        Some("processes") => two_processes(),
        Some("receiver") => {
            let bytes = arguments.get(3).and_then(|bytes| bytes.parse().ok()).expect("bytes");
            receiver(&arguments[2], bytes);
        }
        Some("count") => {
            let mut rig = Rig::new(4 << 10);
            (0..count() / BATCH).for_each(|_| rig.batch(Kind::Write, 4 << 10));
        }
        Some("count-read") => {
            let mut rig = Rig::new(4 << 10);
            (0..count() / BATCH).for_each(|_| rig.batch(Kind::Read, 4 << 10));
        }
        Some("count-memcpy") => {
            let rig = Rig::new(4 << 10);
            (0..count() / BATCH).for_each(|_| rig.copies(Kind::Write, 4 << 10));
        }
        Some(other) => eprintln!("unknown mode '{other}': processes, count N or count-memcpy N"),
    }
}
