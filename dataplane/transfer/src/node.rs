//! One node's transfers as a state machine: commands and fabric events in, notices out.
//!
//! Driven by one thread, with time as an argument. No hidden clock, so a simulation with a seeded fabric
//! replays exactly.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dataplane_fabric::{Completion, Event, Fabric, Full, Operation, PeerId, WorkRequest};
use dataplane_memory::{Lease, LeaseTable, SlotRef};

use crate::config::{BLOCKS_MAX, Limits, PieceLayout};
use crate::inbound::Inbound;
use crate::metrics::TransferCounters;
use crate::outbound::{Outbound, Progress, Reservation};
use crate::wire::{Message, VERSION};

/// A peer that does not acknowledge a cancellation for so long is disconnected.
const ACKNOWLEDGE_WITHIN: Duration = Duration::from_secs(5);
/// Far enough in the future that a peer is given up once.
const GIVEN_UP: Duration = Duration::from_secs(365 * 24 * 3600);
/// Messages that may wait for one peer before nothing more is expected from it.
const OUTBOX_MAX: usize = 4096;

/// Names a transfer on both of its ends; drawn at random by whoever routes the request.
pub type TransferId = u64;

/// What the owner of a node asks of it.
#[derive(Debug)]
pub enum Command {
    /// Receive blocks `first_block..` of this transfer into `slots` from the node at `address`.
    Expect {
        /// The transfer.
        transfer: TransferId,
        /// The sender, in the fabric's notation.
        address: String,
        /// Index of the first block wanted; the ones before it are here already.
        first_block: u32,
        /// What is wanted: equal on both legs of one request, and on no others.
        content: [u8; 16],
        /// Where the blocks go.
        slots: Vec<SlotRef>,
        /// When to make do with what has come.
        deadline: Instant,
    },
    /// These layers of these blocks are computed; send them when the receiver is known.
    Push {
        /// The transfer.
        transfer: TransferId,
        /// What the transfer as a whole brings, as in `Expect`.
        content: [u8; 16],
        /// Index of the first block.
        first_block: u32,
        /// The blocks' slots. Nobody writes these layers of them any more.
        slots: Vec<SlotRef>,
        /// Which layers.
        layers: Range<u16>,
    },
    /// Nothing more will be pushed for this transfer.
    PushEnd {
        /// The transfer.
        transfer: TransferId,
    },
    /// Tell the sender at `address` that nothing of this transfer is wanted.
    Decline {
        /// The transfer.
        transfer: TransferId,
        /// The sender.
        address: String,
    },
    /// Stop, on whichever side this node is.
    Cancel {
        /// The transfer.
        transfer: TransferId,
    },
}

/// How a received transfer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Every block is here and verified.
    Complete,
    /// A checksum did not match.
    Corrupted,
    /// The sender stopped before the end.
    SenderStopped,
    /// The connection could not be made or ended.
    PeerDown,
    /// The deadline passed.
    Deadline,
    /// It could not start: too many transfers, too many blocks, or a bad address.
    Refused,
}

/// What a node tells its owner.
#[derive(Debug)]
pub enum Notice {
    /// A transfer that was expected is over; `slots` are the leading blocks that are complete and verified.
    Arrived {
        /// The transfer.
        transfer: TransferId,
        /// The verified blocks, from `first_block` on.
        slots: Vec<SlotRef>,
        /// How it ended.
        outcome: Outcome,
    },
    /// A transfer that was pushed is over; the node holds none of its slots any more.
    Pushed {
        /// The transfer.
        transfer: TransferId,
        /// Whether the receiver has been sent everything.
        complete: bool,
    },
}

#[derive(Debug)]
struct Peer {
    /// Where we connected to; `None` for a peer that connected to us.
    address: Option<String>,
    connected: bool,
    greeted: bool,
    /// Messages that wait for the connection or for room.
    outbox: VecDeque<Message>,
}

/// Transfers of one node over one fabric.
pub struct TransferNode<F> {
    fabric: F,
    layout: PieceLayout,
    limits: Limits,
    counters: Arc<TransferCounters>,
    peers: HashMap<PeerId, Peer>,
    inbound: HashMap<TransferId, Inbound>,
    tags: HashMap<u16, TransferId>,
    next_tag: u16,
    /// Blocks kept for a receiver; owner is the peer once it has reserved.
    outbound: LeaseTable<TransferId, Option<PeerId>, Outbound>,
    /// Outbound transfers with something to post.
    active: HashSet<TransferId>,
    finishing: HashMap<u64, TransferId>,
    next_id: u64,
    /// Outbound transfers that were cancelled, and until when that is remembered: their other half may still
    /// be on its way, and must not start them anew.
    cancelled: HashMap<TransferId, Instant>,
    /// Slots that a peer was told of and may still write to.
    quarantine: HashMap<(PeerId, TransferId), (Vec<SlotRef>, Instant)>,
    /// The time that the present call was given.
    now: Instant,
    events: Vec<Event>,
    notices: Vec<Notice>,
}

impl<F: Fabric> TransferNode<F> {
    /// A node without transfers.
    pub fn new(fabric: F, layout: PieceLayout, limits: Limits, counters: Arc<TransferCounters>) -> Self {
        Self {
            fabric,
            layout,
            limits,
            counters,
            peers: HashMap::new(),
            inbound: HashMap::new(),
            tags: HashMap::new(),
            next_tag: 0,
            outbound: LeaseTable::new(limits.transfers_max),
            active: HashSet::new(),
            finishing: HashMap::new(),
            next_id: 1,
            cancelled: HashMap::new(),
            quarantine: HashMap::new(),
            now: Instant::now(),
            events: Vec::with_capacity(limits.poll_budget),
            notices: Vec::new(),
        }
    }

    /// The fabric, to wait on its descriptors.
    pub fn fabric(&self) -> &F {
        &self.fabric
    }

    /// The fabric, to prepare it for a wait.
    pub fn fabric_mut(&mut self) -> &mut F {
        &mut self.fabric
    }

    /// When something happens by itself next.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let inbound = self.inbound.values().map(|inbound| inbound.deadline).min();
        let forget = self.cancelled.values().copied().min();
        let unanswered = self.quarantine.values().map(|(_, since)| *since + ACKNOWLEDGE_WITHIN).min();
        [inbound, forget, unanswered, self.outbound.next_expiry()].into_iter().flatten().min()
    }

    /// Whether something waits for room in a queue: nobody rings when there is room again.
    #[must_use]
    pub fn has_backlog(&self) -> bool {
        !self.active.is_empty() || self.peers.values().any(|peer| peer.connected && !peer.outbox.is_empty())
    }

    /// Whether nothing is held, expected or quarantined: what a leak check asserts.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.inbound.is_empty() && self.outbound.is_empty() && self.quarantine.is_empty()
    }

    /// Carries out one command.
    pub fn handle(&mut self, command: Command, now: Instant) {
        self.now = now;
        match command {
            Command::Expect { transfer, address, content, first_block, slots, deadline } => {
                self.expect(transfer, &address, content, first_block, slots, deadline);
            }
            Command::Push { transfer, content, first_block, slots, layers } => {
                if let Some(outbound) = self.outbound_for(transfer, now) {
                    outbound.content = Some(content);
                    outbound.push(first_block, slots, layers);
                }
                // What is being computed is alive: the lease starts anew.
                if let Some(lease) = self.outbound.get_mut(transfer) {
                    lease.expires_at = now + self.limits.lease;
                    self.active.insert(transfer);
                }
            }
            Command::PushEnd { transfer } => {
                if let Some(outbound) = self.outbound_for(transfer, now) {
                    outbound.ended = true;
                    self.active.insert(transfer);
                }
            }
            Command::Decline { transfer, address } => {
                if let Some(peer) = self.peer_at(&address) {
                    self.send(peer, Message::Cancel { transfer });
                }
            }
            Command::Cancel { transfer } => self.cancel(transfer, now),
        }
    }

    /// Makes progress: posts, polls, expires. Returns the number of events handled; notices are appended.
    pub fn poll(&mut self, now: Instant, notices: &mut Vec<Notice>) -> usize {
        self.now = now;
        self.pump();
        self.fabric.flush();
        let mut events = std::mem::take(&mut self.events);
        let count = self.fabric.poll(self.limits.poll_budget, &mut events);
        for event in events.drain(..) {
            self.digest(event, now);
        }
        self.events = events;
        self.expire(now);
        self.pump();
        self.fabric.flush();
        self.publish_levels();
        notices.append(&mut self.notices);
        count
    }

    // --- receiving ---

    fn expect(
        &mut self,
        transfer: TransferId,
        address: &str,
        content: [u8; 16],
        first_block: u32,
        slots: Vec<SlotRef>,
        deadline: Instant,
    ) {
        let room = self.inbound.len() < self.limits.transfers_max
            && slots.len() <= BLOCKS_MAX
            && self.quarantine.len() < self.limits.transfers_max;
        let peer = if room && !self.inbound.contains_key(&transfer) { self.peer_at(address) } else { None };
        let is_moving =
            |peer: &PeerId| self.peers.get(peer).is_some_and(|state| state.outbox.len() < OUTBOX_MAX);
        let peer = peer.filter(is_moving);
        let (Some(peer), Some(tag)) = (peer, self.free_tag()) else {
            if let Some(peer) = self.peer_at(address) {
                self.send(peer, Message::Cancel { transfer });
            }
            self.notices.push(Notice::Arrived { transfer, slots: Vec::new(), outcome: Outcome::Refused });
            return;
        };
        self.tags.insert(tag, transfer);
        self.inbound.insert(transfer, Inbound::new(peer, tag, content, first_block, slots, deadline));
        if self.peers.get(&peer).is_some_and(|peer| peer.greeted) {
            self.reserve(transfer);
        }
    }

    fn free_tag(&mut self) -> Option<u16> {
        for _ in 0..=u16::MAX {
            self.next_tag = self.next_tag.wrapping_add(1);
            if !self.tags.contains_key(&self.next_tag) {
                return Some(self.next_tag);
            }
        }
        None
    }

    /// The connection to `address`, made if there is none.
    fn peer_at(&mut self, address: &str) -> Option<PeerId> {
        let known = self.peers.iter().find(|(_, peer)| peer.address.as_deref() == Some(address));
        if let Some((&id, _)) = known {
            return Some(id);
        }
        match self.fabric.connect(address) {
            Ok(id) => {
                let peer = Peer {
                    address: Some(address.to_owned()),
                    connected: false,
                    greeted: false,
                    outbox: VecDeque::new(),
                };
                self.peers.insert(id, peer);
                Some(id)
            }
            Err(error) => {
                tracing::warn!(%error, "transfer: cannot reach the sender");
                None
            }
        }
    }

    fn reserve(&mut self, transfer: TransferId) {
        let Some(inbound) = self.inbound.get_mut(&transfer).filter(|inbound| !inbound.reserved) else {
            return;
        };
        inbound.reserved = true;
        let (peer, tag, content, first_block) =
            (inbound.peer, inbound.tag, inbound.content, inbound.first_block);
        let slots = inbound.slot_names();
        self.send(peer, Message::Reserve { transfer, tag, content, first_block, slots });
    }

    /// Ends an inbound transfer. `writes_over`: the sender cannot write to its slots any more.
    fn end_inbound(&mut self, transfer: TransferId, outcome: Outcome, writes_over: bool) {
        let Some(mut inbound) = self.inbound.remove(&transfer) else { return };
        self.tags.remove(&inbound.tag);
        let unverified = inbound.slots.split_off(inbound.verified_prefix(&self.layout));
        let peer = inbound.peer;
        if !writes_over {
            if inbound.reserved && !unverified.is_empty() {
                self.quarantine.insert((peer, transfer), (unverified, self.now));
            }
            self.send(peer, Message::Cancel { transfer });
        }
        TransferCounters::add(&self.counters.blocks_received, inbound.slots.len() as u64);
        TransferCounters::add(
            match outcome {
                Outcome::Complete => &self.counters.transfers_completed,
                _ => &self.counters.transfers_incomplete,
            },
            1,
        );
        self.notices.push(Notice::Arrived { transfer, slots: inbound.slots, outcome });
    }

    fn landed(&mut self, from: PeerId, value: u32) {
        let Some(&transfer) = self.tags.get(&((value >> 16) as u16)) else { return };
        let Some(inbound) = self.inbound.get_mut(&transfer).filter(|inbound| inbound.peer == from) else {
            return;
        };
        let failures = inbound.landed(&self.layout, value as u16);
        self.account_verification(transfer, failures);
    }

    fn account_verification(&mut self, transfer: TransferId, failures: u64) {
        if failures > 0 {
            TransferCounters::add(&self.counters.checksum_failures, failures);
            tracing::warn!(transfer, failures, "transfer: checksum mismatch, the blocks will be recomputed");
        }
        if self.inbound.get(&transfer).is_some_and(|inbound| inbound.is_complete(&self.layout)) {
            self.end_inbound(transfer, Outcome::Complete, true);
        }
    }

    fn announced(&mut self, from: PeerId, message: Message) -> bool {
        let Message::Announce { transfer, sequence, first_layer, layers, first_block, sums } = message else {
            return false;
        };
        let Some(inbound) = self.inbound.get_mut(&transfer).filter(|inbound| inbound.peer == from) else {
            return true; // Of a transfer that we gave up.
        };
        let was_corrupted = inbound.corrupted;
        let sensible = inbound.announce(&self.layout, sequence, (first_layer, layers), first_block, sums);
        let failures = u64::from(inbound.corrupted && !was_corrupted);
        self.account_verification(transfer, failures);
        sensible
    }

    // --- sending ---

    fn outbound_for(&mut self, transfer: TransferId, now: Instant) -> Option<&mut Outbound> {
        if self.cancelled.contains_key(&transfer) {
            self.notices.push(Notice::Pushed { transfer, complete: false });
            return None;
        }
        if self.outbound.get_mut(transfer).is_none() {
            let lease = Lease { owner: None, expires_at: now + self.limits.lease, held: Outbound::default() };
            if self.outbound.grant(transfer, lease).is_err() {
                self.notices.push(Notice::Pushed { transfer, complete: false });
                return None;
            }
        }
        self.outbound.get_mut(transfer).map(|lease| &mut lease.held)
    }

    /// False when the transfer is reserved already: slots that are being written to must not change.
    fn reserved(&mut self, transfer: TransferId, reservation: Reservation, now: Instant) -> bool {
        let peer = reservation.peer;
        let Some(outbound) = self.outbound_for(transfer, now) else {
            self.send(peer, Message::Finished { transfer });
            return true;
        };
        if outbound.reservation.is_some() {
            return false;
        }
        outbound.reservation = Some(reservation);
        if let Some(lease) = self.outbound.get_mut(transfer) {
            lease.owner = Some(peer);
            lease.expires_at = now + self.limits.lease;
        }
        self.active.insert(transfer);
        true
    }

    fn pump(&mut self) {
        let peers: Vec<PeerId> = self.peers.keys().copied().collect();
        peers.into_iter().for_each(|peer| self.pump_outbox(peer));
        let active: Vec<TransferId> = self.active.iter().copied().collect();
        for transfer in active {
            let Some(lease) = self.outbound.get_mut(transfer) else {
                self.active.remove(&transfer);
                continue;
            };
            let finish_id = self.next_id;
            let (before, was_posted) = (lease.held.bytes_posted, lease.held.finish_posted);
            let progress = lease.held.pump(transfer, &self.layout, &mut self.fabric, finish_id);
            TransferCounters::add(&self.counters.bytes_sent, lease.held.bytes_posted - before);
            if lease.held.finish_posted && !was_posted {
                self.finishing.insert(finish_id, transfer);
                self.next_id += 1;
            }
            if progress == Progress::Idle {
                self.active.remove(&transfer);
            }
        }
    }

    fn end_outbound(&mut self, transfer: TransferId, complete: bool) {
        if self.outbound.release(transfer).is_some() {
            self.active.remove(&transfer);
            self.notices.push(Notice::Pushed { transfer, complete });
        }
    }

    // --- both ---

    fn remember_cancelled(&mut self, transfer: TransferId, now: Instant) {
        if self.cancelled.len() < self.limits.transfers_max {
            self.cancelled.insert(transfer, now + self.limits.lease);
        }
    }

    fn cancel(&mut self, transfer: TransferId, now: Instant) {
        let known = self.inbound.contains_key(&transfer) || self.outbound.get_mut(transfer).is_some();
        if known {
            TransferCounters::add(&self.counters.transfers_cancelled, 1);
        }
        if self.inbound.contains_key(&transfer) {
            self.end_inbound(transfer, Outcome::SenderStopped, false);
        } else {
            self.remember_cancelled(transfer, now);
        }
        if let Some(lease) = self.outbound.get_mut(transfer) {
            lease.held.abandon();
            match lease.held.reservation {
                Some(_) => drop(self.active.insert(transfer)),
                None => self.end_outbound(transfer, false),
            }
        }
    }

    fn send(&mut self, peer: PeerId, message: Message) {
        if let Some(state) = self.peers.get_mut(&peer) {
            state.outbox.push_back(message);
            self.pump_outbox(peer);
        }
    }

    fn pump_outbox(&mut self, peer: PeerId) {
        let Some(state) = self.peers.get_mut(&peer).filter(|state| state.connected) else { return };
        while let Some(message) = state.outbox.front() {
            let operation = Operation::Send { message: message.encode() };
            if let Err(Full(_)) = self.fabric.post(WorkRequest { id: 0, peer, operation }) {
                return;
            }
            state.outbox.pop_front();
        }
    }

    fn digest(&mut self, event: Event, now: Instant) {
        match event {
            Event::Connected { peer } | Event::Accepted { peer } => {
                let state = self.peers.entry(peer).or_insert(Peer {
                    address: None,
                    connected: true,
                    greeted: false,
                    outbox: VecDeque::new(),
                });
                state.connected = true;
                state.outbox.push_front(Message::Hello { version: VERSION, layout: self.layout });
                self.pump_outbox(peer);
            }
            Event::Immediate { peer, value } => self.landed(peer, value),
            Event::Message { peer, message } => {
                let understood =
                    Message::decode(&message).is_some_and(|message| self.understand(peer, message, now));
                if !understood {
                    tracing::warn!(?peer, "transfer: a message that makes no sense; closing the connection");
                    self.fabric.disconnect(peer);
                }
            }
            Event::Completed { id, completion } => {
                if let Some(transfer) = self.finishing.remove(&id) {
                    self.end_outbound(transfer, completion == Completion::Done);
                }
            }
            Event::PeerDown { peer, reason } => self.peer_down(peer, &reason),
        }
    }

    /// False when the peer breaks the protocol.
    fn understand(&mut self, peer: PeerId, message: Message, now: Instant) -> bool {
        let greeted = self.peers.get(&peer).is_some_and(|state| state.greeted);
        match message {
            Message::Hello { version, layout } => {
                if version != VERSION || layout != self.layout {
                    tracing::warn!(version, ?layout, ours = ?self.layout, "transfer: the peer's blocks differ from ours");
                    return false;
                }
                if let Some(state) = self.peers.get_mut(&peer) {
                    state.greeted = true;
                }
                let waiting: Vec<TransferId> = self
                    .inbound
                    .iter()
                    .filter(|(_, inbound)| inbound.peer == peer && !inbound.reserved)
                    .map(|(&transfer, _)| transfer)
                    .collect();
                waiting.into_iter().for_each(|transfer| self.reserve(transfer));
                true
            }
            _ if !greeted => false,
            Message::Reserve { transfer, tag, content, first_block, slots } => {
                self.reserved(transfer, Reservation { peer, tag, content, first_block, slots }, now)
            }
            message @ Message::Announce { .. } => self.announced(peer, message),
            Message::Finished { transfer } => {
                self.quarantine.remove(&(peer, transfer));
                let outcome = match self.inbound.get(&transfer) {
                    Some(inbound) if inbound.corrupted => Outcome::Corrupted,
                    _ => Outcome::SenderStopped,
                };
                if self.inbound.get(&transfer).is_some_and(|inbound| inbound.peer == peer) {
                    self.end_inbound(transfer, outcome, true);
                }
                true
            }
            Message::Cancel { transfer } => {
                let owner = self.outbound.get_mut(transfer).map(|lease| lease.owner);
                if owner.is_some_and(|owner| owner.is_some_and(|owner| owner != peer)) {
                    return false;
                }
                if owner.is_some() {
                    TransferCounters::add(&self.counters.transfers_cancelled, 1);
                    self.end_outbound(transfer, false);
                }
                self.remember_cancelled(transfer, now);
                self.send(peer, Message::CancelAck { transfer });
                true
            }
            Message::CancelAck { transfer } => {
                self.quarantine.remove(&(peer, transfer));
                true
            }
        }
    }

    fn peer_down(&mut self, peer: PeerId, reason: &str) {
        tracing::info!(?peer, reason, "transfer: connection ended");
        TransferCounters::add(&self.counters.peers_lost, 1);
        self.peers.remove(&peer);
        self.quarantine.retain(|(owner, _), _| *owner != peer);
        let lost: Vec<TransferId> = self
            .inbound
            .iter()
            .filter(|(_, inbound)| inbound.peer == peer)
            .map(|(&transfer, _)| transfer)
            .collect();
        lost.into_iter().for_each(|transfer| self.end_inbound(transfer, Outcome::PeerDown, true));
        for (transfer, _) in self.outbound.end_owner(&Some(peer)) {
            self.remember_cancelled(transfer, self.now);
            self.active.remove(&transfer);
            self.notices.push(Notice::Pushed { transfer, complete: false });
        }
    }

    fn expire(&mut self, now: Instant) {
        let late: Vec<TransferId> = self
            .inbound
            .iter()
            .filter(|(_, inbound)| inbound.deadline <= now)
            .map(|(&transfer, _)| transfer)
            .collect();
        late.into_iter().for_each(|transfer| self.end_inbound(transfer, Outcome::Deadline, false));
        for (transfer, lease) in self.outbound.expire(now) {
            TransferCounters::add(&self.counters.leases_expired, 1);
            if let Some(peer) = lease.owner {
                self.send(peer, Message::Finished { transfer });
            }
            self.remember_cancelled(transfer, now);
            self.active.remove(&transfer);
            self.notices.push(Notice::Pushed { transfer, complete: false });
        }
        self.cancelled.retain(|_, until| *until > now);
        let mute: HashSet<PeerId> = self
            .quarantine
            .iter()
            .filter(|(_, (_, since))| *since + ACKNOWLEDGE_WITHIN <= now)
            .map(|((peer, _), _)| *peer)
            .collect();
        for peer in mute {
            self.give_up(peer);
        }
    }

    /// Disconnects a peer that does not answer, and connects anew the next time. Its slots stay in quarantine
    /// until the fabric says that it cannot write any more.
    fn give_up(&mut self, peer: PeerId) {
        tracing::warn!(?peer, "transfer: a peer does not acknowledge; disconnecting");
        if let Some(state) = self.peers.get_mut(&peer) {
            state.address = None;
            state.outbox.clear();
        }
        let now = self.now;
        let own = self.quarantine.iter_mut().filter(|((owner, _), _)| *owner == peer);
        own.for_each(|(_, (_, since))| *since = now + GIVEN_UP);
        self.fabric.disconnect(peer);
    }

    fn publish_levels(&self) {
        let quarantined = self.quarantine.values().map(|(slots, _)| slots.len()).sum::<usize>() as u64;
        self.counters.quarantined_slots.store(quarantined, Ordering::Relaxed);
        let open = (self.inbound.len() + self.outbound.len()) as u64;
        self.counters.transfers_open.store(open, Ordering::Relaxed);
    }
}
