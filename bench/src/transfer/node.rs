//! One end: its fabrics, its memory and its arrivals.
//!
//! Half of the slots are sources (`out`: written from, and read by the peer), the other half targets (`in_`), so that
//! both directions can run at once. Messages that start with a zero byte belong to a test, all others are commands.
//! Driven by one thread; posting and polling allocate nothing for one-sided operations.

use std::collections::VecDeque;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use dataplane_fabric::{Completion, Event, Fabric, Full, Operation, PeerId, Priority, WorkRequest};
use dataplane_memory::{Slab, SlabKind, SlabLayout, SlotPool, SlotRef};

use super::command::{Command, VERSION};
use super::memory::Memory;
use super::piece::{Piece, Remote};
use super::places::{self, Shape};
use super::session::Rails;

const POLL_BUDGET: usize = 64;
/// Most commands that wait for room in the fabric's queue.
const OUTBOX_MAX: usize = 64;

pub(super) struct Node {
    fabrics: Vec<Box<dyn Fabric>>,
    peers: Vec<Option<PeerId>>,
    layout: SlabLayout,
    pub(super) slab: Arc<Slab>,
    pub(super) out: Vec<SlotRef>,
    pub(super) in_: Vec<SlotRef>,
    pub(super) remote: Remote,
    events: Vec<Event>,
    outbox: VecDeque<Box<[u8]>>,
    last_id: u64,
    /// Number of signalled requests that succeeded.
    pub(super) completed: u64,
    /// Immediates received since they were last taken.
    pub(super) immediates: Vec<u32>,
    /// Messages of a test received since they were last taken.
    pub(super) messages: Vec<Box<[u8]>>,
    pub(super) commands: VecDeque<Command>,
    ended: Option<String>,
}

impl Node {
    /// Creates the fabrics over one slab. Returns their addresses if they listen.
    pub(super) fn open(
        rails: &dyn Rails,
        transport: &str,
        (layout, memory): (SlabLayout, Memory),
        listen: Option<&[String]>,
        rail_count: usize,
    ) -> Result<(Self, Vec<String>)> {
        let slab = Arc::new(memory.slab("bench-transfer", layout)?);
        let pool = SlotPool::new(Arc::clone(&slab));
        let mut out: Vec<SlotRef> = std::iter::from_fn(|| pool.acquire()).collect();
        let in_ = out.split_off(out.len() / 2);
        let (mut fabrics, mut addresses) = (Vec::new(), Vec::new());
        for rail in 0..rail_count {
            let listen = match listen {
                Some(list) => {
                    Some(list.get(rail).with_context(|| format!("no address for rail {rail}"))?.as_str())
                }
                None => None,
            };
            let made = rails.make(transport, Arc::clone(&slab), listen, rail);
            let (fabric, address) = made.with_context(|| format!("{transport}, rail {rail}"))?;
            fabrics.push(fabric);
            addresses.push(address);
        }
        let node = Self {
            peers: vec![None; rail_count],
            fabrics,
            layout,
            slab,
            out,
            in_,
            remote: Remote::default(),
            events: Vec::with_capacity(2 * POLL_BUDGET),
            outbox: VecDeque::new(),
            last_id: 0,
            completed: 0,
            immediates: Vec::with_capacity(2 * POLL_BUDGET),
            messages: Vec::new(),
            commands: VecDeque::new(),
            ended: None,
        };
        Ok((node, addresses))
    }

    pub(super) fn connect(&mut self, addresses: &[String]) -> Result<()> {
        for (rail, address) in addresses.iter().enumerate() {
            self.fabrics[rail].connect(address)?;
        }
        Ok(())
    }

    /// Whether every rail has its peer.
    pub(super) fn is_connected(&self) -> bool {
        self.peers.iter().all(Option::is_some)
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    pub(super) fn rail_count(&self) -> usize {
        self.fabrics.len()
    }

    pub(super) fn slot_bytes(&self) -> usize {
        self.layout.slot_bytes
    }

    /// Most pieces that fit into each half of both ends.
    pub(super) fn capacity(&self, shape: Shape) -> u32 {
        let here = shape.capacity(self.layout.slot_bytes, self.out.len().min(self.in_.len()));
        here.min(shape.capacity(self.remote.slot_bytes, self.remote.out.len().min(self.remote.in_.len())))
    }

    /// Returns the first command, with the data that the peer needs.
    pub(super) fn hello(&self) -> Command {
        let (out, in_) = (places::names(&self.out), places::names(&self.in_));
        let on_device = self.slab.kind() == SlabKind::Device;
        Command::Hello { version: VERSION, on_device, slot_bytes: self.layout.slot_bytes, out, in_ }
    }

    /// Handles events and returns their number. Commands that had to wait are sent first.
    pub(super) fn poll(&mut self) -> Result<usize> {
        self.send_outbox();
        let mut events = std::mem::take(&mut self.events);
        let mut count = 0;
        for rail in 0..self.fabrics.len() {
            self.fabrics[rail].poll(POLL_BUDGET, &mut events);
            count += events.len();
            for event in events.drain(..) {
                self.take(rail, event)?;
            }
        }
        self.events = events;
        Ok(count)
    }

    fn take(&mut self, rail: usize, event: Event) -> Result<()> {
        match event {
            Event::Connected { peer } | Event::Accepted { peer } if self.peers[rail].is_none() => {
                self.peers[rail] = Some(peer);
            }
            // There is one peer; other connections are closed and their messages ignored.
            Event::Connected { peer } | Event::Accepted { peer } => self.fabrics[rail].disconnect(peer),
            Event::Immediate { peer, .. } | Event::Message { peer, .. } if self.peers[rail] != Some(peer) => {
            }
            Event::PeerDown { peer, .. } if self.peers[rail].is_some_and(|ours| ours != peer) => {}
            Event::Completed { completion: Completion::Done, .. } => self.completed += 1,
            Event::Completed { completion: Completion::PeerDown, .. } => {}
            Event::Immediate { value, .. } => self.immediates.push(value),
            Event::Message { message, .. } if message.first() == Some(&0) => self.messages.push(message),
            Event::Message { message, .. } => {
                let command = serde_json::from_slice(&message).context("a command of the peer")?;
                self.commands.push_back(command);
            }
            Event::PeerDown { reason, .. } => self.ended = Some(format!("rail {rail}: {reason}")),
        }
        Ok(())
    }

    /// Fails once the peer is gone.
    pub(super) fn require_peer(&self) -> Result<()> {
        match &self.ended {
            Some(reason) => Err(anyhow!("the peer is gone: {reason}")),
            None => Ok(()),
        }
    }

    /// Discards arrivals that have not been taken.
    pub(super) fn clear_arrivals(&mut self) {
        self.immediates.clear();
        self.messages.clear();
    }

    pub(super) fn send_command(&mut self, command: &Command) -> Result<()> {
        if self.outbox.len() >= OUTBOX_MAX {
            bail!("{OUTBOX_MAX} commands wait for the fabric to take one");
        }
        self.outbox.push_back(serde_json::to_vec(command)?.into_boxed_slice());
        self.send_outbox();
        Ok(())
    }

    fn send_outbox(&mut self) {
        let Some(peer) = self.peers[0] else { return };
        while let Some(message) = self.outbox.pop_front() {
            if let Err(Full(WorkRequest { operation: Operation::Send { message }, .. })) =
                self.fabrics[0].post(WorkRequest::message(peer, message))
            {
                self.outbox.push_front(message);
                return;
            }
            self.fabrics[0].flush();
        }
    }

    /// Queues one piece; `false`: the queue is full. The caller flushes after a batch.
    pub(super) fn post(&mut self, rail: usize, piece: Piece) -> Result<bool> {
        let request = self.request(rail, piece)?;
        Ok(self.post_request(rail, request).is_ok())
    }

    pub(super) fn post_request(&mut self, rail: usize, request: WorkRequest) -> Result<(), Full> {
        self.fabrics[rail].post(request)
    }

    pub(super) fn flush(&mut self, rail: usize) {
        self.fabrics[rail].flush();
    }

    /// Builds the request for a piece.
    pub(super) fn request(&mut self, rail: usize, piece: Piece) -> Result<WorkRequest> {
        let peer = self.peers[rail].with_context(|| format!("rail {rail} has no peer"))?;
        let operation = piece.operation(self)?;
        self.last_id += u64::from(piece.signalled);
        let id = if piece.signalled { self.last_id } else { 0 };
        Ok(WorkRequest { id, peer, priority: Priority::Urgent, operation })
    }
}
