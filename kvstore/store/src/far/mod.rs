//! Tiers that are not on this node: host memory of other nodes ([`remote`]), objects ([`object`]).
//!
//! Each has a thread of its own, behind [`FarTier`]. The store's thread asks one after the other for what the faster ones
//! have not got, and brings what they deliver into host memory, where the request that waits for it finds it like
//! anything else. A tier that does not answer costs the request its deadline and nobody else anything.

pub mod object;
pub mod remote;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;
use kvstore_catalog::{Filling, Lease, Registered};
use kvstore_plan::{Priority, Tier};

use crate::background::BACKGROUND_REQUEST;
use crate::job::{Moved, Prepare};
use crate::metrics::StoreCounters;
use crate::mover::Mover;
use crate::shared::HOST;
use crate::{Description, HostBlock};

/// Requests that may be looking for blocks in other nodes' tiers.
const PREPARES_MAX: usize = 1024;
/// Share of host memory that is filled from there at a time, as a divisor.
const SHARE: usize = 2;

/// A block for a tier further away.
#[derive(Debug)]
pub struct Outgoing {
    /// Which block.
    pub identity: BlockIdentity,
    /// What it is.
    pub description: Description,
    /// Where its bytes are.
    pub slot: SlotRef,
    /// Holds them there until this is dropped.
    pub block: HostBlock,
}

/// Slots of host memory for blocks that a tier further away has.
#[derive(Debug)]
pub struct Incoming {
    /// The store's number of the request.
    pub request: u64,
    /// The chain from its root.
    pub chain: Vec<BlockIdentity>,
    /// The first block that is wanted, and with it all that follow.
    pub first: usize,
    /// A slot for each of those.
    pub targets: Vec<SlotRef>,
    /// What has not arrived by then is not waited for.
    pub deadline: Instant,
    pub(crate) fillings: Vec<Filling>,
}

/// What a tier further away answers.
#[derive(Debug)]
pub enum FarResult {
    /// So many leading blocks are there.
    Found {
        /// The store's number of the request.
        request: u64,
        /// How many.
        blocks: usize,
    },
    /// The leading blocks have arrived, and were verified; each with its length.
    Arrived {
        /// What was asked for.
        incoming: Incoming,
        /// Bytes of each that has arrived.
        bytes: Vec<u32>,
    },
    /// So many blocks were kept there.
    Kept {
        /// How many.
        blocks: usize,
    },
}

/// In which portions a tier takes new blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Portion {
    /// One by one, with the first block of the group of so many that it belongs to.
    Single {
        /// Blocks of a group, counted from the start of the chain.
        group: u32,
    },
    /// So many blocks of a chain together, counted from its start.
    Run(u32),
}

/// A tier that is not on this node. Called by the store's thread; must not block. Each `look_up` and `read` is answered
/// once, at about its deadline at the latest, through the way that the tier was given at its start.
pub trait FarTier: Send {
    /// Which kind it is, for what is known of its speed.
    fn tier(&self) -> Tier;
    /// How long a look-up and the read after it may take.
    fn patience(&self) -> Duration;
    /// Asks how many blocks it has of `chain` (which starts at the root) from the block `first` on. False when it cannot be
    /// asked now.
    fn look_up(&mut self, request: u64, chain: &[BlockIdentity], first: usize, deadline: Instant) -> bool;
    /// Asks for blocks that it said it has; "full" hands the request back.
    fn read(&mut self, incoming: Incoming) -> Result<(), Incoming>;
    /// What was found for the request is not going to be read.
    fn leave(&mut self, request: u64);
    /// In which portions it takes new blocks.
    fn portion(&self) -> Portion;
    /// Offers it a portion that is new here; `head` is the first block of the group or run. It may not want it.
    fn offer(&mut self, blocks: Vec<Outgoing>, head: BlockIdentity);
}

struct Search {
    prepare: Prepare,
    /// Blocks of the chain that are on this node.
    found: usize,
    tier: usize,
    /// Holds the prefix that is here: what is fetched is of no use without it.
    held: Vec<Lease>,
    /// When the present tier was asked.
    asked: Instant,
    /// When it has had its time.
    patience: Instant,
    has_found: bool,
}

/// The tiers in the order in which they are asked.
#[derive(Default)]
pub(crate) struct FarLinks {
    tiers: Vec<Box<dyn FarTier>>,
    /// By a number that is new for each question, so that an answer that comes late is known as such.
    searches: HashMap<u64, Search>,
    next_question: u64,
    /// Slots of host memory that are being filled.
    filling: usize,
}

impl FarLinks {
    pub(crate) fn new(tiers: Vec<Box<dyn FarTier>>) -> Self {
        Self { tiers, ..Self::default() }
    }

    /// Whether nobody searches.
    pub(crate) fn is_idle(&self) -> bool {
        self.searches.is_empty()
    }

    /// The tier that is asked first.
    pub(crate) fn nearest(&self) -> Option<Tier> {
        self.tiers.first().map(|tier| tier.tier())
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.searches.values().map(|search| search.patience.min(search.prepare.deadline)).min()
    }

    pub(crate) fn cancel(&mut self, request: u64) {
        self.searches.retain(|_, search| search.prepare.request != request);
    }
}

impl Mover {
    pub(crate) fn prepare(&mut self, prepare: Prepare) {
        let request = prepare.request;
        if self.far.searches.len() >= PREPARES_MAX {
            return self.prepared(request, 0);
        }
        let now = Instant::now();
        let mut held = Vec::new();
        let rest = &prepare.chain[prepare.device_blocks.min(prepare.chain.len())..];
        self.shared.catalog.lease_prefix(HOST, rest, &mut held);
        let search = Search {
            found: self.local_blocks(&prepare),
            prepare,
            tier: 0,
            held,
            asked: now,
            patience: now,
            has_found: false,
        };
        self.ask_next(search);
    }

    fn local_blocks(&self, prepare: &Prepare) -> usize {
        let rest = &prepare.chain[prepare.device_blocks.min(prepare.chain.len())..];
        prepare.chain.len() - rest.len() + self.shared.match_count(rest)
    }

    /// Asks the next tier that can be asked, or ends the search.
    fn ask_next(&mut self, mut search: Search) {
        let now = Instant::now();
        while let Some(tier) = self.far.tiers.get_mut(search.tier) {
            let Prepare { chain, deadline, .. } = &search.prepare;
            if search.found >= chain.len() || *deadline <= now {
                break;
            }
            let question = self.far.next_question;
            self.far.next_question += 1;
            let patience = (now + tier.patience()).min(*deadline);
            if tier.look_up(question, chain, search.found, patience) {
                (search.asked, search.patience) = (now, patience);
                self.far.searches.insert(question, search);
                return;
            }
            search.tier += 1;
        }
        self.end_search(search);
    }

    fn end_search(&mut self, search: Search) {
        let blocks = self.local_blocks(&search.prepare);
        if search.prepare.request != BACKGROUND_REQUEST {
            self.shared.observe_search(search.has_found);
        }
        self.prepared(search.prepare.request, blocks);
    }

    fn prepared(&mut self, request: u64, blocks: usize) {
        if request != BACKGROUND_REQUEST {
            (self.notify)(Moved::Prepared { request, blocks });
        }
    }

    pub(crate) fn far_result(&mut self, result: FarResult) {
        match result {
            FarResult::Found { request, blocks } => self.far_found(request, blocks),
            FarResult::Arrived { incoming, bytes } => self.far_arrived(incoming, &bytes),
            FarResult::Kept { blocks } => {
                StoreCounters::add(&self.shared.counters.to_far, blocks);
                self.room_came_free();
            }
        }
    }

    fn far_found(&mut self, question: u64, blocks: usize) {
        let Some(mut search) = self.far.searches.remove(&question) else {
            // Nobody waits any more.
            return self.far.tiers.iter_mut().for_each(|tier| tier.leave(question));
        };
        // All searches together take a part of host memory at most.
        let share = (self.descriptions.len() / SHARE).saturating_sub(self.far.filling);
        let wanted = blocks.min(search.prepare.chain.len() - search.found).min(share);
        let mut fillings = Vec::with_capacity(wanted);
        while fillings.len() < wanted {
            let Some(reserved) = self.host_slot_now(search.prepare.tenant) else { break };
            fillings.push(reserved.fill());
        }
        if fillings.is_empty() {
            self.far.tiers[search.tier].leave(question);
            search.tier += 1;
            return self.ask_next(search);
        }
        search.has_found = true;
        self.far.filling += fillings.len();
        let incoming = Incoming {
            request: question,
            chain: search.prepare.chain[..search.found + fillings.len()].to_vec(),
            first: search.found,
            targets: fillings.iter().map(|filling| self.shared.memory.slot(filling.slot()).clone()).collect(),
            deadline: search.patience,
            fillings,
        };
        if let Err(incoming) = self.far.tiers[search.tier].read(incoming) {
            self.far.filling -= incoming.fillings.len();
            drop(incoming);
            self.far.tiers[search.tier].leave(question);
            self.room_came_free();
            search.tier += 1;
            return self.ask_next(search);
        }
        self.far.searches.insert(question, search);
    }

    /// What arrived becomes part of host memory, also when nobody waits for it any more.
    fn far_arrived(&mut self, incoming: Incoming, bytes: &[u32]) {
        let Incoming { request: question, chain, first, targets, fillings, .. } = incoming;
        self.far.filling = self.far.filling.saturating_sub(targets.len().max(fillings.len()));
        drop(targets);
        self.room_came_free();
        let mut parent = first.checked_sub(1).map(|before| chain[before]);
        for (position, (filling, &bytes)) in (first..).zip(fillings.into_iter().zip(bytes)) {
            let identity = &chain[position];
            let slot = filling.slot();
            self.descriptions[slot as usize] = None;
            let checksum = self.shared.memory.checksum(slot, bytes as usize);
            let cost = self.shared.recompute_cost(position as u32);
            if let Registered::New = filling.complete(checksum, bytes).register(*identity, parent, cost) {
                StoreCounters::add(&self.shared.counters.from_far, 1);
                self.tell_stored(*identity);
            }
            parent = Some(*identity);
        }
        let Some(mut search) = self.far.searches.remove(&question) else { return };
        let tier = self.far.tiers[search.tier].tier();
        let sum = bytes.iter().map(|&bytes| u64::from(bytes)).sum();
        if search.prepare.request != BACKGROUND_REQUEST {
            self.bandwidth.charge(tier, sum);
        }
        self.shared.observe_far(tier, sum, search.asked.elapsed(), false);
        self.shared.catalog.lease_prefix(HOST, &chain[first..], &mut search.held);
        search.found = self.local_blocks(&search.prepare);
        search.tier += 1;
        self.ask_next(search);
    }

    /// Ends the searches that have taken too long, and moves on from tiers that have had their time.
    pub(crate) fn expire_searches(&mut self, now: Instant) {
        let is_late = |search: &Search| search.patience <= now || search.prepare.deadline <= now;
        let late: Vec<u64> = (self.far.searches.iter())
            .filter(|(_, search)| is_late(search))
            .map(|(&question, _)| question)
            .collect();
        for question in late {
            let Some(mut search) = self.far.searches.remove(&question) else { continue };
            let tier = self.far.tiers[search.tier].tier();
            self.shared.observe_far(tier, 0, search.asked.elapsed(), true);
            search.found = self.local_blocks(&search.prepare);
            search.tier += 1;
            self.ask_next(search);
        }
    }

    /// Offers a block that is new in host memory to the tiers further away. One whose chain is not in host memory as far
    /// as the tier needs it is not offered.
    pub(crate) fn offer_far(&mut self, identity: BlockIdentity) {
        for index in 0..self.far.tiers.len() {
            let portion = self.far.tiers[index].portion();
            let Some(last) = self.outgoing(identity) else { return };
            let position = last.description.position;
            let (steps, is_run) = match portion {
                Portion::Single { group } => (position % group.max(1), false),
                Portion::Run(run) if (position + 1).is_multiple_of(run.max(1)) => (run.max(1) - 1, true),
                Portion::Run(_) => continue,
            };
            let Some((blocks, head)) = self.portion_of(last, steps, is_run) else { continue };
            let bytes = blocks.iter().map(|block| block.block.len() as u64).sum();
            let tier = self.far.tiers[index].tier();
            if self.bandwidth.admit(tier, Priority::Offload, bytes).is_ok() {
                self.far.tiers[index].offer(blocks, head);
            } else {
                StoreCounters::add(&self.shared.counters.throttled, blocks.len());
            }
        }
    }

    /// A block of host memory that came from this node's worker.
    fn outgoing(&self, identity: BlockIdentity) -> Option<Outgoing> {
        let lease = self.shared.catalog.lease(HOST, &identity)?;
        let description = self.descriptions[lease.slot() as usize].clone()?;
        let slot = self.shared.memory.slot(lease.slot()).clone();
        Some(Outgoing {
            identity,
            description,
            slot,
            block: HostBlock { lease, memory: self.shared.memory.clone() },
        })
    }

    /// The block `steps` before `last` in its chain, and all blocks from there if they are wanted.
    fn portion_of(&self, last: Outgoing, steps: u32, is_run: bool) -> Option<(Vec<Outgoing>, BlockIdentity)> {
        let mut head = last.identity;
        let mut parent = last.description.parent;
        let mut blocks = vec![last];
        for _ in 0..steps {
            let before = self.outgoing(parent?)?;
            (head, parent) = (before.identity, before.description.parent);
            if is_run {
                blocks.push(before);
            }
        }
        blocks.reverse();
        Some((blocks, head))
    }
}
