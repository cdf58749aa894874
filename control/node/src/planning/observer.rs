//! Requests served by gateways since the last observation: differences of the counters in their
//! `/kvasir/status`.
//!
//! A gateway that does not answer may still serve requests: its last rates count until it answers again, for
//! at most five minutes. A restarted gateway counts from its second answer on.

use std::time::{Duration, Instant};

use control_planner::{Lengths, WorkerRole};
use futures_util::future::join_all;
use router_engines::client::EngineClient;
use serde_json::Value;

/// Time limit for a gateway's answer; a slower gateway counts as silent.
const ANSWER_WITHIN: Duration = Duration::from_millis(500);

/// Time of silence after which a gateway is assumed to serve no requests.
const GONE_AFTER: Duration = Duration::from_secs(300);
/// Time within which the clients of a removed gateway appear at other gateways.
const MOVED_WITHIN: Duration = Duration::from_secs(60);

/// Histogram of durations.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Timings {
    /// Upper bounds of the buckets, in seconds.
    bounds: Vec<f64>,
    /// Count of each bucket, with one more than `bounds`: the last one has no upper bound.
    counts: Vec<f64>,
    sum: f64,
}

impl Timings {
    fn parse(told: &Value) -> Self {
        let numbers = |name: &str| -> Vec<f64> {
            told[name].as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
        };
        let (bounds, counts) = (numbers("le"), numbers("counts"));
        match counts.len() == bounds.len() + 1 {
            true => Self { bounds, counts, sum: told["sum"].as_f64().unwrap_or(0.0) },
            false => Self::default(),
        }
    }

    fn since(&self, before: &Self) -> Self {
        if before.bounds != self.bounds {
            return Self::default();
        }
        let counts = self.counts.iter().zip(&before.counts).map(|(now, before)| (now - before).max(0.0));
        Self { counts: counts.collect(), sum: (self.sum - before.sum).max(0.0), ..self.clone() }
    }

    fn add(&mut self, other: &Self) {
        if self.counts.is_empty() {
            self.clone_from(other);
            return;
        }
        // A gateway of another version has different buckets and is left out of the quantiles.
        if self.bounds != other.bounds {
            return;
        }
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, more)| *count += more);
        self.sum += other.sum;
    }

    /// Mean in seconds; `None` without durations.
    pub(crate) fn mean(&self) -> Option<f64> {
        let count: f64 = self.counts.iter().sum();
        (count > 0.0).then(|| self.sum / count)
    }

    /// 90th percentile in seconds, interpolated within its bucket; `None` without durations.
    pub(crate) fn p90(&self) -> Option<f64> {
        let rank = 0.9 * self.counts.iter().sum::<f64>();
        let mut below = 0.0;
        for (at, &count) in self.counts.iter().enumerate() {
            if count > 0.0 && below + count >= rank {
                let lower = if at == 0 { 0.0 } else { self.bounds[at - 1] };
                // The last bucket has no upper bound.
                let upper = self.bounds.get(at).copied().unwrap_or(lower);
                return Some(lower + (upper - lower) * (rank - below) / count);
            }
            below += count;
        }
        None
    }
}

/// A worker as a gateway sees it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ObservedWorker {
    pub(crate) name: String,
    pub(crate) role: WorkerRole,
    pub(crate) is_ready: bool,
    pub(crate) is_draining: bool,
    pub(crate) is_asleep: bool,
    /// Requests of all gateways on the worker.
    pub(crate) requests: f64,
    /// Requests waiting in the engine, as the engine reports.
    pub(crate) waiting: f64,
    /// KV tokens of running requests, as the gateways account for them.
    pub(crate) kv_tokens: f64,
    /// Blocks of the worker in the index.
    pub(crate) cached_blocks: f64,
    /// Reason for late answers, from the kernel of the worker's machine; empty if unknown.
    pub(crate) why_slow: String,
}

/// Requests, lengths and latencies since the last observation, and the present workers.
#[derive(Debug, Clone, Default)]
pub(crate) struct FleetObservation {
    pub(crate) seconds: f64,
    pub(crate) begun: f64,
    /// Attempts among `begun` that used a prefill worker.
    pub(crate) disaggregated: f64,
    pub(crate) lengths: Vec<Lengths>,
    pub(crate) ttft: Timings,
    pub(crate) itl: Timings,
    /// Requests waiting at gateways.
    pub(crate) waiting: f64,
    pub(crate) workers: Vec<ObservedWorker>,
    /// Number of gateways that did not answer.
    pub(crate) silent: usize,
    /// Whether a silent gateway may still serve, or a gateway was removed so recently that its clients may
    /// not have moved yet.
    pub(crate) is_partial: bool,
}

#[derive(Debug, Clone)]
struct Sample {
    started_unix: u64,
    begun: f64,
    disaggregated: f64,
    finished: u64,
    ttft: Timings,
    itl: Timings,
}

struct Gateway {
    client: EngineClient,
    before: Option<(Sample, Instant)>,
    /// Time at which the gateway was added to the list.
    listed: Instant,
    /// Rates per second in the last interval in which the gateway answered.
    rate: FleetObservation,
}

pub(crate) struct Observer {
    gateways: Vec<Gateway>,
    before: Option<Instant>,
    /// Time at which a gateway was last removed from the list.
    left: Option<Instant>,
}

impl Observer {
    pub(crate) fn new(clients: Vec<EngineClient>) -> Self {
        let gateways = clients.into_iter().map(|client| Gateway {
            client,
            before: None,
            listed: Instant::now(),
            rate: FleetObservation::default(),
        });
        Self { gateways: gateways.collect(), before: None, left: None }
    }

    /// Sets the gateways to observe. A gateway that stays is compared with its previous answer; the last
    /// rates of a removed gateway are dropped.
    pub(crate) fn set_clients(&mut self, clients: &[EngineClient]) {
        let mut known = std::mem::take(&mut self.gateways);
        let gateway = |client: &EngineClient| match known
            .iter()
            .position(|gateway| gateway.client.base() == client.base())
        {
            Some(at) => known.swap_remove(at),
            None => Gateway {
                client: client.clone(),
                before: None,
                listed: Instant::now(),
                rate: FleetObservation::default(),
            },
        };
        self.gateways = clients.iter().map(gateway).collect();
        if !known.is_empty() {
            self.left = Some(Instant::now());
        }
    }

    /// Queries all gateways; `None` if none has ever answered twice, or none answers now.
    pub(crate) async fn observe(&mut self) -> Option<FleetObservation> {
        let answers = join_all(self.gateways.iter().map(|gateway| fetch(&gateway.client))).await;
        let now = Instant::now();
        let seconds = self.before.replace(now).map(|before| (now - before).as_secs_f64());
        let mut all = FleetObservation::default();
        for (gateway, answer) in self.gateways.iter_mut().zip(&answers) {
            match answer {
                Some(status) => gateway.take(status, now, &mut all),
                None => {
                    all.silent += 1;
                    // A gateway that is permanently gone must not count forever.
                    let heard = gateway.before.as_ref().map_or(gateway.listed, |(_, at)| *at);
                    match now - heard > GONE_AFTER {
                        true => gateway.rate = FleetObservation::default(),
                        false => all.is_partial = true,
                    }
                }
            }
            all.add_rate(&gateway.rate, seconds.unwrap_or(0.0), answer.is_some());
        }
        all.is_partial |= self.left.is_some_and(|left| now - left < MOVED_WITHIN);
        all.seconds = seconds?;
        (all.silent < self.gateways.len()).then_some(all)
    }
}

async fn fetch(client: &EngineClient) -> Option<Value> {
    let body = tokio::time::timeout(ANSWER_WITHIN, client.get("/kvasir/status")).await.ok()?.ok()?;
    serde_json::from_slice(&body).ok()
}

impl Gateway {
    /// Applies an answer: its rates since the previous answer, and its workers.
    fn take(&mut self, status: &Value, now: Instant, all: &mut FleetObservation) {
        let sample = Sample::parse(status);
        // A restarted gateway is assumed to have its previous rates.
        let mut rate = FleetObservation {
            begun: self.rate.begun,
            disaggregated: self.rate.disaggregated,
            ..FleetObservation::default()
        };
        if let Some((before, at)) = &self.before
            && before.started_unix == sample.started_unix
        {
            let seconds = (now - *at).as_secs_f64().max(1e-3);
            rate.begun = (sample.begun - before.begun).max(0.0) / seconds;
            rate.disaggregated = (sample.disaggregated - before.disaggregated).max(0.0) / seconds;
            rate.lengths = recent(status, sample.finished.saturating_sub(before.finished));
            rate.ttft = sample.ttft.since(&before.ttft);
            rate.itl = sample.itl.since(&before.itl);
        }
        self.rate = rate;
        self.before = Some((sample, now));
        all.waiting += status["waiting"].as_f64().unwrap_or(0.0);
        for worker in status["workers"].as_array().into_iter().flatten().filter_map(parse_worker) {
            // `peers_requests` has the load of all gateways; the other values are each gateway's own.
            match all.workers.iter_mut().find(|known| known.name == worker.name) {
                Some(known) => {
                    known.is_ready |= worker.is_ready;
                    known.is_draining |= worker.is_draining;
                    known.is_asleep |= worker.is_asleep;
                    known.requests = known.requests.max(worker.requests);
                    known.waiting = known.waiting.max(worker.waiting);
                    known.kv_tokens += worker.kv_tokens;
                    known.cached_blocks = known.cached_blocks.max(worker.cached_blocks);
                    if known.why_slow.is_empty() {
                        known.why_slow = worker.why_slow;
                    }
                }
                None => all.workers.push(worker),
            }
        }
    }
}

impl FleetObservation {
    fn add_rate(&mut self, rate: &Self, seconds: f64, is_fresh: bool) {
        self.begun += rate.begun * seconds;
        self.disaggregated += rate.disaggregated * seconds;
        if is_fresh {
            self.lengths.extend(&rate.lengths);
            self.ttft.add(&rate.ttft);
            self.itl.add(&rate.itl);
        }
    }
}

impl Sample {
    fn parse(status: &Value) -> Self {
        let number = |name: &str| status[name].as_f64().unwrap_or(0.0);
        let histograms = &status["histograms"];
        Self {
            started_unix: status["started_unix"].as_u64().unwrap_or(0),
            // Counts each request that a worker got, and none that was rejected for its key or its form.
            begun: Timings::parse(&histograms["routing"]).counts.iter().sum(),
            disaggregated: number("disaggregated"),
            finished: status["lengths"]["count"].as_u64().unwrap_or(0),
            ttft: Timings::parse(&histograms["time_to_first_token"]),
            itl: Timings::parse(&histograms["inter_token"]),
        }
    }
}

/// Returns the lengths of the last `count` requests, as far as the gateway has kept them.
fn recent(status: &Value, count: u64) -> Vec<Lengths> {
    let told = status["lengths"]["recent"].as_array().into_iter().flatten();
    let lengths = told.filter_map(|lengths| {
        let token = |at: usize| lengths[at].as_f64();
        Some(Lengths { prompt: token(0)?, cached: token(1)?, output: token(2)? })
    });
    lengths.take(usize::try_from(count).unwrap_or(usize::MAX)).collect()
}

fn parse_worker(told: &Value) -> Option<ObservedWorker> {
    let number = |name: &str| told[name].as_f64().unwrap_or(0.0);
    let state = told["state"].as_str().unwrap_or_default();
    let cached = told["pools"].as_array().into_iter().flatten().filter_map(|pool| pool["indexed"].as_f64());
    Some(ObservedWorker {
        name: told["name"].as_str()?.to_owned(),
        role: match told["role"].as_str() {
            Some("prefill") => WorkerRole::Prefill,
            Some("decode") => WorkerRole::Decode,
            _ => WorkerRole::Both,
        },
        is_ready: told["ready"] == true,
        is_draining: state == "draining",
        is_asleep: state == "sleeping",
        requests: number("requests") + number("peers_requests"),
        waiting: number("engine_waiting"),
        kv_tokens: number("kv_tokens"),
        cached_blocks: cached.sum(),
        why_slow: told["kernel"]["why"].as_str().unwrap_or_default().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status(requests: u64, started: u64) -> Value {
        json!({
            "started_unix": started, "disaggregated": 1, "waiting": 3,
            "lengths": { "count": requests, "recent": [[100, 10, 20], [200, 0, 30], [1, 1, 1]] },
            "histograms": {
                "routing": { "le": [1.0], "counts": [0, requests] },
                "bad": { "le": [null, 1.0], "counts": [1, 2, 3] },
                "time_to_first_token": { "le": [0.1, 1.0], "counts": [requests, 1, 0], "sum": 0.5 * requests as f64 },
                "inter_token": { "le": [], "counts": [0], "sum": 0.0 },
            },
            "workers": [{ "name": "a:1", "role": "decode", "ready": true, "state": "ready", "requests": 4,
                "peers_requests": 1, "engine_waiting": 1, "kv_tokens": 640,
                "pools": [{ "indexed": 7 }, { "indexed": 5 }] }],
        })
    }

    fn gateway() -> Gateway {
        let client = EngineClient::new("http://127.0.0.1:9", None);
        Gateway { client, before: None, listed: Instant::now(), rate: FleetObservation::default() }
    }

    #[test]
    fn differences_of_counters_are_what_was_served() {
        let (mut gateway, start) = (gateway(), Instant::now());
        let mut all = FleetObservation::default();
        gateway.take(&status(10, 1), start, &mut all);
        all.add_rate(&gateway.rate, 5.0, true);
        assert!(all.begun.abs() < f64::EPSILON, "one look says nothing: {all:?}");
        let mut all = FleetObservation::default();
        gateway.take(&status(12, 1), start + Duration::from_secs(4), &mut all);
        all.add_rate(&gateway.rate, 4.0, true);
        assert!((all.begun - 2.0).abs() < 1e-9 && (all.waiting - 3.0).abs() < 1e-9, "{all:?}");
        assert_eq!(all.lengths.len(), 2, "those that finished since");
        assert!((all.ttft.mean().expect("a mean") - 0.5).abs() < 1e-9);
        let worker = &all.workers[0];
        assert!((worker.requests - 5.0).abs() < 1e-9 && (worker.cached_blocks - 12.0).abs() < 1e-9);
        let mut silent = FleetObservation::default();
        silent.add_rate(&gateway.rate, 8.0, false);
        assert!((silent.begun - 4.0).abs() < 1e-9, "what it served last counts on");
        assert!(silent.lengths.is_empty() && silent.ttft.mean().is_none());
        gateway.take(&status(3, 2), start + Duration::from_secs(8), &mut silent);
        assert!(
            (gateway.rate.begun - 0.5).abs() < 1e-9,
            "it has restarted, and is believed to get what it got"
        );
        gateway.take(&status(3, 2), start + Duration::from_secs(9), &mut silent);
        assert!(gateway.rate.begun.abs() < f64::EPSILON);
    }

    #[test]
    fn buckets_that_do_not_fit_are_none() {
        let told = status(3, 1);
        assert_eq!(Timings::parse(&told["histograms"]["bad"]), Timings::default());
        assert_eq!(Timings::parse(&told["histograms"]["none"]).p90(), None);
        let known = Timings::parse(&told["histograms"]["time_to_first_token"]);
        assert_eq!(known.since(&Timings::default()), Timings::default(), "other buckets before");
    }

    #[test]
    fn quantiles_are_interpolated() {
        let timings =
            |counts: [f64; 3]| Timings { bounds: vec![1.0, 2.0], counts: counts.to_vec(), sum: 0.0 };
        assert_eq!(timings([0.0; 3]).p90(), None);
        assert!((timings([10.0, 0.0, 0.0]).p90().expect("p90") - 0.9).abs() < 1e-9);
        assert!((timings([5.0, 5.0, 0.0]).p90().expect("p90") - 1.8).abs() < 1e-9);
        assert!((timings([1.0, 0.0, 9.0]).p90().expect("p90") - 2.0).abs() < 1e-9, "beyond all buckets");
    }
}
