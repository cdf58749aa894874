//! Reads the counts of workers and carries out the planner's decisions.
//!
//! | `planner.actuator` | Counts come from | Decisions go to |
//! | --- | --- | --- |
//! | (`mode = "advise"`) | gateways | none |
//! | `kubernetes` | the workloads and their pods | their `scale` |
//! | `keda` | gateways | KEDA's external scaler, on request |
//! | `webhook` | gateways | a URL, with each change |
//!
//! Each request to Kubernetes ends within 5 s; a tick that takes longer delays the next one. A failed request
//! is repeated at the next tick.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use control_actuate::{DesiredSender, PoolTarget, Webhook, desired_counts, keda_routes};
use control_config::Settings;
use control_planner::Decision;
use futures_util::future::BoxFuture;
use router_engines::client::EngineClient;
use router_engines::upstream::Upstream;
use router_serve::ServeConfig;
use router_tls::PlainListener;
use tokio::task::JoinHandle;

use super::leadership::Leadership;
use crate::compose::some;
use crate::credentials::Credentials;
use crate::planning::{FleetObservation, PoolCounts};
use crate::{http, secret};

pub(super) struct Actuation {
    actuator: Actuator,
    /// Election state; `None` if this process is the only control service.
    leadership: Option<Leadership>,
}

/// Mechanism that carries out decisions.
enum Actuator {
    /// Decisions are only shown.
    Advise,
    /// Decisions are published from `publishes_from` on to a task that serves or posts them.
    Publish { counts: DesiredSender, serving: JoinHandle<()>, publishes_from: Instant },
    #[cfg(feature = "kubernetes")]
    Kubernetes(Box<kubernetes::Workloads>),
}

impl Actuation {
    /// Connects to the actuator and the election that the settings name.
    pub(super) async fn start(settings: &Settings, credentials: &Credentials) -> Result<Self> {
        let actuator = Actuator::start(settings, credentials).await?;
        Ok(Self { actuator, leadership: Leadership::start(settings).await? })
    }

    /// Whether this process may act and show its plan.
    pub(super) fn leads(&self) -> bool {
        self.leadership.as_ref().is_none_or(Leadership::leads)
    }

    /// Whether there are prefill workers, if the settings determine it.
    pub(super) fn has_prefill(&self) -> Option<bool> {
        match &self.actuator {
            #[cfg(feature = "kubernetes")]
            Actuator::Kubernetes(workloads) => Some(workloads.has_prefill()),
            _ => None,
        }
    }

    /// Returns the number of failed requests so far.
    pub(super) fn failures(&self) -> u64 {
        match &self.actuator {
            #[cfg(feature = "kubernetes")]
            Actuator::Kubernetes(workloads) => workloads.failures(),
            _ => 0,
        }
    }

    /// Returns the counts of each pool; `None` if they come from gateways; an error, which was logged, if
    /// they cannot be read now.
    pub(super) async fn read(&mut self) -> Result<Option<Vec<PoolCounts>>, ()> {
        match &mut self.actuator {
            #[cfg(feature = "kubernetes")]
            Actuator::Kubernetes(workloads) => workloads.read().await.map(Some),
            _ => Ok(None),
        }
    }

    /// Carries out the decisions of all pools. Returns the indices of the pools whose counts were set at
    /// once.
    #[cfg_attr(
        not(feature = "kubernetes"),
        expect(unused_variables, reason = "only Kubernetes uses counts of blocks")
    )]
    pub(super) async fn carry_out(
        &mut self,
        decisions: &[Decision],
        counts: &[PoolCounts],
        seen: &FleetObservation,
    ) -> Vec<usize> {
        match &mut self.actuator {
            Actuator::Advise => Vec::new(),
            Actuator::Publish { publishes_from, .. } if Instant::now() < *publishes_from => Vec::new(),
            Actuator::Publish { counts: sender, .. } => {
                let target = |(decision, counts): (&Decision, &PoolCounts)| PoolTarget {
                    pool: decision.pool.clone(),
                    wanted: decision.wanted,
                    current: counts.in_force,
                    text: decision.to_string(),
                };
                sender.publish(decisions.iter().zip(counts).map(target).collect());
                Vec::new()
            }
            #[cfg(feature = "kubernetes")]
            Actuator::Kubernetes(workloads) => {
                let leads = || self.leadership.as_ref().is_none_or(Leadership::leads);
                workloads.carry_out(decisions, seen, leads).await
            }
        }
    }

    /// Stops serving, and releases the lease.
    pub(super) async fn stop(self) {
        if let Actuator::Publish { serving, .. } = self.actuator {
            serving.abort();
        }
        if let Some(leadership) = self.leadership {
            leadership.stop().await;
        }
    }
}

impl Actuator {
    async fn start(settings: &Settings, credentials: &Credentials) -> Result<Self> {
        let (planner, control) = (&settings.planner, &settings.control);
        if planner.mode != "act" {
            return Ok(Self::Advise);
        }
        // Gateways do not see workers that an earlier process requested and that are still starting. A count
        // without these workers would stop them.
        let publishes_from = Instant::now() + planner.start_time;
        match planner.actuator.as_str() {
            "keda" => {
                let listen = &control.keda_listen;
                let address = listen
                    .parse()
                    .with_context(|| format!("control.keda_listen: {listen:?} is no IP:PORT"))?;
                let listener = PlainListener::new(http::bind(address).await?);
                let (sender, counts) = desired_counts();
                let routes = keda_routes(counts).prepare().into_axum_router();
                let bounds = ServeConfig { http2_only: true, connections_max: 64, ..ServeConfig::default() };
                let serving =
                    tokio::spawn(router_serve::serve(listener, routes, bounds, std::future::pending()));
                Ok(Self::Publish { counts: sender, serving, publishes_from })
            }
            "webhook" => {
                let Some(url) = some(&control.webhook) else {
                    bail!("planner.actuator = \"webhook\" needs control.webhook");
                };
                let (base, path) = Webhook::split(&url).context("control.webhook")?;
                let key = secret::variable("KVASIR_WEBHOOK_KEY")?;
                let upstream = Upstream::with_key(&base, credentials.tls(&base)?.as_ref(), key.as_ref());
                let webhook = Webhook::new(EngineClient::over(&upstream), path);
                let (sender, counts) = desired_counts();
                let serving = tokio::spawn(webhook.run(counts));
                Ok(Self::Publish { counts: sender, serving, publishes_from })
            }
            #[cfg(feature = "kubernetes")]
            "kubernetes" => Ok(Self::Kubernetes(Box::new(kubernetes::Workloads::start(settings).await?))),
            _ => bail!(
                "planner.actuator = \"kubernetes\" needs a binary that was built with `--features kubernetes`"
            ),
        }
    }
}

/// Returns a future that reconciles graphs until it is dropped; `None` if `control.graphs` is off.
#[cfg_attr(not(feature = "kubernetes"), expect(clippy::unused_async, reason = "only Kubernetes has graphs"))]
pub(super) async fn graphs(settings: &Settings) -> Result<Option<BoxFuture<'static, ()>>> {
    if !settings.control.graphs {
        return Ok(None);
    }
    #[cfg(feature = "kubernetes")]
    {
        let client = control_kubernetes::connect().await?;
        let namespace = some(&settings.control.namespace);
        let graphs = control_kubernetes::GraphController::new(
            client,
            namespace.as_deref(),
            &settings.control.graph_image,
        );
        Ok(Some(Box::pin(graphs.run())))
    }
    #[cfg(not(feature = "kubernetes"))]
    bail!("control.graphs needs a binary that was built with `--features kubernetes`")
}

#[cfg(feature = "kubernetes")]
mod kubernetes {
    use std::collections::HashMap;

    use anyhow::{Context, Result, bail};
    use control_config::Settings;
    use control_kubernetes::{ScaleTarget, Workload, WorkloadCounts, connect, error_chain};
    use control_planner::{Decision, WorkerCounts};

    use crate::compose::some;
    use crate::planning::{FleetObservation, PoolCounts};

    /// Blocks per unit of deletion cost: costs are `i32`, and pods of about equal use should have equal
    /// costs.
    const BLOCKS_OF_COST: f64 = 64.0;

    /// The workloads of a fleet.
    pub(crate) struct Workloads {
        /// One workload for each pool, in the pools' order, with the counts last read.
        pools: Vec<(Workload, WorkloadCounts)>,
        has_deletion_cost: bool,
        failures: u64,
        /// Last failure of a request, and last reasons of pods that do not start: each is logged when it
        /// changes.
        problem: Option<String>,
        reasons: String,
    }

    impl Workloads {
        pub(crate) async fn start(settings: &Settings) -> Result<Self> {
            let (planner, control) = (&settings.planner, &settings.control);
            let client = connect().await?;
            let namespace = some(&control.namespace);
            let target = |key: &str, text: &str| -> Result<Option<Workload>> {
                let Some(text) = some(text) else { return Ok(None) };
                let target = ScaleTarget::parse(&text).map_err(anyhow::Error::msg);
                let target = target.with_context(|| format!("planner.{key}"))?;
                Ok(Some(Workload::new(&client, namespace.as_deref(), target)))
            };
            let prefill = target("prefill_target", &planner.prefill_target)?;
            let Some(decode) = target("decode_target", &planner.decode_target)? else {
                bail!("planner.actuator = \"kubernetes\" needs planner.decode_target");
            };
            let pools =
                prefill.into_iter().chain([decode]).map(|workload| (workload, WorkloadCounts::default()));
            Ok(Self {
                pools: pools.collect(),
                has_deletion_cost: planner.deletion_cost,
                failures: 0,
                problem: None,
                reasons: String::new(),
            })
        }

        pub(crate) fn has_prefill(&self) -> bool {
            self.pools.len() > 1
        }

        pub(crate) fn failures(&self) -> u64 {
            self.failures
        }

        fn failed(&mut self, problem: String) {
            self.failures += 1;
            if self.problem.as_ref() != Some(&problem) {
                tracing::warn!("{problem}; trying again");
                self.problem = Some(problem);
            }
        }

        pub(crate) async fn read(&mut self) -> Result<Vec<PoolCounts>, ()> {
            let reads = self.pools.iter_mut().map(|(workload, known)| async {
                *known = workload.read().await?;
                Ok(known.clone())
            });
            let read: Result<Vec<WorkloadCounts>, control_kubernetes::ScaleError> =
                futures_util::future::join_all(reads).await.into_iter().collect();
            match read {
                Ok(counts) => {
                    let reasons: Vec<&str> =
                        counts.iter().flat_map(|counts| &counts.reasons).map(String::as_str).collect();
                    let reasons = reasons.join("; ");
                    if !reasons.is_empty() && reasons != self.reasons {
                        tracing::warn!("pods do not start: {reasons}");
                    }
                    self.reasons = reasons;
                    Ok(counts.into_iter().map(pool_counts).collect())
                }
                Err(error) => {
                    self.failed(error_chain(&error));
                    Err(())
                }
            }
        }

        /// Sets replicas, lower counts first: their GPUs may be needed for the higher ones.
        pub(crate) async fn carry_out(
            &mut self,
            decisions: &[Decision],
            seen: &FleetObservation,
            leads: impl Fn() -> bool,
        ) -> Vec<usize> {
            let (mut problems, mut set) = (Vec::new(), Vec::new());
            let is_down = |&pool: &usize| decisions[pool].wanted < self.pools[pool].1.replicas;
            let (down, other): (Vec<usize>, Vec<usize>) =
                (0..self.pools.len().min(decisions.len())).partition(is_down);
            for pool in down.into_iter().chain(other) {
                let ((workload, counts), decision) = (&self.pools[pool], &decisions[pool]);
                // Leadership may have ended since the decision.
                if decision.wanted == counts.replicas || !leads() {
                    continue;
                }
                if self.has_deletion_cost && decision.wanted < counts.replicas {
                    let costs = deletion_costs(seen);
                    let marked = workload.set_deletion_costs(|ip| costs.get(ip).copied()).await;
                    // Without deletion costs a less suitable pod may be deleted; the scale-down goes ahead.
                    problems.extend(
                        marked.err().map(|error| format!("deletion costs of {}", error_chain(&error))),
                    );
                }
                match workload.set(decision.wanted, counts).await {
                    Ok(()) => {
                        set.push(pool);
                        let (from, to) = (counts.replicas, decision.wanted);
                        tracing::info!(workload = workload.name(), from, to, "replicas set");
                    }
                    Err(error) => problems.push(error_chain(&error)),
                }
            }
            if problems.is_empty() {
                self.problem = None;
            }
            problems.into_iter().for_each(|problem| self.failed(problem));
            set
        }
    }

    fn pool_counts(counts: WorkloadCounts) -> PoolCounts {
        PoolCounts {
            workers: WorkerCounts {
                ready: counts.ready,
                starting: counts.starting_for.len() as u32,
                draining: counts.draining,
                sleeping: 0,
            },
            starting_for: counts.starting_for,
            started_in: counts.started_in,
            woken_in: Vec::new(),
            in_force: counts.replicas,
        }
    }

    /// Returns the deletion cost by pod address: the cached blocks of all its ranks, in units of
    /// [`BLOCKS_OF_COST`].
    fn deletion_costs(seen: &FleetObservation) -> HashMap<String, i32> {
        let mut costs: HashMap<String, f64> = HashMap::new();
        for worker in &seen.workers {
            if let Some((host, _)) = worker.name.rsplit_once(':') {
                *costs.entry(host.trim_matches(['[', ']']).to_owned()).or_default() += worker.cached_blocks;
            }
        }
        costs.into_iter().map(|(host, blocks)| (host, (blocks / BLOCKS_OF_COST) as i32)).collect()
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use crate::planning::ObservedWorker;
        use control_planner::WorkerRole;

        #[test]
        fn the_cost_of_a_pod_is_what_all_its_ranks_hold() {
            let worker = |name: &str, cached_blocks| ObservedWorker {
                name: name.to_owned(),
                role: WorkerRole::Both,
                is_ready: true,
                is_draining: false,
                is_asleep: false,
                requests: 0.0,
                waiting: 0.0,
                kv_tokens: 0.0,
                cached_blocks,
                why_slow: String::new(),
            };
            let workers = vec![
                worker("10.0.0.1:8000", 640.0),
                worker("10.0.0.1:8001", 64.0),
                worker("[fd00::1]:1", 0.0),
            ];
            let costs = deletion_costs(&FleetObservation { workers, ..FleetObservation::default() });
            assert_eq!((costs.get("10.0.0.1"), costs.get("fd00::1")), (Some(&11), Some(&0)));
        }
    }
}
