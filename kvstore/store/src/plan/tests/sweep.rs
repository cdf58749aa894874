//! The sweep "prefix length × tier speed" in simulation: what the chosen plan costs beside the better of
//! onboarding everything, recomputing everything and the best split.
//!
//! For each speed a node that knows nothing serves [`WARM_UP`] requests of random length with noisy times;
//! then the plan for each prefix length is judged by the true, noise-free times.

use std::time::Duration;

use crate::plan::config::PlanConfig;
use crate::plan::planner::{Choice, Request};
use crate::plan::recompute::PrefillGuess;
use crate::plan::speed::SpeedSnapshot;
use crate::plan::tests::testing::{Random, SimulatedNode, speed};
use crate::plan::tier::{TIERS, Tier, TierSet};

/// Requests that a node serves before it is judged.
pub(crate) const WARM_UP: usize = 200;
/// Tokens of a block.
pub(crate) const BLOCK_TOKENS: u32 = 16;
/// Bytes of a block: 8 kv heads of 128 in 32 layers, bf16.
pub(crate) const BLOCK_BYTES: u64 = 2 << 20;
/// Prefix lengths in tokens.
pub(crate) const PREFIX_TOKENS: [u32; 14] =
    [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072];
/// Bandwidths in bytes a second.
pub(crate) const BYTES_PER_S: [f64; 12] = [1e7, 1e8, 5e8, 1e9, 2e9, 2.6e9, 3e9, 3.3e9, 4e9, 8e9, 2e10, 5e10];
/// Latencies in microseconds.
pub(crate) const LATENCY_US: [u64; 5] = [10, 100, 1000, 10_000, 100_000];
/// The true prefill of the simulated worker; not the planner's guess.
pub(crate) const PREFILL: PrefillGuess = PrefillGuess { fixed_s: 8e-3, linear_s: 4e-5, quadratic_s: 4e-10 };
/// Tokens of a prompt after the prefix.
const SUFFIX_TOKENS: u32 = 64;

/// One point of the sweep. All times are true seconds to the first token.
#[derive(Debug, Clone, Copy)]
#[expect(dead_code, reason = "a failed test prints the point")]
pub(crate) struct Cell {
    /// Tokens that the tier holds.
    pub(crate) prefix_tokens: u32,
    /// Bandwidth of the tier.
    pub(crate) bytes_per_s: f64,
    /// Latency of the tier.
    pub(crate) latency: Duration,
    /// Everything onboarded.
    pub(crate) onboard_s: f64,
    /// Everything recomputed.
    pub(crate) recompute_s: f64,
    /// The best number of onboarded blocks, by trying each.
    pub(crate) best_s: f64,
    /// The plan.
    pub(crate) chosen_s: f64,
    /// The plan's blocks.
    pub(crate) chosen_blocks: usize,
}

impl Cell {
    /// By how much the plan is worse than the best, as a part.
    #[must_use]
    pub(crate) fn regret(&self) -> f64 {
        self.chosen_s / self.best_s - 1.0
    }
}

/// A request for a prefix that is held in the same tiers throughout.
#[must_use]
pub(crate) fn request<'a>(held: &'a [TierSet], previous: Choice) -> Request<'a> {
    Request {
        held,
        groups: &[],
        block_bytes: [BLOCK_BYTES; TIERS],
        block_tokens: BLOCK_TOKENS,
        prompt_tokens: held.len() as u32 * BLOCK_TOKENS + SUFFIX_TOKENS,
        device_blocks: 0,
        queued_bytes: [0; TIERS],
        queued_tokens: 0,
        deadline: None,
        previous,
    }
}

/// True speeds in which only the disk matters.
#[must_use]
pub(crate) fn disk_of(latency: Duration, bytes_per_s: f64) -> SpeedSnapshot {
    [speed(latency, bytes_per_s); TIERS]
}

/// Serves requests of random length from the disk.
pub(crate) fn warm_up(node: &mut SimulatedNode, seed: u64, requests: usize) {
    let mut random = Random::new(seed);
    let held = vec![TierSet::EMPTY.with(Tier::Disk); 8192];
    let mut previous = Choice::Recompute;
    for _ in 0..requests {
        let blocks = 2_f64.powf(13.0 * random.uniform()) as usize;
        previous = node.serve(&request(&held[..blocks], previous)).choice;
    }
}

/// Every cell of one tier speed.
#[must_use]
pub(crate) fn cells(seed: u64, latency: Duration, bytes_per_s: f64, config: PlanConfig) -> Vec<Cell> {
    let mut node = SimulatedNode::new(seed, disk_of(latency, bytes_per_s), PREFILL, config);
    warm_up(&mut node, seed ^ 0x5eed, WARM_UP);
    let held = vec![TierSet::EMPTY.with(Tier::Disk); 8192];
    let cell = |prefix_tokens: u32| {
        let blocks = (prefix_tokens / BLOCK_TOKENS) as usize;
        let request = request(&held[..blocks], Choice::Recompute);
        let split_s = |blocks: usize| {
            let mut from = [0; TIERS];
            from[Tier::Disk.index()] = blocks;
            node.true_s(&request, from)
        };
        Cell {
            prefix_tokens,
            bytes_per_s,
            latency,
            onboard_s: split_s(blocks),
            recompute_s: split_s(0),
            best_s: (0..=blocks).map(split_s).fold(f64::INFINITY, f64::min),
            chosen_s: node.chosen_s(&request),
            chosen_blocks: node.plan(&request).recompute_from,
        }
    };
    PREFIX_TOKENS.into_iter().map(cell).collect()
}

/// The whole sweep.
#[must_use]
pub(crate) fn sweep(seed: u64, config: PlanConfig) -> Vec<Cell> {
    let speeds = LATENCY_US.into_iter().flat_map(|latency| BYTES_PER_S.map(|bytes| (latency, bytes)));
    speeds.flat_map(|(us, bytes)| cells(seed + us, Duration::from_micros(us), bytes, config)).collect()
}
