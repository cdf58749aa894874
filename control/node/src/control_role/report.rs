//! HTTP routes of the control service: `/livez`, `/readyz`, `/metrics`, `/kvasir/plan`.

use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use control_config::Settings;
use control_planner::Decision;
use router_serve::ServeConfig;
use router_tls::PlainListener;
use serde_json::Value;

use crate::compose::some;
use crate::http;

/// Age of the last decision up to which the service is ready, if that is longer than three of its intervals.
const READY_WITHIN: Duration = Duration::from_secs(30);

/// State of the service at one tick.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Report {
    /// Number of observed gateways.
    pub(super) gateways: usize,
    /// Number of gateways that did not answer.
    pub(super) silent: usize,
    /// Whether this process acts.
    pub(super) leads: bool,
    /// Number of failed requests to carry out a decision so far.
    pub(super) failures: u64,
}

#[derive(Debug, Default)]
struct ControlStatus {
    report: Report,
    wanted: Vec<(String, u32)>,
    plan: Option<String>,
    decided: Option<Instant>,
}

#[derive(Debug, Clone)]
pub(super) struct Reporter {
    shown: Arc<Mutex<ControlStatus>>,
    ready_within: Duration,
    /// Whether a planner runs. Without a planner the service is always ready.
    is_planning: bool,
}

impl Reporter {
    fn with<T>(&self, change: impl FnOnce(&mut ControlStatus) -> T) -> T {
        change(&mut self.shown.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Records a tick without a decision.
    pub(super) fn silent(&self, report: Report) {
        self.with(|shown| shown.report = report);
    }

    /// Records a tick with a decision.
    pub(super) fn decided(&self, report: Report, decisions: &[Decision], plan: Value) {
        self.with(|shown| {
            shown.report = report;
            shown.wanted =
                decisions.iter().map(|decision| (decision.pool.clone(), decision.wanted)).collect();
            shown.plan = Some(plan.to_string());
            shown.decided = Some(Instant::now());
        });
    }

    fn is_ready(&self) -> bool {
        !self.is_planning
            || self.with(|shown| shown.decided.is_some_and(|at| at.elapsed() < self.ready_within))
    }
}

/// Serves the routes, unless `control.listen` is empty.
pub(super) async fn start(settings: &Settings) -> Result<Reporter> {
    let ready_within = READY_WITHIN.max(3 * settings.planner.interval);
    let is_planning = settings.planner.mode != "off";
    let reporter = Reporter { shown: Arc::default(), ready_within, is_planning };
    if let Some(listen) = some(&settings.control.listen) {
        let address = listen.parse().with_context(|| format!("control.listen: {listen:?} is no IP:PORT"))?;
        let listener = PlainListener::new(http::bind(address).await?);
        let bounds = ServeConfig { connections_max: 256, ..ServeConfig::default() };
        tokio::spawn(router_serve::serve(listener, routes(reporter.clone()), bounds, std::future::pending()));
    }
    Ok(reporter)
}

fn routes(reporter: Reporter) -> Router {
    let readyz = async |State(reporter): State<Reporter>| match reporter.is_ready() {
        true => (StatusCode::OK, "ready\n"),
        false => (
            StatusCode::SERVICE_UNAVAILABLE,
            "nothing was decided lately: no gateway answers, or workers cannot be counted\n",
        ),
    };
    let metrics = async |State(reporter): State<Reporter>| {
        let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
        (kind, reporter.with(|shown| metrics_text(&shown.report, &shown.wanted)))
    };
    let plan = async |State(reporter): State<Reporter>| -> Response {
        match reporter.with(|shown| shown.plan.clone()) {
            Some(plan) => ([(header::CONTENT_TYPE, "application/json")], plan).into_response(),
            None => (StatusCode::NOT_FOUND, "nothing was decided yet\n").into_response(),
        }
    };
    Router::new()
        .route("/livez", get(async || "alive\n"))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .route("/kvasir/plan", get(plan))
        .with_state(reporter)
}

fn metrics_text(report: &Report, wanted: &[(String, u32)]) -> String {
    let mut text = String::new();
    let mut series = |name: &str, kind: &str, help: &str, values: &[(String, f64)]| {
        // Writing to a String cannot fail.
        let _written = writeln!(text, "# HELP {name} {help}.\n# TYPE {name} {kind}");
        for (labels, value) in values {
            let _written = writeln!(text, "{name}{labels} {value}");
        }
    };
    let one = |value: f64| [(String::new(), value)];
    series("kvasir_control_gateways", "gauge", "Gateways that are observed", &one(report.gateways as f64));
    series(
        "kvasir_control_gateways_silent",
        "gauge",
        "Gateways that did not answer",
        &one(report.silent as f64),
    );
    series(
        "kvasir_control_leader",
        "gauge",
        "Whether this process acts",
        &one(f64::from(u8::from(report.leads))),
    );
    series(
        "kvasir_control_actuation_failures_total",
        "counter",
        "Requests to Kubernetes about workers that were refused or not answered",
        &one(report.failures as f64),
    );
    if !wanted.is_empty() {
        // Pool names are role names, which need no escaping.
        let labelled = |(pool, wanted): &(String, u32)| (format!("{{pool=\"{pool}\"}}"), f64::from(*wanted));
        let values: Vec<_> = wanted.iter().map(labelled).collect();
        series("kvasir_control_wanted", "gauge", "Workers that the planner wants", &values);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_say_who_acts_and_what_is_wanted() {
        let report = Report { gateways: 2, silent: 1, leads: true, failures: 3 };
        let text = metrics_text(&report, &[("decode".to_owned(), 4)]);
        for line in [
            "kvasir_control_gateways 2\n",
            "kvasir_control_gateways_silent 1\n",
            "kvasir_control_leader 1\n",
            "# TYPE kvasir_control_actuation_failures_total counter\nkvasir_control_actuation_failures_total 3\n",
            "kvasir_control_wanted{pool=\"decode\"} 4\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert!(!metrics_text(&report, &[]).contains("wanted"), "nothing was decided yet");
    }
}
