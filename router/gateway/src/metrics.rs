//! The gateway's metrics, with handles resolved once.

use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::load::Load;

const SECONDS: [f64; 16] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
const MICROSECONDS: [f64; 16] =
    [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 20.0, 50.0, 100.0, 500.0, 2000.0, 20_000.0];

/// By worker.
type ByWorker = Family<Vec<(&'static str, String)>, Gauge>;
type RatioByWorker = Family<Vec<(&'static str, String)>, Gauge<f64, AtomicU64>>;

/// Everything that is counted.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    pub(crate) requests: Family<Vec<(&'static str, String)>, Counter>,
    pub(crate) active: Gauge,
    pub(crate) prompt_tokens: Counter,
    pub(crate) cached_tokens: Counter,
    pub(crate) generated_tokens: Counter,
    pub(crate) disaggregated: Counter,
    pub(crate) migrations: Counter,
    pub(crate) time_to_first_token: Histogram,
    pub(crate) inter_token: Histogram,
    pub(crate) broken_streams: Counter,
    pub(crate) shed: Counter,
    pub(crate) routing_microseconds: Histogram,
    pub(crate) index_blocks: Gauge,
    pub(crate) index_bytes: Gauge,
    pub(crate) index_nodes: Gauge,
    pub(crate) workers_ready: Gauge,
    pub(crate) event_batches: Gauge,
    pub(crate) event_orphans: Gauge,
    pub(crate) event_resets: Gauge,
    pub(crate) event_broken: Gauge,
    audit_requests: ByWorker,
    audit_exact: ByWorker,
    audit_predicted: ByWorker,
    audit_reported: ByWorker,
    audit_resets: ByWorker,
    pub(crate) prediction_error: Gauge<f64, AtomicU64>,
    pub(crate) seconds_per_token: Gauge<f64, AtomicU64>,
    slowness: RatioByWorker,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut this = Self {
            registry: Registry::with_prefix("kvasir_gateway"),
            requests: Family::default(),
            active: Gauge::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            generated_tokens: Counter::default(),
            disaggregated: Counter::default(),
            migrations: Counter::default(),
            time_to_first_token: Histogram::new(SECONDS),
            inter_token: Histogram::new(SECONDS),
            broken_streams: Counter::default(),
            shed: Counter::default(),
            routing_microseconds: Histogram::new(MICROSECONDS),
            index_blocks: Gauge::default(),
            index_bytes: Gauge::default(),
            workers_ready: Gauge::default(),
            event_batches: Gauge::default(),
            event_orphans: Gauge::default(),
            event_resets: Gauge::default(),
            event_broken: Gauge::default(),
            index_nodes: Gauge::default(),
            audit_requests: ByWorker::default(),
            audit_exact: ByWorker::default(),
            audit_predicted: ByWorker::default(),
            audit_reported: ByWorker::default(),
            audit_resets: ByWorker::default(),
            prediction_error: Gauge::default(),
            seconds_per_token: Gauge::default(),
            slowness: RatioByWorker::default(),
        };
        let registry = &mut this.registry;
        registry.register("requests", "Requests by surface and status", this.requests.clone());
        registry.register("active_requests", "Requests inside", this.active.clone());
        registry.register("prompt_tokens", "Prompt tokens", this.prompt_tokens.clone());
        registry.register(
            "cached_tokens",
            "Prompt tokens that needed no computation",
            this.cached_tokens.clone(),
        );
        registry.register("generated_tokens", "Generated tokens", this.generated_tokens.clone());
        registry.register("disaggregated", "Attempts with a prefill worker", this.disaggregated.clone());
        registry.register("migrations", "Attempts that went on elsewhere", this.migrations.clone());
        registry.register(
            "time_to_first_token_seconds",
            "From request to first token",
            this.time_to_first_token.clone(),
        );
        registry.register("inter_token_seconds", "Between two pieces of a stream", this.inter_token.clone());
        registry.register("shed", "Requests sent away because too many waited", this.shed.clone());
        registry.register(
            "broken_streams",
            "Streams that ended with an error after they had begun",
            this.broken_streams.clone(),
        );
        registry.register(
            "routing_microseconds",
            "Time of one routing decision",
            this.routing_microseconds.clone(),
        );
        registry.register("index_blocks", "(worker, block) pairs in the index", this.index_blocks.clone());
        registry.register("index_bytes", "Bytes of the index", this.index_bytes.clone());
        registry.register("index_nodes", "Nodes of the index", this.index_nodes.clone());
        registry.register("workers_ready", "Workers that can take requests", this.workers_ready.clone());
        registry.register("kv_event_batches", "KV event batches applied", this.event_batches.clone());
        registry.register("kv_event_orphans", "Blocks with an unknown parent", this.event_orphans.clone());
        registry.register(
            "kv_event_resets",
            "Times that a worker's blocks were forgotten",
            this.event_resets.clone(),
        );
        registry.register("kv_event_broken", "Events that could not be read", this.event_broken.clone());
        let by_worker = [
            ("audit_requests", "Requests whose cached tokens were compared", &this.audit_requests),
            ("audit_exact", "Of those, as predicted to the token", &this.audit_exact),
            ("audit_predicted_tokens", "Cached tokens that were predicted", &this.audit_predicted),
            ("audit_reported_tokens", "Cached tokens that the engine reported", &this.audit_reported),
            ("audit_resets", "Times that a worker's blocks were forgotten for drift", &this.audit_resets),
        ];
        for (name, help, family) in by_worker {
            registry.register(name, help, family.clone());
        }
        registry.register(
            "prediction_error_ratio",
            "Mean error of the predicted time to the first token",
            this.prediction_error.clone(),
        );
        registry.register(
            "learned_slowness_ratio",
            "How many times as slow as the fleet a worker is",
            this.slowness.clone(),
        );
        registry.register(
            "learned_seconds_per_token",
            "Learned time to compute a token",
            this.seconds_per_token.clone(),
        );
        this
    }

    /// Counts a request by surface and status.
    pub(crate) fn count(&self, surface: &'static str, status: axum::http::StatusCode) {
        let labels = vec![("surface", surface.to_owned()), ("status", status.as_str().to_owned())];
        self.requests.get_or_create(&labels).inc();
    }

    /// Takes over what a worker's load says.
    pub(crate) fn of_worker(&self, name: &str, load: &Load) {
        let labels = vec![("worker", name.to_owned())];
        let audit = &load.audit;
        for (family, value) in [
            (&self.audit_requests, &audit.requests),
            (&self.audit_exact, &audit.exact),
            (&self.audit_predicted, &audit.predicted_tokens),
            (&self.audit_reported, &audit.reported_tokens),
            (&self.audit_resets, &audit.resets),
        ] {
            family.get_or_create(&labels).set(value.load(Ordering::Relaxed) as i64);
        }
        self.slowness.get_or_create(&labels).set(load.factor());
    }

    pub(crate) fn render(&self) -> String {
        let mut out = String::with_capacity(4096);
        // Encoding into a String cannot fail.
        let _infallible = encode(&mut out, &self.registry);
        out
    }
}
