//! The receiving side of a lane: events that have arrived and wait for earlier events or for markers.
//!
//! An event is delivered once, in order, and only when the markers of one of its copies have arrived: the
//! writes before it have landed then ([`super::lane`]). A copy that depends on an ended connection is
//! ignored, since the peer may post again the writes that the connection carried. The waiting events are
//! bounded by their number, the bytes of their messages, and the copies.

use std::collections::VecDeque;

use super::lane::{UNACKNOWLEDGED_BYTES_MAX, UNACKNOWLEDGED_MAX};
use super::wire::{LinkName, MarkerName};

/// Most copies of one event, by the live connections that they depend on. A peer that sends more loses the
/// connection, and sends the event again.
const COPIES_MAX: usize = 16;

/// One received copy of an event, with the connections that carried the writes before the event.
#[derive(Debug, PartialEq, Eq)]
struct EventDependencies {
    /// The connection that carried the copy and, before it, some of the writes.
    over: LinkName,
    /// Markers of the connections that carried the other writes; they must have arrived.
    behind: Vec<MarkerName>,
}

/// An event that has arrived and waits for earlier events or for markers.
#[derive(Debug)]
struct Arrived<T> {
    event: T,
    bytes: usize,
    /// Received copies: an event is sent again when a link fails, and an old copy may arrive after a new
    /// one. Copies that depend on an ended connection are removed, since the peer may post its writes
    /// again.
    copies: Vec<EventDependencies>,
}

/// Received events, in order. At most [`UNACKNOWLEDGED_MAX`] wait, with [`UNACKNOWLEDGED_BYTES_MAX`] bytes
/// of messages plus one message.
#[derive(Debug)]
pub(crate) struct Arrivals<T> {
    /// Number of the last event that was delivered.
    pub(crate) delivered: u64,
    /// Received events with the next numbers.
    waiting: VecDeque<Arrived<T>>,
    /// Bytes of the waiting messages.
    waiting_bytes: usize,
}

impl<T> Default for Arrivals<T> {
    fn default() -> Self {
        Self { delivered: 0, waiting: VecDeque::new(), waiting_bytes: 0 }
    }
}

impl<T> Arrivals<T> {
    /// Takes a copy of an event, if the event is the next one or is waiting already. Returns false when the
    /// peer exceeds the bounds.
    pub(crate) fn take(
        &mut self,
        sequence: u64,
        over: LinkName,
        behind: Vec<MarkerName>,
        event: T,
        bytes: usize,
    ) -> bool {
        let Some(at) = sequence.checked_sub(self.delivered + 1) else { return true };
        let (waiting, copy) = (self.waiting.len(), EventDependencies { over, behind });
        match self.waiting.get_mut(at as usize) {
            Some(known) if known.copies.contains(&copy) => {}
            Some(known) if known.copies.len() >= COPIES_MAX => return false,
            Some(known) => known.copies.push(copy),
            None if at as usize != waiting => {}
            None if waiting >= UNACKNOWLEDGED_MAX || self.waiting_bytes >= UNACKNOWLEDGED_BYTES_MAX => {
                return false;
            }
            None => {
                self.waiting_bytes += bytes;
                self.waiting.push_back(Arrived { event, bytes, copies: vec![copy] });
            }
        }
        true
    }

    /// Handles the end of a connection: copies that depend on it are removed.
    pub(crate) fn link_down(&mut self, name: LinkName) {
        for arrived in &mut self.waiting {
            let depends = |copy: &EventDependencies| {
                copy.over == name || copy.behind.iter().any(|marker| marker.over == name)
            };
            arrived.copies.retain(|copy| !depends(copy));
        }
    }

    /// Returns the next event, once the markers of one of its copies have arrived; `marker` returns the
    /// number of a connection's last marker.
    pub(crate) fn next(&mut self, marker: impl Fn(LinkName) -> Option<u64>) -> Option<T> {
        let sequence = self.delivered + 1;
        let has_come = |needed: &MarkerName| marker(needed.over).is_some_and(|last| last >= needed.number);
        let may_go =
            |arrived: &mut Arrived<T>| arrived.copies.iter().any(|copy| copy.behind.iter().all(has_come));
        let next = self.waiting.pop_front_if(may_go)?;
        self.delivered = sequence;
        self.waiting_bytes -= next.bytes;
        Some(next.event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_delivered_in_turn_when_their_markers_have_come() {
        let [one, two, again] =
            [(1, 1), (2, 1), (2, 2)].map(|(link, connection)| LinkName { link, connection });
        let behind = vec![MarkerName { over: two, number: 7 }];
        let mut arrivals = Arrivals::default();
        assert!(arrivals.take(2, one, Vec::new(), 'b', 0), "not the next: it will come again");
        assert!(arrivals.take(1, one, behind, 'a', 0) && arrivals.take(2, one, Vec::new(), 'b', 0));
        let none = |_| None;
        assert_eq!(arrivals.next(none), None);
        assert_eq!(arrivals.next(|name| (name == again).then_some(9)), None, "of another connection");
        assert_eq!(arrivals.next(|name| (name == two).then_some(6)), None, "an earlier one");
        let marker = |name| (name == two).then_some(7);
        assert_eq!(
            [arrivals.next(marker), arrivals.next(marker), arrivals.next(marker)],
            [Some('a'), Some('b'), None]
        );
        assert!(
            arrivals.take(1, one, Vec::new(), 'a', 0) && arrivals.next(none).is_none(),
            "it was delivered"
        );
    }

    #[test]
    fn what_an_ended_connection_brought_delivers_nothing_any_more() {
        let [one, two] = [1, 2].map(|link| LinkName { link, connection: 1 });
        let behind = MarkerName { over: two, number: 1 };
        for (ended, over, behind) in [(one, one, vec![behind]), (two, one, vec![behind])] {
            let mut arrivals = Arrivals::default();
            assert!(arrivals.take(1, over, behind, 'a', 0));
            arrivals.link_down(ended);
            assert_eq!(arrivals.next(|_| Some(1)), None, "its writes may be posted again");
            assert!(arrivals.take(1, two, Vec::new(), 'a', 0));
            assert_eq!(arrivals.next(|_| None), Some('a'), "it was sent again");
        }
    }

    #[test]
    fn an_old_copy_that_comes_late_holds_no_event_up() {
        let [old, new, slow] =
            [(0, 1), (1, 1), (2, 1)].map(|(link, connection)| LinkName { link, connection });
        let slow_marker = MarkerName { over: slow, number: 1 };
        for late_first in [false, true] {
            let mut arrivals = Arrivals::default();
            let mut copies = [(old, vec![slow_marker]), (new, Vec::new())];
            copies[..].rotate_left(usize::from(!late_first));
            assert!(arrivals.take(1, new, vec![slow_marker], 'a', 0), "the event before it waits");
            for (over, behind) in copies {
                assert!(arrivals.take(2, over, behind, 'b', 0));
            }
            assert_eq!(arrivals.next(|_| None), None);
            arrivals.link_down(old);
            let marker = |name| (name == slow).then_some(1);
            assert_eq!([arrivals.next(marker), arrivals.next(marker)], [Some('a'), Some('b')]);
        }
    }

    #[test]
    fn copies_of_one_event_are_bounded() {
        let mut arrivals = Arrivals::default();
        let name = |connection| LinkName { link: 0, connection };
        for epoch in 0..2 * COPIES_MAX as u32 {
            let over = name(epoch.min(COPIES_MAX as u32 - 1));
            assert!(
                arrivals.take(1, over, vec![MarkerName { over: name(99), number: 1 }], (), 0),
                "the same copy again is none"
            );
        }
        assert!(!arrivals.take(
            1,
            name(COPIES_MAX as u32),
            vec![MarkerName { over: name(99), number: 1 }],
            (),
            0
        ));
    }

    #[test]
    fn a_peer_may_not_send_more_events_than_it_may_have_unacknowledged() {
        let name = LinkName { link: 0, connection: 1 };
        let mut arrivals = Arrivals::default();
        for sequence in 1..=UNACKNOWLEDGED_MAX as u64 {
            let never = MarkerName { over: name, number: 1 };
            assert!(arrivals.take(sequence, name, vec![never], (), 0));
        }
        assert!(!arrivals.take(UNACKNOWLEDGED_MAX as u64 + 1, name, Vec::new(), (), 0));
    }

    #[test]
    fn messages_that_wait_are_bounded_by_their_bytes() {
        let name = LinkName { link: 0, connection: 1 };
        let never = MarkerName { over: name, number: 1 };
        let mut arrivals = Arrivals::default();
        let (bytes, most) = (64 << 10, UNACKNOWLEDGED_BYTES_MAX as u64 / (64 << 10));
        for sequence in 1..=most {
            assert!(arrivals.take(sequence, name, vec![never], (), bytes));
        }
        assert!(!arrivals.take(most + 1, name, Vec::new(), (), 1), "a peer may not have sent that");
        assert!(arrivals.next(|_| Some(1)).is_some());
        assert!(arrivals.take(most + 1, name, Vec::new(), (), 1), "one was delivered");
    }
}
