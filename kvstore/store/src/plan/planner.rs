//! The choice for one request.
//!
//! Attention needs the KV of the whole prefix, so a plan onboards leading blocks and computes the rest. For each
//! number of onboarded blocks k the time to the first token is predicted as
//! `Q + combined(max(O(k) − Q, 0), R(k))`: Q is the worker's queue (onboarding during it is free), O the
//! time until the last block arrives with tiers in parallel ([`crate::plan::placement`]), R the time to compute the
//! tokens after block k behind that context; at least one token is computed, the engine needs its logits.
//! Every k is tried: O(blocks × (tiers + groups)).
//!
//! *Groups.* Layers with sliding windows need of the prefix only the last blocks before k ([`Group`]). A k for which one of these
//! is missing is no choice. Group blocks arrive beside the prefix, each from the first tier that holds it, and lengthen O.
//!
//! *Caution.* O is taken 1 + `margin` times as long as predicted, or as short if the previous choice was to
//! onboard; a nominally slower tier has to win by the margin as well. If predictions are exact, the first costs
//! at most a factor 1 + margin on the total (O × (1 + margin) + R ≤ (1 + margin) × (O + R), and O ≤ C where
//! onboarding is kept), the second the same on O: together less than (1 + margin)² − 1 = 3.02 % at the default
//! of 1.5 %, which leaves 2 % of the wanted 5 % to noise.
//!
//! *Trial loads.* While prefills as short as a rest were hardly measured, a load that takes at most [`CHEAP_LOAD_PART`] of
//! computing everything is planned with the optimistic R of [`RecomputeModel::optimistic_remaining_s`]; each may cost that much more
//! than computing, outside the bound above.
//!
//! Runs on the request path, once a request; allocates the pieces only.

use std::ops::Range;
use std::time::Duration;

use crate::plan::config::PlanConfig;
use crate::plan::give_up::{Waiting, combined_s, give_up_after};
use crate::plan::placement::{Placement, TierCost, finish_s};
use crate::plan::recompute::{PrefillEstimate, PrefillGuess, RecomputeModel};
use crate::plan::speed::{SpeedSnapshot, TierSpeed, duration};
use crate::plan::tier::{TIERS, Tier, TierSet};

/// A load that takes at most this part of the time of computing everything may be made in the hope that the rest is short
/// ([`RecomputeModel::optimistic_remaining_s`]).
const CHEAP_LOAD_PART: f64 = 0.25;

/// Whether a plan onboards anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Choice {
    /// Everything that is not on the device is computed.
    #[default]
    Recompute,
    /// Some blocks are onboarded.
    Onboard,
}

/// A request to plan.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request<'a> {
    /// For each full block of the prompt, from its start, the tiers that hold it.
    pub(crate) held: &'a [TierSet],
    /// Layer groups with blocks of their own, beside the prefix above.
    pub(crate) groups: &'a [Group<'a>],
    /// Bytes of one block in each tier.
    pub(crate) block_bytes: [u64; TIERS],
    /// Tokens of a block.
    pub(crate) block_tokens: u32,
    /// Tokens of the prompt.
    pub(crate) prompt_tokens: u32,
    /// Leading blocks that the device has already.
    pub(crate) device_blocks: usize,
    /// Bytes queued before this request, in each tier.
    pub(crate) queued_bytes: [u64; TIERS],
    /// Prompt tokens that the worker computes before this request.
    pub(crate) queued_tokens: u64,
    /// When the first token is wanted, from now.
    pub(crate) deadline: Option<Duration>,
    /// The previous choice for this conversation, for hysteresis.
    pub(crate) previous: Choice,
}

/// A group of layers with blocks of its own, of which the model needs the last ones before the block that it computes next.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Group<'a> {
    /// For each full block of the prompt, from its start, the tiers that hold this group's block; none: it is missing.
    pub(crate) held: &'a [TierSet],
    /// Number of blocks needed; `usize::MAX`: all of them.
    pub(crate) window_blocks: usize,
}

/// Counts of the blocks that all groups need, as the number of onboarded blocks grows.
struct GroupBlocks<'a> {
    groups: &'a [Group<'a>],
    /// Blocks before this one are on the device, and are not counted.
    start: usize,
    /// Needed blocks that no tier holds.
    missing: usize,
    /// Needed blocks by the first tier that holds each.
    from: [u32; TIERS],
}

impl<'a> GroupBlocks<'a> {
    fn new(groups: &'a [Group<'a>], start: usize) -> Self {
        Self { groups, start, missing: 0, from: [0; TIERS] }
    }

    /// Counts block `at`, and drops the block that leaves each window.
    fn advance(&mut self, at: usize) {
        for group in self.groups {
            match first_holder(group.held, at) {
                Some(tier) => self.from[tier] += 1,
                None => self.missing += 1,
            }
            let Some(left) = at.checked_sub(group.window_blocks).filter(|left| *left >= self.start) else {
                continue;
            };
            match first_holder(group.held, left) {
                Some(tier) => self.from[tier] -= 1,
                None => self.missing -= 1,
            }
        }
    }
}

/// The most leading blocks of a prompt that could be onboarded with all that its groups need, those on the device included.
#[must_use]
pub(crate) fn loadable(held: &[TierSet], groups: &[Group<'_>], device_blocks: usize) -> usize {
    let mut of_groups = GroupBlocks::new(groups, device_blocks);
    let mut loadable = device_blocks;
    for (at, tiers) in held.iter().enumerate().skip(device_blocks) {
        if tiers.is_empty() {
            break;
        }
        of_groups.advance(at);
        if of_groups.missing == 0 {
            loadable = at + 1;
        }
    }
    loadable
}

fn first_holder(held: &[TierSet], at: usize) -> Option<usize> {
    let holders = held.get(at)?;
    Tier::ALL.into_iter().find(|tier| holders.contains(*tier)).map(Tier::index)
}

/// A run of blocks from one tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlannedRange {
    /// Tier that the blocks come from.
    pub(crate) tier: Tier,
    /// Positions of the blocks in the prompt's chain.
    pub(crate) blocks: Range<usize>,
}

/// The planned loads of a request, and their expected times.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Blocks to onboard, in the order of the prompt; all pieces are started at once.
    pub(crate) pieces: Vec<PlannedRange>,
    /// The first block that is computed.
    pub(crate) recompute_from: usize,
    /// Expected time to the first token; of a trial load the hoped-for one.
    pub(crate) predicted: Duration,
    /// The same if nothing were onboarded.
    pub(crate) predicted_recompute: Duration,
    /// Expected time until the last block is here; zero if none is onboarded.
    pub(crate) predicted_onboard: Duration,
    /// The same at the high quantile of the tiers.
    pub(crate) predicted_onboard_tail: Duration,
    /// Time from now after which what has not arrived is computed.
    pub(crate) give_up_after: Duration,
}

impl Plan {
    /// Whether the plan onboards blocks or recomputes.
    #[must_use]
    pub(crate) fn choice(&self) -> Choice {
        if self.pieces.is_empty() { Choice::Recompute } else { Choice::Onboard }
    }

    /// Blocks from a tier.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn blocks_from(&self, tier: Tier) -> usize {
        self.pieces.iter().filter(|piece| piece.tier == tier).map(|piece| piece.blocks.len()).sum()
    }
}

/// Chooses how many blocks to onboard and from where.
#[must_use]
pub(crate) fn plan(
    config: &PlanConfig,
    request: &Request<'_>,
    speeds: &SpeedSnapshot,
    recompute: &RecomputeModel,
) -> Plan {
    let prefill = recompute.coefficients();
    let queue_s = prefill.queue_seconds(request.queued_tokens);
    let costs = tier_costs(config, request, speeds);
    let start = request.device_blocks.min(full_blocks(request));
    let end = request.held.len().min(full_blocks(request)).max(start);
    let caution = match request.previous {
        Choice::Recompute => 1.0 + config.margin,
        Choice::Onboard => 1.0 / (1.0 + config.margin),
    };
    let total_s = |makespan_s: f64, remaining_s: f64| {
        queue_s + combined_s((makespan_s - queue_s).max(0.0), remaining_s, config.overlap)
    };

    let estimate = |blocks: usize| PrefillEstimate {
        tokens: remaining_tokens(request, blocks),
        seconds: compute_s(&prefill, request, blocks),
    };
    let everything = estimate(start);
    let everything_s = everything.seconds;
    let rest_after_s = |blocks: usize, makespan_s: f64| {
        let rest = estimate(blocks);
        let is_cheap = makespan_s <= everything_s * CHEAP_LOAD_PART;
        if is_cheap { recompute.optimistic_remaining_s(rest, everything) } else { rest.seconds }
    };

    let mut placement = Placement::new();
    let mut of_groups = GroupBlocks::new(request.groups, start);
    let mut best = Candidate {
        blocks: start,
        placement,
        from: [0; TIERS],
        remaining_s: everything_s,
        total_s: queue_s + everything_s,
    };
    let mut least_s = best.total_s;
    for at in start..end {
        if !placement.add(&costs, request.held[at], config.margin) {
            break;
        }
        of_groups.advance(at);
        let from = blocks_from(&placement, &of_groups.from);
        if of_groups.missing > 0 || (0..TIERS).any(|tier| from[tier] > costs[tier].blocks_max) {
            continue;
        }
        let makespan_s = latest_s(&costs, &from, |_| 1.0);
        let remaining_s = rest_after_s(at + 1, makespan_s);
        let cautious_s = total_s(makespan_s * caution, remaining_s);
        if cautious_s < least_s {
            let total_s = total_s(makespan_s, remaining_s);
            best = Candidate { blocks: at + 1, placement, from, remaining_s, total_s };
            least_s = cautious_s;
        }
    }
    let Candidate { blocks: recompute_from, placement, from, remaining_s, total_s: predicted_s } = best;
    let tail_s = latest_s(&costs, &from, |tier| speeds[tier].tail_factor);
    let onboard = duration(latest_s(&costs, &from, |_| 1.0));
    let give_up = if recompute_from == start {
        Duration::ZERO
    } else {
        let give_up = give_up_after(&Waiting {
            queue: duration(queue_s),
            everything: duration(everything_s),
            rest: duration(remaining_s),
            overlap: config.overlap,
            expected: onboard,
            tail: duration(tail_s),
            deadline: request.deadline,
        });
        // A trial load is given up when it costs twice what it may.
        let is_trial = remaining_s < compute_s(&prefill, request, recompute_from);
        if is_trial { give_up.min(duration(queue_s + 2.0 * CHEAP_LOAD_PART * everything_s)) } else { give_up }
    };
    Plan {
        pieces: pieces(request.held, start..recompute_from, placement),
        recompute_from,
        predicted: duration(predicted_s),
        predicted_recompute: duration(queue_s + everything_s),
        predicted_onboard: onboard,
        predicted_onboard_tail: duration(tail_s),
        give_up_after: give_up,
    }
}

/// A choice of how many blocks to onboard.
struct Candidate {
    blocks: usize,
    placement: Placement,
    /// Blocks from each tier, those of groups among them.
    from: [u32; TIERS],
    /// Seconds to compute the rest.
    remaining_s: f64,
    total_s: f64,
}

/// Blocks from each tier, of the prefix and of the groups.
fn blocks_from(placement: &Placement, of_groups: &[u32; TIERS]) -> [u32; TIERS] {
    Tier::ALL.map(|tier| placement.blocks(tier) + of_groups[tier.index()])
}

/// Seconds until the last block of so many from each tier is here; a tier may take `factor` times as long.
fn latest_s(costs: &[TierCost; TIERS], blocks: &[u32; TIERS], factor: impl Fn(usize) -> f64) -> f64 {
    (0..TIERS)
        .filter(|tier| blocks[*tier] > 0)
        .map(|tier| finish_s(&costs[tier], blocks[tier]) * factor(tier))
        .fold(0.0, f64::max)
}

fn full_blocks(request: &Request<'_>) -> usize {
    request.prompt_tokens.checked_div(request.block_tokens).unwrap_or(0) as usize
}

/// Seconds to compute what comes after `blocks` blocks.
fn compute_s(prefill: &PrefillGuess, request: &Request<'_>, blocks: usize) -> f64 {
    let context = (blocks as f64 * f64::from(request.block_tokens)).min(f64::from(request.prompt_tokens));
    prefill.seconds(remaining_tokens(request, blocks), context)
}

/// Tokens that are computed after `blocks` blocks.
fn remaining_tokens(request: &Request<'_>, blocks: usize) -> f64 {
    (f64::from(request.prompt_tokens) - blocks as f64 * f64::from(request.block_tokens)).max(1.0)
}

fn tier_costs(config: &PlanConfig, request: &Request<'_>, speeds: &SpeedSnapshot) -> [TierCost; TIERS] {
    Tier::ALL.map(|tier| {
        let at = tier.index();
        let speed = &speeds[at];
        let bytes = request.block_bytes[at];
        TierCost {
            start_s: speed.latency_s + request.queued_bytes[at] as f64 * speed.seconds_per_byte,
            block_s: bytes as f64 * speed.seconds_per_byte,
            blocks_max: trusted_blocks(config, tier, speed, bytes),
        }
    })
}

/// Most blocks to take from a tier at once: extrapolating far beyond what was measured is a guess. For host
/// memory, extrapolation is good.
pub(crate) fn trusted_blocks(config: &PlanConfig, tier: Tier, speed: &TierSpeed, block_bytes: u64) -> u32 {
    if tier == Tier::Host || speed.samples >= config.trusted_samples {
        return u32::MAX;
    }
    let largest = speed.largest_bytes.saturating_mul(config.growth.into()).checked_div(block_bytes);
    u32::try_from(largest.unwrap_or(0)).unwrap_or(u32::MAX).max(config.first_blocks)
}

fn pieces(held: &[TierSet], blocks: Range<usize>, mut placement: Placement) -> Vec<PlannedRange> {
    let mut pieces: Vec<PlannedRange> = Vec::new();
    for at in blocks {
        let Some(tier) = placement.take(held[at], pieces.last().map(|piece| piece.tier)) else { break };
        match pieces.last_mut() {
            Some(piece) if piece.tier == tier => piece.blocks.end = at + 1,
            _ => pieces.push(PlannedRange { tier, blocks: at..at + 1 }),
        }
    }
    pieces
}
