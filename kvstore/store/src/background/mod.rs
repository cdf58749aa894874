//! Background work of the store: brings the blocks of conversations that are about to continue into host
//! memory, and reads a little from a disk that plans do not use, so that its speed stays known.
//!
//! Background work comes last: only while no request's load is inside, within the tier's bandwidth, one piece
//! of [`PIECE_BLOCKS`] at a time. Blocks fetched for conversations that have not continued yet fill a quarter
//! of host memory at most.

mod conversations;

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use crate::plan::{Priority, ReturnConfig, Tier};
use kvstore_block::BlockIdentity;

use crate::held::HeldBlock;
use crate::job::{Destination, LoadRequest, Prepare, Probe};
use crate::metrics::StoreCounters;
use crate::quota;
use crate::shared::{DISK, HOST};
use crate::store_thread::StoreThread;
use conversations::Conversations;

/// Request number of all background requests, whose ends are not reported.
pub(crate) const BACKGROUND_REQUEST: u64 = u64::MAX;
/// Blocks that are brought up at a time.
const PIECE_BLOCKS: usize = 16;
/// Interval of the scans of idle conversations.
const CHECK_EVERY: Duration = Duration::from_millis(100);
/// The part of host memory that blocks fetched ahead may fill, as a divisor.
const AHEAD_SHARE: usize = 4;
/// Longest time that blocks fetched for a conversation stay held after its prompt has come: its load is about
/// to hold them.
const HELD_FOR_LOAD: Duration = Duration::from_secs(2);

/// Longest time that the disk may take to read a block whose copy in host memory was damaged.
const REREAD_MAX: Duration = Duration::from_secs(10);

pub(crate) struct Background {
    /// Boxed: otherwise an optimiser may read the absent value before it tests for `None`, which valgrind
    /// reports as an error.
    conversations: Option<Box<Conversations>>,
    /// Blocks of conversations whose prompts have come, until their loads hold them. The oldest first.
    held_for_load: VecDeque<(Instant, Vec<HeldBlock>)>,
    /// Conversations are not checked before this time.
    next_check: Instant,
    /// Fetched blocks are not given up before this time.
    next_give_up: Instant,
}

impl Background {
    pub(crate) fn new(prefetch: Option<ReturnConfig>, now: Instant) -> Self {
        Self {
            conversations: prefetch.map(|config| Box::new(Conversations::new(config))),
            held_for_load: VecDeque::new(),
            next_check: now,
            next_give_up: now,
        }
    }

    /// Whether blocks are held for a load that is to come.
    pub(crate) fn holds_for_load(&self) -> bool {
        !self.held_for_load.is_empty()
    }

    /// Blocks that are held for conversations.
    #[cfg(test)]
    pub(crate) fn held(&self) -> usize {
        let held_for_load: usize = self.held_for_load.iter().map(|(_, held)| held.len()).sum();
        held_for_load + self.conversations.as_ref().map_or(0, |conversations| conversations.held())
    }

    /// Next time at which there may be work. Conversations are not checked while requests load; the end of a
    /// load wakes the thread.
    pub(crate) fn next_deadline(&self, has_loads: bool) -> Option<Instant> {
        let has_idle = self.conversations.as_ref().is_some_and(|conversations| !conversations.is_empty());
        let check = (has_idle && !has_loads).then_some(self.next_check);
        let release = self.held_for_load.front().map(|(since, _)| *since + HELD_FOR_LOAD);
        check.into_iter().chain(release).min()
    }
}

impl StoreThread {
    /// Handles the arrival of a prompt.
    pub(crate) fn prompt_started(&mut self, chain: &[BlockIdentity]) {
        let Some(conversations) = &mut self.background.conversations else { return };
        let (used, held) = conversations.prompt_arrived(chain, self.tiers.now);
        if !held.is_empty() {
            self.background.held_for_load.push_back((self.tiers.now, held));
        }
        StoreCounters::add(&self.tiers.shared.counters.prefetch_used, used);
    }

    /// Handles the end of an answer: the conversation is idle.
    pub(crate) fn conversation_idle(&mut self, chain: Vec<BlockIdentity>) {
        if let Some(conversations) = &mut self.background.conversations {
            conversations.mark_conversation_idle(chain, self.tiers.now);
        }
    }

    /// Reads blocks only to learn how long it takes.
    pub(crate) fn probe(&mut self, probe: Probe) {
        let Probe { chain, first, deadline } = probe;
        let bytes = (chain.len() * self.tiers.shared.config.block_bytes) as u64;
        if self.loads.is_empty() && self.tiers.bandwidth.admit(Tier::Disk, Priority::Prefetch, bytes).is_ok()
        {
            StoreCounters::add(&self.tiers.shared.counters.probed, chain.len());
            self.load_ahead(chain, first, deadline, Destination::Host);
        }
    }

    /// Moves newly fetched blocks to their conversations, gives up on conversations that do not continue, and
    /// drops leases for those that did after [`HELD_FOR_LOAD`].
    pub(crate) fn hold_ahead(&mut self, now: Instant) {
        for (last, held) in self.tiers.fetched_ahead.drain(..) {
            if let Some(conversations) = &mut self.background.conversations {
                conversations.hold(&last, held);
            }
        }
        if now >= self.background.next_give_up
            && let Some(conversations) = &mut self.background.conversations
        {
            self.background.next_give_up = now + CHECK_EVERY;
            let wasted = conversations.give_up(now);
            StoreCounters::add(&self.tiers.shared.counters.prefetch_wasted, wasted);
        }
        let is_over = |since: Instant| now.saturating_duration_since(since) >= HELD_FOR_LOAD;
        while self.background.held_for_load.front().is_some_and(|(since, _)| is_over(*since)) {
            self.background.held_for_load.pop_front();
        }
    }

    /// Drops the holds on the blocks of a load that has begun, because it holds them itself.
    pub(crate) fn release_for(&mut self, chain: &[BlockIdentity]) {
        let catalog = &self.tiers.shared.catalog;
        let slot_of = |identity| catalog.places(identity).and_then(|places| places.slot(HOST));
        let slots: HashSet<u32> = chain.iter().filter_map(slot_of).collect();
        self.background
            .held_for_load
            .retain(|(_, held)| held.first().is_some_and(|first| !slots.contains(&first.lease().slot())));
    }

    /// Does the background work that is due; called when the thread has nothing else to do.
    pub(crate) fn work_ahead(&mut self, now: Instant) {
        if now < self.background.next_check || !self.loads.is_empty() {
            return;
        }
        let Some(conversations) = &mut self.background.conversations else { return };
        self.background.next_check = now + CHECK_EVERY;
        let Some((last, chain, from)) = conversations.next(now) else { return };
        let first = (from..chain.len()).find(|&at| !self.tiers.shared.holds(HOST, &chain[at]));
        let held_for_load: usize = self.background.held_for_load.iter().map(|(_, held)| held.len()).sum();
        let room =
            (self.tiers.host_slots() / AHEAD_SHARE).saturating_sub(conversations.ahead() + held_for_load);
        // Blocks that are here already are held too, unless the rest is on other nodes: blocks from there are
        // not held either.
        let is_whole_here = first.is_none_or(|first| self.tiers.shared.holds(DISK, &chain[first]));
        let here_end = if is_whole_here { first.unwrap_or(chain.len()).min(from + room) } else { from };
        let here = &chain[from..here_end];
        let held: Vec<HeldBlock> =
            here.iter().filter_map(|identity| self.tiers.shared.hold_on_host(identity)).collect();
        let room = room - held.len();
        if !held.is_empty() {
            conversations.found(&last, from + here.len(), held, now);
        }
        let Some(first) = first else {
            conversations.fetched(&last, now);
            return;
        };
        if room == 0 {
            if from > 0 || !here.is_empty() {
                // No room is left for further blocks.
                conversations.fetched(&last, now);
            }
            return;
        }
        let is_here = |at: &usize| {
            self.tiers.shared.holds(DISK, &chain[*at]) && !self.tiers.shared.holds(HOST, &chain[*at])
        };
        let count = (first..chain.len()).take(PIECE_BLOCKS.min(room)).take_while(is_here).count();
        if count == 0 {
            // The rest is on no tier of this node.
            conversations.fetched(&last, now);
            self.search_ahead(&chain, first, first + room.min(chain.len() - first), now);
            return;
        }
        let bytes = (count * self.tiers.shared.config.block_bytes) as u64;
        if let Err(wait) = self.tiers.bandwidth.admit(Tier::Disk, Priority::Prefetch, bytes) {
            self.background.next_check = now + wait.max(CHECK_EVERY);
            return;
        }
        if let Some(conversations) = &mut self.background.conversations {
            conversations.record_progress(&last, first + count, count, now);
        }
        // The next piece follows at once when this one is here.
        self.background.next_check = now;
        StoreCounters::add(&self.tiers.shared.counters.prefetched, count);
        let deadline = now + self.tiers.shared.config.prefetch.map_or(CHECK_EVERY, |config| config.lead);
        let piece = chain[first..first + count].to_vec();
        self.load_ahead(piece, first as u32, deadline, Destination::Ahead(last));
    }

    /// Discards copies in host memory that a reader found damaged. Their copies on the disk are read at once,
    /// if there is bandwidth: the disk's copy is whole, or the disk forgets it.
    pub(crate) fn drop_damaged(&mut self, chain: &[BlockIdentity]) {
        self.tiers.forget_on_host(chain);
        let (now, bytes) = (self.tiers.now, self.tiers.shared.config.block_bytes as u64);
        for identity in chain {
            if self.tiers.shared.holds(DISK, identity)
                && self.tiers.bandwidth.admit(Tier::Disk, Priority::Prefetch, bytes).is_ok()
            {
                self.load_ahead(vec![*identity], 0, now + REREAD_MAX, Destination::Host);
            }
        }
    }

    /// Loads blocks into host memory in the background.
    fn load_ahead(
        &mut self,
        chain: Vec<BlockIdentity>,
        first: u32,
        deadline: Instant,
        destination: Destination,
    ) {
        let request = BACKGROUND_REQUEST;
        let wanted = LoadRequest { request, chain, first, destination, verified_by_caller: false, deadline };
        self.loads.start(wanted, &mut self.tiers, &self.device);
    }

    /// Searches the tiers of other nodes for a chain's blocks from `first` up to the block `end`, for the
    /// tenant that has the block before them.
    fn search_ahead(&mut self, chain: &[BlockIdentity], first: usize, end: usize, now: Instant) {
        let bytes = ((end - first) * self.tiers.shared.config.block_bytes) as u64;
        let nearest = self.far.nearest().filter(|_| self.far.is_idle());
        if nearest.is_some_and(|tier| self.tiers.bandwidth.admit(tier, Priority::Prefetch, bytes).is_ok()) {
            let deadline = now + self.tiers.shared.config.others_deadline;
            let before = first.checked_sub(1).map(|before| &chain[before]);
            let tenant = before
                .map_or(quota::UNOWNED, |before| quota::owner(&self.tiers.shared.catalog, HOST, before));
            let chain = chain[..end].to_vec();
            let request = BACKGROUND_REQUEST;
            // An idle conversation has identities only.
            let metas = Vec::new();
            let prepare = Prepare { request, chain, device_blocks: 0, metas, tenant, deadline };
            self.far.prepare(prepare, &mut self.tiers);
        }
    }
}
