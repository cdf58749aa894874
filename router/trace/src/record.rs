//! The recorded data of one request, and its conversion to spans. Recording happens on the request's path and is plain
//! pushes to lists; spans are built on the exporter's thread.

use std::borrow::Cow;
use std::str::FromStr;
use std::time::{Instant, SystemTime};

use opentelemetry::trace::{Event, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{Array, InstrumentationScope, KeyValue, Value};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

use crate::context::fresh_span_id;
use crate::names;

/// Largest number of spans of a trace, its root included.
pub const SPANS_MAX: usize = 64;
/// Largest number of attributes of all spans of a trace.
pub const ATTRIBUTES_MAX: usize = 512;
/// Largest number of events of all spans of a trace.
pub const EVENTS_MAX: usize = 128;
/// Longest text of a name, an attribute or a status; the rest is cut off.
pub const TEXT_BYTES_MAX: usize = 256;
/// Largest number of values of an array.
const ARRAY_MAX: usize = 32;
/// Capacity reserved for spans: root, queue, tokenise, route, prefill, transfer, decode and two more.
const SPANS_USUAL: usize = 9;
/// Capacity reserved for attributes.
const ATTRIBUTES_USUAL: usize = 32;

/// Index of a span within its trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanIndex(u16);

impl SpanIndex {
    pub(crate) const ROOT: Self = Self(0);
    /// Index of a span that was left out: data recorded for it is ignored.
    const NOWHERE: Self = Self(u16::MAX);
}

/// Fields that do not change after the start.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head {
    pub(crate) trace_id: TraceId,
    pub(crate) flags: TraceFlags,
    /// The caller's span.
    pub(crate) parent: Option<SpanId>,
    /// One instant by both clocks: all instants of the trace are converted with it, so that a step of the wall clock does not
    /// move its spans against each other.
    pub(crate) anchor: (Instant, SystemTime),
}

#[derive(Debug)]
struct Span {
    id: SpanId,
    parent: SpanIndex,
    kind: SpanKind,
    name: Cow<'static, str>,
    start: Instant,
    /// End of the span; `None` while it is open. An open span ends with the root.
    end: Option<Instant>,
    status: Status,
}

/// Recorded data of one request.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) head: Head,
    pub(crate) tracestate: Option<Box<str>>,
    spans: Vec<Span>,
    attributes: Vec<(SpanIndex, KeyValue)>,
    events: Vec<(SpanIndex, &'static str, Instant)>,
    dropped_spans: u32,
    dropped_attributes: u32,
    dropped_events: u32,
}

impl Record {
    pub(crate) fn new(head: Head, tracestate: Option<&str>, start: Instant) -> Self {
        let mut record = Self {
            tracestate: tracestate.map(Box::from),
            spans: Vec::with_capacity(SPANS_USUAL),
            attributes: Vec::with_capacity(ATTRIBUTES_USUAL),
            ..Self::empty(head)
        };
        record.open(SpanIndex::NOWHERE, "request".into(), SpanKind::Server, start);
        record
    }

    fn empty(head: Head) -> Self {
        Self {
            head,
            tracestate: None,
            spans: Vec::new(),
            attributes: Vec::new(),
            events: Vec::new(),
            dropped_spans: 0,
            dropped_attributes: 0,
            dropped_events: 0,
        }
    }

    /// Returns the whole record, and leaves one without spans.
    pub(crate) fn take(&mut self) -> Self {
        let empty = Self::empty(self.head);
        std::mem::replace(self, empty)
    }

    pub(crate) fn span_count(&self) -> usize {
        self.spans.len()
    }

    /// Id of a span. For a span that was left out the root's, so that an engine's spans still have a parent.
    pub(crate) fn span_id(&self, span: SpanIndex) -> SpanId {
        self.spans.get(usize::from(span.0)).or(self.spans.first()).map_or(SpanId::INVALID, |span| span.id)
    }

    pub(crate) fn open(
        &mut self,
        parent: SpanIndex,
        name: Cow<'static, str>,
        kind: SpanKind,
        start: Instant,
    ) -> SpanIndex {
        if self.spans.len() == SPANS_MAX {
            self.dropped_spans += 1;
            return SpanIndex::NOWHERE;
        }
        let index = SpanIndex(self.spans.len() as u16);
        let (id, name) = (fresh_span_id(), cut_name(name));
        self.spans.push(Span { id, parent, kind, name, start, end: None, status: Status::Unset });
        index
    }

    pub(crate) fn rename(&mut self, span: SpanIndex, name: Cow<'static, str>) {
        if let Some(span) = self.spans.get_mut(usize::from(span.0)) {
            span.name = cut_name(name);
        }
    }

    pub(crate) fn close(&mut self, span: SpanIndex, end: Instant, status: Status) {
        if let Some(span) = self.spans.get_mut(usize::from(span.0)) {
            span.end = Some(end);
            span.status = match status {
                Status::Error { description } => Status::Error { description: cut_name(description) },
                other => other,
            };
        }
    }

    pub(crate) fn add(&mut self, span: SpanIndex, attributes: impl IntoIterator<Item = KeyValue>) {
        if span == SpanIndex::NOWHERE {
            return;
        }
        for mut attribute in attributes {
            if self.attributes.len() == ATTRIBUTES_MAX {
                self.dropped_attributes += 1;
                continue;
            }
            cut_value(&mut attribute.value);
            self.attributes.push((span, attribute));
        }
    }

    pub(crate) fn event(&mut self, span: SpanIndex, name: &'static str, at: Instant) {
        if span == SpanIndex::NOWHERE {
            return;
        }
        if self.events.len() == EVENTS_MAX {
            self.dropped_events += 1;
        } else {
            self.events.push((span, name, at));
        }
    }

    /// Builds the spans, root first. The number of those left out is an attribute of the root.
    pub(crate) fn write_spans(mut self, scope: &InstrumentationScope, spans: &mut Vec<SpanData>) {
        if self.dropped_spans > 0 {
            let count = KeyValue::new(names::KVASIR_DROPPED_SPANS, i64::from(self.dropped_spans));
            self.attributes.push((SpanIndex::ROOT, count));
        }
        let Self { head, tracestate, spans: noted, attributes, events, .. } = self;
        let ids: Vec<SpanId> = noted.iter().map(|span| span.id).collect();
        let end_of_all = noted.first().and_then(|root| root.end);
        let state = tracestate.and_then(|text| TraceState::from_str(&text).ok()).unwrap_or(TraceState::NONE);
        let first = spans.len();
        for (index, span) in noted.into_iter().enumerate() {
            let above = ids.get(usize::from(span.parent.0)).copied();
            let parent = if index == 0 { head.parent } else { above.or(ids.first().copied()) };
            let end = span.end.or(end_of_all).unwrap_or(span.start).max(span.start);
            spans.push(SpanData {
                span_context: SpanContext::new(head.trace_id, span.id, head.flags, false, state.clone()),
                parent_span_id: parent.unwrap_or(SpanId::INVALID),
                parent_span_is_remote: index == 0 && parent.is_some(),
                span_kind: span.kind,
                name: span.name,
                start_time: head.system_time(span.start),
                end_time: head.system_time(end),
                attributes: Vec::new(),
                dropped_attributes_count: if index == 0 { self.dropped_attributes } else { 0 },
                events: SpanEvents::default(),
                links: SpanLinks::default(),
                status: span.status,
                instrumentation_scope: scope.clone(),
            });
        }
        let made = &mut spans[first..];
        for (span, attribute) in attributes {
            made[usize::from(span.0)].attributes.push(attribute);
        }
        for (span, name, at) in events {
            let event = Event::new(name, head.system_time(at), Vec::new(), 0);
            made[usize::from(span.0)].events.events.push(event);
        }
        if let Some(root) = made.first_mut() {
            root.events.dropped_count = self.dropped_events;
        }
    }
}

// A waiting trace of usual size is about 4 KiB, as the queue's documentation says.
const _: () = assert!(
    size_of::<Record>()
        + SPANS_USUAL * size_of::<Span>()
        + ATTRIBUTES_USUAL * size_of::<(SpanIndex, KeyValue)>()
        <= 4096
);

impl Head {
    fn system_time(&self, at: Instant) -> SystemTime {
        let (instant, system) = self.anchor;
        let time = match at.checked_duration_since(instant) {
            Some(later) => system.checked_add(later),
            None => system.checked_sub(instant.saturating_duration_since(at)),
        };
        time.unwrap_or(system)
    }
}

fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(TEXT_BYTES_MAX)]
}

fn cut_name(name: Cow<'static, str>) -> Cow<'static, str> {
    if name.len() <= TEXT_BYTES_MAX { name } else { cut(&name).to_owned().into() }
}

fn cut_value(value: &mut Value) {
    match value {
        Value::String(text) if text.as_str().len() > TEXT_BYTES_MAX => {
            *text = cut(text.as_str()).to_owned().into();
        }
        Value::Array(Array::String(texts)) => {
            texts.truncate(ARRAY_MAX);
            for text in texts.iter_mut().filter(|text| text.as_str().len() > TEXT_BYTES_MAX) {
                *text = cut(text.as_str()).to_owned().into();
            }
        }
        Value::Array(Array::I64(numbers)) => numbers.truncate(ARRAY_MAX),
        Value::Array(Array::F64(numbers)) => numbers.truncate(ARRAY_MAX),
        Value::Array(Array::Bool(flags)) => flags.truncate(ARRAY_MAX),
        _ => {}
    }
}

#[cfg(test)]
mod tests;
