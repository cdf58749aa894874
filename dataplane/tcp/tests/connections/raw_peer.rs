//! A peer made of plain sockets, which misbehaves at moments that a real peer does not reach.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use dataplane_fabric::auth::SharedKey;
use dataplane_fabric::{Event, Fabric};
use dataplane_tcp::{TcpConfig, TcpFabric};

use crate::nodes::{PATIENCE, content, header, hello, is_down, listening, pool, say_hello};

const MESSAGE: u8 = 2;
const WRITE: u8 = 3;
const READ: u8 = 5;
const FENCE: u8 = 8;
const WITH_IMMEDIATE: u8 = 1;

/// Opens the connections of both lanes and returns them, the urgent lane's first.
fn join(node: &mut TcpFabric, per_lane: u8) -> Vec<TcpStream> {
    let address = node.listening_on().expect("bound");
    let places = (0..2).flat_map(|lane| (0..per_lane).map(move |index| (lane, index)));
    let (mut events, key) = (Vec::new(), SharedKey::default());
    let mut streams: Vec<TcpStream> = places
        .map(|(lane, index)| {
            let mut stream = TcpStream::connect(address).expect("connect");
            stream.set_nodelay(true).expect("nodelay");
            let proofs = say_hello(node, &mut stream, &hello(11, lane, index, per_lane), &key, &mut events);
            assert!(proofs.is_some());
            stream
        })
        .collect();
    events.extend(poll(node, |events| !events.is_empty()));
    assert!(matches!(events[..], [Event::Accepted { .. }]), "{events:?}");
    streams.iter_mut().for_each(|stream| stream.read_exact(&mut [0; 64]).expect("answer"));
    streams
}

fn poll(node: &mut TcpFabric, mut done: impl FnMut(&[Event]) -> bool) -> Vec<Event> {
    let (start, mut events) = (Instant::now(), Vec::new());
    while !done(&events) {
        node.flush();
        node.poll(64, &mut events);
        assert!(start.elapsed() < PATIENCE, "never: {events:?}");
    }
    events
}

/// Polls for 50 ms and returns the events.
fn poll_shortly(node: &mut TcpFabric) -> Vec<Event> {
    let start = Instant::now();
    poll(node, |_| start.elapsed() > Duration::from_millis(50))
}

#[test]
fn connection_0_waits_at_a_fence_for_its_siblings() {
    let pool = pool(4096, 1);
    let slot = pool.acquire().expect("slot");
    let mut node = listening(&pool, TcpConfig::default());
    let mut streams = join(&mut node, 3);
    // A fence of two writes on connection 2 and one on connection 1, before the message.
    streams[0].write_all(&header(FENCE, 0, &[1, 2])).expect("fence");
    streams[0].write_all(&header(MESSAGE, 0, &[5])).expect("header");
    streams[0].write_all(b"hello").expect("message");
    assert!(poll_shortly(&mut node).is_empty(), "nothing has landed");
    for (stream, offset) in [(2, 0), (1, 8), (2, 16)] {
        let write = header(WRITE, 0, &[8, slot.slot(), slot.generation(), offset]);
        streams[stream].write_all(&write).expect("header");
        streams[stream].write_all(&[7; 4]).expect("half");
        assert!(poll_shortly(&mut node).is_empty(), "not all has landed");
        streams[stream].write_all(&[7; 4]).expect("half");
    }
    let events = poll(&mut node, |events| !events.is_empty());
    assert!(matches!(&events[..], [Event::Message { message, .. }] if **message == *b"hello"), "{events:?}");
    assert_eq!(content(&slot, 24), [7; 24]);
}

#[test]
fn ordered_frames_on_a_sibling_connection_end_the_peer() {
    for kind in [MESSAGE, FENCE, 4] {
        let mut node = listening(&pool(4096, 1), TcpConfig::default());
        let mut streams = join(&mut node, 2);
        streams[1].write_all(&header(kind, 0, &[])).expect("header");
        assert!(poll(&mut node, |events| !events.is_empty()).iter().all(is_down));
    }
}

/// The slot is released between the first half of a write and the second.
#[test]
fn a_slot_that_is_reused_while_it_is_written_ends_the_connection() {
    for len in [600_u32, 60_000] {
        let pool = pool(64 << 10, 1);
        let slot = pool.acquire().expect("slot");
        let mut node = listening(&pool, TcpConfig::default());
        let mut streams = join(&mut node, 1);
        let words = [len, slot.slot(), slot.generation(), 0, 77];
        streams[0].write_all(&header(WRITE, WITH_IMMEDIATE, &words)).expect("header");
        let half = vec![9; len as usize / 2];
        streams[0].write_all(&half).expect("half");
        assert!(poll_shortly(&mut node).is_empty());
        drop(slot);
        streams[0].write_all(&half).expect("half");
        let events = poll(&mut node, |events| !events.is_empty());
        assert!(events.iter().all(is_down), "no immediate: {events:?}");
    }
}

#[test]
fn more_reads_than_were_offered_end_the_connection() {
    let pool = pool(4096, 1);
    let slot = pool.acquire().expect("slot");
    let mut node = listening(&pool, TcpConfig { reads_max: 4, ..TcpConfig::default() });
    let mut streams = join(&mut node, 1);
    let read = header(READ, 0, &[4096, slot.slot(), slot.generation(), 0, 1]);
    let mut batch = [read; 5].concat();
    batch[1] = 4;
    streams[0].write_all(&batch).expect("five reads");
    assert!(poll(&mut node, |events| !events.is_empty()).iter().all(is_down));
}

/// The peer acknowledges a frame that was not sent.
#[test]
fn made_up_acknowledgements_end_the_connection() {
    let mut node = listening(&pool(4096, 1), TcpConfig::default());
    let mut streams = join(&mut node, 1);
    streams[0].write_all(&header(9, 0, &[1])).expect("header");
    assert!(poll(&mut node, |events| !events.is_empty()).iter().all(is_down));
}

/// A peer that resets one of its connections in the middle of a frame.
#[test]
fn a_reset_in_mid_frame_is_noticed() {
    let pool = pool(64 << 10, 1);
    let slot = pool.acquire().expect("slot");
    let mut node = listening(&pool, TcpConfig::default());
    let mut streams = join(&mut node, 2);
    let write = header(WRITE, 0, &[60_000, slot.slot(), slot.generation(), 0]);
    streams[1].write_all(&write).expect("header");
    streams[1].write_all(&[1; 20_000]).expect("a third");
    assert!(poll_shortly(&mut node).is_empty());
    drop(streams.remove(2));
    assert!(poll(&mut node, |events| !events.is_empty()).iter().all(is_down));
}

/// An incomplete write is counted on its slot until it completes or the connection ends. Once the generation
/// is stale, no further byte of it is written to the slot.
#[test]
fn a_write_under_way_is_counted_and_ends_with_its_generation() {
    let pool = pool(4096, 2);
    let (slot, other) = (pool.acquire().expect("slot"), pool.acquire().expect("slot"));
    let mut node = listening(&pool, TcpConfig::default());
    let mut streams = join(&mut node, 1);
    let grant = slot.grant();
    let write = header(WRITE, 0, &[4000, slot.slot(), slot.generation(), 0]);
    streams[1].write_all(&[&write[..], &[7; 1000]].concat()).expect("the first bytes");
    poll_shortly(&mut node);
    assert_eq!(
        (pool.slab().writes_in_progress(slot.slot()), pool.slab().writes_in_progress(other.slot())),
        (1, 0)
    );
    assert!(!slot.has_stray_writes());
    drop(grant);
    assert!(slot.has_stray_writes());
    slot.slab().write(slot.slot(), 0, &[3; 4096]);
    // The receive that is already in the kernel may write some of these bytes; no later receive does.
    streams[1].write_all(&[7; 500]).expect("more");
    let events = poll(&mut node, |events| events.iter().any(is_down));
    assert!(matches!(&events[..], [Event::PeerDown { .. }]), "{events:?}");
    assert!(!slot.has_stray_writes() && pool.slab().writes_in_progress(slot.slot()) == 0);
    let bytes = content(&slot, 4096);
    assert!(
        bytes[..1000].iter().chain(&bytes[1500..]).all(|&byte| byte == 3),
        "the rest is the slot's next owner's"
    );
}

#[test]
fn landings_are_over_when_writes_have_landed() {
    let pool = pool(4096, 1);
    let slot = pool.acquire().expect("slot");
    let mut node = listening(&pool, TcpConfig::default());
    let mut streams = join(&mut node, 2);
    let write = header(WRITE, 0, &[4000, slot.slot(), slot.generation(), 0]);
    for stream in &mut streams[2..] {
        stream.write_all(&[&write[..], &[7; 4000]].concat()).expect("a write");
    }
    poll_shortly(&mut node);
    assert_eq!((content(&slot, 4000), pool.slab().writes_in_progress(slot.slot())), (vec![7; 4000], 0));
    // The second header of the batch is refused: the write of the first was counted, and its count ends with
    // the connection.
    let mut first = write;
    first[1] = 1;
    let stale = header(WRITE, 0, &[8, slot.slot(), slot.generation().wrapping_add(1), 0]);
    streams[3].write_all(&[first, stale].concat()).expect("a batch");
    poll(&mut node, |events| events.iter().any(is_down));
    assert_eq!(pool.slab().writes_in_progress(slot.slot()), 0);
}
