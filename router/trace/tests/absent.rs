//! Without a collector: requests notice nothing, what is lost is counted, and one warning says so. A test of its own,
//! as it listens to all that this process logs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use router_trace::{Counters, KeyValue, Status, Trace, TraceConfig, Tracer, names};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

static WARNINGS: AtomicU64 = AtomicU64::new(0);

struct Warnings;

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        WARNINGS.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[tokio::test]
async fn a_full_queue_costs_microseconds_and_is_counted() {
    const TRACES: usize = 20_000;
    tracing::subscriber::set_global_default(Warnings).expect("first");
    let config = TraceConfig {
        // Nothing listens there.
        endpoint: "http://127.0.0.1:1".to_owned(),
        sample_ratio: 1.0,
        queue_max: 4,
        timeout: Duration::from_secs(1),
        ..TraceConfig::default()
    };
    let tracer = Tracer::new(config).expect("tracer");
    let mut times = Vec::with_capacity(TRACES);
    for _ in 0..TRACES {
        let start = Instant::now();
        let mut trace = tracer.begin(None, None, start).expect("all are sampled");
        trace.span(Trace::ROOT, names::span::QUEUE, start, start, [KeyValue::new(names::KVASIR_BLOCKS, 1)]);
        let before = Instant::now();
        trace.finish(before, [], Status::Unset);
        times.push(before.elapsed());
    }
    let counters = tracer.counters();
    // The exporter may have filled a batch meanwhile, but not many.
    assert!(counters.dropped as usize > TRACES, "{counters:?}");
    times.sort_unstable();
    let (median, most) = (times[TRACES / 2], times[TRACES * 99 / 100]);
    println!("finish into a full queue: median {median:?}, 99 % within {most:?}");
    assert!(median < Duration::from_micros(20), "{median:?}");
    assert!(most < Duration::from_micros(500), "{most:?}");

    // Long enough for more than one batch to fail.
    for _ in 0..4 {
        tokio::time::sleep(Duration::from_millis(800)).await;
        let now = Instant::now();
        tracer.begin(None, None, now).expect("sampled").finish(now, [], Status::Unset);
    }
    tracer.shutdown(Duration::from_secs(3)).await;
    let Counters { exported, dropped, failed } = tracer.counters();
    assert_eq!(exported, 0);
    assert!(failed > 0);
    assert_eq!(dropped + failed, 2 * TRACES as u64 + 4, "each span is counted once");
    assert_eq!(WARNINGS.load(Ordering::Relaxed), 1);
}
