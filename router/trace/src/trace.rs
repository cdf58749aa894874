//! The trace of one request.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use opentelemetry::KeyValue;
use opentelemetry::trace::{SpanKind, Status, TraceId};

use crate::context::Traceparent;
use crate::names;
use crate::queue::Queue;
use crate::record::{Record, SpanIndex};

/// Spans, attributes and events of one request, recorded by its owner. No method waits or makes a system call.
///
/// Data beyond [`SPANS_MAX`](crate::SPANS_MAX), [`ATTRIBUTES_MAX`](crate::ATTRIBUTES_MAX) and
/// [`EVENTS_MAX`](crate::EVENTS_MAX) is dropped, and its amount is an attribute of the root.
#[derive(Debug)]
pub struct Trace {
    record: Record,
    queue: Arc<Queue>,
}

impl Trace {
    /// The root: the request itself, of kind server.
    pub const ROOT: SpanIndex = SpanIndex::ROOT;

    pub(crate) fn new(record: Record, queue: Arc<Queue>) -> Self {
        Self { record, queue }
    }

    /// Names the root, by convention `{operation} {model}`; its name is `request` before that.
    pub fn rename(&mut self, name: impl Into<Cow<'static, str>>) {
        self.record.rename(Self::ROOT, name.into());
    }

    /// Begins a span whose end is not known yet, such as a call of an engine; its id is fixed from now on. A span that is
    /// never closed ends with the root.
    pub fn open(
        &mut self,
        parent: SpanIndex,
        name: impl Into<Cow<'static, str>>,
        kind: SpanKind,
        start: Instant,
    ) -> SpanIndex {
        self.record.open(parent, name.into(), kind, start)
    }

    /// Ends a span.
    pub fn close(
        &mut self,
        span: SpanIndex,
        end: Instant,
        attributes: impl IntoIterator<Item = KeyValue>,
        status: Status,
    ) {
        self.record.add(span, attributes);
        self.record.close(span, end, status);
    }

    /// Records a span that has ended, within the gateway.
    pub fn span(
        &mut self,
        parent: SpanIndex,
        name: impl Into<Cow<'static, str>>,
        start: Instant,
        end: Instant,
        attributes: impl IntoIterator<Item = KeyValue>,
    ) -> SpanIndex {
        let span = self.open(parent, name, SpanKind::Internal, start);
        self.close(span, end, attributes, Status::Unset);
        span
    }

    /// Records an event at an instant within a span.
    pub fn event(&mut self, span: SpanIndex, name: &'static str, at: Instant) {
        self.record.event(span, name, at);
    }

    /// Adds attributes to a span.
    pub fn add(&mut self, span: SpanIndex, attributes: impl IntoIterator<Item = KeyValue>) {
        self.record.add(span, attributes);
    }

    /// Value of `traceparent` for the call that `span` stands for.
    #[must_use]
    pub fn traceparent(&self, span: SpanIndex) -> Traceparent {
        let head = &self.record.head;
        Traceparent::new(head.trace_id, self.record.span_id(span), head.flags)
    }

    /// Value of `tracestate` for any call: the caller's.
    #[must_use]
    pub fn tracestate(&self) -> Option<&str> {
        self.record.tracestate.as_deref()
    }

    /// Id of the trace, for logs; displayed as 32 hexadecimal digits.
    #[must_use]
    pub fn trace_id(&self) -> TraceId {
        self.record.head.trace_id
    }

    /// Ends the root and queues all spans. When the queue is full they are dropped and counted.
    pub fn finish(
        mut self: Box<Self>,
        end: Instant,
        attributes: impl IntoIterator<Item = KeyValue>,
        status: Status,
    ) {
        self.close(Self::ROOT, end, attributes, status);
        self.queue.push(self.record.take());
    }
}

/// A request that was dropped before its end, as when its client disconnected, is queued as an error.
impl Drop for Trace {
    fn drop(&mut self) {
        // A record that was queued has no spans any more.
        if self.record.span_count() > 0 {
            let reason = [KeyValue::new(names::ERROR_TYPE, names::ABANDONED)];
            self.close(Self::ROOT, Instant::now(), reason, Status::error(names::ABANDONED));
            self.queue.push(self.record.take());
        }
    }
}
