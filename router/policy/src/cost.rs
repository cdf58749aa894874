//! Cost of a request on a worker: two models behind one trait. Lower is better; each model has its own unit.

use crate::candidate::{Candidate, Request, TIERS};
use crate::learn::{FEATURES, TimeCoefficients};

/// A cost and its parts.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    /// Total, by which candidates are compared.
    pub total: f64,
    /// Work queued at the worker.
    pub queue: f64,
    /// Computing the tokens of the request that are not cached.
    pub prefill: f64,
    /// Loading blocks from lower tiers.
    pub onboard: f64,
    /// Moving blocks to the decode worker.
    pub transfer: f64,
    /// Share of the requests that are decoding at the worker.
    pub decode: f64,
}

/// A model of the cost of a request on a worker.
pub trait CostModel {
    /// Cost of the request on the candidate.
    fn cost(&self, request: &Request, candidate: &Candidate) -> Cost;
}

/// Cost in blocks: blocks to be computed, weighted, plus queued and decoding blocks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockCost {
    /// Cost of a block to compute, relative to a block being decoded.
    pub prefill: f64,
    /// Share of a block's computing cost that a cached block in each tier saves; 1: all of it.
    pub credit: [f64; TIERS],
    /// Cost of each request on the worker, in blocks.
    pub request: f64,
}

impl Default for BlockCost {
    fn default() -> Self {
        Self { prefill: 1.0, credit: [1.0, 0.75, 0.5, 0.25], request: 0.0 }
    }
}

impl CostModel for BlockCost {
    #[inline]
    fn cost(&self, request: &Request, candidate: &Candidate) -> Cost {
        let saved = candidate.saved_blocks(request);
        let block_tokens = f64::from(request.block_tokens.max(1));
        // The last block may be partial; the part that a lower tier does not save is the cost of onboarding.
        let blocks = f64::from(request.tokens) / block_tokens;
        let total_saved: f64 = saved.iter().map(|&blocks| f64::from(blocks)).sum();
        let onboard: f64 =
            saved.iter().zip(self.credit).map(|(&blocks, credit)| f64::from(blocks) * (1.0 - credit)).sum();
        let prefill = self.prefill * (blocks - total_saved);
        let onboard = self.prefill * onboard;
        let queue = self.prefill * f64::from(candidate.queued_tokens) / block_tokens;
        let decode = f64::from(candidate.decoding_blocks) + self.request * f64::from(candidate.requests);
        Cost { total: prefill + onboard + queue + decode, queue, prefill, onboard, transfer: 0.0, decode }
    }
}

/// Cost in seconds: the predicted time to the first token, from the learned coefficients of each worker.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PredictedTime;

/// Features of a request on a worker, to which the learned coefficients are applied.
#[must_use]
#[inline]
pub fn features(request: &Request, candidate: &Candidate) -> [f64; FEATURES] {
    let saved = candidate.saved_blocks(request);
    let onboarded: u32 = saved[1..].iter().sum();
    let own = f64::from(request.tokens - (saved[0] + onboarded) * request.block_tokens);
    [
        1.0,
        own + f64::from(candidate.queued_tokens),
        own * f64::from(request.tokens) / 1e6,
        f64::from(candidate.requests),
        f64::from(onboarded),
    ]
}

impl CostModel for PredictedTime {
    #[inline]
    fn cost(&self, request: &Request, candidate: &Candidate) -> Cost {
        let TimeCoefficients { base, per_token, per_square, per_decode, per_onboard } =
            candidate.coefficients;
        let [_, tokens, square, decoding, onboarded] = features(request, candidate);
        let queue = per_token * f64::from(candidate.queued_tokens);
        let prefill = base + per_token * (tokens - f64::from(candidate.queued_tokens)) + per_square * square;
        let (onboard, decode) = (per_onboard * onboarded, per_decode * decoding);
        let transfer = candidate.transfer_seconds;
        Cost {
            total: queue + prefill + onboard + transfer + decode,
            queue,
            prefill,
            onboard,
            transfer,
            decode,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten whole blocks and one token.
    const REQUEST: Request = Request { tokens: 161, block_tokens: 16, session: None };
    /// Three blocks are on the device, two more in host memory, one more on disk.
    const CANDIDATE: Candidate = Candidate {
        identity: 7,
        leading: [3, 5, 6, 6],
        queued_tokens: 320,
        decoding_blocks: 40,
        requests: 4,
        transfer_seconds: 0.25,
        is_cold: false,
        coefficients: TimeCoefficients {
            base: 0.5,
            per_token: 0.25,
            per_square: 100.0,
            per_decode: 2.0,
            per_onboard: 4.0,
        },
    };

    #[test]
    fn a_cost_in_blocks_is_the_sum_of_its_parts() {
        let model = BlockCost { prefill: 2.0, credit: [1.0, 0.75, 0.5, 0.25], request: 3.0 };
        // Of 10.0625 blocks six are saved; of those two cost a quarter and one costs a half.
        let wanted = Cost {
            total: 8.125 + 2.0 + 40.0 + 52.0,
            queue: 40.0,
            prefill: 8.125,
            onboard: 2.0,
            transfer: 0.0,
            decode: 52.0,
        };
        assert_eq!(model.cost(&REQUEST, &CANDIDATE), wanted);
    }

    #[test]
    fn a_predicted_time_is_the_sum_of_its_parts() {
        // 65 of 161 tokens are to be computed.
        let square = 65.0 * 161.0 / 1e6;
        assert_eq!(features(&REQUEST, &CANDIDATE), [1.0, 385.0, square, 4.0, 3.0]);
        let cost = PredictedTime.cost(&REQUEST, &CANDIDATE);
        let prefill = 0.5 + 0.25 * 65.0 + 100.0 * square;
        let parts = [
            (cost.queue, 80.0),
            (cost.prefill, prefill),
            (cost.onboard, 12.0),
            (cost.transfer, 0.25),
            (cost.decode, 8.0),
            (cost.total, 80.0 + prefill + 12.0 + 0.25 + 8.0),
        ];
        for (number, (part, wanted)) in parts.into_iter().enumerate() {
            assert!((part - wanted).abs() < 1e-9, "part {number}: {part}, not {wanted}");
        }
    }
}
