//! Look-up, match and lease: the hot path of every reader. Any thread, no lock, no allocation beyond what the
//! caller's vectors need; one line of the index and one record per block, loaded in batches so that their cache
//! misses overlap.
//!
//! A lease and [`Catalog::touch`] count as a use. [`Catalog::contains`] and [`Catalog::match_prefix`] do not,
//! because planners and routers ask many times for one use; [`Catalog::pin`] holds a block without one, for a
//! store's own bookkeeping.

use std::ops::ControlFlow;

use kvstore_block::BlockIdentity;

use crate::catalog::{BlockSlots, Catalog, NOWHERE};
use crate::config::{TIERS_MAX, TierIndex};
use crate::index::hash_halves;
use crate::lease::Lease;
use crate::record::halves;
use crate::sketch::FrequencySketch;
use crate::tier::Tier;

/// Blocks whose cache misses overlap.
const BATCH: usize = 16;

impl Catalog {
    /// Whether the block is in any tier.
    #[must_use]
    pub fn contains(&self, identity: &BlockIdentity) -> bool {
        self.places(identity).is_some()
    }

    /// Returns the block's slots, if it is in any tier.
    #[must_use]
    pub fn places(&self, identity: &BlockIdentity) -> Option<BlockSlots> {
        let identity = halves(identity);
        self.places_of(identity, hash_halves(identity))
    }

    fn places_of(&self, identity: [u64; 2], hash: u64) -> Option<BlockSlots> {
        let mut places = BlockSlots([NOWHERE; TIERS_MAX]);
        let mut found = false;
        self.shared.index.visit::<()>(hash, |tier, slot| {
            if self.shared.tiers[usize::from(tier)].records[slot as usize].holds(identity) {
                places.0[usize::from(tier)] = slot;
                found = true;
            }
            ControlFlow::Continue(())
        });
        found.then_some(places)
    }

    /// Appends the slots of the blocks of the longest prefix of `chain` that is in any tier; returns its
    /// length. The answer is not a promise: a block may be gone when it is asked for.
    pub fn match_prefix(&self, chain: &[BlockIdentity], places: &mut Vec<BlockSlots>) -> usize {
        let before = places.len();
        for batch in chain.chunks(BATCH) {
            let hashes = self.warm(batch);
            let found = batch.iter().zip(hashes);
            let found = found.map_while(|(identity, hash)| self.places_of(halves(identity), hash));
            let wanted = places.len() + batch.len();
            places.extend(found);
            if places.len() < wanted {
                break;
            }
        }
        places.len() - before
    }

    /// Holds the block in its slot of this tier.
    #[must_use]
    pub fn lease(&self, tier: TierIndex, identity: &BlockIdentity) -> Option<Lease> {
        let identity = halves(identity);
        let lease = self.lease_in(self.tier(tier)?, identity, hash_halves(identity))?;
        self.count(tier, 1);
        Some(lease)
    }

    /// Holds the longest prefix of `chain` that this tier has; appends the leases and returns how many.
    pub fn lease_prefix(&self, tier: TierIndex, chain: &[BlockIdentity], leases: &mut Vec<Lease>) -> usize {
        let Some(of) = self.tier(tier) else { return 0 };
        let before = leases.len();
        for batch in chain.chunks(BATCH) {
            let hashes = self.warm(batch);
            if let Some(sketch) = &of.sketch {
                hashes[..batch.len()].iter().for_each(|&hash| sketch.warm(hash));
            }
            let held = batch.iter().zip(hashes);
            let held = held.map_while(|(identity, hash)| self.lease_in(of, halves(identity), hash));
            let wanted = leases.len() + batch.len();
            leases.extend(held);
            if leases.len() < wanted {
                break;
            }
        }
        self.count(tier, leases.len() - before);
        leases.len() - before
    }

    /// Holds the block in its slot of this tier as a lease does, but does not count as a use: for code that
    /// moves or watches blocks that no request has asked for. The eviction policies do not see it.
    #[must_use]
    pub fn pin(&self, tier: TierIndex, identity: &BlockIdentity) -> Option<Lease> {
        let identity = halves(identity);
        self.pin_in(self.tier(tier)?, identity, hash_halves(identity))
    }

    /// The same for the longest prefix of `chain` that this tier has; appends the pins and returns how many.
    pub fn pin_prefix(&self, tier: TierIndex, chain: &[BlockIdentity], pins: &mut Vec<Lease>) -> usize {
        let before = pins.len();
        for batch in chain.chunks(BATCH) {
            // The lines of the index are on their way for the whole batch.
            self.warm(batch);
            let wanted = pins.len() + batch.len();
            pins.extend(batch.iter().map_while(|identity| self.pin(tier, identity)));
            if pins.len() < wanted {
                break;
            }
        }
        pins.len() - before
    }

    /// Notes a use of the blocks of `chain` that this tier has, as a lease would.
    pub fn touch(&self, tier: TierIndex, chain: &[BlockIdentity]) {
        let Some(of) = self.tier(tier) else { return };
        for identity in chain {
            let hash = hash_halves(halves(identity));
            if let Some(slot) = of.find(&self.shared.index, hash, halves(identity)) {
                of.touch(slot, hash);
            }
        }
        self.count(tier, chain.len());
    }

    /// Recent request counts of this tier's blocks; only a tier under [`crate::PolicyKind::Cost`] has them.
    #[must_use]
    pub fn sketch(&self, tier: TierIndex) -> Option<&FrequencySketch> {
        self.tier(tier)?.sketch.as_ref()
    }

    /// Hashes of up to [`BATCH`] blocks, whose lines of the index are on their way when this returns.
    fn warm(&self, batch: &[BlockIdentity]) -> [u64; BATCH] {
        let mut hashes = [0; BATCH];
        for (identity, hash) in batch.iter().zip(&mut hashes) {
            *hash = hash_halves(halves(identity));
            self.shared.index.warm(*hash);
        }
        hashes
    }

    fn lease_in(&self, tier: &Tier, identity: [u64; 2], hash: u64) -> Option<Lease> {
        let lease = self.pin_in(tier, identity, hash)?;
        tier.touch(lease.slot(), hash);
        Some(lease)
    }

    fn pin_in(&self, tier: &Tier, identity: [u64; 2], hash: u64) -> Option<Lease> {
        let slot = self.shared.index.visit(hash, |number, slot| {
            let pinned = number == tier.number && tier.records[slot as usize].pin(identity);
            if pinned { ControlFlow::Break(slot) } else { ControlFlow::Continue(()) }
        })?;
        Some(Lease::new(self.anchor(slot), tier.number, slot))
    }

    fn count(&self, tier: TierIndex, uses: usize) {
        if let Some(sketch) = self.sketch(tier).filter(|_| uses > 0) {
            sketch.advance(uses as u64);
        }
    }
}
