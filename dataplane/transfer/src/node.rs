//! One node's transfers as a state machine: commands and fabric events in, notices out.
//!
//! Driven by one thread, with time as an argument. No hidden clock, so a simulation with a seeded fabric
//! replays exactly. The three sides of it are [`receiving`], [`sending`] and [`peers`]; [`messages`] says what messages
//! mean, [`direct`] what a device's checksums mean; batches without a protocol are [`crate::moves`].

mod command;
mod direct;
mod messages;
mod peers;
mod receiving;
mod sending;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dataplane_fabric::{Completion, Event, Fabric, PeerId};
use dataplane_memory::{DeviceError, Lease, LeaseTable, SlotGrant, SlotRef};

use crate::budget::Budget;
use crate::config::Limits;
use crate::direct::{Purpose, Summing, Wanted};
use crate::flight::{FlightTable, MoveOutcome, Ticket};
use crate::inbound::Inbound;
use crate::metrics::TransferCounters;
use crate::moves::Mover;
use crate::outbound::{Outbound, Pushed};
use crate::shard::{Cut, PieceLayout};
use crate::stages::Stage;
use crate::wire::Message;
pub use command::{Command, Notice, Outcome, TransferId};
pub(crate) use direct::Returned;
use direct::is_on_device;
use peers::{Backoff, Peer};

/// A peer that does not acknowledge a cancellation for so long is disconnected.
const ACKNOWLEDGE_WITHIN: Duration = Duration::from_secs(5);
/// A peer that connects and does not say what it holds is disconnected after so long.
const GREET_WITHIN: Duration = Duration::from_secs(10);
/// Far enough in the future that a peer is given up once.
const GIVEN_UP: Duration = Duration::from_secs(365 * 24 * 3600);

/// What a peer may still write, until it says that it does not.
struct Quarantined {
    slots: Vec<SlotRef>,
    /// Ended when the peer has said so.
    granted: Vec<SlotGrant>,
    since: Instant,
}

impl Quarantined {
    fn has_stray_writes(&self) -> bool {
        self.slots.iter().any(SlotRef::has_stray_writes)
    }
}

/// Transfers of one node over one fabric.
pub struct TransferNode<F> {
    fabric: F,
    layout: PieceLayout,
    limits: Limits,
    counters: Arc<TransferCounters>,
    peers: HashMap<PeerId, Peer>,
    /// Addresses that could not be reached, and when to try again.
    backoff: HashMap<String, Backoff>,
    random: u64,
    mover: Mover,
    flights: Arc<FlightTable>,
    inbound: HashMap<TransferId, Inbound>,
    /// Inbound transfers whose sender has greeted and has not been told the slots.
    unreserved: VecDeque<TransferId>,
    tags: HashMap<u16, TransferId>,
    next_tag: u16,
    /// Blocks kept for a receiver; owner is the peer once it has reserved.
    outbound: LeaseTable<TransferId, Option<PeerId>, Outbound>,
    /// Outbound transfers with something to write, checksum or announce, ordered by id so that equal seeds give equal runs.
    active: BTreeSet<TransferId>,
    /// The first of them in this round; smaller ids follow the largest one. It is the same for writing and for checksums: what was
    /// just copied is still in the cache.
    turn: TransferId,
    /// The first in the next round: behind the first that has spent a budget in this one.
    next_turn: TransferId,
    /// Whether moves come before hand-offs in this round, as in every other one.
    moves_first: bool,
    /// Inbound transfers with something for the processor to verify, first come first.
    verifying: VecDeque<TransferId>,
    finishing: HashMap<u64, TransferId>,
    next_id: u64,
    /// Outbound transfers that were cancelled, and until when that is remembered: their other half may still
    /// be on its way, and must not start them anew.
    cancelled: HashMap<TransferId, Instant>,
    /// Slots that a peer was told of and may still write to.
    quarantine: HashMap<(PeerId, TransferId), Quarantined>,
    /// What a device sums, when there is one that does.
    summing: Option<Summing>,
    /// Outbound transfers with sums that were not asked for, first come first: at most as many as there are transfers.
    unasked: VecDeque<TransferId>,
    /// What has landed in a device's memory since the last poll, and is to be summed there.
    landed: Vec<Wanted>,
    /// What cannot be sent directly, for staging to take.
    returned: Vec<Returned>,
    /// The time that the present call was given.
    now: Instant,
    /// Kept for their capacity.
    peers_scratch: Vec<PeerId>,
    transfers_scratch: Vec<TransferId>,
    sums_ended: Vec<(Purpose, Result<u64, DeviceError>)>,
    events: Vec<Event>,
    notices: Vec<Notice>,
}

impl<F: Fabric> TransferNode<F> {
    /// A node without transfers.
    pub fn new(fabric: F, layout: PieceLayout, limits: Limits, counters: Arc<TransferCounters>) -> Self {
        let limits = Limits { round_bytes: limits.round_bytes.max(1), ..limits };
        let flights = Arc::new(FlightTable::new(limits.moves_max));
        Self {
            fabric,
            layout,
            limits,
            counters,
            peers: HashMap::new(),
            backoff: HashMap::new(),
            random: limits.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
            mover: Mover::new(limits, Arc::clone(&flights)),
            flights,
            inbound: HashMap::new(),
            unreserved: VecDeque::new(),
            tags: HashMap::new(),
            next_tag: 0,
            outbound: LeaseTable::new(limits.transfers_max),
            active: BTreeSet::new(),
            turn: 0,
            next_turn: 0,
            moves_first: false,
            verifying: VecDeque::new(),
            finishing: HashMap::new(),
            next_id: 1,
            cancelled: HashMap::new(),
            quarantine: HashMap::new(),
            summing: None,
            unasked: VecDeque::new(),
            landed: Vec::new(),
            returned: Vec::new(),
            now: Instant::now(),
            peers_scratch: Vec::new(),
            transfers_scratch: Vec::new(),
            sums_ended: Vec::new(),
            events: Vec::with_capacity(limits.poll_budget),
            notices: Vec::new(),
        }
    }

    /// Opens a ticket for a [`Command::Move`], or `None` when as many as allowed are under way.
    #[must_use]
    pub fn open_move(&self) -> Option<Ticket> {
        self.flights.open()
    }

    /// Asks a batch to stop; [`Notice::Moved`] follows when nothing of it is in flight.
    pub fn cancel_move(&self, ticket: Ticket) {
        self.flights.cancel(ticket);
    }

    /// The ticket's owner will not look again: it may be given out anew once the batch is over.
    pub fn close_move(&self, ticket: Ticket) {
        self.flights.abandon(ticket);
    }

    pub(crate) fn counters(&self) -> &TransferCounters {
        &self.counters
    }

    pub(crate) fn layout(&self) -> &PieceLayout {
        &self.layout
    }

    /// What a transfer that is received has in common with its sender, and the verified layers of each block.
    pub(crate) fn inbound_view(&self, transfer: TransferId) -> Option<(Cut, &[u16])> {
        self.inbound.get(&transfer)?.view()
    }

    pub(crate) fn flights(&self) -> &Arc<FlightTable> {
        &self.flights
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
        let unanswered = self.quarantine.values().map(|held| held.since + ACKNOWLEDGE_WITHIN).min();
        let greetings = self.peers.values().filter_map(Peer::greeting_deadline).min();
        let moves = self.mover.next_deadline();
        let (fabric, leases) = (self.fabric.next_deadline(), self.outbound.next_expiry());
        [inbound, forget, unanswered, greetings, moves, fabric, leases].into_iter().flatten().min()
    }

    /// Whether something waits for room in a queue: nobody rings when there is room again.
    #[must_use]
    pub fn has_backlog(&self) -> bool {
        !self.active.is_empty()
            || !self.verifying.is_empty()
            || !self.unreserved.is_empty()
            || self.mover.has_backlog()
            || !self.unasked.is_empty()
            || self.summing.as_ref().is_some_and(Summing::has_waiting)
            || self.peers.values().any(|peer| peer.connected && !peer.outbox.is_empty())
    }

    /// Whether nothing is held, expected or quarantined: what a leak check asserts.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.inbound.is_empty()
            && self.outbound.is_empty()
            && self.quarantine.is_empty()
            && self.summing.as_ref().is_none_or(Summing::is_idle)
            && self.mover.is_idle()
    }

    /// Carries out one command.
    pub fn handle(&mut self, command: Command, now: Instant) {
        self.now = now;
        if self.refuse_duplicate(&command) || self.refuse_out_of_reach(&command) {
            return;
        }
        match command {
            Command::Expect { transfer, address, content, first_block, slots, deadline } => {
                self.expect(transfer, &address, content, first_block, slots, deadline);
            }
            Command::Push { transfer, content, first_block, slots, layers } => {
                if self.outbound_for(transfer, now).is_some() {
                    self.add_push(transfer, content, Pushed { first_block, slots, layers });
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
            Command::Move { ticket, batch } => {
                let peer = self.peer_at(&batch.address).map_err(|unreachable| unreachable.as_outcome());
                self.mover.start(ticket, batch, peer);
            }
            Command::Decline { transfer, address } => {
                if let Ok(peer) = self.peer_at(&address) {
                    self.send(peer, Message::Cancel { transfer });
                }
            }
            Command::Cancel { transfer } => self.cancel(transfer, now),
        }
    }

    /// Whether a transfer of this id is being received.
    pub(crate) fn expects(&self, transfer: TransferId) -> bool {
        self.inbound.contains_key(&transfer)
    }

    /// Answers an expectation of a transfer that is being received: its sender must not hear of it, since it would stop. False
    /// for every other command.
    fn refuse_duplicate(&mut self, command: &Command) -> bool {
        let Command::Expect { transfer, .. } = *command else { return false };
        let is_known = self.expects(transfer);
        if is_known {
            tracing::warn!(transfer, "transfer: expected a second time; the first one goes on");
            let (slots, outcome) = (Vec::new(), Outcome::Duplicate);
            self.notices.push(Notice::Arrived { transfer, slots, outcome });
        }
        is_known
    }

    /// Answers a command with slots that neither the processor nor, where it is asked for, the fabric and a device reach,
    /// or that peers cannot be told of; false when there are none. [`crate::Staging`] takes such hand-offs.
    fn refuse_out_of_reach(&mut self, command: &Command) -> bool {
        match command {
            Command::Expect { transfer, slots, .. } => {
                let is_verified = !slots.iter().any(is_on_device) || self.receives_directly(slots);
                let is_refused = !is_verified || !slots.iter().all(self.shown_to_peers());
                if is_refused {
                    let (transfer, slots, outcome) = (*transfer, Vec::new(), Outcome::Refused);
                    self.notices.push(Notice::Arrived { transfer, slots, outcome });
                }
                is_refused
            }
            Command::Push { transfer, slots, .. } => {
                let is_refused = slots.iter().any(is_on_device) && !self.sends_directly(*transfer, slots);
                if is_refused {
                    self.refuse_push(*transfer);
                }
                is_refused
            }
            Command::Move { ticket, batch } if !self.fabric.reaches_device_memory() => {
                let is_refused = batch.pieces.iter().any(|piece| is_on_device(&piece.local.slot));
                if is_refused {
                    let (ticket, outcome) = (*ticket, MoveOutcome::Refused);
                    self.flights.end(ticket, outcome);
                    self.notices.push(Notice::Moved { ticket, outcome });
                }
                is_refused
            }
            _ => false,
        }
    }

    /// Makes progress: posts, polls, sums, expires, each as far as [`Limits`] let it. Returns how much was done: zero when there
    /// is nothing to do before something happens. Notices are appended.
    pub fn poll(&mut self, now: Instant, notices: &mut Vec<Notice>) -> usize {
        self.now = now;
        self.stop_returned();
        let summed = self.reap_sums();
        self.moves_first = !self.moves_first;
        self.turn = self.next_turn;
        let mut posts = Budget::new(self.limits.round_bytes);
        self.post(&mut posts);
        self.fabric.flush();
        let mut events = std::mem::take(&mut self.events);
        let count = self.fabric.poll(self.limits.poll_budget, &mut events);
        for event in events.drain(..) {
            self.digest(event, now);
        }
        self.events = events;
        self.start_sums();
        self.expire(now);
        self.post(&mut posts);
        self.fabric.flush();
        // Checksums and verification come last: the writes are on the wire meanwhile.
        let [mut sums, mut verifications] = [(); 2].map(|()| Budget::new(self.limits.round_bytes));
        self.announce(&mut sums);
        self.verify(&mut verifications);
        self.fabric.flush();
        let moved = self.mover.drain_ended();
        self.notices.extend(moved.map(|(ticket, outcome)| Notice::Moved { ticket, outcome }));
        self.publish_levels();
        notices.append(&mut self.notices);
        let spent = [posts, sums, verifications].iter().filter(|budget| budget.spent() > 0).count();
        count + summed + spent
    }

    fn digest(&mut self, event: Event, now: Instant) {
        match event {
            Event::Connected { peer } | Event::Accepted { peer } => {
                self.peer_up(peer);
            }
            Event::Immediate { peer, value } => self.landed(peer, value),
            Event::Message { peer, message } => self.take_message(peer, &message, now),
            Event::Completed { id, completion } => {
                if self.mover.completed(id, completion, now) {
                    return;
                }
                if let Some(transfer) = self.finishing.remove(&id) {
                    let is_whole = |lease: &Lease<_, Outbound>| !lease.held.is_abandoned;
                    let is_whole = self.outbound.get(transfer).is_some_and(is_whole);
                    let posted = self.outbound.get(transfer).and_then(|lease| lease.held.finish_at);
                    if let Some(posted) = posted.filter(|_| completion == Completion::Done) {
                        self.counters.stages.observe(Stage::Finish, now.saturating_duration_since(posted));
                    }
                    self.end_outbound(transfer, completion == Completion::Done && is_whole);
                }
            }
            Event::PeerDown { peer, reason } => self.peer_down(peer, &reason),
        }
    }

    fn expire(&mut self, now: Instant) {
        let late = self.inbound_where(|inbound| inbound.deadline <= now);
        late.into_iter().for_each(|transfer| self.end_inbound(transfer, Outcome::Deadline, false));
        for (transfer, lease) in sorted(self.outbound.expire(now)) {
            TransferCounters::add(&self.counters.leases_expired, 1);
            if let Some(peer) = lease.owner {
                self.send(peer, Message::Finished { transfer });
            }
            self.remember_cancelled(transfer, now);
            self.active.remove(&transfer);
            self.forget_sums(lease.held.number);
            self.notices.push(Notice::Pushed { transfer, complete: false });
        }
        self.cancelled.retain(|_, until| *until > now);
        // Of peers that are gone those slots are left into which another's write is under way.
        let peers = &self.peers;
        self.quarantine.retain(|(owner, _), held| peers.contains_key(owner) || held.has_stray_writes());
        let mute: BTreeSet<PeerId> = self
            .quarantine
            .iter()
            .filter(|(_, held)| held.since + ACKNOWLEDGE_WITHIN <= now)
            .map(|((peer, _), _)| *peer)
            .collect();
        let stuck = self.mover.expire(now);
        let silent: Vec<PeerId> = self
            .peers
            .iter()
            .filter(|(_, peer)| peer.greeting_deadline().is_some_and(|deadline| deadline <= now))
            .map(|(&id, _)| id)
            .collect();
        for peer in mute.into_iter().chain(stuck).chain(silent) {
            self.give_up(peer);
        }
    }

    /// Those that are received, in an order that does not depend on chance.
    fn inbound_where(&self, is_meant: impl Fn(&Inbound) -> bool) -> BTreeSet<TransferId> {
        let meant = self.inbound.iter().filter(|(_, inbound)| is_meant(inbound));
        meant.map(|(&transfer, _)| transfer).collect()
    }

    fn publish_levels(&self) {
        let quarantined = self.quarantine.values().map(|held| held.slots.len()).sum::<usize>() as u64;
        self.counters.quarantined_slots.store(quarantined, Ordering::Relaxed);
        let open = (self.inbound.len() + self.outbound.len() + self.mover.len()) as u64;
        self.counters.transfers_open.store(open, Ordering::Relaxed);
    }
}

/// Leases in an order that does not depend on chance.
fn sorted<T>(mut leases: Vec<(TransferId, T)>) -> Vec<(TransferId, T)> {
    leases.sort_unstable_by_key(|&(transfer, _)| transfer);
    leases
}
