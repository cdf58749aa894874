//! One run: the cluster starts, goes through its plan, is healed, and must then come to rest and serve.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::task::{JoinSet, LocalSet};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tools_mocker::Fault;

use crate::answers::Surface;
use crate::bounds::Finding;
use crate::catalog::{Catalog, Exchange};
use crate::client::{self, ClientBehaviour, ExchangeResult, Outcome, ask};
use crate::cluster::{Cluster, Listed, faults_of};
use crate::fault_effects::FaultEffects;
use crate::kernel::{self, DiskFaults, HostId, KernelConfig, LinkFaults, Nanos, report};
use crate::oracle::{Oracle, Violation};
use crate::plan::{Action, Plan};
use crate::quiescence::{Counts, Observer};

/// Time within which a cluster without faults is ready.
const READY_WITHIN: Duration = Duration::from_secs(60);
/// Time within which each exchange ends after all faults were healed.
const ENDS_WITHIN: Duration = Duration::from_secs(600);

/// Time within which a fleet without requests shrinks to the fewest engines, in addition to the planner's
/// waiting time.
const SCALES_WITHIN: Duration = Duration::from_secs(240);
/// Seconds for which the planner waits before it scales down: `down_after` of `nodes.rs`, multiplied by four
/// for each reversal, a rise that follows a fall, up to two hours (`control/planner/src/planner.rs`).
const DOWN_AFTER: u64 = 4;
const DOWN_AFTER_FACTOR: u64 = 4;
const DOWN_AFTER_MAX: u64 = 7200;
/// One run in this many has its levels checked throughout.
const MONITORS_ONE_SEED_IN: u64 = 4;
/// Consecutive polls that must confirm a state.
const STEADY_POLLS: u32 = 20;
/// Interval at which the supervisor polls for ended processes.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Result of a run that passed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Summary {
    pub(crate) hash: u64,
    pub(crate) steps: u64,
    pub(crate) turns: u64,
    pub(crate) simulated_nanos: u64,
    /// Number of exchanges by outcome.
    pub(crate) ends: BTreeMap<String, u64>,
    /// Counters of the system's parts at the end, which show that each part was exercised.
    pub(crate) worked: BTreeMap<String, u64>,
}

/// State of a run.
struct SimulationRun {
    cluster: Cluster,
    catalog: Rc<Vec<Vec<Exchange>>>,
    ends: Counts,
    /// Running exchanges: step number and outcome.
    asked: JoinSet<(usize, ExchangeResult)>,
    fault_effects: FaultEffects,
    /// Steps whose exchanges ended correctly, with the time of the end.
    correct_since: BTreeMap<usize, Nanos>,
    /// Number of answers whose cached tokens were checked against an upper bound.
    cached_checked: u64,
    /// Number of answers whose time was checked against an upper bound.
    time_checked: u64,
    /// Faults that began, by their names.
    begun: Counts,
    /// The first level that was out of bounds.
    finding: Finding,
    prints_steps: bool,
}

/// Carries out a plan in this process, which becomes the simulation, and exits.
pub(crate) fn run(plan: &Plan, catalog: &Catalog, prints_trace: bool, prints_steps: bool) -> ! {
    std::panic::set_hook(Box::new(|panic| report::fail(Oracle::Alive, &panic.to_string())));
    kernel::begin(&KernelConfig { seed: plan.seed, prints_trace });
    // Both ways in which the programs call the system must end in the simulated kernel.
    let [std, rustix] = [std::process::id(), rustix::process::getpid().as_raw_nonzero().get().unsigned_abs()];
    if std != rustix || kernel::now() > kernel::SECOND {
        report::fail(
            Oracle::Simulator,
            "a library bypasses the simulated kernel: is rustix built with `use-libc`, and the program linked with `-rdynamic`?",
        );
    }
    match run_plan(plan, catalog, prints_steps) {
        Ok((ends, worked)) => {
            let (hash, steps, turns) = kernel::trace();
            let summary = Summary { hash, steps, turns, simulated_nanos: kernel::now(), ends, worked };
            report::send(&json!({ "passed": summary }).to_string());
            report::end(0)
        }
        Err(error) => match error.downcast_ref::<Violation>() {
            Some(Violation(oracle, what)) => report::fail(*oracle, what),
            None => report::fail(Oracle::Simulator, &format!("{error:#}")),
        },
    }
}

fn run_plan(plan: &Plan, catalog: &Catalog, prints_steps: bool) -> Result<(Counts, Counts)> {
    // The first runtime of the process creates the shared state, and lives longest.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let client = HostId::WORLD;
    LocalSet::new().block_on(&runtime, async {
        let cluster = Cluster::start(plan, client)?;
        let mut run = SimulationRun {
            cluster,
            catalog: Rc::new(if plan.is_reference() {
                catalog.workers.clone()
            } else {
                catalog.mocks.clone()
            }),
            ends: BTreeMap::new(),
            asked: JoinSet::new(),
            fault_effects: FaultEffects::new(plan, 0),
            correct_since: BTreeMap::new(),
            cached_checked: 0,
            time_checked: 0,
            begun: Action::NAMES.map(|name| (format!("fault: {name}"), 0)).into(),
            finding: Finding::default(),
            prints_steps,
        };
        run.await_ready().await?;
        run.fault_effects = FaultEffects::new(plan, kernel::now());
        // Reading the levels makes connections and takes time of all nodes, so most runs do without.
        if plan.seed.is_multiple_of(MONITORS_ONE_SEED_IN) {
            let monitor = run.cluster.level_monitor(plan.requests_max);
            tokio::task::spawn_local(monitor.watch(Rc::clone(&run.finding)));
        }
        run.run_steps(plan).await?;
        run.print_step("everything is healed");
        run.cluster.heal()?;
        let ended = timeout(ENDS_WITHIN, run.all_end()).await;
        let is_over = ended.is_ok();
        ended.unwrap_or(Ok(()))?;
        ensure!(
            is_over,
            Violation::new(Oracle::Progress, "exchanges have not ended 10 minutes after all was healed")
        );
        while run.cluster.is_restarting() {
            sleep(POLL_INTERVAL).await;
            run.cluster.supervise()?;
        }
        run.await_scale().await?;
        run.publish_final_events().await;
        let observer = Observer { cluster: &run.cluster };
        observer.await_quiescence().await?;
        run.print_step("at rest");
        run.final_questions().await?;
        run.check_bounds()?;
        run.cluster.supervise()?;
        let mut worked = Observer { cluster: &run.cluster }.worked().await;
        worked.insert("answers whose cached tokens are bounded".to_owned(), run.cached_checked);
        worked.insert("answers whose time is bounded".to_owned(), run.time_checked);
        worked.append(&mut run.begun);
        Ok((run.ends, worked))
    })
}

impl SimulationRun {
    fn print_step(&self, what: &str) {
        if self.prints_steps {
            report::print(&format!("{:>9.3} s  {what}\n", kernel::now() as f64 / 1e9));
        }
    }

    async fn await_ready(&mut self) -> Result<()> {
        let mut last = None;
        let ready = async {
            for gateway in 0..self.cluster.gateway_count() as u8 {
                let address = self.cluster.admin_address(gateway);
                loop {
                    let status =
                        client::get(address, "/kvasir/status", self.cluster.administrators_key()).await;
                    let status = status.and_then(|status| serde_json::from_str::<Value>(&status).ok());
                    let is_ready = |worker: &Value| worker["ready"] == true;
                    let workers = status.as_ref().and_then(|status| status["workers"].as_array());
                    if workers.is_some_and(|all| {
                        all.len() == self.cluster.wanted_engines().len() && all.iter().all(is_ready)
                    }) {
                        break;
                    }
                    last = Some((gateway, status));
                    sleep(Duration::from_millis(200)).await;
                    self.cluster.supervise()?;
                }
            }
            anyhow::Ok(())
        };
        match timeout(READY_WITHIN, ready).await {
            Ok(ended) => ended,
            Err(_) => bail!(Violation::new(
                Oracle::Service,
                format!("the cluster is not ready in a minute; the last status: {last:?}")
            )),
        }
    }

    async fn run_steps(&mut self, plan: &Plan) -> Result<()> {
        let began = Instant::now();
        // The end of a fault is a step of its own.
        let mut steps: Vec<(u64, usize, StepEdge)> = Vec::new();
        for (number, step) in plan.steps.iter().enumerate() {
            steps.push((step.at, number, StepEdge::Begin(step.action.clone())));
            if let Some(lasts) = step.action.lasts() {
                steps.push((step.at + lasts, number, StepEdge::End(step.action.clone())));
            }
        }
        steps.sort_by_key(|(at, number, _)| (*at, *number));
        for (at, number, edge) in steps {
            let due = began + Duration::from_millis(at);
            while self.cluster.needs_supervision() && Instant::now() + POLL_INTERVAL < due {
                sleep(POLL_INTERVAL).await;
                self.cluster.supervise()?;
            }
            sleep_until(due).await;
            self.cluster.supervise()?;
            kernel::note("step", number as u64, at);
            match edge {
                StepEdge::Begin(action) => self.begin(number as u64, &action)?,
                StepEdge::End(action) => self.end(&action)?,
            }
            while let Some(ended) = self.asked.try_join_next() {
                self.check_result(ended?)?;
            }
        }
        Ok(())
    }

    fn begin(&mut self, number: u64, action: &Action) -> Result<()> {
        if let Some(name) = action.name() {
            self.print_step(&format!("{action:?}"));
            *self.begun.entry(format!("fault: {name}")).or_default() += 1;
        }
        match action {
            Action::Ask { gateway, conversation, turn, streams, leaves_after, pause, tenant, surface } => {
                let address = self.cluster.gateway_address(*gateway);
                let catalog = Rc::clone(&self.catalog);
                let behaviour = ClientBehaviour {
                    key: self.cluster.key(*tenant),
                    surface: *surface,
                    streams: *streams,
                    leaves_after: *leaves_after,
                    pause: *pause,
                };
                let (conversation, turn, gateway) = (*conversation, *turn, *gateway);
                self.print_step(&format!("request {number}: turn {turn} of conversation {conversation}, to gateway {gateway}, {behaviour:?}"));
                self.asked.spawn_local(async move {
                    let ended = ask(address, &catalog[conversation][turn], behaviour, number).await;
                    (number as usize, ended)
                });
            }
            Action::Kill { node, silently, .. } => self.cluster.kill(*node, *silently),
            Action::Terminate { node, kill_after } => self.cluster.terminate(*node, *kill_after),
            Action::ChangeModel { engine, .. } => self.cluster.change_model(*engine, true),
            Action::Freeze { node, .. } => self.cluster.freeze(*node, true),
            Action::Partition { a, b, .. } => {
                self.cluster.set_link(*a, *b, LinkFaults { is_down: true, ..self.cluster.usual_link() });
            }
            Action::Degrade { a, b, link, .. } => self.cluster.set_link(*a, *b, faults_of(*link)),
            Action::Cut { a, b, silently } => self.cluster.cut(*a, *b, *silently),
            Action::Jump { node, millis } => self.cluster.jump(*node, *millis),
            Action::Misbehave { engine, kind, probability_percent, millis, tokens, .. } => {
                let fault: Fault = serde_json::from_value(json!({
                    "kind": kind, "probability": f64::from(*probability_percent) / 100.0, "millis": millis, "tokens": tokens,
                }))?;
                if let Some(mock) = self.cluster.mock(usize::from(*engine)) {
                    mock.fault(fault)?;
                }
            }
            Action::Disk { node, slow_ms, fail_one_in, rot_one_in, .. } => {
                let slow = slow_ms * kernel::MILLISECOND;
                let faults = DiskFaults { slow, fail_one_in: *fail_one_in, rot_one_in: *rot_one_in };
                self.cluster.set_disk(*node, faults);
            }
            Action::CutWatches => self.cluster.cut_watches(),
            Action::Leave { engine, drains, .. } => {
                self.cluster.set_listed(*engine, if *drains { Listed::Draining } else { Listed::Out })?
            }
        }
        Ok(())
    }

    fn end(&mut self, action: &Action) -> Result<()> {
        self.print_step(&format!("over: {action:?}"));
        match action {
            Action::Kill { node, .. } => self.cluster.restart(*node),
            Action::Freeze { node, .. } => self.cluster.freeze(*node, false),
            Action::Partition { a, b, .. } | Action::Degrade { a, b, .. } => {
                self.cluster.set_link(*a, *b, self.cluster.usual_link());
            }
            Action::Misbehave { engine, .. } => {
                if let Some(mock) = self.cluster.mock(usize::from(*engine)) {
                    mock.heal();
                }
            }
            Action::Disk { node, .. } => self.cluster.set_disk(*node, DiskFaults::default()),
            Action::Leave { engine, .. } => self.cluster.set_listed(*engine, Listed::In)?,
            Action::ChangeModel { engine, .. } => self.cluster.change_model(*engine, false),
            Action::Ask { .. }
            | Action::Cut { .. }
            | Action::CutWatches
            | Action::Jump { .. }
            | Action::Terminate { .. } => {}
        }
        Ok(())
    }

    fn check_result(&mut self, (number, ended): (usize, ExchangeResult)) -> Result<()> {
        self.check_bounds()?;
        let outcome = &ended.outcome;
        self.print_step(&format!("request {number}: {outcome:?}, cached {:?}", ended.cached));
        let name = match outcome {
            Outcome::Wrong(oracle, what) => {
                bail!(Violation::new(*oracle, format!("request {number}: {what}")))
            }
            Outcome::Refused(status) => format!("refused {status}"),
            other => format!("{other:?}").to_lowercase(),
        };
        ensure!(
            self.fault_effects.explain(number, &ended),
            Violation::new(
                self.fault_effects.violated(number, &ended),
                format!("request {number} ends as {outcome:?}, and no fault explains it")
            )
        );
        if *outcome == Outcome::Correct {
            if let Some(within) = self.fault_effects.answers_within(number) {
                let took = ended.at.saturating_sub(self.fault_effects.due(number));
                let what = format!(
                    "request {number} is answered after {} ms without any fault",
                    took / kernel::MILLISECOND
                );
                ensure!(took <= within, Violation::new(Oracle::Progress, what));
                self.time_checked += 1;
            }
            self.check_cached(number, &ended)?;
        }
        let name = match ended.surface {
            Surface::Chat => name,
            other => format!("{name} ({})", format!("{other:?}").to_lowercase()),
        };
        *self.ends.entry(name).or_default() += 1;
        Ok(())
    }

    /// Checks that the cached tokens of a prompt come only from its tenant's requests.
    fn check_cached(&mut self, number: usize, ended: &ExchangeResult) -> Result<()> {
        let Some(cached) = ended.cached else {
            // The usage may be the gateway's own, if the last engine of a stream has reported none.
            let what = format!("the usage of request {number} has no number of cached tokens");
            ensure!(self.fault_effects.may_repeat(ended.at), Violation::new(Oracle::Tenants, what));
            return Ok(());
        };
        if let Some(most) = self.fault_effects.cached_max(number, ended, &self.catalog) {
            self.cached_checked += 1;
            let what = format!(
                "request {number} had {cached} tokens in a cache, and its tenant has asked for {most} of them before"
            );
            ensure!(cached <= most, Violation::new(Oracle::Tenants, what));
        }
        let fewest = self.fault_effects.cached_min(number, &self.correct_since, &self.catalog);
        let what = format!(
            "request {number} had {cached} tokens in a cache, and its tenant has left {fewest} of them there"
        );
        ensure!(cached >= fewest, Violation::new(Oracle::Tenants, what));
        self.correct_since.insert(number, ended.at);
        Ok(())
    }

    fn check_bounds(&self) -> Result<()> {
        match self.finding.borrow().as_ref() {
            Some(finding) => bail!(Violation::new(Oracle::Bounds, finding.clone())),
            None => Ok(()),
        }
    }

    async fn all_end(&mut self) -> Result<()> {
        while !self.asked.is_empty() {
            if let Ok(Some(ended)) = timeout(POLL_INTERVAL, self.asked.join_next()).await {
                self.check_result(ended?)?;
            }
            if self.cluster.needs_supervision() {
                self.cluster.supervise()?;
            }
        }
        Ok(())
    }

    /// Without requests one engine is enough, and one of the control services leads.
    async fn await_scale(&mut self) -> Result<()> {
        let (began, mut steady) = (Instant::now(), 0);
        while let Some((running, wanted)) = self.cluster.scale()? {
            let mut leaders = 0;
            for address in self.cluster.control_addresses() {
                let metrics = client::get(address, "/metrics", None).await.unwrap_or_default();
                leaders += u64::from(metrics.contains("kvasir_control_leader 1"));
            }
            steady = if (running, wanted, leaders) == (1, 1, 1) { steady + 1 } else { 0 };
            // Decisions that an unreachable API server did not carry out show in no object: each rise may be a reversal.
            let reversals = match self.fault_effects.hits_api_server() {
                true => self.cluster.counts().scaled_up.max(self.cluster.reversals()),
                false => self.cluster.reversals(),
            };
            let factor = DOWN_AFTER_FACTOR.saturating_pow(u32::try_from(reversals).unwrap_or(u32::MAX));
            let patience = DOWN_AFTER.saturating_mul(factor).min(DOWN_AFTER_MAX);
            let within = SCALES_WITHIN + Duration::from_secs(patience);
            if steady == STEADY_POLLS {
                break;
            }
            let what = format!(
                "{running} engines run and {wanted} are wanted {} s after the last request, and {leaders} control services lead",
                within.as_secs()
            );
            ensure!(began.elapsed() < within, Violation::new(Oracle::Scaling, what));
            sleep(POLL_INTERVAL).await;
            self.cluster.supervise()?;
        }
        Ok(())
    }

    /// Makes each engine publish another event: its sequence number reveals a lost one.
    async fn publish_final_events(&self) {
        sleep(Duration::from_secs(10)).await;
        for number in self.cluster.wanted_engines() {
            let text = "nothing that anybody else has said ".repeat(2);
            client::post_completion(self.cluster.engine_address(number), &text).await;
        }
    }

    /// Checks that a healed cluster serves as if there had been no faults.
    async fn final_questions(&mut self) -> Result<()> {
        for gateway in 0..self.cluster.gateway_count() as u8 {
            let address = self.cluster.gateway_address(gateway);
            for (number, streams) in [(0, true), (1, false)] {
                let exchange = self.catalog[number][0].clone();
                let key = self.cluster.key(0);
                let behaviour =
                    ClientBehaviour { key, surface: Surface::Chat, streams, leaves_after: None, pause: 0 };
                let ended = ask(address, &exchange, behaviour, 1_000_000 + number as u64).await;
                let what = format!("after all was healed gateway {gateway} answers {:?}", ended.outcome);
                ensure!(ended.outcome == Outcome::Correct, Violation::new(Oracle::Service, what));
            }
        }
        Ok(())
    }
}

/// The beginning or the end of an action.
enum StepEdge {
    Begin(Action),
    End(Action),
}
