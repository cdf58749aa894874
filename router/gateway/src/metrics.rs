//! The gateway's metrics, with handles resolved once. Their names are documented in `METRICS.md`; a test
//! compares it with the served metrics.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use router_fleet::{Load, Pool};

use crate::requests_by::RequestCounters;
use crate::timing::{ANSWERS, DECISIONS, Timing};

/// Series with one value per worker.
type ByWorker = Family<Vec<(&'static str, String)>, Gauge>;
type ByStore = Family<Vec<(&'static str, String)>, Gauge>;
type CountByWorker = Family<Vec<(&'static str, String)>, Counter>;
type RatioByWorker = Family<Vec<(&'static str, String)>, Gauge<f64, AtomicU64>>;
/// Series with one value per pool.
type RatioByPool = Family<Vec<(&'static str, String)>, Gauge<f64, AtomicU64>>;

/// All metrics of the gateway.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    pub(crate) requests: RequestCounters,
    pub(crate) active: Gauge,
    pub(crate) waiting: Gauge,
    pub(crate) running: Gauge,
    pub(crate) running_max: Gauge,
    pub(crate) request_memory: Gauge,
    pub(crate) prompt_tokens: Counter,
    pub(crate) cached_tokens: Counter,
    pub(crate) generated_tokens: Counter,
    pub(crate) disaggregated: Counter,
    pub(crate) handed_over: Counter,
    pub(crate) served_elsewhere: Counter,
    pub(crate) migrations: Counter,
    pub(crate) hedged: Counter,
    pub(crate) late: Counter,
    pub(crate) config_changes: Counter,
    pub(crate) config_refused: Counter,
    pub(crate) config_waiting: Gauge,
    pub(crate) time_to_first_token: Timing,
    pub(crate) inter_token: Timing,
    pub(crate) broken_streams: Counter,
    pub(crate) guardrail_blocked: Counter,
    pub(crate) guardrail_changed: Counter,
    pub(crate) guardrail_failed: Counter,
    pub(crate) stored_bytes: Gauge,
    pub(crate) not_stored: Counter,
    pub(crate) shed: Counter,
    pub(crate) routing: Timing,
    pub(crate) index_blocks: Gauge,
    pub(crate) index_bytes: Gauge,
    pub(crate) index_nodes: Gauge,
    pub(crate) workers_ready: Gauge,
    pub(crate) event_batches: Counter,
    pub(crate) event_orphans: Counter,
    pub(crate) event_resets: Counter,
    pub(crate) event_broken: Counter,
    pub(crate) event_unattributed: Counter,
    pub(crate) event_dropped: Counter,
    pub(crate) log_written: Counter,
    pub(crate) log_dropped: Counter,
    pub(crate) log_lost: Counter,
    pub(crate) spans_exported: Counter,
    pub(crate) spans_dropped: Counter,
    pub(crate) spans_failed: Counter,
    pub(crate) certificate_expires: Gauge,
    pub(crate) handshakes: Counter,
    pub(crate) handshakes_failed: Counter,
    cache_prediction_requests: CountByWorker,
    cache_prediction_exact: CountByWorker,
    cache_prediction_predicted: CountByWorker,
    cache_prediction_reported: CountByWorker,
    cache_prediction_resets: CountByWorker,
    ejections: CountByWorker,
    worker_requests: ByWorker,
    prediction_error: RatioByPool,
    seconds_per_token: RatioByPool,
    /// Held while the series of workers are rebuilt and read.
    pub(crate) scraping: Mutex<()>,
    slowness: RatioByWorker,
    store_answers: ByStore,
    store_blocks: ByStore,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut this = Self {
            registry: Registry::with_prefix("kvasir_gateway"),
            requests: RequestCounters::default(),
            active: Gauge::default(),
            waiting: Gauge::default(),
            running: Gauge::default(),
            running_max: Gauge::default(),
            request_memory: Gauge::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            generated_tokens: Counter::default(),
            disaggregated: Counter::default(),
            handed_over: Counter::default(),
            served_elsewhere: Counter::default(),
            migrations: Counter::default(),
            hedged: Counter::default(),
            late: Counter::default(),
            config_changes: Counter::default(),
            config_refused: Counter::default(),
            config_waiting: Gauge::default(),
            time_to_first_token: Timing::new(ANSWERS),
            inter_token: Timing::new(ANSWERS),
            broken_streams: Counter::default(),
            guardrail_blocked: Counter::default(),
            guardrail_changed: Counter::default(),
            guardrail_failed: Counter::default(),
            stored_bytes: Gauge::default(),
            not_stored: Counter::default(),
            shed: Counter::default(),
            routing: Timing::new(DECISIONS),
            index_blocks: Gauge::default(),
            index_bytes: Gauge::default(),
            workers_ready: Gauge::default(),
            event_batches: Counter::default(),
            event_orphans: Counter::default(),
            event_resets: Counter::default(),
            event_broken: Counter::default(),
            event_unattributed: Counter::default(),
            event_dropped: Counter::default(),
            index_nodes: Gauge::default(),
            log_written: Counter::default(),
            log_dropped: Counter::default(),
            log_lost: Counter::default(),
            spans_exported: Counter::default(),
            spans_dropped: Counter::default(),
            spans_failed: Counter::default(),
            certificate_expires: Gauge::default(),
            handshakes: Counter::default(),
            handshakes_failed: Counter::default(),
            cache_prediction_requests: CountByWorker::default(),
            cache_prediction_exact: CountByWorker::default(),
            cache_prediction_predicted: CountByWorker::default(),
            cache_prediction_reported: CountByWorker::default(),
            cache_prediction_resets: CountByWorker::default(),
            ejections: CountByWorker::default(),
            worker_requests: ByWorker::default(),
            prediction_error: Family::default(),
            seconds_per_token: Family::default(),
            scraping: Mutex::new(()),
            slowness: RatioByWorker::default(),
            store_answers: ByStore::default(),
            store_blocks: ByStore::default(),
        };
        let registry = &mut this.registry;
        registry.register("requests", "Requests by surface and status", this.requests.clone());
        registry.register("active_requests", "Requests in flight", this.active.clone());
        registry.register("waiting_requests", "Requests queued at the admission gates", this.waiting.clone());
        registry.register("running_requests", "Requests admitted and not ended", this.running.clone());
        registry.register(
            "running_requests_max",
            "Requests that the admission gates let run at a time",
            this.running_max.clone(),
        );
        registry.register(
            "request_memory_bytes",
            "Memory for requests that is in use",
            this.request_memory.clone(),
        );
        registry.register("prompt_tokens", "Prompt tokens", this.prompt_tokens.clone());
        registry.register(
            "cached_tokens",
            "Prompt tokens that needed no computation",
            this.cached_tokens.clone(),
        );
        registry.register("generated_tokens", "Generated tokens", this.generated_tokens.clone());
        registry.register("disaggregated", "Attempts with a prefill worker", this.disaggregated.clone());
        registry.register(
            "handed_over",
            "Requests that a proxy sends to their workers",
            this.handed_over.clone(),
        );
        registry.register(
            "served_elsewhere",
            "Requests that a proxy had another endpoint serve",
            this.served_elsewhere.clone(),
        );
        registry.register(
            "migrations",
            "Streams that were continued on another worker",
            this.migrations.clone(),
        );
        registry.register(
            "hedged",
            "Hedged attempts: second ones beside a slow first one",
            this.hedged.clone(),
        );
        registry.register("deadline_exceeded", "Requests whose time was over", this.late.clone());
        registry.register(
            "time_to_first_token_seconds",
            "Time from request to first token",
            this.time_to_first_token.clone(),
        );
        registry.register(
            "inter_token_seconds",
            "Time between two chunks of a stream",
            this.inter_token.clone(),
        );
        registry.register("shed", "Requests sent away because too many waited", this.shed.clone());
        registry.register(
            "broken_streams",
            "Streams that ended with an error after they had begun",
            this.broken_streams.clone(),
        );
        registry.register("stored_bytes", "Bytes of stored documents", this.stored_bytes.clone());
        registry.register("not_stored", "Responses that could not be stored", this.not_stored.clone());
        registry.register("routing_seconds", "Time of one routing decision", this.routing.clone());
        registry.register("index_blocks", "(worker, block) pairs in the index", this.index_blocks.clone());
        registry.register("index_bytes", "Bytes of the index", this.index_bytes.clone());
        registry.register("index_nodes", "Nodes of the index", this.index_nodes.clone());
        registry.register("workers_ready", "Workers that can take requests", this.workers_ready.clone());
        registry.register("kv_event_batches", "KV event batches applied", this.event_batches.clone());
        registry.register("kv_event_orphans", "Blocks with an unknown parent", this.event_orphans.clone());
        registry.register(
            "kv_event_resets",
            "Times that a publisher's blocks were indexed anew",
            this.event_resets.clone(),
        );
        registry.register("kv_event_broken", "Events that could not be read", this.event_broken.clone());
        registry.register(
            "kv_event_unattributed",
            "Messages at a shared port that belong to no worker",
            this.event_unattributed.clone(),
        );
        registry.register(
            "kv_event_dropped",
            "Messages at a shared port that a worker's queue had no room for",
            this.event_dropped.clone(),
        );
        registry.register("audit_log_lines", "Lines of the audit log written", this.log_written.clone());
        registry.register("audit_log_dropped", "Lines that found its queue full", this.log_dropped.clone());
        registry.register("audit_log_lost", "Lines that could not be written", this.log_lost.clone());
        for (name, help, counter) in [
            ("trace_spans_exported", "Spans that the collector has taken", &this.spans_exported),
            ("trace_spans_dropped", "Spans that found the queue full", &this.spans_dropped),
            ("guardrail_blocked", "Requests and answers that the guardrail blocked", &this.guardrail_blocked),
            ("guardrail_changed", "Requests and answers that the guardrail changed", &this.guardrail_changed),
            (
                "guardrail_failed",
                "Checks that the guardrail failed or did not answer",
                &this.guardrail_failed,
            ),
            ("trace_spans_failed", "Spans that the collector has not taken", &this.spans_failed),
            ("tls_handshakes", "TLS handshakes that became a connection", &this.handshakes),
            ("tls_handshakes_failed", "TLS handshakes that failed or took too long", &this.handshakes_failed),
        ] {
            registry.register(name, help, counter.clone());
        }
        registry.register(
            "tls_certificate_expires",
            "End of the certificate's validity, Unix time",
            this.certificate_expires.clone(),
        );
        registry.register("config_changes", "Changed configurations taken", this.config_changes.clone());
        registry.register("config_refused", "Configurations with mistakes", this.config_refused.clone());
        registry.register("config_waiting", "Keys that wait for the next start", this.config_waiting.clone());
        let by_worker = [
            ("ejections", "Times that a worker was taken out for its failures", &this.ejections),
            (
                "cache_prediction_requests",
                "Requests whose cached tokens were compared",
                &this.cache_prediction_requests,
            ),
            (
                "cache_prediction_exact",
                "Requests whose cached tokens were as predicted",
                &this.cache_prediction_exact,
            ),
            (
                "cache_prediction_predicted_tokens",
                "Cached tokens that were predicted",
                &this.cache_prediction_predicted,
            ),
            (
                "cache_prediction_reported_tokens",
                "Cached tokens that the engine reported",
                &this.cache_prediction_reported,
            ),
            (
                "cache_prediction_resets",
                "Times that a worker's blocks were indexed anew because predictions had drifted",
                &this.cache_prediction_resets,
            ),
        ];
        for (name, help, family) in by_worker {
            registry.register(name, help, family.clone());
        }
        registry.register(
            "worker_requests",
            "Requests booked on a worker by this gateway",
            this.worker_requests.clone(),
        );
        registry.register(
            "prediction_error_ratio",
            "Mean error of the predicted time to the first token",
            this.prediction_error.clone(),
        );
        registry.register(
            "learned_slowness_ratio",
            "How many times as slow as its pool a worker is",
            this.slowness.clone(),
        );
        registry.register(
            "learned_seconds_per_token",
            "Learned time to compute a token",
            this.seconds_per_token.clone(),
        );
        registry.register(
            "shared_store_answers",
            "1 if the last poll of the shared store succeeded",
            this.store_answers.clone(),
        );
        registry.register("shared_store_blocks", "Blocks that it holds", this.store_blocks.clone());
        this
    }

    /// Removes the series of all workers, so that workers that left are no longer shown.
    pub(crate) fn forget_workers(&self) {
        for family in [
            &self.ejections,
            &self.cache_prediction_requests,
            &self.cache_prediction_exact,
            &self.cache_prediction_predicted,
            &self.cache_prediction_reported,
            &self.cache_prediction_resets,
        ] {
            family.clear();
        }
        self.worker_requests.clear();
        self.slowness.clear();
        self.prediction_error.clear();
        self.seconds_per_token.clear();
    }

    /// Sets the series of a pool from its learned coefficients.
    pub(crate) fn of_pool(&self, pool: &Pool) {
        let labels = vec![("pool", pool.name.clone())];
        if let Some(error) = pool.learned_coefficients.prediction_error() {
            self.prediction_error.get_or_create(&labels).set(error);
        }
        self.seconds_per_token.get_or_create(&labels).set(pool.learned_coefficients.get().per_token);
    }

    /// Sets the series of a store.
    pub(crate) fn of_store(&self, url: &str, answers: bool, blocks: usize) {
        let labels = vec![("store", url.to_owned())];
        self.store_answers.get_or_create(&labels).set(i64::from(answers));
        self.store_blocks.get_or_create(&labels).set(i64::try_from(blocks).unwrap_or(i64::MAX));
    }

    /// Sets the series of a worker from its load.
    pub(crate) fn of_worker(&self, name: &str, load: &Load, ejections: u64) {
        let labels = vec![("worker", name.to_owned())];
        self.ejections.get_or_create(&labels).inner().store(ejections, Ordering::Relaxed);
        self.worker_requests.get_or_create(&labels).set(i64::from(load.own.get()[0]));
        let predictions = &load.predictions;
        for (family, value) in [
            (&self.cache_prediction_requests, &predictions.requests),
            (&self.cache_prediction_exact, &predictions.exact),
            (&self.cache_prediction_predicted, &predictions.predicted_tokens),
            (&self.cache_prediction_reported, &predictions.reported_tokens),
            (&self.cache_prediction_resets, &predictions.resets),
        ] {
            family.get_or_create(&labels).inner().store(value.load(Ordering::Relaxed), Ordering::Relaxed);
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

#[cfg(test)]
mod tests {
    use router_openai::Surface;

    #[test]
    fn the_document_names_every_surface() {
        let document = crate::METRICS;
        let row =
            document.lines().find(|line| line.starts_with("| `kvasir_gateway_requests` |")).expect("its row");
        for surface in Surface::ALL {
            assert!(row.contains(&format!("`{}`", surface.name())), "{}: {row}", surface.name());
        }
    }
}
