//! Batches of one-sided writes and reads that no protocol between the nodes accompanies: offload to another
//! node's memory, a remote tier's reads, replication.
//!
//! The caller names the peer's slots itself and says how urgent a batch is. The mover cuts large pieces, keeps the
//! bytes in flight to each peer within a window, lets background batches through only while nothing urgent is in
//! flight to the same peer, and answers for each batch exactly once: when its last posted piece has completed,
//! so that the caller may reuse the slots whatever the outcome is.
//!
//! A cancelled or late batch posts nothing more and waits for what is posted. A peer that does not complete within
//! [`ABANDON_AFTER`] then is disconnected, which completes it.
//!
//! Driven by the transfer thread, with time as an argument; commands and answers cross threads in
//! [`crate::flight`]. Per piece: no allocation, no lock. A read into a device's memory ends with a call of
//! [`DeviceMemory::settle`](dataplane_memory::DeviceMemory::settle) for each slab, once for the batch.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::{
    Completion, Fabric, Full, Operation, PeerId, Priority, Rows, SlotRange, Source, Target, WorkRequest,
};
use dataplane_memory::Slab;

use crate::config::Limits;
use crate::flight::{FlightTable, MoveOutcome, Ticket};
use crate::pieces::front_of;

/// Completion ids of moves have this bit; the hand-off's have not.
pub(crate) const MOVE_BIT: u64 = 1 << 63;
/// How long a batch that shall stop waits for its posted pieces before its peer is disconnected.
const ABANDON_AFTER: Duration = Duration::from_secs(2);

/// Which way the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From our slots to the peer's.
    Write,
    /// From the peer's slots to ours.
    Read,
}

/// Some bytes of one slot here and one there.
#[derive(Debug, Clone)]
pub struct Piece {
    /// Here. Kept alive until the batch is over. In a device's memory only over a fabric that reaches it; refused else.
    pub local: SlotRange,
    /// There.
    pub remote: Target,
    /// How the bytes lie; `None`: in one piece on both sides.
    pub rows: Option<Rows>,
}

impl Piece {
    fn is_sensible(&self) -> bool {
        let SlotRange { slot, offset, len } = &self.local;
        let spans = match self.rows {
            None => Some((*len, *len)),
            Some(rows) if rows.is_valid(*len) => {
                rows.span(*len, rows.local_stride).zip(rows.span(*len, rows.remote_stride))
            }
            Some(_) => None,
        };
        *len > 0
            && spans.is_some_and(|(here, there)| {
                slot.slab().contains(slot.slot(), *offset as usize, here as usize)
                    && self.remote.offset.checked_add(there).is_some()
            })
    }

    /// Takes at most about `bytes` off the front; `None` when that is the whole piece.
    fn split(&mut self, bytes: u32) -> Option<Self> {
        let step = front_of(self.local.len, self.rows, bytes)?;
        let mut front = self.clone();
        front.local.len = step.bytes;
        self.local.len -= step.bytes;
        self.local.offset += step.local;
        self.remote.offset += step.remote;
        Some(front)
    }

    /// Joins `next` to this piece when it goes on where this ends, on both sides.
    fn merge(&mut self, next: &Self) -> bool {
        let same = self.local.slot.slot() == next.local.slot.slot()
            && Arc::ptr_eq(self.local.slot.slab(), next.local.slot.slab())
            && (self.remote.slot, self.remote.generation) == (next.remote.slot, next.remote.generation);
        let adjacent = self.rows.is_none()
            && next.rows.is_none()
            && self.local.offset + self.local.len == next.local.offset
            && self.remote.offset.checked_add(self.local.len) == Some(next.remote.offset);
        if same && adjacent {
            self.local.len += next.local.len;
        }
        same && adjacent
    }

    fn operation(self, direction: Direction) -> Operation {
        let Self { local, remote, rows } = self;
        match direction {
            Direction::Read => Operation::Read { into: local, from: remote, rows },
            Direction::Write => {
                let source = Source::Slot { slot: local.slot, offset: local.offset, len: local.len };
                Operation::Write { source, target: remote, rows, immediate: None }
            }
        }
    }
}

/// What to move, as its owner submits it.
#[derive(Debug)]
pub struct Batch {
    /// The peer, in the fabric's notation.
    pub address: String,
    /// Which way.
    pub direction: Direction,
    /// Whether somebody waits.
    pub priority: Priority,
    /// Neighbours in this list that are neighbours in memory, here and there, are moved as one.
    pub pieces: Vec<Piece>,
    /// When to stop.
    pub deadline: Instant,
}

#[derive(Debug)]
struct Moving {
    ticket: Ticket,
    peer: PeerId,
    direction: Direction,
    priority: Priority,
    pieces: VecDeque<Piece>,
    deadline: Instant,
    /// Slabs in a device's memory that a read brings bytes to.
    landing: Vec<Arc<Slab>>,
    /// Work requests posted and not completed.
    in_flight: u32,
    /// Set once it shall not go on; with when its peer is given up.
    stopping: Option<(MoveOutcome, Instant)>,
}

#[derive(Debug, Default)]
struct Window {
    bytes: [u64; Priority::ALL.len()],
}

/// The batches under way.
#[derive(Debug)]
pub(crate) struct Mover {
    table: Arc<FlightTable>,
    limits: Limits,
    moves: HashMap<u32, Moving>,
    /// Moves with something to post, oldest first, by lane.
    waiting: [VecDeque<u32>; Priority::ALL.len()],
    windows: HashMap<PeerId, Window>,
    /// Posted pieces: completion id to (move, bytes).
    posted: HashMap<u64, (u32, u32)>,
    next_move: u32,
    next_id: u64,
    ended: Vec<(Ticket, MoveOutcome)>,
}

impl Mover {
    pub(crate) fn new(limits: Limits, table: Arc<FlightTable>) -> Self {
        Self {
            table,
            limits,
            moves: HashMap::with_capacity(limits.moves_max),
            waiting: Default::default(),
            windows: HashMap::new(),
            posted: HashMap::with_capacity(1024),
            next_move: 0,
            next_id: MOVE_BIT,
            ended: Vec::new(),
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.moves.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.moves.len()
    }

    /// Whether something waits for room or for a window: nobody rings when there is room again.
    pub(crate) fn has_backlog(&self) -> bool {
        self.waiting.iter().any(|queue| !queue.is_empty())
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.moves.values().map(|moving| moving.stopping.map_or(moving.deadline, |(_, at)| at)).min()
    }

    /// Takes a batch; `peer` is `None` when there is no way to its address.
    pub(crate) fn start(&mut self, ticket: Ticket, batch: Batch, peer: Result<PeerId, MoveOutcome>) {
        let peer = match peer {
            Ok(_) if !batch.pieces.iter().all(Piece::is_sensible) => Err(MoveOutcome::Refused),
            other => other,
        };
        let peer = match peer {
            Ok(peer) if !batch.pieces.is_empty() => peer,
            Ok(_) => return self.end(ticket, MoveOutcome::Done),
            Err(outcome) => return self.end(ticket, outcome),
        };
        let landing = landing(&batch);
        let mut pieces: VecDeque<Piece> = VecDeque::with_capacity(batch.pieces.len());
        for piece in batch.pieces {
            if !pieces.back_mut().is_some_and(|last| last.merge(&piece)) {
                pieces.push_back(piece);
            }
        }
        let number = self.next_move;
        self.next_move = self.next_move.wrapping_add(1);
        let (direction, priority, deadline) = (batch.direction, batch.priority, batch.deadline);
        let (in_flight, stopping) = (0, None);
        let moving =
            Moving { ticket, peer, direction, priority, pieces, deadline, landing, in_flight, stopping };
        self.moves.insert(number, moving);
        self.waiting[priority.index()].push_back(number);
    }

    fn end(&mut self, ticket: Ticket, outcome: MoveOutcome) {
        self.table.end(ticket, outcome);
        self.ended.push((ticket, outcome));
    }

    /// Posts what the windows and the fabric take. `may_post` says whether a peer is connected, and for background moves
    /// whether nothing more urgent is under way to it.
    pub(crate) fn pump<F: Fabric>(&mut self, fabric: &mut F, may_post: impl Fn(PeerId, Priority) -> bool) {
        for priority in Priority::ALL {
            for _ in 0..self.waiting[priority.index()].len() {
                let Some(number) = self.waiting[priority.index()].pop_front() else { break };
                if self.pump_one(number, fabric, &may_post) {
                    self.waiting[priority.index()].push_back(number);
                }
            }
        }
    }

    /// Posts pieces of one move; true while it has more.
    fn pump_one<F: Fabric>(
        &mut self,
        number: u32,
        fabric: &mut F,
        may_post: &impl Fn(PeerId, Priority) -> bool,
    ) -> bool {
        let Some(moving) = self.moves.get_mut(&number) else { return false };
        if moving.stopping.is_some() {
            return false;
        }
        if !may_post(moving.peer, moving.priority) {
            return true;
        }
        let window = self.windows.entry(moving.peer).or_default();
        while let Some(front) = moving.pieces.front_mut() {
            if !has_room(&self.limits, window, moving.priority) {
                return true;
            }
            let split = front.split(self.limits.slice_bytes);
            let whole = split.is_none();
            let piece = split.unwrap_or_else(|| front.clone());
            let (bytes, id) = (piece.local.len, self.next_id);
            let (priority, operation) = (moving.priority, piece.operation(moving.direction));
            if let Err(Full(refused)) =
                fabric.post(WorkRequest { id, peer: moving.peer, priority, operation })
            {
                if !whole {
                    put_back(front, refused);
                }
                return true;
            }
            self.next_id = (self.next_id + 1) | MOVE_BIT;
            self.posted.insert(id, (number, bytes));
            window.bytes[priority.index()] += u64::from(bytes);
            moving.in_flight += 1;
            if whole {
                moving.pieces.pop_front();
            }
        }
        false
    }

    /// A completion; false when the id is none of ours.
    pub(crate) fn completed(&mut self, id: u64, completion: Completion, now: Instant) -> bool {
        if id & MOVE_BIT == 0 {
            return false;
        }
        let Some((number, bytes)) = self.posted.remove(&id) else { return true };
        let Some(moving) = self.moves.get_mut(&number) else { return true };
        moving.in_flight -= 1;
        if let Some(window) = self.windows.get_mut(&moving.peer) {
            window.bytes[moving.priority.index()] -= u64::from(bytes);
        }
        if completion == Completion::PeerDown && moving.stopping.is_none() {
            moving.stopping = Some((MoveOutcome::PeerDown, now + ABANDON_AFTER));
            moving.pieces.clear();
        }
        self.settle(number);
        true
    }

    /// Ends the move if nothing of it is in flight and nothing more will be.
    fn settle(&mut self, number: u32) {
        let Some(moving) = self.moves.get(&number) else { return };
        if moving.in_flight > 0 || (moving.stopping.is_none() && !moving.pieces.is_empty()) {
            return;
        }
        let outcome = moving.stopping.map_or_else(|| landed(&moving.landing), |(outcome, _)| outcome);
        let ticket = moving.ticket;
        self.moves.remove(&number);
        self.end(ticket, outcome);
    }

    /// Stops what was cancelled or is late. Returns the peers that hold up a stop for too long.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<PeerId> {
        let mut stuck = Vec::new();
        let mut stopped = Vec::new();
        for (&number, moving) in &mut self.moves {
            let reason = if self.table.is_cancelled(moving.ticket) {
                Some(MoveOutcome::Cancelled)
            } else {
                (moving.deadline <= now).then_some(MoveOutcome::Deadline)
            };
            match (&mut moving.stopping, reason) {
                (None, Some(outcome)) => {
                    moving.stopping = Some((outcome, now + ABANDON_AFTER));
                    moving.pieces.clear();
                    stopped.push(number);
                }
                (Some((_, give_up)), _) if *give_up <= now => {
                    *give_up = now + ABANDON_AFTER;
                    stuck.push(moving.peer);
                }
                _ => {}
            }
        }
        stopped.into_iter().for_each(|number| self.settle(number));
        stuck.sort_unstable();
        stuck.dedup();
        stuck
    }

    /// The connection is over; its posted pieces have completed already.
    pub(crate) fn peer_down(&mut self, peer: PeerId, now: Instant) {
        self.windows.remove(&peer);
        let lost: Vec<u32> =
            self.moves.iter().filter(|(_, moving)| moving.peer == peer).map(|(&number, _)| number).collect();
        for number in lost {
            if let Some(moving) = self.moves.get_mut(&number) {
                moving.pieces.clear();
                moving.stopping.get_or_insert((MoveOutcome::PeerDown, now + ABANDON_AFTER));
            }
            self.settle(number);
        }
    }

    /// What has ended since the last call.
    pub(crate) fn drain_ended(&mut self) -> impl Iterator<Item = (Ticket, MoveOutcome)> + '_ {
        self.ended.drain(..)
    }
}

impl Drop for Mover {
    /// Whoever waits for a batch of a node that is gone is told.
    fn drop(&mut self) {
        for moving in self.moves.values() {
            self.table.end(moving.ticket, MoveOutcome::PeerDown);
        }
    }
}

/// The slabs in devices' memory that the batch brings bytes to, each once.
fn landing(batch: &Batch) -> Vec<Arc<Slab>> {
    let mut slabs: Vec<Arc<Slab>> = Vec::new();
    if batch.direction == Direction::Read {
        for slab in batch.pieces.iter().map(|piece| piece.local.slot.slab()) {
            if slab.device().is_some() && !slabs.iter().any(|known| Arc::ptr_eq(known, slab)) {
                slabs.push(Arc::clone(slab));
            }
        }
    }
    slabs
}

/// The outcome of a batch whose bytes have all landed.
fn landed(slabs: &[Arc<Slab>]) -> MoveOutcome {
    let unsettled = slabs.iter().find_map(|slab| slab.device()?.settle().err());
    let Some(error) = unsettled else { return MoveOutcome::Done };
    tracing::warn!(%error, "transfer: bytes are in a device's memory, and its kernels may not see them");
    MoveOutcome::Unsettled
}

/// Whether one more piece may be posted: a window is overdrawn by at most one slice.
fn has_room(limits: &Limits, window: &Window, priority: Priority) -> bool {
    let [urgent, background] = window.bytes;
    match priority {
        Priority::Urgent => urgent < limits.urgent_window_bytes,
        Priority::Background => urgent == 0 && background < limits.background_window_bytes,
    }
}

/// Undoes a split whose front the fabric did not take.
fn put_back(rest: &mut Piece, refused: WorkRequest) {
    let (local, remote) = match refused.operation {
        Operation::Read { into, from, .. } => (into, from),
        Operation::Write { source: Source::Slot { slot, offset, len }, target, .. } => {
            (SlotRange { slot, offset, len }, target)
        }
        Operation::Write { .. } | Operation::Send { .. } => return,
    };
    rest.local.len += local.len;
    rest.local.offset = local.offset;
    rest.remote.offset = remote.offset;
}

#[cfg(test)]
mod tests {
    use dataplane_fabric::testing::pool;
    use dataplane_memory::testing::{Abilities, DeviceDouble};
    use dataplane_memory::{SlabLayout, SlotPool};

    use super::*;

    #[test]
    fn neighbours_merge_and_large_pieces_are_cut() {
        let pool = pool("moves");
        let slot = pool.acquire().expect("a slot");
        let piece = |offset: u32, len: u32, there: u32| Piece {
            local: SlotRange { slot: slot.clone(), offset, len },
            remote: Target { slot: 3, generation: 1, offset: there },
            rows: None,
        };
        let mut first = piece(0, 4096, 100);
        assert!(first.merge(&piece(4096, 4096, 4196)), "adjacent on both sides");
        assert!(!first.merge(&piece(8192, 4096, 9000)), "not there");
        assert!(!first.merge(&piece(9000, 4096, 8292)), "not here");
        assert_eq!(first.local.len, 8192);
        let front = first.split(3000).expect("larger than a slice");
        assert_eq!((front.local.len, front.remote.offset), (3000, 100));
        assert_eq!((first.local.offset, first.local.len, first.remote.offset), (3000, 5192, 3100));
        assert!(first.split(5192).is_none(), "fits");

        let rows = Rows { bytes: 100, local_stride: 300, remote_stride: 200 };
        let mut strided = Piece { rows: Some(rows), ..piece(10, 1000, 20) };
        assert!(strided.is_sensible());
        let front = strided.split(350).expect("three rows");
        assert_eq!(front.local.len, 300);
        assert_eq!((strided.local.offset, strided.local.len, strided.remote.offset), (910, 700, 620));
        assert!(!Piece { rows: Some(rows), ..piece(0, 1050, 0) }.is_sensible(), "half a row");
        assert!(!piece(0, u32::MAX, 0).is_sensible(), "beyond the slot");
        assert!(!piece(0, 0, 0).is_sensible(), "nothing");
    }

    /// Without a fabric: the pieces are taken as posted, and completed by hand.
    #[test]
    fn a_read_into_a_device_is_done_when_the_device_has_settled() {
        let layout = SlabLayout { slot_bytes: 4096, slot_count: 2 };
        let memory = DeviceDouble::new(layout.slots_bytes(), Abilities::default());
        let slab = Slab::on_device("device", layout, Arc::clone(&memory) as _).expect("slab");
        let device = SlotPool::new(Arc::new(slab));
        let (host, now) = (pool("host"), Instant::now());
        let table = Arc::new(FlightTable::new(8));
        let mut mover = Mover::new(Limits::default(), Arc::clone(&table));
        let mut run = |direction, pools: &[&Arc<SlotPool>], dies: bool| {
            let piece = |pool: &Arc<SlotPool>| Piece {
                local: SlotRange { slot: pool.acquire().expect("a slot"), offset: 0, len: 64 },
                remote: Target { slot: 3, generation: 1, offset: 0 },
                rows: None,
            };
            let pieces: Vec<Piece> = pools.iter().map(|pool| piece(pool)).collect();
            let (address, priority) = ("1".to_owned(), Priority::Urgent);
            let batch = Batch { address, direction, priority, pieces, deadline: now + ABANDON_AFTER };
            let (ticket, number) = (table.open().expect("an entry"), mover.next_move);
            mover.start(ticket, batch, Ok(PeerId(0)));
            let moving = mover.moves.get_mut(&number).expect("under way");
            (moving.in_flight, _) = (1, moving.pieces.clear());
            let before = memory.settled_count();
            if dies {
                memory.kill();
            }
            mover.posted.insert(MOVE_BIT, (number, 64));
            mover.windows.entry(PeerId(0)).or_default().bytes[priority.index()] += 64;
            assert!(mover.completed(MOVE_BIT, Completion::Done, now));
            (table.outcome(ticket), memory.settled_count() - before)
        };
        let done = Some(MoveOutcome::Done);
        assert_eq!(run(Direction::Read, &[&device, &host, &device], false), (done, 1), "once for the slab");
        assert_eq!(run(Direction::Read, &[&host], false), (done, 0));
        assert_eq!(run(Direction::Write, &[&device], false), (done, 0), "nothing has landed here");
        assert_eq!(run(Direction::Read, &[&device], true), (Some(MoveOutcome::Unsettled), 0));
    }
}
