//! The planner for running gateways: observes them, decides, and shows them the decisions.

mod headroom_choice;
mod observer;

use std::collections::VecDeque;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use control_config::{PlannerSettings, season_seconds};
use control_planner::{
    Decision, Engine, Headroom, Observation, Planner, PlannerConfig, PoolConfig, ServiceLevel, StepTime,
    WorkerCounts, WorkerRole,
};
use http::Method;
use router_engines::client::EngineClient;
use serde_json::{Value, json};

use headroom_choice::HeadroomChoice;
pub(crate) use observer::{FleetObservation, ObservedWorker, Observer};

/// Most changes that are shown.
const CHANGES_MAX: usize = 32;
/// Time limit for posting a plan to a gateway; a slower gateway does not get this plan.
const ANSWER_WITHIN: Duration = Duration::from_millis(500);

/// Workers of one role, as the process that starts and stops workers counts them.
#[derive(Debug, Clone, Default)]
pub(crate) struct PoolCounts {
    pub(crate) workers: WorkerCounts,
    /// For each starting worker: seconds since it was requested.
    pub(crate) starting_for: Vec<f64>,
    /// For each worker that became ready since the last decision: seconds since it was requested.
    pub(crate) started_in: Vec<f64>,
    /// For each worker that was woken since the last decision: seconds since it was requested.
    pub(crate) woken_in: Vec<f64>,
    /// The count that was last set.
    pub(crate) in_force: u32,
}

/// Decisions for the roles of one fleet.
pub(crate) struct Planning {
    planner: Planner,
    roles: Vec<WorkerRole>,
    is_acting: bool,
    headroom: HeadroomChoice,
    wanted: Vec<Option<u32>>,
    changes: VecDeque<Value>,
    /// For each role, reasons for late answers from the kernels of its workers' machines.
    slow: Vec<String>,
}

impl Planning {
    /// Creates the planner for prefill and decode workers, or for workers that do both.
    pub(crate) fn new(settings: &PlannerSettings, has_prefill: bool) -> Self {
        let roles = match has_prefill {
            true => vec![WorkerRole::Prefill, WorkerRole::Decode],
            false => vec![WorkerRole::Both],
        };
        let pools: Vec<PoolConfig> = roles.iter().map(|&role| pool(settings, role)).collect();
        let is_acting = settings.mode == "act";
        let wanted = vec![None; roles.len()];
        let config = config(settings, is_acting, &pools);
        let headroom = HeadroomChoice::new(settings, &config, &pools);
        let planner = Planner::new(config, pools);
        let slow = vec![String::new(); roles.len()];
        Self { planner, roles, is_acting, headroom, wanted, changes: VecDeque::new(), slow }
    }

    pub(crate) fn roles(&self) -> &[WorkerRole] {
        &self.roles
    }

    /// Decides on the count of each role, in the order of the roles.
    pub(crate) fn decide(&mut self, seen: &FleetObservation, counts: &[PoolCounts]) -> Vec<Decision> {
        let has_prefill = self.roles.len() > 1;
        let observe = |(&role, counts)| observation(role, has_prefill, seen, counts);
        let observations: Vec<Observation> = self.roles.iter().zip(counts).map(observe).collect();
        self.slow = self.roles.iter().map(|&role| slow(role, has_prefill, seen)).collect();
        let now = unix_now().as_secs_f64();
        self.headroom.tick(now, &observations, &mut self.planner);
        let decisions = self.planner.decide(now, &observations);
        for (decision, before) in decisions.iter().zip(&mut self.wanted) {
            if let Some(from) = before.replace(decision.wanted).filter(|&from| from != decision.wanted) {
                tracing::info!(from, "planner: {decision}");
                self.changes.push_back(json!({
                    "unix_ms": unix_now().as_millis() as u64, "pool": decision.pool, "from": from,
                    "to": decision.wanted, "text": decision.to_string(),
                }));
                if self.changes.len() > CHANGES_MAX {
                    self.changes.pop_front();
                }
            }
        }
        decisions
    }

    /// Forgets the requested counts: another process carries out its own decisions, and a count that differs
    /// from this process's was not set by hand.
    pub(crate) fn forget_asked(&mut self) {
        self.planner.forget_asked();
    }

    /// Records that the count of the pool with this index was set as decided.
    pub(crate) fn carried_out(&mut self, pool: usize) {
        self.planner.carried_out(pool);
    }

    /// Returns the plan in the format that gateways show.
    pub(crate) fn to_json(&self, decisions: &[Decision], counts: &[PoolCounts]) -> Value {
        let pools = decisions.iter().zip(counts).enumerate().map(|(pool, (decision, counts))| {
            json!({
                "trials": self.headroom.trials(pool),
                "pool": decision.pool,
                "wanted": decision.wanted,
                "ready": counts.workers.ready,
                "starting": counts.workers.starting,
                "draining": counts.workers.draining,
                "sleeping": counts.workers.sleeping,
                "stuck": decision.stuck,
                "reason": decision.reason.name(),
                "text": format!("{decision}{}", self.slow[pool]),
                "rate": decision.rate,
                "capacity": decision.capacity,
                "need": decision.need,
                "utilisation": decision.utilisation,
                "horizon_seconds": decision.horizon,
            })
        });
        json!({
            "mode": if self.is_acting { "act" } else { "advise" },
            "pools": pools.collect::<Vec<Value>>(),
            "changes": self.changes,
        })
    }
}

/// Returns the kernels' reasons for the workers of a role, limited to the first few.
fn slow(role: WorkerRole, has_prefill: bool, seen: &FleetObservation) -> String {
    const SHOWN: usize = 3;
    let of_role = seen.workers.iter().filter(|worker| planned_role(worker, has_prefill) == role);
    let slow = of_role.filter(|worker| !worker.why_slow.is_empty()).take(SHOWN);
    slow.map(|worker| format!("; {}: {}", worker.name, worker.why_slow)).collect()
}

/// Posts a plan to a gateway, which shows it.
pub(crate) async fn post(client: &EngineClient, plan: &Value) {
    let posted = client.ask(Method::POST, "/kvasir/plan", Bytes::from(plan.to_string()));
    match tokio::time::timeout(ANSWER_WITHIN, posted).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::debug!("the plan was not taken: {error}"),
        Err(_) => tracing::debug!("the plan was not taken in time"),
    }
}

fn unix_now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn pool(settings: &PlannerSettings, role: WorkerRole) -> PoolConfig {
    let (min, max) = match role {
        WorkerRole::Prefill => (settings.prefill_min.min(settings.prefill_max), settings.prefill_max),
        WorkerRole::Decode | WorkerRole::Both => (settings.decode_min, settings.decode_max),
    };
    PoolConfig {
        name: role.name().to_owned(),
        role,
        min: min as u32,
        max: max as u32,
        gpus: settings.gpus as u32,
    }
}

/// Returns the initial engine model, before any measurement.
pub(crate) fn engine(settings: &PlannerSettings) -> Engine {
    let seconds = |micros: f64| micros / 1e6;
    Engine {
        step: StepTime {
            base: seconds(settings.step_base_us),
            per_request: seconds(settings.step_per_request_us),
            per_kv_token: seconds(settings.step_per_kv_token_us),
            per_prompt_token: seconds(settings.step_per_prompt_token_us),
            per_prompt_square: seconds(settings.step_per_prompt_square_us),
        },
        kv_tokens: settings.kv_tokens as f64,
        batch_tokens: settings.batch_tokens as f64,
        running_max: settings.running_max as usize,
    }
}

/// Returns the service level of the settings.
pub(crate) fn level(settings: &PlannerSettings) -> ServiceLevel {
    ServiceLevel {
        ttft: settings.ttft.as_secs_f64(),
        itl: settings.itl.as_secs_f64(),
        attainment: settings.attainment,
    }
}

fn config(settings: &PlannerSettings, is_acting: bool, pools: &[PoolConfig]) -> PlannerConfig {
    // Sleeping workers occupy their GPUs.
    let spares = if is_acting { settings.spares } else { 0 };
    let of_spares: u64 = pools.iter().map(|pool| spares * u64::from(pool.gpus)).sum();
    PlannerConfig {
        level: level(settings),
        engine: engine(settings),
        headroom: Headroom { utilisation: settings.utilisation },
        start_time: settings.start_time.as_secs_f64(),
        clear_within: settings.clear_within.as_secs_f64(),
        down_after: settings.down_after.as_secs_f64(),
        // Advice is not carried out, and an autoscaler or a webhook's receiver may round: there, a different
        // count does not mean that it was changed by hand.
        manual_hold: match is_acting && ["processes", "kubernetes"].contains(&settings.actuator.as_str()) {
            true => settings.manual_hold.as_secs_f64(),
            false => 0.0,
        },
        gpus_max: settings.gpus_max.saturating_sub(of_spares) as u32,
        seasons: settings.seasons.iter().filter_map(|season| season_seconds(season)).collect(),
    }
}

/// Returns the role that a worker is planned as. With prefill workers, a combined worker counts as decode;
/// without, all count as combined.
pub(crate) fn planned_role(worker: &ObservedWorker, has_prefill: bool) -> WorkerRole {
    match (worker.role, has_prefill) {
        (_, false) => WorkerRole::Both,
        (WorkerRole::Prefill, true) => WorkerRole::Prefill,
        (WorkerRole::Both | WorkerRole::Decode, true) => WorkerRole::Decode,
    }
}

fn observation(
    role: WorkerRole,
    has_prefill: bool,
    seen: &FleetObservation,
    counts: &PoolCounts,
) -> Observation {
    let sum = |of: fn(&ObservedWorker) -> f64| -> f64 {
        let workers = seen.workers.iter().filter(|worker| {
            // Draining workers' load is not part of the ready workers' load.
            planned_role(worker, has_prefill) == role && !worker.is_draining
        });
        workers.map(of).sum()
    };
    // Times to first token are measured over all requests: they describe prefill workers only if nearly all
    // prompts go there.
    let tells_of_prompts = role != WorkerRole::Prefill || seen.disaggregated >= 0.9 * seen.begun;
    let waiting = sum(|worker| worker.waiting);
    // Requests that gateways hold back, because no worker can take them, wait for the first phase.
    let held_back = if role == WorkerRole::Decode { 0.0 } else { seen.waiting };
    Observation {
        seconds: seen.seconds,
        // Without a ready prefill worker, decode workers compute the prompts, so all requests count as its
        // demand.
        arrivals: match role {
            WorkerRole::Prefill if counts.workers.ready > 0 => seen.disaggregated,
            _ => seen.begun,
        },
        finished: seen.lengths.clone(),
        queued: waiting + held_back,
        decoding: (sum(|worker| worker.requests) - waiting).max(0.0),
        kv_tokens: sum(|worker| worker.kv_tokens),
        itl_mean: seen.itl.mean(),
        itl_p90: seen.itl.p90(),
        ttft_mean: seen.ttft.mean().filter(|_| tells_of_prompts),
        ttft_p90: seen.ttft.p90(),
        workers: counts.workers,
        starting_for: counts.starting_for.clone(),
        started_in: counts.started_in.clone(),
        woken_in: counts.woken_in.clone(),
        in_force: counts.in_force,
        is_partial: seen.is_partial,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_shown_with_their_reason_and_bounded() {
        let settings = PlannerSettings { decode_max: 9, ..PlannerSettings::default() };
        let mut planning = Planning::new(&settings, false);
        let seen = |waiting: f64| FleetObservation {
            seconds: 5.0,
            begun: 5.0,
            waiting,
            ..FleetObservation::default()
        };
        let mut counts = PoolCounts { in_force: 1, ..PoolCounts::default() };
        counts.workers.ready = 1;
        for _ in 0..3 {
            planning.decide(&seen(0.0), std::slice::from_ref(&counts));
        }
        let decisions = planning.decide(&seen(50.0), std::slice::from_ref(&counts));
        assert_eq!(decisions[0].wanted, 2);
        let plan = planning.to_json(&decisions, &[counts]);
        assert_eq!((&plan["mode"], &plan["pools"][0]["wanted"]), (&json!("advise"), &json!(2)));
        let change = &plan["changes"][0];
        assert_eq!((&change["from"], &change["to"]), (&json!(1), &json!(2)), "{plan}");
        assert!(change["text"].as_str().is_some_and(|text| text.contains("too few requests")), "{plan}");
    }
}
