//! InferencePool: selector and ports of the pods behind a gateway of the Gateway API.
//!
//! Source: `kubernetes-sigs/gateway-api-inference-extension`, `api/v1/inferencepool_types.go` (v1.6.0): `spec.selector.matchLabels`,
//! `spec.targetPorts[].number`.

use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use serde::Deserialize;
use std::collections::BTreeMap;

/// Returns the API resource of InferencePools.
pub(crate) fn resource() -> ApiResource {
    let kind = GroupVersionKind::gvk("inference.networking.k8s.io", "v1", "InferencePool");
    ApiResource::from_gvk_with_plural(&kind, "inferencepools")
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    selector: Selector,
    target_ports: Vec<Port>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Selector {
    match_labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Port {
    number: u16,
}

/// Returns the selector and the ports of a pool; an error names the unreadable field.
pub(crate) fn selector_and_ports(pool: &DynamicObject) -> Result<(String, Vec<u16>), String> {
    let name = pool.metadata.name.as_deref().unwrap_or_default();
    let spec = Spec::deserialize(&pool.data["spec"]);
    let spec = spec.map_err(|error| format!("InferencePool {name}: spec: {error}"))?;
    if spec.selector.match_labels.is_empty() || spec.target_ports.is_empty() {
        return Err(format!("InferencePool {name}: its selector or its ports are empty"));
    }
    let labels = spec.selector.match_labels.iter().map(|(name, value)| format!("{name}={value}"));
    let ports = spec.target_ports.iter().map(|port| port.number).collect();
    Ok((labels.collect::<Vec<_>>().join(","), ports))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(spec: Value) -> Result<(String, Vec<u16>), String> {
        let pool = json!({"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
            "metadata": {"name": "pool"}, "spec": spec});
        selector_and_ports(&serde_json::from_value(pool).expect("an object"))
    }

    #[test]
    fn a_pool_is_a_selector_and_ports() {
        let spec = json!({"selector": {"matchLabels": {"app": "vllm", "tier": "a"}},
            "targetPorts": [{"number": 8000}, {"number": 8001}], "endpointPickerRef": {"name": "epp"}});
        assert_eq!(read(spec), Ok(("app=vllm,tier=a".to_owned(), vec![8000, 8001])));
        for spec in [
            json!(null),
            json!({"selector": {"matchLabels": {}}, "targetPorts": [{"number": 1}]}),
            json!({"selector": {"matchLabels": {"a": "b"}}, "targetPorts": []}),
            json!({"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": 70000}]}),
        ] {
            let error = read(spec.clone()).expect_err("no pool");
            assert!(error.starts_with("InferencePool pool: "), "{spec}: {error}");
        }
    }
}
