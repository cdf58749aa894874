//! The contract of [`Fabric`], as a test that every transport runs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_memory::{PageSize, Slab, SlabKind, SlabLayout, SlotPool, SlotRef};

use crate::wait::{Notifier, WaitPolicy, Waiter};
use crate::{
    Completion, Event, Fabric, Full, MESSAGE_BYTES_MAX, Operation, PeerId, Priority, Rows, SlotRange, Source,
    Target, WorkRequest,
};

/// Bytes of a slot in the pools of these tests.
pub const SLOT_BYTES: usize = 128 << 10;
/// Slots of the pools of these tests.
pub const LAYOUT: SlabLayout = SlabLayout { slot_bytes: SLOT_BYTES, slot_count: 16 };
const PATIENCE: Duration = Duration::from_secs(10);

/// Two nodes that can reach each other.
pub struct Pair {
    /// The node that connects. `None` once a test has killed it.
    pub a: Option<Box<dyn Fabric>>,
    /// The node that is connected to. `None` once a test has killed it.
    pub b: Option<Box<dyn Fabric>>,
    /// The slots of `a` that `b` may write.
    pub pool_a: Arc<SlotPool>,
    /// The slots of `b` that `a` may write.
    pub pool_b: Arc<SlotPool>,
    /// The address that `a` passes to `connect`.
    pub address_of_b: String,
    /// Advances the time where the transport simulates it.
    pub tick: Box<dyn FnMut()>,
}

/// Creates a slot pool for tests.
#[must_use]
pub fn pool(name: &str) -> Arc<SlotPool> {
    SlotPool::new(Arc::new(Slab::create(name, LAYOUT, PageSize::Standard).expect("a small slab")))
}

/// Sleeps once, as the thread of a node does after [`Fabric::prepare_wait`].
pub fn sleep(fabric: &impl Fabric, until: Option<Instant>) {
    Waiter::new(Notifier::new().expect("an eventfd"), WaitPolicy::default()).sleep(fabric, until);
}

struct Connected {
    pair: Pair,
    to_b: PeerId,
    to_a: PeerId,
    seen_a: Vec<Event>,
    seen_b: Vec<Event>,
}

impl Connected {
    fn new(mut pair: Pair) -> Self {
        let to_b = pair.a.as_mut().expect("a").connect(&pair.address_of_b).expect("connect starts");
        let mut this = Self { pair, to_b, to_a: PeerId(0), seen_a: Vec::new(), seen_b: Vec::new() };
        this.until("connected and accepted", |this| {
            let accepted = this.seen_b.iter().find_map(|event| match event {
                Event::Accepted { peer } => Some(*peer),
                _ => None,
            });
            this.to_a = accepted.unwrap_or(PeerId(0));
            accepted.is_some() && this.seen_a.contains(&Event::Connected { peer: this.to_b })
        });
        this.seen_a.clear();
        this.seen_b.clear();
        this
    }

    fn step(&mut self) {
        (self.pair.tick)();
        if let Some(a) = &mut self.pair.a {
            a.flush();
            a.poll(64, &mut self.seen_a);
        }
        if let Some(b) = &mut self.pair.b {
            b.flush();
            b.poll(64, &mut self.seen_b);
        }
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        loop {
            self.step();
            if done(self) {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "never: {what}\na: {:?}\nb: {:?}", self.seen_a, self.seen_b);
        }
    }

    /// Posts from `a`, polling while the queue is full.
    fn post(&mut self, id: u64, operation: Operation) {
        self.post_on(Priority::Urgent, id, operation);
    }

    fn post_on(&mut self, priority: Priority, id: u64, operation: Operation) {
        let mut request = WorkRequest { id, peer: self.to_b, priority, operation };
        let start = Instant::now();
        while let Err(Full(back)) = self.pair.a.as_mut().expect("a").post(request) {
            request = back;
            self.step();
            assert!(start.elapsed() < PATIENCE, "the queue stays full");
        }
    }
}

fn completed(events: &[Event], id: u64) -> Option<Completion> {
    events.iter().find_map(|event| match event {
        Event::Completed { id: done, completion } if *done == id => Some(*completion),
        _ => None,
    })
}

/// Returns the position of a slot's byte in its device's memory.
fn offset_in_device(slot: &SlotRef, offset: usize) -> usize {
    slot.slot() as usize * slot.slab().layout().stride() + offset
}

/// Writes bytes of a slot in host or device memory.
fn put(slot: &SlotRef, offset: usize, bytes: &[u8]) {
    match slot.slab().device() {
        Some(device) => device.write(offset_in_device(slot, offset), bytes).expect("inside"),
        None => slot.slab().write(slot.slot(), offset, bytes),
    }
}

/// Reads bytes of a slot in host or device memory.
fn take(slot: &SlotRef, offset: usize, bytes: &mut [u8]) {
    match slot.slab().device() {
        Some(device) => device.read(offset_in_device(slot, offset), bytes).expect("inside"),
        None => slot.slab().read(slot.slot(), offset, bytes),
    }
}

/// Runs the whole contract. `make` returns a fresh pair for each clause.
pub fn conformance(make: &mut dyn FnMut() -> Pair) {
    writes_land_before_their_immediate(Connected::new(make()));
    messages_of_every_size_arrive_in_order(Connected::new(make()));
    both_directions_at_once(Connected::new(make()));
    rows_land_where_they_belong(Connected::new(make()));
    reads_bring_what_is_there(Connected::new(make()));
    lanes_keep_their_own_order(Connected::new(make()));
    a_stale_generation_changes_nothing(Connected::new(make()));
    a_range_outside_of_the_slot_changes_nothing(Connected::new(make()));
    a_slab_that_the_peer_does_not_show_is_out_of_reach(Connected::new(make()));
    disconnect_completes_and_is_noticed(Connected::new(make()));
    a_dropped_node_is_noticed(Connected::new(make()));
    an_absent_node_is_reported(make());
}

fn writes_land_before_their_immediate(mut pair: Connected) {
    let sizes = [1, 7, 64, 4096, 70_000, SLOT_BYTES];
    for (round, len) in sizes.into_iter().cycle().take(60).enumerate() {
        let fill = round as u8 + 1;
        let source = pair.pair.pool_a.acquire().expect("a slot");
        let target = pair.pair.pool_b.acquire().expect("a slot");
        put(&source, 0, &vec![fill; len]);
        let write = Operation::Write {
            source: Source::Slot { slot: source, offset: 0, len: len as u32 },
            target: Target::of(&target, 0),
            rows: None,
            immediate: Some(round as u32),
        };
        let id = round as u64 + 1;
        pair.post(id, write);
        pair.until("immediate and completion", |pair| {
            pair.seen_b.contains(&Event::Immediate { peer: pair.to_a, value: round as u32 })
                && completed(&pair.seen_a, id).is_some()
        });
        assert_eq!(completed(&pair.seen_a, id), Some(Completion::Done));
        let mut bytes = vec![0; len];
        take(&target, 0, &mut bytes);
        assert!(bytes.iter().all(|&byte| byte == fill), "round {round}, {len} bytes");
        pair.seen_a.clear();
        pair.seen_b.clear();
    }
    assert_eq!(pair.pair.pool_a.used_count(), 0, "completed requests hold no slot");
}

fn messages_of_every_size_arrive_in_order(mut pair: Connected) {
    let largest = pair.pair.a.as_ref().map_or(MESSAGE_BYTES_MAX, |a| a.message_bytes_max());
    let size = |n: usize| if n % 50 == 4 { largest } else { [1, 3, 100, 5000, 5000][n % 5] };
    let sizes: Vec<usize> = (0..300).map(size).collect();
    for (number, &len) in sizes.iter().enumerate() {
        pair.post(0, Operation::Send { message: vec![number as u8; len].into_boxed_slice() });
    }
    pair.until("all messages", |pair| pair.seen_b.len() == sizes.len());
    for (number, (event, len)) in pair.seen_b.iter().zip(sizes).enumerate() {
        let expected =
            Event::Message { peer: pair.to_a, message: vec![number as u8; len].into_boxed_slice() };
        assert!(*event == expected, "message {number} differs");
    }
}

fn both_directions_at_once(mut pair: Connected) {
    for id in 1..=50_u64 {
        pair.post(id, Operation::Send { message: Box::new([1; 900]) });
        let operation = Operation::Send { message: Box::new([2; 900]) };
        let request = WorkRequest { id, peer: pair.to_a, priority: Priority::Urgent, operation };
        while pair.pair.b.as_mut().expect("b").post(request.clone()).is_err() {
            pair.step();
        }
    }
    pair.until("fifty each way", |pair| {
        let messages =
            |events: &[Event]| events.iter().filter(|event| matches!(event, Event::Message { .. })).count();
        messages(&pair.seen_a) == 50 && messages(&pair.seen_b) == 50
    });
}

/// Returns a byte that depends on its position, so that no two rows are equal.
fn pattern(at: usize) -> u8 {
    (at * 31 + at / 251) as u8
}

/// (row bytes, stride of the writer or reader, stride at the peer, rows): a head of each token, one row only,
/// wider gaps at the peer, dense at the peer (a gather), dense here (a scatter), rows that are dense on both
/// sides, many.
const ROWS: [(u32, u32, u32, u32); 7] = [
    (256, 1024, 512, 32),
    (100, 100, 4000, 1),
    (8, 24, 1000, 90),
    (4096, 8192, 4096, 8),
    (512, 512, 2048, 60),
    (1000, 1000, 1000, 10),
    (64, 128, 96, 900),
];

fn rows_land_where_they_belong(mut pair: Connected) {
    for (round, (bytes, local_stride, remote_stride, count)) in ROWS.into_iter().enumerate() {
        let source = pair.pair.pool_a.acquire().expect("a slot");
        let target = pair.pair.pool_b.acquire().expect("a slot");
        let content: Vec<u8> = (0..SLOT_BYTES).map(pattern).collect();
        put(&source, 0, &content);
        put(&target, 0, &vec![0xEE; SLOT_BYTES]);
        let (from, to) = (16_u32, 48_u32);
        let write = Operation::Write {
            source: Source::Slot { slot: source, offset: from, len: bytes * count },
            target: Target::of(&target, to),
            rows: Some(Rows { bytes, local_stride, remote_stride }),
            immediate: Some(round as u32),
        };
        pair.post(round as u64 + 1, write);
        pair.until("the rows", |pair| {
            pair.seen_b.contains(&Event::Immediate { peer: pair.to_a, value: round as u32 })
        });
        let mut expected = vec![0xEE; SLOT_BYTES];
        for row in 0..count {
            for byte in 0..bytes {
                let (there, here) = (to + row * remote_stride + byte, from + row * local_stride + byte);
                expected[there as usize] = content[here as usize];
            }
        }
        let mut found = vec![0; SLOT_BYTES];
        take(&target, 0, &mut found);
        let wrong = found.iter().zip(&expected).position(|(found, expected)| found != expected);
        assert_eq!(wrong, None, "round {round}: first wrong byte of the slot");
    }
}

fn reads_bring_what_is_there(mut pair: Connected) {
    let whole = (SLOT_BYTES as u32, SLOT_BYTES as u32, SLOT_BYTES as u32, 1);
    for (round, (bytes, local_stride, remote_stride, count)) in ROWS.into_iter().chain([whole]).enumerate() {
        let into = pair.pair.pool_a.acquire().expect("a slot");
        let from = pair.pair.pool_b.acquire().expect("a slot");
        let content: Vec<u8> = (0..SLOT_BYTES).map(pattern).collect();
        put(&from, 0, &content);
        put(&into, 0, &vec![0xEE; SLOT_BYTES]);
        let rows = (count > 1).then_some(Rows { bytes, local_stride, remote_stride });
        let offset = if count == 1 { 0 } else { 24 };
        let range = SlotRange { slot: into.clone(), offset, len: bytes * count };
        let target = Target::of(&from, offset * 2);
        let id = round as u64 + 1;
        pair.post(id, Operation::Read { into: range, from: target, rows });
        pair.until("the bytes", |pair| completed(&pair.seen_a, id).is_some());
        assert_eq!(completed(&pair.seen_a, id), Some(Completion::Done), "round {round}");
        let mut expected = vec![0xEE; SLOT_BYTES];
        for row in 0..count {
            for byte in 0..bytes {
                let (here, there) =
                    (offset + row * local_stride + byte, 2 * offset + row * remote_stride + byte);
                expected[here as usize] = content[there as usize];
            }
        }
        let mut found = vec![0; SLOT_BYTES];
        take(&into, 0, &mut found);
        let wrong = found.iter().zip(&expected).position(|(found, expected)| found != expected);
        assert_eq!(wrong, None, "round {round}: first wrong byte of the slot");
    }
    assert_eq!(pair.pair.pool_a.used_count(), 0, "completed reads hold no slot");
}

/// Both lanes are used at once; each delivers in its own order.
fn lanes_keep_their_own_order(mut pair: Connected) {
    for number in 0..200_u32 {
        let priority = Priority::ALL[number as usize % 2];
        let operation = Operation::Send { message: number.to_le_bytes().into() };
        pair.post_on(priority, 0, operation);
    }
    pair.until("all messages", |pair| pair.seen_b.len() == 200);
    let numbers: Vec<u32> = pair
        .seen_b
        .iter()
        .filter_map(|event| match event {
            Event::Message { message, .. } => <[u8; 4]>::try_from(&**message).ok().map(u32::from_le_bytes),
            _ => None,
        })
        .collect();
    for lane in 0..2 {
        let of_lane: Vec<u32> = numbers.iter().copied().filter(|number| number % 2 == lane).collect();
        assert_eq!(of_lane, (0..100).map(|number| number * 2 + lane).collect::<Vec<_>>());
    }
}

fn a_range_outside_of_the_slot_changes_nothing(mut pair: Connected) {
    let source = pair.pair.pool_a.acquire().expect("a slot");
    // The last slot: the bytes behind it belong to no slot.
    let mut slots: Vec<_> = std::iter::from_fn(|| pair.pair.pool_b.acquire()).collect();
    slots.sort_by_key(|slot| slot.slot());
    let last = slots.last().expect("a slot");
    let beyond = Target { slot: last.slot() + 1, ..Target::of(last, SLOT_BYTES as u32 - 8) };
    let source = Source::Slot { slot: source, offset: 0, len: 4096 };
    pair.post(1, Operation::Write { source, target: beyond, rows: None, immediate: Some(1) });
    pair.until("the connection to end", |pair| {
        pair.seen_a.iter().any(|event| matches!(event, Event::PeerDown { .. }))
    });
    assert!(!pair.seen_b.iter().any(|event| matches!(event, Event::Immediate { .. })));
    assert_eq!(completed(&pair.seen_a, 1), Some(Completion::PeerDown));
}

fn a_slab_that_the_peer_does_not_show_is_out_of_reach(mut pair: Connected) {
    let (source, to_b, to_a) = (pair.pair.pool_a.acquire().expect("a slot"), pair.to_b, pair.to_a);
    let target = pair.pair.pool_b.acquire().expect("a slot");
    let (Some(a), Some(b)) = (&pair.pair.a, &pair.pair.b) else { return };
    assert!(a.shows_slab(source.slab()) && a.carries(source.slab()) && !a.shows_slab(target.slab()));
    let mut absent = None;
    for kind in SlabKind::ALL {
        let is_shown = b.shown_slab(kind).is_some();
        assert_eq!((b.is_shown_to(to_a, kind), a.peer_shows(to_b, kind)), (is_shown, is_shown), "{kind:?}");
        assert_eq!(a.reaches(to_b, Some(source.slab()), kind), is_shown, "{kind:?}");
        absent = absent.or((!is_shown).then_some(kind));
    }
    let Some(absent) = absent else { return };
    put(&target, 0, &[5; 64]);
    let source = Source::Slot { slot: source, offset: 0, len: 64 };
    let elsewhere = Target { slab: absent, ..Target::of(&target, 0) };
    pair.post(1, Operation::Write { source, target: elsewhere, rows: None, immediate: Some(1) });
    pair.until("the connection to end", |pair| {
        pair.seen_a.iter().any(|event| matches!(event, Event::PeerDown { .. }))
    });
    let mut bytes = [0; 64];
    take(&target, 0, &mut bytes);
    assert_eq!(bytes, [5; 64], "the slot of the same number in another slab was written");
    assert_eq!(completed(&pair.seen_a, 1), Some(Completion::PeerDown));
}

fn a_stale_generation_changes_nothing(mut pair: Connected) {
    if pair.pair.a.as_ref().is_some_and(|a| !a.checks_generations()) {
        return; // See clause 4.
    }
    let source = pair.pair.pool_a.acquire().expect("a slot");
    put(&source, 0, &[9; 64]);
    let target = pair.pair.pool_b.acquire().expect("a slot");
    put(&target, 0, &[5; 64]);
    let stale = Target { generation: target.generation().wrapping_sub(1), ..Target::of(&target, 0) };
    let source = Source::Slot { slot: source, offset: 0, len: 64 };
    pair.post(1, Operation::Write { source, target: stale, rows: None, immediate: Some(1) });
    pair.until("the connection to end", |pair| {
        pair.seen_a.iter().any(|event| matches!(event, Event::PeerDown { .. }))
    });
    let mut bytes = [0; 64];
    take(&target, 0, &mut bytes);
    assert_eq!(bytes, [5; 64], "a stale write changed the slot");
    assert!(!pair.seen_b.iter().any(|event| matches!(event, Event::Immediate { .. })));
}

fn disconnect_completes_and_is_noticed(mut pair: Connected) {
    let slot = pair.pair.pool_a.acquire().expect("a slot");
    let target = pair.pair.pool_b.acquire().expect("a slot");
    let target = Target::of(&target, 0);
    let source = Source::Slot { slot, offset: 0, len: SLOT_BYTES as u32 };
    pair.post(7, Operation::Write { source, target, rows: None, immediate: None });
    let to_b = pair.to_b;
    pair.pair.a.as_mut().expect("a").disconnect(to_b);
    pair.until("completion and end here, news there", |pair| {
        completed(&pair.seen_a, 7).is_some()
            && pair.seen_a.iter().any(|event| matches!(event, Event::PeerDown { .. }))
            && pair.seen_b.iter().any(|event| matches!(event, Event::PeerDown { .. }))
    });
    assert_eq!(pair.pair.pool_a.used_count(), 0, "ended requests hold no slot");
    let operation = Operation::Send { message: Box::new([1]) };
    let refused = WorkRequest { id: 8, peer: to_b, priority: Priority::Urgent, operation };
    assert!(pair.pair.a.as_mut().expect("a").post(refused).is_err(), "a closed connection takes nothing");
}

fn a_dropped_node_is_noticed(mut pair: Connected) {
    drop(pair.pair.b.take());
    pair.until("news of the death", |pair| {
        pair.seen_a.iter().any(|event| matches!(event, Event::PeerDown { peer, .. } if *peer == pair.to_b))
    });
}

fn an_absent_node_is_reported(mut pair: Pair) {
    drop(pair.b.take());
    let a = pair.a.as_mut().expect("a");
    let start = Instant::now();
    let Ok(peer) = a.connect(&pair.address_of_b) else { return };
    let mut events = Vec::new();
    while !events.iter().any(|event| matches!(event, Event::PeerDown { peer: down, .. } if *down == peer)) {
        (pair.tick)();
        a.poll(16, &mut events);
        assert!(start.elapsed() < PATIENCE, "no news of a peer that is not there: {events:?}");
    }
}
