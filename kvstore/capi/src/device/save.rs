//! Saves: blocks of a device's tensors into the store.

use std::collections::HashSet;

use dataplane_gpu::{BlockCopy, Sums};
use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;
use kvstore_store::{Offload, StoreEvent, Throttled};

use super::StagingRoutes;
use super::copy_thread::CopyThread;
use super::launch::{SUMS, launch};
use crate::backend::{ChainPosition, Identity};
use crate::status::{Failure, Status};
use crate::store::QUEUE_PAUSE;
use crate::transfer::Blocks;

impl CopyThread {
    /// Saves blocks. Returns the number of blocks that the store took or already had.
    pub(super) fn save(&mut self, places: &StagingRoutes, what: &Blocks) -> Result<usize, Failure> {
        let mut count = 0;
        let place = |at: usize| (what.identities[at], what.blocks[at], what.place(at));
        let blocks: Vec<(Identity, u64, ChainPosition)> = (0..what.identities.len()).map(place).collect();
        for round in blocks.chunks(places.pool.slot_count()) {
            if self.is_closing() {
                break;
            }
            let mut saved: HashSet<Identity> = HashSet::with_capacity(round.len());
            let (mut missing, mut seen) = (Vec::new(), HashSet::new());
            for &(identity, block, place) in round {
                if self.store.touch_if_kept(&identity) {
                    saved.insert(identity);
                } else if seen.insert(identity) {
                    missing.push((identity, block, place));
                }
            }
            let present = saved.len();
            if !missing.is_empty() {
                self.save_round(places, &missing, &mut saved)?;
            }
            self.store.count_saved(missing.len(), saved.len() - present);
            count += round.iter().filter(|(identity, ..)| saved.contains(identity)).count();
        }
        Ok(count)
    }

    /// Gathers blocks into staging slots, computes their checksums there, and hands them to the store. Returns
    /// once the store has copied each block or had no room for it. Adds the stored blocks to `saved`.
    fn save_round(
        &mut self,
        places: &StagingRoutes,
        blocks: &[(Identity, u64, ChainPosition)],
        saved: &mut HashSet<Identity>,
    ) -> Result<(), Failure> {
        let slots = self.slots(places, blocks.len())?;
        let pairs: Vec<BlockCopy> = (blocks.iter().zip(&slots))
            .map(|((_, block, _), slot)| BlockCopy { block: *block, slot: slot.slot() })
            .collect();
        let gathered: Vec<u32> = slots.iter().map(SlotRef::slot).collect();
        let mut checksums = Vec::with_capacity(slots.len());
        launch(
            &mut self.queue,
            |queue| {
                for route in &places.routes {
                    queue.gather(route, &pairs, Sums::None, 0)?;
                }
                queue.checksum(&places.sums, &gathered, SUMS)
            },
            |end| checksums.extend_from_slice(end.checksums),
        )?;
        if checksums.len() < slots.len() {
            return Err(Failure::new(Status::Panicked, "checksums are missing"));
        }
        // Discards reports of blocks stored between rounds.
        while self.moved.try_recv().is_ok() {}
        let listening = self.listening.clone();
        let _until_the_end = listening.begin();
        for (((identity, _, place), slot), checksum) in blocks.iter().zip(slots).zip(checksums) {
            let identity = BlockIdentity(*identity);
            let mut offload = Offload { identity, description: place.description(), slot };
            // The queue is full of other requests' blocks; the store works them off.
            while let Err(Throttled(refused)) = self.store.store().offload_summed(offload, checksum) {
                if !self.store.store().is_alive() {
                    return Err(self.stopped());
                }
                offload = refused;
                std::thread::sleep(QUEUE_PAUSE);
            }
        }
        let mut under_way = blocks.len();
        let wanted: HashSet<&Identity> = blocks.iter().map(|(identity, ..)| identity).collect();
        while under_way > 0 {
            match self.next_report()? {
                // The block may be evicted before the report of its copy arrives.
                StoreEvent::Stored { identity, .. } if wanted.contains(&identity.0) => {
                    saved.insert(identity.0);
                }
                StoreEvent::Offloaded { identity } => {
                    under_way -= 1;
                    // Another request may have stored the block before.
                    if self.store.is_there(&identity.0) {
                        saved.insert(identity.0);
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}
