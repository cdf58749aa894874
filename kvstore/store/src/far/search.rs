//! Searches in the tiers of other nodes, one tier after the other, and the blocks that they bring into host
//! memory.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::plan::Tier;
use kvstore_block::BlockIdentity;
use kvstore_catalog::{Lease, TenantId};

use super::lent_slot::LentSlot;
use super::offer::Backlog;
use super::{
    Delivered, FetchRequest, MappedBlock, OfferBatch, ReturnedSlots, SecondaryTier, SecondaryTierEvent,
};
use crate::Description;
use crate::background::BACKGROUND_REQUEST;
use crate::config::WriteMode;
use crate::guarded_count::GuardedCount;
use crate::job::{Prepare, RetentionRequest, StoreEvent};
use crate::metrics::StoreCounters;
use crate::shared::{HOST, Shared};
use crate::tiers::{Arrival, Origin, Tiers};

/// Requests that may be looking for blocks in other nodes' tiers.
const PREPARES_MAX: usize = 1024;
/// Late questions whose answers are still measured.
const LATE_MAX: usize = 64;
/// Share of host memory that is filled from there at a time, as a divisor.
const SHARE: usize = 2;

struct Search {
    prepare: Prepare,
    /// Blocks of the chain that are on this node.
    found: usize,
    /// Index of the tier that is asked.
    tier: usize,
    /// Holds the prefix that is here: the fetched blocks are of no use without it. Not a use: the load that
    /// follows is one.
    held: Vec<Lease>,
    /// When the present tier was asked.
    asked: Instant,
    /// When the present tier is given up.
    patience: Instant,
    /// Blocks of the present tier that are read in place, in a pool's memory.
    mapped: usize,
    /// Whether some tier had blocks, with or without room for them here.
    has_found: bool,
    /// Whether some block that is read in place was not taken in: the blocks behind it are of no use.
    is_cut: bool,
    /// Whether there was no room for some block that a tier had.
    lacked_room: bool,
    /// Whether some tier was asked.
    has_asked: bool,
}

impl Search {
    /// Goes on behind a tier that has been asked.
    fn next_tier(mut self, shared: &Shared) -> Self {
        self.found = local_blocks(&self.prepare, shared);
        self.tier += 1;
        self
    }

    /// Counts a question that its tier did not answer in time. Background searches are not counted.
    fn count_unanswered(&self, shared: &Shared) {
        let is_awaited = self.prepare.request != BACKGROUND_REQUEST;
        StoreCounters::add(&shared.counters.far_unanswered, usize::from(is_awaited));
    }
}

/// A look-up whose search has stopped waiting, because computing would be as fast. The answer still shows how
/// long the tier takes.
struct LateLookUp {
    question: u64,
    tier: Tier,
    asked: Instant,
    /// When the question is given up.
    patience: Instant,
}

impl LateLookUp {
    fn answered(&self, tiers: &Tiers) {
        let _is_late = observe_answer(tiers, self.tier, 0, self.asked, self.patience);
    }
}

/// Records the time of a tier's answer, which brought so many bytes. Returns whether the tier gave up: no
/// bytes, and its time was over.
fn observe_answer(tiers: &Tiers, tier: Tier, bytes: u64, asked: Instant, patience: Instant) -> bool {
    let is_late = bytes == 0 && tiers.now >= patience;
    tiers.shared.observe_far(tier, bytes, tiers.now.saturating_duration_since(asked), is_late);
    is_late
}

/// Leading blocks of the chain that are on this node, those in the worker's pool included.
fn local_blocks(prepare: &Prepare, shared: &Shared) -> usize {
    let rest = &prepare.chain[prepare.device_blocks.min(prepare.chain.len())..];
    prepare.chain.len() - rest.len() + shared.match_count(rest)
}

/// A read in flight at a tier.
#[derive(Debug)]
struct OpenRead {
    /// Slots that have not come back. [`SecondaryTiers::check_guards`] compares them with the count of the guards.
    out: usize,
    /// Index of the tier that reads.
    tier: usize,
    /// Tenant whose quota the blocks count against.
    tenant: TenantId,
    /// Caller's data of the blocks that have not been described yet.
    metas: VecDeque<Arc<[u8]>>,
}

impl OpenRead {
    /// Describes the next block of the read.
    fn describe(&mut self, position: usize, parent: Option<BlockIdentity>) -> Description {
        let meta = self.metas.pop_front().unwrap_or_default();
        Description { parent, position: position as u32, meta, tenant: self.tenant }
    }
}

/// Blocks that a tier has delivered and that are not part of host memory yet.
struct Arriving {
    /// Search that waits for the blocks; `None` when its time is up or it was cancelled.
    search: Option<Search>,
    read: Option<OpenRead>,
    chain: Vec<BlockIdentity>,
    /// Position of the next block in the chain.
    position: usize,
    /// Blocks that have not been taken in yet, with their slots.
    blocks: VecDeque<(LentSlot, Delivered)>,
    /// Bytes of the blocks that were taken in.
    bytes: u64,
}

/// The tiers of other nodes, in the order in which they are asked.
#[derive(Default)]
pub(crate) struct SecondaryTiers {
    pub(super) links: Vec<Box<dyn SecondaryTier>>,
    /// Blocks to be offered to each tier.
    pub(super) backlogs: Vec<Backlog>,
    /// Searches by question. Each question has a new number, so that a late answer is recognised.
    searches: HashMap<u64, Search>,
    /// Questions whose searches have ended or moved on to another tier, in the order of asking.
    late: VecDeque<LateLookUp>,
    next_question: u64,
    /// Slots of host memory that are being filled, counted by the guards that travel with them.
    lent: GuardedCount,
    /// Reads whose slots have not all come back, by their questions; a read outlives a search whose time is up.
    reads: HashMap<u64, OpenRead>,
    /// Deliveries in the order of arrival. Each round takes in a bounded part of them.
    arriving: VecDeque<Arriving>,
}

impl SecondaryTiers {
    pub(crate) fn new(links: Vec<Box<dyn SecondaryTier>>) -> Self {
        let backlogs = links.iter().map(|_| Backlog::default()).collect();
        Self { links, backlogs, ..Self::default() }
    }

    /// Hands a retention request to every tier.
    pub(crate) fn retain(&mut self, request: &Arc<RetentionRequest>, how_long: Duration) {
        self.links.iter_mut().for_each(|link| link.retain(request, how_long));
    }

    /// Whether no search is open and no delivery waits to be taken in.
    pub(crate) fn is_idle(&self) -> bool {
        self.searches.is_empty() && self.arriving.is_empty()
    }

    /// The tier that is asked first.
    pub(crate) fn nearest(&self) -> Option<Tier> {
        self.links.first().map(|link| link.tier())
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let searches = self.searches.values().map(|search| search.patience.min(search.prepare.deadline));
        searches.chain(self.backlogs.iter().filter_map(Backlog::resumes_at)).min()
    }

    /// Slots of host memory that are lent to far reads.
    #[cfg(test)]
    pub(super) fn lent(&self) -> usize {
        self.lent.get()
    }

    /// Panics when more slots count as lent than the reads have: each such slot would be missing, until the
    /// process ends, from the part of host memory that far reads may fill.
    pub(crate) fn check_guards(&self) {
        let arriving: usize = self.arriving.iter().map(|arriving| arriving.blocks.len()).sum();
        let reading: usize = self.reads.values().map(|read| read.out).sum();
        self.lent.check("slots lent to far reads", arriving + reading);
    }

    pub(crate) fn cancel(&mut self, request: u64) {
        self.searches.retain(|_, search| search.prepare.request != request);
        for arriving in &mut self.arriving {
            drop(arriving.search.take_if(|search| search.prepare.request == request));
        }
    }

    pub(crate) fn prepare(&mut self, prepare: Prepare, tiers: &mut Tiers) {
        if self.searches.len() + self.arriving.len() >= PREPARES_MAX {
            let blocks = local_blocks(&prepare, &tiers.shared);
            return prepared(prepare.request, blocks, tiers);
        }
        let now = tiers.now;
        let mut held = Vec::new();
        let rest = &prepare.chain[prepare.device_blocks.min(prepare.chain.len())..];
        tiers.shared.catalog.pin_prefix(HOST, rest, &mut held);
        tiers.forget_ending(rest);
        let found = local_blocks(&prepare, &tiers.shared);
        let (asked, patience) = (now, now);
        let search = Search {
            prepare,
            found,
            tier: 0,
            held,
            asked,
            patience,
            mapped: 0,
            has_found: false,
            is_cut: false,
            lacked_room: false,
            has_asked: false,
        };
        self.ask_next(search, tiers);
    }

    /// Asks the next tier that can be asked, or ends the search.
    fn ask_next(&mut self, mut search: Search, tiers: &mut Tiers) {
        let now = tiers.now;
        while let Some(link) = self.links.get_mut(search.tier) {
            let Prepare { chain, deadline, .. } = &search.prepare;
            if search.found >= chain.len() || *deadline <= now {
                break;
            }
            let question = self.next_question;
            self.next_question += 1;
            let patience = now + link.patience();
            // The answer is measured also when the search does not wait for it any more.
            if link.look_up(question, chain, search.found, patience) {
                (search.asked, search.patience, search.mapped) = (now, patience.min(*deadline), 0);
                search.has_asked = true;
                self.searches.insert(question, search);
                return;
            }
            search.tier += 1;
        }
        end(&search, tiers);
    }

    /// Handles an answer of a tier.
    pub(crate) fn answered(&mut self, result: SecondaryTierEvent, tiers: &mut Tiers) {
        match result {
            SecondaryTierEvent::Mapped { request, blocks } => self.mapped(request, blocks, tiers),
            SecondaryTierEvent::Found { request, blocks } => self.found(request, blocks, tiers),
            SecondaryTierEvent::Arrived { incoming, blocks } => self.arrived(incoming, blocks, tiers),
            SecondaryTierEvent::Returned(slots) => self.returned(slots, tiers),
            SecondaryTierEvent::Reached(tier) => {
                tiers.shared.observe_reached(tier);
                self.reached(tier, tiers);
            }
            SecondaryTierEvent::Offered { tier, kept, too_large, failed, refused } => {
                StoreCounters::add(&tiers.shared.counters.to_far, kept);
                StoreCounters::add(&tiers.shared.counters.far_too_large, too_large);
                self.offered(tier, failed, refused, tiers.now, tiers.host_slots());
                tiers.room.mark_released();
            }
        }
    }

    /// Makes blocks of a pool of this host known; they stay in the pool's memory.
    fn mapped(&mut self, question: u64, blocks: Vec<MappedBlock>, tiers: &mut Tiers) {
        // No search waits for this question any more: dropping `blocks` ends their leases.
        let Some(search) = self.searches.get_mut(&question) else { return };
        if search.prepare.request == BACKGROUND_REQUEST {
            // A background search does not read the blocks before their leases end.
            search.is_cut = true;
            return;
        }
        let (asked, first) = (blocks.len(), search.found);
        let mapped = tiers.map(&search.prepare, first, blocks);
        search.has_found = true;
        search.found += mapped;
        search.mapped += mapped;
        search.is_cut |= mapped < asked;
        search.lacked_room |= mapped < asked;
        // Blocks that an engine computes behind them are offered to the same group.
        if let OfferBatch::Single { group } = self.links[search.tier].offer_batch()
            && let Some(last) = search.found.checked_sub(1).filter(|_| mapped > 0)
        {
            let head = last - last % group.max(1) as usize;
            for position in head.max(first)..=last {
                let chain = &search.prepare.chain;
                self.backlogs[search.tier].groups.remember(chain[position], chain[head]);
            }
        }
    }

    fn found(&mut self, question: u64, blocks: usize, tiers: &mut Tiers) {
        let Some(mut search) = self.searches.remove(&question) else {
            let at = self.late.iter().position(|late| late.question == question);
            if let Some(late) = at.and_then(|at| self.late.remove(at)) {
                late.answered(tiers);
            }
            // No search waits for this question any more: the tiers drop what they found.
            return self.links.iter_mut().for_each(|link| link.leave(question));
        };
        if blocks == 0 || search.is_cut {
            // The time of an answer without blocks counts, too: it decides whether the tier is asked again.
            let link = &self.links[search.tier];
            let (tier, asked, patience) = (link.tier(), search.asked, search.asked + link.patience());
            let bytes = (search.mapped * tiers.shared.config.block_bytes) as u64;
            if observe_answer(tiers, tier, bytes, asked, patience) {
                search.count_unanswered(&tiers.shared);
            }
            return self.pass_over(question, search, tiers);
        }
        // Counts as found without room to read it, too: missing room here says nothing of the tier's
        // contents.
        search.has_found = true;
        // All searches together take a part of host memory at most.
        let share = (tiers.host_slots() / SHARE).saturating_sub(self.lent.get());
        let wanted = blocks.min(search.prepare.chain.len() - search.found).min(share);
        let mut slots = Vec::with_capacity(wanted);
        while slots.len() < wanted {
            let Some(reserved) = tiers.host_slot_now(search.prepare.tenant) else { break };
            slots.push(LentSlot::new(reserved.fill(), &self.lent));
        }
        search.lacked_room |= slots.len() < blocks.min(search.prepare.chain.len() - search.found);
        if slots.is_empty() {
            // Blocks of further tiers have no room either.
            self.links[search.tier].leave(question);
            return end(&search, tiers);
        }
        let positions = search.found..search.found + slots.len();
        let metas = positions.map(|position| search.prepare.meta(position)).collect();
        let (out, tier, tenant) = (slots.len(), search.tier, search.prepare.tenant);
        self.reads.insert(question, OpenRead { out, tier, tenant, metas });
        let memory = &tiers.shared.memory;
        let incoming = FetchRequest {
            request: question,
            chain: search.prepare.chain[..search.found + slots.len()].to_vec(),
            first: search.found,
            targets: slots.iter().map(|slot| memory.slot(slot.slot()).clone()).collect(),
            deadline: search.patience,
            slots,
            held: 0,
        };
        if let Err(incoming) = self.links[search.tier].read(incoming) {
            drop(incoming);
            self.reads.remove(&question);
            tiers.room.mark_released();
            return self.pass_over(question, search, tiers);
        }
        self.searches.insert(question, search);
    }

    /// Skips the blocks that the tier has found, and asks the next tier.
    fn pass_over(&mut self, question: u64, mut search: Search, tiers: &mut Tiers) {
        self.links[search.tier].leave(question);
        search.tier += 1;
        self.ask_next(search, tiers);
    }

    /// Queues delivered blocks, which are taken in when their turn comes.
    fn arrived(&mut self, incoming: FetchRequest, delivered: Vec<Delivered>, tiers: &mut Tiers) {
        let FetchRequest { request: question, chain, first: position, targets, slots, held, .. } = incoming;
        drop(targets);
        let (search, read) = (self.searches.remove(&question), self.record_returned(question, held));
        let blocks = slots.into_iter().zip(delivered).collect();
        self.arriving.push_back(Arriving { search, read, chain, position, blocks, bytes: 0 });
        tiers.room.mark_released();
    }

    /// Takes in delivered blocks, as far as their checksums may be taken in this part of the round; false
    /// when there was none.
    pub(crate) fn advance(&mut self, tiers: &mut Tiers) -> bool {
        let has_arrived = !self.arriving.is_empty();
        while let Some(mut arriving) = self.arriving.pop_front() {
            while !tiers.hashing.is_spent()
                && let Some((slot, delivered)) = arriving.blocks.pop_front()
            {
                if !self.take_in(&mut arriving, slot, delivered, tiers) {
                    // The blocks behind a damaged one are not leading blocks.
                    arriving.blocks.clear();
                }
            }
            if !arriving.blocks.is_empty() {
                self.arriving.push_front(arriving);
                break;
            }
            self.finish_arrival(arriving, tiers);
        }
        has_arrived
    }

    /// Makes the next block part of host memory, also when no search waits for it any more; false when the
    /// block is damaged.
    fn take_in(
        &mut self,
        arriving: &mut Arriving,
        slot: LentSlot,
        delivered: Delivered,
        tiers: &mut Tiers,
    ) -> bool {
        let (filling, position) = (slot.into_filling(), arriving.position);
        let identity = arriving.chain[position];
        let Some(checksum) = tiers.checksum_of(filling.slot(), &delivered) else {
            tracing::warn!(
                block = identity.short(),
                "host tier: a block from another tier changed after it was verified and is thrown away"
            );
            StoreCounters::add(&tiers.shared.counters.checksum_failures, 1);
            return false;
        };
        let bytes = delivered.bytes;
        arriving.position += 1;
        arriving.bytes += u64::from(bytes);
        let parent = position.checked_sub(1).map(|before| arriving.chain[before]);
        let described = |read: &mut OpenRead| (read.describe(position, parent), read.tier);
        let (description, from) = arriving.read.as_mut().map(described).unzip();
        let arrival = Arrival {
            identity,
            parent,
            position: position as u32,
            bytes,
            checksum,
            origin: Origin::Far,
            description,
        };
        let is_new = tiers.register(filling, arrival);
        if let Some(search) = &mut arriving.search {
            search.held.extend(tiers.shared.catalog.pin(HOST, &identity));
        }
        if let Some(from) = from.filter(|_| is_new) {
            self.pass_on(identity, from, tiers);
        }
        true
    }

    /// Continues the search after all blocks of its read are part of host memory.
    fn finish_arrival(&mut self, arriving: Arriving, tiers: &mut Tiers) {
        let Arriving { search: Some(search), bytes, .. } = arriving else { return };
        let tier = self.links[search.tier].tier();
        if search.prepare.request != BACKGROUND_REQUEST {
            tiers.bandwidth.charge(tier, bytes);
        }
        tiers.shared.observe_far(tier, bytes, tiers.now.saturating_duration_since(search.asked), false);
        self.ask_next(search.next_tier(&tiers.shared), tiers);
    }

    /// Frees the slots that a read had kept.
    fn returned(&mut self, returned: ReturnedSlots, tiers: &mut Tiers) {
        let ReturnedSlots { request: question, slots } = returned;
        drop(slots);
        self.record_returned(question, 0);
        tiers.room.mark_released();
    }

    /// Records that a read has given slots back, and keeps so many. Returns what was known of the read.
    fn record_returned(&mut self, question: u64, held: usize) -> Option<OpenRead> {
        let read = self.reads.remove(&question)?;
        if held > 0 {
            self.reads.insert(question, OpenRead { out: held, metas: VecDeque::new(), ..read });
        }
        Some(read)
    }

    /// Offers a block that came from a tier to the nearer tiers, like a block of the worker: its children
    /// could not be kept there without it.
    fn pass_on(&mut self, identity: BlockIdentity, from: usize, tiers: &mut Tiers) {
        tiers.count_offer(&identity);
        if tiers.shared.config.disk_write == WriteMode::Through {
            tiers.write_through(identity);
        }
        self.offer_to_first(from, identity, tiers);
    }

    /// Ends the searches that have taken too long, and moves on from tiers that are too late.
    pub(crate) fn expire(&mut self, now: Instant, tiers: &mut Tiers) {
        for arriving in &mut self.arriving {
            // Blocks that have arrived become part of host memory all the same.
            if let Some(search) = arriving.search.take_if(|search| search.prepare.deadline <= now) {
                search.count_unanswered(&tiers.shared);
                end(&search, tiers);
            }
        }
        let is_late = |search: &Search| search.patience <= now || search.prepare.deadline <= now;
        let mut late: Vec<u64> = (self.searches.iter())
            .filter(|(_, search)| is_late(search))
            .map(|(&question, _)| question)
            .collect();
        late.sort_unstable();
        for question in late {
            let Some(search) = self.searches.remove(&question) else { continue };
            let (tier, asked) = (self.links[search.tier].tier(), search.asked);
            let patience = asked + self.links[search.tier].patience();
            let reading = self.reads.get(&question).map_or(0, |read| read.out);
            search.count_unanswered(&tiers.shared);
            if patience > now && reading == 0 && self.late.len() < LATE_MAX {
                self.late.push_back(LateLookUp { question, tier, asked, patience });
            } else {
                let bytes = (reading * tiers.shared.config.block_bytes) as u64;
                tiers.shared.observe_far(tier, bytes, now.saturating_duration_since(asked), true);
            }
            self.ask_next(search.next_tier(&tiers.shared), tiers);
        }
        while let Some(late) = self.late.pop_front_if(|late| late.patience <= now) {
            tiers.shared.observe_far(late.tier, 0, now.saturating_duration_since(late.asked), true);
        }
    }
}

/// Ends the search, whatever it has found.
fn end(search: &Search, tiers: &mut Tiers) {
    let rest = &search.prepare.chain[search.prepare.device_blocks.min(search.prepare.chain.len())..];
    tiers.promise_mapped(rest);
    let (request, blocks) = (search.prepare.request, local_blocks(&search.prepare, &tiers.shared));
    if request != BACKGROUND_REQUEST {
        StoreCounters::add(&tiers.shared.counters.far_searches, usize::from(search.has_asked));
        StoreCounters::add(&tiers.shared.counters.far_cut, usize::from(search.lacked_room));
        // Tiers that were not asked may have everything.
        if search.has_asked {
            tiers.shared.observe_search(search.has_found);
        }
    }
    prepared(request, blocks, tiers);
}

fn prepared(request: u64, blocks: usize, tiers: &mut Tiers) {
    if request != BACKGROUND_REQUEST {
        tiers.tell(StoreEvent::Prepared { request, blocks });
    }
}
