//! The `scale` subresource of a workload: read with its pods, and set.
//!
//! A change carries the resource version that was read, so that the patch of a process that is no longer the
//! leader is refused (409) and the workload is read again. Any resource with a `scale` subresource is
//! supported.
//!
//! Required rights: `get` and `patch` of `KIND/scale` for the named objects, `list` of pods; `patch` of pods
//! for deletion costs.

use std::time::Duration;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;

use crate::workload::{PodCounter, WorkloadCounts};

/// Time limit for one request.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Most pods that are marked at a time.
const PATCHES_MAX: usize = 16;
/// Annotation with a pod's deletion cost; ReplicaSets delete pods with the lowest cost first ("ReplicaSet",
/// "Pod deletion cost").
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// Kinds by the names that users write: name, group, version, plural.
const KINDS: [(&str, &str, &str, &str); 5] = [
    ("Deployment", "apps", "v1", "deployments"),
    ("StatefulSet", "apps", "v1", "statefulsets"),
    ("ReplicaSet", "apps", "v1", "replicasets"),
    ("LeaderWorkerSet", "leaderworkerset.x-k8s.io", "v1", "leaderworkersets"),
    ("DynamoGraphDeploymentScalingAdapter", "nvidia.com", "v1alpha1", "dynamographdeploymentscalingadapters"),
];

/// A workload whose replicas can be set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScaleTarget {
    resource: ApiResource,
    name: String,
}

/// Error of a request about a workload.
#[derive(Debug, thiserror::Error)]
pub enum ScaleError {
    /// The workload has changed since it was read.
    #[error("{0} has changed since it was read")]
    Stale(String),
    /// The server did not answer in time.
    #[error("{0}: no answer within {ANSWER_WITHIN:?}")]
    Timeout(String),
    /// The server refused the request, or was unreachable.
    #[error("{target}: {source}")]
    Failed {
        /// The workload.
        target: String,
        /// The server's reason.
        #[source]
        source: Box<kube::Error>,
    },
    /// The answer lacks a field of a `Scale`.
    #[error("{0}: its scale subresource reports no replicas or no selector")]
    Incomplete(String),
}

impl ScaleTarget {
    /// Parses `Deployment/NAME`, or `PLURAL.VERSION.GROUP/NAME` for any other kind.
    pub fn parse(text: &str) -> Result<Self, String> {
        let known: Vec<&str> = KINDS.iter().map(|kind| kind.0).collect();
        let error = || {
            format!(
                "{text:?} is not of the form KIND/NAME, with a kind among {} or PLURAL.VERSION.GROUP",
                known.join(", ")
            )
        };
        let (kind, name) = text.split_once('/').ok_or_else(error)?;
        let is_name = |text: &str| {
            !text.is_empty()
                && text.chars().all(|letter| {
                    letter.is_ascii_lowercase() || letter.is_ascii_digit() || "-.".contains(letter)
                })
        };
        if !is_name(name) {
            return Err(error());
        }
        let parts = |kind: &str| -> Option<(String, String, String, String)> {
            let (plural, rest) = kind.split_once('.')?;
            let (version, group) = rest.split_once('.')?;
            [plural, version, group]
                .iter()
                .all(|part| is_name(part))
                .then(|| (plural.to_owned(), group.to_owned(), version.to_owned(), plural.to_owned()))
        };
        let named = KINDS.iter().find(|known| known.0.eq_ignore_ascii_case(kind));
        let named = named.map(|&(kind, group, version, plural)| {
            (kind.to_owned(), group.to_owned(), version.to_owned(), plural.to_owned())
        });
        let (kind, group, version, plural) = named.or_else(|| parts(kind)).ok_or_else(error)?;
        let resource =
            ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(&group, &version, &kind), &plural);
        Ok(Self { resource, name: name.to_owned() })
    }
}

impl std::fmt::Display for ScaleTarget {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}/{}", self.resource.kind, self.name)
    }
}

/// A workload of one namespace.
pub struct Workload {
    target: ScaleTarget,
    api: Api<DynamicObject>,
    pods: Api<Pod>,
    counter: PodCounter,
    /// Label selector of the workload's pods, as last read.
    selector: String,
}

impl Workload {
    /// Creates the workload in this namespace; `None` is the client's own.
    #[must_use]
    pub fn new(client: &Client, namespace: Option<&str>, target: ScaleTarget) -> Self {
        let namespace = namespace.unwrap_or(client.default_namespace());
        let api = Api::namespaced_with(client.clone(), namespace, &target.resource);
        let pods = Api::namespaced(client.clone(), namespace);
        Self { target, api, pods, counter: PodCounter::default(), selector: String::new() }
    }

    /// Returns the workload's name, like `Deployment/decode`.
    #[must_use]
    pub fn name(&self) -> String {
        self.target.to_string()
    }

    /// Reads the replicas and counts the pods. The server omits zero replicas from its answer (`omitempty`).
    pub async fn read(&mut self) -> Result<WorkloadCounts, ScaleError> {
        let scale = self.asked(self.api.get_scale(&self.target.name)).await?;
        let replicas = scale.spec.as_ref().map(|spec| spec.replicas.unwrap_or(0));
        let selector = scale.status.as_ref().and_then(|status| status.selector.clone());
        let (Some(replicas), Some(selector)) = (replicas, selector.filter(|selector| !selector.is_empty()))
        else {
            return Err(ScaleError::Incomplete(self.name()));
        };
        let pods = self.asked(self.pods.list(&ListParams::default().labels(&selector))).await?;
        self.selector = selector;
        let replicas = u32::try_from(replicas).unwrap_or(0);
        let version = scale.metadata.resource_version.unwrap_or_default();
        Ok(WorkloadCounts { version, ..self.counter.count(replicas, &pods.items, Timestamp::now()) })
    }

    /// Sets the replicas, if the workload is unchanged since `counts` were read.
    pub async fn set(&self, replicas: u32, counts: &WorkloadCounts) -> Result<(), ScaleError> {
        let patch = json!({
            "apiVersion": "autoscaling/v1", "kind": "Scale",
            "metadata": {"name": self.target.name, "resourceVersion": counts.version},
            "spec": {"replicas": replicas},
        });
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(&patch));
        self.asked(self.api.patch_scale(&self.target.name, &parameters, &patch)).await.map(drop)
    }

    /// Sets the deletion costs of pods: `cost` maps a pod's address to its cost. Pods without a cost are not
    /// changed.
    pub async fn set_deletion_costs(&self, cost: impl Fn(&str) -> Option<i32>) -> Result<(), ScaleError> {
        let marked = async {
            let pods = self.asked(self.pods.list(&ListParams::default().labels(&self.selector))).await?;
            let changed: Vec<(&str, String)> = pods
                .items
                .iter()
                .filter_map(|pod| {
                    let ip = pod.status.as_ref().and_then(|status| status.pod_ip.as_deref());
                    let (cost, name) = (ip.and_then(&cost)?.to_string(), pod.metadata.name.as_deref()?);
                    let annotations = pod.metadata.annotations.as_ref();
                    let is_other = annotations.and_then(|all| all.get(DELETION_COST)) != Some(&cost);
                    is_other.then_some((name, cost))
                })
                .collect();
            let patched = changed.into_iter().map(async |(name, cost)| {
                let patch = json!({"metadata": {"annotations": {DELETION_COST: cost}}});
                let patch = Patch::Merge(&patch);
                match self.asked(self.pods.patch(name, &PatchParams::default(), &patch)).await {
                    // The pod was deleted since it was listed.
                    Err(ScaleError::Failed { source, .. }) if is_not_found(&source) => Ok(()),
                    patched => patched.map(drop),
                }
            });
            stream::iter(patched).buffer_unordered(PATCHES_MAX).try_collect::<()>().await
        };
        // Marking is bounded in time: a larger fleet is scaled down with some pods unmarked.
        let marked = tokio::time::timeout(ANSWER_WITHIN, marked).await;
        marked.unwrap_or_else(|_| Err(ScaleError::Timeout(self.name())))
    }

    async fn asked<T>(&self, request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, ScaleError> {
        match tokio::time::timeout(ANSWER_WITHIN, request).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => Err(ScaleError::Stale(self.name())),
            Ok(Err(source)) => Err(ScaleError::Failed { target: self.name(), source: Box::new(source) }),
            Err(_) => Err(ScaleError::Timeout(self.name())),
        }
    }
}

fn is_not_found(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_a_known_kind_or_says_where_its_kind_is() {
        let url = |text: &str| {
            let target = ScaleTarget::parse(text).expect(text);
            (target.resource.api_version.clone(), target.resource.plural.clone(), target.to_string())
        };
        let triple = |version: &str, plural: &str, name: &str| {
            (version.to_owned(), plural.to_owned(), name.to_owned())
        };
        assert_eq!(url("Deployment/decode"), triple("apps/v1", "deployments", "Deployment/decode"));
        assert_eq!(url("statefulset/d-1"), triple("apps/v1", "statefulsets", "StatefulSet/d-1"));
        assert_eq!(
            url("LeaderWorkerSet/prefill"),
            triple("leaderworkerset.x-k8s.io/v1", "leaderworkersets", "LeaderWorkerSet/prefill")
        );
        assert_eq!(url("things.v1beta1.example.org/x"), triple("example.org/v1beta1", "things", "things/x"));
        for bad in ["decode", "Deployment/", "Thing/x", "Deployment/Not_A_Name", "/x", "a.b/x"] {
            let error = ScaleTarget::parse(bad).expect_err(bad);
            assert!(error.contains(bad) && error.contains("LeaderWorkerSet"), "{error}");
        }
    }
}
