//! Loads: blocks of the store into a device's tensors.
//!
//! Two rounds of blocks in host memory overlap: while the blocks of one are verified and scattered, those of
//! the next are on the bus. Blocks on the disk are requested in rounds of as many as there are staging slots.
//! The device compares the checksum of each filled staging slot with the one that the store has, and scatters
//! the slot in any case: a mismatch ends the prefix, and blocks behind the prefix may hold anything.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use dataplane_gpu::{BlockCopy, Sums};
use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;
use kvstore_store::{HostBlock, Onboard, StoreEvent, Throttled};

use super::StagingRoutes;
use super::copy_thread::CopyThread;
use super::launch::{SUMS, launch};
use crate::backend::{Backend, LoadReport, Loaded};
use crate::format::HEAD_BYTES_MIN;
use crate::status::{Failure, Status};
use crate::store::{QUEUE_PAUSE, READ_MAX};
use crate::transfer::Blocks;

/// Blocks in transit to staging slots.
struct Round {
    request: u64,
    /// Index of the round's first block in the transfer.
    first: usize,
    /// The round's blocks in host memory. Holding them keeps their slots from other blocks, so that
    /// [`StoreBackend::unchanged`](crate::store::StoreBackend::unchanged) detects an identity that came to name
    /// another block.
    held: Vec<HostBlock>,
}

/// The store's report of a round.
struct Arrived {
    request: u64,
    slots: Vec<SlotRef>,
    /// Number of leading slots that hold a block.
    count: usize,
}

/// The rounds of one transfer.
#[derive(Default)]
struct Rounds {
    under_way: VecDeque<Round>,
    /// Reports that arrived before their round was due.
    early: Vec<Arrived>,
}

/// Result of a round.
struct Ended {
    /// Number of leading blocks that are in the tensors.
    good: usize,
    /// Whether the next block arrived, but differs from what was stored.
    is_damaged: bool,
}

impl CopyThread {
    /// Loads blocks. Returns the number of leading blocks that are in the tensors.
    pub(super) fn load(&mut self, places: &StagingRoutes, what: &Blocks) -> Result<usize, Failure> {
        let mut rounds = Rounds::default();
        let (started, mut counts) = (Instant::now(), Loaded::default());
        let loaded = self.load_rounds(places, what, &mut rounds, &mut counts);
        // The store measures copies out of host memory itself.
        if let Some(blocks) = loaded.as_ref().ok().filter(|_| counts.asked_of_disk > 0) {
            counts.blocks = *blocks;
            self.store.observe_load(&LoadReport {
                loaded: counts,
                wanted: what.identities.len(),
                started,
                reading: Duration::ZERO,
                deadline: what.deadline,
            });
        }
        // Wait for rounds behind the end of the prefix: the store uses their slots until it reports.
        while let Some(round) = rounds.under_way.pop_front() {
            self.arrival(round.request, &mut rounds.early)?;
        }
        loaded
    }

    fn load_rounds(
        &mut self,
        places: &StagingRoutes,
        what: &Blocks,
        rounds: &mut Rounds,
        counts: &mut Loaded,
    ) -> Result<usize, Failure> {
        let total = what.identities.len();
        let rounds_max = places.pool.slot_count().min(2);
        let (mut loaded, mut asked, mut tried_again) = (0, 0, None);
        while loaded < total && !self.is_closing() {
            while asked < total && rounds.under_way.len() < rounds_max {
                let is_ahead = !rounds.under_way.is_empty();
                let Some(round) = self.begin_round(places, what, asked, is_ahead, counts)? else { break };
                asked += round.held.len();
                rounds.under_way.push_back(round);
            }
            let Some(round) = rounds.under_way.pop_front() else { break };
            let (first, count) = (round.first, round.held.len());
            let Ended { good, is_damaged } = self.end_round(places, what, round, &mut rounds.early)?;
            loaded = first + good;
            self.store.count_hits(good);
            if good == count {
                continue;
            }
            if !is_damaged {
                break;
            }
            let _unless_stopped = self.store.discard_damaged(&what.identities[loaded]);
            if tried_again == Some(loaded) {
                break;
            }
            // The disk may have an intact copy of the block.
            tried_again = Some(loaded);
            while let Some(round) = rounds.under_way.pop_front() {
                self.arrival(round.request, &mut rounds.early)?;
            }
            asked = loaded;
        }
        if loaded < total && !self.is_closing() {
            self.store.count_miss();
        }
        Ok(loaded)
    }

    /// Requests the blocks from `first` on into staging slots: up to half of the slots if host memory has all
    /// of these blocks, otherwise up to all slots. While another round is in flight, only the first kind is
    /// begun, without waiting. `None`: no round was begun.
    fn begin_round(
        &mut self,
        places: &StagingRoutes,
        what: &Blocks,
        first: usize,
        is_ahead: bool,
        counts: &mut Loaded,
    ) -> Result<Option<Round>, Failure> {
        let rest = &what.identities[first..];
        let slots = places.pool.slot_count();
        let identities = &rest[..rest.len().min(slots)];
        let near = identities.len().min((slots / 2).max(1)).min(places.pool.free_count());
        // The store copies blocks of the right length. The head shows whether a block has no meta, and so a
        // payload of the right size.
        let is_right =
            |block: &HostBlock| block.len() == places.block_bytes && block.begins_with(&[0; HEAD_BYTES_MIN]);
        let mut held = self.store.hold_present(&identities[..near], is_right);
        if held.is_empty() && !is_ahead {
            held = self.store.hold_prefix(identities, is_right, what.deadline, counts)?;
            if held.is_empty() && Instant::now() < what.deadline && self.store.is_there(&identities[0]) {
                // Before the deadline, an empty prefix although the block is present means that its head is
                // damaged. Discard it, so that a later save does not find it present. After the deadline, the
                // disk was late.
                let _unless_stopped = self.store.discard_block(&identities[0]);
            }
        }
        if held.is_empty() {
            return Ok(None);
        }
        let mut targets = self.slots(places, held.len())?;
        let deadline = Instant::now() + READ_MAX;
        self.next_request += 1;
        let request = self.next_request;
        loop {
            let chain = identities[..held.len()].iter().copied().map(BlockIdentity).collect();
            let onboard = Onboard { request, chain, first: 0, targets, deadline };
            match self.store.store().onboard_unverified(onboard) {
                Ok(()) => return Ok(Some(Round { request, first, held })),
                Err(_) if !self.store.store().is_alive() => return Err(self.stopped()),
                Err(_) if is_ahead || Instant::now() >= deadline => return Ok(None),
                Err(Throttled(refused)) => {
                    targets = refused.targets;
                    std::thread::sleep(QUEUE_PAUSE);
                }
            }
        }
    }

    /// Waits for a round's blocks, verifies them, and scatters them.
    fn end_round(
        &mut self,
        places: &StagingRoutes,
        what: &Blocks,
        round: Round,
        early: &mut Vec<Arrived>,
    ) -> Result<Ended, Failure> {
        let Round { request, first, held } = round;
        let Arrived { slots, count, .. } = self.arrival(request, early)?;
        if count < held.len() {
            // A short count may mean that the device is lost.
            let device = self.queue.stream().synchronise();
            device.map_err(|error| super::failed("the device", &error))?;
        }
        // The store looks blocks up by identity, and an identity may name another block by now.
        let count = count.min(self.store.unchanged(&what.identities[first..], &held));
        let checksums: Vec<u64> = held.iter().take(count).map(HostBlock::checksum).collect();
        drop(held);
        if count == 0 {
            return Ok(Ended { good: 0, is_damaged: false });
        }
        let filled: Vec<u32> = slots[..count].iter().map(SlotRef::slot).collect();
        let pairs: Vec<BlockCopy> = (filled.iter().zip(&what.blocks[first..]))
            .map(|(slot, block)| BlockCopy { block: *block, slot: *slot })
            .collect();
        let mut good = None;
        launch(
            &mut self.queue,
            |queue| {
                queue.verify(&places.sums, &filled, &checksums, SUMS)?;
                places.routes.iter().try_for_each(|route| queue.scatter(route, &pairs, Sums::None, 0))
            },
            |end| good = Some(end.statuses.iter().take_while(|status| **status == 0).count()),
        )?;
        let good = good.ok_or_else(|| Failure::new(Status::Panicked, "checksums are missing"))?;
        Ok(Ended { good, is_damaged: good < count })
    }

    /// Returns the store's report of a request. Reports arrive in any order.
    fn arrival(&mut self, request: u64, early: &mut Vec<Arrived>) -> Result<Arrived, Failure> {
        if let Some(at) = early.iter().position(|arrived| arrived.request == request) {
            return Ok(early.swap_remove(at));
        }
        loop {
            let StoreEvent::Onboarded { request: ended, slots, verified } = self.next_report()? else {
                continue;
            };
            let arrived = Arrived { request: ended, slots, count: verified };
            if ended == request {
                return Ok(arrived);
            }
            early.push(arrived);
        }
    }
}
