//! OpenTelemetry traces of a request's whole life, and metrics, exported over OTLP (gRPC).
//!
//! In the order in which a request meets them:
//!
//! * [`Context`]: the caller's `traceparent` and `tracestate`, read as W3C Trace Context asks.
//! * [`Tracer::begin`]: whether this request is traced. A caller's decision is kept; without a caller a ratio of the
//!   trace ids is sampled, with the arithmetic of every OpenTelemetry SDK, so that services agree.
//! * [`Trace`]: the spans of one request. Its owner notes instants as things happen; a leg to an engine is opened
//!   before it starts, so that its id can travel with it.
//! * [`Trace::finish`]: hands all spans over at once. A trace that is dropped unfinished, as when a client goes away,
//!   is handed over as an error: those are the ones that one wants to see.
//! * [`names`]: what spans and attributes are called. Never a prompt's or an answer's text.
//!
//! [`MetricsExporter`] sends the text of `/metrics` to the same collector.
//!
//! One thread with a runtime of its own takes traces from a bounded queue, makes spans of them and sends them. A
//! collector that is absent, slow or dies costs that thread time and fills the queue; then traces are dropped and
//! counted ([`Counters`]), and a warning says so at most once a minute.
//!
//! Hot path: a request that is not traced costs the parse of a header or eight random bytes, and no allocation
//! (`tests/no_allocation.rs`). A traced one allocates its lists once; `finish` is one push to a lock-free queue. The
//! exporter looks into the queue every [`TICK`] rather than being woken: to wake a thread is a system call, and the
//! SDK's own batch processor, which does so, also makes spans on the request's thread and does not count what it
//! drops.
//!
//! gRPC, as KServe brings tonic anyway: with it OTLP over gRPC is 81 crates and OTLP over HTTP 80.
//!
//! This crate knows nothing of HTTP servers, workers, blocks or models.

#![forbid(unsafe_code)]

mod config;
mod context;
mod error;
mod export;
mod metrics;
pub mod names;
mod queue;
mod record;
mod sampling;
mod trace;
mod tracer;
mod tracestate;

pub use config::{QUEUE_MAX_LIMIT, TraceConfig};
pub use context::{Context, Traceparent};
pub use error::TraceError;
pub use export::{BATCH_SPANS_MAX, TICK};
pub use metrics::MetricsExporter;
pub use opentelemetry::trace::{SpanId, SpanKind, Status, TraceId};
pub use opentelemetry::{Array, KeyValue, StringValue, Value};
pub use queue::Counters;
pub use record::{ATTRIBUTES_MAX, EVENTS_MAX, SPANS_MAX, SpanIndex, TEXT_BYTES_MAX};
pub use trace::Trace;
pub use tracer::Tracer;
pub use tracestate::TRACESTATE_BYTES_MAX;
