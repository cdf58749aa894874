//! Who gets a request: hashes → overlaps → policy → one worker, or a prefill and a decode worker; and its booking.
//!
//! Hot path: runs on the request's own thread, without lock and without waiting, and allocates nothing once its
//! buffers have grown, but a copy of the hashes for a worker without events. With peers configured, their bell is rung.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use kvstore_block::{PromptExtras, block_hashes};
use router_engines::dialect::{Dialect, Role};
use router_policy::{
    Candidate, CostModel, FEATURES, Policy, PredictedTime, Request, features, is_worth_disaggregating,
};
use router_radix::{Index, Overlaps, Reader};
use serde_json::{Value, json};

use crate::Tuning;
use crate::decisions::{Decision, Decisions};
use crate::fleet::Fleet;
use crate::traced::Traced;
use crate::worker::{Picked, able_to_decode};

/// Buffers kept: as many as threads decide at a time.
const BUFFERS_MAX: usize = 256;

/// Where a request goes.
#[derive(Clone)]
pub(crate) struct Route {
    pub(crate) decode: Picked,
    pub(crate) prefill: Option<Picked>,
    pub(crate) blocks: u32,
    /// Leading blocks held by the worker that computes the prompt.
    pub(crate) overlap_blocks: u32,
    /// Tokens that somebody has to compute.
    pub(crate) uncached_tokens: usize,
    pub(crate) predicted: Duration,
    /// Hashing, look-up, policy and booking.
    pub(crate) decided_in: Duration,
    prompt_tokens: usize,
    features: [f64; FEATURES],
    /// Blocks that have to come from the prefill worker.
    pub(crate) moved_blocks: u32,
    is_warm_up: bool,
}

impl Route {
    /// For the response header.
    pub(crate) fn explain(&self) -> String {
        let prefill = self.prefill.as_ref().map_or("-", |picked| picked.live.name.as_str());
        let warm_up = if self.is_warm_up { "; warm_up" } else { "" };
        format!(
            "worker={}; prefill={prefill}; overlap_blocks={}/{}; predicted_ms={:.1}; decided_us={:.2}{warm_up}",
            self.decode.live.name,
            self.overlap_blocks,
            self.blocks,
            self.predicted.as_secs_f64() * 1e3,
            self.decided_in.as_secs_f64() * 1e6,
        )
    }
}

/// What is to be routed.
pub(crate) struct Wanted<'a> {
    pub(crate) tokens: &'a [u32],
    pub(crate) salt: Option<&'a str>,
    pub(crate) session: Option<u64>,
    /// The adapter, if the request names one.
    pub(crate) adapter: Option<&'a str>,
    /// The tokens are the engine's own: what it says of its cache can be compared.
    pub(crate) audited: bool,
    /// The decode worker computes the prompt itself, if its engine can do that.
    pub(crate) without_prefill: bool,
    /// Names of workers that have just failed this request.
    pub(crate) avoid: &'a [String],
    /// Told of the decision.
    pub(crate) traced: Option<&'a Traced>,
}

/// What a decision works with.
struct Buffers {
    reader: Reader,
    hashes: Vec<u64>,
    candidates: Vec<Candidate>,
    /// Which of the fleet each candidate is.
    places: Vec<u32>,
}

/// Chooses workers. Turns and random numbers come from a counter.
#[derive(Debug)]
pub(crate) struct Chooser {
    turn: AtomicU64,
    buffers: ArrayQueue<Buffers>,
    pub(crate) decisions: Decisions,
}

impl std::fmt::Debug for Buffers {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Buffers")
    }
}

impl Default for Chooser {
    fn default() -> Self {
        Self { turn: AtomicU64::new(0), buffers: ArrayQueue::new(BUFFERS_MAX), decisions: Decisions::new() }
    }
}

impl Chooser {
    fn buffers(&self, index: &Index) -> Option<Buffers> {
        self.buffers.pop().or_else(|| {
            let reader = index.reader()?;
            Some(Buffers { reader, hashes: Vec::new(), candidates: Vec::new(), places: Vec::new() })
        })
    }

    /// `None` when no worker can take it now.
    pub(crate) fn route(
        &self,
        fleet: &Fleet,
        tuning: &Tuning,
        wanted: &Wanted<'_>,
    ) -> Option<(Route, Booking)> {
        let started = Instant::now();
        let mut buffers = self.buffers(&fleet.index)?;
        let routed = self.decide(fleet, tuning, wanted, &mut buffers, started);
        if let Some((route, _)) = &routed {
            for picked in [Some(&route.decode), route.prefill.as_ref()].into_iter().flatten() {
                picked.live.routed(&buffers.hashes);
            }
        }
        // A full pool drops it: more threads than ever decide at once.
        let _dropped = self.buffers.push(buffers);
        routed
    }

    fn decide(
        &self,
        fleet: &Fleet,
        tuning: &Tuning,
        wanted: &Wanted<'_>,
        buffers: &mut Buffers,
        started: Instant,
    ) -> Option<(Route, Booking)> {
        let roster = fleet.roster.load();
        let block_tokens = roster.iter().find(|picked| picked.is_ready())?.live.description.block_tokens;
        let tokens = wanted.tokens;
        buffers.hashes.clear();
        let extras =
            PromptExtras { cache_salt: wanted.salt, lora: wanted.adapter, ..PromptExtras::default() };
        block_hashes(tokens, block_tokens, &extras, &mut buffers.hashes);
        let Buffers { reader, hashes, candidates, places } = buffers;
        let overlaps = reader.overlaps(hashes);
        let request = Request {
            tokens: tokens.len() as u32,
            block_tokens: block_tokens as u32,
            session: wanted.session,
        };
        let can_decode = able_to_decode(&roster, wanted.adapter);
        let mut pick = |fits: &dyn Fn(&Picked) -> bool, transfer_seconds: f64| {
            gather(&roster, overlaps, wanted, fits, transfer_seconds, candidates, places);
            self.pick(&tuning.policy, &request, &roster, candidates, places)
        };
        let decoding = pick(&can_decode, 0.0)?;
        let decode = decoding.picked;
        let held_blocks = overlaps.any(decode.live.member);
        let held = (held_blocks as usize * block_tokens).min(tokens.len());
        let needs_prefill = decode.live.needs_prefill();
        let is_split = needs_prefill
            || (!wanted.without_prefill
                && decode.live.role != Role::Both
                && is_worth_disaggregating(tokens.len(), held, tuning.disaggregate_above_tokens));
        // What the decode worker has need not be moved to it; the prefill worker computes what it has not itself.
        let moved_blocks = request.blocks().saturating_sub(held_blocks);
        let transfer_seconds = decode.live.load.transfer_per_block() * f64::from(moved_blocks);
        let prefill = match is_split {
            true => pick(&|picked: &Picked| picked.live.role == Role::Prefill, transfer_seconds),
            false => None,
        };
        if needs_prefill && prefill.is_none() {
            // The last prefill worker went away between the two choices.
            return None;
        }
        // Who computes the prompt is the decision that counts.
        let computing = prefill.as_ref().unwrap_or(&decoding);
        let seen = computing.candidate;
        let cost = PredictedTime.cost(&request, &seen);
        let is_warm_up = decoding.is_warm_up;
        let runner_up = computing.runner_up.map(|(runner, candidate)| {
            let seconds = PredictedTime.cost(&request, &candidate).total;
            (runner.live.identity, overlaps.any(runner.live.member), seconds as f32 * 1e3)
        });
        let holds = overlaps.any(computing.picked.live.member);
        let considered = computing.among;
        let mut route = Route {
            blocks: request.blocks(),
            overlap_blocks: holds,
            uncached_tokens: seen.uncached_tokens(&request) as usize,
            predicted: Duration::from_secs_f64(cost.total.clamp(0.0, 3600.0)),
            decided_in: Duration::ZERO,
            prompt_tokens: tokens.len(),
            features: features(&request, &seen),
            moved_blocks: if prefill.is_some() { moved_blocks } else { 0 },
            is_warm_up,
            decode: decode.clone(),
            prefill: prefill.map(|chosen| chosen.picked.clone()),
        };
        let found = seen.saved_blocks(&request).iter().sum::<u32>() as usize * block_tokens;
        let booking = Booking::new(&route, Expected::new(&route, wanted, found, held));
        let now = Instant::now();
        route.decided_in = now.duration_since(started);
        let decision = Decision {
            worker: decode.live.identity,
            prefill: route.prefill.as_ref().map_or(0, |prefill| prefill.live.identity),
            prompt_tokens: tokens.len() as u32,
            blocks: route.blocks,
            overlap_blocks: holds,
            uncached_tokens: route.uncached_tokens as u32,
            predicted_ms: cost.total as f32 * 1e3,
            decided_us: route.decided_in.as_secs_f32() * 1e6,
            candidates: considered as u32,
            is_warm_up,
            strategy: tuning.policy.strategy,
            runner_up,
        };
        self.decisions.note(&decision, now);
        Some((route, booking))
    }

    /// What a decision would be made of, without making it: every worker with what it holds and what it would cost.
    pub(crate) fn explain(&self, fleet: &Fleet, tuning: &Tuning, wanted: &Wanted<'_>) -> Value {
        let roster = fleet.roster.load();
        let first = roster.iter().find(|picked| picked.is_ready());
        let (Some(first), Some(mut buffers)) = (first, self.buffers(&fleet.index)) else {
            return json!({ "workers": [], "chosen": null });
        };
        let block_tokens = first.live.description.block_tokens;
        let extras =
            PromptExtras { cache_salt: wanted.salt, lora: wanted.adapter, ..PromptExtras::default() };
        buffers.hashes.clear();
        block_hashes(wanted.tokens, block_tokens, &extras, &mut buffers.hashes);
        let Buffers { reader, hashes, candidates, places } = &mut buffers;
        let overlaps = reader.overlaps(hashes);
        let request = Request {
            tokens: wanted.tokens.len() as u32,
            block_tokens: block_tokens as u32,
            session: wanted.session,
        };
        let fits = able_to_decode(&roster, wanted.adapter);
        gather(&roster, overlaps, wanted, &fits, 0.0, candidates, places);
        let chosen = tuning.policy.choose(&request, candidates, 0, 0);
        let shown = |(candidate, &place): (&Candidate, &u32)| {
            let live = &roster[place as usize].live;
            let cost = PredictedTime.cost(&request, candidate);
            json!({
                "worker": live.name, "role": live.role.name(), "overlap_blocks": overlaps.any(live.member),
                "overlap_blocks_by_tier": candidate.leading, "uncached_tokens": candidate.uncached_tokens(&request),
                "requests": candidate.requests, "queued_tokens": candidate.queued_tokens,
                "decoding_blocks": candidate.decoding_blocks, "is_cold": candidate.is_cold,
                "predicted_ms": cost.total * 1e3,
            })
        };
        let workers: Vec<Value> = candidates.iter().zip(places.iter()).map(shown).collect();
        let chosen = chosen.map(|choice| roster[places[choice.index] as usize].live.name.clone());
        let answer = json!({
            "prompt_tokens": wanted.tokens.len(), "block_tokens": block_tokens, "blocks": request.blocks(),
            "strategy": tuning.policy.strategy.name(), "workers": workers, "chosen": chosen,
        });
        // A full pool drops it.
        let _dropped = self.buffers.push(buffers);
        answer
    }

    fn pick<'a>(
        &self,
        policy: &Policy,
        request: &Request,
        roster: &'a [Picked],
        candidates: &[Candidate],
        places: &[u32],
    ) -> Option<Chosen<'a>> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let choice = policy.choose(request, candidates, turn, turn)?;
        let at = |index: usize| (&roster[places[index] as usize], candidates[index]);
        let (picked, candidate) = at(choice.index);
        Some(Chosen {
            picked,
            candidate,
            is_warm_up: choice.is_warm_up,
            runner_up: choice.runner_up.map(at),
            among: candidates.len(),
        })
    }
}

/// Who was picked, for what.
struct Chosen<'a> {
    picked: &'a Picked,
    candidate: Candidate,
    is_warm_up: bool,
    runner_up: Option<(&'a Picked, Candidate)>,
    /// How many could do it.
    among: usize,
}

/// Everyone who could do it. Workers to be avoided, and those that fail too much, come in only when there is nobody else:
/// they may be well again.
fn gather(
    roster: &[Picked],
    overlaps: &Overlaps,
    wanted: &Wanted<'_>,
    fits: &dyn Fn(&Picked) -> bool,
    transfer_seconds: f64,
    candidates: &mut Vec<Candidate>,
    places: &mut Vec<u32>,
) {
    let Some(speed) = roster.first().map(|picked| picked.live.speeds.get()) else {
        candidates.clear();
        return;
    };
    let now = Instant::now();
    for avoids in [true, false] {
        candidates.clear();
        places.clear();
        for (place, picked) in roster.iter().enumerate() {
            let live = &*picked.live;
            if !fits(picked) || !picked.is_ready() || !picked.serves(wanted.adapter) {
                continue;
            }
            if avoids && (wanted.avoid.contains(&live.name) || picked.worker.breaker.is_open(now)) {
                continue;
            }
            let [requests, queued_tokens, decoding_blocks] = live.load.counts();
            candidates.push(Candidate {
                identity: picked.live.identity,
                leading: overlaps.tiers(live.member),
                queued_tokens: queued_tokens.saturating_add(live.capacity.foreign_tokens()),
                decoding_blocks,
                requests,
                transfer_seconds,
                is_cold: live.load.is_cold(),
                speed: speed.times(live.load.factor()),
            });
            places.push(place as u32);
        }
        if !candidates.is_empty() {
            return;
        }
    }
}

/// A leg of a request; without a hand-off there is the decode leg alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leg {
    Prefill,
    Decode,
}

/// The cached tokens that an engine should report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Expected {
    prompt_tokens: usize,
    cached_tokens: usize,
    /// The leg whose answer tells them.
    told_by: Leg,
    /// The leg whose worker holds them, by the index.
    held_by: Leg,
}

impl Expected {
    /// `found` is what the worker that computes the prompt should find in its cache, `held` what the decode worker holds,
    /// both in tokens. `None` when there is nothing to compare.
    fn new(route: &Route, wanted: &Wanted<'_>, found: usize, held: usize) -> Option<Self> {
        if !wanted.audited {
            return None;
        }
        let prompt_tokens = route.prompt_tokens;
        match &route.prefill {
            None => {
                let leg = Leg::Decode;
                Some(Self { prompt_tokens, cached_tokens: found, told_by: leg, held_by: leg })
            }
            // Several prompts or choices, or a prefill that failed before: the counts add up in ways of the engine's own.
            Some(_) if wanted.without_prefill => None,
            Some(prefill) => {
                let dialect = prefill.live.description.engine.dialect();
                Some(Self::of_handoff(dialect, prompt_tokens, found, held))
            }
        }
    }

    fn of_handoff(dialect: &dyn Dialect, prompt_tokens: usize, found: usize, held: usize) -> Self {
        if !dialect.decode_reports_both() {
            let leg = Leg::Prefill;
            return Self { prompt_tokens, cached_tokens: found, told_by: leg, held_by: leg };
        }
        let held_by = if held > found { Leg::Decode } else { Leg::Prefill };
        Self { prompt_tokens, cached_tokens: found.max(held), told_by: Leg::Decode, held_by }
    }
}

/// Counts a request against its workers until it is dropped.
pub(crate) struct Booking {
    pub(crate) decode: Picked,
    /// Who computes the prompt, if not the decode worker.
    prefill: Option<Picked>,
    decoding_blocks: u32,
    queued_tokens: u32,
    features: [f64; FEATURES],
    predicted_seconds: f64,
    moved_blocks: u32,
    started: Instant,
    is_prefilling: bool,
    /// Compared once.
    expected: Option<Expected>,
}

impl Booking {
    fn new(route: &Route, expected: Option<Expected>) -> Self {
        let this = Self {
            decode: route.decode.clone(),
            prefill: route.prefill.clone(),
            decoding_blocks: route.blocks,
            queued_tokens: route.uncached_tokens as u32,
            features: route.features,
            predicted_seconds: route.predicted.as_secs_f64(),
            moved_blocks: route.moved_blocks,
            started: Instant::now(),
            is_prefilling: true,
            expected,
        };
        let decode = &this.decode.live.load.own;
        decode.requests.fetch_add(1, Ordering::Relaxed);
        decode.decoding_blocks.fetch_add(this.decoding_blocks, Ordering::Relaxed);
        this.computing().live.load.own.queued_tokens.fetch_add(this.queued_tokens, Ordering::Relaxed);
        if let Some(prefill) = &this.prefill {
            prefill.live.load.own.requests.fetch_add(1, Ordering::Relaxed);
        }
        this.decode.live.changed();
        this
    }

    fn computing(&self) -> &Picked {
        self.prefill.as_ref().unwrap_or(&self.decode)
    }

    /// The decode worker says how many of the prompt's tokens were cached.
    pub(crate) fn cached_tokens(&mut self, reported: usize) {
        self.compare(Leg::Decode, reported);
    }

    /// The prefill worker says how many of the prompt's tokens it had.
    pub(crate) fn prefill_cached_tokens(&mut self, reported: usize) {
        self.compare(Leg::Prefill, reported);
    }

    fn compare(&mut self, told_by: Leg, reported: usize) {
        let Some(expected) = self.expected.take_if(|expected| expected.told_by == told_by) else { return };
        let holder = match expected.held_by {
            Leg::Prefill => self.computing(),
            Leg::Decode => &self.decode,
        };
        let (live, audit) = (&holder.live, &holder.live.load.audit);
        if audit.compare(expected.prompt_tokens, expected.cached_tokens, reported) && live.has_feed {
            audit.resets.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                worker = holder.worker.name,
                "the index promised what is not there; starting over"
            );
            live.distrust.notify_one();
        }
    }

    /// The first token is here: the prompt is no longer queued, and the worker's speed is known better.
    pub(crate) fn first_token(&mut self) {
        if !std::mem::replace(&mut self.is_prefilling, false) {
            return;
        }
        let live = &self.computing().live;
        let computing = &live.load;
        computing.own.queued_tokens.fetch_sub(self.queued_tokens, Ordering::Relaxed);
        let seconds = self.started.elapsed().as_secs_f64();
        let transfer = self.decode.live.load.transfer_per_block() * f64::from(self.moved_blocks);
        if self.moved_blocks > 0 {
            // What the computing does not explain was the moving.
            let without = self.predicted_seconds - transfer;
            self.decode.live.load.learn_transfer((seconds - without).max(0.0) / f64::from(self.moved_blocks));
        }
        computing.learn(&live.speeds, self.features, (seconds - transfer).max(seconds * 0.1));
        self.decode.live.changed();
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        if self.is_prefilling {
            self.computing().live.load.own.queued_tokens.fetch_sub(self.queued_tokens, Ordering::Relaxed);
        }
        let decode = &self.decode.live.load.own;
        decode.requests.fetch_sub(1, Ordering::Relaxed);
        decode.decoding_blocks.fetch_sub(self.decoding_blocks, Ordering::Relaxed);
        if let Some(prefill) = &self.prefill {
            prefill.live.load.own.requests.fetch_sub(1, Ordering::Relaxed);
        }
        self.decode.live.changed();
    }
}

#[cfg(test)]
mod tests {
    use router_engines::dialect::Engine;

    use super::*;

    #[test]
    fn a_hand_off_is_compared_where_its_count_is_defined() {
        let expected = |engine: Engine, found, held| {
            let expected = Expected::of_handoff(engine.dialect(), 100, found, held);
            (expected.cached_tokens, expected.told_by, expected.held_by)
        };
        // SGLang's decode worker reports the larger of both counts.
        assert_eq!(expected(Engine::Sglang, 64, 0), (64, Leg::Decode, Leg::Prefill));
        assert_eq!(expected(Engine::Sglang, 64, 64), (64, Leg::Decode, Leg::Prefill));
        assert_eq!(expected(Engine::Sglang, 64, 80), (80, Leg::Decode, Leg::Decode));
        // The others' prefill workers answer for themselves.
        for engine in [Engine::Native, Engine::Vllm, Engine::TensorRtLlm] {
            assert_eq!(expected(engine, 64, 80), (64, Leg::Prefill, Leg::Prefill));
        }
    }
}
