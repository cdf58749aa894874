//! Tiers of other nodes as the model plays them: they may have any block, and answer when and how they are told to.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::plan::Tier;
use crossbeam_channel::{Receiver, Sender, unbounded};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use kvstore_block::BlockIdentity;
use kvstore_remote::with_identity;
use xxhash_rust::xxh3::xxh3_64;

use super::disk::write_slot;
use super::{BLOCK, Random, content};
use crate::far::{
    Delivered, DeliveredSum, FetchRequest, LeaseEvent, LeaseGuard, MappedBlock, OfferBatch, OfferedBlock,
    ReturnedSlots, SecondaryTier, SecondaryTierEvent, SecondaryTierInbox,
};

#[derive(Default)]
struct Pending {
    /// Each with the blocks that are asked for.
    look_ups: Vec<(u64, Vec<BlockIdentity>)>,
    reads: Vec<FetchRequest>,
    returned: Vec<ReturnedSlots>,
    offers: Vec<Vec<OfferedBlock>>,
    is_refusing: bool,
}

pub(super) struct ModelTier {
    tier: Tier,
    offer_batch: OfferBatch,
    patience: Duration,
    pending: Arc<Mutex<Pending>>,
}

impl ModelTier {
    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().expect("one thread")
    }
}

impl SecondaryTier for ModelTier {
    fn tier(&self) -> Tier {
        self.tier
    }

    fn patience(&self) -> Duration {
        self.patience
    }

    fn look_up(&mut self, request: u64, chain: &[BlockIdentity], first: usize, _deadline: Instant) -> bool {
        let mut pending = self.pending();
        let takes = !pending.is_refusing;
        if takes {
            pending.look_ups.push((request, chain[first..].to_vec()));
        }
        takes
    }

    fn read(&mut self, incoming: FetchRequest) -> Result<(), FetchRequest> {
        let mut pending = self.pending();
        if pending.is_refusing {
            return Err(incoming);
        }
        pending.reads.push(incoming);
        Ok(())
    }

    fn leave(&mut self, _request: u64) {}

    fn offer_batch(&self) -> OfferBatch {
        self.offer_batch
    }

    fn has_room(&self, _bytes: u64) -> bool {
        self.pending().offers.len() < 4
    }

    fn offer(&mut self, blocks: Vec<OfferedBlock>, _head: BlockIdentity) -> bool {
        let mut pending = self.pending();
        let takes = !pending.is_refusing;
        if takes {
            pending.offers.push(blocks);
        }
        takes
    }
}

/// The other side of a [`ModelTier`].
pub(super) struct OtherNodes {
    tier: Tier,
    pending: Arc<Mutex<Pending>>,
    inbox: SecondaryTierInbox,
    /// The memory of a pool, and the slots of it that are leased, by the number of the lease.
    memory: Arc<SlotPool>,
    leased: HashMap<u64, Vec<SlotRef>>,
    next_lease: u64,
    events: (Sender<Told>, Receiver<Told>),
    pub(super) delivered: u64,
    pub(super) offered: u64,
    pub(super) mapped: u64,
}

/// An event that a client tells of a lease.
type Told = (u64, LeaseEvent);

/// Slots of a pool's memory.
const POOL_SLOTS: u32 = 48;
/// Most blocks that one lease covers.
const LEASE_BLOCKS_MAX: usize = 4;

impl OtherNodes {
    pub(super) fn new(
        tier: Tier,
        patience: Duration,
        inbox: SecondaryTierInbox,
    ) -> (Box<dyn SecondaryTier>, Self) {
        let offer_batch = match tier {
            Tier::Object => OfferBatch::Run(2),
            _ => OfferBatch::Single { group: 3 },
        };
        let pending = Arc::<Mutex<Pending>>::default();
        let link = ModelTier { tier, offer_batch, patience, pending: Arc::clone(&pending) };
        let layout = SlabLayout { slot_bytes: BLOCK, slot_count: POOL_SLOTS };
        let memory =
            SlotPool::new(Arc::new(Slab::create("of a pool", layout, PageSize::Standard).expect("memory")));
        let (leased, events) = (HashMap::new(), unbounded());
        let node = Self {
            tier,
            pending,
            inbox,
            memory,
            leased,
            next_lease: 0,
            events,
            delivered: 0,
            offered: 0,
            mapped: 0,
        };
        (Box::new(link), node)
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().expect("one thread")
    }

    pub(super) fn is_idle(&self) -> bool {
        let pending = self.pending();
        pending.look_ups.is_empty()
            && pending.reads.is_empty()
            && pending.returned.is_empty()
            && pending.offers.is_empty()
    }

    pub(super) fn refuse(&self, is_refusing: bool) {
        self.pending().is_refusing = is_refusing;
    }

    /// Leases that clients have not given back.
    pub(super) fn leases(&mut self) -> usize {
        self.take_lease_events();
        self.leased.len()
    }

    fn take_lease_events(&mut self) {
        for (lease, event) in self.events.1.try_iter() {
            if event == LeaseEvent::Ended {
                assert!(self.leased.remove(&lease).is_some(), "a lease ends twice");
            }
        }
    }

    /// Leases the leading ones of these blocks in memory that is mapped, some of them wrong. Against its word the pool may take
    /// slots back before the lease is over.
    fn lease(
        &mut self,
        wanted: &[BlockIdentity],
        now: Instant,
        random: &mut Random,
        is_honest: bool,
    ) -> Vec<MappedBlock> {
        let lease = self.next_lease;
        self.next_lease += 1;
        let events = self.events.0.clone();
        let guard = Arc::new(LeaseGuard::new(move |event| {
            // The world may be over.
            let _over = events.send((lease, event));
        }));
        let until = now + Duration::from_millis(random.below(2000) as u64);
        let (mut slots, mut blocks) = (Vec::new(), Vec::new());
        for identity in wanted {
            let Some(slot) = self.memory.acquire() else { break };
            let mut bytes = content(identity);
            let checksum = dataplane_checksum::checksum(&bytes);
            if !is_honest && random.percent(5) {
                bytes[random.below(BLOCK)] ^= 1;
            }
            write_slot(&slot, &bytes);
            blocks.push(MappedBlock {
                slab: Arc::clone(slot.slab()),
                slot: slot.slot(),
                generation: slot.slab().generation(slot.slot()),
                bytes: BLOCK as u32,
                wire_checksum: with_identity(checksum, identity),
                lease: Arc::clone(&guard),
                until,
            });
            if is_honest || !random.percent(10) {
                slots.push(slot);
            }
        }
        self.leased.insert(lease, slots);
        self.mapped += blocks.len() as u64;
        blocks
    }

    /// Answers something that it was asked.
    pub(super) fn answer(&mut self, now: Instant, random: &mut Random, is_honest: bool) {
        self.take_lease_events();
        let look_up = {
            let mut pending = self.pending();
            let at = random.below(pending.look_ups.len().max(1));
            let is_turn = self.tier == Tier::Remote && random.percent(50) && at < pending.look_ups.len();
            is_turn.then(|| pending.look_ups.swap_remove(at))
        };
        if let Some((request, wanted)) = look_up {
            let found = random.below(wanted.len() + 1);
            let count = random.below(found.min(LEASE_BLOCKS_MAX) + 1);
            let blocks = self.lease(&wanted[..count], now, random, is_honest);
            let left = found - blocks.len();
            if !blocks.is_empty() {
                self.inbox.send(SecondaryTierEvent::Mapped { request, blocks });
            }
            return self.inbox.send(SecondaryTierEvent::Found { request, blocks: left });
        }
        let mut pending = self.pending();
        let kinds =
            [pending.look_ups.len(), pending.reads.len(), pending.returned.len(), pending.offers.len()];
        let asked: Vec<usize> = (0..kinds.len()).filter(|&kind| kinds[kind] > 0).collect();
        if asked.is_empty() {
            return;
        }
        let kind = *random.of(&asked);
        let at = random.below(kinds[kind]);
        let result = match kind {
            0 => {
                let (request, wanted) = pending.look_ups.swap_remove(at);
                SecondaryTierEvent::Found { request, blocks: random.below(wanted.len() + 1) }
            }
            1 => {
                let incoming = pending.reads.swap_remove(at);
                let (arrived, held) = deliver(incoming, random, is_honest);
                pending.returned.extend(held);
                arrived
            }
            2 => SecondaryTierEvent::Returned(pending.returned.swap_remove(at)),
            _ => {
                let offer = pending.offers.swap_remove(at);
                let last = offer.last().expect("a portion has blocks").identity;
                for block in &offer {
                    let bytes = block.block.to_bytes();
                    assert!(
                        bytes.is_none_or(|bytes| bytes == content(&block.identity)),
                        "another block is offered"
                    );
                }
                let mut told = (offer.len(), 0, Vec::new(), Vec::new());
                if !is_honest && random.percent(30) {
                    told.0 = 0;
                    match random.below(3) {
                        0 => told.1 = offer.len(),
                        1 => told.2 = vec![last],
                        _ => told.3 = vec![last],
                    }
                }
                let (kept, too_large, failed, refused) = told;
                SecondaryTierEvent::Offered { tier: self.tier, kept, too_large, failed, refused }
            }
        };
        drop(pending);
        self.delivered += u64::from(kind == 1);
        self.offered += u64::from(kind == 3);
        self.inbox.send(result);
    }
}

/// Writes the leading blocks of a read, some of them wrong after their checksums were taken. Some slots are kept for later.
fn deliver(
    mut incoming: FetchRequest,
    random: &mut Random,
    is_honest: bool,
) -> (SecondaryTierEvent, Option<ReturnedSlots>) {
    let targets = std::mem::take(&mut incoming.targets);
    let count = if is_honest { targets.len() } else { random.below(targets.len() + 1) };
    let identities = &incoming.chain[incoming.first..];
    let mut blocks = Vec::new();
    for (target, identity) in targets.iter().zip(identities).take(count) {
        let mut bytes = content(identity);
        let sum = match random.percent(50) {
            true => DeliveredSum::Block(dataplane_checksum::checksum(&bytes)),
            false => DeliveredSum::Xxh3(xxh3_64(&bytes)),
        };
        if !is_honest && random.percent(5) {
            bytes[random.below(BLOCK)] ^= 1;
        }
        write_slot(target, &bytes);
        blocks.push(Delivered { bytes: BLOCK as u32, sum });
    }
    let mut held = None;
    if count < incoming.slots.len() && random.percent(50) {
        let slots = incoming.slots.split_off(count);
        incoming.held = slots.len();
        held = Some(ReturnedSlots { request: incoming.request, slots });
    }
    (SecondaryTierEvent::Arrived { incoming, blocks }, held)
}
