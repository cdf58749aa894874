//! The last hour of the gateway's own counters, so that the page and `kvasir top` show the time before they
//! were opened.
//!
//! One sample every [`PERIOD`], [`SAMPLES_MAX`] of them: about 1 KiB each, so less than half a MiB. A background task of the
//! gateway takes the samples; no request waits for the lock.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError, Weak};
use std::time::Duration;

use serde_json::{Value, json};

use crate::Gateway;
use crate::metrics::Metrics;

/// Time between two samples.
const PERIOD: Duration = Duration::from_secs(10);
/// Samples kept: an hour of them.
const SAMPLES_MAX: usize = 360;

/// Returns the gateway's counters at one time: the fields of `/kvasir/status` that change with load.
pub(crate) fn sample(metrics: &Metrics, now_unix_ms: u64, active: usize, waiting: u32) -> Value {
    let (requests, failed) = metrics.requests.sums();
    json!({
        "now_unix_ms": now_unix_ms,
        "active": active,
        "waiting": waiting,
        "requests": requests,
        "failed": failed,
        "shed": metrics.shed.get(),
        "migrations": metrics.migrations.get(),
        "disaggregated": metrics.disaggregated.get(),
        "hedged": metrics.hedged.get(),
        "broken_streams": metrics.broken_streams.get(),
        "prompt_tokens": metrics.prompt_tokens.get(),
        "cached_tokens": metrics.cached_tokens.get(),
        "generated_tokens": metrics.generated_tokens.get(),
        "histograms": {
            "time_to_first_token": metrics.time_to_first_token.to_json(),
            "inter_token": metrics.inter_token.to_json(),
            "routing": metrics.routing.to_json(),
        },
    })
}

/// Samples, oldest first, as JSON text, since they are only sent.
#[derive(Default)]
pub(crate) struct History(Mutex<VecDeque<String>>);

impl History {
    pub(crate) fn record(&self, sample: &Value) {
        let mut samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if samples.len() == SAMPLES_MAX {
            samples.pop_front();
        }
        samples.push_back(sample.to_string());
    }

    /// Returns a JSON object with the samples, oldest first, of a gateway that started at `started_unix`.
    pub(crate) fn to_json(&self, started_unix: u64) -> String {
        let samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut text =
            format!("{{\"started_unix\":{started_unix},\"period_s\":{},\"samples\":[", PERIOD.as_secs());
        for (index, sample) in samples.iter().enumerate() {
            if index > 0 {
                text.push(',');
            }
            text.push_str(sample);
        }
        text.push_str("]}");
        text
    }
}

/// Takes samples until the gateway is dropped.
pub(crate) async fn keep(gateway: Weak<Gateway>) {
    let mut ticks = tokio::time::interval(PERIOD);
    loop {
        ticks.tick().await;
        let Some(gateway) = gateway.upgrade() else { return };
        let waiting = gateway.models.gates().waiting;
        let now = crate::service::unix_millis();
        gateway.history.record(&sample(&gateway.metrics, now, gateway.requests_inside(), waiting));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_hour_is_kept_oldest_first() {
        let (history, metrics) = (History::default(), Metrics::new());
        for tick in 0..SAMPLES_MAX as u64 + 5 {
            metrics.generated_tokens.inc();
            history.record(&sample(&metrics, tick, 3, 1));
        }
        let told: Value = serde_json::from_str(&history.to_json(77)).expect("JSON");
        let samples = told["samples"].as_array().expect("samples");
        assert_eq!((told["started_unix"].as_u64(), samples.len()), (Some(77), SAMPLES_MAX));
        assert_eq!(samples[0]["now_unix_ms"], 5);
        assert_eq!(samples[0]["generated_tokens"], 6);
        assert_eq!(samples[SAMPLES_MAX - 1]["generated_tokens"], SAMPLES_MAX as u64 + 5);
        assert_eq!(PERIOD * SAMPLES_MAX as u32, Duration::from_secs(3600));
    }
}
