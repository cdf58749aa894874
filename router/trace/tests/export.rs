//! The spans that a collector receives for a request.

mod collector;

use std::time::{Duration, Instant, SystemTime};

use collector::{Collector, CollectorReply, find, text, texts, until};
use opentelemetry_proto::tonic::common::v1::any_value::Value as Sent;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind as SentKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use router_trace::{
    Array, Context, Counters, KeyValue, SpanKind, Status, StringValue, Trace, TraceConfig, Tracer, Value,
    names,
};

const CALLER: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const CALLER_UNSAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";
const BOUND: Duration = Duration::from_secs(10);

fn config(endpoint: String) -> TraceConfig {
    TraceConfig {
        endpoint,
        service_name: "gateway".to_owned(),
        instance: "g0".to_owned(),
        sample_ratio: 1.0,
        headers: vec![("authorization".to_owned(), "Bearer collect".to_owned())],
        timeout: Duration::from_secs(5),
        ..TraceConfig::default()
    }
}

fn unix_ns(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_nanos() as u64
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test]
async fn a_whole_life() {
    let collector = Collector::start("127.0.0.1:0", CollectorReply::Takes).await;
    let tracer = Tracer::new(config(collector.endpoint())).expect("tracer");
    let start = Instant::now();
    let started = SystemTime::now();
    let after = |ms: u64| start + Duration::from_millis(ms);

    let mut trace = tracer.begin(Some(CALLER), Some("vendor=1,other=2"), start).expect("the caller samples");
    trace.rename("chat small");
    let queue = trace.span(Trace::ROOT, names::span::QUEUE, start, after(3), []);
    let route = trace.span(
        Trace::ROOT,
        names::span::ROUTE,
        after(3),
        after(4),
        [KeyValue::new(names::KVASIR_BLOCKS, 40), KeyValue::new(names::KVASIR_OVERLAP_BLOCKS, 31)],
    );
    let leg = trace.open(Trace::ROOT, names::span::DECODE, SpanKind::Client, after(4));
    let sent_on = trace.traceparent(leg);
    assert_eq!(trace.tracestate(), Some("vendor=1,other=2"));
    let transfer = trace.span(
        leg,
        names::span::TRANSFER,
        after(5),
        after(6),
        [KeyValue::new(names::KVASIR_TRANSFER_BYTES, 1 << 40)],
    );
    trace.event(leg, names::event::FIRST_TOKEN, after(20));
    trace.close(leg, after(90), [KeyValue::new(names::SERVER_ADDRESS, "10.0.0.7")], Status::Unset);
    assert_ne!(queue, route);
    assert_ne!(leg, transfer);
    let reasons = Value::Array(Array::String(vec![StringValue::from("stop")]));
    trace.finish(
        after(100),
        [
            KeyValue::new(names::GEN_AI_OPERATION_NAME, names::operation::CHAT),
            KeyValue::new(names::GEN_AI_REQUEST_MODEL, "small"),
            KeyValue::new(names::GEN_AI_USAGE_INPUT_TOKENS, 640),
            KeyValue::new(names::GEN_AI_RESPONSE_FINISH_REASONS, reasons),
            KeyValue::new(names::KVASIR_PREDICTED_MS, 17.5),
        ],
        Status::Ok,
    );
    assert!(tracer.shutdown(BOUND).await, "{:?}", tracer.counters());
    assert_eq!(tracer.counters(), Counters { exported: 5, dropped: 0, failed: 0 });

    let received = collector.received.lock().expect("lock");
    assert_eq!(received.requests.len(), 1);
    let (metadata, request) = &received.requests[0];
    assert_eq!(metadata.get("authorization").expect("header"), "Bearer collect");
    let resource = request.resource_spans[0].resource.as_ref().expect("resource");
    for (key, value) in
        [("service.name", "gateway"), ("service.instance.id", "g0"), ("telemetry.sdk.language", "rust")]
    {
        assert_eq!(find(&resource.attributes, key), Some(&text(value)));
    }
    let scope = request.resource_spans[0].scope_spans[0].scope.as_ref().expect("scope");
    assert_eq!(scope.name, "kvasir");

    let spans = received.spans();
    let named = |name: &str| spans.iter().find(|span| span.name == name).expect(name);
    let root = named("chat small");
    let decode = named("decode");
    assert_eq!(spans.len(), 5);
    for span in &spans {
        assert_eq!(hex(&span.trace_id), &CALLER[3..35]);
        assert_eq!(span.trace_state, "vendor=1,other=2");
        assert_eq!(span.flags & 0xff, 1);
    }
    assert_eq!(hex(&root.parent_span_id), &CALLER[36..52]);
    assert_eq!(root.flags & 0x300, 0x300, "the caller is remote");
    for (child, parent) in [("queue", root), ("route", root), ("decode", root), ("kv_transfer", decode)] {
        assert_eq!(named(child).parent_span_id, parent.span_id, "{child}");
    }
    assert_eq!(
        sent_on.as_str(),
        format!("00-{}-{}-01", &CALLER[3..35], hex(&decode.span_id)),
        "an engine's spans hang below its leg"
    );
    let kinds = [root.kind(), decode.kind(), named("queue").kind()];
    assert_eq!(kinds, [SentKind::Server, SentKind::Client, SentKind::Internal]);

    // All times come from one anchor: their differences are exact, and equal to those of the wall clock.
    let zero = root.start_time_unix_nano;
    assert!(zero.abs_diff(unix_ns(started)) < 50_000_000, "{zero}");
    let times = |span: &Span| (span.start_time_unix_nano - zero, span.end_time_unix_nano - zero);
    let ms = 1_000_000;
    assert_eq!(times(root), (0, 100 * ms));
    assert_eq!(times(named("queue")), (0, 3 * ms));
    assert_eq!(times(named("route")), (3 * ms, 4 * ms));
    assert_eq!(times(decode), (4 * ms, 90 * ms));
    assert_eq!(times(named("kv_transfer")), (5 * ms, 6 * ms));
    assert_eq!(decode.events.len(), 1);
    assert_eq!((&*decode.events[0].name, decode.events[0].time_unix_nano - zero), ("first_token", 20 * ms));

    let of_root = |key| find(&root.attributes, key);
    assert_eq!(of_root("gen_ai.operation.name"), Some(&text("chat")));
    assert_eq!(of_root("gen_ai.request.model"), Some(&text("small")));
    assert_eq!(of_root("gen_ai.usage.input_tokens"), Some(&Sent::IntValue(640)));
    assert_eq!(of_root("gen_ai.response.finish_reasons"), Some(&texts(&["stop"])));
    assert_eq!(of_root("kvasir.predicted_ms"), Some(&Sent::DoubleValue(17.5)));
    assert_eq!(find(&named("route").attributes, "kvasir.overlap_blocks"), Some(&Sent::IntValue(31)));
    assert_eq!(
        find(&named("kv_transfer").attributes, "kvasir.transfer.bytes"),
        Some(&Sent::IntValue(1 << 40))
    );
    assert_eq!(find(&decode.attributes, "server.address"), Some(&text("10.0.0.7")));
    assert_eq!(root.status.as_ref().expect("status").code(), StatusCode::Ok);
    assert_eq!(decode.status.as_ref().expect("status").code(), StatusCode::Unset);
}

#[tokio::test]
async fn an_abandoned_request_is_an_error() {
    let collector = Collector::start("127.0.0.1:0", CollectorReply::Takes).await;
    let tracer = Tracer::new(config(collector.endpoint())).expect("tracer");
    let start = Instant::now();
    let mut trace = tracer.begin(None, None, start).expect("all are sampled");
    trace.open(Trace::ROOT, names::span::DECODE, SpanKind::Client, start);
    drop(trace);
    // The trace is exported without a flush, within about a tick.
    until("the trace", || tracer.counters().exported == 2).await;
    let spans = collector.spans();
    let root = spans.iter().find(|span| span.name == "request").expect("root");
    let status = root.status.as_ref().expect("status");
    assert_eq!((status.code(), &*status.message), (StatusCode::Error, "abandoned"));
    assert_eq!(find(&root.attributes, "error.type"), Some(&text("abandoned")));
    assert!(root.parent_span_id.is_empty());
    let leg = spans.iter().find(|span| span.name == "decode").expect("leg");
    assert_eq!(leg.end_time_unix_nano, root.end_time_unix_nano);
}

#[tokio::test]
async fn who_is_sampled() {
    let now = Instant::now();
    let ratio = |sample_ratio| {
        Tracer::new(TraceConfig { sample_ratio, ..config("http://127.0.0.1:1".to_owned()) }).expect("tracer")
    };
    let (never, half, always) = (ratio(0.0), ratio(0.5), ratio(1.0));
    // The caller decides, whatever the ratio.
    for tracer in [&never, &half, &always] {
        let trace = tracer.begin(Some(CALLER), None, now).expect("sampled");
        assert_eq!(trace.trace_id().to_string(), &CALLER[3..35]);
        assert!(tracer.begin(Some(CALLER_UNSAMPLED), None, now).is_none());
    }
    // Without a valid caller's context, the ratio decides.
    for header in [None, Some("00-nonsense-01"), Some("")] {
        assert!(never.begin(header, Some("a=1"), now).is_none());
        let root = always.begin(header, Some("a=1"), now).expect("sampled");
        assert_eq!(root.tracestate(), None, "belongs to a traceparent that is not there");
        assert!(root.traceparent(Trace::ROOT).as_str().ends_with("-01"));
    }
    let rounds = 4000;
    let sampled: Vec<_> = (0..rounds).filter_map(|_| half.begin(None, None, now)).collect();
    let part = sampled.len() as f64 / f64::from(rounds);
    assert!((part - 0.5).abs() < 0.05, "{part}");
    for trace in &sampled {
        // The upper bit of the low half decides about a half.
        assert_eq!(trace.trace_id().to_bytes()[8] >> 7, 0, "{}", trace.trace_id());
    }
    // Headers that an untraced request passes on.
    let caller = Context::from_headers(Some(CALLER_UNSAMPLED), Some("a=1")).expect("valid");
    assert_eq!(caller.traceparent().as_str(), CALLER_UNSAMPLED);
    assert_eq!(caller.tracestate(), Some("a=1"));
}

fn finish_one(tracer: &Tracer) {
    let now = Instant::now();
    let trace = tracer.begin(None, None, now).expect("all are sampled");
    trace.finish(now, [], Status::Unset);
}

#[tokio::test]
async fn a_collector_that_comes_late_and_one_that_dies() {
    // A port that was free a moment ago.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = listener.local_addr().expect("address").to_string();
    drop(listener);
    let tracer = Tracer::new(config(format!("http://{address}"))).expect("a collector is not needed");
    finish_one(&tracer);
    until("the failure", || tracer.counters().failed == 1).await;
    let collector = Collector::start(&address, CollectorReply::Takes).await;
    finish_one(&tracer);
    until("the export", || tracer.counters().exported == 1).await;
    *collector.reply.lock().expect("lock") = CollectorReply::Refuses;
    finish_one(&tracer);
    until("the refusal", || tracer.counters().failed == 2).await;
    *collector.reply.lock().expect("lock") = CollectorReply::Takes;
    finish_one(&tracer);
    until("the next export", || tracer.counters().exported == 2).await;
    assert_eq!(collector.spans().len(), 2);
    assert!(tracer.shutdown(BOUND).await);
    finish_one(&tracer);
    assert_eq!(tracer.counters(), Counters { exported: 2, dropped: 1, failed: 2 }, "after the end");
}

#[tokio::test]
async fn a_collector_that_hangs_holds_neither_requests_nor_the_end() {
    let collector = Collector::start("127.0.0.1:0", CollectorReply::Hangs).await;
    let hang = config(collector.endpoint());
    let impatient = TraceConfig { timeout: Duration::from_millis(300), ..hang.clone() };
    let tracer = Tracer::new(impatient).expect("tracer");
    finish_one(&tracer);
    until("the timeout", || tracer.counters().failed == 1).await;
    assert!(tracer.shutdown(BOUND).await, "nothing was left");

    let patient = Tracer::new(TraceConfig { queue_max: 8, timeout: Duration::from_secs(60), ..hang });
    let patient = patient.expect("tracer");
    finish_one(&patient);
    // Gives the exporter time to take the first trace, so that eight more fit.
    tokio::time::sleep(2 * router_trace::TICK).await;
    (0..10).for_each(|_| finish_one(&patient));
    assert_eq!(patient.counters(), Counters { exported: 0, dropped: 2, failed: 0 });
    let start = Instant::now();
    assert!(!patient.shutdown(Duration::from_millis(200)).await);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!(patient.counters(), Counters { exported: 0, dropped: 10, failed: 1 }, "each is counted once");
}

#[tokio::test]
async fn more_than_a_batch_goes_out_at_the_end() {
    let collector = Collector::start("127.0.0.1:0", CollectorReply::Takes).await;
    let tracer = Tracer::new(config(collector.endpoint())).expect("tracer");
    (0..1300).for_each(|_| finish_one(&tracer));
    assert!(tracer.shutdown(BOUND).await);
    assert_eq!(tracer.counters().exported, 1300);
    assert_eq!(collector.spans().len(), 1300);
    assert!(collector.received.lock().expect("lock").requests.len() >= 3);
}

/// A build with `tls` starts and keeps running; the trusted authorities are the system's.
#[tokio::test]
async fn a_collector_behind_tls_that_is_not_there() {
    let tracer = Tracer::new(config("https://127.0.0.1:1".to_owned())).expect("tracer");
    finish_one(&tracer);
    until("the failure", || tracer.counters().failed == 1).await;
}

#[tokio::test]
async fn a_tracer_that_is_dropped_leaves_its_traces_harmless() {
    let collector = Collector::start("127.0.0.1:0", CollectorReply::Takes).await;
    let tracer = Tracer::new(config(collector.endpoint())).expect("tracer");
    let now = Instant::now();
    let trace = tracer.begin(None, None, now).expect("all are sampled");
    drop(tracer);
    tokio::time::sleep(2 * router_trace::TICK).await;
    trace.finish(now, [], Status::Unset);
    tokio::time::sleep(2 * router_trace::TICK).await;
    assert_eq!(collector.spans().len(), 0, "its exporter has ended");
}
