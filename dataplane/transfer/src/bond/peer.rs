//! A peer with its links and lanes: what is posted next, and over which link.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use dataplane_fabric::{Event, Fabric, Full, Operation, PeerId, Priority, WorkRequest};
use dataplane_memory::{Slab, SlabKind};

use super::arrivals::Arrivals;
use super::counters::{BondCounters, RailCounts};
use super::lane::{Lane, LaneMarker, LinkSet, Next, Slice};
use super::link::{Link, State};
use super::wire::{Frame, LinkName, MarkerName};
use super::{
    BondConfig, FENCE_WITHIN, GREET_WITHIN, InFlightSlice, PostedSlices, REACH_WITHIN, Rail, SAY_AGAIN_AFTER,
    SETTLE_WITHIN,
};
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
    /// When its first link was up.
    pub(crate) first_up: Option<Instant>,
    /// By lane: since when the first slice that waits has had no link that reaches its memory.
    out_of_reach: [Option<Instant>; Priority::ALL.len()],
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
            first_up: None,
            out_of_reach: Default::default(),
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

    /// The links that are up: their index, rail and connection.
    pub(crate) fn up_links(&self) -> impl Iterator<Item = (usize, usize, PeerId)> {
        let up = self.links.iter().enumerate().filter(|(_, link)| link.is_up());
        up.filter_map(|(index, link)| Some((index, link.rail, link.inner?)))
    }

    /// Whether the user can be told of the connection: a link is up, and none that may come up soon would show the peer memory that
    /// it is not shown yet. A peer that connects to us is told of at once: it asks for memory as its own links reach it.
    pub(crate) fn is_settled<F: Fabric>(&self, rails: &[Rail<F>], now: Instant) -> bool {
        let Some(first_up) = self.first_up else { return false };
        let is_on_its_way = |link: &&Link| link.is_on_its_way() && link.address.is_some();
        let shows_more = |link: &Link| {
            let fabric = &rails[link.rail].fabric;
            SlabKind::ALL
                .into_iter()
                .filter(|&kind| fabric.shown_slab(kind).is_some())
                .any(|kind| !self.up_links().any(|(_, rail, inner)| rails[rail].fabric.shows(inner, kind)))
        };
        self.up_links().next().is_some()
            && (now >= first_up + SETTLE_WITHIN || !self.links.iter().filter(is_on_its_way).any(shows_more))
    }

    /// Whether a first link may still come up.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.announced && self.links.iter().any(Link::is_on_its_way)
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
        let settles = self.first_up.filter(|_| !self.announced).map(|first| first + SETTLE_WITHIN);
        let unreached = self.out_of_reach.iter().flatten().map(|&since| since + REACH_WITHIN);
        let fences = overdue.map(|fence| fence.since + FENCE_WITHIN).chain(again);
        retries.chain(fences).chain(settles).chain(unreached).min()
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

    /// Whether slices have waited too long for a link that reaches their memory.
    pub(crate) fn is_reach_overdue(&self, now: Instant) -> bool {
        self.out_of_reach.iter().flatten().any(|&since| since + REACH_WITHIN <= now)
    }

    /// Whether slices have begun to wait so at this moment.
    pub(crate) fn is_out_of_reach_since(&self, now: Instant) -> bool {
        self.out_of_reach.contains(&Some(now))
    }

    /// The links that are up on the best rank.
    fn best_links<F>(&self, rails: &[Rail<F>]) -> LinkSet {
        let rank = self.up_links().map(|(_, rail, _)| rails[rail].rank).min();
        self.up_links()
            .filter(|&(_, rail, _)| Some(rails[rail].rank) == rank)
            .map(|(index, ..)| index)
            .collect()
    }

    /// The links for slices between such memory: of those that are up and reach it those on the best rank.
    fn links_between<F: Fabric>(
        &self,
        rails: &[Rail<F>],
        here: Option<&Arc<Slab>>,
        there: SlabKind,
    ) -> LinkSet {
        let reach =
            || self.up_links().filter(|&(_, rail, inner)| rails[rail].fabric.reaches(inner, here, there));
        let rank = reach().map(|(_, rail, _)| rails[rail].rank).min();
        reach().filter(|&(_, rail, _)| Some(rails[rail].rank) == rank).map(|(index, ..)| index).collect()
    }

    /// Of these links the one on which `bytes` more would be done first and whose window has room; `full` has a bit for each that
    /// takes nothing now.
    fn choose(&self, links: LinkSet, bytes: u64, window: u64, full: u32) -> Option<usize> {
        let usable =
            |&index: &usize| full >> index & 1 == 0 && self.links[index].outstanding_bytes < window.max(1);
        let done_at = |index: &usize| {
            let link = &self.links[*index];
            link.pace.finish_nanos(link.outstanding_bytes + bytes)
        };
        links.iter().filter(usable).min_by_key(done_at)
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
        // Slices of one memory follow one another as a rule: its links are looked for once.
        let mut between: Option<(Option<*const Slab>, SlabKind, LinkSet)> = None;
        while let Some(mut slice) = self.lanes[lane].waiting.pop_front() {
            if let Some(front) = split_front(&mut slice.operation, config.slice_bytes) {
                let (request, failures) = (slice.request, slice.failures);
                self.lanes[lane].waiting.push_front(slice);
                self.lanes[lane].cut(request);
                slice = Slice { request, operation: front, is_last: false, failures };
            }
            let bytes = u64::from(bytes_of(&slice.operation));
            let here = slice.operation.local_slab();
            let there = slice.operation.target().map_or(SlabKind::Host, |target| target.slab);
            let memory = (here.map(Arc::as_ptr), there);
            let links = match between {
                Some((here, there, links)) if (here, there) == memory => links,
                _ => self.links_between(rails, here, there),
            };
            between = Some((memory.0, memory.1, links));
            if links.is_empty() {
                self.out_of_reach[lane].get_or_insert(now);
                self.lanes[lane].waiting.push_front(slice);
                return full != 0;
            }
            self.out_of_reach[lane] = None;
            let chosen = self.choose(links, bytes, config.link_window_bytes, full);
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
        let best = self.best_links(rails);
        let first = best.iter().next()?;
        let present = self.carriers[lane].filter(|&index| self.links[index].is_up());
        let may_change = present.is_none() || self.lanes[lane].may_change_carrier();
        if may_change && !present.is_some_and(|index| best.contains(index)) {
            self.carriers[lane] = Some(first);
        }
        self.carriers[lane]
    }

    /// Posts control frames and the acknowledgement that is due; true when one did not fit.
    pub(crate) fn pump_control<F: Fabric>(&mut self, rails: &mut [Rail<F>]) -> bool {
        let links: Vec<(usize, PeerId)> = self.up_links().map(|(_, rail, inner)| (rail, inner)).collect();
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
