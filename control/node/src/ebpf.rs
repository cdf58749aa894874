//! eBPF programs (`[ebpf]`): attachment and counters. The programs are detached when the process ends. Each
//! is off by default; if a requested program cannot be attached, the reason is logged and the process
//! continues without it, because none is required.

use std::fmt::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use anyhow::Context;
use control_config::Settings;
use dataplane_ebpf::{
    Admission, AdmissionConfig, EbpfError, Histogram, Latency, LatencyConfig, Redirect, RedirectConfig,
};
use router_engines::exposition;
use router_gateway::Gateway;

/// Interval at which the share of dropped connections is adjusted to the load.
const OVERLOAD_PERIOD: Duration = Duration::from_millis(200);
/// Share of `gateway.requests_max` from which on new connections are dropped in the kernel.
const OVERLOAD_FROM: f64 = 0.9;

/// The attached programs. Dropping this value detaches all of them.
pub(crate) struct EbpfPrograms {
    redirect: Option<Redirect>,
    admission: Option<Mutex<Admission>>,
    latency: Option<Latency>,
}

fn or_off<T>(name: &str, attached: Result<T, EbpfError>) -> Option<T> {
    match attached {
        Ok(program) => {
            tracing::info!("ebpf: {name} is on");
            Some(program)
        }
        Err(off) => {
            tracing::warn!("ebpf: {name} is off: {off}");
            None
        }
    }
}

impl EbpfPrograms {
    /// Attaches the programs of `[ebpf]`. Admission filters `own_ports`; redirection short-circuits
    /// `local_ports`. Returns an error if admission is requested and cannot be attached, so that the ports
    /// are not left open by accident.
    pub(crate) fn attach(
        settings: &Settings,
        own_ports: &[u16],
        local_ports: Vec<u16>,
    ) -> anyhow::Result<Self> {
        let ebpf = &settings.ebpf;
        if ebpf.redirect && local_ports.is_empty() {
            tracing::warn!("ebpf: redirect has nothing to do: no worker is named by a loopback address");
        }
        let redirect = (ebpf.redirect && !local_ports.is_empty()).then(|| {
            let cgroup = (!ebpf.cgroup.is_empty()).then(|| PathBuf::from(&ebpf.cgroup));
            let message_bytes_max = ebpf.redirect_message_max.0 as u32;
            let config =
                RedirectConfig { cgroup, ports: local_ports, message_bytes_max, ..RedirectConfig::default() };
            or_off("redirect", Redirect::attach(&config))
        });
        let admission =
            if ebpf.admission_interfaces.is_empty() {
                None
            } else {
                let attached = Admission::attach(&admission_config(settings, own_ports)?);
                Some(Mutex::new(attached.context(
                    "ebpf.admission_interfaces is set, and the admission filter cannot be attached",
                )?))
            };
        let latency = ebpf.latency.then(|| or_off("latency", Latency::attach(&LatencyConfig::default())));
        Ok(Self { redirect: redirect.flatten(), admission, latency: latency.flatten() })
    }

    /// Appends the counters in the format of `/metrics`.
    fn render(&self, out: &mut String) {
        if let Some(counters) = self.redirect.as_ref().and_then(|redirect| redirect.counters().ok()) {
            let series = [
                ("redirected_messages", "Messages that skipped the TCP stack", counters.redirected_messages),
                ("redirected_bytes", "Bytes of those messages", counters.redirected_bytes),
                ("redirect_refused_messages", "Messages that could not be redirected", counters.refused),
                ("redirect_sockets_added", "Sockets taken into the map", counters.sockets_added),
                (
                    "redirect_sockets_not_added",
                    "Sockets that the map had no room for",
                    counters.sockets_not_added,
                ),
            ];
            series.iter().for_each(|(name, help, value)| plain(out, name, help, *value));
        }
        let admission = self.admission.as_ref().and_then(|admission| admission.lock().ok());
        if let Some(counters) = admission.and_then(|admission| admission.counters().ok()) {
            let series = [
                ("admission_connections", "Connections let in", counters.passed_connection),
                (
                    "admission_dropped_prefix",
                    "Connection requests dropped by address",
                    counters.dropped_prefix,
                ),
                (
                    "admission_dropped_overload",
                    "Connection requests dropped in overload",
                    counters.dropped_overload,
                ),
                (
                    "admission_dropped_source_rate",
                    "Connection requests dropped by their source's rate",
                    counters.dropped_source_rate,
                ),
                (
                    "admission_dropped_total_rate",
                    "Connection requests dropped by the rate of all",
                    counters.dropped_total_rate,
                ),
            ];
            series.iter().for_each(|(name, help, value)| plain(out, name, help, *value));
        }
        if let Some(snapshot) = self.latency.as_ref().and_then(|latency| latency.snapshot().ok()) {
            let series = [
                ("connect_seconds", "Time to connect", &snapshot.connect),
                ("connection_lifetime_seconds", "Life of connections", &snapshot.lifetime),
                ("block_read_seconds", "Reads of block devices", &snapshot.block_read),
                ("block_write_seconds", "Writes of block devices", &snapshot.block_write),
            ];
            series.iter().for_each(|(name, help, histogram)| buckets(out, name, help, histogram));
            plain(out, "retransmitted_segments", "TCP segments sent again", snapshot.retransmits);
        }
    }

    /// Adds the counters to the gateway's metrics, and drops up to `overload_max` percent of new connections
    /// in the kernel while the gateway is nearly full.
    pub(crate) fn serve(self, gateway: &Arc<Gateway>, requests_max: usize, overload_max: u32) {
        let programs = Arc::new(self);
        let shown = Arc::clone(&programs);
        gateway.show_also(Box::new(move |out| shown.render(out)));
        if programs.admission.is_some() && overload_max > 0 {
            tokio::spawn(follow_load(Arc::downgrade(gateway), programs, requests_max, overload_max));
        }
    }
}

fn admission_config(settings: &Settings, own_ports: &[u16]) -> anyhow::Result<AdmissionConfig> {
    let ebpf = &settings.ebpf;
    let mut ports = own_ports.to_vec();
    for port in &ebpf.admission_ports {
        let port = port.parse().map_err(|_| anyhow::anyhow!("ebpf.admission_ports: {port:?} is no port"))?;
        ports.push(port);
    }
    let mut allow = Vec::new();
    for prefix in &ebpf.admission_allow {
        let parsed =
            prefix.parse().map_err(|error| anyhow::anyhow!("ebpf.admission_allow: {prefix:?}: {error}"))?;
        allow.push(parsed);
    }
    Ok(AdmissionConfig {
        interfaces: ebpf.admission_interfaces.clone(),
        ports,
        allow,
        syn_rate_per_source: ebpf.syn_rate_per_source as u32,
        syn_burst_per_source: ebpf.syn_burst_per_source as u32,
        syn_rate: ebpf.syn_rate as u32,
        syn_burst: ebpf.syn_burst as u32,
        ..AdmissionConfig::default()
    })
}

/// Returns the share of new connections to drop, in percent, for `inside` of `requests_max` requests.
fn overload_percent(inside: usize, requests_max: usize) -> u32 {
    let taken = inside as f64 / requests_max.max(1) as f64;
    let over = (taken - OVERLOAD_FROM) / (1.0 - OVERLOAD_FROM);
    (over.clamp(0.0, 1.0) * 100.0) as u32
}

async fn follow_load(
    gateway: Weak<Gateway>,
    programs: Arc<EbpfPrograms>,
    requests_max: usize,
    overload_max: u32,
) {
    let mut present = 0;
    loop {
        tokio::time::sleep(OVERLOAD_PERIOD).await;
        let Some(gateway) = gateway.upgrade() else { return };
        let percent = overload_percent(gateway.requests_inside(), requests_max).min(overload_max);
        if percent == present {
            continue;
        }
        let admission = programs.admission.as_ref().and_then(|admission| admission.lock().ok());
        match admission.map(|mut admission| admission.set_overload(percent)) {
            // Retried in the next period.
            Some(Err(error)) => tracing::warn!("ebpf: the overload level cannot be set: {error}"),
            _ => present = percent,
        }
    }
}

/// Appends a counter without labels.
fn plain(out: &mut String, name: &str, help: &str, value: u64) {
    exposition::metric(out, &format!("kvasir_kernel_{name}"), help, value);
}

fn buckets(out: &mut String, name: &str, help: &str, histogram: &Histogram) {
    let name = format!("kvasir_kernel_{name}");
    let _infallible = writeln!(out, "# HELP {name} {help}.\n# TYPE {name} histogram");
    for (le, count) in histogram.buckets() {
        let _infallible = writeln!(out, "{name}_bucket{{le=\"{le:?}\"}} {count}");
    }
    let (count, sum) = (histogram.count(), histogram.sum().as_secs_f64());
    let _infallible =
        writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {count}\n{name}_sum {sum:?}\n{name}_count {count}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_dropped_as_the_room_runs_out() {
        let percents = [0, 899, 900, 950, 1000, 2000].map(|inside| overload_percent(inside, 1000));
        assert_eq!(percents[..3], [0, 0, 0]);
        assert!((49..=50).contains(&percents[3]) && percents[4..] == [100, 100], "{percents:?}");
    }

    #[test]
    fn what_cannot_be_parsed_is_named() {
        let mut settings = Settings::default();
        settings.ebpf.admission_allow = vec!["10.0.0.0/8".to_owned(), "ten".to_owned()];
        let error = admission_config(&settings, &[8000]).expect_err("no prefix").to_string();
        assert!(error.contains("ebpf.admission_allow") && error.contains("ten"), "{error}");
        settings.ebpf.admission_allow.pop();
        settings.ebpf.admission_ports = vec!["7400".to_owned()];
        let config = admission_config(&settings, &[8000]).expect("fine");
        assert_eq!((config.ports, config.allow.len()), (vec![8000, 7400], 1));
    }
}
