//! Endpoints of the worker in a pod. No I/O.
//!
//! | Pod | Endpoints |
//! | --- | --- |
//! | without an address, or at its end (`Succeeded`, `Failed`) | none |
//! | worker of a LeaderWorkerSet that is not the leader | none: only the leader serves HTTP |
//! | with a role that a gateway has no use for, or ports that cannot be read | none, with the reason in the log |
//! | with a `deletionTimestamp` | draining. It is set before the engine gets SIGTERM |
//! | whose `Ready` condition is not `True`, or that has the label `sleeping=true` | not ready |
//! | else | ready |
//!
//! There is one endpoint for each port (data-parallel ranks). The UID is the worker's identity, so that a pod of a
//! StatefulSet that comes back under the same name and address is a new worker.

use std::collections::BTreeMap;

use control_discovery::{Endpoint, EndpointState, Labels, Object, Role};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

/// Label with LeaderWorkerSet's index of a pod in its group (`leaderworkerset.sigs.k8s.io`, "Labels,
/// Annotations and Environment Variables").
const LWS_INDEX: &str = "leaderworkerset.sigs.k8s.io/worker-index";

/// Configuration of a source's pods in addition to their labels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodRules {
    /// Role of all pods; `None`: by their labels.
    pub role: Option<Role>,
    /// Ports of pods whose labels and annotations name none.
    pub ports: Vec<u16>,
}

/// Returns the key of a pod among the objects of its source.
pub(crate) fn key(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any())
}

/// Converts a pod to an object of discovery.
#[must_use]
pub fn object(pod: &Pod, rules: &PodRules) -> Object {
    let key = key(pod);
    let endpoints = endpoints(pod, rules).unwrap_or_else(|reason| {
        tracing::warn!(pod = key, "{reason}; it is not a worker");
        Vec::new()
    });
    Object { key, endpoints }
}

fn endpoints(pod: &Pod, rules: &PodRules) -> Result<Vec<Endpoint>, String> {
    let none = BTreeMap::new();
    let (own, annotations) = (pod.metadata.labels.as_ref(), pod.metadata.annotations.as_ref());
    let labels = Labels([own.unwrap_or(&none), annotations.unwrap_or(&none)]);
    let is_follower = own.and_then(|labels| labels.get(LWS_INDEX)).is_some_and(|index| index != "0");
    let status = pod.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref()).unwrap_or_default();
    let Some(ip) = status.and_then(|status| status.pod_ip.as_deref()).filter(|ip| !ip.is_empty()) else {
        return Ok(Vec::new());
    };
    if is_follower || phase == "Succeeded" || phase == "Failed" {
        return Ok(Vec::new());
    }
    let role = match rules.role {
        Some(role) => Some(role),
        None => labels.role().map_err(|name| format!("its role {name:?} is unknown to gateways"))?,
    };
    let mut ports = labels.ports().map_err(|ports| format!("its ports {ports:?} cannot be read"))?;
    if ports.is_empty() {
        ports.clone_from(&rules.ports);
    }
    let conditions = status.and_then(|status| status.conditions.as_ref());
    let is_ready = conditions.is_some_and(|conditions| {
        conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
    });
    let state = match () {
        () if pod.metadata.deletion_timestamp.is_some() => EndpointState::Draining,
        () if !is_ready || labels.is_sleeping() => EndpointState::NotReady,
        () => EndpointState::Ready,
    };
    let (uid, model, pool, generation) = (pod.uid(), labels.model(), labels.pool(), labels.generation());
    let endpoint = |port: u16| Endpoint {
        uid: uid.clone(),
        role,
        model: model.clone(),
        pool: pool.clone(),
        generation: generation.clone(),
        state,
        ..Endpoint::at(ip, port)
    };
    Ok(ports.into_iter().map(endpoint).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn rules() -> PodRules {
        PodRules { role: None, ports: vec![8000] }
    }

    fn read(pod: Value) -> Object {
        object(&serde_json::from_value(pod).expect("a pod"), &rules())
    }

    /// Returns a ready pod with `change` merged into it.
    fn pod(change: &Value) -> Value {
        let mut pod = json!({
            "metadata": {"name": "decode-0", "namespace": "llm", "uid": "u-1", "labels": {}, "annotations": {}},
            "status": {"phase": "Running", "podIP": "10.0.0.7", "conditions": [
                {"type": "ContainersReady", "status": "True"}, {"type": "Ready", "status": "True"}]},
        });
        merge(&mut pod, change);
        pod
    }

    fn merge(into: &mut Value, change: &Value) {
        match (into, change) {
            (Value::Object(into), Value::Object(change)) => {
                for (key, value) in change {
                    merge(into.entry(key.clone()).or_insert(Value::Null), value);
                }
            }
            (into, change) => *into = change.clone(),
        }
    }

    #[test]
    fn a_ready_pod_is_a_worker_with_its_uid() {
        let Object { key, endpoints } = read(pod(&json!({})));
        let expected = Endpoint { uid: Some("u-1".to_owned()), ..Endpoint::new("http://10.0.0.7:8000") };
        assert_eq!((key.as_str(), endpoints), ("llm/decode-0", vec![expected]));
        let ipv6 = read(pod(&json!({"status": {"podIP": "fd00::7"}})));
        assert_eq!(ipv6.endpoints[0].url, "http://[fd00::7]:8000");
    }

    #[test]
    fn states_come_from_deletion_readiness_and_sleep() {
        let not_ready = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
        let deleted = json!({"metadata": {"deletionTimestamp": "2026-11-24T10:00:00Z"}});
        for (change, state) in [
            (json!({}), EndpointState::Ready),
            (not_ready, EndpointState::NotReady),
            (json!({"status": {"conditions": null}}), EndpointState::NotReady),
            (json!({"metadata": {"labels": {"sleeping": "true"}}}), EndpointState::NotReady),
            (deleted, EndpointState::Draining),
        ] {
            assert_eq!(read(pod(&change)).endpoints[0].state, state, "{change}");
        }
    }

    #[test]
    fn pods_that_serve_nothing_have_no_endpoints() {
        for change in [
            json!({"status": {"podIP": null}}),
            json!({"status": null}),
            json!({"status": {"phase": "Failed"}}),
            json!({"status": {"phase": "Succeeded"}}),
            json!({"metadata": {"labels": {"leaderworkerset.sigs.k8s.io/worker-index": "1"}}}),
            json!({"metadata": {"labels": {"llm-d.ai/role": "encode"}}}),
            json!({"metadata": {"annotations": {"llm-d.ai/active-ports": "many"}}}),
        ] {
            assert_eq!(read(pod(&change)).endpoints, [], "{change}");
        }
    }

    /// Manifests in the format of other routers and operators.
    #[test]
    fn pods_of_peers_are_understood_without_configuration() {
        let urls = |object: &Object| -> Vec<String> {
            object.endpoints.iter().map(|endpoint| endpoint.url.clone()).collect()
        };
        // llm-d: role by label, data-parallel ranks by annotation.
        let llm_d = read(pod(&json!({"metadata": {
            "labels": {"llm-d.ai/inferenceServing": "true", "llm-d.ai/role": "prefill"},
            "annotations": {"llm-d.ai/active-ports": "8000,8001"}}})));
        assert_eq!(urls(&llm_d), ["http://10.0.0.7:8000", "http://10.0.0.7:8001"]);
        assert!(llm_d.endpoints.iter().all(|endpoint| endpoint.role == Some(Role::Prefill)));
        // LeaderWorkerSet: only the leader is a worker.
        let leader = read(pod(&json!({"metadata": {"labels": {LWS_INDEX: "0", "llm-d.ai/role": "both"}}})));
        assert_eq!((urls(&leader).len(), leader.endpoints[0].role), (1, Some(Role::Both)));
        // AIBrix: model, port and role.
        let aibrix = read(pod(&json!({"metadata": {"labels": {
            "model.aibrix.ai/name": "llama-70b", "model.aibrix.ai/port": "8080", "role-name": "decode"}}})));
        assert_eq!(urls(&aibrix), ["http://10.0.0.7:8080"]);
        let endpoint = &aibrix.endpoints[0];
        assert_eq!((endpoint.role, endpoint.model.as_deref()), (Some(Role::Decode), Some("llama-70b")));
        // production-stack: model by label, asleep by label.
        let stack = read(pod(&json!({"metadata": {"labels": {"model": "opt", "sleeping": "true"}}})));
        assert_eq!(stack.endpoints[0].model.as_deref(), Some("opt"));
        assert_eq!(stack.endpoints[0].state, EndpointState::NotReady);
        // vllm-router and SGLang's router: only a selector and a port; SGLang's gateway may name ports.
        let sglang = read(pod(&json!({"metadata": {"annotations": {
            "sglang.ai/bootstrap-port": "8998", "smg.ai/worker-ports": "30000"}}})));
        assert_eq!(urls(&sglang), ["http://10.0.0.7:30000"]);
        // Kvasir's own annotations.
        let own = read(pod(&json!({"metadata": {"annotations": {
            "kvasir/role": "decode", "kvasir/port": "9000", "kvasir/pool": "large", "kvasir/model": "m"}}})));
        let endpoint = &own.endpoints[0];
        assert_eq!((endpoint.pool.as_deref(), endpoint.role), (Some("large"), Some(Role::Decode)));
        assert_eq!(urls(&own), ["http://10.0.0.7:9000"]);
    }

    #[test]
    fn a_sources_role_counts_before_labels() {
        let pod = pod(&json!({"metadata": {"labels": {"llm-d.ai/role": "decode"}}}));
        let pod: Pod = serde_json::from_value(pod).expect("a pod");
        let rules = PodRules { role: Some(Role::Prefill), ports: vec![1, 2] };
        let object = object(&pod, &rules);
        assert_eq!(object.endpoints.len(), 2);
        assert!(object.endpoints.iter().all(|endpoint| endpoint.role == Some(Role::Prefill)));
    }
}
