//! Posting to one peer: selection of the next slice, event or control frame, and of its link.
//!
//! A lane is one queue: slices wait for earlier ones, also when these go over other links.

use std::sync::Arc;
use std::time::Instant;

use dataplane_fabric::{Fabric, Full, Operation, PeerId, Priority, WorkRequest};
use dataplane_memory::{Slab, SlabKind};

use super::counters::{BondCounters, RailCounts};
use super::lane::{LaneMarker, LinkSet, Next, Slice};
use super::peer::{Control, Peer, UpLink};
use super::wire::{Frame, LinkName, MarkerName};
use super::{BondConfig, InFlightSlice, PostedSlices, REACH_WITHIN, Rail};
use crate::pieces::{bytes_of, split_front};

/// The links for slices between a slab of this node (`None`: bytes of the request itself) and the peer's slab of a kind.
struct Route {
    here: Option<*const Slab>,
    there: Option<SlabKind>,
    links: LinkSet,
}

impl Route {
    fn leads_between_the_slabs_of(&self, operation: &Operation) -> bool {
        self.here == operation.local_slab().map(Arc::as_ptr)
            && self.there == operation.target().map(|target| target.slab)
    }
}

impl Peer {
    /// Whether slices have waited too long for a link that reaches their memory. Checks once more for such
    /// a link, which may have just come up.
    pub(super) fn is_reach_overdue<F: Fabric>(&mut self, rails: &[Rail<F>], now: Instant) -> bool {
        for lane in 0..self.lanes.len() {
            let is_due = self.out_of_reach[lane].is_some_and(|since| since + REACH_WITHIN <= now);
            let Some(slice) = self.lanes[lane].waiting.front().filter(|_| is_due) else { continue };
            if self.route_of(rails, &slice.operation).links.is_empty() {
                return true;
            }
            self.out_of_reach[lane] = None;
        }
        false
    }

    /// Returns the links of the best rank among those that are up and satisfy `fits`.
    fn best_of<F>(&self, rails: &[Rail<F>], fits: impl Fn(&UpLink) -> bool) -> LinkSet {
        let mut best: Option<(u8, LinkSet)> = None;
        for link in self.up_links().filter(fits) {
            let rank = rails[link.rail].rank;
            let known = best.filter(|(known, _)| *known <= rank);
            let (least, mut links) = known.unwrap_or((rank, LinkSet::default()));
            if least == rank {
                links.insert(link.index);
            }
            best = Some((least, links));
        }
        best.map_or_else(LinkSet::default, |(_, links)| links)
    }

    /// Returns the links of the best rank that move bytes between the slabs of an operation.
    fn route_of<F: Fabric>(&self, rails: &[Rail<F>], operation: &Operation) -> Route {
        let (here, there) = (operation.local_slab(), operation.target().map(|target| target.slab));
        let reaches = |link: &UpLink| {
            let fabric = &rails[link.rail].fabric;
            there.is_none_or(|there| fabric.reaches(link.inner, here, there))
        };
        Route { here: here.map(Arc::as_ptr), there, links: self.best_of(rails, reaches) }
    }

    /// Selects the link with the earliest expected completion of `bytes` more, among those that are not
    /// `full` and whose window has room.
    fn choose(&self, links: LinkSet, bytes: u64, window: u64, full: LinkSet) -> Option<usize> {
        let usable = |&index: &usize| self.links[index].outstanding_bytes < window.max(1);
        let done_at = |index: &usize| {
            let link = &self.links[*index];
            link.pace.finish_nanos(link.outstanding_bytes + bytes)
        };
        links.without(full).iter().filter(usable).min_by_key(done_at)
    }

    /// Cuts and posts waiting slices of a lane; returns true when a rail's queue was full and posting must
    /// be retried. (A completion signals that a window has room again.)
    pub(super) fn pump_slices<F: Fabric>(
        &mut self,
        id: PeerId,
        lane: usize,
        rails: &mut [Rail<F>],
        config: &BondConfig,
        now: Instant,
        posted: &mut PostedSlices<'_>,
    ) -> bool {
        let mut full = LinkSet::default();
        // Consecutive slices are between the same slabs as a rule: their links are looked up once.
        let mut last: Option<Route> = None;
        while let Some(mut slice) = self.lanes[lane].waiting.pop_front() {
            if let Some(front) = split_front(&mut slice.operation, config.slice_bytes) {
                let (request, failures) = (slice.request, slice.failures);
                self.lanes[lane].waiting.push_front(slice);
                self.lanes[lane].cut(request);
                slice = Slice { request, operation: front, is_last: false, failures };
            }
            let bytes = u64::from(bytes_of(&slice.operation));
            let known = last.take().filter(|route| route.leads_between_the_slabs_of(&slice.operation));
            let route = known.unwrap_or_else(|| self.route_of(rails, &slice.operation));
            let links = route.links;
            last = Some(route);
            if links.is_empty() {
                self.out_of_reach[lane].get_or_insert(now);
                self.lanes[lane].waiting.push_front(slice);
                return !full.is_empty();
            }
            self.out_of_reach[lane] = None;
            let chosen = self.choose(links, bytes, config.link_window_bytes, full);
            let Some((index, inner)) = chosen.and_then(|index| Some((index, self.links[index].inner?)))
            else {
                self.lanes[lane].waiting.push_front(slice);
                return !full.is_empty();
            };
            let link = &mut self.links[index];
            let operation = slice.operation.clone();
            let post =
                WorkRequest { id: *posted.next, peer: inner, priority: Priority::ALL[lane], operation };
            if let Err(Full(_)) = rails[link.rail].fabric.post(post) {
                self.lanes[lane].waiting.push_front(slice);
                full.insert(index);
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

    /// Posts the events of a lane that are ready, and markers before them; returns true when one did not fit.
    pub(super) fn pump_events<F: Fabric>(
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

    /// Returns the link for the events of a lane: the same one while some are not acknowledged, so that
    /// they arrive in order; else the first of the best.
    fn carrier<F>(&mut self, lane: usize, rails: &[Rail<F>]) -> Option<usize> {
        let best = self.best_of(rails, |_| true);
        let first = best.iter().next()?;
        let present = self.carriers[lane].filter(|&index| self.links[index].is_up());
        let may_change = present.is_none() || self.lanes[lane].may_change_carrier();
        if may_change && !present.is_some_and(|index| best.contains(index)) {
            self.carriers[lane] = Some(first);
        }
        self.carriers[lane]
    }

    /// Posts control frames and the acknowledgement that is due; returns true when one did not fit.
    pub(super) fn pump_control<F: Fabric>(&mut self, rails: &mut [Rail<F>]) -> bool {
        let links: Vec<(usize, PeerId)> = self.up_links().map(|link| (link.rail, link.inner)).collect();
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
                // More events may have been delivered since the connection ended, but none because of what
                // the connection carried.
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
