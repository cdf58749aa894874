//! Simulated tiers and workers with noisy times, for tests and for the table of the sweep.

use std::time::Duration;

use crate::plan::explore::Exploration;
use crate::plan::planner::{Choice, Plan, Request, plan};
use crate::plan::recompute::{PrefillGuess, RecomputeModel};
use crate::plan::speed::{SpeedSnapshot, TierSpeed, TierSpeeds, duration};
use crate::plan::tier::{TIERS, Tier};
use crate::plan::{ExplorationConfig, PlanConfig};

/// Seeded random numbers (splitmix64).
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    /// Equal seeds, equal numbers.
    #[must_use]
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// From [0, 1).
    pub(crate) fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A factor whose logarithm is normal with this deviation (Box-Muller).
    pub(crate) fn noise(&mut self, deviation: f64) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        (deviation * radius * (std::f64::consts::TAU * self.uniform()).cos()).exp()
    }
}

/// A node whose true speeds are known to the test and unknown to the planner.
#[derive(Debug, Clone)]
pub(crate) struct SimulatedNode {
    /// True speeds.
    pub(crate) tiers: SpeedSnapshot,
    /// True prefill.
    pub(crate) prefill: PrefillGuess,
    /// Log deviation of transfer times.
    pub(crate) tier_noise: f64,
    /// Log deviation of prefill times.
    pub(crate) prefill_noise: f64,
    /// Speeds that the planner has learnt.
    pub(crate) speeds: TierSpeeds,
    /// Prefill times that the planner has learnt.
    pub(crate) recompute: RecomputeModel,
    config: PlanConfig,
    explore: Exploration,
    random: Random,
    now: Duration,
}

/// Cost of a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Outcome {
    /// Seconds to the first token.
    pub(crate) seconds: f64,
    /// Whether the onboarding was given up.
    pub(crate) gave_up: bool,
    /// The planned choice.
    pub(crate) choice: Choice,
}

impl SimulatedNode {
    /// A node that knows nothing yet.
    #[must_use]
    pub(crate) fn new(seed: u64, tiers: SpeedSnapshot, prefill: PrefillGuess, config: PlanConfig) -> Self {
        Self {
            tiers,
            prefill,
            tier_noise: 0.1,
            prefill_noise: 0.03,
            speeds: TierSpeeds::new(&TierSpeeds::guesses(), TierSpeeds::TAIL_QUANTILE),
            recompute: RecomputeModel::default(),
            config,
            explore: Exploration::new(ExplorationConfig::default()),
            random: Random::new(seed),
            now: Duration::ZERO,
        }
    }

    /// The plan with what is known.
    #[must_use]
    pub(crate) fn plan(&self, request: &Request<'_>) -> Plan {
        plan(&self.config, request, &self.speeds.snapshot(), &self.recompute)
    }

    /// Plans and runs a request, learns from it, and probes. Requests come every two seconds.
    pub(crate) fn serve(&mut self, request: &Request<'_>) -> Outcome {
        self.now += Duration::from_secs(2);
        let plan = self.plan(request);
        let snapshot = self.speeds.snapshot();
        let probe = self.explore.probe(self.now, &self.config, request, &plan, &snapshot);
        if let Some(probe) = probe {
            let bytes = probe.blocks.len() as u64 * request.block_bytes[probe.tier.index()];
            let seconds = self.transfer_s(probe.tier, bytes, 0);
            self.speeds.observe(probe.tier, bytes, duration(seconds), 0);
        }
        let mut onboard_s = 0.0_f64;
        let give_up_s = plan.give_up_after.as_secs_f64();
        for tier in Tier::ALL {
            let bytes = plan.blocks_from(tier) as u64 * request.block_bytes[tier.index()];
            if bytes == 0 {
                continue;
            }
            let queued = request.queued_bytes[tier.index()];
            let seconds = self.transfer_s(tier, bytes, queued);
            onboard_s = onboard_s.max(seconds);
            if seconds > give_up_s {
                self.speeds.observe_given_up(tier, bytes, plan.give_up_after, queued);
            } else {
                self.speeds.observe(tier, bytes, duration(seconds), queued);
            }
        }
        let gave_up = onboard_s > give_up_s;
        let from = if gave_up { request.device_blocks } else { plan.recompute_from };
        let context = from as u32 * request.block_tokens;
        let tokens = (request.prompt_tokens - context).max(1);
        let compute_s =
            self.prefill.seconds(tokens.into(), context.into()) * self.random.noise(self.prefill_noise);
        self.recompute.observe(tokens, context, 0, duration(compute_s));
        let seconds = onboard_s.min(give_up_s) + compute_s;
        Outcome { seconds, gave_up, choice: plan.choice() }
    }

    fn transfer_s(&mut self, tier: Tier, bytes: u64, queued_bytes: u64) -> f64 {
        let noise = self.random.noise(self.tier_noise);
        self.tiers[tier.index()].expected(bytes, queued_bytes).as_secs_f64() * noise
    }

    /// Noise-free time of a plan that uses so many blocks of each tier, on an idle worker.
    #[must_use]
    pub(crate) fn true_s(&self, request: &Request<'_>, blocks: [usize; TIERS]) -> f64 {
        let onboard_s = Tier::ALL
            .into_iter()
            .filter(|tier| blocks[tier.index()] > 0)
            .map(|tier| {
                let bytes = blocks[tier.index()] as u64 * request.block_bytes[tier.index()];
                self.tiers[tier.index()].expected(bytes, request.queued_bytes[tier.index()]).as_secs_f64()
            })
            .fold(0.0, f64::max);
        let total: usize = blocks.iter().sum();
        let context = (request.device_blocks + total) as f64 * f64::from(request.block_tokens);
        let tokens = (f64::from(request.prompt_tokens) - context).max(1.0);
        onboard_s + self.prefill.seconds(tokens, context)
    }

    /// Noise-free time of the plan that would be chosen now.
    #[must_use]
    pub(crate) fn chosen_s(&self, request: &Request<'_>) -> f64 {
        let plan = self.plan(request);
        self.true_s(request, Tier::ALL.map(|tier| plan.blocks_from(tier)))
    }
}

/// A speed for simulated tiers.
#[must_use]
pub(crate) fn speed(latency: Duration, bytes_per_s: f64) -> TierSpeed {
    TierSpeed::guess(latency, bytes_per_s)
}
