//! Outstanding work of a worker, and its learned factor, as far as this gateway and its peers know.
//!
//! Counters are plain atomics: a decision reads them without lock, and books its choice in them before the next
//! decision is made. Learned times are copied into atomics too; the pool's learner itself is behind a lock that only
//! first tokens take. A first token that finds it taken changes only the factor of its rank.

use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

use router_policy::{FEATURES, Factor, Learner, TimeCoefficients};

/// A worker with fewer first tokens than this is cold.
const WARM_AFTER: u64 = 16;
/// Share of a new value in a running mean.
const NEW_SHARE: f64 = 1.0 / 16.0;

/// Requests, tokens and blocks of one worker.
#[derive(Debug, Default)]
pub struct Counts {
    /// Requests under way.
    pub requests: AtomicU32,
    /// Tokens of prompts that are still to be computed.
    pub queued_tokens: AtomicU32,
    /// Blocks of sequences that are being generated.
    pub decoding_blocks: AtomicU32,
}

impl Counts {
    /// As plain numbers: requests, queued tokens, decoding blocks.
    pub fn get(&self) -> [u32; 3] {
        [&self.requests, &self.queued_tokens, &self.decoding_blocks]
            .map(|count| count.load(Ordering::Relaxed))
    }

    /// Replaces all three.
    pub fn set(&self, counts: [u32; 3]) {
        for (cell, count) in
            [&self.requests, &self.queued_tokens, &self.decoding_blocks].into_iter().zip(counts)
        {
            cell.store(count, Ordering::Relaxed);
        }
    }
}

/// Coefficients of the time to the first token in a pool, learned from all its workers.
#[derive(Debug)]
pub struct LearnedCoefficients {
    learner: Mutex<Learner>,
    /// A copy for decisions.
    coefficients: [AtomicU64; FEATURES],
    /// [`TimeCoefficients::per_onboard`] as learned; decisions may use a lower value.
    learned_onboard: AtomicU64,
}

impl Default for LearnedCoefficients {
    fn default() -> Self {
        let learner = Learner::default();
        let coefficients = learner.coefficients().to_array().map(|value| AtomicU64::new(value.to_bits()));
        let learned_onboard = AtomicU64::new(learner.learned().per_onboard.to_bits());
        Self { learner: Mutex::new(learner), coefficients, learned_onboard }
    }
}

impl LearnedCoefficients {
    /// The learned coefficients.
    fn learned(&self) -> TimeCoefficients {
        let per_onboard = f64::from_bits(self.learned_onboard.load(Ordering::Relaxed));
        TimeCoefficients { per_onboard, ..self.get() }
    }

    /// The coefficients to choose by.
    pub fn get(&self) -> TimeCoefficients {
        TimeCoefficients::from_array(
            [0, 1, 2, 3, 4].map(|at: usize| f64::from_bits(self.coefficients[at].load(Ordering::Relaxed))),
        )
    }

    fn learn(&self, features: [f64; FEATURES], seconds: f64) {
        // Another thread holds the learner: this observation is lost.
        let Ok(mut learner) = self.learner.try_lock() else { return };
        learner.observe(features, seconds);
        for (cell, value) in self.coefficients.iter().zip(learner.coefficients().to_array()) {
            cell.store(value.to_bits(), Ordering::Relaxed);
        }
        self.learned_onboard.store(learner.learned().per_onboard.to_bits(), Ordering::Relaxed);
    }

    /// Mean relative error of the predicted time to the first token.
    pub fn prediction_error(&self) -> Option<f64> {
        self.learner.try_lock().ok().map(|learner| learner.relative_error())
    }
}

/// Outstanding work and learned factor of one rank. The part that decisions read is one cache line.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Load {
    /// Work sent by this gateway.
    pub own: Counts,
    /// Work sent by peers, as they report.
    pub peers: Counts,
    /// Time relative to that learned for the pool (2.0: twice as slow), as the bits of an `f64`.
    factor: AtomicU64,
    observations: AtomicU64,
    /// Seconds to move a block to this worker, as the bits of an `f64`.
    transfer_per_block: AtomicU64,
    /// Comparison of reported with predicted cached tokens.
    pub predictions: PredictionAccuracy,
}

impl Default for Load {
    fn default() -> Self {
        Self {
            own: Counts::default(),
            peers: Counts::default(),
            factor: AtomicU64::new(1.0_f64.to_bits()),
            observations: AtomicU64::new(0),
            transfer_per_block: AtomicU64::new(0),
            predictions: PredictionAccuracy::default(),
        }
    }
}

impl Load {
    /// Bytes of the part that decisions read.
    pub(crate) const HOT_BYTES: usize = std::mem::offset_of!(Self, predictions);

    /// Requests, queued tokens and decoding blocks, from this gateway and its peers.
    pub fn counts(&self) -> [u32; 3] {
        let (own, peers) = (self.own.get(), self.peers.get());
        [0, 1, 2].map(|at| own[at].saturating_add(peers[at]))
    }

    /// Time relative to that learned for the pool (2.0: twice as slow).
    pub fn factor(&self) -> f64 {
        f64::from_bits(self.factor.load(Ordering::Relaxed))
    }

    /// Whether the worker has served fewer first tokens than its factor can be judged by.
    pub fn is_cold(&self) -> bool {
        self.observations.load(Ordering::Relaxed) < WARM_AFTER
    }

    /// Seconds to move a block to the worker.
    pub fn transfer_per_block(&self) -> f64 {
        f64::from_bits(self.transfer_per_block.load(Ordering::Relaxed))
    }

    /// Learns from a first token that came `seconds` after a request with these features.
    pub fn learn(&self, learned_coefficients: &LearnedCoefficients, features: [f64; FEATURES], seconds: f64) {
        // A lost race loses one observation.
        let mut factor = Factor::from_parts(self.factor(), self.observations.load(Ordering::Relaxed));
        factor.observe(learned_coefficients.learned().seconds(features), seconds);
        self.factor.store(factor.value().to_bits(), Ordering::Relaxed);
        self.observations.store(factor.observations(), Ordering::Relaxed);
        learned_coefficients.learn(features, seconds / factor.value());
    }

    /// Learns from a transfer to this worker that took this time per block.
    pub fn learn_transfer(&self, seconds_per_block: f64) {
        let before = self.transfer_per_block();
        // A lost race loses one value.
        self.transfer_per_block
            .store((before + (seconds_per_block - before) * NEW_SHARE).max(0.0).to_bits(), Ordering::Relaxed);
    }
}

/// Predicted against reported cached tokens.
#[derive(Debug, Default)]
pub struct PredictionAccuracy {
    /// Requests whose cached tokens were compared.
    pub requests: AtomicU64,
    /// Requests among these that were predicted to the token.
    pub exact: AtomicU64,
    /// Cached tokens that were predicted.
    pub predicted_tokens: AtomicU64,
    /// Cached tokens that the engine reported.
    pub reported_tokens: AtomicU64,
    /// Times that the worker's blocks were forgotten because predictions had drifted.
    pub resets: AtomicU64,
    /// Running mean of predicted tokens that were not cached, in thousandths of the prompt.
    drift: AtomicI64,
    since_reset: AtomicU64,
}

/// Largest mean `drift` before the worker's blocks are forgotten: a quarter of a prompt.
const DRIFT_MAX: i64 = 250;
/// Requests before the mean is significant.
const DRIFT_AFTER: u64 = 32;

impl PredictionAccuracy {
    /// Compares one request; true when the index has drifted so far that the worker's part must be rebuilt. `own`: predicted
    /// tokens in the worker's own tiers; blocks in shared stores do not count against the worker's part.
    pub fn compare(&self, prompt: usize, predicted: usize, own: usize, reported: usize) -> bool {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.exact.fetch_add(u64::from(predicted == reported), Ordering::Relaxed);
        self.predicted_tokens.fetch_add(predicted as u64, Ordering::Relaxed);
        self.reported_tokens.fetch_add(reported as u64, Ordering::Relaxed);
        // More cached tokens than predicted are no error: blocks were computed or brought back in the meantime.
        let missing = (predicted.min(own).saturating_sub(reported) * 1000 / prompt.max(1)) as i64;
        let before = self.drift.load(Ordering::Relaxed);
        let drift = before + (missing * 16 - before) / 16;
        self.drift.store(drift, Ordering::Relaxed);
        let since = self.since_reset.fetch_add(1, Ordering::Relaxed);
        if since < DRIFT_AFTER || drift / 16 < DRIFT_MAX {
            return false;
        }
        self.drift.store(0, Ordering::Relaxed);
        self.since_reset.store(0, Ordering::Relaxed);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_broken_promises_are_drift() {
        let predictions = PredictionAccuracy::default();
        assert!((0..1000).all(|_| !predictions.compare(1000, 200, 200, 900)), "more than promised");
        assert!((0..1000).all(|_| !predictions.compare(1000, 900, 100, 100)), "the stores' promise");
        assert!((0..1000).all(|number| !predictions.compare(
            1000,
            500,
            500,
            if number % 10 == 0 { 0 } else { 500 }
        )));
        let reset = (0..1000).position(|_| predictions.compare(1000, 800, 800, 0));
        assert!(reset.is_some_and(|after| after < 40), "{reset:?}");
        assert!(
            (0..DRIFT_AFTER).all(|_| !predictions.compare(1000, 800, 800, 0)),
            "a new start is given time"
        );
    }
}
