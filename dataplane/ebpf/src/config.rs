//! What an operator may set, with the checks. Defaults are those of `Default`.

use std::path::PathBuf;

use crate::error::Off;
use crate::prefix::Prefix;

/// Ports that one program can watch; the size of the map `ports`.
pub const PORTS_MAX: usize = 64;
/// Prefixes of each address family in an allow-list; the size of the maps `allow_v4` and `allow_v6`.
pub const PREFIXES_MAX: usize = 4096;
/// The highest rate and burst of new connections: a token each microsecond.
pub const RATE_MAX: u32 = 1_000_000;
/// Everything is dropped.
pub const OVERLOAD_PERCENT_MAX: u32 = 100;

const MESSAGE_BYTES_MAX: std::ops::RangeInclusive<u32> = 1..=512 << 10;
const UNREAD_BYTES_MAX: std::ops::RangeInclusive<u64> = 1 << 20..=1 << 30;
const SOCKETS_MAX: std::ops::RangeInclusive<u32> = 2..=1 << 20;
const SOURCES_MAX: std::ops::RangeInclusive<u32> = 1024..=1 << 22;

/// Which connections skip the TCP stack.
#[derive(Clone, Debug)]
pub struct RedirectConfig {
    /// The cgroup v2 directory whose processes take part; `None`: the one that this process is in.
    pub cgroup: Option<PathBuf>,
    /// Ports that a local server listens on: 1 to [`PORTS_MAX`] of them.
    pub ports: Vec<u16>,
    /// A longer message takes the TCP stream, which has flow control and is as fast for it. 1 to 512 KiB.
    pub message_bytes_max: u32,
    /// Bytes that may wait unread in one direction, 1 KiB of overhead for each message included, before the sender
    /// gets `EACCES`: only a sender that never pauses after a short message, to a reader that stays behind, comes
    /// near it. 1 MiB to 1 GiB.
    pub unread_bytes_max: u64,
    /// Sockets in the map, two for each connection; further connections take the usual way. 2 to 2^20.
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
    pub(crate) fn check(&self) -> Result<(), Off> {
        check_ports("ebpf.redirect.ports", &self.ports)?;
        check("ebpf.redirect_message_max", &MESSAGE_BYTES_MAX, self.message_bytes_max)?;
        check("ebpf.redirect.unread_bytes_max", &UNREAD_BYTES_MAX, self.unread_bytes_max)?;
        check("ebpf.redirect.sockets_max", &SOCKETS_MAX, self.sockets_max)
    }
}

/// Who may open connections, and how fast.
#[derive(Clone, Debug)]
pub struct AdmissionConfig {
    /// Network interfaces, by name; an interface has room for one XDP program.
    pub interfaces: Vec<String>,
    /// TCP destination ports: 1 to [`PORTS_MAX`] of them.
    pub ports: Vec<u16>,
    /// Sources that may send to these ports; empty: everybody. At most [`PREFIXES_MAX`] of each family.
    pub allow: Vec<Prefix>,
    /// New connections per second of one source (an IPv4 address or an IPv6 /64); 0: no limit. Up to [`RATE_MAX`].
    pub syn_rate_per_source: u32,
    /// New connections that a source may open at once. 1 to [`RATE_MAX`].
    pub syn_burst_per_source: u32,
    /// New connections per second of all sources; 0: no limit. Up to [`RATE_MAX`].
    pub syn_rate: u32,
    /// New connections that all sources together may open at once. 1 to [`RATE_MAX`].
    pub syn_burst: u32,
    /// Share of new connections dropped at random, 0 to 100.
    pub overload_percent: u32,
    /// Sources remembered; the least recently seen one makes room. 1024 to 2^22.
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
    pub(crate) fn check(&self) -> Result<(), Off> {
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

/// Whose sockets and block requests are measured.
#[derive(Clone, Debug, Default)]
pub enum Scope {
    /// Those of this process. Accepted connections are not among the sockets: the kernel finishes a handshake
    /// outside of any process. Block requests that waited in a full queue are not counted either: a kernel thread
    /// issues them.
    #[default]
    Process,
    /// The sockets of the processes in a cgroup v2 directory, accepted ones included, and the block requests of
    /// everybody: the kernel issues many of them for others.
    Cgroup(PathBuf),
    /// Everything on this machine.
    Machine,
}

/// What is measured. Each part costs something on every event, so that each can be left out.
#[derive(Clone, Debug)]
pub struct LatencyConfig {
    /// Whose.
    pub scope: Scope,
    /// TCP connections: time to connect, lifetime, retransmissions.
    pub connections: bool,
    /// Each arriving segment: round-trip time, and how long the first unread byte waits for its reader.
    pub segments: bool,
    /// Block requests: time from issue to completion.
    pub block: bool,
    /// Only the requests of this device (major, minor), a whole disk; `None`: all.
    pub device: Option<(u32, u32)>,
}

impl Default for LatencyConfig {
    fn default() -> Self {
        Self { scope: Scope::Process, connections: true, segments: false, block: true, device: None }
    }
}

pub(crate) fn check_allow(allow: &[Prefix]) -> Result<(), Off> {
    let v4 = allow.iter().filter(|prefix| prefix.address().is_ipv4()).count();
    check("ebpf.admission_allow", &(0..=PREFIXES_MAX), v4.max(allow.len() - v4))
}

pub(crate) fn check_overload(percent: u32) -> Result<(), Off> {
    check("ebpf.admission.overload_percent", &(0..=OVERLOAD_PERCENT_MAX), percent)
}

fn check_ports(key: &'static str, ports: &[u16]) -> Result<(), Off> {
    if ports.contains(&0) {
        return Err(Off::Configuration { key, reason: "0 is no port".to_owned() });
    }
    check(key, &(1..=PORTS_MAX), ports.len())
}

fn check<T: PartialOrd + std::fmt::Display>(
    key: &'static str,
    range: &std::ops::RangeInclusive<T>,
    value: T,
) -> Result<(), Off> {
    if range.contains(&value) {
        return Ok(());
    }
    let reason = format!("{value} is not within {} to {}", range.start(), range.end());
    Err(Off::Configuration { key, reason })
}

#[cfg(test)]
mod tests {
    use super::{AdmissionConfig, RedirectConfig, check_overload};
    use crate::error::Off;

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
                Err(Off::Configuration { key, .. }) => assert_eq!(key, expected),
                other => panic!("{expected}: {other:?}"),
            }
        }
    }
}
