//! Two connected fabrics, driven in turn, and scenarios that run on software devices and on real ones.

#![allow(dead_code, reason = "each test program uses a part")]

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::testing::pool;
use dataplane_fabric::{
    Completion, Event, Fabric, Full, Operation, PeerId, Priority, Source, Target, WorkRequest,
};
use dataplane_memory::{SlabKind, SlotPool, SlotRef};
use dataplane_verbs::{Device, VerbsConfig, VerbsFabric};
use rustix::event::{PollFd, PollFlags};

const PATIENCE: Duration = Duration::from_secs(20);

/// Any port of this machine.
pub(crate) fn loopback() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// Settings that make small buffers, so that tests start quickly.
pub(crate) fn small() -> VerbsConfig {
    VerbsConfig {
        send_queue_depth: 128,
        request_queue_depth: 128,
        completion_entries: 2048,
        receive_buffers: 256,
        receive_buffer_bytes: 1024,
        receive_credits: 16,
        send_buffers: 64,
        signal_every: 8,
        ..VerbsConfig::default()
    }
}

/// A signalled write on the urgent lane.
pub(crate) fn write(peer: PeerId, id: u64, source: Source, target: Target) -> WorkRequest {
    let operation = Operation::Write { source, target, rows: None, immediate: None };
    WorkRequest { id, peer, priority: Priority::Urgent, operation }
}

/// Two fabrics, a connected to b.
pub(crate) struct Two {
    pub(crate) a: VerbsFabric,
    pub(crate) b: VerbsFabric,
    pub(crate) pool_a: Arc<SlotPool>,
    pub(crate) pool_b: Arc<SlotPool>,
    pub(crate) source: SlotRef,
    pub(crate) target: SlotRef,
    pub(crate) to_a: PeerId,
    pub(crate) to_b: PeerId,
    pub(crate) seen_a: Vec<Event>,
    pub(crate) seen_b: Vec<Event>,
}

impl Two {
    pub(crate) fn new(
        device_a: Arc<Device>,
        device_b: Arc<Device>,
        config_a: VerbsConfig,
        config_b: VerbsConfig,
    ) -> Self {
        Self::over(device_a, device_b, config_a, config_b, [pool("a"), pool("b")])
    }

    /// Makes two fabrics over slots of any memory; a source in host memory is filled with ones.
    pub(crate) fn over(
        device_a: Arc<Device>,
        device_b: Arc<Device>,
        config_a: VerbsConfig,
        config_b: VerbsConfig,
        pools: [Arc<SlotPool>; 2],
    ) -> Self {
        let a = VerbsFabric::new(device_a, pools[0].slab(), Some(loopback()), config_a).expect("a");
        let b = VerbsFabric::new(device_b, pools[1].slab(), Some(loopback()), config_b).expect("b");
        Self::connected(a, b, pools)
    }

    /// Connects two fabrics that show the slots of these pools.
    pub(crate) fn connected(mut a: VerbsFabric, b: VerbsFabric, pools: [Arc<SlotPool>; 2]) -> Self {
        let [pool_a, pool_b] = pools;
        let address = b.listening_on().expect("listening").to_string();
        let to_b = a.connect(&address).expect("connect starts");
        let target = pool_b.acquire().expect("slot");
        let source = pool_a.acquire().expect("slot");
        if source.slab().device().is_none() {
            source.slab().write(source.slot(), 0, &[1; 4096]);
        }
        let (seen_a, seen_b) = (Vec::new(), Vec::new());
        let mut this = Self { a, b, pool_a, pool_b, source, target, to_a: PeerId(0), to_b, seen_a, seen_b };
        this.until("connected", |this| {
            for event in &this.seen_b {
                if let Event::Accepted { peer } = event {
                    this.to_a = *peer;
                }
            }
            this.to_a != PeerId(0) && this.seen_a.contains(&Event::Connected { peer: this.to_b })
        });
        this.seen_a.clear();
        this.seen_b.clear();
        this
    }

    pub(crate) fn step(&mut self) {
        for (fabric, seen) in [(&mut self.a, &mut self.seen_a), (&mut self.b, &mut self.seen_b)] {
            fabric.flush();
            fabric.poll(64, seen);
        }
    }

    pub(crate) fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !done(self) {
            self.step();
            assert!(start.elapsed() < PATIENCE, "never: {what}\na: {:?}\nb: {:?}", self.seen_a, self.seen_b);
        }
    }

    pub(crate) fn post(&mut self, mut request: WorkRequest) {
        let start = Instant::now();
        while let Err(Full(back)) = self.a.post(request) {
            request = back;
            self.step();
            assert!(start.elapsed() < PATIENCE, "the queue stays full");
        }
    }

    /// A write of `len` bytes of ones; all of them share one source.
    pub(crate) fn slot_write(&self, id: u64, len: u32) -> WorkRequest {
        let slot = self.source.clone();
        let target = Target::of(&self.target, 0);
        write(self.to_b, id, Source::Slot { slot, offset: 0, len }, target)
    }

    pub(crate) fn write_and_wait(&mut self, id: u64, len: u32) {
        let request = self.slot_write(id, len);
        self.post(request);
        self.until("the write", |this| this.completion_at_a(id).is_some());
        assert_eq!(self.completion_at_a(id), Some(Completion::Done));
        self.seen_a.clear();
    }

    pub(crate) fn completion_at_a(&self, wanted: u64) -> Option<Completion> {
        self.seen_a.iter().find_map(|event| match event {
            Event::Completed { id, completion } if *id == wanted => Some(*completion),
            _ => None,
        })
    }

    pub(crate) fn is_down(&self) -> bool {
        let down = |events: &[Event]| events.iter().any(|event| matches!(event, Event::PeerDown { .. }));
        down(&self.seen_a) && down(&self.seen_b)
    }

    pub(crate) fn reason_at_a(&self) -> String {
        let reason = self.seen_a.iter().find_map(|event| match event {
            Event::PeerDown { reason, .. } => Some(reason.clone()),
            _ => None,
        });
        reason.expect("a has seen the end")
    }

    pub(crate) fn target_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        self.target.slab().read(self.target.slot(), 0, &mut bytes);
        bytes
    }
}

fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Sleeps until a descriptor is readable; returns false when the time runs out first.
pub(crate) fn sleep_on(fabric: &VerbsFabric, most: Duration) -> bool {
    let mut descriptors = Vec::new();
    fabric.wait_descriptors(&mut descriptors);
    let mut polled: Vec<PollFd<'_>> = descriptors
        .iter()
        .map(|descriptor| PollFd::from_borrowed_fd(descriptor.as_fd(), PollFlags::IN))
        .collect();
    let most =
        rustix::event::Timespec { tv_sec: most.as_secs() as i64, tv_nsec: i64::from(most.subsec_nanos()) };
    rustix::event::poll(&mut polled, Some(&most)).expect("poll") > 0
}

/// Fabric b sleeps on its descriptors in a thread of its own while a writes with immediates at long intervals.
pub(crate) fn sleeps_and_wakes(two: Two) {
    const ROUNDS: u32 = 5;
    const PAUSE: Duration = Duration::from_millis(100);
    let Two { mut a, mut b, source, target, to_b, .. } = two;
    let target_slot = target.slot();
    let sleeper = std::thread::spawn(move || {
        let (mut events, mut sleeps) = (Vec::new(), 0);
        let (start, start_cpu) = (Instant::now(), cpu_time());
        let received =
            |events: &[Event]| events.iter().filter(|event| matches!(event, Event::Immediate { .. })).count();
        while received(&events) < ROUNDS as usize {
            b.poll(64, &mut events);
            if received(&events) < ROUNDS as usize && b.prepare_wait() {
                sleeps += 1;
                sleep_on(&b, PATIENCE);
            }
            assert!(start.elapsed() < PATIENCE, "not woken: {events:?}");
        }
        (start.elapsed(), cpu_time() - start_cpu, sleeps, b)
    });
    let mut events = Vec::new();
    for round in 0..ROUNDS {
        let until = Instant::now() + PAUSE;
        while Instant::now() < until {
            a.poll(64, &mut events);
            std::thread::sleep(Duration::from_millis(1));
        }
        let operation = Operation::Write {
            source: Source::Slot { slot: source.clone(), offset: 0, len: 64 },
            target: Target { slab: SlabKind::Host, slot: target_slot, generation: 0, offset: 0 },
            rows: None,
            immediate: Some(round),
        };
        let request = WorkRequest { id: 0, peer: to_b, priority: Priority::Urgent, operation };
        a.post(request).expect("room");
        a.flush();
    }
    let (wall, cpu, sleeps, _b) = sleeper.join().expect("the sleeper");
    println!("slept {sleeps} times in {wall:?}, {cpu:?} of CPU");
    assert!(sleeps >= ROUNDS, "it never slept");
    assert!(cpu * 5 < wall, "{cpu:?} of CPU in {wall:?}: it does not sleep");
}

/// Returns the number of descriptors that this process has open.
pub(crate) fn descriptor_count() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

/// Makes `count` connections from one fabric to another, uses all, then closes all: none is lost, none remains.
pub(crate) fn storm(device_a: Arc<Device>, device_b: Arc<Device>, config: &VerbsConfig, count: usize) {
    let (pool_a, pool_b) = (pool("a"), pool("b"));
    let config = VerbsConfig { connections_max: count, handshakes_max: count, ..config.clone() };
    let mut a = VerbsFabric::new(device_a, pool_a.slab(), None, config.clone()).expect("a");
    let mut b = VerbsFabric::new(device_b, pool_b.slab(), Some(loopback()), config).expect("b");
    let address = b.listening_on().expect("listening").to_string();
    let descriptors = descriptor_count();
    let start = Instant::now();
    let peers: Vec<PeerId> = (0..count).map(|_| a.connect(&address).expect("connect starts")).collect();
    let (mut seen_a, mut seen_b) = (Vec::new(), Vec::new());
    let mut until =
        |a: &mut VerbsFabric, b: &mut VerbsFabric, what: &str, done: &dyn Fn(&[Event], &[Event]) -> bool| {
            let start = Instant::now();
            while !done(&seen_a, &seen_b) {
                a.flush();
                a.poll(64, &mut seen_a);
                b.flush();
                b.poll(64, &mut seen_b);
                assert!(
                    start.elapsed() < 6 * PATIENCE,
                    "never: {what}, {} and {} events",
                    seen_a.len(),
                    seen_b.len()
                );
            }
        };
    let counted =
        |events: &[Event], wanted: fn(&Event) -> bool| events.iter().filter(|event| wanted(event)).count();
    until(&mut a, &mut b, "all connected", &|seen_a, seen_b| {
        counted(seen_a, |event| matches!(event, Event::Connected { .. })) == count
            && counted(seen_b, |event| matches!(event, Event::Accepted { .. })) == count
    });
    let connected = start.elapsed();
    assert_eq!(a.metrics().queue_pairs_open, 2 * count as u64);
    for &peer in &peers {
        let operation = Operation::Send { message: peer.0.to_le_bytes().into() };
        a.post(WorkRequest { id: 0, peer, priority: Priority::Background, operation }).expect("room");
    }
    until(&mut a, &mut b, "all messages", &|_, seen_b| {
        counted(seen_b, |event| matches!(event, Event::Message { .. })) == count
    });
    peers.iter().for_each(|&peer| a.disconnect(peer));
    until(&mut a, &mut b, "all closed", &|seen_a, seen_b| {
        counted(seen_a, |event| matches!(event, Event::PeerDown { .. })) == count
            && counted(seen_b, |event| matches!(event, Event::PeerDown { .. })) == count
    });
    for fabric in [&a, &b] {
        let metrics = fabric.metrics();
        assert_eq!((metrics.queue_pairs_open, metrics.outstanding, fabric.connection_count()), (0, 0, 0));
    }
    assert_eq!(descriptor_count(), descriptors, "descriptors leaked");
    println!("{count} connections: up in {connected:?}, all used and closed in {:?}", start.elapsed());
}
