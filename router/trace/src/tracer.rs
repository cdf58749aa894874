//! Selects the requests that are traced, and owns the exporter.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use opentelemetry::trace::TraceFlags;
use tokio::sync::watch;

use crate::config::TraceConfig;
use crate::context::{Context, fresh_trace_id};
use crate::error::TraceError;
use crate::export;
use crate::queue::{Counters, Queue};
use crate::record::{Head, Record};
use crate::sampling::Ratio;
use crate::trace::Trace;

/// Selects the requests that are traced, and owns the exporter. Dropping it ends the exporter without a flush.
#[derive(Debug)]
pub struct Tracer {
    queue: Arc<Queue>,
    ratio: Ratio,
    /// Deadline of the exporter's last exports, set when it is to end.
    stop: watch::Sender<Option<Instant>>,
    /// Closed when the exporter has ended.
    end: watch::Receiver<()>,
}

impl Tracer {
    /// Starts the exporter's thread. Does not check whether the collector is reachable: it may start later.
    ///
    /// # Errors
    ///
    /// The configuration is invalid, or the thread cannot be started.
    pub fn new(config: TraceConfig) -> Result<Arc<Self>, TraceError> {
        let queue = Arc::new(Queue::new(config.check().map(|_| config.queue_max)?));
        let (stop, stopped) = watch::channel(None);
        let end = export::start(&config, Arc::clone(&queue), stopped)?;
        Ok(Arc::new(Self { queue, ratio: Ratio::new(config.sample_ratio), stop, end }))
    }

    /// Returns the trace of a request that began at `start`, or `None` when it is not sampled: with a valid `traceparent` as the
    /// caller decided, else by the ratio.
    ///
    /// The headers of an untraced request are those of [`Context::from_headers`], or [`Context::unsampled`].
    #[must_use]
    pub fn begin(
        &self,
        traceparent: Option<&str>,
        tracestate: Option<&str>,
        start: Instant,
    ) -> Option<Box<Trace>> {
        let caller = Context::from_headers(traceparent, tracestate);
        let (trace_id, flags) = match caller {
            Some(caller) if caller.is_sampled() => (caller.trace_id(), caller.flags()),
            Some(_) => return None,
            None if self.ratio.is_never() => return None,
            None => {
                let trace_id = fresh_trace_id();
                if !self.ratio.samples(trace_id) {
                    return None;
                }
                (trace_id, TraceFlags::SAMPLED)
            }
        };
        let parent = caller.map(|caller| caller.span_id());
        let head = Head { trace_id, flags, parent, anchor: (Instant::now(), SystemTime::now()) };
        let record = Record::new(head, caller.and_then(|caller| caller.tracestate()), start);
        Some(Box::new(Trace::new(record, Arc::clone(&self.queue))))
    }

    /// Counters of the spans so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.queue.counters()
    }

    /// Closes the queue, sends the queued traces, and ends the exporter: within `timeout`, or at the first batch that fails.
    /// Returns whether all were sent; the rest is counted.
    pub async fn shutdown(&self, timeout: Duration) -> bool {
        let before = self.counters();
        self.queue.close();
        let until = Instant::now() + timeout;
        self.stop.send_modify(|stop| *stop = Some(stop.map_or(until, |earlier| earlier.min(until))));
        // No value is ever sent: an error means that the exporter has ended. The exporter keeps the timeout itself; the second
        // limit is for a thread that is not scheduled.
        let mut end = self.end.clone();
        let ended = tokio::time::timeout(timeout + export::TICK, end.changed()).await.is_ok();
        let after = self.counters();
        ended && (after.dropped, after.failed) == (before.dropped, before.failed)
    }
}
