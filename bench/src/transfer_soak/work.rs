//! The random work and its counts.

use std::collections::HashMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use dataplane_fabric::auth::SharedKey;
use dataplane_memory::SlotRef;
use dataplane_transfer::{Command, HeadRange, Notice, Outcome};

use super::Peer;
use super::node::{HEADS, LAYOUT, Node, block_bytes, content_of, fill_block, ranges_of};

/// Slots that are announced to no peer.
const UNANNOUNCED_SLOTS: usize = 16;
/// Limit of hand-offs in progress: at first, and at most on fast transports.
const IN_FLIGHT_FIRST: usize = 4;
const IN_FLIGHT_MAX: usize = 24;
/// Most blocks of one hand-off.
const BLOCKS_MAX: u64 = 12;

#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Tally {
    pub(crate) whole: u64,
    cancelled: u64,
    pub(crate) late: u64,
    stopped: u64,
    lost: u64,
    refused: u64,
    /// Largest limit of hand-offs in progress that was reached.
    in_flight_peak: usize,
    pub(crate) bytes_compared: u64,
}

impl Tally {
    pub(crate) fn render(&self) -> String {
        format!(
            "hand-offs: {} whole, {} cancelled, {} late, {} stopped by their sender, {} lost their peer, {} refused; up to {} at once · {:.1} GB compared, none wrong",
            self.whole,
            self.cancelled,
            self.late,
            self.stopped,
            self.lost,
            self.refused,
            self.in_flight_peak,
            self.bytes_compared as f64 / 1e9
        )
    }
}

struct Expected {
    seed: u64,
    /// First block that is wanted, and number of blocks.
    first_block: usize,
    blocks: usize,
    /// Heads of each block that the sender holds.
    heads: HeadRange,
    is_cancelled: bool,
    /// Whether its deadline is below 2 ms, which most hand-offs miss.
    has_short_deadline: bool,
}

pub(crate) struct Worker {
    pub(super) node: Node,
    notices: Receiver<Notice>,
    random: fastrand::Rng,
    expected: HashMap<u64, Expected>,
    /// Adaptive limit, 1 to [`IN_FLIGHT_MAX`]: one less when a hand-off misses a deadline that is not short,
    /// one more when a hand-off completes. A transport that is too slow for all at once (Soft-RoCE in an
    /// emulated machine) would otherwise be late with every one.
    in_flight_limit: usize,
    pub(crate) tally: Tally,
    /// Slots that are announced to no peer; attackers try to write to them.
    unannounced: Vec<SlotRef>,
    seed: u64,
}

impl Worker {
    pub(crate) fn new(folder: &Path, seed: u64, transports: &str, key: &SharedKey) -> Result<Self> {
        let (sender, notices) = channel();
        // The receiver outlives the service, except that a notice at the very end may find it gone.
        let notify = move |notice| drop(sender.send(notice));
        let node = Node::new(transports, &folder.join("0.sock"), HEADS, seed, key, notify)?;
        let unannounced: Vec<SlotRef> = (0..UNANNOUNCED_SLOTS).filter_map(|_| node.pool.acquire()).collect();
        unannounced.iter().for_each(|slot| fill_block(slot, HEADS, seed, 0));
        Ok(Self {
            node,
            notices,
            random: fastrand::Rng::with_seed(seed),
            expected: HashMap::new(),
            in_flight_limit: IN_FLIGHT_FIRST,
            tally: Tally { in_flight_peak: IN_FLIGHT_FIRST, ..Tally::default() },
            unannounced,
            seed,
        })
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.random.u64(..bound)
    }

    /// Returns the numbers of the slots that are announced to no peer.
    pub(crate) fn unannounced(&self) -> Vec<u32> {
        self.unannounced.iter().map(SlotRef::slot).collect()
    }

    /// Compares these slots, and releases them.
    pub(crate) fn check_unannounced(&mut self) -> Result<()> {
        for slot in self.unannounced.drain(..) {
            let mut found = vec![0; LAYOUT.slot_bytes()];
            slot.slab().read(slot.slot(), 0, &mut found);
            ensure!(
                found == block_bytes(self.seed, 0),
                "invalid write accepted: slot {} was changed",
                slot.slot()
            );
        }
        Ok(())
    }

    pub(crate) fn step(&mut self, peers: &mut [Peer]) -> Result<()> {
        self.collect()?;
        if self.expected.len() >= self.in_flight_limit {
            std::thread::sleep(Duration::from_micros(200));
            return Ok(());
        }
        let index = self.below(peers.len() as u64) as usize;
        self.expect(&mut peers[index]);
        if self.below(12) == 0
            && let Some((&transfer, expected)) = self.expected.iter_mut().next()
        {
            // Refused if the queue is full; then the hand-off is not cancelled.
            expected.is_cancelled |= self.node.service.submit(Command::Cancel { transfer }).is_ok();
        }
        Ok(())
    }

    fn expect(&mut self, peer: &mut Peer) {
        let (transfer, seed) = (self.below(1 << 40) << 16 | 1, self.below(1 << 50));
        let pushed = 1 + self.below(BLOCKS_MAX) as usize;
        // In half of the hand-offs the first blocks are already present.
        let first_block = if self.below(2) == 0 { 0 } else { self.below(pushed as u64) as usize };
        let blocks = pushed - first_block;
        let slots: Vec<SlotRef> = (0..blocks).map_while(|_| self.node.pool.acquire()).collect();
        if slots.len() < blocks {
            return;
        }
        // Old bytes of a slot must not pass for an arrived block.
        let blank = vec![0xA5; LAYOUT.slot_bytes()];
        slots.iter().for_each(|slot| slot.slab().write(slot.slot(), 0, &blank));
        let has_short_deadline = self.below(10) == 0;
        let patience = if has_short_deadline {
            Duration::from_micros(self.below(2000))
        } else {
            Duration::from_millis(500 + self.below(3000))
        };
        let (address, content) = (peer.address.clone(), content_of(transfer));
        let (first, deadline) = (first_block as u32, Instant::now() + patience);
        let expect = Command::Expect { transfer, address, first_block: first, content, slots, deadline };
        if self.node.service.submit(expect).is_ok() {
            let heads = peer.heads;
            let expected =
                Expected { seed, first_block, blocks, heads, is_cancelled: false, has_short_deadline };
            self.expected.insert(transfer, expected);
            peer.push(transfer, pushed, seed);
        }
    }

    /// Handles ended hand-offs.
    pub(crate) fn collect(&mut self) -> Result<()> {
        while let Ok(notice) = self.notices.try_recv() {
            if let Notice::Arrived { transfer, slots, outcome } = notice {
                self.arrived(transfer, &slots, outcome)?;
            }
        }
        Ok(())
    }

    fn arrived(&mut self, transfer: u64, slots: &[SlotRef], outcome: Outcome) -> Result<()> {
        let Some(expected) = self.expected.remove(&transfer) else {
            bail!("transfer {transfer} ended twice");
        };
        for (at, slot) in slots.iter().enumerate() {
            let block = expected.first_block + at;
            let mut found = vec![0; LAYOUT.slot_bytes()];
            slot.slab().read(slot.slot(), 0, &mut found);
            let sent = block_bytes(expected.seed, block);
            for range in ranges_of(expected.heads) {
                ensure!(
                    found[range.clone()] == sent[range.clone()],
                    "WRONG BYTES in block {block} of a hand-off at {range:?}"
                );
                self.tally.bytes_compared += range.len() as u64;
            }
        }
        ensure!(
            outcome != Outcome::Complete || slots.len() == expected.blocks,
            "complete, and blocks are missing"
        );
        let tally = &mut self.tally;
        match outcome {
            Outcome::Complete => {
                tally.whole += 1;
                self.in_flight_limit = IN_FLIGHT_MAX.min(self.in_flight_limit + 1);
                tally.in_flight_peak = tally.in_flight_peak.max(self.in_flight_limit);
            }
            _ if expected.is_cancelled => tally.cancelled += 1,
            Outcome::Deadline => {
                tally.late += 1;
                self.in_flight_limit =
                    (self.in_flight_limit - usize::from(!expected.has_short_deadline)).max(1);
            }
            Outcome::SenderStopped => tally.stopped += 1,
            Outcome::PeerDown => tally.lost += 1,
            Outcome::Refused => tally.refused += 1,
            Outcome::Corrupted => bail!("a checksum did not match on a fabric that corrupts nothing"),
            Outcome::Duplicate | Outcome::DeviceFailed => bail!("transfer {transfer} ended as {outcome:?}"),
        }
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
        self.expected.is_empty()
            && self.node.pool.used_count() == 0
            && self.level("open") == 0
            && self.level("quarantined_slots") == 0
    }

    pub(crate) fn render_held(&self) -> String {
        format!(
            "{} hand-offs not answered, {} slots in use, {} transfers open, {} slots in quarantine",
            self.expected.len(),
            self.node.pool.used_count(),
            self.level("open"),
            self.level("quarantined_slots")
        )
    }
}
