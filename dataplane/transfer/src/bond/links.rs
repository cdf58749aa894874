//! Links: connecting, failure, reconnection, and their end with the peer.

use std::time::{Duration, Instant};

use dataplane_fabric::{Completion, ConnectError, Event, Fabric, PeerId};

use super::counters::RailCounts;
use super::link::{Link, State};
use super::wire::LinkName;
use super::{Bond, GREET_WITHIN, LINKS_MAX, RailConnection};

impl<F: Fabric> Bond<F> {
    /// Returns the rail for the `nth` address of a transport: addresses and rails of one name are paired in
    /// order.
    pub(super) fn rail_named(&self, name: &str, nth: usize) -> Option<usize> {
        let of_name: Vec<usize> =
            (0..self.rails.len()).filter(|&rail| self.rails[rail].fabric.name() == name).collect();
        of_name.get(nth % of_name.len().max(1)).copied()
    }

    pub(super) fn links_of(&self, address: &str) -> Result<Vec<Link>, ConnectError> {
        let wrong = |reason: &str| ConnectError::Address {
            fabric: "bond",
            address: address.to_owned(),
            reason: reason.to_owned(),
        };
        let mut links: Vec<Link> = Vec::new();
        for part in address.split(',') {
            let (name, rest) = part.split_once(':').ok_or_else(|| wrong("no transport before ':'"))?;
            let nth = links.iter().filter(|link| self.rails[link.rail].fabric.name() == name).count();
            // A transport that this node lacks is skipped: the peer gives the same list to every node.
            if let Some(rail) = self.rail_named(name, nth) {
                links.push(Link::new(rail, Some(rest.to_owned())));
            }
        }
        match links.len() {
            0 => Err(wrong("this node has none of these transports")),
            1..=LINKS_MAX => Ok(links),
            _ => Err(wrong("too many links")),
        }
    }

    /// Connects one link of a peer that this node connects to.
    pub(super) fn connect_link(&mut self, id: PeerId, index: usize) -> Result<(), ConnectError> {
        let Some(link) = self.peers.get_mut(&id).and_then(|peer| peer.links.get_mut(index)) else {
            return Ok(());
        };
        let Some(address) = &link.address else { return Ok(()) };
        let inner = self.rails[link.rail].fabric.connect(address)?;
        link.begin(inner, link.connection + 1);
        link.state = State::Connecting;
        let owner = RailConnection { peer: id, link: index, connection: link.connection, failed: Vec::new() };
        self.inners.insert((link.rail, inner), owner);
        Ok(())
    }

    pub(super) fn retry_link(&mut self, id: PeerId, index: usize, now: Instant) {
        let random = self.draw();
        let (first, max) = (self.config.retry_first, self.config.retry_max);
        let Some(link) = self.peers.get_mut(&id).and_then(|peer| peer.links.get_mut(index)) else { return };
        let whole = first.saturating_mul(1 << link.failures.min(16)).min(max);
        let half_nanos = (whole.as_nanos() / 2).max(1) as u64;
        link.failures += 1;
        let retry_at =
            link.address.is_some().then(|| now + whole - Duration::from_nanos(random % half_nanos));
        link.state = State::Down { retry_at };
    }

    /// Handles the end of a connection, over which nothing can arrive here any more.
    pub(super) fn link_down(&mut self, rail: usize, inner: RailConnection, reason: &str, now: Instant) {
        let RailConnection { peer: id, link: index, connection, failed } = inner;
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let name = LinkName { link: index as u8, connection };
        peer.arrivals.iter_mut().for_each(|arrivals| arrivals.link_down(name));
        peer.confirm_fence(name);
        let is_current = peer.links[index].connection == connection;
        // A connection that was never made is unknown to the peer.
        let was_made = !(is_current && peer.links[index].state == State::Connecting);
        if is_current {
            let link = &mut peer.links[index];
            // A link that fails soon after its greeting, for instance where large packets are lost, is
            // retried at growing intervals.
            let was_up = link.up_since.take().map(|since| now.saturating_duration_since(since));
            if was_up.is_some_and(|time| time >= self.config.retry_max) {
                link.failures = 0;
            }
            peer.links[index].inner = None;
            peer.links[index].outstanding_bytes = 0;
            peer.links[index].state = State::Down { retry_at: None };
        }
        if peer.ending.is_some() {
            return self.end(id);
        }
        if !peer.links.iter().any(Link::is_up) {
            if peer.is_waiting() {
                // Another link may come up first.
                return self.retry_link(id, index, now);
            }
            peer.ending = Some(reason.to_owned());
            return self.end(id);
        }
        if was_made {
            tracing::warn!(?id, index, reason, "bond: a link failed; the peer goes on over the others");
            let counts = self.counters.rail(rail);
            RailCounts::add(&counts.links_failed, 1);
            if is_current {
                peer.link_ended(index);
            }
            peer.repeat(now);
            RailCounts::add(&counts.slices_retried, peer.fence(name, failed, now));
        }
        if is_current {
            self.retry_link(id, index, now);
        }
        self.announce(id, now);
        self.mark_dirty(id);
    }

    /// Closes the remaining connections of a peer; its end is reported when none is left.
    pub(super) fn end(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let is_first = !std::mem::replace(&mut peer.closing, true);
        // Also closes connections that were replaced and still drain: nothing may arrive over them later.
        let open: Vec<(usize, PeerId)> =
            self.inners.iter().filter(|(_, inner)| inner.peer == id).map(|(&key, _)| key).collect();
        if open.is_empty() {
            return self.finish(id);
        }
        if is_first {
            open.into_iter().for_each(|(rail, inner)| self.rails[rail].fabric.disconnect(inner));
        }
    }

    pub(super) fn finish(&mut self, id: PeerId) {
        let Some(mut peer) = self.peers.remove(&id) else { return };
        self.sessions.remove(&peer.session);
        self.in_flight.retain(|_, in_flight| in_flight.peer != id);
        for lane in &mut peer.lanes {
            let completed = |id| Event::Completed { id, completion: Completion::PeerDown };
            self.out.extend(lane.abandon().into_iter().map(completed));
        }
        let reason = peer.ending.unwrap_or_default();
        // The end is reported only for peers whose beginning was reported, or that this node connected to.
        if peer.announced || peer.links.iter().any(|link| link.address.is_some()) {
            self.emit(Event::PeerDown { peer: id, reason });
        }
    }

    /// Handles timeouts and retries. Checks the peers only when a deadline has passed or its inputs have changed.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.expires_at.is_none_or(|at| at > now) {
            return;
        }
        let silent: Vec<(usize, PeerId)> = self
            .awaiting_hello
            .iter()
            .filter(|(_, since)| **since + GREET_WITHIN <= now)
            .map(|(&stranger, _)| stranger)
            .collect();
        for (rail, inner) in silent {
            self.awaiting_hello.remove(&(rail, inner));
            self.rails[rail].fabric.disconnect(inner);
        }
        let mut retry = Vec::new();
        let mut told_again = Vec::new();
        let mut mute = Vec::new();
        let mut settled = Vec::new();
        let mut silent = Vec::new();
        for (&id, peer) in &mut self.peers {
            if peer.ending.is_some() {
                if !peer.closing {
                    mute.push(id);
                }
                continue;
            }
            silent.extend(peer.links.iter().filter_map(|link| match link.state {
                State::Greeting { since } if since + GREET_WITHIN <= now => Some((link.rail, link.inner?)),
                _ => None,
            }));
            if peer.repeat_overdue(now) {
                told_again.push(id);
            }
            if !peer.announced && peer.has_all_links(&self.rails, now) {
                settled.push(id);
            }
            if peer.is_reach_overdue(&self.rails, now) {
                peer.ending = Some("no link reaches the memory that its reads and writes name".to_owned());
                mute.push(id);
                continue;
            }
            if peer.is_fence_overdue(now) {
                peer.ending = Some("the peer does not confirm the end of a link".to_owned());
                mute.push(id);
                continue;
            }
            let due = |link: &Link| matches!(link.state, State::Down { retry_at: Some(at) } if at <= now);
            retry.extend(
                (0..peer.links.len()).filter(|&index| due(&peer.links[index])).map(|index| (id, index)),
            );
        }
        for (rail, inner) in silent {
            // The link is down at once: a transport may report the end late, or never while the peer is stopped.
            if let Some((id, index)) = self.owner(rail, inner)
                && let Some(peer) = self.peers.get_mut(&id)
            {
                peer.links[index].state = State::Down { retry_at: None };
            }
            self.rails[rail].fabric.disconnect(inner);
        }
        settled.into_iter().for_each(|id| self.announce(id, now));
        told_again.into_iter().for_each(|id| self.mark_dirty(id));
        mute.into_iter().for_each(|id| self.end(id));
        for (id, index) in retry {
            if self.connect_link(id, index).is_err() {
                self.retry_link(id, index, now);
            }
        }
        self.expires_at = self.earliest_deadline(now);
    }
}
