//! A peer with its links and lanes: what is posted next, and over which link.

use std::collections::VecDeque;
use std::time::Instant;

use dataplane_fabric::{Event, Fabric, Full, Operation, PeerId, Priority, WorkRequest};

use super::arrivals::Arrivals;
use super::counters::{BondCounters, RailCounts};
use super::lane::{Lane, LaneMarker, Next, Slice};
use super::link::{Link, State};
use super::wire::{Frame, LinkName, MarkerName};
use super::{BondConfig, FENCE_WITHIN, GREET_WITHIN, InFlightSlice, PostedSlices, Rail, SAY_AGAIN_AFTER};
use crate::pieces::{bytes_of, split_front};

/// Connections that one slice may end. Its place at the peer may be one that the peer's side refuses.
const SLICE_FAILURES_MAX: u8 = 16;
/// Events of a peer that may arrive before the connection was announced.
const EARLY_MAX: usize = 256;
/// Control frames that may wait, and ended connections of which the peer has not confirmed the end.
const CONTROL_MAX: usize = 64;

/// A connection that has ended here, until the peer says that nothing of it can arrive any more.
#[derive(Debug)]
struct Fence {
    name: LinkName,
    /// Writes of the connection: they are posted again then.
    slices: Vec<(usize, Slice)>,
    since: Instant,
    /// When the peer was told of the end last.
    said_at: Instant,
}

/// Frames about connections, sent over every link that is up and has room: any of them may have failed at the other end only.
/// Repeats are harmless.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Control {
    LinkDown(LinkName),
    Fenced(LinkName),
}

#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) session: u64,
    /// Of the node that accepted: drawn here if that is us, else as its first welcome said.
    pub(crate) incarnation: Option<u64>,
    pub(crate) links: Vec<Link>,
    pub(crate) lanes: [Lane; Priority::ALL.len()],
    /// By lane: events that have come.
    pub(crate) arrivals: [Arrivals<Event>; Priority::ALL.len()],
    /// The link that carries the events of each lane.
    pub(crate) carriers: [Option<usize>; Priority::ALL.len()],
    /// Set once the user was told of the connection.
    pub(crate) announced: bool,
    pub(crate) early: Vec<Event>,
    /// Set once it shall end, with the reason.
    pub(crate) ending: Option<String>,
    /// Its connections are being closed.
    pub(crate) closing: bool,
    pub(crate) ack_due: bool,
    fences: Vec<Fence>,
    /// Links whose end the peer wants to be told of, when they have ended here.
    owed: Vec<LinkName>,
    control: VecDeque<Control>,
}

impl Peer {
    pub(crate) fn new(session: u64, incarnation: Option<u64>, links: Vec<Link>) -> Self {
        Self {
            session,
            incarnation,
            links,
            lanes: Default::default(),
            arrivals: Default::default(),
            carriers: [None; Priority::ALL.len()],
            announced: false,
            early: Vec::new(),
            ending: None,
            closing: false,
            ack_due: false,
            fences: Vec::new(),
            owed: Vec::new(),
            control: VecDeque::new(),
        }
    }

    /// With one link, requests pass through and messages are the users' own.
    pub(crate) fn is_framed(&self) -> bool {
        self.links.len() > 1
    }

    pub(crate) fn keep_early(&mut self, event: Event) {
        if self.early.len() < EARLY_MAX {
            self.early.push(event);
        } else {
            self.ending.get_or_insert_with(|| "too much said before the welcome".to_owned());
        }
    }

    /// Whether a first link may still come up.
    pub(crate) fn is_waiting(&self) -> bool {
        let is_on_its_way = |link: &Link| matches!(link.state, State::Connecting | State::Greeting { .. });
        !self.announced && self.links.iter().any(is_on_its_way)
    }

    /// A link carries nothing more: the events that it carried, or whose writes it carried, go again over another.
    pub(crate) fn link_ended(&mut self, index: usize) {
        for (carrier, lane) in self.carriers.iter_mut().zip(&mut self.lanes) {
            let was_carrier = *carrier == Some(index);
            if was_carrier {
                *carrier = None;
            }
            lane.link_ended(index, was_carrier);
        }
    }

    pub(crate) fn next_deadline(&self, now: Instant) -> Option<Instant> {
        if self.ending.is_some() {
            // Once its connections are being closed, the rails tell of the end.
            return (!self.closing).then_some(now);
        }
        let retries = self.links.iter().filter_map(|link| match link.state {
            State::Down { retry_at } => retry_at,
            State::Greeting { since } => Some(since + GREET_WITHIN),
            State::Connecting | State::Up => None,
        });
        let overdue = self.fences.iter().filter(|fence| !fence.slices.is_empty());
        let again = self.fences.iter().map(|fence| fence.said_at + SAY_AGAIN_AFTER);
        retries.chain(overdue.map(|fence| fence.since + FENCE_WITHIN)).chain(again).min()
    }

    /// Takes a request of the user, or hands it back when the lane is full.
    pub(crate) fn enqueue(&mut self, request: WorkRequest) -> Result<(), WorkRequest> {
        let lane = &mut self.lanes[request.priority.index()];
        if lane.is_full() {
            return Err(request);
        }
        let WorkRequest { id, operation, .. } = request;
        match operation {
            Operation::Send { message } => lane.add_message(id, message),
            Operation::Write { source, target, rows, immediate } => {
                lane.add_request(id, Operation::Write { source, target, rows, immediate: None });
                if let Some(value) = immediate {
                    lane.add_immediate(value);
                }
            }
            operation @ Operation::Read { .. } => lane.add_request(id, operation),
        }
        Ok(())
    }

    // --- fences ---

    /// Our slices that a dead link had: reads go again at once, writes when the peer has fenced the link. Gives the number of
    /// reads.
    pub(crate) fn fence(&mut self, name: LinkName, failed: Vec<(usize, Slice)>, now: Instant) -> u64 {
        let (mut writes, mut reads) = (Vec::new(), 0);
        for (lane, mut slice) in failed.into_iter().rev() {
            slice.is_last = false;
            slice.failures = slice.failures.saturating_add(1);
            if slice.failures > SLICE_FAILURES_MAX {
                self.ending.get_or_insert_with(|| "a slice ends every connection that carries it".to_owned());
            }
            match slice.operation {
                Operation::Read { .. } => {
                    reads += 1;
                    self.lanes[lane].waiting.push_front(slice);
                }
                _ => writes.push((lane, slice)),
            }
        }
        // Also without writes: the peer may not have noticed, and would go on sending into the void. What it sends again only
        // once it has noticed is lost until then.
        if self.fences.len() < CONTROL_MAX {
            self.fences.push(Fence { name, slices: writes, since: now, said_at: now });
        } else {
            self.too_many_failures();
        }
        self.say(Control::LinkDown(name));
        reads
    }

    /// What was said over a link that has failed may not have been heard: says it again over the others.
    pub(crate) fn repeat(&mut self, now: Instant) {
        self.ack_due = true;
        self.say_again(now, |_| true);
    }

    /// Says the end of connections again that the peer has not confirmed for a while; true when there are some.
    pub(crate) fn repeat_overdue(&mut self, now: Instant) -> bool {
        self.say_again(now, |fence| fence.said_at + SAY_AGAIN_AFTER <= now)
    }

    fn say_again(&mut self, now: Instant, which: impl Fn(&Fence) -> bool) -> bool {
        let due = self.fences.iter_mut().filter(|fence| which(fence));
        let names: Vec<LinkName> = due
            .map(|fence| {
                fence.said_at = now;
                fence.name
            })
            .collect();
        names.iter().for_each(|&name| self.say(Control::LinkDown(name)));
        !names.is_empty()
    }

    /// The peer has confirmed: the writes go again, but for those that it has delivered the events of. Gives the ids of requests
    /// that have landed with these, and how many slices go again.
    pub(crate) fn fenced(
        &mut self,
        name: LinkName,
        delivered: [u64; Priority::ALL.len()],
    ) -> (Vec<u64>, u64) {
        let (mut landed, mut again) = (Vec::new(), 0);
        let Some(at) = self.fences.iter().position(|fence| fence.name == name) else { return (landed, 0) };
        for (lane, slice) in self.fences.swap_remove(at).slices {
            if self.lanes[lane].was_delivered(slice.request, delivered[lane]) {
                landed.extend(self.lanes[lane].slice_done(slice.request));
            } else {
                again += 1;
                self.lanes[lane].waiting.push_front(slice);
            }
        }
        (landed, again)
    }

    fn delivered(&self) -> [u64; Priority::ALL.len()] {
        std::array::from_fn(|lane| self.arrivals[lane].delivered)
    }

    pub(crate) fn is_fence_overdue(&self, now: Instant) -> bool {
        self.fences.iter().any(|fence| !fence.slices.is_empty() && fence.since + FENCE_WITHIN <= now)
    }

    /// The peer asks for news of a link's end: now if it has ended, else when it has.
    pub(crate) fn owe_fence(&mut self, name: LinkName, is_open: bool) {
        if is_open {
            // Asked again, it is still owed once.
            if !self.owed.contains(&name) {
                self.owed.push(name);
            }
        } else {
            self.say(Control::Fenced(name));
        }
    }

    pub(crate) fn settle_fence_for_peer(&mut self, name: LinkName) {
        if let Some(at) = self.owed.iter().position(|owed| *owed == name) {
            self.owed.swap_remove(at);
            self.say(Control::Fenced(name));
        }
    }

    fn say(&mut self, control: Control) {
        if self.control.contains(&control) {
            return;
        }
        if self.control.len() < CONTROL_MAX {
            self.control.push_back(control);
        } else {
            self.too_many_failures();
        }
    }

    fn too_many_failures(&mut self) {
        self.ending.get_or_insert_with(|| "its links fail faster than it can be told".to_owned());
    }

    // --- posting ---

    /// The links to use: those that are up on the best rank.
    fn best_rank<F>(&self, rails: &[Rail<F>]) -> Option<u8> {
        self.links.iter().filter(|link| link.is_up()).map(|link| rails[link.rail].rank).min()
    }

    /// The link on which `bytes` more would be done first, of those whose window has room; `full` has a bit for each that
    /// takes nothing now.
    fn choose<F>(&self, rails: &[Rail<F>], bytes: u64, window: u64, full: u32) -> Option<usize> {
        let rank = self.best_rank(rails)?;
        let usable = |link: &Link| {
            link.is_up() && rails[link.rail].rank == rank && link.outstanding_bytes < window.max(1)
        };
        let candidates = self.links.iter().enumerate().filter(|(i, link)| full >> i & 1 == 0 && usable(link));
        candidates
            .min_by_key(|(_, link)| link.pace.finish_nanos(link.outstanding_bytes + bytes))
            .map(|(i, _)| i)
    }

    /// Cuts and posts what waits in a lane; true when a rail's queue was full and must be tried again. (A window has room
    /// again when a completion says so.)
    pub(crate) fn pump_slices<F: Fabric>(
        &mut self,
        id: PeerId,
        lane: usize,
        rails: &mut [Rail<F>],
        config: &BondConfig,
        now: Instant,
        posted: &mut PostedSlices<'_>,
    ) -> bool {
        let mut full = 0_u32;
        while let Some(mut slice) = self.lanes[lane].waiting.pop_front() {
            if let Some(front) = split_front(&mut slice.operation, config.slice_bytes) {
                let (request, failures) = (slice.request, slice.failures);
                self.lanes[lane].waiting.push_front(slice);
                self.lanes[lane].cut(request);
                slice = Slice { request, operation: front, is_last: false, failures };
            }
            let bytes = u64::from(bytes_of(&slice.operation));
            let chosen = self.choose(rails, bytes, config.link_window_bytes, full);
            let Some((index, inner)) = chosen.and_then(|index| Some((index, self.links[index].inner?)))
            else {
                self.lanes[lane].waiting.push_front(slice);
                return full != 0;
            };
            let link = &mut self.links[index];
            let operation = slice.operation.clone();
            let post =
                WorkRequest { id: *posted.next, peer: inner, priority: Priority::ALL[lane], operation };
            if let Err(Full(_)) = rails[link.rail].fabric.post(post) {
                self.lanes[lane].waiting.push_front(slice);
                full |= 1 << index;
                continue;
            }
            self.lanes[lane].slice_posted(slice.request, slice.is_last, index);
            link.outstanding_bytes += bytes;
            let (inner, ahead) = ((link.rail, inner), link.outstanding_bytes);
            let in_flight =
                InFlightSlice { peer: id, lane, inner, link: index, slice, bytes, ahead, posted_at: now };
            posted.in_flight.insert(*posted.next, in_flight);
            *posted.next = (*posted.next + 1) | super::SLICE_BIT;
        }
        false
    }

    /// Posts the events of a lane that may go, and markers before them; true when one did not fit.
    pub(crate) fn pump_events<F: Fabric>(
        &mut self,
        lane: usize,
        rails: &mut [Rail<F>],
        counters: &BondCounters,
    ) -> bool {
        while self.lanes[lane].has_event() {
            let Some(carrier) = self.carrier(lane, rails) else { return false };
            let (index, frame) = match self.lanes[lane].next(carrier) {
                Next::Nothing => return false,
                Next::Marker { link, number } => {
                    (link, Some(Frame::Marker { lane: lane as u8, number }.encode()))
                }
                Next::Event { behind } => {
                    let frame = self.lanes[lane].event_frame(lane as u8, self.names(&behind));
                    (carrier, frame)
                }
            };
            let link = &self.links[index];
            let (Some(inner), Some(message)) = (link.inner, frame) else { return false };
            let operation = Operation::Send { message };
            let post = WorkRequest { id: 0, peer: inner, priority: Priority::ALL[lane], operation };
            if rails[link.rail].fabric.post(post).is_err() {
                return true;
            }
            if index == carrier {
                self.lanes[lane].event_sent();
            } else {
                self.lanes[lane].marked(index);
                RailCounts::add(&counters.rail(link.rail).markers_sent, 1);
            }
        }
        false
    }

    fn names(&self, markers: &[LaneMarker]) -> Vec<MarkerName> {
        let name = |&LaneMarker { link, number }: &LaneMarker| MarkerName {
            over: LinkName { link: link as u8, connection: self.links[link].connection },
            number,
        };
        markers.iter().map(name).collect()
    }

    /// The link for the events of a lane: always the same while some are not acknowledged, so that they arrive in
    /// turn; else the first of the best.
    fn carrier<F>(&mut self, lane: usize, rails: &[Rail<F>]) -> Option<usize> {
        let rank = self.best_rank(rails)?;
        let is_best = |link: &Link| link.is_up() && rails[link.rail].rank == rank;
        let present = self.carriers[lane].filter(|&index| self.links[index].is_up());
        let may_change = present.is_none() || self.lanes[lane].may_change_carrier();
        if may_change && !present.is_some_and(|index| is_best(&self.links[index])) {
            self.carriers[lane] = self.links.iter().position(is_best);
        }
        self.carriers[lane]
    }

    /// Posts control frames and the acknowledgement that is due; true when one did not fit.
    pub(crate) fn pump_control<F: Fabric>(&mut self, rails: &mut [Rail<F>]) -> bool {
        let links: Vec<(usize, PeerId)> = self
            .links
            .iter()
            .filter(|link| link.is_up())
            .filter_map(|link| Some((link.rail, link.inner?)))
            .collect();
        if links.is_empty() {
            return false;
        }
        let mut post = |frame: &[u8], (rail, inner): (usize, PeerId)| {
            rails[rail].fabric.post(WorkRequest::message(inner, frame.into())).is_ok()
        };
        let delivered = self.delivered();
        while let Some(&control) = self.control.front() {
            let frame = match control {
                Control::LinkDown(name) => Frame::LinkDown { name }.encode(),
                // By now more events may have been delivered than when the connection ended, but none for which it counted.
                Control::Fenced(name) => Frame::Fenced { name, delivered }.encode(),
            };
            if links.iter().filter(|&&link| post(&frame, link)).count() == 0 {
                return true;
            }
            self.control.pop_front();
        }
        if self.ack_due {
            let frame = Frame::Ack { delivered }.encode();
            if !links.iter().any(|&link| post(&frame, link)) {
                return true;
            }
            self.ack_due = false;
        }
        false
    }
}
