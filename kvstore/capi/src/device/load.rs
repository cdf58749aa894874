//! Blocks of the store into a device's tensors.

use std::time::Instant;

use dataplane_gpu::{Pair, Sums};
use kvstore_block::BlockIdentity;
use kvstore_store::{HostBlock, Moved, Onboard, Throttled};

use super::lane::Lane;
use super::{Places, failed};
use crate::format::HEAD_BYTES_MIN;
use crate::status::Failure;
use crate::store::{QUEUE_PAUSE, READ_MAX};
use crate::transfer::Blocks;

impl Lane {
    /// How many blocks, from the first on, are in the tensors then.
    pub(super) fn load(&mut self, places: &Places, what: &Blocks) -> Result<usize, Failure> {
        let mut loaded = 0;
        while loaded < what.identities.len() && !self.is_closing() {
            // Fewer than there is room for come when host memory cannot hold as many at a time.
            let count = self.load_round(places, what, loaded)?;
            loaded += count;
            self.store.count_loaded(count);
            if count == 0 {
                break;
            }
        }
        Ok(loaded)
    }

    /// Has the store bring blocks from `first` on into staging slots, and scatters those that came.
    fn load_round(&mut self, places: &Places, what: &Blocks, first: usize) -> Result<usize, Failure> {
        let end = what.identities.len().min(first + places.pool.slot_count());
        // The store copies what has the right length. That a block has no meta, and so the right payload, shows in its head.
        let is_right =
            |block: &HostBlock| block.len() == places.block_bytes && block.begins_with(&[0; HEAD_BYTES_MIN]);
        let held = self.store.hold_prefix(&what.identities[first..end], is_right)?;
        if held.is_empty() {
            return Ok(0);
        }
        let identities = &what.identities[first..first + held.len()];
        let mut targets = self.slots(places, held.len())?;
        let deadline = Instant::now() + READ_MAX;
        self.next_request += 1;
        let request = self.next_request;
        loop {
            let chain = identities.iter().copied().map(BlockIdentity).collect();
            match self.store.store().onboard(Onboard { request, chain, first: 0, targets, deadline }) {
                Ok(()) => break,
                Err(_) if !self.store.store().is_alive() => return Err(self.stopped()),
                Err(_) if Instant::now() >= deadline => return Ok(0),
                Err(Throttled(refused)) => {
                    targets = refused.targets;
                    std::thread::sleep(QUEUE_PAUSE);
                }
            }
        }
        let (slots, verified) = loop {
            match self.next_report()? {
                Moved::Onboarded { request: ended, slots, verified } if ended == request => {
                    break (slots, verified);
                }
                _ => {}
            }
        };
        if verified < held.len() {
            // A block that is damaged, or a device that is lost.
            self.queue.stream().synchronise().map_err(|error| failed("the device", &error))?;
        }
        // The store went by the names, and another block may have had one of them by then.
        let verified = verified.min(self.store.unchanged(identities, &held));
        drop(held);
        let pairs: Vec<Pair> = (slots.iter().zip(&what.blocks[first..]).take(verified))
            .map(|(slot, block)| Pair { block: *block, slot: slot.slot() })
            .collect();
        if !pairs.is_empty() {
            self.launch(places, &pairs, |queue, route, pairs| queue.scatter(route, pairs, Sums::None, 0))?;
        }
        Ok(verified)
    }
}
