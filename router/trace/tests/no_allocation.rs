//! A request that is not traced allocates nothing in this crate; one that is allocates its lists once.

#![forbid(unsafe_code)]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use router_trace::{Context, KeyValue, SpanKind, Status, Trace, TraceConfig, Tracer, names};
use tests_allocations::{Counting, count};

/// Rounds that are counted.
const ROUNDS: u64 = 100_000;
const UNSAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of this thread; the exporter's are its own.
fn allocations(mut work: impl FnMut()) -> u64 {
    // Once before, for what is made lazily.
    work();
    count(|| (0..ROUNDS).for_each(|_| work())).allocations
}

fn tracer(sample_ratio: f64) -> Arc<Tracer> {
    let endpoint = "http://127.0.0.1:1".to_owned();
    Tracer::new(TraceConfig { endpoint, sample_ratio, ..TraceConfig::default() }).expect("tracer")
}

#[test]
fn an_untraced_request_allocates_nothing() {
    let now = Instant::now();
    // One in 10¹⁵ is still drawn for, and never seen.
    for ratio in [0.0, 1e-15] {
        let tracer = tracer(ratio);
        for (traceparent, tracestate) in
            [(None, None), (Some(UNSAMPLED), Some("a=1,b=2")), (Some("nonsense"), Some("nonsense"))]
        {
            let count = allocations(|| {
                assert!(tracer.begin(black_box(traceparent), black_box(tracestate), now).is_none());
                // And what it passes on.
                let context =
                    Context::from_headers(traceparent, tracestate).unwrap_or_else(Context::unsampled);
                black_box((context.traceparent().as_str().len(), context.tracestate()));
            });
            assert_eq!(count, 0, "ratio {ratio}, {traceparent:?}");
        }
    }
    assert_eq!(allocations(|| drop(black_box(Box::new(1)))), ROUNDS, "the counter counts");
}

#[test]
fn a_traced_request_allocates_four_times() {
    let tracer = tracer(1.0);
    let model: Arc<str> = "small".into();
    let count = allocations(|| {
        let now = Instant::now();
        let mut trace = tracer.begin(None, None, now).expect("sampled");
        for _ in 0..6 {
            trace.span(Trace::ROOT, names::span::QUEUE, now, now, [KeyValue::new(names::KVASIR_BLOCKS, 1)]);
        }
        let leg = trace.open(Trace::ROOT, names::span::DECODE, SpanKind::Client, now);
        trace.event(leg, names::event::FIRST_TOKEN, now);
        trace.close(leg, now, [], Status::Ok);
        let model = KeyValue::new(names::GEN_AI_REQUEST_MODEL, Arc::clone(&model));
        trace.finish(now, [model], Status::Ok);
    });
    // The trace, its spans, its attributes and its events.
    assert_eq!(count, 4 * ROUNDS);
}
