//! One-way latency of an immediate between two processes that sleep while they wait, by kind of sleep, in one run.
//!
//! For each kind a process of its own answers every immediate; this one plays ping-pong with each in turn. One way is
//! half of a round trip. `poll`: eventfd and poll(2). `futex`: the sleeper without spinning. `spin`: the sleeper
//! with a budget of 200 µs. `busy`: nobody sleeps.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::{
    Event, Fabric, INLINE_BYTES_MAX, Operation, PeerId, Priority, Source, Target, WorkRequest,
};
use dataplane_memory::{PageSize, Slab, SlabLayout};
use dataplane_shm::{ShmConfig, ShmFabric};
use rustix::event::{PollFd, PollFlags};

const KINDS: [&str; 4] = ["poll", "futex", "spin", "busy"];

fn fabric(kind: &str, listen: Option<&str>) -> ShmFabric {
    let layout = SlabLayout { slot_bytes: 64, slot_count: 1 };
    let slab = Arc::new(Slab::create("wake", layout, PageSize::Standard).expect("slab"));
    let spin = if kind == "spin" { Duration::from_micros(200) } else { Duration::ZERO };
    ShmFabric::new(slab, listen, ShmConfig { spin, ..ShmConfig::default() }).expect("fabric")
}

/// Polls, and sleeps between polls, until there are events.
fn wait(kind: &str, fabric: &mut ShmFabric, events: &mut Vec<Event>) {
    let sleeper = fabric.sleeper().expect("shared memory has one");
    while fabric.poll(16, events) == 0 {
        if kind == "busy" || !fabric.prepare_wait() {
            continue;
        }
        if kind != "poll" {
            sleeper.sleep(None);
            continue;
        }
        let mut descriptors = Vec::with_capacity(1);
        fabric.wait_descriptors(&mut descriptors);
        let mut polled: Vec<PollFd<'_>> =
            descriptors.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        rustix::event::poll(&mut polled, None).expect("poll");
    }
}

fn send(fabric: &mut ShmFabric, peer: PeerId) {
    let source = Source::Inline { bytes: [1; INLINE_BYTES_MAX], len: 8 };
    let target = Target { slot: 0, generation: 0, offset: 0 };
    let operation = Operation::Write { source, target, rows: None, immediate: Some(1) };
    fabric.post(WorkRequest { id: 0, peer, priority: Priority::Urgent, operation }).expect("room");
    fabric.flush();
}

fn answer(kind: &str, address: &str) {
    let mut fabric = fabric(kind, Some(address));
    let mut events = Vec::with_capacity(16);
    loop {
        // The busy one must not take a processor from the others' turns.
        wait(kind, &mut fabric, &mut events);
        for event in events.drain(..) {
            match event {
                Event::Immediate { peer, .. } => send(&mut fabric, peer),
                Event::PeerDown { .. } => return,
                _ => {}
            }
        }
    }
}

struct Player {
    kind: &'static str,
    child: Child,
    fabric: ShmFabric,
    peer: PeerId,
    one_way_ns: Vec<u64>,
}

impl Player {
    fn new(kind: &'static str) -> Self {
        let address = format!("@kvasir-wake-{kind}-{}", std::process::id());
        let program = std::env::current_exe().expect("this program");
        let child = Command::new(program).args([kind, &address]).stdin(Stdio::null()).spawn().expect("spawn");
        let mut fabric = fabric(kind, None);
        let start = Instant::now();
        let peer = loop {
            match fabric.connect(&address) {
                Ok(peer) => break peer,
                Err(error) => assert!(start.elapsed() < Duration::from_secs(20), "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let mut events = Vec::new();
        wait("poll", &mut fabric, &mut events);
        assert_eq!(events, [Event::Connected { peer }]);
        Self { kind, child, fabric, peer, one_way_ns: Vec::new() }
    }

    fn play(&mut self, count: usize) {
        let mut events = Vec::with_capacity(16);
        for _ in 0..count {
            let start = Instant::now();
            send(&mut self.fabric, self.peer);
            wait(self.kind, &mut self.fabric, &mut events);
            self.one_way_ns.push(start.elapsed().as_nanos() as u64 / 2);
            events.clear();
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, kind, address] = &arguments[..] {
        return answer(kind, address);
    }
    // The busy answerer spins all the time, so it plays last and alone.
    let mut sleepers: Vec<Player> = KINDS[..3].iter().map(|kind| Player::new(kind)).collect();
    for _ in 0..100 {
        sleepers.iter_mut().for_each(|player| player.play(200));
    }
    let mut busy = Player::new(KINDS[3]);
    (0..100).for_each(|_| busy.play(200));
    for mut player in sleepers.into_iter().chain([busy]) {
        player.one_way_ns.sort_unstable();
        let at = |share: f64| player.one_way_ns[(player.one_way_ns.len() as f64 * share) as usize];
        let counters = player.fabric.counters().snapshot();
        let of = |wanted| counters.iter().find(|(name, ..)| *name == wanted).map_or(0, |(.., value)| *value);
        println!(
            "{:<6} one way p50 {:>7} ns  p99 {:>8} ns  ({} rounds; futex wakes {}, eventfd wakes {}, sleeps {}, spins {})",
            player.kind,
            at(0.5),
            at(0.99),
            player.one_way_ns.len(),
            of("futex_wakes"),
            of("eventfd_wakes"),
            of("sleeps"),
            of("spins_that_sufficed"),
        );
        drop(player.fabric);
        player.child.wait().expect("the answerer ends");
    }
}
