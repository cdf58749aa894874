//! Sleeping spare workers beyond those that demand needs.
//!
//! The planner decides how many workers of a role are awake. The actuator gets that count plus
//! `planner.spares`. This module decides which workers sleep, and gateways carry it out
//! (`/kvasir/workers/NAME/sleep`):
//!
//! | Awake | Then |
//! | --- | --- |
//! | fewer than wanted, for [`LACKING_TICKS`] or with queued requests | spares are woken; starting workers become spares in their place |
//! | more than wanted, for [`SPARE_TICKS`], and too few spares | the workers with the fewest cached blocks are put to sleep |
//! | more than wanted, and enough spares | the actuator stops workers |
//!
//! No worker is put to sleep or woken while a gateway does not answer. All requests about one worker go to
//! one gateway, which detects a change that is already in progress.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use control_config::Settings;
use control_planner::{Decision, WorkerRole};
use http::Method;
use router_engines::client::EngineClient;

use crate::planning::{FleetObservation, ObservedWorker, PoolCounts, planned_role};
use crate::workers_command::path_of;

/// Pause after a failed attempt to put a worker to sleep or to wake it.
const RETRY_PAUSE: Duration = Duration::from_secs(60);
/// Longest time for one request: the gateway's own limit is shorter.
const CHANGE_TIMEOUT: Duration = router_fleet::SLEEP_REQUEST_MAX;
/// Pause after a change of a worker's sleep: observations may be older than the change.
const OBSERVATION_LAG_MAX: Duration = Duration::from_secs(15);
/// Consecutive decisions with too few workers awake before spares are woken.
const LACKING_TICKS: u32 = 2;
/// Consecutive decisions with too many workers awake before one is put to sleep.
const SPARE_TICKS: u32 = 3;

/// Change of a worker's sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SleepChange {
    FallsAsleep,
    Wakes,
    /// The change failed at this time.
    Failed(Instant),
    /// The change was done at this time.
    Done(Instant),
}

/// Changes by worker name, and the times that woken workers took.
#[derive(Debug, Default)]
struct SleepChanges {
    by_name: HashMap<String, SleepChange>,
    woken_in: Vec<(WorkerRole, f64)>,
}

/// The spares of all roles.
pub(super) struct Spares {
    wanted: u32,
    sleep_changes: Arc<Mutex<SleepChanges>>,
    /// Consecutive decisions with too few workers of a role awake, and with too many.
    streaks: HashMap<WorkerRole, (u32, u32)>,
}

/// A worker process with all its ranks.
#[derive(Debug, Clone, PartialEq)]
struct WorkerProcess {
    name: String,
    is_awake: bool,
    is_asleep: bool,
    /// Cost of putting the worker to sleep: cached blocks, then requests.
    value: (f64, f64),
}

/// Groups the workers of a role by process, with all ranks of a process together.
fn whole(role: WorkerRole, has_prefill: bool, seen: &FleetObservation) -> Vec<WorkerProcess> {
    let mut all: Vec<WorkerProcess> = Vec::new();
    for worker in seen.workers.iter().filter(|worker| planned_role(worker, has_prefill) == role) {
        let ObservedWorker { name, is_ready, is_draining, is_asleep, cached_blocks, requests, .. } = worker;
        let name = name.split_once('@').map_or(name.as_str(), |(name, _)| name);
        let is_awake = *is_ready && !is_draining;
        match all.iter_mut().find(|known| known.name == name) {
            Some(known) => {
                known.is_awake &= is_awake;
                known.is_asleep &= is_asleep;
                known.value = (known.value.0 + cached_blocks, known.value.1 + requests);
            }
            None => all.push(WorkerProcess {
                name: name.to_owned(),
                is_awake,
                is_asleep: *is_asleep,
                value: (*cached_blocks, *requests),
            }),
        }
    }
    all
}

/// Returns the names to wake and the names to put to sleep, so that `wanted` are awake and at most `spares`
/// asleep.
fn choose(
    mut workers: Vec<WorkerProcess>,
    sleep_changes: &HashMap<String, SleepChange>,
    wanted: u32,
    spares: u32,
) -> (Vec<String>, Vec<String>) {
    let change = |worker: &WorkerProcess| sleep_changes.get(&worker.name).copied();
    let count = |is: &dyn Fn(&WorkerProcess) -> bool| workers.iter().filter(|worker| is(worker)).count();
    let waking = count(&|worker| change(worker) == Some(SleepChange::Wakes));
    let falling = count(&|worker| change(worker) == Some(SleepChange::FallsAsleep));
    let asleep = count(&|worker| worker.is_asleep && change(worker) != Some(SleepChange::Wakes));
    let awake = count(&|worker| worker.is_awake && change(worker) != Some(SleepChange::FallsAsleep));
    let (wanted, spares) = (wanted as usize, spares as usize);
    let to_wake = wanted.saturating_sub(awake + waking);
    let to_sleep = awake.saturating_sub(wanted).min(spares.saturating_sub(asleep + falling));
    workers.sort_by(|a, b| a.value.0.total_cmp(&b.value.0).then(a.value.1.total_cmp(&b.value.1)));
    let free = |worker: &&WorkerProcess| change(worker).is_none();
    let names = |is: fn(&&WorkerProcess) -> bool, most: usize| -> Vec<String> {
        workers.iter().filter(is).filter(free).take(most).map(|worker| worker.name.clone()).collect()
    };
    (names(|worker| worker.is_asleep, to_wake), names(|worker| worker.is_awake, to_sleep))
}

impl Spares {
    pub(super) fn new(settings: &Settings) -> Self {
        let is_acting = settings.planner.mode == "act";
        let wanted = if is_acting { settings.planner.spares as u32 } else { 0 };
        Self { wanted, sleep_changes: Arc::default(), streaks: HashMap::new() }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, SleepChanges> {
        // Each update is complete, so a poisoned lock leaves no broken state.
        self.sleep_changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Subtracts sleeping workers from the counts of a role: the planner decides on awake workers.
    pub(super) fn count(
        &self,
        role: WorkerRole,
        has_prefill: bool,
        seen: &FleetObservation,
        counts: &mut PoolCounts,
    ) {
        let workers = whole(role, has_prefill, seen);
        let sleeping = workers.iter().filter(|worker| worker.is_asleep).count() as u32;
        let mut sleep_changes = self.lock();
        let is_falling = |worker: &&WorkerProcess| {
            !worker.is_asleep && sleep_changes.by_name.get(&worker.name) == Some(&SleepChange::FallsAsleep)
        };
        let falling = workers.iter().filter(is_falling).count() as u32;
        counts.workers.sleeping = sleeping;
        counts.in_force = counts.in_force.saturating_sub(self.wanted);
        if self.wanted == 0 {
            return;
        }
        // A workload counts sleeping workers as ready; gateways do not.
        let awake = workers.iter().filter(|worker| worker.is_awake).count() as u32;
        if counts.workers.ready > awake {
            counts.workers.ready =
                counts.workers.ready.saturating_sub(sleeping + falling).max(awake.min(counts.workers.ready));
        }
        // Workers beyond the count in force become spares and are not part of demand.
        counts.workers.ready = counts.workers.ready.min(counts.in_force);
        counts.workers.starting = counts.workers.starting.min(counts.in_force - counts.workers.ready);
        let (own, others) =
            std::mem::take(&mut sleep_changes.woken_in).into_iter().partition(|(of, _)| *of == role);
        sleep_changes.woken_in = others;
        let own: Vec<(WorkerRole, f64)> = own;
        counts.woken_in = own.into_iter().map(|(_, seconds)| seconds).collect();
    }

    /// Returns the decisions for the actuator, which include the spares.
    pub(super) fn replicas(&self, decisions: &[Decision]) -> Vec<Decision> {
        let with_spares =
            |decision: &Decision| Decision { wanted: decision.wanted + self.wanted, ..decision.clone() };
        decisions.iter().map(with_spares).collect()
    }

    /// Requests gateways to wake workers of a role and to put workers to sleep.
    pub(super) fn carry_out(
        &mut self,
        role: WorkerRole,
        has_prefill: bool,
        decision: &Decision,
        seen: &FleetObservation,
        clients: &[EngineClient],
    ) {
        if self.wanted == 0 || clients.is_empty() || seen.silent > 0 || seen.is_partial {
            return;
        }
        let workers = whole(role, has_prefill, seen);
        let (mut wake, mut sleep) = {
            let mut sleep_changes = self.lock();
            sleep_changes.by_name.retain(|_, change| match change {
                SleepChange::Failed(at) => at.elapsed() <= RETRY_PAUSE,
                SleepChange::Done(at) => at.elapsed() <= OBSERVATION_LAG_MAX,
                SleepChange::FallsAsleep | SleepChange::Wakes => true,
            });
            choose(workers, &sleep_changes.by_name, decision.wanted, self.wanted)
        };
        let row = self.streaks.entry(role).or_default();
        *row = (if wake.is_empty() { 0 } else { row.0 + 1 }, if sleep.is_empty() { 0 } else { row.1 + 1 });
        if row.0 < LACKING_TICKS && seen.waiting <= 0.0 {
            wake.clear();
        }
        if row.1 < SPARE_TICKS {
            sleep.clear();
        }
        let wake = wake.into_iter().map(|name| (name, SleepChange::Wakes));
        for (name, change) in wake.chain(sleep.into_iter().map(|name| (name, SleepChange::FallsAsleep))) {
            // The same gateway is chosen for a worker as long as the set of gateways is the same.
            let first = |client: &&EngineClient| {
                xxhash_rust::xxh3::xxh3_64(format!("{name} {}", client.base()).as_bytes())
            };
            let Some(client) = clients.iter().min_by_key(first).cloned() else { return };
            self.lock().by_name.insert(name.clone(), change);
            tokio::spawn(ask(client, role, name, change, Arc::clone(&self.sleep_changes)));
        }
    }
}

/// Requests one change from a gateway and records its result.
async fn ask(
    client: EngineClient,
    role: WorkerRole,
    name: String,
    change: SleepChange,
    sleep_changes: Arc<Mutex<SleepChanges>>,
) {
    let (began, wakes) = (Instant::now(), change == SleepChange::Wakes);
    let path = path_of(&name, if wakes { "/wake" } else { "/sleep" });
    let asked = client.ask(Method::POST, &path, bytes::Bytes::from_static(b"{}"));
    let problem = match tokio::time::timeout(CHANGE_TIMEOUT, asked).await {
        Ok(Ok(_)) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(_) => Some(format!("no answer within {CHANGE_TIMEOUT:?}")),
    };
    let took = began.elapsed();
    let mut sleep_changes = sleep_changes.lock().unwrap_or_else(PoisonError::into_inner);
    match problem {
        None => {
            sleep_changes.by_name.insert(name.clone(), SleepChange::Done(Instant::now()));
            if wakes {
                sleep_changes.woken_in.push((role, took.as_secs_f64()));
            }
            tracing::info!(worker = name, ?took, wakes, "worker put to sleep or woken");
        }
        Some(problem) => {
            if !wakes {
                // The gateway may have failed half-way: a worker that is still awake is put back into
                // service.
                let path = path_of(&name, "/serve");
                tokio::spawn(async move {
                    let asked = client.ask(Method::POST, &path, bytes::Bytes::from_static(b"{}"));
                    let _best_effort = tokio::time::timeout(RETRY_PAUSE, asked).await;
                });
            }
            sleep_changes.by_name.insert(name.clone(), SleepChange::Failed(Instant::now()));
            tracing::warn!(worker = name, wakes, "the worker is left alone for {RETRY_PAUSE:?}: {problem}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(name: &str, state: &str, blocks: f64) -> WorkerProcess {
        let (is_awake, is_asleep) = (state == "awake", state == "asleep");
        WorkerProcess { name: name.to_owned(), is_awake, is_asleep, value: (blocks, 0.0) }
    }

    fn sleep_changes(of: &[(&str, SleepChange)]) -> HashMap<String, SleepChange> {
        of.iter().map(|(name, change)| ((*name).to_owned(), *change)).collect()
    }

    #[test]
    fn sleepers_are_woken_first_and_the_emptiest_workers_sleep() {
        let fleet = || {
            vec![
                worker("a", "awake", 9.0),
                worker("b", "awake", 2.0),
                worker("c", "asleep", 0.0),
                worker("d", "starting", 0.0),
            ]
        };
        let none = HashMap::new();
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(choose(fleet(), &none, 2, 1), (names(&[]), names(&[])));
        assert_eq!(choose(fleet(), &none, 3, 1), (names(&["c"]), names(&[])));
        assert_eq!(choose(fleet(), &none, 9, 1), (names(&["c"]), names(&[])));
        assert_eq!(choose(fleet(), &none, 1, 1), (names(&[]), names(&[])), "there are spares enough");
        assert_eq!(choose(fleet(), &none, 1, 2), (names(&[]), names(&["b"])));
        // Changes in progress count and are not requested again.
        assert_eq!(
            choose(fleet(), &sleep_changes(&[("c", SleepChange::Wakes)]), 3, 1),
            (names(&[]), names(&[]))
        );
        assert_eq!(
            choose(fleet(), &sleep_changes(&[("b", SleepChange::FallsAsleep)]), 1, 2),
            (names(&[]), names(&[]))
        );
        let failed = sleep_changes(&[("c", SleepChange::Failed(Instant::now()))]);
        assert_eq!(choose(fleet(), &failed, 3, 1), (names(&[]), names(&[])), "it is left alone");
    }

    fn seen_worker(name: &str, state: &str) -> ObservedWorker {
        ObservedWorker {
            name: name.to_owned(),
            role: WorkerRole::Both,
            is_ready: state == "ready",
            is_draining: state == "draining",
            is_asleep: state == "sleeping",
            requests: 1.0,
            waiting: 0.0,
            kv_tokens: 0.0,
            cached_blocks: 2.0,
            why_slow: String::new(),
        }
    }

    /// A workload counts sleeping workers as ready, and counts workers that start up to the replicas it was
    /// set to.
    #[test]
    fn sleepers_and_workers_that_are_to_be_spares_are_not_what_demand_asked_for() {
        let mut settings = Settings::default();
        settings.planner.mode = "act".to_owned();
        settings.planner.spares = 1;
        let spares = Spares::new(&settings);
        // States at gateways; ready, starting and replicas of the workload; then ready, starting, in force
        // and sleeping.
        for (states, workload, expected) in [
            (&[][..], (0, 2, 2), (0, 1, 1, 0)),
            (&["ready", "ready"], (2, 0, 2), (1, 0, 1, 0)),
            (&["ready", "sleeping"], (2, 0, 2), (1, 0, 1, 1)),
            (&["ready", "ready", "sleeping"], (3, 0, 3), (2, 0, 2, 1)),
            (&["ready", "sleeping"], (2, 1, 3), (1, 1, 2, 1)),
        ] {
            let names = ["a:1", "b:1", "c:1"];
            let workers = states.iter().zip(names).map(|(state, name)| seen_worker(name, state)).collect();
            let seen = FleetObservation { workers, ..FleetObservation::default() };
            let mut counts = PoolCounts { in_force: workload.2, ..PoolCounts::default() };
            (counts.workers.ready, counts.workers.starting) = (workload.0, workload.1);
            spares.count(WorkerRole::Both, false, &seen, &mut counts);
            let told = counts.workers;
            assert_eq!(
                (told.ready, told.starting, counts.in_force, told.sleeping),
                expected,
                "{states:?} {workload:?}"
            );
        }
    }

    #[test]
    fn a_worker_is_all_its_ranks() {
        let rank = |name: &str, is_ready: bool| seen_worker(name, if is_ready { "ready" } else { "joining" });
        let workers = vec![rank("a:1@0", true), rank("a:1@1", false), rank("b:1", true)];
        let seen = FleetObservation { workers, ..FleetObservation::default() };
        let all = whole(WorkerRole::Both, false, &seen);
        let told: Vec<(&str, bool, f64)> =
            all.iter().map(|worker| (worker.name.as_str(), worker.is_awake, worker.value.0)).collect();
        assert_eq!(told, [("a:1", false, 4.0), ("b:1", true, 2.0)]);
    }
}
