//! eBPF programs beside the data plane. Each is optional, and the appliance works correctly without any of
//! them.
//!
//! - [`Redirect`]: short messages between two sockets of this host skip the TCP stack (sockops + sk_msg).
//! - [`Admission`]: filters and limits new connections to the appliance's ports in the driver (XDP).
//! - [`EngineProbe`]: waiting times of an engine of this machine, measured in the kernel; the engine is not
//!   changed.
//! - [`Latency`]: histograms, kept in the kernel, of the appliance's TCP sockets and block requests.
//!
//! Invariants:
//! - Nothing is pinned. Cgroup, XDP and tracepoint attachments are kernel links held by a file descriptor of
//!   this process, so that they end with it, however it ends.
//! - A program only passes packets that the kernel would pass, faster (`Redirect`), drops TCP to listed ports
//!   (`Admission`) or observes (`Latency`, `EngineProbe`). Packets that a program cannot judge take the usual
//!   path and are counted.
//! - Each missing requirement (clang, capability, BTF, cgroup, interface) is an [`EbpfError`] with the reason and
//!   the remedy.
//!
//! The programs are C in `bpf/`, compiled by `build.rs` and embedded: aya's Rust side needs a nightly
//! compiler, its own LLVM and a second target, and generates the same instructions. aya 0.14 loads them; 0.16
//! needs a newer compiler. All calls here are for the control path: each one makes a few system calls.
//! Linux 5.18 or newer. Sources: kernel net/ipv4/tcp_bpf.c, net/core/sock_map.c, include/uapi/linux/bpf.h.

mod admission;
mod bucket;
mod config;
mod engines;
mod error;
mod histogram;
mod host;
mod latency;
mod layout;
mod link;
mod load;
mod prefix;
mod probe;
mod redirect;

pub use admission::{Admission, AdmissionCounters, Attached};
pub use bucket::Bucket;
pub use config::{
    AdmissionConfig, LatencyConfig, OVERLOAD_PERCENT_MAX, PORTS_MAX, PREFIXES_MAX, RATE_MAX, RedirectConfig,
    Scope,
};
pub use engines::{EngineProbe, EngineTimes, WatchedEngine};
pub use error::EbpfError;
pub use histogram::Histogram;
pub use host::own_cgroup;
pub use latency::{Latency, LatencySnapshot};
pub use prefix::{Prefix, PrefixError};
pub use probe::{Finding, probe};
pub use redirect::{Redirect, RedirectCounters};
