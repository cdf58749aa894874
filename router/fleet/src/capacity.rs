//! Number of requests that each engine can take, by its own reports; `router-gateway` sets a pool's gate to their sum.
//!
//! Engines queue first in, first out: a request of a better priority, or of another tenant, cannot overtake one that waits
//! there. So the gate is kept as narrow as the engines are, and requests wait in the gateway's queue, which is fair. A
//! worker's limit is the number of places that its engine reports. For an engine that reports none, the limit follows its
//! queue, as TCP follows a path: a queue in two reports in a row lowers the limit by a quarter, but not below what runs; no
//! queue while at least half of the limit is used raises it. A small queue is left to each engine, so that it is not idle
//! while a request is on its way. An engine that reports nothing has no limit.
//!
//! While an engine's KV pool is nearly used up ([`KV_USAGE_FULL`]), its part of the gate grows by one request a report: with
//! more, it would preempt requests and compute their blocks again; with none, an engine that counts wrongly would run dry.
//! The gate belongs to the pool: the policy decides which of its workers gets a request. The limit stays as it is.
//!
//! The limit of a worker is written by the task that asks for its reports and read by the task that sets the gates; relaxed, since each number
//! stands for itself.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use router_engines::dialect::EngineLoad;

/// The share of running requests that may wait at the engine is one in this number.
const QUEUE_SHARE: u32 = 8;
/// The limit is lowered by one in this number at a time, and raised by as much.
const STEP_SHARE: u32 = 4;
/// Share of the KV pool from which on an engine gets one further request a report. Blocks that are only cached are not counted.
const KV_USAGE_FULL: f64 = 0.97;
/// The least limit, and the least step upwards.
const LIMIT_MIN: u32 = 4;
/// Tokens assumed to be uncomputed in a waiting request that no known gateway sent.
const FOREIGN_TOKENS: u32 = 512;

/// Limits of one rank, by its engine's reports.
#[derive(Debug)]
pub struct Capacity {
    /// Requests that the rank may have, from all gateways and clients.
    limit: AtomicU32,
    /// One request more than the rank had when its KV pool was reported full; [`u32::MAX`] otherwise.
    kv_limit: AtomicU32,
    /// Whether the last report showed a queue.
    had_queue: AtomicBool,
    /// Requests at the rank that were sent neither by this gateway nor by its peers.
    external_requests: AtomicU32,
    /// The waiting requests among `external_requests`.
    external_waiting: AtomicU32,
}

impl Default for Capacity {
    fn default() -> Self {
        Self {
            limit: AtomicU32::new(u32::MAX),
            kv_limit: AtomicU32::new(u32::MAX),
            had_queue: AtomicBool::new(false),
            external_requests: AtomicU32::new(0),
            external_waiting: AtomicU32::new(0),
        }
    }
}

impl Capacity {
    /// Takes over the engine's reported load, and the most requests that it runs, if it reports that. `known`: requests
    /// that this gateway and its peers had there meanwhile.
    pub fn report(&self, load: &EngineLoad, requests_max: Option<u32>, known: u32) {
        let inside = load.running.saturating_add(load.waiting);
        let external_requests = inside.saturating_sub(known);
        self.external_requests.store(external_requests, Ordering::Relaxed);
        self.external_waiting.store(external_requests.min(load.waiting), Ordering::Relaxed);
        let has_queue = load.waiting > load.running / QUEUE_SHARE;
        let had_queue = self.had_queue.swap(has_queue, Ordering::Relaxed);
        let limit = self.limit.load(Ordering::Relaxed);
        let next = match requests_max {
            Some(most) => most.saturating_add(most / QUEUE_SHARE),
            None if has_queue && had_queue => {
                let used = limit.min(inside);
                (used - used / STEP_SHARE).max(load.running.saturating_add(load.running / QUEUE_SHARE))
            }
            None if !has_queue && inside >= limit / 2 => {
                limit.saturating_add((limit / STEP_SHARE).max(LIMIT_MIN))
            }
            None => limit,
        };
        self.limit.store(next.max(LIMIT_MIN), Ordering::Relaxed);
        let is_full = (KV_USAGE_FULL..=1.0).contains(&load.kv_usage);
        let kv_limit = if is_full { inside.saturating_add(1) } else { u32::MAX };
        self.kv_limit.store(kv_limit, Ordering::Relaxed);
    }

    /// Requests that the rank may have from this gateway while it has `peers` requests from other gateways.
    pub fn share(&self, peers: u32) -> u32 {
        let others = self.external_requests.load(Ordering::Relaxed).saturating_add(peers);
        let places = self.limit.load(Ordering::Relaxed).min(self.kv_limit.load(Ordering::Relaxed));
        places.saturating_sub(others)
    }

    /// Estimated tokens still to be computed for waiting requests that no known gateway sent.
    pub fn foreign_tokens(&self) -> u32 {
        self.external_waiting.load(Ordering::Relaxed).saturating_mul(FOREIGN_TOKENS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(running: u32, waiting: u32) -> EngineLoad {
        EngineLoad { running, waiting, kv_usage: 0.0 }
    }

    #[test]
    fn a_limit_falls_with_a_queue_that_stays_and_rises_without() {
        let capacity = Capacity::default();
        capacity.report(&load(10, 40), None, 50);
        assert_eq!(capacity.share(0), u32::MAX, "one report may be a burst");
        capacity.report(&load(10, 40), None, 50);
        assert_eq!(capacity.share(0), 38);
        for _ in 0..20 {
            capacity.report(&load(10, 40), None, 50);
        }
        assert_eq!(capacity.share(0), 11, "what runs, and a little more");
        capacity.report(&load(11, 0), None, 11);
        assert_eq!(capacity.share(0), 15);
        capacity.report(&load(1, 0), None, 1);
        assert_eq!(capacity.share(0), 15, "an idle engine says nothing of what it can do");
        assert_eq!(capacity.share(20), 0, "the others' requests have the places");
        capacity.report(&load(64, 0), Some(64), 64);
        assert_eq!(capacity.share(0), 72, "what the engine tells counts at once");
    }

    #[test]
    fn an_engine_whose_kv_pool_is_used_up_gets_one_request_a_report() {
        let capacity = Capacity::default();
        let report = |running, kv_usage, requests_max| {
            capacity.report(&EngineLoad { running, waiting: 0, kv_usage }, requests_max, running);
            capacity.share(0)
        };
        for (requests_max, limit) in [(None, u32::MAX), (Some(64), 72)] {
            assert_eq!(report(12, 0.5, requests_max), limit);
            assert_eq!(report(12, 0.98, requests_max), 13, "one more than it has");
            assert_eq!(report(9, 0.98, requests_max), 10);
            assert_eq!(report(10, 0.98, requests_max), 11, "an engine that counts wrongly does not run dry");
            for no_share in [f64::NAN, f64::INFINITY, 98.0] {
                assert_eq!(report(9, no_share, requests_max), limit, "{no_share} is no share of a pool");
            }
            assert_eq!(report(9, 0.6, requests_max), limit, "the limit was left as it was");
        }
        capacity.report(&EngineLoad { running: 5, waiting: 0, kv_usage: 0.98 }, Some(64), 0);
        assert_eq!(capacity.share(0), 1, "others' requests use the pool up");
    }

    #[test]
    fn requests_of_others_that_wait_count_as_tokens_to_compute() {
        let capacity = Capacity::default();
        capacity.report(&load(4, 3), Some(16), 7);
        assert_eq!((capacity.share(0), capacity.foreign_tokens()), (18, 0), "all of them are known");
        capacity.report(&load(4, 3), Some(16), 5);
        assert_eq!((capacity.share(0), capacity.foreign_tokens()), (16, 2 * FOREIGN_TOKENS));
        capacity.report(&load(4, 3), Some(16), 0);
        assert_eq!((capacity.share(0), capacity.foreign_tokens()), (11, 3 * FOREIGN_TOKENS));
    }
}
