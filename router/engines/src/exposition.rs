//! Prometheus' text forms, for metrics that are written by hand.
//!
//! Everything is rendered as OpenMetrics 1.0: a counter's family has no suffix, its sample ends in `_total`. [`classic`]
//! converts that to text form 0.0.4, where the `# TYPE` line names the sample; `promtool check metrics` reads that form.
//! Names begin with `kvasir_`. Not a hot path: runs once per scrape.

use std::collections::BTreeSet;
use std::fmt::Write;

/// Suffix of a gauge's help text; counters have none.
const LEVEL: &str = " (level)";

/// Content type of OpenMetrics 1.0.
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Content type of text form 0.0.4, which every Prometheus reads.
pub const CLASSIC: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Family, type, help and scale of a metric that the workspace's crates describe by name and help: a gauge if the help ends
/// with "(level)", else a counter. Microseconds are converted to seconds.
fn described<'a>(name: &str, help: &'a str) -> (String, &'static str, &'a str, f64) {
    let (kind, help) = match help.strip_suffix(LEVEL) {
        Some(help) => ("gauge", help),
        None => ("counter", help),
    };
    match name.strip_suffix("_us") {
        Some(name) => (format!("{name}_seconds"), kind, help, 1e-6),
        None => (name.to_owned(), kind, help, 1.0),
    }
}

/// Writes one metric with a series for each set of labels (`rail="mlx5_0"`; empty is none).
pub fn family<'a>(
    out: &mut String,
    name: &str,
    help: &str,
    series: impl IntoIterator<Item = (&'a str, u64)>,
) {
    let (family, kind, help, scale) = described(name, help);
    let suffix = if kind == "counter" { "_total" } else { "" };
    let _infallible = writeln!(out, "# HELP {family} {help}.\n# TYPE {family} {kind}");
    for (labels, value) in series {
        let labels = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        let _infallible = writeln!(out, "{family}{suffix}{labels} {}", value as f64 * scale);
    }
}

/// A label whose value may hold any text: backslashes, quotes and line ends are escaped (text format 0.0.4).
#[must_use]
pub fn label(name: &str, value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("{name}=\"{value}\"")
}

/// Writes one metric without labels.
pub fn metric(out: &mut String, name: &str, help: &str, value: u64) {
    family(out, name, help, [("", value)]);
}

/// One series of a histogram.
pub struct HistogramSeries {
    /// Labels of the series (`stage="verify"`).
    pub labels: String,
    /// Upper bound in seconds, and number of observations up to it; the last bound is `None`.
    pub cumulative: Vec<(Option<f64>, u64)>,
    /// Sum of all observations, in seconds.
    pub sum: f64,
}

/// Writes a histogram of times.
pub fn histogram(out: &mut String, name: &str, help: &str, series: &[HistogramSeries]) {
    let _infallible = writeln!(out, "# HELP {name} {help}.\n# TYPE {name} histogram");
    for HistogramSeries { labels, cumulative, sum } in series {
        for (bound, count) in cumulative {
            let bound = bound.map_or("+Inf".to_owned(), |bound| bound.to_string());
            let _infallible = writeln!(out, "{name}_bucket{{{labels},le=\"{bound}\"}} {count}");
        }
        let count = cumulative.last().map_or(0, |(_, count)| *count);
        let _infallible = writeln!(out, "{name}_sum{{{labels}}} {sum}\n{name}_count{{{labels}}} {count}");
    }
}

/// Writes the metrics of every process: its version, and `process_*` as Prometheus' clients name it (from `/proc/self`).
pub fn process(out: &mut String, version: &str) {
    let _infallible = writeln!(
        out,
        "# HELP kvasir_build_info The version that runs.\n# TYPE kvasir_build_info gauge\nkvasir_build_info{{version=\"{version}\"}} 1"
    );
    let mut put = |name: &str, kind: &str, help: &str, value: Option<f64>| {
        let Some(value) = value else { return };
        let suffix = if kind == "counter" { "_total" } else { "" };
        let _infallible =
            writeln!(out, "# HELP {name} {help}.\n# TYPE {name} {kind}\n{name}{suffix} {value}");
    };
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // proc_pid_stat(5): fields count from 1, and the second, the name, may hold spaces and brackets.
    let fields: Vec<&str> =
        stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().collect()).unwrap_or_default();
    let field = |number: usize| fields.get(number.checked_sub(3)?)?.parse::<f64>().ok();
    /// USER_HZ, time(7): 100 on every architecture of Linux but Alpha.
    const TICKS: f64 = 100.0;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kibibytes = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Some(line.split_whitespace().next()?.parse::<f64>().ok()? * 1024.0)
    };
    let cpu = field(14).zip(field(15)).map(|(user, system)| (user + system) / TICKS);
    put("process_cpu_seconds", "counter", "Processor time, user and system", cpu);
    put("process_virtual_memory_bytes", "gauge", "Virtual memory", kibibytes("VmSize"));
    put("process_resident_memory_bytes", "gauge", "Resident memory", kibibytes("VmRSS"));
    let uptime = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let booted = uptime.lines().find_map(|line| line.strip_prefix("btime ")?.parse::<f64>().ok());
    let started = booted.zip(field(22)).map(|(booted, started)| booted + started / TICKS);
    put("process_start_time_seconds", "gauge", "Start of the process, Unix time", started);
    let descriptors = std::fs::read_dir("/proc/self/fd").ok().map(|entries| entries.count() as f64);
    put("process_open_fds", "gauge", "Open file descriptors", descriptors);
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let most = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files")?.split_whitespace().next()?.parse::<f64>().ok());
    put("process_max_fds", "gauge", "Most file descriptors", most);
}

/// Converts OpenMetrics to text form 0.0.4: counters' families take the suffix of their samples; units and the end marker are removed.
#[must_use]
pub fn classic(openmetrics: &str) -> String {
    let counters: BTreeSet<&str> = openmetrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter"))
        .collect();
    let mut out = String::with_capacity(openmetrics.len() + 1024);
    for line in openmetrics.lines() {
        if line == "# EOF" || line.starts_with("# UNIT ") {
            continue;
        }
        let head = ["# TYPE ", "# HELP "].into_iter().find(|head| line.starts_with(head));
        let named = head.and_then(|head| {
            let (family, rest) = line[head.len()..].split_once(' ')?;
            counters.contains(family).then_some([head, family, "_total ", rest])
        });
        match named {
            Some(parts) => parts.iter().for_each(|part| out.push_str(part)),
            None => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

/// Whether a client asks for OpenMetrics.
#[must_use]
pub fn wants_openmetrics(accept: Option<&str>) -> bool {
    accept.is_some_and(|accept| accept.contains("application/openmetrics-text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_and_levels_are_told_apart_in_both_forms() {
        let mut out = String::new();
        metric(&mut out, "kvasir_host_hits", "Blocks found", 3);
        family(&mut out, "kvasir_rail_open", "Connections (level)", [("rail=\"a\"", 1), ("rail=\"b\"", 2)]);
        metric(&mut out, "kvasir_node_latency_us", "Time of a look-up (level)", 1500);
        let expected = "# HELP kvasir_host_hits Blocks found.\n# TYPE kvasir_host_hits counter\nkvasir_host_hits_total 3\n\
            # HELP kvasir_rail_open Connections.\n# TYPE kvasir_rail_open gauge\n\
            kvasir_rail_open{rail=\"a\"} 1\nkvasir_rail_open{rail=\"b\"} 2\n\
            # HELP kvasir_node_latency_seconds Time of a look-up.\n# TYPE kvasir_node_latency_seconds gauge\n\
            kvasir_node_latency_seconds 0.0015\n";
        assert_eq!(out, expected);
        let classic = classic(&format!("{out}# EOF\n"));
        assert!(classic.starts_with(
            "# HELP kvasir_host_hits_total Blocks found.\n# TYPE kvasir_host_hits_total counter\n"
        ));
        assert!(!classic.contains("# EOF") && classic.contains("# TYPE kvasir_rail_open gauge\n"));
    }

    #[test]
    fn a_label_holds_any_text() {
        assert_eq!(label("node", "a\\\"b\"\n"), "node=\"a\\\\\\\"b\\\"\\n\"");
    }

    #[test]
    fn a_histogram_ends_with_all_of_them() {
        let mut out = String::new();
        let labels = "stage=\"verify\"".to_owned();
        let cumulative = vec![(Some(0.000_016), 2), (Some(0.5), 3), (None, 4)];
        histogram(
            &mut out,
            "kvasir_x_seconds",
            "Times",
            &[HistogramSeries { labels, cumulative, sum: 7.25 }],
        );
        let expected = "# HELP kvasir_x_seconds Times.\n# TYPE kvasir_x_seconds histogram\n\
            kvasir_x_seconds_bucket{stage=\"verify\",le=\"0.000016\"} 2\n\
            kvasir_x_seconds_bucket{stage=\"verify\",le=\"0.5\"} 3\n\
            kvasir_x_seconds_bucket{stage=\"verify\",le=\"+Inf\"} 4\n\
            kvasir_x_seconds_sum{stage=\"verify\"} 7.25\nkvasir_x_seconds_count{stage=\"verify\"} 4\n";
        assert_eq!(out, expected);
    }

    #[test]
    fn a_process_tells_what_it_takes() {
        let mut out = String::new();
        process(&mut out, "1.2.3");
        for name in [
            "kvasir_build_info{version=\"1.2.3\"} 1",
            "process_cpu_seconds_total ",
            "process_resident_memory_bytes ",
            "process_start_time_seconds ",
            "process_open_fds ",
            "process_max_fds ",
        ] {
            assert!(out.lines().any(|line| line.starts_with(name)), "{name}: {out}");
        }
        let resident = out.lines().find_map(|line| line.strip_prefix("process_resident_memory_bytes "));
        assert!(
            resident.and_then(|bytes| bytes.parse::<f64>().ok()).is_some_and(|bytes| bytes > 1e6),
            "{out}"
        );
    }
}
