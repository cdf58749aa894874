//! Posting of waiting slices, markers, events and control frames.

use std::time::Instant;

use dataplane_fabric::{Fabric, PeerId};

use super::{Bond, PostedSlices};

impl<F: Fabric> Bond<F> {
    pub(super) fn pump(&mut self, now: Instant) {
        let mut dirty = std::mem::take(&mut self.dirty);
        // Round robin over peers: a fabric that copies accepts a limited amount between two polls.
        if !dirty.is_empty() {
            dirty.rotate_left(1);
        }
        self.has_backlog = false;
        for id in dirty.drain(..) {
            if self.pump_peer(id, now) {
                self.has_backlog = true;
                self.dirty.push(id);
            }
        }
        std::mem::swap(&mut dirty, &mut self.dirty);
        self.dirty.extend(dirty);
    }

    /// Posts to one peer as much as possible; returns true when posting must be retried for the rest.
    pub(super) fn pump_peer(&mut self, id: PeerId, now: Instant) -> bool {
        let Some(peer) = self.peers.get_mut(&id).filter(|peer| peer.is_framed() && peer.ending.is_none())
        else {
            return false;
        };
        let (mut is_left, out_of_reach) = (false, peer.out_of_reach);
        is_left |= peer.pump_control(&mut self.rails);
        for lane in 0..peer.lanes.len() {
            if lane > 0 && !peer.lanes[0].waiting.is_empty() {
                is_left |= !peer.lanes[lane].waiting.is_empty();
                break;
            }
            let mut posted = PostedSlices { in_flight: &mut self.in_flight, next: &mut self.next_slice };
            is_left |= peer.pump_slices(id, lane, &mut self.rails, &self.config, now, &mut posted);
        }
        let has_new_deadline = peer.out_of_reach != out_of_reach;
        for lane in 0..peer.lanes.len() {
            is_left |= peer.pump_events(lane, &mut self.rails, &self.counters);
        }
        if has_new_deadline {
            self.deadlines_changed(now);
        }
        is_left
    }
}
