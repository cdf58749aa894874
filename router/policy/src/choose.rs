//! Choice of a worker by one of several strategies.

use crate::candidate::{Candidate, Request};
use crate::cost::{BlockCost, Cost, CostModel, PredictedTime};

/// Rule by which a worker is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Strategy {
    /// The least predicted time to the first token.
    #[default]
    PredictedTime,
    /// The least cost in blocks: overlap, queued prompts, decoding blocks.
    Cost,
    /// The less loaded of two random workers (Mitzenmacher 1996).
    PowerOfTwo,
    /// A conversation stays with one worker (rendezvous hashing), unless that one has much more load than the mean.
    Session,
    /// The fewest requests.
    LeastLoaded,
    /// Workers in turn.
    RoundRobin,
    /// A random worker.
    Random,
}

impl Strategy {
    /// All strategies.
    pub const ALL: [Self; 7] = [
        Self::PredictedTime,
        Self::Cost,
        Self::PowerOfTwo,
        Self::Session,
        Self::LeastLoaded,
        Self::RoundRobin,
        Self::Random,
    ];

    /// Name in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::PredictedTime => "predicted-time",
            Self::Cost => "cost",
            Self::PowerOfTwo => "power-of-two",
            Self::Session => "session",
            Self::LeastLoaded => "least-loaded",
            Self::RoundRobin => "round-robin",
            Self::Random => "random",
        }
    }

    /// Returns the strategy with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|strategy| strategy.name() == name)
    }
}

/// Settings of the choice.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Policy {
    /// Rule by which a worker is chosen.
    pub strategy: Strategy,
    /// Weights of [`Strategy::Cost`].
    pub block_cost: BlockCost,
    /// 0 takes the cheapest; larger values draw by a softmax over costs, scaled to their range.
    pub temperature: f64,
    /// Share of requests that go to cold workers, while there are any, so that they become warm.
    pub warm_up_share: f64,
}

/// Result of a choice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Index of the chosen candidate.
    pub index: usize,
    /// Cost of the chosen candidate with its parts; zero for strategies without costs.
    pub cost: Cost,
    /// Whether the candidate was chosen to become warm.
    pub is_warm_up: bool,
    /// Index of the second-best candidate, for strategies that compare costs.
    pub runner_up: Option<usize>,
}

/// Largest load of a session's worker, relative to the mean: bounded loads (Mirrokni et al. 2018).
const SESSION_LOAD_MAX: f64 = 1.25;

impl Policy {
    /// Chooses among candidates; `None` when there are none. `turn` counts decisions, `random` is any number; equal arguments
    /// give equal choices.
    #[must_use]
    pub fn choose(
        &self,
        request: &Request,
        candidates: &[Candidate],
        turn: u64,
        random: u64,
    ) -> Option<Choice> {
        if candidates.is_empty() {
            return None;
        }
        let plain = |index| Choice { index, cost: Cost::default(), is_warm_up: false, runner_up: None };
        if let Some(index) = self.cold_one(candidates, random) {
            return Some(Choice { is_warm_up: true, ..plain(index) });
        }
        let count = candidates.len() as u64;
        Some(match self.strategy {
            Strategy::PredictedTime => self.cheapest(&PredictedTime, request, candidates, random),
            Strategy::Cost => self.cheapest(&self.block_cost, request, candidates, random),
            Strategy::PowerOfTwo => {
                let first = (scrambled(random) % count) as usize;
                let second = (scrambled(random ^ 0x2545_F491) % count) as usize;
                let load = |index: usize| (candidates[index].requests, candidates[index].queued_tokens);
                plain(if load(second) < load(first) { second } else { first })
            }
            Strategy::Session => plain(session(request, candidates, random)),
            Strategy::LeastLoaded => {
                let load = |candidate: &Candidate| f64::from(candidate.requests);
                plain(least(candidates.iter().map(load), random).0)
            }
            Strategy::RoundRobin => plain((turn % count) as usize),
            Strategy::Random => plain((scrambled(random) % count) as usize),
        })
    }

    /// Returns the least loaded cold candidate, for a share of requests.
    fn cold_one(&self, candidates: &[Candidate], random: u64) -> Option<usize> {
        if self.warm_up_share <= 0.0 || unit(scrambled(random ^ 0xC01D)) >= self.warm_up_share {
            return None;
        }
        if candidates.iter().all(|candidate| candidate.is_cold) {
            return None;
        }
        let cold = candidates.iter().enumerate().filter(|(_, candidate)| candidate.is_cold);
        cold.min_by_key(|(_, candidate)| (candidate.requests, candidate.queued_tokens))
            .map(|(index, _)| index)
    }

    fn cheapest(
        &self,
        model: &impl CostModel,
        request: &Request,
        candidates: &[Candidate],
        random: u64,
    ) -> Choice {
        let total = |candidate: &Candidate| model.cost(request, candidate).total;
        let (best, second) = least(candidates.iter().map(total), random);
        let (index, runner_up) = if self.temperature > 0.0 {
            let drawn = draw(candidates.iter().map(total), self.temperature, random);
            (drawn, if drawn == best { second } else { Some(best) })
        } else {
            (best, second)
        };
        Choice { index, cost: model.cost(request, &candidates[index]), is_warm_up: false, runner_up }
    }
}

/// splitmix64, which makes random numbers of a counter.
fn scrambled(random: u64) -> u64 {
    let word = random.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

/// The positions of the least value and of the second least; ties are broken by the random number. One pass.
fn least(values: impl Iterator<Item = f64>, random: u64) -> (usize, Option<usize>) {
    let (mut best, mut found, mut ties) = (f64::INFINITY, 0, 0_u64);
    let (mut next, mut second) = (f64::INFINITY, None);
    for (index, value) in values.enumerate() {
        if value < best {
            if ties > 0 {
                (next, second) = (best, Some(found));
            }
            (best, found, ties) = (value, index, 1);
        } else if value <= best && ties > 0 {
            // Each of n equal ones is kept with a chance of 1 in n.
            ties += 1;
            let is_kept = scrambled(random ^ ties << 32).is_multiple_of(ties);
            (next, second) =
                (value, Some(if is_kept { std::mem::replace(&mut found, index) } else { index }));
        } else if value < next {
            (next, second) = (value, Some(index));
        }
    }
    (found, second)
}

/// Draws by a softmax over costs, scaled to the range between the lowest and the highest.
fn draw(costs: impl Iterator<Item = f64> + Clone, temperature: f64, random: u64) -> usize {
    let low = costs.clone().fold(f64::INFINITY, f64::min);
    let high = costs.clone().fold(f64::NEG_INFINITY, f64::max);
    let range = (high - low).max(f64::MIN_POSITIVE);
    let weight = |cost: f64| (-(cost - low) / range / temperature).exp();
    let total: f64 = costs.clone().map(weight).sum();
    let mut left = unit(scrambled(random)) * total;
    let mut last = 0;
    for (index, cost) in costs.enumerate() {
        left -= weight(cost);
        last = index;
        if left < 0.0 {
            break;
        }
    }
    last
}

/// The candidate that ranks first for the session among those whose load is within the bound.
fn session(request: &Request, candidates: &[Candidate], random: u64) -> usize {
    let session = request.session.unwrap_or_else(|| scrambled(random));
    let total: u64 = candidates.iter().map(|candidate| u64::from(candidate.requests)).sum();
    let bound = ((total + 1) as f64 / candidates.len() as f64 * SESSION_LOAD_MAX).ceil();
    let rank = |candidate: &Candidate| scrambled(session ^ scrambled(candidate.identity));
    let fits = |candidate: &Candidate| f64::from(candidate.requests) < bound;
    let best = candidates.iter().enumerate().max_by_key(|(_, candidate)| (fits(candidate), rank(candidate)));
    best.map_or(0, |(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers of Vigna's splitmix64.c with the seeds 0 and 1.
    #[test]
    fn a_counter_is_scrambled_as_by_splitmix64() {
        assert_eq!([scrambled(0), scrambled(1)], [0xE220_A839_7B1D_CDAF, 0x910A_2DEC_8902_5CC1]);
    }

    #[test]
    fn a_draw_prefers_what_is_cheap_by_the_temperature() {
        // By a softmax over 0 and 1: 1 to 1 / e.
        let draws: usize = (0..20_000).map(|random| draw([1e6, 1e6 + 7.0].into_iter(), 1.0, random)).sum();
        let share = draws as f64 / 20_000.0;
        assert!((share - 1.0 / (1.0 + 1_f64.exp())).abs() < 0.01, "{share}");
    }

    #[test]
    fn the_runner_up_of_a_draw_is_the_cheapest_of_the_others() {
        let candidate = |requests| Candidate { requests, decoding_blocks: requests, ..Candidate::default() };
        let candidates = [candidate(2), candidate(1), candidate(3)];
        let policy = Policy { strategy: Strategy::Cost, temperature: 1.0, ..Policy::default() };
        let request = Request { tokens: 16, block_tokens: 16, session: None };
        let mut seen = [0; 3];
        for random in 0..300 {
            let choice = policy.choose(&request, &candidates, 0, random).expect("a choice");
            seen[choice.index] += 1;
            assert_eq!(choice.runner_up, Some(if choice.index == 1 { 0 } else { 1 }), "{choice:?}");
        }
        assert!(seen.iter().all(|&count| count > 0), "{seen:?}");
    }

    /// Two workers of which one has this many requests: the bound is 1.25 of the mean, with the new request, rounded up.
    #[test]
    fn a_session_leaves_its_worker_when_that_has_more_than_its_bound() {
        let request = Request { tokens: 16, block_tokens: 16, session: Some(5) };
        let candidate = |identity, requests| Candidate { identity, requests, ..Candidate::default() };
        let first = session(&request, &[candidate(1, 0), candidate(2, 0)], 0);
        let with = |requests| {
            let of = |at: usize| if at == first { requests } else { 0 };
            session(&request, &[candidate(1, of(0)), candidate(2, of(1))], 0)
        };
        assert_eq!(with(1), first, "1 is below 2");
        assert_eq!(with(2), 1 - first, "2 is not below 2");
    }

    #[test]
    fn the_least_and_the_next_are_those_of_a_sort() {
        for seed in 0..2000_u64 {
            let count = 1 + (scrambled(seed) % 6) as usize;
            // Few distinct values, so that there are ties.
            let values: Vec<f64> =
                (0..count as u64).map(|at| (scrambled(seed * 31 + at) % 3) as f64).collect();
            let (best, second) = least(values.iter().copied(), seed);
            let mut sorted = values.clone();
            sorted.sort_by(f64::total_cmp);
            assert_eq!(values[best], sorted[0], "seed {seed}: {values:?}");
            assert_eq!(
                second.map(|second| values[second]),
                sorted.get(1).copied(),
                "seed {seed}: {values:?}"
            );
            assert_ne!(second, Some(best));
        }
    }
}
