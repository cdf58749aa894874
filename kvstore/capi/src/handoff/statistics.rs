//! Statistics of hand-offs, in the layout of the C API.

use dataplane_rails::RailCounters;
use dataplane_transfer::{BOUNDS, StageSnapshot};

use super::HandOffs;
use crate::layout::text_field;

/// Counters of hand-offs, `kvasir_kv_handoff_statistics` in C. Fields are only ever appended.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HandOffStatistics {
    /// Blocks received and verified.
    pub blocks_received: u64,
    /// Transfers received completely.
    pub transfers_completed: u64,
    /// Transfers that ended with blocks missing.
    pub transfers_incomplete: u64,
    /// Transfers that either side cancelled.
    pub transfers_cancelled: u64,
    /// Transfers whose lease expired because no receiver connected.
    pub leases_expired: u64,
    /// Connections that ended.
    pub peers_lost: u64,
    /// Bytes written to peers.
    pub bytes_sent: u64,
    /// Pieces whose checksum did not match.
    pub checksum_failures: u64,
    /// Slots in use now.
    pub slots_used: u64,
    /// Transfers whose blocks a network card or a copy engine read directly from device memory.
    pub sent_directly: u64,
    /// Transfers whose blocks went from device memory through host memory.
    pub sent_staged: u64,
    /// Transfers whose blocks a network card or a copy engine wrote directly to device memory.
    pub received_directly: u64,
    /// Transfers whose blocks reached device memory through host memory.
    pub received_staged: u64,
    /// Number of slots, each for one block.
    pub slots: u64,
}

/// Bytes of a rail's name in [`RailStatistics`], the final 0 included.
pub const RAIL_NAME_BYTES: usize = 64;

/// Counters of one transport of hand-offs, `kvasir_kv_rail_statistics` in C. Fields are only ever appended.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RailStatistics {
    /// `shm`, `cuda_ipc`, `tcp` or `rdma DEVICE`, UTF-8 with a final 0; longer names are cut.
    pub name: [u8; RAIL_NAME_BYTES],
    /// Bytes of blocks that the rail was given to write or read.
    pub block_bytes: u64,
    /// Slices posted again because a connection failed.
    pub slices_retried: u64,
    /// Connections that failed while their peer stayed reachable over others.
    pub links_failed: u64,
    /// Smoothed time per KiB, queueing included; 0 if no peer has several rails.
    pub nanoseconds_per_kib: u64,
    /// 1 from the time at which the rail's time per KiB exceeds 3 times that of the best rail of equal
    /// preference until it is at most 1.5 times.
    pub is_slow: u64,
}

impl RailStatistics {
    fn named(name: &str) -> Self {
        Self {
            name: text_field(name),
            block_bytes: 0,
            slices_retried: 0,
            links_failed: 0,
            nanoseconds_per_kib: 0,
            is_slow: 0,
        }
    }
}

/// Bytes of a stage's name in [`StageStatistics`], the final 0 included.
pub const STAGE_NAME_BYTES: usize = 16;

/// Durations of one stage of hand-offs, `kvasir_kv_stage_statistics` in C. Fields are only ever appended.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageStatistics {
    /// Name as in [`dataplane_transfer::Stage::name`], with a final 0.
    pub name: [u8; STAGE_NAME_BYTES],
    /// Sum of the durations, in microseconds.
    pub sum_us: u64,
    /// Number of durations.
    pub count: u64,
    /// Number of durations of at most 16 µs · 2^index.
    pub at_most: [u64; BOUNDS],
}

impl From<StageSnapshot> for StageStatistics {
    fn from(snapshot: StageSnapshot) -> Self {
        let mut at_most = [0; BOUNDS];
        for (to, (_, count)) in at_most.iter_mut().zip(&snapshot.cumulative) {
            *to = *count;
        }
        let count = snapshot.cumulative.last().map_or(0, |(_, count)| *count);
        Self { name: text_field(snapshot.stage.name()), sum_us: snapshot.sum_us, count, at_most }
    }
}

impl HandOffs {
    /// Counters since the start.
    pub(crate) fn statistics(&self) -> HandOffStatistics {
        let counted = self.counters.snapshot();
        let staged = self.staging_pool.as_ref().map_or(0, |pool| pool.used_count());
        let value =
            |name: &str| counted.iter().find(|(known, ..)| *known == name).map_or(0, |(.., value)| *value);
        HandOffStatistics {
            blocks_received: value("blocks_received"),
            transfers_completed: value("completed"),
            transfers_incomplete: value("incomplete"),
            transfers_cancelled: value("cancelled"),
            leases_expired: value("leases_expired"),
            peers_lost: value("peers_lost"),
            bytes_sent: value("bytes_sent"),
            checksum_failures: value("checksum_failures"),
            slots_used: (self.pool.used_count() + staged) as u64,
            sent_directly: value("sent_directly"),
            sent_staged: value("sent_staged"),
            received_directly: value("received_directly"),
            received_staged: value("received_staged"),
            slots: self.pool.slot_count() as u64,
        }
    }

    /// Durations of the stages, the receiver's first.
    pub(crate) fn stages(&self) -> Vec<StageStatistics> {
        self.counters.stages.snapshot().into_iter().map(StageStatistics::from).collect()
    }

    /// Counters of each transport, in the order in which the transports were opened.
    pub(crate) fn rails(&self) -> Vec<RailStatistics> {
        let mut rails: Vec<(&str, RailStatistics)> = Vec::new();
        for RailCounters { name, read } in &self.rails {
            // The bond's counters of each transport follow those of the transports, under the same names.
            let index = rails.iter().position(|(known, _)| known == name).unwrap_or_else(|| {
                rails.push((name, RailStatistics::named(name)));
                rails.len() - 1
            });
            let rail = &mut rails[index].1;
            for (counter, _, value) in read() {
                match counter {
                    "block_bytes" => rail.block_bytes += value,
                    "slices_retried" => rail.slices_retried += value,
                    "links_failed" => rail.links_failed += value,
                    "nanoseconds_per_kib" => rail.nanoseconds_per_kib = rail.nanoseconds_per_kib.max(value),
                    "slow" => rail.is_slow = rail.is_slow.max(value),
                    _ => {}
                }
            }
        }
        rails.into_iter().map(|(_, rail)| rail).collect()
    }
}
