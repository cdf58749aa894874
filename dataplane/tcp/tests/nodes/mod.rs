//! Two connected nodes that one thread drives.
#![allow(dead_code, reason = "each test file uses its part")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::auth::{Authentication, DialledAddress, OPENING_BYTES, SharedKey, Transport};
use dataplane_fabric::{
    Completion, Event, Fabric, Full, Operation, PeerId, Priority, Source, Target, WorkRequest,
};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use dataplane_tcp::{TcpConfig, TcpFabric};

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct Nodes {
    pub(crate) a: TcpFabric,
    pub(crate) b: TcpFabric,
    pub(crate) pool_a: Arc<SlotPool>,
    pub(crate) pool_b: Arc<SlotPool>,
    pub(crate) to_b: PeerId,
    pub(crate) to_a: PeerId,
    pub(crate) seen_a: Vec<Event>,
    pub(crate) seen_b: Vec<Event>,
}

pub(crate) fn pool(slot_bytes: usize, slot_count: u32) -> Arc<SlotPool> {
    let layout = SlabLayout { slot_bytes, slot_count };
    SlotPool::new(Arc::new(Slab::create("nodes", layout, PageSize::Standard).expect("slab")))
}

pub(crate) fn listening(pool: &Arc<SlotPool>, config: TcpConfig) -> TcpFabric {
    let listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    TcpFabric::new(Arc::clone(pool.slab()), listen, config).expect("fabric")
}

impl Nodes {
    pub(crate) fn new(config: &TcpConfig, slot_bytes: usize, slot_count: u32) -> Self {
        let (pool_a, pool_b) = (pool(slot_bytes, slot_count), pool(slot_bytes, slot_count));
        let (a, b) = (listening(&pool_a, config.clone()), listening(&pool_b, config.clone()));
        let (seen_a, seen_b) = (Vec::with_capacity(4096), Vec::with_capacity(4096));
        let mut this = Self { a, b, pool_a, pool_b, to_b: PeerId(0), to_a: PeerId(0), seen_a, seen_b };
        let address = this.b.listening_on().expect("bound").to_string();
        this.to_b = this.a.connect(&address).expect("address");
        this.until("connected", |this| {
            let accepted = this.seen_b.iter().find_map(|event| match event {
                Event::Accepted { peer } => Some(*peer),
                _ => None,
            });
            this.to_a = accepted.unwrap_or(PeerId(0));
            accepted.is_some() && this.seen_a.contains(&Event::Connected { peer: this.to_b })
        });
        this.forget();
        this
    }

    pub(crate) fn step(&mut self) {
        self.a.flush();
        self.a.poll(64, &mut self.seen_a);
        self.b.flush();
        self.b.poll(64, &mut self.seen_b);
    }

    pub(crate) fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !done(self) {
            self.step();
            assert!(
                start.elapsed() < PATIENCE,
                "never: {what}; {} and {} events",
                self.seen_a.len(),
                self.seen_b.len()
            );
        }
    }

    pub(crate) fn forget(&mut self) {
        self.seen_a.clear();
        self.seen_b.clear();
    }

    /// Posts from a, making progress while the queue is full.
    pub(crate) fn post(&mut self, priority: Priority, id: u64, operation: Operation) {
        let mut request = WorkRequest { id, peer: self.to_b, priority, operation };
        let start = Instant::now();
        while let Err(Full(back)) = self.a.post(request) {
            request = back;
            self.step();
            assert!(start.elapsed() < PATIENCE, "the queue stays full");
        }
    }
}

pub(crate) fn write(from: &SlotRef, to: &SlotRef, len: usize, immediate: Option<u32>) -> Operation {
    let source = Source::Slot { slot: from.clone(), offset: 0, len: len as u32 };
    Operation::Write { source, target: target(to), rows: None, immediate }
}

pub(crate) fn target(slot: &SlotRef) -> Target {
    Target::of(slot, 0)
}

pub(crate) fn completed(events: &[Event], id: u64) -> Option<Completion> {
    events.iter().find_map(|event| match event {
        Event::Completed { id: done, completion } if *done == id => Some(*completion),
        _ => None,
    })
}

pub(crate) fn is_down(event: &Event) -> bool {
    matches!(event, Event::PeerDown { .. })
}

pub(crate) fn fill(slot: &SlotRef, len: usize, byte: u8) {
    slot.slab().write(slot.slot(), 0, &vec![byte; len]);
}

pub(crate) fn content(slot: &SlotRef, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    slot.slab().read(slot.slot(), 0, &mut bytes);
    bytes
}

/// A hello of the documented layout.
pub(crate) fn hello(session: u64, lane: u8, index: u8, connections: u8) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(b"KVSRTCP\0");
    bytes[8..13].copy_from_slice(&[0, 0, lane, index, connections]);
    bytes[16] = 8;
    bytes[24..].copy_from_slice(&session.to_le_bytes());
    bytes
}

/// Says hello to a node as a peer that holds `key` does: opening, the node's answer, hello and proof. What happens at the
/// node meanwhile is added to `events`. The proofs of the handshake, or nothing when the node hung up.
pub(crate) fn say_hello(
    node: &mut TcpFabric,
    stream: &mut TcpStream,
    hello: &[u8; 32],
    key: &SharedKey,
    events: &mut Vec<Event>,
) -> Option<Authentication> {
    let (mut authentication, opening) =
        Authentication::connecting(Transport::Tcp.into()).expect("random bytes");
    stream.write_all(&opening).expect("opening");
    stream.set_nonblocking(true).expect("nonblocking");
    let (start, mut answer, mut filled) = (Instant::now(), [0; OPENING_BYTES], 0);
    while filled < answer.len() {
        node.flush();
        node.poll(16, events);
        match stream.read(&mut answer[filled..]) {
            Ok(0) => return None,
            Ok(bytes) => filled += bytes,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return None,
        }
        assert!(start.elapsed() < PATIENCE, "no answer to an opening");
    }
    stream.set_nonblocking(false).expect("blocking");
    let dialled = DialledAddress::of(stream.peer_addr().expect("an address"));
    authentication.opened(&answer, dialled).expect("an opening");
    let proof = authentication.prove(key, hello).expect("agreed");
    stream.write_all(&[&hello[..], &proof].concat()).expect("hello and proof");
    Some(authentication)
}

/// A header of the documented layout, alone in its batch: kind, flags, and words from byte 4 on.
pub(crate) fn header(kind: u8, flags: u8, words: &[u32]) -> [u8; 32] {
    let mut bytes = [0; 32];
    (bytes[0], bytes[2]) = (kind, flags);
    for (place, word) in bytes[4..].chunks_mut(4).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}
