//! Small reads off the critical path that keep unused tiers known.
//!
//! A tier that the planner does not choose is not measured, so it could never win again. Once an interval each
//! such tier is read a little in the background: mostly as much as takes four times its latency (at least
//! [`PROBE_S`] and `first_blocks`, at most `bytes_max`), every fourth time one block. The first shows the
//! bandwidth, the second the latency. Sizes of unmeasured tiers grow as in the planner. The bytes may be thrown
//! away. The caller breaks a probe off after ten times its expected time and reports it as given up. Probes
//! pass the bandwidth gate as `Prefetch`.

use std::time::Duration;

use crate::plan::config::PlanConfig;
use crate::plan::planner::{Plan, PlannedRange, Request, trusted_blocks};
use crate::plan::speed::SpeedSnapshot;
use crate::plan::tier::{TIERS, Tier};

/// The larger probe takes at least this long.
const PROBE_S: f64 = 0.05;

/// Settings of [`Exploration`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ExplorationConfig {
    /// A tier that was not used for this long is probed (0.01 s … 1 day).
    pub(crate) every: Duration,
    /// Most bytes of one probe (at least 1).
    pub(crate) bytes_max: u64,
}

impl Default for ExplorationConfig {
    fn default() -> Self {
        Self { every: Duration::from_secs(2), bytes_max: 256 << 20 }
    }
}

/// When each tier was last used or probed.
#[derive(Debug, Clone)]
pub(crate) struct Exploration {
    config: ExplorationConfig,
    last: [Option<Duration>; TIERS],
    probes: [u8; TIERS],
}

impl Exploration {
    /// Every tier is due.
    #[must_use]
    pub(crate) fn new(config: ExplorationConfig) -> Self {
        Self { config, last: [None; TIERS], probes: [0; TIERS] }
    }

    /// The blocks to read besides a plan, if some tier is due at `now` (any monotonic clock). At most one
    /// tier a call, the one that waits longest.
    pub(crate) fn probe(
        &mut self,
        now: Duration,
        config: &PlanConfig,
        request: &Request<'_>,
        plan: &Plan,
        speeds: &SpeedSnapshot,
    ) -> Option<PlannedRange> {
        for piece in &plan.pieces {
            self.last[piece.tier.index()] = Some(now);
        }
        let due =
            |last: Option<Duration>| last.is_none_or(|last| now >= last.saturating_add(self.config.every));
        let (tier, first) = Tier::ALL
            .into_iter()
            .filter(|tier| due(self.last[tier.index()]))
            .filter_map(|tier| Some((tier, request.held.iter().position(|holders| holders.contains(tier))?)))
            .min_by_key(|(tier, _)| self.last[tier.index()])?;
        let at = tier.index();
        self.last[at] = Some(now);
        self.probes[at] = self.probes[at].wrapping_add(1);
        let blocks =
            if self.probes[at] % 4 != 2 { self.large_blocks(config, request, speeds, tier) } else { 1 };
        let run = request.held[first..].iter().take(blocks).take_while(|holders| holders.contains(tier));
        Some(PlannedRange { tier, blocks: first..first + run.count() })
    }

    fn large_blocks(
        &self,
        config: &PlanConfig,
        request: &Request<'_>,
        speeds: &SpeedSnapshot,
        tier: Tier,
    ) -> usize {
        let at = tier.index();
        let (speed, block_bytes) = (&speeds[at], request.block_bytes[at].max(1));
        let bytes = (4.0 * speed.latency_s).max(PROBE_S) / speed.seconds_per_byte.max(f64::MIN_POSITIVE);
        let blocks = (bytes as u64 / block_bytes).max(config.first_blocks.into());
        let blocks = blocks.min(self.config.bytes_max / block_bytes);
        (blocks.min(trusted_blocks(config, tier, speed, block_bytes).into()) as usize).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::planner::{Choice, plan};
    use crate::plan::recompute::RecomputeModel;
    use crate::plan::speed::TierSpeeds;
    use crate::plan::tier::TierSet;

    #[test]
    fn idle_tiers_are_probed_in_turn_once_an_interval() {
        let config = PlanConfig::default();
        let held = [TierSet::EMPTY.with(Tier::Disk).with(Tier::Object); 100];
        let request = Request {
            held: &held,
            groups: &[],
            block_bytes: [1 << 20; TIERS],
            block_tokens: 16,
            prompt_tokens: 10,
            device_blocks: 0,
            queued_bytes: [0; TIERS],
            queued_tokens: 0,
            deadline: None,
            previous: Choice::Recompute,
        };
        let speeds = TierSpeeds::guesses();
        let plan = plan(&config, &request, &speeds, &RecomputeModel::default());
        assert_eq!(plan.choice(), Choice::Recompute);
        let mut explore = Exploration::new(ExplorationConfig::default());
        let mut probe = |millis| {
            let now = Duration::from_millis(millis);
            explore
                .probe(now, &config, &request, &plan, &speeds)
                .map(|piece| (piece.tier, piece.blocks.len()))
        };
        assert_eq!(probe(0), Some((Tier::Disk, 8)));
        assert_eq!(probe(1), Some((Tier::Object, 8)));
        assert_eq!(probe(1999), None);
        assert_eq!(probe(2001), Some((Tier::Disk, 1)));
        assert_eq!(probe(2002), Some((Tier::Object, 1)));
        assert_eq!(probe(2003), None);
    }
}
