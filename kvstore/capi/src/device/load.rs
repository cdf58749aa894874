//! Blocks of the store into a device's tensors.
//!
//! Two rounds of blocks that host memory has go on at a time: while those of one are verified and scattered, those of the next
//! are on the bus. Blocks that the disk has are asked for as many at a time as there are staging slots. The device
//! compares the checksum of what arrived in a staging slot with the one that the store has, and scatters it in any case: what is
//! not what had been stored ends the prefix, and blocks beyond the prefix may hold anything.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use dataplane_gpu::{Pair, Sums};
use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;
use kvstore_store::{HostBlock, Moved, Onboard, Throttled};

use super::Places;
use super::lane::Lane;
use super::launch::{SUMS, launch};
use crate::backend::{Backend, LoadReport, Loaded};
use crate::format::HEAD_BYTES_MIN;
use crate::status::{Failure, Status};
use crate::store::{QUEUE_PAUSE, READ_MAX};
use crate::transfer::Blocks;

/// Blocks on their way into staging slots.
struct Round {
    request: u64,
    /// Number of its first block in the transfer.
    first: usize,
    /// Its blocks in host memory. While they are held their slots go to no other block, so that a name that came to stand for
    /// another one shows ([`StoreBackend::unchanged`](crate::store::StoreBackend::unchanged)).
    held: Vec<HostBlock>,
}

/// The store's report of a round.
struct Arrived {
    request: u64,
    slots: Vec<SlotRef>,
    /// Leading slots with a block.
    count: usize,
}

/// The rounds of one transfer.
#[derive(Default)]
struct Rounds {
    under_way: VecDeque<Round>,
    /// Reports of rounds whose turn has not come.
    early: Vec<Arrived>,
}

/// How far a round came.
struct Ended {
    /// Leading blocks that are in the tensors.
    good: usize,
    /// The one behind them arrived, but not as it had been stored.
    is_damaged: bool,
}

impl Lane {
    /// How many blocks, from the first on, are in the tensors then.
    pub(super) fn load(&mut self, places: &Places, what: &Blocks) -> Result<usize, Failure> {
        let mut rounds = Rounds::default();
        let (started, mut counts) = (Instant::now(), Loaded::default());
        let loaded = self.load_rounds(places, what, &mut rounds, &mut counts);
        // The store has measured the copies out of host memory itself.
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
        // Those behind the end of the prefix: their slots are the store's until it reports.
        while let Some(round) = rounds.under_way.pop_front() {
            self.arrival(round.request, &mut rounds.early)?;
        }
        loaded
    }

    fn load_rounds(
        &mut self,
        places: &Places,
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
            let _unless_stopped = self.store.throw_away_damaged(&what.identities[loaded]);
            if tried_again == Some(loaded) {
                break;
            }
            // The disk may have the block as it had been stored.
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

    /// Has the store bring blocks from number `first` on into staging slots: as many as half of the slots take if host memory
    /// has them all, else as many as all slots take. Ahead of a round that is under way there is only the former, and no waiting.
    /// `None`: there is none.
    fn begin_round(
        &mut self,
        places: &Places,
        what: &Blocks,
        first: usize,
        is_ahead: bool,
        counts: &mut Loaded,
    ) -> Result<Option<Round>, Failure> {
        let rest = &what.identities[first..];
        let slots = places.pool.slot_count();
        let identities = &rest[..rest.len().min(slots)];
        let near = identities.len().min((slots / 2).max(1)).min(places.pool.free_count());
        // The store copies what has the right length. That a block has no meta, and so the right payload, shows in its head.
        let is_right =
            |block: &HostBlock| block.len() == places.block_bytes && block.begins_with(&[0; HEAD_BYTES_MIN]);
        let mut held = self.store.hold_present(&identities[..near], is_right);
        if held.is_empty() && !is_ahead {
            held = self.store.hold_prefix(identities, is_right, what.deadline, counts)?;
            if held.is_empty() && Instant::now() < what.deadline && self.store.is_there(&identities[0]) {
                // Before the deadline, an empty prefix of a block that is there means that its head is damaged: whoever saves
                // it again must not hear that it is there. After it the disk was late.
                let _unless_stopped = self.store.throw_away(&identities[0]);
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
        places: &Places,
        what: &Blocks,
        round: Round,
        early: &mut Vec<Arrived>,
    ) -> Result<Ended, Failure> {
        let Round { request, first, held } = round;
        let Arrived { slots, count, .. } = self.arrival(request, early)?;
        if count < held.len() {
            // A device that is lost.
            let device = self.queue.stream().synchronise();
            device.map_err(|error| super::failed("the device", &error))?;
        }
        // The store went by the names, and another block may have had one of them by then.
        let count = count.min(self.store.unchanged(&what.identities[first..], &held));
        let checksums: Vec<u64> = held.iter().take(count).map(HostBlock::checksum).collect();
        drop(held);
        if count == 0 {
            return Ok(Ended { good: 0, is_damaged: false });
        }
        let filled: Vec<u32> = slots[..count].iter().map(SlotRef::slot).collect();
        let pairs: Vec<Pair> = (filled.iter().zip(&what.blocks[first..]))
            .map(|(slot, block)| Pair { block: *block, slot: *slot })
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

    /// The store's report of a request, which comes in any order.
    fn arrival(&mut self, request: u64, early: &mut Vec<Arrived>) -> Result<Arrived, Failure> {
        if let Some(at) = early.iter().position(|arrived| arrived.request == request) {
            return Ok(early.swap_remove(at));
        }
        loop {
            let Moved::Onboarded { request: ended, slots, verified } = self.next_report()? else { continue };
            let arrived = Arrived { request: ended, slots, count: verified };
            if ended == request {
                return Ok(arrived);
            }
            early.push(arrived);
        }
    }
}
