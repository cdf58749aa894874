//! The trace of a request that is sampled; any other request only checks an empty option.
//!
//! Parts of a request add spans, some in its own task, some in tasks beside it, so there is a lock, which
//! only traced requests take and which is held no longer than a push. Calls to engines carry the context,
//! so that the engines' own traces are children of the leg that caused them.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderValue};
use router_engines::dialect::host_of;
use router_fleet::{RankRef, Route};
use router_trace::{Context, KeyValue, SpanIndex, SpanKind, Status, Trace, Tracer, names};

const TRACEPARENT: &str = "traceparent";
const TRACESTATE: &str = "tracestate";

/// A request's trace.
#[derive(Debug)]
pub(crate) struct Traced(Mutex<Option<Box<Trace>>>);

/// The trace of a request, if it has one.
pub(crate) type Tracing = Option<Arc<Traced>>;

/// Decides whether a request is traced, and sets the headers that engines get when it is not.
pub(crate) fn begin(tracer: &Tracer, headers: &HeaderMap, passed: &mut HeaderMap, start: Instant) -> Tracing {
    passed.remove(TRACEPARENT);
    passed.remove(TRACESTATE);
    let mut parents = headers.get_all(TRACEPARENT).iter();
    // With several parents the caller is ambiguous, so none is used.
    let parent = match (parents.next(), parents.next()) {
        (Some(one), None) => one.to_str().ok(),
        _ => None,
    };
    let states: Vec<&str> =
        headers.get_all(TRACESTATE).iter().filter_map(|state| state.to_str().ok()).collect();
    let states = states.join(",");
    let state = (!states.is_empty()).then_some(states.as_str());
    if let Some(trace) = tracer.begin(parent, state, start) {
        return Some(Arc::new(Traced(Mutex::new(Some(trace)))));
    }
    match Context::from_headers(parent, state) {
        Some(context) => tell(passed, context.traceparent().as_str(), context.tracestate()),
        // Engines must not begin traces of their own for the request.
        None => tell(passed, Context::unsampled().traceparent().as_str(), None),
    }
    None
}

fn tell(headers: &mut HeaderMap, parent: &str, state: Option<&str>) {
    for (name, value) in [(TRACEPARENT, Some(parent)), (TRACESTATE, state)] {
        if let Some(value) = value.and_then(|value| HeaderValue::from_str(value).ok()) {
            headers.insert(name, value);
        }
    }
}

impl Traced {
    fn with<T>(&self, note: impl FnOnce(&mut Trace) -> T) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_deref_mut().map(note)
    }

    /// Adds a span that ends now.
    pub(crate) fn span(&self, name: &'static str, start: Instant, attributes: Vec<KeyValue>) {
        self.with(|trace| trace.span(Trace::ROOT, name, start, Instant::now(), attributes));
    }

    /// Adds a span that ends now, by its duration.
    pub(crate) fn lasted(&self, name: &'static str, took: Duration, attributes: Vec<KeyValue>) {
        let now = Instant::now();
        self.span(name, now.checked_sub(took).unwrap_or(now), attributes);
    }

    /// Adds an event that happens now.
    pub(crate) fn event(&self, name: &'static str) {
        self.with(|trace| trace.event(Trace::ROOT, name, Instant::now()));
    }

    /// Adds the span of the routing decision.
    pub(crate) fn routed(&self, route: &Route) {
        let mut attributes = vec![
            KeyValue::new(names::KVASIR_DECODE_WORKER, route.decode.run.name.clone()),
            KeyValue::new(names::KVASIR_BLOCKS, i64::from(route.blocks)),
            KeyValue::new(names::KVASIR_OVERLAP_BLOCKS, i64::from(route.overlap_blocks)),
            KeyValue::new(names::KVASIR_PREDICTED_MS, route.predicted.as_secs_f64() * 1e3),
        ];
        if let Some(prefill) = &route.prefill {
            attributes.push(KeyValue::new(names::KVASIR_PREFILL_WORKER, prefill.run.name.clone()));
        }
        self.lasted(names::span::ROUTE, route.decided_in, attributes);
    }

    /// Adds the span of the transfer of blocks to the decode worker, which ends now.
    pub(crate) fn transferred(&self, start: Instant, route: &Route) {
        let blocks = KeyValue::new(names::KVASIR_TRANSFER_BLOCKS, i64::from(route.moved_blocks));
        self.span(names::span::TRANSFER, start, vec![blocks]);
    }

    /// Ends the trace of the request.
    pub(crate) fn finish(&self, name: String, attributes: Vec<KeyValue>, status: Status) {
        if let Some(mut trace) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take() {
            trace.rename(name);
            trace.finish(Instant::now(), attributes, status);
        }
    }
}

/// The span of a call to a worker, open until this is dropped.
#[derive(Debug)]
pub(crate) struct LegSpan {
    traced: Arc<Traced>,
    span: SpanIndex,
    failure: Option<&'static str>,
}

impl LegSpan {
    /// Begins the span of a call to a worker and adds its context to the call.
    pub(crate) fn open(
        tracing: &Tracing,
        name: &'static str,
        rank: &RankRef,
        headers: &mut HeaderMap,
    ) -> Option<Self> {
        let traced = tracing.as_ref()?;
        let base = rank.worker.client.base();
        let host = host_of(base);
        let port = rank.worker.name.rsplit_once(':').map_or("", |(_, port)| port);
        let mut attributes = vec![
            KeyValue::new(names::SERVER_ADDRESS, host.to_owned()),
            KeyValue::new(names::GEN_AI_PROVIDER_NAME, rank.run.description.engine.name()),
        ];
        attributes.extend(port.parse::<i64>().ok().map(|port| KeyValue::new(names::SERVER_PORT, port)));
        let span = traced.with(|trace| {
            let span = trace.open(Trace::ROOT, name, SpanKind::Client, Instant::now());
            trace.add(span, attributes);
            tell(headers, trace.traceparent(span).as_str(), trace.tracestate());
            span
        })?;
        Some(Self { traced: Arc::clone(traced), span, failure: Some(names::ABANDONED) })
    }

    /// Records success. A call without a recorded result was abandoned.
    pub(crate) fn succeeded(&mut self) {
        self.failure = None;
    }

    /// Records the failure of the call.
    pub(crate) fn failed(&mut self, how: &'static str) {
        self.failure = Some(how);
    }
}

impl Drop for LegSpan {
    fn drop(&mut self) {
        let status = self.failure.map_or(Status::Unset, Status::error);
        let attributes = self.failure.map(|how| KeyValue::new(names::ERROR_TYPE, how));
        self.traced.with(|trace| trace.close(self.span, Instant::now(), attributes, status));
    }
}
