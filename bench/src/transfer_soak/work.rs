//! The random work and its accounts.

use std::collections::HashMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use dataplane_fabric::auth::SharedKey;
use dataplane_fabric::{Priority, Rows, SlotRange, Target};
use dataplane_memory::SlotRef;
use dataplane_transfer::{Batch, Command, Direction, MoveHandle, MoveOutcome, Notice, Outcome, Piece};

use super::Peer;
use super::node::{Node, SLOT_BYTES, block_bytes, content_of, fill_block, pattern};

/// Slots that nobody is told of.
const UNTOLD: usize = 16;
/// Moves and hand-offs under way at a time.
const UNDER_WAY_MAX: usize = 24;

#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Tally {
    pub(crate) moves_done: u64,
    moves_cancelled: u64,
    moves_late: u64,
    moves_down: u64,
    pub(crate) handed_whole: u64,
    handed_in_part: u64,
    bytes_compared: u64,
}

impl Tally {
    pub(crate) fn render(&self) -> String {
        format!(
            "moves: {} done, {} cancelled, {} late, {} lost their peer · hand-offs: {} whole, {} in part · {:.1} GB compared, none wrong",
            self.moves_done,
            self.moves_cancelled,
            self.moves_late,
            self.moves_down,
            self.handed_whole,
            self.handed_in_part,
            self.bytes_compared as f64 / 1e9
        )
    }
}

/// One move: a write, and when that is done a read of the same bytes.
struct Moving {
    handle: MoveHandle,
    peer: usize,
    life: u64,
    seed: u64,
    lent: usize,
    piece: Piece,
    /// Where the bytes come back to; set while they do.
    back: Option<SlotRef>,
    address: String,
}

struct Expected {
    seed: u64,
    blocks: usize,
}

pub(crate) struct Worker {
    pub(super) node: Node,
    notices: Receiver<Notice>,
    random: u64,
    moving: Vec<Moving>,
    expected: HashMap<u64, Expected>,
    /// By peer: how often it was replaced, and which of its slots are in use.
    lives: Vec<u64>,
    in_use: Vec<Vec<usize>>,
    pub(crate) tally: Tally,
    /// Slots that nobody is told of: liars try to write them.
    untold: Vec<SlotRef>,
    seed: u64,
}

impl Worker {
    pub(crate) fn new(
        folder: &Path,
        seed: u64,
        transports: &str,
        peers: usize,
        key: &SharedKey,
    ) -> Result<Self> {
        let (sender, notices) = channel();
        // The receiver outlives the service; at the very end a notice may find nobody.
        let notify = move |notice| drop(sender.send(notice));
        let node = Node::new(transports, &folder.join("0.sock"), seed, key, notify)?;
        let untold: Vec<SlotRef> = (0..UNTOLD).filter_map(|_| node.pool.acquire()).collect();
        untold.iter().for_each(|slot| fill_block(slot, seed, 0));
        Ok(Self {
            node,
            notices,
            random: seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
            moving: Vec::new(),
            expected: HashMap::new(),
            lives: vec![0; peers],
            in_use: vec![Vec::new(); peers],
            tally: Tally::default(),
            untold,
            seed,
        })
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 8) % bound
    }

    /// Numbers of the slots that nobody is told of.
    pub(crate) fn untold(&self) -> Vec<u32> {
        self.untold.iter().map(SlotRef::slot).collect()
    }

    /// Compares those slots, and gives them back.
    pub(crate) fn check_untold(&mut self) -> Result<()> {
        for slot in self.untold.drain(..) {
            let mut found = vec![0; SLOT_BYTES];
            slot.slab().read(slot.slot(), 0, &mut found);
            ensure!(
                found == block_bytes(self.seed, 0),
                "A LIE WAS BELIEVED: slot {} was written",
                slot.slot()
            );
        }
        Ok(())
    }

    pub(crate) fn peer_replaced(&mut self, index: usize) {
        self.lives[index] += 1;
        self.in_use[index].clear();
    }

    pub(crate) fn step(&mut self, peers: &mut [Peer]) -> Result<()> {
        self.collect()?;
        if self.moving.len() + self.expected.len() >= UNDER_WAY_MAX {
            std::thread::sleep(Duration::from_micros(200));
            return Ok(());
        }
        let index = self.below(peers.len() as u64) as usize;
        if self.below(3) == 0 {
            self.expect(&mut peers[index]);
        } else {
            self.write(&peers[index], index);
        }
        if self.below(8) == 0 && !self.moving.is_empty() {
            let at = self.below(self.moving.len() as u64) as usize;
            self.moving[at].handle.cancel();
        }
        if self.below(12) == 0
            && let Some(&transfer) = self.expected.keys().next()
        {
            // Refused when the queue is full: then it is simply not cancelled.
            let _full = self.node.service.submit(Command::Cancel { transfer });
        }
        Ok(())
    }

    fn expect(&mut self, peer: &mut Peer) {
        let (transfer, seed) = (self.below(1 << 40) << 16 | 1, self.below(1 << 50));
        let blocks = 1 + self.below(12) as usize;
        let slots: Vec<SlotRef> = (0..blocks).map_while(|_| self.node.pool.acquire()).collect();
        if slots.len() < blocks {
            return;
        }
        let deadline = Instant::now() + Duration::from_millis(5 + self.below(3000));
        let (address, content) = (peer.address.clone(), content_of(transfer));
        let expect = Command::Expect { transfer, address, first_block: 0, content, slots, deadline };
        if self.node.service.submit(expect).is_ok() {
            self.expected.insert(transfer, Expected { seed, blocks });
            peer.push(transfer, blocks, seed);
        }
    }

    fn write(&mut self, peer: &Peer, index: usize) {
        let lent = self.below(peer.slots.len() as u64) as usize;
        let Some(slot) = self.node.pool.acquire().filter(|_| !self.in_use[index].contains(&lent)) else {
            return;
        };
        let seed = self.below(1 << 50);
        slot.slab().write(slot.slot(), 0, &pattern(seed, SLOT_BYTES));
        let (slot_there, generation) = peer.slots[lent];
        let piece = if self.below(2) == 0 {
            let offset = self.below(SLOT_BYTES as u64 / 2) as u32;
            let len = 1 + self.below(SLOT_BYTES as u64 / 2) as u32;
            let there = self.below(SLOT_BYTES as u64 / 2) as u32;
            let remote = Target { slot: slot_there, generation, offset: there };
            Piece { local: SlotRange { slot, offset, len }, remote, rows: None }
        } else {
            let bytes = 1 + self.below(700) as u32;
            let count = 1 + self.below(40) as u32;
            let (local_stride, remote_stride) =
                (bytes + self.below(800) as u32, bytes + self.below(800) as u32);
            let rows = Rows { bytes, local_stride, remote_stride };
            let remote = Target { slot: slot_there, generation, offset: self.below(500) as u32 };
            let offset = self.below(500) as u32;
            Piece { local: SlotRange { slot, offset, len: bytes * count }, remote, rows: Some(rows) }
        };
        let patience =
            if self.below(10) == 0 { Duration::from_micros(self.below(500)) } else { Duration::from_secs(5) };
        let batch = self.batch(&peer.address, Direction::Write, piece.clone(), patience);
        if let Ok(handle) = self.node.service.start_move(batch) {
            self.in_use[index].push(lent);
            let (life, address) = (self.lives[index], peer.address.clone());
            self.moving.push(Moving { handle, peer: index, life, seed, lent, piece, back: None, address });
        }
    }

    fn batch(&mut self, address: &str, direction: Direction, piece: Piece, patience: Duration) -> Batch {
        let priority = if self.below(2) == 0 { Priority::Urgent } else { Priority::Background };
        let deadline = Instant::now() + patience;
        Batch { address: address.to_owned(), direction, priority, pieces: vec![piece], deadline }
    }

    /// Takes what has ended.
    pub(crate) fn collect(&mut self) -> Result<()> {
        let mut index = 0;
        while index < self.moving.len() {
            let Some(outcome) = self.moving[index].handle.outcome() else {
                index += 1;
                continue;
            };
            let moved = self.moving.swap_remove(index);
            self.moved(moved, outcome)?;
        }
        while let Ok(notice) = self.notices.try_recv() {
            if let Notice::Arrived { transfer, slots, outcome } = notice {
                self.arrived(transfer, &slots, outcome)?;
            }
        }
        Ok(())
    }

    fn moved(&mut self, mut moved: Moving, outcome: MoveOutcome) -> Result<()> {
        match outcome {
            MoveOutcome::Done => {}
            MoveOutcome::Cancelled => self.tally.moves_cancelled += 1,
            MoveOutcome::Deadline => self.tally.moves_late += 1,
            MoveOutcome::PeerDown => self.tally.moves_down += 1,
            MoveOutcome::Unsettled => bail!("a move into host memory waited for a device"),
            MoveOutcome::Refused => {
                bail!("a move was refused, {:?} at {}", moved.piece.remote, moved.address)
            }
        }
        if outcome == MoveOutcome::Done && moved.back.is_none() && self.lives[moved.peer] == moved.life {
            let Some(back) = self.node.pool.acquire() else {
                self.release(&moved);
                return Ok(());
            };
            let local = SlotRange { slot: back.clone(), ..moved.piece.local.clone() };
            let piece = Piece { local, ..moved.piece.clone() };
            let batch = self.batch(&moved.address.clone(), Direction::Read, piece, Duration::from_secs(5));
            match self.node.service.start_move(batch) {
                Ok(handle) => {
                    (moved.handle, moved.back) = (handle, Some(back));
                    self.moving.push(moved);
                }
                Err(_) => self.release(&moved),
            }
            return Ok(());
        }
        if outcome == MoveOutcome::Done
            && let Some(back) = &moved.back
        {
            self.compare(&moved, back)?;
            self.tally.moves_done += 1;
        }
        self.release(&moved);
        Ok(())
    }

    fn compare(&mut self, moved: &Moving, back: &SlotRef) -> Result<()> {
        let sent = pattern(moved.seed, SLOT_BYTES);
        let mut found = vec![0; SLOT_BYTES];
        back.slab().read(back.slot(), 0, &mut found);
        let SlotRange { offset, len, .. } = moved.piece.local;
        let rows = moved.piece.rows.unwrap_or(Rows { bytes: len, local_stride: len, remote_stride: len });
        for row in 0..rows.count(len) {
            let at = (offset + row * rows.local_stride) as usize;
            let range = at..at + rows.bytes as usize;
            ensure!(
                sent[range.clone()] == found[range],
                "WRONG BYTES after a move: {:?}, row {row}",
                moved.piece
            );
        }
        self.tally.bytes_compared += u64::from(len);
        Ok(())
    }

    fn release(&mut self, moved: &Moving) {
        if self.lives[moved.peer] == moved.life {
            self.in_use[moved.peer].retain(|&lent| lent != moved.lent);
        }
    }

    fn arrived(&mut self, transfer: u64, slots: &[SlotRef], outcome: Outcome) -> Result<()> {
        let Some(expected) = self.expected.remove(&transfer) else {
            bail!("transfer {transfer} ended twice");
        };
        for (block, slot) in slots.iter().enumerate() {
            let mut found = vec![0; SLOT_BYTES];
            slot.slab().read(slot.slot(), 0, &mut found);
            ensure!(found == block_bytes(expected.seed, block), "WRONG BYTES in block {block} of a hand-off");
            self.tally.bytes_compared += SLOT_BYTES as u64;
        }
        ensure!(outcome != Outcome::Corrupted, "a checksum did not match on a fabric that corrupts nothing");
        ensure!(
            outcome != Outcome::Complete || slots.len() == expected.blocks,
            "complete, and blocks are missing"
        );
        let whole = outcome == Outcome::Complete;
        self.tally.handed_whole += u64::from(whole);
        self.tally.handed_in_part += u64::from(!whole);
        Ok(())
    }

    fn level(&self, name: &str) -> u64 {
        self.node
            .counters
            .snapshot()
            .into_iter()
            .find(|(known, ..)| *known == name)
            .map_or(0, |(.., value)| value)
    }

    pub(crate) fn is_at_rest(&self) -> bool {
        self.moving.is_empty()
            && self.expected.is_empty()
            && self.node.pool.used_count() == 0
            && self.node.service.open_moves() == 0
            && self.level("open") == 0
            && self.level("quarantined_slots") == 0
    }

    pub(crate) fn what_is_held(&self) -> String {
        format!(
            "{} moves and {} hand-offs not answered, {} slots in use, {} moves open, {} transfers open, {} slots in quarantine",
            self.moving.len(),
            self.expected.len(),
            self.node.pool.used_count(),
            self.node.service.open_moves(),
            self.level("open"),
            self.level("quarantined_slots")
        )
    }
}
