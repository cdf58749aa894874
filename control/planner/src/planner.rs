//! Demand over capacity, and the rules of when to follow it.
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
//! * Demand is looked at as far ahead as the next worker needs: as waking takes while one sleeps, as starting takes otherwise.
//! * Nothing waits for workers that are starting: `wanted` is a count, and they are part of it. One that has been starting
//!   for twice the usual time is reported as stuck; its place is not asked for twice.
//! * Up at once. Down only when the need stayed lower for `down_after`, and an eighth of the workers at a time. Each
//!   reversal (up again soon after a down) makes `down_after` four times as long for a day, so that steady load has a
//!   steady count.
//! * Answers later than the service level, with queues that grow, in two ticks: one worker more than are ready, whatever
//!   the model says.
//! * A count that was changed by hand stays for `manual_hold`.
//! * Without `SAMPLES_MIN` finished requests there is no capacity; a threshold on KV and queues decides, and says so.

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

/// Finished requests before their lengths say what a worker can do.
const SAMPLES_MIN: usize = 50;
/// Lengths that are kept.
const SAMPLES_MAX: usize = 512;
/// A worker's capacity is that of one among so many. It is not that of one among as many as there are: a capacity that
/// depends on the count makes the count swing.
pub const CAPACITY_OF: u32 = 4;
/// Tokens of a prompt or an answer beyond which a length is not believed.
const TOKENS_MAX: f64 = 1e6;
/// Seconds over which arrivals are counted.
pub const LEVEL_WINDOW: f64 = 40.0;
/// Of a worker more than `n`, this much does not count as a need for `n + 1`.
const ROUNDING: f64 = 0.02;
/// Learned step times are rounded to powers of this ratio: each engine has its capacities computed once.
const ENGINE_GRAIN: f64 = 1.04;
/// Capacities of so many engines are kept.
const ENGINES_MAX: usize = 8;
/// A rise within so many times `down_after` from the last fall is a reversal.
const REVERSAL_WITHIN: f64 = 30.0;
/// Each makes `down_after` so many times as long.
const REVERSAL_FACTOR: f64 = 4.0;
/// Longest wait before going down, in seconds, and how long reversals are remembered.
const DOWN_AFTER_MAX: f64 = 2.0 * 3600.0;
const REVERSALS_REMEMBERED: f64 = 24.0 * 3600.0;
/// A pool does not go down to a count that the noise of arrivals would lift again: so many standard deviations above the
/// need must fit.
const SWINGS: f64 = 3.0;
/// One worker in so many drains at a time.
const DRAIN_SHARE: u32 = 8;
/// Late ticks before the model is overridden.
const LATE_TICKS: u32 = 2;
/// Slots of a season: so many of a period, of so many seconds at least. Shorter ones would follow the noise.
const SEASON_SLOTS: f64 = 288.0;
const SEASON_SLOT_MIN: f64 = 30.0;
/// Without a model: KV in use above which a worker is added, and below which one may go.
const KV_HIGH: f64 = 0.8;
const KV_LOW: f64 = 0.3;

/// One role of one model.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolConfig {
    /// Name in decisions.
    pub name: String,
    /// Phases that its workers compute.
    pub role: WorkerRole,
    /// Workers at least; 0 lets the pool end when nothing is asked.
    pub min: u32,
    /// Workers at most.
    pub max: u32,
    /// GPUs of a worker.
    pub gpus: u32,
}

/// Service level and limits that the planner keeps; times in seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannerConfig {
    /// The service level.
    pub level: ServiceLevel,
    /// The engine, as far as it is known before the first request.
    pub engine: Engine,
    /// Share of the capacity that is used, until [`Planner::set_headroom`] says otherwise.
    pub headroom: Headroom,
    /// Seconds from asking for a worker to its first request, until starts have been seen.
    pub start_time: f64,
    /// Seconds in which what waits is to be worked off.
    pub clear_within: f64,
    /// Seconds that the need must have been lower before a worker goes.
    pub down_after: f64,
    /// Seconds that a count which was changed by hand stays.
    pub manual_hold: f64,
    /// GPUs of all pools together, those of draining workers included.
    pub gpus_max: u32,
    /// Periods after which demand repeats, in seconds.
    pub seasons: Vec<f64>,
}

/// Workers of a pool by state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WorkerCounts {
    /// Take requests.
    pub ready: u32,
    /// Exist, and take none yet.
    pub starting: u32,
    /// Take no more.
    pub draining: u32,
    /// Are asleep, and would be woken before any other is started.
    pub sleeping: u32,
}

/// Measurements of one pool since the last tick.
#[derive(Debug, Clone, Default)]
pub struct Observation {
    /// Seconds since the last tick.
    pub seconds: f64,
    /// Requests that came.
    pub arrivals: f64,
    /// Lengths of requests that finished, or of a sample of them.
    pub finished: Vec<Lengths>,
    /// Requests that wait for a place on a worker, now.
    pub queued: f64,
    /// Requests that generate, on all workers together.
    pub decoding: f64,
    /// Tokens of KV that these hold.
    pub kv_tokens: f64,
    /// Mean seconds between tokens.
    pub itl_mean: Option<f64>,
    /// Mean seconds to the first token.
    pub ttft_mean: Option<f64>,
    /// p90 of the seconds between tokens.
    pub itl_p90: Option<f64>,
    /// p90 of the seconds to the first token.
    pub ttft_p90: Option<f64>,
    /// Workers.
    pub workers: WorkerCounts,
    /// For each worker that is starting: seconds since it was asked for.
    pub starting_for: Vec<f64>,
    /// Workers that became ready: seconds since each was asked for.
    pub started_in: Vec<f64>,
    /// Workers that were woken: seconds since each was asked for.
    pub woken_in: Vec<f64>,
    /// The count in force where workers are started and stopped.
    pub in_force: u32,
    /// A part of the demand was not measured: a gateway is silent, or has just gone. There may be more than is seen.
    pub is_partial: bool,
}

/// Why a count is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The need, as computed.
    Demand,
    /// Most of the need are requests that wait.
    Backlog,
    /// The same time in earlier periods.
    Season,
    /// Answers are late and queues grow.
    LateAnswers,
    /// Too few requests have finished to know a worker's capacity; KV in use and queues decided.
    Thresholds,
    /// Even a request alone on a worker is late; KV in use and queues decided.
    LevelImpossible,
    /// Fewer would do, and were not enough for long enough; or an eighth is draining.
    WaitingToShrink,
    /// Fewer would do for the part of the demand that is seen.
    Partial,
    /// The pool's minimum.
    Minimum,
    /// The pool's maximum.
    Maximum,
    /// The other GPUs are in use, or still draining.
    Budget,
    /// The count was changed by hand.
    ManualHold,
}

impl Reason {
    /// The name in metrics.
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

/// The count that a pool should have, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// Name of the pool.
    pub pool: String,
    /// Workers that should exist and not be draining.
    pub wanted: u32,
    /// Why so many.
    pub reason: Reason,
    /// Arrivals per second.
    pub rate: f64,
    /// Requests per second that one worker serves within the service level; `None` without enough requests.
    pub capacity: Option<f64>,
    /// Workers that demand asks for, before limits; `None` without a capacity.
    pub need: Option<f64>,
    /// Share of the capacity that is used.
    pub utilisation: f64,
    /// How far ahead demand is looked at, in seconds: the time that the next worker needs, to wake where one sleeps, else to start,
    /// and one interval.
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
    /// A planner that has seen nothing yet.
    #[must_use]
    pub fn new(config: PlannerConfig, pools: Vec<PoolConfig>) -> Self {
        let pools = pools.into_iter().map(|pool| Pool::new(pool, &config)).collect();
        Self { config, pools, decided_at: f64::NEG_INFINITY }
    }

    /// Decides at `now`, in seconds of the wall clock, from one observation for each pool, in their order.
    ///
    /// # Panics
    ///
    /// When there are not as many observations as pools: the caller observes the pools that it configured.
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

    /// Forgets which counts were asked for. For a planner whose decisions are not carried out: counts that differ from them
    /// then do not look as if they were set by hand.
    pub fn forget_asked(&mut self) {
        for pool in &mut self.pools {
            pool.asked = None;
            pool.held_until = f64::NEG_INFINITY;
        }
    }

    /// Says that a pool's count was set as it was decided. A count that differs at the next decision was then set by hand, even
    /// if it is the one from before.
    pub fn carried_out(&mut self, pool: usize) {
        if let Some(pool) = self.pools.get_mut(pool) {
            pool.in_force_before = pool.asked.unwrap_or(pool.in_force_before);
        }
    }

    /// Uses another share of the capacity of a pool's workers from now on.
    pub fn set_headroom(&mut self, pool: usize, headroom: Headroom) {
        if let Some(pool) = self.pools.get_mut(pool) {
            pool.headroom = headroom;
        }
    }

    /// Workers of a pool as far as they are known by now, and seconds that they take to start.
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
    /// Of the engines that were in force lately.
    capacities: VecDeque<(EngineKey, Capacity)>,
    engine: LearnedEngine,
    start_time: StartTime,
    wake_time: StartTime,
    seasons: Vec<Season>,
    shrink: Shrink,
    late_ticks: u32,
    queued_before: f64,
    /// The count that was asked for, and the one that was in force before that.
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
            shrink: Shrink::default(),
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
        // The next worker is one that sleeps, where there is one.
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
        (wanted, reason) = self.shrunk(config, now, seen, wanted, reason, need.unwrap_or(0.0));
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

    /// Requests per second of one worker.
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

    /// Workers that demand asks for.
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
        // Demand beyond the sleepers needs new workers: look as far ahead as a start takes, without what the sleepers serve.
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
        // However little there is to do, a worker must do it.
        let is_used = seen.queued > 0.0 || seen.arrivals > 0.0 || seen.decoding > 0.0;
        (wanted.max(u32::from(is_used)), reason, Some(need))
    }

    /// One more or one fewer than are ready, by KV in use and by queues.
    fn by_thresholds(&self, config: &PlannerConfig, seen: &Observation) -> u32 {
        let ready = seen.workers.ready;
        let exist = ready + seen.workers.starting;
        // However little there is to do, a worker must do it.
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

    /// Not fewer than were needed lately, and not more workers draining at a time than an eighth.
    fn shrunk(
        &mut self,
        config: &PlannerConfig,
        now: f64,
        seen: &Observation,
        wanted: u32,
        reason: Reason,
        need: f64,
    ) -> (u32, Reason) {
        // Counts of Poisson arrivals over the level's window have this standard deviation.
        let counted = LEVEL_WINDOW * self.level.rate();
        let swing = if counted > 0.0 { need * SWINGS / counted.sqrt() } else { 0.0 };
        let high = ((need + swing - ROUNDING).ceil() as u32).min(self.config.max);
        // A planner that has just started knows no demand: the count that it finds is taken to be needed.
        self.shrink.begin(now, seen.in_force);
        let current = self.asked.unwrap_or(seen.in_force).clamp(self.config.min, self.config.max);
        let needed = self.shrink.most(now, wanted.max(high), config.down_after);
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

    /// Whether a count that someone else set is in force, and still to be kept.
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
        // A fall or a rise that was not the demand's says nothing about how long to wait.
        let is_demand = !matches!(decision.reason, Reason::ManualHold | Reason::Budget);
        if let Some(before) = self.asked
            && is_demand
        {
            self.shrink.note(now, before, decision.wanted, config.down_after);
        }
        self.asked = Some(decision.wanted);
    }

    /// Forgets times that are still to come after the clock was set back.
    fn clock_went_back(&mut self, now: f64) {
        self.held_until = f64::NEG_INFINITY;
        self.shrink.last_fall = None;
        self.shrink.last_reversal = self.shrink.last_reversal.min(now);
    }
}

/// Exponents of an engine's step times on the grid of [`ENGINE_GRAIN`].
type EngineKey = [i32; 5];

/// An engine on the grid.
fn rounded(engine: Engine) -> (EngineKey, Engine) {
    let StepTime { base, per_request, per_kv_token, per_prompt_token, per_prompt_square } = engine.step;
    // A term of zero has an exponent of its own.
    let terms = [base, per_request, per_kv_token, per_prompt_token, per_prompt_square];
    let key = terms.map(|term| if term > 0.0 { term.log(ENGINE_GRAIN).round() as i32 } else { i32::MIN });
    let [base, per_request, per_kv_token, per_prompt_token, per_prompt_square] =
        key.map(|exponent| if exponent == i32::MIN { 0.0 } else { ENGINE_GRAIN.powi(exponent) });
    let step = StepTime { base, per_request, per_kv_token, per_prompt_token, per_prompt_square };
    (key, Engine { step, ..engine })
}

/// When a pool may go down.
#[derive(Debug, Default)]
struct Shrink {
    /// Counts that were needed, each higher than those after it.
    needed: VecDeque<(f64, u32)>,
    last_fall: Option<f64>,
    last_reversal: f64,
    reversals: u32,
    has_begun: bool,
}

impl Shrink {
    fn down_after(&self, down_after: f64) -> f64 {
        (down_after * REVERSAL_FACTOR.powi(self.reversals as i32)).min(down_after.max(DOWN_AFTER_MAX))
    }

    /// Takes the count that was in force at the first decision as needed.
    fn begin(&mut self, now: f64, in_force: u32) {
        if !std::mem::replace(&mut self.has_begun, true) {
            self.needed.push_back((now, in_force));
        }
    }

    /// The highest count that was needed within `down_after`.
    fn most(&mut self, now: f64, needed: u32, down_after: f64) -> u32 {
        if now - self.last_reversal > REVERSALS_REMEMBERED {
            self.reversals = 0;
        }
        let from = now - self.down_after(down_after);
        while self.needed.back().is_some_and(|&(_, before)| before <= needed) {
            self.needed.pop_back();
        }
        self.needed.push_back((now, needed));
        // A clock that was set back must not keep a count for ever.
        while self.needed.front().is_some_and(|&(at, _)| at < from || at > now) {
            self.needed.pop_front();
        }
        self.needed.front().map_or(needed, |&(_, most)| most)
    }

    fn note(&mut self, now: f64, before: u32, after: u32, down_after: f64) {
        if after < before {
            self.last_fall = Some(now);
        } else if after > before
            && let Some(fall) = self.last_fall.take()
            && now - fall < (REVERSAL_WITHIN * down_after).min(DOWN_AFTER_MAX)
        {
            self.reversals = (self.reversals + 1).min(16);
            self.last_reversal = now;
        }
    }
}
