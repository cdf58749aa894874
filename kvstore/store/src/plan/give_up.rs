//! When to stop waiting for an onboarding.
//!
//! Let C be the time to compute everything that is not on the device, R the time to compute what the plan
//! computes anyway, and X the time (unknown, whatever an adversary likes) until the onboarding is complete.
//! Waiting to the end costs f(X), without overlap f(X) = X + R. Recomputing at once costs C. Let D be the
//! solution of f(D) = C: without overlap D = C − R, "what recomputing from here would have taken". The rule:
//! wait until D, then compute what has not arrived.
//!
//! *Bound.* If X ≤ D the rule pays f(X) ≤ C, and both alternatives cost at least f(X): it is optimal. If X > D
//! it pays at most D + C (less if some blocks have arrived), the better alternative pays C since f(X) ≥ f(D) =
//! C; the ratio is at most 1 + D / C ≤ 2, because D ≤ C. No deterministic rule has a smaller factor for R → 0:
//! that is the ski-rental problem (Karlin, Manasse, Rudolph, Sleator, "Competitive snoopy caching",
//! Algorithmica 3, 1988).
//!
//! *Close calls.* If the expected X is just below D, ordinary noise would make half of the onboardings be given
//! up at D, at nearly twice the price. So the rule waits until G = clamp(high quantile of X, D, 2 D): where
//! onboarding wins clearly G = D and nothing changes; otherwise a transfer is given up with the quantile's
//! small chance. The worst case becomes 1 + G / C ≤ 3 (for X in D … G it pays f(X) ≤ f(D) + (G − D) ≤ C + D),
//! which is the usual price for trusting a prediction (Purohit, Svitkina, Kumar, NeurIPS 2018).
//!
//! While the worker is busy with other requests for Q, waiting is free: with X' = max(X − Q, 0) the argument
//! is the same, and the time to give up is Q + G.

use std::time::Duration;

use crate::plan::speed::duration;

/// Seconds until the first token when onboarding ends `onboard_s` after the worker is free, and `compute_s` are
/// to be computed, of which the worker hides a part `overlap` of the shorter behind the longer.
pub(crate) fn combined_s(onboard_s: f64, compute_s: f64, overlap: f64) -> f64 {
    onboard_s.max(compute_s) + (1.0 - overlap) * onboard_s.min(compute_s)
}

/// D of the module header: `everything_s` is C, `remaining_s` is R.
pub(crate) fn break_even_s(everything_s: f64, remaining_s: f64, overlap: f64) -> f64 {
    let behind_s = everything_s - (1.0 - overlap) * remaining_s;
    if behind_s >= remaining_s {
        return behind_s.max(0.0);
    }
    if overlap >= 1.0 {
        return remaining_s.min(everything_s).max(0.0);
    }
    ((everything_s - remaining_s) / (1.0 - overlap)).max(0.0)
}

/// Inputs of [`give_up_after`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Waiting {
    /// Q: the worker is busy with others for so long.
    pub(crate) queue: Duration,
    /// C: computing everything.
    pub(crate) everything: Duration,
    /// R: computing what the plan computes anyway.
    pub(crate) rest: Duration,
    /// Part of the shorter of onboarding and computing that is hidden behind the longer.
    pub(crate) overlap: f64,
    /// Expected X.
    pub(crate) expected: Duration,
    /// High quantile of X.
    pub(crate) tail: Duration,
    /// Time at which the first token is wanted, from now.
    pub(crate) deadline: Option<Duration>,
}

/// Time after which what has not arrived is computed: Q + G; earlier if a first token wanted within `deadline`
/// can only be kept by giving up earlier, and the onboarding is expected to be done by then.
#[must_use]
pub(crate) fn give_up_after(waiting: &Waiting) -> Duration {
    let seconds = |time: Duration| time.as_secs_f64();
    let queue_s = seconds(waiting.queue);
    let even_s = break_even_s(seconds(waiting.everything), seconds(waiting.rest), waiting.overlap);
    let usual = duration(queue_s + (seconds(waiting.tail) - queue_s).clamp(even_s, 2.0 * even_s));
    match waiting.deadline.and_then(|deadline| deadline.checked_sub(waiting.everything)) {
        Some(latest) if latest > waiting.expected => usual.min(latest),
        _ => usual,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::testing::Random;

    /// The worst ratio to the better alternative over random cases, and whether X ≤ D was always optimal.
    fn worst(seed: u64, tail_of: impl Fn(f64, &mut Random) -> f64) -> f64 {
        println!("seed {seed}");
        let mut random = Random::new(seed);
        let mut worst = 0.0_f64;
        for _ in 0..100_000 {
            let everything_s = 10.0 * random.uniform() + 1e-3;
            let remaining_s = everything_s * random.uniform();
            let overlap = if random.uniform() < 0.3 { 0.0 } else { random.uniform() };
            let even_s = break_even_s(everything_s, remaining_s, overlap);
            let give_up_s = give_up_after(&Waiting {
                queue: Duration::ZERO,
                everything: duration(everything_s),
                rest: duration(remaining_s),
                overlap,
                expected: Duration::ZERO,
                tail: duration(tail_of(even_s, &mut random)),
                deadline: None,
            })
            .as_secs_f64();
            let arrives_s = everything_s * 3.0 * random.uniform();
            let waited_s = combined_s(arrives_s, remaining_s, overlap);
            let best_s = waited_s.min(everything_s);
            let paid_s = if arrives_s <= give_up_s { waited_s } else { give_up_s + everything_s };
            if arrives_s <= even_s.min(give_up_s) {
                assert!(paid_s <= best_s * (1.0 + 1e-6), "{paid_s} {best_s}");
            }
            assert!(paid_s <= best_s * (1.0 + give_up_s / everything_s) + 1e-6, "{paid_s} {best_s}");
            worst = worst.max(paid_s / best_s);
        }
        println!("worst ratio {worst:.4}");
        worst
    }

    #[test]
    fn never_more_than_twice_the_better_for_a_clear_win_and_three_times_for_a_close_call() {
        let clear = worst(41, |even_s, random| even_s * random.uniform());
        assert!((1.9..=2.0 + 1e-6).contains(&clear));
        let close = worst(42, |even_s, random| even_s * 10.0 * random.uniform());
        assert!((2.5..=3.0 + 1e-6).contains(&close));
    }

    #[test]
    fn a_wanted_first_token_makes_it_earlier_only_when_that_helps() {
        let seconds = Duration::from_secs;
        let at = |deadline| {
            give_up_after(&Waiting {
                queue: seconds(1),
                everything: seconds(10),
                rest: seconds(2),
                overlap: 0.0,
                expected: seconds(3),
                tail: seconds(4),
                deadline,
            })
        };
        assert_eq!(at(None), seconds(9));
        assert_eq!(at(Some(seconds(15))), seconds(5));
        assert_eq!(at(Some(seconds(12))), seconds(9), "12 − 10 s is before the expected end");
        assert_eq!(at(Some(seconds(5))), seconds(9), "recomputing alone misses it");
    }
}
