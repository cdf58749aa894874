//! The gateway's metrics, with handles resolved once.

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

const SECONDS: [f64; 16] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
const MICROSECONDS: [f64; 12] =
    [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 5000.0, 20_000.0];

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
    pub(crate) routing_microseconds: Histogram,
    pub(crate) index_blocks: Gauge,
    pub(crate) index_bytes: Gauge,
    pub(crate) workers_ready: Gauge,
    pub(crate) event_batches: Gauge,
    pub(crate) event_orphans: Gauge,
    pub(crate) event_resets: Gauge,
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
            routing_microseconds: Histogram::new(MICROSECONDS),
            index_blocks: Gauge::default(),
            index_bytes: Gauge::default(),
            workers_ready: Gauge::default(),
            event_batches: Gauge::default(),
            event_orphans: Gauge::default(),
            event_resets: Gauge::default(),
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
        registry.register(
            "routing_microseconds",
            "Time of one routing decision",
            this.routing_microseconds.clone(),
        );
        registry.register("index_blocks", "Distinct blocks in the index", this.index_blocks.clone());
        registry.register("index_bytes", "Bytes of the index's table", this.index_bytes.clone());
        registry.register("workers_ready", "Workers that can take requests", this.workers_ready.clone());
        registry.register("kv_event_batches", "KV event batches applied", this.event_batches.clone());
        registry.register("kv_event_orphans", "Blocks with an unknown parent", this.event_orphans.clone());
        registry.register(
            "kv_event_resets",
            "Times that a worker's blocks were forgotten",
            this.event_resets.clone(),
        );
        this
    }

    pub(crate) fn render(&self) -> String {
        let mut out = String::with_capacity(4096);
        // Encoding into a String cannot fail.
        let _infallible = encode(&mut out, &self.registry);
        out
    }
}
