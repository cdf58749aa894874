//! One lane of a bonded peer: waiting requests, requests in flight, and the order in which events are delivered.
//!
//! Writes and reads are cut into slices that go over any rail. A message or an immediate (an *event*) says
//! that every write before it has landed; writes behind it do not wait. For that the lane groups writes by
//! *epoch*, the interval between two events. Once all slices of an epoch are posted, a *marker* goes over
//! every link that took some of them, and the event over its own link: each rail delivers in order, so that
//! the receiver, which keeps the number of each rail's last marker, knows that the slices before them are
//! in memory ([`super::arrivals`]). While no link fails, no event waits for completions: over RDMA a
//! completion says that the peer's NIC has the bytes, not that a reader whom another NIC has notified can
//! see them. When a link with slices of an epoch fails, its event waits until all of them have completed,
//! and then goes behind markers of the links that took the slices again.
//!
//! An event stays here until the peer has acknowledged it, so that it can be sent again over another link;
//! the peer accepts only the next number, so nothing is delivered twice or out of order.

use std::collections::{HashMap, VecDeque};

use dataplane_fabric::Operation;

use super::wire::{Frame, MarkerName};

/// Most requests that wait or are in flight in one lane to one peer; beyond it `post` returns full.
pub(crate) const REQUESTS_MAX: usize = 1024;
/// Most events that are sent and not acknowledged.
pub(crate) const UNACKNOWLEDGED_MAX: usize = 256;
/// Bytes of messages sent and not acknowledged at which sending stops; the last message may exceed it.
pub(crate) const UNACKNOWLEDGED_BYTES_MAX: usize = 1 << 20;

/// A write or read of the user.
#[derive(Debug)]
struct Request {
    /// The user's id; zero: no completion is reported.
    id: u64,
    /// Epoch of a write; `None` for reads and sends.
    epoch: Option<u64>,
    /// Slices posted and not completed; the waiting rest counts as one.
    unfinished: u32,
}

/// A part of a request.
#[derive(Debug)]
pub(crate) struct Slice {
    pub(crate) request: u64,
    pub(crate) operation: Operation,
    /// Whether the slice ends its request and is posted for the first time.
    pub(crate) is_last: bool,
    /// Number of connections that failed while they carried the slice.
    pub(crate) failures: u8,
}

/// Links by their index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct LinkSet(u16);

impl LinkSet {
    pub(crate) fn insert(&mut self, link: usize) {
        self.0 |= 1 << link;
    }

    pub(crate) fn contains(self, link: usize) -> bool {
        self.0 >> link & 1 == 1
    }

    pub(crate) fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
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
enum EventContent {
    Message(Box<[u8]>),
    Immediate(u32),
}

impl EventContent {
    fn bytes(&self) -> usize {
        match self {
            Self::Message(bytes) => bytes.len(),
            Self::Immediate(_) => 0,
        }
    }
}

/// A message or an immediate.
#[derive(Debug)]
struct QueuedEvent {
    sequence: u64,
    content: EventContent,
    /// The user's id; zero: no completion is reported.
    id: u64,
}

/// A marker of a lane that was posted to a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LaneMarker {
    pub(crate) link: usize,
    pub(crate) number: u64,
}

/// Writes between two events, and the event behind them.
#[derive(Debug, Default)]
struct Epoch {
    /// Writes that have not completed.
    unfinished: u32,
    /// Writes that are not fully posted.
    unposted: u32,
    /// Links with slices of these writes, since each link's present connection was made.
    used: LinkSet,
    /// Markers posted to links of `used`, behind the last slice.
    marked: Vec<LaneMarker>,
    /// Whether a link with slices of these writes has failed: the event waits for their completions, before
    /// its markers.
    by_completion: bool,
    event: Option<QueuedEvent>,
}

/// The next post of a lane.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// A marker to post on this link.
    Marker { link: usize, number: u64 },
    /// The next event, to post on its own link, behind these markers on others.
    Event { behind: Vec<LaneMarker> },
    /// Nothing can be posted now.
    Nothing,
}

#[derive(Debug, Default)]
pub(crate) struct Lane {
    requests: HashMap<u64, Request>,
    next_request: u64,
    /// Slices that are still to be cut and posted.
    pub(crate) waiting: VecDeque<Slice>,
    /// Epochs from `first_epoch` on. The events of the leading ones are posted and not acknowledged; the
    /// last has no event yet.
    epochs: VecDeque<Epoch>,
    first_epoch: u64,
    /// Number of leading epochs whose events were sent.
    sent: usize,
    /// Number of leading epochs whose events must be sent again.
    resend: usize,
    /// Bytes of the messages of the sent events.
    sent_bytes: usize,
    next_sequence: u64,
    last_marker: u64,
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

    /// Returns the epoch of a request, unless its event is acknowledged.
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
        self.waiting.push_back(Slice { request, operation, is_last: true, failures: 0 });
    }

    pub(crate) fn add_message(&mut self, id: u64, message: Box<[u8]>) {
        self.add_event(id, EventContent::Message(message));
    }

    pub(crate) fn add_immediate(&mut self, value: u32) {
        self.add_event(0, EventContent::Immediate(value));
    }

    fn add_event(&mut self, id: u64, content: EventContent) {
        self.next_sequence += 1;
        let event = QueuedEvent { sequence: self.next_sequence, content, id };
        self.current().1.event = Some(event);
        self.epochs.push_back(Epoch::default());
    }

    /// Counts a slice that was cut off a waiting one and posted.
    pub(crate) fn cut(&mut self, request: u64) {
        if let Some(request) = self.requests.get_mut(&request) {
            request.unfinished += 1;
        }
    }

    /// Records that a slice was posted to a link.
    pub(crate) fn slice_posted(&mut self, request: u64, is_last: bool, link: usize) {
        if let Some(epoch) = self.epoch_of(request) {
            epoch.used.insert(link);
            // A slice behind a marker needs another marker.
            epoch.marked.retain(|marker| marker.link != link);
            epoch.unposted -= u32::from(is_last);
        }
    }

    /// Counts a completed slice; returns the user's id when it was the last one of its request and a
    /// completion is reported.
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

    /// Whether the event behind this write is among those up to number `delivered` that the peer has
    /// delivered: the write has landed, whatever happened to the link.
    pub(crate) fn was_delivered(&self, request: u64, delivered: u64) -> bool {
        // The event behind epoch 0 is number 1.
        let epoch = self.requests.get(&request).and_then(|request| request.epoch);
        epoch.is_some_and(|epoch| epoch < delivered)
    }

    /// Index of the event to send next: the first of those to send again, else the first that was not sent.
    fn next_index(&self) -> Option<usize> {
        let is_full = self.sent >= UNACKNOWLEDGED_MAX || self.sent_bytes >= UNACKNOWLEDGED_BYTES_MAX;
        if self.resend == 0 && is_full {
            return None;
        }
        let index = self.sent - self.resend;
        self.epochs.get(index).is_some_and(|epoch| epoch.event.is_some()).then_some(index)
    }

    /// Whether an event waits to be sent, at once or behind its writes.
    pub(crate) fn has_event(&self) -> bool {
        self.next_index().is_some()
    }

    /// Returns the next post when events go over the link `carrier`.
    pub(crate) fn next(&self, carrier: usize) -> Next {
        let Some(epoch) = self.next_index().map(|index| &self.epochs[index]) else { return Next::Nothing };
        if epoch.unposted > 0 || (epoch.by_completion && epoch.unfinished > 0) {
            return Next::Nothing;
        }
        // The event itself is the marker of its own link.
        let mut behind = Vec::new();
        for link in epoch.used.without(carrier.into()).iter() {
            match epoch.marked.iter().find(|marker| marker.link == link) {
                Some(&marker) => behind.push(marker),
                None => return Next::Marker { link, number: self.last_marker + 1 },
            }
        }
        Next::Event { behind }
    }

    /// Records that the marker of [`Next::Marker`] was posted.
    pub(crate) fn marked(&mut self, link: usize) {
        if let Some(index) = self.next_index() {
            self.last_marker += 1;
            let number = self.last_marker;
            self.epochs[index].marked.push(LaneMarker { link, number });
        }
    }

    /// Encodes the next event as a frame of lane `lane`, with the markers that the receiver waits for.
    pub(crate) fn event_frame(&self, lane: u8, behind: Vec<MarkerName>) -> Option<Box<[u8]>> {
        let event = self.epochs.get(self.next_index()?)?.event.as_ref()?;
        let sequence = event.sequence;
        Some(match &event.content {
            EventContent::Message(bytes) => Frame::Message { lane, sequence, behind, bytes }.encode(),
            EventContent::Immediate(value) => {
                Frame::Immediate { lane, sequence, behind, value: *value }.encode()
            }
        })
    }

    /// Records that the next event was posted.
    pub(crate) fn event_sent(&mut self) {
        if self.resend > 0 {
            self.resend -= 1;
        } else {
            let sent = self.epochs.get(self.sent).and_then(|epoch| epoch.event.as_ref());
            self.sent_bytes += sent.map_or(0, |event| event.content.bytes());
            self.sent += 1;
        }
    }

    /// Handles the end of a link. Events that wait for its markers wait for completions instead. If it
    /// carried events, or events that were sent wait for its markers, all unacknowledged events are sent
    /// again.
    pub(crate) fn link_ended(&mut self, link: usize, was_carrier: bool) {
        let mut must_resend = was_carrier;
        for (index, epoch) in self.epochs.iter_mut().enumerate() {
            if epoch.used.contains(link) {
                epoch.by_completion = true;
                epoch.used = epoch.used.without(link.into());
                epoch.marked.retain(|marker| marker.link != link);
                must_resend |= index < self.sent;
            }
        }
        if must_resend {
            self.resend = self.sent;
        }
    }

    /// Whether another link may carry the next event: no event is in transit over the present one.
    pub(crate) fn may_change_carrier(&self) -> bool {
        self.sent == self.resend
    }

    /// Removes the events up to this number, which the peer has delivered; adds the ids to report to `done`.
    pub(crate) fn acknowledged(&mut self, delivered: u64, done: &mut Vec<u64>) {
        while self.sent > 0
            && let Some(epoch) = self
                .epochs
                .pop_front_if(|epoch| epoch.event.as_ref().is_some_and(|event| event.sequence <= delivered))
        {
            self.first_epoch += 1;
            self.sent -= 1;
            let bytes = epoch.event.as_ref().map_or(0, |event| event.content.bytes());
            self.sent_bytes -= bytes;
            done.extend(epoch.event.map(|event| event.id).filter(|&id| id != 0));
        }
        self.resend = self.resend.min(self.sent);
    }

    /// Ends the lane; returns the ids of all requests whose completion is reported.
    pub(crate) fn abandon(&mut self) -> Vec<u64> {
        self.waiting.clear();
        let mut ids: Vec<u64> = self.requests.drain().map(|(_, request)| request.id).collect();
        ids.extend(self.epochs.drain(..).filter_map(|epoch| epoch.event.map(|event| event.id)));
        (self.sent, self.resend, self.sent_bytes) = (0, 0, 0);
        ids.retain(|&id| id != 0);
        ids.sort_unstable();
        ids
    }
}

#[cfg(test)]
mod tests {
    use dataplane_fabric::testing::pool;
    use dataplane_fabric::{Source, Target};
    use dataplane_memory::SlabKind;

    use super::*;

    fn write() -> Operation {
        let slot = pool("lane").acquire().expect("a slot");
        let source = Source::Slot { slot, offset: 0, len: 8 };
        let target = Target { slab: SlabKind::Host, slot: 0, generation: 0, offset: 0 };
        Operation::Write { source, target, rows: None, immediate: None }
    }

    /// Makes a lane with one write on each of these links and an event behind them.
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
        assert_eq!(lane.next(1), Next::Marker { link: 0, number: 1 });
        lane.marked(0);
        assert_eq!(lane.next(1), Next::Marker { link: 3, number: 2 });
        lane.marked(3);
        let behind = vec![LaneMarker { link: 0, number: 1 }, LaneMarker { link: 3, number: 2 }];
        assert_eq!(lane.next(1), Next::Event { behind });
        assert_eq!(lane.next(3), Next::Marker { link: 1, number: 3 }, "over another link");
        lane.event_sent();
        assert!(!lane.has_event() && !lane.may_change_carrier());
        assert_eq!(posted(&[2]).next(2), Next::Event { behind: Vec::new() }, "its own link");
    }

    #[test]
    fn when_a_link_fails_its_events_wait_for_completions_and_go_again() {
        let mut lane = posted(&[0, 1]);
        lane.marked(1);
        lane.event_sent();
        lane.link_ended(2, false);
        assert!(!lane.has_event(), "a link that had nothing of it");
        lane.link_ended(1, false);
        assert_eq!(lane.next(0), Next::Nothing, "two writes have not completed");
        assert!(lane.slice_done(0).is_none() && lane.slice_done(1).is_none());
        assert_eq!(lane.next(0), Next::Event { behind: Vec::new() });
        lane.event_sent();
        lane.acknowledged(1, &mut Vec::new());
        assert!(lane.is_idle());
    }

    /// A marker posted before the writes were posted to this link again does not cover them.
    #[test]
    fn writes_that_went_again_have_a_marker_of_their_own() {
        let mut lane = posted(&[0, 1, 2]);
        lane.marked(1);
        lane.marked(2);
        lane.event_sent();
        lane.link_ended(1, false);
        lane.slice_posted(1, false, 2);
        assert!((0..3).all(|request| lane.slice_done(request).is_none()), "nobody asked");
        assert_eq!(lane.next(0), Next::Marker { link: 2, number: 3 });
        lane.marked(2);
        assert_eq!(lane.next(0), Next::Event { behind: vec![LaneMarker { link: 2, number: 3 }] });
    }

    #[test]
    fn messages_that_are_not_acknowledged_are_bounded_by_their_bytes() {
        let message = || vec![0; 64 << 10].into_boxed_slice();
        let most = UNACKNOWLEDGED_BYTES_MAX / message().len();
        let mut lane = Lane::default();
        for _ in 0..most {
            lane.add_message(0, message());
            assert!(lane.has_event());
            lane.event_sent();
        }
        lane.add_message(0, message());
        assert!(!lane.has_event(), "{most} are not acknowledged");
        lane.link_ended(0, true);
        assert!(lane.has_event(), "those that go again are none more");
        (0..most).for_each(|_| lane.event_sent());
        lane.acknowledged(1, &mut Vec::new());
        assert!(lane.has_event());
    }

    #[test]
    fn writes_of_a_delivered_event_have_landed() {
        let mut lane = posted(&[0, 1]);
        lane.add_request(0, write());
        assert!(lane.was_delivered(1, 1) && !lane.was_delivered(1, 0) && !lane.was_delivered(2, 1));
    }
}
