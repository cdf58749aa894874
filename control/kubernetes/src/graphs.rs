//! Reconciles `KvasirGraph` objects: applies the objects rendered from each, deletes those no longer
//! rendered, and writes the status.
//!
//! Objects are applied with Server-Side Apply, so that fields of other managers, such as the counts that the
//! planner sets, are left alone. Each object has the graph as its owner: the cluster deletes it with the
//! graph. Several processes of one version may reconcile at the same time; processes of two versions would
//! undo each other's work, so the operator's Deployment has one process.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use control_deploy::custom_resource::{GROUP, KIND, KINDS, PLURAL, VERSION, manifests_of};
use futures_util::{StreamExt, TryStreamExt};
use k8s_openapi::jiff::Timestamp;
use kube::api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};

use crate::source::{WATCH_SECONDS, error_chain};

/// Field manager of applied fields.
const MANAGER: &str = "kvasir-control";
/// Field manager of counts that the planner sets from then on.
const COUNT_MANAGER: &str = "kvasir-planner";
/// Interval at which every graph is reconciled in addition to its changes: for workers that have become
/// ready, and for changes by other managers.
const AGAIN_EVERY: Duration = Duration::from_secs(30);
/// Most graphs that are reconciled concurrently at that interval.
const SIDE_BY_SIDE: usize = 8;
/// Time limit for one request.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Label that all objects of a graph have.
const INSTANCE: &str = "app.kubernetes.io/instance";

/// Reconciles the graphs of one namespace.
pub struct GraphController {
    client: Client,
    namespace: String,
    /// Image of the gateways of graphs that name none.
    image: String,
    again_every: Duration,
}

/// Returns the resource with this API version, kind and plural.
fn resource(version: &str, kind: &str, plural: &str) -> ApiResource {
    let (group, short) = version.split_once('/').unwrap_or(("", version));
    ApiResource {
        group: group.to_owned(),
        version: short.to_owned(),
        api_version: version.to_owned(),
        kind: kind.to_owned(),
        plural: plural.to_owned(),
    }
}

/// Returns a request's answer, or its failure as text.
async fn asked<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, String> {
    match tokio::time::timeout(ANSWER_WITHIN, request).await {
        Ok(answer) => answer.map_err(|error| error_chain(&error)),
        Err(_) => Err(format!("not answered within {ANSWER_WITHIN:?}")),
    }
}

impl GraphController {
    /// Creates a controller of this namespace; `None` is the client's own. `image` is the image of the
    /// gateways of graphs that name none; empty: that of this version.
    #[must_use]
    pub fn new(client: Client, namespace: Option<&str>, image: &str) -> Self {
        let namespace = namespace.map_or_else(|| client.default_namespace().to_owned(), str::to_owned);
        Self { client, namespace, image: image.to_owned(), again_every: AGAIN_EVERY }
    }

    /// Sets the reconciliation interval, instead of 30 s.
    #[must_use]
    pub fn again_every(self, every: Duration) -> Self {
        Self { again_every: every, ..self }
    }

    fn api(&self, resource: &ApiResource) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), &self.namespace, resource)
    }

    /// Follows the graphs, and reconciles each graph when it changes and at every interval. Never returns.
    pub async fn run(self) {
        let graphs = self.api(&resource(&format!("{GROUP}/{VERSION}"), KIND, PLURAL));
        let mut events = watcher(graphs.clone(), watcher::Config::default().timeout(WATCH_SECONDS)).boxed();
        let mut known: BTreeMap<String, DynamicObject> = BTreeMap::new();
        let mut again = tokio::time::interval(self.again_every);
        again.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                event = events.try_next() => match event {
                    Ok(Some(watcher::Event::Apply(graph) | watcher::Event::InitApply(graph))) => {
                        // A change of the status alone needs no reconciliation.
                        let is_new = known.get(&graph.name_any()).is_none_or(|known| {
                            known.metadata.generation != graph.metadata.generation || known.uid() != graph.uid()
                                || known.data["spec"] != graph.data["spec"]
                        });
                        known.insert(graph.name_any(), graph.clone());
                        if is_new {
                            self.reconcile(&graphs, &graph).await;
                        }
                    }
                    Ok(Some(watcher::Event::Delete(graph))) => drop(known.remove(&graph.name_any())),
                    Ok(Some(watcher::Event::Init)) => known.clear(),
                    Ok(Some(watcher::Event::InitDone)) => {}
                    Ok(None) => return,
                    Err(error) => {
                        tracing::warn!("graphs cannot be followed: {}", error_chain(&error));
                        tokio::time::sleep(Duration::from_secs(1)).await;
                    }
                },
                _ = again.tick() => {
                    let names: Vec<String> = known.keys().cloned().collect();
                    let (this, graphs) = (&self, &graphs);
                    let looks = names.into_iter().map(async |name| {
                        // The graph is read again, because its latest version has the current status.
                        match asked(graphs.get_opt(&name)).await {
                            Ok(Some(graph)) => this.reconcile(graphs, &graph).await,
                            Ok(None) => {}
                            Err(error) => tracing::warn!(graph = name, "{error}"),
                        }
                    });
                    futures_util::stream::iter(looks).buffer_unordered(SIDE_BY_SIDE).collect::<()>().await;
                }
            }
        }
    }

    /// Applies the objects of the graph to the cluster, and writes the outcome to its status.
    async fn reconcile(&self, graphs: &Api<DynamicObject>, graph: &DynamicObject) {
        if graph.metadata.deletion_timestamp.is_some() {
            return;
        }
        let object = serde_json::to_value(graph).unwrap_or_default();
        let outcome = match manifests_of(&object, &self.image) {
            Err(problem) => Outcome { accepted: Err(problem), ..Outcome::default() },
            Ok(manifests) => self.carry_out(graph, manifests).await,
        };
        if let Err(problem) = outcome.accepted.as_ref().and(outcome.applied.as_ref()) {
            tracing::warn!(graph = graph.name_any(), "{problem}");
        }
        let status = outcome.status(&object);
        if status == object["status"] {
            return;
        }
        let (name, parameters) = (graph.name_any(), PatchParams::default());
        let patch = Patch::Merge(json!({"status": status}));
        if let Err(error) = asked(graphs.patch_status(&name, &parameters, &patch)).await {
            tracing::warn!(graph = name, "the status of the KvasirGraph cannot be written: {error}");
        }
    }

    async fn carry_out(&self, graph: &DynamicObject, manifests: Vec<Value>) -> Outcome {
        let owner = json!([{
            "apiVersion": format!("{GROUP}/{VERSION}"), "kind": KIND, "name": graph.name_any(),
            "uid": graph.uid().unwrap_or_default(), "controller": true, "blockOwnerDeletion": false,
        }]);
        let mut outcome = Outcome::default();
        let (mut wanted, mut problems) = (HashSet::new(), Vec::new());
        for mut manifest in manifests {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let (version, kind) = (text(&manifest["apiVersion"]), text(&manifest["kind"]));
            let name = text(&manifest["metadata"]["name"]);
            let Some(known) = KINDS.iter().find(|known| (known.0, known.1) == (&version, &kind)) else {
                continue;
            };
            manifest["metadata"]["namespace"] = self.namespace.as_str().into();
            manifest["metadata"]["ownerReferences"] = owner.clone();
            let api = self.api(&resource(known.0, known.1, known.2));
            wanted.insert((kind.clone(), name.clone()));
            let parameters = PatchParams::apply(MANAGER).force();
            let applied = async {
                if let Some(known) = asked(api.get_opt(&name)).await? {
                    // Objects with another owner are not taken over.
                    if !is_owned(&known, graph) {
                        return Err(
                            "the object exists and belongs to another owner: remove it, or give the graph another name"
                                .to_owned(),
                        );
                    }
                    // The uid makes the server refuse the apply if the object was replaced since.
                    manifest["metadata"]["uid"] = known.uid().into();
                    if let Some(count) = count_to_keep(&known, &manifest) {
                        let count = Patch::Apply(count);
                        asked(api.patch(&name, &PatchParams::apply(COUNT_MANAGER), &count)).await?;
                    }
                }
                asked(api.patch(&name, &parameters, &Patch::Apply(&manifest))).await
            };
            match applied.await {
                Ok(applied) => outcome.note(&applied),
                Err(error) => problems.push(format!("{kind} {name}: {error}")),
            }
        }
        if !problems.is_empty() {
            // Nothing is pruned after a failure: the old objects may be the only ones that work.
            outcome.applied = Err(problems.join("; "));
            return outcome;
        }
        if let Err(error) = self.prune(graph, &wanted).await {
            outcome.applied = Err(error);
        }
        outcome
    }

    /// Deletes objects that the graph owns and that are no longer rendered.
    async fn prune(&self, graph: &DynamicObject, wanted: &HashSet<(String, String)>) -> Result<(), String> {
        let selector = ListParams::default().labels(&format!("{INSTANCE}={}", graph.name_any()));
        for (version, kind, plural) in KINDS.iter().filter(|(_, kind, _)| *kind != KIND) {
            let api = self.api(&resource(version, kind, plural));
            let owned = match tokio::time::timeout(ANSWER_WITHIN, api.list(&selector)).await {
                Ok(Ok(list)) => list.items,
                // A cluster without LeaderWorkerSets or Grove has no such objects.
                Ok(Err(kube::Error::Api(status))) if status.code == 404 => continue,
                Ok(Err(error)) => return Err(format!("{plural}: {}", error_chain(&error))),
                Err(_) => return Err(format!("{plural}: not answered within {ANSWER_WITHIN:?}")),
            };
            for object in owned {
                if is_owned(&object, graph) && !wanted.contains(&((*kind).to_owned(), object.name_any())) {
                    match tokio::time::timeout(
                        ANSWER_WITHIN,
                        api.delete(&object.name_any(), &DeleteParams::default()),
                    )
                    .await
                    {
                        Ok(Ok(_)) => {}
                        // Another process, or the cluster, has already deleted it.
                        Ok(Err(kube::Error::Api(status))) if status.code == 404 => continue,
                        Ok(Err(error)) => return Err(format!("{plural}: {}", error_chain(&error))),
                        Err(_) => return Err(format!("{plural}: not answered within {ANSWER_WITHIN:?}")),
                    }
                    tracing::info!(graph = graph.name_any(), kind, name = object.name_any(), "removed");
                }
            }
        }
        Ok(())
    }
}

/// Whether an object was created for this graph, and not for an earlier graph of its name.
fn is_owned(object: &DynamicObject, graph: &DynamicObject) -> bool {
    object.owner_references().iter().any(|owner| Some(&owner.uid) == graph.metadata.uid.as_ref())
}

/// Returns the live count of a workload whose manifest no longer sets one, if the count still belongs to this
/// manager: leaving it out of the next apply would set it to 1. Applied by another manager it stays, until
/// the planner changes it.
fn count_to_keep(known: &DynamicObject, manifest: &Value) -> Option<Value> {
    let owns_count = |entry: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry| {
        let fields = serde_json::to_value(&entry.fields_v1).unwrap_or_default();
        entry.manager.as_deref() == Some(MANAGER) && !fields["f:spec"]["f:replicas"].is_null()
    };
    let is_ours = known.metadata.managed_fields.iter().flatten().any(owns_count);
    let count = known.data["spec"]["replicas"]
        .as_u64()
        .filter(|_| is_ours && manifest["spec"]["replicas"].is_null())?;
    Some(json!({
        "apiVersion": manifest["apiVersion"], "kind": manifest["kind"],
        "metadata": {"name": manifest["metadata"]["name"], "namespace": manifest["metadata"]["namespace"]},
        "spec": {"replicas": count},
    }))
}

/// Outcome of a reconciliation.
struct Outcome {
    accepted: Result<(), String>,
    applied: Result<(), String>,
    /// Pods of the gateways, and of the workers of each role.
    parts: Vec<WorkloadPods>,
    /// Whether there is a workload that does not report the state of its pods.
    is_opaque: bool,
}

/// The pods of a workload.
struct WorkloadPods {
    name: String,
    pods: u64,
    ready: u64,
}

impl Default for Outcome {
    fn default() -> Self {
        Self { accepted: Ok(()), applied: Ok(()), parts: Vec::new(), is_opaque: false }
    }
}

impl Outcome {
    /// Records the pods of an applied object. A status that is older than the object is ignored.
    fn note(&mut self, object: &DynamicObject) {
        let data = &object.data;
        let kind = object.types.as_ref().map_or("", |types| types.kind.as_str());
        if kind == "PodCliqueSet" {
            self.is_opaque = true;
        }
        let template = match kind {
            "Deployment" | "StatefulSet" => &data["spec"]["template"],
            "LeaderWorkerSet" => &data["spec"]["leaderWorkerTemplate"]["workerTemplate"],
            _ => return,
        };
        let labels = &template["metadata"]["labels"];
        let name = labels["kvasir/role"].as_str().or_else(|| labels["app.kubernetes.io/component"].as_str());
        let Some(name) = name.filter(|name| *name != "control") else { return };
        let status = &data["status"];
        let is_current = status["observedGeneration"].as_i64() >= object.metadata.generation;
        let count = |field: &str| status[field].as_u64().filter(|_| is_current).unwrap_or(0);
        self.parts.push(WorkloadPods {
            name: name.to_owned(),
            pods: count("replicas"),
            ready: count("readyReplicas"),
        });
    }

    /// Returns the graph's status, with the old times of conditions that have not changed.
    fn status(&self, object: &Value) -> Value {
        let of = |part: &WorkloadPods| match part.name.as_str() {
            "gateway" => "no gateway is ready".to_owned(),
            role => format!("no {role} worker is ready"),
        };
        let waiting: Vec<String> = self.parts.iter().filter(|part| part.ready == 0).map(of).collect();
        let problem = self.accepted.as_ref().and(self.applied.as_ref()).err();
        let (is_ready, reason, message) = match problem {
            Some(problem) => ("False", "Problem", problem.clone()),
            None if !waiting.is_empty() => ("False", "PodsStart", waiting.join("; ")),
            None if self.is_opaque => {
                ("Unknown", "NotObserved", "Grove reports whether a PodCliqueSet is ready".to_owned())
            }
            None => ("True", "Ready", "a gateway and workers of each role are ready".to_owned()),
        };
        let truth = |is_true: bool| if is_true { "True" } else { "False" };
        let told = |outcome: &Result<(), String>, good: &str| match outcome {
            Ok(()) => good.to_owned(),
            Err(problem) => problem.clone(),
        };
        let is_applied = self.accepted.is_ok() && self.applied.is_ok();
        let conditions = [
            (
                "Accepted",
                truth(self.accepted.is_ok()),
                if self.accepted.is_ok() { "Valid" } else { "Invalid" },
                told(&self.accepted, "the description is valid"),
            ),
            (
                "Applied",
                truth(is_applied),
                if is_applied { "Applied" } else { "Refused" },
                told(&self.applied, "its objects are as described"),
            ),
            ("Ready", is_ready, reason, message),
        ];
        let conditions: Vec<Value> = conditions
            .iter()
            .map(|(kind, status, reason, message)| {
                let known = object["status"]["conditions"].as_array().into_iter().flatten();
                let before =
                    known.into_iter().find(|before| before["type"] == *kind && before["status"] == **status);
                let since =
                    before.and_then(|before| before["lastTransitionTime"].as_str()).map(str::to_owned);
                json!({
                    "type": kind, "status": status, "reason": reason, "message": message,
                    "lastTransitionTime": since.unwrap_or_else(now),
                })
            })
            .collect();
        let roles: Vec<Value> = self
            .parts
            .iter()
            .filter(|part| part.name != "gateway")
            .map(|part| json!({"role": part.name, "workers": part.pods, "ready": part.ready}))
            .collect();
        json!({"observedGeneration": object["metadata"]["generation"], "conditions": conditions, "roles": roles})
    }
}

/// Returns the current time in whole seconds, in the format of `metav1.Time`.
fn now() -> String {
    let now = Timestamp::now();
    Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}
