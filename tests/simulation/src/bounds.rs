//! Plausibility checks of levels while a cluster runs: a count that was decremented twice underflows far
//! beyond any valid value.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use serde_json::Value;
use tokio::time::sleep;

use crate::client;
use crate::quiescence::{GATEWAY_LEVELS, STORE_LEVELS, WORKER_LEVELS, level_of};

/// Interval between two rounds of reads.
const EVERY: Duration = Duration::from_millis(700);
/// Gauges of the requests that a gateway's admission gate has let in, and of those that it may let in.
const RUNNING: [&str; 2] = ["kvasir_gateway_running_requests", "kvasir_gateway_running_requests_max"];
/// Above any count of a run: a request may be counted in several places, and be retried several times.
const COUNT_MAX: u64 = 10_000;
/// Above any number of tokens or bytes of a run.
const AMOUNT_MAX: u64 = 1 << 30;

/// Addresses whose levels are read, and an administrator's key.
#[derive(Debug, Clone, Default)]
pub(crate) struct LevelMonitor {
    pub(crate) gateways: Vec<SocketAddr>,
    pub(crate) workers: Vec<SocketAddr>,
    pub(crate) stores: Vec<SocketAddr>,
    pub(crate) key: Option<&'static str>,
    /// Most requests in progress on a gateway; further ones wait.
    pub(crate) requests_max: u32,
}

/// The first level that was out of bounds, if any.
pub(crate) type Finding = Rc<RefCell<Option<String>>>;

impl LevelMonitor {
    /// Reads all levels periodically. Never returns.
    pub(crate) async fn watch(self, finding: Finding) {
        let gateway_levels: Vec<&str> = GATEWAY_LEVELS.into_iter().chain(RUNNING).collect();
        loop {
            sleep(EVERY).await;
            for address in &self.gateways {
                let status = client::get(*address, "/kvasir/status", self.key).await;
                let status = status.and_then(|status| serde_json::from_str::<Value>(&status).ok());
                let beyond = status.and_then(|status| self.beyond(&status));
                self.report(&finding, *address, beyond);
            }
            let metrics = [
                (&self.gateways, &gateway_levels[..], self.key),
                (&self.workers, &WORKER_LEVELS[..], None),
                (&self.stores, &STORE_LEVELS[..], None),
            ];
            for (addresses, levels, key) in metrics {
                for address in addresses {
                    let Some(metrics) = client::get(*address, "/metrics", key).await else { continue };
                    let beyond = levels.iter().find_map(|level| {
                        let most = match *level {
                            level if RUNNING.contains(&level) => u64::from(self.requests_max),
                            level if level.ends_with("_bytes") => AMOUNT_MAX,
                            _ => COUNT_MAX,
                        };
                        level_of(&metrics, level)
                            .filter(|value| *value > most)
                            .map(|value| format!("{level} is {value}"))
                    });
                    self.report(&finding, *address, beyond);
                }
            }
        }
    }

    fn report(&self, finding: &Finding, address: SocketAddr, beyond: Option<String>) {
        if let Some(beyond) = beyond {
            finding.borrow_mut().get_or_insert_with(|| format!("{address}: {beyond}"));
        }
    }

    /// Returns the first impossible count in a gateway's status.
    fn beyond(&self, status: &Value) -> Option<String> {
        // A worker that has not joined reports no requests.
        let count = |value: &Value| if value.is_null() { 0 } else { value.as_u64().unwrap_or(u64::MAX) };
        let (active, waiting) = (count(&status["active"]), count(&status["waiting"]));
        if waiting > active || active > COUNT_MAX {
            return Some(format!("{active} requests are inside, of which {waiting} wait"));
        }
        for worker in status["workers"].as_array()? {
            for (level, most) in
                [("requests", COUNT_MAX), ("peers_requests", COUNT_MAX), ("kv_tokens", AMOUNT_MAX)]
            {
                if count(&worker[level]) > most {
                    return Some(format!("{} has {level} {}", worker["name"], worker[level]));
                }
            }
        }
        None
    }
}
