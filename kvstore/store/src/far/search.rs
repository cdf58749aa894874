//! Searches in the tiers of other nodes, one tier after the other, and what they bring into host memory.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::plan::Tier;
use kvstore_block::BlockIdentity;
use kvstore_catalog::{Lease, TenantId};

use super::lent_slot::LentSlot;
use super::offer::Backlog;
use super::{Delivered, FarResult, FarTier, Incoming, MappedBlock, Portion, ReturnedSlots};
use crate::Description;
use crate::background::BACKGROUND_REQUEST;
use crate::config::WriteMode;
use crate::guarded_count::GuardedCount;
use crate::job::{Moved, Prepare, RetentionRequest};
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
    /// Which of the tiers is asked.
    tier: usize,
    /// Holds the prefix that is here: what is fetched is of no use without it. The load that follows is the use.
    held: Vec<Lease>,
    /// When the present tier was asked.
    asked: Instant,
    /// When it has had its time.
    patience: Instant,
    /// Blocks of the present tier that are read where they lie.
    mapped: usize,
    /// Some tier had blocks, whether there was room for them or not.
    has_found: bool,
    /// There was no room for some block that is read where it lies: those behind it are of no use.
    is_cut: bool,
    /// There was no room for some block that a tier had.
    lacked_room: bool,
    /// Some tier was asked.
    has_asked: bool,
}

impl Search {
    /// Goes on behind a tier that has been asked.
    fn next_tier(mut self, shared: &Shared) -> Self {
        self.found = local_blocks(&self.prepare, shared);
        self.tier += 1;
        self
    }

    /// The tier that is asked has no answer, or one that comes too late.
    fn count_unanswered(&self, shared: &Shared) {
        let is_awaited = self.prepare.request != BACKGROUND_REQUEST;
        StoreCounters::add(&shared.counters.far_unanswered, usize::from(is_awaited));
    }
}

/// A question that its search does not wait for any more, because computing would be as fast. When the answer comes, it shows how long
/// the tier takes.
struct LateQuestion {
    question: u64,
    tier: Tier,
    asked: Instant,
    /// When the question is given up.
    patience: Instant,
}

impl LateQuestion {
    fn answered(&self, tiers: &Tiers) {
        let _is_late = observe_answer(tiers, self.tier, 0, self.asked, self.patience);
    }
}

/// A tier has answered, and brought so many bytes. Whether it has given up itself: without any bytes, when its time was over.
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

/// A read that a tier was asked for.
#[derive(Debug)]
struct OpenRead {
    /// Slots that have not come back. [`FarLinks::check_guards`] compares them with what the guards count.
    out: usize,
    /// Which of the tiers reads.
    tier: usize,
    /// What its blocks are.
    tenant: TenantId,
    /// Of those that were not described yet.
    metas: VecDeque<Arc<[u8]>>,
}

impl OpenRead {
    /// What the next block of the read is.
    fn describe(&mut self, position: usize, parent: Option<BlockIdentity>) -> Description {
        let meta = self.metas.pop_front().unwrap_or_default();
        Description { parent, position: position as u32, meta, tenant: self.tenant }
    }
}

/// Blocks that a tier has delivered and that are not part of host memory yet.
struct Arriving {
    /// Whoever asked for them; `None` when its time is up or it was cancelled.
    search: Option<Search>,
    read: Option<OpenRead>,
    chain: Vec<BlockIdentity>,
    /// The next one's place in the chain.
    position: usize,
    /// Those that are left, with their slots.
    blocks: VecDeque<(LentSlot, Delivered)>,
    /// Bytes of those that were taken in.
    bytes: u64,
}

/// The tiers of other nodes, in the order in which they are asked.
#[derive(Default)]
pub(crate) struct FarLinks {
    pub(super) links: Vec<Box<dyn FarTier>>,
    /// What each is to be offered.
    pub(super) backlogs: Vec<Backlog>,
    /// By a number that is new for each question, so that an answer that comes late is known as such.
    searches: HashMap<u64, Search>,
    /// Questions without a search, in the order in which they were asked.
    late: VecDeque<LateQuestion>,
    next_question: u64,
    /// Slots of host memory that are being filled, counted by the guards that travel with them.
    lent: GuardedCount,
    /// Reads whose slots have not all come back, by their questions; a read outlives a search whose time is up.
    reads: HashMap<u64, OpenRead>,
    /// What has arrived, in its order: it is taken in a bounded piece a round.
    arriving: VecDeque<Arriving>,
}

impl FarLinks {
    pub(crate) fn new(links: Vec<Box<dyn FarTier>>) -> Self {
        let backlogs = links.iter().map(|_| Backlog::default()).collect();
        Self { links, backlogs, ..Self::default() }
    }

    /// Hands a retention request to every tier.
    pub(crate) fn retain(&mut self, request: &Arc<RetentionRequest>, how_long: Duration) {
        self.links.iter_mut().for_each(|link| link.retain(request, how_long));
    }

    /// Whether nobody searches.
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

    /// Slots of host memory that far reads have.
    #[cfg(test)]
    pub(super) fn lent(&self) -> usize {
        self.lent.get()
    }

    /// Panics when slots count as lent that no read has: each would be missing from the part of host memory that far reads may
    /// fill until the process ends.
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

    /// A tier has answered.
    pub(crate) fn answered(&mut self, result: FarResult, tiers: &mut Tiers) {
        match result {
            FarResult::Mapped { request, blocks } => self.mapped(request, blocks, tiers),
            FarResult::Found { request, blocks } => self.found(request, blocks, tiers),
            FarResult::Arrived { incoming, blocks } => self.arrived(incoming, blocks, tiers),
            FarResult::Returned(slots) => self.returned(slots, tiers),
            FarResult::Reached(tier) => {
                tiers.shared.observe_reached(tier);
                self.reached(tier, tiers);
            }
            FarResult::Offered { tier, kept, too_large, failed, refused } => {
                StoreCounters::add(&tiers.shared.counters.to_far, kept);
                StoreCounters::add(&tiers.shared.counters.far_too_large, too_large);
                self.offered(tier, failed, refused, tiers.now, tiers.host_slots());
                tiers.room.came_free();
            }
        }
    }

    /// A pool of this host has blocks: they are known from here on, and stay where they are.
    fn mapped(&mut self, question: u64, blocks: Vec<MappedBlock>, tiers: &mut Tiers) {
        // If nobody waits any more, the leases end here.
        let Some(search) = self.searches.get_mut(&question) else { return };
        if search.prepare.request == BACKGROUND_REQUEST {
            // Nobody reads them before their leases end.
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
        if let Portion::Single { group } = self.links[search.tier].portion()
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
            // Nobody waits any more.
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
        // Also when it cannot be read: that there is no room here says nothing of what others have.
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
            // There is none for what further tiers have either.
            self.links[search.tier].leave(question);
            return end(&search, tiers);
        }
        let positions = search.found..search.found + slots.len();
        let metas = positions.map(|position| search.prepare.meta(position)).collect();
        let (out, tier, tenant) = (slots.len(), search.tier, search.prepare.tenant);
        self.reads.insert(question, OpenRead { out, tier, tenant, metas });
        let memory = &tiers.shared.memory;
        let incoming = Incoming {
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
            tiers.room.came_free();
            return self.pass_over(question, search, tiers);
        }
        self.searches.insert(question, search);
    }

    /// What the tier has found is not read; the next one is asked.
    fn pass_over(&mut self, question: u64, mut search: Search, tiers: &mut Tiers) {
        self.links[search.tier].leave(question);
        search.tier += 1;
        self.ask_next(search, tiers);
    }

    /// A tier has delivered: the blocks are taken in when their turn comes.
    fn arrived(&mut self, incoming: Incoming, delivered: Vec<Delivered>, tiers: &mut Tiers) {
        let Incoming { request: question, chain, first: position, targets, slots, held, .. } = incoming;
        drop(targets);
        let (search, read) = (self.searches.remove(&question), self.came_back(question, held));
        let blocks = slots.into_iter().zip(delivered).collect();
        self.arriving.push_back(Arriving { search, read, chain, position, blocks, bytes: 0 });
        tiers.room.came_free();
    }

    /// Takes in what has arrived, as far as its checksums may be taken in this part of the round; false when there was
    /// nothing.
    pub(crate) fn advance(&mut self, tiers: &mut Tiers) -> bool {
        let has_arrived = !self.arriving.is_empty();
        while let Some(mut arriving) = self.arriving.pop_front() {
            while !tiers.hashing.is_spent()
                && let Some((slot, delivered)) = arriving.blocks.pop_front()
            {
                if !self.take_in(&mut arriving, slot, delivered, tiers) {
                    // Those behind it are no leading blocks.
                    arriving.blocks.clear();
                }
            }
            if !arriving.blocks.is_empty() {
                self.arriving.push_front(arriving);
                break;
            }
            self.went_in(arriving, tiers);
        }
        has_arrived
    }

    /// The next block becomes part of host memory, also when nobody waits for it any more; false when it is damaged.
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

    /// All blocks of a read are part of host memory; the search behind it goes on.
    fn went_in(&mut self, arriving: Arriving, tiers: &mut Tiers) {
        let Arriving { search: Some(search), bytes, .. } = arriving else { return };
        let tier = self.links[search.tier].tier();
        if search.prepare.request != BACKGROUND_REQUEST {
            tiers.bandwidth.charge(tier, bytes);
        }
        tiers.shared.observe_far(tier, bytes, tiers.now.saturating_duration_since(search.asked), false);
        self.ask_next(search.next_tier(&tiers.shared), tiers);
    }

    /// The slots that a read had kept are free.
    fn returned(&mut self, returned: ReturnedSlots, tiers: &mut Tiers) {
        let ReturnedSlots { request: question, slots } = returned;
        drop(slots);
        self.came_back(question, 0);
        tiers.room.came_free();
    }

    /// A read has given slots back, and keeps so many. Returns what was known of it.
    fn came_back(&mut self, question: u64, held: usize) -> Option<OpenRead> {
        let read = self.reads.remove(&question)?;
        if held > 0 {
            self.reads.insert(question, OpenRead { out: held, metas: VecDeque::new(), ..read });
        }
        Some(read)
    }

    /// A block that came from a tier goes to the tiers that are nearer, as one of the worker does: what hangs on it could
    /// not be kept there without it.
    fn pass_on(&mut self, identity: BlockIdentity, from: usize, tiers: &mut Tiers) {
        tiers.saw(&identity);
        if tiers.shared.config.disk_write == WriteMode::Through {
            tiers.write_through(identity);
        }
        self.offer_to_first(from, identity, tiers);
    }

    /// Ends the searches that have taken too long, and moves on from tiers that have had their time.
    pub(crate) fn expire(&mut self, now: Instant, tiers: &mut Tiers) {
        for arriving in &mut self.arriving {
            // What has arrived becomes part of host memory all the same.
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
                self.late.push_back(LateQuestion { question, tier, asked, patience });
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

/// The search is over, whatever it has brought.
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
        tiers.tell(Moved::Prepared { request, blocks });
    }
}
