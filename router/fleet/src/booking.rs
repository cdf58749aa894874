//! Accounting of a request against its workers from the decision to its end, and the comparison of predicted with reported cached tokens.

use std::sync::atomic::Ordering;
use std::time::Instant;

use router_engines::dialect::Dialect;
use router_policy::FEATURES;

use crate::route::{Route, RouteRequest};
use crate::worker::RankRef;

/// A leg of a request; without a hand-off there is the decode leg alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leg {
    Prefill,
    Decode,
}

/// Prediction of the cached tokens that an engine should report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Expected {
    prompt_tokens: usize,
    cached_tokens: usize,
    /// Upper bound of these tokens that are in the holder's own tiers.
    own_tokens: usize,
    /// The leg whose answer reports them.
    reported_by: Leg,
    /// The leg whose worker holds them, according to the index.
    held_by: Leg,
}

impl Expected {
    /// `found`: tokens that the worker that computes the prompt should find in its cache; `held`: tokens that the decode worker
    /// holds. `None` when there is nothing to compare.
    pub(crate) fn new(route: &Route, wanted: &RouteRequest<'_>, found: usize, held: usize) -> Option<Self> {
        if !wanted.tokens_are_exact {
            return None;
        }
        let prompt_tokens = wanted.tokens.len();
        match &route.prefill {
            None => {
                let leg = Leg::Decode;
                Some(Self {
                    prompt_tokens,
                    cached_tokens: found,
                    own_tokens: found,
                    reported_by: leg,
                    held_by: leg,
                })
            }
            // Several prompts or choices, or a prefill that failed before: the sum of the counts depends on the engine.
            Some(_) if wanted.without_prefill => None,
            Some(prefill) => {
                let dialect = prefill.run.description.engine.dialect();
                Some(Self::of_handoff(dialect, prompt_tokens, found, held))
            }
        }
    }

    fn of_handoff(dialect: &dyn Dialect, prompt_tokens: usize, found: usize, held: usize) -> Self {
        if !dialect.decode_reports_both() {
            let leg = Leg::Prefill;
            return Self {
                prompt_tokens,
                cached_tokens: found,
                own_tokens: found,
                reported_by: leg,
                held_by: leg,
            };
        }
        let held_by = if held > found { Leg::Decode } else { Leg::Prefill };
        let cached_tokens = found.max(held);
        Self { prompt_tokens, cached_tokens, own_tokens: cached_tokens, reported_by: Leg::Decode, held_by }
    }

    /// Sets the numbers of tokens that the computing and the decode worker hold in their own tiers.
    pub(crate) fn of_own(mut self, computing: usize, decode: usize) -> Self {
        self.own_tokens = match self.held_by {
            Leg::Prefill => computing,
            Leg::Decode => decode,
        };
        self
    }
}

/// Counts a request against its workers until it is dropped.
pub struct Booking {
    /// The worker that generates.
    pub decode: RankRef,
    /// The worker that computes the prompt, if it is not the decode worker.
    prefill: Option<RankRef>,
    decoding_blocks: u32,
    queued_tokens: u32,
    features: [f64; FEATURES],
    predicted_seconds: f64,
    moved_blocks: u32,
    started: Instant,
    is_prefilling: bool,
    is_served_elsewhere: bool,
    /// The prediction; taken by the first comparison.
    expected: Option<Expected>,
}

impl Booking {
    pub(crate) fn new(route: &Route, features: [f64; FEATURES], expected: Option<Expected>) -> Self {
        let this = Self {
            decode: route.decode.clone(),
            prefill: route.prefill.clone(),
            decoding_blocks: route.blocks,
            queued_tokens: route.uncached_tokens as u32,
            features,
            predicted_seconds: route.predicted.as_secs_f64(),
            moved_blocks: route.moved_blocks,
            started: Instant::now(),
            is_prefilling: true,
            is_served_elsewhere: false,
            expected,
        };
        let decode = &this.decode.run.load.own;
        decode.requests.fetch_add(1, Ordering::Relaxed);
        decode.decoding_blocks.fetch_add(this.decoding_blocks, Ordering::Relaxed);
        this.computing().run.load.own.queued_tokens.fetch_add(this.queued_tokens, Ordering::Relaxed);
        if let Some(prefill) = &this.prefill {
            prefill.run.load.own.requests.fetch_add(1, Ordering::Relaxed);
            prefill.run.reorder();
        }
        this.decode.run.changed();
        this
    }

    fn computing(&self) -> &RankRef {
        self.prefill.as_ref().unwrap_or(&self.decode)
    }

    /// Records that a proxy had another endpoint serve the request: its answer is not evidence of this worker's cache or times.
    pub fn served_elsewhere(&mut self) {
        self.is_served_elsewhere = true;
        self.expected = None;
        self.prompt_done();
    }

    /// Closes the decode worker's breaker after its answer, unless a proxy had another endpoint serve the request.
    pub fn decode_succeeded(&self) {
        if !self.is_served_elsewhere {
            self.decode.worker.breaker.succeeded();
        }
    }

    /// Whether a proxy had another endpoint serve the request.
    #[must_use]
    pub fn is_served_elsewhere(&self) -> bool {
        self.is_served_elsewhere
    }

    /// Compares the number of cached prompt tokens that the decode worker reports.
    pub fn cached_tokens(&mut self, reported: usize) {
        self.compare(Leg::Decode, reported);
    }

    /// Compares the number of cached prompt tokens that the prefill worker reports.
    pub fn prefill_cached_tokens(&mut self, reported: usize) {
        self.compare(Leg::Prefill, reported);
    }

    fn compare(&mut self, reported_by: Leg, reported: usize) {
        let Some(expected) = self.expected.take_if(|expected| expected.reported_by == reported_by) else {
            return;
        };
        let holder = match expected.held_by {
            Leg::Prefill => self.computing(),
            Leg::Decode => &self.decode,
        };
        let (run, predictions) = (&holder.run, &holder.run.load.predictions);
        if predictions.compare(expected.prompt_tokens, expected.cached_tokens, expected.own_tokens, reported)
            && run.has_feed
        {
            predictions.resets.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                worker = holder.worker.name,
                "the engine reports far fewer cached tokens than the index predicted: its blocks are indexed anew"
            );
            run.resync.notify_one();
        }
    }

    /// Removes the prompt from the queued tokens. Its time is not exact, and is not learned from.
    pub fn prompt_done(&mut self) {
        if std::mem::replace(&mut self.is_prefilling, false) {
            let run = &self.computing().run;
            run.load.own.queued_tokens.fetch_sub(self.queued_tokens, Ordering::Relaxed);
            run.reorder();
            self.decode.run.changed();
        }
    }

    /// Records the first token: the prompt is no longer queued, and its time is learned from.
    pub fn first_token(&mut self) {
        if !std::mem::replace(&mut self.is_prefilling, false) {
            return;
        }
        let run = &self.computing().run;
        let computing = &run.load;
        computing.own.queued_tokens.fetch_sub(self.queued_tokens, Ordering::Relaxed);
        run.reorder();
        let seconds = self.started.elapsed().as_secs_f64();
        let transfer = self.decode.run.load.transfer_per_block() * f64::from(self.moved_blocks);
        if self.moved_blocks > 0 {
            // Time that computing does not explain is attributed to the transfer.
            let without = self.predicted_seconds - transfer;
            self.decode.run.load.learn_transfer((seconds - without).max(0.0) / f64::from(self.moved_blocks));
        }
        computing.learn(
            &self.decode.worker.pool.learned_coefficients,
            self.features,
            (seconds - transfer).max(seconds * 0.1),
        );
        self.decode.run.changed();
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        if self.is_prefilling {
            self.computing().run.load.own.queued_tokens.fetch_sub(self.queued_tokens, Ordering::Relaxed);
        }
        let decode = &self.decode.run.load.own;
        decode.requests.fetch_sub(1, Ordering::Relaxed);
        decode.decoding_blocks.fetch_sub(self.decoding_blocks, Ordering::Relaxed);
        if let Some(prefill) = &self.prefill {
            prefill.run.load.own.requests.fetch_sub(1, Ordering::Relaxed);
            prefill.run.reorder();
        }
        self.decode.run.changed();
    }
}

#[cfg(test)]
mod tests {
    use router_engines::dialect::Engine;

    use super::*;

    #[test]
    fn a_hand_off_is_compared_where_its_count_is_defined() {
        let expected = |engine: Engine, found, held| {
            let expected = Expected::of_handoff(engine.dialect(), 100, found, held);
            (expected.cached_tokens, expected.reported_by, expected.held_by)
        };
        // SGLang's decode worker reports the larger of both counts.
        assert_eq!(expected(Engine::Sglang, 64, 0), (64, Leg::Decode, Leg::Prefill));
        assert_eq!(expected(Engine::Sglang, 64, 64), (64, Leg::Decode, Leg::Prefill));
        assert_eq!(expected(Engine::Sglang, 64, 80), (80, Leg::Decode, Leg::Decode));
        // With other engines the prefill worker's own report counts.
        for engine in [Engine::Native, Engine::Vllm, Engine::TensorRtLlm] {
            assert_eq!(expected(engine, 64, 80), (64, Leg::Prefill, Leg::Prefill));
        }
    }
}
