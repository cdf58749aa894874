//! Far reads over tiers without threads: a tier that answers as its test says, on the test's own thread.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::plan::Tier;
use crossbeam_channel::{Receiver, Sender, unbounded};
use kvstore_block::BlockIdentity;
use kvstore_catalog::{PolicyKind, TenantId};
use kvstore_remote::Ticket;

use super::in_flight_reads::RemoteReads;
use super::offer::outgoing;
use super::offer_queue::{InFlightOffer, Offer, OfferQueue};
use super::{
    DeliveredSum, FetchRequest, OfferBatch, OfferedBlock, ReturnedSlots, SecondaryTier, SecondaryTierEvent,
    SecondaryTierInbox, SecondaryTiers,
};
use crate::Description;
use crate::job::{Prepare, StoreEvent};
use crate::shared::HOST;
use crate::store_thread::Message;
use crate::tiers::testing::{host_tiers, numbered_chain};
use crate::tiers::{Arrival, Origin, Tiers};

const BLOCK: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(60);

/// State that a [`LateTier`] and its test share.
#[derive(Default)]
struct Reads {
    in_flight: RemoteReads,
    /// Reads that keep slots.
    late: Vec<Ticket>,
    made: u64,
    /// Leading blocks of a read that arrive by its deadline.
    arriving: usize,
    /// The block of a read that is written once more after it was verified.
    damaged_after: Option<usize>,
    /// Blocks come with xxh3 and not with the checksum that their writers took.
    is_hashed: bool,
    /// The node has nothing.
    is_empty: bool,
    /// The node answers when it is told to.
    is_slow: bool,
}

fn xxh3_of(slot: &dataplane_memory::SlotRef, bytes: usize) -> u64 {
    let mut read = vec![0; bytes];
    slot.slab().read(slot.slot(), 0, &mut read);
    xxhash_rust::xxh3::xxh3_64(&read)
}

/// Another node that has every block, and whose reads end at their deadline with some blocks still on their way.
struct LateTier {
    reads: Arc<Mutex<Reads>>,
    inbox: SecondaryTierInbox,
    block_bytes: usize,
}

impl SecondaryTier for LateTier {
    fn tier(&self) -> Tier {
        Tier::Remote
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    fn look_up(&mut self, request: u64, chain: &[BlockIdentity], first: usize, _deadline: Instant) -> bool {
        let (is_empty, is_slow) = {
            let reads = self.reads.lock().expect("one thread");
            (reads.is_empty, reads.is_slow)
        };
        if is_slow {
            return true;
        }
        self.inbox.send(SecondaryTierEvent::Found {
            request,
            blocks: if is_empty { 0 } else { chain.len() - first },
        });
        true
    }

    fn read(&mut self, mut incoming: FetchRequest) -> Result<(), FetchRequest> {
        let mut reads = self.reads.lock().expect("one thread");
        let ticket = Ticket(reads.made);
        reads.made += 1;
        // The driver hands the targets to the client.
        let targets = std::mem::take(&mut incoming.targets);
        let identities = &incoming.chain[incoming.first..];
        let sum = |(identity, target)| {
            (self.block_bytes as u32, kvstore_remote::checksum(identity, target, self.block_bytes))
        };
        let sums: Vec<(u32, u64)> = identities.iter().zip(&targets).take(reads.arriving).map(sum).collect();
        let hashed: Vec<u64> = targets.iter().map(|target| xxh3_of(target, self.block_bytes)).collect();
        if let Some(damaged) = reads.damaged_after.and_then(|block| targets.get(block)) {
            damaged.slab().write(damaged.slot(), 0, b"a late write");
        }
        let is_held = reads.arriving < incoming.slots.len();
        reads.in_flight.begin(ticket, incoming);
        if is_held {
            reads.late.push(ticket);
        }
        let mut arrived = reads.in_flight.fetched(ticket, &sums, is_held).expect("it has begun");
        if let SecondaryTierEvent::Arrived { blocks, .. } = &mut arrived
            && reads.is_hashed
        {
            blocks.iter_mut().zip(hashed).for_each(|(block, hash)| block.sum = DeliveredSum::Xxh3(hash));
        }
        self.inbox.send(arrived);
        Ok(())
    }

    fn leave(&mut self, _request: u64) {}

    fn offer_batch(&self) -> OfferBatch {
        OfferBatch::Single { group: 32 }
    }

    fn has_room(&self, _bytes: u64) -> bool {
        true
    }

    fn offer(&mut self, _blocks: Vec<OfferedBlock>, _head: BlockIdentity) -> bool {
        true
    }
}

/// The store's thread without the thread.
struct Rig {
    tiers: Tiers,
    moved: Receiver<StoreEvent>,
    far: SecondaryTiers,
    messages: Receiver<Message>,
    reads: Arc<Mutex<Reads>>,
}

impl Rig {
    fn new(slots: u32, block_bytes: usize) -> Self {
        Self::over(1, slots, block_bytes)
    }

    /// A rig with several tiers, asked one after the other, that do alike.
    fn over(links: usize, slots: u32, block_bytes: usize) -> Self {
        let (tiers, moved) = host_tiers(slots, block_bytes, PolicyKind::Lru);
        let (sender, messages) = unbounded();
        let reads = Arc::<Mutex<Reads>>::default();
        let link = |_| {
            let (reads, inbox) = (Arc::clone(&reads), SecondaryTierInbox(sender.clone()));
            Box::new(LateTier { reads, inbox, block_bytes }) as Box<dyn SecondaryTier>
        };
        let far = SecondaryTiers::new((0..links).map(link).collect());
        Self { tiers, moved, far, messages, reads }
    }

    fn reads(&self) -> MutexGuard<'_, Reads> {
        self.reads.lock().expect("one thread")
    }

    /// Asks for a chain of which so many blocks arrive in time, and takes in every answer.
    fn ask(&mut self, request: u64, chain: &[BlockIdentity], arriving: usize) {
        self.reads().arriving = arriving;
        let (chain, deadline) = (chain.to_vec(), Instant::now() + PATIENCE);
        let (metas, tenant) = (Vec::new(), TenantId(0));
        let prepare = Prepare { request, chain, device_blocks: 0, metas, tenant, deadline };
        self.far.prepare(prepare, &mut self.tiers);
        self.take_answers();
    }

    fn take_answers(&mut self) {
        while let Ok(message) = self.messages.try_recv() {
            let Message::Far(result) = message else { panic!("only the tier answers") };
            self.tiers.now = Instant::now();
            self.far.answered(result, &mut self.tiers);
        }
    }

    /// Takes in delivered blocks as one round of the store's thread does; false when there were none.
    fn round(&mut self) -> bool {
        self.tiers.hashing.refill();
        let has_arrived = self.far.advance(&mut self.tiers);
        self.far.check_guards();
        has_arrived
    }

    /// The same until the search is over; returns how many blocks are here then.
    fn search(&mut self, request: u64, chain: &[BlockIdentity], arriving: usize) -> usize {
        self.ask(request, chain, arriving);
        while self.round() {
            self.take_answers();
        }
        let is_end = |moved: StoreEvent| match moved {
            StoreEvent::Prepared { request: ended, blocks } if ended == request => Some(blocks),
            _ => None,
        };
        self.moved.try_iter().find_map(is_end).expect("the search has ended")
    }

    /// The fabric lets go of the slots of every read that has ended late.
    fn release_held(&mut self) -> Vec<SecondaryTierEvent> {
        let mut reads = self.reads();
        let late = std::mem::take(&mut reads.late);
        late.into_iter().filter_map(|ticket| reads.in_flight.returned(ticket)).collect()
    }

    fn answer(&mut self, results: Vec<SecondaryTierEvent>) {
        results.into_iter().for_each(|result| self.far.answered(result, &mut self.tiers));
    }
}

/// However often a read ends at its deadline with slots that the fabric may still write, each slot counts as lent until it
/// comes back and no longer: the next read finds the same room.
#[test]
fn ten_thousand_far_reads_that_end_late_give_back_every_slot_they_were_lent() {
    let mut rig = Rig::new(16, BLOCK);
    for number in 0..10_000_u64 {
        let arriving = number as usize % 4;
        assert_eq!(rig.search(number, &numbered_chain(number, 4), arriving), arriving, "search {number}");
        assert_eq!(rig.far.lent(), 4 - arriving, "search {number}: the rest is on its way");
        rig.far.check_guards();
        let late = rig.release_held();
        rig.answer(late);
        assert_eq!(rig.far.lent(), 0, "search {number}");
        rig.far.check_guards();
    }
    assert_eq!(rig.reads().made, 10_000, "each search was read");
    assert_eq!(rig.tiers.shared.catalog.census(HOST).under_way, 0);
}

/// Far reads take half of host memory at a time, so what the first tier has does not all fit: the second one brings the rest when the
/// first part is in.
#[test]
fn a_tier_whose_blocks_did_not_fit_does_not_stop_the_next_one() {
    let mut rig = Rig::over(2, 16, BLOCK);
    assert_eq!(rig.search(1, &numbered_chain(1, 12), 8), 12);
    let counted = rig.tiers.shared.counters.snapshot();
    let of = |name: &str| counted.iter().find(|(known, ..)| *known == name).expect("a counter").2;
    assert_eq!((of("far_searches"), of("far_cut_searches"), of("far_unanswered_questions")), (1, 1, 0));
}

/// Otherwise one late answer would mark a node as slow for good, because the node would not be asked any
/// more.
#[test]
fn answers_that_bring_nothing_show_how_long_a_node_takes() {
    let mut rig = Rig::new(16, BLOCK);
    rig.reads().is_empty = true;
    rig.tiers.shared.observe_far(Tier::Remote, 0, Duration::from_millis(300), true);
    assert!(rig.tiers.shared.latency(Tier::Remote) > Duration::from_millis(100));
    for number in 0..4 {
        assert_eq!(rig.search(number, &numbered_chain(number, 4), 4), 0);
    }
    assert!(rig.tiers.shared.latency(Tier::Remote) < Duration::from_millis(100));
}

/// A prompt that is computed in 5 ms waits no longer: that a node has not answered by then says little.
#[test]
fn an_answer_that_comes_after_its_search_shows_how_long_a_node_takes() {
    let mut rig = Rig::new(16, BLOCK);
    rig.reads().is_slow = true;
    let start = Instant::now();
    let after = |millis| start + Duration::from_millis(millis);
    let ask = |rig: &mut Rig, number: u64, millis: u64| {
        rig.tiers.now = after(millis);
        let (chain, deadline) = (numbered_chain(number, 4), after(millis + 5));
        let (metas, tenant) = (Vec::new(), TenantId(0));
        let prepare = Prepare { request: number, chain, device_blocks: 0, metas, tenant, deadline };
        rig.far.prepare(prepare, &mut rig.tiers);
        rig.far.expire(after(millis + 5), &mut rig.tiers);
    };
    for number in 0..8 {
        ask(&mut rig, number, 100 * number);
        rig.tiers.now = after(100 * number + 7);
        rig.far.answered(SecondaryTierEvent::Found { request: number, blocks: 0 }, &mut rig.tiers);
    }
    let latency = rig.tiers.shared.latency(Tier::Remote);
    assert!((6..8).contains(&latency.as_millis()), "{latency:?}");
    // One that never comes counts when its tier's time is up.
    for number in 8..20 {
        ask(&mut rig, number, 100 * number);
    }
    rig.far.expire(after(100_000), &mut rig.tiers);
    assert!(
        rig.tiers.shared.latency(Tier::Remote) > PATIENCE,
        "{:?}",
        rig.tiers.shared.latency(Tier::Remote)
    );
}

/// A late write, after the tier has verified a block, is found by the block's readers: its checksum is the
/// one that its writer took. A block that came without that is hashed when it becomes part of host memory;
/// neither it nor the blocks behind it are taken in.
#[test]
fn a_block_that_changes_after_its_tier_verified_it_is_not_served() {
    for (is_hashed, taken_in) in [(false, 4), (true, 2)] {
        let mut rig = Rig::new(16, BLOCK);
        let chain = numbered_chain(1, 4);
        (rig.reads().damaged_after, rig.reads().is_hashed) = (Some(2), is_hashed);
        assert_eq!(rig.search(1, &chain, 4), taken_in);
        let mut served = Vec::new();
        rig.tiers.shared.catalog.lease_prefix(HOST, &chain, &mut served);
        let is_intact = |lease: &kvstore_catalog::Lease| rig.tiers.shared.memory.is_intact(lease);
        assert_eq!(served.iter().take_while(|lease| is_intact(lease)).count(), 2, "those in front of it");
        drop(served);
        // A reader that finds it throws it away, and the blocks behind it are read again.
        rig.tiers.forget_on_host(&chain[2..3]);
        (rig.reads().damaged_after, rig.reads().is_hashed) = (None, false);
        assert_eq!(rig.search(2, &chain, 2), 4, "they are read again");
        assert_eq!((rig.far.lent(), rig.tiers.shared.catalog.census(HOST).under_way), (0, 0));
    }
}

/// The control: a share of the count that is not given back with its slot is found in the same round.
#[test]
#[should_panic(expected = "guards of slots lent to far reads exist")]
fn a_lost_decrement_of_the_lent_slots_is_found() {
    let mut rig = Rig::new(16, BLOCK);
    rig.search(1, &numbered_chain(1, 4), 2);
    rig.far.check_guards();
    let mut late = rig.release_held();
    let Some(SecondaryTierEvent::Returned(ReturnedSlots { slots, .. })) = late.last_mut() else {
        panic!("two slots are late")
    };
    slots.pop().expect("two slots are late").lose_share();
    rig.answer(late);
    rig.far.check_guards();
}

/// A block that is offered to two tiers of other nodes was asked for by no request: it goes before a younger
/// one that is not offered, as S3-FIFO has it for blocks that were used at most once.
#[test]
fn the_pins_of_offers_and_searches_are_no_uses() {
    let (mut tiers, _moved) = host_tiers(12, BLOCK, PolicyKind::S3Fifo);
    let (sender, _messages) = unbounded();
    let link = || -> Box<dyn SecondaryTier> {
        Box::new(LateTier {
            reads: Arc::default(),
            inbox: SecondaryTierInbox(sender.clone()),
            block_bytes: BLOCK,
        })
    };
    let mut far = SecondaryTiers::new(vec![link(), link()]);
    let blocks = [numbered_chain(1, 1), numbered_chain(2, 1)].concat();
    for identity in &blocks {
        register(&mut tiers, *identity, BLOCK);
    }
    for _ in 0..3 {
        far.offer(blocks[0], &tiers);
        assert!(far.advance_offers(Instant::now(), &mut tiers));
        let deadline = Instant::now() + PATIENCE;
        let (chain, metas, tenant) = (vec![blocks[0]], Vec::new(), TenantId(0));
        let prepare = Prepare { request: 1, chain, device_blocks: 0, metas, tenant, deadline };
        far.prepare(prepare, &mut tiers);
    }
    let mut evicting = Vec::new();
    assert_eq!(tiers.shared.catalog.evict(HOST, 1, &mut evicting), 1);
    assert_eq!(evicting[0].identity(), blocks[0]);
}

/// Puts a block of zeros, the first of its chain, into host memory; its slot comes back.
fn register(tiers: &mut Tiers, identity: BlockIdentity, bytes: usize) -> u32 {
    register_at(tiers, &[identity], 0, bytes)
}

/// The same with a block of a chain.
fn register_at(tiers: &mut Tiers, chain: &[BlockIdentity], position: usize, bytes: usize) -> u32 {
    let identity = chain[position];
    let parent = position.checked_sub(1).map(|before| chain[before]);
    let position = position as u32;
    let filling = tiers.host_slot_now(TenantId(0)).expect("a free slot").fill();
    let slot = filling.slot();
    let arrival = Arrival {
        identity,
        parent,
        position,
        bytes: bytes as u32,
        checksum: tiers.checksum(slot, bytes),
        origin: Origin::Pool,
        description: Some(Description { parent, position, meta: Arc::default(), tenant: TenantId(0) }),
    };
    assert!(tiers.register(filling, arrival));
    slot
}

/// Blocks that a tier delivers together are hashed by at most eight MiB a round, so that a request for other
/// blocks waits for one round and not for all of them; the search ends when all of them are here.
#[test]
fn blocks_that_arrive_together_are_hashed_in_bounded_rounds() {
    let mut rig = Rig::new(48, 1 << 20);
    rig.reads().is_hashed = true;
    let chain = numbered_chain(1, 20);
    rig.ask(1, &chain, 20);
    let mut here = vec![rig.tiers.shared.match_count(&chain)];
    while rig.round() {
        here.push(rig.tiers.shared.match_count(&chain));
    }
    assert_eq!(here, [0, 8, 16, 20]);
    let ended = |moved: &StoreEvent| matches!(moved, StoreEvent::Prepared { request: 1, blocks: 20 });
    assert!(rig.moved.try_iter().any(|moved| ended(&moved)));
    assert_eq!(rig.far.lent(), 0);
}

/// Blocks on their way to other nodes wait for their turn: it reads each of them once, and no more bytes than its part of
/// a turn, however many wait. Damage is found in the same pass.
#[test]
fn offers_take_a_bounded_part_of_a_turn_and_each_block_is_read_once() {
    const BYTES: usize = 64 << 10;
    const PER_TURN: usize = BYTES / 2;
    let (mut tiers, _moved) = host_tiers(8, BYTES, PolicyKind::Lru);
    let blocks: Vec<BlockIdentity> = (0..4).flat_map(|number| numbered_chain(number, 1)).collect();
    let slots: Vec<u32> = blocks.iter().map(|identity| register(&mut tiers, *identity, BYTES)).collect();
    let (mut queue, count) = (OfferQueue::default(), Arc::<AtomicUsize>::default());
    for identity in &blocks {
        let block = outgoing(*identity, &tiers).expect("it is there");
        let counted = InFlightOffer::one_of(&count, 4).expect("four may be on their way");
        queue.push(Box::new(Offer { block, group: *identity, _counted: counted }));
    }
    assert!(InFlightOffer::one_of(&count, 4).is_none(), "a fifth is not offered");
    tiers.shared.memory.slab().write(slots[2], BYTES - 1, &[1]);
    let (mut sent, mut turns) = (Vec::new(), 0);
    while !queue.is_empty() {
        turns += 1;
        let mut budget = PER_TURN;
        while let Some((offer, checksum)) = queue.advance(&mut budget) {
            let OfferedBlock { identity, slot, .. } = &offer.block;
            let Some(checksum) = checksum else { continue };
            assert_eq!(checksum, kvstore_remote::checksum(identity, slot, BYTES));
            sent.push(*identity);
        }
        assert_eq!(budget, 0, "turn {turns}");
    }
    assert_eq!(turns, 4 * BYTES / PER_TURN);
    assert_eq!(sent, [blocks[0], blocks[1], blocks[3]], "the damaged one is not sent");
    assert_eq!(count.load(Ordering::Relaxed), 0);
}

const REFUSING: usize = usize::MAX;

/// A tier that takes so many blocks at a time and tells which.
struct NarrowTier {
    /// [`REFUSING`]: it says that it has room, and takes nothing.
    room: Arc<AtomicUsize>,
    offered: Sender<BlockIdentity>,
}

impl SecondaryTier for NarrowTier {
    fn tier(&self) -> Tier {
        Tier::Remote
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    fn look_up(&mut self, _: u64, _: &[BlockIdentity], _: usize, _: Instant) -> bool {
        false
    }

    fn read(&mut self, incoming: FetchRequest) -> Result<(), FetchRequest> {
        Err(incoming)
    }

    fn leave(&mut self, _request: u64) {}

    fn offer_batch(&self) -> OfferBatch {
        OfferBatch::Single { group: 32 }
    }

    fn has_room(&self, _bytes: u64) -> bool {
        self.room.load(Ordering::Relaxed) > 0
    }

    fn offer(&mut self, blocks: Vec<OfferedBlock>, _head: BlockIdentity) -> bool {
        if self.room.load(Ordering::Relaxed) == REFUSING {
            return false;
        }
        self.room.fetch_sub(1, Ordering::Relaxed);
        blocks.iter().all(|block| self.offered.send(block.identity).is_ok())
    }
}

/// A burst of new blocks is larger than what a tier takes at a time: none of them is left out. Those that it could not take are
/// offered again after a pause, which grows with each failure in a row.
#[test]
fn a_tier_is_offered_every_block_when_it_has_room() {
    const BLOCKS: usize = 24;
    let (mut tiers, _moved) = host_tiers(BLOCKS as u32, BLOCK, PolicyKind::Lru);
    let blocks: Vec<BlockIdentity> =
        (0..BLOCKS as u64).flat_map(|number| numbered_chain(number, 1)).collect();
    let (sender, offered) = unbounded();
    let room = Arc::new(AtomicUsize::new(0));
    let mut far =
        SecondaryTiers::new(vec![Box::new(NarrowTier { room: Arc::clone(&room), offered: sender })]);
    for identity in &blocks {
        register(&mut tiers, *identity, BLOCK);
        far.offer(*identity, &tiers);
    }
    let now = Instant::now();
    assert!(!far.advance_offers(now, &mut tiers), "there is no room");
    let answer = |kept, failed| {
        let refused = Vec::new();
        SecondaryTierEvent::Offered { tier: Tier::Remote, kept, too_large: 0, failed, refused }
    };
    let mut taken = Vec::new();
    while taken.len() < BLOCKS {
        room.store(5, Ordering::Relaxed);
        assert!(far.advance_offers(now, &mut tiers));
        let some: Vec<BlockIdentity> = offered.try_iter().collect();
        assert!(some.len() <= 5);
        far.answered(answer(some.len(), Vec::new()), &mut tiers);
        taken.extend(some);
    }
    assert_eq!(taken, blocks, "in their order");
    assert!(!far.advance_offers(now, &mut tiers) && far.next_deadline().is_none());

    room.store(BLOCKS, Ordering::Relaxed);
    let mut pauses = Vec::new();
    for _ in 0..3 {
        far.answered(answer(0, vec![blocks[0], blocks[1]]), &mut tiers);
        let paused = Instant::now();
        assert!(!far.advance_offers(paused, &mut tiers), "it is left alone");
        let resumes = far.next_deadline().expect("they wait");
        assert!(far.advance_offers(resumes, &mut tiers));
        assert_eq!(offered.try_iter().collect::<Vec<_>>(), blocks[..2]);
        pauses.push(resumes - paused);
    }
    assert!(pauses[1] > pauses[0] && pauses[2] > pauses[1], "{pauses:?}");
    // As soon as a node can be reached again there is no pause, and new blocks are held.
    far.answered(answer(0, vec![blocks[0]]), &mut tiers);
    assert!(!far.advance_offers(Instant::now(), &mut tiers), "it is left alone");
    far.answered(SecondaryTierEvent::Reached(Tier::Remote), &mut tiers);
    assert_eq!(tiers.shared.catalog.census(HOST).pinned, 1, "the block that waits is held");
    assert!(far.advance_offers(Instant::now(), &mut tiers));
    assert_eq!(offered.try_iter().collect::<Vec<_>>(), blocks[..1]);
    // A node that is full is asked a few times for each block.
    for _ in 0..10 {
        let refused = vec![blocks[4]];
        far.answered(
            SecondaryTierEvent::Offered {
                tier: Tier::Remote,
                kept: 0,
                too_large: 0,
                failed: Vec::new(),
                refused,
            },
            &mut tiers,
        );
        let Some(resumes) = far.next_deadline() else { break };
        assert!(far.advance_offers(resumes, &mut tiers));
    }
    assert_eq!(offered.try_iter().collect::<Vec<_>>(), [blocks[4]; 3]);
    // A tier that has room and takes nothing is left alone, too: it would be asked again in each round.
    far.answered(answer(1, Vec::new()), &mut tiers);
    room.store(REFUSING, Ordering::Relaxed);
    far.offer(blocks[3], &tiers);
    assert!(!far.advance_offers(Instant::now(), &mut tiers));
    let resumes = far.next_deadline().expect("it is tried again");
    room.store(1, Ordering::Relaxed);
    assert!(far.advance_offers(resumes, &mut tiers));
    assert_eq!(offered.try_iter().collect::<Vec<_>>(), [blocks[3]]);
    room.store(BLOCKS, Ordering::Relaxed);
    // Blocks that host memory has lost by then are passed over.
    tiers.forget_on_host(&blocks);
    far.answered(answer(0, vec![blocks[0]]), &mut tiers);
    let resumes = far.next_deadline().expect("it waits");
    assert!(far.advance_offers(resumes, &mut tiers) && offered.try_iter().next().is_none());
}

/// Threads that save a chain side by side make its blocks known in any order: each is offered when its group is there from its first
/// block on.
#[test]
fn a_block_that_comes_before_its_parent_is_offered_after_it() {
    const BLOCKS: usize = 40;
    let (mut tiers, _moved) = host_tiers(64, BLOCK, PolicyKind::Lru);
    let (sender, offered) = unbounded();
    let room = Arc::new(AtomicUsize::new(1000));
    let mut far = SecondaryTiers::new(vec![Box::new(NarrowTier { room, offered: sender })]);
    let (blocks, now) = (numbered_chain(1, BLOCKS as u64), Instant::now());
    // The seventh comes last; the second group of 32 does not wait for it.
    for position in (0..BLOCKS).rev().filter(|position| *position != 7) {
        register_at(&mut tiers, &blocks, position, BLOCK);
        far.offer(blocks[position], &tiers);
        while far.advance_offers(now, &mut tiers) {}
    }
    let mut taken: Vec<BlockIdentity> = offered.try_iter().collect();
    let position = |identity: &BlockIdentity| blocks.iter().position(|block| block == identity);
    taken.sort_unstable_by_key(position);
    assert_eq!(taken, [&blocks[..7], &blocks[32..]].concat());
    register_at(&mut tiers, &blocks, 7, BLOCK);
    far.offer(blocks[7], &tiers);
    while far.advance_offers(now, &mut tiers) {}
    let mut taken: Vec<BlockIdentity> = offered.try_iter().collect();
    taken.sort_unstable_by_key(position);
    assert_eq!(taken, blocks[7..32]);
}
