//! Model of the time that a worker takes to compute a piece of a prompt.
//!
//! `fixed + linear × (tokens + tokens in the queue) + quadratic × tokens × (context + tokens / 2)`: projections
//! and feed-forward cost the same for each token; a token attends to the context and to half of the tokens
//! that are computed with it. Learnt from prefills as they happen, with the same learner as the tiers.
//!
//! *The fixed part* is what loading a prefix cannot save. Only prefills of few tokens show it, and an engine whose prompts
//! are all computed from their start makes none: one slow short prefill among long ones looks like a fixed part that is
//! nearly all, no prefix seems worth a load, and so nothing ever corrects it. While fewer than three prefills about as
//! short as a rest were measured lately, the fixed part is therefore taken to be at most [`FIXED_PART_MAX`] of the whole
//! ([`RecomputeModel::optimistic_remaining_s`]): the loads that this causes are the measurements. Where the fixed part really is
//! nearly all, this makes about one load in 85 prefills that saves nothing (`planner` bounds what it costs).

use std::time::Duration;

use crate::plan::learner::Learner;
use crate::plan::speed::duration;

/// A rest's time is known once so many prefills of its octave of tokens, the next or a lower one were measured: three, of which
/// forgetting takes a little off.
const ENOUGH_PREFILLS: f32 = 2.5;
/// Engines do not report prefills of fewer tokens.
const TOKENS_MIN: u32 = 16;
/// The count of a measured prefill falls to 1/e after so many further ones.
const MEMORY_PREFILLS: f32 = 256.0;
/// Largest fixed part of a prefill that is believed without enough measurements.
const FIXED_PART_MAX: f64 = 0.1;

/// Coefficients that are assumed before anything was measured: an 8-billion-parameter model on one data
/// centre GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PrefillGuess {
    /// Seconds for each prefill, however short.
    pub(crate) fixed_s: f64,
    /// Seconds for each token.
    pub(crate) linear_s: f64,
    /// Seconds for each pair of a token and a token that it attends to.
    pub(crate) quadratic_s: f64,
}

impl Default for PrefillGuess {
    fn default() -> Self {
        Self { fixed_s: 5e-3, linear_s: 5e-5, quadratic_s: 1e-9 }
    }
}

/// The learnt time of a prefill of one worker.
#[derive(Debug, Clone)]
pub(crate) struct RecomputeModel {
    learner: Learner<3>,
    /// Prefills measured lately, by the octave of their tokens.
    measured: [f32; OCTAVES],
}

/// A prefill and the time that the model expects for it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PrefillEstimate {
    pub(crate) tokens: f64,
    pub(crate) seconds: f64,
}

const OCTAVES: usize = u32::BITS as usize;

impl Default for RecomputeModel {
    fn default() -> Self {
        Self::new(PrefillGuess::default())
    }
}

impl RecomputeModel {
    /// Starts from a guess.
    #[must_use]
    pub(crate) fn new(guess: PrefillGuess) -> Self {
        Self {
            learner: Learner::new([guess.fixed_s, guess.linear_s, guess.quadratic_s]),
            measured: [0.0; OCTAVES],
        }
    }

    /// A finished prefill: `tokens` computed after `context_tokens`, started behind `queued_tokens`.
    pub(crate) fn observe(
        &mut self,
        tokens: u32,
        context_tokens: u32,
        queued_tokens: u64,
        elapsed: Duration,
    ) {
        if tokens > 0 {
            self.measured.iter_mut().for_each(|count| *count *= 1.0 - 1.0 / MEMORY_PREFILLS);
            self.measured[tokens.ilog2() as usize] += 1.0;
            self.learner.observe(features(tokens, context_tokens, queued_tokens), elapsed.as_secs_f64());
        }
    }

    /// Expected time of a prefill behind `queued_tokens`.
    #[must_use]
    pub(crate) fn expected(&self, tokens: u32, context_tokens: u32, queued_tokens: u64) -> Duration {
        duration(self.learner.predict(&features(tokens, context_tokens, queued_tokens)))
    }

    /// Seconds to compute the rest of a prompt: less than the model expects where the fixed part in it was hardly measured.
    pub(crate) fn optimistic_remaining_s(&self, rest: PrefillEstimate, everything: PrefillEstimate) -> f64 {
        let (fixed_s, believed_s) = (self.coefficients().fixed_s, FIXED_PART_MAX * everything.seconds);
        if fixed_s <= believed_s || self.is_measured(rest.tokens as u32) {
            return rest.seconds;
        }
        let saved_with_tokens = everything.seconds - fixed_s;
        let part = match saved_with_tokens > 0.0 {
            true => (rest.seconds - fixed_s) / saved_with_tokens,
            false => rest.tokens / everything.tokens,
        };
        believed_s + part * (everything.seconds - believed_s)
    }

    /// Whether prefills of so few tokens, or less than four times as many, were measured lately.
    fn is_measured(&self, tokens: u32) -> bool {
        let octave = (tokens.max(TOKENS_MIN).ilog2() as usize + 1).min(OCTAVES - 1);
        self.measured[..=octave].iter().sum::<f32>() >= ENOUGH_PREFILLS
    }

    /// The coefficients now, for planning.
    #[must_use]
    pub(crate) fn coefficients(&self) -> PrefillGuess {
        let [fixed_s, linear_s, quadratic_s] = *self.learner.parameters();
        PrefillGuess { fixed_s, linear_s, quadratic_s }
    }
}

impl PrefillGuess {
    /// Seconds to compute `tokens` after `context` tokens on an idle worker.
    pub(crate) fn seconds(&self, tokens: f64, context: f64) -> f64 {
        self.fixed_s + tokens * (self.linear_s + self.quadratic_s * (context + tokens / 2.0))
    }

    /// Seconds that the worker is busy with the queue before this request.
    pub(crate) fn queue_seconds(&self, queued_tokens: u64) -> f64 {
        queued_tokens as f64 * self.linear_s
    }
}

fn features(tokens: u32, context_tokens: u32, queued_tokens: u64) -> [f64; 3] {
    let (tokens, context) = (f64::from(tokens), f64::from(context_tokens));
    [1.0, tokens + queued_tokens as f64, tokens * (context + tokens / 2.0)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::testing::Random;

    #[test]
    fn a_worker_far_from_the_guess_is_learnt() {
        let mut random = Random::new(21);
        let truth = PrefillGuess { fixed_s: 0.03, linear_s: 8e-4, quadratic_s: 4e-8 };
        let mut model = RecomputeModel::default();
        for _ in 0..300 {
            let tokens = 2_f64.powf(4.0 + 12.0 * random.uniform()) as u32;
            let context = (random.uniform() * 60_000.0) as u32;
            let seconds = truth.seconds(tokens.into(), context.into()) * random.noise(0.05);
            model.observe(tokens, context, 0, duration(seconds));
        }
        for (tokens, context) in [(16, 0), (16, 50_000), (2000, 0), (2000, 30_000), (60_000, 0)] {
            let ratio = model.expected(tokens, context, 0).as_secs_f64()
                / truth.seconds(tokens.into(), context.into());
            assert!((0.95..1.05).contains(&ratio), "{tokens} after {context}: {ratio}");
        }
        let waiting = model.expected(16, 0, 1000) - model.expected(16, 0, 0);
        assert!((0.7..0.9).contains(&waiting.as_secs_f64()), "{waiting:?}");
    }
}
