//! Comparison of this fabric with plain blocking sockets over loopback, in one run: throughput by size and
//! ping-pong latency, the two alternating, each side a pinned thread, medians and the median of the ratios.
//! `wall` is bytes by elapsed time; `busy` is bytes by the processor time of the busier side, which other
//! load on the machine disturbs less. Both peers sleep when they are idle.
//!
//! `writev_limit [rounds] [connections] [socket buffer bytes] [only this size in KiB, and the ping-pong]`

use std::io::{IoSlice, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dataplane_fabric::{Event, Fabric, Full, Operation, PeerId, Priority, Source, Target, WorkRequest};
use dataplane_memory::{PageSize, Slab, SlabKind, SlabLayout, SlotPool};
use dataplane_tcp::{TcpConfig, TcpFabric};
use rustix::event::{PollFd, PollFlags};
use rustix::net::sockopt;

/// (bytes of one write, slots, batches)
const SIZES: [(usize, u32, usize); 4] =
    [(4 << 10, 64, 4000), (64 << 10, 64, 400), (1 << 20, 64, 24), (16 << 20, 4, 24)];
/// Bytes in flight of the fabric; for the plain peer the socket buffers are the limit.
const WINDOW_BYTES: usize = 4 << 20;
const PING_BYTES: usize = 64;
const PINGS: usize = 2_000;

#[derive(Clone, Copy, PartialEq)]
enum Lane {
    Urgent,
    Background,
}

fn main() {
    let argument = |at: usize| std::env::args().nth(at).and_then(|word| word.parse().ok());
    let (rounds, connections) = (argument(1).unwrap_or(9), argument(2).unwrap_or(1));
    let buffer: usize = argument(3).unwrap_or(0);
    let config = TcpConfig {
        connections_per_peer: connections,
        send_buffer_bytes: buffer,
        receive_buffer_bytes: buffer,
        ..TcpConfig::default()
    };
    println!(
        "{rounds} rounds, {connections} connections a lane, socket buffers {buffer} (0: the kernel's choice)"
    );
    let is_wanted = |bytes: usize| argument(4).is_none_or(|only| only << 10 == bytes);
    for (bytes, slots, batches) in SIZES.into_iter().filter(|size| is_wanted(size.0)) {
        for lane in [Lane::Urgent, Lane::Background] {
            let pairs: Vec<_> = (0..rounds)
                .map(|_| {
                    let plain = plain_stream(bytes, slots, batches, buffer);
                    (plain, fabric_stream(&config, bytes, slots, batches, lane))
                })
                .collect();
            let name = if lane == Lane::Urgent { "urgent" } else { "background" };
            let what = format!("{:>6} KiB x {slots:>2}, {name:<10}", bytes >> 10);
            let of = |pick: fn(&Speed) -> f64| pairs.iter().map(|(a, b)| (pick(a), pick(b))).collect();
            report(&format!("{what} wall"), "GB/s", of(|speed| speed.wall));
            report(&format!("{what} busy"), "GB/s", of(|speed| speed.busy));
        }
    }
    // Many short runs: the shortest ones were disturbed least.
    let pairs: Vec<_> = (0..rounds * 6).map(|_| (plain_ping(), fabric_ping(&config))).collect();
    report("64 B ping-pong, half a round trip", "us", pairs.clone());
    let least = |pick: fn(&(f64, f64)) -> f64| pairs.iter().map(pick).fold(f64::MAX, f64::min);
    let (plain, ours) = (least(|pair| pair.0), least(|pair| pair.1));
    println!(
        "64 B ping-pong, the least: plain {plain:.2} us, fabric {ours:.2} us, ratio {:.2}",
        ours / plain
    );
}

#[derive(Clone, Copy)]
struct Speed {
    wall: f64,
    busy: f64,
}

fn speed(bytes: usize, start: Instant, busy: [Duration; 2]) -> Speed {
    let per_second = |time: Duration| bytes as f64 / time.as_secs_f64() / 1e9;
    Speed { wall: per_second(start.elapsed()), busy: per_second(busy[0].max(busy[1])) }
}

/// Returns the processor time of this thread.
fn busy() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the place to write to is a live value of the right type.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn report(what: &str, unit: &str, mut pairs: Vec<(f64, f64)>) {
    let mut ratios: Vec<f64> = pairs.iter().map(|(plain, ours)| ours / plain).collect();
    ratios.sort_by(f64::total_cmp);
    let middle = pairs.len() / 2;
    pairs.sort_by(|a, b| a.0.total_cmp(&b.0));
    let plain = pairs[middle].0;
    pairs.sort_by(|a, b| a.1.total_cmp(&b.1));
    let (ours, low, high) = (pairs[middle].1, ratios[0], ratios[ratios.len() - 1]);
    println!(
        "{what}: plain {plain:6.2} {unit}, fabric {ours:6.2} {unit}, ratio {:.2} ({low:.2} to {high:.2})",
        ratios[middle]
    );
}

fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    let _unpinned = rustix::thread::sched_setaffinity(None, &set);
}

fn plain_pair(buffer: usize) -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let here = TcpStream::connect(listener.local_addr().expect("address")).expect("connect");
    let (there, _) = listener.accept().expect("accept");
    for socket in [&here, &there] {
        socket.set_nodelay(true).expect("nodelay");
        if buffer > 0 {
            let _cut = sockopt::set_socket_send_buffer_size_force(socket, buffer / 2);
            let _cut = sockopt::set_socket_recv_buffer_size_force(socket, buffer / 2);
        }
    }
    (here, there)
}

/// Sends whole batches with `writev` into large `recv`s, as a hand-written peer without framing does.
fn plain_stream(bytes: usize, slots: u32, batches: usize, buffer: usize) -> Speed {
    let (mut here, mut there) = plain_pair(buffer);
    let batch_bytes = bytes * slots as usize;
    let receiver = thread::spawn(move || {
        pin(1);
        let mut target = vec![1_u8; batch_bytes];
        let begun = busy();
        for _ in 0..batches {
            let mut filled = 0;
            while filled < batch_bytes {
                filled += there.read(&mut target[filled..]).expect("recv");
            }
        }
        there.write_all(&[1]).expect("the last word");
        busy() - begun
    });
    pin(0);
    let source = vec![7_u8; batch_bytes];
    let (start, begun) = (Instant::now(), busy());
    for _ in 0..batches {
        let mut sent = 0;
        while sent < batch_bytes {
            let first = sent % bytes;
            let pieces: Vec<IoSlice<'_>> = source[sent - first..]
                .chunks(bytes)
                .enumerate()
                .map(|(at, piece)| IoSlice::new(if at == 0 { &piece[first..] } else { piece }))
                .collect();
            sent += here.write_vectored(&pieces).expect("writev");
        }
    }
    here.read_exact(&mut [0]).expect("the last word");
    let here = busy() - begun;
    speed(batch_bytes * batches, start, [here, receiver.join().expect("receiver")])
}

struct Node {
    fabric: TcpFabric,
    pool: Arc<SlotPool>,
    events: Vec<Event>,
}

fn node(bytes: usize, slots: u32, config: &TcpConfig) -> Node {
    let layout = SlabLayout { slot_bytes: bytes, slot_count: slots };
    let slab = Arc::new(Slab::create("limit", layout, PageSize::Standard).expect("slab"));
    // Touches all pages before the clock runs, as for the plain peer's memory.
    (0..slots).for_each(|slot| slab.write(slot, 0, &vec![7; bytes]));
    let pool = SlotPool::new(Arc::clone(&slab));
    let listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    let fabric = TcpFabric::new(slab, listen, config.clone()).expect("fabric");
    Node { fabric, pool, events: Vec::with_capacity(1024) }
}

impl Node {
    fn poll(&mut self) {
        self.events.clear();
        self.fabric.poll(256, &mut self.events);
    }

    /// Sleeps until `poll` has work.
    fn sleep(&mut self) {
        if self.fabric.prepare_wait() {
            let mut descriptors = Vec::with_capacity(1);
            self.fabric.wait_descriptors(&mut descriptors);
            let mut polled = [PollFd::new(&descriptors[0], PollFlags::IN)];
            let _interrupted = rustix::event::poll(&mut polled, None);
        }
    }

    fn wait_for<T>(&mut self, mut want: impl FnMut(&Event) -> Option<T>) -> T {
        loop {
            // One event at a time, so that events behind the awaited one are kept.
            self.events.clear();
            self.fabric.poll(1, &mut self.events);
            if let Some(found) = self.events.iter().find_map(&mut want) {
                return found;
            }
        }
    }

    fn connect(&mut self, address: &str) -> PeerId {
        let peer = self.fabric.connect(address).expect("connect");
        self.wait_for(|event| (*event == Event::Connected { peer }).then_some(peer))
    }

    fn accept(&mut self) -> PeerId {
        self.wait_for(|event| match event {
            Event::Accepted { peer } => Some(*peer),
            _ => None,
        })
    }
}

fn fabric_stream(config: &TcpConfig, bytes: usize, slots: u32, batches: usize, lane: Lane) -> Speed {
    let (address, told) = std::sync::mpsc::channel();
    let (other, is_over) = (config.clone(), Arc::new(AtomicBool::new(false)));
    let over = Arc::clone(&is_over);
    let receiver = thread::spawn(move || {
        pin(1);
        let mut node = node(bytes, slots, &other);
        let held: Vec<_> = std::iter::from_fn(|| node.pool.acquire()).collect();
        address.send(node.fabric.listening_on().expect("bound").to_string()).expect("told");
        let _peer = node.accept();
        let mut batches_landed = 0;
        let begun = busy();
        while batches_landed < batches {
            node.poll();
            if node.events.is_empty() {
                node.sleep();
            }
            batches_landed +=
                node.events.iter().filter(|event| matches!(event, Event::Immediate { .. })).count();
        }
        let time = busy() - begun;
        while !over.load(Ordering::Acquire) {
            node.poll();
        }
        drop(held);
        time
    });
    pin(0);
    let mut node = node(bytes, slots, config);
    let peer = node.connect(&told.recv().expect("address"));
    let held: Vec<_> = std::iter::from_fn(|| node.pool.acquire()).collect();
    let priority = if lane == Lane::Urgent { Priority::Urgent } else { Priority::Background };
    let window = (WINDOW_BYTES / (bytes * held.len())).clamp(2, 14);
    let (mut posted, mut done) = (0, 0);
    let (start, begun) = (Instant::now(), busy());
    while done < batches {
        while posted < batches && posted < done + window {
            for (at, slot) in held.iter().enumerate() {
                let is_last = at + 1 == held.len();
                let source = Source::Slot { slot: slot.clone(), offset: 0, len: bytes as u32 };
                let target = Target { slab: SlabKind::Host, slot: slot.slot(), generation: 0, offset: 0 };
                let immediate = is_last.then_some(posted as u32);
                let operation = Operation::Write { source, target, rows: None, immediate };
                let mut request = WorkRequest { id: u64::from(is_last), peer, priority, operation };
                while let Err(Full(back)) = node.fabric.post(request) {
                    request = back;
                    node.poll();
                    done += node.events.len();
                }
            }
            posted += 1;
        }
        node.fabric.flush();
        node.poll();
        done += node.events.iter().filter(|event| matches!(event, Event::Completed { .. })).count();
        if node.events.is_empty() {
            node.sleep();
        }
    }
    let here = busy() - begun;
    let bytes = bytes * held.len() * batches;
    let end = speed(bytes, start, [here, here]);
    is_over.store(true, Ordering::Release);
    let there = receiver.join().expect("receiver");
    Speed { wall: end.wall, ..speed(bytes, start, [here, there]) }
}

/// Ping-pong over sockets that are polled without sleeping.
fn plain_ping() -> f64 {
    let (mut here, mut there) = plain_pair(0);
    here.set_nonblocking(true).expect("nonblocking");
    there.set_nonblocking(true).expect("nonblocking");
    let receive = |socket: &mut TcpStream| {
        let (mut bytes, mut filled) = ([0; PING_BYTES], 0);
        while filled < PING_BYTES {
            filled += socket.read(&mut bytes[filled..]).unwrap_or(0);
        }
    };
    let echo = thread::spawn(move || {
        pin(1);
        for _ in 0..PINGS {
            receive(&mut there);
            there.write_all(&[2; PING_BYTES]).expect("send");
        }
    });
    pin(0);
    let start = Instant::now();
    for _ in 0..PINGS {
        here.write_all(&[1; PING_BYTES]).expect("send");
        receive(&mut here);
    }
    let seconds = start.elapsed().as_secs_f64();
    echo.join().expect("echo");
    seconds * 1e6 / PINGS as f64 / 2.0
}

fn fabric_ping(config: &TcpConfig) -> f64 {
    let (address, told) = std::sync::mpsc::channel();
    let other = config.clone();
    let is_message = |event: &Event| matches!(event, Event::Message { .. }).then_some(());
    let send = |node: &mut Node, peer| {
        let full = node.fabric.post(WorkRequest::message(peer, Box::new([1; PING_BYTES]))).is_err();
        assert!(!full, "one message at a time fits");
        node.fabric.flush();
    };
    let echo = thread::spawn(move || {
        pin(1);
        let mut node = node(4096, 1, &other);
        address.send(node.fabric.listening_on().expect("bound").to_string()).expect("told");
        let peer = node.accept();
        for _ in 0..PINGS {
            node.wait_for(is_message);
            send(&mut node, peer);
        }
        node.wait_for(|event| matches!(event, Event::PeerDown { .. }).then_some(()));
    });
    pin(0);
    let mut node = node(4096, 1, config);
    let peer = node.connect(&told.recv().expect("address"));
    let start = Instant::now();
    for _ in 0..PINGS {
        send(&mut node, peer);
        node.wait_for(is_message);
    }
    let seconds = start.elapsed().as_secs_f64();
    drop(node);
    echo.join().expect("echo");
    seconds * 1e6 / PINGS as f64 / 2.0
}
