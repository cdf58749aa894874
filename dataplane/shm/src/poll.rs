//! Receiving: completions, reports of connections, then the rings, the urgent lane of every peer first.
//!
//! Hot path; one allocation for each message, no other. Checks the sockets after a sleep and at every 64th call.

use dataplane_fabric::{Event, Fabric, PeerId, Priority};

use crate::connection::State;
use crate::fabric::ShmFabric;
use crate::ring::Record;
use crate::table::Table;

/// Number of polls between two checks of the sockets.
const SOCKETS_PERIOD: u32 = 64;
/// Fraction of a poll's budget for the background lane, as a divisor, so that the urgent lane cannot starve it.
const BACKGROUND_SHARE: usize = 8;

impl ShmFabric {
    pub(crate) fn receive(&mut self, budget: usize, events: &mut Vec<Event>) -> usize {
        let start = events.len();
        let limit = start.saturating_add(budget);
        let has_slept = std::mem::take(&mut self.announced);
        if has_slept {
            self.doorbell.retract();
            self.doorbell.drain();
        }
        self.polls = self.polls.wrapping_add(1);
        self.copied_bytes = 0;
        if !self.completions.is_empty() {
            // A message is done when the peer's fabric has it, so it is published before its completion is
            // returned.
            self.flush();
        }
        self.take_local(limit, events);
        self.take_records(limit, events);
        if self.ended > 0 {
            self.drop_delivered();
        }
        if has_slept || self.polls.is_multiple_of(SOCKETS_PERIOD) {
            self.check_sockets();
        }
        self.take_local(limit, events);
        self.sums.publish(&self.counters);
        events.len() - start
    }

    /// Takes completions first: the end of a connection is reported after the completions of its requests.
    #[inline]
    fn take_local(&mut self, limit: usize, events: &mut Vec<Event>) {
        while events.len() < limit {
            let Some((id, completion)) = self.completions.pop_front() else { break };
            events.push(Event::Completed { id, completion });
        }
        while events.len() < limit {
            let Some(notice) = self.notices.pop_front() else { break };
            events.push(notice);
        }
    }

    #[inline]
    fn take_records(&mut self, limit: usize, events: &mut Vec<Event>) {
        if self.table.len() == 0 || events.len() >= limit {
            return;
        }
        let [urgent, background] = Priority::ALL.map(Priority::index);
        let reserved = (limit - events.len()) / BACKGROUND_SHARE;
        let more = self.take_lane(urgent, limit - reserved, events);
        self.take_lane(background, limit, events);
        if more {
            self.take_lane(urgent, limit, events);
        }
    }

    /// Takes records of one lane of all peers, starting at another peer each time; returns true when the
    /// limit was reached.
    #[inline]
    fn take_lane(&mut self, lane: usize, limit: usize, events: &mut Vec<Event>) -> bool {
        let first = self.polls as usize;
        for number in 0..self.table.len() {
            let Some(connection) = self.table.nth_from(first, number) else { continue };
            if !connection.delivers() {
                continue;
            }
            let (peer, before) = (connection.peer, events.len());
            while events.len() < limit {
                match connection.inbound.pop(lane) {
                    Ok(None) => break,
                    Ok(Some(Record::Immediate(value))) => events.push(Event::Immediate { peer, value }),
                    Ok(Some(Record::Message(message))) => events.push(Event::Message { peer, message }),
                    Err(reason) => {
                        connection.start_closing(&self.handshakes, reason);
                        // For a producer that is gone already: drops its remaining records, so that its end
                        // can be reported.
                        connection.inbound.discard();
                        break;
                    }
                }
            }
            if events.len() > before {
                connection.inbound.release(lane);
            }
            if events.len() >= limit {
                return true;
            }
        }
        false
    }

    /// Reports the end of peers whose last records have been delivered.
    #[cold]
    fn drop_delivered(&mut self) {
        let delivered = |table: &Table| -> Option<PeerId> {
            table
                .iter()
                .find(|connection| connection.state == State::Ended && connection.inbound.is_empty())
                .map(|connection| connection.peer)
        };
        while let Some(peer) = delivered(&self.table) {
            self.drop_connection(peer, "");
        }
    }
}
