//! Decides which requests are traced, and owns the exporter.

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

/// Decides which requests are traced, and owns the exporter. When it is dropped the exporter ends without a flush.
#[derive(Debug)]
pub struct Tracer {
    queue: Arc<Queue>,
    ratio: Ratio,
    /// Until when the exporter may work on, once it is to end.
    stop: watch::Sender<Option<Instant>>,
    /// Closed when the exporter has ended.
    end: watch::Receiver<()>,
}

impl Tracer {
    /// Starts the exporter's thread. Whether the collector is there is not asked: it may come later.
    ///
    /// # Errors
    ///
    /// A bad configuration, or no thread to be had.
    pub fn new(config: TraceConfig) -> Result<Arc<Self>, TraceError> {
        let queue = Arc::new(Queue::new(config.check().map(|_| config.queue_max)?));
        let (stop, stopped) = watch::channel(None);
        let end = export::start(&config, Arc::clone(&queue), stopped)?;
        Ok(Arc::new(Self { queue, ratio: Ratio::new(config.sample_ratio), stop, end }))
    }

    /// The trace of a request that came at `start`, or none when it is not sampled: with a valid `traceparent` as
    /// the caller decided, else by the ratio.
    ///
    /// What an untraced request passes on is told by [`Context::from_headers`], or [`Context::unsampled`].
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

    /// What became of the spans so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.queue.counters()
    }

    /// Takes nothing more in, sends what waits, and ends the exporter: within `timeout`, or at the first batch that
    /// fails. Says whether all went out; what did not is counted.
    pub async fn shutdown(&self, timeout: Duration) -> bool {
        let before = self.counters();
        self.queue.close();
        let until = Instant::now() + timeout;
        self.stop.send_modify(|stop| *stop = Some(stop.map_or(until, |earlier| earlier.min(until))));
        // Nothing is ever sent: the error is that the other side is gone. The exporter keeps its time by itself; the
        // second bound is for a thread that gets no time.
        let mut end = self.end.clone();
        let ended = tokio::time::timeout(timeout + export::TICK, end.changed()).await.is_ok();
        let after = self.counters();
        ended && (after.dropped, after.failed) == (before.dropped, before.failed)
    }
}
