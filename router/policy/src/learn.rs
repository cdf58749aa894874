//! Times to the first token, learned from observations: least squares with forgetting, on a handful of features of each request
//! and the time to its first token.
//!
//! The equations are solved again every few observations; see [`LeastSquares`].
//!
//! Prompts go where they seem fastest, so an overestimated cost of blocks from a lower tier would not be corrected: after one
//! slow load, such as an engine's first, no prompt would be sent where its blocks are. Therefore such blocks count as cheap as
//! in the first guess until some loads have been seen, and again when no load has been seen for long.

use crate::least_squares::LeastSquares;

/// Number of features of a request on a worker.
pub const FEATURES: usize = 5;

/// Coefficients of the time to the first token, in seconds per unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimeCoefficients {
    /// Constant part.
    pub base: f64,
    /// Per token to compute, of queued prompts and of the request.
    pub per_token: f64,
    /// Per thousand own tokens to compute times thousand tokens of the prompt: attention.
    pub per_square: f64,
    /// Per request that is decoding at the same time.
    pub per_decode: f64,
    /// Per block loaded from a lower tier.
    pub per_onboard: f64,
}

impl Default for TimeCoefficients {
    /// A plain GPU and a model of some billion parameters: 10,000 tokens a second.
    fn default() -> Self {
        Self { base: 0.005, per_token: 1e-4, per_square: 5e-4, per_decode: 2e-4, per_onboard: 1e-4 }
    }
}

impl TimeCoefficients {
    /// Returns the coefficients as an array, in the order of [`crate::features`].
    #[must_use]
    pub fn to_array(self) -> [f64; FEATURES] {
        [self.base, self.per_token, self.per_square, self.per_decode, self.per_onboard]
    }

    /// Returns the coefficients with these values.
    #[must_use]
    pub fn from_array([base, per_token, per_square, per_decode, per_onboard]: [f64; FEATURES]) -> Self {
        Self { base, per_token, per_square, per_decode, per_onboard }
    }

    /// Multiplies each coefficient by `factor`.
    #[must_use]
    pub fn scaled_by(self, factor: f64) -> Self {
        Self::from_array(self.to_array().map(|value| value * factor))
    }

    /// Predicted seconds for these features.
    #[must_use]
    pub fn seconds(self, features: [f64; FEATURES]) -> f64 {
        self.to_array().iter().zip(features).map(|(value, feature)| value * feature).sum()
    }
}

/// Time of one worker relative to the fleet's [`TimeCoefficients`]; 2 is twice as slow.
///
/// The relative costs (of a token, a request, a block) are learned from all workers together, by one [`Learner`]; a worker has
/// only this number of its own. A learner per worker saw too few of the rare long prompts: in simulation a worker whose
/// learner underestimated its times drew requests for a minute before that was corrected.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Factor {
    value: f64,
    observations: u64,
}

impl Default for Factor {
    fn default() -> Self {
        Self { value: 1.0, observations: 0 }
    }
}

/// Largest factor by which a worker may be slower, or faster, than the fleet.
const FACTOR_MAX: f64 = 16.0;
/// Share of a new observation in a worker's factor, after the first observations.
const FACTOR_SHARE: f64 = 1.0 / 32.0;

impl Factor {
    /// Restores a factor.
    #[must_use]
    pub fn from_parts(value: f64, observations: u64) -> Self {
        Self { value: value.clamp(1.0 / FACTOR_MAX, FACTOR_MAX), observations }
    }

    /// The factor; 2 is twice as slow as the fleet.
    #[must_use]
    pub fn value(self) -> f64 {
        self.value
    }

    /// Number of observed first tokens.
    #[must_use]
    pub fn observations(self) -> u64 {
        self.observations
    }

    /// Observes a first token that came after `seconds` where the fleet's coefficients predict `expected`. Averaged in logarithms:
    /// twice as slow weighs as much as twice as fast.
    pub fn observe(&mut self, expected: f64, seconds: f64) {
        if !(expected > 0.0 && seconds > 0.0 && (seconds / expected).is_finite()) {
            return;
        }
        self.observations += 1;
        let share = FACTOR_SHARE.max(1.0 / (self.observations as f64 + 4.0));
        let target = (seconds / expected).clamp(1.0 / FACTOR_MAX, FACTOR_MAX).ln();
        // Drawn towards 1 a little, so that fleet and factors do not drift together.
        let value = self.value.ln() * 0.999;
        self.value = (value + (target - value) * share).exp();
    }
}

/// Scales that bring all features near 1, so that the matrix is well conditioned.
const SCALES: [f64; FEATURES] = [1.0, 1000.0, 10.0, 10.0, 10.0];
/// Factor by which old observations fade: half of their weight is left after 140.
const FORGETTING: f64 = 0.995;
/// Weight of the first guess, in observations of one second.
const GUESS_WEIGHT: f64 = 0.1;

/// Number of loads from lower tiers that weigh as much as the first guess of their cost, where that is less.
const LOADS_OF_GUESS: f64 = 4.0;
/// Factor by which the number of loads fades: half of it is left after 700 prompts.
const LOADS_FORGETTING: f64 = 0.999;
/// Index of the feature of [`TimeCoefficients::per_onboard`].
const ONBOARDED: usize = FEATURES - 1;

/// Number of first observations that are each solved for at once; later one more changes little.
const SOLVED_EACH_UNTIL: u64 = 100;
const SOLVED_EVERY: u64 = 4;

/// Learner of a fleet's [`TimeCoefficients`].
#[derive(Debug, Clone)]
pub struct Learner {
    /// Regression over scaled features, weighted by the inverse of the time.
    regression: LeastSquares<FEATURES>,
    weights: [f64; FEATURES],
    /// First guess of the cost of a block from a lower tier.
    guessed_onboard: f64,
    /// Number of observations with blocks from lower tiers; old ones fade.
    loads: f64,
    observations: u64,
    /// Mean relative error of the last predictions.
    error: f64,
}

impl Default for Learner {
    fn default() -> Self {
        Self::new(TimeCoefficients::default())
    }
}

impl Learner {
    /// Starts with a guess of the coefficients.
    #[must_use]
    pub fn new(guess: TimeCoefficients) -> Self {
        let mut weights = guess.to_array();
        weights.iter_mut().zip(SCALES).for_each(|(weight, scale)| *weight *= scale);
        let regression = LeastSquares::new(weights, GUESS_WEIGHT, FORGETTING);
        Self {
            regression,
            weights,
            guessed_onboard: guess.per_onboard,
            loads: 0.0,
            observations: 0,
            error: 0.0,
        }
    }

    /// The coefficients learned so far. None is negative: more work takes no less time.
    #[must_use]
    pub fn learned(&self) -> TimeCoefficients {
        let mut array = self.weights;
        array.iter_mut().zip(SCALES).for_each(|(weight, scale)| *weight /= scale);
        TimeCoefficients::from_array(array)
    }

    /// The coefficients to choose by: loads count as cheap while few have been seen.
    #[must_use]
    pub fn coefficients(&self) -> TimeCoefficients {
        let learned = self.learned();
        let hoped = learned.per_onboard.min(self.guessed_onboard);
        let per_onboard =
            (self.loads * learned.per_onboard + LOADS_OF_GUESS * hoped) / (self.loads + LOADS_OF_GUESS);
        TimeCoefficients { per_onboard, ..learned }
    }

    /// Number of observed requests.
    #[must_use]
    pub fn observations(&self) -> u64 {
        self.observations
    }

    /// Mean of |predicted − real| / real over the last requests, as predicted by [`Self::learned`].
    #[must_use]
    pub fn relative_error(&self) -> f64 {
        self.error
    }

    /// Observes a request with these features, whose first token came after `seconds`.
    pub fn observe(&mut self, features: [f64; FEATURES], seconds: f64) {
        if !seconds.is_finite() || seconds <= 0.0 || features.iter().any(|feature| !feature.is_finite()) {
            return;
        }
        self.loads = self.loads * LOADS_FORGETTING + f64::from(u8::from(features[ONBOARDED] > 0.0));
        let mut x = features;
        x.iter_mut().zip(SCALES).for_each(|(feature, scale)| *feature /= scale);
        // Weighted by the inverse of the time: a long request must not outweigh a hundred short ones.
        let weight = 1.0 / seconds.max(1e-3);
        let y = seconds * weight;
        x.iter_mut().for_each(|feature| *feature *= weight);
        let predicted: f64 = x.iter().zip(self.weights).map(|(feature, weight)| feature * weight).sum();
        self.observations += 1;
        let share = 1.0 / (self.observations.min(50) as f64);
        self.error += ((predicted - y).abs() / y - self.error) * share;
        self.regression.observe(x, y);
        if self.observations < SOLVED_EACH_UNTIL || self.observations.is_multiple_of(SOLVED_EVERY) {
            self.weights = self.regression.solve().unwrap_or(self.weights);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
    }

    #[test]
    fn a_factor_follows_the_logarithm_of_how_slow_a_worker_is() {
        let mut factor = Factor::default();
        factor.observe(1.0, 2.0);
        // A fifth of the way, since the prior counts as four observations.
        let first = 2_f64.ln() / 5.0;
        assert!(is_close(factor.value(), first.exp()), "{factor:?}");
        factor.observe(3.0, 6.0);
        let second = first * 0.999 + (2_f64.ln() - first * 0.999) / 6.0;
        assert!(is_close(factor.value(), second.exp()) && factor.observations() == 2, "{factor:?}");
        let mut fast = Factor::default();
        fast.observe(2.0, 1.0);
        assert!(is_close(fast.value(), (-first).exp()), "twice as fast weighs as much: {fast:?}");
        let before = factor;
        for (expected, seconds) in [(1.0, 0.0), (1.0, -1.0), (-1.0, 1.0), (1e-320, 1e10)] {
            factor.observe(expected, seconds);
            assert_eq!(factor, before, "{expected} {seconds}");
        }
        for (value, kept) in [(2.0, 2.0), (100.0, 16.0), (1e-3, 1.0 / 16.0)] {
            let factor = Factor::from_parts(value, 7);
            assert_eq!((factor.value(), factor.observations()), (kept, 7));
        }
    }

    #[test]
    fn the_error_is_the_mean_of_the_predictions() {
        let mut learner = Learner::default();
        let mut errors = Vec::new();
        for (tokens, seconds) in [(1000.0, 0.3), (2000.0, 0.5), (5.0, 5e-4)] {
            let features = [1.0, tokens, tokens * tokens / 1e6, 2.0, 0.0];
            let before = learner.learned();
            errors.push((before.seconds(features) - seconds).abs() / seconds);
            learner.observe(features, seconds);
            assert_ne!(learner.learned(), before, "what was seen counts at once");
            let mean = errors.iter().sum::<f64>() / errors.len() as f64;
            assert!((learner.relative_error() - mean).abs() < 1e-6, "{} {mean}", learner.relative_error());
        }
        assert_eq!(learner.observations(), 3);
        for _ in 3..103 {
            learner.observe([1.0, 100.0, 0.01, 0.0, 0.0], 0.1);
        }
        assert!(learner.relative_error() > 0.0);
        let (before, features) = (learner.learned(), [1.0, 3000.0, 9.0, 1.0, 0.0]);
        // The 104th observation is solved for, and then every fourth.
        learner.observe(features, 1.0);
        let solved = learner.learned();
        assert_ne!(solved, before);
        (0..3).for_each(|_| learner.observe(features, 1.0));
        assert_eq!(learner.learned(), solved);
    }

    #[test]
    fn loads_that_were_hardly_seen_are_taken_for_as_cheap_as_was_guessed() {
        let mut learner = Learner::default();
        let guess = TimeCoefficients::default().per_onboard;
        let hoped = |learner: &Learner, loads: f64| {
            let learned = learner.learned().per_onboard;
            assert!(learned > 2.0 * guess, "{learned}");
            (loads * learned + 4.0 * guess) / (loads + 4.0)
        };
        learner.observe([1.0, 100.0, 0.01, 0.0, 16.0], 1.0);
        assert!(is_close(learner.coefficients().per_onboard, hoped(&learner, 1.0)), "{learner:?}");
        learner.observe([1.0, 100.0, 0.01, 0.0, 0.0], 0.02);
        assert!(is_close(learner.coefficients().per_onboard, hoped(&learner, 0.999)), "{learner:?}");
        learner.observe([1.0, 100.0, 0.01, 0.0, 16.0], 1.0);
        assert!(
            is_close(learner.coefficients().per_onboard, hoped(&learner, 0.999 * 0.999 + 1.0)),
            "{learner:?}"
        );
    }

    #[test]
    fn known_coefficients_are_learned() {
        let truth = TimeCoefficients {
            base: 0.02,
            per_token: 4e-5,
            per_square: 2e-4,
            per_decode: 1e-3,
            per_onboard: 3e-4,
        };
        let mut learner = Learner::default();
        let mut random = fastrand::Rng::with_seed(3);
        let mut unit = move || random.f64();
        for _ in 0..600 {
            let (own, queued) = (unit() * 8000.0, if unit() < 0.5 { 0.0 } else { unit() * 20_000.0 });
            let features =
                [1.0, own + queued, own * (own + 2000.0) / 1e6, (unit() * 40.0).floor(), unit() * 30.0];
            let seconds: f64 = features.iter().zip(truth.to_array()).map(|(x, w)| x * w).sum();
            learner.observe(features, seconds * (0.95 + 0.1 * unit()));
        }
        let learned = learner.coefficients();
        let close = |a: f64, b: f64| (a / b - 1.0).abs() < 0.2;
        assert!(close(learned.per_token, truth.per_token), "{learned:?}");
        assert!(close(learned.per_decode, truth.per_decode), "{learned:?}");
        assert!(close(learned.per_onboard, truth.per_onboard), "{learned:?}");
        assert!(learner.relative_error() < 0.06, "{}", learner.relative_error());
        learner.observe([f64::NAN; FEATURES], 1.0);
        learner.observe([1.0; FEATURES], -1.0);
        assert_eq!(learner.coefficients(), learned, "nonsense changes nothing");
    }

    /// One of four workers is three times as slow; the relative costs are learned from all of them.
    #[test]
    fn a_slow_worker_is_told_from_the_fleet() {
        let truth = TimeCoefficients {
            base: 0.01,
            per_token: 6e-5,
            per_square: 2e-4,
            per_decode: 1e-3,
            per_onboard: 0.0,
        };
        let (mut learner, mut factors) = (Learner::default(), [Factor::default(); 4]);
        let mut random = 5_u64;
        let mut unit = move || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 40) as f64 / (1_u64 << 24) as f64
        };
        for turn in 0..4000 {
            let own = unit() * 20_000.0;
            let features = [1.0, own, own * own / 1e6, (unit() * 20.0).floor(), 0.0];
            let slow = if turn % 4 == 3 { 3.0 } else { 1.0 };
            let seconds = truth.seconds(features) * slow * (0.9 + 0.2 * unit());
            let factor = &mut factors[turn % 4];
            factor.observe(learner.coefficients().seconds(features), seconds);
            learner.observe(features, seconds / factor.value());
        }
        let features = [1.0, 8000.0, 64.0, 5.0, 0.0];
        for (worker, slow) in [(0, 1.0), (3, 3.0)] {
            let predicted = learner.coefficients().scaled_by(factors[worker].value()).seconds(features);
            let real = truth.seconds(features) * slow;
            assert!((predicted / real - 1.0).abs() < 0.15, "worker {worker}: {predicted} s, not {real}");
        }
        let before = factors[0];
        factors[0].observe(f64::NAN, 1.0);
        factors[0].observe(0.0, 1.0);
        assert_eq!(factors[0], before, "nonsense changes nothing");
    }

    /// One slow first load is forgotten; lasting slow loads are not.
    #[test]
    fn one_slow_load_does_not_end_loading_and_slow_loads_do() {
        let computed = |learner: &Learner, tokens: f64| {
            learner.coefficients().seconds([1.0, tokens, tokens * tokens / 1e6, 0.0, 0.0])
        };
        let loaded = |learner: &Learner| learner.coefficients().seconds([1.0, 32.0, 0.02, 0.0, 16.0]);
        let seconds = |tokens: f64| 0.006 + 4e-5 * tokens;
        let mut learner = Learner::default();
        let compute = |learner: &mut Learner, times: usize| {
            for turn in 0..times {
                let tokens = 100.0 + 40.0 * (turn % 16) as f64;
                learner.observe([1.0, tokens, tokens * tokens / 1e6, 0.0, 0.0], seconds(tokens));
            }
        };
        let load = |learner: &mut Learner, block_s: f64| {
            learner.observe([1.0, 32.0, 0.02, 0.0, 16.0], seconds(32.0) + 16.0 * block_s);
        };
        compute(&mut learner, 60);
        // Loading takes three times as long as computing.
        load(&mut learner, 5e-3);
        assert!(loaded(&learner) < computed(&learner, 544.0), "{:?}", learner.coefficients());
        let mut loads = 1;
        while loaded(&learner) < computed(&learner, 544.0) {
            load(&mut learner, 5e-3);
            loads += 1;
            assert!(loads < 10, "{:?}", learner.coefficients());
        }
        // Prompts are computed from then on, and a load is tried again occasionally.
        let mut tried = 0;
        for _ in 0..4000 {
            if loaded(&learner) < computed(&learner, 544.0) {
                load(&mut learner, 5e-3);
                tried += 1;
            } else {
                compute(&mut learner, 1);
            }
        }
        println!("given up after {loads} slow loads; {tried} tried in 4,000 prompts");
        assert!((2..30).contains(&tried), "{tried}");
        // The tier has become fast: the next trials show it.
        for _ in 0..2000 {
            if loaded(&learner) < computed(&learner, 544.0) {
                load(&mut learner, 1e-4);
            } else {
                compute(&mut learner, 1);
            }
        }
        assert!(loaded(&learner) < 0.6 * computed(&learner, 544.0), "{:?}", learner.coefficients());
    }

    /// Cases in which the recursive form fails: very many observations, features of very different size, changing times.
    #[test]
    fn a_long_life_changes_nothing() {
        let mut learner = Learner::default();
        let mut random = 9_u64;
        let mut unit = move || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 40) as f64 / (1_u64 << 24) as f64
        };
        for turn in 0..300_000 {
            let (own, queued) = (unit() * 100_000.0, if turn % 1000 < 500 { 0.0 } else { unit() * 1e6 });
            let seconds = 0.012 + 6e-5 * (own + queued) + 2e-10 * own * own;
            let features = [1.0, own + queued, own * own / 1e6, (unit() * 200.0).floor(), 0.0];
            learner.observe(features, seconds * (0.7 + 0.6 * unit()));
            assert!(learner.relative_error() < 0.6 || turn < 100, "turn {turn}: {learner:?}");
        }
        assert!((learner.coefficients().per_token / 6e-5 - 1.0).abs() < 0.2, "{:?}", learner.coefficients());
    }

    #[test]
    fn a_feature_that_never_varies_does_no_harm() {
        let mut learner = Learner::default();
        for _ in 0..100_000 {
            learner.observe([1.0, 500.0, 0.25, 0.0, 0.0], 0.1);
        }
        let coefficients = learner.coefficients();
        let predicted = coefficients.base + 500.0 * coefficients.per_token + 0.25 * coefficients.per_square;
        assert!((predicted - 0.1).abs() < 0.001, "{coefficients:?}");
        assert!(coefficients.to_array().iter().all(|weight| weight.is_finite()));
    }
}
