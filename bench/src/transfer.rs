//! Block writes from one node to another of the same process, over real transports.
//!
//! Throughput: batches of 64 writes, the last with an immediate, timed until the immediate has arrived. Beside
//! it memcpy of the same bytes between the same slabs, in turn. Latency: one write with immediate and its echo,
//! halved.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use dataplane_fabric::{Event, Fabric, Full, Operation, PeerId, Source, Target, WorkRequest};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use dataplane_shm::ShmFabric;
use dataplane_tcp::TcpFabric;

use crate::measure::{Latencies, median, time};

const BATCH: usize = 64;

struct Pair {
    name: &'static str,
    a: Box<dyn Fabric>,
    b: Box<dyn Fabric>,
    to_b: PeerId,
    to_a: PeerId,
    pool_a: Arc<SlotPool>,
    pool_b: Arc<SlotPool>,
}

fn pool(slot_bytes: usize) -> Result<Arc<SlotPool>> {
    let layout = SlabLayout { slot_bytes, slot_count: BATCH as u32 + 1 };
    Ok(SlotPool::new(Arc::new(Slab::create("bench", layout, PageSize::Standard)?)))
}

impl Pair {
    fn new(name: &'static str, slot_bytes: usize) -> Result<Self> {
        let (pool_a, pool_b) = (pool(slot_bytes)?, pool(slot_bytes)?);
        let (slab_a, slab_b) = (Arc::clone(pool_a.slab()), Arc::clone(pool_b.slab()));
        let (mut a, b, address): (Box<dyn Fabric>, Box<dyn Fabric>, String) = if name == "shm" {
            let path = std::env::temp_dir().join(format!("kvasir-bench-{}.sock", std::process::id()));
            let b = ShmFabric::new(slab_b, Some(&path))?;
            (Box::new(ShmFabric::new(slab_a, None)?), Box::new(b), path.display().to_string())
        } else {
            let b = TcpFabric::new(slab_b, Some(SocketAddr::from(([127, 0, 0, 1], 0))))?;
            let address = b.listening_on().context("bound")?.to_string();
            (Box::new(TcpFabric::new(slab_a, None)?), Box::new(b), address)
        };
        let to_b = a.connect(&address)?;
        let mut pair = Self { name, a, b, to_b, to_a: PeerId(0), pool_a, pool_b };
        let mut events = Vec::new();
        while pair.to_a == PeerId(0) || !events.contains(&Event::Connected { peer: to_b }) {
            pair.a.poll(16, &mut events);
            let mut seen = Vec::new();
            pair.b.poll(16, &mut seen);
            for event in seen {
                if let Event::Accepted { peer } = event {
                    pair.to_a = peer;
                }
            }
        }
        Ok(pair)
    }

    /// Posts the writes and makes progress on both ends until the last immediate has arrived.
    fn batch(&mut self, sources: &[SlotRef], targets: &[SlotRef], len: usize) -> Result<()> {
        let mut events = Vec::new();
        for (index, (source, target)) in sources.iter().zip(targets).enumerate() {
            let target = Target { slot: target.slot(), generation: target.generation(), offset: 0 };
            let source = Source::Slot { slot: source.clone(), offset: 0, len: len as u32 };
            let immediate = (index + 1 == sources.len()).then_some(7);
            let operation = Operation::Write { source, target, immediate };
            let mut request = WorkRequest { id: 0, peer: self.to_b, operation };
            while let Err(Full(back)) = self.a.post(request) {
                request = back;
                self.a.flush();
                self.a.poll(BATCH, &mut events);
                self.b.poll(BATCH, &mut events);
            }
        }
        self.a.flush();
        while !events.iter().any(|event| matches!(event, Event::Immediate { .. })) {
            self.b.poll(BATCH, &mut events);
            self.a.poll(BATCH, &mut events);
            if let Some(down) = events.iter().find(|event| matches!(event, Event::PeerDown { .. })) {
                bail!("{}: {down:?}", self.name);
            }
        }
        Ok(())
    }

    /// One write with immediate there and one back.
    fn round_trip(&mut self, here: &SlotRef, there: &SlotRef, len: usize) {
        let mut events = Vec::new();
        post(self.a.as_mut(), self.to_b, here, there, len);
        wait(self.b.as_mut(), self.a.as_mut(), &mut events);
        post(self.b.as_mut(), self.to_a, there, here, len);
        wait(self.a.as_mut(), self.b.as_mut(), &mut events);
    }
}

fn post(fabric: &mut dyn Fabric, peer: PeerId, source: &SlotRef, target: &SlotRef, len: usize) {
    let source = Source::Slot { slot: source.clone(), offset: 0, len: len as u32 };
    let target = Target { slot: target.slot(), generation: target.generation(), offset: 0 };
    let operation = Operation::Write { source, target, immediate: Some(1) };
    let posted = fabric.post(WorkRequest { id: 0, peer, operation });
    assert!(posted.is_ok(), "an empty queue takes one request");
    fabric.flush();
}

fn wait(receiver: &mut dyn Fabric, sender: &mut dyn Fabric, events: &mut Vec<Event>) {
    events.clear();
    while !events.iter().any(|event| matches!(event, Event::Immediate { .. })) {
        receiver.poll(16, events);
        let mut other = Vec::new();
        sender.poll(16, &mut other);
    }
}

pub(crate) fn run(smoke: bool) -> Result<()> {
    println!("# transfer: 64 writes a batch, median of rounds; memcpy of the same bytes in turn");
    let rounds = if smoke { 3 } else { 41 };
    for name in ["shm", "tcp"] {
        for len in [4 << 10, 64 << 10, 2 << 20] {
            let mut pair = Pair::new(name, len)?;
            let sources: Vec<SlotRef> = (0..BATCH).filter_map(|_| pair.pool_a.acquire()).collect();
            let targets: Vec<SlotRef> = (0..BATCH).filter_map(|_| pair.pool_b.acquire()).collect();
            for (number, slot) in sources.iter().enumerate() {
                slot.slab().write(slot.slot(), 0, &vec![number as u8; len]);
            }
            let (mut ours, mut copies, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
            for _ in 0..rounds {
                let (moved, result) = time(|| pair.batch(&sources, &targets, len));
                result?;
                let (copied, ()) = time(|| {
                    for (source, target) in sources.iter().zip(&targets) {
                        target.slab().copy_from(source.slab(), (source.slot(), 0), (target.slot(), 0), len);
                    }
                });
                let rate = |spent: Duration| (BATCH * len) as f64 / spent.as_secs_f64() / 1e9;
                ours.push(rate(moved));
                copies.push(rate(copied));
                ratios.push(rate(moved) / rate(copied));
            }
            println!(
                "{name} {:>4} KiB: {:6.2} GB/s, memcpy {:6.2} GB/s, ratio {:.2}",
                len >> 10,
                median(ours),
                median(copies),
                median(ratios)
            );
        }
        latency(name, if smoke { 100 } else { 20_000 })?;
    }
    Ok(())
}

fn latency(name: &'static str, rounds: usize) -> Result<()> {
    let mut pair = Pair::new(name, 4096)?;
    let here = pair.pool_a.acquire().context("a slot")?;
    let there = pair.pool_b.acquire().context("a slot")?;
    for len in [64, 4096] {
        let mut latencies = Latencies::new()?;
        for _ in 0..rounds {
            let (spent, ()) = time(|| pair.round_trip(&here, &there, len));
            latencies.record(spent / 2);
        }
        println!("{name} {len:>4} B one way, one thread drives both ends: {}", latencies.render());
    }
    Ok(())
}
