//! Cost of a trace on the request's thread. A measurement: `cargo test --release -p router-trace --test cost --
//! --ignored --nocapture`.

mod collector;

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use collector::{Collector, CollectorReply};
use router_trace::{KeyValue, SpanKind, Status, Trace, TraceConfig, Tracer, names};

/// Traces in a row, well below the queue's capacity.
const BURST: usize = 1000;
const BURSTS: usize = 20;
const UNSAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";

/// Eight spans with the root, eleven attributes and two events.
fn note(trace: &mut Trace, now: Instant, model: &Arc<str>) {
    for name in [names::span::QUEUE, names::span::TOKENISE, names::span::ROUTE] {
        trace.span(
            Trace::ROOT,
            name,
            now,
            now,
            [KeyValue::new(names::KVASIR_BLOCKS, 40), KeyValue::new(names::KVASIR_OVERLAP_BLOCKS, 31)],
        );
    }
    for name in [names::span::PREFILL, names::span::DECODE] {
        let leg = trace.open(Trace::ROOT, name, SpanKind::Client, now);
        black_box(trace.traceparent(leg));
        trace.span(
            leg,
            names::span::TRANSFER,
            now,
            now,
            [KeyValue::new(names::KVASIR_TRANSFER_BYTES, 1 << 30)],
        );
        trace.event(leg, names::event::FIRST_TOKEN, now);
        trace.close(leg, now, [KeyValue::new(names::SERVER_ADDRESS, Arc::clone(model))], Status::Unset);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn cost_of_a_trace() {
    let collector = Collector::start("127.0.0.1:0", CollectorReply::Takes).await;
    let of_ratio = |sample_ratio| {
        let endpoint = collector.endpoint();
        Tracer::new(TraceConfig { endpoint, sample_ratio, ..TraceConfig::default() }).expect("tracer")
    };
    let tracer = of_ratio(1.0);
    let model: Arc<str> = "small".into();
    let (mut begin, mut notes, mut finish) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..BURSTS {
        for _ in 0..BURST {
            let t0 = Instant::now();
            let mut trace = tracer.begin(None, None, t0).expect("sampled");
            let t1 = Instant::now();
            note(&mut trace, t1, &model);
            let t2 = Instant::now();
            trace.finish(t2, [KeyValue::new(names::GEN_AI_REQUEST_MODEL, Arc::clone(&model))], Status::Ok);
            finish.push(t2.elapsed());
            begin.push(t1 - t0);
            notes.push(t2 - t1);
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    for (what, times) in [("begin", &mut begin), ("notes", &mut notes), ("finish", &mut finish)] {
        times.sort_unstable();
        let part = |percent: usize| times[times.len() * percent / 100];
        println!("{what} of a trace of 8 spans: median {:?}, 99 % {:?}", part(50), part(99));
    }
    assert!(tracer.shutdown(Duration::from_secs(10)).await);
    println!("{:?}", tracer.counters());
    assert_eq!(tracer.counters().exported as usize, 8 * BURST * BURSTS);

    for (what, tracer, header) in [
        ("ratio 0, no caller", of_ratio(0.0), None),
        ("ratio 1e-15, no caller", of_ratio(1e-15), None),
        ("caller unsampled", of_ratio(1.0), Some(UNSAMPLED)),
    ] {
        let rounds = 1_000_000;
        let now = Instant::now();
        for _ in 0..rounds {
            black_box(tracer.begin(black_box(header), None, now));
        }
        println!("begin, {what}: {:.1} ns", now.elapsed().as_nanos() as f64 / f64::from(rounds));
    }
}
