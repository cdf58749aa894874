//! `bench transfer` between host memory and device memory, over the double of the driver and a fabric that
//! reaches both. The double copies what a NIC would move, so this tests the benchmark and measures nothing.

#[path = "../../dataplane/cuda/tests/double/mod.rs"]
mod double;

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use bench::transfer::{Rails, Record, TransferArgs, run};
use clap::Parser;
use dataplane_fabric::{
    Completion, ConnectError, Event, Fabric, Full, Operation, PeerId, Source, WorkRequest,
};
use dataplane_memory::{Slab, SlabKind};
use double::Double;

/// One end: its memory, its events, and its peer.
#[derive(Default)]
struct End {
    slab: Option<Arc<Slab>>,
    events: VecDeque<Event>,
    peer: Option<String>,
}

/// All ends of this process, by address.
#[derive(Default)]
struct Nic {
    ends: Mutex<HashMap<String, End>>,
    /// Number of ends in device memory.
    on_device: AtomicUsize,
}

impl Nic {
    fn ends(&self) -> MutexGuard<'_, HashMap<String, End>> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Port {
    nic: &'static Nic,
    address: String,
}

const PEER: PeerId = PeerId(1);

/// Reads bytes of a slot in either kind of memory.
fn get(slab: &Slab, slot: u32, offset: u32, bytes: u32) -> Vec<u8> {
    let mut content = vec![0; bytes as usize];
    match slab.device() {
        None => slab.read(slot, offset as usize, &mut content),
        Some(device) => {
            let address = slab.device_address(slot, offset as usize, content.len()).expect("inside");
            device.read((address - device.address()) as usize, &mut content).expect("read");
        }
    }
    content
}

fn put(slab: &Slab, slot: u32, offset: u32, content: &[u8]) {
    match slab.device() {
        None => slab.write(slot, offset as usize, content),
        Some(device) => {
            let address = slab.device_address(slot, offset as usize, content.len()).expect("inside");
            device.write((address - device.address()) as usize, content).expect("write");
        }
    }
}

impl Fabric for Port {
    fn name(&self) -> &'static str {
        "nic"
    }

    fn shown_slab(&self, kind: SlabKind) -> Option<Arc<Slab>> {
        let ends = self.nic.ends();
        ends.get(&self.address).and_then(|end| end.slab.clone()).filter(|slab| slab.kind() == kind)
    }

    fn carries(&self, _slab: &Arc<Slab>) -> bool {
        true
    }

    fn peer_shows(&self, _peer: PeerId, _kind: SlabKind) -> bool {
        true
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, ConnectError> {
        let mut ends = self.nic.ends();
        for (one, other, event) in [
            (address, self.address.as_str(), Event::Accepted { peer: PEER }),
            (self.address.as_str(), address, Event::Connected { peer: PEER }),
        ] {
            let end = ends.get_mut(one).expect("an end");
            end.peer = Some(other.to_owned());
            end.events.push_back(event);
        }
        Ok(PEER)
    }

    fn post(&mut self, request: WorkRequest) -> Result<(), Full> {
        let mut ends = self.nic.ends();
        let peer = ends.get_mut(&self.address).and_then(|end| end.peer.clone()).expect("connected");
        let there = ends.get_mut(&peer).expect("an end");
        let slab = there.slab.clone().expect("memory");
        match request.operation {
            Operation::Send { message } => there.events.push_back(Event::Message { peer: PEER, message }),
            Operation::Write {
                source: Source::Slot { slot, offset, len },
                target,
                rows: None,
                immediate,
            } => {
                put(&slab, target.slot, target.offset, &get(slot.slab(), slot.slot(), offset, len));
                there.events.extend(immediate.map(|value| Event::Immediate { peer: PEER, value }));
            }
            Operation::Read { into, from, rows: None } => {
                let content = get(&slab, from.slot, from.offset, into.len);
                put(into.slot.slab(), into.slot.slot(), into.offset, &content);
            }
            other => panic!("not needed here: {other:?}"),
        }
        if request.id != 0 {
            let done = Event::Completed { id: request.id, completion: Completion::Done };
            ends.get_mut(&self.address).expect("an end").events.push_back(done);
        }
        Ok(())
    }

    fn flush(&mut self) {}

    fn poll(&mut self, budget: usize, events: &mut Vec<Event>) -> usize {
        let mut ends = self.nic.ends();
        let queue = &mut ends.get_mut(&self.address).expect("an end").events;
        let count = queue.len().min(budget);
        events.extend(queue.drain(..count));
        count
    }

    fn disconnect(&mut self, _peer: PeerId) {}

    fn wait_descriptors<'a>(&'a self, _descriptors: &mut Vec<BorrowedFd<'a>>) {}
}

impl Drop for Port {
    fn drop(&mut self) {
        let mut ends = self.nic.ends();
        let end = ends.remove(&self.address);
        let peer = end.and_then(|end| end.peer).and_then(|peer| ends.get_mut(&peer));
        if let Some(peer) = peer {
            peer.events.push_back(Event::PeerDown { peer: PEER, reason: "dropped".to_owned() });
        }
    }
}

/// The NIC is leaked on purpose, since ports need it for `'static`.
struct NicRails(&'static Nic);

impl Rails for NicRails {
    fn make(
        &self,
        _transport: &str,
        slab: Arc<Slab>,
        listen: Option<&str>,
        rail: usize,
    ) -> Result<(Box<dyn Fabric>, String)> {
        self.0.on_device.fetch_add(usize::from(slab.device().is_some()), Ordering::Relaxed);
        let address = format!("{}-{rail}", if listen.is_some() { "far" } else { "near" });
        self.0.ends().insert(address.clone(), End { slab: Some(slab), ..End::default() });
        Ok((Box::new(Port { nic: self.0, address: address.clone() }), address))
    }
}

#[derive(Parser)]
struct Options {
    #[command(flatten)]
    transfer: TransferArgs,
}

/// Runs over the NIC. Returns the number of ends in device memory.
fn measured(transport: &str, line: &str) -> (Result<Vec<Record>>, usize) {
    let line = format!(
        "--transport {transport} --threads one --sizes 64,4K --iterations 3 --rounds 3 --batch 4 --check {line}"
    );
    let options = Options::parse_from(std::iter::once("transfer").chain(line.split_whitespace()));
    let rails = NicRails(Box::leak(Box::default()));
    let records = run(&options.transfer, &rails, false, None);
    (records, rails.0.on_device.load(Ordering::Relaxed))
}

#[test]
fn every_pair_of_memories_gets_the_right_bytes() {
    let Some(_double) = Double::load() else { return };
    for (ends, on_device) in [
        ("--memory gpu", 2),
        ("--memory gpu --far-memory host", 1),
        ("--far-memory gpu --gpu 1", 1),
        ("--memory host", 0),
    ] {
        for op in ["write", "read", "send", "write-imm"] {
            let line = format!("{ends} --op {op} --memory-bytes 1M");
            let (records, found) = measured("nic", &line);
            let records = records.unwrap_or_else(|error| panic!("{line}: {error:#}"));
            assert_eq!((records.len(), found), (4, on_device), "bandwidth and latency of two sizes: {line}");
            for record in records.iter().filter(|record| record.test == "bw") {
                let has_memcpy = record.peer == Some("memcpy");
                assert_eq!((record.wrong_bytes, has_memcpy), (Some(0), on_device == 0), "{line}: {record:?}");
            }
        }
    }
}

#[test]
fn what_cannot_be_is_said() {
    let Some(double) = Double::load() else { return };
    let refused = |transport, line| format!("{:#}", measured(transport, line).0.expect_err("not here"));
    let error = refused("shm", "--memory gpu");
    assert!(error.contains("shm moves host memory only"), "{error}");
    let error = refused("nic", "--memory gpu --gpu 7");
    assert!(error.contains("CUDA_ERROR_INVALID_DEVICE"), "{error}");
    double.set("memory", 1 << 20);
    let error = refused("nic", "--memory gpu");
    assert!(error.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
}
