//! Export of metrics to an OpenTelemetry collector, from the text for Prometheus.
//!
//! A thread with a runtime of its own renders the text at an interval, converts it to OTLP and sends it. Counters and
//! histograms are cumulative since the start of the process, so a failed export loses only that point in time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use opentelemetry_otlp::tonic_types::metadata::MetadataMap;
use opentelemetry_otlp::tonic_types::transport::{Certificate, ClientTlsConfig};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_client::MetricsServiceClient;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value as Number;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint, ResourceMetrics,
    ScopeMetrics, Sum,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use tokio::runtime::Builder;
use tonic::transport::{Channel, Endpoint};

use crate::config::TraceConfig;
use crate::error::TraceError;

/// Least time between two warnings.
const WARNING_EVERY: Duration = Duration::from_secs(60);
/// Interval at which the thread checks whether it is to end.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// Sends metrics until it is dropped.
#[derive(Debug)]
pub struct MetricsExporter {
    is_over: Arc<AtomicBool>,
}

impl Drop for MetricsExporter {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

impl MetricsExporter {
    /// Sends the output of `render`, in OpenMetrics' text form, to the collector of this configuration.
    ///
    /// # Errors
    ///
    /// The configuration cannot be used, or the thread cannot be started.
    pub fn start(
        config: &TraceConfig,
        interval: Duration,
        render: impl Fn() -> Option<String> + Send + 'static,
    ) -> Result<Self, TraceError> {
        let headers = config.check()?;
        let endpoint = endpoint(config)?;
        let is_over = Arc::new(AtomicBool::new(false));
        let (config, stop) = (config.clone(), Arc::clone(&is_over));
        let runtime = Builder::new_current_thread().enable_all().thread_name("kvasir-metrics-dns").build();
        let runtime = runtime.map_err(TraceError::Start)?;
        let work = move || {
            let sender = Sender {
                client: runtime.block_on(async { MetricsServiceClient::new(endpoint.connect_lazy()) }),
                metadata: MetadataMap::from_headers(headers),
                resource: resource(&config),
                started: unix_nanos(),
                timeout: config.timeout,
                warned: None,
            };
            runtime.block_on(sender.run(interval, &stop, render));
            runtime.shutdown_background();
        };
        thread::Builder::new().name("kvasir-metrics".to_owned()).spawn(work)?;
        Ok(Self { is_over })
    }
}

fn endpoint(config: &TraceConfig) -> Result<Endpoint, TraceError> {
    let bad =
        |error: tonic::transport::Error| TraceError::Config { what: "endpoint", reason: error.to_string() };
    let endpoint = Endpoint::from_shared(config.endpoint.clone()).map_err(bad)?;
    if !config.endpoint.starts_with("https:") {
        return Ok(endpoint);
    }
    let tls = ClientTlsConfig::new().with_enabled_roots();
    let tls = match &config.authority {
        Some(pem) => tls.ca_certificate(Certificate::from_pem(pem)),
        None => tls,
    };
    endpoint.tls_config(tls).map_err(bad)
}

fn attribute(name: &str, value: &str) -> KeyValue {
    let value = AnyValue { value: Some(Value::StringValue(value.to_owned())) };
    KeyValue { key: name.to_owned(), value: Some(value), ..KeyValue::default() }
}

fn resource(config: &TraceConfig) -> Resource {
    let attributes = vec![
        attribute("service.name", &config.service_name),
        attribute("service.version", env!("CARGO_PKG_VERSION")),
        attribute("service.instance.id", &config.instance),
    ];
    Resource { attributes, ..Resource::default() }
}

fn unix_nanos() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

struct Sender {
    client: MetricsServiceClient<Channel>,
    metadata: MetadataMap,
    resource: Resource,
    started: u64,
    timeout: Duration,
    warned: Option<Instant>,
}

impl Sender {
    async fn run(mut self, interval: Duration, stop: &AtomicBool, render: impl Fn() -> Option<String>) {
        let mut next = Instant::now() + interval;
        loop {
            while Instant::now() < next {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                tokio::time::sleep(CHECK_INTERVAL.min(next.saturating_duration_since(Instant::now()))).await;
            }
            next = Instant::now() + interval;
            let Some(text) = render() else { return };
            let metrics = to_metrics(&text, self.started, unix_nanos());
            let scope = InstrumentationScope {
                name: "kvasir".to_owned(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                ..InstrumentationScope::default()
            };
            let scope_metrics = vec![ScopeMetrics { scope: Some(scope), metrics, ..ScopeMetrics::default() }];
            let resource_metrics = vec![ResourceMetrics {
                resource: Some(self.resource.clone()),
                scope_metrics,
                ..ResourceMetrics::default()
            }];
            let request = ExportMetricsServiceRequest { resource_metrics };
            let request =
                tonic::Request::from_parts(self.metadata.clone(), tonic::Extensions::new(), request);
            let failure = match tokio::time::timeout(self.timeout, self.client.export(request)).await {
                Ok(Ok(_)) => continue,
                Ok(Err(status)) => status.to_string(),
                Err(_) => format!("no answer within {:?}", self.timeout),
            };
            if self.warned.is_none_or(|warned| warned.elapsed() >= WARNING_EVERY) {
                self.warned = Some(Instant::now());
                tracing::warn!(failure, "metrics cannot be exported to the collector");
            }
        }
    }
}

/// A sample: its name, its labels, its value.
type Sample<'a> = (&'a str, Vec<(&'a str, String)>, f64);

/// Reads a line such as `name{label="value"} 1.5`.
fn sample(line: &str) -> Option<Sample<'_>> {
    let (name, mut rest) = line.split_at(line.find(['{', ' '])?);
    let mut labels = Vec::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        while !rest.starts_with('}') {
            let (label, quoted) = rest.trim_start_matches(',').split_once("=\"")?;
            let (mut value, mut letters) = (String::new(), quoted.char_indices());
            let end = loop {
                match letters.next()? {
                    (at, '"') => break at,
                    (_, '\\') => value.push(match letters.next()?.1 {
                        'n' => '\n',
                        other => other,
                    }),
                    (_, letter) => value.push(letter),
                }
            };
            labels.push((label, value));
            rest = &quoted[end + 1..];
        }
        rest = &rest[1..];
    }
    // A timestamp or an exemplar may follow the value.
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some((name, labels, value))
}

fn attributes(labels: &[(&str, String)]) -> Vec<KeyValue> {
    labels.iter().map(|(name, value)| attribute(name, value)).collect()
}

#[derive(Default)]
struct Series {
    /// Upper bounds, and the number of observations not above each.
    buckets: Vec<(f64, f64)>,
    sum: f64,
    count: f64,
}

/// Converts a text in OpenMetrics' form to metrics, counted since `started`.
fn to_metrics(text: &str, started: u64, now: u64) -> Vec<Metric> {
    let mut families: Vec<(&str, &str, &str, Vec<Sample<'_>>)> = Vec::new();
    let mut help = BTreeMap::new();
    for line in text.lines() {
        if let Some((name, said)) = line.strip_prefix("# HELP ").and_then(|line| line.split_once(' ')) {
            help.insert(name, said);
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|line| line.split_once(' '))
        {
            families.push((name, kind, "", Vec::new()));
        } else if !line.starts_with('#')
            && let Some(sample) = sample(line)
            && let Some((name, _, _, samples)) = families.last_mut()
            && sample.0.starts_with(*name)
        {
            samples.push(sample);
        }
    }
    let temporality = AggregationTemporality::Cumulative as i32;
    let metric = |(name, kind, _, samples): (&str, &str, &str, Vec<Sample<'_>>)| {
        let points = || {
            samples.iter().filter(|sample| !sample.0.ends_with("_created")).map(|(_, labels, value)| {
                NumberDataPoint {
                    attributes: attributes(labels),
                    start_time_unix_nano: if kind == "counter" { started } else { 0 },
                    time_unix_nano: now,
                    value: Some(Number::AsDouble(*value)),
                    ..NumberDataPoint::default()
                }
            })
        };
        let data = match kind {
            "counter" => Data::Sum(Sum {
                data_points: points().collect(),
                aggregation_temporality: temporality,
                is_monotonic: true,
            }),
            "histogram" => Data::Histogram(Histogram {
                data_points: histogram(name, &samples, started, now),
                aggregation_temporality: temporality,
            }),
            _ => Data::Gauge(Gauge { data_points: points().collect() }),
        };
        Metric {
            name: name.to_owned(),
            description: help.get(name).map_or_else(String::new, |said| (*said).to_owned()),
            unit: if name.ends_with("_seconds") { "s".to_owned() } else { String::new() },
            data: Some(data),
            ..Metric::default()
        }
    };
    families.into_iter().filter(|family| !family.3.is_empty()).map(metric).collect()
}

fn histogram(name: &str, samples: &[Sample<'_>], started: u64, now: u64) -> Vec<HistogramDataPoint> {
    let mut all = BTreeMap::<Vec<(&str, String)>, Series>::new();
    for (sample, labels, value) in samples {
        let bound = labels.iter().find(|(label, _)| *label == "le").map(|(_, bound)| bound.parse());
        let labels = labels.iter().filter(|(label, _)| *label != "le").cloned().collect();
        let series = all.entry(labels).or_default();
        match (&sample[name.len()..], bound) {
            ("_bucket", Some(Ok(bound))) => series.buckets.push((bound, *value)),
            ("_sum", _) => series.sum = *value,
            ("_count", _) => series.count = *value,
            _ => {}
        }
    }
    let point = |(labels, mut series): (Vec<(&str, String)>, Series)| {
        series.buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut below = 0.0;
        let counts = series.buckets.iter().map(|(_, count)| {
            let own = count - below;
            below = *count;
            own.max(0.0) as u64
        });
        HistogramDataPoint {
            attributes: attributes(&labels),
            start_time_unix_nano: started,
            time_unix_nano: now,
            count: series.count as u64,
            sum: Some(series.sum),
            bucket_counts: counts.collect(),
            // The last bucket has no upper bound.
            explicit_bounds: series
                .buckets
                .iter()
                .map(|(bound, _)| *bound)
                .filter(|bound| bound.is_finite())
                .collect(),
            ..HistogramDataPoint::default()
        }
    };
    all.into_iter().map(point).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# HELP a_requests Requests by surface.\n# TYPE a_requests counter\n\
        a_requests_total{surface=\"chat\",status=\"200\"} 3\na_requests_total{surface=\"x\\\"y\\\\z\\n,}\",status=\"404\"} 1\n\
        # HELP a_active Inside.\n# TYPE a_active gauge\na_active 2.5\n\
        # HELP a_time_seconds Time.\n# TYPE a_time_seconds histogram\n\
        a_time_seconds_sum{p=\"q\"} 4.5\na_time_seconds_count{p=\"q\"} 6\n\
        a_time_seconds_bucket{le=\"0.1\",p=\"q\"} 1\na_time_seconds_bucket{le=\"1.0\",p=\"q\"} 4\na_time_seconds_bucket{le=\"+Inf\",p=\"q\"} 6\n\
        # TYPE a_none gauge\n# EOF\n";

    fn texts(attributes: &[KeyValue]) -> Vec<(String, String)> {
        let text = |attribute: &KeyValue| match attribute.value.as_ref().and_then(|value| value.value.clone())
        {
            Some(Value::StringValue(text)) => (attribute.key.clone(), text),
            other => panic!("{other:?}"),
        };
        attributes.iter().map(text).collect()
    }

    #[test]
    fn a_text_becomes_metrics() {
        let metrics = to_metrics(TEXT, 5, 9);
        let names: Vec<(&str, &str, &str)> = metrics
            .iter()
            .map(|metric| (metric.name.as_str(), metric.description.as_str(), metric.unit.as_str()))
            .collect();
        let expected = [
            ("a_requests", "Requests by surface.", ""),
            ("a_active", "Inside.", ""),
            ("a_time_seconds", "Time.", "s"),
        ];
        assert_eq!(names, expected);
        let Some(Data::Sum(sum)) = &metrics[0].data else { panic!("a counter") };
        assert!(sum.is_monotonic && sum.aggregation_temporality == AggregationTemporality::Cumulative as i32);
        let odd = &sum.data_points[1];
        assert_eq!(odd.value, Some(Number::AsDouble(1.0)));
        assert_eq!((odd.start_time_unix_nano, odd.time_unix_nano), (5, 9));
        let label = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(texts(&odd.attributes), [label("surface", "x\"y\\z\n,}"), label("status", "404")]);
        let Some(Data::Gauge(gauge)) = &metrics[1].data else { panic!("a gauge") };
        assert_eq!(gauge.data_points[0].value, Some(Number::AsDouble(2.5)));
        let Some(Data::Histogram(histogram)) = &metrics[2].data else { panic!("a histogram") };
        let [point] = histogram.data_points.as_slice() else { panic!("one series") };
        assert_eq!((point.count, point.sum), (6, Some(4.5)));
        assert_eq!(
            (point.explicit_bounds.as_slice(), point.bucket_counts.as_slice()),
            (&[0.1, 1.0][..], &[1, 3, 2][..])
        );
        assert_eq!(texts(&point.attributes), [label("p", "q")]);
    }

    #[test]
    fn lines_that_are_no_samples_are_left_out() {
        for line in ["", "a", "a{", "a{b", "a{b=\"", "a{b=\"c", "a{b=\"c\"}", "a{b=\"c\"} x", "{} "] {
            assert!(sample(line).is_none(), "{line:?}");
            assert!(to_metrics(&format!("# TYPE a gauge\n{line}\n"), 0, 0).is_empty(), "{line:?}");
        }
    }
}
