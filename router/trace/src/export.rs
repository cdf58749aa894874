//! The exporter: one thread with a runtime of its own, so that a slow collector and the building of spans do not delay the
//! threads that serve requests.

use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{io, thread};

use http::HeaderMap;
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::tonic_types::metadata::MetadataMap;
use opentelemetry_otlp::tonic_types::transport::{Certificate, ClientTlsConfig};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::resource::TelemetryResourceDetector;
use opentelemetry_sdk::trace::{SpanData, SpanExporter as _};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio::time::{sleep, sleep_until};

use crate::config::TraceConfig;
use crate::error::TraceError;
use crate::queue::{Counters, Queue};

/// Interval at which the exporter reads the queue.
pub const TICK: Duration = Duration::from_millis(200);
/// Spans after which a batch is sent; a batch may have a few more, as traces are not split.
pub const BATCH_SPANS_MAX: usize = 512;
/// Pause after a failed batch, so that a collector that refuses at once is not called without pause.
const PAUSE: Duration = Duration::from_secs(1);
/// Least time between two warnings.
const WARNING_EVERY: Duration = Duration::from_secs(60);

/// Starts the thread. The returned channel closes when the thread has ended.
pub(crate) fn start(
    config: &TraceConfig,
    queue: Arc<Queue>,
    stop: watch::Receiver<Option<Instant>>,
) -> Result<watch::Receiver<()>, TraceError> {
    let headers = config.check()?;
    let (ending, end) = watch::channel(());
    let (config, timeout) = (config.clone(), config.timeout);
    let (ready, outcome) = std::sync::mpsc::sync_channel(1);
    // Everything is created on the thread: a runtime must not be dropped on another runtime's thread.
    let work = move || {
        let _ending = ending;
        let made = Builder::new_current_thread()
            .enable_all()
            .thread_name("kvasir-trace-dns")
            .build()
            .map_err(TraceError::Start)
            .and_then(|runtime| Ok((connect(&runtime, &config, headers)?, runtime)));
        let (exporter, runtime) = match made {
            Ok(made) => made,
            Err(error) => {
                let _ = ready.send(Err(error));
                return;
            }
        };
        let _ = ready.send(Ok(()));
        let scope = InstrumentationScope::builder("kvasir").with_version(env!("CARGO_PKG_VERSION")).build();
        let export = Export { exporter, queue, scope, timeout, warnings: Warnings::default() };
        runtime.block_on(export.run(stop));
        // A pending name look-up must not delay the end.
        runtime.shutdown_background();
    };
    thread::Builder::new().name("kvasir-trace".to_owned()).spawn(work)?;
    match outcome.recv() {
        Ok(made) => made.map(|()| end),
        Err(_) => Err(TraceError::Start(io::Error::other("the thread ended"))),
    }
}

/// Makes the exporter, which connects with its first batch.
fn connect(runtime: &Runtime, config: &TraceConfig, headers: HeaderMap) -> Result<SpanExporter, TraceError> {
    let _inside = runtime.enter();
    let builder = SpanExporter::builder()
        .with_tonic()
        .with_endpoint(&config.endpoint)
        .with_timeout(config.timeout)
        .with_metadata(MetadataMap::from_headers(headers));
    let builder = if config.endpoint.starts_with("https:") {
        // By default the exporter trusts no certificate authority.
        let tls = ClientTlsConfig::new().with_enabled_roots();
        builder.with_tls_config(match &config.authority {
            Some(pem) => tls.ca_certificate(Certificate::from_pem(pem)),
            None => tls,
        })
    } else {
        builder
    };
    let mut exporter = builder
        .build()
        .map_err(|error| TraceError::Config { what: "exporter", reason: error.to_string() })?;
    let resource = Resource::builder_empty()
        .with_detector(Box::new(TelemetryResourceDetector))
        .with_attributes([
            KeyValue::new("service.name", config.service_name.clone()),
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
            KeyValue::new("service.instance.id", config.instance.clone()),
        ])
        .build();
    exporter.set_resource(&resource);
    Ok(exporter)
}

struct Export {
    exporter: SpanExporter,
    queue: Arc<Queue>,
    scope: InstrumentationScope,
    timeout: Duration,
    warnings: Warnings,
}

impl Export {
    async fn run(mut self, mut stop: watch::Receiver<Option<Instant>>) {
        loop {
            // The tracer was dropped, which does not request a flush.
            if stop.has_changed().is_err() {
                break;
            }
            let is_stopping = stop.borrow().is_some();
            let spans = self.batch();
            if spans.is_empty() {
                if is_stopping {
                    break;
                }
                self.warnings.say(self.queue.counters(), None);
                tokio::select! {
                    () = sleep(TICK) => {}
                    _ = stop.wait_for(Option::is_some) => {}
                }
                continue;
            }
            let count = spans.len();
            let failure = tokio::select! {
                biased;
                result = tokio::time::timeout(self.timeout, self.exporter.export(spans)) => match result {
                    Ok(Ok(())) => None,
                    Ok(Err(error)) => Some(error.to_string()),
                    Err(_) => Some(format!("no answer within {:?}", self.timeout)),
                },
                () = deadline(stop.clone()) => Some("the shutdown deadline passed before the export finished".to_owned()),
            };
            let Some(reason) = failure else {
                self.queue.count_exported(count);
                continue;
            };
            self.queue.count_failed(count);
            self.warnings.say(self.queue.counters(), Some(&reason));
            if stop.borrow().is_some() {
                break;
            }
            tokio::select! {
                () = sleep(PAUSE) => {}
                _ = stop.wait_for(Option::is_some) => {}
            }
        }
        self.queue.close();
        self.queue.drop_rest();
    }

    fn batch(&self) -> Vec<SpanData> {
        let mut spans = Vec::new();
        while spans.len() < BATCH_SPANS_MAX {
            let Some(record) = self.queue.pop() else { break };
            record.write_spans(&self.scope, &mut spans);
        }
        spans
    }
}

/// Completes when the exporter has to end.
async fn deadline(mut stop: watch::Receiver<Option<Instant>>) {
    // An error means that the tracer was dropped.
    let until = stop.wait_for(Option::is_some).await.ok().and_then(|until| *until);
    if let Some(until) = until {
        sleep_until(until.into()).await;
    }
}

/// Limits warnings to one a minute, with the losses since the last one.
#[derive(Debug, Default)]
struct Warnings {
    last: Option<Instant>,
    said: Counters,
}

impl Warnings {
    fn say(&mut self, now: Counters, reason: Option<&str>) {
        if let Some((dropped, failed)) = self.due(now, Instant::now()) {
            let reason = reason.unwrap_or("the queue was full");
            tracing::warn!(dropped, failed, reason, "spans were lost");
        }
    }

    /// Spans dropped and failed since the last warning, if it is time for another.
    fn due(&mut self, counters: Counters, now: Instant) -> Option<(u64, u64)> {
        let lost = (counters.dropped - self.said.dropped, counters.failed - self.said.failed);
        let is_early = self.last.is_some_and(|last| now.saturating_duration_since(last) < WARNING_EVERY);
        if lost == (0, 0) || is_early {
            return None;
        }
        (self.last, self.said) = (Some(now), counters);
        Some(lost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_a_minute_with_all_that_was_lost() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let lost = |dropped, failed| Counters { exported: 9, dropped, failed };
        let mut warnings = Warnings::default();
        // Columns: seconds, total losses, expected warning.
        let table = [
            (0, lost(0, 0), None),
            (1, lost(0, 8), Some((0, 8))),
            (2, lost(5, 16), None),
            (60, lost(7, 24), None),
            (61, lost(9, 32), Some((9, 24))),
            (200, lost(9, 32), None),
            (201, lost(10, 32), Some((1, 0))),
        ];
        for (seconds, counters, expected) in table {
            assert_eq!(warnings.due(counters, after(seconds)), expected, "after {seconds} s");
        }
    }
}
