//! Loads `bpf/latency.bpf.c`: histograms of sockets and block requests, kept in the kernel.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use aya::maps::{MapData, PerCpuArray};
use aya::programs::raw_trace_point::RawTracePoint;
use aya::programs::tp_btf::BtfTracePoint;
use aya::programs::{RawTracePointRunOptions, TestRun};
use aya::{Btf, Ebpf};

use crate::config::{LatencyConfig, Scope};
use crate::error::EbpfError;
use crate::histogram::Histogram;
use crate::host;
use crate::layout::{HistogramValues, LatencySettings};
use crate::load::{self, refused};

const FEATURE: &str = "kernel latency histograms";

const CONNECTIONS: &[(&str, &str)] =
    &[("socket_state", "inet_sock_set_state"), ("segment_resent", "tcp_retransmit_skb")];
const SEGMENTS: &[(&str, &str)] =
    &[("segment_arrives", "tcp_probe"), ("socket_read", "tcp_rcv_space_adjust")];
const BLOCK: &[(&str, &str)] = &[("request_issued", "block_rq_issue"), ("request_done", "block_rq_complete")];

/// The attached programs. Dropping it detaches them.
pub struct Latency {
    histograms: PerCpuArray<MapData, HistogramValues>,
    counters: PerCpuArray<MapData, u64>,
    ebpf: Ebpf,
}

/// Values of the histograms since the attachment. A part that was not configured stays empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LatencySnapshot {
    /// Time from `connect(2)` to the established connection.
    pub connect: Histogram,
    /// Time from the established connection to its end.
    pub lifetime: Histogram,
    /// Time from the arrival of the first unread byte to the read that returns it.
    pub read_delay: Histogram,
    /// The kernel's smoothed round-trip time, sampled at each arriving segment.
    pub round_trip: Histogram,
    /// Block reads: time from issue to the device to completion.
    pub block_read: Histogram,
    /// Block writes: time from issue to completion.
    pub block_write: Histogram,
    /// Flushes of a device's cache: time from issue to completion.
    pub block_flush: Histogram,
    /// Retransmitted segments.
    pub retransmits: u64,
    /// Sockets and requests that were not measured because the map was full.
    pub untracked: u64,
}

impl Latency {
    /// Loads and attaches the configured programs.
    ///
    /// # Errors
    ///
    /// [`EbpfError`]: not built, capabilities, BTF, cgroup, or the kernel refused.
    pub fn attach(config: &LatencyConfig) -> Result<Self, EbpfError> {
        let (mut latency, btf) = Self::load()?;
        let mut settings = LatencySettings::default();
        match &config.scope {
            Scope::Process => settings.tgid = latency.own_tgid()?,
            Scope::Cgroup(path) => settings.cgroup = cgroup_id(path)?,
            Scope::Machine => {}
        }
        (settings.major, settings.minor) = config.device.unwrap_or((0, 0));
        load::set_once(&mut latency.ebpf, "settings", settings)?;
        for (asked, programs) in [
            // Segments are those of tracked connections.
            (config.connections || config.segments, CONNECTIONS),
            (config.segments, SEGMENTS),
            (config.block, BLOCK),
        ] {
            for (name, tracepoint) in programs.iter().filter(|_| asked) {
                let program: &mut BtfTracePoint =
                    load::program(&mut latency.ebpf, name, |program: &mut BtfTracePoint| {
                        program.load(tracepoint, &btf)
                    })?;
                program.attach().map_err(|error| refused(format!("attaching to {tracepoint}"), &error))?;
            }
        }
        Ok(latency)
    }

    /// Loads all programs and attaches none, to find out whether [`Latency::attach`] would work.
    pub(crate) fn check() -> Result<(), EbpfError> {
        let (mut latency, btf) = Self::load()?;
        for (name, tracepoint) in [CONNECTIONS, SEGMENTS, BLOCK].concat() {
            load::program(&mut latency.ebpf, name, |program: &mut BtfTracePoint| {
                program.load(tracepoint, &btf)
            })?;
        }
        Ok(())
    }

    fn load() -> Result<(Self, Btf), EbpfError> {
        load::LATENCY.map_err(EbpfError::NotBuilt)?;
        host::check_capabilities(FEATURE, host::STRUCTURES)?;
        host::check_btf(FEATURE)?;
        let btf = Btf::from_sys_fs().map_err(|error| refused("the kernel's BTF".to_owned(), &error))?;
        let mut ebpf = load::load("latency", load::LATENCY, &[])?;
        let histograms = load::map(&mut ebpf, "histograms")?;
        let counters = load::map(&mut ebpf, "counters")?;
        Ok((Self { histograms, counters, ebpf }, btf))
    }

    /// Returns all histograms, summed over CPUs: nine system calls.
    ///
    /// # Errors
    ///
    /// [`EbpfError::Refused`] where a map cannot be read.
    pub fn snapshot(&self) -> Result<LatencySnapshot, EbpfError> {
        let histogram = |index| {
            let mut sum = Histogram::default();
            for values in load::per_cpu(&self.histograms, index)?.iter() {
                sum.add(&values.counts, values.sum_ns);
            }
            Ok(sum)
        };
        Ok(LatencySnapshot {
            connect: histogram(0)?,
            lifetime: histogram(1)?,
            read_delay: histogram(2)?,
            round_trip: histogram(3)?,
            block_read: histogram(4)?,
            block_write: histogram(5)?,
            block_flush: histogram(6)?,
            retransmits: load::counter(&self.counters, 0)?,
            untracked: load::counter(&self.counters, 1)?,
        })
    }

    /// Returns this process's number as the kernel's programs see it, which in a container differs from
    /// `getpid`.
    fn own_tgid(&mut self) -> Result<u32, EbpfError> {
        let program: &mut RawTracePoint = load::program(&mut self.ebpf, "own_tgid", RawTracePoint::load)?;
        let result = program
            .test_run(RawTracePointRunOptions::new())
            .map_err(|error| refused("running own_tgid".to_owned(), &error))?;
        Ok(result.return_value)
    }
}

/// Returns a cgroup's id, which is the inode number of its directory.
fn cgroup_id(path: &Path) -> Result<u64, EbpfError> {
    host::check_cgroup(path)?;
    let found = std::fs::metadata(path)
        .map_err(|error| EbpfError::NotACgroup { path: path.to_owned(), reason: error.to_string() })?;
    Ok(found.ino())
}

#[cfg(test)]
mod tests {
    use super::{Latency, RawTracePoint, RawTracePointRunOptions, TestRun, load};
    use crate::error::EbpfError;
    use crate::histogram::Histogram;
    use std::time::Duration;

    /// The histogram code of the kernel and of this crate put the same values into the same buckets.
    #[test]
    fn kernel_and_model_agree() {
        let (mut latency, _) = match Latency::load() {
            Ok(loaded) => loaded,
            Err(off @ (EbpfError::NotBuilt(_) | EbpfError::Capability { .. } | EbpfError::NoBtf { .. })) => {
                println!("SKIPPED: {off}");
                return;
            }
            Err(off) => panic!("{off}"),
        };
        assert_ne!(latency.own_tgid().expect("it runs"), 0);
        let mut model = Histogram::default();
        let program: &mut RawTracePoint =
            load::program(&mut latency.ebpf, "record_value", RawTracePoint::load).expect("it loads");
        let values = (0..=64).chain((6..63).flat_map(|bit| [(1u64 << bit) - 1, 1 << bit, 3 << (bit - 1)]));
        for ns in values {
            let mut options = RawTracePointRunOptions::new();
            options.args[0] = ns;
            program.test_run(options).expect("it runs");
            model.record(Duration::from_nanos(ns));
        }
        assert_eq!(latency.snapshot().expect("it reads").connect, model);
    }
}
