//! The choice for one request.
//!
//! Attention needs the KV of the whole prefix, so a plan onboards leading blocks and computes the rest. For each
//! number of onboarded blocks k the time to the first token is predicted as
//! `Q + combined(max(O(k) − Q, 0), R(k))`: Q is the worker's queue (onboarding during it is free), O the
//! time until the last block arrives with tiers in parallel ([`crate::placement`]), R the time to compute the
//! tokens after block k behind that context; at least one token is computed, the engine needs its logits.
//! Every k is tried: O(blocks × tiers).
//!
//! *Caution.* O is taken 1 + `margin` times as long as predicted, or as short if the previous choice was to
//! onboard; a nominally slower tier has to win by the margin as well. If predictions are exact, the first costs
//! at most a factor 1 + margin on the total (O × (1 + margin) + R ≤ (1 + margin) × (O + R), and O ≤ C where
//! onboarding is kept), the second the same on O: together less than (1 + margin)² − 1 = 3.02 % at the default
//! of 1.5 %, which leaves 2 % of the wanted 5 % to noise.
//!
//! Runs on the request path, once a request; allocates the pieces only.

use std::ops::Range;
use std::time::Duration;

use crate::config::PlanConfig;
use crate::give_up::{Waiting, combined_s, give_up_after};
use crate::placement::{Placement, TierCost};
use crate::recompute::{PrefillGuess, RecomputeModel};
use crate::speed::{SpeedSnapshot, TierSpeed, duration};
use crate::tier::{TIERS, Tier, TierSet};

/// Whether a plan onboards anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Choice {
    /// Everything that is not on the device is computed.
    #[default]
    Recompute,
    /// Some blocks are onboarded.
    Onboard,
}

/// What the planner is asked.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// For each full block of the prompt, from its start, the tiers that hold it.
    pub held: &'a [TierSet],
    /// Bytes of one block in each tier; tiers may quantise.
    pub block_bytes: [u64; TIERS],
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Leading blocks that the device has already.
    pub device_blocks: usize,
    /// Bytes that wait in front, in each tier.
    pub queued_bytes: [u64; TIERS],
    /// Prompt tokens that the worker computes before this request.
    pub queued_tokens: u64,
    /// When the first token is wanted, from now.
    pub deadline: Option<Duration>,
    /// The previous choice for this conversation, for hysteresis.
    pub previous: Choice,
}

/// A run of blocks from one tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Where they come from.
    pub tier: Tier,
    /// Their positions in the prompt's chain.
    pub blocks: Range<usize>,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// What to onboard, in the order of the prompt; start all at once.
    pub pieces: Vec<Piece>,
    /// The first block that is computed.
    pub recompute_from: usize,
    /// Expected time to the first token.
    pub predicted: Duration,
    /// The same if nothing were onboarded.
    pub predicted_recompute: Duration,
    /// Expected time until the last block is here; zero if none is onboarded.
    pub predicted_onboard: Duration,
    /// The same at the high quantile of the tiers.
    pub predicted_onboard_tail: Duration,
    /// Time from now after which what has not arrived is computed.
    pub give_up_after: Duration,
}

impl Plan {
    /// What was chosen.
    #[must_use]
    pub fn choice(&self) -> Choice {
        if self.pieces.is_empty() { Choice::Recompute } else { Choice::Onboard }
    }

    /// Blocks from a tier.
    #[must_use]
    pub fn blocks_from(&self, tier: Tier) -> usize {
        self.pieces.iter().filter(|piece| piece.tier == tier).map(|piece| piece.blocks.len()).sum()
    }
}

/// Chooses how many blocks to onboard and from where.
#[must_use]
pub fn plan(
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
    let everything_s = compute_s(&prefill, request, start);
    let caution = match request.previous {
        Choice::Recompute => 1.0 + config.margin,
        Choice::Onboard => 1.0 / (1.0 + config.margin),
    };
    let total_s = |makespan_s: f64, rest_s: f64| {
        queue_s + combined_s((makespan_s - queue_s).max(0.0), rest_s, config.overlap)
    };

    let mut placement = Placement::new();
    let mut best = (start, placement, queue_s + everything_s);
    let mut least_s = best.2;
    for at in start..end {
        if !placement.add(&costs, request.held[at], config.margin) {
            break;
        }
        let rest_s = compute_s(&prefill, request, at + 1);
        let cautious_s = total_s(placement.makespan_s() * caution, rest_s);
        if cautious_s < least_s {
            best = (at + 1, placement, total_s(placement.makespan_s(), rest_s));
            least_s = cautious_s;
        }
    }
    let (recompute_from, placement, predicted_s) = best;
    let tail_s = Tier::ALL
        .into_iter()
        .filter(|tier| placement.blocks(*tier) > 0)
        .map(|tier| {
            let cost = &costs[tier.index()];
            let expected_s = cost.start_s + f64::from(placement.blocks(tier)) * cost.block_s;
            expected_s * speeds[tier.index()].tail_factor
        })
        .fold(0.0, f64::max);
    let onboard = duration(placement.makespan_s());
    let give_up = if recompute_from == start {
        Duration::ZERO
    } else {
        give_up_after(&Waiting {
            queue: duration(queue_s),
            everything: duration(everything_s),
            rest: duration(compute_s(&prefill, request, recompute_from)),
            overlap: config.overlap,
            expected: onboard,
            tail: duration(tail_s),
            deadline: request.deadline,
        })
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

fn full_blocks(request: &Request<'_>) -> usize {
    request.prompt_tokens.checked_div(request.block_tokens).unwrap_or(0) as usize
}

/// Seconds to compute what comes after `blocks` blocks.
fn compute_s(prefill: &PrefillGuess, request: &Request<'_>, blocks: usize) -> f64 {
    let context = (blocks as f64 * f64::from(request.block_tokens)).min(f64::from(request.prompt_tokens));
    prefill.seconds((f64::from(request.prompt_tokens) - context).max(1.0), context)
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

/// How many blocks may be taken from a tier at once: extrapolating far beyond what was measured is a guess. Of this machine's
/// memory it is a good one.
pub(crate) fn trusted_blocks(config: &PlanConfig, tier: Tier, speed: &TierSpeed, block_bytes: u64) -> u32 {
    if tier == Tier::Host || speed.samples >= config.trusted_samples {
        return u32::MAX;
    }
    let largest = speed.largest_bytes.saturating_mul(config.growth.into()).checked_div(block_bytes);
    u32::try_from(largest.unwrap_or(0)).unwrap_or(u32::MAX).max(config.first_blocks)
}

fn pieces(held: &[TierSet], blocks: Range<usize>, mut placement: Placement) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    for at in blocks {
        let Some(tier) = placement.take(held[at], pieces.last().map(|piece| piece.tier)) else { break };
        match pieces.last_mut() {
            Some(piece) if piece.tier == tier => piece.blocks.end = at + 1,
            _ => pieces.push(Piece { tier, blocks: at..at + 1 }),
        }
    }
    pieces
}
