//! Mirrors of `bpf/shared.h`: the types in the maps. Sizes are asserted here, the order of the counters by
//! tests that provoke all but the rarest (`sockets_not_added`, `retransmits`, `untracked`).

use aya::Pod;

/// One end of a connection. Used only as the key of a map whose entries are counted, so only its size
/// matters.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Endpoint {
    pub(crate) netns: u64,
    pub(crate) local: [u32; 4],
    pub(crate) remote: [u32; 4],
    pub(crate) local_port: u32,
    pub(crate) remote_port: u32,
}
const _: () = assert!(size_of::<Endpoint>() == 48);

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct RedirectSettings {
    pub(crate) enabled: u32,
    pub(crate) message_bytes_max: u32,
    pub(crate) unread_bytes_max: u64,
}
const _: () = assert!(size_of::<RedirectSettings>() == 16);

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct AdmissionSettings {
    pub(crate) source_interval_ns: u64,
    pub(crate) source_burst_ns: u64,
    pub(crate) total_interval_ns: u64,
    pub(crate) total_burst_ns: u64,
    pub(crate) allow_list: u32,
    pub(crate) overload_percent: u32,
}
const _: () = assert!(size_of::<AdmissionSettings>() == 40);

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct LatencySettings {
    pub(crate) cgroup: u64,
    pub(crate) tgid: u32,
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) padding: u32,
}
const _: () = assert!(size_of::<LatencySettings>() == 24);

/// A listening port within a network namespace.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct EnginePort {
    pub(crate) netns: u32,
    pub(crate) port: u32,
}
const _: () = assert!(size_of::<EnginePort>() == 8);

/// Largest number of engines that are watched at a time.
pub(crate) const ENGINES_MAX: u32 = 32;
/// Number of histograms of each engine.
pub(crate) const ENGINE_HISTOGRAMS: u32 = 4;

/// Number of buckets of a histogram: a quarter of an octave each.
pub(crate) const BUCKETS: usize = 160;

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct HistogramValues {
    pub(crate) counts: [u64; BUCKETS],
    pub(crate) sum_ns: u64,
}
const _: () = assert!(size_of::<HistogramValues>() == (BUCKETS + 1) * 8);

// SAFETY: repr(C), integers only, and the size above shows that there is no padding.
unsafe impl Pod for Endpoint {}
// SAFETY: as for `Endpoint`.
unsafe impl Pod for EnginePort {}
// SAFETY: as for `Endpoint`.
unsafe impl Pod for RedirectSettings {}
// SAFETY: as for `Endpoint`.
unsafe impl Pod for AdmissionSettings {}
// SAFETY: as for `Endpoint`.
unsafe impl Pod for LatencySettings {}
// SAFETY: as for `Endpoint`.
unsafe impl Pod for HistogramValues {}
