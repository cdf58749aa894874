//! Blocks of a pool on this host, which are read where they lie.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use kvstore_block::BlockIdentity;
use kvstore_catalog::PolicyKind;
use kvstore_remote::with_identity;
use kvstore_store::far::{LeaseEvent, LeaseGuard, MappedBlock, OfferBatch};
use kvstore_store::{
    BandwidthTier, FetchRequest, HostTier, OfferedBlock, SecondaryTier, SecondaryTierEvent,
    SecondaryTierInbox, StoreConfig, TenantId,
};

use crate::far::{beside, prepare};
use crate::rig::{BLOCK, PATIENCE, Rig, TOKENS, chain, contents};

/// A pool that leases each block that it is asked for by itself.
struct Pool {
    inbox: SecondaryTierInbox,
    slots: Arc<SlotPool>,
    lease: Duration,
    asked: Arc<AtomicUsize>,
    /// The slots of its blocks, as they are leased.
    given: Sender<(BlockIdentity, SlotRef)>,
    events: Sender<(BlockIdentity, LeaseEvent)>,
    /// Of the blocks of a look-up, so many are in memory that is mapped.
    mapped_max: usize,
}

impl SecondaryTier for Pool {
    fn tier(&self) -> BandwidthTier {
        BandwidthTier::Remote
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    fn look_up(&mut self, request: u64, chain: &[BlockIdentity], first: usize, _deadline: Instant) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let wanted = &chain[first..];
        let blocks: Vec<MappedBlock> =
            wanted.iter().take(self.mapped_max).map(|identity| self.lease(*identity)).collect();
        let left = wanted.len() - blocks.len();
        self.inbox.send(SecondaryTierEvent::Mapped { request, blocks });
        self.inbox.send(SecondaryTierEvent::Found { request, blocks: left });
        true
    }

    fn read(&mut self, incoming: FetchRequest) -> Result<(), FetchRequest> {
        let of = |identity: &BlockIdentity| kvstore_store::Delivered {
            bytes: BLOCK as u32,
            sum: kvstore_store::DeliveredSum::Block(dataplane_checksum::checksum(&contents(identity))),
        };
        let wanted = &incoming.chain[incoming.first..];
        for (identity, target) in wanted.iter().zip(&incoming.targets) {
            target.slab().write(target.slot(), 0, &contents(identity));
        }
        let blocks = wanted.iter().map(of).collect();
        self.inbox.send(SecondaryTierEvent::Arrived { incoming, blocks });
        Ok(())
    }

    fn leave(&mut self, _request: u64) {}

    fn offer_batch(&self) -> OfferBatch {
        OfferBatch::Single { group: 1 }
    }

    fn has_room(&self, _bytes: u64) -> bool {
        true
    }

    fn offer(&mut self, _blocks: Vec<OfferedBlock>, _head: BlockIdentity) -> bool {
        true
    }
}

impl Pool {
    fn lease(&self, identity: BlockIdentity) -> MappedBlock {
        let slot = self.slots.acquire().expect("a slot of the pool");
        let bytes = contents(&identity);
        slot.slab().write(slot.slot(), 0, &bytes);
        let (slab, number, generation) =
            (Arc::clone(slot.slab()), slot.slot(), slot.slab().generation(slot.slot()));
        let events = self.events.clone();
        let guard = LeaseGuard::new(move |event| {
            // The test may be over.
            let _over = events.send((identity, event));
        });
        // The test may not look at them.
        let _unused = self.given.send((identity, slot));
        MappedBlock {
            slab,
            slot: number,
            generation,
            bytes: BLOCK as u32,
            wire_checksum: with_identity(dataplane_checksum::checksum(&bytes), &identity),
            lease: Arc::new(guard),
            until: Instant::now() + self.lease,
        }
    }
}

struct Beside {
    rig: Rig,
    slots: Arc<SlotPool>,
    given: Receiver<(BlockIdentity, SlotRef)>,
    events: Receiver<(BlockIdentity, LeaseEvent)>,
    asked: Arc<AtomicUsize>,
}

/// A store with room for four blocks in its own memory, beside a pool.
fn beside_pool(lease: Duration, mapped_max: usize) -> Beside {
    let layout = SlabLayout { slot_bytes: BLOCK, slot_count: 32 };
    let slots = SlotPool::new(Arc::new(Slab::create("of a pool", layout, PageSize::Standard).expect("slab")));
    let ((of_given, given), (of_events, events)) = (unbounded(), unbounded());
    let (asked, pool_slots) = (Arc::new(AtomicUsize::new(0)), Arc::clone(&slots));
    let of_asked = Arc::clone(&asked);
    let host = HostTier { slots: 4, pages: PageSize::Standard, eviction: PolicyKind::Lru };
    let rig = beside(None, StoreConfig::new(BLOCK, TOKENS), host, |inbox| {
        vec![Box::new(Pool {
            inbox,
            slots: pool_slots,
            lease,
            asked: of_asked,
            given: of_given,
            events: of_events,
            mapped_max,
        })]
    });
    Beside { rig, slots, given, events, asked }
}

#[test]
fn blocks_of_a_pool_are_read_where_they_lie() {
    let Beside { mut rig, given, events, asked, .. } = beside_pool(Duration::from_secs(60), usize::MAX);
    let talk = chain(1, 12);
    assert_eq!(prepare(&mut rig, TenantId(0), &talk), 12, "three times what memory has room for");
    assert_eq!((rig.store.blocks(), rig.store.leased_slots()), ([0, 0], 0), "none of them is copied");
    assert_eq!((rig.counter("far_read_blocks"), rig.counter("far_mapped_blocks")), (12, 12));
    let held = rig.store.hold_now(&talk).expect("all are there");
    assert_eq!(rig.onboard(&talk, PATIENCE), 12, "every byte is compared");
    for (block, identity) in held.iter().zip(&talk) {
        assert_eq!(block.to_bytes(), Some(contents(identity)));
        assert!(block.read().is_intact() && !block.is_gone());
    }
    // Soon after they were read their leases end, and they are asked for again.
    for _ in 0..12 {
        assert_eq!(events.recv_timeout(PATIENCE).expect("a lease ends").1, LeaseEvent::Ended);
    }
    assert_eq!(rig.store.look_up(&talk), 0);
    assert_eq!((prepare(&mut rig, TenantId(0), &talk), asked.load(Ordering::Relaxed)), (12, 2));
    drop(rig);
    assert_eq!(events.iter().filter(|(_, event)| *event == LeaseEvent::Ended).count(), 12);
    assert_eq!(held[0].to_bytes(), Some(contents(&talk[0])), "its memory is there for whoever reads");
    drop(given);
}

/// A block stays for each prompt whose search has told of it.
#[test]
fn a_load_leaves_the_blocks_that_another_was_told_of() {
    let Beside { mut rig, given, events, asked, .. } = beside_pool(Duration::from_secs(60), usize::MAX);
    let talk = chain(4, 6);
    let told = Instant::now();
    assert_eq!([prepare(&mut rig, TenantId(0), &talk), prepare(&mut rig, TenantId(0), &talk)], [6, 6]);
    assert_eq!(asked.load(Ordering::Relaxed), 1, "the second search found them here");
    assert_eq!(rig.onboard(&talk, PATIENCE), 6);
    let early = events.recv_timeout(Duration::from_millis(200));
    assert!(early.is_err() || told.elapsed() > Duration::from_millis(500), "{early:?} after one load of two");
    rig.onboard(&talk, PATIENCE);
    for _ in usize::from(early.is_ok())..6 {
        assert_eq!(events.recv_timeout(PATIENCE).expect("a lease ends").1, LeaseEvent::Ended);
    }
    drop(given);
}

#[test]
fn the_rest_is_copied_behind_what_is_mapped() {
    let Beside { mut rig, given, .. } = beside_pool(Duration::from_secs(60), 3);
    let talk = chain(2, 5);
    assert_eq!(prepare(&mut rig, TenantId(0), &talk), 5);
    assert_eq!((rig.store.blocks()[0], rig.counter("far_mapped_blocks")), (2, 3));
    assert_eq!(rig.onboard(&talk, PATIENCE), 5);
    drop(given);
}

#[test]
fn a_lease_that_is_over_is_given_back_and_its_blocks_are_not_known_any_more() {
    let Beside { mut rig, given, events, .. } = beside_pool(Duration::from_millis(300), usize::MAX);
    let talk = chain(3, 6);
    assert_eq!(prepare(&mut rig, TenantId(0), &talk), 6);
    let held = rig.store.hold_now(&talk).expect("all are there");
    for _ in 0..6 {
        let (_, event) = events.recv_timeout(PATIENCE).expect("the leases end, although somebody reads");
        assert_eq!(event, LeaseEvent::Ended);
    }
    let deadline = Instant::now() + PATIENCE;
    while rig.store.look_up(&talk) > 0 {
        assert!(Instant::now() < deadline, "{} blocks are known", rig.store.look_up(&talk));
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(rig.store.hold_now(&talk[..1]).is_none());
    assert_eq!(held[0].to_bytes(), Some(contents(&talk[0])), "the pool has not taken the slot yet");
    drop((held, given));
}

#[test]
fn a_slot_that_the_pool_has_taken_back_is_a_miss_and_no_damage() {
    let Beside { mut rig, slots, given, events, .. } = beside_pool(Duration::from_secs(60), usize::MAX);
    let talk = chain(4, 3);
    assert_eq!(prepare(&mut rig, TenantId(0), &talk), 3);
    let held = rig.store.hold_now(&talk).expect("all are there");
    // Against its word it gives the second block's slot to another one, with the same bytes in it.
    let mut kept: Vec<SlotRef> = Vec::new();
    for (identity, slot) in given.try_iter() {
        if identity != talk[1] {
            kept.push(slot);
        }
    }
    let other: Vec<SlotRef> = std::iter::from_fn(|| slots.acquire()).collect();
    assert_eq!(other.len(), 32 - 2);
    assert_eq!(held.iter().map(|block| block.is_gone()).collect::<Vec<_>>(), [false, true, false]);
    assert_eq!(held[1].to_bytes(), None);
    assert_eq!(rig.onboard(&talk, PATIENCE), 1);
    assert_eq!(rig.counter("checksum_failures"), 0);
    assert_eq!(
        events.recv_timeout(PATIENCE).map(|(identity, event)| (identity == talk[1], event)),
        Ok((true, LeaseEvent::Ended))
    );
    assert_eq!(rig.store.look_up(&talk), 1, "it is not known any more");
}

#[test]
fn damage_in_a_pools_memory_is_told_to_the_pool() {
    let Beside { mut rig, given, events, .. } = beside_pool(Duration::from_secs(60), usize::MAX);
    let talk = chain(5, 4);
    assert_eq!(prepare(&mut rig, TenantId(0), &talk), 4);
    let slots: Vec<(BlockIdentity, SlotRef)> = given.try_iter().collect();
    let (_, slot) = slots.iter().find(|(identity, _)| *identity == talk[2]).expect("it was leased");
    slot.slab().write(slot.slot(), 77, &[contents(&talk[2])[77] ^ 1]);
    assert_eq!(rig.onboard(&talk, PATIENCE), 2, "those before it");
    assert_eq!(rig.counter("checksum_failures"), 1);
    let told: Vec<LeaseEvent> =
        (0..2).map(|_| events.recv_timeout(PATIENCE).expect("two events").1).collect();
    assert_eq!(told, [LeaseEvent::Damaged(talk[2]), LeaseEvent::Ended]);
    assert_eq!(rig.store.look_up(&talk), 2);
}

/// Such blocks come and go with each prompt.
#[test]
fn listeners_are_told_nothing_of_blocks_of_pools() {
    let Beside { mut rig, given, events, .. } = beside_pool(Duration::from_millis(100), usize::MAX);
    let talk = chain(6, 2);
    assert_eq!(prepare(&mut rig, TenantId(0), &talk), 2);
    for _ in 0..2 {
        assert_eq!(events.recv_timeout(PATIENCE).expect("a lease ends").1, LeaseEvent::Ended);
    }
    // A block of its own memory is told of.
    rig.offload(&talk, 0);
    rig.wait_until_on_disk(0);
    rig.events_are_true(&talk);
    assert_eq!(rig.told.len(), 1);
    drop(given);
}
