//! One lane to one peer: a queue pair, the queue of waiting requests, the requests in flight, and the credits.
//!
//! Requests wait in order in `queue`. [`Lane::pump`] builds as many work requests as there is room for,
//! posts them with one doorbell, and moves finished requests to `in_flight`, which holds their slots. Work
//! requests carry a sequence number as their id, and a reliable connection completes in order: the
//! completion of number n retires every request whose last work request has a number up to n. So most work
//! requests need no signal.
//!
//! Credits: each message piece and each immediate uses up one receive of the peer. A lane starts with the
//! number that the peer's hello granted and gets receives back in the headers of the peer's pieces, or in a
//! credit message when the peer has no message to send. Credit messages need no credit; at most two of them
//! are in flight, since one is sent for half a window at the least.
//!
//! Hot path: no allocation (the queues have their capacity from the start), no lock, no system call.

mod pump;

use std::collections::VecDeque;

use dataplane_fabric::{Completion, Event, INLINE_BYTES_MAX};
use dataplane_memory::{Slab, SlotRef};

use crate::geometry::{Cursor, Geometry};
use crate::memory_region::MemoryRegion;
use crate::metrics::Metrics;
use crate::post::{PostArray, Remote};
use crate::queue_pair::{Failed, Initialised, QueuePair, ReadyToSend};
use crate::wire::Segment;

/// The queue pair, in the state that the connection has reached.
#[derive(Debug)]
pub(crate) enum Pair {
    Absent,
    /// A command in flight holds the pair, or will create it.
    InCommand,
    Initialised(QueuePair<Initialised>),
    Ready(QueuePair<ReadyToSend>),
    Failed(QueuePair<Failed>),
    /// The device neither ended the pair's work nor destroyed it: without limit in time the device may
    /// access what is in flight, and the peer the slots shown to it.
    Leaked,
}

/// Work of a request that is still to be posted.
#[derive(Debug)]
pub(crate) enum Work {
    /// Transfer between a local slot and the peer's slots.
    Slot {
        slot: SlotRef,
        region: u32,
        local: u64,
        remote: Remote,
        geometry: Geometry,
        cursor: Cursor,
        is_read: bool,
        immediate: Option<u32>,
    },
    /// A few bytes carried inside the work request.
    Inline { bytes: [u8; INLINE_BYTES_MAX], len: u8, remote: Remote, immediate: Option<u32> },
    /// A message, sent up to `offset`.
    Message { message: Box<[u8]>, offset: usize },
}

#[derive(Debug)]
struct Pending {
    id: u64,
    work: Work,
}

/// Memory that a request holds until the device has completed it.
#[derive(Debug)]
enum Held {
    Nothing,
    Slot(#[expect(dead_code, reason = "held, not read")] SlotRef),
    Bounce(u32),
}

#[derive(Debug)]
struct Flight {
    last: u64,
    id: u64,
    held: Held,
}

/// Resources of the fabric that [`Lane::pump`] uses.
pub(crate) struct PumpResources<'fabric> {
    pub(crate) array: &'fabric mut PostArray,
    pub(crate) regions: &'fabric [MemoryRegion],
    pub(crate) bounce_region: &'fabric MemoryRegion,
    pub(crate) bounce_slab: &'fabric Slab,
    pub(crate) bounce_free: &'fabric mut Vec<u32>,
    /// Work requests that may still be posted, so that the completion queue cannot overflow.
    pub(crate) completion_room: usize,
    /// Bounce buffers that this lane must leave free for other lanes.
    pub(crate) bounce_reserve: usize,
    pub(crate) signal_every: u32,
    pub(crate) message_bytes_max: u32,
    pub(crate) metrics: &'fabric mut Metrics,
}

/// Parameters that both ends agreed on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LaneParameters {
    /// Receives of the peer that this side may use up.
    pub(crate) send_credits: u32,
    /// Receives of this side that the peer may use up.
    pub(crate) receive_credits: u32,
    /// Bytes of a piece, header included.
    pub(crate) segment_bytes: usize,
}

/// One lane; see the module's documentation. The pair is declared first and thus dropped first: the device
/// can no longer access requests in flight when their slots are released.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) pair: Pair,
    /// Number and `ibv_qp` address of the pair, also while a command holds it; `None` once it is destroyed.
    identity: Option<(u32, usize)>,
    queue: VecDeque<Pending>,
    in_flight: VecDeque<Flight>,
    queue_max: usize,
    depth: u64,
    entries_max: u32,
    read_entries_max: u32,
    inline_max: usize,
    /// Number of the next work request.
    posted: u64,
    /// Every work request below this number has ended.
    ended: u64,
    unsignalled: u32,
    agreement: LaneParameters,
    credits: u32,
    owed: u32,
    next_piece: u32,
    expected_piece: u32,
    assembling: Vec<u8>,
    assembling_bytes: usize,
}

impl Lane {
    pub(crate) fn new(queue_max: usize) -> Self {
        Self {
            pair: Pair::Absent,
            identity: None,
            queue: VecDeque::new(),
            in_flight: VecDeque::new(),
            queue_max,
            depth: 0,
            entries_max: 1,
            read_entries_max: 1,
            inline_max: 0,
            posted: 0,
            ended: 0,
            unsignalled: 0,
            agreement: LaneParameters { send_credits: 0, receive_credits: u32::MAX, segment_bytes: 0 },
            credits: 0,
            owed: 0,
            next_piece: 0,
            expected_piece: 0,
            assembling: Vec::new(),
            assembling_bytes: 0,
        }
    }

    /// Allocates all memory that work on this pair will need. `entries` are the maximum entries of a write
    /// and of a read.
    pub(crate) fn reserve_queues<State>(
        &mut self,
        pair: &QueuePair<State>,
        depth: u32,
        entries: (u32, u32),
        inline_bytes: u32,
    ) {
        let capacity = pair.capacity();
        self.identity = Some((pair.number(), pair.raw().addr()));
        self.depth = u64::from(depth.min(capacity.send_requests));
        self.entries_max = entries.0.min(capacity.entries).max(1);
        self.read_entries_max = entries.1.min(capacity.entries).max(1);
        self.inline_max = inline_bytes.min(capacity.inline_bytes) as usize;
        self.queue.reserve_exact(self.queue_max);
        self.in_flight.reserve_exact(depth as usize);
    }

    /// Takes the pair for the thread that executes commands.
    pub(crate) fn take_for_command(&mut self) -> Pair {
        std::mem::replace(&mut self.pair, Pair::InCommand)
    }

    /// Takes the pair for its destruction, if the device ended its work.
    pub(crate) fn take_failed(&mut self) -> Option<QueuePair<Failed>> {
        match self.take_for_command() {
            Pair::Failed(pair) => Some(pair),
            other => {
                self.pair = other;
                None
            }
        }
    }

    pub(crate) fn is_in_command(&self) -> bool {
        matches!(self.pair, Pair::InCommand)
    }

    pub(crate) fn agree(&mut self, agreement: LaneParameters) {
        self.agreement = agreement;
        self.credits = agreement.send_credits;
    }

    pub(crate) fn number(&self) -> Option<u32> {
        self.identity.map(|(number, _)| number)
    }

    /// Clears the identity of a destroyed pair; returns its number.
    pub(crate) fn take_identity(&mut self) -> Option<u32> {
        self.identity.take().map(|(number, _)| number)
    }

    pub(crate) fn is_pair(&self, raw: *const std::ffi::c_void) -> bool {
        self.identity.is_some_and(|(_, address)| address == raw.addr())
    }

    pub(crate) fn has_room(&self) -> bool {
        self.queue.len() < self.queue_max
    }

    pub(crate) fn enqueue(&mut self, id: u64, work: Work) {
        assert!(self.has_room(), "the caller asked");
        self.queue.push_back(Pending { id, work });
    }

    pub(crate) fn has_work(&self) -> bool {
        !self.queue.is_empty() || self.owes_credits()
    }

    fn owes_credits(&self) -> bool {
        self.owed >= (self.agreement.receive_credits / 2).max(1)
    }

    /// Work requests in flight.
    pub(crate) fn outstanding(&self) -> u64 {
        self.posted - self.ended
    }

    /// Retires work request `number` and all before it. Returns how many were retired; `None` when no such
    /// request is in flight.
    pub(crate) fn retire(
        &mut self,
        number: u64,
        completion: Completion,
        bounce_free: &mut Vec<u32>,
        events: &mut VecDeque<Event>,
    ) -> Option<u64> {
        if number < self.ended || number >= self.posted {
            return None;
        }
        let ended = number + 1 - self.ended;
        self.ended = number + 1;
        while self.in_flight.front().is_some_and(|flight| flight.last <= number) {
            let Some(Flight { id, held, .. }) = self.in_flight.pop_front() else { break };
            if let Held::Bounce(buffer) = held {
                bounce_free.push(buffer);
            }
            if id != 0 {
                events.push_back(Event::Completed { id, completion });
            }
        }
        Some(ended)
    }

    /// Counts a receive that the peer has used up and that will be posted again. Using more than were
    /// granted is an error.
    pub(crate) fn count_used_receive(&mut self) -> Result<(), &'static str> {
        if self.owed >= self.agreement.receive_credits {
            return Err("the peer used more receives than it had credits for");
        }
        self.owed += 1;
        Ok(())
    }

    /// Adds receives that the peer has returned. Returning more than were used is an error.
    pub(crate) fn earn(&mut self, credits: u16) -> Result<(), &'static str> {
        let credits = self.credits + u32::from(credits);
        if credits > self.agreement.send_credits {
            return Err("the peer returned more credits than were used");
        }
        self.credits = credits;
        Ok(())
    }

    /// Adds a piece to the message in assembly; `copy` fills a slice with its payload. Returns the message
    /// when it is complete.
    pub(crate) fn assemble(
        &mut self,
        segment: &Segment,
        payload: usize,
        copy: impl FnOnce(&mut [u8]),
    ) -> Result<Option<Box<[u8]>>, &'static str> {
        if segment.number != self.expected_piece {
            return Err("a piece is missing");
        }
        self.expected_piece = self.expected_piece.wrapping_add(1);
        let (offset, total) = (segment.offset as usize, segment.message_bytes as usize);
        if offset != self.assembling.len() || (offset > 0 && total != self.assembling_bytes) {
            return Err("a piece of another message");
        }
        if offset == 0 {
            self.assembling_bytes = total;
            self.assembling.reserve_exact(total);
        }
        self.assembling.resize(offset + payload, 0);
        copy(&mut self.assembling[offset..]);
        if self.assembling.len() < total {
            return Ok(None);
        }
        Ok(Some(std::mem::take(&mut self.assembling).into_boxed_slice()))
    }

    /// Whether the device kept a pair that it was told to end, or may have kept it because a command for it
    /// never came back.
    pub(crate) fn is_leaked(&self) -> bool {
        matches!(self.pair, Pair::Leaked | Pair::InCommand)
    }

    /// Drops the requests in flight and in the queue when the pair is destroyed. Returns the number of work
    /// requests that had not ended and never will. If the device kept the pair, the memory that it may
    /// access is leaked, and its work requests may still complete.
    pub(crate) fn give_up(&mut self, bounce_free: &mut Vec<u32>, events: &mut VecDeque<Event>) -> u64 {
        let is_gone = !self.is_leaked();
        let lost = if is_gone { self.outstanding() } else { 0 };
        let mut ids = Vec::new();
        for Flight { id, held, .. } in self.in_flight.drain(..) {
            ids.push(id);
            match held {
                Held::Bounce(buffer) if is_gone => bounce_free.push(buffer),
                held if !is_gone => std::mem::forget(held),
                _ => {}
            }
        }
        for Pending { id, work } in self.queue.drain(..) {
            ids.push(id);
            if !is_gone {
                std::mem::forget(work);
            }
        }
        let completed = ids.into_iter().filter(|&id| id != 0);
        events.extend(completed.map(|id| Event::Completed { id, completion: Completion::PeerDown }));
        self.ended = self.posted;
        lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane() -> Lane {
        let mut lane = Lane::new(4);
        lane.agree(LaneParameters { send_credits: 4, receive_credits: 3, segment_bytes: 64 });
        lane
    }

    fn piece(number: u32, message_bytes: u32, offset: u32) -> Segment {
        Segment { carries_message: true, credits: 0, number, message_bytes, offset }
    }

    #[test]
    fn a_peer_cannot_return_or_use_more_receives_than_there_are() {
        let mut lane = lane();
        assert!(lane.earn(1).is_err(), "none was used");
        lane.credits = 1;
        assert_eq!((lane.earn(3), lane.credits), (Ok(()), 4));
        for _ in 0..3 {
            assert_eq!(lane.count_used_receive(), Ok(()));
        }
        assert!(lane.owes_credits());
        assert!(lane.count_used_receive().is_err(), "a fourth of three");
    }

    #[test]
    fn pieces_make_messages_in_their_order_only() {
        let mut lane = lane();
        let copy = |bytes: &mut [u8]| bytes.fill(5);
        assert_eq!(lane.assemble(&piece(0, 5, 0), 3, copy), Ok(None));
        assert_eq!(lane.assemble(&piece(1, 5, 3), 2, copy), Ok(Some([5; 5].into())));
        assert_eq!(lane.assemble(&piece(2, 0, 0), 0, copy), Ok(Some([].into())), "an empty message");
        assert!(lane.assemble(&piece(4, 1, 0), 1, copy).is_err(), "number three is missing");
        for (first, second) in [((0, 5, 0), (1, 5, 0)), ((0, 5, 0), (1, 6, 3)), ((0, 5, 0), (1, 5, 4))] {
            let mut lane = self::lane();
            assert_eq!(lane.assemble(&piece(first.0, first.1, first.2), 3, copy), Ok(None));
            assert!(lane.assemble(&piece(second.0, second.1, second.2), 1, copy).is_err(), "{second:?}");
        }
    }

    /// Completions of numbers that were never posted, or have ended, retire nothing.
    #[test]
    fn only_what_is_in_flight_is_retired() {
        let (mut lane, mut free, mut events) = (lane(), Vec::new(), VecDeque::new());
        lane.posted = 4;
        for (last, id, held) in [(0, 7, Held::Nothing), (2, 0, Held::Bounce(3)), (3, 9, Held::Nothing)] {
            lane.in_flight.push_back(Flight { last, id, held });
        }
        assert_eq!(lane.retire(4, Completion::Done, &mut free, &mut events), None);
        assert_eq!(lane.retire(2, Completion::Done, &mut free, &mut events), Some(3));
        assert_eq!((&free[..], events.len(), lane.outstanding()), (&[3][..], 1, 1));
        assert_eq!(lane.retire(2, Completion::Done, &mut free, &mut events), None);
        assert_eq!(lane.give_up(&mut free, &mut events), 1);
        assert_eq!(events[1], Event::Completed { id: 9, completion: Completion::PeerDown });
    }

    #[test]
    fn what_a_leaked_pair_may_touch_is_never_given_back() {
        let (mut lane, mut free, mut events) = (lane(), Vec::new(), VecDeque::new());
        (lane.pair, lane.posted) = (Pair::Leaked, 2);
        for (last, held) in [(0, Held::Bounce(3)), (1, Held::Bounce(4))] {
            lane.in_flight.push_back(Flight { last, id: 7 + last, held });
        }
        assert!(lane.is_leaked());
        assert_eq!(lane.retire(0, Completion::Done, &mut free, &mut events), Some(1));
        assert_eq!(free, [3], "of this one the device has said that it is done");
        assert_eq!((lane.give_up(&mut free, &mut events), &free[..]), (0, &[3][..]));
        assert_eq!(events[1], Event::Completed { id: 8, completion: Completion::PeerDown });
    }
}
