//! Chooses the worker, or the prefill and decode worker, of a request: block hashes → overlaps → policy → booking.
//!
//! Hot path: runs on the request's own thread, without lock and without waiting, and allocates nothing once its
//! buffers have grown, but a copy of the hashes for a worker without events. With peers configured, their tasks are woken.
//! Cost of a decision hardly grows with the number of workers: see `CandidateSearch::gather`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use kvstore_block::{PromptExtras, block_hashes};
use router_engines::dialect::Role;
use router_policy::{
    Candidate, CostModel, Policy, PredictedTime, Request, Strategy, TimeCoefficients, features,
    is_worth_disaggregating,
};
use router_radix::{Index, Overlaps, Reader};
use serde_json::{Value, json};

use crate::booking::{Booking, Expected};
use crate::decisions::{Decision, Decisions};
use crate::pool::Pool;
use crate::roster::{Phase, Roster};
use crate::worker::{RankRef, able_to_decode};

/// Buffers kept: as many as threads decide at a time.
const BUFFERS_MAX: usize = 256;
/// Largest pool of which all ranks are compared; about 10 ns each.
const SCANNED_MAX: usize = 48;
/// Ranks of a larger pool that are compared because they hold most of the prefix.
const HOLDERS_MAX: usize = 8;
/// Members of the index that are examined to find `HOLDERS_MAX` ranks: some are shared stores.
const HOLDERS_SEEN_MAX: usize = 16;
/// Ranks of a larger pool that are compared because they are least loaded.
const LEAST_LOADED_MAX: usize = 8;
/// Ranks that are examined to find `LEAST_LOADED_MAX` ranks.
const SEEN_MAX: usize = 128;

/// Worker, or prefill and decode worker, chosen for a request.
#[derive(Clone)]
pub struct Route {
    /// The worker that generates.
    pub decode: RankRef,
    /// The worker that computes the prompt, if it is not the decode worker.
    pub prefill: Option<RankRef>,
    /// Blocks of the prompt.
    pub blocks: u32,
    /// Leading blocks held by the worker that computes the prompt.
    pub overlap_blocks: u32,
    /// Prompt tokens that the computing worker does not hold.
    pub uncached_tokens: usize,
    /// Predicted time to the first token.
    pub predicted: Duration,
    /// Time for hashing, look-up, policy and booking.
    pub decided_in: Duration,
    /// Part of `decided_in` spent hashing the prompt's blocks.
    pub hashed_in: Duration,
    /// Part of `decided_in` spent looking the hashes up in the index.
    pub looked_up_in: Duration,
    /// Blocks that have to come from the prefill worker.
    pub moved_blocks: u32,
    /// Leading blocks in the stores that the worker shares with others. `None` if it has none, if another worker computes the
    /// prompt, or if there may be more: the index knows no blocks of adapters in stores, and none of prompts whose tokens may
    /// differ from the engine's.
    pub shared_blocks: Option<u32>,
    is_warm_up: bool,
}

impl Route {
    /// Formats the route for the response header.
    pub fn explain(&self) -> String {
        let mut number = itoa::Buffer::new();
        let mut text = String::with_capacity(192);
        text.push_str("worker=");
        text.push_str(&self.decode.run.name);
        text.push_str("; prefill=");
        text.push_str(self.prefill.as_ref().map_or("-", |rank| rank.run.name.as_str()));
        text.push_str("; overlap_blocks=");
        text.push_str(number.format(self.overlap_blocks));
        text.push('/');
        text.push_str(number.format(self.blocks));
        // Whole numbers on both sides of the point: formatting floats costs more than the decision.
        let tenths_of_ms = self.predicted.as_micros() as u64 / 100;
        text.push_str("; predicted_ms=");
        text.push_str(number.format(tenths_of_ms / 10));
        text.push('.');
        text.push_str(number.format(tenths_of_ms % 10));
        let parts = [
            ("; decided_us=", self.decided_in),
            ("; hash_us=", self.hashed_in),
            ("; lookup_us=", self.looked_up_in),
        ];
        for (name, spent) in parts {
            let nanos = spent.as_nanos() as u64;
            text.push_str(name);
            text.push_str(number.format(nanos / 1000));
            text.push('.');
            text.push_str(number.format(nanos / 100 % 10));
            text.push_str(number.format(nanos / 10 % 10));
        }
        if self.is_warm_up {
            text.push_str("; warm_up");
        }
        text
    }
}

/// A prompt to be routed.
#[derive(Debug, Clone, Copy)]
pub struct RouteRequest<'a> {
    /// Token ids of the prompt.
    pub tokens: &'a [u32],
    /// Salt of the block hashes, which keeps the caches of tenants apart.
    pub salt: Option<&'a str>,
    /// Hash of the conversation, for the strategy that keeps a conversation at one worker.
    pub session: Option<u64>,
    /// Name of the adapter, if the request asks for one.
    pub adapter: Option<&'a str>,
    /// Whether the tokens are the engine's own, so that its reported cache use can be compared.
    pub tokens_are_exact: bool,
    /// Whether the decode worker computes the prompt itself, if its engine can do that.
    pub without_prefill: bool,
    /// Names of workers that have just failed this request.
    pub avoid: &'a [String],
    /// The only workers that may generate, as `HOST:PORT`, or as `HOST` for all ports of it; `None`: all workers.
    pub allowed_workers: Option<&'a [String]>,
}

impl RouteRequest<'_> {
    fn allows(&self, rank: &RankRef) -> bool {
        self.allowed_workers.is_none_or(|allowed| is_allowed(allowed, &rank.worker.name))
    }
}

/// Whether one of these addresses is that of the worker with this name.
fn is_allowed(allowed_workers: &[String], name: &str) -> bool {
    let (host, port) = host_and_port(name);
    allowed_workers.iter().map(|allowed| host_and_port(allowed)).any(|(allowed_host, allowed_port)| {
        // A worker's name has no port where the port is the scheme's default.
        let is_port = match port {
            Some(port) => allowed_port.is_none_or(|allowed| allowed == port),
            None => allowed_port.is_none_or(|allowed| ["80", "443"].contains(&allowed)),
        };
        allowed_host == host && is_port
    })
}

/// Host, without the brackets of an IPv6 address, and port of `HOST`, `HOST:PORT`, `[HOST]`, `[HOST]:PORT` or an IPv6 address.
fn host_and_port(address: &str) -> (&str, Option<&str>) {
    if let Some((host, rest)) = address.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return (host, rest.strip_prefix(':'));
    }
    match address.split_once(':') {
        Some((host, port)) if !port.contains(':') => (host, Some(port)),
        _ => (address, None),
    }
}

/// Buffers of one decision, reused.
struct Buffers {
    reader: Reader,
    hashes: Vec<u64>,
    candidates: Vec<Candidate>,
    /// Index into the pool's ranks, for each candidate.
    places: Vec<u32>,
}

/// Chooses workers. Turns and random numbers come from a counter.
#[derive(Debug)]
pub struct Chooser {
    /// Turns for decode workers, and for prefill workers. With one number for both, round robin would give a request of two
    /// phases two turns, and pass over every second worker.
    turns: [AtomicU64; 2],
    buffers: ArrayQueue<Buffers>,
    /// The last decisions.
    pub decisions: Decisions,
}

impl std::fmt::Debug for Buffers {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Buffers")
    }
}

impl Default for Chooser {
    fn default() -> Self {
        // Random draws of the two phases differ.
        let turns = [0, 1 << 32].map(AtomicU64::new);
        Self { turns, buffers: ArrayQueue::new(BUFFERS_MAX), decisions: Decisions::new() }
    }
}

impl Chooser {
    fn buffers(&self, index: &Index) -> Option<Buffers> {
        self.buffers.pop().or_else(|| {
            let reader = index.reader()?;
            Some(Buffers { reader, hashes: Vec::new(), candidates: Vec::new(), places: Vec::new() })
        })
    }

    /// Returns `None` when no worker can take the request now.
    pub fn route(&self, index: &Index, pool: &Pool, wanted: &RouteRequest<'_>) -> Option<(Route, Booking)> {
        let started = Instant::now();
        let mut buffers = self.buffers(index)?;
        let routed = self.decide(pool, wanted, &mut buffers, started);
        if let Some((route, _)) = &routed {
            for rank in [Some(&route.decode), route.prefill.as_ref()].into_iter().flatten() {
                rank.run.routed(&buffers.hashes);
            }
        }
        // The push fails only when more threads decide at once than `BUFFERS_MAX`; the buffers are then dropped.
        let _dropped = self.buffers.push(buffers);
        routed
    }

    fn decide(
        &self,
        pool: &Pool,
        wanted: &RouteRequest<'_>,
        buffers: &mut Buffers,
        started: Instant,
    ) -> Option<(Route, Booking)> {
        let roster = pool.roster();
        let block_tokens = roster.any_ready()?.run.description.block_tokens;
        let routing = pool.routing();
        let tokens = wanted.tokens;
        buffers.hashes.clear();
        let extras =
            PromptExtras { cache_salt: wanted.salt, lora: wanted.adapter, ..PromptExtras::default() };
        block_hashes(tokens, block_tokens, &extras, &mut buffers.hashes);
        let hashed = Instant::now();
        let Buffers { reader, hashes, candidates, places } = buffers;
        let overlaps = reader.overlaps(hashes);
        let looked_up = Instant::now();
        let request = Request {
            tokens: tokens.len() as u32,
            block_tokens: block_tokens as u32,
            session: wanted.session,
        };
        let is_able = able_to_decode(&roster, wanted.adapter);
        let can_decode = |rank: &RankRef| is_able(rank) && wanted.allows(rank);
        let coefficients = pool.learned_coefficients.get();
        let mut pick = |phase: Phase, fits: &dyn Fn(&RankRef) -> bool, transfer_seconds: f64| {
            let turn = self.turns[usize::from(phase == Phase::Prefill)].fetch_add(1, Ordering::Relaxed);
            let look =
                CandidateSearch { roster: &roster, overlaps, wanted, fits, transfer_seconds, coefficients };
            look.gather(routing.policy.strategy, phase, turn, candidates, places);
            choose(&routing.policy, &request, &roster, candidates, places, turn)
        };
        let decoding = pick(Phase::Decode, &can_decode, 0.0)?;
        let decode = decoding.rank;
        let held_blocks = decode.run.leading_any(overlaps);
        let held = (held_blocks as usize * block_tokens).min(tokens.len());
        let needs_prefill = decode.run.needs_prefill();
        let is_split = needs_prefill
            || (!wanted.without_prefill
                && decode.run.role != Role::Both
                && is_worth_disaggregating(tokens.len(), held, routing.disaggregate_above_tokens));
        // Blocks that the decode worker holds are not moved; the prefill worker computes those that it lacks itself.
        let moved_blocks = request.blocks().saturating_sub(held_blocks);
        let transfer_seconds = decode.run.load.transfer_per_block() * f64::from(moved_blocks);
        let prefill = match is_split {
            true => {
                let fits = |rank: &RankRef| rank.run.role == Role::Prefill && rank.pairs_with(decode);
                pick(Phase::Prefill, &fits, transfer_seconds)
            }
            false => None,
        };
        if needs_prefill && prefill.is_none() {
            // The last prefill worker went away between the two choices.
            return None;
        }
        // The worker that computes the prompt decides cost and prediction.
        let computing = prefill.as_ref().unwrap_or(&decoding);
        let seen = computing.candidate;
        let cost = PredictedTime.cost(&request, &seen);
        let is_warm_up = decoding.is_warm_up;
        let runner_up = computing.runner_up.map(|(runner, candidate)| {
            let seconds = PredictedTime.cost(&request, &candidate).total;
            (runner.run.identity, runner.run.leading_any(overlaps), seconds as f32 * 1e3)
        });
        let holds = computing.rank.run.leading_any(overlaps);
        let considered = computing.candidate_count;
        let mut route = Route {
            blocks: request.blocks(),
            overlap_blocks: holds,
            uncached_tokens: seen.uncached_tokens(&request) as usize,
            predicted: Duration::from_secs_f64(cost.total.clamp(0.0, 3600.0)),
            decided_in: Duration::ZERO,
            hashed_in: hashed.duration_since(started),
            looked_up_in: looked_up.duration_since(hashed),
            moved_blocks: if prefill.is_some() { moved_blocks } else { 0 },
            shared_blocks: match prefill {
                None if wanted.tokens_are_exact && wanted.adapter.is_none() => {
                    decode.run.shared_stores().map(|shared| overlaps.any(shared))
                }
                _ => None,
            },
            is_warm_up,
            decode: decode.clone(),
            prefill: prefill.as_ref().map(|chosen| chosen.rank.clone()),
        };
        let found = seen.saved_blocks(&request).iter().sum::<u32>() as usize * block_tokens;
        let own = |rank: &RankRef| overlaps.any(rank.run.member) as usize * block_tokens;
        let expected = Expected::new(&route, wanted, found, held)
            .map(|expected| expected.of_own(own(computing.rank), own(decode)));
        let booking = Booking::new(&route, features(&request, &seen), expected);
        let now = Instant::now();
        route.decided_in = now.duration_since(started);
        let decision = Decision {
            worker: decode.run.identity,
            prefill: route.prefill.as_ref().map_or(0, |prefill| prefill.run.identity),
            prompt_tokens: tokens.len() as u32,
            blocks: route.blocks,
            overlap_blocks: holds,
            uncached_tokens: route.uncached_tokens as u32,
            predicted_ms: cost.total as f32 * 1e3,
            decided_us: route.decided_in.as_secs_f32() * 1e6,
            candidates: considered as u32,
            is_warm_up,
            strategy: routing.policy.strategy,
            runner_up,
        };
        self.decisions.note(&decision, now);
        Some((route, booking))
    }

    /// Explains a decision without making it: every worker with the blocks that it holds and its cost.
    pub fn explain(&self, index: &Index, pool: &Pool, wanted: &RouteRequest<'_>) -> Value {
        let routing = pool.routing();
        let roster = pool.roster();
        let first = roster.any_ready();
        let (Some(first), Some(mut buffers)) = (first, self.buffers(index)) else {
            return json!({ "workers": [], "chosen": null });
        };
        let block_tokens = first.run.description.block_tokens;
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
        let coefficients = pool.learned_coefficients.get();
        let look = CandidateSearch {
            roster: &roster,
            overlaps,
            wanted,
            fits: &fits,
            transfer_seconds: 0.0,
            coefficients,
        };
        look.gather_all(candidates, places);
        let chosen = routing.policy.choose(&request, candidates, 0, 0);
        let shown = |(candidate, &place): (&Candidate, &u32)| {
            let run = &roster[place as usize].run;
            let cost = PredictedTime.cost(&request, candidate);
            json!({
                "worker": run.name, "role": run.role.name(), "overlap_blocks": run.leading_any(overlaps),
                "overlap_blocks_by_tier": candidate.leading, "uncached_tokens": candidate.uncached_tokens(&request),
                "requests": candidate.requests, "queued_tokens": candidate.queued_tokens,
                "decoding_blocks": candidate.decoding_blocks, "is_cold": candidate.is_cold,
                "predicted_ms": cost.total * 1e3,
            })
        };
        let workers: Vec<Value> = candidates.iter().zip(places.iter()).map(shown).collect();
        let chosen = chosen.map(|choice| roster[places[choice.index] as usize].run.name.clone());
        let answer = json!({
            "prompt_tokens": wanted.tokens.len(), "block_tokens": block_tokens, "blocks": request.blocks(),
            "strategy": routing.policy.strategy.name(), "workers": workers, "chosen": chosen,
        });
        // The push fails only when the buffer pool is full; the buffers are then dropped.
        let _dropped = self.buffers.push(buffers);
        answer
    }
}

/// Chooses among candidates.
fn choose<'a>(
    policy: &Policy,
    request: &Request,
    roster: &'a Roster,
    candidates: &[Candidate],
    places: &[u32],
    turn: u64,
) -> Option<Chosen<'a>> {
    let choice = policy.choose(request, candidates, turn, turn)?;
    let at = |index: usize| (&roster[places[index] as usize], candidates[index]);
    let (rank, candidate) = at(choice.index);
    Some(Chosen {
        rank,
        candidate,
        is_warm_up: choice.is_warm_up,
        runner_up: choice.runner_up.map(at),
        candidate_count: candidates.len(),
    })
}

/// The chosen rank, and the candidates that it was chosen from.
struct Chosen<'a> {
    rank: &'a RankRef,
    candidate: Candidate,
    is_warm_up: bool,
    runner_up: Option<(&'a RankRef, Candidate)>,
    /// Candidates that were compared.
    candidate_count: usize,
}

/// Inputs of the search for candidates.
struct CandidateSearch<'a> {
    roster: &'a Roster,
    overlaps: &'a Overlaps,
    wanted: &'a RouteRequest<'a>,
    /// Whether a rank can serve this phase of the request.
    fits: &'a dyn Fn(&RankRef) -> bool,
    transfer_seconds: f64,
    coefficients: TimeCoefficients,
}

impl CandidateSearch<'_> {
    /// Gathers candidates: all ranks of a small pool; of a large one those that hold most of the prefix, and the least
    /// loaded. Among ranks that hold equally much the least loaded is the best, so a larger choice would seldom find a
    /// better one.
    fn gather(
        &self,
        strategy: Strategy,
        phase: Phase,
        turn: u64,
        candidates: &mut Vec<Candidate>,
        places: &mut Vec<u32>,
    ) {
        candidates.clear();
        places.clear();
        let is_large = self.roster.len() > SCANNED_MAX;
        match strategy {
            // Rendezvous hashing ranks all of them for the session.
            Strategy::Session => {}
            Strategy::RoundRobin if is_large => self.gather_from(turn, 1, candidates, places),
            Strategy::Random if is_large => self.gather_from(scrambled(turn), 1, candidates, places),
            Strategy::PowerOfTwo if is_large => {
                self.gather_from(scrambled(turn), 1, candidates, places);
                self.gather_from(scrambled(!turn), 2, candidates, places);
            }
            Strategy::PredictedTime | Strategy::Cost | Strategy::LeastLoaded if is_large => {
                self.gather_best(phase, turn as usize, candidates, places);
            }
            _ => {}
        }
        // All ranks are examined when none of the gathered ones fits, as for an adapter that few workers have.
        if candidates.is_empty() {
            self.gather_all(candidates, places);
        }
    }

    /// The ranks that hold most of the prefix, then the least loaded.
    fn gather_best(&self, phase: Phase, turn: usize, candidates: &mut Vec<Candidate>, places: &mut Vec<u32>) {
        let now = Instant::now();
        let mut holders = [(self.roster[0].run.member, 0); HOLDERS_SEEN_MAX];
        let count = self.overlaps.deepest(turn, &mut holders);
        holders[..count].sort_unstable_by_key(|(_, blocks)| std::cmp::Reverse(*blocks));
        for (member, _) in &holders[..count] {
            if candidates.len() == HOLDERS_MAX {
                break;
            }
            if let Some(place) = self.roster.place_of(*member)
                && self.is_able(&self.roster[place])
                && !self.is_avoided(&self.roster[place], now)
            {
                candidates.push(self.candidate(&self.roster[place]));
                places.push(place as u32);
            }
        }
        let (mut taken, mut seen) = (0, 0);
        self.roster.least_loaded(phase, turn, |place| {
            seen += 1;
            let rank = &self.roster[place];
            let is_new = !places.contains(&(place as u32));
            if is_new && self.is_able(rank) && !self.is_avoided(rank, now) {
                candidates.push(self.candidate(rank));
                places.push(place as u32);
                taken += 1;
            }
            taken < LEAST_LOADED_MAX && seen < SEEN_MAX
        });
    }

    /// The first able rank from a place on, unless it was gathered before, until there are `count` candidates.
    fn gather_from(&self, from: u64, count: usize, candidates: &mut Vec<Candidate>, places: &mut Vec<u32>) {
        let now = Instant::now();
        let ranks = self.roster.len();
        let first = (from % ranks as u64) as usize;
        for place in (0..ranks).map(|at| (first + at) % ranks) {
            if candidates.len() >= count {
                return;
            }
            let rank = &self.roster[place];
            let is_new = !places.contains(&(place as u32));
            if is_new && self.is_able(rank) && !self.is_avoided(rank, now) {
                candidates.push(self.candidate(rank));
                places.push(place as u32);
            }
        }
    }

    /// Gathers every rank that fits. Workers to be avoided, and workers that fail too often, are included only when there is
    /// no other: they may have recovered.
    fn gather_all(&self, candidates: &mut Vec<Candidate>, places: &mut Vec<u32>) {
        let now = Instant::now();
        for avoids in [true, false] {
            candidates.clear();
            places.clear();
            for (place, rank) in self.roster.iter().enumerate() {
                if self.is_able(rank) && !(avoids && self.is_avoided(rank, now)) {
                    candidates.push(self.candidate(rank));
                    places.push(place as u32);
                }
            }
            if !candidates.is_empty() {
                return;
            }
        }
    }

    fn is_able(&self, rank: &RankRef) -> bool {
        rank.is_ready() && (self.fits)(rank) && rank.serves(self.wanted.adapter)
    }

    fn is_avoided(&self, rank: &RankRef, now: Instant) -> bool {
        self.wanted.avoid.contains(&rank.run.name) || rank.worker.breaker.is_open(now)
    }

    fn candidate(&self, rank: &RankRef) -> Candidate {
        let run = &*rank.run;
        let [requests, queued_tokens, decoding_blocks] = run.load.counts();
        Candidate {
            identity: run.identity,
            leading: run.leading(self.overlaps),
            queued_tokens: queued_tokens.saturating_add(run.capacity.foreign_tokens()),
            decoding_blocks,
            requests,
            transfer_seconds: self.transfer_seconds,
            is_cold: run.load.is_cold(),
            coefficients: self.coefficients.scaled_by(run.load.factor()),
        }
    }
}

/// splitmix64's mixing of a counter into a random number.
fn scrambled(number: u64) -> u64 {
    let word = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_among_addresses_by_host_and_port() {
        for (allowed, name, expected) in [
            ("10.0.0.1:8000", "10.0.0.1:8000", true),
            ("10.0.0.1:8000", "10.0.0.1:8001", false),
            ("10.0.0.1", "10.0.0.1:8001", true),
            ("10.0.0.1:80", "10.0.0.1", true),
            ("10.0.0.1:8000", "10.0.0.1", false),
            ("10.0.0.1", "10.0.0.11:8000", false),
            ("[fd00::7]:8000", "[fd00::7]:8000", true),
            ("fd00::7", "[fd00::7]:8000", true),
            ("[fd00::7]", "[fd00::7]", true),
            ("fd00::7", "[fd00::8]:8000", false),
        ] {
            assert_eq!(is_allowed(&[allowed.to_owned()], name), expected, "{allowed} {name}");
        }
        assert!(!is_allowed(&[], "10.0.0.1:8000"), "an empty hint allows none");
    }
}
