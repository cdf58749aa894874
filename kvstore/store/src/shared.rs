//! State that the store's thread and its callers share.

use std::iter::{repeat_n, zip};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::plan::{
    Choice, Exploration, ExplorationConfig, Group, PlanConfig, PrefillEstimate, RecomputeModel, Request,
    Tier, TierSet, TierSpeeds, loadable, plan,
};
use crossbeam_queue::SegQueue;
use kvstore_block::BlockIdentity;
use kvstore_catalog::{Catalog, TierIndex};

use crate::config::StoreConfig;
use crate::held::{HeldBlock, HeldSlots};
use crate::job::Probe;
use crate::memory::HostMemory;
use crate::metrics::StoreCounters;

pub(crate) const HOST: TierIndex = TierIndex(0);
pub(crate) const DISK: TierIndex = TierIndex(1);
/// Blocks in the memory of pools on this host, which are read where they lie (`tiers::mapped`).
pub(crate) const MAPPED: TierIndex = TierIndex(2);
/// The quantile of transfer times that plans use.
const TAIL: f64 = TierSpeeds::TAIL_QUANTILE;
/// Divisor of the time that prompts take to compute: the part that look-ups in the tiers of other nodes may
/// take although they are not expected to pay. The contents of those tiers may have changed.
const CURIOSITY: f64 = 32.0;
/// Assumed part of the searches in other nodes' tiers that find blocks, before any is measured.
const SECONDARY_HIT_RATIO_INITIAL: f64 = 0.5;
/// Weight of the latest search in the moving average `secondary_hit_ratio`.
const LAST: f64 = 0.1;
/// The part of host memory that one probe may fill, as a divisor.
const PROBE_SHARE: u64 = 16;
/// A probe is broken off after so many times its expected time, and never before [`PROBE_MIN`].
const PROBE_PATIENCE: u32 = 10;
const PROBE_MIN: Duration = Duration::from_millis(10);
/// No plan waits longer.
const WAIT_MAX: Duration = Duration::from_secs(600);

/// A prompt that is about to be computed.
#[derive(Debug, Clone, Copy)]
pub struct Prompt<'a> {
    /// Whole blocks of the prompt behind those that the worker's pool has.
    pub chain: &'a [BlockIdentity],
    /// Layer groups with blocks of their own, beside the chain above.
    pub groups: &'a [PromptGroup<'a>],
    /// Blocks before them, which the worker's pool has.
    pub device_blocks: usize,
    /// Number of tokens of the prompt.
    pub tokens: usize,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Prompt tokens that the worker computes before.
    pub queued_tokens: u64,
}

/// The blocks of a prompt in a group of layers: a prefix is useful only if each group has its last blocks.
#[derive(Debug, Clone, Copy)]
pub struct PromptGroup<'a> {
    /// The group's block for each block of the prompt's chain.
    pub chain: &'a [BlockIdentity],
    /// Number of blocks needed before the first one that is computed; `usize::MAX`: all of them.
    pub window_blocks: usize,
}

/// Knowledge of a prompt's blocks in the tiers of other nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoteCoverage {
    /// The tiers were asked: what they had is here.
    Asked,
    /// Nothing.
    Unknown,
    /// Nodes hold so many blocks of the prompt's chain, from its first one on. Of object storage this says nothing.
    Hold(usize),
}

/// The decision for a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    /// Compute it: no tier has what would be faster.
    Recompute,
    /// Bring so many blocks of the chain in, and compute the rest.
    Onboard {
        /// Number of blocks to bring in.
        blocks: usize,
        /// Time after which waiting any longer does not pay.
        deadline: Instant,
    },
    /// Ask the tiers of other nodes first ([`crate::Store::prepare`]), then plan again.
    AskOthers {
        /// Time after which waiting any longer does not pay.
        deadline: Instant,
    },
}

/// Measured times of a load, from which plans learn the speed of the tiers.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoadTimes {
    /// Time from the load's beginning to its last block.
    pub elapsed: Duration,
    /// Bytes that came from the disk within `elapsed`.
    pub disk_bytes: u64,
    /// Bytes that the disk was asked for.
    pub disk_wanted_bytes: u64,
    /// Bytes that were copied out of host memory.
    pub host_bytes: u64,
    /// Time spent copying `host_bytes`.
    pub copying: Duration,
    /// The deadline passed while the load waited for the disk.
    pub is_late: bool,
}

#[derive(Debug)]
struct Estimates {
    speeds: TierSpeeds,
    recompute: RecomputeModel,
    previous: Choice,
    /// Scratch of `plan`.
    held: Vec<TierSet>,
    /// Part of the recent searches in other nodes' tiers that found blocks, as a moving average.
    secondary_hit_ratio: f64,
    /// Seconds that look-ups may take although they are not expected to pay.
    search_credit_s: f64,
    exploration: Exploration,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) memory: Arc<HostMemory>,
    pub(crate) counters: Arc<StoreCounters>,
    pub(crate) config: StoreConfig,
    /// Loads inside, for the bound on them.
    pub(crate) loads: AtomicUsize,
    /// Blocks of host memory that wait to be written to the disk.
    pub(crate) unwritten: AtomicUsize,
    /// Slots of host memory that the store holds for no request.
    pub(crate) held: Arc<HeldSlots>,
    /// Blocks of retention requests that wait for a thread.
    pub(crate) retaining: Arc<AtomicUsize>,
    /// Blocks that are retained.
    pub(crate) retained: AtomicUsize,
    /// Set when callers fill slots themselves: the store's thread then keeps some slots free.
    pub(crate) wants_free_slots: AtomicBool,
    /// Blocks of host memory that another thread than the store's has evicted and whose removal has not been
    /// published yet.
    pub(crate) evicted_elsewhere: SegQueue<BlockIdentity>,
    has_disk: bool,
    /// The tiers of other nodes, in the order in which they are asked.
    others: Vec<Tier>,
    planning: PlanConfig,
    estimates: Mutex<Estimates>,
    /// Zero of the clock that schedules probes.
    origin: Instant,
}

impl Estimates {
    /// Seconds that are saved if the first `fetched` of `tokens` tokens behind `context` need not be computed.
    fn saved_s(&self, tokens: u32, context: u32, fetched: u32) -> f64 {
        let expected = |tokens: u32, context: u32| PrefillEstimate {
            tokens: tokens.into(),
            seconds: self.recompute.expected(tokens, context, 0).as_secs_f64(),
        };
        let everything = expected(tokens, context);
        let rest = expected(tokens.saturating_sub(fetched).max(1), context + fetched);
        everything.seconds - self.recompute.optimistic_remaining_s(rest, everything)
    }
}

impl Shared {
    pub(crate) fn new(
        catalog: Arc<Catalog>,
        memory: Arc<HostMemory>,
        config: StoreConfig,
        has_disk: bool,
        others: Vec<Tier>,
    ) -> Self {
        // A probe shall not empty host memory.
        let host_bytes = memory.slot_count() as u64 * config.block_bytes as u64;
        let held = Arc::new(HeldSlots::new(memory.slot_count()));
        let probing = ExplorationConfig {
            bytes_max: (host_bytes / PROBE_SHARE).max(1),
            ..ExplorationConfig::default()
        };
        let estimates = Estimates {
            speeds: TierSpeeds::new(&TierSpeeds::guesses(), TAIL),
            recompute: RecomputeModel::default(),
            previous: Choice::Recompute,
            held: Vec::new(),
            secondary_hit_ratio: SECONDARY_HIT_RATIO_INITIAL,
            search_credit_s: 0.0,
            exploration: Exploration::new(probing),
        };
        Self {
            catalog,
            memory,
            counters: Arc::new(StoreCounters::default()),
            config,
            loads: AtomicUsize::new(0),
            unwritten: AtomicUsize::new(0),
            held,
            retaining: Arc::default(),
            retained: AtomicUsize::new(0),
            wants_free_slots: AtomicBool::new(false),
            evicted_elsewhere: SegQueue::new(),
            has_disk,
            others,
            planning: PlanConfig::default(),
            estimates: Mutex::new(estimates),
            origin: Instant::now(),
        }
    }

    /// Whether the tier has the block. Takes no lock.
    pub(crate) fn holds(&self, tier: TierIndex, identity: &BlockIdentity) -> bool {
        self.catalog.places(identity).is_some_and(|places| places.slot(tier).is_some())
    }

    pub(crate) fn has_disk(&self) -> bool {
        self.has_disk
    }

    /// The block, if host memory has it; it stays there, and counts for no request.
    pub(crate) fn hold_on_host(&self, identity: &BlockIdentity) -> Option<HeldBlock> {
        Some(self.held.hold(self.catalog.pin(HOST, identity)?))
    }

    /// Leading blocks of a chain that are in some tier of this node. Takes no lock.
    pub(crate) fn match_count(&self, chain: &[BlockIdentity]) -> usize {
        chain.iter().take_while(|identity| self.catalog.contains(identity)).count()
    }

    /// Slots of a tier that nothing uses.
    pub(crate) fn free(&self, tier: TierIndex) -> u32 {
        self.catalog.usage(tier).map_or(0, |usage| usage.free)
    }

    /// The lock is held for arithmetic only.
    fn estimates(&self) -> MutexGuard<'_, Estimates> {
        self.estimates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tiers of this node that hold a block. Takes no lock.
    fn tiers_of(&self, identity: &BlockIdentity) -> TierSet {
        let Some(places) = self.catalog.places(identity) else { return TierSet::EMPTY };
        // Blocks of a pool on this host are copied as fast as blocks of host memory.
        let on_host = places.slot(HOST).or(places.slot(MAPPED)).map(|_| Tier::Host);
        let on_disk = places.slot(DISK).filter(|_| self.has_disk).map(|_| Tier::Disk);
        on_host.into_iter().chain(on_disk).collect()
    }

    /// Returns the plan, and the blocks to read besides so that the disk's speed stays known.
    pub(crate) fn plan(&self, prompt: &Prompt<'_>, others: RemoteCoverage) -> (Plan, Option<Probe>) {
        let now = Instant::now();
        // Long prompts are looked up without the lock: the store's thread takes it for every copy.
        let mut held = std::mem::take(&mut self.estimates().held);
        held.clear();
        held.resize(prompt.device_blocks, TierSet::EMPTY);
        held.extend(
            prompt.chain.iter().map(|identity| self.tiers_of(identity)).take_while(|tiers| !tiers.is_empty()),
        );
        let of_groups: Vec<Vec<TierSet>> = prompt
            .groups
            .iter()
            .map(|group| {
                let before = repeat_n(TierSet::EMPTY, prompt.device_blocks);
                let behind = group.chain.iter().map(|identity| self.tiers_of(identity));
                before.chain(behind).take(held.len()).collect()
            })
            .collect();
        let groups: Vec<Group<'_>> = zip(prompt.groups, &of_groups)
            .map(|(group, held)| Group { held, window_blocks: group.window_blocks })
            .collect();
        let loadable_end = loadable(&held, &groups, prompt.device_blocks);
        let mut guard = self.estimates();
        let estimates = &mut *guard;
        let bytes = self.config.block_bytes as u64;
        let request = Request {
            held: &held,
            groups: &groups,
            block_bytes: [bytes; crate::plan::TIERS],
            block_tokens: prompt.block_tokens as u32,
            prompt_tokens: prompt.tokens as u32,
            device_blocks: prompt.device_blocks,
            queued_bytes: [0; crate::plan::TIERS],
            queued_tokens: prompt.queued_tokens,
            deadline: None,
            previous: estimates.previous,
        };
        let speeds = estimates.speeds.snapshot();
        let chosen = plan(&self.planning, &request, &speeds, &estimates.recompute);
        let Request { block_bytes, block_tokens, prompt_tokens, device_blocks, queued_bytes, .. } = request;
        let Request { queued_tokens, previous, .. } = request;
        let available = loadable_end - prompt.device_blocks;
        let others = match others {
            // The count concerns the nodes alone: further tiers may have more.
            RemoteCoverage::Hold(_) if self.others[..] != [Tier::Remote] => RemoteCoverage::Unknown,
            others => others,
        };
        let missing = match others {
            RemoteCoverage::Asked => 0,
            RemoteCoverage::Unknown => prompt.chain.len() - available,
            RemoteCoverage::Hold(blocks) => blocks.min(prompt.chain.len()).saturating_sub(available),
        };
        let nearest = self.others.first().filter(|_| missing > 0);
        let question = nearest.map(|tier| {
            let context = (loadable_end * prompt.block_tokens) as u32;
            let rest = (prompt.tokens as u32).saturating_sub(context);
            let compute = estimates.recompute.expected(rest, context, prompt.queued_tokens);
            let speed = &speeds[tier.index()];
            let end = loadable_end + missing;
            let windows = prompt.groups.iter().map(|group| group.window_blocks.min(end - device_blocks));
            let blocks = end.saturating_sub(held.len()) + windows.sum::<usize>();
            let fetch = speed.expected(bytes * blocks as u64, 0);
            let gain_s = match others {
                RemoteCoverage::Hold(_) => {
                    let fetched = (missing * prompt.block_tokens) as u32;
                    estimates.saved_s(rest, context, fetched) - fetch.as_secs_f64()
                }
                // The answer costs its latency whether anything is there or not, and groups are asked for when it has come.
                _ => {
                    let rounds = if prompt.groups.is_empty() { 1.0 } else { 2.0 };
                    compute.saturating_sub(fetch).as_secs_f64() * estimates.secondary_hit_ratio
                        - rounds * speed.latency_s
                }
            };
            (compute, gain_s, speed.latency_s)
        });
        let probe = self.has_disk.then(|| {
            // Blocks that host memory has too would be read from there, not from the disk.
            for tiers in &mut held {
                *tiers = if tiers.contains(Tier::Host) { TierSet::EMPTY } else { *tiers };
            }
            let request = Request {
                held: &held,
                groups: &[],
                block_bytes,
                block_tokens,
                prompt_tokens,
                device_blocks,
                queued_bytes,
                queued_tokens,
                deadline: None,
                previous,
            };
            let passed = now.saturating_duration_since(self.origin);
            let piece = estimates.exploration.probe(passed, &self.planning, &request, &chosen, &speeds)?;
            let expected = speeds[piece.tier.index()].expected(bytes * piece.blocks.len() as u64, 0);
            let patience = expected.saturating_mul(PROBE_PATIENCE).clamp(PROBE_MIN, WAIT_MAX);
            let first = piece.blocks.start as u32;
            let blocks = piece.blocks.start - device_blocks..piece.blocks.end - device_blocks;
            Some(Probe { chain: prompt.chain[blocks].to_vec(), first, deadline: now + patience })
        });
        let probe = probe.flatten();
        estimates.held = held;
        if let Some((compute, gain_s, latency_s)) = question {
            let is_worth = gain_s > 0.0;
            if !is_worth {
                estimates.search_credit_s += compute.as_secs_f64() / CURIOSITY;
            }
            let is_curious = !is_worth && estimates.search_credit_s >= latency_s;
            if is_curious {
                estimates.search_credit_s = 0.0;
            }
            if is_worth || is_curious {
                let deadline = now + compute.min(self.config.others_deadline);
                return (Plan::AskOthers { deadline }, probe);
            }
        }
        if let RemoteCoverage::Hold(_) = others {
            StoreCounters::add(&self.counters.far_not_asked, missing);
        }
        estimates.previous = chosen.choice();
        let blocks = chosen.recompute_from.saturating_sub(prompt.device_blocks);
        StoreCounters::add(&self.counters.not_worth, available.saturating_sub(blocks));
        let plan = match blocks {
            0 => Plan::Recompute,
            _ => Plan::Onboard { blocks, deadline: now + chosen.give_up_after.min(WAIT_MAX) },
        };
        (plan, probe)
    }

    pub(crate) fn observe_prefill(&self, tokens: usize, context: usize, elapsed: Duration) {
        self.estimates().recompute.observe(tokens as u32, context as u32, 0, elapsed);
    }

    /// A load is over.
    pub(crate) fn observe_load(&self, load: &LoadTimes) {
        let mut estimates = self.estimates();
        if load.is_late {
            estimates.speeds.observe_given_up(Tier::Disk, load.disk_wanted_bytes, load.elapsed, 0);
        } else if load.disk_bytes > 0 {
            estimates.speeds.observe(Tier::Disk, load.disk_bytes, load.elapsed, 0);
        }
        if load.host_bytes > 0 {
            estimates.speeds.observe(Tier::Host, load.host_bytes, load.copying, 0);
        }
    }

    /// A tier of other nodes has delivered.
    pub(crate) fn observe_far(&self, tier: Tier, bytes: u64, elapsed: Duration, is_late: bool) {
        let mut estimates = self.estimates();
        match is_late {
            true if bytes == 0 => estimates.speeds.observe_no_answer(tier, elapsed),
            true => estimates.speeds.observe_given_up(tier, bytes, elapsed, 0),
            false if bytes == 0 => estimates.speeds.observe_empty(tier, elapsed),
            false => estimates.speeds.observe(tier, bytes, elapsed, 0),
        }
    }

    /// Expected time of an answer that brings no bytes.
    #[cfg(test)]
    pub(crate) fn latency(&self, tier: Tier) -> Duration {
        self.estimates().speeds.snapshot_of(tier).expected(0, 0)
    }

    /// Records that a node of the tier can be reached again. The speed learnt while it could not be reached,
    /// and the part of searches that found blocks, would keep requests from asking.
    pub(crate) fn observe_reached(&self, tier: Tier) {
        let mut estimates = self.estimates();
        if estimates.speeds.forget_slowness(tier) {
            estimates.secondary_hit_ratio = estimates.secondary_hit_ratio.max(SECONDARY_HIT_RATIO_INITIAL);
        }
    }

    /// A search in the tiers of other nodes is over.
    pub(crate) fn observe_search(&self, found_something: bool) {
        let mut estimates = self.estimates();
        let hit = if found_something { 1.0 } else { 0.0 };
        estimates.secondary_hit_ratio += (hit - estimates.secondary_hit_ratio) * LAST;
    }

    pub(crate) fn observe_copy(&self, bytes: usize, elapsed: Duration) {
        self.estimates().speeds.observe(Tier::Host, bytes as u64, elapsed, 0);
    }

    /// Seconds of compute that an eviction of the block at this position of its chain would cost.
    pub(crate) fn recompute_cost(&self, position: u32) -> f32 {
        let block_tokens = self.config.block_tokens;
        let context = position.saturating_mul(block_tokens);
        self.estimates().recompute.expected(block_tokens, context, 0).as_secs_f32()
    }
}

#[cfg(test)]
mod tests {
    use kvstore_catalog::PolicyKind;

    use super::*;
    use crate::tiers::testing::{host_tiers, numbered_chain};

    /// Whether each of so many prompts is looked for on other nodes.
    fn asked(shared: &Shared, others: RemoteCoverage, prompts: usize) -> Vec<bool> {
        let chain = numbered_chain(1, 100);
        let (groups, tokens) = (&[][..], 1601);
        let prompt =
            Prompt { chain: &chain, groups, device_blocks: 0, tokens, block_tokens: 16, queued_tokens: 0 };
        (0..prompts).map(|_| matches!(shared.plan(&prompt, others).0, Plan::AskOthers { .. })).collect()
    }

    #[test]
    fn nodes_that_had_nothing_and_were_slow_are_asked_as_often_as_it_costs_little() {
        let (tiers, _moved) = host_tiers(8, 4096, PolicyKind::Lru);
        let shared = &tiers.shared;
        // 0.4 s to compute.
        (0..50).for_each(|_| shared.observe_prefill(1600, 0, Duration::from_millis(400)));
        assert!(
            asked(shared, RemoteCoverage::Unknown, 10).iter().all(|asked| *asked),
            "nothing is known against them"
        );
        let latency = Duration::from_millis(50);
        for _ in 0..200 {
            shared.observe_far(Tier::Remote, 4096, latency, false);
            shared.observe_search(false);
        }
        let of_100 = asked(shared, RemoteCoverage::Unknown, 100).iter().filter(|asked| **asked).count();
        // A question costs an eighth of a prompt.
        assert!((15..=35).contains(&of_100), "{of_100} of 100");
        (0..50).for_each(|_| shared.observe_search(true));
        assert!(
            asked(shared, RemoteCoverage::Unknown, 10).iter().all(|asked| *asked),
            "they have what is looked for again"
        );
    }

    #[test]
    fn nodes_that_answer_at_once_are_asked_again_although_one_answer_was_late() {
        let (tiers, _moved) = host_tiers(8, 4096, PolicyKind::Lru);
        let shared = &tiers.shared;
        (0..50).for_each(|_| shared.observe_prefill(1600, 0, Duration::from_millis(400)));
        (0..50).for_each(|_| shared.observe_prefill(16, 0, Duration::from_millis(4)));
        shared.observe_far(Tier::Remote, 0, Duration::from_millis(300), true);
        let of_10 = |shared: &Shared| {
            asked(shared, RemoteCoverage::Hold(100), 10).iter().filter(|asked| **asked).count()
        };
        assert!(of_10(shared) < 10, "as far as is known they take 600 ms");
        (0..4).for_each(|_| shared.observe_far(Tier::Remote, 0, Duration::from_millis(2), false));
        assert_eq!(of_10(shared), 10);
    }

    #[test]
    fn nodes_that_can_be_reached_again_are_asked_at_once() {
        let (tiers, _moved) = host_tiers(8, 4096, PolicyKind::Lru);
        let shared = &tiers.shared;
        (0..50).for_each(|_| shared.observe_prefill(1600, 0, Duration::from_millis(400)));
        (0..50).for_each(|_| shared.observe_prefill(16, 0, Duration::from_millis(4)));
        for _ in 0..20 {
            shared.observe_far(Tier::Remote, 0, Duration::from_millis(200), true);
            shared.observe_search(false);
        }
        let of_10 =
            |shared: &Shared, others| asked(shared, others, 10).iter().filter(|asked| **asked).count();
        assert!(
            of_10(shared, RemoteCoverage::Unknown) < 10 && of_10(shared, RemoteCoverage::Hold(100)) < 10,
            "they do not answer"
        );
        shared.observe_reached(Tier::Remote);
        assert_eq!(
            (of_10(shared, RemoteCoverage::Unknown), of_10(shared, RemoteCoverage::Hold(100))),
            (10, 10)
        );
    }

    #[test]
    fn nodes_are_asked_for_what_they_are_known_to_hold_if_that_saves_more_than_it_takes() {
        let (tiers, _moved) = host_tiers(8, 4096, PolicyKind::Lru);
        let shared = &tiers.shared;
        // 0.25 ms a token, 4 ms a block.
        (0..50).for_each(|_| shared.observe_prefill(1600, 0, Duration::from_millis(400)));
        (0..50).for_each(|_| shared.observe_prefill(16, 0, Duration::from_millis(4)));
        for _ in 0..200 {
            shared.observe_far(Tier::Remote, 4096, Duration::from_millis(50), false);
            shared.observe_search(false);
        }
        let of_100 =
            |blocks| asked(shared, RemoteCoverage::Hold(blocks), 100).iter().filter(|asked| **asked).count();
        // 50 ms are 12.5 blocks. What does not pay is still asked for now and then.
        assert_eq!((of_100(50), of_100(0)), (100, 0), "whatever searches have found before");
        assert!((15..=35).contains(&of_100(8)), "{}", of_100(8));
        assert!(asked(shared, RemoteCoverage::Asked, 10).iter().all(|asked| !asked));
    }
}
