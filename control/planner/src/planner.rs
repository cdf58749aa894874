//! Wanted counts from demand over capacity, and the rules for following them.
//!
//! For each pool, at each tick:
//!
//! ```text
//! need   = (max(arrivals/s, season's highest arrivals/s up to the horizon) + queued ÷ clear_within) ÷ (capacity · utilisation)
//! wanted = ⌈need⌉, between the pool's minimum and maximum, then within the GPUs that there are
//! ```
//!
//! * `capacity` is requests/s of a worker within the service level for the lengths of the last requests, with the
//!   engine's step times learned from what gateways measure.
//! * Demand is forecast as far ahead as the next worker needs: the time to wake a sleeping worker if there is
//!   one, otherwise the time to start one.
//! * Starting workers delay nothing: `wanted` is a count that includes them. A worker that has been starting
//!   for twice the usual time is reported as stuck, and is not requested a second time.
//! * Scale up at once. Scale down only if the need stayed lower for `down_after`, and by an eighth of the
//!   workers at a time. Each reversal (up again soon after a scale-down) multiplies `down_after` by four for a
//!   day, so that steady load has a steady count.
//! * Two ticks with answers later than the service level and growing queues: one worker more than are ready,
//!   whatever the model predicts.
//! * A count that was changed by hand is kept for `manual_hold`.
//! * Without `SAMPLES_MIN` finished requests there is no capacity; a threshold on KV and queues decides, and
//!   the reason names it.

use std::collections::VecDeque;
use std::fmt;

use crate::budget::{Claim, fit};
use crate::capacity::{Capacity, Lengths};
use crate::demand::Level;
use crate::engine::{Engine, ServiceLevel, StepTime, WorkerRole};
use crate::headroom::Headroom;
use crate::learned_engine::LearnedEngine;
use crate::season::Season;
use crate::start_time::StartTime;

/// Finished requests from which on their lengths determine a worker's capacity.
const SAMPLES_MIN: usize = 50;
/// Most lengths that are kept.
const SAMPLES_MAX: usize = 512;
/// Workers of the simulated group that determines a worker's capacity. It is a constant, because a capacity
/// that depended on the count would make the count oscillate.
pub const CAPACITY_OF: u32 = 4;
/// Tokens of a prompt or an answer above which a length is ignored.
const TOKENS_MAX: f64 = 1e6;
/// Window in which arrivals are counted, in seconds.
pub const LEVEL_WINDOW: f64 = 40.0;
/// Part of a worker by which the need may exceed a count without another worker.
const ROUNDING: f64 = 0.02;
/// Ratio of the grid to which learned step times are rounded, so that each engine's capacities are computed
/// once.
const ENGINE_GRAIN: f64 = 1.04;
/// Most engines whose capacities are kept.
const ENGINES_MAX: usize = 8;
/// A rise within this multiple of `down_after` after the last fall is a reversal.
const REVERSAL_WITHIN: f64 = 30.0;
/// Factor by which each reversal multiplies `down_after`.
const REVERSAL_FACTOR: f64 = 4.0;
/// Longest wait before scaling down, in seconds, and time for which reversals are remembered.
const DOWN_AFTER_MAX: f64 = 2.0 * 3600.0;
const REVERSALS_REMEMBERED: f64 = 24.0 * 3600.0;
/// Standard deviations of arrival noise that must fit above the need: a pool is not scaled down to a count
/// that the noise would raise again.
const SWINGS: f64 = 3.0;
/// Divisor of the workers that may drain at a time.
const DRAIN_SHARE: u32 = 8;
/// Consecutive late ticks after which the model is overridden.
const LATE_TICKS: u32 = 2;
/// Slots of a season, and shortest slot in seconds. Shorter slots would follow the noise.
const SEASON_SLOTS: f64 = 288.0;
const SEASON_SLOT_MIN: f64 = 30.0;
/// Without a model: KV use above which a worker is added, and below which one may be removed.
const KV_HIGH: f64 = 0.8;
const KV_LOW: f64 = 0.3;

/// One role of one model.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolConfig {
    /// Name of the pool in decisions.
    pub name: String,
    /// Phases that the pool's workers compute.
    pub role: WorkerRole,
    /// Fewest workers. 0: the pool may have no worker without demand.
    pub min: u32,
    /// Most workers.
    pub max: u32,
    /// GPUs of a worker.
    pub gpus: u32,
}

/// Service level and limits of the planner; times in seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannerConfig {
    /// The service level.
    pub level: ServiceLevel,
    /// Engine as assumed before the first request.
    pub engine: Engine,
    /// Share of the capacity that is used, until [`Planner::set_headroom`] changes it.
    pub headroom: Headroom,
    /// Seconds from the request for a worker to its first request, until starts have been measured.
    pub start_time: f64,
    /// Seconds within which queued requests are to be served.
    pub clear_within: f64,
    /// Seconds for which the need must have been lower before a worker is removed.
    pub down_after: f64,
    /// Seconds for which a count that was changed by hand is kept.
    pub manual_hold: f64,
    /// Most GPUs of all pools together, including draining workers.
    pub gpus_max: u32,
    /// Periods after which demand repeats, in seconds.
    pub seasons: Vec<f64>,
}

/// Workers of a pool by state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WorkerCounts {
    /// Workers that take requests.
    pub ready: u32,
    /// Workers that exist and do not take requests yet.
    pub starting: u32,
    /// Workers that take no more requests.
    pub draining: u32,
    /// Workers that are asleep, and are woken before another one is started.
    pub sleeping: u32,
}

/// Measurements of one pool since the last tick.
#[derive(Debug, Clone, Default)]
pub struct Observation {
    /// Seconds since the last tick.
    pub seconds: f64,
    /// Requests that arrived.
    pub arrivals: f64,
    /// Lengths of finished requests, or of a sample of them.
    pub finished: Vec<Lengths>,
    /// Requests that wait for a worker at the end of the tick.
    pub queued: f64,
    /// Requests that decode, on all workers together.
    pub decoding: f64,
    /// Tokens of KV that the decoding requests hold.
    pub kv_tokens: f64,
    /// Mean inter-token latency, in seconds.
    pub itl_mean: Option<f64>,
    /// Mean time to first token, in seconds.
    pub ttft_mean: Option<f64>,
    /// 90th percentile of inter-token latency, in seconds.
    pub itl_p90: Option<f64>,
    /// 90th percentile of time to first token, in seconds.
    pub ttft_p90: Option<f64>,
    /// Workers by state.
    pub workers: WorkerCounts,
    /// For each starting worker: seconds since it was requested.
    pub starting_for: Vec<f64>,
    /// For each worker that became ready: seconds since it was requested.
    pub started_in: Vec<f64>,
    /// For each worker that was woken: seconds since it was requested.
    pub woken_in: Vec<f64>,
    /// Count in force at the process that starts and stops workers.
    pub in_force: u32,
    /// Whether part of the demand was not measured, because a gateway is silent or was just removed. Demand
    /// may be higher than measured.
    pub is_partial: bool,
}

/// Reason for a wanted count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The computed need.
    Demand,
    /// Queued requests are most of the need.
    Backlog,
    /// Demand at the same time in earlier periods.
    Season,
    /// Answers are late and queues grow.
    LateAnswers,
    /// Too few requests have finished to know a worker's capacity; KV in use and queues decided.
    Thresholds,
    /// Even a request alone on a worker is late; KV in use and queues decided.
    LevelImpossible,
    /// A lower count would suffice, but has not for long enough; or an eighth of the workers is draining.
    WaitingToShrink,
    /// A lower count would suffice for the measured part of the demand.
    Partial,
    /// The pool's minimum.
    Minimum,
    /// The pool's maximum.
    Maximum,
    /// The remaining GPUs are in use or belong to draining workers.
    Budget,
    /// The count was changed by hand.
    ManualHold,
}

impl Reason {
    /// Returns the name in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Demand => "demand",
            Self::Backlog => "backlog",
            Self::Season => "season",
            Self::LateAnswers => "late_answers",
            Self::Thresholds => "thresholds",
            Self::LevelImpossible => "level_impossible",
            Self::WaitingToShrink => "waiting_to_shrink",
            Self::Partial => "partial",
            Self::Minimum => "minimum",
            Self::Maximum => "maximum",
            Self::Budget => "budget",
            Self::ManualHold => "manual_hold",
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Demand => "by demand",
            Self::Backlog => "to clear what waits",
            Self::Season => "for demand that comes at this time",
            Self::LateAnswers => "answers are late and queues grow",
            Self::Thresholds => {
                "by KV in use and queues: too few requests have finished to know a worker's capacity"
            }
            Self::LevelImpossible => "by KV in use and queues: even a request alone on a worker is late",
            Self::WaitingToShrink => "fewer would do, and were not enough for long enough",
            Self::Partial => "fewer would do for what is seen, but a gateway is not heard",
            Self::Minimum => "the pool's minimum",
            Self::Maximum => "the pool's maximum",
            Self::Budget => "the other GPUs are in use, or still draining",
            Self::ManualHold => "changed by hand",
        }
    }
}

/// Count that a pool should have, with its reason.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// Name of the pool.
    pub pool: String,
    /// Workers that should exist and not be draining.
    pub wanted: u32,
    /// Reason for the count.
    pub reason: Reason,
    /// Arrivals per second.
    pub rate: f64,
    /// Requests per second that one worker serves within the service level; `None` if too few requests have
    /// finished.
    pub capacity: Option<f64>,
    /// Workers that demand needs, before limits; `None` without a capacity.
    pub need: Option<f64>,
    /// Share of the capacity that is used.
    pub utilisation: f64,
    /// Time for which demand is forecast, in seconds: the time of the next worker, to wake if one sleeps,
    /// otherwise to start, plus one interval.
    pub horizon: f64,
    /// Workers that have been starting for more than twice the usual time.
    pub stuck: u32,
}

impl fmt::Display for Decision {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let workers = if self.wanted == 1 { "worker" } else { "workers" };
        write!(formatter, "{}: {} {workers}, {}", self.pool, self.wanted, self.reason.text())?;
        if let (Some(need), Some(capacity)) = (self.need, self.capacity) {
            write!(
                formatter,
                " (need {need:.2}: {:.2} requests/s, {capacity:.2} a worker, used to {:.0} %)",
                self.rate,
                100.0 * self.utilisation
            )?;
        }
        if self.stuck > 0 {
            write!(formatter, "; {} stuck while starting", self.stuck)?;
        }
        Ok(())
    }
}

/// Decides how many workers each pool should have.
#[derive(Debug)]
pub struct Planner {
    config: PlannerConfig,
    pools: Vec<Pool>,
    decided_at: f64,
}

impl Planner {
    /// Creates a planner without observations.
    #[must_use]
    pub fn new(config: PlannerConfig, pools: Vec<PoolConfig>) -> Self {
        let pools = pools.into_iter().map(|pool| Pool::new(pool, &config)).collect();
        Self { config, pools, decided_at: f64::NEG_INFINITY }
    }

    /// Decides at `now`, in seconds of the wall clock, from one observation for each pool, in their order.
    ///
    /// # Panics
    ///
    /// If the numbers of observations and pools differ: the caller observes the pools that it configured.
    pub fn decide(&mut self, now: f64, observations: &[Observation]) -> Vec<Decision> {
        assert_eq!(observations.len(), self.pools.len(), "one observation for each pool");
        if now < std::mem::replace(&mut self.decided_at, now) {
            self.pools.iter_mut().for_each(|pool| pool.clock_went_back(now));
        }
        let mut decisions: Vec<Decision> = self
            .pools
            .iter_mut()
            .zip(observations)
            .map(|(pool, observation)| pool.decide(&self.config, now, observation))
            .collect();
        self.keep_budget(observations, &mut decisions);
        for (pool, decision) in self.pools.iter_mut().zip(&decisions) {
            pool.note(now, decision, &self.config);
        }
        decisions
    }

    /// Forgets the requested counts, for a planner whose decisions are not carried out: different counts then
    /// do not look as if they were set by hand.
    pub fn forget_asked(&mut self) {
        for pool in &mut self.pools {
            pool.asked = None;
            pool.held_until = f64::NEG_INFINITY;
        }
    }

    /// Records that a pool's count was set as decided. A different count at the next decision was then set by
    /// hand, even if it is the previous one.
    pub fn carried_out(&mut self, pool: usize) {
        if let Some(pool) = self.pools.get_mut(pool) {
            pool.in_force_before = pool.asked.unwrap_or(pool.in_force_before);
        }
    }

    /// Sets the share of the capacity of a pool's workers that is used from now on.
    pub fn set_headroom(&mut self, pool: usize, headroom: Headroom) {
        if let Some(pool) = self.pools.get_mut(pool) {
            pool.headroom = headroom;
        }
    }

    /// Returns the engine of a pool's workers as learned so far, and the seconds that they take to start.
    #[must_use]
    pub fn learned(&self, pool: usize) -> Option<(Engine, f64)> {
        self.pools.get(pool).map(|pool| (pool.engine.engine(), pool.start_time.p90()))
    }

    fn keep_budget(&self, observations: &[Observation], decisions: &mut [Decision]) {
        let claims: Vec<Claim> = self
            .pools
            .iter()
            .zip(observations)
            .zip(decisions.iter())
            .map(|((pool, observation), decision)| Claim {
                min: pool.config.min,
                wanted: decision.wanted.max(pool.config.min),
                current: observation.workers.ready + observation.workers.starting,
                draining: observation.workers.draining,
                gpus: pool.config.gpus,
            })
            .collect();
        for (decision, count) in decisions.iter_mut().zip(fit(&claims, self.config.gpus_max)) {
            if count < decision.wanted {
                decision.wanted = count;
                decision.reason = Reason::Budget;
            }
        }
    }
}

#[derive(Debug)]
struct Pool {
    config: PoolConfig,
    headroom: Headroom,
    level: Level,
    lengths: VecDeque<Lengths>,
    /// Capacities of the engines that were recently in use.
    capacities: VecDeque<(EngineKey, Capacity)>,
    engine: LearnedEngine,
    start_time: StartTime,
    wake_time: StartTime,
    seasons: Vec<Season>,
    scale_down: ScaleDown,
    late_ticks: u32,
    queued_before: f64,
    /// Count that was requested, and the count that was in force before.
    asked: Option<u32>,
    in_force_before: u32,
    held_until: f64,
}

impl Pool {
    fn new(config: PoolConfig, planner: &PlannerConfig) -> Self {
        Self {
            config,
            headroom: planner.headroom,
            level: Level::new(LEVEL_WINDOW),
            lengths: VecDeque::new(),
            capacities: VecDeque::new(),
            engine: LearnedEngine::new(planner.engine),
            start_time: StartTime::new(planner.start_time),
            wake_time: StartTime::new(planner.start_time),
            seasons: planner
                .seasons
                .iter()
                .map(|&period| Season::new(period, (period / SEASON_SLOTS).max(SEASON_SLOT_MIN)))
                .collect(),
            scale_down: ScaleDown::default(),
            late_ticks: 0,
            queued_before: 0.0,
            asked: None,
            in_force_before: 0,
            held_until: f64::NEG_INFINITY,
        }
    }

    fn decide(&mut self, config: &PlannerConfig, now: f64, seen: &Observation) -> Decision {
        self.observe(seen);
        let ahead = |time: &StartTime| time.p90() + seen.seconds.clamp(0.0, 60.0);
        let start = ahead(&self.start_time);
        // The next worker is a sleeping one, if there is one.
        let horizon = if seen.workers.sleeping > 0 { ahead(&self.wake_time) } else { start };
        let capacity = self.capacity(config);
        let (mut wanted, mut reason, need) = match capacity {
            Some(capacity) if capacity > 0.0 => self.by_capacity(config, now, horizon, start, capacity, seen),
            Some(_) => (self.by_thresholds(config, seen), Reason::LevelImpossible, None),
            None => (self.by_thresholds(config, seen), Reason::Thresholds, None),
        };
        if self.is_late(config, seen) && wanted <= seen.workers.ready {
            (wanted, reason) = (seen.workers.ready + 1, Reason::LateAnswers);
        }
        (wanted, reason) = self.limited(wanted, reason);
        (wanted, reason) = self.limit_scale_down(config, now, seen, wanted, reason, need.unwrap_or(0.0));
        if self.is_held(config, now, seen) {
            (wanted, reason) = (seen.in_force, Reason::ManualHold);
        }
        let stuck = seen.starting_for.iter().filter(|&&age| self.start_time.is_stuck(age)).count();
        Decision {
            pool: self.config.name.clone(),
            wanted,
            reason,
            rate: self.level.rate(),
            capacity,
            need,
            utilisation: self.headroom.utilisation,
            horizon,
            stuck: stuck as u32,
        }
    }

    fn observe(&mut self, seen: &Observation) {
        self.level.observe(seen.arrivals, seen.seconds);
        let is_possible = |lengths: &&Lengths| {
            let tokens = 1.0..=TOKENS_MAX;
            tokens.contains(&lengths.prompt)
                && tokens.contains(&lengths.output)
                && (0.0..=lengths.prompt).contains(&lengths.cached)
        };
        for lengths in seen.finished.iter().filter(is_possible) {
            self.lengths.truncate(SAMPLES_MAX - 1);
            self.lengths.push_front(*lengths);
        }
        seen.started_in.iter().for_each(|&seconds| self.start_time.observe(seconds));
        seen.woken_in.iter().for_each(|&seconds| self.wake_time.observe(seconds));
        self.engine.observe(self.config.role, self.lengths.make_contiguous(), seen);
    }

    /// Returns the requests per second of one worker.
    fn capacity(&mut self, config: &PlannerConfig) -> Option<f64> {
        if self.lengths.len() < SAMPLES_MIN {
            return None;
        }
        let (key, engine) = rounded(self.engine.engine());
        let at = self.capacities.iter().position(|known| known.0 == key).unwrap_or_else(|| {
            self.capacities.truncate(ENGINES_MAX - 1);
            self.capacities.push_front((key, Capacity::new(engine, self.config.role, config.level)));
            0
        });
        let workers = self.config.max.clamp(1, CAPACITY_OF);
        Some(self.capacities[at].1.of(self.lengths.make_contiguous(), workers))
    }

    /// Returns the workers that demand needs.
    fn by_capacity(
        &mut self,
        config: &PlannerConfig,
        now: f64,
        horizon: f64,
        start: f64,
        capacity: f64,
        seen: &Observation,
    ) -> (u32, Reason, Option<f64>) {
        let utilisation = self.headroom.utilisation;
        let level = self.level.rate() / capacity;
        self.seasons.iter_mut().for_each(|season| {
            season.observe(now, seen.arrivals / seen.seconds.max(1e-3) / capacity, seen.seconds)
        });
        let ahead = |horizon: f64| {
            self.seasons.iter().filter_map(|season| season.forecast(now, horizon)).fold(0.0, f64::max)
        };
        // Demand beyond the sleeping workers needs new ones: the forecast covers the start of a worker, minus
        // the demand that sleeping workers serve.
        let sleeping = f64::from(seen.workers.sleeping) * utilisation;
        let season = ahead(horizon).max(ahead(start) - sleeping);
        let backlog = seen.queued.max(0.0) / config.clear_within / capacity;
        let need = (level.max(season) + backlog) / utilisation;
        let reason = if backlog > level.max(season) {
            Reason::Backlog
        } else if season > level {
            Reason::Season
        } else {
            Reason::Demand
        };
        let wanted = (need - ROUNDING).ceil().clamp(0.0, f64::from(u32::MAX)) as u32;
        // Any demand at all needs a worker.
        let is_used = seen.queued > 0.0 || seen.arrivals > 0.0 || seen.decoding > 0.0;
        (wanted.max(u32::from(is_used)), reason, Some(need))
    }

    /// Returns one worker more or fewer than are ready, by KV use and queues.
    fn by_thresholds(&self, config: &PlannerConfig, seen: &Observation) -> u32 {
        let ready = seen.workers.ready;
        let exist = ready + seen.workers.starting;
        // Any demand at all needs a worker.
        let least = u32::from(seen.queued > 0.0 || seen.arrivals > 0.0 || seen.decoding > 0.0);
        if ready == 0 {
            return exist.max(least);
        }
        let usage = seen.kv_tokens / (f64::from(ready) * config.engine.kv_tokens);
        if usage > KV_HIGH || seen.queued > f64::from(ready) {
            exist.max(ready + 1)
        } else if usage < KV_LOW && seen.queued <= 0.0 {
            exist.saturating_sub(1).max(least)
        } else {
            exist
        }
    }

    fn is_late(&mut self, config: &PlannerConfig, seen: &Observation) -> bool {
        let is_over = |p90: Option<f64>, most: f64| p90.is_some_and(|p90| p90 > most);
        let has_late_first =
            self.config.role != WorkerRole::Decode && is_over(seen.ttft_p90, config.level.ttft);
        let has_late_next =
            self.config.role != WorkerRole::Prefill && is_over(seen.itl_p90, config.level.itl);
        let is_late = has_late_first || has_late_next;
        let grows = seen.queued > self.queued_before;
        self.queued_before = seen.queued;
        self.late_ticks = if is_late && grows { self.late_ticks + 1 } else { 0 };
        self.late_ticks >= LATE_TICKS
    }

    fn limited(&self, wanted: u32, reason: Reason) -> (u32, Reason) {
        if wanted < self.config.min {
            (self.config.min, Reason::Minimum)
        } else if wanted > self.config.max {
            (self.config.max, Reason::Maximum)
        } else {
            (wanted, reason)
        }
    }

    /// Limits a scale-down: at least the recently needed count, and at most an eighth of the workers draining
    /// at a time.
    fn limit_scale_down(
        &mut self,
        config: &PlannerConfig,
        now: f64,
        seen: &Observation,
        wanted: u32,
        reason: Reason,
        need: f64,
    ) -> (u32, Reason) {
        // Standard deviation of Poisson arrivals counted over the window of the level.
        let counted = LEVEL_WINDOW * self.level.rate();
        let swing = if counted > 0.0 { need * SWINGS / counted.sqrt() } else { 0.0 };
        let high = ((need + swing - ROUNDING).ceil() as u32).min(self.config.max);
        // A planner that has just started knows no demand: the present count is assumed to be needed.
        self.scale_down.begin(now, seen.in_force);
        let current = self.asked.unwrap_or(seen.in_force).clamp(self.config.min, self.config.max);
        let needed = self.scale_down.most(now, wanted.max(high), config.down_after);
        if wanted >= current {
            return (wanted, reason);
        }
        if seen.is_partial {
            return (current, Reason::Partial);
        }
        if needed >= current {
            return (current, Reason::WaitingToShrink);
        }
        let at_once = (current / DRAIN_SHARE).max(1).saturating_sub(seen.workers.draining);
        let count = needed.max(current.saturating_sub(at_once));
        (count, if count > wanted { Reason::WaitingToShrink } else { reason })
    }

    /// Whether the count in force was set by hand, and is still to be kept.
    fn is_held(&mut self, config: &PlannerConfig, now: f64, seen: &Observation) -> bool {
        let is_changed =
            self.asked.is_some_and(|asked| seen.in_force != asked && seen.in_force != self.in_force_before);
        if is_changed {
            self.held_until = now + config.manual_hold;
        }
        self.in_force_before = seen.in_force;
        now < self.held_until
    }

    fn note(&mut self, now: f64, decision: &Decision, config: &PlannerConfig) {
        // A change that demand did not cause is no evidence for the waiting time.
        let is_demand = !matches!(decision.reason, Reason::ManualHold | Reason::Budget);
        if let Some(before) = self.asked
            && is_demand
        {
            self.scale_down.note(now, before, decision.wanted, config.down_after);
        }
        self.asked = Some(decision.wanted);
    }

    /// Drops times in the future, after the clock was set back.
    fn clock_went_back(&mut self, now: f64) {
        self.held_until = f64::NEG_INFINITY;
        self.scale_down.last_scale_down = None;
        self.scale_down.last_reversal = self.scale_down.last_reversal.min(now);
    }
}

/// Exponents of an engine's step times on the grid of [`ENGINE_GRAIN`].
type EngineKey = [i32; 5];

/// Rounds an engine to the grid.
fn rounded(engine: Engine) -> (EngineKey, Engine) {
    let StepTime { base, per_request, per_kv_token, per_prompt_token, per_prompt_square } = engine.step;
    // A term of zero has a reserved exponent.
    let terms = [base, per_request, per_kv_token, per_prompt_token, per_prompt_square];
    let key = terms.map(|term| if term > 0.0 { term.log(ENGINE_GRAIN).round() as i32 } else { i32::MIN });
    let [base, per_request, per_kv_token, per_prompt_token, per_prompt_square] =
        key.map(|exponent| if exponent == i32::MIN { 0.0 } else { ENGINE_GRAIN.powi(exponent) });
    let step = StepTime { base, per_request, per_kv_token, per_prompt_token, per_prompt_square };
    (key, Engine { step, ..engine })
}

/// Conditions for scaling a pool down.
#[derive(Debug, Default)]
struct ScaleDown {
    /// Needed counts with their times, each higher than all later ones.
    needed: VecDeque<(f64, u32)>,
    last_scale_down: Option<f64>,
    last_reversal: f64,
    reversals: u32,
    has_begun: bool,
}

impl ScaleDown {
    fn down_after(&self, down_after: f64) -> f64 {
        (down_after * REVERSAL_FACTOR.powi(self.reversals as i32)).min(down_after.max(DOWN_AFTER_MAX))
    }

    /// Records the count in force at the first decision as needed.
    fn begin(&mut self, now: f64, in_force: u32) {
        if !std::mem::replace(&mut self.has_begun, true) {
            self.needed.push_back((now, in_force));
        }
    }

    /// Returns the highest count that was needed within `down_after`.
    fn most(&mut self, now: f64, needed: u32, down_after: f64) -> u32 {
        if now - self.last_reversal > REVERSALS_REMEMBERED {
            self.reversals = 0;
        }
        let from = now - self.down_after(down_after);
        while self.needed.back().is_some_and(|&(_, before)| before <= needed) {
            self.needed.pop_back();
        }
        self.needed.push_back((now, needed));
        // A clock that was set back must not keep a count forever.
        while self.needed.front().is_some_and(|&(at, _)| at < from || at > now) {
            self.needed.pop_front();
        }
        self.needed.front().map_or(needed, |&(_, most)| most)
    }

    fn note(&mut self, now: f64, before: u32, after: u32, down_after: f64) {
        if after < before {
            self.last_scale_down = Some(now);
        } else if after > before
            && let Some(fall) = self.last_scale_down.take()
            && now - fall < (REVERSAL_WITHIN * down_after).min(DOWN_AFTER_MAX)
        {
            self.reversals = (self.reversals + 1).min(16);
            self.last_reversal = now;
        }
    }
}
