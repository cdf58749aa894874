//! Measures the cost of posting: `posting [writes]`.
//!
//! The device is the software one with a `post_send` that writes requests to a ring in memory and completes
//! them at once, as a driver does before the doorbell; so the measurement covers little besides this
//! crate's own work. Runs under callgrind too: with the number of writes given, exactly that many are
//! posted and nothing is timed.

use std::error::Error;
use std::net::SocketAddr;
use std::time::Instant;

use dataplane_fabric::testing::pool;
use dataplane_fabric::{Event, Fabric, Operation, PeerId, Priority, Rows, Source, Target, WorkRequest};
use dataplane_memory::{SlabKind, SlotRef};
use dataplane_verbs::testing::SoftwareDevice;
use dataplane_verbs::{VerbsConfig, VerbsFabric};

const DESCRIPTORS: u64 = 10_000;

struct Rig {
    a: VerbsFabric,
    _b: VerbsFabric,
    to_b: PeerId,
    source: SlotRef,
    target: SlotRef,
    events: Vec<Event>,
}

impl Rig {
    fn new() -> Result<Self, Box<dyn Error>> {
        let (device_a, device_b) = (SoftwareDevice::new(), SoftwareDevice::new());
        let config = VerbsConfig {
            send_queue_depth: 16 << 10,
            request_queue_depth: 16 << 10,
            completion_entries: 64 << 10,
            receive_buffers: 64,
            send_buffers: 64,
            ..VerbsConfig::default()
        };
        let (pool_a, pool_b) = (pool("a"), pool("b"));
        let listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
        let mut a = VerbsFabric::new(device_a.open()?, pool_a.slab(), None, config.clone())?;
        let mut b = VerbsFabric::new(device_b.open()?, pool_b.slab(), listen, config)?;
        let address = b.listening_on().ok_or("not listening")?.to_string();
        let to_b = a.connect(&address)?;
        let mut events = Vec::with_capacity(1 << 16);
        let mut others = Vec::new();
        while !events.contains(&Event::Connected { peer: to_b }) {
            a.poll(64, &mut events);
            b.poll(64, &mut others);
        }
        device_a.discard(true);
        let source = pool_a.acquire().ok_or("no slot")?;
        let target = pool_b.acquire().ok_or("no slot")?;
        Ok(Self { a, _b: b, to_b, source, target, events })
    }

    /// Posts `count` writes of a few strided rows in one batch and rings the doorbell.
    fn post(&mut self, count: u64, rows: Option<Rows>, len: u32) {
        for id in 1..=count {
            let source = Source::Slot { slot: self.source.clone(), offset: 0, len };
            let target = Target { slab: SlabKind::Host, slot: self.target.slot(), generation: 0, offset: 0 };
            let operation = Operation::Write { source, target, rows, immediate: None };
            let request = WorkRequest { id, peer: self.to_b, priority: Priority::Urgent, operation };
            assert!(self.a.post(request).is_ok(), "the queue is deep enough");
        }
        self.a.flush();
    }

    fn drain(&mut self) {
        self.events.clear();
        while self.a.metrics().outstanding > 0 {
            self.a.poll(1 << 16, &mut self.events);
        }
        self.a.poll(1 << 16, &mut self.events);
        self.events.clear();
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut rig = Rig::new()?;
    if let Some(count) = std::env::args().nth(1) {
        let count: u64 = count.parse()?;
        rig.post(count.min(DESCRIPTORS), None, 4096);
        rig.drain();
        println!("{:?}", rig.a.metrics());
        return Ok(());
    }
    let strided = Some(Rows { bytes: 256, local_stride: 512, remote_stride: 256 });
    for (what, rows, len) in [("plain", None, 4096), ("strided, 8 rows gathered", strided, 2048)] {
        let (mut best, mut median) = (f64::MAX, Vec::new());
        for _ in 0..50 {
            let before = rig.a.metrics();
            let start = Instant::now();
            rig.post(DESCRIPTORS, rows, len);
            let nanos = start.elapsed().as_nanos() as f64;
            let after = rig.a.metrics();
            assert_eq!(after.doorbells - before.doorbells, 1, "one doorbell for each batch");
            assert_eq!(after.work_requests - before.work_requests, DESCRIPTORS);
            rig.drain();
            best = best.min(nanos);
            median.push(nanos);
        }
        median.sort_by(f64::total_cmp);
        let (best, median) = (best / DESCRIPTORS as f64, median[25] / DESCRIPTORS as f64);
        println!(
            "{what}: {DESCRIPTORS} descriptors, 1 doorbell: best {best:.1} ns, median {median:.1} ns each; \
             all of them in {:.3} ms at best",
            best * DESCRIPTORS as f64 / 1e6
        );
    }
    Ok(())
}
