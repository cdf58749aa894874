//! A time learnt from measurements: a linear model, the spread around it, and notice of a change.
//!
//! * Rows are weighted by 1 / max(predicted, measured / 4)²: errors count relative to the time itself, and
//!   one stalled transfer cannot bend the line (its pull is bounded, as in Huber's estimator).
//! * The spread is a histogram of measured / predicted with four buckets an octave, with the same forgetting.
//! * The thing itself may change, or the model may have settled on a wrong split of latency and bandwidth.
//!   [`CHANGE_RUN`] measurements in a row on the same side and off by more than [`CHANGE_FACTOR`], or half of
//!   the last [`RECENT`] off by more than [`MISFIT_FACTOR`], mean that: all older rows are dropped and the
//!   latest are fitted afresh, each with equal relative weight. So a disk that becomes 100 times slower costs
//!   four measurements; independent normal noise with a log deviation of 0.2 triggers it by chance about once
//!   in 2 × 10⁶ (P(|z| > 2.03) / 2 to the fourth, on two sides).
//! * While there are at most [`RECENT`] rows, a misfit of half of them fits all afresh with equal relative weight: one slow first row (an
//!   engine compiles kernels with its first prompt) would otherwise set the weights of the rest.
//! * A measurement that was broken off says only "at least so long". It counts as twice that, as a retry doubles
//!   its timer; [`UNFINISHED_RUN`] of them scale the model to that and void all rows, the invented ones too.
//!
//! One thread owns a learner; an observation neither allocates nor makes a system call.

use crate::plan::least_squares::LeastSquares;

/// Memory: a row weighs 1/e after so many further rows.
const MEMORY_ROWS: f64 = 256.0;
/// Off by more than this is suspicious.
const CHANGE_FACTOR: f64 = 1.5;
/// So many suspicious rows in a row are a change.
const CHANGE_RUN: usize = 4;
/// So many unfinished measurements with no finished one between make everything known void.
const UNFINISHED_RUN: u32 = 3;
/// Rows that are kept for a fresh fit.
const RECENT: usize = 8;
/// Half of the recent rows off by more than this are a misfit.
const MISFIT_FACTOR: f64 = 2.0;
/// Measured times above this multiple of the predicted pull no harder.
const OUTLIER_FACTOR: f64 = 4.0;

const BUCKETS: usize = 64;
const BUCKETS_PER_OCTAVE: f64 = 4.0;
/// Bucket 16 starts at a ratio of 1; the range is 1/16 … 4096.
const BUCKET_OF_ONE: f64 = 16.0;

/// The model, its spread and the latest rows.
#[derive(Debug, Clone)]
pub(crate) struct Learner<const N: usize> {
    fit: LeastSquares<N>,
    spread: [f32; BUCKETS],
    recent: [([f64; N], f64); RECENT],
    /// Since the last fresh fit.
    rows_here: u64,
    /// Rows in a row that were too long (positive) or too short.
    run: i32,
    /// One bit for each recent row, the latest lowest: it did not fit at all.
    misfits: u8,
    unfinished: u32,
    changes: u64,
}

impl<const N: usize> Learner<N> {
    /// Starts from a guess.
    pub(crate) fn new(guess: [f64; N]) -> Self {
        Self {
            fit: LeastSquares::new(guess),
            spread: [0.0; BUCKETS],
            recent: [([0.0; N], 0.0); RECENT],
            rows_here: 0,
            run: 0,
            misfits: 0,
            unfinished: 0,
            changes: 0,
        }
    }

    /// The parameters now.
    pub(crate) fn parameters(&self) -> &[f64; N] {
        self.fit.parameters()
    }

    /// Measurements that the model rests on: since the last fresh fit.
    pub(crate) fn rows(&self) -> u64 {
        self.rows_here
    }

    /// Changes noticed so far.
    #[cfg(test)]
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// The expected seconds.
    pub(crate) fn predict(&self, features: &[f64; N]) -> f64 {
        self.fit.predict(features)
    }

    /// Measured / predicted at a quantile, at least 1.1 where the quantile is above the median; 2 before
    /// anything was measured.
    pub(crate) fn spread(&self, quantile: f64) -> f64 {
        let total: f32 = self.spread.iter().sum();
        if total <= 0.0 {
            return 2.0;
        }
        let mut left = f64::from(total) * quantile;
        for (bucket, weight) in self.spread.iter().enumerate() {
            left -= f64::from(*weight);
            if left <= 0.0 {
                let upper = ((bucket as f64 + 1.0 - BUCKET_OF_ONE) / BUCKETS_PER_OCTAVE).exp2();
                return if quantile > 0.5 { upper.max(1.1) } else { upper };
            }
        }
        (BUCKETS as f64 - BUCKET_OF_ONE).exp2()
    }

    /// One measurement. Times that are not positive and finite are dropped.
    pub(crate) fn observe(&mut self, features: [f64; N], seconds: f64) {
        if !(seconds.is_finite() && seconds > 0.0) {
            return;
        }
        self.unfinished = 0;
        self.rows_here += 1;
        self.recent.rotate_right(1);
        self.recent[0] = (features, seconds);
        let ratio = self.ratio(&features, seconds);
        self.run = match ratio {
            _ if ratio > CHANGE_FACTOR => self.run.max(0) + 1,
            _ if ratio < 1.0 / CHANGE_FACTOR => self.run.min(0) - 1,
            _ => 0,
        };
        self.misfits = self.misfits << 1 | u8::from(is_misfit(ratio));
        if self.rows_here == 1 {
            self.fit_afresh(1);
        } else if self.run.unsigned_abs() as usize >= CHANGE_RUN {
            self.fit_afresh(CHANGE_RUN);
            self.changes += 1;
        } else if self.misfits.count_ones() as usize >= RECENT / 2 {
            self.fit_afresh(RECENT.min(self.rows_here as usize));
            self.changes += 1;
        } else {
            self.add(&features, seconds);
            self.refit_few_rows();
        }
    }

    /// Fits afresh if there are few rows and half of them do not fit at all.
    fn refit_few_rows(&mut self) {
        let rows = self.rows_here as usize;
        if rows > RECENT {
            return;
        }
        let misfits = self.recent[..rows]
            .iter()
            .filter(|(features, seconds)| is_misfit(self.ratio(features, *seconds)))
            .count();
        if misfits * 2 >= rows {
            // A change that is under way is noticed as soon as without.
            let run = self.run;
            self.fit_afresh(rows);
            self.run = run;
        }
    }

    /// A measurement that was broken off after `seconds`.
    pub(crate) fn observe_unfinished(&mut self, features: [f64; N], seconds: f64) {
        if !(seconds.is_finite() && seconds > 0.0) {
            return;
        }
        self.unfinished += 1;
        if self.unfinished < UNFINISHED_RUN {
            self.add(&features, 2.0 * seconds);
            return;
        }
        self.fit.restart(self.ratio(&features, 2.0 * seconds), &features);
        self.spread = [0.0; BUCKETS];
        (self.run, self.misfits, self.unfinished, self.rows_here) = (0, 0, 0, 0);
        self.changes += 1;
    }

    fn add(&mut self, features: &[f64; N], seconds: f64) {
        let ratio = self.ratio(features, seconds);
        let scale = self.fit.predict(features).max(seconds / OUTLIER_FACTOR);
        self.fit.observe(features, seconds, 1.0 / (scale * scale), 1.0 - 1.0 / MEMORY_ROWS);
        self.note_spread(ratio);
    }

    /// From the latest rows alone. The spread starts anew with their residuals.
    fn fit_afresh(&mut self, rows: usize) {
        let (features, seconds) = self.recent[0];
        self.fit.restart(self.ratio(&features, seconds), &features);
        self.spread = [0.0; BUCKETS];
        self.run = 0;
        self.misfits = 0;
        let recent = self.recent;
        for (features, seconds) in recent[..rows].iter().rev() {
            self.fit.observe(features, *seconds, 1.0 / (seconds * seconds), 1.0);
        }
        for (features, seconds) in &recent[..rows] {
            self.note_spread(self.ratio(features, *seconds));
        }
        self.rows_here = rows as u64;
    }

    fn ratio(&self, features: &[f64; N], seconds: f64) -> f64 {
        seconds / self.fit.predict(features).max(f64::MIN_POSITIVE)
    }

    fn note_spread(&mut self, ratio: f64) {
        let keep = (1.0 - 1.0 / MEMORY_ROWS) as f32;
        let bucket = (ratio.log2() * BUCKETS_PER_OCTAVE + BUCKET_OF_ONE).clamp(0.0, BUCKETS as f64 - 1.0);
        for weight in &mut self.spread {
            *weight *= keep;
        }
        self.spread[bucket as usize] += 1.0;
    }
}

fn is_misfit(ratio: f64) -> bool {
    !(1.0 / MISFIT_FACTOR..=MISFIT_FACTOR).contains(&ratio)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::testing::Random;

    #[test]
    fn a_first_row_that_was_far_too_long_does_not_decide_the_next_ones() {
        // Seconds to compute so many tokens: the first prompt compiled kernels.
        let mut learner = Learner::new([5e-3, 5e-5]);
        for (tokens, seconds) in [(16.0, 3.1), (16.0, 0.018), (1920.0, 0.68), (1920.0, 0.55)] {
            learner.observe([1.0, tokens], seconds);
        }
        let (short, long) = (learner.predict(&[1.0, 1.0]), learner.predict(&[1.0, 1920.0]));
        assert!(short < 0.03 && (0.5..0.7).contains(&long), "{short} {long}");
    }

    #[test]
    fn first_rows_that_were_far_too_short_do_not_hide_a_change() {
        for fast in 1..=3 {
            let mut learner = Learner::new([5e-3]);
            (0..fast).for_each(|_| learner.observe([1.0], 0.01));
            (0..4).for_each(|_| learner.observe([1.0], 1.0));
            let now = learner.predict(&[1.0]);
            assert!((0.9..1.1).contains(&now), "{now} after {fast} short ones");
        }
    }

    #[test]
    fn one_stall_does_not_move_the_line_but_a_change_does() {
        let mut random = Random::new(3);
        let mut learner = Learner::new([1.0, 1.0]);
        let row = |random: &mut Random| [1.0, 1e6 * (1.0 + 99.0 * random.uniform())];
        let truth = |row: &[f64; 2]| 1e-3 + row[1] * 1e-9;
        for _ in 0..200 {
            let row = row(&mut random);
            learner.observe(row, truth(&row) * random.noise(0.1));
        }
        let probe = [1.0, 5e7];
        assert!((learner.predict(&probe) / truth(&probe) - 1.0).abs() < 0.03);
        learner.observe(probe, 100.0 * truth(&probe));
        assert!((learner.predict(&probe) / truth(&probe) - 1.0).abs() < 0.05);
        assert_eq!(learner.changes(), 0);
        for _ in 0..4 {
            let row = row(&mut random);
            learner.observe(row, 100.0 * truth(&row) * random.noise(0.1));
        }
        assert!((learner.predict(&probe) / truth(&probe) / 100.0 - 1.0).abs() < 0.2);
        assert_eq!(learner.changes(), 1);
    }

    #[test]
    fn quantiles_of_the_spread_follow_the_noise() {
        let mut random = Random::new(4);
        let mut learner = Learner::new([1.0]);
        for _ in 0..2000 {
            learner.observe([1.0], random.noise(0.3));
        }
        // exp(0.3 × 2.33) = 2.01; a bucket is a factor of 1.19, and 256 rows see the 99 % point coarsely.
        let high = learner.spread(0.99);
        assert!((1.4..3.2).contains(&high), "{high}");
        assert!((0.8..1.25).contains(&learner.spread(0.5)), "{}", learner.spread(0.5));
    }

    #[test]
    fn rows_without_bytes_change_the_latency_alone() {
        let bandwidth = |learner: &Learner<2>| learner.parameters()[1];
        let mut learner = Learner::new([1e-3, 2e-9]);
        (0..20).for_each(|_| learner.observe([1.0, 0.0], 1e-4));
        assert!((learner.predict(&[1.0, 0.0]) / 1e-4 - 1.0).abs() < 0.01);
        assert!((bandwidth(&learner) / 2e-9 - 1.0).abs() < 0.01, "{}", bandwidth(&learner));
        (0..3).for_each(|_| learner.observe_unfinished([1.0, 0.0], 1.0));
        assert!((learner.predict(&[1.0, 0.0]) / 2.0 - 1.0).abs() < 0.01);
        assert!((bandwidth(&learner) / 2e-9 - 1.0).abs() < 0.01, "{}", bandwidth(&learner));
    }

    #[test]
    fn nonsense_is_dropped() {
        let mut learner = Learner::new([1.0, 1e-9]);
        for seconds in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            learner.observe([1.0, 1.0], seconds);
        }
        assert_eq!(learner.rows(), 0);
        for seconds in [1e-300, 1e300, 1e-300, 1e300, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0] {
            learner.observe([1.0, 1e18], seconds);
            assert!(learner.parameters().iter().all(|value| value.is_finite() && *value >= 0.0));
        }
    }
}
