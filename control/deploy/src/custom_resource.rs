//! The description as a custom resource of Kubernetes: `KvasirGraph`, and the operator that reconciles it.
//!
//! A graph's `spec` has the fields of the description, without `name`, which is the object's own, and with
//! `workload`. Its schema names the fields and leaves their values to [`Graph::check`], whose messages go to
//! the object's status: a stricter schema would duplicate these checks.

use serde_json::{Map, Value, json};

use crate::graph::Graph;
use crate::kubernetes::{Workload, objects, own_container, settings_volume};
use crate::yaml;

/// Group of the resource.
pub const GROUP: &str = "kvasir.dev";
/// Version of the resource.
pub const VERSION: &str = "v1alpha1";
/// Kind of the resource.
pub const KIND: &str = "KvasirGraph";
/// Plural name, in paths of the API.
pub const PLURAL: &str = "kvasirgraphs";

/// Kinds of the objects that a graph is rendered to: API version, kind and plural.
pub const KINDS: [(&str, &str, &str); 12] = [
    ("v1", "ConfigMap", "configmaps"),
    ("v1", "ServiceAccount", "serviceaccounts"),
    ("v1", "Service", "services"),
    ("rbac.authorization.k8s.io/v1", "Role", "roles"),
    ("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
    ("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    ("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    ("apps/v1", "StatefulSet", "statefulsets"),
    ("apps/v1", "Deployment", "deployments"),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets"),
    ("grove.io/v1alpha1", "PodCliqueSet", "podcliquesets"),
    ("kvasir.dev/v1alpha1", "KvasirGraph", "kvasirgraphs"),
];

/// Parses the graph of an object of this kind; an error describes the fault in its `spec`. `image` is for
/// gateways without an image.
pub fn from_object(object: &Value, image: &str) -> Result<(Graph, Workload), String> {
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let mut spec = object["spec"].as_object().cloned().unwrap_or_default();
    let workload = match spec.remove("workload") {
        None => Workload::Auto,
        Some(value) => match value.as_str() {
            Some("auto") => Workload::Auto,
            Some("stateful-set") => Workload::StatefulSet,
            Some("leader-worker-set") => Workload::LeaderWorkerSet,
            Some("pod-clique-set") => Workload::PodCliqueSet,
            _ => {
                return Err(format!(
                    "workload: {value} is none of auto, stateful-set, leader-worker-set, pod-clique-set"
                ));
            }
        },
    };
    spec.insert("name".to_owned(), name.into());
    let mut graph: Graph = serde_json::from_value(Value::Object(spec)).map_err(|error| error.to_string())?;
    if object["spec"]["gateway"]["image"].is_null() && !image.is_empty() {
        image.clone_into(&mut graph.gateway.image);
    }
    graph.check()?;
    if graph.storage.iter().any(|storage| !storage.folder.is_empty()) {
        // The right to create graphs must not include the right to mount a machine's folders.
        return Err(
            "storage: a folder of the machine is not for a graph of the cluster; name a claim".to_owned()
        );
    }
    Ok((graph, workload))
}

/// Returns the manifests of an object's graph.
pub fn manifests_of(object: &Value, image: &str) -> Result<Vec<Value>, String> {
    let (graph, workload) = from_object(object, image)?;
    objects(&graph, workload)
}

/// Returns the definition of the resource, and the control service that reconciles it in one namespace, as
/// manifests.
pub fn operator(image: &str) -> Result<String, String> {
    let name = "kvasir-operator";
    let labels = json!({"app.kubernetes.io/name": "kvasir", "app.kubernetes.io/component": "operator"});
    let object = |version: &str, kind: &str, rest: Value| {
        let mut object =
            json!({"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": labels}});
        if let (Some(object), Value::Object(rest)) = (object.as_object_mut(), rest) {
            object.extend(rest);
        }
        object
    };
    let settings = toml::to_string(&json!({
        "planner": {"mode": "off"},
        "control": {"graphs": true, "graph_image": image, "listen": "0.0.0.0:8090"},
    }));
    let settings = settings.map_err(|error| error.to_string())?;
    control_config::parse(&settings).map_err(|_| format!("the image {image:?} cannot be written down"))?;
    let container =
        own_container(image, &["control", "--config", "/etc/kvasir/control.toml", "--log", "info"], 8090);
    let spec = json!({
        // Two versions at the same time would undo each other's work.
        "replicas": 1, "strategy": {"type": "Recreate"}, "selector": {"matchLabels": labels},
        "template": {
            "metadata": {"labels": labels},
            "spec": {"serviceAccountName": name, "containers": [container], "volumes": settings_volume(name)},
        },
    });
    let objects = [
        definition(),
        object("v1", "ServiceAccount", json!({})),
        object("rbac.authorization.k8s.io/v1", "Role", json!({"rules": rules()})),
        object(
            "rbac.authorization.k8s.io/v1",
            "RoleBinding",
            json!({
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
                "subjects": [{"kind": "ServiceAccount", "name": name}],
            }),
        ),
        object("v1", "ConfigMap", json!({"data": {"control.toml": settings}})),
        object("apps/v1", "Deployment", json!({"spec": spec})),
    ];
    yaml::documents(&objects)
}

/// Returns the operator's rights in its namespace. It can grant rights to gateways and control services only
/// if it has them itself.
fn rules() -> Value {
    let mut rules: Vec<Value> = KINDS
        .iter()
        .filter(|(_, kind, _)| *kind != KIND)
        .map(|(version, _, plural)| {
            let group = version.split_once('/').map_or("", |(group, _)| group);
            json!({"apiGroups": [group], "resources": [plural], "verbs": ["create", "delete", "get", "list", "patch"]})
        })
        .collect();
    rules.push(json!({"apiGroups": [GROUP], "resources": [PLURAL], "verbs": ["get", "list", "watch"]}));
    rules.push(json!({"apiGroups": [GROUP], "resources": [format!("{PLURAL}/status")], "verbs": ["patch"]}));
    rules.push(json!({"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}));
    let scales = ["deployments/scale", "statefulsets/scale"];
    rules.push(json!({"apiGroups": ["apps"], "resources": scales, "verbs": ["get", "patch"]}));
    let scales = ["leaderworkersets/scale"];
    rules.push(
        json!({"apiGroups": ["leaderworkerset.x-k8s.io"], "resources": scales, "verbs": ["get", "patch"]}),
    );
    let verbs = ["create", "get", "update"];
    rules.push(json!({"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": verbs}));
    rules.into()
}

/// Returns the CustomResourceDefinition.
#[must_use]
pub fn definition() -> Value {
    let text = || json!({"type": "string"});
    let number = || json!({"type": "integer", "minimum": 0});
    let list = |of: Value| json!({"type": "array", "items": of});
    let texts = || json!({"type": "object", "additionalProperties": {"type": "string"}});
    let fields = |fields: &[(&str, Value)]| -> Value {
        let fields: Map<String, Value> =
            fields.iter().map(|(name, schema)| ((*name).to_owned(), schema.clone())).collect();
        json!({"type": "object", "properties": fields})
    };
    let role = fields(&[
        ("role", json!({"type": "string", "enum": ["prefill", "decode", "both"]})),
        ("workers", number()),
        ("min", number()),
        ("max", number()),
        ("gpus", number()),
        ("nodes", number()),
        ("cpu", text()),
        ("memory", text()),
        ("resources", texts()),
        ("placement", texts()),
        ("arguments", list(text())),
        ("environment", texts()),
    ]);
    let settings = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let mut spec = fields(&[
        ("model", text()),
        ("alias", text()),
        ("engine", json!({"type": "string", "enum": ["vllm", "sglang", "tensorrt-llm", "kvasir", "mock"]})),
        ("image", text()),
        ("arguments", list(text())),
        ("environment", texts()),
        ("secrets", list(text())),
        ("storage", list(fields(&[("path", text()), ("claim", text()), ("folder", text())]))),
        ("level", fields(&[("ttft", text()), ("itl", text()), ("attainment", json!({"type": "number"}))])),
        (
            "gateway",
            fields(&[
                ("replicas", number()),
                ("image", text()),
                ("port", number()),
                ("secrets", list(text())),
                ("settings", settings),
            ]),
        ),
        ("role", list(role)),
        (
            "workload",
            json!({"type": "string", "enum": ["auto", "stateful-set", "leader-worker-set", "pod-clique-set"]}),
        ),
    ]);
    spec["required"] = json!(["engine", "role"]);
    let condition = fields(&[
        ("type", text()),
        ("status", text()),
        ("reason", text()),
        ("message", text()),
        ("lastTransitionTime", json!({"type": "string", "format": "date-time"})),
    ]);
    let state = fields(&[("role", text()), ("workers", number()), ("ready", number())]);
    let status =
        fields(&[("observedGeneration", number()), ("conditions", list(condition)), ("roles", list(state))]);
    let column = |name: &str, kind: &str, path: &str| json!({"name": name, "type": kind, "jsonPath": path});
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{PLURAL}.{GROUP}")},
        "spec": {
            "group": GROUP, "scope": "Namespaced",
            "names": {"kind": KIND, "plural": PLURAL, "singular": "kvasirgraph", "shortNames": ["kvg"]},
            "versions": [{
                "name": VERSION, "served": true, "storage": true, "subresources": {"status": {}},
                "additionalPrinterColumns": [
                    column("Model", "string", ".spec.model"),
                    column("Ready", "string", ".status.conditions[?(@.type==\"Ready\")].status"),
                    column("Reason", "string", ".status.conditions[?(@.type==\"Ready\")].message"),
                    column("Age", "date", ".metadata.creationTimestamp"),
                ],
                "schema": {"openAPIV3Schema": {
                    "type": "object", "required": ["spec"], "properties": {"spec": spec, "status": status},
                }},
            }],
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_small_and_names_every_field() {
        let definition = definition();
        let bytes = definition.to_string().len();
        println!("the definition has {bytes} bytes");
        assert!(bytes < 30_000, "{bytes}");
        let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"];
        let graph = crate::from_toml(crate::graph::tests::DISAGGREGATED).expect("a description");
        let check = |value: &Value, schema: &Value, but: &str| {
            for name in value.as_object().expect("an object").keys().filter(|name| *name != but) {
                assert!(schema[name].is_object(), "{name} is in no schema");
            }
        };
        let value = serde_json::to_value(&graph).expect("JSON");
        check(&value, schema, "name");
        check(&value["role"][0], &schema["role"]["items"]["properties"], "");
        check(&value["gateway"], &schema["gateway"]["properties"], "");
        check(&value["storage"][0], &schema["storage"]["items"]["properties"], "");
    }

    #[test]
    fn an_object_is_a_description_and_its_mistakes_are_named() {
        let graph = crate::from_toml(crate::graph::tests::DISAGGREGATED).expect("a description");
        let mut spec = serde_json::to_value(&graph).expect("JSON");
        spec.as_object_mut().expect("an object").shift_remove("name");
        let mut object = json!({"metadata": {"name": "qwen"}, "spec": spec});
        assert_eq!(from_object(&object, ""), Ok((graph, Workload::Auto)));
        object["spec"]["workload"] = "pod-clique-set".into();
        assert_eq!(from_object(&object, "").map(|read| read.1), Ok(Workload::PodCliqueSet));
        object["spec"]["workload"] = "job".into();
        assert!(from_object(&object, "").expect_err("no workload").contains("workload: "));
        object["spec"] =
            json!({"engine": "mock", "role": [{"role": "both"}], "storage": [{"path": "/a", "folder": "/"}]});
        assert!(from_object(&object, "").expect_err("a folder").contains("storage: "));
        object["spec"] = json!({"engine": "vllm", "role": [{"role": "both"}]});
        assert!(from_object(&object, "").expect_err("no model").contains("model: "));
        assert!(operator("kvasir:1").expect("manifests").contains("kind: CustomResourceDefinition"));
    }
}
