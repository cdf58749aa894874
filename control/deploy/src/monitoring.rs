//! A Grafana dashboard and Prometheus rules, made from the gateway's table of metrics.
//!
//! Every metric of the table has a panel, described by its meaning in the table; the metrics of the service
//! level come first. Alerts report conditions that need an action. Sources: Grafana "Dashboard JSON model";
//! Prometheus "Alerting rules".

use serde_json::{Value, json};

use crate::graph::Level;
use crate::{File, yaml};

/// A metric of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metric {
    /// Name without the suffix of its samples.
    pub name: String,
    /// Kind of the metric, which determines how its samples are queried.
    pub kind: Kind,
    /// Meaning, as the table states it.
    pub meaning: String,
}

/// Kinds of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Grows only; its sample ends in `_total`.
    Counter,
    /// May rise and fall.
    Gauge,
    /// Counts by bucket.
    Histogram,
    /// A sum and a count.
    Summary,
}

impl Kind {
    fn named(name: &str) -> Option<Self> {
        match name {
            "counter" => Some(Self::Counter),
            "gauge" => Some(Self::Gauge),
            "histogram" => Some(Self::Histogram),
            _ => None,
        }
    }
}

/// Parses the metrics of a table in Markdown (`| name | kind | meaning |`), and of the lists below it.
#[must_use]
pub fn metrics(document: &str) -> Vec<Metric> {
    let metric = |name: &str, kind: Kind, meaning: &str| Metric {
        name: name.to_owned(),
        kind,
        // Notes for tests are in parentheses at the end.
        meaning: meaning
            .split(" (still")
            .next()
            .unwrap_or_default()
            .trim()
            .trim_end_matches(['.', ';'])
            .to_owned(),
    };
    let row = |line: &str| {
        let mut cells = line.strip_prefix("| `")?.splitn(3, " | ");
        let (name, kind, meaning) = (cells.next()?, cells.next()?, cells.next()?);
        Some(metric(name.trim_end_matches('`'), Kind::named(kind)?, meaning.trim_end_matches(" |")))
    };
    let entry = |line: &str| {
        let (name, rest) = line.strip_prefix("- `")?.split_once('`')?;
        let (kind, meaning) = rest.split_once(": ")?;
        let kind = Kind::named(kind.trim_start_matches(", ")).unwrap_or(Kind::Gauge);
        Some(metric(name, kind, meaning))
    };
    let sentence = |line: &str| {
        let (name, rest) = line.strip_prefix("And `")?.split_once('`')?;
        let meaning = rest.strip_prefix(", a summary without quantiles: ")?;
        Some(metric(name, Kind::Summary, meaning))
    };
    document.lines().filter_map(|line| row(line).or_else(|| entry(line)).or_else(|| sentence(line))).collect()
}

/// Returns a duration of the description, like `500ms`, in seconds.
fn seconds(text: &str) -> Result<f64, String> {
    let (number, factor) = [("ms", 1e-3), ("us", 1e-6), ("s", 1.0), ("min", 60.0), ("h", 3600.0)]
        .iter()
        .find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)))
        .unwrap_or((text, f64::NAN));
    let seconds = number.trim().parse::<f64>().map(|number| number * factor).ok();
    seconds
        .filter(|seconds| *seconds > 0.0)
        .ok_or_else(|| format!("level: {text:?} is no duration, as 500ms or 2s"))
}

/// Returns `dashboard.json` and `rules.yaml`.
pub fn monitoring(metrics: &[Metric], level: &Level) -> Result<Vec<File>, String> {
    let dashboard = serde_json::to_string_pretty(&dashboard(metrics)).map_err(|error| error.to_string())?;
    Ok(vec![
        File { name: "dashboard.json".to_owned(), text: dashboard + "\n" },
        File { name: "rules.yaml".to_owned(), text: yaml::document(&rules(level)?)? },
    ])
}

fn unit(name: &str) -> &'static str {
    match name {
        _ if name.ends_with("_seconds") || name.ends_with("_lag_seconds") => "s",
        _ if name.ends_with("_bytes") => "bytes",
        _ if name.ends_with("_ratio") || name.ends_with("_utilisation") => "percentunit",
        _ => "short",
    }
}

/// A line of a panel: an expression and the name of its series.
type Line = (String, String);

fn quantiles(name: &str) -> Vec<Line> {
    let line = |(quantile, title): &(&str, &str)| {
        let buckets = format!("sum by (le) (rate({name}_bucket[$__rate_interval]))");
        (format!("histogram_quantile({quantile}, {buckets})"), (*title).to_owned())
    };
    [("0.5", "p50"), ("0.9", "p90"), ("0.99", "p99")].iter().map(line).collect()
}

/// Returns the labels that distinguish a metric's series, according to its meaning.
fn labels(metric: &Metric) -> Vec<&'static str> {
    let all = ["worker", "pool", "surface", "status", "source", "version", "store"];
    let named = |label: &&str| metric.meaning.contains(&format!("`{label}`"));
    let mut labels: Vec<&str> = all.into_iter().filter(named).collect();
    if metric.name.starts_with("kvasir_planner_") {
        labels.push("pool");
    } else if metric.name.starts_with("kvasir_discovery_") && metric.kind != Kind::Summary {
        labels.push("source");
    }
    labels
}

fn lines(metric: &Metric) -> Vec<Line> {
    let name = &metric.name;
    let labels = labels(metric);
    let by = if labels.is_empty() { String::new() } else { format!(" by ({})", labels.join(", ")) };
    let legend = labels.iter().map(|label| format!("{{{{{label}}}}}")).collect::<Vec<_>>().join(" ");
    let legend = if legend.is_empty() { "all gateways".to_owned() } else { legend };
    match metric.kind {
        Kind::Histogram => quantiles(name),
        Kind::Counter => vec![(format!("sum{by} (rate({name}_total[$__rate_interval]))"), legend)],
        Kind::Summary => {
            let rate = |part: &str| format!("sum(rate({name}_{part}[$__rate_interval]))");
            vec![(format!("{} / {}", rate("sum"), rate("count")), "mean".to_owned())]
        }
        Kind::Gauge if name.ends_with("_build_info") => vec![(format!("count{by} ({name})"), legend)],
        // Gauges that describe the fleet are equal on all gateways and must not be summed.
        Kind::Gauge if by.is_empty() && !is_shared(name) => vec![(format!("sum({name})"), legend)],
        Kind::Gauge => vec![(format!("max{by} ({name})"), legend)],
    }
}

/// Whether all gateways report the same value for a fleet.
fn is_shared(name: &str) -> bool {
    ["_workers_ready", "_certificate_expires", "_index_", "_start_time_seconds", "_max_fds"]
        .iter()
        .any(|part| name.contains(part))
}

fn dashboard(metrics: &[Metric]) -> Value {
    let mut panels: Vec<Value> = Vec::new();
    let (mut x, mut y) = (0, 0);
    let row = |panels: &mut Vec<Value>, title: &str, x: &mut u32, y: &mut u32| {
        *y += if *x > 0 { 8 } else { 0 };
        *x = 0;
        panels.push(json!({
            "id": panels.len() + 1, "type": "row", "title": title, "collapsed": false, "panels": [],
            "gridPos": {"h": 1, "w": 24, "x": 0, "y": *y},
        }));
        *y += 1;
    };
    let panel = |panels: &mut Vec<Value>,
                 title: &str,
                 meaning: &str,
                 unit: &str,
                 lines: &[Line],
                 x: &mut u32,
                 y: &mut u32| {
        let targets: Vec<Value> = lines
            .iter()
            .zip('A'..)
            .map(|((expression, legend), letter)| {
                json!({"refId": letter.to_string(), "expr": expression, "legendFormat": legend})
            })
            .collect();
        panels.push(json!({
            "id": panels.len() + 1, "type": "timeseries", "title": title, "description": meaning,
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "gridPos": {"h": 8, "w": 8, "x": *x, "y": *y}, "targets": targets,
        }));
        *x += 8;
        if *x == 24 {
            (*x, *y) = (0, *y + 8);
        }
    };
    row(&mut panels, "Clients", &mut x, &mut y);
    let rate = |name: &str, rest: &str| format!("sum{rest} (rate({name}_total[$__rate_interval]))");
    let one = |expression: String, legend: &str| vec![(expression, legend.to_owned())];
    let first: [(&str, &str, &str, Vec<Line>); 6] = [
        (
            "Time to the first token",
            "From a request to its first token",
            "s",
            quantiles("kvasir_gateway_time_to_first_token_seconds"),
        ),
        (
            "Between tokens",
            "Time between two chunks of a stream",
            "s",
            quantiles("kvasir_gateway_inter_token_seconds"),
        ),
        (
            "Requests by status",
            "Requests a second by HTTP status",
            "reqps",
            one(rate("kvasir_gateway_requests", " by (status)"), "{{status}}"),
        ),
        (
            "Cached share of prompts",
            "Tokens of prompts that needed no computation",
            "percentunit",
            one(
                format!(
                    "{} / {}",
                    rate("kvasir_gateway_cached_tokens", ""),
                    rate("kvasir_gateway_prompt_tokens", "")
                ),
                "all gateways",
            ),
        ),
        (
            "Inside and waiting",
            "Requests in flight, and those queued at the admission gates",
            "short",
            vec![
                ("sum(kvasir_gateway_active_requests)".to_owned(), "inside".to_owned()),
                ("sum(kvasir_gateway_waiting_requests)".to_owned(), "waiting".to_owned()),
            ],
        ),
        (
            "Workers",
            "Workers that can take requests, and those that the planner wants",
            "short",
            vec![
                ("max(kvasir_gateway_workers_ready)".to_owned(), "ready".to_owned()),
                ("max by (pool) (kvasir_planner_wanted)".to_owned(), "wanted: {{pool}}".to_owned()),
            ],
        ),
    ];
    for (title, meaning, unit, lines) in &first {
        panel(&mut panels, title, meaning, unit, lines, &mut x, &mut y);
    }
    for group in ["Gateway", "Workers", "Index and KV events", "Discovery", "Planner", "Process"] {
        let is_here = |metric: &&Metric| group_of(&metric.name) == group;
        let mut members = metrics.iter().filter(is_here).peekable();
        if members.peek().is_none() {
            continue;
        }
        row(&mut panels, group, &mut x, &mut y);
        for metric in members {
            let title = metric.name.trim_start_matches("kvasir_gateway_").trim_start_matches("kvasir_");
            panel(&mut panels, title, &metric.meaning, unit(&metric.name), &lines(metric), &mut x, &mut y);
        }
    }
    json!({
        "uid": "kvasir", "title": "Kvasir", "tags": ["kvasir"], "schemaVersion": 39, "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"}, "timezone": "browser",
        "templating": {"list": [{"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]},
        "panels": panels,
    })
}

fn group_of(name: &str) -> &'static str {
    let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    match name {
        _ if name.starts_with("kvasir_discovery_") => "Discovery",
        _ if name.starts_with("kvasir_planner_") => "Planner",
        _ if name.starts_with("process_") || name == "kvasir_build_info" => "Process",
        _ if has(&["_index_", "_kv_event_", "_cache_prediction_", "_shared_store_"]) => "Index and KV events",
        _ if has(&["_worker", "_learned_", "_prediction_", "_ejections"]) => "Workers",
        _ => "Gateway",
    }
}

/// An alert: name, expression, time that it must hold, severity, and explanation for the operator.
type Alert = (&'static str, String, &'static str, &'static str, &'static str);

fn rules(level: &Level) -> Result<Value, String> {
    let (ttft, itl) = (seconds(&level.ttft)?, seconds(&level.itl)?);
    let p90 = |name: &str| format!("histogram_quantile(0.9, sum by (le) (rate({name}_bucket[5m])))");
    let rate = |name: &str| format!("sum(rate({name}_total[5m]))");
    let alerts: [Alert; 15] = [
        (
            "KvasirNoWorkers",
            "max(kvasir_gateway_workers_ready) == 0".to_owned(),
            "1m",
            "critical",
            "No worker takes requests: clients get 503. `kvasir workers` says why of each.",
        ),
        (
            "KvasirErrors",
            format!(
                "sum(rate(kvasir_gateway_requests_total{{status=~\"5..\"}}[5m])) / {} > 0.01",
                rate("kvasir_gateway_requests")
            ),
            "5m",
            "critical",
            "More than one request of a hundred fails.",
        ),
        (
            "KvasirLateFirstTokens",
            format!("{} > {ttft}", p90("kvasir_gateway_time_to_first_token_seconds")),
            "10m",
            "warning",
            "One request of ten waits longer for its first token than the service level says.",
        ),
        (
            "KvasirSlowTokens",
            format!("{} > {itl}", p90("kvasir_gateway_inter_token_seconds")),
            "10m",
            "warning",
            "One token of ten comes later than the service level says.",
        ),
        (
            "KvasirShedsRequests",
            format!("{} > 0", rate("kvasir_gateway_shed")),
            "5m",
            "warning",
            "Requests are sent away because too many wait: more workers, or fewer clients.",
        ),
        (
            "KvasirBrokenStreams",
            format!("{} > 0.01 * {}", rate("kvasir_gateway_broken_streams"), rate("kvasir_gateway_requests")),
            "5m",
            "warning",
            "Streams end with an error after they had begun: workers die faster than requests can go on elsewhere.",
        ),
        (
            "KvasirWorkerEjected",
            "sum by (worker) (increase(kvasir_gateway_ejections_total[15m])) > 3".to_owned(),
            "0m",
            "warning",
            "A worker was taken out for its failures again and again.",
        ),
        (
            "KvasirIndexDrifts",
            format!(
                "{} / {} < 0.5 and {} > 0.1",
                rate("kvasir_gateway_cache_prediction_exact"),
                rate("kvasir_gateway_cache_prediction_requests"),
                rate("kvasir_gateway_cache_prediction_requests")
            ),
            "15m",
            "warning",
            "Engines hold other blocks than the index says: events are lost, or another hash or block size is in use.",
        ),
        (
            "KvasirStoreSilent",
            "min by (store) (kvasir_gateway_shared_store_answers) == 0".to_owned(),
            "2m",
            "warning",
            "A store does not tell what it holds: what lies there is computed again. The gateway's log says why.",
        ),
        (
            "KvasirDiscoveryFails",
            "max by (source) (kvasir_discovery_failing) == 1".to_owned(),
            "5m",
            "warning",
            "A source of workers cannot be read; its workers stay as they were. `kvasir workers` says why.",
        ),
        (
            "KvasirWorkersSuspect",
            "max by (source) (kvasir_discovery_suspect) > 0".to_owned(),
            "5m",
            "warning",
            "A list lost many workers at once and is not believed (discovery.guard_share).",
        ),
        (
            "KvasirWorkersStuck",
            "max by (pool) (kvasir_planner_stuck) > 0".to_owned(),
            "10m",
            "warning",
            "Workers do not start: the control service's log says why.",
        ),
        (
            "KvasirAtMaximum",
            "max by (pool) (kvasir_planner_need) > max by (pool) (kvasir_planner_wanted)".to_owned(),
            "15m",
            "warning",
            "Demand needs more workers than there may be (planner.decode_max, prefill_max, gpus_max).",
        ),
        (
            "KvasirCertificateExpires",
            "min(kvasir_gateway_tls_certificate_expires > 0) - time() < 7 * 24 * 3600".to_owned(),
            "1h",
            "warning",
            "The gateway's certificate is valid for less than a week.",
        ),
        (
            "KvasirConfigRefused",
            "sum(increase(kvasir_gateway_config_refused_total[1h])) > 0".to_owned(),
            "0m",
            "warning",
            "A changed configuration was not taken; the log names the lines. `kvasir config check` does, too.",
        ),
    ];
    let rule = |(name, expression, after, severity, meaning): &Alert| {
        json!({
            "alert": name, "expr": expression, "for": after, "labels": {"severity": severity},
            "annotations": {"summary": meaning},
        })
    };
    Ok(json!({"groups": [{"name": "kvasir", "rules": alerts.iter().map(rule).collect::<Vec<_>>()}]}))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "| Name | Kind | Meaning |\n| --- | --- | --- |\n\
        | `kvasir_gateway_requests` | counter | requests by `surface` and HTTP `status` |\n\
        | `kvasir_gateway_active_requests` | gauge | requests inside (still: a test) |\n\
        | `kvasir_gateway_routing_seconds` | histogram | one decision |\n\n\
        - `kvasir_discovery_failing`, gauge: 1 while it cannot be read; more.\n\
        - `kvasir_planner_wanted`: workers that the planner wants.\n\
        And `kvasir_discovery_lag_seconds`, a summary without quantiles: from report to change.\n";

    #[test]
    fn the_table_is_read_with_its_lists() {
        let all = metrics(TABLE);
        let kinds: Vec<Kind> = all.iter().map(|metric| metric.kind).collect();
        assert_eq!(
            kinds,
            [Kind::Counter, Kind::Gauge, Kind::Histogram, Kind::Gauge, Kind::Gauge, Kind::Summary]
        );
        assert_eq!(all[1].meaning, "requests inside");
        let expression = |at: usize| lines(&all[at])[0].0.clone();
        assert_eq!(
            expression(0),
            "sum by (surface, status) (rate(kvasir_gateway_requests_total[$__rate_interval]))"
        );
        assert_eq!(expression(1), "sum(kvasir_gateway_active_requests)");
        assert!(
            expression(2).starts_with(
                "histogram_quantile(0.5, sum by (le) (rate(kvasir_gateway_routing_seconds_bucket"
            )
        );
        assert_eq!(expression(4), "max by (pool) (kvasir_planner_wanted)");
        assert!(expression(5).contains("_sum") && expression(5).contains("_count"));
    }

    #[test]
    fn thresholds_are_those_of_the_level() {
        let level = Level { ttft: "2s".to_owned(), itl: "40ms".to_owned(), ..Level::default() };
        let text = rules(&level).expect("rules").to_string();
        assert!(text.contains("> 2\"") && text.contains("> 0.04\""), "{text}");
        let wrong = Level { ttft: "soon".to_owned(), ..Level::default() };
        assert!(rules(&wrong).expect_err("no duration").contains("soon"));
    }
}
