//! Choice of the worker for a request. Pure functions: load, overlap, time coefficients and randomness arrive as arguments, so a
//! decision can be replayed and explained.
//!
//! * [`Policy::choose`]: from a request and candidates to a choice, by one of several strategies.
//! * [`CostModel`]: two models. [`BlockCost`] counts blocks to be computed, queued and decoding. [`PredictedTime`] adds up
//!   seconds: queue, computing tokens that no tier holds, loading blocks from a lower tier, moving them to the decode worker;
//!   so that a long queue outweighs a cache hit when it should.
//! * [`Learner`] and [`Factor`]: the seconds per token, block and request of the fleet, and the relative slowness of each
//!   worker, from recent observations.
//!
//! Herding: the loads of a decision must include requests routed a moment ago, here and by other gateways; the caller
//! books each choice before the next one. Ties are drawn.
//!
//! Hot path: no allocation, no lock, no clock. About 8 ns a candidate.

#![forbid(unsafe_code)]

mod candidate;
mod choose;
mod cost;
mod learn;
mod least_squares;

pub use candidate::{Candidate, Request, TIERS};
pub use choose::{Choice, Policy, Strategy};
pub use cost::{BlockCost, Cost, CostModel, PredictedTime, features};
pub use learn::{FEATURES, Factor, Learner, TimeCoefficients};
pub use least_squares::LeastSquares;

/// Whether a prompt is worth a prefill worker: if more than `threshold_tokens` of it are not held at the decode worker.
#[must_use]
pub fn is_worth_disaggregating(prompt_tokens: usize, held_tokens: usize, threshold_tokens: usize) -> bool {
    prompt_tokens.saturating_sub(held_tokens) > threshold_tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: Request = Request { tokens: 161, block_tokens: 16, session: None };

    fn candidate(leading: [u32; 4], queued_blocks: u32, decoding_blocks: u32) -> Candidate {
        Candidate {
            leading,
            queued_tokens: queued_blocks * 16,
            decoding_blocks,
            requests: queued_blocks + decoding_blocks,
            ..Candidate::default()
        }
    }

    fn held(device: u32, host: u32) -> [u32; 4] {
        [device, host, host, host]
    }

    fn policy(strategy: Strategy) -> Policy {
        Policy { strategy, ..Policy::default() }
    }

    fn pick(policy: &Policy, candidates: &[Candidate]) -> usize {
        policy.choose(&REQUEST, candidates, 0, 3).expect("a choice").index
    }

    #[test]
    fn what_is_not_held_must_be_more_than_the_threshold() {
        assert!(!is_worth_disaggregating(100, 40, 60));
        assert!(is_worth_disaggregating(101, 40, 60));
        assert!(!is_worth_disaggregating(40, 100, 0), "more may be held than was asked for");
    }

    #[test]
    fn the_last_block_of_a_request_may_not_be_whole() {
        let blocks = |tokens, block_tokens| Request { tokens, block_tokens, session: None }.blocks();
        assert_eq!([blocks(160, 16), blocks(161, 16), blocks(1, 16), blocks(0, 16)], [10, 11, 1, 0]);
    }

    #[test]
    fn overlap_wins_until_load_outweighs_it() {
        for strategy in [Strategy::Cost, Strategy::PredictedTime] {
            let policy = policy(strategy);
            let none = held(0, 0);
            assert_eq!(pick(&policy, &[candidate(none, 0, 0), candidate(held(8, 8), 0, 0)]), 1);
            assert_eq!(
                pick(&policy, &[candidate(none, 0, 0), candidate(held(8, 8), 40, 0)]),
                0,
                "{strategy:?}: a long queue beats a hit"
            );
            assert_eq!(
                pick(&policy, &[candidate(held(0, 8), 0, 0), candidate(none, 0, 0)]),
                0,
                "host counts"
            );
            assert_eq!(
                pick(&policy, &[candidate(held(0, 8), 0, 0), candidate(held(8, 8), 0, 0)]),
                1,
                "but less"
            );
        }
        let careless = Policy {
            block_cost: BlockCost { prefill: 0.0, ..BlockCost::default() },
            ..policy(Strategy::Cost)
        };
        assert_eq!(pick(&careless, &[candidate(held(9, 9), 0, 1), candidate(held(0, 0), 0, 0)]), 1);
    }

    #[test]
    fn predicted_time_knows_fast_workers_and_far_ones() {
        let slow = Candidate {
            coefficients: TimeCoefficients { per_token: 1e-3, ..TimeCoefficients::default() },
            ..candidate(held(5, 5), 0, 0)
        };
        let fast = candidate(held(0, 0), 0, 0);
        assert_eq!(
            pick(&policy(Strategy::PredictedTime), &[slow, fast]),
            1,
            "computing all of it is faster there"
        );
        assert_eq!(pick(&policy(Strategy::Cost), &[slow, fast]), 0);
        let far = Candidate { transfer_seconds: 0.5, ..candidate(held(10, 10), 0, 0) };
        assert_eq!(pick(&policy(Strategy::PredictedTime), &[far, fast]), 1);
    }

    #[test]
    fn the_last_token_is_always_computed() {
        let request = Request { tokens: 160, ..REQUEST };
        let all = candidate(held(10, 10), 0, 0);
        assert_eq!(all.saved_blocks(&request), [9, 0, 0, 0]);
        assert_eq!(all.uncached_tokens(&request), 16);
        assert_eq!(all.uncached_tokens(&REQUEST), 1);
        let tiers = candidate([2, 5, 5, 7], 0, 0);
        assert_eq!(tiers.saved_blocks(&REQUEST), [2, 3, 0, 2]);
        let cost = BlockCost::default().cost(&REQUEST, &tiers);
        assert!((cost.onboard - (3.0 * 0.25 + 2.0 * 0.75)).abs() < 1e-9, "{cost:?}");
        let sum = cost.queue + cost.prefill + cost.onboard + cost.transfer + cost.decode;
        assert!((cost.total - sum).abs() < 1e-9, "the parts explain the whole");
    }

    #[test]
    fn ties_are_spread_and_seeded() {
        let same = [Candidate::default(); 4];
        let mut seen = [0; 4];
        for random in 0..4000 {
            let first = policy(Strategy::Cost).choose(&REQUEST, &same, 0, random);
            assert_eq!(first, policy(Strategy::Cost).choose(&REQUEST, &same, 9, random));
            seen[first.expect("a choice").index] += 1;
        }
        assert!(seen.iter().all(|&count| (800..1200).contains(&count)), "{seen:?}");
    }

    #[test]
    fn temperature_moves_from_cheapest_to_uniform() {
        let candidates = [candidate(held(10, 10), 0, 0), candidate(held(0, 0), 0, 0)];
        let share = |temperature| {
            let policy = Policy { temperature, ..policy(Strategy::Cost) };
            let picks = (0..4000).map(|random| policy.choose(&REQUEST, &candidates, 0, random));
            picks.filter(|pick| pick.is_some_and(|pick| pick.index == 0)).count()
        };
        assert_eq!(share(0.0), 4000);
        let (cool, hot) = (share(0.5), share(100.0));
        assert!((3300..3700).contains(&cool), "{cool}: e^2 to 1");
        assert!((1850..2200).contains(&hot), "{hot}");
    }

    /// Booking each choice before the next spreads a burst; equal prefixes do not pile up on one worker.
    #[test]
    fn a_burst_does_not_herd() {
        for strategy in [Strategy::Cost, Strategy::PredictedTime, Strategy::LeastLoaded] {
            let mut candidates = vec![candidate(held(0, 0), 0, 0); 8];
            candidates[0].leading = [6; 4];
            for random in 0..80 {
                let choice =
                    policy(strategy).choose(&REQUEST, &candidates, random, random).expect("a choice");
                let chosen = &mut candidates[choice.index];
                chosen.queued_tokens += chosen.uncached_tokens(&REQUEST);
                chosen.requests += 1;
                chosen.decoding_blocks += REQUEST.blocks();
            }
            let most = candidates.iter().map(|candidate| candidate.requests).max();
            // The worker with 6 of 10 blocks can take two and a half times as many requests as each other one.
            assert!(most <= Some(24), "{strategy:?}: {most:?} of 80 on one of 8 workers");
        }
    }

    #[test]
    fn sessions_stay_and_move_little_when_workers_come_and_go() {
        let workers = |count: u64| -> Vec<Candidate> {
            (0..count).map(|identity| Candidate { identity: identity * 77, ..Candidate::default() }).collect()
        };
        let worker_of = |session, candidates: &[Candidate]| {
            let request = Request { session: Some(session), ..REQUEST };
            let choice = policy(Strategy::Session).choose(&request, candidates, session, session * 3);
            candidates[choice.expect("a choice").index].identity
        };
        let moved =
            (0..1000).filter(|&session| worker_of(session, &workers(8)) != worker_of(session, &workers(9)));
        let moved = moved.count();
        assert!((60..170).contains(&moved), "{moved} of 1000 moved; a ninth is 111");
        let mut busy = workers(4);
        let home = worker_of(5, &busy);
        for candidate in &mut busy {
            candidate.requests = if candidate.identity == home { 30 } else { 2 };
        }
        assert_ne!(worker_of(5, &busy), home, "not at any price");
    }

    #[test]
    fn cold_workers_get_their_share() {
        let mut candidates = [candidate(held(10, 10), 0, 0), candidate(held(0, 0), 0, 0)];
        candidates[1].is_cold = true;
        let policy = Policy { warm_up_share: 0.1, ..policy(Strategy::PredictedTime) };
        let cold = (0..10_000).filter(|&random| {
            let choice = policy.choose(&REQUEST, &candidates, 0, random).expect("a choice");
            assert_eq!(choice.is_warm_up, choice.index == 1);
            choice.is_warm_up
        });
        assert!((900..1100).contains(&cold.count()));
    }

    #[test]
    fn the_plain_strategies() {
        let candidates =
            [candidate(held(0, 0), 1, 1), candidate(held(0, 0), 0, 1), candidate(held(0, 0), 5, 5)];
        let index = |strategy, turn| {
            policy(strategy).choose(&REQUEST, &candidates, turn, turn).expect("a choice").index
        };
        assert_eq!((0..4).map(|turn| index(Strategy::RoundRobin, turn)).collect::<Vec<_>>(), [0, 1, 2, 0]);
        assert_eq!(index(Strategy::LeastLoaded, 0), 1);
        let random: std::collections::HashSet<usize> =
            (0..50).map(|turn| index(Strategy::Random, turn)).collect();
        assert_eq!(random.len(), 3);
        let two = (0..3000).filter(|&turn| index(Strategy::PowerOfTwo, turn) == 2).count();
        assert!((200..470).contains(&two), "{two}: only when drawn twice, a ninth");
        assert_eq!(policy(Strategy::Cost).choose(&REQUEST, &[], 0, 0), None);
        assert!(Strategy::ALL.iter().all(|strategy| Strategy::from_name(strategy.name()) == Some(*strategy)));
    }

    #[test]
    fn short_or_cached_prompts_stay() {
        assert!(!is_worth_disaggregating(100, 0, 256));
        assert!(is_worth_disaggregating(1000, 0, 256));
        assert!(!is_worth_disaggregating(1000, 800, 256));
        assert!(!is_worth_disaggregating(10, 50, 256));
    }
}
