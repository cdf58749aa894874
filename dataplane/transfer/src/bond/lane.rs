//! One lane of a bonded peer: what waits, what is under way, and in which order it may be told.
//!
//! Writes and reads are cut into slices that go over any rail. A message or an immediate (an *event*) is posted
//! only when every write before it has landed; writes behind it do not wait. For that the lane counts unfinished
//! writes by *epoch*, the stretch between two events. An event stays here until the peer has acknowledged it, so that
//! it can be sent again over another link; the peer takes only the number that is next, so nothing is delivered
//! twice or out of turn.

use std::collections::{HashMap, VecDeque};

use dataplane_fabric::Operation;

/// Requests that wait or are under way in one lane to one peer before `post` says full.
pub(crate) const REQUESTS_MAX: usize = 1024;
/// Events that are sent and not acknowledged.
const UNACKNOWLEDGED_MAX: usize = 256;

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
}

/// A message or an immediate.
#[derive(Debug)]
struct QueuedEvent {
    sequence: u64,
    frame: Box<[u8]>,
    /// The user's id; zero: nobody asks.
    id: u64,
}

#[derive(Debug, Default)]
struct Epoch {
    writes: u32,
    event: Option<QueuedEvent>,
}

#[derive(Debug, Default)]
pub(crate) struct Lane {
    requests: HashMap<u64, Request>,
    next_request: u64,
    /// What is left to cut and post.
    pub(crate) waiting: VecDeque<Slice>,
    /// Epochs from `first_epoch` on; the last has no event yet.
    epochs: VecDeque<Epoch>,
    first_epoch: u64,
    next_sequence: u64,
    /// Posted, not acknowledged.
    unacknowledged: VecDeque<QueuedEvent>,
    /// How many of `unacknowledged` must be sent again.
    pub(crate) resend: usize,
    /// The number of the last event that was delivered here.
    pub(crate) received: u64,
}

impl Lane {
    pub(crate) fn is_full(&self) -> bool {
        self.requests.len() >= REQUESTS_MAX || self.epochs.len() >= REQUESTS_MAX
    }

    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.requests.is_empty() && self.unacknowledged.is_empty() && self.epochs.len() <= 1
    }

    fn current(&mut self) -> (u64, &mut Epoch) {
        if self.epochs.is_empty() {
            self.epochs.push_back(Epoch::default());
        }
        let number = self.first_epoch + self.epochs.len() as u64 - 1;
        let last = self.epochs.len() - 1;
        (number, &mut self.epochs[last])
    }

    pub(crate) fn add_request(&mut self, id: u64, operation: Operation) {
        let epoch = match operation {
            Operation::Write { .. } => {
                let (number, epoch) = self.current();
                epoch.writes += 1;
                Some(number)
            }
            Operation::Read { .. } | Operation::Send { .. } => None,
        };
        let request = self.next_request;
        self.next_request += 1;
        self.requests.insert(request, Request { id, epoch, unfinished: 1 });
        self.waiting.push_back(Slice { request, operation });
    }

    pub(crate) fn add_event(&mut self, id: u64, frame: impl FnOnce(u64) -> Box<[u8]>) {
        self.next_sequence += 1;
        let frame = frame(self.next_sequence);
        let event = QueuedEvent { sequence: self.next_sequence, frame, id };
        self.current().1.event = Some(event);
        self.epochs.push_back(Epoch::default());
    }

    /// A slice was cut off a waiting one and posted.
    pub(crate) fn cut(&mut self, request: u64) {
        if let Some(request) = self.requests.get_mut(&request) {
            request.unfinished += 1;
        }
    }

    /// A slice has completed; the user's id when that was the last of its request and somebody asks.
    pub(crate) fn slice_done(&mut self, number: u64) -> Option<u64> {
        let request = self.requests.get_mut(&number)?;
        request.unfinished -= 1;
        if request.unfinished > 0 {
            return None;
        }
        let request = self.requests.remove(&number)?;
        if let Some(epoch) = request.epoch.and_then(|epoch| epoch.checked_sub(self.first_epoch))
            && let Some(epoch) = self.epochs.get_mut(epoch as usize)
        {
            epoch.writes -= 1;
        }
        (request.id != 0).then_some(request.id)
    }

    /// The next event to send, if one may be sent now.
    pub(crate) fn next_event(&self) -> Option<&[u8]> {
        if self.resend > 0 {
            let at = self.unacknowledged.len() - self.resend;
            return self.unacknowledged.get(at).map(|event| &*event.frame);
        }
        if self.unacknowledged.len() >= UNACKNOWLEDGED_MAX {
            return None;
        }
        let first = self.epochs.front().filter(|epoch| epoch.writes == 0)?;
        first.event.as_ref().map(|event| &*event.frame)
    }

    /// That event was posted.
    pub(crate) fn event_sent(&mut self) {
        if self.resend > 0 {
            self.resend -= 1;
            return;
        }
        let Some(event) = self.epochs.pop_front().and_then(|epoch| epoch.event) else { return };
        self.first_epoch += 1;
        self.unacknowledged.push_back(event);
    }

    /// The link that carried the events is gone: all that are not acknowledged go again.
    pub(crate) fn send_again(&mut self) {
        self.resend = self.unacknowledged.len();
    }

    /// Whether another link may carry the next event: nothing is on its way over the present one.
    pub(crate) fn may_change_carrier(&self) -> bool {
        self.unacknowledged.len() == self.resend
    }

    /// The peer has delivered everything up to this number; gives the ids of the users who asked.
    pub(crate) fn acknowledged(&mut self, received: u64, done: &mut Vec<u64>) {
        while let Some(event) = self.unacknowledged.pop_front_if(|event| event.sequence <= received) {
            done.extend(Some(event.id).filter(|&id| id != 0));
        }
        self.resend = self.resend.min(self.unacknowledged.len());
    }

    /// Whether this event is to be delivered: it is the next one.
    pub(crate) fn take(&mut self, sequence: u64) -> bool {
        let is_next = sequence == self.received + 1;
        self.received += u64::from(is_next);
        is_next
    }

    /// The connection is over: the ids of all that somebody asks for.
    pub(crate) fn abandon(&mut self) -> Vec<u64> {
        self.waiting.clear();
        let mut ids: Vec<u64> = self.requests.drain().map(|(_, request)| request.id).collect();
        ids.extend(self.epochs.drain(..).filter_map(|epoch| epoch.event.map(|event| event.id)));
        ids.extend(self.unacknowledged.drain(..).map(|event| event.id));
        ids.retain(|&id| id != 0);
        ids.sort_unstable();
        ids
    }
}
