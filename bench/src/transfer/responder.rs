//! The responder executes the initiator's commands: it counts arrivals, echoes, fills and compares memory, streams in the other direction.
//!
//! `step` never blocks, so one thread can drive both ends.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use dataplane_fabric::MESSAGE_BYTES_MAX;

use super::against::Server;
use super::args::Op;
use super::command::{Command, Echo, VERSION};
use super::memory;
use super::node::Node;
use super::piece::{Piece, Remote};
use super::places::{Shape, pattern, shuffled};
use super::session::{IDLE_STEPS_BEFORE_YIELD, Stop};
use super::sizes::RowShape;
use super::stream::Stream;

/// Most echoes that wait for room in the queue.
const ECHOES_MAX: usize = 1 << 16;

pub(super) struct Responder {
    node: Node,
    /// Device that perftest runs on.
    device: Option<String>,
    immediates: u64,
    messages: u64,
    last_message: Box<[u8]>,
    arrivals: Option<(Instant, Instant)>,
    echo: Option<Echo>,
    /// The last byte of the piece that plain writes go to, as last polled.
    last_mark: u8,
    due: VecDeque<u32>,
    stream: Option<Stream>,
    server: Option<Server>,
    quit: bool,
}

impl Responder {
    pub(super) fn new(node: Node, device: Option<String>) -> Self {
        Self {
            node,
            device,
            immediates: 0,
            messages: 0,
            last_message: Box::default(),
            arrivals: None,
            echo: None,
            last_mark: 0,
            due: VecDeque::new(),
            stream: None,
            server: None,
            quit: false,
        }
    }

    /// Serves until the initiator quits or disconnects.
    pub(super) fn serve(mut self, stop: &Stop) -> Result<()> {
        let mut idle = 0;
        while !self.quit && !self.node.has_ended() && !stop.is_set() {
            idle = if self.step()? > 0 { 0 } else { idle + 1 };
            // A perftest program needs the core that polling would occupy.
            if !self.node.is_connected() || self.server.is_some() {
                std::thread::sleep(Duration::from_millis(1));
            } else if idle > IDLE_STEPS_BEFORE_YIELD {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Handles events and due work. Returns the number of events.
    pub(super) fn step(&mut self) -> Result<usize> {
        let happened = self.node.poll()?;
        if happened > 0 {
            self.count();
        }
        while let Some(command) = self.node.commands.pop_front() {
            if let Err(error) = self.execute(command) {
                self.node.send_command(&Command::Failed { reason: format!("{error:#}") })?;
            }
        }
        self.send_echoes()?;
        if let Some(stream) = &mut self.stream
            && stream.pump(&mut self.node)?
        {
            self.stream = None;
            self.node.send_command(&Command::Done)?;
        }
        Ok(happened)
    }

    fn count(&mut self) {
        let (immediates, messages) = (self.node.immediates.len(), self.node.messages.len());
        if immediates + messages > 0 {
            let now = Instant::now();
            self.arrivals = Some((self.arrivals.map_or(now, |(first, _)| first), now));
        }
        self.immediates += immediates as u64;
        self.messages += messages as u64;
        let room = ECHOES_MAX - self.due.len();
        if self.echo.is_some() {
            // No fabric has more than this in flight.
            self.due.extend(self.node.immediates.iter().copied().take(room));
            self.due.extend(self.node.messages.iter().take(room).map(|message| number_of(message)));
        }
        self.node.immediates.clear();
        if let Some(last) = self.node.messages.drain(..).next_back() {
            self.last_message = last;
        }
    }

    fn send_echoes(&mut self) -> Result<()> {
        let Some(Echo { op, shape }) = self.echo else { return Ok(()) };
        if op == Op::Write {
            // A plain write has no notification: its last byte is polled.
            let mark = mark_of(&self.node, shape)?;
            if mark != self.last_mark {
                self.last_mark = mark;
                self.due.push_back(mark.into());
            }
        }
        while let Some(value) = self.due.pop_front() {
            if !ping(&mut self.node, op, shape, value)? {
                self.due.push_front(value);
                return Ok(());
            }
        }
        Ok(())
    }

    fn execute(&mut self, command: Command) -> Result<()> {
        let answer = match command {
            Command::Hello { version, on_device, slot_bytes, out, in_ } => {
                ensure!(version == VERSION, "the peer speaks version {version}, this end {VERSION}");
                self.node.remote = Remote::checked(on_device, slot_bytes, out, in_)?;
                self.node.hello()
            }
            Command::Reset => {
                (self.immediates, self.messages, self.arrivals) = (0, 0, None);
                Command::Done
            }
            Command::Count => {
                let span = self.arrivals.map_or(Duration::ZERO, |(first, last)| last - first);
                let span_ns = span.as_nanos() as u64;
                Command::Counted { immediates: self.immediates, messages: self.messages, span_ns }
            }
            Command::Stream(plan) => {
                ensure!(plan.batch > 0 && plan.depth > 0, "an empty window");
                require_room(&self.node, plan.shape, plan.window())?;
                self.stream = Some(Stream::new(plan, &self.node));
                return Ok(());
            }
            Command::Fill { shape, count, seed, out } => {
                fill(&self.node, shape, count, seed, out, false)?;
                Command::Done
            }
            Command::Compare { shape, count, seed } => {
                Command::Compared { wrong: wrong_written(&self.node, shape, count, seed)? }
            }
            Command::CompareMessage { shape, piece, seed } => {
                ensure!(shape.bytes as usize <= MESSAGE_BYTES_MAX, "no message has {} bytes", shape.bytes);
                Command::Compared { wrong: wrong_message(&self.last_message, shape, piece, seed) }
            }
            Command::Echo(echo) => {
                if let Some(Echo { op, shape }) = echo {
                    ensure!(op != Op::Read, "a read cannot be sent back");
                    ensure!(shape.bytes > 0, "nothing to send back");
                    require_room(&self.node, shape, 1)?;
                    self.last_mark = mark_of(&self.node, shape)?;
                }
                (self.echo, self.due) = (echo, VecDeque::new());
                Command::Done
            }
            Command::Perftest(plan) => {
                self.server = Some(Server::start(&plan, self.device.as_deref())?);
                Command::Done
            }
            Command::PerftestEnd => {
                if let Some(server) = self.server.take() {
                    server.finish();
                }
                Command::Done
            }
            Command::Quit => {
                self.quit = true;
                return Ok(());
            }
            Command::Counted { .. } | Command::Compared { .. } | Command::Done => {
                bail!("not a request: {command:?}")
            }
            Command::Failed { reason } => bail!("the initiator reports: {reason}"),
        };
        self.node.send_command(&answer)
    }
}

/// Checks that a peer's request fits into the memory of both ends.
fn require_room(node: &Node, shape: Shape, count: u32) -> Result<()> {
    let room = node.capacity(shape);
    ensure!(count <= room, "{count} pieces of {} bytes do not fit: there is room for {room}", shape.bytes);
    Ok(())
}

/// Sends one small write with an immediate or with a mark in its last byte, or one message, unsignalled.
pub(super) fn ping(node: &mut Node, op: Op, shape: Shape, value: u32) -> Result<bool> {
    let place = shape.place(node.slot_bytes(), 0);
    let slot = node.out[place.slot].slot();
    match op {
        Op::Send => {
            let number = value.to_le_bytes();
            memory::write(&node.slab, node.out[0].slot(), 1, &number[..(shape.bytes as usize - 1).min(4)])?;
        }
        Op::Write => memory::write(&node.slab, slot, end_of(shape, place.offset, true), &[value as u8])?,
        Op::WriteImm | Op::Read => {}
    }
    let immediate = (op == Op::WriteImm).then_some(value);
    let posted = node.post(0, Piece { op, shape, local: 0, remote: 0, immediate, signalled: false })?;
    node.flush(0);
    Ok(posted)
}

/// Offset of the last byte of a piece that starts at `offset`.
fn end_of(shape: Shape, offset: u32, local: bool) -> usize {
    let rows = shape.rows.map(RowShape::rows);
    let span = rows
        .and_then(|rows| rows.span(shape.bytes, if local { rows.local_stride } else { rows.remote_stride }));
    (offset + span.unwrap_or(shape.bytes)) as usize - 1
}

/// Returns the mark of the last plain write that has arrived.
pub(super) fn mark_of(node: &Node, shape: Shape) -> Result<u8> {
    let place = shape.place(node.slot_bytes(), 0);
    let mut mark = [0];
    memory::read(&node.slab, node.in_[place.slot].slot(), end_of(shape, place.offset, false), &mut mark)?;
    Ok(mark[0])
}

/// Returns the number that `ping` put into a message.
pub(super) fn number_of(message: &[u8]) -> u32 {
    let mut bytes = [0; 4];
    let given = &message[1..message.len().min(5)];
    bytes[..given.len()].copy_from_slice(given);
    u32::from_le_bytes(bytes)
}

/// Fills the pieces of one half, with the rows of the initiator (`local`) or of the target.
pub(super) fn fill(node: &Node, shape: Shape, count: u32, seed: u64, out: bool, local: bool) -> Result<()> {
    let slots = if out { &node.out } else { &node.in_ };
    require_room(node, shape, count)?;
    for index in 0..count {
        let place = shape.place(node.slot_bytes(), index);
        shape.fill(&node.slab, slots[place.slot].slot(), place.offset, local, seed, index)?;
    }
    Ok(())
}

fn wrong_written(node: &Node, shape: Shape, count: u32, seed: u64) -> Result<u64> {
    require_room(node, shape, count)?;
    let wrong = (0..count).map(|index| {
        let place = shape.place(node.slot_bytes(), shuffled(index, count));
        shape.wrong(&node.slab, node.in_[place.slot].slot(), place.offset, false, seed, index)
    });
    wrong.sum()
}

fn wrong_message(message: &[u8], shape: Shape, piece: u32, seed: u64) -> u64 {
    let mut expected = pattern(seed, piece, shape.bytes);
    // A first byte of zero marks messages of a test.
    if let Some(first) = expected.first_mut() {
        *first = 0;
    }
    let different = expected.iter().zip(message).filter(|(one, other)| one != other).count();
    (different + expected.len().abs_diff(message.len())) as u64
}

#[cfg(test)]
mod tests {
    use dataplane_memory::SlabLayout;

    use super::super::args::MemoryKind;
    use super::super::fakes::SimRails;
    use super::super::memory::Memory;
    use super::super::sizes::RowShape;
    use super::super::stream::Plan;
    use super::*;

    #[test]
    fn nonsense_from_a_peer_is_refused() {
        let layout = SlabLayout { slot_bytes: 4096, slot_count: 8 };
        let listen = ["any".to_owned()];
        let memory = (layout, Memory { kind: MemoryKind::Host, gpu: 0 });
        let (node, _) = Node::open(&SimRails::default(), "sim", memory, Some(&listen), 1).expect("a node");
        let mut responder = Responder::new(node, None);
        let names = vec![(0, 0); 4];
        let hello = |version, slot_bytes| Command::Hello {
            version,
            on_device: false,
            slot_bytes,
            out: names.clone(),
            in_: names.clone(),
        };
        responder.execute(hello(VERSION, 4096)).expect("a good greeting");
        let rows = Some(RowShape { bytes: 0, local_stride: 0, remote_stride: 0 });
        let (good, large) = (Shape { bytes: 64, rows: None }, Shape { bytes: 8192, rows: None });
        let (empty, cut) = (Shape { bytes: 0, rows: None }, Shape { bytes: 64, rows });
        let stream =
            |shape, batch, depth| Command::Stream(Plan { op: Op::Write, shape, batch, depth, batches: 1 });
        for command in [
            hello(VERSION + 1, 4096),
            hello(VERSION, 1 << 40),
            stream(good, 0, 1),
            stream(good, u32::MAX, u32::MAX),
            stream(large, 1, 1),
            stream(empty, 1, 1),
            stream(cut, 1, 1),
            Command::Fill { shape: good, count: u32::MAX, seed: 1, out: true },
            Command::Compare { shape: cut, count: 1, seed: 1 },
            Command::CompareMessage { shape: Shape { bytes: u32::MAX, rows: None }, piece: 0, seed: 1 },
            Command::Echo(Some(Echo { op: Op::Read, shape: good })),
            Command::Echo(Some(Echo { op: Op::WriteImm, shape: large })),
            Command::Done,
            Command::Compared { wrong: 1 },
        ] {
            assert!(responder.execute(command.clone()).is_err(), "{command:?}");
        }
        responder.execute(stream(good, 4, 2)).expect("the good ones still work");
    }
}
