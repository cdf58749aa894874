//! Which worker gets a request. Pure functions: load, overlap and randomness arrive as arguments, so a decision
//! can be replayed and explained.
//!
//! The cost of a worker, in blocks: what it would have to compute, weighted, plus what it has queued and what
//! it is decoding. Blocks in its host tier count for part, since bringing them back costs something.
//! Temperature 0 takes the cheapest, ties by the random number; above 0, workers are drawn by a softmax over
//! normalised costs, which spreads bursts that would otherwise all follow the same prefix.
//!
//! Hot path: no allocation beyond the caller's slices, no lock, no clock.

#![forbid(unsafe_code)]

/// How to choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Strategy {
    /// By cost: overlap, prefill load, decode load.
    #[default]
    Cost,
    /// In turn.
    RoundRobin,
    /// Fewest active requests.
    LeastLoaded,
    /// By chance.
    Random,
}

/// Weights of the cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weights {
    /// What a block to compute costs, relative to a block being decoded.
    pub prefill: f64,
    /// What a block in the host tier saves, relative to one on the device (0 to 1).
    pub host_credit: f64,
    /// 0 takes the cheapest; larger values spread.
    pub temperature: f64,
}

impl Default for Weights {
    fn default() -> Self {
        Self { prefill: 1.0, host_credit: 0.75, temperature: 0.0 }
    }
}

/// A worker as the decision sees it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Candidate {
    /// Leading blocks of the request in its own pool.
    pub device_blocks: u32,
    /// Leading blocks in its pool or host tier.
    pub any_blocks: u32,
    /// Blocks of prompts that it has still to compute.
    pub queued_prefill_blocks: u32,
    /// Blocks of the requests that it is decoding.
    pub decoding_blocks: u32,
    /// Requests that it has.
    pub requests: u32,
}

/// The outcome.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Index of the chosen candidate.
    pub index: usize,
    /// Its cost in blocks (0 for strategies without costs).
    pub cost: f64,
}

/// Cost of running a request of `blocks` blocks on a candidate.
#[must_use]
pub fn cost(blocks: u32, candidate: &Candidate, weights: &Weights) -> f64 {
    let device = f64::from(candidate.device_blocks.min(blocks));
    let host = f64::from(candidate.any_blocks.min(blocks)) - device;
    let to_compute = f64::from(blocks) - device - weights.host_credit * host.max(0.0);
    weights.prefill * (to_compute + f64::from(candidate.queued_prefill_blocks))
        + f64::from(candidate.decoding_blocks)
}

/// Chooses among candidates; `None` when there are none. `turn` counts decisions, `random` is any number.
#[must_use]
pub fn choose(
    strategy: Strategy,
    blocks: u32,
    candidates: &[Candidate],
    weights: &Weights,
    turn: u64,
    random: u64,
) -> Option<Choice> {
    if candidates.is_empty() {
        return None;
    }
    let count = candidates.len() as u64;
    let plain = |index| Some(Choice { index, cost: 0.0 });
    match strategy {
        Strategy::RoundRobin => plain((turn % count) as usize),
        Strategy::Random => plain((scrambled(random) % count) as usize),
        Strategy::LeastLoaded => {
            let index = cheapest(candidates, random, |candidate| f64::from(candidate.requests));
            plain(index)
        }
        Strategy::Cost => {
            let of = |candidate: &Candidate| cost(blocks, candidate, weights);
            let index = match weights.temperature {
                hot if hot > 0.0 => draw(candidates, hot, random, of),
                _ => cheapest(candidates, random, of),
            };
            Some(Choice { index, cost: of(&candidates[index]) })
        }
    }
}

/// Whether a prompt is worth a prefill worker: only when enough of it is cached nowhere near the decode worker.
#[must_use]
pub fn is_worth_disaggregating(prompt_tokens: usize, held_tokens: usize, threshold_tokens: usize) -> bool {
    prompt_tokens.saturating_sub(held_tokens) > threshold_tokens
}

/// splitmix64, so that a counter will do as a random number.
fn scrambled(random: u64) -> u64 {
    let word = random.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

fn cheapest(candidates: &[Candidate], random: u64, cost: impl Fn(&Candidate) -> f64) -> usize {
    let least = candidates.iter().map(&cost).fold(f64::INFINITY, f64::min);
    let ties = candidates.iter().filter(|candidate| cost(candidate) <= least).count() as u64;
    let wanted = (scrambled(random) % ties.max(1)) as usize;
    let mut tied = candidates.iter().enumerate().filter(|(_, candidate)| cost(candidate) <= least);
    tied.nth(wanted).map_or(0, |(index, _)| index)
}

/// Softmax over costs, scaled to the range between cheapest and dearest.
fn draw(candidates: &[Candidate], temperature: f64, random: u64, cost: impl Fn(&Candidate) -> f64) -> usize {
    let least = candidates.iter().map(&cost).fold(f64::INFINITY, f64::min);
    let most = candidates.iter().map(&cost).fold(f64::NEG_INFINITY, f64::max);
    let range = (most - least).max(f64::MIN_POSITIVE);
    let weight = |candidate: &Candidate| (-(cost(candidate) - least) / range / temperature).exp();
    let total: f64 = candidates.iter().map(weight).sum();
    let mut left = (scrambled(random) >> 11) as f64 / (1_u64 << 53) as f64 * total;
    for (index, candidate) in candidates.iter().enumerate() {
        left -= weight(candidate);
        if left < 0.0 {
            return index;
        }
    }
    candidates.len() - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(device: u32, any: u32, queued: u32, decoding: u32) -> Candidate {
        Candidate {
            device_blocks: device,
            any_blocks: any,
            queued_prefill_blocks: queued,
            decoding_blocks: decoding,
            requests: queued + decoding,
        }
    }

    fn pick(candidates: &[Candidate], weights: &Weights) -> usize {
        choose(Strategy::Cost, 10, candidates, weights, 0, 3).expect("a choice").index
    }

    #[test]
    fn overlap_wins_until_load_outweighs_it() {
        let weights = Weights::default();
        assert_eq!(pick(&[candidate(0, 0, 0, 0), candidate(8, 8, 0, 0)], &weights), 1);
        assert_eq!(
            pick(&[candidate(0, 0, 0, 0), candidate(8, 8, 9, 0)], &weights),
            0,
            "a long queue beats a hit"
        );
        assert_eq!(pick(&[candidate(0, 8, 0, 0), candidate(0, 0, 0, 0)], &weights), 0, "host blocks count");
        assert_eq!(pick(&[candidate(0, 8, 0, 0), candidate(7, 7, 0, 0)], &weights), 1, "but less");
        let careless = Weights { prefill: 0.0, ..weights };
        assert_eq!(pick(&[candidate(9, 9, 0, 1), candidate(0, 0, 0, 0)], &careless), 1);
    }

    #[test]
    fn ties_are_spread_and_seeded() {
        let same = [Candidate::default(); 4];
        let mut seen = [0; 4];
        for random in 0..4000 {
            let first = choose(Strategy::Cost, 5, &same, &Weights::default(), 0, random);
            assert_eq!(first, choose(Strategy::Cost, 5, &same, &Weights::default(), 9, random));
            seen[first.expect("a choice").index] += 1;
        }
        assert!(seen.iter().all(|&count| (800..1200).contains(&count)), "{seen:?}");
    }

    #[test]
    fn temperature_moves_from_cheapest_to_uniform() {
        let candidates = [candidate(10, 10, 0, 0), candidate(0, 0, 0, 0)];
        let share = |temperature| {
            let weights = Weights { temperature, ..Weights::default() };
            let picks = (0..4000).map(|random| choose(Strategy::Cost, 10, &candidates, &weights, 0, random));
            picks.filter(|pick| pick.is_some_and(|pick| pick.index == 0)).count()
        };
        assert_eq!(share(0.0), 4000);
        let (cool, hot) = (share(0.5), share(100.0));
        assert!((3300..3700).contains(&cool), "{cool}: e^2 to 1");
        assert!((1850..2200).contains(&hot), "{hot}");
    }

    #[test]
    fn the_plain_strategies() {
        let candidates = [candidate(0, 0, 1, 1), candidate(0, 0, 0, 1), candidate(0, 0, 5, 5)];
        let weights = Weights::default();
        let index =
            |strategy, turn| choose(strategy, 1, &candidates, &weights, turn, turn).expect("a choice").index;
        assert_eq!((0..4).map(|turn| index(Strategy::RoundRobin, turn)).collect::<Vec<_>>(), [0, 1, 2, 0]);
        assert_eq!(index(Strategy::LeastLoaded, 0), 1);
        let random: std::collections::HashSet<usize> =
            (0..50).map(|turn| index(Strategy::Random, turn)).collect();
        assert_eq!(random.len(), 3);
        assert_eq!(choose(Strategy::Cost, 1, &[], &weights, 0, 0), None);
    }

    #[test]
    fn short_or_cached_prompts_stay() {
        assert!(!is_worth_disaggregating(100, 0, 256));
        assert!(is_worth_disaggregating(1000, 0, 256));
        assert!(!is_worth_disaggregating(1000, 800, 256));
        assert!(!is_worth_disaggregating(10, 50, 256));
    }
}
