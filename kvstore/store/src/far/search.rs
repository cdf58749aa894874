//! Searches in the tiers of other nodes, one tier after the other, and what they bring into host memory.

use std::collections::HashMap;
use std::time::Instant;

use kvstore_catalog::Lease;
use kvstore_plan::Tier;

use super::{FarResult, FarTier, Incoming};
use crate::background::BACKGROUND_REQUEST;
use crate::job::{Moved, Prepare};
use crate::metrics::StoreCounters;
use crate::shared::{HOST, Shared};
use crate::tiers::{Arrival, Origin, Tiers};

/// Requests that may be looking for blocks in other nodes' tiers.
const PREPARES_MAX: usize = 1024;
/// Share of host memory that is filled from there at a time, as a divisor.
const SHARE: usize = 2;

struct Search {
    prepare: Prepare,
    /// Blocks of the chain that are on this node.
    found: usize,
    /// Which of the tiers is asked.
    tier: usize,
    /// Holds the prefix that is here: what is fetched is of no use without it.
    held: Vec<Lease>,
    /// When the present tier was asked.
    asked: Instant,
    /// When it has had its time.
    patience: Instant,
    /// Some tier had blocks, whether there was room for them or not.
    has_found: bool,
}

impl Search {
    /// Goes on behind a tier that has been asked.
    fn next_tier(mut self, shared: &Shared) -> Self {
        self.found = local_blocks(&self.prepare, shared);
        self.tier += 1;
        self
    }
}

/// Leading blocks of the chain that are on this node, those in the worker's pool included.
fn local_blocks(prepare: &Prepare, shared: &Shared) -> usize {
    let rest = &prepare.chain[prepare.device_blocks.min(prepare.chain.len())..];
    prepare.chain.len() - rest.len() + shared.match_count(rest)
}

/// The tiers of other nodes, in the order in which they are asked.
#[derive(Default)]
pub(crate) struct FarLinks {
    pub(super) links: Vec<Box<dyn FarTier>>,
    /// By a number that is new for each question, so that an answer that comes late is known as such.
    searches: HashMap<u64, Search>,
    next_question: u64,
    /// Slots of host memory that are being filled.
    filling: usize,
}

impl FarLinks {
    pub(crate) fn new(links: Vec<Box<dyn FarTier>>) -> Self {
        Self { links, ..Self::default() }
    }

    /// Whether nobody searches.
    pub(crate) fn is_idle(&self) -> bool {
        self.searches.is_empty()
    }

    /// The tier that is asked first.
    pub(crate) fn nearest(&self) -> Option<Tier> {
        self.links.first().map(|link| link.tier())
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.searches.values().map(|search| search.patience.min(search.prepare.deadline)).min()
    }

    pub(crate) fn cancel(&mut self, request: u64) {
        self.searches.retain(|_, search| search.prepare.request != request);
    }

    pub(crate) fn prepare(&mut self, prepare: Prepare, tiers: &mut Tiers) {
        if self.searches.len() >= PREPARES_MAX {
            return prepared(prepare.request, 0, tiers);
        }
        let now = Instant::now();
        let mut held = Vec::new();
        let rest = &prepare.chain[prepare.device_blocks.min(prepare.chain.len())..];
        tiers.shared.catalog.lease_prefix(HOST, rest, &mut held);
        let found = local_blocks(&prepare, &tiers.shared);
        let (asked, patience) = (now, now);
        let search = Search { prepare, found, tier: 0, held, asked, patience, has_found: false };
        self.ask_next(search, tiers);
    }

    /// Asks the next tier that can be asked, or ends the search.
    fn ask_next(&mut self, mut search: Search, tiers: &mut Tiers) {
        let now = Instant::now();
        while let Some(link) = self.links.get_mut(search.tier) {
            let Prepare { chain, deadline, .. } = &search.prepare;
            if search.found >= chain.len() || *deadline <= now {
                break;
            }
            let question = self.next_question;
            self.next_question += 1;
            let patience = (now + link.patience()).min(*deadline);
            if link.look_up(question, chain, search.found, patience) {
                (search.asked, search.patience) = (now, patience);
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
            FarResult::Found { request, blocks } => self.found(request, blocks, tiers),
            FarResult::Arrived { incoming, bytes } => self.arrived(incoming, &bytes, tiers),
            FarResult::Kept { blocks } => {
                StoreCounters::add(&tiers.shared.counters.to_far, blocks);
                tiers.room.came_free();
            }
        }
    }

    fn found(&mut self, question: u64, blocks: usize, tiers: &mut Tiers) {
        let Some(mut search) = self.searches.remove(&question) else {
            // Nobody waits any more.
            return self.links.iter_mut().for_each(|link| link.leave(question));
        };
        if blocks == 0 {
            return self.pass_over(question, search, tiers);
        }
        // Also when it cannot be read: that there is no room here says nothing of what others have.
        search.has_found = true;
        // All searches together take a part of host memory at most.
        let share = (tiers.host_slots() / SHARE).saturating_sub(self.filling);
        let wanted = blocks.min(search.prepare.chain.len() - search.found).min(share);
        let mut fillings = Vec::with_capacity(wanted);
        while fillings.len() < wanted {
            let Some(reserved) = tiers.host_slot_now(search.prepare.tenant) else { break };
            fillings.push(reserved.fill());
        }
        if fillings.is_empty() {
            // There is none for what further tiers have either.
            self.links[search.tier].leave(question);
            return end(&search, tiers);
        }
        self.filling += fillings.len();
        let memory = &tiers.shared.memory;
        let incoming = Incoming {
            request: question,
            chain: search.prepare.chain[..search.found + fillings.len()].to_vec(),
            first: search.found,
            targets: fillings.iter().map(|filling| memory.slot(filling.slot()).clone()).collect(),
            deadline: search.patience,
            fillings,
        };
        if let Err(incoming) = self.links[search.tier].read(incoming) {
            self.filling -= incoming.fillings.len();
            drop(incoming);
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

    /// What arrived becomes part of host memory, also when nobody waits for it any more.
    fn arrived(&mut self, incoming: Incoming, bytes: &[u32], tiers: &mut Tiers) {
        let Incoming { request: question, chain, first, targets, fillings, .. } = incoming;
        self.filling = self.filling.saturating_sub(targets.len().max(fillings.len()));
        drop(targets);
        tiers.room.came_free();
        for (position, (filling, &bytes)) in (first..).zip(fillings.into_iter().zip(bytes)) {
            let arrival = Arrival {
                identity: chain[position],
                parent: position.checked_sub(1).map(|before| chain[before]),
                position: position as u32,
                bytes,
                checksum: tiers.shared.memory.checksum(filling.slot(), bytes as usize),
                origin: Origin::Far,
                description: None,
            };
            tiers.register(filling, arrival);
        }
        let Some(mut search) = self.searches.remove(&question) else { return };
        let tier = self.links[search.tier].tier();
        let sum = bytes.iter().map(|&bytes| u64::from(bytes)).sum();
        if search.prepare.request != BACKGROUND_REQUEST {
            tiers.bandwidth.charge(tier, sum);
        }
        tiers.shared.observe_far(tier, sum, search.asked.elapsed(), false);
        tiers.shared.catalog.lease_prefix(HOST, &chain[first..], &mut search.held);
        self.ask_next(search.next_tier(&tiers.shared), tiers);
    }

    /// Ends the searches that have taken too long, and moves on from tiers that have had their time.
    pub(crate) fn expire(&mut self, now: Instant, tiers: &mut Tiers) {
        let is_late = |search: &Search| search.patience <= now || search.prepare.deadline <= now;
        let late: Vec<u64> = (self.searches.iter())
            .filter(|(_, search)| is_late(search))
            .map(|(&question, _)| question)
            .collect();
        for question in late {
            let Some(search) = self.searches.remove(&question) else { continue };
            let tier = self.links[search.tier].tier();
            tiers.shared.observe_far(tier, 0, search.asked.elapsed(), true);
            self.ask_next(search.next_tier(&tiers.shared), tiers);
        }
    }
}

/// The search is over, whatever it has brought.
fn end(search: &Search, tiers: &mut Tiers) {
    let (request, blocks) = (search.prepare.request, local_blocks(&search.prepare, &tiers.shared));
    if request != BACKGROUND_REQUEST {
        tiers.shared.observe_search(search.has_found);
    }
    prepared(request, blocks, tiers);
}

fn prepared(request: u64, blocks: usize, tiers: &mut Tiers) {
    if request != BACKGROUND_REQUEST {
        tiers.tell(Moved::Prepared { request, blocks });
    }
}
