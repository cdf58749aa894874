//! One run: the cluster starts, lives through its plan, is healed, and must then come to rest and serve.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::task::{JoinSet, LocalSet};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tools_mocker::Fault;

use crate::catalog::{Catalog, Exchange};
use crate::client::{self, Manner, Outcome, ask};
use crate::cluster::{Cluster, faults_of};
use crate::kernel::{self, DiskFaults, HostId, KernelConfig, LinkFaults, report};
use crate::plan::{Node, Plan, Step, Tiers, What};

/// A cluster without faults is ready within this.
const READY_WITHIN: Duration = Duration::from_secs(60);
/// Each exchange ends within this once everything is healed.
const ENDS_WITHIN: Duration = Duration::from_secs(600);
/// Within this a healed cluster comes to rest.
const RESTS_WITHIN: Duration = Duration::from_secs(240);

/// Result of a run that passed.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Summary {
    pub(crate) hash: u64,
    pub(crate) steps: u64,
    pub(crate) turns: u64,
    pub(crate) simulated_nanos: u64,
    /// How exchanges ended.
    pub(crate) ends: BTreeMap<String, u64>,
    /// How often parts of the system did what they are for, by their own counters at the end.
    pub(crate) worked: BTreeMap<String, u64>,
}

/// Counters of workers by which a reader sees what runs have reached.
const WORKED: [&str; 14] = [
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

/// The world that a plan is carried out in.
struct Life {
    cluster: Cluster,
    catalog: Rc<Vec<Vec<Exchange>>>,
    ends: BTreeMap<String, u64>,
    /// Numbers of steps that ask, and how they ended.
    asked: JoinSet<(usize, Outcome)>,
    steps: Vec<Step>,
    tiers: Tiers,
    tells: bool,
}

/// Carries out a plan in this process, which becomes the simulation, and ends it.
pub(crate) fn live(plan: &Plan, catalog: &Catalog, prints_trace: bool, tells: bool) -> ! {
    std::panic::set_hook(Box::new(|panic| report::fail(&panic.to_string())));
    kernel::begin(&KernelConfig { seed: plan.seed, prints_trace });
    // Both ways by which the programs here call the system end in the simulated one.
    let [std, rustix] = [std::process::id(), rustix::process::getpid().as_raw_nonzero().get().unsigned_abs()];
    if std != rustix || kernel::now() > kernel::SECOND {
        report::fail("a library calls the system past the simulated kernel");
    }
    match carry_out(plan, catalog, tells) {
        Ok((ends, worked)) => {
            let (hash, steps, turns) = kernel::trace();
            let summary = Summary { hash, steps, turns, simulated_nanos: kernel::now(), ends, worked };
            report::send(&json!({ "passed": summary }).to_string());
            report::end(0)
        }
        Err(error) => report::fail(&format!("{error:#}")),
    }
}

/// Counts by name.
type Counts = BTreeMap<String, u64>;

fn carry_out(plan: &Plan, catalog: &Catalog, tells: bool) -> Result<(Counts, Counts)> {
    // The first runtime of the process makes what all have in common, and lives longest.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let client = HostId::WORLD;
    LocalSet::new().block_on(&runtime, async {
        let cluster = Cluster::start(plan, client)?;
        let mut life = Life {
            cluster,
            catalog: Rc::new(if plan.is_reference() {
                catalog.workers.clone()
            } else {
                catalog.mocks.clone()
            }),
            ends: BTreeMap::new(),
            asked: JoinSet::new(),
            steps: plan.steps.clone(),
            tiers: plan.tiers,
            tells,
        };
        life.await_ready().await?;
        life.go_through(plan).await?;
        life.tell("everything is healed");
        life.cluster.heal()?;
        let ended = timeout(ENDS_WITHIN, life.all_end()).await;
        ended.context("exchanges have not ended 10 minutes after all was healed")??;
        life.nudge().await;
        life.await_rest().await?;
        life.final_questions().await?;
        let worked = life.worked().await;
        Ok((life.ends, worked))
    })
}

impl Life {
    fn tell(&self, what: &str) {
        if self.tells {
            report::print(&format!("{:>9.3} s  {what}\n", kernel::now() as f64 / 1e9));
        }
    }

    async fn await_ready(&self) -> Result<()> {
        let mut last = None;
        let ready = async {
            for gateway in 0..self.cluster.gateways() as u8 {
                let address = self.cluster.admin_address(gateway);
                loop {
                    let status = client::get(address, "/kvasir/status").await;
                    let status = status.and_then(|status| serde_json::from_str::<Value>(&status).ok());
                    let is_ready = |worker: &Value| worker["ready"] == true;
                    let workers = status.as_ref().and_then(|status| status["workers"].as_array());
                    if workers
                        .is_some_and(|all| all.len() == self.cluster.engines() && all.iter().all(is_ready))
                    {
                        break;
                    }
                    last = Some((gateway, status));
                    sleep(Duration::from_millis(200)).await;
                }
            }
        };
        if timeout(READY_WITHIN, ready).await.is_err() {
            bail!("the cluster is not ready in a minute; the last status: {last:?}");
        }
        Ok(())
    }

    async fn go_through(&mut self, plan: &Plan) -> Result<()> {
        let began = Instant::now();
        // The end of a fault is a step, too.
        let mut steps: Vec<(u64, usize, Action)> = Vec::new();
        for (number, step) in plan.steps.iter().enumerate() {
            steps.push((step.at, number, Action::Begin(step.what.clone())));
            if let Some(lasts) = lasts(&step.what) {
                steps.push((step.at + lasts, number, Action::End(step.what.clone())));
            }
        }
        steps.sort_by_key(|(at, number, _)| (*at, *number));
        for (at, number, action) in steps {
            sleep_until(began + Duration::from_millis(at)).await;
            kernel::note("step", number as u64, at);
            match action {
                Action::Begin(what) => self.begin(number as u64, &what)?,
                Action::End(what) => self.end(&what)?,
            }
            while let Some(ended) = self.asked.try_join_next() {
                self.take(ended?)?;
            }
        }
        Ok(())
    }

    fn begin(&mut self, number: u64, what: &What) -> Result<()> {
        if !matches!(what, What::Ask { .. }) {
            self.tell(&format!("{what:?}"));
        }
        match what {
            What::Ask { gateway, conversation, turn, streams, leaves_after, pause } => {
                let address = self.cluster.gateway_address(*gateway);
                let catalog = Rc::clone(&self.catalog);
                let manner = Manner { streams: *streams, leaves_after: *leaves_after, pause: *pause };
                let (conversation, turn, gateway) = (*conversation, *turn, *gateway);
                self.tell(&format!("request {number}: turn {turn} of conversation {conversation}, to gateway {gateway}, {manner:?}"));
                self.asked.spawn_local(async move {
                    let outcome = ask(address, &catalog[conversation][turn], manner, number).await;
                    (number as usize, outcome)
                });
            }
            What::Kill { node, silently, .. } => self.cluster.kill(*node, *silently),
            What::Freeze { node, .. } => self.cluster.freeze(*node, true),
            What::Partition { a, b, .. } => {
                self.cluster.set_link(*a, *b, LinkFaults { is_down: true, ..self.cluster.usual_link() });
            }
            What::Degrade { a, b, link, .. } => self.cluster.set_link(*a, *b, faults_of(*link)),
            What::Cut { a, b, silently } => self.cluster.cut(*a, *b, *silently),
            What::Jump { node, millis } => self.cluster.jump(*node, *millis),
            What::Misbehave { engine, kind, probability_percent, millis, tokens, .. } => {
                let fault: Fault = serde_json::from_value(json!({
                    "kind": kind, "probability": f64::from(*probability_percent) / 100.0, "millis": millis, "tokens": tokens,
                }))?;
                if let Some(mock) = self.cluster.mock(usize::from(*engine)) {
                    mock.fault(fault)?;
                }
            }
            What::Disk { node, slow_ms, fail_one_in, rot_one_in, .. } => {
                let slow = slow_ms * kernel::MILLISECOND;
                let faults = DiskFaults { slow, fail_one_in: *fail_one_in, rot_one_in: *rot_one_in };
                self.cluster.set_disk(*node, faults);
            }
            What::Leave { engine, drains, .. } => self.cluster.list(*engine, false, *drains)?,
        }
        Ok(())
    }

    fn end(&mut self, what: &What) -> Result<()> {
        self.tell(&format!("over: {what:?}"));
        match what {
            What::Kill { node, .. } => self.cluster.restart(*node),
            What::Freeze { node, .. } => self.cluster.freeze(*node, false),
            What::Partition { a, b, .. } | What::Degrade { a, b, .. } => {
                self.cluster.set_link(*a, *b, self.cluster.usual_link());
            }
            What::Misbehave { engine, .. } => {
                if let Some(mock) = self.cluster.mock(usize::from(*engine)) {
                    mock.heal();
                }
            }
            What::Disk { node, .. } => self.cluster.set_disk(*node, DiskFaults::default()),
            What::Leave { engine, .. } => self.cluster.list(*engine, true, false)?,
            What::Ask { .. } | What::Cut { .. } | What::Jump { .. } => {}
        }
        Ok(())
    }

    fn take(&mut self, (number, outcome): (usize, Outcome)) -> Result<()> {
        self.tell(&format!("request {number}: {outcome:?}"));
        let name = match &outcome {
            Outcome::Wrong(what) => bail!("request {number}: {what}"),
            Outcome::Refused(status) => format!("refused {status}"),
            other => format!("{other:?}").to_lowercase(),
        };
        ensure!(
            self.is_excused(number, &outcome),
            "request {number} ends as {outcome:?}, and no fault explains it"
        );
        *self.ends.entry(name).or_default() += 1;
        Ok(())
    }

    /// Whether the faults of this run explain how an exchange ended.
    fn is_excused(&self, number: usize, outcome: &Outcome) -> bool {
        let Some(Step { what: What::Ask { gateway: asked, .. }, .. }) = self.steps.get(number) else {
            return false;
        };
        let gateway = Node::Gateway(*asked);
        let joins = |a: &Node, b: &Node| [*a, *b].contains(&Node::Client) && [*a, *b].contains(&gateway);
        let any = |fits: &dyn Fn(&What) -> bool| self.steps.iter().any(|step| fits(&step.what));
        match outcome {
            Outcome::Right | Outcome::Left => true,
            Outcome::Wrong(_) => false,
            // Something on the way to this gateway, or the gateway itself.
            Outcome::Cut => any(&|what| match what {
                What::Kill { node, .. } | What::Freeze { node, .. } => *node == gateway,
                What::Cut { a, b, .. } | What::Partition { a, b, .. } | What::Degrade { a, b, .. } => {
                    joins(a, b)
                }
                _ => false,
            }),
            // The gateway of an earlier request is gone, and its client is not told.
            Outcome::GaveUp => any(&|what| match what {
                What::Kill { node, silently, .. } => *silently && *node == gateway,
                What::Cut { a, b, silently } => *silently && joins(a, b),
                _ => false,
            }),
            // The engine's own words.
            Outcome::Refused(500) => {
                any(&|what| matches!(what, What::Misbehave { kind, .. } if kind == "error"))
            }
            Outcome::Refused(status) => matches!(status, 429 | 502..=504) && any(&What::is_fault),
            Outcome::Broken => any(&What::is_fault),
        }
    }

    async fn all_end(&mut self) -> Result<()> {
        while let Some(ended) = self.asked.join_next().await {
            self.take(ended?)?;
        }
        Ok(())
    }

    /// Has each engine publish something once more: that an event was lost is seen from the number of the next one.
    async fn nudge(&self) {
        sleep(Duration::from_secs(10)).await;
        for number in 0..self.cluster.engines() {
            let text = "nothing that anybody else has said ".repeat(2);
            client::nudge(self.cluster.engine_address(number), &text).await;
        }
    }

    /// Waits until nothing of a request is left anywhere, and the index knows what engines hold.
    async fn await_rest(&self) -> Result<()> {
        let began = Instant::now();
        loop {
            let left = self.left_over().await;
            if left.is_empty() {
                self.tell("at rest");
                return Ok(());
            }
            if began.elapsed() >= RESTS_WITHIN {
                self.tell_sockets();
                bail!("at rest: {}", left.join("; "));
            }
            sleep(Duration::from_millis(500)).await;
        }
    }

    fn tell_sockets(&self) {
        let gateways = (0..self.cluster.gateways() as u8).map(Node::Gateway);
        for node in gateways.chain((0..self.cluster.engines() as u8).map(Node::Engine)) {
            self.tell(&format!("sockets of {node:?}: {}", self.cluster.sockets(node).join(", ")));
        }
    }

    async fn left_over(&self) -> Vec<String> {
        let mut left = Vec::new();
        let mut held = BTreeMap::new();
        if self.cluster.is_reference() {
            self.workers_left_over(&mut left, &mut held).await;
            for number in 0..self.cluster.stores() {
                let metrics = client::get(self.cluster.store_address(number), "/metrics").await;
                let Some(metrics) = metrics else {
                    left.push(format!("store {number} does not tell its metrics"));
                    continue;
                };
                for level in STORE_LEVELS {
                    if level_of(&metrics, level) != Some(0) {
                        left.push(format!("store {number}: {level} {:?}", level_of(&metrics, level)));
                    }
                }
            }
        }
        for number in 0..self.cluster.engines() {
            if self.cluster.is_reference() {
                break;
            }
            let Some(mock) = self.cluster.mock(number) else {
                left.push(format!("engine {number} does not run"));
                continue;
            };
            let stats = mock.stats();
            if stats.running + stats.waiting + stats.held_blocks + stats.leased_blocks > 0 {
                left.push(format!(
                    "engine {number} runs {}, {} wait, {} blocks are held",
                    stats.running, stats.waiting, stats.held_blocks
                ));
            }
            held.insert(self.cluster.engine_name(number), (number, stats.known_blocks as u64));
        }
        for gateway in 0..self.cluster.gateways() as u8 {
            let status = client::get(self.cluster.admin_address(gateway), "/kvasir/status").await;
            let Some(status) = status.and_then(|status| serde_json::from_str::<Value>(&status).ok()) else {
                left.push(format!("gateway {gateway} does not tell its status"));
                continue;
            };
            self.compare(gateway, &status, &held, &mut left);
        }
        left
    }

    async fn workers_left_over(&self, left: &mut Vec<String>, held: &mut BTreeMap<String, (usize, u64)>) {
        for number in 0..self.cluster.engines() {
            let Some(metrics) = client::get(self.cluster.engine_address(number), "/metrics").await else {
                left.push(format!("worker {number} does not tell its metrics"));
                continue;
            };
            for level in WORKER_LEVELS {
                match level_of(&metrics, level) {
                    Some(0) => {}
                    // Without tiers there is no such level.
                    None if level.starts_with("kvasir_host_") && !self.tiers.has_host() => {}
                    None if level.starts_with("kvasir_remote_") && !self.tiers.has_stores() => {}
                    other => left.push(format!("worker {number}: {level} {other:?}")),
                }
            }
            let [used, evictable, cached] = ["used", "evictable", "cached"].map(|name| {
                level_of(&metrics, &format!("kvasir_engine_kv_slots_{name}")).unwrap_or(u64::MAX)
            });
            if used != evictable {
                left.push(format!(
                    "worker {number}: {used} slots are used, of which {evictable} can be evicted"
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
        left: &mut Vec<String>,
    ) {
        // The question for the status is none of the requests.
        for level in ["active", "waiting"] {
            if status[level].as_u64() != Some(0) {
                left.push(format!("gateway {gateway}: {level} {}", status[level]));
            }
        }
        let empty = Vec::new();
        let workers = status["workers"].as_array().unwrap_or(&empty);
        for (name, (number, blocks)) in held {
            let Some(worker) = workers.iter().find(|worker| worker["name"] == name.as_str()) else {
                left.push(format!("gateway {gateway} does not know {name}"));
                continue;
            };
            if worker["ready"] != true {
                left.push(format!("gateway {gateway}: {name} is not ready: {}", worker["reason"]));
            }
            for level in ["requests", "peers_requests", "kv_tokens"] {
                if worker[level].as_u64() != Some(0) {
                    left.push(format!("gateway {gateway}: {name} has {level} {}", worker[level]));
                }
            }
            let pools = worker["pools"].as_array().unwrap_or(&empty);
            let device = pools.iter().find(|pool| pool["tier"] == "device");
            let indexed = device.and_then(|pool| pool["indexed"].as_u64()).unwrap_or(0);
            if self.cluster.has_events(*number) && indexed != *blocks {
                left.push(format!(
                    "gateway {gateway}: {indexed} blocks of {name} are indexed, it holds {blocks}"
                ));
            }
        }
        if workers.len() != held.len() {
            left.push(format!("gateway {gateway} knows {} workers of {}", workers.len(), held.len()));
        }
    }

    /// A cluster that was healed serves as one to which nothing has happened.
    async fn final_questions(&mut self) -> Result<()> {
        for gateway in 0..self.cluster.gateways() as u8 {
            let address = self.cluster.gateway_address(gateway);
            for (number, streams) in [(0, true), (1, false)] {
                let exchange = self.catalog[number][0].clone();
                let manner = Manner { streams, leaves_after: None, pause: 0 };
                let outcome = ask(address, &exchange, manner, 1_000_000 + number as u64).await;
                ensure!(
                    outcome == Outcome::Right,
                    "after all was healed gateway {gateway} answers {outcome:?}"
                );
            }
        }
        Ok(())
    }

    async fn worked(&self) -> Counts {
        let mut worked = Counts::new();
        worked.extend(WORKED.map(|name| (name.to_owned(), 0)));
        let disks = kernel::disk_counts();
        worked.insert("disk operations that failed".to_owned(), disks.failed);
        worked.insert("reads that brought a wrong bit".to_owned(), disks.rotten);
        worked.insert("writes that were lost with the power".to_owned(), disks.undone);
        if self.cluster.is_reference() {
            for number in 0..self.cluster.engines() {
                let metrics = client::get(self.cluster.engine_address(number), "/metrics").await;
                for name in WORKED {
                    let count = metrics.as_ref().and_then(|metrics| level_of(metrics, name)).unwrap_or(0);
                    *worked.entry(name.to_owned()).or_default() += count;
                }
            }
        }
        worked
    }
}

/// Levels of workers and stores that are 0 at rest.
const WORKER_LEVELS: [&str; 8] = [
    "kvasir_engine_requests_running",
    "kvasir_engine_requests_waiting",
    "kvasir_engine_requests_fetching",
    "kvasir_transfer_open",
    "kvasir_transfer_quarantined_slots",
    "kvasir_host_leased_slots",
    "kvasir_remote_operations",
    "kvasir_remote_held_slots",
];
const STORE_LEVELS: [&str; 3] =
    ["kvasir_pool_leases", "kvasir_pool_fenced_slots", "kvasir_pool_verifying_blocks"];

/// A level in a text of metrics.
fn level_of(metrics: &str, name: &str) -> Option<u64> {
    let values = metrics.lines().filter_map(|line| {
        let rest = line.strip_prefix(name).filter(|rest| rest.starts_with([' ', '{']))?;
        rest.rsplit(' ').next()?.parse::<f64>().ok()
    });
    // A metric with labels has several.
    values.reduce(|sum, value| sum + value).map(|sum| sum as u64)
}

enum Action {
    Begin(What),
    End(What),
}

/// How long something lasts that ends by itself.
fn lasts(what: &What) -> Option<u64> {
    match what {
        What::Kill { back_after: lasts, .. }
        | What::Freeze { lasts, .. }
        | What::Partition { lasts, .. }
        | What::Degrade { lasts, .. }
        | What::Misbehave { lasts, .. }
        | What::Disk { lasts, .. }
        | What::Leave { lasts, .. } => Some(*lasts),
        What::Ask { .. } | What::Cut { .. } | What::Jump { .. } => None,
    }
}
