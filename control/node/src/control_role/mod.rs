//! `kvasir control`: plans the number of workers behind running gateways, shows the plan on the gateways and,
//! with `planner.mode = "act"`, carries it out. No request passes through this process; while it is down,
//! counts do not change.
//!
//! Reading order: `gateways` (the observed gateways), `actuation` (how counts are read and carried out),
//! `leadership` (which of several processes acts), `spares` (sleeping workers), `report` (HTTP routes of the
//! control service).

mod actuation;
mod gateways;
mod leadership;
mod report;
mod spares;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use control_config::Settings;
use control_planner::WorkerRole;
use futures_util::future::join_all;
use tokio::time::MissedTickBehavior;

use crate::credentials::Credentials;
use crate::http::StopSource;
use crate::planning::{FleetObservation, Observer, Planning, PoolCounts, planned_role, post};
use crate::{GlobalArgs, exposure, http, process};
use actuation::Actuation;
use gateways::Gateways;
use report::{Report, Reporter};
use spares::Spares;

/// Ticks without a worker of one phase after which the fleet is planned with combined workers: ten minutes by
/// default.
const FORGET_TICKS: u32 = 120;

/// Arguments of `kvasir control`.
#[derive(Args)]
pub(crate) struct ControlArgs {
    #[command(flatten)]
    common: GlobalArgs,
    /// A gateway of the fleet, as HOST:PORT or https://HOST:PORT; use its `gateway.admin_listen` address if
    /// that is set. May be given several times: all gateways of the fleet (default: `control.gateways`). A
    /// name behind http may have several addresses.
    #[arg(long = "gateway", value_name = "GATEWAY")]
    gateways: Vec<String>,
    #[command(flatten)]
    credentials: Credentials,
}

pub(crate) fn run(arguments: &ControlArgs, stop_source: StopSource) -> Result<ExitCode> {
    let settings = process::start(&arguments.common)?;
    check(&settings)?;
    if let Some(said) = exposure::of_control(&settings) {
        tracing::warn!("{said}");
    }
    let names = if arguments.gateways.is_empty() { &settings.control.gateways } else { &arguments.gateways };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let graphs = actuation::graphs(&settings).await?;
        let follows_graphs = graphs.is_some();
        let graphs = tokio::spawn(graphs.unwrap_or_else(|| Box::pin(std::future::pending())));
        let mut graphs = AbortOnDrop(graphs);
        let gateways = Gateways::new(names, &arguments.credentials, settings.control.gateways_interval)?;
        let mut actuation = Actuation::start(&settings, &arguments.credentials).await?;
        let reporter = report::start(&settings).await?;
        let mut stop = http::stop_signals(stop_source, Duration::ZERO)?;
        tokio::select! {
            _ = stop.wait_for(Option::is_some) => {}
            // The controller's loop ends only by a failure.
            _ = &mut graphs.0, if follows_graphs => bail!("the task that follows KvasirGraph objects has ended"),
            () = control(&settings, gateways, &mut actuation, &reporter), if settings.planner.mode != "off" => {}
        }
        actuation.stop().await;
        Ok(ExitCode::SUCCESS)
    })
}

/// Aborts the task when the part of this process that needs it is dropped.
struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Refuses settings that leave nothing to do or cannot be carried out.
fn check(settings: &Settings) -> Result<()> {
    let planner = &settings.planner;
    match (planner.mode.as_str(), planner.actuator.as_str()) {
        ("off", _) if !settings.control.graphs => bail!("planner.mode is off: there is nothing to do"),
        // KEDA queries any of several control services, and each of them would put workers to sleep or wake
        // them.
        ("act", "keda") if planner.spares > 0 => {
            bail!("planner.spares is for planner.actuator = \"kubernetes\" or \"webhook\"")
        }
        ("act", "processes") => bail!(
            "planner.actuator = \"processes\" is for `kvasir serve`; `kvasir control` acts by kubernetes, keda or webhook"
        ),
        _ => Ok(()),
    }
}

/// Observes, decides and acts at each tick, without end.
async fn control(
    settings: &Settings,
    mut gateways: Gateways<'_>,
    actuation: &mut Actuation,
    reporter: &Reporter,
) {
    let mut observer = Observer::new(Vec::new());
    let mut spares = Spares::new(settings);
    let mut planning: Option<Planning> = None;
    let mut ticks = tokio::time::interval(settings.planner.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut shown = Vec::new();
    let mut was_silent = false;
    // Once workers of one phase were seen there are two pools, and one of them may temporarily have no
    // worker.
    let (mut has_phases, mut ticks_without) = (false, 0);
    loop {
        ticks.tick().await;
        let clients = gateways.clients().await.to_vec();
        let unresolved = gateways.unresolved();
        observer.set_clients(&clients);
        let seen = observer.observe().await;
        let silent = seen.as_ref().map_or(clients.len(), |seen| seen.silent) + unresolved;
        if std::mem::replace(&mut was_silent, silent > 0) != was_silent && planning.is_some() {
            tracing::warn!(silent, gateways = clients.len(), "gateways that do not answer");
        }
        let mut report = Report {
            gateways: clients.len(),
            silent,
            leads: actuation.leads(),
            failures: actuation.failures(),
        };
        // Some of the gateways do not represent the whole fleet.
        let Some(seen) = seen.filter(|_| unresolved == 0) else {
            reporter.silent(report);
            continue;
        };
        let has_some = seen.workers.iter().any(|worker| worker.role != WorkerRole::Both);
        let is_whole = silent == 0 && !seen.workers.is_empty();
        ticks_without = if has_some || !is_whole { 0 } else { ticks_without + 1 };
        has_phases |= has_some;
        // A pool whose minimum is above 0 but that had no worker for this long does not exist.
        if ticks_without >= FORGET_TICKS && settings.planner.prefill_min > 0 {
            has_phases = false;
        }
        let has_prefill = actuation.has_prefill().unwrap_or(has_phases);
        // Without workloads, the pools are unknown until a worker was seen.
        if planning.is_none() && seen.workers.is_empty() && actuation.has_prefill().is_none() {
            reporter.silent(report);
            continue;
        }
        // Step times learned for workers of both phases do not apply to workers of one phase.
        if planning.as_ref().is_some_and(|planning| (planning.roles().len() > 1) != has_prefill) {
            planning = None;
        }
        let planning = planning.get_or_insert_with(|| Planning::new(&settings.planner, has_prefill));
        let seen_counts = |&role: &WorkerRole| seen_counts(role, has_prefill, &seen);
        let counts = match actuation.read().await {
            Ok(Some(counts)) => counts,
            Ok(None) => planning.roles().iter().map(seen_counts).collect(),
            // Nothing is planned, and no count changes, until the workers can be counted.
            Err(()) => {
                report.failures = actuation.failures();
                reporter.silent(report);
                continue;
            }
        };
        let mut awake = counts.clone();
        for (&role, counts) in planning.roles().iter().zip(&mut awake) {
            spares.count(role, has_prefill, &seen, counts);
        }
        let decisions = planning.decide(&seen, &awake);
        let wanted: Vec<u32> = decisions.iter().map(|decision| decision.wanted).collect();
        if wanted != shown {
            decisions.iter().for_each(|decision| println!("{decision}"));
            shown = wanted;
        }
        if actuation.leads() {
            let replicas = spares.replicas(&decisions);
            for pool in actuation.carry_out(&replicas, &counts, &seen).await {
                planning.carried_out(pool);
            }
            for (&role, decision) in planning.roles().iter().zip(&decisions) {
                spares.carry_out(role, has_prefill, decision, &seen, &clients);
            }
        } else {
            planning.forget_asked();
        }
        let plan = planning.to_json(&decisions, &awake);
        if actuation.leads() {
            join_all(clients.iter().map(|client| post(client, &plan))).await;
        }
        report.failures = actuation.failures();
        reporter.decided(report, &decisions, plan);
    }
}

/// Counts the workers of a role as gateways see them.
fn seen_counts(role: WorkerRole, has_prefill: bool, seen: &FleetObservation) -> PoolCounts {
    let mut counts = PoolCounts::default();
    for worker in seen.workers.iter().filter(|worker| planned_role(worker, has_prefill) == role) {
        match (worker.is_draining, worker.is_ready) {
            // A sleeping worker counts as in force; `Spares::count` subtracts the spares.
            _ if worker.is_asleep => counts.in_force += 1,
            (true, _) => counts.workers.draining += 1,
            (false, true) => counts.workers.ready += 1,
            (false, false) => counts.workers.starting += 1,
        }
    }
    counts.in_force += counts.workers.ready + counts.workers.starting;
    counts
}
