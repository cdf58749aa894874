//! Selection of the requests that are traced.

use opentelemetry::trace::TraceId;

/// Share of the trace ids that is sampled, as a bound of their last 63 random bits, as in OpenTelemetry's
/// `TraceIdRatioBased`, so that services with equal ratios trace the same requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ratio(u64);

impl Ratio {
    /// Makes the bound of a ratio from 0 to 1.
    pub(crate) fn new(ratio: f64) -> Self {
        Self((ratio.clamp(0.0, 1.0) * (1u64 << 63) as f64) as u64)
    }

    pub(crate) fn is_never(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn samples(self, trace_id: TraceId) -> bool {
        // The low half of the id; the shift keeps 63 bits of it.
        let low = u128::from_be_bytes(trace_id.to_bytes()) as u64;
        low >> 1 < self.0
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::SpanKind;
    use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator, Sampler, SamplingDecision, ShouldSample};

    use super::*;

    #[test]
    fn equal_to_the_sdk() {
        let ids = RandomIdGenerator::default();
        let edges = [1u128, u128::MAX, 1 << 63, (1 << 63) - 1, u128::from(u64::MAX)];
        let all: Vec<TraceId> = (0..10_000)
            .map(|_| ids.new_trace_id())
            .chain(edges.map(|id| TraceId::from_bytes(id.to_be_bytes())))
            .collect();
        for ratio in [0.0, 1e-9, 0.01, 0.5, 0.999, 1.0] {
            let oracle = Sampler::TraceIdRatioBased(ratio);
            let ours = Ratio::new(ratio);
            let mut sampled = 0;
            for &id in &all {
                let expected = oracle.should_sample(None, id, "", &SpanKind::Server, &[], &[]).decision
                    == SamplingDecision::RecordAndSample;
                assert_eq!(ours.samples(id), expected, "ratio {ratio}, id {id}");
                sampled += u32::from(expected);
            }
            assert!((f64::from(sampled) / all.len() as f64 - ratio).abs() < 0.03, "{sampled} of {ratio}");
        }
    }

    #[test]
    fn a_half_is_decided_by_the_id() {
        let half = Ratio::new(0.5);
        let id = |low: u64| TraceId::from_bytes(((7u128 << 64) | u128::from(low)).to_be_bytes());
        for (low, sampled) in [(0, true), (u64::MAX / 2, true), (u64::MAX / 2 + 1, false), (u64::MAX, false)]
        {
            assert_eq!(half.samples(id(low)), sampled, "{low:x}");
        }
        assert!(Ratio::new(0.0).is_never() && !half.is_never());
    }
}
