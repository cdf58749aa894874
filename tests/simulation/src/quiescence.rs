//! State of a healed cluster at rest: no trace of a request is left, and each index matches the engines'
//! blocks.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, bail};
use memchr::memmem;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::client;
use crate::cluster::Cluster;
use crate::kernel::{self, report};
use crate::oracle::{Oracle, Violation};
use crate::plan::Node;

/// Time within which a healed cluster comes to rest.
const QUIESCENT_WITHIN: Duration = Duration::from_secs(240);

/// Consecutive looks that must find nothing left.
const CLEAN_POLLS: u32 = 3;

/// Leftovers at one look, each with the oracle that it violates.
type LeftOver = Vec<(Oracle, String)>;

/// Counts by name.
pub(crate) type Counts = BTreeMap<String, u64>;

/// Counters of workers that show which parts a run exercised.
const WORKER_COVERAGE: [&str; 14] = [
    "kvasir_transfer_completed_total",
    "kvasir_transfer_incomplete_total",
    "kvasir_transfer_cancelled_total",
    "kvasir_transfer_peers_lost_total",
    "kvasir_transfer_leases_expired_total",
    "kvasir_engine_preemptions_total",
    "kvasir_engine_requests_cancelled_total",
    "kvasir_host_offloaded_blocks_total",
    "kvasir_host_onboarded_blocks_total",
    "kvasir_host_disk_read_blocks_total",
    "kvasir_host_disk_written_blocks_total",
    "kvasir_host_far_read_blocks_total",
    "kvasir_host_far_written_blocks_total",
    "kvasir_disk_log_recovered_blocks_total",
];

/// Counters of gateways that show the same.
const GATEWAY_COVERAGE: [&str; 5] = [
    "kvasir_gateway_migrations_total",
    "kvasir_gateway_disaggregated_total",
    "kvasir_gateway_broken_streams_total",
    "kvasir_gateway_kv_event_batches_total",
    "kvasir_gateway_kv_event_resets_total",
];

/// Counters that may stay 0 over a thousand runs.
pub(crate) const RARELY_COVERED: [&str; 2] =
    ["kvasir_transfer_leases_expired_total", "kvasir_gateway_broken_streams_total"];

/// Checks of a cluster without requests.
pub(crate) struct Observer<'a> {
    pub(crate) cluster: &'a Cluster,
}

impl Observer<'_> {
    /// Waits until no trace of a request is left, and the index matches the engines' blocks.
    pub(crate) async fn await_quiescence(&self) -> Result<()> {
        let (began, mut clean) = (Instant::now(), 0);
        loop {
            let left = self.left_over().await;
            clean = if left.is_empty() { clean + 1 } else { 0 };
            if clean == CLEAN_POLLS {
                return Ok(());
            }
            if began.elapsed() >= QUIESCENT_WITHIN {
                self.print_sockets();
                // Blocks that a forgotten request holds are missing in an index as well.
                let is_index = left.iter().all(|(oracle, _)| *oracle == Oracle::Index);
                let oracle = if is_index { Oracle::Index } else { Oracle::Rest };
                let texts: Vec<String> = left.into_iter().map(|(_, text)| text).collect();
                bail!(Violation::new(oracle, format!("at rest: {}", texts.join("; "))));
            }
            sleep(Duration::from_millis(500)).await;
        }
    }

    fn print_sockets(&self) {
        let gateways = (0..self.cluster.gateway_count() as u8).map(Node::Gateway);
        for node in gateways.chain((0..self.cluster.engine_count() as u8).map(Node::Engine)) {
            report::print(&format!("sockets of {node:?}: {}\n", self.cluster.sockets(node).join(", ")));
        }
    }

    async fn left_over(&self) -> LeftOver {
        let mut left = Vec::new();
        let mut held = BTreeMap::new();
        if self.cluster.is_reference() {
            self.workers_left_over(&mut left, &mut held).await;
            for number in 0..self.cluster.store_count() {
                let metrics = client::get(self.cluster.store_address(number), "/metrics", None).await;
                let Some(metrics) = metrics else {
                    left.push((Oracle::Rest, format!("store {number} does not answer GET /metrics")));
                    continue;
                };
                for level in STORE_LEVELS {
                    if level_of(&metrics, level) != Some(0) {
                        left.push((
                            Oracle::Rest,
                            format!("store {number}: {level} {:?}", level_of(&metrics, level)),
                        ));
                    }
                }
            }
        }
        let mocks = if self.cluster.is_reference() { Vec::new() } else { self.cluster.wanted_engines() };
        for number in mocks {
            let Some(mock) = self.cluster.mock(number) else {
                left.push((Oracle::Rest, format!("engine {number} does not run")));
                continue;
            };
            let stats = mock.stats();
            if stats.running + stats.waiting + stats.held_blocks + stats.leased_blocks > 0 {
                left.push((
                    Oracle::Rest,
                    format!(
                        "engine {number} runs {}, {} wait, {} blocks are held, {} are leased",
                        stats.running, stats.waiting, stats.held_blocks, stats.leased_blocks
                    ),
                ));
            }
            held.insert(self.cluster.engine_name(number), (number, stats.known_blocks as u64));
        }
        for gateway in 0..self.cluster.gateway_count() as u8 {
            let key = self.cluster.administrators_key();
            let status = client::get(self.cluster.admin_address(gateway), "/kvasir/status", key).await;
            let Some(status) = status.and_then(|status| serde_json::from_str::<Value>(&status).ok()) else {
                left.push((Oracle::Rest, format!("gateway {gateway} does not tell its status")));
                continue;
            };
            self.compare(gateway, &status, &held, &mut left);
            let metrics = client::get(self.cluster.admin_address(gateway), "/metrics", key).await;
            for level in GATEWAY_LEVELS {
                let value = metrics.as_ref().and_then(|metrics| level_of(metrics, level));
                if value != Some(0) {
                    left.push((Oracle::Rest, format!("gateway {gateway}: {level} {value:?}")));
                }
            }
        }
        left
    }

    async fn workers_left_over(&self, left: &mut LeftOver, held: &mut BTreeMap<String, (usize, u64)>) {
        for number in 0..self.cluster.engine_count() {
            let Some(metrics) = client::get(self.cluster.engine_address(number), "/metrics", None).await
            else {
                left.push((Oracle::Rest, format!("worker {number} does not answer GET /metrics")));
                continue;
            };
            for level in WORKER_LEVELS {
                match level_of(&metrics, level) {
                    Some(0) => {}
                    // Without tiers these levels do not exist.
                    None if level.starts_with("kvasir_host_") && !self.cluster.tiers().has_host() => {}
                    None if level.starts_with("kvasir_remote_") && !self.cluster.tiers().has_stores() => {}
                    other => left.push((Oracle::Rest, format!("worker {number}: {level} {other:?}"))),
                }
            }
            let slots = ["used", "evictable", "cached"]
                .map(|name| level_of(&metrics, &format!("kvasir_engine_kv_slots_{name}")));
            let [Some(used), Some(evictable), Some(cached)] = slots else {
                left.push((Oracle::Rest, format!("worker {number} does not tell its slots: {slots:?}")));
                continue;
            };
            if used != evictable {
                left.push((
                    Oracle::Rest,
                    format!("worker {number}: {used} slots are used, of which {evictable} can be evicted"),
                ));
            }
            held.insert(self.cluster.engine_name(number), (number, cached));
        }
    }

    fn compare(
        &self,
        gateway: u8,
        status: &Value,
        held: &BTreeMap<String, (usize, u64)>,
        left: &mut LeftOver,
    ) {
        // The status query itself is not counted.
        for level in ["active", "waiting"] {
            if status[level].as_u64() != Some(0) {
                left.push((Oracle::Rest, format!("gateway {gateway}: {level} {}", status[level])));
            }
        }
        let empty = Vec::new();
        let workers = status["workers"].as_array().unwrap_or(&empty);
        for (name, (number, blocks)) in held {
            let Some(worker) = workers.iter().find(|worker| worker["name"] == name.as_str()) else {
                left.push((Oracle::Rest, format!("gateway {gateway} does not know {name}")));
                continue;
            };
            if worker["ready"] != true {
                left.push((
                    Oracle::Rest,
                    format!("gateway {gateway}: {name} is not ready: {}", worker["reason"]),
                ));
            }
            for level in ["requests", "peers_requests", "kv_tokens"] {
                if worker[level].as_u64() != Some(0) {
                    left.push((
                        Oracle::Rest,
                        format!("gateway {gateway}: {name} has {level} {}", worker[level]),
                    ));
                }
            }
            let pools = worker["pools"].as_array().unwrap_or(&empty);
            let device = pools.iter().find(|pool| pool["tier"] == "device");
            let indexed = device.and_then(|pool| pool["indexed"].as_u64()).unwrap_or(0);
            if self.cluster.has_events(*number) && indexed != *blocks {
                left.push((
                    Oracle::Index,
                    format!("gateway {gateway}: {indexed} blocks of {name} are indexed, it holds {blocks}"),
                ));
            }
        }
        if workers.len() != held.len() {
            left.push((
                Oracle::Rest,
                format!("gateway {gateway} knows {} workers of {}", workers.len(), held.len()),
            ));
        }
    }

    /// Returns the counters that show which parts of the system were exercised.
    pub(crate) async fn worked(&self) -> Counts {
        let mut worked = Counts::new();
        worked.extend(WORKER_COVERAGE.into_iter().chain(GATEWAY_COVERAGE).map(|name| (name.to_owned(), 0)));
        let disks = kernel::disk_counts();
        worked.insert("disk operations that failed".to_owned(), disks.failed);
        worked.insert("reads that brought a wrong bit".to_owned(), disks.rotten);
        worked.insert("writes that were lost with the power".to_owned(), disks.undone);
        let counts = self.cluster.counts();
        worked.insert("processes that ended when they were told to".to_owned(), counts.drained);
        worked.insert("processes that did not end in time".to_owned(), counts.killed_draining);
        worked.insert("engines that control services started".to_owned(), counts.scaled_up);
        worked.insert("engines that control services stopped".to_owned(), counts.scaled_down);
        let network = kernel::network_counts();
        worked.insert("ends of connections that were cut".to_owned(), network.cut_ends);
        worked.insert("packets that were lost".to_owned(), network.lost_packets);
        worked.insert("writes that found a full window".to_owned(), network.full_windows);
        let mocks = (0..self.cluster.engine_count()).filter_map(|number| self.cluster.mock(number));
        let fetched = mocks.map(|mock| mock.stats().pulled).sum();
        worked.insert("prompts that mock engines handed over".to_owned(), fetched);
        for gateway in 0..self.cluster.gateway_count() as u8 {
            let address = self.cluster.admin_address(gateway);
            let metrics = client::get(address, "/metrics", self.cluster.administrators_key()).await;
            for name in GATEWAY_COVERAGE {
                let count = metrics.as_ref().and_then(|metrics| level_of(metrics, name)).unwrap_or(0);
                *worked.entry(name.to_owned()).or_default() += count;
            }
        }
        if self.cluster.is_reference() {
            for number in 0..self.cluster.engine_count() {
                let metrics = client::get(self.cluster.engine_address(number), "/metrics", None).await;
                for name in WORKER_COVERAGE {
                    let count = metrics.as_ref().and_then(|metrics| level_of(metrics, name)).unwrap_or(0);
                    *worked.entry(name.to_owned()).or_default() += count;
                }
            }
        }
        worked
    }
}

/// Levels of workers, gateways and stores that are 0 at rest.
pub(crate) const WORKER_LEVELS: [&str; 8] = [
    "kvasir_engine_requests_running",
    "kvasir_engine_requests_waiting",
    "kvasir_engine_requests_fetching",
    "kvasir_transfer_open",
    "kvasir_transfer_quarantined_slots",
    "kvasir_host_leased_slots",
    "kvasir_remote_operations",
    "kvasir_remote_held_slots",
];
pub(crate) const GATEWAY_LEVELS: [&str; 6] = [
    "kvasir_gateway_waiting_requests",
    "kvasir_gateway_running_requests",
    "kvasir_gateway_request_memory_bytes",
    "kvasir_gateway_worker_requests",
    "kvasir_discovery_suspect",
    "kvasir_discovery_failing",
];
pub(crate) const STORE_LEVELS: [&str; 3] =
    ["kvasir_pool_leases", "kvasir_pool_fenced_slots", "kvasir_pool_verifying_blocks"];

/// Returns the sum of a level over all its labels in a text of metrics; a negative value counts as far too
/// high.
pub(crate) fn level_of(metrics: &str, name: &str) -> Option<u64> {
    let values = memmem::find_iter(metrics.as_bytes(), name).filter_map(|at| {
        let is_first = at == 0 || metrics.as_bytes()[at - 1] == b'\n';
        let rest = &metrics[at + name.len()..];
        if !is_first || !rest.starts_with([' ', '{']) {
            return None;
        }
        let value = rest.lines().next()?.rsplit(' ').next()?.parse::<f64>().ok()?;
        Some(if value < 0.0 { u64::MAX } else { value as u64 })
    });
    values.reduce(u64::saturating_add)
}
