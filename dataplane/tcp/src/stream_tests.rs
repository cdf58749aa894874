//! Streams of frames in random pieces, good and damaged, against an oracle that sees the whole stream at once.

use dataplane_fabric::{Completion, Event, PeerId, Target};
use dataplane_memory::{PageSize, Slab, SlabKind, SlabLayout, SlotPool};

use crate::fuzzing::{READ_BYTES, READ_ROW_BYTES, SERVED_MAX, Stream};
use crate::wire::{HEADER_BYTES, Header, RowShape};

const SLOT_BYTES: usize = 6000;
const SLOTS: u32 = 6;
const ROUNDS: u64 = 3000;

/// Random numbers, and for each read the number of response pieces sent and of those that lack a
/// verification.
struct Random(fastrand::Rng, [(u32, u32); 3]);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0.u64(..bound.max(1))
    }

    fn range(&mut self) -> (Target, u32, Option<RowShape>) {
        let slot = 3 + self.below(3) as u32;
        let bytes = [1, 8, 64, 511, 512, 600][self.below(6) as usize];
        let stride = bytes + self.below(3) as u32 * 100;
        let count = 1 + self.below(u64::from((SLOT_BYTES as u32 - bytes) / stride)) as u32;
        let rows = (self.below(2) == 0).then_some(RowShape { bytes, stride });
        let len = rows.map_or_else(|| self.below(SLOT_BYTES as u64 + 1) as u32, |rows| rows.bytes * count);
        (Target { slab: SlabKind::Host, slot, generation: 0, offset: 0 }, len, rows)
    }

    fn header(&mut self) -> Header {
        match self.below(12) {
            0..3 => Header::Message { len: self.below(3000) as u32 },
            3..7 => {
                let (target, len, rows) = self.range();
                let immediate = (self.below(2) == 0).then(|| self.below(99) as u32);
                Header::Write { len, target, rows, immediate }
            }
            7 => Header::Immediate { value: self.below(99) as u32 },
            8 => {
                let (from, len, rows) = self.range();
                Header::Read { number: 5, len, from, rows }
            }
            9 | 10 => {
                let (number, is_verified) = (self.below(3) as u32, self.below(2) == 0);
                let (pieces, unverified) = &mut self.1[number as usize];
                let at = *pieces * 400;
                *pieces += 1;
                *unverified += u32::from(!is_verified);
                // The fourth piece of a read exceeds its length.
                Header::Response { number, at: at.min(1200), len: 400, is_verified }
            }
            _ => {
                let number = self.below(3) as u32;
                let len = self.1[number as usize].1 * 400;
                self.1[number as usize].1 = 0;
                Header::Verified { number, len: len + self.below(20).saturating_sub(18) as u32 }
            }
        }
    }

    /// Returns batches of frames, some with a flipped bit in a header.
    fn stream(&mut self) -> Vec<u8> {
        let mut stream = Vec::new();
        for _ in 0..=self.below(6) {
            let headers: Vec<Header> = (0..=self.below(9)).map(|_| self.header()).collect();
            for (at, header) in headers.iter().enumerate() {
                let followers = if at == 0 { headers.len() as u8 - 1 } else { 0 };
                let mut bytes = header.encode(followers, false);
                if self.below(90) == 0 {
                    bytes[self.below(32) as usize] ^= 1 << self.below(8);
                }
                stream.extend(bytes);
            }
            for header in headers {
                stream.extend((0..payload_bytes(&header)).map(|_| self.0.u8(..)));
            }
        }
        let end = stream.len() - self.below(300).min(stream.len() as u64 - 1) as usize;
        stream.truncate(if self.below(4) == 0 { end } else { stream.len() });
        stream
    }
}

fn payload_bytes(header: &Header) -> u32 {
    match *header {
        Header::Message { len } | Header::Write { len, .. } | Header::Response { len, .. } => len,
        _ => 0,
    }
}

#[derive(Default)]
struct Oracle {
    slots: Vec<Vec<u8>>,
    events: Vec<Event>,
    /// (promised, landed, verified, is complete) of each read.
    reads: [(u64, u64, u64, bool); 3],
    served: usize,
    is_held: bool,
}

impl Oracle {
    /// Returns the position of byte `at` of a range, when rows and slot allow all bytes.
    fn place(target: Target, len: u32, rows: Option<RowShape>) -> Option<impl Fn(u64) -> usize> {
        let rows = rows.unwrap_or(RowShape { bytes: len.max(1), stride: len.max(1) });
        let (bytes, stride) = (u64::from(rows.bytes), u64::from(rows.stride));
        let place = move |at: u64| (u64::from(target.offset) + at / bytes * stride + at % bytes) as usize;
        let cuts = bytes > 0 && u64::from(len) % bytes == 0 && stride >= bytes;
        let fits = target.slot < SLOTS && target.generation == 0 && target.offset as usize <= SLOT_BYTES;
        let last = u64::from(len).checked_sub(1).map_or(0, place);
        (cuts && fits && (len == 0 || last < SLOT_BYTES)).then_some(place)
    }

    fn check(&self, header: &Header) -> bool {
        match *header {
            Header::Write { len, target, rows, .. } => Self::place(target, len, rows).is_some(),
            Header::Read { len, from, rows, .. } => Self::place(from, len, rows).is_some(),
            Header::Response { number, at, len, .. } => {
                u64::from(at) + u64::from(len) <= u64::from(READ_BYTES) && self.is_open(number)
            }
            _ => true,
        }
    }

    fn is_open(&self, number: u32) -> bool {
        self.reads.get(number as usize).is_some_and(|read| !read.3)
    }

    fn settle(&mut self, number: u32) {
        let read = &mut self.reads[number as usize];
        if read.1 == u64::from(READ_BYTES) && read.2 == u64::from(READ_BYTES) && !read.3 {
            read.3 = true;
            let id = u64::from(number) + 1;
            self.events.push(Event::Completed { id, completion: Completion::Done });
        }
    }

    /// Returns false when the stream is invalid.
    fn run(&mut self, mut stream: &[u8]) -> bool {
        while let Some(first) = stream.first_chunk::<HEADER_BYTES>() {
            let Ok(decoded) = Header::decode(first) else { return false };
            let count = 1 + usize::from(decoded.followers);
            let Some((table, rest)) = stream.split_at_checked(count * HEADER_BYTES) else { return true };
            let mut headers = Vec::new();
            for (at, bytes) in table.as_chunks::<HEADER_BYTES>().0.iter().enumerate() {
                match Header::decode(bytes) {
                    Ok(decoded) if at == 0 || decoded.followers == 0 => headers.push(decoded.header),
                    _ => return false,
                }
            }
            if !headers.iter().all(|header| self.check(header)) {
                return false;
            }
            stream = rest;
            for header in headers {
                let len = payload_bytes(&header) as usize;
                let here = &stream[..len.min(stream.len())];
                stream = &stream[here.len()..];
                match self.obey(&header, here, here.len() == len) {
                    None => return false,
                    Some(false) => return true,
                    Some(true) => {}
                }
            }
        }
        true
    }

    /// Returns `None` for an invalid frame, and false when the stream ends at this frame.
    fn obey(&mut self, header: &Header, here: &[u8], is_whole: bool) -> Option<bool> {
        let peer = PeerId(1);
        match *header {
            Header::Message { .. } if is_whole => {
                self.events.push(Event::Message { peer, message: here.into() });
            }
            Header::Message { .. } => {}
            Header::Write { len, target, rows, immediate } => {
                let place = Self::place(target, len, rows)?;
                for (at, byte) in here.iter().enumerate() {
                    self.slots[target.slot as usize][place(at as u64)] = *byte;
                }
                let value = immediate.filter(|_| is_whole);
                self.events.extend(value.map(|value| Event::Immediate { peer, value }));
            }
            Header::Immediate { value } => self.events.push(Event::Immediate { peer, value }),
            Header::Read { .. } => {
                self.served += 1;
                return (self.served <= SERVED_MAX).then_some(true);
            }
            Header::Response { number, at, len, is_verified } => {
                let read = self.reads.get_mut(number as usize).filter(|read| !read.3)?;
                read.0 += u64::from(len);
                if read.0 > u64::from(READ_BYTES) {
                    return None;
                }
                let row = u64::from(READ_ROW_BYTES[number as usize]);
                for (step, byte) in here.iter().enumerate() {
                    let at = u64::from(at) + step as u64;
                    let place = at.checked_div(row).map_or(at, |before| before * 2 * row + at % row);
                    self.slots[number as usize][place as usize] = *byte;
                }
                if is_whole {
                    let read = &mut self.reads[number as usize];
                    read.1 += u64::from(len);
                    read.2 += if is_verified { u64::from(len) } else { 0 };
                    if read.2 > u64::from(READ_BYTES) {
                        return None;
                    }
                    self.settle(number);
                }
            }
            Header::Verified { number, len } => {
                let read = self.reads.get_mut(number as usize).filter(|read| !read.3)?;
                read.2 += u64::from(len);
                if read.2 > u64::from(READ_BYTES) {
                    return None;
                }
                self.settle(number);
            }
            Header::Landed { count } => return (count == 0).then_some(true),
            Header::Fence { counts } => {
                self.is_held = counts.iter().any(|count| *count != 0 && *count <= 1 << 31);
                return Some(!self.is_held);
            }
        }
        Some(is_whole)
    }
}

#[test]
fn any_cut_of_any_stream_gives_what_the_whole_gives() {
    let (mut good, mut bad, mut completed) = (0, 0, 0);
    for seed in 1..=ROUNDS {
        let mut random = Random(fastrand::Rng::with_seed(seed), [(0, 0); 3]);
        let bytes = random.stream();
        let layout = SlabLayout { slot_bytes: SLOT_BYTES, slot_count: SLOTS };
        let pool = SlotPool::new(Slab::create("stream", layout, PageSize::Standard).expect("slab").into());
        let mut stream = Stream::new(&pool);
        let mut oracle = Oracle { slots: vec![vec![0; SLOT_BYTES]; SLOTS as usize], ..Oracle::default() };
        let expected = oracle.run(&bytes);
        let style = random.below(3);
        let fed = stream.feed(&bytes, |room| match style {
            0 => room,
            1 => 1 + random.below(40) as usize,
            _ => 1 + random.below(room as u64) as usize,
        });
        assert_eq!(fed.is_ok(), expected, "seed {seed}: {fed:?}");
        let other = stream.events.iter().zip(&oracle.events).position(|(found, model)| found != model);
        let counts = (stream.events.len(), oracle.events.len());
        assert!(
            other.is_none() && counts.0 == counts.1,
            "seed {seed}: event {other:?} differs, {counts:?} events"
        );
        good += u64::from(expected);
        bad += u64::from(!expected);
        completed += oracle.events.iter().filter(|event| matches!(event, Event::Completed { .. })).count();
        if !expected {
            continue; // How far the bytes of a bad batch got depends on the cuts; they went where they may.
        }
        for (slot, model) in oracle.slots.iter().enumerate() {
            let mut found = vec![0; SLOT_BYTES];
            pool.slab().read(slot as u32, 0, &mut found);
            let wrong = found.iter().zip(model).position(|(found, model)| found != model);
            assert_eq!(wrong, None, "seed {seed}, slot {slot}: first wrong byte");
        }
    }
    println!("{good} good streams, {bad} bad ones, {completed} reads completed");
    assert!(good > ROUNDS / 10 && bad > ROUNDS / 10 && completed > 100, "{good} {bad} {completed}");
}

#[test]
fn noise_is_refused_without_harm() {
    let layout = SlabLayout { slot_bytes: SLOT_BYTES, slot_count: SLOTS };
    let pool = SlotPool::new(Slab::create("noise", layout, PageSize::Standard).expect("slab").into());
    let mut random = Random(fastrand::Rng::with_seed(77), [(0, 0); 3]);
    for _ in 0..20_000 {
        let mut bytes: Vec<u8> = (0..random.below(400)).map(|_| random.below(256) as u8).collect();
        for header in bytes.chunks_mut(HEADER_BYTES) {
            header[0] = random.below(11) as u8;
            header.iter_mut().skip(1).take(3).for_each(|byte| *byte = 0);
        }
        let mut stream = Stream::new(&pool);
        let _refused = stream.feed(&bytes, |room| 1 + random.below(room as u64) as usize);
    }
}
