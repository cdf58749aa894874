//! Handling of the fabric's events.

use std::time::Instant;

use dataplane_fabric::{Event, Fabric, PeerId};

use super::RemotePool;
use super::operation::Purpose;
use crate::NodeId;
use crate::metrics::add;
use crate::wire::{Message, VERSION};

impl<F: Fabric> RemotePool<F> {
    pub(super) fn digest(&mut self, event: Event, now: Instant) {
        match event {
            Event::Connected { peer } => self.connected(peer, now),
            // Clients accept no connections and no immediates.
            Event::Accepted { peer } => self.fabric.disconnect(peer),
            Event::Immediate { .. } => {}
            Event::Message { peer, message } => {
                // Ignore messages of a connection that was given up.
                let Some(id) = self.node_of(peer) else { return };
                let understood =
                    Message::decode(&message).is_some_and(|message| self.dispatch(id, peer, message, now));
                if !understood {
                    match Message::other_version(&message) {
                        Some(version) => tracing::warn!(
                            ?peer,
                            "remote tier: a pool speaks version {version} of the protocol and this process {VERSION}: run one release on \
                             engines and pools; closing the connection"
                        ),
                        None => tracing::warn!(
                            ?peer,
                            "remote tier: a malformed or unexpected message; closing the connection"
                        ),
                    }
                    self.give_up(id, now);
                }
            }
            Event::Completed { id, completion } => self.completed(id, completion, now),
            Event::PeerDown { peer, reason } => {
                if let Some(id) = self.node_of(peer) {
                    tracing::info!(?peer, reason, "remote tier: a node went down");
                    self.lost(id, peer, now);
                }
            }
        }
    }

    /// Handles a message. False when it violates the protocol.
    fn dispatch(&mut self, id: NodeId, peer: PeerId, message: Message, now: Instant) -> bool {
        match message {
            Message::Found { request, lease, lease_ms, blocks } => {
                let Some(known) = self.answered(request, peer) else {
                    // The request has timed out; release the lease.
                    add(&self.counters.totals.late_answers, 1);
                    self.send_or_disconnect(id, &Message::Release { lease }, now);
                    return true;
                };
                let Purpose::LookUp { ticket, group } = known.purpose else { return false };
                if let Some(node) = self.nodes.get_mut(&id) {
                    node.note_latency(now.saturating_duration_since(known.sent_at));
                    node.breaker.success();
                }
                self.found((ticket, group), (id, peer), (lease, lease_ms, known.sent_at), &blocks, now)
            }
            Message::Granted { request, lease_ms, grants } => {
                self.granted(id, request, peer, lease_ms, &grants, now)
            }
            Message::Committed { request, registered, damaged } => match self.answered(request, peer) {
                Some(known) => {
                    let Purpose::Store { ticket, part } = known.purpose else { return false };
                    if let Some(node) = self.nodes.get_mut(&id) {
                        node.breaker.success();
                        add(&node.counters.stored_blocks, registered.count_ones() as usize);
                    }
                    self.committed(ticket, part, registered, damaged);
                    true
                }
                None => true,
            },
            Message::Load { request, .. } => {
                let known = self.answered(request, peer);
                if let Some((known, node)) = known.zip(self.nodes.get_mut(&id)) {
                    node.breaker.close(now);
                    if node.latency.is_zero() {
                        node.note_latency(now.saturating_duration_since(known.sent_at));
                    }
                    node.publish();
                }
                true
            }
            Message::Busy { request } => {
                let Some(known) = self.answered(request, peer) else { return true };
                if let Some(node) = self.nodes.get(&id) {
                    add(&node.counters.refused, 1);
                }
                self.unanswered(known.purpose, now);
                true
            }
            Message::LookUp { .. }
            | Message::Release { .. }
            | Message::Reserve { .. }
            | Message::Commit { .. }
            | Message::ReportDamaged { .. }
            | Message::Retain { .. }
            | Message::Stats { .. } => false,
        }
    }
}
