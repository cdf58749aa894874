//! One node's transfers as a state machine: commands and fabric events in, notices out.
//!
//! Driven by one thread, with time as an argument. No hidden clock, so a simulation with a seeded fabric
//! replays exactly. The three sides of it are [`receiving`], [`sending`] and [`peers`]; [`messages`] says what messages
//! mean, [`direct`] what a device's checksums mean.

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
use crate::direct::{Purpose, Summing, Wanted};
use crate::inbound::Inbound;
use crate::metrics::TransferCounters;
use crate::outbound::{Outbound, Pushed, Sending};
use crate::shard::{Cut, PieceLayout};
use crate::stages::Stage;
use crate::timers::{Cancelled, Timer, TimerQueue};
use crate::wire::Message;
pub use command::{Command, Notice, Outcome, TransferId};
use direct::is_on_device;
pub(crate) use direct::{Returned, ReturnedExpectation};
use peers::{Backoff, Peer};
use quarantine::Quarantine;

/// A peer that does not acknowledge a cancellation for so long is disconnected.
const ACKNOWLEDGE_WITHIN: Duration = Duration::from_secs(5);
/// A peer that connects and does not say what it holds is disconnected after so long.
const GREET_WITHIN: Duration = Duration::from_secs(10);

/// Transfers of one node over one fabric.
pub struct TransferNode<F> {
    fabric: F,
    layout: PieceLayout,
    limits: Limits,
    counters: Arc<TransferCounters>,
    peers: HashMap<PeerId, Peer>,
    /// Peers that we have connected to, by address.
    dialled: HashMap<String, PeerId>,
    /// Peers with messages that wait, in order, so that equal seeds give equal runs.
    talking: BTreeSet<PeerId>,
    /// Addresses that could not be reached, and when to try again.
    backoff: HashMap<String, Backoff>,
    random: u64,
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
    /// Inbound transfers with something for the processor to verify, first come first.
    verifying: VecDeque<TransferId>,
    finishing: HashMap<u64, TransferId>,
    next_id: u64,
    /// Outbound transfers that were cancelled.
    cancelled: Cancelled,
    quarantine: Quarantine,
    timers: TimerQueue,
    /// What a device sums, when there is one that does.
    summing: Option<Summing>,
    /// Outbound transfers with sums that were not asked for, first come first: at most as many as there are transfers.
    unasked: VecDeque<TransferId>,
    /// What has landed in a device's memory since the last poll, and is to be summed there.
    landed: Vec<Wanted>,
    /// What cannot be sent directly, for staging to take.
    returned: Vec<Returned>,
    /// Expectations that cannot be received directly: staging gives them host slots.
    returned_expectations: Vec<TransferId>,
    /// Outbound transfers that were reserved in this round, for staging to see.
    reserved_now: Vec<TransferId>,
    /// Layouts that inbound transfers, ended in this round, shared with their senders: one may begin and end in a round.
    ended_now: Vec<(TransferId, Cut)>,
    /// The time that the present call was given.
    now: Instant,
    /// Kept for their capacity.
    peers_scratch: Vec<PeerId>,
    sums_ended: Vec<(Purpose, Result<u64, DeviceError>)>,
    events: Vec<Event>,
    notices: Vec<Notice>,
}

impl<F: Fabric> TransferNode<F> {
    /// A node without transfers.
    pub fn new(fabric: F, layout: PieceLayout, limits: Limits, counters: Arc<TransferCounters>) -> Self {
        let limits = Limits { round_bytes: limits.round_bytes.max(1), ..limits };
        Self {
            fabric,
            layout,
            limits,
            counters,
            peers: HashMap::new(),
            dialled: HashMap::new(),
            talking: BTreeSet::new(),
            backoff: HashMap::new(),
            random: limits.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
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

    /// What a transfer that is received has in common with its sender, and the verified layers of each block.
    pub(crate) fn inbound_view(&self, transfer: TransferId) -> Option<(Cut, &[u16])> {
        self.inbound.get(&transfer)?.view()
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
        // A cancelled transfer is forgotten in some later round: nobody waits for that.
        [self.timers.next(), self.outbound.next_expiry(), self.fabric.next_deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Whether something waits for room in a queue: nobody rings when there is room again.
    #[must_use]
    pub fn has_backlog(&self) -> bool {
        !self.active.is_empty()
            || !self.verifying.is_empty()
            || !self.unreserved.is_empty()
            || !self.unasked.is_empty()
            || self.summing.as_ref().is_some_and(Summing::has_waiting)
            || self.talking.iter().any(|peer| self.peers.get(peer).is_some_and(|peer| peer.connected))
    }

    /// Whether nothing is held, expected or quarantined: what a leak check asserts.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.inbound.is_empty()
            && self.outbound.is_empty()
            && self.quarantine.is_empty()
            && self.summing.as_ref().is_none_or(Summing::is_idle)
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

    /// Transfers whose receivers have asked for their blocks in the last round.
    pub(crate) fn reserved_now(&self) -> &[TransferId] {
        &self.reserved_now
    }

    /// Layouts that inbound transfers, ended since the last round began, shared with their senders.
    pub(crate) fn ended_now(&self) -> &[(TransferId, Cut)] {
        &self.ended_now
    }

    /// The blocks that the receiver of a transfer has asked for, once it has.
    pub(crate) fn blocks_wanted(&self, transfer: TransferId) -> Option<Range<u32>> {
        let reservation = self.outbound.get(transfer)?.held.reservation()?;
        Some(reservation.first_block..reservation.first_block.saturating_add(reservation.blocks as u32))
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
            _ => false,
        }
    }

    /// Makes progress: posts, polls, sums, expires, each as far as [`Limits`] let it. Returns how much was done: zero when there
    /// is nothing to do before something happens. Notices are appended.
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

    /// Carries out what is due. Takes as long as that is much, however much there is that is not due.
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

    /// An outbound transfer was taken out of the table before its end.
    fn outbound_ended(&mut self, transfer: TransferId, lease: Lease<Option<PeerId>, Outbound>) {
        self.cancelled.insert(transfer, self.now);
        self.forget_outbound(transfer, &lease);
        self.notices.push(Notice::Pushed { transfer, complete: false });
    }

    /// An outbound transfer was taken out of the table.
    fn forget_outbound(&mut self, transfer: TransferId, lease: &Lease<Option<PeerId>, Outbound>) {
        self.active.remove(&transfer);
        self.forget_sums(lease.held.number);
        if let Some(peer) = lease.owner.and_then(|peer| self.peers.get_mut(&peer)) {
            peer.blocks_reserved -= lease.held.blocks_reserved();
        }
    }

    /// Those that are received, in an order that does not depend on chance.
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
