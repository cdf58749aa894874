//! The receiving side of one transfer: parts that were announced, that have landed, and that are verified.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use dataplane_fabric::PeerId;
use dataplane_memory::{SlotGrant, SlotRef};

use crate::budget::Budget;
use crate::checksum::{RunningChecksum, SlotRows};
use crate::direct::{Purpose, SumRequest};
use crate::negotiation::NegotiatedParameters;
use crate::node::Outcome;
use crate::shard::SharedHeads;
use crate::wire::SlotName;

#[derive(Debug)]
struct Announcement {
    first_layer: u16,
    layers: u16,
    first_block: u32,
    sums: Vec<u64>,
}

/// The half of a part that arrived first: its announcement or its immediate.
#[derive(Debug)]
enum UnmatchedPart {
    Announced(Announcement),
    Landed,
}

/// A part that the processor verifies.
#[derive(Debug)]
struct PartToVerify {
    announcement: Announcement,
    /// Time at which both halves of the part had arrived.
    since: Instant,
    /// Number of leading blocks that are processed.
    blocks_done: usize,
}

/// Access of the sender to the local slots.
#[derive(Debug, Clone, Copy)]
enum Access {
    /// The sender has not been told the slots.
    Untold,
    /// The sender may write the slots, under these terms.
    Writing(NegotiatedParameters),
    /// The sender can write no more: the outcome to report when the remaining verification, by processor or device, has ended.
    Over(NegotiatedParameters, Outcome),
}

/// One transfer that this node expects.
#[derive(Debug)]
pub(crate) struct Inbound {
    pub(crate) peer: PeerId,
    pub(crate) tag: u16,
    pub(crate) content: [u8; 16],
    pub(crate) first_block: u32,
    pub(crate) slots: Vec<SlotRef>,
    /// By block: the grant that lets the sender write it. Empty until the sender is told the slots.
    grants: Vec<Option<SlotGrant>>,
    /// Time at which the transfer was expected.
    pub(crate) since: Instant,
    /// Time at which the sender was told the slots; taken when the first part is complete.
    told: Option<Instant>,
    pub(crate) corrupted: bool,
    /// Number that identifies this transfer's sums at the device; `None`: the processor verifies.
    pub(crate) number: Option<u64>,
    access: Access,
    /// By block: number of verified layers. With the processor these are the leading layers, with a device any.
    layers_verified: Vec<u16>,
    /// By block: number of leading layers that have landed and whose sum is requested from the device.
    layers_started: Vec<u16>,
    /// Leading blocks of which every byte is verified.
    pub(crate) verified_blocks: usize,
    /// Number of sums that the device still has to return.
    pub(crate) sums_open: usize,
    layers: u16,
    /// Announced layers of blocks, over all parts: each is announced once.
    announced_layers: u64,
    /// Parts of which one half has arrived, by sequence number.
    unmatched: HashMap<u16, UnmatchedPart>,
    /// Parts that the processor has to verify, in the order in which they became complete.
    verifying: VecDeque<PartToVerify>,
    /// Checksum in progress, of the first block of the first part.
    running_checksum: RunningChecksum,
}

/// Result of a part that has landed and is announced.
#[derive(Debug, Default)]
pub(crate) struct PartOutcome {
    /// Blocks that failed verification.
    pub(crate) failures: u64,
    /// Sums that the device has to compute before the part is verified.
    pub(crate) wanted: Vec<SumRequest>,
    /// Whether [`Inbound::verify`] has work now and had none before.
    pub(crate) starts_verifying: bool,
}

/// Announcements and immediates that may wait for their other half.
const UNMATCHED_MAX: usize = 4096;

impl Inbound {
    pub(crate) fn new(
        peer: PeerId,
        tag: u16,
        content: [u8; 16],
        first_block: u32,
        slots: Vec<SlotRef>,
        layers: u16,
        since: Instant,
    ) -> Self {
        let (layers_verified, layers_started) = (vec![0; slots.len()], vec![0; slots.len()]);
        Self {
            peer,
            tag,
            content,
            first_block,
            slots,
            grants: Vec::new(),
            since,
            told: None,
            corrupted: false,
            number: None,
            access: Access::Untold,
            layers_verified,
            layers_started,
            verified_blocks: 0,
            sums_open: 0,
            layers,
            announced_layers: 0,
            unmatched: HashMap::new(),
            verifying: VecDeque::new(),
            running_checksum: RunningChecksum::default(),
        }
    }

    /// Grants the sender write access to the slots, under the terms of its greeting.
    pub(crate) fn reserve(&mut self, terms: NegotiatedParameters, now: Instant) {
        self.access = Access::Writing(terms);
        self.told = Some(now);
        self.grants = self.slots.iter().map(|slot| Some(slot.grant())).collect();
    }

    /// Returns the time since the sender was told the slots, at the first complete part.
    pub(crate) fn first_part(&mut self, now: Instant) -> Option<Duration> {
        let told = self.told?;
        let is_first = self.sums_open > 0 || self.has_parts();
        is_first.then(|| {
            self.told = None;
            now.saturating_duration_since(told)
        })
    }

    /// Takes the grants that the sender still holds.
    pub(crate) fn take_grants(&mut self) -> Vec<SlotGrant> {
        std::mem::take(&mut self.grants).into_iter().flatten().collect()
    }

    /// Whether the sender has been told the slots.
    pub(crate) fn is_reserved(&self) -> bool {
        self.terms().is_some()
    }

    /// Returns the terms with the sender, once it has been told the slots.
    fn terms(&self) -> Option<NegotiatedParameters> {
        match self.access {
            Access::Untold => None,
            Access::Writing(terms) | Access::Over(terms, _) => Some(terms),
        }
    }

    /// Ends the sender's access. The first outcome counts: a sender may report that it has stopped, and
    /// close the connection then.
    pub(crate) fn writes_over(&mut self, outcome: Outcome) {
        if let Access::Writing(terms) = self.access {
            self.access = Access::Over(terms, outcome);
        }
    }

    /// Returns the outcome to report after the last verification, if the sender can write no more.
    pub(crate) fn ending(&self) -> Option<Outcome> {
        match self.access {
            Access::Untold | Access::Writing(_) => None,
            Access::Over(_, outcome) => Some(outcome),
        }
    }

    pub(crate) fn slot_names(&self) -> Vec<SlotName> {
        let name = |slot: &SlotRef| SlotName { slot: slot.slot(), generation: slot.generation() };
        self.slots.iter().map(name).collect()
    }

    /// Takes an announcement; `None` when it is invalid.
    pub(crate) fn announce(
        &mut self,
        transfer: u64,
        sequence: u16,
        layers: (u16, u16),
        first_block: u32,
        sums: Vec<u64>,
        now: Instant,
    ) -> Option<PartOutcome> {
        let (first_layer, layers) = layers;
        let blocks_fit = first_block
            .checked_sub(self.first_block)
            .is_some_and(|first| first as usize + sums.len() <= self.slots.len());
        let layers_fit = layers > 0 && first_layer.checked_add(layers).is_some_and(|end| end <= self.layers);
        if !blocks_fit || !layers_fit || sums.is_empty() || self.unmatched.len() >= UNMATCHED_MAX {
            return None;
        }
        self.announced_layers += sums.len() as u64 * u64::from(layers);
        if self.announced_layers > self.slots.len() as u64 * u64::from(self.layers) {
            // More layers than the transfer has: the announcement is dropped, so that a peer cannot exhaust
            // the memory.
            self.corrupted = true;
            return Some(PartOutcome { failures: 1, ..PartOutcome::default() });
        }
        let announcement = Announcement { first_layer, layers, first_block, sums };
        match self.unmatched.remove(&sequence) {
            Some(UnmatchedPart::Landed) => Some(self.start_verification(transfer, announcement, now)),
            Some(UnmatchedPart::Announced(_)) => None,
            None => {
                self.unmatched.insert(sequence, UnmatchedPart::Announced(announcement));
                Some(PartOutcome::default())
            }
        }
    }

    /// Takes an immediate.
    pub(crate) fn landed(&mut self, transfer: u64, sequence: u16, now: Instant) -> PartOutcome {
        match self.unmatched.remove(&sequence) {
            Some(UnmatchedPart::Announced(announcement)) => {
                self.start_verification(transfer, announcement, now)
            }
            None if self.unmatched.len() >= UNMATCHED_MAX => PartOutcome::default(),
            None | Some(UnmatchedPart::Landed) => {
                self.unmatched.insert(sequence, UnmatchedPart::Landed);
                PartOutcome::default()
            }
        }
    }

    /// Starts the verification of a part that has landed and is announced.
    fn start_verification(&mut self, transfer: u64, announcement: Announcement, now: Instant) -> PartOutcome {
        let mut landing = PartOutcome::default();
        let Some(terms) = self.terms() else { return landing };
        let Some(number) = self.number else {
            self.verifying.push_back(PartToVerify { announcement, since: now, blocks_done: 0 });
            landing.starts_verifying = self.verifying.len() == 1;
            return landing;
        };
        let Announcement { first_layer, layers, first_block, sums } = announcement;
        let offset = terms.cut.offset_here(first_layer);
        let len = terms.cut.len(&(first_layer..first_layer + layers));
        let first = (first_block - self.first_block) as usize;
        for (block, expected) in (first..).zip(sums) {
            let started = &mut self.layers_started[block];
            if *started == first_layer {
                *started += layers;
                let slot = self.slots[block].clone();
                if *started == self.layers {
                    self.grants[block] = None;
                }
                if slot.has_stray_writes() {
                    landing.failures += 1;
                    self.corrupted = true;
                    continue;
                }
                let block = block as u32;
                let purpose = Purpose::Verify { transfer, number, block, layers, expected };
                landing.wanted.push(SumRequest { purpose, slot, offset, len });
            } else {
                landing.failures += 1;
                self.corrupted = true;
            }
        }
        self.sums_open += landing.wanted.len();
        landing
    }

    /// Verifies complete parts with the processor until the budget is spent, and calls `over` for each part
    /// done with the time at which it was complete. Returns the number of blocks that failed.
    pub(crate) fn verify(&mut self, budget: &mut Budget, over: impl FnMut(Instant)) -> u64 {
        let failures = self.verify_parts(budget, over);
        self.advance();
        failures
    }

    fn verify_parts(&mut self, budget: &mut Budget, mut over: impl FnMut(Instant)) -> u64 {
        let mut failures = 0;
        let Some(terms) = self.terms() else { return failures };
        while let Some(PartToVerify { announcement, since, blocks_done }) = self.verifying.front_mut() {
            let Announcement { first_layer, layers, first_block, sums } = announcement;
            let (first_layer, layers) = (*first_layer, *layers);
            let offset = terms.cut.offset_here(first_layer) as usize;
            let len = terms.cut.len(&(first_layer..first_layer + layers)) as usize;
            let first = (*first_block - self.first_block) as usize;
            while let Some(expected) = sums.get(*blocks_done) {
                let block = first + *blocks_done;
                let is_next = self.layers_verified[block] == first_layer;
                let mut is_good = false;
                if is_next {
                    if budget.is_spent() {
                        return failures;
                    }
                    let slot = &self.slots[block];
                    if first_layer + layers == self.layers {
                        // The sender has nothing left to write: if the fabric checks generations, no write
                        // that begins later can change the bytes that are verified now; one that began
                        // earlier is a stray.
                        self.grants[block] = None;
                    }
                    if slot.has_stray_writes() {
                        // A write of a peer is in progress in a block that is complete: the block counts as
                        // damaged.
                        failures += 1;
                        self.corrupted = true;
                        self.running_checksum.reset();
                        *blocks_done += 1;
                        continue;
                    }
                    let row = terms.cut.row_here();
                    let piece = SlotRows { slab: slot.slab(), slot: slot.slot(), offset, len, row };
                    let Some(sum) = self.running_checksum.advance(terms.checksum, &piece, budget) else {
                        return failures;
                    };
                    is_good = sum == *expected;
                }
                if is_good {
                    self.layers_verified[block] += layers;
                } else {
                    failures += 1;
                    self.corrupted = true;
                }
                *blocks_done += 1;
            }
            over(*since);
            self.verifying.pop_front();
        }
        failures
    }

    /// Whether [`Inbound::verify`] has something to do.
    pub(crate) fn has_parts(&self) -> bool {
        !self.verifying.is_empty()
    }

    /// Whether parts that have arrived are not verified yet, by the processor or by a device.
    pub(crate) fn is_verifying(&self) -> bool {
        self.sums_open > 0 || self.has_parts()
    }

    /// Takes the device's verdict on layers of a block. Returns the number of blocks that failed: 0 or 1.
    pub(crate) fn summed(&mut self, block: u32, layers: u16, is_good: bool) -> u64 {
        self.sums_open -= 1;
        if is_good {
            self.layers_verified[block as usize] += layers;
            self.advance();
        }
        self.corrupted |= !is_good;
        u64::from(!is_good)
    }

    /// Returns the bytes shared with the sender, and the number of leading layers of each block that are
    /// verified.
    pub(crate) fn view(&self) -> Option<(SharedHeads, &[u16])> {
        self.terms().map(|terms| (terms.cut, &*self.layers_verified))
    }

    /// Advances `verified_blocks` over the blocks that are complete now, once each in a transfer.
    fn advance(&mut self) {
        while self.layers_verified.get(self.verified_blocks) == Some(&self.layers) {
            self.verified_blocks += 1;
        }
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.verified_blocks == self.slots.len()
    }
}

#[cfg(test)]
mod tests {
    use dataplane_fabric::testing::pool;

    use super::*;
    use crate::checksum::Checksum;
    use crate::shard::PieceLayout;

    const LAYOUT: PieceLayout = PieceLayout::whole(2, 256, 1);

    fn inbound(blocks: usize) -> Inbound {
        let pool = pool("inbound");
        let slots = (0..blocks).map(|_| pool.acquire().expect("a slot")).collect();
        let now = Instant::now();
        let mut inbound = Inbound::new(PeerId(1), 0, [0; 16], 0, slots, LAYOUT.layers, now);
        let cut = SharedHeads::between(&LAYOUT, &LAYOUT).expect("equal layouts");
        inbound.reserve(NegotiatedParameters { cut, checksum: Checksum::Xxh3 }, now);
        inbound
    }

    #[test]
    fn what_is_announced_again_and_again_is_not_kept() {
        let (mut inbound, now) = (inbound(4), Instant::now());
        let wrong = vec![1; 4];
        for sequence in 0..1000 {
            let announced = inbound.announce(1, sequence, (0, 1), 0, wrong.clone(), now).expect("it fits");
            let landed = inbound.landed(1, sequence, now);
            // Two parts of one layer each are all that four blocks of two layers can be.
            assert_eq!((announced.failures > 0, landed.starts_verifying), (sequence >= 2, sequence == 0));
        }
        assert_eq!(inbound.verifying.len(), 2);
        assert!(
            inbound.announce(1, 1001, (0, 1), 0, Vec::new(), now).is_none(),
            "an announcement of nothing"
        );
        // Four blocks failed twice; nothing is left to be verified.
        assert_eq!(inbound.verify(&mut Budget::new(usize::MAX), |_| ()), 8);
        assert!(inbound.corrupted && !inbound.has_parts() && inbound.verified_blocks == 0);
    }

    #[test]
    fn verification_goes_on_where_its_budget_ended() {
        let (mut inbound, now) = (inbound(3), Instant::now());
        let good = xxhash_rust::xxh3::xxh3_64(&[0; 512]);
        let landing = inbound.landed(1, 9, now);
        assert!(!landing.starts_verifying);
        assert!(
            inbound
                .announce(1, 9, (0, 2), 0, vec![good, good, good + 1], now)
                .expect("it fits")
                .starts_verifying
        );
        let steps: Vec<(u64, usize)> =
            (0..4).map(|_| (inbound.verify(&mut Budget::new(1), |_| ()), inbound.verified_blocks)).collect();
        assert_eq!(steps, [(0, 1), (0, 2), (1, 2), (0, 2)]);
        assert!(inbound.corrupted && !inbound.is_verifying());
    }
}
