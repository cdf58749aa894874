//! Tests of recorded spans.

use std::time::Duration;

use super::*;

fn head() -> Head {
    let trace_id = TraceId::from_bytes([7; 16]);
    Head {
        trace_id,
        flags: TraceFlags::SAMPLED,
        parent: None,
        anchor: (Instant::now(), SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000)),
    }
}

fn spans_of(record: Record) -> Vec<SpanData> {
    let mut spans = Vec::new();
    record.write_spans(&InstrumentationScope::builder("test").build(), &mut spans);
    spans
}

fn value<'a>(span: &'a SpanData, key: &str) -> Option<&'a Value> {
    span.attributes.iter().find(|attribute| attribute.key.as_str() == key).map(|attribute| &attribute.value)
}

#[test]
fn instants_before_and_after_the_anchor() {
    let head = head();
    let (instant, system) = head.anchor;
    let step = Duration::from_nanos(1_234_567);
    assert_eq!(head.system_time(instant), system);
    assert_eq!(head.system_time(instant + step), system + step);
    assert_eq!(head.system_time(instant - step), system - step);
}

#[test]
fn an_open_span_ends_with_the_root_and_none_ends_before_it_starts() {
    let head = head();
    let (instant, system) = head.anchor;
    let after = |ms| instant + Duration::from_millis(ms);
    let mut record = Record::new(head, None, instant);
    let open = record.open(SpanIndex::ROOT, "open".into(), SpanKind::Client, after(1));
    let backwards = record.open(open, "backwards".into(), SpanKind::Internal, after(5));
    record.close(backwards, after(4), Status::Unset);
    let late = record.open(SpanIndex::ROOT, "late".into(), SpanKind::Internal, after(9));
    record.close(SpanIndex::ROOT, after(7), Status::Ok);
    let spans = spans_of(record);
    let ends: Vec<u128> = spans
        .iter()
        .map(|span| span.end_time.duration_since(system).expect("after the anchor").as_millis())
        .collect();
    assert_eq!(ends, [7, 7, 5, 9]);
    assert_ne!(open, late);
    assert_eq!(spans[2].parent_span_id, spans[1].span_context.span_id());
    assert_eq!(spans[3].parent_span_id, spans[0].span_context.span_id());
}

#[test]
fn everything_is_bounded() {
    let head = head();
    let now = head.anchor.0;
    let mut record = Record::new(head, None, now);
    let mut last = SpanIndex::ROOT;
    for _ in 1..SPANS_MAX + 3 {
        last = record.open(SpanIndex::ROOT, "s".into(), SpanKind::Client, now);
    }
    assert_eq!(last, SpanIndex::NOWHERE);
    assert_eq!(record.span_id(last), record.span_id(SpanIndex::ROOT), "an engine still has a parent");
    // Notes of a span that had no room change nothing, and a child of it becomes the root's.
    record.add(last, [KeyValue::new("lost", 1)]);
    record.event(last, "lost", now);
    record.close(last, now, Status::Ok);
    record.rename(last, "lost".into());
    for index in 0..ATTRIBUTES_MAX + 2 {
        record.add(SpanIndex::ROOT, [KeyValue::new("k", index as i64)]);
    }
    for _ in 0..EVENTS_MAX + 4 {
        record.event(SpanIndex::ROOT, "e", now);
    }
    let spans = spans_of(record);
    assert_eq!(spans.len(), SPANS_MAX);
    assert_eq!(value(&spans[0], names::KVASIR_DROPPED_SPANS), Some(&Value::I64(3)));
    assert_eq!(spans[0].attributes.len(), ATTRIBUTES_MAX + 1);
    assert_eq!(spans[0].dropped_attributes_count, 2);
    assert_eq!((spans[0].events.len(), spans[0].events.dropped_count), (EVENTS_MAX, 4));
    assert!(spans.iter().all(|span| value(span, "lost").is_none() && span.name != "lost"));
}

#[test]
fn texts_are_cut_at_a_letter() {
    let long = "é".repeat(TEXT_BYTES_MAX);
    let cut = "é".repeat(TEXT_BYTES_MAX / 2);
    let head = head();
    let now = head.anchor.0;
    let mut record = Record::new(head, None, now);
    let odd = format!("a{long}");
    record.rename(SpanIndex::ROOT, long.clone().into());
    let reasons = Value::Array(Array::String(vec![long.clone().into(); ARRAY_MAX + 1]));
    record.add(
        SpanIndex::ROOT,
        [
            KeyValue::new("model", long.clone()),
            KeyValue::new("odd", odd),
            KeyValue::new("reasons", reasons),
            KeyValue::new("short", "short"),
        ],
    );
    record.close(SpanIndex::ROOT, now, Status::error(long));
    let spans = spans_of(record);
    assert_eq!(spans[0].name, cut);
    assert_eq!(spans[0].status, Status::error(cut.clone()));
    assert_eq!(value(&spans[0], "model"), Some(&Value::from(cut.clone())));
    assert_eq!(value(&spans[0], "odd").map(|odd| odd.as_str().len()), Some(TEXT_BYTES_MAX - 1));
    let reasons = Value::Array(Array::String(vec![cut.into(); ARRAY_MAX]));
    assert_eq!(value(&spans[0], "reasons"), Some(&reasons));
    assert_eq!(value(&spans[0], "short"), Some(&Value::from("short")));
}

#[test]
fn what_was_taken_is_gone() {
    let head = head();
    let mut record = Record::new(head, Some("a=1"), head.anchor.0);
    assert_eq!(record.take().span_count(), 1);
    assert_eq!(record.take().span_count(), 0);
    assert!(spans_of(record).is_empty());
}
