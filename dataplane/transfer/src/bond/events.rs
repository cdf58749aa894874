//! Events of the rails and frames of the peers.

use std::time::Instant;

use dataplane_fabric::{Completion, Event, Fabric, PeerId};

use super::counters::RailCounts;
use super::link::{Link, State};
use super::peer::Peer;
use super::wire::{Frame, LinkName, MarkerName};
use super::{AWAITING_HELLO_MAX, Bond, LINKS_MAX, RailConnection, SLICE_BIT};

impl<F: Fabric> Bond<F> {
    pub(super) fn digest(&mut self, rail: usize, event: Event, now: Instant) {
        if !matches!(event, Event::Completed { .. } | Event::Message { .. } | Event::Immediate { .. }) {
            self.deadlines_changed(now);
        }
        match event {
            Event::Completed { id, completion }
                if id & SLICE_BIT != 0 && self.in_flight.contains_key(&id) =>
            {
                self.slice_ended(id, completion, now);
            }
            Event::Completed { .. } => self.emit(event),
            Event::Accepted { peer } if self.awaiting_hello.len() < AWAITING_HELLO_MAX => {
                self.awaiting_hello.insert((rail, peer), now);
            }
            Event::Accepted { peer } => self.rails[rail].fabric.disconnect(peer),
            Event::Connected { peer } => self.link_connected(rail, peer, now),
            Event::Message { peer, message } => self.message(rail, peer, message),
            Event::Immediate { peer, value } => match self.owner(rail, peer) {
                Some((id, _)) => self.deliver(id, Event::Immediate { peer: id, value }),
                None => self.rails[rail].fabric.disconnect(peer),
            },
            Event::PeerDown { peer, reason } => {
                self.awaiting_hello.remove(&(rail, peer));
                if let Some(inner) = self.inners.remove(&(rail, peer)) {
                    self.link_down(rail, inner, &reason, now);
                }
            }
        }
    }

    pub(super) fn owner(&self, rail: usize, inner: PeerId) -> Option<(PeerId, usize)> {
        self.inners.get(&(rail, inner)).map(|inner| (inner.peer, inner.link))
    }

    /// Delivers an event of an unframed peer, or keeps it until the connection is announced.
    pub(super) fn deliver(&mut self, id: PeerId, event: Event) {
        match self.peers.get_mut(&id) {
            Some(peer) if !peer.announced => {
                peer.keep_early(event);
                let now = (self.clock)();
                self.deadlines_changed(now);
            }
            _ => self.emit(event),
        }
    }

    pub(super) fn link_connected(&mut self, rail: usize, inner: PeerId, now: Instant) {
        let Some((id, index)) = self.owner(rail, inner) else { return };
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let links = peer.links.len() as u8;
        let link = &mut peer.links[index];
        link.state = State::Greeting { since: now };
        let name = LinkName { link: index as u8, connection: link.connection };
        let hello = Frame::Hello { session: peer.session, links, name };
        if !self.post_frame(rail, inner, &hello) {
            self.rails[rail].fabric.disconnect(inner);
        }
    }

    pub(super) fn message(&mut self, rail: usize, inner: PeerId, message: Box<[u8]>) {
        if self.awaiting_hello.remove(&(rail, inner)).is_some() {
            let now = (self.clock)();
            self.deadlines_changed(now);
            match Frame::decode(&message) {
                Some(Frame::Hello { session, links, name }) => {
                    self.greeted(rail, inner, session, links, name)
                }
                _ => self.rails[rail].fabric.disconnect(inner),
            }
            return;
        }
        let Some((id, index)) = self.owner(rail, inner) else { return };
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if matches!(peer.links[index].state, State::Greeting { .. })
            && let Some(Frame::Welcome { incarnation }) = Frame::decode(&message)
        {
            if *peer.incarnation.get_or_insert(incarnation) == incarnation {
                return self.link_up(id, index);
            }
            peer.ending.get_or_insert_with(|| "the peer has started anew".to_owned());
            return self.end(id);
        }
        if !peer.is_framed() {
            return self.deliver(id, Event::Message { peer: id, message });
        }
        if !self.framed(id, (rail, inner), &message) {
            self.rails[rail].fabric.disconnect(inner);
        }
    }

    /// Handles the hello of an accepted connection.
    pub(super) fn greeted(&mut self, rail: usize, inner: PeerId, session: u64, links: u8, name: LinkName) {
        let known = self.sessions.get(&session).copied();
        let id = match known {
            Some(id) if self.peers.get(&id).is_some_and(|peer| peer.links.len() == usize::from(links)) => id,
            None if usize::from(links) <= LINKS_MAX => {
                let links = (0..links).map(|_| Link::new(rail, None)).collect();
                let incarnation = self.draw_name();
                let id = self.new_peer(Peer::new(session, Some(incarnation), links));
                self.sessions.insert(session, id);
                id
            }
            _ => return self.rails[rail].fabric.disconnect(inner),
        };
        let index = usize::from(name.link);
        let Some(peer) = self.peers.get_mut(&id).filter(|peer| peer.ending.is_none()) else {
            return self.rails[rail].fabric.disconnect(inner);
        };
        let incarnation = peer.incarnation.unwrap_or_default();
        if name.connection <= peer.links[index].connection {
            return self.rails[rail].fabric.disconnect(inner);
        }
        peer.link_ended(index);
        let link = &mut peer.links[index];
        // The peer has noticed earlier than this node that the link's last connection is over.
        let old = link.inner.map(|old| (link.rail, old));
        link.rail = rail;
        link.begin(inner, name.connection);
        self.inners.insert(
            (rail, inner),
            RailConnection { peer: id, link: index, connection: name.connection, failed: Vec::new() },
        );
        if let Some((rail, old)) = old {
            self.rails[rail].fabric.disconnect(old);
        }
        if self.post_frame(rail, inner, &Frame::Welcome { incarnation }) {
            self.link_up(id, index);
        } else {
            self.rails[rail].fabric.disconnect(inner);
        }
    }

    pub(super) fn link_up(&mut self, id: PeerId, index: usize) {
        let now = (self.clock)();
        self.deadlines_changed(now);
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let link = &mut peer.links[index];
        let restored = &self.counters.rail(link.rail).links_restored;
        RailCounts::add(restored, u64::from(link.connection > 1));
        link.state = State::Up;
        link.up_since = Some(now);
        peer.first_link_up_at.get_or_insert(now);
        self.announce(id, now);
        self.mark_dirty(id);
    }

    /// Reports a connection to the user once it has settled.
    pub(super) fn announce(&mut self, id: PeerId, now: Instant) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if peer.announced || peer.ending.is_some() || !peer.has_all_links(&self.rails, now) {
            return;
        }
        peer.announced = true;
        let we_connected = peer.links.iter().any(|link| link.address.is_some());
        let early = std::mem::take(&mut peer.early);
        self.emit(if we_connected { Event::Connected { peer: id } } else { Event::Accepted { peer: id } });
        self.out.extend(early);
    }

    pub(super) fn slice_ended(&mut self, id: u64, completion: Completion, now: Instant) {
        let Some(in_flight) = self.in_flight.remove(&id) else { return };
        let Some(peer) = self.peers.get_mut(&in_flight.peer) else { return };
        let is_current = peer.links[in_flight.link].inner == Some(in_flight.inner.1);
        if is_current {
            let link = &mut peer.links[in_flight.link];
            link.outstanding_bytes = link.outstanding_bytes.saturating_sub(in_flight.bytes);
        }
        match completion {
            Completion::Done => {
                let elapsed = now.saturating_duration_since(in_flight.posted_at);
                peer.links[in_flight.link].pace.measured(in_flight.ahead, elapsed);
                let (rail, _) = in_flight.inner;
                let counts = self.counters.rail(rail);
                RailCounts::add(&counts.bytes, in_flight.bytes);
                RailCounts::add(&counts.slices, 1);
                self.paces.measured(rail, in_flight.ahead, elapsed, now, counts);
                let done = peer.lanes[in_flight.lane].slice_done(in_flight.slice.request);
                let completed = |id| Event::Completed { id, completion: Completion::Done };
                self.out.extend(done.map(completed));
            }
            Completion::PeerDown => {
                if let Some(inner) = self.inners.get_mut(&in_flight.inner) {
                    inner.failed.push((in_flight.lane, in_flight.slice));
                }
            }
        }
        self.mark_dirty(in_flight.peer);
    }

    /// Takes an event; returns false when the peer exceeds its limits.
    fn arrived(
        &mut self,
        id: PeerId,
        lane: u8,
        sequence: u64,
        (over, behind): (LinkName, Vec<MarkerName>),
        event: Event,
    ) -> bool {
        let Some(peer) = self.peers.get_mut(&id) else { return true };
        peer.ack_due = true;
        let bytes = match &event {
            Event::Message { message, .. } => message.len(),
            _ => 0,
        };
        let is_taken = peer.arrivals[usize::from(lane)].take(sequence, over, behind, event, bytes);
        self.deliver_arrived(id, lane.into());
        self.mark_dirty(id);
        is_taken
    }

    /// Delivers the events of a lane that are next in order and whose writes have landed.
    fn deliver_arrived(&mut self, id: PeerId, lane: usize) {
        while let Some(peer) = self.peers.get_mut(&id) {
            let links = &peer.links;
            let marker = |name: LinkName| {
                let link = links.get(usize::from(name.link))?;
                (link.connection == name.connection && link.inner.is_some()).then_some(link.markers[lane])
            };
            let Some(event) = peer.arrivals[lane].next(marker) else { return };
            peer.ack_due = true;
            self.deliver(id, event);
        }
    }

    /// Handles a frame; returns false when the peer breaks the protocol.
    pub(super) fn framed(&mut self, id: PeerId, (rail, inner): (usize, PeerId), message: &[u8]) -> bool {
        let Some(frame) = Frame::decode(message) else { return false };
        let Some((index, connection)) =
            self.inners.get(&(rail, inner)).map(|inner| (inner.link, inner.connection))
        else {
            return true;
        };
        let over = LinkName { link: index as u8, connection };
        if matches!(frame, Frame::LinkDown { .. } | Frame::Fenced { .. }) {
            let now = (self.clock)();
            self.deadlines_changed(now);
        }
        let Some(peer) = self.peers.get_mut(&id) else { return true };
        match frame {
            Frame::Hello { .. } | Frame::Welcome { .. } => return false,
            Frame::Message { lane, sequence, behind, bytes } => {
                let event = Event::Message { peer: id, message: bytes.into() };
                return self.arrived(id, lane, sequence, (over, behind), event);
            }
            Frame::Immediate { lane, sequence, behind, value } => {
                let event = Event::Immediate { peer: id, value };
                return self.arrived(id, lane, sequence, (over, behind), event);
            }
            Frame::Marker { lane, number } => {
                let link = &mut peer.links[index];
                // A marker from a replaced connection is ignored.
                if link.connection == connection {
                    let last = &mut link.markers[usize::from(lane)];
                    *last = number.max(*last);
                    RailCounts::add(&self.counters.rail(rail).markers_received, 1);
                    self.deliver_arrived(id, lane.into());
                }
            }
            Frame::Ack { delivered } => {
                let mut done = Vec::new();
                for (lane, delivered) in peer.lanes.iter_mut().zip(delivered) {
                    lane.acknowledged(delivered, &mut done);
                }
                let completed = |id| Event::Completed { id, completion: Completion::Done };
                self.out.extend(done.into_iter().map(completed));
            }
            Frame::LinkDown { name } => {
                if usize::from(name.link) >= peer.links.len() {
                    return false;
                }
                let is_it = |inner: &RailConnection| {
                    (inner.peer, inner.link, inner.connection)
                        == (id, usize::from(name.link), name.connection)
                };
                let open = self.inners.iter().find(|(_, inner)| is_it(inner)).map(|(&key, _)| key);
                peer.owe_fence(name, open.is_some());
                if let Some((rail, inner)) = open {
                    // Nothing is posted to the connection while it closes.
                    if peer.links[usize::from(name.link)].inner == Some(inner) {
                        peer.links[usize::from(name.link)].state = State::Down { retry_at: None };
                        peer.link_ended(usize::from(name.link));
                    }
                    self.rails[rail].fabric.disconnect(inner);
                }
            }
            Frame::Fenced { name, delivered } => {
                let (landed, again) = peer.fenced(name, delivered);
                let rail = peer.links.get(usize::from(name.link)).map(|link| link.rail);
                let retried = rail.map(|rail| &self.counters.rail(rail).slices_retried);
                retried.into_iter().for_each(|count| RailCounts::add(count, again));
                let completed = |id| Event::Completed { id, completion: Completion::Done };
                self.out.extend(landed.into_iter().map(completed));
            }
        }
        self.mark_dirty(id);
        true
    }
}
