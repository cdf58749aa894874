//! Step times of an engine, learned from the gateways' measurements: mean inter-token latencies and mean
//! times to first token.
//!
//! A fleet runs at nearly one operating point for long periods, which does not separate an engine's five
//! terms. So two scales are learned first ([`Factor`]): one of the decode terms, from gaps at the mean number
//! of running requests and their KV, and one of the prefill terms, from times to first token. The shape of
//! the decode terms is learned only as far as the operating point moves ([`LeastSquares`] around the
//! configured shape).
//!
//! ```text
//! gap  = decode step ÷ (1 − u)                      u: share of the time that prompts take
//! TTFT = 1½ decode steps + P · (1 + c · u / 2(1 − u))   P: mean seconds of a prompt, u = P · prompts/s of a worker,
//!                                                       c: mean of their squares over the square of their mean
//! ```
//!
//! The first formula follows from tokens that wait while a chunk of a prompt is computed; the second is a
//! request that arrives in the middle of a step, and the queue of an M/G/1 station (Pollaczek and Khinchine;
//! Kleinrock, Queueing Systems I, ch. 5).

use router_policy::{Factor, LeastSquares};

use crate::capacity::Lengths;
use crate::engine::{Engine, StepTime, WorkerRole};
use crate::planner::Observation;

/// Ticks in which the scale of the decode terms is learned. The scale is then fixed: a scale that continued
/// to adapt would explain each operating point by itself, and leave nothing to the shape.
const SCALE_OBSERVATIONS: u64 = 64;
/// Weight of the configured shape, in observations of a whole step's time.
const SHAPE_WEIGHT: f64 = 1.0;
/// Factor per tick of an observation's weight: half of the weight is lost after 140 ticks.
const FORGETTING: f64 = 0.995;
/// Share of time spent on prompts above which a tick is ignored: queueing then outweighs the work.
const PROMPT_SHARE_MAX: f64 = 0.6;
/// Duration of a tick, in seconds, above which its means are ignored.
const TICK_MAX: f64 = 600.0;
/// Bisection steps for the seconds of a prompt.
const HALVINGS: usize = 30;

#[derive(Debug)]
pub(crate) struct LearnedEngine {
    start: Engine,
    decode: Factor,
    prefill: Factor,
    /// Shares of the decode terms, relative to their scale.
    shape: LeastSquares<3>,
}

impl LearnedEngine {
    pub(crate) fn new(start: Engine) -> Self {
        Self {
            start,
            decode: Factor::default(),
            prefill: Factor::default(),
            shape: LeastSquares::new([1.0; 3], SHAPE_WEIGHT, FORGETTING),
        }
    }

    /// Adds a tick's measurements of workers that serve requests of these lengths.
    pub(crate) fn observe(&mut self, role: WorkerRole, lengths: &[Lengths], seen: &Observation) {
        let ready = f64::from(seen.workers.ready);
        if ready <= 0.0 || lengths.is_empty() || !(seen.seconds > 0.0 && seen.seconds <= TICK_MAX) {
            return;
        }
        let rate = seen.arrivals / seen.seconds / ready;
        let share = if role == WorkerRole::Decode { 0.0 } else { rate * self.prompt_seconds(lengths) };
        if let Some(itl) = seen.itl_mean.filter(|_| role != WorkerRole::Prefill && share < PROMPT_SHARE_MAX) {
            self.observe_decode(seen.decoding / ready, seen.kv_tokens / ready, itl * (1.0 - share));
        }
        if let Some(ttft) = seen.ttft_mean.filter(|_| role != WorkerRole::Decode && seen.queued <= 0.0) {
            let decoding = if role == WorkerRole::Prefill { 0.0 } else { 1.0 / ready };
            let step = self.step().decode(seen.decoding * decoding, seen.kv_tokens * decoding);
            self.observe_prefill(lengths, ttft - 1.5 * step, rate);
        }
    }

    fn observe_decode(&mut self, requests: f64, kv_tokens: f64, seconds: f64) {
        let is_sane = |value: f64| value.is_finite() && value > 0.0;
        if !(is_sane(requests) && is_sane(kv_tokens) && is_sane(seconds)) {
            return;
        }
        let start = &self.start.step;
        if self.decode.observations() < SCALE_OBSERVATIONS {
            self.decode.observe(start.decode(requests, kv_tokens), seconds);
        }
        let scale = self.decode.value() / seconds;
        let shares = [start.base, start.per_request * requests, start.per_kv_token * kv_tokens];
        self.shape.observe(shares.map(|share| share * scale), 1.0);
    }

    /// Adds the mean `seconds` that prompts of these lengths took, queueing included, at `rate` prompts per
    /// second.
    fn observe_prefill(&mut self, lengths: &[Lengths], seconds: f64, rate: f64) {
        if !(seconds.is_finite() && seconds > 0.0 && rate.is_finite() && rate >= 0.0) {
            return;
        }
        let spread = spread(&self.start.step, lengths);
        let with_queue = |prompt: f64| {
            let share = prompt * rate;
            if share < 1.0 { prompt * (1.0 + spread * share / (2.0 * (1.0 - share))) } else { f64::INFINITY }
        };
        let (mut low, mut high) = (0.0, seconds);
        for _ in 0..HALVINGS {
            let middle = (low + high) / 2.0;
            if with_queue(middle) < seconds {
                low = middle;
            } else {
                high = middle;
            }
        }
        if low * rate < PROMPT_SHARE_MAX {
            self.prefill.observe(mean_prefill(&self.start.step, lengths), low);
        }
    }

    /// Returns the mean seconds of a prompt.
    fn prompt_seconds(&self, lengths: &[Lengths]) -> f64 {
        mean_prefill(&self.start.step, lengths) * self.prefill_scale()
    }

    /// Before the first measured prompt, prompts are assumed to be slower by the same factor as decoding.
    fn prefill_scale(&self) -> f64 {
        if self.prefill.observations() > 0 { self.prefill.value() } else { self.decode.value() }
    }

    /// Returns the step times as learned so far.
    pub(crate) fn step(&self) -> StepTime {
        let start = &self.start.step;
        let (decode, prefill) = (self.decode.value(), self.prefill_scale());
        let [base, per_request, per_kv_token] = self.shape.solve().unwrap_or([1.0; 3]);
        StepTime {
            base: start.base * decode * base,
            per_request: start.per_request * decode * per_request,
            per_kv_token: start.per_kv_token * decode * per_kv_token,
            per_prompt_token: start.per_prompt_token * prefill,
            per_prompt_square: start.per_prompt_square * prefill,
        }
    }

    /// Returns the engine as learned so far.
    pub(crate) fn engine(&self) -> Engine {
        Engine { step: self.step(), ..self.start }
    }
}

fn mean_prefill(step: &StepTime, lengths: &[Lengths]) -> f64 {
    let all: f64 = lengths.iter().map(|lengths| step.prefill(lengths.cached, lengths.prompt)).sum();
    all / lengths.len().max(1) as f64
}

/// Returns the mean square of the prompts' seconds over the square of their mean: 1 if all are equal.
fn spread(step: &StepTime, lengths: &[Lengths]) -> f64 {
    let squares: f64 =
        lengths.iter().map(|lengths| step.prefill(lengths.cached, lengths.prompt).powi(2)).sum();
    squares / lengths.len().max(1) as f64 / mean_prefill(step, lengths).powi(2).max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::WorkerCounts;

    const LENGTHS: Lengths = Lengths { prompt: 4000.0, cached: 0.0, output: 500.0 };

    fn seen(truth: &StepTime, requests: f64) -> Observation {
        let (kv_tokens, seconds) = (requests * 4250.0, 5.0);
        let prompt = truth.prefill(0.0, LENGTHS.prompt);
        let rate = 0.3 / prompt;
        let step = truth.decode(requests, kv_tokens);
        Observation {
            seconds,
            arrivals: rate * seconds,
            decoding: requests,
            kv_tokens,
            itl_mean: Some(step / 0.7),
            ttft_mean: Some(1.5 * step + prompt * (1.0 + 0.3 / 1.4)),
            workers: WorkerCounts { ready: 1, ..WorkerCounts::default() },
            ..Observation::default()
        }
    }

    /// A different device: four times as slow, and eight times for each token of KV; prompts twice as slow.
    #[test]
    fn scales_are_learned_at_one_point_and_the_shape_when_it_moves() {
        let start = Engine::default();
        let slow = start.step.times(4.0);
        let truth = StepTime {
            per_kv_token: slow.per_kv_token * 2.0,
            per_prompt_token: slow.per_prompt_token / 2.0,
            per_prompt_square: slow.per_prompt_square / 2.0,
            ..slow
        };
        let mut learned = LearnedEngine::new(start);
        let ratio = |learned: &LearnedEngine, requests: f64| {
            learned.step().decode(requests, requests * 4250.0) / truth.decode(requests, requests * 4250.0)
        };
        (0..300).for_each(|_| learned.observe(WorkerRole::Both, &[LENGTHS], &seen(&truth, 10.0)));
        assert!((ratio(&learned, 10.0) - 1.0).abs() < 0.03, "{}", ratio(&learned, 10.0));
        let prompts = learned.prompt_seconds(&[LENGTHS]) / truth.prefill(0.0, 4000.0);
        assert!((prompts - 1.0).abs() < 0.05, "{prompts}");
        for requests in [20.0, 40.0, 60.0, 30.0, 10.0] {
            (0..60).for_each(|_| learned.observe(WorkerRole::Both, &[LENGTHS], &seen(&truth, requests)));
        }
        for requests in [10.0, 40.0, 80.0] {
            assert!(
                (ratio(&learned, requests) - 1.0).abs() < 0.12,
                "{requests}: {}",
                ratio(&learned, requests)
            );
        }
    }

    /// Short and long prompts: queueing behind long prompts is not attributed to slow prompts.
    #[test]
    fn the_queue_of_mixed_prompts_is_told_from_their_work() {
        let start = Engine::default();
        let mix = [Lengths { prompt: 500.0, ..LENGTHS }, Lengths { prompt: 12_000.0, ..LENGTHS }];
        let seconds = mix.map(|lengths| start.step.prefill(0.0, lengths.prompt));
        let mean = (seconds[0] + seconds[1]) / 2.0;
        let square = (seconds[0].powi(2) + seconds[1].powi(2)) / 2.0;
        let rate = 0.4 / mean;
        let mut learned = LearnedEngine::new(start);
        let step = start.step.decode(10.0, 42_500.0);
        let seen = Observation {
            arrivals: rate * 5.0,
            itl_mean: Some(step / 0.6),
            ttft_mean: Some(1.5 * step + mean + rate * square / (2.0 * 0.6)),
            ..seen(&start.step, 10.0)
        };
        (0..200).for_each(|_| learned.observe(WorkerRole::Both, &mix, &seen));
        let ratio = learned.prompt_seconds(&mix) / mean;
        assert!((ratio - 1.0).abs() < 0.05, "{ratio}");
    }

    #[test]
    fn nonsense_changes_nothing() {
        let mut learned = LearnedEngine::new(Engine::default());
        let good = seen(&Engine::default().step, 10.0);
        for value in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
            for bad in [
                Observation { itl_mean: Some(value), ttft_mean: Some(value), ..good.clone() },
                Observation { decoding: value, ttft_mean: None, ..good.clone() },
                Observation { kv_tokens: value, ttft_mean: None, ..good.clone() },
                Observation { seconds: value, ..good.clone() },
            ] {
                learned.observe(WorkerRole::Both, &[LENGTHS], &bad);
            }
        }
        let (learned, start) = (learned.step(), Engine::default().step);
        assert!((learned.decode(10.0, 1e4) / start.decode(10.0, 1e4) - 1.0).abs() < 1e-9);
        assert!((learned.prefill(0.0, 1e3) / start.prefill(0.0, 1e3) - 1.0).abs() < 1e-9);
    }
}
