//! `kvasir control`: plans for the workers behind running gateways, and lets them show what is wanted. It starts and stops
//! nothing, and requests do not pass through it.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use control_planner::WorkerRole;
use futures_util::future::join_all;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::MissedTickBehavior;

use crate::credentials::Credentials;
use crate::planning::{Observer, Planning, PoolCounts, Seen, planned_role, post};
use crate::{Common, process};

/// Ticks after which a fleet that has prefill workers, or has none any more, is planned for anew.
const OTHER_TICKS: u32 = 12;

/// Arguments of `kvasir control`.
#[derive(Args)]
pub(crate) struct ControlArgs {
    #[command(flatten)]
    common: Common,
    /// A gateway of the fleet, as HOST:PORT or https://HOST:PORT; its `gateway.admin_listen` where that is set. May be given
    /// several times: all gateways of the fleet.
    #[arg(long = "gateway", default_value = "127.0.0.1:8000", value_name = "GATEWAY")]
    gateways: Vec<String>,
    #[command(flatten)]
    credentials: Credentials,
}

pub(crate) fn run(arguments: &ControlArgs) -> Result<ExitCode> {
    let settings = process::start(&arguments.common)?;
    match settings.planner.mode.as_str() {
        "advise" => {}
        "off" => bail!("planner.mode is off: there is nothing to do"),
        _ => bail!("planner.mode = \"act\" is for `kvasir serve`; `kvasir control` can only advise so far"),
    }
    let clients = arguments.gateways.iter().map(|gateway| arguments.credentials.client(gateway));
    let clients = clients.collect::<Result<Vec<_>>>()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut observer = Observer::new(clients.clone());
        let mut planning: Option<Planning> = None;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut ticks = tokio::time::interval(settings.planner.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut shown = Vec::new();
        let mut was_silent = false;
        let mut other_ticks = 0;
        loop {
            tokio::select! {
                _ = interrupt.recv() => return Ok(ExitCode::SUCCESS),
                _ = terminate.recv() => return Ok(ExitCode::SUCCESS),
                _ = ticks.tick() => {}
            }
            let seen = observer.observe().await;
            let silent = seen.as_ref().map_or(clients.len(), |seen| seen.silent);
            if std::mem::replace(&mut was_silent, silent > 0) != was_silent && planning.is_some() {
                tracing::warn!(silent, gateways = clients.len(), "gateways that do not answer");
            }
            let Some(seen) = seen else { continue };
            let has_prefill = seen.workers.iter().any(|worker| worker.role == WorkerRole::Prefill);
            // Workers of other roles are another fleet, once they have stayed; what was learned is then forgotten.
            let is_other =
                planning.as_ref().is_some_and(|planning| (planning.roles().len() > 1) != has_prefill);
            other_ticks = if is_other { other_ticks + 1 } else { 0 };
            if seen.workers.is_empty() || (is_other && (other_ticks < OTHER_TICKS || silent > 0)) {
                continue;
            }
            if is_other {
                planning = None;
            }
            let planning = planning.get_or_insert_with(|| Planning::new(&settings.planner, has_prefill));
            let count = |&role: &WorkerRole| counts(role, has_prefill, &seen);
            let counts: Vec<PoolCounts> = planning.roles().iter().map(count).collect();
            let decisions = planning.decide(&seen, &counts);
            let plan = planning.to_json(&decisions, &counts);
            join_all(clients.iter().map(|client| post(client, &plan))).await;
            let wanted: Vec<u32> = decisions.iter().map(|decision| decision.wanted).collect();
            if wanted != shown {
                decisions.iter().for_each(|decision| println!("{decision}"));
                shown = wanted;
            }
        }
    })
}

/// Workers of a role, as gateways see them.
fn counts(role: WorkerRole, has_prefill: bool, seen: &Seen) -> PoolCounts {
    let mut counts = PoolCounts::default();
    for worker in seen.workers.iter().filter(|worker| planned_role(worker, has_prefill) == role) {
        match (worker.is_draining, worker.is_ready) {
            (true, _) => counts.workers.draining += 1,
            (false, true) => counts.workers.ready += 1,
            (false, false) => counts.workers.starting += 1,
        }
    }
    counts.in_force = counts.workers.ready + counts.workers.starting;
    counts
}
