//! One lane of a bonded peer: what waits, what is under way, and in which order it may be told.
//!
//! Writes and reads are cut into slices that go over any rail. A message or an immediate (an *event*) says that every write
//! before it has landed; writes behind it do not wait. For that the lane keeps writes by *epoch*, the stretch between two
//! events. Once all slices of an epoch are posted, a *marker* goes over every link that took some of them, and the event over its
//! own link: each rail delivers what it carries in order, so that the receiver, which counts the markers, knows that the slices
//! before them are in memory. Nobody waits for completions. (A NIC's completion says that the peer's NIC has the bytes, not that
//! another NIC's user sees them.) When a link with slices of an epoch fails, its event waits until all of them have completed.
//!
//! An event stays here until the peer has acknowledged it, so that it can be sent again over another link; the peer takes only the
//! number that is next, so nothing is delivered twice or out of turn.

use std::collections::{HashMap, VecDeque};

use dataplane_fabric::Operation;

use super::wire::{Frame, LinkName};

/// Requests that wait or are under way in one lane to one peer before `post` says full.
pub(crate) const REQUESTS_MAX: usize = 1024;
/// Events that are sent and not acknowledged.
const UNACKNOWLEDGED_MAX: usize = 256;
/// Different copies of one event, by the live connections that they depend on. A peer that sends more loses the connection, and
/// sends the event again.
const PROOFS_MAX: usize = 16;

/// A write or read of the user.
#[derive(Debug)]
struct Request {
    /// The user's id; zero: nobody asks.
    id: u64,
    /// Set for writes.
    epoch: Option<u64>,
    /// Slices posted and not completed; the part that waits counts as one.
    unfinished: u32,
}

/// A part of a request.
#[derive(Debug)]
pub(crate) struct Slice {
    pub(crate) request: u64,
    pub(crate) operation: Operation,
    /// Nothing of the request is left to post behind it, and it was not posted before.
    pub(crate) is_last: bool,
}

/// Links by their index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct LinkSet(u16);

impl LinkSet {
    fn insert(&mut self, link: usize) {
        self.0 |= 1 << link;
    }

    fn contains(self, link: usize) -> bool {
        self.0 >> link & 1 == 1
    }

    fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub(crate) fn iter(self) -> impl Iterator<Item = usize> {
        (0..u16::BITS as usize).filter(move |&link| self.contains(link))
    }
}

impl From<usize> for LinkSet {
    fn from(link: usize) -> Self {
        Self(1 << link)
    }
}

/// Content of an event for the peer's user.
#[derive(Debug)]
enum Told {
    Message(Box<[u8]>),
    Immediate(u32),
}

/// A message or an immediate.
#[derive(Debug)]
struct QueuedEvent {
    sequence: u64,
    told: Told,
    /// The user's id; zero: nobody asks.
    id: u64,
}

/// Writes, and the event behind them.
#[derive(Debug, Default)]
struct Epoch {
    /// Writes that have not completed.
    unfinished: u32,
    /// Writes of which something is not posted.
    unposted: u32,
    /// Links with slices of these writes, since their connections were made.
    used: LinkSet,
    /// Links of `used` that a marker was posted to, behind the last slice.
    marked: LinkSet,
    /// A link with slices of these writes has failed: the event waits for their completions.
    by_completion: bool,
    event: Option<QueuedEvent>,
}

/// The next post of a lane.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// A marker of this event, on this link.
    Marker { link: usize, sequence: u64 },
    /// The next event, on its link, behind the markers of these others.
    Event { behind: LinkSet },
    /// Nothing for now.
    Nothing,
}

/// A copy of an event as it came: why the writes before the event have landed.
#[derive(Debug, PartialEq, Eq)]
struct Proof {
    /// The connection that carried the copy, and with it, before it, some of the writes.
    over: LinkName,
    /// Connections that carried others: their markers have to come.
    behind: Vec<LinkName>,
}

/// An event that has come and waits for its turn or its markers.
#[derive(Debug)]
struct Arrived<T> {
    event: T,
    /// Of the copies that came: an event is sent again when a link fails, and an old copy may come after a new one. Copies
    /// that depend on an ended connection are gone, since the peer may post its writes again.
    proofs: Vec<Proof>,
}

/// Events that have come, in turn. At most [`UNACKNOWLEDGED_MAX`] wait, each of at most one message of a rail.
#[derive(Debug)]
pub(crate) struct Arrivals<T> {
    /// Number of the last event that was delivered here.
    pub(crate) delivered: u64,
    /// Events with the next numbers.
    waiting: VecDeque<Arrived<T>>,
}

impl<T> Default for Arrivals<T> {
    fn default() -> Self {
        Self { delivered: 0, waiting: VecDeque::new() }
    }
}

impl<T> Arrivals<T> {
    /// Takes a copy of an event, when the event is the next or waits already. False when the peer sends more than may wait.
    pub(crate) fn take(&mut self, sequence: u64, over: LinkName, behind: Vec<LinkName>, event: T) -> bool {
        let Some(at) = sequence.checked_sub(self.delivered + 1) else { return true };
        let (waiting, proof) = (self.waiting.len(), Proof { over, behind });
        match self.waiting.get_mut(at as usize) {
            Some(known) if known.proofs.contains(&proof) => {}
            Some(known) if known.proofs.len() >= PROOFS_MAX => return false,
            Some(known) => known.proofs.push(proof),
            None if at as usize != waiting => {}
            None if waiting >= UNACKNOWLEDGED_MAX => return false,
            None => self.waiting.push_back(Arrived { event, proofs: vec![proof] }),
        }
        true
    }

    /// A connection is over: no event is delivered on account of what the connection brought, unless it was before.
    pub(crate) fn link_down(&mut self, name: LinkName) {
        for arrived in &mut self.waiting {
            arrived.proofs.retain(|proof| proof.over != name && !proof.behind.contains(&name));
        }
    }

    /// The next event, once the markers of one of its copies have come; `marker` gives the last one of a connection.
    pub(crate) fn next(&mut self, marker: impl Fn(LinkName) -> Option<u64>) -> Option<T> {
        let sequence = self.delivered + 1;
        let has_come = |&name: &LinkName| marker(name).is_some_and(|last| last >= sequence);
        let may_go =
            |arrived: &mut Arrived<T>| arrived.proofs.iter().any(|proof| proof.behind.iter().all(has_come));
        let next = self.waiting.pop_front_if(may_go)?;
        self.delivered = sequence;
        Some(next.event)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Lane {
    requests: HashMap<u64, Request>,
    next_request: u64,
    /// What is left to cut and post.
    pub(crate) waiting: VecDeque<Slice>,
    /// Epochs from `first_epoch` on. The leading ones' events are posted and not acknowledged; the last has no event yet.
    epochs: VecDeque<Epoch>,
    first_epoch: u64,
    /// How many of the leading ones that are.
    sent: usize,
    /// How many of those must be sent again.
    resend: usize,
    next_sequence: u64,
}

impl Lane {
    pub(crate) fn is_full(&self) -> bool {
        self.requests.len() >= REQUESTS_MAX || self.epochs.len() >= REQUESTS_MAX
    }

    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.requests.is_empty() && self.epochs.len() <= 1
    }

    fn current(&mut self) -> (u64, &mut Epoch) {
        if self.epochs.is_empty() {
            self.epochs.push_back(Epoch::default());
        }
        let number = self.first_epoch + self.epochs.len() as u64 - 1;
        let last = self.epochs.len() - 1;
        (number, &mut self.epochs[last])
    }

    /// The epoch of a request, unless its event is acknowledged.
    fn epoch_of(&mut self, request: u64) -> Option<&mut Epoch> {
        let number = self.requests.get(&request)?.epoch?;
        self.epochs.get_mut(number.checked_sub(self.first_epoch)? as usize)
    }

    pub(crate) fn add_request(&mut self, id: u64, operation: Operation) {
        let epoch = match operation {
            Operation::Write { .. } => {
                let (number, epoch) = self.current();
                epoch.unfinished += 1;
                epoch.unposted += 1;
                Some(number)
            }
            Operation::Read { .. } | Operation::Send { .. } => None,
        };
        let request = self.next_request;
        self.next_request += 1;
        self.requests.insert(request, Request { id, epoch, unfinished: 1 });
        self.waiting.push_back(Slice { request, operation, is_last: true });
    }

    pub(crate) fn add_message(&mut self, id: u64, message: Box<[u8]>) {
        self.add_event(id, Told::Message(message));
    }

    pub(crate) fn add_immediate(&mut self, value: u32) {
        self.add_event(0, Told::Immediate(value));
    }

    fn add_event(&mut self, id: u64, told: Told) {
        self.next_sequence += 1;
        let event = QueuedEvent { sequence: self.next_sequence, told, id };
        self.current().1.event = Some(event);
        self.epochs.push_back(Epoch::default());
    }

    /// A slice was cut off a waiting one and posted.
    pub(crate) fn cut(&mut self, request: u64) {
        if let Some(request) = self.requests.get_mut(&request) {
            request.unfinished += 1;
        }
    }

    /// A slice was posted to a link.
    pub(crate) fn slice_posted(&mut self, request: u64, is_last: bool, link: usize) {
        if let Some(epoch) = self.epoch_of(request) {
            epoch.used.insert(link);
            // A slice behind a marker needs another marker.
            epoch.marked = epoch.marked.without(link.into());
            epoch.unposted -= u32::from(is_last);
        }
    }

    /// A slice has completed; the user's id when that was the last of its request and somebody asks.
    pub(crate) fn slice_done(&mut self, number: u64) -> Option<u64> {
        let request = self.requests.get_mut(&number)?;
        request.unfinished -= 1;
        if request.unfinished > 0 {
            return None;
        }
        if let Some(epoch) = self.epoch_of(number) {
            epoch.unfinished -= 1;
        }
        let request = self.requests.remove(&number)?;
        (request.id != 0).then_some(request.id)
    }

    /// Whether the peer has delivered the event behind this write, of those up to number `delivered`: the write has landed, whatever
    /// became of the link.
    pub(crate) fn was_delivered(&self, request: u64, delivered: u64) -> bool {
        // The event behind epoch 0 is number 1.
        let epoch = self.requests.get(&request).and_then(|request| request.epoch);
        epoch.is_some_and(|epoch| epoch < delivered)
    }

    /// Which event is to be sent next: of those that go again the first, else the first that was not sent.
    fn next_index(&self) -> Option<usize> {
        if self.resend == 0 && self.sent >= UNACKNOWLEDGED_MAX {
            return None;
        }
        let index = self.sent - self.resend;
        self.epochs.get(index).is_some_and(|epoch| epoch.event.is_some()).then_some(index)
    }

    /// Whether an event waits to be sent, at once or behind its writes.
    pub(crate) fn has_event(&self) -> bool {
        self.next_index().is_some()
    }

    /// The next post when events go over the link `carrier`.
    pub(crate) fn next(&self, carrier: usize) -> Next {
        let Some(epoch) = self.next_index().map(|index| &self.epochs[index]) else { return Next::Nothing };
        let Some(event) = &epoch.event else { return Next::Nothing };
        if epoch.by_completion {
            let may_go = epoch.unfinished == 0;
            return if may_go { Next::Event { behind: LinkSet::default() } } else { Next::Nothing };
        }
        if epoch.unposted > 0 {
            return Next::Nothing;
        }
        // The event itself is the marker of its own link.
        let behind = epoch.used.without(carrier.into());
        match behind.without(epoch.marked).iter().next() {
            Some(link) => Next::Marker { link, sequence: event.sequence },
            None => Next::Event { behind },
        }
    }

    /// The marker of [`Next::Marker`] was posted.
    pub(crate) fn marked(&mut self, link: usize) {
        if let Some(index) = self.next_index() {
            self.epochs[index].marked.insert(link);
        }
    }

    /// The next event as a frame of lane `lane`, with what it waits for at the receiver.
    pub(crate) fn event_frame(&self, lane: u8, behind: Vec<LinkName>) -> Option<Box<[u8]>> {
        let event = self.epochs.get(self.next_index()?)?.event.as_ref()?;
        let sequence = event.sequence;
        Some(match &event.told {
            Told::Message(bytes) => Frame::Message { lane, sequence, behind, bytes }.encode(),
            Told::Immediate(value) => Frame::Immediate { lane, sequence, behind, value: *value }.encode(),
        })
    }

    /// The next event was posted.
    pub(crate) fn event_sent(&mut self) {
        if self.resend > 0 {
            self.resend -= 1;
        } else {
            self.sent += 1;
        }
    }

    /// A link carries nothing more. Events that wait for its markers wait for completions instead, and when it carried events, or
    /// some that were sent wait for its markers, all that are not acknowledged go again.
    pub(crate) fn leave(&mut self, link: usize, was_carrier: bool) {
        let mut must_resend = was_carrier;
        for (index, epoch) in self.epochs.iter_mut().enumerate() {
            if epoch.used.contains(link) {
                epoch.by_completion = true;
                must_resend |= index < self.sent;
            }
        }
        if must_resend {
            self.resend = self.sent;
        }
    }

    /// Whether another link may carry the next event: nothing is on its way over the present one.
    pub(crate) fn may_change_carrier(&self) -> bool {
        self.sent == self.resend
    }

    /// The peer has delivered everything up to this number; gives the ids of the users who asked.
    pub(crate) fn acknowledged(&mut self, received: u64, done: &mut Vec<u64>) {
        while self.sent > 0
            && let Some(epoch) = self
                .epochs
                .pop_front_if(|epoch| epoch.event.as_ref().is_some_and(|event| event.sequence <= received))
        {
            self.first_epoch += 1;
            self.sent -= 1;
            done.extend(epoch.event.map(|event| event.id).filter(|&id| id != 0));
        }
        self.resend = self.resend.min(self.sent);
    }

    /// The connection is over: the ids of all that somebody asks for.
    pub(crate) fn abandon(&mut self) -> Vec<u64> {
        self.waiting.clear();
        let mut ids: Vec<u64> = self.requests.drain().map(|(_, request)| request.id).collect();
        ids.extend(self.epochs.drain(..).filter_map(|epoch| epoch.event.map(|event| event.id)));
        (self.sent, self.resend) = (0, 0);
        ids.retain(|&id| id != 0);
        ids.sort_unstable();
        ids
    }
}

#[cfg(test)]
mod tests {
    use dataplane_fabric::testing::pool;
    use dataplane_fabric::{Source, Target};

    use super::*;

    fn write() -> Operation {
        let slot = pool("lane").acquire().expect("a slot");
        let source = Source::Slot { slot, offset: 0, len: 8 };
        let target = Target { slot: 0, generation: 0, offset: 0 };
        Operation::Write { source, target, rows: None, immediate: None }
    }

    /// A lane with so many writes and an event behind them, the writes posted to these links.
    fn posted(links: &[usize]) -> Lane {
        let mut lane = Lane::default();
        links.iter().for_each(|_| lane.add_request(0, write()));
        lane.add_immediate(7);
        for &link in links {
            let slice = lane.waiting.pop_front().expect("a slice");
            lane.slice_posted(slice.request, slice.is_last, link);
        }
        lane
    }

    #[test]
    fn an_event_follows_markers_on_every_other_link_that_took_writes() {
        let mut lane = Lane::default();
        lane.add_request(0, write());
        lane.add_immediate(7);
        assert_eq!(lane.next(0), Next::Nothing, "its write is not posted");
        let mut lane = posted(&[0, 3, 1]);
        assert_eq!(lane.next(1), Next::Marker { link: 0, sequence: 1 });
        lane.marked(0);
        assert_eq!(lane.next(1), Next::Marker { link: 3, sequence: 1 });
        lane.marked(3);
        let Next::Event { behind } = lane.next(1) else { panic!("{:?}", lane.next(1)) };
        assert_eq!(behind.iter().collect::<Vec<_>>(), [0, 3]);
        assert_eq!(lane.next(3), Next::Marker { link: 1, sequence: 1 }, "over another link");
        lane.event_sent();
        assert!(!lane.has_event() && !lane.may_change_carrier());
        assert_eq!(posted(&[2]).next(2), Next::Event { behind: LinkSet::default() }, "its own link");
    }

    #[test]
    fn when_a_link_fails_its_events_wait_for_completions_and_go_again() {
        let mut lane = posted(&[0, 1]);
        lane.marked(1);
        lane.event_sent();
        lane.leave(2, false);
        assert!(!lane.has_event(), "a link that had nothing of it");
        lane.leave(1, false);
        assert_eq!(lane.next(0), Next::Nothing, "two writes have not completed");
        assert!(lane.slice_done(0).is_none() && lane.slice_done(1).is_none());
        assert_eq!(lane.next(0), Next::Event { behind: LinkSet::default() });
        lane.event_sent();
        lane.acknowledged(1, &mut Vec::new());
        assert!(lane.is_idle());
    }

    #[test]
    fn writes_of_a_delivered_event_have_landed() {
        let mut lane = posted(&[0, 1]);
        lane.add_request(0, write());
        assert!(lane.was_delivered(1, 1) && !lane.was_delivered(1, 0) && !lane.was_delivered(2, 1));
    }

    #[test]
    fn events_are_delivered_in_turn_when_their_markers_have_come() {
        let [one, two, again] = [(1, 1), (2, 1), (2, 2)].map(|(link, epoch)| LinkName { link, epoch });
        let mut arrivals = Arrivals::default();
        assert!(arrivals.take(2, one, Vec::new(), 'b'), "not the next: it will come again");
        assert!(arrivals.take(1, one, vec![two], 'a') && arrivals.take(2, one, Vec::new(), 'b'));
        let none = |_| None;
        assert_eq!(arrivals.next(none), None);
        assert_eq!(arrivals.next(|name| (name == again).then_some(9)), None, "of another connection");
        let marker = |name| (name == two).then_some(1);
        assert_eq!(
            [arrivals.next(marker), arrivals.next(marker), arrivals.next(marker)],
            [Some('a'), Some('b'), None]
        );
        assert!(arrivals.take(1, one, Vec::new(), 'a') && arrivals.next(none).is_none(), "it was delivered");
    }

    #[test]
    fn what_an_ended_connection_brought_delivers_nothing_any_more() {
        let [one, two] = [1, 2].map(|link| LinkName { link, epoch: 1 });
        for (ended, over, behind) in [(one, one, vec![two]), (two, one, vec![two])] {
            let mut arrivals = Arrivals::default();
            assert!(arrivals.take(1, over, behind, 'a'));
            arrivals.link_down(ended);
            assert_eq!(arrivals.next(|_| Some(1)), None, "its writes may be posted again");
            assert!(arrivals.take(1, two, Vec::new(), 'a'));
            assert_eq!(arrivals.next(|_| None), Some('a'), "it was sent again");
        }
    }

    #[test]
    fn an_old_copy_that_comes_late_holds_no_event_up() {
        let [old, new, slow] = [(0, 1), (1, 1), (2, 1)].map(|(link, epoch)| LinkName { link, epoch });
        for late_first in [false, true] {
            let mut arrivals = Arrivals::default();
            let mut copies = [(old, vec![slow]), (new, Vec::new())];
            copies[..].rotate_left(usize::from(!late_first));
            assert!(arrivals.take(1, new, vec![slow], 'a'), "the event before it waits");
            for (over, behind) in copies {
                assert!(arrivals.take(2, over, behind, 'b'));
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
        let name = |epoch| LinkName { link: 0, epoch };
        for epoch in 0..2 * PROOFS_MAX as u32 {
            let over = name(epoch.min(PROOFS_MAX as u32 - 1));
            assert!(arrivals.take(1, over, vec![name(99)], ()), "the same copy again is none");
        }
        assert!(!arrivals.take(1, name(PROOFS_MAX as u32), vec![name(99)], ()));
    }

    #[test]
    fn a_peer_may_not_send_more_events_than_it_may_have_unacknowledged() {
        let name = LinkName { link: 0, epoch: 1 };
        let mut arrivals = Arrivals::default();
        for sequence in 1..=UNACKNOWLEDGED_MAX as u64 {
            assert!(arrivals.take(sequence, name, vec![name], ()));
        }
        assert!(!arrivals.take(UNACKNOWLEDGED_MAX as u64 + 1, name, vec![name], ()));
    }
}
