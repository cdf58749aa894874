//! One node's transfers as a state machine: commands and fabric events in, notices out.
//!
//! Driven by one thread, with time as an argument. There is no hidden clock, so a simulation with a seeded
//! fabric replays exactly. The parts of the state machine are [`receiving`], [`sending`] and [`peers`];
//! [`messages`] handles the peers' messages, [`direct`] a device's checksums.

mod command;
mod direct;
mod messages;
mod peers;
mod quarantine;
mod receiving;
mod sending;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dataplane_fabric::{Completion, Event, Fabric, PeerId};
use dataplane_memory::{DeviceError, Lease, LeaseTable};

use crate::budget::Budget;
use crate::config::Limits;
use crate::direct::{Purpose, SumQueue, SumRequest};
use crate::inbound::Inbound;
use crate::metrics::TransferCounters;
use crate::outbound::{Outbound, Pushed, Sending};
use crate::shard::{PieceLayout, SharedHeads};
use crate::stages::Stage;
use crate::timers::{Cancelled, Timer, TimerQueue};
use crate::wire::Message;
pub use command::{Command, Notice, Outcome, TransferId};
use direct::is_on_device;
pub(crate) use direct::{ReturnedExpectation, ReturnedPush};
use peers::{Backoff, Peer};
use quarantine::Quarantine;

/// Time that a peer has to acknowledge a cancellation before it is disconnected.
const ACKNOWLEDGE_WITHIN: Duration = Duration::from_secs(5);
/// Time that a peer has to send its greeting before it is disconnected.
const GREET_WITHIN: Duration = Duration::from_secs(10);

/// Transfers of one node over one fabric.
pub struct TransferNode<F> {
    fabric: F,
    layout: PieceLayout,
    limits: Limits,
    counters: Arc<TransferCounters>,
    peers: HashMap<PeerId, Peer>,
    /// Peers that this node connected to, by address.
    peers_by_address: HashMap<String, PeerId>,
    /// Peers with messages in their outbox, in order, so that equal seeds give equal runs.
    peers_with_messages: BTreeSet<PeerId>,
    /// Addresses that could not be reached, with the time of the next attempt.
    backoff: HashMap<String, Backoff>,
    random: fastrand::Rng,
    inbound: HashMap<TransferId, Inbound>,
    /// Inbound transfers whose sender has greeted and has not been told the slots.
    unreserved: VecDeque<TransferId>,
    tags: HashMap<u16, TransferId>,
    next_tag: u16,
    /// Blocks kept for a receiver; the owner is the peer once it has reserved them.
    outbound: LeaseTable<TransferId, Option<PeerId>, Outbound>,
    /// Outbound transfers with something to write, checksum or announce, ordered by id so that equal seeds give equal runs.
    active: BTreeSet<TransferId>,
    /// First transfer served in this round; smaller ids follow the largest one. The same for writing and
    /// for checksums, so that bytes just copied are still in the cache.
    turn: TransferId,
    /// First transfer of the next round: the one after the first that has spent a budget in this round.
    next_turn: TransferId,
    /// Inbound transfers with parts for the processor to verify, in order of arrival.
    verifying: VecDeque<TransferId>,
    finishing: HashMap<u64, TransferId>,
    next_id: u64,
    /// Outbound transfers that were cancelled.
    cancelled: Cancelled,
    quarantine: Quarantine,
    timers: TimerQueue,
    /// Checksums that a device computes; `None` without a checksummer.
    summing: Option<SumQueue>,
    /// Outbound transfers with sums that were not requested yet, in order of arrival: at most as many as
    /// there are transfers.
    unasked: VecDeque<TransferId>,
    /// Blocks that have landed in a device's memory since the last poll and whose sums are to be requested.
    landed: Vec<SumRequest>,
    /// Pushes that cannot be sent directly; staging takes them.
    returned: Vec<ReturnedPush>,
    /// Expectations that cannot be received directly; staging gives them host slots.
    returned_expectations: Vec<TransferId>,
    /// Outbound transfers that were reserved in this round, reported to staging.
    reserved_now: Vec<TransferId>,
    /// Layouts shared with their senders of inbound transfers that ended in this round: a transfer may
    /// begin and end within one round.
    ended_now: Vec<(TransferId, SharedHeads)>,
    /// Time that was passed to the current call.
    now: Instant,
    /// Buffers kept for their capacity.
    peers_scratch: Vec<PeerId>,
    sums_ended: Vec<(Purpose, Result<u64, DeviceError>)>,
    events: Vec<Event>,
    notices: Vec<Notice>,
}

impl<F: Fabric> TransferNode<F> {
    /// Creates a node without transfers.
    pub fn new(fabric: F, layout: PieceLayout, limits: Limits, counters: Arc<TransferCounters>) -> Self {
        let limits = Limits { round_bytes: limits.round_bytes.max(1), ..limits };
        Self {
            fabric,
            layout,
            limits,
            counters,
            peers: HashMap::new(),
            peers_by_address: HashMap::new(),
            peers_with_messages: BTreeSet::new(),
            backoff: HashMap::new(),
            random: fastrand::Rng::with_seed(limits.seed),
            inbound: HashMap::new(),
            unreserved: VecDeque::new(),
            tags: HashMap::new(),
            next_tag: 0,
            outbound: LeaseTable::new(limits.transfers_max),
            active: BTreeSet::new(),
            turn: 0,
            next_turn: 0,
            verifying: VecDeque::new(),
            finishing: HashMap::new(),
            next_id: 1,
            cancelled: Cancelled::new(limits.transfers_max, limits.lease),
            quarantine: Quarantine::default(),
            timers: TimerQueue::default(),
            summing: None,
            unasked: VecDeque::new(),
            landed: Vec::new(),
            returned: Vec::new(),
            returned_expectations: Vec::new(),
            reserved_now: Vec::new(),
            ended_now: Vec::new(),
            now: Instant::now(),
            peers_scratch: Vec::new(),
            sums_ended: Vec::new(),
            events: Vec::with_capacity(limits.poll_budget),
            notices: Vec::new(),
        }
    }

    pub(crate) fn counters(&self) -> &TransferCounters {
        &self.counters
    }

    pub(crate) fn layout(&self) -> &PieceLayout {
        &self.layout
    }

    /// Returns the bytes that an inbound transfer shares with its sender, and the verified layers of each block.
    pub(crate) fn inbound_view(&self, transfer: TransferId) -> Option<(SharedHeads, &[u16])> {
        self.inbound.get(&transfer)?.view()
    }

    /// Returns the fabric, for waiting on its descriptors.
    pub fn fabric(&self) -> &F {
        &self.fabric
    }

    /// Returns the fabric, for preparing it for a wait.
    pub fn fabric_mut(&mut self) -> &mut F {
        &mut self.fabric
    }

    /// Returns the time of the next deadline.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        // The expiry of cancelled transfers is no deadline: removing them can wait for any later round.
        [self.timers.next(), self.outbound.next_expiry(), self.fabric.next_deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Whether work remains for a later poll, such as messages that wait for room in a queue. No descriptor
    /// signals it.
    #[must_use]
    pub fn has_backlog(&self) -> bool {
        !self.active.is_empty()
            || !self.verifying.is_empty()
            || !self.unreserved.is_empty()
            || !self.unasked.is_empty()
            || self.summing.as_ref().is_some_and(SumQueue::has_waiting)
            || self
                .peers_with_messages
                .iter()
                .any(|peer| self.peers.get(peer).is_some_and(|peer| peer.connected))
    }

    /// Whether nothing is held, expected or quarantined: what a leak check asserts.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.inbound.is_empty()
            && self.outbound.is_empty()
            && self.quarantine.is_empty()
            && self.summing.as_ref().is_none_or(SumQueue::is_idle)
    }

    /// Executes one command.
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
                // A push shows that the computation is alive: the lease starts anew.
                if self.outbound.get(transfer).is_some() {
                    self.outbound.renew(transfer, now + self.limits.lease);
                    self.active.insert(transfer);
                }
            }
            Command::PushEnd { transfer } => {
                if let Some(outbound) = self.outbound_for(transfer, now) {
                    outbound.end();
                    self.active.insert(transfer);
                }
            }
            Command::Decline { transfer, address } => {
                if let Ok(peer) = self.peer_at(&address) {
                    self.send(peer, Message::Cancel { transfer });
                }
            }
            Command::Cancel { transfer } => self.cancel(transfer, now),
        }
    }

    /// Returns the transfers whose receivers reserved their blocks in the last round.
    pub(crate) fn reserved_now(&self) -> &[TransferId] {
        &self.reserved_now
    }

    /// Returns the layouts shared with their senders of inbound transfers that ended since the last round began.
    pub(crate) fn ended_now(&self) -> &[(TransferId, SharedHeads)] {
        &self.ended_now
    }

    /// Returns the blocks that the receiver of a transfer has reserved, once it has.
    pub(crate) fn blocks_wanted(&self, transfer: TransferId) -> Option<Range<u32>> {
        let reservation = self.outbound.get(transfer)?.held.reservation()?;
        Some(reservation.first_block..reservation.first_block.saturating_add(reservation.blocks as u32))
    }

    /// Whether a transfer of this id is being received.
    pub(crate) fn expects(&self, transfer: TransferId) -> bool {
        self.inbound.contains_key(&transfer)
    }

    /// Answers an expectation of a transfer that is being received already. Its sender must not be told,
    /// since it would stop. Returns false for every other command.
    fn refuse_duplicate(&mut self, command: &Command) -> bool {
        let Command::Expect { transfer, .. } = *command else { return false };
        let is_known = self.expects(transfer);
        if is_known {
            tracing::warn!(transfer, "transfer: duplicate expectation refused; the first one continues");
            let (slots, outcome) = (Vec::new(), Outcome::Duplicate);
            self.notices.push(Notice::Arrived { transfer, slots, outcome });
        }
        is_known
    }

    /// Refuses a command with slots that neither the processor nor, where a device is needed, the fabric
    /// and a device reach, or that peers cannot be told of; returns false when there are none.
    /// [`crate::Staging`] takes such hand-offs.
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
            _ => false,
        }
    }

    /// Makes progress: posts, polls, checksums, expires, each within its [`Limits`]. Returns the amount of
    /// work done: zero when nothing is left to do before the next event. Notices are appended.
    pub fn poll(&mut self, now: Instant, notices: &mut Vec<Notice>) -> usize {
        self.now = now;
        self.reserved_now.clear();
        self.ended_now.clear();
        self.stop_returned();
        let summed = self.reap_sums();
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
                if let Some(transfer) = self.finishing.remove(&id) {
                    let sending = self.outbound.get(transfer).map(|lease| lease.held.sending);
                    let is_done = completion == Completion::Done;
                    let mut is_complete = false;
                    if let Some(Sending::Finishing { since, is_whole }) = sending.filter(|_| is_done) {
                        is_complete = is_whole;
                        self.counters.stages.observe(Stage::Finish, now.saturating_duration_since(since));
                    }
                    self.end_outbound(transfer, is_complete);
                }
            }
            Event::PeerDown { peer, reason } => self.peer_down(peer, &reason),
        }
    }

    /// Handles expired deadlines. The cost depends on the number of expired deadlines, not on the number of
    /// pending ones.
    fn expire(&mut self, now: Instant) {
        while let Some(timer) = self.timers.take_due(now) {
            match timer {
                Timer::Arrival(transfer) => self.end_inbound(transfer, Outcome::Deadline, false),
                Timer::Acknowledgement(peer, _) | Timer::Greeting(peer) => self.give_up(peer),
            }
        }
        for (transfer, lease) in self.outbound.expire(now) {
            TransferCounters::add(&self.counters.leases_expired, 1);
            if let Some(peer) = lease.owner {
                self.send(peer, Message::Finished { transfer });
            }
            self.outbound_ended(transfer, lease);
        }
        self.cancelled.expire(now);
        self.quarantine.free_strays();
    }

    /// Ends an outbound transfer that was removed from the table before its end.
    fn outbound_ended(&mut self, transfer: TransferId, lease: Lease<Option<PeerId>, Outbound>) {
        self.cancelled.insert(transfer, self.now);
        self.forget_outbound(transfer, &lease);
        self.notices.push(Notice::Pushed { transfer, complete: false });
    }

    /// Releases the state of an outbound transfer that was removed from the table.
    fn forget_outbound(&mut self, transfer: TransferId, lease: &Lease<Option<PeerId>, Outbound>) {
        self.active.remove(&transfer);
        self.drop_waiting_sums(lease.held.number);
        if let Some(peer) = lease.owner.and_then(|peer| self.peers.get_mut(&peer)) {
            peer.blocks_reserved -= lease.held.blocks_reserved();
        }
    }

    /// Returns the inbound transfers that satisfy `is_meant`, in a deterministic order.
    fn inbound_where(&self, is_meant: impl Fn(&Inbound) -> bool) -> BTreeSet<TransferId> {
        let meant = self.inbound.iter().filter(|(_, inbound)| is_meant(inbound));
        meant.map(|(&transfer, _)| transfer).collect()
    }

    fn publish_levels(&self) {
        self.counters.quarantined_slots.store(self.quarantine.slots() as u64, Ordering::Relaxed);
        let open = (self.inbound.len() + self.outbound.len()) as u64;
        self.counters.transfers_open.store(open, Ordering::Relaxed);
    }
}
