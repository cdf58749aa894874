//! Discovery of the API server's versions, groups and resources ("Kubernetes API Concepts", "API Discovery";
//! here the older, unaggregated form, which clients accept as well).

use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use serde_json::{Value, json};

/// Group (empty: the core group), version, plural and kind of each resource.
const RESOURCES: [(&str, &str, &str, &str); 15] = [
    ("", "v1", "pods", "Pod"),
    ("", "v1", "services", "Service"),
    ("", "v1", "configmaps", "ConfigMap"),
    ("", "v1", "serviceaccounts", "ServiceAccount"),
    ("apps", "v1", "deployments", "Deployment"),
    ("apps", "v1", "statefulsets", "StatefulSet"),
    ("coordination.k8s.io", "v1", "leases", "Lease"),
    ("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    ("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    ("rbac.authorization.k8s.io", "v1", "roles", "Role"),
    ("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding"),
    ("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", "LeaderWorkerSet"),
    ("grove.io", "v1alpha1", "podcliquesets", "PodCliqueSet"),
    ("kvasir.dev", "v1alpha1", "kvasirgraphs", "KvasirGraph"),
    ("inference.networking.k8s.io", "v1", "inferencepools", "InferencePool"),
];

const VERBS: [&str; 7] = ["create", "delete", "get", "list", "patch", "update", "watch"];

/// Returns group, version and plural of a kind, as the API's paths name them.
#[must_use]
pub fn resource_of(version: &str, kind: &str) -> Option<(&'static str, &'static str)> {
    let (group, version) = version.split_once('/').unwrap_or(("", version));
    let found = RESOURCES.iter().find(|known| (known.0, known.1, known.3) == (group, version, kind));
    found.map(|known| (known.0, known.2))
}

fn versions() -> Value {
    json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})
}

fn groups() -> Value {
    let mut groups: Vec<Value> = Vec::new();
    for (group, version, ..) in RESOURCES.iter().filter(|known| !known.0.is_empty()) {
        if groups.iter().any(|known| known["name"] == *group) {
            continue;
        }
        let version = json!({"groupVersion": format!("{group}/{version}"), "version": version});
        groups.push(json!({"name": group, "versions": [version], "preferredVersion": version}));
    }
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
}

fn resources(group: &str, version: &str) -> Response {
    let of = |known: &&(&str, &str, &str, &str)| (known.0, known.1) == (group, version);
    let all: Vec<Value> = RESOURCES
        .iter()
        .filter(of)
        .map(|(_, _, plural, kind)| {
            json!({
                "name": plural, "singularName": kind.to_lowercase(), "namespaced": true, "kind": kind, "verbs": VERBS,
            })
        })
        .collect();
    if all.is_empty() {
        return StatusCode::NOT_FOUND.into_response();
    }
    let version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    answer(&json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": all}))
}

fn answer(value: &Value) -> Response {
    ([(axum::http::header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

/// Returns the routes that need no right.
pub(crate) fn routes<S: Clone + Send + Sync + 'static>() -> [(&'static str, MethodRouter<S>); 5] {
    let version = json!({"major": "1", "minor": "34", "gitVersion": "v1.34.0", "platform": "linux/amd64"});
    [
        ("/version", get(async move || answer(&version))),
        ("/api", get(async || answer(&versions()))),
        ("/apis", get(async || answer(&groups()))),
        ("/api/{version}", get(async |Path(version): Path<String>| resources("", &version))),
        (
            "/apis/{group}/{version}",
            get(async |Path((group, version)): Path<(String, String)>| resources(&group, &version)),
        ),
    ]
}
