//! Configuration of the eBPF features, with the checks. Defaults are those of `Default`.

use std::path::PathBuf;

use crate::error::EbpfError;
use crate::prefix::Prefix;

/// Largest number of ports of one program; the size of the map `ports`.
pub const PORTS_MAX: usize = 64;
/// Largest number of prefixes of each address family in an allow-list; the size of the maps `allow_v4` and
/// `allow_v6`.
pub const PREFIXES_MAX: usize = 4096;
/// Largest rate and burst of new connections: one token per microsecond.
pub const RATE_MAX: u32 = 1_000_000;
/// Largest overload level: every new connection is dropped.
pub const OVERLOAD_PERCENT_MAX: u32 = 100;

const MESSAGE_BYTES_MAX: std::ops::RangeInclusive<u32> = 1..=512 << 10;
const UNREAD_BYTES_MAX: std::ops::RangeInclusive<u64> = 1 << 20..=1 << 30;
const SOCKETS_MAX: std::ops::RangeInclusive<u32> = 2..=1 << 20;
const SOURCES_MAX: std::ops::RangeInclusive<u32> = 1024..=1 << 22;

/// Configuration of the redirect: connections that skip the TCP stack.
#[derive(Clone, Debug)]
pub struct RedirectConfig {
    /// The cgroup v2 directory whose processes take part; `None`: the directory of this process.
    pub cgroup: Option<PathBuf>,
    /// Ports that a local server listens on: 1 to [`PORTS_MAX`] of them.
    pub ports: Vec<u16>,
    /// Longest message that is redirected, 1 to 512 KiB. Longer messages take the TCP stream, which has flow
    /// control and is as fast for them.
    pub message_bytes_max: u32,
    /// Largest number of unread bytes in one direction, including 1 KiB of overhead for each message; beyond
    /// it the sender gets `EACCES`. Only a sender that never pauses after a short message, to a reader that
    /// stays behind, comes near it. 1 MiB to 1 GiB.
    pub unread_bytes_max: u64,
    /// Sockets in the map, two for each connection. Further connections are not redirected. 2 to 2^20.
    pub sockets_max: u32,
}

impl Default for RedirectConfig {
    fn default() -> Self {
        Self {
            cgroup: None,
            ports: Vec::new(),
            message_bytes_max: 16 << 10,
            unread_bytes_max: 256 << 20,
            sockets_max: 8192,
        }
    }
}

impl RedirectConfig {
    pub(crate) fn check(&self) -> Result<(), EbpfError> {
        check_ports("ebpf.redirect.ports", &self.ports)?;
        check("ebpf.redirect_message_max", &MESSAGE_BYTES_MAX, self.message_bytes_max)?;
        check("ebpf.redirect.unread_bytes_max", &UNREAD_BYTES_MAX, self.unread_bytes_max)?;
        check("ebpf.redirect.sockets_max", &SOCKETS_MAX, self.sockets_max)
    }
}

/// Configuration of admission: the sources that may open connections, and the rates.
#[derive(Clone, Debug)]
pub struct AdmissionConfig {
    /// Network interfaces, by name. An interface can have only one XDP program.
    pub interfaces: Vec<String>,
    /// TCP destination ports: 1 to [`PORTS_MAX`] of them.
    pub ports: Vec<u16>,
    /// Sources that may send to these ports; empty: all sources. At most [`PREFIXES_MAX`] of each family.
    pub allow: Vec<Prefix>,
    /// New connections per second of one source (an IPv4 address or an IPv6 /64); 0: no limit. Up to
    /// [`RATE_MAX`].
    pub syn_rate_per_source: u32,
    /// Burst of new connections of one source. 1 to [`RATE_MAX`].
    pub syn_burst_per_source: u32,
    /// New connections per second of all sources; 0: no limit. Up to [`RATE_MAX`].
    pub syn_rate: u32,
    /// Burst of new connections of all sources together. 1 to [`RATE_MAX`].
    pub syn_burst: u32,
    /// Share of new connections that are dropped at random, in percent, 0 to 100.
    pub overload_percent: u32,
    /// Sources that are remembered; the least recently seen one is replaced. 1024 to 2^22.
    pub sources_max: u32,
}

impl Default for AdmissionConfig {
    fn default() -> Self {
        Self {
            interfaces: Vec::new(),
            ports: Vec::new(),
            allow: Vec::new(),
            syn_rate_per_source: 0,
            syn_burst_per_source: 64,
            syn_rate: 0,
            syn_burst: 1024,
            overload_percent: 0,
            sources_max: 65536,
        }
    }
}

impl AdmissionConfig {
    pub(crate) fn check(&self) -> Result<(), EbpfError> {
        check_ports("ebpf.admission_ports", &self.ports)?;
        check_allow(&self.allow)?;
        check("ebpf.syn_rate_per_source", &(0..=RATE_MAX), self.syn_rate_per_source)?;
        check("ebpf.syn_burst_per_source", &(1..=RATE_MAX), self.syn_burst_per_source)?;
        check("ebpf.syn_rate", &(0..=RATE_MAX), self.syn_rate)?;
        check("ebpf.syn_burst", &(1..=RATE_MAX), self.syn_burst)?;
        check_overload(self.overload_percent)?;
        check("ebpf.admission.sources_max", &SOURCES_MAX, self.sources_max)
    }
}

/// Sockets and block requests that are measured.
#[derive(Clone, Debug, Default)]
pub enum Scope {
    /// Sockets and block requests of this process. Accepted connections are not included: the kernel finishes
    /// a handshake outside of any process. Block requests that waited in a full queue are not included
    /// either: a kernel thread issues them.
    #[default]
    Process,
    /// Sockets of the processes in a cgroup v2 directory, including accepted ones, and the block requests of
    /// all processes: the kernel issues many of them on behalf of another process.
    Cgroup(PathBuf),
    /// All sockets and block requests of this machine.
    Machine,
}

/// Configuration of the latency measurement. Each part costs time on every event and can be switched off.
#[derive(Clone, Debug)]
pub struct LatencyConfig {
    /// Sockets and block requests that are measured.
    pub scope: Scope,
    /// TCP connections: time to connect, lifetime, retransmissions.
    pub connections: bool,
    /// Each arriving segment: round-trip time, and the time that the first unread byte waits for its reader.
    pub segments: bool,
    /// Block requests: time from issue to completion.
    pub block: bool,
    /// Whole disk (major, minor) whose requests are measured; `None`: all disks.
    pub device: Option<(u32, u32)>,
}

impl Default for LatencyConfig {
    fn default() -> Self {
        Self { scope: Scope::Process, connections: true, segments: false, block: true, device: None }
    }
}

pub(crate) fn check_allow(allow: &[Prefix]) -> Result<(), EbpfError> {
    let v4 = allow.iter().filter(|prefix| prefix.address().is_ipv4()).count();
    check("ebpf.admission_allow", &(0..=PREFIXES_MAX), v4.max(allow.len() - v4))
}

pub(crate) fn check_overload(percent: u32) -> Result<(), EbpfError> {
    check("ebpf.admission.overload_percent", &(0..=OVERLOAD_PERCENT_MAX), percent)
}

fn check_ports(key: &'static str, ports: &[u16]) -> Result<(), EbpfError> {
    if ports.contains(&0) {
        return Err(EbpfError::Configuration { key, reason: "0 is no port".to_owned() });
    }
    check(key, &(1..=PORTS_MAX), ports.len())
}

fn check<T: PartialOrd + std::fmt::Display>(
    key: &'static str,
    range: &std::ops::RangeInclusive<T>,
    value: T,
) -> Result<(), EbpfError> {
    if range.contains(&value) {
        return Ok(());
    }
    let reason = format!("{value} is not within {} to {}", range.start(), range.end());
    Err(EbpfError::Configuration { key, reason })
}

#[cfg(test)]
mod tests {
    use super::{AdmissionConfig, RedirectConfig, check_overload};
    use crate::error::EbpfError;

    #[test]
    fn values_out_of_range_are_named() {
        let redirect = RedirectConfig { ports: vec![8000], ..RedirectConfig::default() };
        let admission = AdmissionConfig { ports: vec![8000], ..AdmissionConfig::default() };
        redirect.check().expect("the defaults are in range");
        admission.check().expect("the defaults are in range");
        let cases = [
            (RedirectConfig { ports: vec![], ..redirect.clone() }.check(), "ebpf.redirect.ports"),
            (RedirectConfig { ports: vec![0], ..redirect.clone() }.check(), "ebpf.redirect.ports"),
            (
                RedirectConfig { unread_bytes_max: 1, ..redirect.clone() }.check(),
                "ebpf.redirect.unread_bytes_max",
            ),
            (AdmissionConfig { ports: vec![9; 65], ..admission.clone() }.check(), "ebpf.admission_ports"),
            (AdmissionConfig { syn_burst: 0, ..admission.clone() }.check(), "ebpf.syn_burst"),
            (check_overload(101), "ebpf.admission.overload_percent"),
        ];
        for (found, expected) in cases {
            match found {
                Err(EbpfError::Configuration { key, .. }) => assert_eq!(key, expected),
                other => panic!("{expected}: {other:?}"),
            }
        }
    }
}
